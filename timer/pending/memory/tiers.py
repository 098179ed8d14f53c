"""Sorted tiers: pairs (due, ref), added in any order, returned in order.

A ref is a number that rises with the seq: the place of a row in a memtable, or the seq itself.

    add --> fresh, unsorted --> sorted tiers; 8 of one level become 1 of the next
                                     |  due pairs, the first ones first
                                     v
                                   ready, one sorted array --> peek, drop

Each pair is sorted log8(n) times, always with many others in one call. `peek` removes no pairs:
`drop` does, when the fired rows are known.
"""

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64
from timer.model.firing_order import find, find_one, rank, sort_pairs

FAN: Final = 8
FRESH_MAX: Final = 8_192
LEVEL_MAX: Final = 2
"""Tiers of this level, half a million pairs, are not merged: a merge would take some 10 ms."""
UNSORTED_LOOKUPS_MAX: Final = 8
"""Up to this many pairs are looked up in the fresh ones without sorting them. Sorting takes longer,
and each time adds a tier to search."""
CHUNK: Final = 16_384
"""Pairs per tier that become ready at a time if many are due. It bounds the longest step."""
NEVER: Final = 1 << 62

_NONE: Final = np.empty(0, np.int64)
Alive = npt.NDArray[np.bool_] | None
"""Which refs are alive. None: all."""


class Index(Protocol):
    """An index that finds a memtable's next due rows: Tiers or a Wheel."""

    def add(self, due: I64, ref: I64, due_min: int) -> None:
        """Add n pairs. `due_min`: the least due. The arrays are kept: don't change them."""

    def peek(
        self, after: tuple[int, int], until_ms: int, count: int, alive: Alive = None
    ) -> tuple[I64, I64, bool]:
        """Return the first pairs after `after` with due <= `until_ms`, sorted. True: more exist.

        At most `count`, perhaps fewer; at least one if one exists. Pairs whose ref is dead may be
        left out, and are then removed.
        """

    def drop(self, through: tuple[int, int]) -> None:
        """Remove the pairs at or before `through`."""

    def next_due(self, alive: npt.NDArray[np.bool_]) -> int | None:
        """Return the least due of a pair whose ref is alive; None if there is none."""


class _Tier:
    """Sorted pairs. Pairs before `head` are removed."""

    __slots__ = ("due", "head", "level", "ref")

    def __init__(self, due: I64, ref: I64, level: int) -> None:
        self.due = due
        self.ref = ref
        self.level = level
        self.head = 0

    def rest(self) -> tuple[I64, I64]:
        return self.due[self.head :], self.ref[self.head :]

    def next_due(self, alive: npt.NDArray[np.bool_]) -> int:
        """Return the due of the first live pair; NEVER if none is left. Remove dead ones before."""
        while self.head < len(self.ref):
            if alive[self.ref[self.head]]:
                return int(self.due[self.head])
            live = alive.take(self.ref[self.head : self.head + FRESH_MAX])
            step = int(live.argmax())
            self.head += step if live[step] else len(live)
        return NEVER


