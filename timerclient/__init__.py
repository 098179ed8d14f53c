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

A name of this package is loaded with its module when it is first used. So `import timerclient` is
cheap, and `from timerclient import TimerClient` loads gRPC.
"""

import importlib
from typing import TYPE_CHECKING, Final

import timerclient.values.quiet  # noqa: F401 -- before grpc
from timerclient.values import errors

if TYPE_CHECKING:
    from timerclient.client.aio import AsyncTimerClient
    from timerclient.client.consumers import AsyncConsumer
    from timerclient.client.group_calls import GroupOptions, GroupType, Start
    from timerclient.client.story_calls import TimerStory
    from timerclient.client.sync import Consumer
    from timerclient.client.timer_client import TimerClient
    from timerclient.client.tracing import Tracing
    from timerclient.rows.messages import Acking, Batch, Message
    from timerclient.rows.peeked_messages import MessagePage, Peeked, PeekedMessage, PeekState
    from timerclient.rows.pending_timers import (
        Changed,
        Redriven,
        Rescheduled,
        TimerCounts,
        TimerInfo,
        Where,
    )
    from timerclient.rows.rows import DueTime, NewTimer, OnConflict, WhenMany
    from timerclient.rows.scheduled_timers import Timer, Timers
    from timerclient.rows.series_fields import Occurrence, Series, SeriesOptions
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
    from timerclient.values.codecs import JSON, Codec, EncodedValue
    from timerclient.values.errors import (
        AlreadyExists,
        Closed,
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
        TokenRejected,
        Unavailable,
        UndecodablePayload,
        Unreachable,
    )
    from timerclient.values.policy_names import PolicyFields
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
    from timerclient.worker.http_target import HttpTarget
    from timerclient.worker.retry_policy import Backoff, Reject, Retry
    from timerclient.worker.timer_app import BoundHandler, TimerApp, TimerContext, TimerHandler
    from timerclient.worker.worker import Worker

__version__ = "0.2.0"
"""Version of timer-client, and of timer-cluster; pyproject.toml reads it here."""

__all__ = [
    "JSON",
    "AckResult",
    "Acking",
    "AlreadyExists",
    "AsyncConsumer",
    "AsyncTimerClient",
    "Backoff",
    "Batch",
    "BoundHandler",
    "CancelResult",
    "Changed",
    "ClientSettings",
    "ClientTls",
    "Closed",
    "Codec",
    "Connected",
    "Consumer",
    "DiskFull",
    "DueTime",
    "EncodedValue",
    "Event",
    "ExtendResult",
    "GroupHeld",
    "GroupOptions",
    "GroupType",
    "HttpTarget",
    "InvalidRequest",
    "LeaderChanged",
    "LeaderMissing",
    "LeaseLost",
    "LeasesLost",
    "Message",
    "MessagePage",
    "NackResult",
    "NewTimer",
    "NotFound",
    "NotPending",
    "Occurrence",
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
    "Reject",
    "RescheduleResult",
    "Rescheduled",
    "Retry",
    "ScheduleResult",
    "Series",
    "SeriesOptions",
    "Start",
    "SubmitBlocked",
    "Timer",
    "TimerApp",
    "TimerClient",
    "TimerContext",
    "TimerCounts",
    "TimerError",
    "TimerHandler",
    "TimerInfo",
    "TimerState",
    "TimerStory",
    "Timers",
    "TokenRejected",
    "Tracing",
    "Unavailable",
    "UndecodablePayload",
    "Unreachable",
    "WhenMany",
    "Where",
    "Worker",
    "errors",
]

_NAMES_OF: Final = {
    "client.aio": "AsyncTimerClient",
    "client.consumers": "AsyncConsumer",
    "client.group_calls": "GroupOptions GroupType Start",
    "client.story_calls": "TimerStory",
    "client.sync": "Consumer",
    "client.timer_client": "TimerClient",
    "client.tracing": "Tracing",
    "rows.messages": "Acking Batch Message",
    "rows.peeked_messages": "MessagePage Peeked PeekedMessage PeekState",
    "rows.pending_timers": "Changed Redriven Rescheduled TimerCounts TimerInfo Where",
    "rows.rows": "DueTime NewTimer OnConflict WhenMany",
    "rows.scheduled_timers": "Timer Timers",
    "rows.series_fields": "Occurrence Series SeriesOptions",
    "values.client_events": "Connected Event LeaderChanged LeaderMissing LeasesLost SubmitBlocked",
    "values.client_settings": "ClientSettings",
    "values.client_tls": "ClientTls",
    "values.codecs": "Codec EncodedValue JSON",
    "values.errors": (
        "AlreadyExists Closed DiskFull GroupHeld InvalidRequest LeaseLost NotFound NotPending "
        "OutcomeUnknown Overloaded PermissionDenied QuotaReached TimerError TokenRejected "
        "Unavailable UndecodablePayload Unreachable"
    ),
    "values.policy_names": "PolicyFields",
    "values.reasons": "Reason",
    "values.results": (
        "AckResult CancelResult ExtendResult NackResult RescheduleResult ScheduleResult TimerState"
    ),
    "worker.http_target": "HttpTarget",
    "worker.retry_policy": "Backoff Reject Retry",
    "worker.timer_app": "BoundHandler TimerApp TimerContext TimerHandler",
    "worker.worker": "Worker",
}
"""Module in this package -> its public names. The imports above say the same to type checkers."""
_MODULE_OF: Final = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        globals()[name] = found = getattr(module, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
