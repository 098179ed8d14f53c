"""Micro-benchmarks of the store: `pytest bench/test_store.py`.

Each round is one call, on state like that of a busy node: 100-byte payloads, 1,000 rows per entry.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.loop import read_ahead
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import Ids, encode_cancel
from timer.files.disk import RealDisk
from timer.model.columns import ROW, RowArray
from timer.model.firing_order import START, Position
from timer.model.units import Epoch, LogIndex, TopicId, UnixMs
from timer.pending.fire_limits import FiredRows
from timer.pending.memory.tiers import Tiers
from timer.pending.memory.wheel import Wheel
from timer.pending.runs.merge_plan import PART_SIZE, Sketch, plan
from timer.pending.runs.read_window import ReadWindow
from timer.pending.runs.run import RunMeta
from timer.pending.store import Store
from timer.ready.queue import Queue
from timer.ready.spill import PageFetch, Spill, write_spill

NOW = 1_700_000_000_000
BATCH = 1_000
PAYLOAD = 100
DAY_MS = 86_400_000


class Entries:
    """Makes batches of rows with ascending seqs."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(7)
        self.seq = 1
        self.buf = bytes(BATCH * PAYLOAD)

    def next(self, low_ms: int, high_ms: int, rows: int = BATCH) -> RowArray:
        """Return rows that are due between NOW + low_ms and NOW + high_ms."""
        batch = np.zeros(rows, ROW)
        batch["due_ms"] = self.random.integers(NOW + low_ms, NOW + high_ms, rows)
        batch["seq"] = np.arange(self.seq, self.seq + rows)
        batch["topic"] = 1
        batch["payload_size"] = PAYLOAD
        batch["payload_start"] = np.arange(rows) * PAYLOAD
        self.seq += rows
        return batch


