"""Merging: many sorted runs read as one, slice by slice.

    lane 1   |----slice----|                   The horizon is the least end of a slice that is
    lane 2   |--slice--|                       not the last of its run. All rows up to it are in
    lane 3   |------slice------|               memory: they are sorted and yielded. Others wait.
                       ^ horizon

Memory per run: one slice (1 MB of payloads) and one head (128 KB), for runs of any size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from timer.model.columns import Buffers, RowArray
from timer.model.firing_order import Position, annihilate, concat, fire_order, rank
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.memory.memtable import Peek
from timer.pending.runs.run import Cursor, Run, is_tombstone

SLICE_ROWS: Final = 4_096
SLICE_SIZE_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge that is under way. `runs` do not change until its result is installed."""

    runs: tuple[Run, ...]
    numbers: range
    """Numbers for the parts, more than enough."""
    part_size: int
    """Bytes of each part, about."""
    position: Position
    """Rows at or before it are left out."""
    deleted_topics: DeletedTopics
    """Rows of these topics are left out, too."""


class _Lane:
    """One run and the slice of it that is in memory."""

    def __init__(self, run: Run, position: Position) -> None:
        self.cursor = Cursor(run, position)
        self.rows: RowArray | None = None
        self.number = 0
        self.data = b""

    def fill(self, number: int) -> bool:
        """Read a slice as buffer `number` if none is in memory. Return whether one was read."""
        if self.rows is not None or self.cursor.next is None:
            return False
        self.rows, self.data = self.cursor.read(0, SLICE_ROWS, SLICE_SIZE_MAX)
        self.rows["buf"] = self.number = number
        return True

    def take(self, horizon: Position | None) -> RowArray | None:
        """Remove and return the rows up to `horizon`; None if there are none."""
        rows = self.rows
        if rows is None:
            return None
        stop = len(rows) if horizon is None else rank(rows["due_ms"], rows["seq"], horizon)
        self.rows = rows[stop:] if stop < len(rows) else None
        return rows[:stop] if stop else None


def merged_rows(merge: Merge) -> Iterator[tuple[RowArray, Buffers]]:
    """Yield the remaining rows, in (due, seq) order, with the buffers that they point into.

    Cancelled rows are left out with their tombstones. A remaining tombstone has its target in
    another run. Rows and tombstones of deleted topics are left out.

    Raises:
        CorruptFileError: a batch doesn't verify.
    """
    lanes = [_Lane(run, merge.position) for run in merge.runs]
    number = 0
    while True:
        for lane in lanes:
            number += lane.fill(number)
        ends = [last_of(lane.rows) for lane in lanes if lane.rows is not None and lane.cursor.next]
        parts, bufs = [], {}
        for lane in lanes:
            part = lane.take(min(ends, default=None))
            if part is not None:
                parts.append(part)
                bufs[lane.number] = lane.data
        if not parts:
            return
        rows = concat(parts)
        if len(parts) > 1:
            order = fire_order(rows["due_ms"].copy(), rows["seq"].copy())
            rows = rows.take(order)
            left = annihilate(rows)
            rows = rows if left.all() else rows[left]
        if merge.deleted_topics and (deleted := merge.deleted_topics.of_rows(rows)).any():
            rows = rows[~deleted]
        yield rows, bufs


class FirstRows(NamedTuple):
    """The first rows of some peeks."""

    rows: RowArray
    """The live rows, in firing order."""
    last: Position | None
    """`rows` is complete up to here. None: as complete as the peeks."""
    met_count: int
    """Number of rows and tombstones in the peeks up to there."""


def first_rows_of(peeks: Sequence[Peek]) -> FirstRows:
    """Return the live rows of all peeks, up to the position where all peeks are complete."""
    horizon = min((peek.last for peek in peeks if peek.last is not None), default=None)
    parts = [peek.rows for peek in peeks if len(peek.rows)]
    if horizon is not None:
        parts = [rows[: rank(rows["due_ms"], rows["seq"], horizon)] for rows in parts]
    rows = concat([part for part in parts if len(part)])
    met = len(rows)
    if len(parts) > 1:
        rows = rows.take(fire_order(rows["due_ms"].copy(), rows["seq"].copy()))
    dead = is_tombstone(rows)
    if dead.any():
        rows = rows[annihilate(rows) & ~dead]
    return FirstRows(rows, horizon, met)


def last_of(rows: RowArray) -> Position:
    """Return the position of the last row."""
    return Position(int(rows["due_ms"][-1]), int(rows["seq"][-1]))
