"""A consumer group, as far as the audit needs it: which entry acked what, after how many attempts.

    start        cursor                                reserved
      | A A A A A A | . A E . A . . . . . . . . . . . . . |
      every offset below the cursor is acked; only what is at or above it is kept here

A lease that ended unacked (E) counts one attempt, and so does an epoch that finds a message
handed out and unacked: that is how a redelivery is marked, and how its place in the log's order
is known (chaos/audit/rules/verdict.py).
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.entries.entry_frame import Entry
from timer.entries.payloads import SHARED, GroupSettings
from timer.model.columns import I64, U64

ACK: Final = np.dtype(
    [
        ("queue_offset", "<i8"),
        ("attempts", "<i8"),  # the highest that was given out before this ack, in the log's order
        ("index", "<i8"),
        ("epoch", "<i8"),
        ("time_ms", "<i8"),
    ]
)

EXPIRED: Final = np.dtype([*ACK.descr, ("ttl_ms", "<i8")])
"""`ttl_ms`: the time to live by the policies of that entry; 0: none."""

RETURN: Final = np.dtype(
    [
        ("queue_offset", "<i8"),
        ("attempts", "<i8"),  # the number of the delivery that came back, at most
        ("why", "<U8"),
        ("not_before_ms", "<i8"),
        ("index", "<i8"),
        ("time_ms", "<i8"),
    ]
)
ENDED, NACKED, RECALLED = "ended", "nacked", "recalled"
"""Why: its lease ended unacked; a consumer gave it back; one that it came behind came back."""


@dataclass(slots=True)
class GroupStory:
    """One group of one topic."""

    group_id: int
    topic: int
    name: str
    start: int
    """First queue offset that it is given."""
    reserved: int
    """The leader of this epoch may hand out offsets below this one."""
    cursor: int
    """Every offset below is acked."""
    delivered_to: int = 0
    """Offsets below this one may have been handed out in an earlier epoch."""
    acked_count: int = 0
    ended_count: int = 0
    """Leases that ended unacked."""
    expired_count: int = 0
    kept: int = 0
    """The first offset that its topic kept as it began."""
    type: str = SHARED
    over: bool = False
    """It was sought, and lives on under another id, or it was deleted, or its topic was."""
    deleted: bool = False
    """It was, by itself: not with its topic."""
    again: bool = False
    """One of this name and topic was sought or deleted before."""
    settings: list[GroupSettings] = field(default_factory=list)
    """What it was made with, and what each ALTER made of that."""
    _marks: list[int] = field(default_factory=list)
    """One per later epoch that found messages handed out: those below count once more."""
    base: int = 0
    """The offset that element 0 of the arrays belongs to."""
    _acked: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    _ended: npt.NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))
    _failed: npt.NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))
    """Of these, how often it was given back or its lease ended: a recall is no failure."""

    def sought(self, group_id: int, start: int, kept: int, queue_end: int) -> "GroupStory":
        """Be over; return the life that begins elsewhere in the queue, under another id.

        What may have been handed out counts as delivered once there.
        """
        self.over = True
        mark = min(max(self.reserved, self.delivered_to), queue_end)
        anew = GroupStory(
            group_id, self.topic, self.name, start, start, start, mark,
            base=start, kept=kept, type=self.type, again=True, settings=[*self.settings],
        )  # fmt: skip
        anew._marks = [mark] if mark > start else []
        return anew

    def ack(self, offsets: U64, item: Entry) -> npt.NDArray[np.void]:
        """Count the acks of offsets that were reserved and are not acked yet; return them (ACK)."""
        at = self._open(offsets)
        self.acked_count += len(at)
        return self._done(at, item)

    def expire(self, offsets: U64, item: Entry, ttl_ms: int) -> npt.NDArray[np.void]:
        """Be done with offsets that have expired, handed out or not; return them (EXPIRED)."""
        below = int(offsets.max(initial=0)) + 1
        at = self._open(offsets, max(self.reserved, self.delivered_to, below))
        self.expired_count += len(at)
        expired = self._done(at, item, EXPIRED)
        expired["ttl_ms"] = ttl_ms
        return expired

    def expire_below(self, offset: int, item: Entry, ttl_ms: int) -> npt.NDArray[np.void]:
        """Be done with all below an offset; return what was not done yet (EXPIRED)."""
        return self.expire(np.arange(self.cursor, offset, dtype=np.uint64), item, ttl_ms)

    def _done(
        self, at: npt.NDArray[np.int64], item: Entry, dtype: "np.dtype[np.void]" = ACK
    ) -> npt.NDArray[np.void]:
        self._acked[at] = True
        acks = np.zeros(len(at), dtype)
        acks["queue_offset"] = at + self.base
        acks["attempts"] = self._attempts(at)
        acks["index"], acks["epoch"], acks["time_ms"] = item.index, item.epoch, item.time_ms
        rest = self._acked[self.cursor - self.base :]
        self.cursor += len(rest) if rest.all() else int(np.argmin(rest))
        self._marks = [mark for mark in self._marks if mark > self.cursor]
        self.reserved = max(self.reserved, self.cursor)
        return acks

    def take_back(
        self, why: str, offsets: U64, item: Entry, not_before_ms: I64 | None = None
    ) -> npt.NDArray[np.void]:
        """Count an attempt more for offsets that came back unacked; return those (RETURN)."""
        at = self._open(offsets)
        returns = np.zeros(len(at), RETURN)
        returns["queue_offset"] = at + self.base
        returns["attempts"] = self._attempts(at)
        returns["why"], returns["index"], returns["time_ms"] = why, item.index, item.time_ms
        if not_before_ms is not None:
            places = np.argsort(offsets, kind="stable")  # of a repeated one the first counts
            first = places[np.searchsorted(offsets[places], (at + self.base).astype(np.uint64))]
            returns["not_before_ms"] = not_before_ms[first]
        self._ended[at] += 1
        if why != RECALLED:
            self.ended_count += len(at)
            self._failed[at] += 1
        return returns

    def failures(self, offsets: U64) -> npt.NDArray[np.int64]:
        """Return how often messages that are not acked yet failed, (n, int64), in their order."""
        at = self._open(offsets)
        failed = np.zeros(len(offsets), np.int64)
        known = np.isin(offsets.astype(np.int64), at + self.base)
        failed[known] = self._failed[offsets[known].astype(np.int64) - self.base]
        return failed

    def _attempts(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of the delivery that these were given out with last, at most."""
        attempts = 1 + self._ended[at].astype(np.int64)
        for mark in self._marks:
            attempts += at + self.base < mark
        return attempts

    def begin_epoch(self, queue_end: int) -> None:
        """Count what the old leader may have handed out as given once more."""
        mark = min(self.reserved, queue_end)
        if mark > self.cursor:
            self._marks.append(mark)
        self.hand_over(mark)

    def hand_over(self, offset: int) -> None:
        """Take note that the old leader handed out nothing at or above an offset."""
        self.delivered_to = max(self.delivered_to, offset)
        self.reserved = self.cursor

    def _open(self, offsets: U64, below: int | None = None) -> npt.NDArray[np.int64]:
        """Return where the arrays tell of those offsets that are not acked, once.

        Of those that are reserved, or lie below an offset.
        """
        below = max(self.reserved, self.delivered_to) if below is None else below
        known = np.unique(offsets[(offsets >= self.cursor) & (offsets < below)])
        if not len(known):
            return known.astype(np.int64)
        if int(known[-1]) >= self.base + len(self._acked):
            skip = self.cursor - self.base
            size = 2 * (int(known[-1]) + 1 - self.cursor) + 1024
            acked, ended = np.zeros(size, np.bool_), np.zeros(size, np.uint16)
            failed = np.zeros(size, np.uint16)
            failed[: max(0, len(self._failed) - skip)] = self._failed[skip:]
            acked[: max(0, len(self._acked) - skip)] = self._acked[skip:]
            ended[: max(0, len(self._ended) - skip)] = self._ended[skip:]
            self._acked, self._ended, self._failed = acked, ended, failed
            self.base = self.cursor
        at = known.astype(np.int64) - self.base
        return at[~self._acked[at]]
