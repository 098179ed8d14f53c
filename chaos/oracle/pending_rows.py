"""Pending rows in bounded memory, in the order of firing.

    add ──► buckets of due time ──(too many)──► sorted runs in files
                 │ due                              │ read ahead, some thousand rows of each
                 │                                  ▼
                 │                                front
                 ▼                                  │ due
               late ◄───────────────────────────────┘
                 │ take: FIRE
                 ▼
               fired, cancelled

Firing moves forward in (due, seq) only, so a run is read once, from its beginning to its end. The
front holds, sorted, all rows of runs up to `_pulled`. `late` holds, sorted, the rows that were due
at the last FIRE and exceeded its limits.

A cancel is a row as well, a *tombstone* beside its target, as in the product's own runs. Its
effect, and whether there was such a target, is decided when both are due. A hundred million pending
rows therefore need the memory of ROWS_MAX rows of 76 bytes, and of about AHEAD rows of every run.
"""

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]
"""Of dtype ROW."""

ROW: Final = np.dtype(
    [
        ("due_ms", "<i8"),  # effective
        ("seq", "<i8"),
        ("mark", "<i8"),  # MARK_NONE: the payload is too short to have one
        ("index", "<i8"),  # of the entry that scheduled it; of a tombstone: that cancels it
        ("time_ms", "<i8"),  # that entry's
        ("other", "<i8"),  # seq of the timer that it replaced, moved, or left alone; 0: none
        ("old_due_ms", "<i8"),  # of the timer that it moved; 0: none
        ("key", "<i8"),  # a hash of topic and key; 0: no key
        ("topic", "<u4"),
        ("size", "<u4"),  # of payload, key and headers
        ("payload_size", "<u4"),
    ]
)
TOMBSTONE: Final = 0xFFFF_FFFF
"""In `topic`: the end of the row with the same (due_ms, seq). `mark` holds the kind of end."""
ROWS_MAX: Final = 4 << 20
"""Rows in memory before a spill."""
AHEAD: Final = 1 << 15
"""Rows of each run in memory."""
_BUCKET_BITS: Final = 8
_PARTS_MAX: Final = 16
"""Parts of a bucket that is searched; each takes as long as some thousand rows."""
_FIRST: Final = (-1, -1)


class RemovedRows(NamedTuple):
    """The rows that a FIRE removed."""

    fired: Rows
    """In the order of firing."""
    cancelled: Rows
    tombstones: Rows
    """Element i cancelled row i of `cancelled`."""
    limited: bool
    """More rows were due than the limits allowed."""
    dropped: Rows
    """Rows without a cancel, of deleted topics."""


@dataclass(slots=True, eq=False)
class SpilledRun:
    """A file of rows sorted by (due, seq), read from its beginning to its end."""

    path: Path
    rows: int
    read: int = 0
    buffer: Rows = field(default_factory=lambda: np.zeros(0, ROW))

    def fill(self) -> None:
        """Read until AHEAD rows of more than one (due, seq), or all that remain, are in memory."""
        while self.read < self.rows and (
            len(self.buffer) < AHEAD or _key(self.buffer[0]) == _key(self.buffer[-1])
        ):
            more = np.fromfile(self.path, ROW, AHEAD, offset=self.read * ROW.itemsize)
            self.read += len(more)
            self.buffer = _joined([self.buffer, more])

    def bound(self) -> tuple[int, int] | None:
        """Return the (due, seq) up to which `buffer` holds all rows of the run; None: it holds all.

        The file may continue with the tombstone of the buffer's last row.
        """
        if self.read == self.rows:
            return None
        due, seq = _key(self.buffer[-1])
        return due, seq - 1

    def pull(self, upto: tuple[int, int] | None) -> Rows:
        """Remove and return the buffer's rows up to and including a (due, seq)."""
        count = len(self.buffer) if upto is None else _count(self.buffer, upto)
        pulled, self.buffer = self.buffer[:count], self.buffer[count:].copy()
        return pulled

    def find(self, key: tuple[int, int]) -> Rows:
        """Return the remaining rows of one (due, seq)."""
        found = _equal(self.buffer, key)
        if self.read == self.rows or _count(self.buffer, key) < len(self.buffer):
            return found
        unread: Rows = np.memmap(self.path, ROW, "r", self.read * ROW.itemsize)
        places = range(len(unread))
        start = bisect.bisect_left(places, key, key=lambda at: _key(unread[at]))
        end = bisect.bisect_right(places, key, key=lambda at: _key(unread[at]))
        return _joined([found, unread[start:end]])


