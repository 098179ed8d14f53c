"""The exporter: what it tells is what the log says, once, whatever it is stopped in."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from chaos.history.archive import follow
from chaos.history.history import RunFolder
from chaos.live import export, exported_events, holders
from chaos.live.export import ExportStory
from chaos.live.exported_events import EventKind
from chaos.live.holders import Ended, Holders, KeyHolder
from chaos.oracle import story as replay
from chaos.sim.world.simdisk import SimDisk
from tests.chaos import test_replay, world
from tests.timer import machines
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.policies import CLUSTER, ScopePolicy, encode_policy
from timer.model.columns import OnConflict, RequestId
from timer.model.units import UnixMs
from timer.state.producers import IDLE_MS_MAX


def a_log() -> world.Log:
    """Return a log with something of everything that is exported."""
    log = world.Log()
    log.epoch(1, at_ms=5)
    first, second = log.topic("t"), log.topic("u")
    log.topic("t")
    producer = log.producer(b"p" * 16)
    log.schedule(first, [(100, 1), (300, 2), (400, 3)], producer=(producer, 1), at_ms=10)
    log.schedule(first, [(100, 1), (300, 2), (400, 3)], producer=(producer, 1), at_ms=11)
    log.schedule(second, [(200, 4)], at_ms=12)
    log.schedule(first, [(350, 9)], producer=(producer, 3))  # a gap: nothing comes of it
    log.entry(
        EntryKind.POLICY, encode_policy(CLUSTER, ScopePolicy(delayed_delivery=False)), at_ms=15
    )
    log.cancel([(300, 2), (400, 99)], at_ms=20)
    log.fire(120)
    log.cancel([(100, 1)], at_ms=130)
    log.epoch(2, at_ms=140)
    log.schedule(second, [(90, 5)], at_ms=150)
    log.fire(420)
    log.entry(EntryKind.CHECKPOINT, b"", at_ms=500)
    return log


def parsed(log: world.Log) -> list[Entry]:
    found = [entry_frame.frame_at(memoryview(frame), 0) for frame in log.frames]
    return [item for item in found if isinstance(item, Entry)]


def exported(into: Path) -> list[dict[str, Any]]:
    """Return all events, in the order of the files."""
    return [
        row
        for path in sorted(into.glob("*.parquet"))
        for row in pq.read_table(path, schema=exported_events.ARROW).to_pylist()
    ]


def told(rows: list[dict[str, Any]]) -> list[tuple[str, int, int, str]]:
    return [
        (EventKind(row["kind"]).name, row["seq"], row["due_ms"], row["topic"])
        for row in rows
        if row["kind"] not in (EventKind.CLOCK, EventKind.REACH, *exported_events.OF_TOPICS)
    ]


EXPECTED = [
    ("SCHEDULED", 1, 100, "t"),
    ("SCHEDULED", 2, 300, "t"),
    ("SCHEDULED", 3, 400, "t"),
    ("SCHEDULED", 4, 200, "u"),
    ("CANCELLED", 2, 300, ""),
    ("CANCELLED", 99, 400, ""),
    ("RACED", 1, 100, ""),
    ("SCHEDULED", 5, 90, "u"),
]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    """Three nodes with the same log."""
    nodes = {name: tmp_path / name for name in ("n1", "n2", "n3")}
    for folder in nodes.values():
        world.write_log(folder / "log", a_log().frames, frames_per_segment=4)
    return nodes


def test_events_are_those_of_the_log(tmp_path: Path, data: dict[str, Path]) -> None:
    export.open_exporter(data, tmp_path / "out").step(0)
    rows = exported(tmp_path / "out")
    assert told(rows) == EXPECTED
    (clock,) = [row for row in rows if row["kind"] == EventKind.CLOCK]
    figures = {name: clock[name] for name in ("seq", "at_ms", "read_ms", "since_ms", "first_seq")}
    assert figures == {"seq": 5, "at_ms": 500, "read_ms": 420, "since_ms": 140, "first_seq": 1}


def test_story_numbers_timers_and_topics_as_the_machine_does() -> None:
    log = machines.Log(now_ms=0)
    log.entries = parsed(a_log())
    engine = machines.engine_on(SimDisk())
    machines.catch_up(engine, log)
    story = ExportStory()
    for item in log.entries:
        story.apply(item)
    machine = engine.machine
    assert story.next_seq == machine.next_seq == 6
    assert story.topics.names == {t.topic_id: t.name for t in machine.topics.values()}
    assert (story.read_ms, story.time_ms) == (machine.last_read_time_ms, 500)


def test_every_event_is_exported_once_whenever_the_exporter_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FLUSH_S", 0.0)
    frames = a_log().frames
    for number, (state_s, every) in enumerate(itertools.product((0.0, 1e9), (1, 2, 5))):
        monkeypatch.setattr(export, "STATE_S", state_s)
        into, node = tmp_path / f"out{number}", tmp_path / f"n{number}"
        world.write_log(node / "log", frames[:1])
        log = node / f"log/{1:016x}.log"
        exporter = export.open_exporter({"n1": node}, into)
        for written, frame in enumerate(frames[1:]):
            exporter.step(written)
            with log.open("ab") as file:
                file.write(frame)
            if written % every == 0:  # killed: what it holds in memory is gone
                exporter = export.open_exporter({"n1": node}, into)
        exporter.step(1000)
        assert told(exported(into)) == EXPECTED
        seqs = [row["seq"] for row in exported(into) if row["kind"] == EventKind.CLOCK]
        assert seqs == sorted(seqs)


def test_dead_letters_are_told_as_timers_of_their_topic_which_may_not_have_become_any() -> None:
    log = world.Log()
    topic = log.topic("t")
    log.schedule(topic, [(100, 1), (100, 2)])
    log.fire(120)
    group = log.group(topic, "g")
    log.reserve(topic, group, 2)
    log.ack(topic, group, [0])
    log.move(topic, group, [0, 1], "t.g.dead", "dead-letters")
    log.schedule(topic, [(900, 3)])
    story = ExportStory()
    told = [each for item in parsed(log) for each in story.apply(item)]
    raced = [
        each.columns["seq"].tolist() for each in told if each.kind is EventKind.RACED and each.n
    ]
    assert raced == [[3, 4]]  # the first was acked meanwhile: there is no 3
    found = [each for each in told if each.kind is EventKind.SCHEDULED]
    [dead] = [each.columns for each in found if "t.g.dead" in each.columns["topic"]]
    assert (dead["seq"].tolist(), dead["due_ms"].tolist()) == ([3, 4], [1, 1])
    assert found[-1].columns["seq"].tolist() == [5]


def test_clock_is_told_while_nothing_happens(tmp_path: Path, data: dict[str, Path]) -> None:
    exporter = export.open_exporter(data, tmp_path / "out")
    for now_s in (0.0, 0.5, 1.0, 1.5, 2.0):
        exporter.step(now_s)
    again = export.open_exporter(data, tmp_path / "out")
    again.step(0.0)
    rows = exported(tmp_path / "out")
    assert told(rows) == EXPECTED
    assert [row["at_ms"] for row in rows if row["kind"] == EventKind.CLOCK] == [500] * 4
    newest = exported_events.newest(tmp_path / "out", export.PREFIX)
    assert newest is not None
    assert len(newest) == 1


def test_files_are_kept_for_a_while_and_the_last_one_for_good(
    tmp_path: Path, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "PRUNE_S", 0.0)
    exporter = export.open_exporter(data, tmp_path / "out", keep_s=-3600.0)
    for now_s in (0.0, 1.0, 2.0):
        exporter.step(now_s)
        assert len([*(tmp_path / "out").glob("*.parquet")]) == 1


def test_export_may_begin_at_a_manifest() -> None:
    log = machines.Log()
    log.begin_epoch()
    log.topic("a")
    log.topic("b")
    log.producer(b"p")
    log.schedule(machines.part_of([(1, machines.START_MS + 50, b"x")] * 3, 1, 1))
    log.fire(machines.START_MS + 9)
    disk = SimDisk()
    engine = machines.engine_on(disk)
    machines.catch_up(engine, log)
    begun = engine.begin_flush()
    assert begun is not None
    begun.write()
    engine.end_flush(begun)

    whole = ExportStory()
    for item in log.entries:
        whole.apply(item)
    begun_here = ExportStory.at_manifest(machines.STATE, disk)
    assert begun_here.first_seq == 4
    log.schedule(machines.part_of([(2, machines.START_MS + 60, b"y")], 1, 2))
    later = [
        exported_events.table(each.apply(log.entries[-1])).to_pylist()
        for each in (whole, begun_here)
    ]
    assert later[0] == later[1]
    assert [row["seq"] for row in later[0]] == [4]
    assert ExportStory.loads(begun_here.dumps()) == begun_here
    assert ExportStory.at_manifest(Path("nowhere"), disk) == ExportStory()


def test_repeated_request_and_expired_producer_make_no_timers() -> None:
    log = machines.Log(now_ms=1_000)
    log.begin_epoch()
    log.topic("a")
    log.producer(b"p")
    request = RequestId(b"r", 1, UnixMs(2_000))
    named = replace(machines.part_of([(1, 5_000, b"x")]), request=request)
    told = [log.schedule(named), log.schedule(named)]
    told.append(log.schedule(machines.part_of([(1, 5_000, b"x")], 1, 1)))
    log.now_ms = 3_000 + IDLE_MS_MAX
    log.checkpoint()
    told.append(log.schedule(machines.part_of([(1, 5_000, b"x")], 1, 2)))
    told.append(log.schedule(named))  # a new request by now
    story, found = ExportStory(), []
    engine = machines.engine_on(SimDisk())
    machines.catch_up(engine, log)
    for item in log.entries:
        story = ExportStory.loads(story.dumps())
        rows = exported_events.table(story.apply(item)).to_pylist()
        found += [(item.index, row["seq"]) for row in rows if row["kind"] == EventKind.SCHEDULED]
    assert found == [(told[0].index, 1), (told[2].index, 2), (told[4].index, 3)]
    assert story.next_seq == engine.machine.next_seq


def test_lone_export_without_its_state_is_refused(tmp_path: Path, data: dict[str, Path]) -> None:
    export.open_exporter(data, tmp_path / "out").step(0)
    (tmp_path / "out" / export.STATE_NAME).unlink()
    with pytest.raises(ValueError, match="name another folder"):
        export.open_exporter(data, tmp_path / "out")


def test_state_of_an_older_version_is_refused(tmp_path: Path, data: dict[str, Path]) -> None:
    export.open_exporter(data, tmp_path / "out")
    (tmp_path / "out" / export.STATE_NAME).write_text('{"index": 3}')
    with pytest.raises(ValueError, match="older version: name another folder"):
        export.open_exporter(data, tmp_path / "out")


def test_rows_are_columns_of_one_schema() -> None:
    table = exported_events.rows(EventKind.SCHEDULED, 2, seq=np.array([1, 2]), topic="t", at_ms=5)
    assert table.schema == exported_events.ARROW
    first = {"kind": 1, "seq": 1, "topic": "t", "at_ms": 5, "detail": ""}
    assert table.to_pylist()[0].items() >= first.items()


# ---- keys


class Facts:
    """What a story told, entry by entry."""

    def __init__(self) -> None:
        self.scheduled: dict[int, tuple[int, str]] = {}
        self.cancelled: set[tuple[int, int]] = set()
        self.raced: set[tuple[int, int]] = set()

    def take(self, found: list[exported_events.EventColumns]) -> None:
        for row in exported_events.table(found).to_pylist():
            timer = row["due_ms"], row["seq"]
            match row["kind"]:
                case EventKind.SCHEDULED:
                    assert row["seq"] not in self.scheduled
                    self.scheduled[row["seq"]] = row["due_ms"], row["topic"]
                case EventKind.CANCELLED:
                    self.cancelled.add(timer)
                case EventKind.RACED:
                    self.raced.add(timer)
                case kind:
                    assert kind in exported_events.OF_TOPICS, row


def truth(log: world.Log, folder: Path) -> dict[int, tuple[int, int]]:
    """Return seq -> (due_ms, end) of all timers, as a story with all pending rows tells."""
    told, notes = test_replay.read(log, folder)
    assert told.last_index == len(log.frames)
    table = notes.table
    columns = (table[name].tolist() for name in ("seq", "due_ms", "end"))
    return {seq: (due, end) for seq, due, end in zip(*columns, strict=True)}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "begun in the middle"])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_told_of_keys_is_true_or_excused(seed: int, whole: bool, tmp_path: Path) -> None:
    log = test_replay.random_log(random.Random(seed), fates=seed % 3 > 0)
    ends = truth(log, tmp_path)
    story, facts = ExportStory(), Facts()
    entries = parsed(log)
    begin = 0 if whole else len(entries) // 3
    for item in entries:
        if item.index == begin:  # who had which key before is not known
            story.holders = Holders(whole=False, read_ms=story.read_ms, stands=story.topics.stands)
            facts = Facts()
        told = story.apply(item)
        story = ExportStory.loads(story.dumps()) if item.index % 7 == 0 and whole else story
        facts.take(told)
        if item.index == begin:
            story.first_seq = story.next_seq
    for seq in range(story.first_seq, story.next_seq):
        due_ms, end = ends.get(seq, (0, replay.KEPT))
        match end:
            case replay.DROPPED:  # what a cancel of such a one is told of is no matter
                assert facts.scheduled[seq][0] == due_ms
            case replay.FIRED | replay.PENDING | replay.HELD:
                assert facts.scheduled[seq][0] == due_ms
                assert (due_ms, seq) not in facts.cancelled
            case replay.REJECTED | replay.KEPT:
                told_ms, _ = facts.scheduled.get(seq, (0, ""))
                assert seq not in facts.scheduled or (told_ms, seq) in facts.raced
            case _:
                assert facts.scheduled[seq][0] == due_ms
                assert (due_ms, seq) in facts.cancelled | facts.raced


def test_keys_without_a_race_are_told_exactly() -> None:
    log, story, facts = world.Log(), ExportStory(), Facts()
    log.epoch(1)
    topic = log.topic("t")
    log.schedule(topic, [(1000, 1)], keys=[b"k"])  # 1
    log.schedule(topic, [(2000, 2)], keys=[b"k"])  # 2: rejected
    log.schedule(topic, [(2000, 3)], keys=[b"k"], on_conflict=OnConflict.REPLACE)  # 3
    log.fire(10)
    log.reschedule(world.by_key([(topic, b"k")]), [3000])  # 4
    log.reschedule(world.by_id([(3000, 4)]), [4000])  # 5
    log.schedule(topic, [(9000, 4)], keys=[b"k"], on_conflict=OnConflict.KEEP)  # 6: 5 is kept
    log.cancel_keys([(topic, b"k"), (topic, b"nobody's")])
    log.schedule(topic, [(5000, 5)], keys=[b"k"])  # 7
    log.cancel([(5000, 7)])
    log.schedule(topic, [(6000, 6)], keys=[b"k"])  # 8
    log.fire(6000)
    log.schedule(topic, [(70_000, 7)], keys=[b"k"])  # 9: perhaps 8 has not fired
    log.fire(70_000)
    log.fire(200_000)
    log.schedule(topic, [(300_000, 8)], keys=[b"k"])  # 10: both have, for long
    for item in parsed(log):
        facts.take(story.apply(item))
    dues = {1: 1000, 3: 2000, 4: 3000, 5: 4000, 7: 5000, 8: 6000, 9: 70_000, 10: 300_000}
    assert facts.scheduled == {seq: (due_ms, "t") for seq, due_ms in dues.items()}
    assert facts.cancelled == {(1000, 1), (2000, 3), (3000, 4), (4000, 5), (5000, 7)}
    assert facts.raced == {(70_000, 9)}


def test_keys_of_what_has_fired_are_forgotten() -> None:
    log, story = world.Log(), ExportStory()
    log.epoch(1)
    topic = log.topic("t")
    for number in range(5):
        rows = [(1000 * number + 500, mark) for mark in range(1000)]
        log.schedule(topic, rows, keys=[f"{number}/{mark}".encode() for mark in range(1000)])
        log.fire(1000 * number + 1000)
        log.fire(1000 * number + 1000 + holders.RACE_MS)
    sizes = []
    for item in parsed(log):
        story.apply(item)
        sizes.append(len(story.holders.dumps()))
    assert max(sizes) <= holders.SWEEP_MIN + 1


def test_who_may_have_been_moved_does_not_have_its_key_for_sure() -> None:
    # Even when what it may have become is cancelled by its id: then nobody may have it.
    holders, ended = Holders(whole=True), Ended()
    old, new = (
        KeyHolder(due, seq, 1, 0, sure=True, place_ms=due) for due, seq in ((50, 1), (60, 2))
    )
    holders.scheduled(7, old, OnConflict.REJECT, ended)
    assert holders.is_sure(7)
    holders.moved(7, new, sure=False, ended=ended)
    holders.gone(60, 2)
    assert not holders.is_sure(7)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["n1"], "--data n1: must be NODE=DIR"),
        (["n1=", "n2=b"], "--data n1=: must be NODE=DIR"),
        (["n1=a", "n1=b"], "--data n1=b: each must name another node and another directory"),
        (["n1=a", "n2=a/../a"], "--data n2=a/../a: each must name another"),
        (["n1=a", "n2=gone"], "--data gone: no such directory"),
    ],
)
def test_data_that_names_no_nodes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
    status = ["--status", "127.0.0.1:1"] if len(words) == 1 else []
    assert export.main(["--data", *words, *status, "--into", "events"]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "events").exists()


@pytest.mark.parametrize(
    "words", [[], ["run", "--data", "n1=a"], ["--data", "n1=a"], ["run", "--keep-s", "0"],
              ["--data", "n1=a", "n2=b", "--status", "127.0.0.1:1"],
              ["run", "--status", "127.0.0.1:1"]],
)  # fmt: skip
def test_arguments_that_do_not_go_together_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        export.main([*words, "--into", "events"])


def test_archived_cluster_is_exported_from_its_nodes_own_logs(
    tmp_path: Path, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"name": name, "data": str(folder)} for name, folder in data.items()]
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": nodes}))
    for name, folder in data.items():
        follow(folder / "log", RunFolder(tmp_path).kept(name))
    seen: list[export.Exporter] = []
    monkeypatch.setattr(export, "_run", seen.append)
    assert export.main([str(tmp_path), "--into", str(tmp_path / "events")]) == 0
    assert seen[0].step(0.0)
    assert export.main([str(tmp_path / "gone"), "--into", str(tmp_path / "none")]) == 2
