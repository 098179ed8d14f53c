"""The audit's own reading of the log, entry by entry."""

import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from chaos import replay
from chaos.replay import ENDS, Replay
from tests.chaos.world import Log, write_log
from timer import entry
from timer.disk import RealDisk
from timer.errors import CorruptFile
from timer.machine import Machine
from timer.payloads import Start
from timer.store import Store
from timer.timer_id import mix
from timer.units import GroupId, LogIndex, TopicId

EVERYTHING = LogIndex(1 << 40)


@pytest.fixture
def log() -> Log:
    log = Log()
    log.epoch(1)
    log.topic("t")
    return log


T = TopicId(1)


def read(log: Log, tmp_path: Path, upto: int = EVERYTHING) -> Replay:
    write_log(tmp_path, log.frames, frames_per_segment=3)
    return replay.replay(tmp_path, upto=LogIndex(upto))


def ends(story: Replay) -> list[str]:
    return [ENDS[end] for end in story.table["end"]]


def fired_marks(story: Replay) -> list[int]:
    """Return the marks of what fired, in the order of queue offsets."""
    fired = story.table[story.table["end"] == replay.FIRED]
    order = np.argsort(fired["queue_offset"])
    assert fired["queue_offset"][order].tolist() == [*range(len(fired))]
    return [int(mark) for mark in fired["mark"][order]]


def test_timers_fire_in_order_of_due_then_seq(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(300, 1), (100, 2), (300, 3), (100, 4), (301, 5)])
    log.fire(300)
    story = read(log, tmp_path)
    assert fired_marks(story) == [2, 4, 1, 3]
    assert ends(story)[4] == "pending"
    assert story.table["ended_at_ms"][:4].tolist() == [300] * 4


def test_limited_fire_moves_the_read_time_to_its_last_row(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 1), (200, 2), (300, 3)])
    log.fire(300, rows_max=2)
    assert read(log, tmp_path).last_read_time_ms == 200
    log.fire(300, rows_max=2)
    story = read(log, tmp_path)
    assert (story.last_read_time_ms, fired_marks(story)) == (300, [1, 2, 3])


def test_fire_limited_by_bytes_moves_at_least_one_row(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 1), (200, 2), (300, 3)], size=50)
    log.fire(300, bytes_max=10)
    assert fired_marks(read(log, tmp_path)) == [1]
    log.fire(300, bytes_max=100)
    assert fired_marks(read(log, tmp_path)) == [1, 2, 3]


def test_timer_that_is_due_already_fires_at_its_own_entry(log: Log, tmp_path: Path) -> None:
    log.fire(500)
    log.schedule(T, [(500, 1), (501, 2), (400, 3)], at_ms=510)
    story = read(log, tmp_path)
    assert fired_marks(story) == [1, 3]
    assert story.table["ended_at_ms"].tolist() == [510, 0, 510]


def test_repeated_or_skipped_sequence_schedules_nothing(log: Log, tmp_path: Path) -> None:
    producer = log.producer(b"a" * 16)
    log.producer(b"a" * 16)
    for sequence, mark in ((1, 1), (1, 2), (3, 3), (2, 4)):
        log.schedule(T, [(100, mark)], producer=(producer, sequence))
    log.schedule(T, [(100, 5)], producer=(producer + 1, 1))  # never issued
    log.schedule(T, [(100, 6)])  # not idempotent
    assert read(log, tmp_path).table["mark"].tolist() == [1, 4, 6]


def test_cancelled_timer_does_not_fire(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 1), (100, 2), (100, 3)])
    log.cancel([(100, 2), (999, 3), (100, 77)])  # the second has another due time, the third no row
    log.fire(100)
    log.cancel([(100, 1)])
    story = read(log, tmp_path)
    assert ends(story) == ["fired", "cancelled", "fired"]


def test_ack_counts_once_and_only_below_what_was_reserved(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, mark) for mark in range(5)])
    log.fire(100)
    group = log.group(T, "g")
    log.reserve(T, group, 3)
    log.ack(T, group, [0, 2, 3], at_ms=110)
    log.epoch(2)
    log.ack(T, group, [1, 2], at_ms=120)
    replay.write(read(log, tmp_path / "log"), "n1", tmp_path)
    rows = pq.read_table(tmp_path / "acks/n1.parquet").to_pylist()
    found = [(row["queue_offset"], row["ack_epoch"], row["acked_at_ms"]) for row in rows]
    assert found == [(0, 1, 110), (1, 2, 120), (2, 1, 110)]


def test_group_starts_at_the_earliest_message_that_is_kept(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, mark) for mark in range(5)])
    log.fire(100)
    first = log.group(T, "first")
    log.reserve(T, first, 5)
    log.ack(T, first, [0, 1, 3])
    log.group(T, "second")
    log.group(T, "latest", Start.LATEST)
    log.group(T, "first")
    groups = read(log, tmp_path).groups.values()
    assert [(g.name, g.start) for g in groups] == [("first", 0), ("second", 2), ("latest", 5)]


def test_replay_ends_where_it_is_told(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 1)])
    log.fire(100)
    assert ends(read(log, tmp_path, upto=3)) == ["pending"]
    assert ends(read(log, tmp_path, upto=4)) == ["fired"]