class WaitingRows:
    """Pending rows, with a folder for those that exceed the memory."""

    def __init__(self, folder: Path, *, rows_max: int = ROWS_MAX) -> None:
        self._folder, self._rows_max = folder, rows_max
        self._buckets: dict[int, list[Rows]] = {}
        self._order: list[int] = []
        self._in_buckets = 0
        self._runs: list[SpilledRun] = []
        self._spills = 0
        self._pulled: tuple[int, int] = _FIRST
        self._front = np.zeros(0, ROW)
        self._late = np.zeros(0, ROW)
        self._deleted: list[int] = []

    def drop(self, topic: int) -> None:
        """Never fire the rows of a topic; they are returned as dropped at their time."""
        self._deleted.append(topic)

    def _split(self, rows: Rows) -> tuple[I64, I64, I64]:
        """Return positions of pending rows, of (row, tombstone), and of rows of deleted topics."""
        live, dead = _alive(rows)
        none = np.zeros(len(live), np.bool_)
        gone = np.isin(rows["topic"][live], self._deleted) if self._deleted else none
        return live[~gone], dead, live[gone]

    def add(self, rows: Rows) -> None:
        """Add rows or tombstones."""
        if not len(rows):
            return
        self._in_buckets += len(rows)
        bucket = rows["due_ms"] >> _BUCKET_BITS
        order = np.argsort(bucket, kind="stable")
        rows, bucket = rows[order], bucket[order]
        cuts = [0, *(np.flatnonzero(np.diff(bucket)) + 1).tolist(), len(rows)]
        for number, start, end in zip(bucket[cuts[:-1]].tolist(), cuts, cuts[1:], strict=False):
            if number not in self._buckets:
                self._buckets[number] = []
                heapq.heappush(self._order, number)
            self._buckets[number].append(rows[start:end])
        if self._in_buckets > self._rows_max:
            self._spill()

    def find(self, due_ms: int, seq: int) -> np.void | None:
        """Return the row with that (due, seq), wherever it lies; None if it ended."""
        found = self.rows_of((due_ms, seq))
        if len(found) != 1 or found["topic"][0] in (TOMBSTONE, *self._deleted):
            return None
        row: np.void = found[0]
        return row

    def rows_of(self, key: tuple[int, int]) -> Rows:
        """Return the row with that (due, seq), if it is pending, and its tombstones."""
        due_ms, seq = key
        found = [_equal(self._late, key), _equal(self._front, key)]
        found += [run.find(key) for run in self._runs]
        bucket = self._buckets.get(due_ms >> _BUCKET_BITS, [])
        if len(bucket) > _PARTS_MAX:
            bucket[:] = [_joined(bucket)]
        for rows in bucket:
            found.append(rows[(rows["seq"] == seq) & (rows["due_ms"] == due_ms)])
        return _joined(found)

    def overdue(self, due_ms: int) -> Rows:
        """Return pending rows that are due by a time, in order: of each run its next AHEAD rows."""
        for run in self._runs:
            run.fill()
        numbers = [number for number in self._order if number <= due_ms >> _BUCKET_BITS]
        parts = [part for number in numbers for part in self._buckets[number]]
        rows = _sorted([self._late, self._front, *parts, *(run.buffer for run in self._runs)])
        rows = rows[self._split(rows)[0]]
        return rows[rows["due_ms"] <= due_ms]

    def take(
        self, read_time_ms: int, rows_max: int, bytes_max: int, topics_max: int = 1 << 32
    ) -> RemovedRows:
        """Remove the rows of one FIRE: due by `read_time_ms`, at least one row if any is due."""
        self._gather(read_time_ms)
        while True:
            complete = not self._runs or self._pulled[0] > read_time_ms
            # `late` may hold rows that are not due yet: an earlier read time may have been later.
            end = int(np.searchsorted(self._late["due_ms"], read_time_ms, "right"))
            late = self._late[: end if complete else min(end, _count(self._late, self._pulled))]
            live, dead, lost = self._split(late)
            within = np.cumsum(late["size"][live], dtype=np.int64) <= bytes_max
            count = max(min(rows_max, int(np.count_nonzero(within))), 1)
            firsts = np.sort(np.unique(late["topic"][live[:count]], return_index=True)[1])
            count = int(firsts[topics_max]) if len(firsts) > topics_max else count
            if complete or count < len(live):
                break
            self._pull()
            self._gather(read_time_ms)
        limited = count < len(live)
        end = int(live[count]) if limited else len(late)
        dead, lost = dead[:, dead[0] < end], lost[lost < end]
        self._late = self._late[end:]
        fired, cancelled = late[live[:count]], late[dead[0]]
        return RemovedRows(fired, cancelled, late[dead[1]], limited, late[lost])

    def rest(self) -> Iterator[RemovedRows]:
        """Remove all rows, piece by piece; `fired` holds those that are still pending."""
        self._spill()
        self._front = _sorted([self._late, self._front])
        self._late = self._late[:0]
        while len(self._front) or self._runs:
            if self._runs:
                self._pull()
            end = _count(self._front, self._pulled) if self._runs else len(self._front)
            rows, self._front = self._front[:end], self._front[end:]
            live, dead, lost = self._split(rows)
            parts = rows[live], rows[dead[0]], rows[dead[1]]
            yield RemovedRows(*parts, limited=False, dropped=rows[lost])

    def _gather(self, read_time_ms: int) -> None:
        """Move the due rows of the buckets and of the front to `late`."""
        found: list[Rows] = []
        while self._order and self._order[0] <= read_time_ms >> _BUCKET_BITS:
            found += self._buckets.pop(heapq.heappop(self._order))
        self._in_buckets -= sum(map(len, found))
        end = int(np.searchsorted(self._front["due_ms"], read_time_ms, "right"))
        if found:
            rows = _joined(found)
            due = rows["due_ms"] <= read_time_ms
            self.add(rows[~due])
            found = [rows[due]]
        if found or end:
            self._late = _sorted([self._late, self._front[:end], *found])
            self._front = self._front[end:]

    def _pull(self) -> None:
        """Move the next rows of all runs to the front, up to one (due, seq)."""
        for run in self._runs:
            run.fill()
        bounds = [bound for run in self._runs if (bound := run.bound()) is not None]
        upto = min(bounds, default=None)
        self._front = _sorted([self._front, *(run.pull(upto) for run in self._runs)])
        if upto is not None:
            self._pulled = upto
        read = [run for run in self._runs if run.read == run.rows and not len(run.buffer)]
        for run in read:
            run.path.unlink()
            self._runs.remove(run)

    def _spill(self) -> None:
        """Move the buckets' rows to a run, and to the front if the runs were read further."""
        found = [rows for parts in self._buckets.values() for rows in parts]
        self._buckets.clear()
        self._order.clear()
        self._in_buckets = 0
        if not found:
            return
        rows = _sorted(found)
        if not self._runs:
            self._pulled = _FIRST
        near = _count(rows, self._pulled)
        if near:
            self._front = _sorted([self._front, rows[:near]])
        if len(rows) > near:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._spills += 1
            run = SpilledRun(self._folder / f"{self._spills:06d}.rows", len(rows) - near)
            rows[near:].tofile(run.path)
            self._runs.append(run)


