"""The live audit's judge: logs with a witness's messages, the violations, and no others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.live.follow import Divergence
from chaos.live.judge import GIVEN, WITNESS_GROUP, Judge, Violation
from tests.chaos import world
from tests.chaos.world import by_id
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import GroupOp, GroupStart, Op
from timer.entries.policies import CLUSTER, Scope, ScopePolicy, encode_policy
from timer.entries.series_payloads import CreateSeries
from timer.model.columns import OnConflict
from timer.model.recurrence import SeriesSpec
from timer.model.units import LogIndex, TopicId, UnixMs

NOW = 1_000_000
OVERDUE_MS = 5_000
HORIZON_MS = 60_000
FIRST = np.zeros(1, np.uint64)


class Court:
    """A judge, and a log with topic `t` that a witness reads."""

    def __init__(self, *, watched: bool = True) -> None:
        self.log = world.Log()
        self.log.epoch(1, at_ms=NOW)
        self.topic = self.log.topic("t")
        if watched:
            self.group = self.log.group(self.topic, WITNESS_GROUP)
        self.given: dict[str, list[tuple[int, ...]]] = {}
        self.reaches: dict[str, int] = {}
        self.judge = Judge(Path(), overdue_ms=OVERDUE_MS, horizon_ms=HORIZON_MS)
        self._taken = 0
        self._raised = set[tuple[str, int]]()

    def policy(self, scope: Scope = CLUSTER, **fields: Any) -> None:
        self.log.entry(EntryKind.POLICY, encode_policy(scope, ScopePolicy(**fields)))

    def give(
        self, seq: int, due_ms: int, offset: int, *,
        fired_ms: int | None = None, out_ms: int = 0, topic: str = "t",
    ) -> None:  # fmt: skip
        fired_at_ms = due_ms if fired_ms is None else fired_ms
        row = seq, due_ms, offset, fired_at_ms, out_ms or fired_at_ms
        self.given.setdefault(topic, []).append(row)

    def pass_to(self, at_ms: int, *, reach_ms: int | None = None) -> None:
        """Let the log's clock and the witness move on."""
        self.log.idle(at_ms)
        self.reaches["t"] = at_ms if reach_ms is None else reach_ms

    def step(self) -> list[Violation]:
        """Return the violations that were not returned before."""
        frames = self.log.frames[self._taken :]
        self._taken += len(frames)
        self.judge.apply(frames)
        given = {topic: np.array(rows, GIVEN) for topic, rows in self.given.items()}
        self.given.clear()
        found = self.judge.violations(given, self.reaches)
        new = [each for each in found if (each.kind, each.seq) not in self._raised]
        self._raised |= {(each.kind, each.seq) for each in new}
        return new

    def kinds(self) -> list[tuple[str, int]]:
        return [(each.kind, each.seq) for each in self.step()]


@pytest.fixture
def court() -> Court:
    return Court()


def fired(court: Court, count: int = 3) -> None:
    """Schedule timers 1, 2, … a second apart, and fire them in time."""
    due = [(NOW + 1000 * at, at) for at in range(1, count + 1)]
    court.log.schedule(court.topic, due, at_ms=NOW)
    for due_ms, _ in due:
        court.log.fire(due_ms)


def test_messages_in_time_are_fine_and_are_forgotten(court: Court) -> None:
    for number in range(1, 151):
        due_ms = NOW + 1000 * number
        court.log.schedule(court.topic, [(due_ms, number)])
        court.log.fire(due_ms)
        court.log.reserve(court.topic, court.group, number)
        court.give(number, due_ms, number - 1)
        court.pass_to(due_ms + 10)
        court.log.ack(court.topic, court.group, [number - 1], at_ms=due_ms + 20)
        assert court.step() == []
    rows = court.judge._queues[court.topic].rows
    assert rows["seq"].tolist() == [*range(90, 151)]


