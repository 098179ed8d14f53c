"""The simulator's comparison of the machine with the oracle, entry by entry."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chaos.sim.checks.book import PromiseBook
from chaos.sim.checks.fatebook import FateBook
from chaos.sim.checks.keybook import TimerName
from chaos.sim.world.referee import Broken
from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import START_MS, Log, machine_on, part_of, u64
from timer.entries.payloads import GroupOp, Op
from timer.entries.policies import CLUSTER
from timer.model.columns import RequestId
from timer.model.units import GroupId, TopicId, UnixMs
from timer.ready.topic import Topic
from timer.state.apply_results import ALREADY_FIRED, CANCELLED, Applied

DUE = START_MS + 1_000
TTL_MS = 1_000


class Pages:
    """A log, a machine, and the book that compares it with the oracle."""

    def __init__(self, **policy: Any) -> None:
        self.log, self.machine, self.book = Log(), machine_on(SimDisk(), leads=False), FateBook()
        self.read = 0
        for name in ("a", "b"):
            self.log.topic(name)
        self.log.create_group(1, "g")
        self.log.op(Op.RESERVE, 1, 1, [10])
        self.policy(**policy)
        self.log.schedule(part_of([(1, DUE, b"x"), (2, DUE, b"y"), (1, DUE + 1, b"z")]))
        self.go_on()

    def policy(self, **said: Any) -> None:
        if said:
            self.log.policy(CLUSTER, **said)

    def go_on(self, change: Callable[[Applied], Applied] = lambda applied: applied) -> None:
        """Apply the new entries; the last one's result is changed."""
        new = self.log.entries[self.read :]
        self.read = len(self.log.entries)
        for entry in new:
            self.book.on_commit(entry)
            applied = self.machine.apply(entry)
            last = entry is new[-1]
            self.book.check(entry, change(applied) if last else applied, self.machine)

    def op(self, op: Op, group: int, *offsets: int, after_ms: int = 0) -> None:
        self.log.now_ms = DUE + after_ms
        self.log.op(op, 1, group, offsets)
        self.go_on()


def _trim_all_the_same(topic: Topic) -> None:
    """Delete messages that all groups have acked, though the topic retains them."""
    if topic.groups:
        topic.queue.drop_below(topic.unacked_from)


def broken(checker: str, pages: Pages, change: Callable[[Any], Any]) -> str:
    """Return the detail of what a checker finds in a changed result."""
    with pytest.raises(Broken) as found:
        pages.go_on(change)
    assert found.value.checker == checker
    return str(found.value)


def test_machine_that_does_the_same_is_fine() -> None:
    pages = Pages()
    pages.log.cancel([(DUE, 1), (DUE, 1), (DUE, 99)])
    pages.log.fire(DUE)
    pages.log.delete_topic(1)
    pages.log.op(Op.EXPIRE_BELOW, 1, 0, [1])  # without effect
    pages.log.checkpoint()
    pages.go_on()
    pages.book.at_end()
    assert pages.book.gone == {3}
    assert pages.book.fired_before(pages.machine) == 0
    assert pages.book.queues == {2: [TimerName(DUE, 2)]}


def test_deletion_ends_all_pending_timers_of_its_topic() -> None:
    pages = Pages()
    pages.log.delete_topic(1)
    assert "1 of 2" in broken("dropped", pages, lambda applied: replace(applied, dropped=1))


def test_cancel_of_a_timer_that_went_with_its_topic_finds_nothing() -> None:
    pages = Pages()
    pages.log.delete_topic(1)
    pages.log.cancel([(DUE, 1)])
    cancelled = np.array([CANCELLED], np.uint8)
    broken("dropped", pages, lambda applied: replace(applied, results=cancelled))


def test_cancel_finds_a_held_timer() -> None:
    pages = Pages(paused=True)
    pages.log.fire(DUE)
    pages.log.cancel([(DUE, 1)])
    fired = np.array([ALREADY_FIRED], np.uint8)
    broken("held", pages, lambda applied: replace(applied, results=fired))


def test_paused_topic_does_not_fire() -> None:
    pages, other = Pages(paused=True), Pages()
    for each in (pages, other):
        each.log.fire(DUE)
    fired = other.machine.apply(other.log.entries[-1])
    broken("pause", pages, lambda applied: replace(fired))  # type: ignore[type-var]


