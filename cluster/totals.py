"""What all topics have together, of which only those that changed are looked at again.

Nodes ask each other for their status every second: with ten thousand topics to add up that held
the event loop for 25 ms.
"""

from typing import Final

from timer.changes import TopicSum
from timer.machine import Machine

MANY: Final = 1_024
"""Topics: one or two milliseconds."""


class Totals:
    """See the module."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        readers = [machine.changes.reader() for _ in range(2)]
        for changed in readers:
            changed.update(machine.topics)
        self._ready = TopicSum(readers[0], lambda topic: topic.ready)
        self._expired = TopicSum(readers[1], lambda topic: topic.expired)

    @property
    def ready(self) -> int:
        """Messages that some group has yet to ack."""
        return self._ready.of(self._machine.topics)

    @property
    def expired(self) -> int:
        """Messages whose time to live was over before they were acked, in topics that are there."""
        return self._expired.of(self._machine.topics)

    def keep_up(self) -> None:
        """Look again if many have changed, though nobody asks: the sets would only grow."""
        for total in (self._ready, self._expired):
            if len(total.changed) >= MANY:
                total.of(self._machine.topics)
