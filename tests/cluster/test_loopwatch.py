"""Holds of the event loop are seen, kept and logged."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import uvloop

from cluster.state.loop_watch import (
    IDLE_INTERVAL_S,
    IDLE_SHARE,
    INTERVAL_S,
    LOG_ABOVE_S,
    ON_TIME_S,
    OTHER,
    QUIET_AFTER,
    QUIET_INTERVAL_S,
    STEP_ABOVE_S,
    LoopWatch,
    Steps,
)


@dataclass
class FakeHandle:
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FakeLoop:
    """A loop whose steps take exactly as long as the test says."""

    now_s: float = 1000.0
    calls: list[tuple[float, Callable[[], object], FakeHandle]] = field(default_factory=list)

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[], object], /) -> FakeHandle:
        handle = FakeHandle()
        self.calls.append((when, callback, handle))
        return handle

    def run_next(self, *, late_s: float) -> None:
        when, callback, handle = self.calls.pop(0)
        assert not handle.cancelled
        self.now_s = when + late_s
        callback()


def test_every_hold_is_observed_and_the_longest_kept() -> None:
    loop, holds = FakeLoop(), list[float]()
    watch = LoopWatch(loop, holds.append)
    watch.start()
    for late_s in (0.0, 0.25, 0.03):
        loop.run_next(late_s=late_s)
    assert holds == pytest.approx([0.0, 0.25, 0.03])
    assert watch.longest_s == pytest.approx(0.25)
    assert loop.calls[0][0] == pytest.approx(loop.now_s + INTERVAL_S)


def test_loop_is_looked_at_less_often_until_its_own_work_makes_it_late() -> None:
    loop, worked_s = FakeLoop(), 0.0
    LoopWatch(loop, lambda held_s: None, worked=lambda: worked_s).start()

    def interval_after(late_s: float, work_s: float = 0.0) -> float:
        nonlocal worked_s
        worked_s += work_s
        loop.run_next(late_s=late_s)
        return loop.calls[0][0] - loop.now_s

    work_s = 2 * IDLE_SHARE * INTERVAL_S
    intervals = [interval_after(0.0, work_s) for _ in range(QUIET_AFTER + 1)]
    assert intervals[:-2] == pytest.approx([INTERVAL_S] * (QUIET_AFTER - 1))
    assert intervals[-2:] == pytest.approx([QUIET_INTERVAL_S] * 2)
    assert interval_after(0.1, 0.04) == pytest.approx(QUIET_INTERVAL_S), "no processor was free"
    assert interval_after(2 * ON_TIME_S, 2 * ON_TIME_S) == pytest.approx(INTERVAL_S)


def test_idle_loop_is_looked_at_rarely_until_it_works() -> None:
    loop, worked_s = FakeLoop(), 0.0
    LoopWatch(loop, lambda held_s: None, worked=lambda: worked_s).start()

    def interval_after(share: float, late_s: float = 0.0) -> float:
        nonlocal worked_s
        worked_s += share * (loop.calls[0][0] + late_s - loop.now_s)
        loop.run_next(late_s=late_s)
        return loop.calls[0][0] - loop.now_s

    intervals = [interval_after(IDLE_SHARE / 2) for _ in range(QUIET_AFTER)]
    assert intervals == pytest.approx([INTERVAL_S] * (QUIET_AFTER - 1) + [IDLE_INTERVAL_S])
    assert interval_after(IDLE_SHARE) == pytest.approx(IDLE_INTERVAL_S)
    assert interval_after(0.3) == pytest.approx(INTERVAL_S), "the work may have been one step"


def test_callback_that_runs_early_counts_as_no_hold() -> None:
    loop, holds = FakeLoop(), list[float]()
    LoopWatch(loop, holds.append).start()
    loop.run_next(late_s=-0.001)
    assert holds == [0.0]


def test_only_a_long_hold_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    loop = FakeLoop()
    LoopWatch(loop, lambda held_s: None).start()
    with caplog.at_level(logging.DEBUG, "cluster.state.loop_watch"):
        loop.run_next(late_s=LOG_ABOVE_S - 0.001)
        assert caplog.records == []
        loop.run_next(late_s=0.1504)
    assert [vars(each)["held_ms"] for each in caplog.records] == [150]


def test_long_hold_is_logged_with_the_function_that_took_most_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, told = FakeLoop(), list[tuple[str, float]]()
    steps = Steps(lambda name, seconds: told.append((name, seconds)), lambda: loop.now_s)
    LoopWatch(loop, lambda held_s: None, steps).start()

    def fold() -> None:
        loop.now_s += 0.15

    def little() -> None:
        loop.now_s += STEP_ABOVE_S / 2

    with caplog.at_level(logging.WARNING, "cluster.state.loop_watch"):
        steps.run(little)
        steps.run(fold)
        loop.run_next(late_s=0.2)
        steps.run(little)
        loop.run_next(late_s=0.2)
    named = [vars(each)["step"] for each in caplog.records]
    assert named == [fold.__qualname__, OTHER]
    [(name, seconds)] = told
    assert name == fold.__qualname__
    assert seconds == pytest.approx(0.15)


def test_stopped_watch_calls_no_more_and_can_be_started_again() -> None:
    loop = FakeLoop()
    watch = LoopWatch(loop, lambda held_s: None)
    watch.stop()
    watch.start()
    watch.stop()
    watch.stop()
    assert [handle.cancelled for _, _, handle in loop.calls] == [True]
    watch.start()
    assert len(loop.calls) == 2


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_step_that_holds_a_real_loop_is_seen(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def hold() -> float:
        loop = asyncio.get_running_loop()
        seen: asyncio.Future[None] = loop.create_future()

        def observe(held_s: float) -> None:
            if held_s > 0.025 and not seen.done():
                seen.set_result(None)

        watch = LoopWatch(loop, observe)
        watch.start()
        await asyncio.sleep(0)
        end = loop.time() + 0.04
        while loop.time() < end:
            pass  # the step that holds the loop
        await asyncio.wait_for(seen, 120)
        watch.stop()
        return watch.longest_s

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(hold()) > 0.025
