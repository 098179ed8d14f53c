"""The store against a naive model, on a leader and a follower, with other files in each."""

import random
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.calls import calls_of
from tests.seeds import seeds
from tests.timer.stores import (
    ALL,
    BYTES_MAX,
    NOW,
    OFFSETS,
    ROWS_MAX,
    STEPS,
    Comparison,
    batch,
    make_small,
    merge_all,
    read_ahead,
    run_program,
    timers_of,
)
from timer.files.disk import RealDisk
from timer.model.firing_order import Position
from timer.model.timer_errors import CorruptFileError
from timer.model.timer_id import SEQ_MAX
from timer.model.units import TopicId, UnixMs
from timer.pending.fire_limits import FiredRows
from timer.pending.runs import merge_plan, run_set
from timer.pending.runs import read_window as window
from timer.pending.runs.read_window import ReadWindow
from timer.pending.runs.run import RunMeta
from timer.pending.runs.run_writer import RunWriter
from timer.pending.store import Store

BIT = st.integers(0, 1)
PICK = st.integers(0, 100)


class Rules(RuleBasedStateMachine):
    """A Comparison as a Hypothesis state machine, which finds short programs."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.pair = Comparison(self.root)

    @rule(
        offsets=st.lists(st.sampled_from(OFFSETS), min_size=1, max_size=30),
        gap=st.integers(0, 2),
        skipped=st.integers(0, 2),
    )
    def insert(self, offsets: list[int], gap: int, skipped: int) -> None:
        self.pair.insert(offsets, gap, skipped)

    @rule(picks=st.lists(PICK, min_size=1, max_size=6), unknown=st.booleans())
    def cancel(self, picks: list[int], unknown: bool) -> None:
        self.pair.cancel(picks, unknown)

    @rule(
        step=st.sampled_from(STEPS),
        rows_max=st.sampled_from(ROWS_MAX),
        bytes_max=st.sampled_from(BYTES_MAX),
    )
    def tick(self, step: int, rows_max: int, bytes_max: int) -> None:
        self.pair.tick(step, rows_max, bytes_max)

    @rule(which=BIT, whole=st.booleans())
    def flush(self, which: int, whole: bool) -> None:
        if whole:
            self.pair.flush(which)
        else:
            self.pair.freeze_or_install(which)

    @rule(which=BIT, at_once=st.booleans())
    def merge(self, which: int, at_once: bool) -> None:
        self.pair.merge(which, at_once)

    @rule(which=BIT)
    def restart(self, which: int) -> None:
        self.pair.restart(which)

    @rule(which=BIT, at_once=st.booleans())
    def read_ahead(self, which: int, at_once: bool) -> None:
        self.pair.read_ahead(which, at_once)

    @rule(roles=st.booleans(), pick=PICK)
    def look(self, roles: bool, pick: int) -> None:
        if roles:
            self.pair.change_roles()
        self.pair.look_up(pick)

    @invariant()
    def all_agree(self) -> None:
        self.pair.check()

    def teardown(self) -> None:
        shutil.rmtree(self.root)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.mark.usefixtures("small")
def test_leader_follower_and_model_agree_on_short_programs() -> None:
    run_state_machine_as_test(
        Rules,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_leader_follower_and_model_agree_on_long_programs(seed: int, tmp_path: Path) -> None:
    run_program(Comparison(tmp_path), random.Random(seed), steps=300)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(RealDisk(), tmp_path)
    store.fire(UnixMs(NOW), 1, 1)
    return store


def flush(store: Store) -> RunMeta | None:
    frozen = store.freeze()
    windows = store.write_run(frozen)
    store.install(frozen, windows)
    return windows[0].run.meta if windows else None


def fire_all(store: Store, read_time_ms: int = NOW + 1_000_000) -> FiredRows:
    return store.fire(UnixMs(read_time_ms), ALL, ALL)


def test_flush_of_what_has_ended_writes_no_run(store: Store, tmp_path: Path) -> None:
    store.insert(*batch(1, [NOW + 1, NOW + 2]))
    store.cancel(np.array([NOW + 2]), np.array([2], np.uint64))
    store.fire(UnixMs(NOW + 1), ALL, ALL)
    assert flush(store) is None
    assert list((tmp_path / "runs").iterdir()) == []


def test_next_due_is_exact_in_memory_and_at_the_front_of_a_run(store: Store) -> None:
    store.lead()
    assert store.next_due() is None
    store.insert(*batch(1, [NOW + 70_000, NOW + 50, NOW + (1 << 40)]))
    assert store.next_due() == NOW + 50
    store.cancel(np.array([NOW + 50]), np.array([2], np.uint64))
    assert store.next_due() == NOW + 70_000
    flush(store)
    assert store.next_due() == NOW + 70_000
    store.fire(UnixMs(NOW + 70_000), ALL, ALL)
    assert store.next_due() == NOW + (1 << 40)


def test_runs_are_asked_for_the_next_due_once_until_it_has_passed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = calls_of(monkeypatch, ReadWindow, "next_due")
    for first_seq, due in ((1, NOW + 50), (2, NOW + 70), (3, NOW + 60)):
        store.insert(*batch(first_seq, [due]))
        flush(store)
        assert store.next_due() == NOW + 50
    asked.clear()
    for _ in range(10):
        store.fire(UnixMs(NOW + 49), ALL, ALL)
        assert store.next_due() == NOW + 50
    assert not asked
    store.fire(UnixMs(NOW + 50), ALL, ALL)
    assert store.next_due() == NOW + 60
    assert len(asked) == 3


def test_cancel_of_a_row_in_a_run_stays_through_flushes_and_merges(store: Store) -> None:
    store.insert(*batch(1, [NOW + 100 + i for i in range(20)]))
    flush(store)
    target = np.array([NOW + 104]), np.array([5], np.uint64)
    assert store.cancel(*target)[0].all()
    meta = flush(store)
    assert meta is not None
    assert meta.tombstones == meta.rows == 1
    assert not store.cancel(*target)[0].any()
    assert store.find(UnixMs(NOW + 104), 5) is None
    assert fire_all(store).rows["seq"].tolist() == [seq for seq in range(1, 21) if seq != 5]


def test_merge_keeps_a_tombstone_only_while_its_target_is_outside(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[list[int]] = [[1, 2], [0, 1]]
    monkeypatch.setattr(run_set, "plan", lambda *_: chosen.pop(0))
    store.insert(*batch(1, [NOW + 100] * 500))
    flush(store)
    for first in (1_001, 2_001):
        store.insert(*batch(first, [NOW + 100] * 5))
        store.cancel(np.full(1, NOW + 100), np.array([first // 1_000], np.uint64))
        flush(store)
    assert [(meta.tombstones, meta.rows) for meta in store.runs] == [(0, 500), (1, 6), (1, 6)]
    for left in ([(0, 500), (2, 12)], [(0, 508)]):
        merge = store.begin_merge()
        assert merge is not None
        store.install_merge(merge, store.write_merge(merge))
        assert [(meta.tombstones, meta.rows) for meta in store.runs] == left


def test_tombstones_that_gather_are_merged_with_what_lies_under_them(store: Store) -> None:
    store.insert(*batch(1, [NOW + 1_000 + i for i in range(400)]))
    flush(store)
    for first in range(1, 400, 50):
        seq = np.arange(first, first + 40, dtype=np.uint64)
        assert store.cancel(NOW + 999 + seq.astype(np.int64), seq)[0].all()
        flush(store)
        merge_all(store)
        written = sum(meta.rows for meta in store.runs)
        assert written <= 2 * store.pending
    assert store.pending == 80


def test_merge_writes_parts_side_by_side_and_each_leaves_unread_when_it_is_past(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (merge_plan, run_set):
        monkeypatch.setattr(module, "PART_SIZE", 20_000)
    for first in range(1, 6_001, 500):
        store.insert(*batch(first, [NOW + 1 + i for i in range(500)]))
        flush(store)
    assert merge_all(store) == 1
    parts = store.runs
    assert len(parts) > 8
    assert all(a.last < b.first for a, b in pairwise(parts))
    assert [meta for meta in parts if meta.size < 20_000] == []
    assert [meta for meta in parts if meta.size > 45_000] == []
    middle = parts[len(parts) // 2]
    for meta in parts[: len(parts) // 2]:
        data = (tmp_path / "runs" / meta.name).read_bytes()
        (tmp_path / "runs" / meta.name).write_bytes(b"x" * len(data))
    store._runs._windows = [w for w in store._runs._windows if w.run.meta.last >= middle.first]
    fire_all(store, middle.first.due_ms)
    flush(store)
    assert merge_all(store) == 0
    assert store.runs[0] == middle


def test_merge_that_meets_damage_leaves_no_parts(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(1, 60_001, 5_000):
        store.insert(*batch(first, [NOW + 90_000 + i for i in range(5_000)]))
        flush(store)
    for module in (merge_plan, run_set):
        monkeypatch.setattr(module, "PART_SIZE", 20_000)
    written, finish = list[RunMeta](), RunWriter.finish

    def noted(writer: RunWriter) -> RunMeta:
        written.append(finish(writer))
        return written[-1]

    monkeypatch.setattr(RunWriter, "finish", noted)
    merge = store.begin_merge()
    assert merge is not None
    run = merge.runs[-1]
    data = bytearray(run.path.read_bytes())
    data[int(run._batches[-1]["position"]) + 50] ^= 1
    run.path.write_bytes(data)
    (tmp_path / "runs" / "an operator's note").touch()
    with pytest.raises(CorruptFileError) as met:
        store.write_merge(merge)
    assert written
    store.leave_out(met.value, merge)
    names = {name for meta in store.runs for name in meta.names}
    assert {each.name for each in (tmp_path / "runs").iterdir()} == names | {"an operator's note"}


def test_past_runs_stay_until_a_manifest_without_them_is_durable(
    store: Store, tmp_path: Path
) -> None:
    store.insert(*batch(1, [NOW + 1] * 5))
    flush(store)
    fire_all(store)
    assert len(store.runs) == 1  # the manifest of the last flush names it
    flush(store)
    assert store.runs == []
    assert len(store.retired) == 1
    retired = store.retired
    (tmp_path / "runs" / retired[0].name).unlink()  # gone already: nothing is left to be removed
    store.remove(retired)
    store.forget(retired)
    assert store.retired == []
    assert list((tmp_path / "runs").iterdir()) == []


def test_runs_of_a_merge_stay_until_it_ends_though_their_time_passes(store: Store) -> None:
    for first in range(1, 9):
        store.insert(*batch(first, [NOW + first]))
        flush(store)
    merge = store.begin_merge()
    assert merge is not None
    fire_all(store)
    flush(store)
    assert store.retired == []
    store.install_merge(merge, store.write_merge(merge))
    assert len(store.retired) == 8


@pytest.mark.parametrize("merged", ["before the flush", "while it goes on", "after it"])
def test_manifest_of_a_freeze_is_whole_whenever_a_merge_ends(tmp_path: Path, merged: str) -> None:
    store = Store(RealDisk(), tmp_path)
    for first in range(1, 81, 10):
        store.insert(*batch(first, [NOW + first, NOW + 100]))
        flush(store)
    store.fire(UnixMs(NOW + 20), ALL, ALL)
    if merged == "before the flush":
        assert merge_all(store) == 1
    then = store.runs, store.position, store.pending
    frozen = store.freeze()
    fired = store.fire(UnixMs(NOW + 85), ALL, ALL)
    assert fired.rows["seq"].tolist() == [*range(21, 81, 10)]
    if merged == "while it goes on":
        assert merge_all(store) == 1
    store.install(frozen, store.write_run(frozen))
    if merged == "after it":
        assert merge_all(store) == 1
    again = Store.recover(RealDisk(), tmp_path, *then)
    assert timers_of(*again.fire(UnixMs(NOW + 85), ALL, ALL)[:2]) == timers_of(*fired[:2])
    assert again.pending == store.pending


# ---- reading ahead


def far_store(tmp_path: Path, count: int = 3) -> Store:
    """Return a store with `count` runs, each with a row every 10 ms for 10 s."""
    store = Store(RealDisk(), tmp_path)
    store.fire(UnixMs(NOW), 1, 1)
    for first in range(count):
        store.insert(*batch(1 + 1_000 * first, [NOW + 10_000 + 10 * i for i in range(1_000)]))
        flush(store)
    return store


@pytest.fixture
def cold_reads(monkeypatch: pytest.MonkeyPatch) -> list[window.ReadWindow]:
    """Return a list that gets a window whenever a FIRE has to read a slice of it."""
    found: list[window.ReadWindow] = []
    load = window.ReadWindow._load_slice

    def noted(self: window.ReadWindow, until_ms: int) -> None:
        found.append(self)
        load(self, until_ms)

    monkeypatch.setattr(window.ReadWindow, "_load_slice", noted)
    return found


def test_what_was_read_ahead_fires_without_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold_reads: list[window.ReadWindow]
) -> None:
    monkeypatch.setattr(window, "SLICE_ROWS_MIN", 16)
    store = far_store(tmp_path)
    for now in range(NOW, NOW + 22_000, 500):
        read_ahead(store, now)
        store.fire(UnixMs(now), ALL, ALL)
    assert store.pending == 0
    assert not cold_reads


def test_new_runs_and_parts_are_loaded_before_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold_reads: list[window.ReadWindow]
) -> None:
    monkeypatch.setattr(window, "SLICE_ROWS_MIN", 16)
    store = far_store(tmp_path, 8)
    for now in range(NOW, NOW + 20_500, 500):
        read_ahead(store, now)
        store.fire(UnixMs(now), ALL, ALL)
        if now == NOW + 12_000:
            store.insert(*batch(20_001, [now + i for i in range(1, 3_000)]))
            flush(store)
        if now == NOW + 13_000:
            assert merge_all(store) == 1
    assert store.pending == 0
    assert not cold_reads


def test_ahead_that_comes_late_is_not_used(
    tmp_path: Path, cold_reads: list[window.ReadWindow]
) -> None:
    store = far_store(tmp_path)
    late = store.begin_read_ahead(UnixMs(NOW + 9_500))
    assert late is not None
    late.read()
    fired = store.fire(UnixMs(NOW + 15_000), ALL, ALL).rows["seq"].tolist()
    assert cold_reads
    store.end_read_ahead(late)
    fired += fire_all(store).rows["seq"].tolist()
    assert sorted(fired) == list(range(1, 3_001))


def test_ahead_of_runs_that_were_merged_and_removed_is_given_up(tmp_path: Path) -> None:
    store = far_store(tmp_path, 8)
    ahead = store.begin_read_ahead(UnixMs(NOW + 9_500))
    assert ahead is not None
    assert merge_all(store) == 1
    store.remove(store.retired)
    ahead.read()
    store.end_read_ahead(ahead)
    assert len(fire_all(store).rows) == 8_000


def test_ahead_reads_the_earliest_rows_of_all_runs_up_to_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "SLICE_ROWS_MIN", 16)
    monkeypatch.setattr(window, "SLICE_SIZE_MAX", 100)
    monkeypatch.setattr(run_set, "LOADED_SIZE_MAX", 20_000)
    store = far_store(tmp_path)
    read_ahead(store, NOW + 9_999)
    loaded = [sum(len(piece.due) for piece in w._slices) for w in store._runs._windows]
    assert max(loaded) - min(loaded) <= 32
    assert 100 < sum(loaded) < 300
    before = store._runs.loaded_size
    read_ahead(store, NOW + 9_999)
    assert store._runs.loaded_size == before


def test_recover_removes_orphans_and_never_uses_their_numbers(tmp_path: Path) -> None:
    store = Store(RealDisk(), tmp_path)
    store.insert(*batch(1, [NOW] * 5))
    kept = flush(store)
    store.insert(*batch(6, [NOW] * 5))
    orphan = flush(store)
    assert kept is not None
    assert orphan is not None
    store = Store.recover(RealDisk(), tmp_path, [kept], Position(0, SEQ_MAX), 5)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == kept.names
    assert store.freeze().numbers[0] > orphan.number


def test_fired_rows_keep_only_the_buffers_they_point_into(store: Store) -> None:
    for first in range(1, 40, 4):
        store.insert(*batch(first, [NOW + first] * 4))
    fired = store.fire(UnixMs(NOW + 9), ALL, ALL)
    assert len(fired.bufs) == 3
    assert timers_of(fired.rows, fired.bufs)[-1][1][2] == b"p12" * 0
    assert timers_of(fired.rows, fired.bufs)[-2][1][2] == b"p11" * 3


def test_dead_rows_of_the_memtable_are_counted_and_no_others(store: Store) -> None:
    store.insert(*batch(1, [NOW + 10, NOW + 10, NOW + 60_000]))
    flush(store)
    dues = [NOW + 10, NOW + 20, NOW + 20, NOW + 60_000, NOW + 70_000]
    store.insert(*batch(4, dues))
    store.fire(UnixMs(NOW + 10), ALL, ALL)
    assert store.memtable.dead == 1, "two more of the fired rows lay in a run"
    store.cancel(np.array([NOW + 20, NOW + 60_000]), np.array([5, 3], np.uint64))
    assert (store.memtable.dead, store.memtable.is_mostly_dead) == (2, False)
    store.fire(UnixMs(NOW + 20), ALL, ALL)
    assert (store.memtable.dead, store.memtable.is_mostly_dead) == (3, True)
    topic = TopicId(int(store.memtable.rows["topic"][3]))
    assert [*store.kill_topic(topic)]
    assert store.memtable.dead == 4, "another row of this topic had fired"
    assert [*store.kill_topic(topic)]
    assert store.memtable.dead == 4, "a dead row is not counted twice"
    store.drop_topic(topic, 1, 0)
    flush(store)
    assert (store.memtable.dead, store.memtable.is_mostly_dead) == (0, False)


def test_memory_does_not_grow_with_the_rows_in_runs(store: Store) -> None:
    store.insert(*batch(1, [NOW + 60_000 + i for i in range(5_000)]))
    before = store.memtable.size
    flush(store)
    assert store.memtable.size < before / 100
    store.lead()
    read_ahead(store, NOW)
    assert store._runs.loaded_size == 0
