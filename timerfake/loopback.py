"""gRPC within one event loop: channels and a server without sockets.

    stub --bytes--> Channel --> Server --> servicer        and back the same way

Messages are serialised and parsed as on the wire, a stream holds so many unread messages and then
makes its writer wait, and who ends a call with a status has its trailing metadata arrive with it.
The generated stubs and servicers can't tell the difference.

`moved` counts what happens, so that somebody can tell when nothing does any more.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, NoReturn, Self

import grpc

UNREAD_MAX: Final = 64
"""Messages of one stream and direction; beyond it the writer waits."""

Serialize = Callable[[Any], bytes]
Parse = Callable[[bytes], Any]


class Aborted(Exception):
    """A servicer ended the call."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error.details())
        self.error = error


def failed(
    code: grpc.StatusCode, details: str, trailer: tuple[tuple[str, Any], ...] = ()
) -> grpc.aio.AioRpcError:
    """Return what a caller gets of a call that failed."""
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), details=details
    )


def _unavailable() -> grpc.aio.AioRpcError:
    return failed(grpc.StatusCode.UNAVAILABLE, "the fake cluster is disconnected")


class Context:
    """What a servicer is told of its caller."""

    def __init__(self, within_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = None if within_s is None else self._loop.time() + within_s

    def peer(self) -> str:
        """Return where the caller is: all are in this process."""
        return "loopback:here:0"

    def time_remaining(self) -> float | None:
        """Return seconds until the caller gives up; None: it has set no deadline."""
        return None if self._deadline_s is None else self._deadline_s - self._loop.time()

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: tuple[tuple[str, Any], ...] = (),
    ) -> NoReturn:
        """End the call.

        Raises:
            Aborted: always.
        """
        raise Aborted(failed(code, details, trailing_metadata))


class Server:
    """Servicers by method; the event loop that it is made on is the only one that calls it."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """A bug: nothing that is seen from then on can be relied on."""
        self.moved = 0
        """Messages that were sent or taken, calls that began or ended."""
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[str, Any] = {}
        self.streams: set[Stream] = set()
        """Those that are open."""
        self._down = False

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve methods of a service: what generated code calls."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Serve nothing more: generated code says the same twice."""

    def disconnect(self) -> None:
        """Break all streams, with what is on its way, and take no call until `reconnect`."""
        self._down = True
        self._break(_unavailable())

    def _break(self, error: grpc.aio.AioRpcError) -> None:
        for stream in [*self.streams]:
            stream.lose(error)

    def reconnect(self) -> None:
        """Take calls again."""
        self._down = False

    def fail(self, bug: BaseException) -> None:
        """End all streams, and refuse all calls, because of a bug."""
        self.failure = self.failure or bug
        self._break(failed(grpc.StatusCode.UNKNOWN, repr(bug)))

    def check(self) -> None:
        """Make a bug known.

        Raises:
            RuntimeError: there was one.
        """
        if self.failure is not None:
            raise RuntimeError("the fake cluster failed") from self.failure

    def enter(self) -> None:
        """Note that a call begins.

        Raises:
            RuntimeError: on another event loop, or after a bug.
        """
        if asyncio.get_running_loop() is not self._loop:
            msg = "a fake cluster is of one event loop: coroutines use their own AsyncFakeCluster"
            raise RuntimeError(msg)
        self.check()
        self.moved += 1

    def handler(self, method: str) -> Any:
        """Return what serves a method.

        Raises:
            Aborted: it is disconnected.
        """
        if self._down:
            raise Aborted(_unavailable())
        return self._handlers[method]


