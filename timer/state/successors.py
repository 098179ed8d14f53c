"""Successors: the timers that fire instead of rescheduled ones (ADR 0061).

    RESCHEDULE of A: B begins; of B: C begins        the successor of A, and of B, is C

An id holds the due time, so a reschedule makes a new id. An application may still hold the old one.
The state keeps the pair of seqs of each of the last reschedules. Half of them are forgotten at a
time, at an entry that all replicas agree on. They decide nothing: answers alone use them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from timer.entries.payloads import Ids
from timer.model.columns import I64, U64

HALF_ROWS: Final = 65_536
"""So many reschedules at least are known, and twice as many at most: 24 bytes each."""
LOOKS_MAX: Final = 1 << 18
"""Of one request: a longer way is followed in part, and ends at a timer that was rescheduled."""
ROUND_LOOKS_MIN: Final = 256
"""Charged for each step: one timer is followed over 1,024 reschedules."""


class Links(NamedTuple):
    """Reschedules, sorted by the seq of the timer that ended; (n,) each. They never change."""

    old: U64
    due_ms: I64
    """Of the timer that began, as its seq."""
    seq: U64

    @classmethod
    def of(cls, old: U64, due_ms: I64, seq: U64) -> "Links":
        """Return these, sorted."""
        order = np.argsort(old, kind="stable")
        return cls(old[order], due_ms[order], seq[order])


@dataclass(slots=True)
class Successors:
    """See the module."""

    _older: list[Links] = field(default_factory=list)
    _newer: list[Links] = field(default_factory=list)
    _rows: int = 0
    """In the newer ones."""

    def add(self, old: U64, due_ms: I64, seq: U64) -> None:
        """Note that timers were rescheduled: `old` ended, the others began, (n,) each."""
        if not len(old):
            return
        self._newer.append(Links.of(old, due_ms, seq))
        while len(self._newer) > 1 and len(self._newer[-2].old) < 2 * len(self._newer[-1].old):
            one, other = self._newer.pop(), self._newer.pop()
            self._newer.append(
                Links.of(
                    np.concatenate([one.old, other.old]),
                    np.concatenate([one.due_ms, other.due_ms]),
                    np.concatenate([one.seq, other.seq]),
                )
            )
        self._rows += len(old)
        if self._rows >= HALF_ROWS:
            self._older, self._newer, self._rows = self._newer, [], 0

    @property
    def links(self) -> Sequence[Links]:
        """All that is known, for `last_of` in a thread."""
        return [*self._older, *self._newer]

    def pack(self) -> list[Any]:
        """Return what a manifest holds; nothing in it changes later."""
        halves = self._older, self._newer
        return [[[old, due_ms.view(np.uint64), seq] for old, due_ms, seq in h] for h in halves]

    def restore(self, packed: Iterable[Iterable[Sequence[bytes]]]) -> None:
        """Put back what a manifest holds."""
        self._older, self._newer = (
            [
                Links(
                    np.frombuffer(old, np.uint64),
                    np.frombuffer(due_ms, np.int64),
                    np.frombuffer(seq, np.uint64),
                )
                for old, due_ms, seq in half
            ]
            for half in packed
        )
        self._rows = sum(len(each.old) for each in self._newer)


def last_of(links: Sequence[Links], seq: U64) -> Ids:
    """Return the last known successor of each of these, (n,); seq = 0: none is known."""
    unique, places = np.unique(seq, return_inverse=True)
    last = Ids(np.zeros(len(unique), np.int64), np.zeros(len(unique), np.uint64))
    rows, left = np.arange(len(unique)), LOOKS_MAX
    asked = unique
    while len(rows) and left > 0:
        left -= max(len(rows), ROUND_LOOKS_MIN)
        found = np.zeros(len(rows), np.bool_)
        for each in links:
            at = np.minimum(each.old.searchsorted(asked), len(each.old) - 1)
            same = each.old[at] == asked
            last.due_ms[rows[same]] = each.due_ms[at[same]]
            last.seq[rows[same]] = each.seq[at[same]]
            found |= same
        rows = rows[found]
        asked = last.seq[rows]
    return Ids(last.due_ms[places], last.seq[places])
