"""gRPC within one process: channels and a server without sockets.

    stub --bytes--> Channel --> Server --> servicer        and back the same way

Messages are serialised and parsed as on the wire. A stream holds at most UNREAD_MAX unread
messages; beyond it the writer waits. A status arrives with its trailing metadata. Generated stubs
and servicers work unchanged.

Servicers and queues run on the event loop that made the server. Clients of other event loops, and
so of other threads, wait for it (`Server.on_own_loop`).

`Server.event_count` counts events; a caller finds by it when no more events come.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Final, NoReturn, Self, TypeVar

import grpc

from timerclient.streams.node_channel import DIRECT

UNREAD_MAX: Final = 64
"""Messages of one stream and direction; beyond it the writer waits."""

CLOSED: Final = "the fake cluster is closed"
OTHER_LOOP: Final = (
    "the fake cluster belongs to another event loop: asyncio.run makes a new one each time, and so "
    "does pytest for each test. Enter a cluster on each, or use FakeCluster"
)
BLOCKED_S: Final = 10.0
"""Seconds for which calls of other event loops wait until that of the server takes one."""
BLOCKED: Final = (
    "the event loop of the fake cluster is blocked: code on it must await calls of an "
    "AsyncTimerClient, and run blocking functions in a thread (asyncio.to_thread)"
)
FAR_CONSUMER: Final = (
    "a consumer of a fake cluster runs on the cluster's event loop: use FakeCluster and a "
    "TimerClient, or an AsyncFakeCluster and an AsyncTimerClient on its event loop"
)

T = TypeVar("T")

Serialize = Callable[[Any], bytes]
Parse = Callable[[bytes], Any]


class Aborted(Exception):
    """A servicer ended the call with a status."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error.details())
        self.error = error


def rpc_error(
    code: grpc.StatusCode, details: str, trailer: tuple[tuple[str, Any], ...] = ()
) -> grpc.aio.AioRpcError:
    """Return the error that the caller of a failed call receives."""
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), details=details
    )


def _unavailable(before: str = "") -> grpc.aio.AioRpcError:
    return rpc_error(grpc.StatusCode.UNAVAILABLE, f"{before}the fake cluster is disconnected")


