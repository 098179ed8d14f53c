"""What all topics have together, of which only those that changed are looked at again.

Nodes ask each other for their status every second: with ten thousand topics to add up that held
the event loop for 25 ms.
"""

from timer.model.units import TopicId
from timer.state.dirty_topics import TopicSum
from timer.state.machine import Machine


class Totals:
    """See the module."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        readers = [machine.changes.reader() for _ in range(2)]
        for changed in readers:
            changed.update(machine.topics)
        self._ready = TopicSum(readers[0], lambda topic: topic.ready)
        self._expired = TopicSum(readers[1], lambda topic: topic.expired)
        for total in (self._ready, self._expired):
            total.of(machine.topics)  # before clients wait

    @property
    def ready(self) -> int:
        """Messages that some group has yet to ack."""
        return self._ready.of(self._machine.topics)

    @property
    def expired(self) -> int:
        """Messages whose time to live was over before they were acked, in topics that are there."""
        return self._expired.of(self._machine.topics)

    def unacked(self) -> list[TopicId]:
        """Return the topics that have such messages."""
        self._ready.of(self._machine.topics)
        return self._ready.positive()

    def keep_up(self) -> bool:
        """Look again if many have changed, though nobody asks; return whether many still have."""
        totals = (self._ready, self._expired)
        return sum(total.keep_up(self._machine.topics) for total in totals) > 0
