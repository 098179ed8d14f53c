"""P9: the cost of one entry is bounded, for any number of topics and dead rows."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.calls import calls_of
from tests.timer.leading import LEASE_MS, Play, delivered
from tests.timer.machines import START_MS, Log, catch_up, engine_on, flush, part_of, u64
from tests.timer.stores import read_ahead
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import FIRE_TOPICS_MAX, Fire, GroupSettings, Op
from timer.entries.policies import CATCH_UPS, DROP, Scope
from timer.entries.series_payloads import CreateSeries
from timer.leader.groups import group_leases
from timer.leader.groups.group_batch import GROUP_OFFSETS_MAX, OP_WEIGHT, Acks, GroupBatch
from timer.leader.groups.group_dispatch import STEP_GROUPS
from timer.leader.groups.group_leases import ACCEPT, Leases
from timer.leader.intake.count_limits import TOPIC_IDS_MAX
from timer.leader.leader import ENTRY_TOPICS_MAX
from timer.model.columns import decode_schedule
from timer.model.feature_level import LEVEL_OF_BOUNDED_SWEEPS
from timer.model.firing_order import START, Position
from timer.model.recurrence import SeriesSpec
from timer.model.timer_errors import LimitReachedError
from timer.model.units import GroupId, LogIndex, QueueOffset, TopicId, UnixMs
from timer.pending import read_view as cut_module
from timer.pending import store as store_module
from timer.pending.memory import memtable as memtable_module
from timer.pending.memory.memtable import PORTION_SIZE, SPARE_ROWS, Memtable
from timer.pending.read_view import Filter, ViewTally
from timer.pending.runs import run_index, run_writer
from timer.pending.runs.run import Run
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.recovery.engine import Engine
from timer.state.apply_results import FireApplied
from timer.state.dirty_topics import MANY, TopicSum
from timer.state.pauses import Pauses
from timer.state.producers import IDLE_MS_MAX, Producers
from timer.state.series_table import CHUNK, SeriesTable

DUE = START_MS + 10_000
INSERT = Memtable, "insert"


def begun(topics: int) -> tuple[Engine, Log]:
    engine, log = engine_on(SimDisk()), Log()
    log.begin_epoch()
    for number in range(topics):
        log.topic(f"crowd/{number}")
    catch_up(engine, log)
    return engine, log


def test_one_fire_moves_timers_of_so_many_topics_and_the_next_one_those_of_others() -> None:
    topics = 3 * FIRE_TOPICS_MAX // 2
    engine, log = begun(topics)
    log.schedule(part_of([(1 + number % topics, DUE, b"") for number in range(2 * topics)]))
    catch_up(engine, log)
    counts = engine.machine.counts
    moved: list[int] = []
    while counts.pending:
        fire = log.fire(*Fire(UnixMs(DUE)))
        applied = engine.machine.apply(fire)
        assert isinstance(applied, FireApplied)
        assert applied.limited == (counts.pending > 0)
        moved.append(len(applied.fired))
    assert moved == [FIRE_TOPICS_MAX] * 3
    assert counts.fired == 2 * topics


@pytest.mark.parametrize("dead", ["cancelled", "cancelled in files", "deleted"])
def test_a_thread_passes_what_is_dead_before_a_fire(
    dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "DEAD_MAX", 100)
    monkeypatch.setattr(store_module, "FIRE_CHUNK", 50)
    engine, log = begun(2)
    count = 1000
    log.schedule(part_of([(1, DUE + number, b"") for number in range(count)]))
    log.schedule(part_of([(2, DUE + count // 2, b"lives"), (2, DUE + count, b"lives")]))
    catch_up(engine, log)
    flush(engine)
    if dead == "deleted":
        log.delete_topic(1)
    else:
        log.cancel([(DUE + number, 1 + number) for number in range(count)])
    catch_up(engine, log)
    if dead == "cancelled in files":
        flush(engine)
    read_ahead(engine.machine.store, DUE + count)  # all of it is in memory, dead as it is
    fire = log.fire(DUE + count)
    engine.raise_commit_index(LogIndex(fire.index))
    assert engine.begin_prefetch([fire]) is None
    assert engine.fold([fire]) == 0
    prefetch = engine.begin_prefetch([fire])
    assert prefetch is not None
    prefetch.read()
    engine.use_prefetch(prefetch)
    assert engine.fold([fire]) == 1
    assert engine.machine.counts.fired == 2
    assert engine.machine.store.dead_rows_passed <= 100


def test_a_fire_before_the_first_run_passes_no_tombstones_of_a_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "DEAD_MAX", 100)
    engine, log = begun(2)
    count = 1000
    log.schedule(part_of([(1, DUE + number, b"") for number in range(count)]))
    catch_up(engine, log)
    engine.machine.store.freeze()
    log.cancel([(DUE + number, 1 + number) for number in range(count - 1)])
    catch_up(engine, log)
    fire = log.fire(DUE + count)
    engine.raise_commit_index(LogIndex(fire.index))
    assert engine.begin_prefetch([fire]) is None
    assert engine.fold([fire]) == 1, "no thread is asked: it has no run to read"
    assert engine.machine.counts.fired == 1
    assert engine.machine.store.dead_rows_passed == 0


def test_schedule_entries_take_requests_for_so_many_topics_together() -> None:
    play = Play()
    request = 3 * ENTRY_TOPICS_MAX // 4
    for number in range(2 * request):
        play.leader.create_topic(f"crowd/{number}", play.now, lambda _: None)
    play.settle()
    before = len(play.log.entries)
    ids = sorted(play.machine.topics)[-2 * request :]
    for start in (0, request):
        mine = part_of([(topic, DUE, b"") for topic in ids[start : start + request]])
        play.leader.schedule(mine, lambda _: None, play.now)
    play.settle()
    entries = [e for e in play.log.entries[before:] if e.kind is EntryKind.SCHEDULE]
    assert [len({*decode_schedule(e.payload).rows["topic"].tolist()}) for e in entries] == [
        request,
        request,
    ]


def test_a_group_entry_has_ops_of_so_many_groups() -> None:
    batch, groups = GroupBatch(), 3 * GROUP_OFFSETS_MAX // OP_WEIGHT
    for number in range(groups):
        group = Group(
            group_id=GroupId(number + 1),
            topic=TopicId(1),
            name=f"g{number}",
            settings=GroupSettings(lease_ms=1),
            cursor=QueueOffset(0),
            reserved=QueueOffset(9),
        )
        verdict = np.full(1, ACCEPT, np.uint8)
        batch.acks.append(Acks(group, group.group_id, verdict, u64([0]), None, lambda _: None))
    counts: list[int] = []
    while batch:
        counts.append(len(batch.take().ops()))
    assert sum(counts) == groups
    assert max(counts) < GROUP_OFFSETS_MAX // OP_WEIGHT


def test_a_checkpoint_finds_little_left_to_do_of_topics_that_changed_just_before() -> None:
    topics = 4 * MANY
    engine, log = begun(topics)
    log.checkpoint()
    log.schedule(part_of([(1 + number, DUE, b"") for number in range(topics)]))
    catch_up(engine, log)
    hashed = 0
    look = TopicSum._update

    def counted(self: TopicSum, *args: Any) -> None:
        nonlocal hashed
        hashed += 1
        look(self, *args)

    log.checkpoint()
    with mock.patch.object(TopicSum, "_update", counted):
        catch_up(engine, log)
    assert hashed <= 2 * MANY


def portions_of(engine: Engine, entry: Entry, *counted: tuple[type, str]) -> list[int]:
    """Fold an entry; return the number of calls of these methods in each portion."""
    calls, counts = 0, list[int]()

    def count_calls(cls: type, name: str) -> Any:
        method = getattr(cls, name)

        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return method(*args)

        return mock.patch.object(cls, name, call)

    engine.raise_commit_index(entry.index)
    with ExitStack() as patches:
        for cls, name in counted:
            patches.enter_context(count_calls(cls, name))
        while True:
            calls = 0
            done = engine.fold([entry])
            counts.append(calls)
            if done:
                return counts
            assert not engine.prepare_flush(0) or engine.begin_flush() is None, "it is halfway"


def test_a_policy_of_the_cluster_reaches_its_topics_in_portions() -> None:
    topics = 4 * MANY
    engine, log = begun(topics)
    log.schedule(part_of([(1 + number, DUE, b"") for number in range(topics)]))
    catch_up(engine, log)
    counted = (Pauses, "_apply_policy"), (Topic, "set_retention")
    pause = log.policy(Scope(""), paused=True, retention_ms=1)
    counts = portions_of(engine, pause, *counted)
    assert max(counts) == MANY
    assert sum(counts) == 2 * topics
    log.fire(DUE)
    catch_up(engine, log)
    assert engine.machine.held == topics
    engine.machine.pauses.search_rows_max = 0  # all take part in one sweep
    resume = log.policy(Scope(""), catch_up=DROP)
    assert max(portions_of(engine, resume, (Pauses, "_register"))) == MANY
    assert engine.machine.digest() == engine.machine.recomputed_digest()


@pytest.mark.parametrize("catch_up_by", CATCH_UPS)
def test_each_fire_releases_timers_of_so_many_resumed_topics(catch_up_by: str) -> None:
    topics = 4 * MANY
    engine, log = begun(topics)
    log.begin_epoch(LEVEL_OF_BOUNDED_SWEEPS)
    log.schedule(part_of([(1 + number, DUE, b"") for number in range(topics)] * 2))
    log.policy(Scope(""), paused=True)
    log.fire(DUE)
    catch_up(engine, log)
    engine.machine.pauses.search_rows_max = 0  # all take part in one sweep
    log.policy(Scope(""), paused=False, catch_up=catch_up_by)
    catch_up(engine, log)
    counts = list[int]()
    while engine.machine.pauses.next_portion():
        counted = (Pauses, "_divide"), (Topic, "end_pending")
        counts += portions_of(engine, log.fire(DUE, topics_max=2 * MANY), *counted)
    assert max(counts) <= 3 * MANY  # each topic of a portion, and the last timers of as many
    counts_of = engine.machine.counts
    fired = {"all": 2 * topics, "latest": topics, "drop": 0}[catch_up_by]
    assert (counts_of.fired, counts_of.dropped) == (fired, 2 * topics - fired)
    assert engine.machine.digest() == engine.machine.recomputed_digest()


def test_an_epoch_reaches_the_groups_of_all_topics_in_portions() -> None:
    topics = 4 * MANY
    engine, log = begun(topics)
    for number in range(topics):
        log.create_group(1 + number, "g")
        log.op(Op.RESERVE, 1 + number, 1 + number, [10])
    catch_up(engine, log)
    counts = portions_of(engine, log.begin_epoch(), (Group, "begin_epoch"))
    assert max(counts) == MANY
    assert sum(counts) == topics
    assert engine.machine.digest() == engine.machine.recomputed_digest()


def test_a_checkpoint_forgets_idle_producers_in_portions() -> None:
    engine, log = begun(1)
    idle = 4 * MANY + 1
    for number in range(idle):
        log.producer(number.to_bytes(16, "little"))
    catch_up(engine, log)
    log.now_ms += IDLE_MS_MAX + 1
    counts = portions_of(engine, log.checkpoint(), (Producers, "end"))
    assert max(counts) == MANY
    assert sum(counts) == idle
    assert len(engine.machine.producers) == 0
    assert engine.machine.digest() == engine.machine.recomputed_digest()


def test_a_deleted_topic_loses_its_series_in_portions_and_freed_places_cost_no_hash() -> None:
    engine, log = begun(2)
    spec, count = SeriesSpec(every_ms=1_000, start_ms=DUE), 3 * CHUNK
    for number in range(count + 9):
        topic = TopicId(2 if number % 341 == 0 else 1)
        log.series(CreateSeries(topic, b"k%d" % number, spec, UnixMs(START_MS)))
    log.occur([(series, 1, DUE, DUE) for series in range(1, 99)])
    catch_up(engine, log)
    series = engine.machine.series
    engine.machine.digest()
    counted = (SeriesTable, "_remove"), (SeriesTable, "sum")
    assert portions_of(engine, log.delete_topic(1), *counted) == [1, 1, 1, 0, 0]
    assert len(series) == 10
    assert len(series._bodies) < CHUNK, "the places of others were freed"
    assert series.ids_of(None, 0, count) == [*range(1, count + 9, 341)]
    assert [series.find(2, b"k%d" % number) for number in (0, 341)] == [1, 342]
    assert [*series.waiting] == [*range(342, count + 9, 341)]
    assert engine.machine.digest() == engine.machine.recomputed_digest()


def test_a_deleted_topic_loses_its_timers_in_memory_in_portions() -> None:
    engine, log = begun(2)
    count = 3 * PORTION_SIZE // engine.machine.store.memtable.rows.itemsize
    log.schedule(part_of([(1, DUE, b"")] * count), part_of([(2, DUE, b"")]))
    catch_up(engine, log)
    assert portions_of(engine, log.delete_topic(1), (Memtable, "kill")) == [1, 1, 1, 1, 0]
    assert engine.machine.store.memtable.dead == count
    log.fire(DUE)
    catch_up(engine, log)
    assert (engine.machine.counts.fired, engine.machine.counts.dropped) == (1, count)
    assert engine.machine.digest() == engine.machine.recomputed_digest()


def test_the_columns_of_tombstones_are_not_copied_as_they_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memtable = Memtable(START)
    copies = calls_of(monkeypatch, memtable_module, "_longer")
    for seq in range(0, 200_000, 10_000):
        seqs = np.arange(seq, seq + 10_000, dtype=np.uint64)
        memtable.add_tombstones(np.full(10_000, DUE), seqs, np.ones(10_000, np.uint32))
    assert memtable.tombstone_count == 200_000
    assert not copies


def test_memory_for_rows_is_touched_in_portions_before_they_are_inserted() -> None:
    engine, log = begun(1)
    row = engine.machine.store.memtable.rows.itemsize
    count = 2 * PORTION_SIZE // row
    counts = portions_of(engine, log.schedule(part_of([(1, DUE, b"")] * count)), INSERT)
    assert sum(counts) == counts[-1] == 1
    assert len(counts) > count * row // PORTION_SIZE
    assert engine.machine.store.pending == count
    few = log.schedule(part_of([(1, DUE, b"")] * SPARE_ROWS))
    assert portions_of(engine, few, INSERT) == [1], "there was memory for these"


def test_rows_are_copied_to_larger_arrays_in_portions() -> None:
    engine, log = begun(1)
    store, count = engine.machine.store, 3 * PORTION_SIZE // 56
    store._memtable = Memtable(store.position, capacity=count + 2 * SPARE_ROWS)
    log.schedule(part_of([(1, DUE + number, b"") for number in range(count)]))
    catch_up(engine, log)
    log.schedule(part_of([(1, DUE, b"")] * SPARE_ROWS))
    catch_up(engine, log)
    assert len(store.memtable.rows) == count + 2 * SPARE_ROWS
    portions = portions_of(engine, log.schedule(part_of([(1, DUE, b"")])), INSERT)
    assert sum(portions) == portions[-1] == 1
    assert len(portions) > 3
    assert len(store.memtable.rows) == 2 * (count + 2 * SPARE_ROWS)
    while store.pending:
        log.fire(DUE + count)
        catch_up(engine, log)
    assert engine.machine.counts.fired == count + SPARE_ROWS + 1
    assert engine.machine.digest() == engine.machine.recomputed_digest()


def test_leases_of_many_groups_that_end_at_once_end_in_many_steps() -> None:
    play, ended = Play(), list[int]()
    groups = [play.make_group(f"g{number}") for number in range(2 * STEP_GROUPS + 1)]
    for group in groups:
        play.join(group)
    play.settle()
    play.schedule("s", 0)
    play.settle()
    while play.deliver():
        pass
    assert len(play.deliveries) == len(groups)
    play.wait(LEASE_MS)
    while sum(ended) < len(groups):
        assert play.leader.wake_at_ms(play.now) <= play.mono_ms
        with mock.patch.object(Leases, "expire", autospec=True, side_effect=Leases.expire) as end:
            play.step()
            ended.append(end.call_count)
        play.commit()
    assert ended == [STEP_GROUPS, STEP_GROUPS, 1]
    play.settle()
    while play.deliver():
        pass
    assert len(play.deliveries) == 2 * len(groups)


def test_a_topic_beyond_the_last_id_is_refused_before_it_is_appended() -> None:
    play = Play()
    play.machine.next_topic_id = TopicId(TOPIC_IDS_MAX)
    before = len(play.log.entries)
    with pytest.raises(LimitReachedError, match="topic ids"):
        play.leader.create_topic("one/more", play.now, lambda _: None)
    assert len(play.log.entries) == before


def test_pages_of_what_lies_in_memory_sort_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, log = begun(1)
    count = 500
    log.schedule(part_of([(1, DUE + number * 7 % 100, b"") for number in range(count)]))
    catch_up(engine, log)
    sorts = calls_of(monkeypatch, cut_module, "merge_order")
    what = Filter(topic=1, due_from_ms=0, due_to_ms=1 << 47)
    seen: Position | None = what.start
    found: list[tuple[int, int]] = []
    while seen is not None:
        page = engine.machine.store.read_view().page(what, seen, 10)
        rows = page.timers.rows
        found += zip(rows["due_ms"].tolist(), rows["seq"].tolist(), strict=True)
        seen = page.next
    assert found == sorted((DUE + number * 7 % 100, 1 + number) for number in range(count))
    assert sum(len(due) for due, _ in sorts) == count


def test_pages_pass_no_tombstones_of_the_pages_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, log = begun(1)
    log.schedule(part_of([(1, DUE + number, b"") for number in range(300)]))
    catch_up(engine, log)
    flush(engine)
    steps = calls_of(monkeypatch, cut_module, "_Step")
    what = Filter(topic=1, due_from_ms=0, due_to_ms=1 << 47)
    seen: Position | None = what.start
    while seen is not None:
        page = engine.machine.store.read_view().page(what, seen, 50)
        rows, seen = page.timers.rows, page.next
        if not len(rows):
            continue
        log.cancel([*zip(rows["due_ms"].tolist(), rows["seq"].tolist(), strict=True)])
        catch_up(engine, log)
    assert not engine.machine.counts.pending
    assert max(len(dead) for _, _, dead, *_ in steps) == 1, (
        "that of the last row of the page before"
    )


def test_acks_of_unacked_messages_search_no_dead_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = calls_of(monkeypatch, group_leases, "end_verdicts")
    play = Play()
    _, _ = delivered(play, 0, 0)
    play.ack("first", play.deliveries[-1], [0])
    play.settle()
    assert not searches
    play.ack("again", play.deliveries[-1], [0, 1])
    play.settle()
    assert [offsets.tolist() for _, offsets in searches] == [[0]]


def test_search_for_a_prefix_of_keys_handles_only_matching_rows_of_runs_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, log = begun(1)
    keys = [b"order-%d-%d" % (number, number % 3) for number in range(500)]
    log.schedule(part_of([(1, DUE + number, b"") for number in range(len(keys))], keys=keys))
    catch_up(engine, log)
    flush(engine)
    handled, rows_of = 0, cut_module._Step.rows

    def counted(step: Any) -> Any:
        nonlocal handled
        for each in rows_of(step):
            handled += 1
            yield each

    monkeypatch.setattr(cut_module._Step, "rows", counted)
    for prefix in (b"order-77-2", b"order-4", b"order-", b"order-77-20", b"other"):
        handled, wanted = 0, [at for at, key in enumerate(keys, 1) if key.startswith(prefix)]
        what = Filter(topic=1, due_from_ms=0, due_to_ms=1 << 47, key_prefix=prefix)
        page = engine.machine.store.read_view().page(what, what.start, len(keys) + 1)
        assert page.timers.rows["seq"].tolist() == wanted
        assert engine.machine.store.read_view().tally(what, what.start) == ViewTally(
            len(wanted), None
        )
        assert handled == len(wanted)


def test_pages_of_a_topic_read_only_batches_of_runs_with_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_writer, "BATCH_ROWS_MAX", 4)
    engine, log = begun(3)
    log.schedule(
        part_of([(2 if number in (50, 51) else 1, DUE + number, b"") for number in range(100)])
    )
    catch_up(engine, log)
    flush(engine)
    log.cancel([(DUE + number, 1 + number) for number in (7, 50)])
    catch_up(engine, log)
    flush(engine)
    assert [len(run) for run in engine.machine.store._runs.runs] == [25, 1]
    for topic, seqs, batches in (
        (1, [seq for seq in range(1, 101) if seq not in (8, 51, 52)], 26),
        (2, [52], 2),
        (3, [], 0),
    ):
        what = Filter(topic=topic, due_from_ms=0, due_to_ms=1 << 47)
        with mock.patch.object(Run, "head", autospec=True, side_effect=Run.head) as head:
            page = engine.machine.store.read_view().page(what, what.start, 100)
            assert (page.timers.rows["seq"].tolist(), page.next) == (seqs, None)
            assert head.call_count == batches


@pytest.mark.parametrize("page_rows", [1, 3, 100])
def test_pages_go_on_within_a_stripe_of_several_batches(
    monkeypatch: pytest.MonkeyPatch, page_rows: int
) -> None:
    monkeypatch.setattr(run_writer, "BATCH_ROWS_MAX", 4)
    monkeypatch.setattr(run_index, "TOPIC_ROWS_MAX", 8)
    engine, log = begun(3)
    topics = [1 + number // 20 % 3 for number in range(100)]
    log.schedule(part_of([(topic, DUE + number, b"") for number, topic in enumerate(topics)]))
    catch_up(engine, log)
    flush(engine)
    store = engine.machine.store
    assert store._runs.runs[0].meta.stripe > 1
    for topic in (1, 2, 3):
        what = Filter(topic=topic, due_from_ms=0, due_to_ms=1 << 47)
        found, at = list[int](), what.start
        for _ in topics:
            page = store.read_view().page(what, at, page_rows)
            found += page.timers.rows["seq"].tolist()
            if page.next is None:
                break
            at = page.next
        else:
            raise AssertionError(f"the list of topic {topic} does not end")
        assert found == [1 + number for number, each in enumerate(topics) if each == topic]


def test_count_by_a_prefix_of_keys_reads_a_bounded_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cut_module, "PART_ROWS", 50)
    monkeypatch.setattr(cut_module, "SCAN_ROWS_MAX", 100)
    engine, log = begun(1)
    keys = [b"%d-%d" % (number % 2, number) for number in range(1_000)]
    log.schedule(part_of([(1, DUE + number, b"") for number in range(len(keys))], keys=keys))
    catch_up(engine, log)
    what = Filter(topic=1, due_from_ms=0, due_to_ms=1 << 47, key_prefix=b"1-")
    counts, seen = [], what.start
    while (part := engine.machine.store.read_view().tally(what, seen)).next is not None:
        counts.append(part.timers)
        seen = part.next
    assert [*counts, part.timers] == [50] * 10
    every = replace(what, key_prefix=b"")
    assert engine.machine.store.read_view().tally(every, every.start) == ViewTally(1_000, None)
