"""The audit's own reading of the log, entry by entry."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from chaos.oracle import held_story, tables
from chaos.oracle import pending_rows as pending
from chaos.oracle.pending_rows import ROW, TOMBSTONE, WaitingRows
from chaos.oracle.story import (
    CANCELLED,
    DROPPED,
    ENDS,
    FIRED,
    HELD,
    KEPT,
    LIFE,
    MOVED_BYTES_MAX,
    NONE,
    PENDING,
    REJECTED,
    REPLACED,
    RESCHEDULED,
    LogStory,
)
from tests.chaos.replaying import EVERYTHING, Notes, T, ends, read
from tests.chaos.world import Log, by_id, by_key, write_log
from tests.seeds import seeds
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import GroupOp, GroupStart, Op, Targets, encode_delete_topic
from timer.entries.policies import CATCH_UPS, CLUSTER, Scope, ScopePolicy, encode_policy
from timer.files.disk import RealDisk
from timer.model.columns import OnConflict
from timer.model.timer_errors import CorruptFileError
from timer.model.timer_id import mix
from timer.model.units import GroupId, LogIndex, TopicId, UnixMs
from timer.pending.store import Store
from timer.state import pauses
from timer.state.machine import RESCHEDULE_BYTES_MAX, Machine
from timerspark.log import segment_files
from timerspark.log.segment_files import Piece, segments


def fired_marks(told: tuple[LogStory, Notes]) -> list[int]:
    """Return the marks of what fired, in the order of queue offsets."""
    fired = told[1].table[told[1].table["end"] == FIRED]
    order = np.argsort(fired["queue_offset"])
    assert fired["queue_offset"][order].tolist() == [*range(len(fired))]
    return [int(mark) for mark in fired["mark"][order]]


def test_fire_limited_by_bytes_moves_at_least_one_row(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 1), (200, 2), (300, 3)], size=50)
    log.fire(300, bytes_max=10)
    assert fired_marks(read(log, tmp_path)) == [1]
    log.fire(300, bytes_max=100)
    assert fired_marks(read(log, tmp_path)) == [1, 2, 3]


def test_timer_that_is_due_already_fires_at_its_own_entry(log: Log, tmp_path: Path) -> None:
    log.fire(500)
    log.schedule(T, [(500, 1), (501, 2), (400, 3)], at_ms=510)
    told = read(log, tmp_path)
    assert fired_marks(told) == [1, 3]
    assert told[1].table["ended_at_ms"].tolist() == [510, NONE, 510]


def test_repeated_or_skipped_sequence_schedules_nothing(log: Log, tmp_path: Path) -> None:
    producer = log.producer(b"a" * 16)
    log.producer(b"a" * 16)
    for sequence, mark in ((1, 1), (1, 2), (3, 3), (2, 4)):
        log.schedule(T, [(100, mark)], producer=(producer, sequence))
    log.schedule(T, [(100, 5)], producer=(producer + 1, 1))  # never issued
    log.schedule(T, [(100, 6)])  # not idempotent
    assert read(log, tmp_path)[1].table["mark"].tolist() == [1, 4, 6]


def test_key_that_a_pending_timer_has_is_rejected_kept_or_taken_over(
    log: Log, tmp_path: Path
) -> None:
    log.schedule(T, [(100, 1), (200, 2)], keys=[b"a", b"b"])
    log.schedule(T, [(300, 3), (300, 4)], keys=[b"a", b"c"])
    log.schedule(T, [(300, 5)], keys=[b"a"], on_conflict=OnConflict.KEEP)
    log.schedule(T, [(400, 6), (500, 7)], keys=[b"b", b"b"], on_conflict=OnConflict.REPLACE)
    other = log.topic("other")
    log.schedule(other, [(300, 8)], keys=[b"a"])  # a key is one of its topic
    log.fire(100)
    log.schedule(T, [(600, 9)], keys=[b"a"])  # free again
    log.schedule(T, [(100, 10), (700, 11)], keys=[b"d", b"d"])  # the first is due: never pending
    told = read(log, tmp_path)
    assert ends(told) == [
        FIRED, REPLACED, REJECTED, PENDING, KEPT, REPLACED, PENDING, PENDING, PENDING, FIRED,
        PENDING,
    ]  # fmt: skip
    assert told[1].table["other"].tolist() == [0, 0, 1, 0, 1, 2, 6, 0, 0, 0, 0]
    assert told[0].timers == 9


def test_update_ends_a_pending_timer_or_makes_none(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 1), (200, 2)], keys=[b"a", b"b"])
    log.fire(100)
    update = OnConflict.UPDATE
    log.schedule(T, [(300, 3), (300, 4), (300, 5)], keys=[b"a", b"b", b"b"], on_conflict=update)
    log.schedule(T, [(400, 6)], keys=[b"b"])
    told = read(log, tmp_path)
    assert ends(told) == [FIRED, REPLACED, REJECTED, REPLACED, PENDING, REJECTED]
    assert told[1].table["other"].tolist() == [0, 0, 0, 2, 4, 5]


def test_key_of_a_cancelled_timer_is_free(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 1), (200, 2)], keys=[b"a", b"b"])
    log.cancel([(100, 1)])
    log.cancel_keys([(T, b"b"), (T, b"b"), (T, b"nobody's")])
    log.schedule(T, [(300, 3), (300, 4)], keys=[b"a", b"b"])
    log.fire(300)
    assert ends(read(log, tmp_path)) == [CANCELLED, CANCELLED, FIRED, FIRED]


def test_rescheduled_timer_fires_once_at_its_new_time(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 1), (200, 2), (900, 3)], keys=[b"a", b"", b""])
    log.reschedule(by_key([(T, b"a"), (T, b"a")]), [300, 301])  # named twice: moved once
    log.reschedule(by_id([(200, 2), (200, 2), (200, 9), (900, 3)]), [400, 401, 402, 50])
    log.fire(250)
    log.schedule(T, [(800, 4)], keys=[b"a"], on_conflict=OnConflict.KEEP)  # it moved with it
    log.reschedule(by_id([(900, 3), (300, 4)]), [500, 240])  # gone; at once
    log.fire(500)
    told = read(log, tmp_path)
    table = told[1].table
    names = ("seq", "mark", "due_ms", "end", "other", "old_due_ms")
    found = zip(*(table[name].tolist() for name in names), strict=True)
    assert [*found] == [
        (1, 1, 100, RESCHEDULED, 0, 0),
        (2, 2, 200, RESCHEDULED, 0, 0),
        (3, 3, 900, RESCHEDULED, 0, 0),
        (4, 1, 300, RESCHEDULED, 1, 100),
        (6, 2, 400, FIRED, 2, 200),
        (9, 3, 50, FIRED, 3, 900),
        (10, 4, 800, KEPT, 4, 0),
        (12, 1, 240, FIRED, 4, 300),
    ]
    assert fired_marks(told) == [3, 1, 2]


def test_reschedule_leaves_what_is_beyond_its_bytes(log: Log, tmp_path: Path) -> None:
    assert MOVED_BYTES_MAX == RESCHEDULE_BYTES_MAX
    log.schedule(T, [(100, mark) for mark in range(3)], size=MOVED_BYTES_MAX // 2 + 1)
    log.reschedule(by_id([(100, 1), (100, 2), (100, 3)]), [200, 200, 200])
    log.fire(200, bytes_max=1 << 30)
    assert ends(read(log, tmp_path)) == [RESCHEDULED, FIRED, FIRED, FIRED]


def test_ack_counts_once_and_only_below_what_was_reserved(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, mark) for mark in range(5)])
    log.fire(100)
    group = log.group(T, "g")
    log.reserve(T, group, 3)
    log.ack(T, group, [0, 2, 3], at_ms=110)
    log.epoch(2)
    log.ack(T, group, [1, 2], at_ms=120)
    _, notes = read(log, tmp_path)
    found = [(offset, epoch, at_ms) for offset, _, _, epoch, at_ms in sorted(notes.acked[group])]
    assert found == [(0, 1, 110), (1, 2, 120), (2, 1, 110)]


def test_ack_knows_the_highest_attempt_that_was_possible_before_it(
    log: Log, tmp_path: Path
) -> None:
    log.schedule(T, [(100, mark) for mark in range(5)])
    log.fire(100)
    group = log.group(T, "g")
    log.reserve(T, group, 3)
    log.ack(T, group, [0])
    log.ended(T, group, [0, 1, 1])  # the first is acked, the second named twice
    log.ack(T, group, [1])
    log.ended(T, group, [1, 2])
    log.epoch(2)  # 2 may have been handed out, 3 and 4 were not reserved
    log.reserve(T, group, 5)
    log.ack(T, group, [2, 3])
    log.ended(T, group, [3, 4])
    log.recall(T, group, [4, 3])
    log.ack(T, group, [4])
    _, notes = read(log, tmp_path)
    assert [(offset, attempts) for offset, attempts, *_ in notes.acked[group]] == [
        (0, 1), (1, 2), (2, 3), (3, 1), (4, 3)
    ]  # fmt: skip
    assert [row[:3] for row in notes.returned[group]] == [
        (1, 1, "ended"), (2, 1, "ended"), (4, 1, "ended"), (4, 2, "recalled")
    ]  # fmt: skip


def test_nack_counts_an_attempt_once_and_knows_which_delivery_it_gave_back(
    log: Log, tmp_path: Path
) -> None:
    log.schedule(T, [(100, mark) for mark in range(3)])
    log.fire(100)
    group = log.group(T, "g")
    log.reserve(T, group, 3)
    log.ack(T, group, [0])
    log.nack(T, group, [2, 0, 2, 1, 9], [170, 171, 172, 173, 174])
    log.epoch(2)
    log.ended(T, group, [1])
    log.nack(T, group, [1], [190])
    log.ack(T, group, [1, 2])
    _, notes = read(log, tmp_path)
    assert [row[:4] for row in notes.returned[group]] == [
        (1, 1, "nacked", 173), (2, 1, "nacked", 170), (1, 3, "ended", 0), (1, 4, "nacked", 190)
    ]  # fmt: skip
    assert [row[:2] for row in notes.acked[group]] == [(0, 1), (1, 5), (2, 3)]


def test_moved_messages_are_acked_and_take_seqs_but_are_no_fates(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 0), (100, 1)])
    log.fire(100)
    group = log.group(T, "g")
    log.reserve(T, group, 2)
    log.ack(T, group, [0])
    log.move(T, group, [0, 1], "dead", "dead-letters", marks=[0, 1])
    log.schedule(T, [(900, 2)])
    log.entry(entry_frame.EntryKind.CHECKPOINT, b"")
    story, notes = read(log, tmp_path)
    assert [row[0] for row in notes.acked[group]] == [0, 1]
    seqs = [int(seq) for rows in notes.rows for seq in rows["seq"]]
    assert sorted(seqs) == [1, 2, 5], "two seqs for two offsets, one of them unused"
    assert notes.carries == [(group, 1, 4, 1, 0)]
    [dead] = [number for number, name in story.topics.items() if name == "dead"]
    assert (story.groups[2].name, story.queues[dead].end) == ("dead-letters", 1)
    assert story.checkpoints[-1][2:] == (4, 3)


def test_group_starts_at_the_earliest_message_that_is_kept(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, mark) for mark in range(5)])
    log.fire(100)
    first = log.group(T, "first")
    log.reserve(T, first, 5)
    log.ack(T, first, [0, 1, 3])
    log.group(T, "second")
    log.group(T, "latest", GroupStart.LATEST)
    log.group(T, "first")
    groups = read(log, tmp_path)[0].groups.values()
    assert [(g.name, g.start) for g in groups] == [("first", 0), ("second", 2), ("latest", 5)]


def test_replay_ends_where_it_is_told(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 1)])
    log.fire(100)
    assert ends(read(log, tmp_path, upto=3)) == [PENDING]
    assert ends(read(log, tmp_path, upto=4)) == [FIRED]


@pytest.mark.parametrize("cut", [1, 40, 41])
def test_torn_last_frame_is_left_out(log: Log, tmp_path: Path, cut: int) -> None:
    log.schedule(T, [(100, 1)])
    log.fire(100)
    write_log(tmp_path, log.frames)
    (part,) = segments(tmp_path)
    part.path.write_bytes(part.path.read_bytes()[:-cut])
    assert [*entries_of(tmp_path)][-1].index == 3


def entries_of(folder: Path) -> Iterator[Entry]:
    return segment_files.entries_of(Piece(segments(folder), LogIndex(1), EVERYTHING))


def many(log: Log, folder: Path) -> list[Path]:
    """Write eight entries in three segments; return their paths."""
    for mark in range(6):
        log.schedule(T, [(100, mark)])
    write_log(folder, log.frames, frames_per_segment=3)
    return [part.path for part in segments(folder)]


def test_damage_before_the_end_is_reported(log: Log, tmp_path: Path) -> None:
    first = many(log, tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(CorruptFileError):
        list(entries_of(tmp_path))


def test_segment_that_lost_whole_frames_is_reported(log: Log, tmp_path: Path) -> None:
    first = many(log, tmp_path)[0]
    (*_, last), data = log.frames[:3], first.read_bytes()
    first.write_bytes(data[: -len(last)])
    with pytest.raises(CorruptFileError, match="ends before entry 3"):
        list(entries_of(tmp_path))


@pytest.mark.parametrize(("first", "last"), [(1, 3), (2, 2), (3, 5), (4, 8), (7, 99)])
def test_piece_of_a_log_has_its_entries_and_no_others(
    log: Log, tmp_path: Path, first: int, last: int
) -> None:
    many(log, tmp_path)
    piece = Piece(segments(tmp_path), LogIndex(first), LogIndex(last))
    found = [item.index for item in segment_files.entries_of(piece)]
    assert found == [*range(first, min(last, 8) + 1)]


def test_damage_outside_of_a_piece_is_no_matter(log: Log, tmp_path: Path) -> None:
    many(log, tmp_path)[0].write_bytes(b"damaged")
    piece = Piece(segments(tmp_path), LogIndex(4), EVERYTHING)
    assert [item.index for item in segment_files.entries_of(piece)] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("pending_max", [1 << 20, 400])
def test_many_timers_are_told_apart(
    log: Log, tmp_path: Path, pending_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "AHEAD", 16)
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
    told = read(log, tmp_path, pending_max=pending_max)
    alive = [mark for mark in range(5_000) if mark % 7]
    assert fired_marks(told) == sorted(alive, key=lambda mark: (due[mark], mark))
    fired = told[1].table[told[1].table["end"] == FIRED]
    assert (fired["ended_at_ms"] >= due[fired["mark"]]).all()
    assert not [*(tmp_path / "spill").glob("*")]


SEEN: set[int] = set()
"""Ends that random logs came to so far."""


@pytest.mark.parametrize("seed", seeds(8, 30))
def test_replay_and_the_production_machine_tell_the_same_story(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two of three replays spill: hardly anything fits into memory.
    monkeypatch.setattr(pending, "AHEAD", 1 + seed % 4)
    few = {"SWEEP_TOPICS": (1, 16)[seed % 2], "SEARCH_BYTES_MAX": (30, 64 << 20)[seed // 2 % 2]}
    for name, value in few.items():
        monkeypatch.setattr(pauses, name, value)
        monkeypatch.setattr(held_story, name, value)
    log = random_log(random.Random(seed))
    machine = Machine(Store(RealDisk(), tmp_path))
    story, notes = read(log, tmp_path / "log", pending_max=(3, 20, 1 << 20)[seed % 3])
    for frame in entry_frame.frames(memoryview(b"".join(log.frames))):
        machine.apply(frame)
    table = notes.table
    counts = np.bincount(table["end"], minlength=len(ENDS))
    assert (story.timers, story.seqs + 1) == (machine.counts.scheduled, machine.next_seq)
    assert counts[[PENDING, HELD]].sum() == machine.counts.pending
    assert counts[HELD] == machine.store.held
    assert {*story.topics} - {*story.deleted} == {*machine.topics}
    assert counts[FIRED] == machine.counts.fired
    assert counts[[CANCELLED, REPLACED, RESCHEDULED]].sum() == machine.counts.cancelled
    assert counts[DROPPED] == machine.counts.dropped
    SEEN.update(np.flatnonzero(counts).tolist())
    pending_rows = table[np.isin(table["end"], (PENDING, HELD))]
    for due, seq in zip(pending_rows["due_ms"].tolist(), pending_rows["seq"].tolist(), strict=True):
        assert machine.store.find(UnixMs(due), seq) is not None
    assert story.last_read_time_ms == machine.last_read_time_ms
    for topic in machine.topics.values():
        rows = table[(table["topic"] == topic.topic_id) & (table["end"] == FIRED)]
        in_order = rows["seq"][np.argsort(rows["queue_offset"])].astype(np.uint64)
        assert chain(in_order) == topic.queue.chain
        for group in topic.groups.values():
            told, acks = story.groups[group.group_id], notes.acked.get(group.group_id, [])
            acked = np.array([offset for offset, *_ in acks], np.uint64)
            assert (told.name, told.acked_count) == (group.name, group.acked_count)
            assert (told.start <= told.cursor, told.cursor) == (True, group.cursor)
            assert int(mix(acked).sum(dtype=np.uint64)) == group.ack_sum


def test_random_logs_hold_every_end() -> None:
    assert {*range(len(ENDS))} == SEEN


def chain(seqs: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> int:
    """Return the chained hash that a queue keeps of the seqs at its offsets."""
    value = 0
    for each in mix(seqs).tolist():
        value = (value * 0x9E3779B97F4A7C15 + each) % (1 << 64)
    return value


KEYS = [b"", b"a", b"bb", b"ccc", b"eight by"]


EVENTS = [
    *(["schedule", "fire", "keyed"] * 4 + ["reschedule"] * 2),
    *("cancel", "group", "ack", "ended", "epoch", "by key", "late"),
]


def pause_policy(chance: random.Random, topics: list[TopicId], *, paused: bool) -> bytes:
    scope = chance.choice([CLUSTER, Scope("default"), *(Scope("", topic) for topic in topics)])
    said = True if paused else chance.choice([False, None])
    return encode_policy(
        scope, ScopePolicy(paused=said, catch_up=chance.choice([None, *CATCH_UPS]))
    )


def ask_the_gone(log: Log, topic: TopicId, now: int) -> None:
    log.schedule(topic, [(now + 7, 1)])
    log.cancel_keys([(topic, key) for key in KEYS[1:]])
    log.reschedule(by_key([(topic, key) for key in KEYS[1:]]), [now + 7] * 4)


def random_log(chance: random.Random, *, fates: bool = True) -> Log:
    """Return a log of two topics, at the edges of limits; `fates`: they are paused and deleted."""
    log, story = Log(), LogStory(Notes(), Path("never"))
    log.epoch(1)
    topics = [log.topic("a"), log.topic("b")]
    producer, sequence = log.producer(b"a" * 16), 0
    now, seq = 1_000, 0
    due: dict[int, int] = {}
    groups: list[tuple[TopicId, GroupId]] = []
    gone: list[TopicId] = []
    for _ in range(150):
        for frame in entry_frame.frames(memoryview(b"".join(log.frames[story.last_index :]))):
            story.apply(frame)
        topic = chance.choice(topics)
        ends = ["pause", "resume"] + ["delete"] * (chance.random() < 0.3)
        match chance.choice(EVENTS + ends * fates):
            case "pause" | "resume" as word:
                policy = pause_policy(chance, topics, paused=word == "pause")
                log.entry(EntryKind.POLICY, policy, at_ms=now)
            case "schedule":
                rows = [(now + chance.choice([-5, 0, 1, 7, 7, 300]), m) for m in range(5)]
                number = chance.choice([0, sequence, sequence + 1, sequence + 1, sequence + 2])
                given = (int(producer), number) if number else (0, 0)
                taken = number in (0, sequence + 1)
                sequence += number == sequence + 1
                log.schedule(topic, rows, producer=given, size=chance.choice([8, 50]))
                if taken:
                    due.update(enumerate((row_due for row_due, _ in rows), seq + 1))
                    seq += len(rows)
            case "keyed":
                rows = [(now + chance.choice([-5, 0, 1, 7, 300]), m) for m in range(4)]
                log.schedule(topic, rows, keys=chance.choices(KEYS, k=4),
                             on_conflict=chance.choice([*OnConflict]))  # fmt: skip
                due.update(enumerate((row_due for row_due, _ in rows), seq + 1))
                seq += len(rows)
            case "reschedule" if due:
                chosen = chance.choices(sorted(due)[-30:], k=3)
                targets: Targets = by_id([(due[s] + (s % 7 == 0), s) for s in chosen])
                if chance.random() < 0.5:
                    targets = by_key([(topic, key) for key in chance.choices(KEYS[1:], k=3)])
                to = [now + chance.choice([-5, 1, 7, 300]) for _ in range(3)]
                log.reschedule(targets, to)
                due.update(enumerate(to, seq + 1))
                seq += len(to)
            case "delete":
                log.delete_topic(topic, at_ms=now)
                gone.append(topic)
                topics[topics.index(topic)] = log.topic("ab"[topics.index(topic)])
            case "late" if gone:
                ask_the_gone(log, gone[-1], now)
                seq += 4
                due.update({seq - at: now + 7 for at in range(4)})
            case "by key":
                log.cancel_keys([(topic, key) for key in chance.choices(KEYS[1:], k=2)])
            case "fire":
                now += chance.choice([0, 1, 7, 50])
                read_ms = max(now - chance.choice([0, 0, 3]), story.last_read_time_ms)
                limit = chance.choice([1, 3, 1000])
                size, few = chance.choice([8, 100, 1 << 20]), chance.choice([1, 1000])
                log.fire(read_ms, rows_max=limit, bytes_max=size, topics_max=few)
            case "cancel" if due:
                chosen = chance.sample(sorted(due), min(3, len(due)))
                log.cancel([(due[s] + (s % 5 == 0), s) for s in chosen])
            case "group" if len(groups) < 4:
                start = chance.choice([GroupStart.EARLIEST, GroupStart.LATEST])
                groups.append((topic, log.group(topic, f"g{len(groups)}", start)))
            case "ack" if groups:
                mine, group = chance.choice(groups)
                end = story.queues[mine].end
                log.reserve(mine, group, chance.randrange(end + 10))
                offsets = sorted(chance.sample(range(end), min(9, end)))
                log.ack(mine, group, offsets, at_ms=now)
            case "ended" if groups:
                mine, group = chance.choice(groups)
                log.ended(mine, group, sorted(chance.sample(range(30), 9)))
            case "epoch":
                log.epoch(log.current + 1)
            case _:
                pass
    return log


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_pending_rows_leave_in_order_however_little_fits_into_memory(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "AHEAD", 1 + seed % 3)
    chance = random.Random(seed)
    few, all_ = WaitingRows(tmp_path / "few", rows_max=5 + seed), WaitingRows(tmp_path / "all")
    seq, read_ms, known = 0, 0, [(1, 1)]
    for index in range(1, 200):
        match chance.choice(["add", "add", "cancel", "take"]):
            case "add":
                dues = [read_ms + chance.choice([1, 1, 2, 50, 999]) for _ in range(9)]
                rows = np.zeros(len(dues), ROW)
                rows["due_ms"], rows["index"] = dues, index
                rows["seq"] = np.arange(seq + 1, seq + 10)
                known += zip(dues, rows["seq"].tolist(), strict=True)
                seq += 9
            case "cancel":
                targets = chance.choices(known[-60:], k=4)
                rows = np.zeros(len(targets), ROW)
                rows["due_ms"], rows["seq"] = zip(*targets, strict=True)
                rows["topic"], rows["index"] = TOMBSTONE, index
            case _:
                now, limit = read_ms + chance.choice([0, 1, 3, 40]), chance.choice([1, 4, 1000])
                one, other = (each.take(now, limit, 1 << 40) for each in (few, all_))
                assert one.limited == other.limited
                for a, b in zip(one[:3], other[:3], strict=True):
                    assert a.tolist() == b.tolist()
                read_ms = int(one.fired["due_ms"][-1]) if one.limited else now
                continue
        few.add(rows.copy())
        all_.add(rows)
    rest_of_few, rest = (
        np.concatenate([np.zeros(0, ROW), *(taken.fired for taken in each.rest())])
        for each in (few, all_)
    )
    assert rest_of_few.tolist() == rest.tolist()
    assert not [*(tmp_path / "few").glob("*")]


def test_tables_hold_what_the_story_told(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 7), (100, 8), (900, 9)], at_ms=5)
    log.cancel([(100, 2)], at_ms=6)
    log.epoch(2)
    log.fire(100)
    group = log.group(T, "g")
    log.reserve(T, group, 1)
    log.ended(T, group, [0])
    log.ack(T, group, [0], at_ms=120)
    log.entry(entry_frame.EntryKind.CHECKPOINT, b"", at_ms=130)
    write_log(tmp_path / "log", log.frames)
    whole = segments(tmp_path / "log")
    pieces = [Piece(whole, LogIndex(1), LogIndex(4)), Piece(whole, LogIndex(5), EVERYTHING)]
    figures = tables.replay(pieces, tmp_path / "out", tmp_path / "spill")
    assert figures == dict.fromkeys(ENDS, 0) | {
        "last_index": 11, "last_read_time_ms": 100, "scheduled": 3, "pending": 1, "fired": 1,
        "cancelled": 1,
    }  # fmt: skip
    fates = {row.pop("mark"): row for row in pq.read_table(tmp_path / "out/fates").to_pylist()}
    start = {"topic": "t", "schedule_index": 3, "scheduled_at_ms": 5, "payload_size": 8}
    start |= dict.fromkeys(("other_seq", "old_due_ms"))
    nothing = dict.fromkeys(("end_index", "end_epoch", "ended_at_ms", "queue_offset"))
    fired = {"end_index": 6, "end_epoch": 2, "ended_at_ms": 100, "queue_offset": 0}
    cancelled = {"end_index": 4, "end_epoch": 1, "ended_at_ms": 6, "queue_offset": None}
    assert fates == {
        7: {"seq": 1, "due_ms": 100, "end": "fired", **start, **fired},
        8: {"seq": 2, "due_ms": 100, "end": "cancelled", **start, **cancelled},
        9: {"seq": 3, "due_ms": 900, "end": "pending", **start, **nothing},
    }
    (ack,) = pq.read_table(tmp_path / "out/acks").to_pylist()
    assert ack == {
        "topic": "t", "group": "g", "queue_offset": 0, "attempts": 2, "ack_index": 10,
        "ack_epoch": 2, "acked_at_ms": 120, "count": 1,
    }  # fmt: skip
    (row,) = pq.read_table(tmp_path / "out/groups").to_pylist()
    assert row == {
        "topic": "t", "group": "g", "group_id": 1, "start_offset": 0, "kept_offset": 0, "acked": 1,
        "sought": False, "over": False, "deleted": False,
        "type": "shared",
    }  # fmt: skip
    (point,) = pq.read_table(tmp_path / "out/checkpoints").to_pylist()
    assert point == {"index": 11, "time_ms": 130, "scheduled": 3, "fired": 1}


def test_what_was_ready_since_the_epoch_began_is_told_where_a_quota_of_it_holds(
    tmp_path: Path,
) -> None:
    log = Log()
    log.epoch(1)
    topic, other = log.topic("t"), log.topic("no-groups")
    group = log.group(topic, "g")
    log.schedule(topic, [(100, mark) for mark in range(5)])
    log.fire(100)
    log.reserve(topic, group, 5)
    said = ScopePolicy(ready_max=3, ready_bytes_max=0, pending_bytes_max=9)
    log.entry(entry_frame.EntryKind.POLICY, encode_policy(CLUSTER, said))
    log.entry(
        entry_frame.EntryKind.POLICY, encode_policy(Scope("", topic), ScopePolicy(ready_max=4))
    )
    log.schedule(topic, [(900, 5)])  # nothing was ready as this epoch began
    log.epoch(2)
    log.schedule(topic, [(900, 6)])
    log.ack(topic, group, [0, 3])
    log.schedule(topic, [(100, 7), (900, 8)])  # due: one more is ready
    log.schedule(topic, [(900, 9)])
    log.schedule(other, [(900, 10)])
    write_log(tmp_path / "log", log.frames)
    pieces = [Piece(segments(tmp_path / "log"), LogIndex(1), EVERYTHING)]
    tables.replay(pieces, tmp_path / "out", tmp_path / "spill")
    noted: dict[str, list[Any]] = {}
    for row in pq.read_table(tmp_path / "out/quotas").to_pylist():
        noted.setdefault(row["quota"], []).append((row["topic"], row["most"], row["ready"]))
    assert noted["ready_max"] == [("t", 4, n) for n in (0, 5, 3, 3)] + [("no-groups", 3, 0)]
    assert noted["pending_bytes_max"] == [("t", 9, None)] * 4 + [("no-groups", 9, None)]
    assert {ready for _, _, ready in noted["ready_bytes_max"]} == {0}
    scopes = [row["topic"] for row in pq.read_table(tmp_path / "out/policies").to_pylist()]
    assert scopes == ["/", "t"]


def test_sought_and_deleted_groups_begin_anew_and_say_so(tmp_path: Path) -> None:
    log = Log()
    log.epoch(1)
    topic, other = log.topic("t"), log.topic("other")
    group = log.group(topic, "g", type="key_shared")
    kept, gone = (log.group(topic, name) for name in ("kept", "gone"))
    log.schedule(topic, [(100, 7), (100, 8), (100, 9)])
    log.fire(100, 10)
    log.reserve(topic, group, 3)
    log.ack(topic, group, [0, 1])
    log.op(GroupOp(Op.RECALL, topic, group, np.array([2], np.uint64)))
    log.op(GroupOp(Op.SEEK, topic, group, np.array([1], np.uint64)))
    log.op(GroupOp(Op.DELETE, topic, gone, np.zeros(0, np.uint64)))
    log.ack(topic, group, [2])
    log.ack(topic, gone, [0])
    log.ack(topic, GroupId(4), [1])
    log.move(topic, gone, [1], "dead", "")
    log.group(topic, "gone")
    log.ended(topic, GroupId(5), [0])
    log.group(other, "with its topic")
    log.entry(EntryKind.TOPIC, encode_delete_topic(other))
    write_log(tmp_path / "log", log.frames)
    pieces = [Piece(segments(tmp_path / "log"), LogIndex(1), EVERYTHING)]
    tables.replay(pieces, tmp_path / "out", tmp_path / "spill")
    rows = pq.read_table(tmp_path / "out/groups").to_pylist()
    assert {row["group"] for row in rows if row["type"] == "key_shared"} == {"g", f"g{LIFE}4"}
    columns = ("start_offset", "acked", "sought", "over", "deleted")
    assert {row["group"]: tuple(row[name] for name in columns) for row in rows} == {
        "kept": (0, 0, False, False, False),
        "gone": (0, 0, True, True, True),
        "g": (0, 2, True, True, False),
        f"g{LIFE}4": (1, 1, True, False, False),
        f"gone{LIFE}5": (0, 0, True, False, False),
        "with its topic": (0, 0, False, True, False),
    }
    assert {row["group_id"]: row["kept_offset"] for row in rows} == dict.fromkeys(range(1, 7), 0)
    acks = pq.read_table(tmp_path / "out/acks").to_pylist()
    runs = [(ack["group"], ack["queue_offset"], ack["count"], ack["attempts"]) for ack in acks]
    # What was handed out before a seek counts as delivered once.
    assert runs == [("g", 0, 2, 1), (f"g{LIFE}4", 1, 1, 2)]
    assert kept == 2
    assert not pq.read_table(tmp_path / "out/carried").num_rows, "its group was gone"


def test_dead_letter_and_its_redrive_are_told_with_what_they_were(log: Log, tmp_path: Path) -> None:
    log.schedule(T, [(100, 7), (100, 8), (100, 9)])
    log.fire(100)
    group = log.group(T, "g")
    log.reserve(T, group, 3)
    log.ack(T, group, [0])
    log.move(T, group, [1, 2], "t.g.dead", "dead-letters", marks=[8, 9])
    dead, letters = TopicId(2), GroupId(2)
    log.reserve(dead, letters, 2)
    log.epoch(2)
    log.move(dead, letters, [1], "t", "", marks=[9], at_ms=130)
    write_log(tmp_path / "log", log.frames)
    pieces = [Piece(segments(tmp_path / "log"), LogIndex(1), EVERYTHING)]
    figures = tables.replay(pieces, tmp_path / "out", tmp_path / "spill")
    rows = pq.read_table(tmp_path / "out/carried").to_pylist()
    columns = ("seq", "mark", "topic", "queue_offset", "end_epoch", "ended_at_ms")
    source = ("from_topic", "from_group", "from_offset", "redriven")
    assert [tuple(row[name] for name in (*columns, *source)) for row in rows] == [
        (4, 8, "t.g.dead", 0, 1, 100, "t", "g", 1, False),
        (5, 9, "t.g.dead", 1, 1, 100, "t", "g", 2, False),
        (6, 9, "t", 3, 2, 130, "t.g.dead", "dead-letters", 1, True),
    ]
    assert {row["end"] for row in rows} == {"fired"}
    assert figures["fired"] == 3, "of what was asked for"
