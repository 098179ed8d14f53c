"""One topic: its queue, its groups, and the counts of its timers."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from timer.model.columns import U64
from timer.model.firing_order import Position
from timer.model.units import Epoch, GroupId, QueueOffset, Seq, TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.queue import INTERVAL_MS, Queue
from timer.ready.topic_shares import MASK, TopicRows

RETENTION_MS: Final = 7 * 24 * 3_600_000
"""Retention of a topic without groups, if no policy sets one: seven days, in milliseconds."""
INTERVALS: Final = 1_000
"""Intervals in a retention, each at least a second. A message may stay one interval longer."""


@dataclass(slots=True)
class Counts:
    """Numbers of timers by outcome: scheduled = pending + fired + cancelled + dropped."""

    scheduled: int = 0
    fired: int = 0
    cancelled: int = 0
    dropped: int = 0

    @property
    def pending(self) -> int:
        """Timers that have not fired and were neither cancelled nor dropped."""
        return self.scheduled - self.fired - self.cancelled - self.dropped


@dataclass(slots=True)
class TopicRelease:
    """The release of a resumed topic's held timers (timer/state/pauses.py)."""

    catch_up: str
    until_ms: UnixMs
    """Time of the resume. Overdue timers are due by then, and have a seq below `seq_end`."""
    seq_end: Seq
    """The next seq to be assigned at the resume."""
    last: Position | None = None
    """Last overdue timer that the sweep has met and not dropped; catch_up = latest fires it."""
    is_waiting: bool = True
    """True until the topic takes part in a sweep."""


@dataclass(slots=True)
class Topic:
    """One incarnation of a topic. A topic created again under the same name has another id."""

    topic_id: TopicId
    name: str
    queue: Queue = field(default_factory=Queue)
    groups: dict[str, Group] = field(default_factory=dict)
    group_by_id: dict[GroupId, Group] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    pending_sum: int = 0
    """Sum of hashes of (due, seq, payload size) of the pending rows, modulo 2 ** 64."""
    pending_bytes: int = 0
    """Bytes of the pending rows' payloads."""
    creator: str = ""
    """See timer/state/creators.py."""
    deleted_in: Epoch = Epoch(0)
    """Epoch of the last deletion of a group here; at first, of the last deletion of any topic."""
    expired: int = 0
    """Messages that expired in the last group that had them, or in a topic without groups."""
    retention_ms: int | None = None
    """Milliseconds, from the policies. None: no policy sets it."""

    paused: bool = False
    """Nothing fires from the topic. Follows from the policies, so no manifest holds it."""
    held: int = 0
    """Pending timers at or before the fire position."""
    held_bytes: int = 0
    """Bytes of the held timers' payloads."""
    release: TopicRelease | None = None
    """None: the topic is paused, or was never paused, or has released all that it held."""

    @property
    def is_holding(self) -> bool:
        """Whether timers that come due are held instead of fired."""
        return self.paused or self.release is not None

    def add(self, group: Group) -> None:
        """Add a group."""
        self.groups[group.name] = self.group_by_id[group.group_id] = group

    def remove(self, group: Group) -> None:
        """Remove a group and mark it as deleted."""
        del self.groups[group.name], self.group_by_id[group.group_id]
        group.deleted = True

    def set_retention(self, retention_ms: int | None, now_ms: UnixMs) -> None:
        """Set the retention in milliseconds from now on; None: the default."""
        self.retention_ms = retention_ms
        interval_ms = INTERVAL_MS if retention_ms is None else max(1_000, retention_ms // INTERVALS)
        self.queue.interval_ms = interval_ms
        self.queue.shorten_intervals(now_ms)

    @property
    def unacked_from(self) -> QueueOffset:
        """First offset that some group has not acked; without groups the queue's begin."""
        return min((group.cursor for group in self.groups.values()), default=self.queue.begin)

    @property
    def ready(self) -> int:
        """Unacked messages of the group that has the most; without groups, all that are kept."""
        begin, end = self.queue.begin, self.queue.end
        if begin == end:
            return 0
        return max(
            (group.unacked_count(end) for group in self.groups.values()), default=end - begin
        )

    def add_pending(self, share: TopicRows) -> None:
        """Count more timers as pending."""
        self.pending_sum = (self.pending_sum + share.sum) & MASK
        self.pending_bytes += share.payload_bytes

    def end_pending(self, share: TopicRows) -> None:
        """Count timers as no longer pending."""
        self.pending_sum = (self.pending_sum - share.sum) & MASK
        self.pending_bytes -= share.payload_bytes

    def close(self) -> None:
        """Mark the groups as deleted with the topic, and drop the queue."""
        for group in self.groups.values():
            group.deleted, group.deleted_with = True, self.name
        self.queue.close()

    def trim(self) -> None:
        """Drop the messages that every group has acked, if no retention is set."""
        if self._trims_at_once:
            self.queue.drop_below(self.unacked_from)

    @property
    def next_forget_ms(self) -> UnixMs | None:
        """Time at which `forget` next drops messages if no op comes before. None: never."""
        queue = self.queue
        if queue.begin == queue.end:
            return None
        below = self.unacked_from if self.groups else queue.end
        if queue.begin >= below:
            return None
        if self._trims_at_once:
            return UnixMs(0)
        return UnixMs(queue.intervals[0][0] + self._effective_retention_ms)

    def forget(self, now_ms: UnixMs) -> None:
        """Drop the messages that every group has acked and that are past their retention."""
        if self._trims_at_once:
            self.trim()
        else:
            below = self.unacked_from if self.groups else self.queue.end
            self.queue.expire(UnixMs(now_ms - self._effective_retention_ms), below)

    @property
    def _trims_at_once(self) -> bool:
        """Whether messages that every group has acked are dropped at once."""
        return bool(self.groups) and not self.retention_ms

    @property
    def _effective_retention_ms(self) -> int:
        return RETENTION_MS if self.retention_ms is None else self.retention_ms

    # ---- time to live: the leader decides which messages expired (timer/leader/groups/expiry.py)

    def expire_below(self, offset: QueueOffset) -> None:
        """Expire all messages below an offset in every group, and drop them."""
        queue = self.queue
        least = max(queue.begin, self.unacked_from)
        if least < offset:
            expired = np.full(offset - least, not self.groups)
            for group in self.groups.values():
                group.expire_below(offset, expired)
            self.expired += int(np.count_nonzero(expired))
        queue.drop_below(offset)

    def expire(self, group: Group, offsets: U64) -> None:
        """Expire single messages, all different, in one group."""
        ended = offsets[group.expire(offsets)]
        for other in self.groups.values():
            if not len(ended):
                break
            ended = ended[other.is_acked(ended)]
        self.expired += len(ended)
        self.trim()
