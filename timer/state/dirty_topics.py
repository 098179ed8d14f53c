"""Which topics have changed: what goes over all topics looks again at those alone.

    an entry changes a topic --note--> the set of each reader --> taken out by it, when it looks

Ten thousand topics are a few hundredths of a second of work, in which the event loop does nothing
else: so a digest, a manifest, what retention lets go of keep what they know of a topic.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from timer.model.units import TopicId
from timer.ready.topic import Topic

MANY: Final = 256
"""Topics: about a millisecond, unless they have very many groups."""
AT_ONCE: Final = 128


class DirtyTopics:
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


class TopicSum:
    """The sum of a number of each topic; topics that did not change are not asked again."""

    def __init__(self, changed: set[TopicId], number: Callable[[Topic], int]) -> None:
        """`changed`: a reader's; of what is there already it has to name each topic."""
        self.changed = changed
        self._number = number
        self._parts: dict[TopicId, int] = {}
        self._sum = 0

    def of(self, topics: Mapping[TopicId, Topic]) -> int:
        """Return the sum over the topics that there are."""
        while self.changed:
            self._look(topics, self.changed.pop())
        return self._sum

    def keep_up(self, topics: Mapping[TopicId, Topic]) -> bool:
        """Look at some, if many have changed, though nobody asks; return whether many still have.

        So that whoever asks never waits for more than MANY of them.
        """
        for topic_id in many(self.changed):
            self._look(topics, topic_id)
        return len(self.changed) > MANY

    def _look(self, topics: Mapping[TopicId, Topic], topic_id: TopicId) -> None:
        self._sum -= self._parts.pop(topic_id, 0)
        if (topic := topics.get(topic_id)) is not None:  # else it is gone
            part = self._number(topic)
            if part:
                self._parts[topic_id] = part
                self._sum += part

    def positive(self) -> list[TopicId]:
        """Return the topics whose number was not 0 when it was last looked at."""
        return [*self._parts]


Id = TypeVar("Id")
Item = TypeVar("Item")


def portions(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield MANY items at a time, in their order."""
    return (items[start : start + MANY] for start in range(0, len(items), MANY))


def many(changed: set[Id]) -> Iterator[Id]:
    """Take out some of those that changed, to be looked at now; none if they are few."""
    for _ in range(min(len(changed) - MANY, AT_ONCE)):
        yield changed.pop()