def test_resume_that_drops_does_not_fire_what_is_overdue() -> None:
    found = []
    for catch_up in ("all", "drop"):
        pages = Pages(paused=True)
        pages.log.fire(DUE + 5)
        pages.policy(paused=False, catch_up=catch_up)
        pages.log.fire(DUE + 6)
        found.append(pages)
    every, drop = found
    for entry in every.log.entries[every.read :]:
        fired = every.machine.apply(entry)
    broken("drop", drop, lambda applied: replace(fired))  # type: ignore[type-var]


def test_timer_fires_once_and_none_is_missing() -> None:
    pages = Pages()
    pages.log.fire(DUE)
    first = pages.machine
    pages.go_on()
    assert first.counts.fired == 2
    pages.log.fire(DUE + 1)
    again = Pages()
    again.log.fire(DUE + 1)
    twice = again.machine.apply(again.log.entries[-1])
    broken("twice", pages, lambda applied: replace(twice))  # type: ignore[type-var]
    pages = Pages()
    pages.log.fire(DUE)
    broken("conservation", pages, lambda applied: replace(applied, fired=()))


def test_expiry_at_its_time_is_fine_and_a_millisecond_before_is_not() -> None:
    for op, group, offset in ((Op.EXPIRE_BELOW, 0, 1), (Op.EXPIRE, 1, 0)):
        for early in (0, 1):
            pages = Pages(ttl_ms=TTL_MS)
            pages.log.fire(DUE)
            if not early:
                pages.op(op, group, offset, after_ms=TTL_MS)
                continue
            with pytest.raises(Broken, match="ends 0 of a") as found:
                pages.op(op, group, offset, after_ms=TTL_MS - 1)
            assert found.value.checker == "expiry"


@pytest.mark.parametrize("said", [{}, {"ttl_ms": 0}])
def test_nothing_expires_where_no_policy_says_so(said: dict[str, Any]) -> None:
    pages = Pages(**said)
    pages.log.fire(DUE)
    with pytest.raises(Broken, match="lives"):
        pages.op(Op.EXPIRE_BELOW, 0, 1, after_ms=10 * TTL_MS)


def test_request_that_is_twice_in_one_entry_repeats_itself_there() -> None:
    pages = Pages()
    request = RequestId(b"r", 1, UnixMs(START_MS + 100))
    part = replace(part_of([(1, DUE, b"x")]), request=request)
    pages.log.schedule(part, part)
    pages.go_on()
    assert pages.book.story.intake.repeats == [False, True]
    pages.log.schedule(part)
    with pytest.raises(Broken, match="repeated True"):
        pages.go_on(lambda applied: replace(applied, parts=(pages.machine,)))  # type: ignore[type-var]


def test_ack_counts_if_it_is_in_the_log_before_the_expiry() -> None:
    pages = Pages(ttl_ms=TTL_MS)
    pages.log.fire(DUE + 1)
    pages.op(Op.ACK, 1, 0)
    pages.op(Op.EXPIRE_BELOW, 0, 2, after_ms=TTL_MS + 1)
    pages.op(Op.ACK, 1, 1, after_ms=TTL_MS + 1)
    book = PromiseBook(fates=pages.book)
    book.check_ack((1, 0), counts=True)
    book.check_ack((1, 1), counts=False)
    with pytest.raises(Broken, match="it had expired"):
        book.check_ack((1, 1), counts=True)


def test_message_that_is_let_go_is_acked_and_not_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    for retention_ms in (0, TTL_MS):
        pages = Pages(retention_ms=retention_ms)
        pages.log.fire(DUE)
        pages.go_on()
        if not retention_ms:
            pages.op(Op.ACK, 1, 0)
            continue
        monkeypatch.setattr(Topic, "trim", _trim_all_the_same)
        with pytest.raises(Broken) as found:
            pages.op(Op.ACK, 1, 0)
        assert found.value.checker == "retention"


def test_groups_that_are_deleted_together_had_acked_what_went_with_the_first() -> None:
    pages = Pages()
    pages.log.fire(DUE + 1)
    pages.log.create_group(1, "h")
    pages.log.op(Op.RESERVE, 1, 2, [10])
    pages.op(Op.ACK, 2, 0, 1)
    pages.log.group(*(GroupOp(Op.DELETE, TopicId(1), GroupId(each), u64([])) for each in (1, 2)))
    pages.go_on()
    assert pages.machine.topics[TopicId(1)].queue.begin == 2
