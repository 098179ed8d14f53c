"""Retention: drops messages at checkpoints, at a cost that depends only on the messages dropped.

    topic changed --> time of its next drop, if unchanged --> dropped at a checkpoint after it

Retention's time intervals end at the same instants for many topics. Each checkpoint drops messages
of some of them. A replica that starts again computes the plan from the topics, so the plan is not
part of the state. Replicas stay equal because they drop at the same checkpoints.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from sortedcontainers import SortedList

from timer.model.units import TopicId, UnixMs
from timer.ready.topic import Topic
from timer.state.dirty_topics import MANY, take_all, take_some

TOPICS_MAX: Final = 256
"""Topics that drop messages at one checkpoint: a few milliseconds."""


class Retention:
    """The plan of drops. `changed`: the topics that changed since the last `forget_due`."""

    def __init__(self, changed: set[TopicId]) -> None:
        self._changed = changed
        self._at_ms: dict[TopicId, UnixMs] = {}
        self._order: SortedList[tuple[UnixMs, TopicId]] = SortedList()

    def forget_due(self, topics: Mapping[TopicId, Topic], now_ms: UnixMs) -> Iterator[TopicId]:
        """Drop messages past their retention; yield the topics that dropped some."""
        self.catch_up(topics)
        for at_ms, topic_id in self._order[:TOPICS_MAX]:
            if at_ms > now_ms:
                break
            self._plan(topic_id, None)  # planned again as the topic changes now
            topics[topic_id].forget(now_ms)
            yield topic_id

    def catch_up(self, topics: Mapping[TopicId, Topic]) -> None:
        """Look at all changed topics."""
        for topic_id in take_all(self._changed):
            self._update(topics, topic_id)

    def keep_up(self, topics: Mapping[TopicId, Topic]) -> bool:
        """Look at some topics if many have changed; return whether many changed ones remain."""
        for topic_id in take_some(self._changed):
            self._update(topics, topic_id)
        return len(self._changed) > MANY

    def _update(self, topics: Mapping[TopicId, Topic], topic_id: TopicId) -> None:
        topic = topics.get(topic_id)
        self._plan(topic_id, None if topic is None else topic.next_forget_ms)

    def _plan(self, topic_id: TopicId, at_ms: UnixMs | None) -> None:
        planned = self._at_ms.get(topic_id)
        if planned == at_ms:
            return
        if planned is not None:
            del self._at_ms[topic_id]
            self._order.remove((planned, topic_id))
        if at_ms is not None:
            self._at_ms[topic_id] = at_ms
            self._order.add((at_ms, topic_id))