def test_message_is_lost_once_the_witness_and_the_leader_had_the_time(court: Court) -> None:
    fired(court)
    for seq in (1, 3):
        court.give(seq, NOW + 1000 * seq, seq - 1)
    court.pass_to(NOW + 2000 + OVERDUE_MS, reach_ms=NOW + 1999 + OVERDUE_MS)
    assert court.step() == []
    court.pass_to(NOW + 2000 + OVERDUE_MS)
    [lost] = court.step()
    assert lost[:4] == ("lost", 2, "t", NOW + 2000)
    court.give(2, NOW + 2000, 1)
    court.pass_to(NOW + 60_000)
    assert court.kinds() == [("delivered_late", 2)]


def test_message_of_a_topic_with_a_rate_is_not_lost(court: Court) -> None:
    court.policy(group_rate_max=1)
    fired(court, 1)
    court.pass_to(NOW + 9000)
    assert court.step() == []


def test_occurrence_is_judged_as_a_timer_and_its_series_has_no_growing_record(court: Court) -> None:
    spec = SeriesSpec(every_ms=1000, start_ms=NOW + 1000)
    court.log.series(CreateSeries(court.topic, b"a", spec, UnixMs(NOW)), at_ms=NOW)
    court.log.occurrence(1, 1, NOW + 1000, NOW + 1000)
    court.log.fire(NOW + 1000)
    court.pass_to(NOW + 9000)
    assert court.kinds() == [("lost", 1)]
    series = court.judge.story.series
    assert (len(series.series), series.rows, series.changes) == (1, [], [])


def test_acked_message_that_the_witness_did_not_receive_is_lost(court: Court) -> None:
    fired(court, 1)
    court.log.reserve(court.topic, court.group, 1)
    court.log.ack(court.topic, court.group, [0])
    court.pass_to(NOW + 9000)
    assert court.kinds() == [("lost", 1)]


def test_new_leader_has_its_time(court: Court) -> None:
    fired(court, 1)
    court.log.schedule(court.topic, [(NOW + 1500, 2)])
    court.log.epoch(2)
    court.reaches["t"] = NOW + 60_000
    assert court.step() == []
    court.log.entry(EntryKind.CHECKPOINT, b"", at_ms=NOW + 20_000)
    for at_ms in (NOW + 20_000, NOW + 19_999 + OVERDUE_MS):
        court.pass_to(at_ms, reach_ms=NOW + 60_000)
        assert court.step() == []
    court.pass_to(NOW + 20_000 + OVERDUE_MS)
    assert court.kinds() == [("lost", 1), ("late", 2)]


def test_timer_that_no_fire_covers_is_late_once() -> None:
    court = Court(watched=False)
    court.log.schedule(court.topic, [(NOW + 1000, 1), (NOW + 90_000, 2)], at_ms=NOW)
    court.log.schedule(court.topic, [(NOW + 1000, 3)], at_ms=NOW + 4000)
    court.pass_to(NOW + 1000 + OVERDUE_MS)
    assert court.kinds() == [("late", 1)]
    court.pass_to(NOW + 4000 + OVERDUE_MS)
    assert court.kinds() == [("late", 3)]
    court.log.fire(NOW + 20_000)
    court.pass_to(NOW + 60_000)
    assert court.step() == []


@pytest.mark.parametrize("jump_ms", [OVERDUE_MS + 1, 120_000])
def test_timer_is_not_late_because_the_logs_clock_jumped(court: Court, jump_ms: int) -> None:
    due_ms = NOW + 2 * jump_ms // 3
    court.log.schedule(court.topic, [(due_ms, 1), (due_ms, 2)], at_ms=NOW)
    court.log.cancel([(due_ms, 2)], at_ms=NOW + jump_ms)
    court.pass_to(NOW + jump_ms - 1 + OVERDUE_MS)
    assert court.step() == []
    court.pass_to(NOW + jump_ms + OVERDUE_MS)
    assert court.kinds() == [("late", 1)]


