"""Rates of delivery: most messages a second, per topic and per group of a topic.

    time ----+rate a second--> bucket --allowance--> a lease of at most that many messages
                                 ^                  |
                                 +------ -1 each ---+      empty: the group waits for its alarm

A bucket holds at most the messages of BURST_MS, or one message. So any span of T seconds has at
most rate * T + rate / 10 + 1 deliveries. A bucket is empty when a leader begins, so this also holds
across failovers. A redelivery counts like a first delivery. A delivery that was taken back before
it was sent counts as well.

Several groups share the rate of their topic in turns. A pure core, in the leader's memory: the log
knows no rates.
"""

from collections.abc import Callable
from typing import Final

from timer.leader.groups.alarms import Alarms
from timer.model.units import GroupId, MonoMs, TopicId
from timer.ready.group import Group
from timer.ready.topic import Topic

BURST_MS: Final = 100
"""Time whose messages a bucket may hold."""
PAUSE_MS: Final = 10
"""Shortest pause of a group without an allowance: at a high rate a lease then has some messages."""
_UNITS_A_MESSAGE: Final = 1000
"""Units of a bucket for one message: a rate a second is as many units a millisecond."""


class Bucket:
    """The allowance for deliveries, which grows with time."""

    __slots__ = ("_at_ms", "_rate", "_units")

    def __init__(self, now_ms: MonoMs) -> None:
        self._at_ms, self._units, self._rate = now_ms, 0, 0

    def allowance(self, rate: int, now_ms: MonoMs) -> int:
        """Return how many messages may be delivered now, at `rate` a second from now on."""
        grown = self._units + self._rate * (now_ms - self._at_ms)
        self._at_ms, self._rate = now_ms, rate
        self._units = min(grown, max(rate * BURST_MS, _UNITS_A_MESSAGE))
        return self._units // _UNITS_A_MESSAGE

    def take(self, messages: int) -> None:
        """Note a delivery, of at most `allowance` messages."""
        self._units -= messages * _UNITS_A_MESSAGE
        assert self._units >= 0, (messages, self._units, self._rate)

    def wait_ms(self) -> int:
        """Return the time from the last `allowance` until it is 1 or more."""
        return -(-max(0, _UNITS_A_MESSAGE - self._units) // self._rate)


class _TopicBuckets:
    """The buckets of one topic."""

    __slots__ = ("groups", "total", "turns")

    def __init__(self, now_ms: MonoMs) -> None:
        self.total = Bucket(now_ms)
        """Of all groups together."""
        self.groups: dict[str, Bucket] = {}
        """By the group's name: a seek changes its id."""
        self.turns: dict[GroupId, None] = {}
        """The groups that share the allowance of `total`, the longest-waiting one first."""

    def share(self, group: GroupId, allowance: int) -> int:
        """Return the part of the allowance of `total` that a group may use."""
        self.turns.setdefault(group)
        share = allowance // len(self.turns)
        return min(allowance, max(share, 1)) if group == next(iter(self.turns)) else share


class DeliveryRates:
    """See the module."""

    def __init__(self, rates: Callable[[Topic], tuple[int, int]]) -> None:
        """`rates`: most deliveries of a topic a second, to all and to each group. 0: no limit."""
        self._rates = rates
        self.alarms: Alarms[GroupId] = Alarms()
        """Times at which groups have an allowance again, on the monotonic clock."""
        self._topics: dict[TopicId, _TopicBuckets] = {}

    def allowance(self, topic: Topic, group: Group, most: int, now_ms: MonoMs) -> int:
        """Return how many messages, of `most`, a group may get now."""
        of_topic, of_group = self._rates(topic)
        if not (of_topic or of_group):
            if self._topics:
                self._topics.pop(topic.topic_id, None)
            return most
        buckets = self._topics.get(topic.topic_id)
        if buckets is None:
            buckets = self._topics[topic.topic_id] = _TopicBuckets(now_ms)
        if of_topic:
            allowance = buckets.total.allowance(of_topic, now_ms)
            most = min(most, buckets.share(group.group_id, allowance))
        else:
            buckets.turns.clear()
        if not of_group:
            buckets.groups.clear()
            return most
        if group.name not in buckets.groups:
            buckets.groups[group.name] = Bucket(now_ms)
        return min(most, buckets.groups[group.name].allowance(of_group, now_ms))

    def wait(self, topic: Topic, group: Group, now_ms: MonoMs) -> None:
        """Set the alarm of a group whose `allowance` is 0."""
        buckets = self._topics.get(topic.topic_id)
        if buckets is not None:
            self.alarms.set(group.group_id, self._retry_at_ms(buckets, topic, group, now_ms))

    def end_turn(self, topic: Topic, group: Group, messages: int) -> None:
        """Count the leased messages of a group that had an allowance; 0: it leased none."""
        buckets = self._topics.get(topic.topic_id)
        if buckets is None:
            return
        waited = group.group_id in buckets.turns
        buckets.turns.pop(group.group_id, None)
        if not messages:
            return
        if waited:
            buckets.turns[group.group_id] = None
            buckets.total.take(messages)
        if group.name in buckets.groups:
            buckets.groups[group.name].take(messages)

    def _retry_at_ms(
        self, buckets: _TopicBuckets, topic: Topic, group: Group, now_ms: MonoMs
    ) -> MonoMs:
        of_topic, of_group = self._rates(topic)
        wait_ms = PAUSE_MS
        if of_topic:
            wait_ms = max(wait_ms, buckets.total.wait_ms())
        if of_group:
            wait_ms = max(wait_ms, buckets.groups[group.name].wait_ms())
        return MonoMs(now_ms + wait_ms)

    def forget_topic(self, topic: TopicId) -> None:
        """Forget a deleted topic."""
        self._topics.pop(topic, None)

    def forget_group(self, topic: TopicId, group: GroupId, name: str | None) -> None:
        """Forget a deleted group. `name` None: the group goes on under another id."""
        buckets = self._topics.get(topic)
        if buckets is not None:
            buckets.turns.pop(group, None)
            if name is not None:
                buckets.groups.pop(name, None)