def _joined(parts: Sequence[Rows]) -> Rows:
    """Return all rows in one array. Numpy's concatenate of records takes twenty times as long."""
    rows = np.empty(sum(map(len, parts)), ROW)
    start = 0
    for part in parts:
        rows[start : start + len(part)] = part
        start += len(part)
    return rows


def _sorted(parts: list[Rows]) -> Rows:
    """Return rows sorted by (due, seq), tombstones behind their rows, the oldest first."""
    rows = _joined(parts)
    ends = rows["topic"] == TOMBSTONE  # one entry may create a row and end it
    return rows[np.lexsort((ends, rows["index"], rows["seq"], rows["due_ms"]))]


def _key(row: Any) -> tuple[int, int]:
    return int(row["due_ms"]), int(row["seq"])


def _count(rows: Rows, key: tuple[int, int]) -> int:
    """Return the number of sorted rows at or before a (due, seq)."""
    due, seq = key
    start = int(np.searchsorted(rows["due_ms"], due, "left"))
    end = int(np.searchsorted(rows["due_ms"], due, "right"))
    return start + int(np.searchsorted(rows["seq"][start:end], seq, "right"))


def _equal(rows: Rows, key: tuple[int, int]) -> Rows:
    """Return those of the sorted rows that have one (due, seq)."""
    return rows[_count(rows, (key[0], key[1] - 1)) : _count(rows, key)]


def _alive(rows: Rows) -> tuple[I64, I64]:
    """Return positions of the rows without a tombstone, and (row, tombstone) of the others."""
    is_row = rows["topic"] != TOMBSTONE
    at = np.flatnonzero(is_row)
    if len(at) == len(rows):
        return at, np.zeros((2, 0), np.int64)
    following = np.minimum(at + 1, len(rows) - 1)
    dead = (
        ~is_row[following]
        & (rows["seq"][following] == rows["seq"][at])
        & (rows["due_ms"][following] == rows["due_ms"][at])
    )
    return at[~dead], np.stack([at[dead], at[dead] + 1])
