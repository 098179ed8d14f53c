"""Helpers for tests of the store: a naive model, and nodes to compare with it."""

import copy
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import Fire, Ids, encode_cancel
from timer.files.data_directory import (
    Identity,
    format_directory,
    founding_replica_id,
)
from timer.files.disk import Disk, RealDisk
from timer.model.columns import ROW, RowArray
from timer.model.firing_order import Position
from timer.model.timer_id import SEQ_MAX
from timer.model.units import Epoch, LogIndex, UnixMs
from timer.pending import prefetch
from timer.pending import store as store_module
from timer.pending.memory import tiers, wheel
from timer.pending.runs import (
    frozen_memtable,
    merge_plan,
    read_window,
    run_index,
    run_writer,
)
from timer.pending.runs import merge as merge_module
from timer.pending.runs import run_set as runs
from timer.pending.runs.frozen_memtable import FrozenMemtable
from timer.pending.runs.merge import Merge
from timer.pending.runs.read_window import ReadAhead
from timer.pending.runs.run import RunMeta
from timer.pending.store import Store

Timer = tuple[int, int, bytes, bytes, bytes]
"""requested_ms, topic, payload, key, headers."""

NOW = 1_700_000_000_000
ALL = 1 << 20


def read_ahead(store: Store, now_ms: int) -> None:
    """Read the rows of runs that are due soon, in this thread."""
    ahead = store.begin_read_ahead(UnixMs(now_ms))
    if ahead is not None:
        ahead.read()
        store.end_read_ahead(ahead)


def batch(first_seq: int, dues: list[int], gap: int = 0) -> tuple[RowArray, bytes]:
    """Return rows with these dues; the bytes of payload, key and headers identify the row."""
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
    """The store's promises, implemented with a dict."""

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
    """The state that a node would have on disk."""

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
        self.frozen: FrozenMemtable | None = None
        self.next_manifest: Manifest | None = None
        self.merge: Merge | None = None
        self.ahead: ReadAhead | None = None
        self.runs_then: list[RunMeta] = []
        self.retired_then: list[RunMeta] = []

    def apply(self, entry: Callable[[Store], Any]) -> Any:
        result = entry(self.store)
        self.log.append(entry)
        self.results.append(result)
        return result

    def freeze(self) -> None:
        store = self.store
        self.next_manifest = Manifest([], store.position, store.pending, len(self.log))
        self.runs_then, self.retired_then = store.runs, store.retired
        self.frozen = store.freeze()

    def install(self) -> None:
        assert self.frozen is not None
        assert self.next_manifest is not None
        windows = self.store.write_run(self.frozen)
        self.next_manifest.runs = [*self.runs_then, *(each.run.meta for each in windows)]
        self.manifest, self.next_manifest = self.next_manifest, None
        assert len({meta.number for meta in self.manifest.runs}) == len(self.manifest.runs)
        self.store.remove(self.retired_then)
        self.store.install(self.frozen, windows)
        self.store.forget(self.retired_then)
        self.frozen = None

    def install_merge(self) -> None:
        assert self.merge is not None
        self.store.install_merge(self.merge, self.store.write_merge(self.merge))
        self.merge = None

    def restart(self) -> None:
        """Recover from the manifest and apply the log after it; check that results are the same."""
        manifest = copy.copy(self.manifest)
        runs = [RunMeta.unpack(meta.pack()) for meta in manifest.runs]
        assert runs == manifest.runs
        self.store = Store.recover(RealDisk(), self.path, runs, manifest.position, manifest.pending)
        self.frozen = self.merge = self.next_manifest = self.ahead = None
        files = {path.name for path in (self.path / "runs").iterdir()}
        assert files == {name for meta in runs for name in meta.names}
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
        fired = store.fire(UnixMs(read_time_ms), rows_max, bytes_max, ALL)
        assert set(fired.bufs) == set(fired.rows["buf"].tolist())
        return timers_of(fired.rows, fired.bufs), fired.limited

    return entry


OFFSETS = [1, 2, 3, 10, 1_000, 1_999, 2_001, 17_000, 40_000, 1 << 21, 1 << 31, 1 << 45]


