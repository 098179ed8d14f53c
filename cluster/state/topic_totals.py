"""Sums over all topics, which are kept up to date by adding only the topics that changed.

Nodes request each other's status every second. Adding up ten thousand topics each time held the
event loop for 25 ms.
"""

from timer.model.units import TopicId
from timer.ready.topic import Topic
from timer.state.dirty_topics import TopicSum
from timer.state.machine import Machine


class Totals:
    """The sums of one machine; see the module."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        readers = [machine.changes.reader() for _ in range(2)]
        for changed in readers:
            changed.update(machine.topics)
        self._ready = TopicSum(readers[0], lambda topic: topic.ready)
        self._expired = TopicSum(readers[1], lambda topic: topic.expired)
        self._expired_deleted = 0
        """Expired messages of the topics that were deleted since this object was made."""
        for total in (self._ready, self._expired):
            total.of(machine.topics)  # the first, full sum is made before clients wait

    @property
    def ready(self) -> int:
        """The sum of `Topic.ready`: unacked messages of each topic's group that has the most."""
        return self._ready.of(self._machine.topics)

    @property
    def n_expired(self) -> int:
        """Messages that expired before they were acknowledged.

        Those of topics that were deleted before this object was made are left out.
        """
        return self._expired.of(self._machine.topics) + self._expired_deleted

    def on_topic_deleted(self, topic: Topic) -> None:
        """Keep the expired messages of a topic that was deleted."""
        self._expired_deleted += topic.expired

    def unacked_topics(self) -> list[TopicId]:
        """Return the topics with messages that at least one group has not acknowledged."""
        self._ready.of(self._machine.topics)
        return self._ready.positive_topics()

    def keep_up(self) -> bool:
        """Add some of the changed topics now if they are many; return whether many are left."""
        totals = (self._ready, self._expired)
        return sum(total.keep_up(self._machine.topics) for total in totals) > 0
