"""Deadlines that share timers of the event loop."""

import asyncio
import gc
import weakref

from timerclient.streams.shared_deadlines import Deadline, Deadlines


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


async def test_each_item_expires_at_its_deadline_and_not_before() -> None:
    expired = Expired("late")
    deadlines = Deadlines(expired.expire)
    began_s = asyncio.get_running_loop().time()
    for name, within_s in {"late": 0.06, "soon": 0.03, "past": -60.0, "now": 0.0}.items():
        deadlines.add(name, within_s)
    await expired.all_came.wait()
    assert expired == ["past", "now", "soon", "late"]
    assert expired.at_s["soon"] - began_s >= 0.03
    assert expired.at_s["late"] - began_s >= 0.06


async def test_removed_items_do_not_expire_and_leave_no_timer() -> None:
    expired = Expired("kept")
    deadlines = Deadlines(expired.expire)
    deadline = deadlines.add("removed", 0.02)
    deadline.remove("removed")
    deadline.remove("removed")
    deadlines.add("kept", 0.04)
    await expired.all_came.wait()
    assert expired == ["kept"]
    deadline = deadlines.add("far", 3600.0)
    deadline.remove("far")
    reference = weakref.ref(deadlines)
    del deadlines, deadline
    gc.collect()
    assert reference() is None, "a timer of the loop keeps it"


async def test_item_that_expires_may_remove_and_add_others() -> None:
    expired = Expired("added")
    removed: list[Deadline[str]] = []

    def expire(name: str) -> None:
        expired.expire(name)
        if name == "first":
            removed[0].remove("removed")  # its deadline is the same
            deadlines.add("added", -1.0)

    deadlines = Deadlines(expire)
    deadlines.add("first", 0.0)
    removed.append(deadlines.add("removed", 0.0))
    await expired.all_came.wait()
    assert expired == ["first", "added"]
