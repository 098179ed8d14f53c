"""Time to live: the leader finds expired messages and appends their expiry to the log.

    queue begin                                         end
      | x x x x x x x x x | . . . x . . . . . . . . . . . |     x: its due + ttl is over
        EXPIRE_BELOW, for all groups    EXPIRE, when it would be delivered to a group

A queue is nearly in due order, so most expired messages are a prefix. An alarm at the first
message's due + ttl starts the search for the end of that prefix. The search uses the least and
greatest due of each block and reads pages for the block at the border only. An expired message
behind a younger one is found when it would be delivered, and is not delivered.

The policies at the end of the leader's log decide, and the decision is appended in the same call.
The log therefore has the entry before any later change of the policy.

Deliveries have no entry. A policy that was appended may lengthen a topic's time to live and never
be committed. Nothing of that topic is delivered until the policy is applied.

A pure core, a part of timer/leader/groups/group_dispatch.py.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, TypeAlias

import numpy as np

from timer.entries import payloads
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import GroupOp, Op
from timer.leader.groups.alarms import Alarms
from timer.model.timer_errors import EngineError
from timer.model.units import GroupId, MonoMs, Now, QueueOffset, TopicId, UnixMs
from timer.ready.queue import Queue
from timer.ready.topic import Topic
from timer.state.apply_results import Applied, GroupApplied
from timer.state.machine import Machine

ALARM_STEP_MS: Final = 100
"""Alarms are rounded up to multiples of this, so that one entry covers many single expiries."""
CHECKS_MAX: Final = 64
"""Most topics checked, and most alarms handled, in one step."""
GROUPS_MAX: Final = 1024
"""Cursors that one entry may move, except that one topic with more groups goes alone."""
SPAN_BYTES: Final = 16 << 20
"""Offsets times groups of one topic's op: an entry takes about 20 ms to apply."""
SPAN_MIN: Final = 4096
RETRY_MS: Final = 100

Propose: TypeAlias = Callable[
    [EntryKind, list[bytes], Now, Callable[[Applied | EngineError], None]], bool
]


def expired_prefix(queue: Queue, outlived_ms: int, limit: int) -> tuple[int, int | None]:
    """Return the end of the prefix of messages due by `outlived_ms`, at most `limit`.

    Also returns the least due that may follow. None: it is not known. Nothing follows, or more may
    have expired, or a page must be read first; the page is then requested.
    """
    offset = int(queue.begin)
    for block in queue.blocks:
        if offset >= limit:
            return limit, None
        if block.due_ms_min > outlived_ms:
            return offset, block.due_ms_min
        if block.due_ms_max > outlived_ms:
            if block.page is None:
                queue.pages.request(block)
                return offset, None
            due_ms = block.page.rows["due_ms"][max(0, offset - block.first) :]
            young = np.flatnonzero(due_ms > outlived_ms)
            if len(young):
                end = offset + int(young[0])
                return min(end, limit), int(due_ms[young[0]]) if end <= limit else None
        offset = int(block.end)
    return min(offset, limit), None