@pytest.mark.parametrize("gap_ms", [3 * OVERDUE_MS // 5, OVERDUE_MS, OVERDUE_MS + 1, 60_000])
def test_log_of_few_entries_is_judged(court: Court, gap_ms: int) -> None:
    fired(court, 1)
    court.log.schedule(court.topic, [(NOW + 2000, 2)])
    found = []
    for number in range(1, 4):
        at_ms = NOW + 2000 + number * gap_ms
        court.log.entry(EntryKind.CHECKPOINT, b"", at_ms=at_ms)
        court.reaches["t"] = at_ms
        found += court.kinds()
    assert found == [("lost", 1), ("late", 2)]


def ended(court: Court) -> None:
    """End timers in all ways: 1 fires; 2 is cancelled, 3 replaced by 4, which becomes 5."""
    log, topic = court.log, court.topic
    log.schedule(topic, [(NOW + 1000, 1), (NOW + 2000, 2)], at_ms=NOW)
    log.cancel([(NOW + 2000, 2)])
    log.schedule(topic, [(NOW + 3000, 3)], keys=[b"k"])
    log.schedule(topic, [(NOW + 4000, 4)], keys=[b"k"], on_conflict=OnConflict.REPLACE)
    log.reschedule(by_id([(NOW + 4000, 4)]), [NOW + 5000])
    log.fire(NOW + 1000)


@pytest.mark.parametrize("settled", [True, False], ids=["due", "not due"])
@pytest.mark.parametrize(
    ("seq", "due_ms", "kind"),
    [
        (1, 1000, "duplicate_fire"), (2, 2000, "cancelled_delivered"),
        (3, 3000, "replaced_delivered"), (4, 4000, "rescheduled_delivered"), (99, 1, "phantom"),
    ],
)  # fmt: skip
def test_message_that_the_log_did_not_fire_there(
    court: Court, seq: int, due_ms: int, kind: str, settled: bool
) -> None:
    ended(court)
    if settled:
        court.log.fire(NOW + 5000)
        court.give(5, NOW + 5000, 1)
    court.give(1, NOW + 1000, 0)
    court.give(seq, NOW + due_ms, 70)
    court.pass_to(NOW + 5500)
    assert court.kinds() == [(kind, seq)]


def test_pending_timer_that_is_delivered(court: Court) -> None:
    court.log.schedule(court.topic, [(NOW + 1000, 1), (NOW + 2000, 2)], at_ms=NOW)
    court.give(1, NOW + 1000, 0, fired_ms=NOW + 999)
    court.give(2, NOW + 2000, 1)
    court.pass_to(NOW + 2100)
    found = court.step()
    assert [(each.kind, each.detail) for each in found] == [
        ("early", "fired before its due time"), ("phantom", "by the log: pending"),
    ]  # fmt: skip


def test_other_times_than_in_the_log(court: Court) -> None:
    fired(court, 2)
    court.give(1, NOW + 1000, 0, fired_ms=NOW + 1001)
    court.give(2, NOW + 2001, 1, fired_ms=NOW + 2000, out_ms=NOW + 2001)
    court.pass_to(NOW + 3000)
    assert court.kinds() == [("diverged", 1), ("diverged", 2)]


def test_delivery_after_the_ack_and_after_the_topic(court: Court) -> None:
    fired(court, 2)
    court.log.reserve(court.topic, court.group, 2)
    court.log.ack(court.topic, court.group, [0], at_ms=NOW + 2500)
    for out_ms in (NOW + 2500 + OVERDUE_MS, NOW + 2501 + OVERDUE_MS):
        court.give(1, NOW + 1000, 0, out_ms=out_ms)
    court.give(2, NOW + 2000, 1)
    court.log.delete_topic(court.topic, at_ms=NOW + 20_000)
    court.pass_to(NOW + 30_000)
    assert court.kinds() == [("acked_again", 1)]
    court.give(2, NOW + 2000, 1, out_ms=NOW + 20_001 + OVERDUE_MS)
    court.pass_to(NOW + 40_000)
    assert court.kinds() == [("deleted_delivered", 2)]


def test_message_that_expired_is_not_lost_and_is_not_delivered(court: Court) -> None:
    court.policy(ttl_ms=10_000)
    fired(court, 3)
    court.log.op(GroupOp(Op.EXPIRE, court.topic, court.group, FIRST), at_ms=NOW + 11_000)
    court.give(2, NOW + 2000, 1, out_ms=NOW + 11_999)
    court.give(3, NOW + 3000, 2, out_ms=NOW + 13_000)
    court.pass_to(NOW + 14_000)
    assert court.kinds() == [("outlived", 3)]
    court.give(1, NOW + 1000, 0, out_ms=NOW + 17_000)
    court.pass_to(NOW + 18_000)
    assert court.kinds() == [("expired_delivered", 1), ("outlived", 1)]


def test_message_that_expires_early(court: Court) -> None:
    court.policy(ttl_ms=10_000)
    fired(court, 1)
    court.log.op(GroupOp(Op.EXPIRE, court.topic, court.group, FIRST), at_ms=NOW + 10_999)
    assert court.kinds() == [("expired_early", 1)]


def test_paused_topic_holds_and_drops(court: Court) -> None:
    court.policy(paused=True, catch_up="drop")
    court.log.schedule(court.topic, [(NOW + 1000, 1), (NOW + 2000, 2)], at_ms=NOW)
    court.log.fire(NOW + 3000)
    court.give(1, NOW + 1000, 0, fired_ms=NOW + 3000)
    court.pass_to(NOW + 100_000)
    [phantom] = court.step()
    assert (phantom.kind, phantom.seq, phantom.detail) == ("phantom", 1, "by the log: held")
    court.policy(paused=False, catch_up="drop")
    court.log.fire(NOW + 101_000)
    court.give(2, NOW + 2000, 0, fired_ms=NOW + 101_000)
    court.pass_to(NOW + 200_000)
    [phantom] = court.step()
    assert (phantom.kind, phantom.seq, phantom.detail) == ("phantom", 2, "by the log: dropped")


def test_topic_that_resumed_has_to_let_its_timers_go(court: Court) -> None:
    court.policy(paused=True)
    court.log.schedule(court.topic, [(NOW + 1000, 1)], at_ms=NOW)
    court.log.fire(NOW + 3000)
    court.policy(paused=False)
    court.pass_to(NOW + 62_999 + OVERDUE_MS)
    assert court.step() == []
    court.pass_to(NOW + 63_000 + OVERDUE_MS)
    assert court.kinds() == [("late", 1)]


def test_only_messages_of_the_witness_group_have_to_come() -> None:
    court = Court(watched=False)
    fired(court, 2)
    court.group = court.log.group(court.topic, WITNESS_GROUP, GroupStart.LATEST)
    court.log.schedule(court.topic, [(NOW + 3000, 3)])
    court.log.fire(NOW + 3000)
    court.pass_to(NOW + 9000)
    assert court.kinds() == [("lost", 3)]


def test_dead_letter_has_to_come(court: Court) -> None:
    fired(court, 1)
    court.give(1, NOW + 1000, 0)
    other = court.log.group(court.topic, "g", max_attempts=1)
    court.log.reserve(court.topic, other, 1)
    court.log.move(court.topic, other, [0], "t.g.dead", "dead-letters", at_ms=NOW + 2000)
    letters = TopicId(2)
    court.log.group(letters, WITNESS_GROUP)
    court.reaches["t.g.dead"] = NOW + 60_000
    court.pass_to(NOW + 20_000)
    # No attempt failed, so the move itself is a violation as well.
    assert court.kinds() == [("lost", 2), ("moved_early", 0)]


def test_topic_of_the_same_name_is_another_one(court: Court) -> None:
    fired(court, 1)
    court.give(1, NOW + 1000, 0)
    court.log.delete_topic(court.topic)
    again = court.log.topic("t")
    court.log.group(again, WITNESS_GROUP)
    court.log.schedule(again, [(NOW + 2000, 2), (NOW + 2000, 3)])
    court.log.fire(NOW + 2000)
    court.give(2, NOW + 2000, 0)
    court.pass_to(NOW + 9000)
    [lost] = court.step()
    assert (lost.kind, lost.seq) == ("lost", 3)


def test_node_that_differs(court: Court) -> None:
    differing = [Divergence("n3", LogIndex(7), "epoch 1 crc 0, not 1")]
    [found] = court.judge.violations({}, {}, differing)
    assert (found.kind, found.detail) == ("diverged_entries", "n3 at 7: epoch 1 crc 0, not 1")


def test_missing_entry_is_refused(court: Court) -> None:
    court.step()
    court.log.frames.append(b"")  # never read
    court._taken += 1
    court.pass_to(NOW + 1)
    with pytest.raises(ValueError, match="entry 5 can't be replayed"):
        court.step()
