"""The timer that wakes the state plane."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from cluster.state.alarm import Alarm

FAR_MS = 10**7


def ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class Rung:
    """When an alarm rang."""

    def __init__(self) -> None:
        self.at_ms: list[int] = []
        self.alarm = Alarm(self._ring)
        self._event = asyncio.Event()

    def _ring(self) -> None:
        self.at_ms.append(ms())
        self._event.set()

    async def wait(self) -> int:
        await asyncio.wait_for(self._event.wait(), 60)
        self._event.clear()
        return self.at_ms[-1]


@pytest.fixture
async def rung() -> AsyncIterator[Rung]:
    rung = Rung()
    yield rung
    rung.alarm.close()


@pytest.mark.parametrize("wait_ms", [0, 1, 2, 20, 1_100])
async def test_alarm_never_rings_early(rung: Rung, wait_ms: int) -> None:
    for _ in range(5 if wait_ms < 1000 else 1):
        began_ms = ms()
        rung.alarm.set_in(wait_ms)
        assert await rung.wait() >= began_ms + wait_ms


async def test_later_order_replaces_the_earlier_one(rung: Rung) -> None:
    rung.alarm.set_in(1)
    rung.alarm.set_in(FAR_MS)
    other = Rung()
    other.alarm.set_in(20)
    await other.wait()
    other.alarm.close()
    assert rung.at_ms == []
    rung.alarm.set_in(0)
    await rung.wait()


async def test_alarm_that_expired_and_was_set_anew_does_not_ring(rung: Rung) -> None:
    rung.alarm.set_in(0)
    rung.alarm.set_in(FAR_MS)
    rung.alarm._expired()
    assert rung.at_ms == []


async def test_closed_alarm_does_not_ring(rung: Rung) -> None:
    other = Rung()
    other.alarm.set_in(0)
    other.alarm.close()
    rung.alarm.set_in(5)
    await rung.wait()
    assert other.at_ms == []
