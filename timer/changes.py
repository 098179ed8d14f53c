"""Which topics have changed: what goes over all topics looks again at those alone.

    an entry changes a topic --note--> the set of each reader --> taken out by it, when it looks

Ten thousand topics are a few hundredths of a second of work, in which the event loop does nothing
else: so a digest, a manifest, what retention lets go of keep what they know of a topic.
"""

from timer.units import TopicId


class Changes:
    """See the module."""

    __slots__ = ("_readers",)

    def __init__(self) -> None:
        self._readers: list[set[TopicId]] = []

    def reader(self) -> set[TopicId]:
        """Return a new reader's set: topics that change from now on come into it."""
        changed: set[TopicId] = set()
        self._readers.append(changed)
        return changed

    def note(self, topic: TopicId) -> None:
        """This topic changes, is made, or goes."""
        for changed in self._readers:
            changed.add(topic)
