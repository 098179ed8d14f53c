"""The leader's hierarchical wheel over a memtable: near rows sorted, far ones in coarse slots.

    now       near_end
     |  near    |16 s |16 s | ... 64 of them | 17 min | ... 64 of them | 18 h | ...
     |  Tiers   |slot |slot |                |  slot  |                |      |

A slot holds column chunks in order of arrival. Its width grows with its distance: the narrowest of
16 s x 64^level that lies within 64 slots of that width from `near_end`. When the near window moves,
the chunks of the slots that it reaches become loose. `keep_up` moves FAR_MAX of their rows at a
time into the window and into narrower slots. It has 16 s for this. Only a chunk with due rows is
moved at once. So far rows are never sorted. A row moves a few times at most, always with many
others in a few numpy calls, and most rows leave for a run before they are near.

`Memtable.lead` begins a wheel for new rows. Rows of runs are not in a wheel: read windows
(timer/pending/runs/read_window.py) copy the next two seconds of them ahead.
"""

from collections import deque
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedDict

from timer.model.columns import I64
from timer.model.firing_order import stable_order
from timer.pending.memory.tiers import NEVER, Alive, Tiers, least_due, live_pairs

NEAR_BITS: Final = 14
"""The near window moves in steps of 2 ** 14 ms. It reaches one to two steps ahead."""
LEVEL_BITS: Final = 6
LEVELS: Final = 7
FAR_MAX: Final = 16_384
"""Far rows that are collected before they are spread over the slots."""


class Wheel:
    """See the module and timer.pending.memory.tiers.Index."""

    def __init__(self, now_ms: int) -> None:
        self._near = Tiers()
        self._near_end = _near_end(now_ms)
        self._far: list[tuple[I64, I64]] = []
        self._far_rows = 0
        self._far_min = NEVER
        self._slots: SortedDict = SortedDict()
        """Start of the slot -> [(due, ref), ...]. Every pair's due is at or after the start."""
        self._loose: deque[tuple[int, I64, I64]] = deque()
        """(least due, due, ref): chunks of slots that the near window has reached."""
        self._loose_min = NEVER

    def add(self, due: I64, ref: I64, due_min: int) -> None:
        """See Index."""
        if due_min < self._near_end:
            near = due < self._near_end
            if near.all():
                self._near.add(due, ref, due_min)
                return
            self._near.add(due[near], ref[near], due_min)
            due, ref = due[~near], ref[~near]
            due_min = int(due.min())
        self._far.append((due, ref))
        self._far_rows += len(due)
        self._far_min = min(self._far_min, due_min)
        if self._far_rows >= FAR_MAX:
            self._spread()

    def peek(
        self, after: tuple[int, int], until_ms: int, count: int, alive: Alive = None
    ) -> tuple[I64, I64, bool]:
        """See Index."""
        if until_ms >= self._near_end:
            self._advance(until_ms)
        self._move_due(until_ms, alive)
        return self._near.peek(after, until_ms, count, alive)

    def drop(self, through: tuple[int, int]) -> None:
        """See Index."""
        self._move_due(through[0], None)
        self._near.drop(through)

    def keep_up(self, alive: npt.NDArray[np.bool_]) -> bool:
        """Move some loose chunks, about FAR_MAX rows. Return whether more are left."""
        some, rows = list[tuple[I64, I64]](), 0
        while self._loose and rows < FAR_MAX:
            _, due, ref = self._loose.popleft()
            some.append((due, ref))
            rows += len(due)
        self._place_live(some, alive)
        if not self._loose:
            self._loose_min = NEVER
        return bool(self._loose)

    def next_due(self, alive: npt.NDArray[np.bool_]) -> int | None:
        """See Index."""
        near = self._near.next_due(alive)
        least = NEVER if near is None else near
        for due_min, due, ref in self._loose:
            if due_min < least:
                least = min(least, least_due([(due, ref)], alive))
        if least < self._near_end:
            return least
        if self._far_min < least:
            least = least_due(self._far, alive)
        for start, chunks in self._slots.items():
            if start >= least:
                break
            least = min(least, least_due(chunks, alive))
        return None if least == NEVER else least

    def _advance(self, now_ms: int) -> None:
        """Move the near window to `now_ms`. The slots that it reaches become loose."""
        self._near_end = _near_end(now_ms)
        if self._far_min < self._near_end:
            self._spread()
        while self._slots and self._slots.peekitem(0)[0] < self._near_end:
            for due, ref in self._slots.popitem(0)[1]:
                for start in range(0, len(due), FAR_MAX):
                    part = slice(start, start + FAR_MAX)
                    due_min = int(due[part].min())
                    self._loose.append((due_min, due[part], ref[part]))
                    self._loose_min = min(self._loose_min, due_min)

    def _move_due(self, until_ms: int, alive: Alive) -> None:
        """Move the loose chunks with due rows."""
        if self._loose_min > until_ms:
            return
        come = [(due, ref) for due_min, due, ref in self._loose if due_min <= until_ms]
        self._loose = deque(chunk for chunk in self._loose if chunk[0] > until_ms)
        self._loose_min = min((due_min for due_min, _, _ in self._loose), default=NEVER)
        self._place_live(come, alive)

    def _place_live(self, chunks: list[tuple[I64, I64]], alive: Alive) -> None:
        chunks = [pairs for each in chunks if len((pairs := live_pairs(*each, alive))[0])]
        if chunks:
            self._place(chunks)

    def _spread(self) -> None:
        """Move the collected far rows into slots, or into the near window if that reaches them."""
        far, self._far = self._far, []
        self._far_rows, self._far_min = 0, NEVER
        self._place(far)

    def _place(self, chunks: list[tuple[I64, I64]]) -> None:
        due = np.concatenate([due for due, _ in chunks])
        ref = np.concatenate([ref for _, ref in chunks])
        near = due < self._near_end
        if near.all():
            self._near.add(due, ref, int(due.min()))
            return
        if near.any():
            mine = due[near]
            self._near.add(mine, ref[near], int(mine.min()))
            due, ref = due[~near], ref[~near]
        start = self._slot_starts(due)
        order = stable_order(start)
        start, due, ref = start.take(order), due.take(order), ref.take(order)
        cuts = [0, *(np.flatnonzero(start[1:] != start[:-1]) + 1).tolist(), len(start)]
        for low, high in pairwise(cuts):
            self._slots.setdefault(int(start[low]), []).append((due[low:high], ref[low:high]))

    def _slot_starts(self, due: I64) -> I64:
        """Return the start of each far row's slot (n, ms)."""
        start = np.empty_like(due)
        left = np.ones(len(due), np.bool_)
        for level in range(LEVELS):
            bits = NEAR_BITS + LEVEL_BITS * level
            slot = due >> bits
            mine = left & (slot - (self._near_end >> bits) < 1 << LEVEL_BITS)
            np.copyto(start, slot << bits, where=mine)
            left &= ~mine
            if not left.any():
                return start
        raise AssertionError(int(due[left][0]))


def _near_end(now_ms: int) -> int:
    return ((now_ms >> NEAR_BITS) + 2) << NEAR_BITS