class Tiers:
    """See the module and Index."""

    def __init__(self) -> None:
        self._fresh: list[tuple[I64, I64]] = []
        self._fresh_rows = 0
        self._fresh_min = NEVER
        self._tiers: list[_Tier] = []  # levels fall from left to right; none is empty
        self._ready = _Tier(_NONE, _NONE, 0)
        self._has_more_due = False
        """True: tiers still have pairs due at the last peek, all after those in `ready`."""

    def add(self, due: I64, ref: I64, due_min: int) -> None:
        """See Index."""
        self._fresh.append((due, ref))
        self._fresh_rows += len(due)
        self._fresh_min = min(self._fresh_min, due_min)
        if self._fresh_rows >= FRESH_MAX:
            self._seal()

    def peek(
        self, after: tuple[int, int], until_ms: int, count: int, alive: Alive = None
    ) -> tuple[I64, I64, bool]:
        """See Index."""
        self._fill(after, until_ms, count, alive)
        due, ref = self._ready.rest()
        if not len(due):
            return due, ref, False
        start = rank(due, ref, after) if due[0] <= after[0] else 0
        end = len(due) if due[-1] <= until_ms else int(due.searchsorted(until_ms, "right"))
        stop = min(end, start + count)
        return due[start:stop], ref[start:stop], stop < end or self._has_more_due

    def drop(self, through: tuple[int, int]) -> None:
        """See Index."""
        passed = False
        for tier in (self._ready, *self._tiers):
            due, ref = tier.rest()
            if not len(due) or due[0] > through[0]:
                continue
            tier.head += len(due) if due[-1] < through[0] else rank(due, ref, through)
            passed |= tier.head == len(tier.due)
        if passed:
            self._tiers = [tier for tier in self._tiers if tier.head < len(tier.due)]
        if self._ready.head == len(self._ready.due):
            self._ready = _Tier(_NONE, _NONE, 0)

    def next_due(self, alive: npt.NDArray[np.bool_]) -> int | None:
        """See Index."""
        least = self._ready.next_due(alive)
        for tier in self._tiers:
            least = min(least, tier.next_due(alive))
        self._tiers = [tier for tier in self._tiers if tier.head < len(tier.due)]
        if self._fresh_min < least:
            least = min(least, least_due(self._fresh, alive))
        return None if least == NEVER else least

    def _fill(self, after: tuple[int, int], until_ms: int, count: int, alive: Alive) -> None:
        """Move due pairs into `ready`. If many are due, move only as many as requested."""
        if self._fresh_min <= until_ms:
            self._seal()
        self._has_more_due = self._fill_some(after, until_ms, count, alive)
        while self._has_more_due and self._is_past(after):  # the moved pairs were dead
            self._has_more_due = self._fill_some(after, until_ms, count, alive)

    def _is_past(self, position: tuple[int, int]) -> bool:
        """Return whether no ready pair lies after a position."""
        due, ref = self._ready.rest()
        return not len(due) or (int(due[-1]), int(ref[-1])) <= position

    def _fill_some(self, after: tuple[int, int], until_ms: int, count: int, alive: Alive) -> bool:
        """Move all due pairs, or a bounded number of each tier. Return whether more are due."""
        tiers = [tier for tier in self._tiers if tier.due[tier.head] <= until_ms]
        if not tiers:
            return False
        held = False
        stops = [int(tier.due.searchsorted(until_ms, "right")) for tier in tiers]
        if sum(stops) - sum(tier.head for tier in tiers) > 4 * CHUNK:
            bound = self._bound(tiers, after, count)
            bounded = [
                min(stop, rank(t.due, t.ref, bound)) for t, stop in zip(tiers, stops, strict=True)
            ]
            held = bounded != stops
            stops = bounded
        moved = []
        for tier, stop in zip(tiers, stops, strict=True):
            if tier.head < stop:
                pairs = live_pairs(tier.due[tier.head : stop], tier.ref[tier.head : stop], alive)
                moved += [pairs] if len(pairs[0]) else []
                tier.head = stop
        self._tiers = [tier for tier in self._tiers if tier.head < len(tier.due)]
        if not moved:
            return held
        if self._ready.head < len(self._ready.due):
            moved.append(self._ready.rest())
        self._ready = _Tier(*(_joined(moved, in_runs=True) if len(moved) > 1 else moved[0]), 0)
        return held

    def _bound(self, tiers: list[_Tier], after: tuple[int, int], count: int) -> tuple[int, int]:
        """Return up to where pairs move: at least to the end of `ready`, so that it stays a prefix.

        If fewer than `count` ready pairs follow `after`, CHUNK pairs of some tier are included.
        """
        due, ref = self._ready.rest()
        end = (int(due[-1]), int(ref[-1])) if len(due) else (-1, -1)
        if len(due) and len(due) - rank(due, ref, after) >= count:
            return end
        places = [(tier, min(tier.head + CHUNK, len(tier.due)) - 1) for tier in tiers]
        return max(end, min((int(t.due[place]), int(t.ref[place])) for t, place in places))

    def contains(self, due: I64, ref: I64) -> npt.NDArray[np.bool_]:
        """Return which of the pairs are here (n, bool)."""
        if len(due) == 1:
            return np.array([self.has(due.item(), ref.item())])
        found = np.zeros(len(due), np.bool_)
        if self._fresh:
            if len(due) > UNSORTED_LOOKUPS_MAX:
                self._seal()
            else:
                found |= self._among_fresh(due, ref)
        for tier in (self._ready, *self._tiers):
            if tier.head < len(tier.due):
                found |= find(*tier.rest(), due, ref) >= 0
        return found

    def has(self, due: int, ref: int) -> bool:
        """Return whether one pair is here."""
        if self._fresh and self._is_fresh(due, ref):
            return True
        tiers = [tier for tier in (self._ready, *self._tiers) if tier.head < len(tier.due)]
        return any(find_one(*tier.rest(), due, ref) >= 0 for tier in tiers)

    def _among_fresh(self, due: I64, ref: I64) -> npt.NDArray[np.bool_]:
        pairs = zip(due.tolist(), ref.tolist(), strict=True)
        return np.array([self._is_fresh(d, r) for d, r in pairs], np.bool_)

    def _is_fresh(self, due: int, ref: int) -> bool:
        fresh_due, fresh_ref = _as_one(self._fresh)
        return bool((fresh_due[fresh_ref == ref] == due).any())

    def _seal(self) -> None:
        """Make a tier of the fresh pairs. Merge 8 tiers of one level into one of the next."""
        self._tiers.append(_Tier(*_joined(self._fresh), level=_level(self._fresh_rows)))
        self._fresh, self._fresh_rows, self._fresh_min = [], 0, NEVER
        while (
            len(self._tiers) >= FAN and self._tiers[-FAN].level <= self._tiers[-1].level < LEVEL_MAX
        ):
            merged = _joined([tier.rest() for tier in self._tiers[-FAN:]], in_runs=True)
            level = self._tiers[-1].level + 1
            self._tiers[-FAN:] = [_Tier(*merged, level=level)]


