"""The store against a naive model, on a leader and a follower, with other files in each."""

import copy
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

from timer import merge as merge_module
from timer import run_writer, tiers, wheel, window
from timer import store as store_module
from timer.columns import ROW, RowArray
from timer.disk import RealDisk
from timer.merge import Merge
from timer.order import Position
from timer.run import RunMeta
from timer.store import Fired, Frozen, Store
from timer.timer_id import SEQ_MAX
from timer.units import UnixMs

Timer = tuple[int, int, bytes, bytes, bytes]
"""requested_ms, topic, payload, key, headers."""

NOW = 1_700_000_000_000
ALL = 1 << 20


def batch(first_seq: int, dues: list[int], gap: int = 0) -> tuple[RowArray, bytes]:
    """Return rows with these dues; payload, key and headers tell by their bytes whose they are."""
    rows = np.zeros(len(dues), ROW)
    rows["due_ms"] = dues
    rows["seq"] = first_seq + np.arange(len(dues)) * (gap + 1)
    rows["requested_ms"] = rows["due_ms"] - 1
    rows["topic"] = 1 + rows["seq"] % 3
    buf = bytearray(b"entry:")
    for name, modulus in (("payload", 4), ("key", 3), ("headers", 5)):
        for row in rows:
            text = name[:1].encode() + b"%d" % row["seq"]
            text = text * int(row["seq"] % modulus)
            row[f"{name}_start"], row[f"{name}_size"] = len(buf), len(text)
            buf += text
    return rows, bytes(buf)


def timers_of(rows: RowArray, bufs: Any) -> list[tuple[tuple[int, int], Timer]]:
    def text(row: Any, name: str) -> bytes:
        start = int(row[f"{name}_start"])
        return bytes(bufs[int(row["buf"])][start : start + int(row[f"{name}_size"])])

    return [
        (
            (int(row["due_ms"]), int(row["seq"])),
            (
                int(row["requested_ms"]),
                int(row["topic"]),
                text(row, "payload"),
                text(row, "key"),
                text(row, "headers"),
            ),
        )
        for row in rows
    ]


@dataclass
class Model:
    """What the store promises, with a dict."""

    position: tuple[int, int] = (0, SEQ_MAX)
    pending: dict[tuple[int, int], Timer] = field(default_factory=dict)

    def insert(self, rows: RowArray, buf: bytes) -> None:
        rows = rows.copy()
        rows["buf"] = 0
        self.pending.update(timers_of(rows, {0: buf}))

    def cancel(self, targets: list[tuple[int, int]]) -> list[bool]:
        return [self.pending.pop(target, None) is not None for target in targets]

    def fire(
        self, read_time_ms: int, rows_max: int, bytes_max: int
    ) -> tuple[list[tuple[tuple[int, int], Timer]], bool]:
        due = sorted(key for key in self.pending if key[0] <= read_time_ms)
        fired: list[tuple[int, int]] = []
        size = 0
        for key in due[:rows_max]:
            size += sum(map(len, self.pending[key][2:]))
            if fired and size > bytes_max:
                break
            fired.append(key)
        limited = len(fired) < len(due)
        self.position = fired[-1] if limited else (read_time_ms, SEQ_MAX)
        return [(key, self.pending.pop(key)) for key in fired], limited


@dataclass
class Manifest:
    """What a node would have on disk."""

    runs: list[RunMeta]
    position: Position
    pending: int
    applied: int


