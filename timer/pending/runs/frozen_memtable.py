"""A memtable during its flush: its rows and tombstones in order, for the new runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from timer.model.columns import Buffers, RowArray
from timer.model.firing_order import fire_order, raw, rows_at, stable_order, tombstones
from timer.pending.memory.held_rows import HELD_OFFSET_MS
from timer.pending.memory.memtable import Memtable, RowsToFlush
from timer.pending.runs.run_writer import TOMBSTONE_SIZE, row_sizes

CHUNK_ROWS: Final = 16_384
"""Rows that a flush gathers in one step."""


@dataclass(frozen=True, slots=True)
class FrozenMemtable:
    """A memtable during its flush, with its state at the freeze."""

    memtable: Memtable
    numbers: range
    """Numbers for the new runs, more than enough."""
    rows_to_flush: RowsToFlush
    """Its pending rows and its tombstones at the freeze."""

    @property
    def size(self) -> int:
        """Bytes of the rows and tombstones in a run, about."""
        rows, live = self.memtable.rows, self.rows_to_flush.live
        pieces = [live[start : start + CHUNK_ROWS] for start in range(0, len(live), CHUNK_ROWS)]
        size = sum(int(row_sizes(rows_at(rows, piece)).sum()) for piece in pieces)
        return size + TOMBSTONE_SIZE * len(self.rows_to_flush.tombstones[0])

    def chunks(self) -> Iterator[tuple[RowArray, Buffers]]:
        """Yield its rows and tombstones in (due, seq) order, in chunks."""
        rows, live = self.memtable.rows, self.rows_to_flush.live
        due_ms = rows["due_ms"][live]
        dead_due, dead_seq, dead_topic = self.rows_to_flush.tombstones
        has_held = len(due_ms) and int(due_ms.max()) >= HELD_OFFSET_MS
        if len(dead_due) or has_held:  # held rows: any order
            seq = np.concatenate([rows["seq"][live], dead_seq])
            order = fire_order(np.concatenate([due_ms, dead_due]), seq)
        else:
            order = stable_order(due_ms)
        for start in range(0, len(order), CHUNK_ROWS):
            places = order[start : start + CHUNK_ROWS]
            if not len(dead_due):
                yield rows_at(rows, live.take(places)), self.memtable.bufs
                continue
            dead = places[places >= len(live)] - len(live)
            chunk = np.empty(len(places), rows.dtype)
            alive = places < len(live)
            raw(chunk)[alive] = raw(rows).take(live.take(places[alive]))
            raw(chunk)[~alive] = raw(tombstones(dead_due[dead], dead_seq[dead], dead_topic[dead]))
            yield chunk, self.memtable.bufs
