"""Time to live and retention in the simulator: worlds with them, and errors that the book finds."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from chaos.sim.checks.expirybook import ExpiryBook
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.referee import Broken
from chaos.sim.world.simdisk import SimDisk
from tests.chaos.planted.planted import calm
from tests.timer.machines import START_MS, Log, machine_on, part_of, u64
from timer.entries.payloads import GroupOp, Op
from timer.model.units import GroupId, TopicId

TTL_MS = 1_000


@pytest.mark.parametrize("seed", range(2))
def test_messages_expire_and_are_retained_while_policies_change(seed: int) -> None:
    world = TimerWorld(seed, options=calm(seed).aim(expiry=True, proposals_per_s=8))
    world.run(30)
    book = world.town.book.expiry
    assert min(book.expired, book.retained, len(book.acked)) > 10


@dataclass
class Story:
    """A log with one topic, one group and three messages, and the book that checks it."""

    said: dict[str, Any] = field(default_factory=lambda: {"ttl_ms": TTL_MS})

    def __post_init__(self) -> None:
        self.book = ExpiryBook(lambda index, topic: self.said)
        self.log, self.machine = Log(), machine_on(SimDisk(), leads=False)
        self.log.topic("t")
        self.log.create_group(1, "g")
        self.log.op(Op.RESERVE, 1, 1, [10])
        self.log.schedule(part_of([(1, START_MS + n, b"m") for n in range(3)]))
        self.log.fire(START_MS + 10)
        self.read()

    def read(self) -> None:
        for entry in self.log.entries[self.machine.applied_index :]:
            self.book.on_commit(entry)
            self.machine.apply(entry)
            self.book.applied(entry, self.machine)

    def op(self, op: Op, group: int, *offsets: int, after_ms: int = 0) -> None:
        self.log.now_ms = START_MS + after_ms
        self.log.op(op, 1, group, offsets)
        self.read()


def test_expiry_at_its_time_is_fine_and_a_millisecond_before_is_not() -> None:
    Story().op(Op.EXPIRE_BELOW, 0, 2, after_ms=TTL_MS + 1)
    with pytest.raises(Broken, match="ends 1 of t") as broken:
        Story().op(Op.EXPIRE_BELOW, 0, 2, after_ms=TTL_MS)
    assert broken.value.checker == "expiry"
    Story().op(Op.EXPIRE, 1, 2, after_ms=TTL_MS + 2)
    with pytest.raises(Broken, match="ends 2 of t"):
        Story().op(Op.EXPIRE, 1, 2, after_ms=TTL_MS + 1)


def test_nothing_expires_where_no_policy_says_so() -> None:
    for said in ({}, {"ttl_ms": 0}):
        with pytest.raises(Broken, match="lives"):
            Story(said).op(Op.EXPIRE_BELOW, 0, 1, after_ms=10 * TTL_MS)


def test_ack_counts_if_it_is_in_the_log_before_the_expiry() -> None:
    story = Story()
    story.op(Op.ACK, 1, 0)
    story.op(Op.EXPIRE_BELOW, 0, 2, after_ms=TTL_MS + 1)
    story.op(Op.ACK, 1, 1, after_ms=TTL_MS + 1)
    story.book.told_acked("g#1", 0)
    with pytest.raises(Broken, match="it had expired"):
        story.book.told_acked("g#1", 1)
    assert [story.book.is_over(1, 1, offset) for offset in range(3)] == [True, True, False]


def test_what_is_let_go_is_acked_and_not_retained() -> None:
    story = Story({"retention_ms": TTL_MS})
    with pytest.raises(Broken) as broken:
        story.op(Op.ACK, 1, 0)  # the machine knows of no policy
    assert broken.value.checker == "retention"
    Story({"retention_ms": TTL_MS}).op(Op.ACK, 1, 0, after_ms=TTL_MS)


def test_groups_that_are_deleted_together_had_acked_what_went_with_the_first() -> None:
    story = Story({})
    story.log.create_group(1, "h")
    story.log.op(Op.RESERVE, 1, 2, [10])
    story.op(Op.ACK, 2, 0, 1)
    story.log.group(*(GroupOp(Op.DELETE, TopicId(1), GroupId(each), u64([])) for each in (1, 2)))
    story.read()
    assert story.machine.topics[TopicId(1)].queue.begin == 2
