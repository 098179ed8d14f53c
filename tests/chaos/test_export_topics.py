"""What the live audit makes of logs in which topics are paused and deleted, and messages expire."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.live import exported_events
from chaos.live.export import ExportStory
from chaos.live.exported_events import RELEASE_MS, WITNESS_GROUP, EventColumns, EventKind
from chaos.oracle import story as replay
from chaos.sim.world.simdisk import SimDisk
from tests.chaos import test_replay, world
from tests.chaos.test_export import parsed
from tests.chaos.test_judge import Court
from tests.timer import machines
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import GroupOp, Op
from timer.entries.policies import CLUSTER, Scope, ScopePolicy, encode_policy
from timer.model.units import GroupId, TopicId

SPAN_MS = 20_000
"""No random log takes so long."""
NAMES = {kind: kind.name for kind in exported_events.OF_TOPICS}


def facts(story: ExportStory, log: world.Log) -> list[tuple[Any, ...]]:
    """Return what a story tells of topics: kind, number and what else it says."""
    found = []
    for item in parsed(log)[story.index :]:
        for row in exported_events.table(story.apply(item)).to_pylist():
            if row["kind"] in NAMES:
                said = (row["ttl_ms"], row["read_ms"], row["seq"], row["detail"])
                found.append((NAMES[row["kind"]], row["topic_id"], *filter(None, said)))
    return found


def policy(log: world.Log, scope: Scope, at_ms: int, **said: Any) -> None:
    log.entry(EntryKind.POLICY, encode_policy(scope, ScopePolicy(**said)), at_ms=at_ms)


def test_what_a_policy_changes_for_a_topic_is_told_whatever_its_scope() -> None:
    log, story = world.Log(), ExportStory()
    log.epoch(1)
    log.topic("a")
    log.topic("n/b")
    policy(log, CLUSTER, 10, paused=True, ttl_ms=500)
    assert facts(story, log) == [
        ("MADE", 1), ("MADE", 2),
        ("PAUSED", 1), ("LIVES", 1, 500), ("PAUSED", 2), ("LIVES", 2, 500),
    ]  # fmt: skip
    policy(log, Scope("n"), 20, paused=False, catch_up="drop")
    log.schedule(TopicId(1), [(30, 1)], at_ms=25)
    policy(log, Scope("", TopicId(1)), 30, paused=False, ttl_ms=0)
    log.topic("c")
    log.topic("n/d")
    story = ExportStory.loads(story.dumps())
    assert facts(story, log) == [
        ("RESUMED", 2, 20, "drop"), ("RESUMED", 1, 30, 1, "all"), ("LIVES", 1),
        ("MADE", 3), ("PAUSED", 3), ("LIVES", 3, 500), ("MADE", 4), ("LIVES", 4, 500),
    ]  # fmt: skip


def test_deleted_topic_is_told_once_and_what_asks_it_later_makes_nothing() -> None:
    log, story = world.Log(), ExportStory()
    log.epoch(1)
    first = log.topic("a")
    group = log.group(first, "g")
    log.schedule(first, [(100, 1)], keys=[b"k"])
    log.delete_topic(first)
    log.delete_topic(first)
    second = log.topic("a")
    log.group(second, WITNESS_GROUP)
    log.schedule(first, [(100, 2)])
    log.move(first, group, [0], "dead", "dead-letters")  # it takes a seq
    log.schedule(second, [(200, 3)], keys=[b"k"])
    entries = parsed(log)
    told = [row for item in entries for row in exported_events.table(story.apply(item)).to_pylist()]
    scheduled = [
        (row["seq"], row["topic_id"]) for row in told if row["kind"] == EventKind.SCHEDULED
    ]
    assert scheduled == [(1, 1), (3, 2)]
    of_topics = [(NAMES[row["kind"]], row["topic_id"]) for row in told if row["kind"] in NAMES]
    assert of_topics == [("MADE", 1), ("DELETED", 1), ("MADE", 2), ("WITNESSED", 2)]
    assert story.topics.names == {2: "a"}


def test_expiry_is_told_by_the_time_to_live_before_its_entry() -> None:
    log, story = world.Log(), ExportStory()
    log.epoch(1)
    topic = log.topic("a")
    group = log.group(topic, "g")
    some = np.array([1], np.uint64)
    log.op(GroupOp(Op.EXPIRE, topic, group, some), at_ms=1000)  # nothing may expire yet
    policy(log, CLUSTER, 1000, ttl_ms=300)
    log.op(GroupOp(Op.EXPIRE, topic, group, some), at_ms=2000)
    log.op(GroupOp(Op.EXPIRE_BELOW, topic, GroupId(0), some), at_ms=2100)
    assert facts(story, log)[1:] == [
        ("LIVES", 1, 300), ("EXPIRED", 1, 1700), ("EXPIRED", 1, 1800),
    ]  # fmt: skip


def test_export_that_begins_at_a_manifest_begins_with_what_is_so() -> None:
    log, disk = machines.Log(), SimDisk()
    log.begin_epoch()
    for name in ("a", "b", "c"):
        log.topic(name)
    log.schedule(machines.part_of([(2, machines.START_MS, b"x")]))
    log.policy(Scope("", TopicId(2)), paused=True, catch_up="latest", ttl_ms=70)
    log.policy(Scope("", TopicId(1)), paused=True)
    log.fire(machines.START_MS + 1)
    log.policy(Scope("", TopicId(2)), paused=False, catch_up="latest", ttl_ms=70)
    log.delete_topic(3)
    engine = machines.engine_on(disk)
    machines.catch_up(engine, log)
    begun = engine.begin_flush()
    assert begun is not None
    begun.write()
    engine.end_flush(begun)
    story = ExportStory.at_manifest(machines.STATE, disk)
    assert ExportStory.loads(story.dumps()) == story
    rows = [row for kind, said in story.begins for row in _rows(EventKind(kind), said)]
    found = [(NAMES[row["kind"]], row["topic_id"], row["detail"] or row["ttl_ms"]) for row in rows]
    assert found == [
        ("MADE", 1, 0), ("PAUSED", 1, 0),
        ("MADE", 2, 0), ("RESUMED", 2, "latest"), ("LIVES", 2, 70),
    ]  # fmt: skip
    assert story.topics.gone == {3}
    assert [*story.topics.stands] == [1, 2]


def _rows(kind: EventKind, columns: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = exported_events.table([EventColumns(kind, 1, columns)]).to_pylist()
    return rows


def test_key_of_a_held_timer_is_taken_until_it_has_gone() -> None:
    log, story = world.Log(), ExportStory()
    log.epoch(1)
    topic = log.topic("a")
    log.schedule(topic, [(100_000, 1), (100_000, 2), (100_000, 3)], keys=[b"k", b"m", b"n"])
    policy(log, Scope("", topic), 50_000, paused=True)
    log.fire(300_000)
    log.schedule(topic, [(400_000, 4)], keys=[b"k"])  # rejected: 1 is held
    log.cancel([(100_000, 2)])
    log.schedule(topic, [(200_000, 5)], keys=[b"m"])  # 5: held at once
    log.schedule(topic, [(500_000, 6)], keys=[b"m"])  # rejected
    log.cancel_keys([(topic, b"m"), (topic, b"n")])
    policy(log, Scope("", topic), 300_000, paused=False)
    log.schedule(topic, [(600_000, 7)], keys=[b"k"])  # 7: perhaps 1 has gone
    log.fire(300_000 + 2 * RELEASE_MS)
    log.schedule(topic, [(700_000, 8)], keys=[b"n"])  # 8
    table = exported_events.table(
        [told for item in parsed(log) for told in story.apply(item)]
    ).to_pylist()
    seqs = {
        kind: [row["seq"] for row in table if row["kind"] == kind]
        for kind in (EventKind.SCHEDULED, EventKind.CANCELLED, EventKind.RACED)
    }
    assert seqs == {
        EventKind.SCHEDULED: [1, 2, 3, 5, 7, 8], EventKind.CANCELLED: [2, 5, 3], EventKind.RACED:
        [7],
    }  # fmt: skip


# ---- random logs, judged


class Witnessed(world.Log):
    """A log in which every topic has the witness's group."""

    def topic(self, name: str) -> TopicId:
        made = super().topic(name)
        self.group(made, WITNESS_GROUP)
        return made


