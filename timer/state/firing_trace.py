"""What apply notes so that the story of a timer can be told from the log
(timer/state/timer_story.py).

    marks     (entry, next seq) at each CHECKPOINT: between which entries a seq was issued. An entry
              of which some parts issued none, as they were repeated or refused, has a mark of its
              own: so seqs between two marks can be counted from the log alone
    firings   per FIRE and topic: the seqs, and the queue offset of the first. The log says that
              something fired, not what; and a message that all groups have acked is gone
    drops     per FIRE and topic: the seqs of held timers that it dropped

They decide nothing. They are of the state all the same, so that every replica and a restarted one
tell the same story, and are bounded: what is older has a story with a gap.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from timer.model.columns import U64, RowArray
from timer.model.units import LogIndex, QueueOffset, Seq, TopicId

MARKS_MAX: Final = 32_768
"""A day of them, if timers are scheduled all the time."""
FIRED_ROWS_MAX: Final = 262_144
FIRINGS_MAX: Final = 16_384


class SeqMark(NamedTuple):
    """Entries from `entry` on issue seqs from `next_seq` on."""

    entry: LogIndex
    next_seq: Seq
    refused: bytes = b""
    """Parts of this very entry that issue none: a bit for each, as np.packbits has them."""

    def refuses(self, part: int) -> bool:
        """Return whether a part of the entry issues no seq."""
        byte, bit = divmod(part, 8)
        return byte < len(self.refused) and bool(self.refused[byte] & 128 >> bit)


class Firing(NamedTuple):
    """Timers of one topic that one entry moved into its queue."""

    entry: LogIndex
    topic: TopicId
    first: QueueOffset
    seqs: U64
    """(n,) at offsets first, first + 1, …"""


class FiringPlace(NamedTuple):
    """Where one timer went."""

    entry: LogIndex
    topic: TopicId
    offset: QueueOffset


@dataclass(slots=True)
class Trace:
    """See the module."""

    marks: deque[SeqMark] = field(
        default_factory=lambda: deque([SeqMark(LogIndex(1), Seq(1))], maxlen=MARKS_MAX)
    )
    firings: deque[Firing] = field(default_factory=deque)
    drops: deque[Firing] = field(default_factory=deque)
    """With offsets that mean nothing."""
    _rows: int = 0
    """In all firings."""
    _drop_rows: int = 0

    def mark(self, index: LogIndex, next_seq: Seq, refused: bytes = b"") -> None:
        """Note which seq an entry issues next, unless the last mark says it."""
        if refused or not self.marks or self.marks[-1].next_seq < next_seq:
            self.marks.append(SeqMark(index, next_seq, refused))

    def fired(self, index: LogIndex, topic: TopicId, first: QueueOffset, rows: RowArray) -> None:
        """Note what an entry moved into a queue."""
        self._add(Firing(index, topic, first, np.ascontiguousarray(rows["seq"], np.uint64)))

    def _add(self, firing: Firing) -> None:
        self.firings.append(firing)
        self._rows += len(firing.seqs)
        while self._rows > FIRED_ROWS_MAX or len(self.firings) > FIRINGS_MAX:
            self._rows -= len(self.firings.popleft().seqs)

    def dropped(self, index: LogIndex, topic: TopicId, rows: RowArray) -> None:
        """Note what an entry dropped."""
        seqs = np.ascontiguousarray(rows["seq"], np.uint64)
        self._add_drop(Firing(index, topic, QueueOffset(0), seqs))

    def _add_drop(self, drop: Firing) -> None:
        self.drops.append(drop)
        self._drop_rows += len(drop.seqs)
        while self._drop_rows > FIRED_ROWS_MAX or len(self.drops) > FIRINGS_MAX:
            self._drop_rows -= len(self.drops.popleft().seqs)

    def pack(self) -> list[Any]:
        """Return what a manifest holds of it; nothing in it changes later."""
        return [list(self.marks), list(self.firings), list(self.drops)]

    def restore(self, fields: list[Any]) -> None:
        """Put back what a manifest holds."""
        marks, firings, drops = fields
        self.marks.clear()
        for index, next_seq, refused in marks:
            self.marks.append(SeqMark(LogIndex(index), Seq(next_seq), refused))
        for index, topic, first, seqs in firings:
            place = LogIndex(index), TopicId(topic), QueueOffset(first)
            self._add(Firing(*place, np.frombuffer(seqs, np.uint64)))
        for index, topic, first, seqs in drops:
            place = LogIndex(index), TopicId(topic), QueueOffset(first)
            self._add_drop(Firing(*place, np.frombuffer(seqs, np.uint64)))


def find(firings: Iterable[Firing], seq: Seq) -> FiringPlace | None:
    """Return where a timer went; None: that is not known, or no more. Some milliseconds' work."""
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