class Context:
    """A servicer's view of its caller."""

    def __init__(self, within_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = None if within_s is None else self._loop.time() + within_s

    def peer(self) -> str:
        """Return the caller's address: that of this process."""
        return "loopback:here:0"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that the project's client sends with each call."""
        return DIRECT

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline; None: there is none."""
        return None if self._deadline_s is None else self._deadline_s - self._loop.time()

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: tuple[tuple[str, Any], ...] = (),
    ) -> NoReturn:
        """End the call with a status.

        Raises:
            Aborted: Always.
        """
        raise Aborted(rpc_error(code, details, trailing_metadata))


class Server:
    """Servicers by method, on the event loop that made it."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """The first bug. After a bug, no result can be relied on."""
        self.event_count = 0
        """Count of messages sent and received, and of calls begun and ended."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._handlers: dict[str, Any] = {}
        self.streams: set[Stream] = set()
        """The open streams."""
        self._is_disconnected = False
        self._closed = False
        self._far_since_s = 0.0
        """When calls of other event loops began to wait for this one, by `time.monotonic`. 0: none
        waits. A client cancels and repeats its calls, so no single one may wait for BLOCKED_S."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve methods of a service. Generated code calls this."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: generated code has already added these handlers."""

    def disconnect(self) -> None:
        """Break all streams and lose messages in flight. Reject calls until `reconnect`."""
        self._is_disconnected = True
        self._break(_unavailable())

    def _break(self, error: grpc.aio.AioRpcError) -> None:
        for stream in [*self.streams]:
            stream.break_off(error)

    def reconnect(self) -> None:
        """Accept calls again."""
        self._is_disconnected = False

    def close(self) -> None:
        """Reject all later calls: no leader comes for which they could wait."""
        self._closed = True

    def fail(self, bug: BaseException) -> None:
        """End all streams and reject all calls, because of a bug."""
        self.failure = self.failure or bug
        self._break(rpc_error(grpc.StatusCode.UNKNOWN, repr(bug)))

    def check(self) -> None:
        """Report a bug.

        Raises:
            RuntimeError: `fail` was called.
        """
        if self.failure is not None:
            raise RuntimeError("the fake cluster failed") from self.failure

    def begin_call(self) -> None:
        """Count the start of a call.

        Raises:
            RuntimeError: After a bug or `close`, or the event loop has ended or can't run.
        """
        self.check()
        if self._closed:
            raise RuntimeError(CLOSED)
        self._check_loop()
        self.event_count += 1

    def _check_loop(self) -> None:
        if self.is_own_loop:
            return
        if self._loop.is_closed() or self._thread_id == threading.get_ident():
            raise RuntimeError(OTHER_LOOP)

    @property
    def is_own_loop(self) -> bool:
        """Whether the caller runs on the event loop of this server."""
        return asyncio.get_running_loop() is self._loop

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T] | Future[T]":
        """Start a coroutine on the event loop of this server, from any event loop."""
        if self.is_own_loop:
            return asyncio.ensure_future(work)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a coroutine that runs on the event loop of this server.

        Raises:
            RuntimeError: That event loop is closed, has been blocked for BLOCKED_S, or can't run,
                as the caller's runs in its thread.
        """
        if self.is_own_loop:
            return await work()
        self._check_loop()
        self._far_since_s = since_s = self._far_since_s or time.monotonic()
        self._loop.call_soon_threadsafe(self._on_turn)  # also if this call is cancelled
        try:
            async with asyncio.timeout(since_s + BLOCKED_S - time.monotonic()):
                await self._run_far(asyncio.sleep(0))
        except TimeoutError:
            raise RuntimeError(BLOCKED) from None
        return await self._run_far(work())

    def _on_turn(self) -> None:
        self._far_since_s = 0.0

    async def _run_far(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def handler(self, method: str) -> Any:
        """Return the handler of a method.

        Raises:
            Aborted: The server is disconnected.
        """
        if self._is_disconnected:
            raise Aborted(_unavailable("failed to connect to all addresses; last error: "))
        return self._handlers[method]


class Stream:
    """The client's side of a call that returns a stream, and may take a stream.

    `request`: the only one, of a unary-stream call. None: `write` sends them.
    """

    def __init__(
        self,
        server: Server,
        method: str,
        serialize: Serialize,
        parse: Parse,
        request: Any = None,
    ) -> None:
        server.begin_call()
        self._server = server
        self._serialize = serialize
        self._parse = parse
        self._requests_queue: asyncio.Queue[bytes | None] = asyncio.Queue(UNREAD_MAX)
        """Requests. None: the client has ended its stream."""
        self._responses_queue: asyncio.Queue[bytes | None] = asyncio.Queue(UNREAD_MAX)
        """Responses. None: the call has ended, with `_error` if that is set."""
        self._error: grpc.aio.AioRpcError | None = None
        self._cancelled = False
        if request is not None:
            self._requests_queue.put_nowait(serialize(request))
        self._task = server.spawn(self._serve(method))

    async def _serve(self, method: str) -> None:
        self._server.streams.add(self)
        try:
            handler = self._server.handler(method)
            answers = await self._begin(handler)
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    await self._put(self._responses_queue, handler.response_serializer(answer))
        except Aborted as aborted:
            self._error = aborted.error
        except Exception as bug:  # noqa: BLE001 - Server.check raises it
            self._server.fail(bug)
        finally:
            self._server.streams.discard(self)
        await self._put(self._responses_queue, None)

    async def _begin(self, handler: Any) -> Any:
        """Return the iterator of responses."""
        if handler.request_streaming:
            return handler.stream_stream(self._requests(handler), Context(None))
        data = await self._get(self._requests_queue)
        return handler.unary_stream(handler.request_deserializer(data), Context(None))

    async def _requests(self, handler: Any) -> AsyncIterator[Any]:
        while (data := await self._get(self._requests_queue)) is not None:
            yield handler.request_deserializer(data)

    async def _put(self, queue: "asyncio.Queue[bytes | None]", data: bytes | None) -> None:
        await queue.put(data)
        self._server.event_count += 1

    async def _get(self, queue: "asyncio.Queue[bytes | None]") -> bytes | None:
        data = await queue.get()
        self._server.event_count += 1
        return data

    async def write(self, message: Any) -> None:
        """Send a message; wait until there is room for it.

        Raises:
            asyncio.InvalidStateError: The call has ended.
        """
        if self._task.done():
            raise asyncio.InvalidStateError("the call is over")
        data = self._serialize(message)
        await self._server.on_own_loop(lambda: self._put(self._requests_queue, data))

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate over the messages until the call ends."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def done_writing(self) -> None:
        """End the stream of requests."""
        await self._server.on_own_loop(lambda: self._put(self._requests_queue, None))

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF after the last one.

        Raises:
            grpc.aio.AioRpcError: The call has failed.
            asyncio.CancelledError: The call was cancelled by `cancel`.
        """
        if self._cancelled:
            raise asyncio.CancelledError
        data = await self._server.on_own_loop(self._next)
        if data is not None:
            return self._parse(data)
        if self._error is not None:
            raise self._error
        return grpc.aio.EOF

    async def _next(self) -> bytes | None:
        data = await self._get(self._responses_queue)
        if data is None:
            self._responses_queue.put_nowait(None)  # a further read returns the same
        return data

    def cancel(self) -> bool:
        """Cancel the call; return whether it was still running or was cancelled before."""
        self._cancelled = self._task.cancel() or self._cancelled
        return self._cancelled

    def break_off(self, error: grpc.aio.AioRpcError) -> None:
        """Break the connection and lose messages in flight."""
        self._error = error
        self._task.cancel()
        while not self._responses_queue.empty():
            self._responses_queue.get_nowait()
        self._responses_queue.put_nowait(None)