def live_pairs(due: I64, ref: I64, alive: Alive) -> tuple[I64, I64]:
    """Return the pairs whose refs are alive."""
    if alive is None:
        return due, ref
    lives = alive.take(ref)
    return (due, ref) if lives.all() else (due[lives], ref[lives])


def least_due(chunks: list[tuple[I64, I64]], alive: npt.NDArray[np.bool_]) -> int:
    """Return the least due of a live pair, NEVER if there is none. `chunks` are joined in place."""
    due, ref = _as_one(chunks)
    live = due[alive.take(ref)]
    return int(live.min()) if len(live) else NEVER


def _as_one(chunks: list[tuple[I64, I64]]) -> tuple[I64, I64]:
    """Join `chunks` (at least one) in place into one, and return it.

    Pairs that came one by one are then searched in a few calls, now and the next time.
    """
    if len(chunks) > 1:
        dues, refs = zip(*chunks, strict=True)
        chunks[:] = [(np.concatenate(dues), np.concatenate(refs))]
    return chunks[0]


def _level(rows: int) -> int:
    """Return the level of a tier of `rows` fresh rows: one more for 8 times as many."""
    return max(0, rows // FRESH_MAX).bit_length() // 3


def _joined(parts: list[tuple[I64, I64]], *, in_runs: bool = False) -> tuple[I64, I64]:
    """Return the pairs of all parts, sorted. `in_runs`: each part is sorted."""
    due = np.concatenate([due for due, _ in parts])
    ref = np.concatenate([ref for _, ref in parts])
    return sort_pairs(due, ref, in_runs=in_runs)
