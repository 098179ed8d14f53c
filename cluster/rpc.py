"""What every RPC handler shares: errors become statuses, waits have an end."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc

from cluster import status
from timer.errors import CommitTimeout, TimerError

COMMIT_TIMEOUT_S: Final = 10.0
"""What a request without a deadline of its own gets."""

PINGS: Final = (
    # Who is at the other end may be gone without a word, with its machine. A client then holds
    # leases, and exclusive groups, until it is missed; a node may come back at another address.
    # (Not grpc.keepalive_timeout_ms: of gRPC 1.85 a ping has the larger of that and a minute.)
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""Options of channels and servers: both ends ping."""
PINGED: Final = (*PINGS, ("grpc.http2.min_ping_interval_without_data_ms", 5_000))
"""Of servers: they don't send clients away for their pings."""

Context = grpc.aio.ServicerContext[Any, Any]


class Service:
    """What our servicers have in common."""

    on_error: Callable[[str, TimerError], None] = staticmethod(lambda method, error: None)
    """Hears of each RPC that fails: its method, and why."""


_Service = TypeVar("_Service", bound=Service)
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


def answered(
    handler: Callable[[_Service, _Request, Context], Awaitable[_Response]],
) -> Callable[[_Service, _Request, Context], Awaitable[_Response]]:
    """Make a unary handler whose TimerErrors end the RPC with their status."""

    @functools.wraps(handler)
    async def answer(service: _Service, request: _Request, context: Context) -> _Response:
        try:
            return await handler(service, request, context)
        except TimerError as error:
            service.on_error(handler.__name__, error)
            await status.abort(context, error)

    return answer


async def within(work: Awaitable[Any], context: Context) -> Any:
    """Return what `work` gives before the caller's deadline.

    Raises:
        CommitTimeout: it took longer; the outcome is unknown.
    """
    left_s: float | None = context.time_remaining()  # the stubs know of no caller without one
    timeout_s = COMMIT_TIMEOUT_S if left_s is None else left_s
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise CommitTimeout("no majority answered in time; the request may still commit") from None
