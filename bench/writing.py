"""S11: the bytes that a node writes for a timer that waits a day, in virtual time.

The production store runs through days of a steady load, with the flushes of its node and the merges
of its plan. Its bytes are counted where they are written. The log's bytes are computed from its
encoders: one entry for a batch of timers, and a leader's FIRE for every tick with due timers.

    day 1    fills up: the first timers fire without a full day behind them
    day 2    counted
"""

import math
import shutil
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from bench.feed import PAYLOAD_SIZE
from bench.measure import Form, Measure, Series, cost
from cluster.settings.config import StorageConfig, TimingConfig
from timer.entries.entry_frame import HEADER_SIZE
from timer.entries.payloads import FIRE_BYTES_MAX, FIRE_ROWS_MAX, Fire, encode_fire
from timer.files.disk import RealDisk
from timer.model.columns import ROW, Binary, Part, encode_schedule
from timer.model.units import ProducerId, UnixMs
from timer.pending.runs.read_window import ReadWindow
from timer.pending.store import Store

DAY_MS: Final = 86_400_000
START_MS: Final = 1_700_000_000_000
STEP_MS: Final = 60_000
PER_DAY: Final = {Form.SHORT: 500_000, Form.FULL: 10_000_000}
BATCH_ROWS: Final = 100


def writing(form: Form) -> Series:
    """Return bytes written per timer and node, for delays of a day and of up to a day."""
    per_day = PER_DAY[form]
    log = _log_bytes(per_day)
    steady, files = _store_bytes(per_day, spread=False)
    mixed, files_mixed = _store_bytes(per_day, spread=True)
    return {
        "steady": [log + steady],
        "mixed": [log + mixed],
        "log": [log],
        "files": [float(max(files, files_mixed))],
    }


def _log_bytes(per_day: int) -> float:
    """Return the log's bytes per timer: its share of a batch, and of the FIRE of its tick."""
    times = np.full(BATCH_ROWS, START_MS, np.int64)
    part = Part(
        producer_id=ProducerId(1),
        sequence=1,
        due_ms=times,
        requested_ms=times,
        topic=np.ones(BATCH_ROWS, np.uint32),
        payload=Binary.of([bytes(PAYLOAD_SIZE)] * BATCH_ROWS),
    )
    scheduled = (HEADER_SIZE + sum(map(len, encode_schedule([part])))) / BATCH_ROWS
    tick_ms = TimingConfig().tick_ms
    in_tick = per_day / DAY_MS * tick_ms
    fires = -math.expm1(-in_tick) / in_tick  # per timer; a tick without timers has no FIRE
    fire = encode_fire(Fire(UnixMs(START_MS), FIRE_ROWS_MAX, FIRE_BYTES_MAX))
    return scheduled + fires * (HEADER_SIZE + len(fire))


def _store_bytes(per_day: int, *, spread: bool) -> tuple[float, int]:
    """Return the runs' bytes per timer over the second day, and the most files at any time."""
    directory = Path(tempfile.mkdtemp(prefix="bench-writing-"))
    try:
        return _Days(directory, per_day, spread=spread).run()
    finally:
        shutil.rmtree(directory)


class _Days:
    def __init__(self, directory: Path, per_day: int, *, spread: bool) -> None:
        self._store = Store(RealDisk(), directory)
        self._rows = per_day * STEP_MS // DAY_MS
        self._spread = spread
        self._random = np.random.default_rng(11)
        self._buf = bytes(self._rows * PAYLOAD_SIZE)
        self._seq = 1
        self._written = 0
        self._storage = StorageConfig()

    def run(self) -> tuple[float, int]:
        """Simulate two days. Return (bytes per timer, most files)."""
        self._store.lead()
        files, flushed_ms, before = 0, 0, 0
        for now_ms in range(0, 2 * DAY_MS, STEP_MS):
            if now_ms == DAY_MS:
                before = self._written
            self._insert(now_ms)
            self._fire(now_ms)
            full = self._store.memtable.size >= self._storage.memtable_bytes_flush
            if full or now_ms - flushed_ms >= self._storage.flush_interval_ms:
                self._flush()
                flushed_ms = now_ms
            files = max(files, len(self._store.runs) + len(self._store.retired))
        return (self._written - before) / (self._rows * DAY_MS / STEP_MS), files

    def _insert(self, now_ms: int) -> None:
        rows = np.zeros(self._rows, ROW)
        come_ms = np.sort(self._random.integers(now_ms, now_ms + STEP_MS, self._rows))
        delay_ms = self._random.integers(1, DAY_MS, self._rows) if self._spread else DAY_MS
        rows["due_ms"] = np.maximum(START_MS + come_ms + delay_ms, START_MS + now_ms + STEP_MS)
        rows["seq"] = np.arange(self._seq, self._seq + self._rows)
        rows["topic"] = 1
        rows["payload_size"] = PAYLOAD_SIZE
        rows["payload_start"] = np.arange(self._rows) * PAYLOAD_SIZE
        self._seq += self._rows
        self._store.insert(rows, self._buf)

    def _fire(self, now_ms: int) -> None:
        until_ms = UnixMs(START_MS + now_ms + STEP_MS - 1)
        while self._store.fire(until_ms, FIRE_ROWS_MAX, FIRE_BYTES_MAX).limited:
            pass

    def _flush(self) -> None:
        store = self._store
        retired = store.retired
        frozen = store.freeze()
        windows = store.write_run(frozen)
        store.install(frozen, windows)
        self._count(windows)
        store.remove(retired)
        store.forget(retired)
        while (merge := store.begin_merge()) is not None:
            windows = store.write_merge(merge)
            store.install_merge(merge, windows)
            self._count(windows)

    def _count(self, windows: list[ReadWindow]) -> None:
        self._written += sum(window.run.meta.size + window.run.meta.keys_size for window in windows)


S11: Final = Measure(
    name="s11",
    title=f"bytes written per timer of {PAYLOAD_SIZE} B that waits a day, virtual time",
    alone=writing,
    figures=(
        cost("each waits a day", "steady", "B", 800, 400),
        cost("each waits up to a day", "mixed", "B"),
        cost("  of that, the log", "log", "B"),
        cost("  most files at once", "files", "files"),
    ),
    runs={Form.SHORT: 1, Form.FULL: 1},
)