class Channel(grpc.aio.Channel):
    """A channel to a server, which may be disconnected."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def unary_unary(self, method: str, *serializers: Any, **more: Any) -> Any:
        """Return the method. Its arguments: a request, and optionally `timeout` in seconds."""
        serialize, parse = _serializers(serializers, more)

        async def call(
            request: Any,
            *,
            timeout: float | None = None,  # noqa: ASYNC109
            metadata: object = (),
        ) -> Any:
            del metadata
            return await self._server.on_own_loop(lambda: serve(request, timeout))

        async def serve(request: Any, timeout: float | None) -> Any:  # noqa: ASYNC109
            server = self._server
            server.begin_call()
            try:
                handler = server.handler(method)
                async with asyncio.timeout(timeout):
                    parsed = handler.request_deserializer(serialize(request))
                    answer = await handler.unary_unary(parsed, Context(timeout))
                    return parse(handler.response_serializer(answer))
            except Aborted as aborted:
                raise aborted.error from None
            except TimeoutError:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                raise rpc_error(code, "Deadline Exceeded") from None
            except Exception as bug:
                server.fail(bug)
                raise
            finally:
                server.event_count += 1

        return call

    def stream_stream(self, method: str, *serializers: Any, **more: Any) -> Any:
        """Return the method; each call returns a Stream."""
        serialize, parse = _serializers(serializers, more)

        def call(*, metadata: object = ()) -> Stream:
            del metadata
            if method.endswith("/Consume") and not self._server.is_own_loop:
                raise RuntimeError(FAR_CONSUMER)
            return Stream(self._server, method, serialize, parse)

        return call

    def unary_stream(self, method: str, *serializers: Any, **more: Any) -> Any:
        """Return the method; each call takes a request and returns a Stream that is only read."""
        serialize, parse = _serializers(serializers, more)

        def call(request: Any, *, metadata: object = ()) -> Stream:
            del metadata
            return Stream(self._server, method, serialize, parse, request)

        return call

    def stream_unary(self, method: str, *serializers: Any, **more: Any) -> NoReturn:
        """Fail: no service has such a method."""
        raise NotImplementedError(method)

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: a channel has no resources."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        """Return READY."""
        del try_to_connect
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for ever: the state never changes."""
        await asyncio.get_running_loop().create_future()

    async def channel_ready(self) -> None:
        """Return at once: the channel is always ready."""

    async def __aenter__(self) -> Self:
        """Return the channel."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channel."""


def _serializers(given: tuple[Any, ...], more: dict[str, Any]) -> tuple[Serialize, Parse]:
    """Return the serializer of requests and the parser of responses; by default bytes."""
    names = ("request_serializer", "response_deserializer")
    named = dict(zip(names, given, strict=False)) | more
    return named.get(names[0]) or bytes, named.get(names[1]) or bytes
