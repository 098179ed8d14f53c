"""Client of the timer cluster: schedule messages for later, cancel them, consume them when due.

    from datetime import timedelta
    from timerclient import TimerClient

    with TimerClient("127.0.0.1:7401,127.0.0.1:7402,127.0.0.1:7403") as client:
        timer = client.schedule("orders", b"cancel 4711", delay=timedelta(minutes=30))
        client.cancel(timer)
        with client.consumer("orders", group="billing") as consumer:
            for message in consumer:
                message.ack()

`TimerClient` is for threads, `AsyncTimerClient` for asyncio; their methods are the same. Errors
are in `timerclient.errors`, as one tree.
"""

import timerclient._quiet  # noqa: F401 -- before grpc
from timerclient.aio import AsyncConsumer, AsyncTimerClient
from timerclient.errors import (
    AlreadyExists,
    DiskFull,
    GroupHeld,
    InvalidRequest,
    LeaseLost,
    NotFound,
    NotPending,
    OutcomeUnknown,
    Overloaded,
    QuotaReached,
    TimerError,
    Unavailable,
    Unreachable,
)
from timerclient.events import (
    Connected,
    Event,
    LeaderChanged,
    LeaderMissing,
    LeasesLost,
    SubmitBlocked,
)
from timerclient.groups import GroupType, Start
from timerclient.messages import Acking, Batch, Message
from timerclient.pending import Changed, Redriven, Rescheduled, TimerCounts, TimerInfo, Where
from timerclient.policies import Policy
from timerclient.reasons import Reason
from timerclient.results import (
    AckResult,
    CancelResult,
    ExtendResult,
    NackResult,
    RescheduleResult,
    ScheduleResult,
    TimerState,
)
from timerclient.rows import NewTimer, OnConflict
from timerclient.seen import Story
from timerclient.settings import Settings
from timerclient.sync import Consumer, TimerClient
from timerclient.timers import Timer, Timers

__all__ = [
    "AckResult",
    "Acking",
    "AlreadyExists",
    "AsyncConsumer",
    "AsyncTimerClient",
    "Batch",
    "CancelResult",
    "Changed",
    "Connected",
    "Consumer",
    "DiskFull",
    "Event",
    "ExtendResult",
    "GroupHeld",
    "GroupType",
    "InvalidRequest",
    "LeaderChanged",
    "LeaderMissing",
    "LeaseLost",
    "LeasesLost",
    "Message",
    "NackResult",
    "NewTimer",
    "NotFound",
    "NotPending",
    "OnConflict",
    "OutcomeUnknown",
    "Overloaded",
    "Policy",
    "QuotaReached",
    "Reason",
    "Redriven",
    "RescheduleResult",
    "Rescheduled",
    "ScheduleResult",
    "Settings",
    "Start",
    "Story",
    "SubmitBlocked",
    "Timer",
    "TimerClient",
    "TimerCounts",
    "TimerError",
    "TimerInfo",
    "TimerState",
    "Timers",
    "Unavailable",
    "Unreachable",
    "Where",
]
