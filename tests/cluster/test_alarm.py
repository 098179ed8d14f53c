"""The timers that wake the state plane."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from cluster.state.alarm import Alarm, KernelAlarm, LoopAlarm

Run = Callable[[Coroutine[Any, Any, None]], None]
FAR_MS = 10**7


@pytest.fixture(params=[asyncio.run, uvloop.run])
def run(request: pytest.FixtureRequest) -> Run:
    runner: Run = request.param
    return runner


@pytest.fixture(params=[LoopAlarm, KernelAlarm])
def make(request: pytest.FixtureRequest) -> Callable[..., Alarm]:
    made: Callable[..., Alarm] = request.param
    return made


def ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class Rung:
    """When an alarm rang."""

    def __init__(self, make: Callable[..., Alarm]) -> None:
        self.at_ms: list[int] = []
        self.alarm = make(self._ring)
        self._event = asyncio.Event()

    def _ring(self) -> None:
        self.at_ms.append(ms())
        self._event.set()

    async def wait(self) -> int:
        await asyncio.wait_for(self._event.wait(), 60)
        self._event.clear()
        return self.at_ms[-1]


def test_kernel_alarm_never_rings_early(run: Run) -> None:
    async def play() -> None:
        rung = Rung(KernelAlarm)
        for wait_ms in (0, 0, 1, 1, 2, 2, 20, 1_100):
            began_ms = ms()
            rung.alarm.set_in(wait_ms)
            assert await rung.wait() >= began_ms + wait_ms
        rung.alarm.close()

    run(play())


def test_later_order_replaces_the_earlier_one(run: Run, make: Callable[..., Alarm]) -> None:
    async def play() -> None:
        rung, other = Rung(make), Rung(make)
        rung.alarm.set_in(1)
        rung.alarm.set_in(FAR_MS)
        other.alarm.set_in(20)
        await other.wait()
        assert rung.at_ms == []
        rung.alarm.set_in(0)
        await rung.wait()
        for each in (rung, other):
            each.alarm.close()

    run(play())


def test_closed_alarm_does_not_ring(run: Run, make: Callable[..., Alarm]) -> None:
    async def play() -> None:
        rung, other = Rung(make), Rung(make)
        other.alarm.set_in(0)
        other.alarm.close()
        rung.alarm.set_in(5)
        await rung.wait()
        rung.alarm.close()
        assert other.at_ms == []

    run(play())


async def test_kernel_alarm_that_expired_and_was_set_anew_does_not_ring() -> None:
    ignored = list[int]()
    alarm = KernelAlarm(lambda: ignored.append(1))
    alarm.set_in(0)
    alarm.set_in(FAR_MS)
    alarm._on_expiry()
    assert ignored == []
    alarm.close()
    with pytest.raises(OSError, match="timerfd"):
        alarm.set_in(1)