class Stream:
    """One call of a method that gives a stream, and perhaps takes one, as its client holds it."""

    def __init__(self, server: Server, method: str, serialize: Serialize, parse: Parse) -> None:
        server.enter()
        self._server = server
        self._serialize = serialize
        self._parse = parse
        self._up: asyncio.Queue[bytes | None] = asyncio.Queue(UNREAD_MAX)
        """None: the client has done writing."""
        self._down: asyncio.Queue[bytes | None] = asyncio.Queue(UNREAD_MAX)
        """None: it is over, as `_error` says."""
        self._error: grpc.aio.AioRpcError | None = None
        self._cancelled = False
        self._task = asyncio.ensure_future(self._serve(method))

    async def _serve(self, method: str) -> None:
        self._server.streams.add(self)
        try:
            handler = self._server.handler(method)
            answers = await self._begin(handler)
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    await self._put(self._down, handler.response_serializer(answer))
        except Aborted as aborted:
            self._error = aborted.error
        except Exception as bug:  # noqa: BLE001 - it is told to who can
            self._server.fail(bug)
        finally:
            self._server.streams.discard(self)
        await self._put(self._down, None)

    async def _begin(self, handler: Any) -> Any:
        """Return the answers to come."""
        if handler.request_streaming:
            return handler.stream_stream(self._requests(handler), Context(None))
        data = await self._get(self._up)
        return handler.unary_stream(handler.request_deserializer(data), Context(None))

    async def _requests(self, handler: Any) -> AsyncIterator[Any]:
        while (data := await self._get(self._up)) is not None:
            yield handler.request_deserializer(data)

    async def _put(self, queue: "asyncio.Queue[bytes | None]", data: bytes | None) -> None:
        await queue.put(data)
        self._server.moved += 1

    async def _get(self, queue: "asyncio.Queue[bytes | None]") -> bytes | None:
        data = await queue.get()
        self._server.moved += 1
        return data

    async def write(self, message: Any) -> None:
        """Send a message, when there is room for it.

        Raises:
            asyncio.InvalidStateError: the call is over.
        """
        if self._task.done():
            raise asyncio.InvalidStateError("the call is over")
        await self._put(self._up, self._serialize(message))

    def begin(self, request: Any) -> None:
        """Send the one request of a call that takes no more."""
        self._up.put_nowait(self._serialize(request))

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate over the messages up to the end."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def done_writing(self) -> None:
        """Send no more."""
        await self._put(self._up, None)

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF once there are no more.

        Raises:
            grpc.aio.AioRpcError: the call has failed.
            asyncio.CancelledError: it was cancelled here.
        """
        if self._cancelled:
            raise asyncio.CancelledError
        data = await self._get(self._down)
        if data is not None:
            return self._parse(data)
        self._down.put_nowait(None)  # whoever reads on is told the same
        if self._error is not None:
            raise self._error
        return grpc.aio.EOF

    def cancel(self) -> bool:
        """End the call; return whether that made a difference."""
        self._cancelled = self._task.cancel() or self._cancelled
        return self._cancelled

    def lose(self, error: grpc.aio.AioRpcError) -> None:
        """Break the connection: what is on its way is lost."""
        self._error = error
        self._task.cancel()
        while not self._down.empty():
            self._down.get_nowait()
        self._down.put_nowait(None)


class Channel(grpc.aio.Channel):
    """The way to a server, or to nobody."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def unary_unary(self, method: str, *serializers: Any, **more: Any) -> Any:
        """Return the method, to be called with a request and perhaps a `timeout`, in seconds."""
        serialize, parse = _serializers(serializers, more)

        async def call(request: Any, *, timeout: float | None = None) -> Any:  # noqa: ASYNC109
            server = self._server
            server.enter()
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
                raise failed(code, "Deadline Exceeded") from None
            except Exception as bug:
                server.fail(bug)
                raise
            finally:
                server.moved += 1

        return call

    def stream_stream(self, method: str, *serializers: Any, **more: Any) -> Any:
        """Return the method, whose call is a Stream."""
        serialize, parse = _serializers(serializers, more)
        return lambda: Stream(self._server, method, serialize, parse)

    def unary_stream(self, method: str, *serializers: Any, **more: Any) -> Any:
        """Return the method, whose call with a request is a Stream that is read alone."""
        serialize, parse = _serializers(serializers, more)

        def call(request: Any) -> Stream:
            stream = Stream(self._server, method, serialize, parse)
            stream.begin(request)
            return stream

        return call

    def stream_unary(self, method: str, *serializers: Any, **more: Any) -> NoReturn:
        """No service has such a method."""
        raise NotImplementedError(method)

    async def close(self, grace: float | None = None) -> None:
        """Nothing was open."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        """Return that it is ready."""
        del try_to_connect
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for what never comes."""
        await asyncio.get_running_loop().create_future()

    async def channel_ready(self) -> None:
        """It always is."""

    async def __aenter__(self) -> Self:
        """Return the channel."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""


def _serializers(given: tuple[Any, ...], more: dict[str, Any]) -> tuple[Serialize, Parse]:
    """Return how requests are written and answers read; bytes stay bytes."""
    names = ("request_serializer", "response_deserializer")
    named = dict(zip(names, given, strict=False)) | more
    return named.get(names[0]) or bytes, named.get(names[1]) or bytes