Trial = list[tuple[list[EventColumns], list[dict[str, Any]]]]
"""What the exporter and an honest witness tell of a log, entry by entry."""


def trial_of(seed: int, directory: Path) -> Trial:
    """Return what is told of a random log."""
    log = test_replay.random_log(random.Random(seed))
    if seed % 3 == 0:
        for scope in (CLUSTER, Scope("default"), *(Scope("", TopicId(n)) for n in range(1, 30))):
            policy(log, scope, log.time_ms, catch_up="all")
    for more in range(30):  # and all that may fire does
        log.fire(log.time_ms + 400 * (more == 0), rows_max=1000)
    notes = test_replay.Notes()
    judged = replay.LogStory(notes, directory)
    story, found = ExportStory(), []
    for item in parsed(log):
        judged.apply(item)
        given = [
            {"seq": row["seq"], "due_ms": row["due_ms"], "queue_offset": row["queue_offset"],
             "fired_at_ms": row["ended_at_ms"], "handed_out_ms": row["ended_at_ms"] + 1,
             "at_ms": row["ended_at_ms"] + 2, "topic": judged.topics[int(row["topic"])]}
            for rows in notes.rows for row in rows[rows["end"] == replay.FIRED]
        ]  # fmt: skip
        notes.rows.clear()
        found.append(([*story.apply(item), story.clock()], given))
        if item.index % 9 == 0:
            story = ExportStory.loads(story.dumps())
    return found


