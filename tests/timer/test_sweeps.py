"""Sweeps of held timers: the progress by one FIRE, and the rows read for it before."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from tests.calls import calls_of
from tests.timer.machines import START_MS, flush, part_of
from tests.timer.pausing import Paused, settle
from timer.entries.policies import CATCH_UPS, Scope
from timer.model.columns import ROW
from timer.model.firing_order import START
from timer.model.units import LogIndex, TopicId
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.memory.held_rows import HELD_OFFSET_MS
from timer.pending.memory.memtable import Memtable
from timer.pending.runs.held_scan import LiveRows
from timer.pending.runs.run import Cursor
from timer.state.pauses import SWEEP_ROWS_MAX


def test_a_topic_is_swept_after_two_sweeps_however_often_others_are_resumed() -> None:
    paused = Paused()
    paused.log.topic("c")
    for topic in (2, 3):
        paused.say(Scope("", TopicId(topic)), paused=True)
    paused.machine.pauses.portion_rows = 50
    paused.schedule(*range(400), topic=2)
    paused.schedule(500, 510)
    paused.fire(600)
    paused.say(paused=False)
    for beat in range(2 * (400 // 50 + 1)):
        paused.say(Scope("", TopicId(3)), paused=False)
        paused.fire(600 + beat)
        paused.say(Scope("", TopicId(3)), paused=True)
    assert paused.fired() == [500, 510]


def test_a_sweep_meets_the_rows_of_its_own_topics_alone() -> None:
    paused = Paused()
    paused.machine.pauses.portion_rows = 8
    paused.schedule(*range(0, 40, 2))
    paused.schedule(*range(1, 40, 2), topic=2)
    paused.say(Scope("", TopicId(2)), paused=True)
    paused.fire(1)
    [*settle(paused, 50)]
    for flushed in (False, True):
        if flushed:
            paused.flush()
        topic = 2 if flushed else 1
        paused.say(Scope("", TopicId(topic)), paused=False)
        paused.catch_up()
        moved = [sum(len(seqs) for _, seqs in a[2]) for a in settle(paused, 50) if len(a) > 2]
        assert moved == [8, 8, 4]
    assert (len(paused.fired()), len(paused.fired(2)), paused.machine.store.held) == (20, 20, 0)


def test_a_topic_whose_last_overdue_timer_was_cancelled_is_in_the_next_digest() -> None:
    paused = Paused()
    paused.machine.pauses.portion_rows = 2
    paused.schedule(5, 6)
    paused.fire(10)
    paused.catch_up()
    paused.say(paused=False, catch_up="latest")
    [behind] = paused.schedule(8)
    paused.fire(10)
    paused.catch_up()
    release = paused.machine.topics[TopicId(1)].release
    assert release is not None
    assert release.last is not None
    paused.log.cancel([release.last, behind])
    paused.schedule(1)  # before the place of the sweep, so that the topic stays in it
    paused.catch_up()
    paused.machine.digest()
    paused.fire(10)
    paused.catch_up()
    left = paused.machine.topics[TopicId(1)].release
    assert left is not None
    assert left.last is None
    assert paused.machine.digest() == paused.machine.recomputed_digest()


def test_topics_are_swept_few_at_a_time_in_the_order_of_their_resumes() -> None:
    paused = Paused()
    names = [*range(3, 43)]
    for topic in names:
        paused.log.topic(f"t{topic}")
    paused.say(Scope("default"), paused=True)
    paused.say()  # of the first topic
    paused.catch_up()
    for topic in names:
        paused.schedule(*range(5), topic=topic)
    paused.fire(100)
    for at, topic in enumerate(reversed(names)):
        paused.log.now_ms = START_MS + 100 + at
        paused.say(Scope("", TopicId(topic)), paused=False)
    paused.catch_up()
    went = [[topic for topic, _ in a[2]] for a in settle(paused, 200) if len(a) > 2]
    assert max(map(len, went)) == 16
    assert [topic for some in went for topic in sorted(some, reverse=True)] == names[::-1]
    assert paused.machine.store.held == 0
    assert all(paused.fired(topic) == [*range(5)] for topic in names)


def test_a_resume_costs_what_it_resumes_whatever_others_hold() -> None:
    paused = Paused()
    names = [*range(3, 103)]
    for topic in names:
        paused.log.topic(f"t{topic}")
    paused.say(Scope("default"), paused=True)
    paused.catch_up()
    for topic in names:
        paused.schedule(*range(200), topic=topic)
    [*settle(paused, 300)]
    assert paused.machine.store.held > 4 * SWEEP_ROWS_MAX
    fires = 0
    for topic in names:
        paused.say(Scope("", TopicId(topic)), paused=False)
        fires += len([*settle(paused, 300)])
        assert paused.fired(topic) == [*range(200)], "in one FIRE"
    assert fires == len(names)


def test_a_sweep_of_very_much_looks_at_so_many_rows_at_a_time_whosever_they_are() -> None:
    paused = Paused()
    paused.machine.pauses.portion_rows = 8
    paused.machine.pauses.search_rows_max = 10
    paused.schedule(*range(0, 40, 2))
    paused.schedule(*range(1, 40, 2), topic=2)
    paused.say(Scope("", TopicId(2)), paused=True)
    paused.fire(1)
    [*settle(paused, 50)]
    paused.resume("all", 50)
    moved = [sum(len(seqs) for _, seqs in a[2]) if len(a) > 2 else 0 for a in settle(paused, 50)]
    assert moved == [4] * 5
    assert (len(paused.fired()), paused.machine.store.held) == (20, 20)


def test_a_fire_does_not_read_all_that_others_hold_where_that_is_many_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused = Paused()
    paused.machine.pauses.portion_rows = 100
    paused.machine.pauses.search_bytes_max = 1 << 20
    paused.say(Scope("", TopicId(2)), paused=True)
    wide = [(1, START_MS + due, b"p%04000d" % due) for due in range(3_000)]
    paused.log.schedule(part_of(wide))
    paused.schedule(*range(0, 3_000, 250), topic=2)
    paused.fire(3_000)
    paused.flush()
    assert paused.machine.held_bytes > 3_000 * 4_000
    paused.say(Scope("", TopicId(2)), paused=False)
    paused.catch_up()
    sizes: list[int] = []
    read = Cursor.read

    def counted(cursor: Cursor, *limits: int) -> Any:
        rows, data = read(cursor, *limits)
        sizes.append(len(data))
        return rows, data

    monkeypatch.setattr(Cursor, "read", counted)
    more = True
    while more:
        sizes.clear()
        more = paused.fire(3_000)[1]
        assert sum(sizes) <= 2 << 20, "some slices, and not all there is"
    assert paused.fired(2) == [*range(0, 3_000, 250)]


@pytest.mark.parametrize("catch_up", CATCH_UPS)
def test_topics_that_hold_nothing_wait_for_no_turn(catch_up: str) -> None:
    paused = Paused()
    names = [*range(3, 103)]
    for topic in names:
        paused.log.topic(f"t{topic}")
    paused.say(Scope("default"), paused=True)
    paused.catch_up()
    paused.schedule(200, topic=names[-1])
    paused.fire(50)
    paused.log.now_ms = START_MS + 100
    paused.say(Scope("default"), paused=False, catch_up=catch_up)
    paused.catch_up()
    assert not paused.fire(150)[1]
    assert not any(paused.machine.topics[TopicId(topic)].is_holding for topic in names)
    assert not paused.fire(250)[1]
    assert paused.fired(names[-1]) == [200]


def test_a_topic_that_holds_nothing_fires_while_others_are_swept() -> None:
    paused = Paused()
    paused.machine.pauses.portion_rows = 5
    paused.say(Scope("", TopicId(2)), paused=True)
    paused.schedule(*range(50))
    paused.fire(50)
    paused.resume("all", 60)
    assert paused.fire(60)[1]
    paused.say(Scope("", TopicId(2)), paused=False)
    paused.schedule(65, topic=2)
    assert paused.fire(70)[1]
    assert paused.fired(2) == [65]


def test_what_a_memtable_needs_for_held_rows_is_counted_however_few_come_at_a_time() -> None:
    topics, rounds = 200, 100
    rows = np.zeros(topics, ROW)
    rows["topic"] = np.arange(1, topics + 1)
    memtable = Memtable(START)
    memtable.hold(rows_of(rows, 0), {})
    size = memtable.size
    tracemalloc.start()
    try:
        for number in range(1, rounds):
            memtable.hold(rows_of(rows, number), {})
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    in_place = (rounds - 1) * topics * (ROW.itemsize + 8 + 1)  # there was room for them
    assert used <= 1.2 * (memtable.size - size - in_place)


def rows_of(rows: Any, number: int) -> Any:
    rows["due_ms"], rows["seq"] = (
        HELD_OFFSET_MS + number,
        np.arange(len(rows)) + number * len(rows) + 1,
    )
    return rows


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("end", ["deleted", "deleted midway", "cancelled", "released"])
def test_a_fire_reads_nothing_however_much_of_what_was_held_is_gone(
    end: str, flushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # P9: another replica's runs may no longer hold these rows, so they can't count as passed.
    paused = Paused()
    paused.say(Scope("", TopicId(2)), paused=True)
    many = paused.schedule(*range(20_000))
    few = paused.schedule(*range(0, 20_000, 100), topic=2)
    [*settle(paused, 20_000)]
    flush(paused.engine)
    if end == "deleted":
        paused.log.delete_topic(1)
    elif end == "cancelled":
        paused.cancel(*many)
    elif end == "released":
        paused.resume("all", 20_000)
        [*settle(paused, 20_000)]
    paused.schedule(*range(0, 20_000, 200), topic=2)
    paused.machine.pauses.portion_rows = 30
    paused.log.policy(Scope("", TopicId(2)))
    paused.log.now_ms += 1
    late = few[-10:]
    for number, timer in enumerate(late):
        if number == len(late) // 2 and end == "deleted midway":
            paused.log.delete_topic(1)
        paused.log.cancel([timer])
        paused.log.fire(paused.log.now_ms)
    for _ in late:
        paused.log.fire(paused.log.now_ms)
    paused.engine.raise_commit_index(LogIndex(len(paused.log.entries)))
    reads = calls_of(monkeypatch, Cursor, "read")
    while paused.engine.is_behind:
        first, last = paused.engine.next_chunk()
        entries = paused.log.entries[first - 1 : last]
        prefetch = paused.engine.begin_prefetch(entries)
        if prefetch is not None:
            prefetch.read()
            paused.engine.use_prefetch(prefetch)
        if flushes and (begun := paused.engine.begin_flush()) is not None:
            begun.write()
            paused.engine.end_flush(begun)
        reads.clear()
        paused.engine.fold(entries)
        assert not reads
    assert len(paused.fired(2)) == len(few) + 100 - len(late)
    assert paused.machine.store.held == 0
    assert not paused.machine.topics[TopicId(2)].is_holding


def test_a_sweep_whose_run_can_not_be_read_ends_the_node_and_is_not_tried_for_ever() -> None:
    paused = Paused()
    paused.schedule(*range(20_000))
    [*settle(paused, 20_000)]
    paused.flush()
    paused.log.policy(Scope("", TopicId(1)))
    paused.log.fire(paused.log.now_ms)
    paused.engine.raise_commit_index(LogIndex(len(paused.log.entries)))
    (run,) = paused.machine.store._runs.runs
    run._disk.remove(run._path)
    tried = 0
    while tried < 10:
        tried += 1
        first, last = paused.engine.next_chunk()
        entries = paused.log.entries[first - 1 : last]
        prefetch = paused.engine.begin_prefetch(entries)
        if prefetch is not None:
            prefetch.read()
            paused.engine.use_prefetch(prefetch)
        try:
            paused.engine.fold(entries)
        except FileNotFoundError:
            break
    assert tried < 10


def test_what_a_flush_puts_among_what_was_read_ahead_of_a_sweep_leaves_in_its_turn() -> None:
    paused = Paused()
    paused.machine.pauses.portion_rows = 10
    paused.schedule(*range(0, 200, 2))
    paused.fire(200)
    paused.flush()
    paused.resume("all", 200)
    assert paused.fire(200)[1]
    paused.schedule(151)
    paused.flush()
    [*settle(paused, 200)]
    assert paused.fired() == sorted([*range(0, 200, 2), 151])


def test_what_is_read_ahead_of_a_sweep_is_no_more_than_it_needs() -> None:
    paused = Paused()
    paused.machine.pauses.portion_rows = 100
    paused.schedule(*range(20_000))
    [*settle(paused, 20_000)]
    paused.flush()
    paused.resume("all", 20_000)
    portion = paused.machine.pauses.next_portion()
    assert portion is not None
    ahead = paused.machine.store.begin_prefetch([], portion)
    assert ahead is not None
    ahead.read()
    [reader] = ahead._readers
    assert 200 <= sum(len(kept.rows) for kept in reader._rows._read) <= 4_096
    [*settle(paused, 20_000)]
    assert paused.fired() == [*range(20_000)]


def test_what_was_read_for_other_topics_is_of_no_use_to_a_sweep_that_goes_by_more() -> None:
    one, two = TopicId(1), TopicId(2)
    others = DeletedTopics.all_but([one], TopicId(4))  # of topics 2 and 3 no row is left
    read = LiveRows([], others, START, lambda: 1)
    assert not read.continue_from(START, [], DeletedTopics.all_but([one, two], TopicId(4)))
    assert read.continue_from(START, [], others.plus(one))
