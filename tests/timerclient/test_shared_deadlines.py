"""Deadlines that share timers of the event loop."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from timerclient.streams.shared_deadlines import SharedDeadlines, SharedTimer


class Expired(list[str]):
    """The names that expired, in their order."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self._last, self.at_s, self.all_came = last, dict[str, float](), asyncio.Event()

    def expire(self, name: str) -> None:
        self.append(name)
        self.at_s[name] = asyncio.get_running_loop().time()
        if name == self._last:
            self.all_came.set()


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the times of the timers that the loop gets."""
    loop = asyncio.get_running_loop()
    at_s, call_at = list[float](), loop.call_at

    def noted(when: float, *args: Any, **more: Any) -> asyncio.TimerHandle:
        at_s.append(when)
        return call_at(when, *args, **more)

    monkeypatch.setattr(loop, "call_at", noted)
    return at_s


async def test_each_item_expires_at_its_deadline_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expired = Expired("late")
    deadlines = SharedDeadlines(expired.expire)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with monkeypatch.context() as still:  # a pause between two of them would change their order
        still.setattr(loop, "time", lambda: began_s)
        for name, within_s in {"late": 0.06, "soon": 0.03, "past": -60.0, "now": 0.0}.items():
            deadlines.add(name, within_s)
    await expired.all_came.wait()
    assert expired == ["past", "now", "soon", "late"]
    assert expired.at_s["soon"] - began_s >= 0.03
    assert expired.at_s["late"] - began_s >= 0.06


async def test_items_share_a_timer_that_rings_at_most_ten_milliseconds_late(
    timers: list[float],
) -> None:
    deadlines = SharedDeadlines[int](lambda _: None)
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    waits = {deadlines.add(number, 60.0) for number in range(1_000)}
    took_s = loop.time() - before_s
    assert len(waits) == len(timers) <= took_s / 0.01 + 2
    assert before_s + 60 <= min(timers) <= max(timers) <= before_s + took_s + 60.01


async def test_removed_items_do_not_expire_and_leave_no_timer() -> None:
    expired = Expired("kept")
    deadlines = SharedDeadlines(expired.expire)
    timer = deadlines.add("removed", 0.02)
    timer.remove("removed")
    timer.remove("removed")
    deadlines.add("kept", 0.04)
    await expired.all_came.wait()
    assert expired == ["kept"]
    timer = deadlines.add("far", 3600.0)
    timer.remove("far")
    reference = weakref.ref(deadlines)
    del deadlines, timer
    gc.collect()
    assert reference() is None, "a timer of the loop keeps it"


async def test_item_that_expires_may_remove_and_add_others_and_may_fail() -> None:
    expired = Expired("again")
    removed: list[SharedTimer[str]] = []
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, why: told.append(why["message"]))

    def expire(name: str) -> None:
        expired.expire(name)
        if name == "first":
            removed[0].remove("removed")  # its timer is the same
            deadlines.add("again", 0.0)  # perhaps in the same step
            raise RuntimeError("a bug")

    deadlines = SharedDeadlines(expire)
    deadlines.add("first", 0.0)
    removed.append(deadlines.add("removed", 0.0))
    deadlines.add("other", 0.0)
    await expired.all_came.wait()
    assert expired == ["first", "other", "again"]
    assert told == ["a deadline failed"]
