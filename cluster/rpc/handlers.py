"""The common parts of all RPC handlers: errors become statuses, and every wait ends.

    bytes --reader_of--> request, or Refused --handler--> answer, or EngineError --refuse--> status
          (cluster/rpc/request_bounds.py)

A refused request must leave memory at once. An error refers to the frames that it passed, and they
refer to the request. gRPC's abort error refers to the frame that raised it, and the RPC to the
error. Only a garbage collection ends such a cycle. So `refuse` clears an error's frames, and its
own frame keeps no references.
"""

import asyncio
import functools
import logging
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NoReturn, Self, TypeVar

import grpc

from cluster.rpc import grpc_errors
from cluster.rpc.fair_queue import FairQueue
from cluster.rpc.relay import Relay, error_for, is_repeatable
from cluster.rpc.request_bounds import COLUMNS_BYTES_MAX, UnreadableRequest, reader_of, size_of
from cluster.rpc.rpc_caller import CALLER, keep_pace
from cluster.security.method_rules import CONTRACT_RULES
from timer.model.timer_errors import CommitTimeoutError, EngineError

COMMIT_TIMEOUT_S: Final = 10.0
"""The deadline of a request without one."""

PINGS: Final = (
    # A peer may disappear with its machine and send nothing. Until a missing answer shows that,
    # a client keeps its leases and exclusive groups; a node may return at another address.
    # (Not grpc.keepalive_timeout_ms: gRPC 1.85 waits for a ping for that or a minute, the longer.)
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""Options of channels and servers: both ends send pings."""
PINGED: Final = (*PINGS, ("grpc.http2.min_ping_interval_without_data_ms", 5_000))
"""Options of servers: they do not disconnect clients for their pings."""

logger = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHooks:
    """The node's callbacks for its services. The defaults do nothing."""

    on_error: Callable[[str, EngineError], None] = lambda method, error: None
    """Called for each RPC that fails, with its method and the error."""
    admit: Callable[[str, int], None] = lambda method, size: None
    """Called with the method and the bytes of each request, and with 0 bytes as a stream begins.
    Raises EngineError if the request is rejected now."""
    on_request: Callable[[Any, Context], None] = lambda request, context: None
    """Called with each request, to count its bytes."""
    on_answer: Callable[[str, str, str, float], None] = lambda method, code, relayed, s: None
    """Called for each answered request: method, name of the status code, `relayed`, seconds.

    `relayed`: "yes" if this node sent the request on to the leader, otherwise "no"."""
    while_unread: Callable[[int, Context], AbstractContextManager[None]] = lambda size, context: (
        nullcontext()
    )
    """Called with the bytes of each answer of a relayed stream. gRPC holds them in the context."""
    on_stream: Callable[[str], None] = lambda method: None
    """Called for each stream of requests that begins, with its method."""
    on_stream_end: Callable[[str, str, str], None] = lambda method, code, relayed: None
    """Called for each stream of requests that ends: method, code and relayed as in `on_answer`."""
    relay: Relay | None = None
    """Sends requests to the leader while this node does not lead. None: no request is sent on."""
    queue: FairQueue = field(default_factory=FairQueue)
    """Where requests wait for their turn."""


NO_HOOKS: Final = ServiceHooks()


class Service:
    """The base of all servicers."""

    def __init__(self, hooks: ServiceHooks = NO_HOOKS) -> None:
        self.hooks = hooks

    async def refuse(
        self, method: str, error: EngineError, context: Context, *, is_repeatable: bool
    ) -> NoReturn:
        """End an RPC with an error, and clear the frames that the error has passed.

        `is_repeatable`: the request may be applied twice without harm.

        Raises:
            grpc.aio.AbortError: always.
        """
        error = error_for(context, error)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.hooks.on_error(method, error)
        try:
            await grpc_errors.abort(context, error, is_repeatable=is_repeatable)
        except grpc.aio.AbortError as aborted:
            aborted.__traceback__ = aborted.__context__ = None
            raise
        finally:
            del context  # the abort's traceback refers to this frame, and the context to the abort


class _RpcMeasurement:
    """Reports the result and the duration of one RPC to the hooks."""

    __slots__ = ("_began", "_context", "_hooks", "_name", "_stream", "relayed")

    def __init__(self, hooks: ServiceHooks, name: str, request: object, context: Context) -> None:
        self._hooks, self._name = hooks, name
        self._context: Context | None = context
        self._stream = hasattr(request, "__aiter__")
        self.relayed = "no"
        """"yes": the request goes to the leader."""

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        if self._stream:
            self._hooks.on_stream(self._name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        context, self._context = self._context, None  # see the module: the error refers to this
        code = "OK" if kind is None else _code_of(kind, context)
        seconds = time.perf_counter() - self._began
        if logger.isEnabledFor(logging.DEBUG) and context is not None:
            more = {"method": self._name, "code": code, "ms": round(seconds * 1_000, 1)}
            logger.debug("RPC", extra=more | {"relayed": self.relayed, "peer": context.peer()})
        if self._stream:
            self._hooks.on_stream_end(self._name, code, self.relayed)
        else:
            self._hooks.on_answer(self._name, code, self.relayed, seconds)


_CODES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


def _code_of(kind: type[BaseException], context: Any) -> str:
    """Return the name of the status code of an RPC that ended with an exception of `kind`."""
    if issubclass(kind, grpc.aio.AbortError):
        code: Any = context.code()
        return _CODES.get(code, "UNKNOWN") if isinstance(code, int) else str(code.name)
    is_cancelled = issubclass(kind, asyncio.CancelledError | GeneratorExit)
    return "CANCELLED" if is_cancelled else "UNKNOWN"


_Service = TypeVar("_Service", bound=Service)
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Result = TypeVar("_Result")


def unary_handler(
    handler: Callable[[_Service, _Request, Context], Awaitable[_Response]],
) -> Callable[[_Service, _Request, Context], Awaitable[_Response]]:
    """Return a unary handler whose EngineErrors end the RPC with their status."""
    name = handler.__name__
    at_once = CONTRACT_RULES[name].here or CONTRACT_RULES[name].at_once

    @functools.wraps(handler)
    async def answer(service: _Service, request: _Request, context: Context) -> _Response:
        with _RpcMeasurement(service.hooks, name, request, context) as measured:
            try:
                service.hooks.on_request(request, context)
                service.hooks.admit(name, size_of(request))
                relay = service.hooks.relay
                if relay is not None and (leader := relay.target(name, context)) is not None:
                    measured.relayed = "yes"
                    encoded: Any = await relay.answer(leader, name, read(request), context)
                    return encoded  # type: ignore[no-any-return]  # encoded; see Registrar
                if at_once:
                    return await handler(service, read(request), context)
                queue, caller = service.hooks.queue, turn_of(context)
                weight = await queue.enter(caller, request)
                try:
                    return await handler(service, read(request), context)
                finally:
                    queue.leave(caller, weight)
            except EngineError as error:
                repeatable = is_repeatable(name, request)
                refusing = service.refuse(name, error, context, is_repeatable=repeatable)
            finally:
                del request, context  # see the module
            return await refusing

    return answer


def stream_handler(
    handler: Callable[[_Service, _Request, Context], AsyncGenerator[_Response, None]],
) -> Callable[[_Service, _Request, Context], AsyncIterator[_Response]]:
    """Return a handler with a stream of answers, whose EngineErrors end the RPC with their status.

    A stream of requests is read through `RequestStream`.
    """
    name = handler.__name__

    @functools.wraps(handler)
    async def answer(
        service: _Service, request: _Request, context: Context
    ) -> AsyncIterator[_Response]:
        with _RpcMeasurement(service.hooks, name, request, context) as measured:
            try:
                if not hasattr(request, "__aiter__"):  # a stream's requests are taken one by one
                    service.hooks.on_request(request, context)
                service.hooks.admit(name, 0)
                relay, answers = service.hooks.relay, None
                if relay is not None and (leader := relay.target(name, context)) is not None:
                    measured.relayed = "yes"
                    requests: Any = read(request)
                    if hasattr(requests, "__aiter__"):
                        requests = RequestStream(
                            requests,
                            context,
                            functools.partial(_admit_request, service.hooks, name),
                        )
                    answers = relay.stream(leader, name, requests, context)
                    del requests
                own: Any = answers or handler(service, read(request), context)
                present = service.hooks.queue.present(turn_of(context))
                with present if answers is None else nullcontext():
                    async with aclosing(own) as responses:
                        async for response in responses:
                            unread: AbstractContextManager[None] = nullcontext()
                            if answers is not None:
                                unread = service.hooks.while_unread(len(response), context)
                            box = [response]
                            del response  # while it is written; see _boxed
                            with unread:
                                yield box.pop()
            except EngineError as error:
                repeatable = is_repeatable(name, request)
                refusing = service.refuse(name, error, context, is_repeatable=repeatable)
            else:
                return
            finally:
                del request, context  # see the module
            await refusing

    return answer


def _admit_request(hooks: ServiceHooks, method: str, request: Any, context: Context) -> None:
    """Take a request of a relayed stream.

    Raises:
        EngineError: the method is rejected now. The stream ends after the answers before.
    """
    hooks.on_request(request, context)
    hooks.admit(method, size_of(request))


def read(request: _Request) -> _Request:
    """Return a request.

    Raises:
        EngineError: the request could not be parsed.
    """
    if isinstance(request, UnreadableRequest):
        raise request.error
    return request


class RequestStream(Generic[_Request]):
    """The requests of a stream, one after another. It keeps no reference to them.

    gRPC's own iterator keeps the last request until the next one comes. `anext` raises an
    EngineError for a request that could not be parsed.
    """

    def __init__(
        self,
        requests: AsyncIterator[_Request],
        context: Context,
        on_request: Callable[[Any, Context], None] = NO_HOOKS.on_request,
    ) -> None:
        """`on_request` is called with each request and the context."""
        self._requests, self._read = requests, getattr(context, "read", None)
        self._context, self._taken = context, on_request

    def __aiter__(self) -> "RequestStream[_Request]":
        return self

    async def __anext__(self) -> _Request:
        if self._read is None:  # a test's context, without gRPC
            return read(await anext(self._requests))
        request: _Request = await self._read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        self._taken(request, self._context)
        await keep_pace(request)
        return read(request)


class Registrar:
    """Stands in for a server while services register, so that `reader_of` parses requests."""

    def __init__(
        self,
        server: Any,
        request_bytes_max: int,
        on_answer: Callable[[int, Context], None] = lambda size, context: None,
    ) -> None:
        """`request_bytes_max`: bytes of a request's payloads, keys and headers, at most.

        `on_answer`: called with the bytes of each unary answer, before it is sent.
        """
        self._server, self._bytes_max = server, request_bytes_max + COLUMNS_BYTES_MAX
        self._on_answer = on_answer

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignore the handlers: their methods are also registered, and gRPC finds those first."""

    def add_registered_method_handlers(
        self, service: str, handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        """Register the methods of a service at the server."""
        read = {name: self._registered(handler) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, read)

    def _registered(self, handler: Any) -> Any:
        encode = functools.partial(_bytes_of, handler.response_serializer)
        if handler.response_streaming:
            shape = "stream_stream" if handler.request_streaming else "unary_stream"
            served = _boxed(getattr(handler, shape))
        else:
            shape, served = "unary_unary", self._counted(handler.unary_unary, encode)
        return handler._replace(
            request_deserializer=reader_of(handler.request_deserializer, self._bytes_max),
            response_serializer=encode,
            **{shape: served},
        )

    def _counted(
        self, handler: Callable[[Any, Context], Awaitable[Any]], encode: Callable[[Any], bytes]
    ) -> Callable[[Any, Context], Awaitable[bytes]]:
        async def answer(request: Any, context: Context) -> bytes:
            working = handler(request, context)
            del request  # see the module
            try:
                encoded = encode(await working)
                self._on_answer(len(encoded), context)
                return encoded
            finally:
                del context  # an error refers to this frame

        return answer


def _boxed(handler: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    """Return a handler whose answers are in lists, which are empty when the answer is encoded.

    gRPC keeps each answer of a stream until the next one: for an idle consumer a megabyte. The
    frames of a handler would keep it until it is written: for one that does not read, forever.
    """

    async def answer(request: Any, context: Context) -> AsyncIterator[list[Any]]:
        working = handler(request, context)
        del request, context  # see the module
        async with aclosing(working) as responses:
            async for response in responses:
                box = [response]
                del response
                yield box

    return answer


def _bytes_of(encode: Callable[[Any], bytes], response: Any) -> bytes:
    """Return a response as bytes. The leader's answer to a relayed request is encoded already."""
    if isinstance(response, list):
        response = response.pop()
    return response if isinstance(response, bytes) else encode(response)


async def within(work: Awaitable[_Result], context: Context) -> _Result:
    """Return the result of `work` before the caller's deadline.

    Raises:
        CommitTimeoutError: the deadline has passed; the outcome is unknown.
    """
    left_s: float | None = context.time_remaining()  # the type stubs omit None: no deadline
    timeout_s = COMMIT_TIMEOUT_S if left_s is None else left_s
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise CommitTimeoutError(
            "no majority answered in time; the request may still commit"
        ) from None


def turn_of(context: Context) -> Hashable:
    """Return the caller with whose requests this one takes turns: an identity, or a connection."""
    caller = CALLER.get()
    return context.peer() if caller is None else caller.identity


def caller_of(context: Context) -> str:
    """Return the address of an RPC's caller, without its port."""
    _, _, address = urllib.parse.unquote(context.peer()).partition(":")
    return address.rpartition(":")[0].strip("[]")
