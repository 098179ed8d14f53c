"""Changed topics: a reader that covers all topics looks again only at those that changed.

    an entry changes a topic --note--> the set of each reader --> removed by the reader's next look

A look at ten thousand topics takes some hundredths of a second, which would block the event loop.
The digest, the manifest and retention therefore remember their result for each topic.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

from timer.model.units import TopicId
from timer.ready.topic import Topic

MANY: Final = 256
"""Topics that are looked at in about a millisecond, if they do not have very many groups."""
AT_ONCE: Final = 128


Id = TypeVar("Id")
Item = TypeVar("Item")


class DirtyIds(Generic[Id]):
    """One set of changed topics, or producers, for each reader."""

    __slots__ = ("_readers",)

    def __init__(self) -> None:
        self._readers: list[set[Id]] = []

    def reader(self) -> set[Id]:
        """Return the set of a new reader; ids that change from now on are added to it."""
        changed: set[Id] = set()
        self._readers.append(changed)
        return changed

    def note_all(self, ids: Collection[Id]) -> None:
        """Record that topics, or producers, are created."""
        for changed in self._readers:
            changed.update(ids)

    def note(self, changed_id: Id) -> None:
        """Record that a topic, or producer, changes, is created, or is deleted."""
        for changed in self._readers:
            changed.add(changed_id)


class TopicSum:
    """The sum of one number per topic; only changed topics are computed again."""

    def __init__(self, changed: set[TopicId], number: Callable[[Topic], int]) -> None:
        """`changed`: a reader's set. It must name all topics that exist already."""
        self.changed = changed
        self._number = number
        self._parts: dict[TopicId, int] = {}
        self._sum = 0

    def of(self, topics: Mapping[TopicId, Topic]) -> int:
        """Return the sum over all existing topics."""
        if not self._parts:
            self._compute_all(topics)
        for topic_id in take_all(self.changed):
            self._update(topics, topic_id)
        return self._sum

    def keep_up(self, topics: Mapping[TopicId, Topic]) -> bool:
        """Look at some topics if more than MANY have changed; return whether more than MANY remain.

        The next call of `of` then has at most about MANY topics to look at.
        """
        for topic_id in take_some(self.changed):
            self._update(topics, topic_id)
        return len(self.changed) > MANY

    def _compute_all(self, topics: Mapping[TopicId, Topic]) -> None:
        """Look at the changed topics, as `_update` does. No topic has a part yet."""
        number, found = self._number, filter(None, map(topics.get, self.changed))
        parts = ((topic.topic_id, number(topic)) for topic in found)
        self._parts = {topic_id: part for topic_id, part in parts if part}
        self._sum = sum(self._parts.values())
        self.changed.clear()

    def _update(self, topics: Mapping[TopicId, Topic], topic_id: TopicId) -> None:
        self._sum -= self._parts.pop(topic_id, 0)
        if (topic := topics.get(topic_id)) is not None:  # None: it was deleted
            part = self._number(topic)
            if part:
                self._parts[topic_id] = part
                self._sum += part

    def positive_topics(self) -> list[TopicId]:
        """Return the topics for which the last look found a number other than 0."""
        return [*self._parts]


def portions(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield MANY items at a time, in their order."""
    return (items[start : start + MANY] for start in range(0, len(items), MANY))


def take_all(changed: set[Id]) -> list[Id]:
    """Remove and return all changed ids.

    A set that `pop` empties keeps its table. After a change of 100,000 topics that is 4 MB, and
    each later `pop` searches it.
    """
    taken = [*changed]
    changed.clear()
    return taken


def take_some(changed: set[Id]) -> Iterator[Id]:
    """Remove and yield changed ids until MANY are left, at most AT_ONCE; none if they are few."""
    for _ in range(min(len(changed) - MANY, AT_ONCE)):
        yield changed.pop()