class Comparison:
    """A leader, a follower and the model that get the same entries; each node has its own files."""

    def __init__(self, root: Path) -> None:
        self.nodes = [Node(root / "leader"), Node(root / "follower")]
        self.nodes[0].leads = True
        self.nodes[0].store.lead()
        self.model = Model()
        self.next_seq = 1
        self.passed = 0
        """Number of FIRE entries that a thread had to prepare."""
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
        """Cancel timers inserted at some time, the newest for pick 0, and some unknown timers."""
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
        if targets and len(picks) % 2:  # else an earlier look-up is used, or none
            dues = np.array([due for due, _ in targets], np.int64)
            ids = Ids(dues, np.array([seq for _, seq in targets], np.uint64))
            payload = memoryview(b"".join(encode_cancel(ids)))
            entry = Entry(EntryKind.CANCEL, Epoch(1), LogIndex(1), UnixMs(0), payload)
            for node in self.nodes:
                prefetch = node.store.begin_prefetch([entry])
                if prefetch is not None:
                    prefetch.read()
                    node.store.use_prefetch(prefetch)
        self.apply(cancelling(targets), (hits, removed))

    def tick(self, step: int, rows_max: int, bytes_max: int) -> None:
        read_time_ms = self.model.position[0] + step
        expected = self.model.fire(read_time_ms, rows_max, bytes_max)
        fire = Fire(UnixMs(read_time_ms), rows_max, bytes_max, ALL)
        for node in self.nodes[: step % 3]:
            if not node.store.try_find_due(fire):
                prefetch = node.store.begin_prefetch([], fire=fire)
                if prefetch is not None:
                    prefetch.read()
                self.passed += 1
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

    def read_ahead(self, which: int, at_once: bool) -> None:
        """Begin to read ahead, or use the rows: at once, or after other steps."""
        node = self.nodes[which]
        begun = node.ahead is None
        if begun:
            node.ahead = node.store.begin_read_ahead(UnixMs(self.model.position[0]))
            if node.ahead is not None:
                node.ahead.read()
        if node.ahead is not None and (at_once or not begun):
            node.store.end_read_ahead(node.ahead)
            node.ahead = None

    def look_up(self, pick: int) -> None:
        due, seq = self.known[-1 - pick % len(self.known)] if self.known else (NOW + 1, 1)
        expected = self.model.pending.get((due, seq))
        for node in self.nodes:
            row = node.store.find(UnixMs(due), seq)
            assert (row is not None) == (expected is not None)
            if row is not None and expected is not None:
                assert (int(row["requested_ms"][0]), int(row["topic"][0])) == expected[:2]

    def check(self) -> None:
        """Check counts and positions, and that the next due time is not after a pending row's."""
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


STEPS = [0, 1, 9, 1_000, 5_000, 30_000, 1 << 22]
ROWS_MAX = [1, 2, 5, ALL]
BYTES_MAX = [0, 1, 30, ALL]


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set limits so small that a few rows reach all of them."""
    for module, name, value in (
        (merge_plan, "FAN", 2),
        (merge_plan, "DEPTH", 2),
        (prefetch, "LOOP_LOOKUPS_MAX", 2),
        (merge_plan, "SMALL_SIZE", 1_000),
        (merge_plan, "PART_SIZE", 3_000),
        (runs, "PART_SIZE", 3_000),
        (runs, "WARM_SIZE_MAX", 100),
        (runs, "LOADED_SIZE_MAX", 600),
        (frozen_memtable, "CHUNK_ROWS", 5),
        (store_module, "FIRE_CHUNK", 3),
        (store_module, "DEAD_MAX", 3),
        (run_writer, "BATCH_ROWS_MAX", 4),
        (run_writer, "BATCH_SIZE_MAX", 250),
        (run_index, "TOPIC_ROWS_MAX", 8),
        (merge_module, "SLICE_ROWS", 3),
        (read_window, "SLICE_ROWS_MIN", 2),
        (read_window, "SLICE_SIZE_MAX", 60),
        (tiers, "FAN", 3),
        (tiers, "FRESH_MAX", 4),
        (tiers, "CHUNK", 2),
        (wheel, "FAR_MAX", 4),
    ):
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def run_program(pair: Comparison, chance: random.Random, steps: int) -> None:
    for _ in range(steps):
        which, flag = chance.randrange(2), chance.random() < 0.5
        match chance.choices(range(10), [8, 6, 8, 5, 3, 5, 0.5, 0.5, 3, 2])[0]:
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
            case 8:
                pair.read_ahead(which, flag)
            case _:
                pair.look_up(chance.randrange(100))
        pair.check()


def merge_all(store: Store) -> int:
    """Merge until the policy requests no merge; return the number of merges."""
    count = 0
    while (merge := store.begin_merge()) is not None:
        assert store.begin_merge() is None
        store.install_merge(merge, store.write_merge(merge))
        count += 1
    return count


CLUSTER = "c-1"


VOTERS = {name: founding_replica_id(CLUSTER, name) for name in ("a", "b", "c")}


PROMISE = b"never given"


def format_a(disk: Disk, path: Path) -> Identity:
    return format_directory(
        disk,
        path,
        cluster_id=CLUSTER,
        name="a",
        replica_id=VOTERS["a"],
        founding_voters=VOTERS,
        promise=PROMISE,
    )
