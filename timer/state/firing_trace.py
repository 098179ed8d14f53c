"""The trace: notes made at apply, from which timer/state/timer_story.py tells a timer's story.

    marks     (entry, next seq) at each CHECKPOINT: the entries between which a seq was issued. An
              entry with repeated or rejected parts, which issue no seq, has a mark of its own. The
              seqs between two marks can therefore be counted from the log alone
    firings   per FIRE and topic: the seqs, and the queue offset of the first. A FIRE entry does not
              name its timers, and a message that all groups have acked is gone
    drops     per FIRE and topic: the seqs of held timers that it dropped

The notes decide nothing. They are still part of the state, so that every replica and a restarted
one tell the same story. They are bounded: stories of older timers have gaps.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from timer.model.columns import U64, RowArray
from timer.model.units import LogIndex, QueueOffset, Seq, TopicId

MARKS_MAX: Final = 32_768
"""A day of marks, if timers are scheduled all the time."""
FIRED_ROWS_MAX: Final = 262_144
FIRINGS_MAX: Final = 16_384


class SeqMark(NamedTuple):
    """A note that entries from `entry` on issue seqs from `next_seq` on."""

    entry: LogIndex
    next_seq: Seq
    refused_parts: bytes = b""
    """Parts of this entry that issue no seq: one bit each, as by np.packbits."""

    def is_refused(self, part: int) -> bool:
        """Return whether a part of the entry issues no seq."""
        byte, bit = divmod(part, 8)
        return byte < len(self.refused_parts) and bool(self.refused_parts[byte] & 128 >> bit)


class Firing(NamedTuple):
    """Timers of one topic that one entry moved into its queue."""

    entry: LogIndex
    topic: TopicId
    first: QueueOffset
    seqs: U64
    """(n,), at offsets first, first + 1, …"""


class FiringPlace(NamedTuple):
    """The entry that fired one timer, and its place in its topic's queue."""

    entry: LogIndex
    topic: TopicId
    offset: QueueOffset


class RecentFirings(deque[Firing]):
    """The last firings or drops, in the order of the log."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = 0
        """Number of their rows."""

    def add(self, index: LogIndex, topic: TopicId, first: QueueOffset, seqs: U64) -> None:
        """Add the seqs of one entry and topic."""
        self.append(Firing(index, topic, first, np.ascontiguousarray(seqs, np.uint64)))
        self._rows += len(seqs)
        while self._rows > FIRED_ROWS_MAX or len(self) > FIRINGS_MAX:
            self._rows -= len(self.popleft().seqs)


@dataclass(slots=True)
class Trace:
    """The marks, firings and drops; see the module."""

    marks: deque[SeqMark] = field(
        default_factory=lambda: deque([SeqMark(LogIndex(1), Seq(1))], maxlen=MARKS_MAX)
    )
    firings: RecentFirings = field(default_factory=RecentFirings)
    drops: RecentFirings = field(default_factory=RecentFirings)
    """Drops; their offsets have no meaning."""

    def add_mark(self, index: LogIndex, next_seq: Seq, refused: bytes = b"") -> None:
        """Note the seq that an entry issues next, unless the last mark implies it."""
        if refused or not self.marks or self.marks[-1].next_seq < next_seq:
            self.marks.append(SeqMark(index, next_seq, refused))

    def add_fired(
        self, index: LogIndex, topic: TopicId, first: QueueOffset, rows: RowArray
    ) -> None:
        """Note the rows that an entry moved into a queue."""
        self.firings.add(index, topic, first, rows["seq"])

    def add_dropped(self, index: LogIndex, topic: TopicId, rows: RowArray) -> None:
        """Note the rows that an entry dropped."""
        self.drops.add(index, topic, QueueOffset(0), rows["seq"])

    def pack(self) -> list[Any]:
        """Return the fields for a manifest; nothing in them changes later."""
        return [list(self.marks), list(self.firings), list(self.drops)]

    def restore(self, fields: list[Any]) -> None:
        """Put back the fields that a manifest holds."""
        marks, *noted = fields
        self.marks.clear()
        for index, next_seq, refused in marks:
            self.marks.append(SeqMark(LogIndex(index), Seq(next_seq), refused))
        for notes, packed in zip((self.firings, self.drops), noted, strict=True):
            for index, topic, first, seqs in packed:
                place = LogIndex(index), TopicId(topic), QueueOffset(first)
                notes.add(*place, np.frombuffer(seqs, np.uint64))


def find_firing(firings: Iterable[Firing], seq: Seq) -> FiringPlace | None:
    """Return a timer's place; None: not known, or no longer. Takes some milliseconds."""
    known = [*firings]
    if not known:
        return None
    seqs = np.concatenate([each.seqs for each in known])
    places = np.flatnonzero(seqs == np.uint64(seq))
    if not len(places):
        return None
    ends = np.cumsum([len(each.seqs) for each in known])
    at = int(ends.searchsorted(places[0], "right"))
    firing = known[at]
    within = int(places[0]) - (int(ends[at]) - len(firing.seqs))
    return FiringPlace(firing.entry, firing.topic, QueueOffset(firing.first + within))
