"""Key conflicts: decides the outcome of each row of one SCHEDULE entry. Pure.

A key is unique among the pending timers of its topic. Rows are decided in their order, each after
those before it. A scheduled row holds its key for the following rows, if it becomes pending. A row
that is due already does not become pending, except in a paused topic, which holds it. A timer that
fires or is cancelled releases its key.
"""

import enum
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, REPLACING, U32, U64, Binary, OnConflict, RowArray


class Verdict(enum.IntEnum):
    """The outcome of one row."""

    SCHEDULED = 1
    REPLACED = 2
    """Scheduled; the pending timer with its key was cancelled."""
    KEPT = 3
    """Not scheduled: the pending timer with its key stays in its place."""
    REJECTED = 4
    """Not scheduled: a pending timer has its key."""
    NOT_PENDING = 5
    """Not scheduled: it was to replace a pending timer, and none has its key."""


NEW_MAX: Final = Verdict.REPLACED
"""Rows with verdicts up to this one became timers."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """One Verdict per row, (n, uint8), and the id of the other timer concerned, (n,), 0: none."""

    verdict: npt.NDArray[np.uint8]
    due_ms: I64
    seq: U64

    def part(self, start: int, stop: int) -> "Verdicts | None":
        """Return a copy for rows [start, stop). None: every row is SCHEDULED."""
        verdict = self.verdict[start:stop]
        if (verdict == Verdict.SCHEDULED).all():
            return None
        return Verdicts(verdict.copy(), self.due_ms[start:stop].copy(), self.seq[start:stop].copy())


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about the n rows of an entry."""

    verdicts: Verdicts
    ended: RowArray
    """Pending timers that were replaced."""
    undone: npt.NDArray[np.bool_]
    """Rows, (n, bool), that were scheduled and then replaced by a later row of the same entry."""


def decide(
    rows: RowArray,
    modes: U32,
    keys: Binary,
    hashes: U64,
    held: RowArray,
    pends: npt.NDArray[np.bool_],
) -> Decision:
    """Return the decision about n rows that have seqs.

    For the m rows with a key, in order: `keys`; `hashes` of topic and key; `held`, the pending
    timer that has the key, seq = 0 for none. For all n rows: `modes`, their OnConflict; `pends`,
    whether the row becomes pending if it is scheduled.
    """
    n = len(rows)
    verdict = np.full(n, Verdict.SCHEDULED, np.uint8)
    other_due, other_seq = np.zeros(n, np.int64), np.zeros(n, np.uint64)
    undone = np.zeros(n, np.bool_)
    keyed = np.flatnonzero(rows["key_size"])
    replaced = np.full(len(keyed), -1)  # number of the held timer that a row replaces
    repeated, there = _repeated(hashes), held["seq"] > 0
    mode = modes[keyed]
    replaces = np.any([mode == each for each in REPLACING], axis=0)

    # most rows are alone in their entry with their key: what holds it alone decides
    alone = np.flatnonzero(there & ~repeated)
    kept = np.where(mode[alone] == OnConflict.KEEP, Verdict.KEPT, Verdict.REJECTED)
    verdict[keyed[alone]] = np.where(replaces[alone], Verdict.REPLACED, kept)
    other_due[keyed[alone]], other_seq[keyed[alone]] = held["due_ms"][alone], held["seq"][alone]
    replaced[alone[replaces[alone]]] = alone[replaces[alone]]
    updates = mode == OnConflict.UPDATE
    verdict[keyed[updates & ~there & ~repeated]] = Verdict.NOT_PENDING

    holders: dict[tuple[int, bytes], tuple[int, int, int]] = {}
    ends = np.cumsum(keys.sizes, dtype=np.int64)
    for number in np.flatnonzero(repeated).tolist():
        at, end = int(keyed[number]), int(ends[number])
        name = int(rows["topic"][at]), bytes(keys.blob[end - int(keys.sizes[number]) : end])
        if name not in holders and there[number]:
            holders[name] = int(held["due_ms"][number]), int(held["seq"][number]), -1 - number
        holder = holders.get(name)
        if holder is not None and holder[1]:
            other_due[at], other_seq[at], place = holder
            if not replaces[number]:
                keep = mode[number] == OnConflict.KEEP
                verdict[at] = Verdict.KEPT if keep else Verdict.REJECTED
                continue
            verdict[at] = Verdict.REPLACED
            if place < 0:
                replaced[number] = -1 - place
            else:
                undone[place] = True
        elif updates[number]:
            verdict[at] = Verdict.NOT_PENDING
            continue
        due = int(rows["due_ms"][at])
        holders[name] = (due, int(rows["seq"][at]), at) if pends[at] else (0, 0, at)
    verdicts = Verdicts(verdict, other_due, other_seq)
    return Decision(verdicts, held[replaced[replaced >= 0]], undone)


def _repeated(hashes: U64) -> npt.NDArray[np.bool_]:
    """Return which of the hashes occur more than once, (n, bool)."""
    order = np.argsort(hashes, kind="stable")
    same = hashes[order][1:] == hashes[order][:-1]
    repeated = np.zeros(len(hashes), np.bool_)
    repeated[order[1:][same]] = True
    repeated[order[:-1][same]] = True
    return repeated
