"""Held rows: pending rows of paused topics that have come due.

    due --> |....F......................|           |............F|
            0   pending after F          HELD_OFFSET_MS   held: due at or before F

A held row is stored with the same seq and the due time due + HELD_OFFSET_MS. That is above every
due time and so after the fire position F. FIRE, flush, merge, snapshot and restart therefore need
no special case. A pending row is held if and only if its due lies at or before F. So a timer's id
is enough to compute the stored due of its row. Rows that leave a store have their plain due again.
"""

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, U64, RowArray
from timer.model.firing_order import Position, find, merge_order, rank
from timer.model.timer_id import SEQ_MAX
from timer.model.units import DUE_MS_MAX

HELD_OFFSET_MS: Final = 1 << 56
"""Milliseconds added to the due of a held row."""
BEGIN: Final = Position(-1, SEQ_MAX)
"""Before all timers, in plain dues."""

assert DUE_MS_MAX < HELD_OFFSET_MS

DUE_MASK: Final = HELD_OFFSET_MS - 1
"""`due & MASK` is the plain due."""
FRESH_MAX: Final = 64
"""Parts that are kept unsorted. An array costs more than the few rows of a part."""
_PLACES: Final = np.empty(0, np.intp)


def restore_dues(rows: RowArray) -> RowArray:
    """Restore the plain dues of `rows` in place, and return `rows`. The caller owns them."""
    rows["due_ms"] &= DUE_MASK
    return rows


def held_position(position: Position) -> Position:
    """Return the position of the held row with this (due, seq)."""
    return Position(position.due_ms + HELD_OFFSET_MS, position.seq)


def split_held(rows: RowArray) -> list[RowArray]:
    """Return sorted rows in two parts, not held and held. Empty parts are left out."""
    at = int(rows["due_ms"].searchsorted(HELD_OFFSET_MS))
    return [part for part in (rows[:at], rows[at:]) if len(part)]


class HeldTiers:
    """(due, seq, place) of a memtable's held rows, in sorted tiers.

    Each tier is at least twice as long as the next. Merges of tiers drop dead rows.
    """

    def __init__(self) -> None:
        self._fresh: list[tuple[I64, U64, npt.NDArray[np.intp]]] = []
        self._tiers: list[tuple[I64, U64, npt.NDArray[np.intp]]] = []

    def add(
        self, due: I64, seq: U64, places: npt.NDArray[np.intp], alive: npt.NDArray[np.bool_]
    ) -> None:
        """Add n rows."""
        self._fresh.append((due, seq, places))
        if len(self._fresh) == FRESH_MAX:
            self._seal(alive)

    def find(self, due: I64, seq: U64, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """Return the places of the wanted rows (n,); -1 if no live row is here."""
        self._seal(alive)
        found = np.full(len(seq), -1, np.intp)
        for tier_due, tier_seq, tier_places in self._tiers:
            at = find(tier_due, tier_seq, due, seq)
            here = at >= 0
            found[here] = tier_places[at[here]]
        found[~alive.take(found) | (found < 0)] = -1
        return found

    def peek(
        self, after: Position, count: int, alive: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.intp], Position | None]:
        """Return the places of the first live rows after a position, sorted, and their end.

        The rows are all live ones up to the end. None: to the last row. About `count` rows: more,
        if several tiers have some.
        """
        self._seal(alive)
        parts: list[tuple[I64, U64, npt.NDArray[np.intp]]] = []
        last: Position | None = None
        for due, seq, places in self._tiers:
            start = rank(due, seq, after)
            stop = start + count
            if stop < len(due):
                end = Position(int(due[stop - 1]), int(seq[stop - 1]))
                last = end if last is None else min(last, end)
            if start < len(due):
                parts.append((due[start:stop], seq[start:stop], places[start:stop]))
        if not parts:
            return _PLACES, None
        due, seq, places = _joined(parts)
        if last is not None:
            places = places[: rank(due, seq, last)]
        return places[alive.take(places)], last

    def _seal(self, alive: npt.NDArray[np.bool_]) -> None:
        if not self._fresh:
            return
        self._tiers.append(_joined(self._fresh))
        self._fresh = []
        while len(self._tiers) > 1 and len(self._tiers[-2][0]) < 2 * len(self._tiers[-1][0]):
            due, seq, places = _joined(self._tiers[-2:])
            lives = alive.take(places)
            self._tiers[-2:] = [(due[lives], seq[lives], places[lives])]


class HeldByTopic:
    """Due, seq and place of a memtable's held rows, by topic. A sweep's topics are in tiers.

    So a sweep over few topics does not pass the rows of the others.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[array[int], array[int], array[int]]] = {}
        """By topic: columns of due, seq, place. array.array grows by single rows cheaply."""
        self._swept: frozenset[int] = frozenset()
        self._tiers = HeldTiers()
        """Of `_swept`."""

    def add(self, rows: RowArray, first: int, alive: npt.NDArray[np.bool_]) -> None:
        """Add n rows that lie side by side from place `first` on."""
        topics = rows["topic"]
        order = np.argsort(topics, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(topics[order])) + 1):
            topic, places, mine = int(topics[part[0]]), part + first, rows[part]
            due, seq = _due(mine), mine["seq"].astype(np.uint64)
            if topic not in self._rows:
                self._rows[topic] = array("q"), array("Q"), array("q")
            for column, values in zip(self._rows[topic], (due, seq, places), strict=True):
                column.frombytes(values.tobytes())
            if topic in self._swept:
                self._tiers.add(due, seq, places, alive)

    def peek(
        self,
        after: Position,
        count: int,
        alive: npt.NDArray[np.bool_],
        topics: frozenset[int],
    ) -> tuple[npt.NDArray[np.intp], Position | None]:
        """Return HeldTiers.peek of the rows of some topics."""
        if topics != self._swept:
            self._sweep(alive, topics)
        return self._tiers.peek(after, count, alive)

    def end_sweep(self) -> None:
        """Free the tiers."""
        self._swept, self._tiers = frozenset(), HeldTiers()

    def _sweep(self, alive: npt.NDArray[np.bool_], topics: frozenset[int]) -> None:
        self._swept, self._tiers = topics, HeldTiers()
        for topic in topics & self._rows.keys():
            columns = self._rows.pop(topic)
            due, seq = np.array(columns[0], np.int64), np.array(columns[1], np.uint64)
            places = np.array(columns[2], np.intp)
            lives = alive.take(places)
            if not lives.all():
                due, seq, places = due[lives], seq[lives], places[lives]
                both = array("q", due.tobytes()), array("Q", seq.tobytes())
                columns = *both, array("q", places.tobytes())
            if len(places):
                self._rows[topic] = columns
                self._tiers.add(due, seq, places, alive)


def _due(rows: RowArray) -> I64:
    due: I64 = rows["due_ms"].astype(np.int64)
    return due


def _joined(
    parts: list[tuple[I64, U64, npt.NDArray[np.intp]]],
) -> tuple[I64, U64, npt.NDArray[np.intp]]:
    if len(parts) == 1:
        due, seq, places = parts[0]
    else:
        due, seq, places = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = merge_order(due, seq)
    return due[order], seq[order], places[order]