class Node:
    """A store with the files of one node, its manifest, and the log after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store(RealDisk(), path)
        self.log: list[Callable[[Store], Any]] = []
        self.results: list[Any] = []
        self.manifest = Manifest([], self.store.position, 0, 0)
        self.leads = False
        self.frozen: Frozen | None = None
        self.next_manifest: Manifest | None = None
        self.merge: Merge | None = None

    def apply(self, entry: Callable[[Store], Any]) -> Any:
        result = entry(self.store)
        self.log.append(entry)
        self.results.append(result)
        return result

    def freeze(self) -> None:
        store = self.store
        self.next_manifest = Manifest([], store.position, store.pending, len(self.log))
        self.frozen = store.freeze()

    def install(self) -> None:
        assert self.frozen is not None
        assert self.next_manifest is not None
        self.store.install(self.frozen, self.store.write_run(self.frozen))
        self.manifest, self.next_manifest, self.frozen = self.next_manifest, None, None
        self.manifest.runs = self.store.runs
        assert len({meta.number for meta in self.manifest.runs}) == len(self.manifest.runs)
        self.store.remove(self.store.retired)

    def install_merge(self) -> None:
        assert self.merge is not None
        self.store.install_merge(self.merge, self.store.write_merge(self.merge))
        self.merge = None

    def restart(self) -> None:
        """Recover from the manifest and apply the log after it: all answers are the same again."""
        self.store.close()
        manifest = copy.copy(self.manifest)
        runs = [RunMeta.unpack(meta.pack()) for meta in manifest.runs]
        assert runs == manifest.runs
        self.store = Store.recover(RealDisk(), self.path, runs, manifest.position, manifest.pending)
        self.frozen = self.merge = self.next_manifest = None
        assert len(list((self.path / "runs").iterdir())) == len(runs)
        if self.leads:
            self.store.lead()
        for entry, result in zip(
            self.log[manifest.applied :], self.results[manifest.applied :], strict=True
        ):
            assert entry(self.store) == result


def cancelling(targets: list[tuple[int, int]]) -> Callable[[Store], Any]:
    due = np.array([due for due, _ in targets], np.int64)
    seq = np.array([seq for _, seq in targets], np.uint64)

    def entry(store: Store) -> Any:
        hit, removed = store.cancel(due, seq)
        rows = zip(
            removed["due_ms"].tolist(),
            removed["seq"].tolist(),
            removed["requested_ms"].tolist(),
            removed["topic"].tolist(),
            removed["payload_size"].tolist(),
            strict=True,
        )
        return hit.tolist(), sorted(rows)

    return entry


def firing(read_time_ms: int, rows_max: int, bytes_max: int) -> Callable[[Store], Any]:
    def entry(store: Store) -> Any:
        fired = store.fire(UnixMs(read_time_ms), rows_max, bytes_max)
        assert set(fired.bufs) == set(fired.rows["buf"].tolist())
        return timers_of(fired.rows, fired.bufs), fired.limited

    return entry


OFFSETS = [1, 2, 3, 10, 1_000, 1_999, 2_001, 17_000, 40_000, 1 << 21, 1 << 31, 1 << 45]


class Comparison:
    """A leader, a follower and the model get the same entries; each node has its own files."""

    def __init__(self, root: Path) -> None:
        self.nodes = [Node(root / "leader"), Node(root / "follower")]
        self.nodes[0].leads = True
        self.nodes[0].store.lead()
        self.model = Model()
        self.next_seq = 1
        self.known: list[tuple[int, int]] = []
        self.tick(NOW, ALL, ALL)

    def apply(self, entry: Callable[[Store], Any], expected: Any) -> None:
        for node in self.nodes:
            assert node.apply(entry) == expected

    def insert(self, offsets: list[int], gap: int, skipped: int) -> None:
        first = self.next_seq + skipped
        rows, buf = batch(first, [self.model.position[0] + offset for offset in offsets], gap)
        self.next_seq = int(rows["seq"][-1]) + 1
        self.known += zip(rows["due_ms"].tolist(), rows["seq"].tolist(), strict=True)
        self.model.insert(rows, buf)
        self.apply(lambda store: store.insert(rows, buf), None)

    def cancel(self, picks: list[int], unknown: bool) -> None:
        """Cancel timers that were once inserted, the newest for pick 0, and some that weren't."""
        targets = [self.known[-1 - pick % len(self.known)] for pick in picks if self.known]
        if unknown:
            due, seq = targets[0] if targets else (NOW + 1, 1)
            targets = [(due + 1, seq), (due, self.next_seq + 9), *targets]
        before = dict(self.model.pending)
        hits = self.model.cancel(targets)
        removed = sorted(
            (*target, before[target][0], before[target][1], len(before[target][2]))
            for target, hit in zip(targets, hits, strict=True)
            if hit
        )
        self.apply(cancelling(targets), (hits, removed))

    def tick(self, step: int, rows_max: int, bytes_max: int) -> None:
        read_time_ms = self.model.position[0] + step
        expected = self.model.fire(read_time_ms, rows_max, bytes_max)
        self.apply(firing(read_time_ms, rows_max, bytes_max), expected)

    def freeze_or_install(self, which: int) -> None:
        node = self.nodes[which]
        if node.frozen is None:
            node.freeze()
        else:
            node.install()

    def flush(self, which: int) -> None:
        if self.nodes[which].frozen is None:
            self.nodes[which].freeze()
        self.nodes[which].install()

    def merge(self, which: int, at_once: bool) -> None:
        node = self.nodes[which]
        begun = node.merge is None
        if begun:
            node.merge = node.store.begin_merge()
        if node.merge is not None and (at_once or not begun):
            node.install_merge()

    def restart(self, which: int) -> None:
        self.nodes[which].restart()

    def change_roles(self) -> None:
        for node in self.nodes:
            node.leads = not node.leads
            if node.leads:
                node.store.lead()
            else:
                node.store.follow()

    def preload(self) -> None:
        for node in self.nodes:
            if node.leads:
                node.store.preload(UnixMs(self.model.position[0]))

    def look_up(self, pick: int) -> None:
        due, seq = self.known[-1 - pick % len(self.known)] if self.known else (NOW + 1, 1)
        expected = self.model.pending.get((due, seq))
        for node in self.nodes:
            row = node.store.find(UnixMs(due), seq)
            assert (row is not None) == (expected is not None)
            if row is not None and expected is not None:
                assert (int(row["requested_ms"][0]), int(row["topic"][0])) == expected[:2]

    def check(self) -> None:
        """Counts and positions agree; no pending row's time can be slept through."""
        earliest = min(self.model.pending, default=None)
        for node in self.nodes:
            assert node.store.pending == len(self.model.pending)
            assert node.store.position == self.model.position
            due = node.store.next_due()
            if earliest is not None:
                assert due is not None
                assert due <= earliest[0]
            if not node.store.runs:
                assert due == (None if earliest is None else earliest[0])


