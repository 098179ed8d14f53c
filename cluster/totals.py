"""Sums over all topics, of which only those that changed are looked at again.

Nodes ask each other for their status every second: with ten thousand topics to add up that held
the event loop for 25 ms.
"""

from typing import Final

from timer.machine import Machine
from timer.units import TopicId

MANY: Final = 1_024
"""Topics: one or two milliseconds."""


class Totals:
    """See the module."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._changed = machine.changes.reader()
        self._changed.update(machine.topics)
        self._parts: dict[TopicId, tuple[int, int]] = {}
        self._ready = self._expired = 0

    @property
    def ready(self) -> int:
        """Messages that some group has yet to ack."""
        self._look()
        return self._ready

    @property
    def expired(self) -> int:
        """Messages whose time to live was over before they were acked, in topics that are there."""
        self._look()
        return self._expired

    def keep_up(self) -> None:
        """Look again if many have changed, though nobody asks."""
        if len(self._changed) >= MANY:
            self._look()

    def _look(self) -> None:
        while self._changed:
            topic_id = self._changed.pop()
            ready, expired = self._parts.pop(topic_id, (0, 0))
            self._ready -= ready
            self._expired -= expired
            topic = self._machine.topics.get(topic_id)
            if topic is not None:
                self._parts[topic_id] = part = topic.ready, topic.expired
                self._ready += part[0]
                self._expired += part[1]