def judge(trial: Trial, *, without: int = 0, twice: int = 0) -> list[tuple[str, int]]:
    """Return what is raised, if the witness was not given one timer, or one twice."""
    court = Court(SPAN_MS)
    for topic in ("a", "b"):
        court.tell(EventKind.REACH, topic=topic, read_ms=1, at_ms=1)
    alerts = court.step()
    for at, (told, given) in enumerate(trial):
        court.told.append(exported_events.table(told))
        for row in given:
            if row["seq"] != without:
                court.tell(EventKind.GIVEN, **row)
            if row["seq"] == twice:
                court.tell(EventKind.GIVEN, **row | {"queue_offset": row["queue_offset"] + 10**6})
        if at % 5 == 0:
            alerts += court.step()
    last = trial[-1][0][-1].columns
    for later_ms in range(1, 4):
        at_ms = last["at_ms"] + later_ms * (2 * SPAN_MS + RELEASE_MS)
        court.told.append(
            exported_events.table([EventColumns(EventKind.CLOCK, 1, last | {"at_ms": at_ms})])
        )
        for topic in ("a", "b"):
            court.tell(EventKind.REACH, topic=topic, read_ms=at_ms, at_ms=at_ms)
        alerts += court.step()
    return [(alert.kind, alert.seq) for alert in alerts]


def test_honest_random_logs_raise_nothing_and_lies_and_most_losses_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_replay, "Log", Witnessed)
    raised: list[bool] = []
    for seed in range(24):
        (tmp_path / str(seed)).mkdir()
        trial = trial_of(seed, tmp_path / str(seed))
        assert judge(trial) == [], seed
        seqs = [int(row["seq"]) for _, given in trial for row in given]
        for seq in seqs[:: max(1, len(seqs) // 4)]:
            lost = judge(trial, without=seq)
            assert lost in ([], [("lost", seq)]), seed
            raised.append(bool(lost))
            assert judge(trial, twice=seq) == [("duplicate", seq)], seed
    assert len(raised) > 50
    assert np.mean(raised) > 0.3
