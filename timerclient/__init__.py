"""Client of the timer cluster: schedule messages for later, cancel them, consume them once due.

    from datetime import timedelta
    from timerclient import TimerClient

    with TimerClient("127.0.0.1:7401,127.0.0.1:7402,127.0.0.1:7403") as client:
        timer = client.schedule("orders", b"cancel 4711", delay=timedelta(minutes=30))
        client.cancel(timer)
        with client.consumer("orders", group="billing") as consumer:
            for message in consumer:
                message.ack()

`TimerClient` is for threads, `AsyncTimerClient` for asyncio; their methods are the same. All
errors are in `timerclient.errors`, as one tree.
"""

import timerclient.values.quiet  # noqa: F401 -- before grpc
from timerclient.client.aio import AsyncTimerClient
from timerclient.client.consumers import AsyncConsumer
from timerclient.client.group_calls import GroupType, Start
from timerclient.client.story_calls import TimerStory
from timerclient.client.sync import Consumer
from timerclient.client.timer_client import TimerClient
from timerclient.client.tracing import Tracing
from timerclient.rows.messages import Acking, Batch, Message
from timerclient.rows.peeked_messages import Peeked, PeekedMessage, PeekState
from timerclient.rows.pending_timers import (
    Changed,
    Redriven,
    Rescheduled,
    TimerCounts,
    TimerInfo,
    Where,
)
from timerclient.rows.policy_fields import PolicyFields
from timerclient.rows.rows import NewTimer, OnConflict
from timerclient.rows.scheduled_timers import Timer, Timers
from timerclient.values import errors
from timerclient.values.client_events import (
    Connected,
    Event,
    LeaderChanged,
    LeaderMissing,
    LeasesLost,
    SubmitBlocked,
)
from timerclient.values.client_settings import ClientSettings
from timerclient.values.client_tls import ClientTls
from timerclient.values.errors import (
    AlreadyExists,
    DiskFull,
    GroupHeld,
    InvalidRequest,
    LeaseLost,
    NotFound,
    NotPending,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    QuotaReached,
    TimerError,
    Unavailable,
    Unreachable,
)
from timerclient.values.reasons import Reason
from timerclient.values.results import (
    AckResult,
    CancelResult,
    ExtendResult,
    NackResult,
    RescheduleResult,
    ScheduleResult,
    TimerState,
)

__version__ = "0.2.0"
"""Version of timer-client, and of timer-cluster; pyproject.toml reads it here."""

__all__ = [
    "AckResult",
    "Acking",
    "AlreadyExists",
    "AsyncConsumer",
    "AsyncTimerClient",
    "Batch",
    "CancelResult",
    "Changed",
    "ClientSettings",
    "ClientTls",
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
    "PeekState",
    "Peeked",
    "PeekedMessage",
    "PermissionDenied",
    "PolicyFields",
    "QuotaReached",
    "Reason",
    "Redriven",
    "RescheduleResult",
    "Rescheduled",
    "ScheduleResult",
    "Start",
    "SubmitBlocked",
    "Timer",
    "TimerClient",
    "TimerCounts",
    "TimerError",
    "TimerInfo",
    "TimerState",
    "TimerStory",
    "Timers",
    "Tracing",
    "Unavailable",
    "Unreachable",
    "Where",
    "errors",
]
