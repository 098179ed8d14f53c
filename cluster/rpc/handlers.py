"""What every RPC handler shares: errors become statuses, waits have an end.

    bytes --reader_of--> request, or Refused --handler--> answer, or EngineError --refuse--> status
          (cluster/rpc/request_bounds.py)

A refused request leaves memory at once. An error holds the frames that it passed, and these the
request; gRPC's abort error holds the frame that raised it, and the RPC that error: a cycle, which
only a collection ends. So `refuse` drops an error's frames, and its own keeps nothing.
"""

import asyncio
import functools
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, Generic, NoReturn, TypeVar

import grpc

from cluster.rpc import grpc_errors
from cluster.rpc.request_bounds import UnreadableRequest, reader_of
from timer.model.timer_errors import CommitTimeoutError, EngineError

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

    on_error: Callable[[str, EngineError], None] = staticmethod(lambda method, error: None)
    """Called with each RPC that fails: its method, and the error."""
    admit: Callable[[str], None] = staticmethod(lambda method: None)
    """Called with the method of each RPC; raises a EngineError if it is not to be served now."""
    taken: Callable[[Any, Context], None] = staticmethod(lambda request, context: None)
    """Called with each request."""

    async def refuse(self, method: str, error: EngineError, context: Context) -> NoReturn:
        """End an RPC with an error; what the error has passed is dropped.

        Raises:
            grpc.aio.AbortError: always.
        """
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.on_error(method, error)
        try:
            await grpc_errors.abort(context, error)
        except grpc.aio.AbortError as aborted:
            aborted.__traceback__ = aborted.__context__ = None
            raise
        finally:
            del context  # the abort's traceback has this frame, and the context has the abort


_Service = TypeVar("_Service", bound=Service)
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


def answered(
    handler: Callable[[_Service, _Request, Context], Awaitable[_Response]],
) -> Callable[[_Service, _Request, Context], Awaitable[_Response]]:
    """Make a unary handler whose TimerErrors end the RPC with their status."""
    name = handler.__name__

    @functools.wraps(handler)
    async def answer(service: _Service, request: _Request, context: Context) -> _Response:
        try:
            service.taken(request, context)
            service.admit(name)
            return await handler(service, read(request), context)
        except EngineError as error:
            why = error
        del request
        refusing = service.refuse(name, why, context)
        del context, why
        return await refusing

    return answer


def streamed(
    handler: Callable[[_Service, _Request, Context], AsyncGenerator[_Response, None]],
) -> Callable[[_Service, _Request, Context], AsyncIterator[_Response]]:
    """Make a handler that answers with a stream, whose TimerErrors end the RPC likewise.

    A stream of requests is read as `RequestStream`.
    """
    name = handler.__name__

    @functools.wraps(handler)
    async def answer(
        service: _Service, request: _Request, context: Context
    ) -> AsyncIterator[_Response]:
        try:
            service.admit(name)
            async with aclosing(handler(service, read(request), context)) as responses:
                async for response in responses:
                    yield response
        except EngineError as error:
            why = error
        else:
            return
        del request
        refusing = service.refuse(name, why, context)
        del context, why
        await refusing

    return answer


def read(request: _Request) -> _Request:
    """Return a request.

    Raises:
        EngineError: it could not be read.
    """
    if isinstance(request, UnreadableRequest):
        raise request.error
    return request


class RequestStream(Generic[_Request]):
    """The requests of a stream, one after the other; it keeps none.

    gRPC's own iterator keeps the last one until the next comes. `anext` raises a EngineError for
    one that could not be read.
    """

    def __init__(
        self,
        requests: AsyncIterator[_Request],
        context: Context,
        taken: Callable[[Any, Context], None] = Service.taken,
    ) -> None:
        """`taken` is called with each."""
        self._requests, self._read = requests, getattr(context, "read", None)
        self._context, self._taken = context, taken

    def __aiter__(self) -> "RequestStream[_Request]":
        return self

    async def __anext__(self) -> _Request:
        if self._read is None:  # a stand-in for gRPC's
            return read(await anext(self._requests))
        request: _Request = await self._read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        self._taken(request, self._context)
        return read(request)


class Registrar:
    """Stands for a server while services add themselves: `reader_of` reads their requests."""

    def __init__(self, server: grpc.aio.Server, bytes_max: int) -> None:
        """`bytes_max`: of a request."""
        self._server, self._bytes_max = server, bytes_max

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Leave them: each of their methods is registered, too, and is found there first."""

    def add_registered_method_handlers(
        self, service: str, handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        """Add methods of a service."""
        read = {
            name: handler._replace(  # type: ignore[attr-defined]  # a named tuple, in truth
                request_deserializer=reader_of(handler.request_deserializer, self._bytes_max)  # type: ignore[arg-type]
            )
            for name, handler in handlers.items()
        }
        self._server.add_registered_method_handlers(service, read)


async def within(work: Awaitable[Any], context: Context) -> Any:
    """Return what `work` gives before the caller's deadline.

    Raises:
        CommitTimeoutError: it took longer; the outcome is unknown.
    """
    left_s: float | None = context.time_remaining()  # the stubs know of no caller without one
    timeout_s = COMMIT_TIMEOUT_S if left_s is None else left_s
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise CommitTimeoutError(
            "no majority answered in time; the request may still commit"
        ) from None


def caller_of(context: Context) -> str:
    """Return the address that a call comes from, without its port."""
    _, _, address = urllib.parse.unquote(context.peer()).partition(":")
    return address.rpartition(":")[0].strip("[]")
