"""One topic: its queue, its groups, and where its timers went."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from timer.model.columns import U64
from timer.model.firing_order import Position
from timer.model.units import Epoch, GroupId, QueueOffset, Seq, TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.queue import MARK_MS, Queue
from timer.ready.topic_shares import MASK, TopicRows

RETENTION_MS: Final = 7 * 24 * 3_600_000
"""How long a topic without groups keeps what has fired, if no policy says."""
MARKS: Final = 1_000
"""A retention is cut into so many stretches, of a second at least: so much longer it may take."""


@dataclass(slots=True)
class Counts:
    """Where timers went. P7: scheduled = pending + fired + cancelled + dropped."""

    scheduled: int = 0
    fired: int = 0
    cancelled: int = 0
    dropped: int = 0

    @property
    def pending(self) -> int:
        """Timers that neither fired nor were cancelled nor dropped."""
        return self.scheduled - self.fired - self.cancelled - self.dropped


@dataclass(slots=True)
class TopicRelease:
    """How what a topic holds leaves, since it was resumed (timer/state/pauses.py)."""

    catch_up: str
    until_ms: UnixMs
    """The time of the resume: what is due by then, and was scheduled before, is overdue."""
    seq_end: Seq
    """The seq of what was scheduled next."""
    last: Position | None = None
    """The last of what is overdue that was met; with catch_up = latest it is to fire."""
    waits: bool = True
    """For the sweep to begin: one was under way already at the resume."""


@dataclass(slots=True)
class Topic:
    """One incarnation of a topic."""

    topic_id: TopicId
    name: str
    queue: Queue = field(default_factory=Queue)
    groups: dict[str, Group] = field(default_factory=dict)
    group_by_id: dict[GroupId, Group] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    pending_sum: int = 0
    """Sum of hashes of (due, seq, payload size) of the pending rows, modulo 2 ** 64."""
    pending_bytes: int = 0
    """Of the pending rows' payloads."""
    deleted_in: Epoch = Epoch(0)
    """When a group was deleted last; or any topic, before this one was made."""
    expired: int = 0
    """Messages that ended so in the last group, or without any."""
    retention_ms: int | None = None
    """As the policies say; None: they say nothing."""

    paused: bool = False
    """Nothing fires from it: by the policies, and so no state of its own."""
    held: int = 0
    """Pending timers at or before the fire position."""
    held_bytes: int = 0
    """Of their payloads."""
    release: TopicRelease | None = None
    """None: it is paused, or was, and holds nothing any more."""

    @property
    def holding(self) -> bool:
        """What comes due is held."""
        return self.paused or self.release is not None

    def add(self, group: Group) -> None:
        """Let it have one more group."""
        self.groups[group.name] = self.group_by_id[group.group_id] = group

    def remove(self, group: Group) -> None:
        """Let it have one group less."""
        del self.groups[group.name], self.group_by_id[group.group_id]
        group.deleted = True

    def retain(self, retention_ms: int | None, now_ms: UnixMs) -> None:
        """Keep what has fired for so long from now on; None: as ever."""
        self.retention_ms = retention_ms
        finely = MARK_MS if retention_ms is None else max(1_000, retention_ms // MARKS)
        self.queue.mark_ms = finely
        self.queue.shorten(now_ms)

    @property
    def unacked_from(self) -> QueueOffset:
        """The first offset that some group has not acked; without groups all that is kept."""
        return min((group.cursor for group in self.groups.values()), default=self.queue.begin)

    @property
    def ready(self) -> int:
        """Messages from there on: what is kept longer, by retention, does not count."""
        return self.queue.end - max(self.queue.begin, self.unacked_from)

    def add_pending(self, share: TopicRows) -> None:
        """Timers of it are pending from now on."""
        self.pending_sum = (self.pending_sum + share.sum) & MASK
        self.pending_bytes += share.payload_bytes

    def end_pending(self, share: TopicRows) -> None:
        """Timers of it are pending no more."""
        self.pending_sum = (self.pending_sum - share.sum) & MASK
        self.pending_bytes -= share.payload_bytes

    def close(self) -> None:
        """It is gone, and its groups with it."""
        for group in self.groups.values():
            group.deleted, group.deleted_with = True, self.name
        self.queue.close()

    def trim(self) -> None:
        """Let go of what every group has acked, unless retention decides."""
        if self._trims:
            self.queue.drop_below(self.unacked_from)

    @property
    def forgets_at_ms(self) -> UnixMs | None:
        """When `forget` does something next, if nothing else happens. None: never."""
        queue = self.queue
        below = self.unacked_from if self.groups else queue.end
        if queue.begin >= below:
            return None
        return UnixMs(0) if self._trims else UnixMs(queue.marks[0][0] + self._kept_ms)

    def forget(self, now_ms: UnixMs) -> None:
        """Let go of what every group has acked and retention keeps no more."""
        if self._trims:
            self.trim()
        else:
            below = self.unacked_from if self.groups else self.queue.end
            self.queue.expire(UnixMs(now_ms - self._kept_ms), below)

    @property
    def _trims(self) -> bool:
        """What every group has acked is let go of at once."""
        return bool(self.groups) and not self.retention_ms

    @property
    def _kept_ms(self) -> int:
        return RETENTION_MS if self.retention_ms is None else self.retention_ms

    # ---- time to live: what has expired, the leader has decided (timer/leader/groups/expiry.py)

    def expire_below(self, offset: QueueOffset) -> None:
        """Let go of all below an offset: whoever has not acked it, never gets it."""
        queue = self.queue
        least = max(queue.begin, self.unacked_from)
        if least < offset:
            lost = np.full(offset - least, not self.groups)
            for group in self.groups.values():
                group.expire_below(offset, lost)
            self.expired += int(np.count_nonzero(lost))
        queue.drop_below(offset)

    def expire(self, group: Group, offsets: U64) -> None:
        """Let go of single messages, all different, in one group."""
        ended = offsets[group.expire(offsets)]
        for other in self.groups.values():
            if not len(ended):
                break
            ended = ended[other.is_acked(ended)]
        self.expired += len(ended)
        self.trim()
