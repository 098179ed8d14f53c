"""A consumer group by the log: acks, attempts, returns and expiry of its messages.

    start        cursor                                reserved
      | A A A A A A | . A E . A . . . . . . . . . . . . . |
      Every offset below the cursor is acked. Only offsets from the cursor on are stored here.

A lease that ended without an ack (E) counts as one attempt. A message that was delivered and not
acked before a new epoch also counts one attempt more. The attempts mark a redelivery and give its
place in the log's order (chaos/audit/rules/verdict.py).
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
        ("attempts", "<i8"),  # the highest attempt delivered before this ack, in the log's order
        ("index", "<i8"),
        ("epoch", "<i8"),
        ("time_ms", "<i8"),
    ]
)

EXPIRED: Final = np.dtype([*ACK.descr, ("ttl_ms", "<i8")])
"""The time to live by the policies of that entry, in ms; 0: none."""

RETURN: Final = np.dtype(
    [
        ("queue_offset", "<i8"),
        ("attempts", "<i8"),  # the highest possible number of the returned delivery
        ("why", "<U8"),
        ("not_before_ms", "<i8"),
        ("index", "<i8"),
        ("time_ms", "<i8"),
    ]
)
_MESSAGE: Final = np.dtype(
    [
        ("acked", "?"),  # or expired
        ("ended", "<u2"),  # deliveries that ended without an ack
        ("failed", "<u2"),  # nacks and ended leases; a recall is no failure
    ]
)
ENDED, NACKED, RECALLED = "ended", "nacked", "recalled"
"""The cause of a return: an ended lease; a nack; a recall, as an earlier message came back."""


@dataclass(slots=True)
class GroupStory:
    """One group of one topic."""

    group_id: int
    topic: int
    name: str
    start: int
    """First queue offset of the group."""
    reserved: int
    """The leader of this epoch may deliver offsets below this one."""
    cursor: int
    """Every offset below is acked."""
    delivered_to: int = 0
    """Offsets below this one may have been delivered in an earlier epoch."""
    acked_count: int = 0
    done: int = 0
    """Messages from `start` on that were acked or expired."""
    oldest: int = 0
    """The first offset that the topic retained when the group began."""
    type: str = SHARED
    over: bool = False
    """The group was deleted, its topic was deleted, or a seek gave it another id."""
    deleted: bool = False
    """The group itself was deleted, not its topic."""
    later_life: bool = False
    """An earlier group of this name and topic was sought or deleted."""
    settings: list[GroupSettings] = field(default_factory=list)
    """The settings at the creation and after each ALTER."""
    _marks: list[int] = field(default_factory=list)
    """One offset for each later epoch with delivered messages; those below count one more."""
    base: int = 0
    """The offset of element 0 of the array."""
    _messages: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, _MESSAGE))

    def next_life(self, group_id: int, start: int, oldest: int, queue_end: int) -> "GroupStory":
        """End this life; return the next one, which begins at another offset under another id.

        Messages that may have been delivered count as delivered once in the next life.
        """
        self.over = True
        mark = min(max(self.reserved, self.delivered_to), queue_end)
        life = GroupStory(
            group_id, self.topic, self.name, start, start, start, mark,
            base=start, oldest=oldest, type=self.type, later_life=True, settings=[*self.settings],
        )  # fmt: skip
        life._marks = [mark] if mark > start else []
        return life

    def ack(self, offsets: U64, item: Entry) -> npt.NDArray[np.void]:
        """Apply the acks of reserved offsets that are not acked yet; return them (ACK)."""
        at = self._open_places(offsets)
        self.acked_count += len(at)
        return self._end_messages(at, item)

    def expire(self, offsets: U64, item: Entry, ttl_ms: int) -> npt.NDArray[np.void]:
        """Expire offsets, delivered or not; return them (EXPIRED)."""
        below = int(offsets.max(initial=0)) + 1
        at = self._open_places(offsets, max(self.reserved, self.delivered_to, below))
        expired = self._end_messages(at, item, EXPIRED)
        expired["ttl_ms"] = ttl_ms
        return expired

    def _end_messages(
        self, at: npt.NDArray[np.int64], item: Entry, dtype: "np.dtype[np.void]" = ACK
    ) -> npt.NDArray[np.void]:
        self._messages["acked"][at] = True
        self.done += len(at)
        acks = np.zeros(len(at), dtype)
        acks["queue_offset"] = at + self.base
        acks["attempts"] = self._attempts(at)
        acks["index"], acks["epoch"], acks["time_ms"] = item.index, item.epoch, item.time_ms
        rest = self._messages["acked"][self.cursor - self.base :]
        self.cursor += len(rest) if rest.all() else int(np.argmin(rest))
        self._marks = [mark for mark in self._marks if mark > self.cursor]
        self.reserved = max(self.reserved, self.cursor)
        return acks

    def take_back(
        self, why: str, offsets: U64, item: Entry, not_before_ms: I64 | None = None
    ) -> npt.NDArray[np.void]:
        """Count an attempt more for offsets that came back without an ack; return them (RETURN)."""
        at = self._open_places(offsets)
        returns = np.zeros(len(at), RETURN)
        returns["queue_offset"] = at + self.base
        returns["attempts"] = self._attempts(at)
        returns["why"], returns["index"], returns["time_ms"] = why, item.index, item.time_ms
        if not_before_ms is not None:
            places = np.argsort(offsets, kind="stable")  # the first of repeated offsets counts
            first = places[np.searchsorted(offsets[places], (at + self.base).astype(np.uint64))]
            returns["not_before_ms"] = not_before_ms[first]
        self._messages["ended"][at] += 1
        if why != RECALLED:
            self._messages["failed"][at] += 1
        return returns

    def failures(self, offsets: U64) -> npt.NDArray[np.int64]:
        """Return the number of failures of messages without an ack, (n, int64), in their order."""
        at = self._open_places(offsets)
        failed = np.zeros(len(offsets), np.int64)
        known = np.isin(offsets.astype(np.int64), at + self.base)
        failed[known] = self._messages["failed"][offsets[known].astype(np.int64) - self.base]
        return failed

    def _attempts(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the highest possible number of the last delivery of each message."""
        attempts = 1 + self._messages["ended"][at].astype(np.int64)
        for mark in self._marks:
            attempts += at + self.base < mark
        return attempts

    def begin_epoch(self, queue_end: int) -> None:
        """Count one delivery more for messages that the old leader may have delivered."""
        mark = min(self.reserved, queue_end)
        if mark > self.cursor:
            self._marks.append(mark)
        self.hand_over(mark)

    def hand_over(self, offset: int) -> None:
        """Note that the old leader delivered no message at or above an offset."""
        self.delivered_to = max(self.delivered_to, offset)
        self.reserved = self.cursor

    def _open_places(self, offsets: U64, below: int | None = None) -> npt.NDArray[np.int64]:
        """Return the places in the arrays of offsets without an ack, each once.

        Only offsets that are reserved, or lie below `below` if it is given.
        """
        below = max(self.reserved, self.delivered_to) if below is None else below
        known = np.unique(offsets[(offsets >= self.cursor) & (offsets < below)])
        if not len(known):
            return known.astype(np.int64)
        if int(known[-1]) >= self.base + len(self._messages):
            left = self._messages[self.cursor - self.base :]
            size = 2 * (int(known[-1]) + 1 - self.cursor) + 1024
            self._messages, self.base = np.zeros(size, _MESSAGE), self.cursor
            self._messages[: len(left)] = left
        at = known.astype(np.int64) - self.base
        opened: npt.NDArray[np.int64] = at[~self._messages["acked"][at]]
        return opened