class Expiry:
    """The expiry of all topics with a time to live, in one epoch."""

    def __init__(
        self,
        machine: Machine,
        propose: Propose,
        ttl_ms: Callable[[Topic], int],
        expires: Callable[[], bool],
        on_expired: Callable[[Iterable[TopicId], GroupApplied | None], None],
    ) -> None:
        """`ttl_ms`: a topic's time to live, 0 for none, by the policies at the end of the log.

        `expires`: whether any topic has one, by the same policies.

        `on_expired` is called with topics of which more may be delivered, and with the result of
        the entry that expired some of their messages; None: no entry did.
        """
        self._machine, self._propose = machine, propose
        self._ttl_ms, self._expires = ttl_ms, expires
        self._on_expired = on_expired
        self._alarms: Alarms[TopicId] = Alarms()
        """Time at which a topic's first message expires, on the cluster's clock."""
        self._to_check: dict[TopicId, None] = {}
        """Topics to look at now."""
        self._reading: set[TopicId] = set()
        """Topics that wait for pages."""
        self._in_flight: set[TopicId] = set()
        self._undecided: set[TopicId] = set()
        """Topics that are not delivered until an appended policy is applied."""
        self.check_all()

    def check_all(self) -> None:
        """Look at all topics: any may have a new time to live."""
        self._alarms = Alarms()  # alarms by an older time to live may be too late
        self._to_check = dict.fromkeys(self._machine.topics if self._expires() else ())

    def check_topic(self, topic: TopicId) -> None:
        """Look at a topic that may have a message which expires before all others."""
        found = self._machine.topics.get(topic)  # None: it was deleted
        if found is not None and self._ttl_ms(found):
            self._to_check.setdefault(topic)

    def forget(self, topic: TopicId) -> None:
        """Forget the alarm of a deleted topic."""
        self._alarms.forget(topic)

    def feed(self, topic: TopicId) -> None:
        """Look at a topic whose queue has grown, if it has no alarm."""
        if topic not in self._alarms:
            self.check_topic(topic)

    def on_pages_read(self) -> None:
        """Look at the topics that waited for pages."""
        self._to_check |= dict.fromkeys(self._reading)
        self._reading.clear()

    def on_policy_applied(self) -> None:
        """Report the topics that waited for a policy to be applied."""
        topics, self._undecided = self._undecided, set()
        self._on_expired(topics, None)

    def is_busy(self, topic: Topic) -> bool:
        """Return whether an expiry of a topic, or a longer time to live, is in flight.

        `applied` is called when that is over.
        """
        committed_ms = self._machine.policies.value_of("ttl_ms", topic.name, topic.topic_id) or 0
        if committed_ms and not 0 < self._ttl_ms(topic) <= committed_ms:
            self._undecided.add(topic.topic_id)
        return topic.topic_id in self._in_flight or topic.topic_id in self._undecided

    def outlived_ms(self, topic: Topic, clock_ms: UnixMs) -> UnixMs | None:
        """Return the due time up to which a topic's messages have expired; None: none expires."""
        ttl_ms = self._ttl_ms(topic)
        return UnixMs(clock_ms - ttl_ms) if ttl_ms else None

    def wake_at_ms(self, now: Now) -> MonoMs | None:
        """Return when `step` must be called next; None: not before another call."""
        if self._to_check:
            return MonoMs(now.mono_ms + 1)
        at_ms = self._alarms.next_ms()
        return None if at_ms is None else MonoMs(now.mono_ms + max(0, at_ms - now.clock_ms))

    def step(self, now: Now) -> None:
        """Look at the topics whose time has come; append their expiry.

        Takes at most CHECKS_MAX alarms and looks at as many topics. If more are due, `wake_at_ms`
        requests another call at once.
        """
        for topic_id in self._alarms.take_due(now.clock_ms, CHECKS_MAX):
            self._to_check.setdefault(topic_id)
        ops: list[GroupOp] = []
        groups_left = GROUPS_MAX
        for topic_id in [*islice(self._to_check, CHECKS_MAX)]:
            topic = self._machine.topics.get(topic_id)
            weight = 1 + len(topic.groups) if topic is not None else 0
            if ops and weight > groups_left:
                break
            del self._to_check[topic_id]
            if topic is not None and (offset := self._expired_end(topic, now)) is not None:
                offsets = np.array([offset], np.uint64)
                ops.append(GroupOp(Op.EXPIRE_BELOW, topic_id, GroupId(0), offsets))
                groups_left -= weight
        if ops:
            topics = [op.topic for op in ops]
            self._in_flight.update(topics)
            self.propose(ops, now, lambda applied: self._on_result(topics, applied, now))

    def _expired_end(self, topic: Topic, now: Now) -> QueueOffset | None:
        """Return the offset below which all of a topic has expired; None: nothing has."""
        ttl_ms, queue = self._ttl_ms(topic), topic.queue
        first = max(queue.begin, topic.unacked_from)
        if not ttl_ms or first >= queue.end or topic.topic_id in self._in_flight:
            return None
        span = max(SPAN_BYTES // max(1, len(topic.groups)), SPAN_MIN)
        offset, due_ms = expired_prefix(queue, now.clock_ms - ttl_ms, first + span)
        if offset > queue.begin:
            return QueueOffset(offset)
        if due_ms is None:
            self._reading.add(topic.topic_id)  # or its messages are acked before the page is there
            self._alarms.set(topic.topic_id, now.clock_ms + RETRY_MS)
        else:
            at_ms = due_ms + ttl_ms
            self._alarms.set(topic.topic_id, at_ms + -at_ms % ALARM_STEP_MS)
        return None

    def propose(
        self, ops: list[GroupOp], now: Now, on_result: Callable[[GroupApplied | None], None]
    ) -> None:
        """Append ops; `on_result` gets their result, or None if they were rejected."""

        def answer(applied: Applied | EngineError) -> None:
            on_result(applied if isinstance(applied, GroupApplied) else None)

        self._propose(EntryKind.GROUP, payloads.encode_group(ops), now, answer)

    def _on_result(self, topics: list[TopicId], applied: GroupApplied | None, now: Now) -> None:
        self._in_flight.difference_update(topics)
        for topic in topics:
            if applied is None:
                self._alarms.set(topic, now.clock_ms + RETRY_MS)
            else:
                self._to_check.setdefault(topic)
        self._on_expired(topics, applied)