@pytest.mark.parametrize("cut", [1, 40, 41])
def test_torn_last_frame_is_left_out(log: Log, tmp_path: Path, cut: int) -> None:
    log.schedule(T, [(100, 1)])
    log.fire(100)
    write_log(tmp_path, log.frames)
    (path,) = replay.segments(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    assert replay.replay(tmp_path, upto=EVERYTHING).last_index == 3


def test_damage_before_the_end_is_reported(log: Log, tmp_path: Path) -> None:
    for mark in range(6):
        log.schedule(T, [(100, mark)])
    write_log(tmp_path, log.frames, frames_per_segment=3)
    first = replay.segments(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(CorruptFile):
        replay.replay(tmp_path, upto=EVERYTHING)


def test_log_without_its_beginning_is_refused(log: Log, tmp_path: Path) -> None:
    for mark in range(6):
        log.schedule(T, [(100, mark)])
    write_log(tmp_path, log.frames, frames_per_segment=3)
    replay.segments(tmp_path)[0].unlink()
    with pytest.raises(ValueError, match="needs the whole log"):
        replay.replay(tmp_path, upto=EVERYTHING)


def test_many_timers_are_told_apart(log: Log, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    due = rng.integers(1, 2_000, 5_000)
    for start in range(0, 5_000, 500):
        rows = [(int(due[mark]), mark) for mark in range(start, start + 500)]
        log.schedule(T, rows)
    gone = [(int(due[mark]), mark + 1) for mark in range(0, 5_000, 7)]
    log.cancel(gone)
    for now in range(10, 2_001, 10):
        log.fire(now, rows_max=17)
    while len(log.frames) < 600:
        log.fire(2_000, rows_max=17)
    story = read(log, tmp_path)
    alive = [mark for mark in range(5_000) if mark % 7]
    assert fired_marks(story) == sorted(alive, key=lambda mark: (due[mark], mark))
    fired = story.table[story.table["end"] == replay.FIRED]
    assert (fired["ended_at_ms"] >= fired["due_ms"]).all()


@pytest.mark.parametrize("seed", range(20))
def test_replay_and_the_production_machine_tell_the_same_story(seed: int, tmp_path: Path) -> None:
    log = random_log(random.Random(seed))
    machine = Machine(Store(RealDisk(), tmp_path))
    story = read(log, tmp_path / "log")
    for frame in entry.frames(memoryview(b"".join(log.frames))):
        machine.apply(frame)
    counts = np.bincount(story.table["end"], minlength=3).tolist()
    assert counts == [machine.counts.pending, machine.counts.fired, machine.counts.cancelled]
    assert min(counts) > 0
    assert story.last_read_time_ms == machine.last_read_time_ms
    for topic in machine.topics.values():
        rows = story.table[(story.table["topic"] == topic.topic_id) & (story.table["end"] == 1)]
        seqs = np.flatnonzero((story.table["topic"] == topic.topic_id) & (story.table["end"] == 1))
        in_order = (seqs[np.argsort(rows["queue_offset"])] + 1).astype(np.uint64)
        assert chain(in_order) == topic.queue.chain
        for group in topic.groups.values():
            told = story.groups[group.group_id]
            acked = np.flatnonzero(told.acks["index"]) + told.start
            assert (told.name, len(acked)) == (group.name, group.acked_count)
            assert int(mix(acked.astype(np.uint64)).sum(dtype=np.uint64)) == group.ack_sum


def chain(seqs: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> int:
    """Return the chained hash that a queue keeps of the seqs at its offsets."""
    value = 0
    for each in mix(seqs).tolist():
        value = (value * 0x9E3779B97F4A7C15 + each) % (1 << 64)
    return value


def random_log(chance: random.Random) -> Log:
    """Return a log of two topics in which everything happens, aimed at the edges of limits."""
    log, story = Log(), Replay()
    log.epoch(1)
    topics = [log.topic("a"), log.topic("b")]
    producer, sequence = log.producer(b"a" * 16), 0
    now, seq, due = 1_000, 0, {}
    groups: list[tuple[TopicId, GroupId]] = []
    for _ in range(150):
        for frame in entry.frames(memoryview(b"".join(log.frames[story.last_index :]))):
            story.apply(frame)
        topic = chance.choice(topics)
        match chance.choice(["schedule"] * 4 + ["fire"] * 4 + ["cancel", "group", "ack", "epoch"]):
            case "schedule":
                rows = [(now + chance.choice([-5, 0, 1, 7, 7, 300]), m) for m in range(5)]
                number = chance.choice([0, sequence, sequence + 1, sequence + 1, sequence + 2])
                given = (int(producer), number) if number else (0, 0)
                taken = number in (0, sequence + 1)
                sequence += number == sequence + 1
                log.schedule(topic, rows, producer=given, size=chance.choice([8, 50]))
                for row_due, _ in rows if taken else []:
                    seq += 1
                    due[seq] = row_due
            case "fire":
                now += chance.choice([0, 1, 7, 50])
                read_ms = max(now - chance.choice([0, 0, 3]), story.last_read_time_ms)
                limit = chance.choice([1, 3, 1000])
                log.fire(read_ms, rows_max=limit, bytes_max=chance.choice([8, 100, 1 << 20]))
            case "cancel" if due:
                chosen = chance.sample(sorted(due), min(3, len(due)))
                log.cancel([(due[s] + (s % 5 == 0), s) for s in chosen])
            case "group" if len(groups) < 4:
                start = chance.choice([Start.EARLIEST, Start.LATEST])
                groups.append((topic, log.group(topic, f"g{len(groups)}", start)))
            case "ack" if groups:
                mine, group = chance.choice(groups)
                end = story._queue_end.get(mine, 0)
                log.reserve(mine, group, chance.randrange(end + 10))
                offsets = sorted(chance.sample(range(end), min(9, end)))
                log.ack(mine, group, offsets, at_ms=now)
            case "epoch":
                log.epoch(log.current + 1)
            case _:
                pass
    return log