def filled_store(path: Path, entries: Entries, rows: int, low_ms: int, high_ms: int) -> Store:
    """Return a leader's store with `rows` rows in its memtable."""
    store = Store(RealDisk(), path)
    store.lead()
    store.fire(UnixMs(NOW), 1, 1)
    for _ in range(rows // BATCH):
        store.insert(entries.next(low_ms, high_ms), entries.buf)
    return store


def measure(
    benchmark: BenchmarkFixture, call: Callable[..., Any], rounds: int, **options: Any
) -> None:
    """Time `rounds` single calls."""
    benchmark.pedantic(call, rounds=rounds, **options)  # type: ignore[no-untyped-call]


def rows_per_s(benchmark: BenchmarkFixture, rows: int) -> None:
    """Add the rate at the median to the report."""
    assert benchmark.stats is not None
    benchmark.extra_info["rows_per_s"] = int(rows / benchmark.stats.stats.median)


def flush(store: Store) -> RunMeta | None:
    """Flush the memtable to a run."""
    frozen = store.freeze()
    windows = store.write_run(frozen)
    store.install(frozen, windows)
    return windows[0].run.meta if windows else None


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_insert_1000(benchmark: BenchmarkFixture, tmp_path: Path, role: str) -> None:
    """Insert a batch of a thousand rows, due within a day."""
    entries = Entries()
    store = filled_store(tmp_path, entries, 100_000, 1, DAY_MS)
    if role == "follower":
        store.follow()
    batches = [entries.next(1, DAY_MS) for _ in range(300)]
    todo = iter(batches)
    measure(benchmark, lambda: store.insert(next(todo), entries.buf), rounds=len(batches))


@pytest.mark.parametrize("runs", [0, 6])
@pytest.mark.parametrize("role", ["leader", "follower"])
def test_fire_1000(benchmark: BenchmarkFixture, tmp_path: Path, role: str, runs: int) -> None:
    """Fire a thousand rows per tick: with half a million pending, then with six runs beside."""
    entries = Entries()
    store = filled_store(tmp_path, entries, 0, 1, 2)
    for _ in range(runs):
        for _ in range(50):
            store.insert(entries.next(1, 60_000), entries.buf)
        flush(store)
    for _ in range(300):
        store.insert(entries.next(1, 3_000), entries.buf)
    for _ in range(200):
        store.insert(entries.next(3_000, DAY_MS), entries.buf)
    if role == "follower":
        store.follow()
    else:
        read_ahead(store, NOW)
    ticks = iter(range(NOW + 10, NOW + 3_000, 10))

    def fire() -> FiredRows:
        return store.fire(UnixMs(next(ticks)), 65_536, 16 << 20)

    measure(benchmark, fire, rounds=150, warmup_rounds=10)
    assert 800 < len(fire().rows) < 1_300


def test_fire_a_million_due_at_once(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """One FIRE of 65,536 out of a million rows due at once."""
    entries = Entries()
    store = filled_store(tmp_path, entries, 1_000_000, 1_000, 1_001)

    def fire() -> FiredRows:
        return store.fire(UnixMs(NOW + 2_000), 65_536, 16 << 20)

    measure(benchmark, fire, rounds=12)


@pytest.mark.parametrize("where", ["memtable", "run"])
def test_cancel_1000(benchmark: BenchmarkFixture, tmp_path: Path, where: str) -> None:
    """Cancel a thousand random rows."""
    entries = Entries()
    store = filled_store(tmp_path, entries, 0, 1, 2)
    batches = [entries.next(1, DAY_MS) for _ in range(300)]
    for batch in batches:
        store.insert(batch, entries.buf)
    if where == "run":
        flush(store)
    rows = np.concatenate(batches)
    targets = iter(entries.random.permutation(rows).reshape(-1, BATCH))

    def cancel() -> int:
        mine = next(targets)
        hit, _ = store.cancel(mine["due_ms"].copy(), mine["seq"].copy())
        return int(hit.sum())

    measure(benchmark, cancel, rounds=100)
    assert cancel() == BATCH


def test_flush_600000(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Sort, gather, checksum, write and sync 84 MB; with rows/s."""
    entries = Entries()
    rounds: Iterator[int] = iter(range(100))

    def fresh() -> tuple[tuple[Store], dict[str, object]]:
        return (filled_store(tmp_path / str(next(rounds)), entries, 600_000, 1, DAY_MS),), {}

    measure(benchmark, flush, setup=fresh, rounds=5)
    rows_per_s(benchmark, 600_000)


def test_freeze_600000(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """The part of a flush during which the event loop waits."""
    entries = Entries()
    rounds = iter(range(100))

    def fresh() -> tuple[tuple[Store], dict[str, object]]:
        return (filled_store(tmp_path / str(next(rounds)), entries, 600_000, 1, DAY_MS),), {}

    measure(benchmark, lambda store: store.freeze(), setup=fresh, rounds=5)


@pytest.mark.parametrize("spread", ["over each other", "side by side"])
def test_merge_eight_runs_of_75000(
    benchmark: BenchmarkFixture, tmp_path: Path, spread: str
) -> None:
    """Read, merge and write 84 MB."""
    entries = Entries()
    store = filled_store(tmp_path, entries, 0, 1, 2)
    for run in range(8):
        low = 1 + run * DAY_MS * (spread == "side by side")
        for _ in range(75):
            store.insert(entries.next(low, low + DAY_MS), entries.buf)
        flush(store)
    merge = store.begin_merge()
    assert merge is not None
    path = tmp_path / "runs"

    def write() -> list[ReadWindow]:
        return store.write_merge(merge)

    def clear() -> None:
        for number in merge.numbers:
            (path / f"{number:010d}.arrow").unlink(missing_ok=True)

    measure(benchmark, write, setup=clear, rounds=3)
    rows_per_s(benchmark, 600_000)


def test_lead_over_600000_rows(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """The work of a promotion on the memtable, and its first search for due rows."""
    entries = Entries()
    store = filled_store(tmp_path, entries, 600_000, 1, DAY_MS)

    def lead() -> int | None:
        store.lead()
        return store.next_due()

    measure(benchmark, lead, setup=store.follow, rounds=10)


def test_cancel_1000_in_a_million_rows_of_sixteen_runs(
    benchmark: BenchmarkFixture, tmp_path: Path
) -> None:
    """The event loop's part, after a thread has looked the rows up."""
    entries = Entries()
    store = filled_store(tmp_path, entries, 0, 1, 2)
    batches: list[RowArray] = []
    for _ in range(16):
        for _ in range(60):
            batches.append(entries.next(1, DAY_MS))
            store.insert(batches[-1], entries.buf)
        flush(store)
    targets = iter(entries.random.permutation(np.concatenate(batches)).reshape(-1, BATCH))

    def prefetched() -> tuple[tuple[RowArray], dict[str, object]]:
        mine = next(targets)
        ids = Ids(mine["due_ms"].copy(), mine["seq"].copy())
        payload = memoryview(b"".join(encode_cancel(ids)))
        entry = Entry(EntryKind.CANCEL, Epoch(1), LogIndex(1), UnixMs(0), payload)
        prefetch = store.begin_prefetch([entry])
        assert prefetch is not None
        prefetch.read()
        store.use_prefetch(prefetch)
        return (mine,), {}

    def cancel(mine: RowArray) -> None:
        hit, _ = store.cancel(mine["due_ms"].copy(), mine["seq"].copy())
        assert hit.all()

    measure(benchmark, cancel, setup=prefetched, rounds=20)


def test_plan_over_two_hundred_parts(benchmark: BenchmarkFixture) -> None:
    """The merge policy at a hundred million pending rows."""
    random = np.random.default_rng(3)
    first = random.integers(0, DAY_MS, 200).tolist()
    runs = [
        Sketch(Position(at, 0), Position(at + DAY_MS // 20, 0), PART_SIZE, 500_000, 1_000)
        for at in first
    ]
    measure(benchmark, lambda: plan(runs), rounds=20)


def test_queue_spill_and_fetch_300000(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Fired messages to a file and back, as in a queue without readers; with rows/s."""
    entries = Entries()
    disk = RealDisk()
    path = tmp_path / "x.spill"

    def fresh() -> tuple[tuple[Queue], dict[str, object]]:
        path.unlink(missing_ok=True)
        queue = Queue()
        for _ in range(300):
            queue.append(entries.next(1, 2), {0: entries.buf}, UnixMs(NOW))
        return (queue,), {}

    def through(queue: Queue) -> None:
        spill = Spill(TopicId(1), queue, queue.unspilled_blocks(), [])
        write_spill(disk, path, [spill])
        spill.install()
        queue.pages.evict(0)
        for block in queue.blocks:
            queue.pages.request(block)
        fetch = PageFetch(disk, tmp_path, queue.pages.requested_blocks(1 << 40))
        fetch.read()
        fetch.install(queue.pages)

    measure(benchmark, through, setup=fresh, rounds=5)
    rows_per_s(benchmark, 300_000)


def test_window_load_of_the_next_two_seconds(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """A thread's copy ahead: about 20,000 rows per two seconds, from one run of a minute."""
    entries = Entries()
    store = filled_store(tmp_path, entries, 600_000, 1, 60_000)
    flush(store)

    def load() -> None:
        read_ahead(store, store.position.due_ms)

    def fire() -> None:
        store.fire(UnixMs(store.position.due_ms + 2_000), 1 << 20, 1 << 30)

    measure(benchmark, load, setup=fire, rounds=25)
    rows_per_s(benchmark, 20_000)


@pytest.mark.parametrize("spread_ms", [16_000, 3_600_000, 30 * DAY_MS])
def test_wheel_advances_over_600000_rows(benchmark: BenchmarkFixture, spread_ms: int) -> None:
    """The longest step: every row is in the slots that the near window reaches next."""
    due = np.random.default_rng(3).integers(40_000_000, 40_000_000 + spread_ms, 600_000)
    places = np.arange(len(due))

    def fresh() -> tuple[tuple[Wheel], dict[str, object]]:
        wheel = Wheel(0)
        for start in range(0, len(due), BATCH):
            mine = due[start : start + BATCH]
            wheel.add(mine, places[start : start + BATCH], int(mine.min()))
        return (wheel,), {}

    measure(benchmark, lambda wheel: wheel.peek((0, 0), 40_000_000, 1), setup=fresh, rounds=5)


def test_tiers_add_and_take(benchmark: BenchmarkFixture) -> None:
    """Add a thousand pairs and take a thousand, with half a million in the tiers."""
    random = np.random.default_rng(3)
    tiers = Tiers()
    now, ref = 0, 0

    def turn() -> int:
        nonlocal now, ref
        due = now + 1 + random.integers(0, 5_000, BATCH)
        tiers.add(due, np.arange(ref, ref + BATCH), now + 1)
        ref += BATCH
        now += 10
        taken = len(tiers.peek((START.due_ms, 0), now, 1 << 20)[0])
        tiers.drop(Position(now, 1 << 40))
        return taken

    for _ in range(1_000):
        turn()
    measure(benchmark, turn, rounds=500)
