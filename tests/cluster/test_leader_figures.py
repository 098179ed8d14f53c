"""A node that does not lead asks the leader for its figures: seldom, and never for long."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from cluster.page.leader_figures import EVERY_MS, OLD_MS, Figures, LeaderFigures, handler_of
from timer.model.units import MonoMs

FIGURES: Final = {"counters": {"at_ms": 7, "acked": 3}, "lags_age_ms": 40}
WAIT_S: Final = 10.0


class Follower:
    """Asks one leader, on a clock that the test moves."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.leader, self.now_ms = "n1", 0
        self.figures = LeaderFigures(
            lambda: self.leader, lambda _: channel, lambda: MonoMs(self.now_ms)
        )


@asynccontextmanager
async def asked(read: Callable[[], Awaitable[Figures | None]] | None) -> AsyncIterator[Follower]:
    """Yield a follower of a leader. `read`: None: the leader's release has no such call."""
    server = grpc.aio.server()
    if read is not None:
        server.add_generic_rpc_handlers((handler_of(read),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        follower = Follower(channel)
        yield follower
        await follower.figures.stop()
    await server.stop(None)


async def test_all_viewers_share_one_call_in_a_second() -> None:
    calls: list[int] = []

    async def read() -> Figures:
        calls.append(1)
        return FIGURES

    async with asked(read) as follower:
        for second in range(3):
            follower.now_ms = second * EVERY_MS
            reads = [follower.figures.read(WAIT_S) for _ in range(100)]
            answers = await asyncio.gather(*reads)
            assert {answer.leader for answer in answers} == {"n1"}
            assert all(answer.figures == FIGURES for answer in answers)
            assert len(calls) == second + 1
        follower.now_ms += EVERY_MS - 1
        figures = (await follower.figures.read(WAIT_S)).figures
        assert figures is not None
        assert figures["lags_age_ms"] == 40 + EVERY_MS - 1
        assert len(calls) == 3


async def test_figures_of_another_leader_or_old_ones_are_not_shown() -> None:
    answers = asyncio.Queue[Any]()
    answers.put_nowait(FIGURES)
    async with asked(answers.get) as follower:
        assert (await follower.figures.read(WAIT_S)).figures == FIGURES
        follower.leader = "n2"
        assert await follower.figures.read(0) == ("n2", None, "the leader has not answered yet")
        follower.leader = ""
        assert await follower.figures.read(0) == ("", None, "no node leads")
        follower.leader, follower.now_ms = "n1", OLD_MS
        assert (await follower.figures.read(0)).figures is not None
        follower.now_ms += 1
        assert (await follower.figures.read(0)).figures is None


async def test_silent_leader_and_one_of_an_older_release_give_a_reason() -> None:
    async def silent() -> Figures:
        await asyncio.Event().wait()
        raise AssertionError

    async def not_leading() -> None:
        return None

    for read, why in (
        (silent, "the leader does not answer within 1 s"),
        (not_leading, "the leader does not lead yet"),
        (None, "the leader's release does not serve this call"),
    ):
        async with asked(read) as follower:
            assert await follower.figures.read(WAIT_S) == ("n1", None, why)
