"""The live audit's judge: planted events, the alerts that follow, and nothing else."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from chaos.live import exported_events
from chaos.live.exported_events import EventKind
from chaos.live.judge import CHUNK_BITS, Alert, Judge, JudgeState, WitnessReach
from chaos.live.standing import Standing, Standings, TopicPause

NOW = 1_700_000_000_000
OVERDUE_MS = 5_000
HORIZON_MS = 60_000


class Court:
    """A judge with a shelf in memory; every step goes through the bytes that Spark would keep."""

    def __init__(self, overdue_ms: int = OVERDUE_MS) -> None:
        self.overdue_ms = overdue_ms
        self.chunks: dict[int, bytes] = {}
        self.head = JudgeState().dumps()
        self.told: list[Any] = []
        self.last_seq = 0
        self.index = 0

    def get(self, chunk: int) -> bytes | None:
        return self.chunks.get(chunk)

    def put(self, chunk: int, rows: bytes) -> None:
        self.chunks[chunk] = rows

    def remove(self, chunk: int) -> None:
        del self.chunks[chunk]

    def step(self) -> list[Alert]:
        table = (
            pa.concat_tables(self.told) if self.told else exported_events.rows(EventKind.CLOCK, 0)
        )
        self.told.clear()
        columns = {n: table[n].to_numpy(zero_copy_only=False) for n in table.column_names}
        judge = Judge(
            JudgeState.loads(self.head), self, overdue_ms=self.overdue_ms, horizon_ms=HORIZON_MS
        )  # fmt: skip
        alerts = judge.step(columns)
        self.head = judge.head.dumps()
        return alerts

    def kinds(self) -> list[tuple[str, int]]:
        return [(alert.kind, alert.seq) for alert in self.step()]

    def schedule(
        self, seq: int, due_ms: int, *, at_ms: int = NOW, topic: str = "t", number: int = 0
    ) -> None:
        self.last_seq = max(self.last_seq, seq)
        self.tell(
            EventKind.SCHEDULED, seq=seq, due_ms=due_ms, at_ms=at_ms, topic=topic, topic_id=number
        )

    def give(
        self, seq: int, due_ms: int, *, offset: int = 0, fired_ms: int | None = None,
        handed_out_ms: int = 0,
    ) -> None:  # fmt: skip
        fired_at_ms = due_ms if fired_ms is None else fired_ms
        self.tell(
            EventKind.GIVEN, seq=seq, due_ms=due_ms, at_ms=fired_at_ms + 1, topic="t",
            queue_offset=offset or seq, fired_at_ms=fired_at_ms,
            handed_out_ms=handed_out_ms or fired_at_ms + 1,
        )  # fmt: skip

    def of_topic(self, kind: EventKind, at_ms: int, number: int = 1, **columns: Any) -> None:
        self.index += 1
        self.tell(
            kind, topic_id=number, topic="t", at_ms=at_ms, index=self.index, **columns
        )  # fmt: skip

    def clock(self, at_ms: int, *, read_ms: int | None = None, since_ms: int = 0) -> None:
        self.index += 1
        self.tell(
            EventKind.CLOCK, seq=self.last_seq, at_ms=at_ms, index=self.index, since_ms=since_ms,
            read_ms=at_ms if read_ms is None else read_ms, first_seq=1,
        )  # fmt: skip

    def reach(self, read_ms: int, *, at_ms: int = NOW) -> None:
        self.tell(EventKind.REACH, topic="t", read_ms=read_ms, at_ms=at_ms)

    def tell(self, kind: EventKind, **columns: Any) -> None:
        self.told.append(exported_events.rows(kind, **columns))


@pytest.fixture
def court() -> Court:
    """A judge that a witness of topic t talks to."""
    court = Court()
    court.reach(NOW)
    court.clock(NOW)
    assert court.step() == []
    return court


def test_timers_that_come_once_and_in_time_are_fine(court: Court) -> None:
    for seq in range(1, 101):
        court.schedule(seq, NOW + 500 * seq)
    court.clock(NOW + 1)
    assert court.step() == []
    for now_ms in range(NOW, NOW + 2 * HORIZON_MS, 1000):
        for seq in range(1, 101):
            if now_ms - 1000 < NOW + 500 * seq <= now_ms:
                court.give(seq, NOW + 500 * seq)
        court.clock(now_ms)
        court.reach(now_ms)
        assert court.step() == []
    assert court.chunks == {}  # nothing is remembered for ever


def test_timer_that_no_fire_covers_is_lost_when_overdue_by_more_than_the_bound(
    court: Court,
) -> None:
    court.schedule(1, NOW + 100)
    court.clock(NOW + 100 + OVERDUE_MS - 1, read_ms=NOW + 99)
    assert court.kinds() == []
    court.clock(NOW + 100 + OVERDUE_MS, read_ms=NOW + 99)
    assert court.kinds() == [("lost", 1)]
    court.clock(NOW + 3 * OVERDUE_MS, read_ms=NOW + 99)
    assert court.kinds() == []  # told once
    court.give(1, NOW + 100, fired_ms=NOW + 3 * OVERDUE_MS)
    assert court.kinds() == [("late", 1)]


def test_timer_that_fired_and_was_not_given_is_lost_when_the_witness_is_past_it(
    court: Court,
) -> None:
    court.schedule(1, NOW + 100)
    court.clock(NOW + 200)
    court.reach(NOW + 100 + OVERDUE_MS)
    assert court.kinds() == []  # the log was seen to fire it at NOW + 200
    court.reach(NOW + 200 + OVERDUE_MS)
    assert court.kinds() == []  # the log's clock stands: perhaps nobody leads
    court.clock(NOW + 200 + OVERDUE_MS)
    assert court.kinds() == [("lost", 1)]


def test_outage_before_what_was_fired_is_given_is_not_a_loss(court: Court) -> None:
    court.schedule(1, NOW + 100)
    court.clock(NOW + 200)  # a FIRE covers it; then its leader dies
    court.reach(NOW + 60_000)
    assert court.step() == []
    court.clock(NOW + 60_500, since_ms=NOW + 60_400)
    court.reach(NOW + 60_400 + OVERDUE_MS - 1)
    assert court.step() == []
    court.clock(NOW + 60_400 + OVERDUE_MS, since_ms=NOW + 60_400)
    court.reach(NOW + 60_400 + OVERDUE_MS)
    assert court.kinds() == [("lost", 1)]


def test_outage_is_not_a_loss(court: Court) -> None:
    court.schedule(1, NOW + 100)
    court.clock(NOW + 50)
    assert court.step() == []
    # Nobody leads for a minute: the log's clock stands, the idle witness's goes on.
    court.reach(NOW + 60_000)
    assert court.step() == []
    court.clock(NOW + 61_000, read_ms=NOW + 50, since_ms=NOW + 60_900)  # a leader; no FIRE yet
    court.reach(NOW + 61_000)
    assert court.step() == []
    court.clock(NOW + 61_200, since_ms=NOW + 60_900)
    court.reach(NOW + 61_300)
    assert court.step() == []
    court.give(1, NOW + 100, fired_ms=NOW + 61_200)
    assert court.step() == []


def test_backlog_that_the_witness_is_working_off_is_not_a_loss(court: Court) -> None:
    for seq in range(1, 61):
        court.schedule(seq, NOW + 1000 * seq)
    court.clock(NOW + 100_000)
    assert court.step() == []
    for seq in range(1, 61):
        court.give(seq, NOW + 1000 * seq, fired_ms=NOW + 100_000)
        court.reach(NOW + 1000 * seq, at_ms=NOW + 100_000 + 500 * seq)
        court.clock(NOW + 100_000 + 500 * seq)
        assert court.step() == []


@pytest.mark.parametrize("apart", [False, True])
def test_second_queue_offset_is_a_duplicate(court: Court, *, apart: bool) -> None:
    court.schedule(1, NOW + 100)
    court.give(1, NOW + 100, offset=7)
    court.clock(NOW + 200)
    if apart:
        assert court.kinds() == []
    court.give(1, NOW + 100, offset=7)  # a redelivery
    court.give(1, NOW + 100, offset=8)
    court.give(1, NOW + 100, offset=9)
    assert court.kinds() == [("duplicate", 1)]
    court.give(1, NOW + 100, offset=9)
    assert court.kinds() == []


def test_second_firing_after_the_first_was_forgotten_is_a_duplicate(court: Court) -> None:
    court.schedule(1, NOW + 100)
    court.give(1, NOW + 100, offset=7)
    court.clock(NOW + 200)
    assert court.kinds() == []
    later_ms = NOW + 2 * HORIZON_MS
    court.clock(later_ms)
    assert court.kinds() == []
    assert court.chunks == {}
    court.give(1, NOW + 100, offset=7)  # a redelivery of the first
    assert court.kinds() == []
    court.give(1, NOW + 100, offset=9, fired_ms=later_ms)
    assert court.kinds() == [("duplicate", 1)]
    court.give(1, NOW + 100, offset=9, fired_ms=later_ms)
    assert court.kinds() == []


def test_timer_that_fired_before_its_due_time_is_early(court: Court) -> None:
    court.schedule(1, NOW + 100)
    court.give(1, NOW + 100, fired_ms=NOW + 99)
    court.clock(NOW + 200)
    assert court.kinds() == [("early", 1)]
    court.clock(NOW + 300)
    assert court.kinds() == []


def test_cancelled_timer_must_not_come_and_is_not_missed(court: Court) -> None:
    for seq in (1, 2, 3):
        court.schedule(seq, NOW + 100)
        court.tell(EventKind.CANCELLED, seq=seq, due_ms=NOW + 100 + (seq == 3), at_ms=NOW)
    court.give(2, NOW + 100)
    court.clock(NOW + 100 + OVERDUE_MS)
    assert court.kinds() == [("cancelled", 2)]
    court.clock(NOW + 200 + 3 * OVERDUE_MS)
    court.reach(NOW + 200 + 3 * OVERDUE_MS)
    assert court.kinds() == [("lost", 3)]  # that cancel was of another id


def test_cancel_that_may_have_come_too_late_excuses_both(court: Court) -> None:
    for seq in (1, 2):
        court.schedule(seq, NOW + 100)
        court.tell(EventKind.RACED, seq=seq, due_ms=NOW + 100, at_ms=NOW + 100)
    court.give(2, NOW + 100)
    court.clock(NOW + 200)
    court.reach(NOW + 200 + 3 * OVERDUE_MS)
    assert court.kinds() == []


def test_given_before_the_log_was_exported_waits_for_it(court: Court) -> None:
    court.give(1, NOW + 100)
    court.give(2, NOW + 100)
    court.clock(NOW + 200)
    assert court.kinds() == []
    court.schedule(1, NOW + 100)
    court.schedule(2, NOW + 101 + (1 << CHUNK_BITS))
    court.clock(NOW + 300)
    assert court.kinds() == [("diverged", 2)]  # the log has it with another due time
    court.clock(NOW + 400)
    assert court.kinds() == []


def test_topic_without_a_witness_is_judged_by_the_log() -> None:
    court = Court()
    court.clock(NOW)
    court.schedule(1, NOW + 100, topic="other")
    court.schedule(2, NOW + 100, topic="other")
    court.clock(NOW + 101)
    court.schedule(3, NOW + 500, topic="other")
    court.clock(NOW + 500 + OVERDUE_MS, read_ms=NOW + 499)
    assert court.kinds() == [("lost", 3)]
    court.clock(NOW + 600 + 2 * OVERDUE_MS)
    assert court.kinds() == [("late", 3)]
    court.clock(NOW + 600 + 3 * HORIZON_MS)
    assert court.kinds() == []
    assert court.chunks == {}


def test_what_fired_before_the_witness_came_is_not_missed() -> None:
    court = Court()
    court.schedule(1, NOW + 100)
    court.clock(NOW + 200)
    assert court.step() == []
    court.reach(NOW + 300, at_ms=NOW + 300)
    court.reach(NOW + 10 * OVERDUE_MS, at_ms=NOW + 10 * OVERDUE_MS)
    court.clock(NOW + 10 * OVERDUE_MS)
    assert court.kinds() == []


def test_node_that_holds_something_else_is_told_of(court: Court) -> None:
    court.tell(EventKind.DIVERGED, node="n2", index=7, detail="crc")
    (alert,) = court.step()
    assert (alert.kind, alert.detail) == ("diverged", "n2 at 7: crc")


def test_head_comes_back_as_it_was_put_down() -> None:
    standing = Standing(deleted_ms=7, pauses=[TopicPause(1), TopicPause(5, catch_up="drop")])
    head = JudgeState(
        clock_ms=5, topics=[(0, "a"), (1, "é")], standings=Standings({1: standing}),
        reaches={"a": WitnessReach(1, 2)}, fires=[(1, 2)], visits={3: 4, 5: 1 << 60},
    )  # fmt: skip
    assert JudgeState.loads(head.dumps()) == head


def test_any_order_and_grouping_of_honest_events_raises_nothing() -> None:
    chance = np.random.default_rng(3)
    for _ in range(4):
        court = Court()
        court.reach(NOW)
        court.clock(NOW)
        due = {seq: NOW + int(chance.integers(-2000, 60_000)) for seq in range(1, 200)}
        cancelled = {seq for seq in due if chance.random() < 0.1}
        steps = sorted(chance.integers(NOW, NOW + 90_000, 60).tolist())
        before = NOW
        next_seq = 1
        for now_ms in steps:
            for seq in range(next_seq, min(next_seq + 10, 200)):
                due[seq] = max(due[seq], now_ms - 2000)
                court.schedule(seq, due[seq], at_ms=now_ms)
                if seq in cancelled:
                    kind = EventKind.CANCELLED if due[seq] > now_ms else EventKind.RACED
                    court.tell(kind, seq=seq, due_ms=due[seq], at_ms=now_ms)
                elif due[seq] <= now_ms:
                    court.give(seq, due[seq], fired_ms=now_ms)
            for seq in range(1, next_seq):
                if before < due[seq] <= now_ms and seq not in cancelled:
                    court.give(seq, due[seq], fired_ms=now_ms)
            next_seq, before = min(next_seq + 10, 200), now_ms
            court.clock(now_ms)
            court.reach(now_ms, at_ms=now_ms)
            order = chance.permutation(len(court.told))
            court.told = [court.told[at] for at in order]
            assert court.step() == []
