"""Which topics let go of messages, and when: retention costs what it lets go of.

    topic changed --> when it lets go next, as it is now --> at a checkpoint after that it does

Stretches of time end at the same instants for many topics: each checkpoint lets some of them go.
A replica that starts anew works it out from the topics: it is no state of its own, and letting go
at the same checkpoints is what makes replicas alike.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from sortedcontainers import SortedList

from timer.model.units import TopicId, UnixMs
from timer.ready.topic import Topic
from timer.state.dirty_topics import MANY, many

TOPICS_MAX: Final = 256
"""That let go at one checkpoint: a few milliseconds."""


class Retention:
    """See the module. `changed`: the topics that changed since the last `let_go`."""

    def __init__(self, changed: set[TopicId]) -> None:
        self._changed = changed
        self._at_ms: dict[TopicId, UnixMs] = {}
        self._order: SortedList[tuple[UnixMs, TopicId]] = SortedList()

    def let_go(self, topics: Mapping[TopicId, Topic], now_ms: UnixMs) -> Iterator[TopicId]:
        """Let topics forget what they keep no longer; yield those that did."""
        self.catch_up(topics)
        for at_ms, topic_id in self._order[:TOPICS_MAX]:
            if at_ms > now_ms:
                break
            self._plan(topic_id, None)  # until it changes, and it does now
            topics[topic_id].forget(now_ms)
            yield topic_id

    def catch_up(self, topics: Mapping[TopicId, Topic]) -> None:
        """Look at all that have changed."""
        while self._changed:
            self._look(topics, self._changed.pop())

    def keep_up(self, topics: Mapping[TopicId, Topic]) -> bool:
        """Look at some, if many have changed; return whether many still have."""
        for topic_id in many(self._changed):
            self._look(topics, topic_id)
        return len(self._changed) > MANY

    def _look(self, topics: Mapping[TopicId, Topic], topic_id: TopicId) -> None:
        topic = topics.get(topic_id)
        self._plan(topic_id, None if topic is None else topic.forgets_at_ms)

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
