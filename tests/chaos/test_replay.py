"""The audit's own reading of the log, entry by entry."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from chaos import replay
from chaos.replay import ENDS, Replay
from tests.chaos.world import Log, write_log
from timer.errors import CorruptFile
from timer.payloads import Start
from timer.units import LogIndex, TopicId

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
