"""Successors: the timers that fire instead of rescheduled ones (ADR 0061).

    RESCHEDULE of A: B begins; of B: C begins        the successor of A, and of B, is C

An id holds the due time, so a reschedule makes a new id. An application may still hold the old one.
The state holds the two seqs of each of the last reschedules. The older half of them is forgotten at
once, at an entry on which all replicas agree. They decide nothing and serve answers only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from timer.entries.payloads import Ids
from timer.model.columns import I64, U64

HALF_ROWS: Final = 65_536
"""Reschedules known: at least this number, at most twice as many, at 24 bytes each."""
LOOKS_MAX: Final = 1 << 18
"""Look-ups of one request. A longer chain is followed in part, to a timer that was rescheduled."""
ROUND_LOOKS_MIN: Final = 256
"""Least look-ups charged for each step: one timer is followed over 1,024 reschedules."""


class Links(NamedTuple):
    """Reschedules, sorted by the seq of the timer that ended; (n,) each. They never change."""

    old: U64
    due_ms: I64
    """Due time of the timer that began; `seq` is its seq."""
    seq: U64

    @classmethod
    def of(cls, old: U64, due_ms: I64, seq: U64) -> "Links":
        """Return the links, sorted."""
        order = np.argsort(old, kind="stable")
        return cls(old[order], due_ms[order], seq[order])


@dataclass(slots=True)
class Successors:
    """The last reschedules; see the module."""

    _older: list[Links] = field(default_factory=list)
    _newer: list[Links] = field(default_factory=list)
    _rows: int = 0
    """Rows in the newer half."""

    def add(self, old: U64, due_ms: I64, seq: U64) -> None:
        """Note that the timers `old` were rescheduled; the other columns are the new ones, (n,)."""
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
        """All known reschedules, for `last_of` in a thread."""
        return [*self._older, *self._newer]

    def pack(self) -> list[Any]:
        """Return the fields for a manifest; nothing in them changes later."""
        halves = self._older, self._newer
        return [[[old, due_ms.view(np.uint64), seq] for old, due_ms, seq in h] for h in halves]

    def restore(self, packed: Iterable[Iterable[Sequence[bytes]]]) -> None:
        """Put back the fields that a manifest holds."""
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
    """Return the last known successor of each timer, (n,); seq = 0: none is known."""
    unique, places = np.unique(seq, return_inverse=True)
    last = Ids(np.zeros(len(unique), np.int64), np.zeros(len(unique), np.uint64))
    rows, looks_left = np.arange(len(unique)), LOOKS_MAX
    seqs = unique
    while len(rows) and looks_left > 0:
        looks_left -= max(len(rows), ROUND_LOOKS_MIN)
        found = np.zeros(len(rows), np.bool_)
        for each in links:
            at = np.minimum(each.old.searchsorted(seqs), len(each.old) - 1)
            same = each.old[at] == seqs
            last.due_ms[rows[same]] = each.due_ms[at[same]]
            last.seq[rows[same]] = each.seq[at[same]]
            found |= same
        rows = rows[found]
        seqs = last.seq[rows]
    return Ids(last.due_ms[places], last.seq[places])
