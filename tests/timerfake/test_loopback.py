"""Channels within an event loop behave as gRPC's, as far as the client relies on it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerfake.loopback import UNREAD_MAX, Channel, Server


class Servicer(rpc.TimerServiceServicer):
    """A server that answers by topic and records its calls."""

    def __init__(self) -> None:
        self.taken = 0
        self.ended = asyncio.Event()
        self.time_remaining: float | None = None

    async def CountTimers(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.time_remaining = context.time_remaining()
        if request.topic == "refused":
            trailer = (("timer-error-bin", b"\x00why"),)
            await context.abort(grpc.StatusCode.NOT_FOUND, "no", trailing_metadata=trailer)
        if request.topic == "silent":
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.ended.set()
        if request.topic == "broken":
            raise ZeroDivisionError
        return pb.CountTimersResponse(pending=len(request.topic))

    async def ScheduleStream(  # noqa: N802
        self, requests: Any, context: Any
    ) -> AsyncIterator[pb.ScheduleStreamResponse]:
        try:
            async for request in requests:
                self.taken += 1
                if request.sequence == 99:
                    await context.abort(grpc.StatusCode.ABORTED, "99")
                if request.sequence == 98:
                    raise ZeroDivisionError
                yield pb.ScheduleStreamResponse(request_no=request.sequence)
        finally:
            self.ended.set()


class Play:
    """A server, a channel and stubs on it."""

    def __init__(self) -> None:
        self.servicer = Servicer()  # type: ignore[abstract]
        self.server = Server()
        rpc.add_TimerServiceServicer_to_server(self.servicer, self.server)  # type: ignore[arg-type]
        self.stub: Any = rpc.TimerServiceStub(Channel(self.server))

    async def count(self, topic: str, **more: Any) -> Any:
        return await self.stub.CountTimers(pb.CountTimersRequest(topic=topic), **more)

    async def stream(self, *sequences: int) -> Any:
        stream = self.stub.ScheduleStream()
        for sequence in sequences:
            await stream.write(pb.ScheduleRequest(sequence=sequence))
        return stream


@pytest.fixture
async def play() -> Play:
    return Play()


async def test_answer_is_another_object_with_the_same_content(play: Play) -> None:
    assert (await play.count("four")).pending == 4
    assert play.servicer.time_remaining is None


async def test_refusal_carries_status_and_metadata(play: Play) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await play.count("refused")
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, "no")
    assert [*refused.value.trailing_metadata()] == [("timer-error-bin", b"\x00why")]


async def test_call_that_takes_too_long_is_ended_on_both_sides(play: Play) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await play.count("silent", timeout=0.01)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert play.servicer.ended.is_set()
    assert play.servicer.time_remaining is not None
    assert 0 < play.servicer.time_remaining <= 0.01


@pytest.mark.parametrize("in_stream", [True, False])
async def test_bug_of_a_servicer_ends_everything(play: Play, in_stream: bool) -> None:
    other = await play.stream(1)
    await other.read()
    if in_stream:
        stream = await play.stream(98)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stream.read()
        assert failed.value.code() is grpc.StatusCode.UNKNOWN
    else:
        with pytest.raises(ZeroDivisionError):
            await play.count("broken")
    with pytest.raises(grpc.aio.AioRpcError):
        await other.read()
    for call in (play.count("four"), play.stream()):
        with pytest.raises(RuntimeError, match="failed") as refused:
            await call
        assert isinstance(refused.value.__cause__, ZeroDivisionError)


async def test_stream_answers_in_order_and_ends_when_both_are_done(play: Play) -> None:
    stream = await play.stream(1, 2, 3)
    await stream.done_writing()
    assert [(await stream.read()).request_no for _ in range(3)] == [1, 2, 3]
    assert await stream.read() is grpc.aio.EOF
    assert await stream.read() is grpc.aio.EOF
    with pytest.raises(asyncio.InvalidStateError):
        await stream.write(pb.ScheduleRequest())


async def test_stream_that_is_refused_gives_what_came_before_and_then_the_error(play: Play) -> None:
    stream = await play.stream(1, 99)
    assert (await stream.read()).request_no == 1
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        assert refused.value.code() is grpc.StatusCode.ABORTED


async def test_unread_stream_makes_its_writer_wait(play: Play) -> None:
    stream = await play.stream()

    async def write() -> None:
        for sequence in range(10 * UNREAD_MAX):
            await stream.write(pb.ScheduleRequest(sequence=sequence % 90))

    writer, moved = asyncio.create_task(write()), -1
    while moved != play.server.event_count:  # until no side makes progress
        moved = play.server.event_count
        for _ in range(5):
            await asyncio.sleep(0)
    assert not writer.done()
    assert UNREAD_MAX <= play.servicer.taken <= UNREAD_MAX + 1
    for _ in range(10 * UNREAD_MAX):
        await stream.read()
    await writer
    stream.cancel()


async def test_cancelled_stream_ends_its_servicer(play: Play) -> None:
    stream = await play.stream(1)
    await stream.read()
    assert stream.cancel()
    await play.servicer.ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await stream.read()


async def test_disconnected_server_breaks_streams_with_what_is_on_its_way(play: Play) -> None:
    stream = await play.stream(1, 2)
    await stream.read()
    play.server.disconnect()
    for lost in (stream, await play.stream()):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await lost.read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError):
        await play.count("four")
    assert play.servicer.ended.is_set()
    play.server.reconnect()
    assert (await play.count("four")).pending == 4
    assert play.server.streams == set()
    play.server.check()


async def test_one_request_may_have_many_answers(play: Play) -> None:
    ended = asyncio.Event()

    async def count(request: bytes, _: Any) -> AsyncIterator[bytes]:
        try:
            for number in range(3 * UNREAD_MAX):
                yield request + b"%d" % number
        finally:
            ended.set()

    handlers = {"Count": grpc.unary_stream_rpc_method_handler(count, bytes, bytes)}
    play.server.add_registered_method_handlers("tests.Tests", handlers)
    method = Channel(play.server).unary_stream("/tests.Tests/Count")
    assert [answer async for answer in method(b"n")] == [b"n%d" % n for n in range(3 * UNREAD_MAX)]
    assert ended.is_set()
    ended.clear()
    stream = method(b"n")
    assert await stream.read() == b"n0"
    stream.cancel()
    await ended.wait()