BIT = st.integers(0, 1)
PICK = st.integers(0, 100)
STEPS = [0, 1, 9, 1_000, 5_000, 30_000, 1 << 22]
ROWS_MAX = [1, 2, 5, ALL]
BYTES_MAX = [0, 1, 30, ALL]


class Rules(RuleBasedStateMachine):
    """Hypothesis' view of a Comparison: it finds short programs."""

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

    @rule(roles=st.booleans(), pick=PICK)
    def look(self, roles: bool, pick: int) -> None:
        if roles:
            self.pair.change_roles()
        self.pair.preload()
        self.pair.look_up(pick)

    @invariant()
    def all_agree(self) -> None:
        self.pair.check()

    def teardown(self) -> None:
        shutil.rmtree(self.root)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so small that a few rows meet all of them."""
    for module, name, value in (
        (store_module, "RUNS_MERGED_AT", 2),
        (store_module, "MERGE_WIDTH", 2),
        (store_module, "BATCH_ROWS_MAX", 5),
        (run_writer, "BATCH_ROWS_MAX", 4),
        (run_writer, "BATCH_SIZE_MAX", 250),
        (merge_module, "SLICE_ROWS", 3),
        (window, "SLICE_ROWS_MIN", 2),
        (window, "SLICE_SIZE_MAX", 60),
        (window, "LOADED_SIZE_MAX", 300),
        (tiers, "FAN", 3),
        (tiers, "FRESH_MAX", 4),
        (tiers, "CHUNK", 2),
        (wheel, "FAR_MAX", 4),
    ):
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)


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
@pytest.mark.parametrize("seed", range(6))
def test_leader_follower_and_model_agree_on_long_programs(seed: int, tmp_path: Path) -> None:
    run_program(Comparison(tmp_path), random.Random(seed), steps=300)


def run_program(pair: Comparison, chance: random.Random, steps: int) -> None:
    for _ in range(steps):
        which, flag = chance.randrange(2), chance.random() < 0.5
        match chance.choices(range(9), [8, 6, 8, 5, 3, 5, 0.5, 0.5, 2])[0]:
            case 0:
                offsets = chance.choices(OFFSETS, k=chance.randint(1, 30))
                pair.insert(offsets, chance.randrange(3), chance.randrange(3))
            case 1:
                reach = chance.choice([10, 1_000])
                picks = [chance.randrange(reach) for _ in range(chance.randint(1, 12))]
                pair.cancel(picks, flag)
            case 2:
                limits = chance.choice(ROWS_MAX), chance.choice(BYTES_MAX)
                pair.tick(chance.choice(STEPS[:-1]), *limits)
            case 3:
                pair.flush(which)
            case 4:
                pair.freeze_or_install(which)
            case 5:
                pair.merge(which, flag)
            case 6:
                pair.restart(which)
            case 7:
                pair.change_roles()
            case _:
                pair.preload()
                pair.look_up(chance.randrange(100))
        pair.check()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(RealDisk(), tmp_path)
    store.fire(UnixMs(NOW), 1, 1)
    yield store
    store.close()


def flush(store: Store) -> RunMeta | None:
    frozen = store.freeze()
    meta = store.write_run(frozen)
    store.install(frozen, meta)
    return meta


def fire_all(store: Store, read_time_ms: int = NOW + 1_000_000) -> Fired:
    return store.fire(UnixMs(read_time_ms), ALL, ALL)


def test_rows_of_one_time_fire_in_the_order_of_their_seqs_wherever_they_lie(store: Store) -> None:
    for first in (1, 11, 21):
        store.insert(*batch(first, [NOW + 5] * 10))
        if first < 21:
            flush(store)
    assert fire_all(store).rows["seq"].tolist() == list(range(1, 31))


def test_bytes_limit_lets_one_row_pass_and_counts_key_and_headers(store: Store) -> None:
    store.insert(*batch(1, [NOW + 1] * 20))
    fired = store.fire(UnixMs(NOW + 1), ALL, 0)
    assert fired.rows["seq"].tolist() == [1]
    assert fired.limited
    sizes = [sum(len(text) for text in texts) for _, (_, _, *texts) in expected(range(2, 21))]
    fired = store.fire(UnixMs(NOW + 1), ALL, sum(sizes[:4]))
    assert fired.rows["seq"].tolist() == [2, 3, 4, 5]


def expected(seqs: range) -> list[tuple[tuple[int, int], Timer]]:
    rows, buf = batch(seqs.start, [NOW + 1] * len(seqs))
    return timers_of(rows, {0: buf})


def test_limit_at_exactly_all_that_is_due_is_not_limited(store: Store) -> None:
    store.insert(*batch(1, [NOW + 1, NOW + 1, NOW + 9]))
    assert not store.fire(UnixMs(NOW + 1), 2, ALL).limited
    assert store.position == (NOW + 1, SEQ_MAX)


def test_cancelled_rows_do_not_count_towards_the_limit(store: Store) -> None:
    store.insert(*batch(1, [NOW + 1] * 6))
    flush(store)
    store.cancel(np.full(3, NOW + 1), np.array([1, 2, 6], np.uint64))
    fired = store.fire(UnixMs(NOW + 1), 3, ALL)
    assert fired.rows["seq"].tolist() == [3, 4, 5]
    assert not fired.limited


def test_fire_of_a_frozen_row_is_not_repeated_by_its_run(store: Store) -> None:
    store.insert(*batch(1, [NOW + 1, NOW + 2]))
    frozen = store.freeze()
    assert store.fire(UnixMs(NOW + 1), ALL, ALL).rows["seq"].tolist() == [1]
    store.install(frozen, store.write_run(frozen))
    assert fire_all(store).rows["seq"].tolist() == [2]


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
    monkeypatch.setattr(store_module, "RUNS_MERGED_AT", 3)
    monkeypatch.setattr(store_module, "MERGE_WIDTH", 2)
    store.insert(*batch(1, [NOW + 100] * 500))
    flush(store)
    for first in (1_001, 2_001):
        store.insert(*batch(first, [NOW + 100] * 5))
        store.cancel(np.full(1, NOW + 100), np.array([first // 1_000], np.uint64))
        flush(store)
    assert [meta.tombstones for meta in store.runs] == [0, 1, 1]
    merge_now(store)
    assert [meta.tombstones for meta in store.runs] == [0, 2]
    store.insert(*batch(3_001, [NOW + 100]))
    flush(store)
    merge_now(store)
    assert [meta.tombstones for meta in store.runs] == [0, 2]
    assert [meta.rows for meta in store.runs] == [500, 13]
    monkeypatch.setattr(store_module, "RUNS_MERGED_AT", 2)
    merge_now(store)
    assert [(meta.tombstones, meta.rows) for meta in store.runs] == [(0, 509)]


def merge_now(store: Store) -> None:
    merge = store.begin_merge()
    assert merge is not None
    assert store.begin_merge() is None
    store.install_merge(merge, store.write_merge(merge))


def test_policy_keeps_eight_runs_at_most(store: Store) -> None:
    for first in range(1, 300, 10):
        store.insert(*batch(first, [NOW + 1_000_000 + first] * 10))
        flush(store)
        assert len(store.runs) <= 8
        bounds = [seq for meta in store.runs for seq in (meta.seq_min, meta.seq_max)]
        assert bounds == sorted(bounds)  # neighbours in age were merged, and lie where they lay
        merge = store.begin_merge()
        if merge is not None:
            store.install_merge(merge, store.write_merge(merge))
    assert fire_all(store, NOW + 2_000_000).rows["seq"].tolist() == list(range(1, 301))


def test_runs_whose_time_has_passed_leave_without_a_merge(store: Store, tmp_path: Path) -> None:
    store.insert(*batch(1, [NOW + 1] * 5))
    flush(store)
    fire_all(store)
    assert store.begin_merge() is None  # a manifest at the last flush still needs it
    flush(store)
    merge = store.begin_merge()
    assert merge is not None
    assert store.write_merge(merge) is None
    store.install_merge(merge, None)
    assert store.runs == []
    store.remove(store.retired)
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("merged", ["while the flush goes on", "after it"])
def test_merge_leaves_what_a_manifest_of_the_last_flush_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: str
) -> None:
    monkeypatch.setattr(store_module, "RUNS_MERGED_AT", 2)
    monkeypatch.setattr(store_module, "MERGE_WIDTH", 2)
    store = Store(RealDisk(), tmp_path)
    for first in (1, 11):
        store.insert(*batch(first, [NOW + first, NOW + 100]))
        flush(store)
    frozen, pending = store.freeze(), store.pending
    fired = store.fire(UnixMs(NOW + 50), ALL, ALL)
    assert fired.rows["seq"].tolist() == [1, 11]
    if merged == "while the flush goes on":
        merge_now(store)
        store.install(frozen, store.write_run(frozen))
    else:
        store.install(frozen, store.write_run(frozen))
        merge_now(store)
    again = Store.recover(RealDisk(), tmp_path, store.runs, frozen.position, pending)
    assert timers_of(*again.fire(UnixMs(NOW + 50), ALL, ALL)[:2]) == timers_of(*fired[:2])
    assert again.pending == store.pending


def test_window_of_a_merged_run_begins_at_the_fire_position(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RUNS_MERGED_AT", 2)
    monkeypatch.setattr(store_module, "MERGE_WIDTH", 2)
    for first in (1, 20_001):
        store.insert(*batch(first, [NOW + i for i in range(1, 20_001)]))
        flush(store)
    assert len(store.fire(UnixMs(NOW + 10_000), ALL, 1 << 30).rows) == 20_000
    merge_now(store)
    store.preload(UnixMs(NOW + 10_000 - store_module.AHEAD_MS + 10))
    [seen] = [store._windows[0]._slices]
    assert seen[0].due[0] == NOW + 10_001
    assert sum(len(piece.due) for piece in seen) == window.SLICE_ROWS_MIN


def test_recover_removes_orphans_and_never_uses_their_numbers(tmp_path: Path) -> None:
    store = Store(RealDisk(), tmp_path)
    store.insert(*batch(1, [NOW] * 5))
    kept = flush(store)
    store.insert(*batch(6, [NOW] * 5))
    orphan = flush(store)
    assert kept is not None
    assert orphan is not None
    store = Store.recover(RealDisk(), tmp_path, [kept], Position(0, SEQ_MAX), 5)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [kept.name]
    assert store.freeze().number > orphan.number


def test_fired_rows_keep_only_the_buffers_they_point_into(store: Store) -> None:
    for first in range(1, 40, 4):
        store.insert(*batch(first, [NOW + first] * 4))
    fired = store.fire(UnixMs(NOW + 9), ALL, ALL)
    assert len(fired.bufs) == 3
    assert timers_of(fired.rows, fired.bufs)[-1][1][2] == b"p12" * 0
    assert timers_of(fired.rows, fired.bufs)[-2][1][2] == b"p11" * 3


def test_memory_does_not_grow_with_the_rows_in_runs(store: Store) -> None:
    store.insert(*batch(1, [NOW + 60_000 + i for i in range(5_000)]))
    before = store.memtable_bytes
    flush(store)
    assert store.memtable_bytes < before / 100
    store.lead()
    store.preload(UnixMs(NOW))
    loaded = [len(buf) for window in store._windows for buf in window.bufs.values()]
    assert loaded == []
