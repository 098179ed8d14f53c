"""Creators: the identity that created a topic or a group, for the limits of an identity.

TOPIC and CREATE name the creator from feature level 2 on. A topic or group has none if it was made
without TLS, by a dead letter, or at feature level 1. A seek and a change of settings keep the
creator. A deletion ends the count.
"""

from collections import Counter
from collections.abc import Iterable

from timer.ready.group import Group
from timer.ready.topic import Topic


class Creators:
    """The number of topics and groups that each identity created and that still exist."""

    def __init__(self) -> None:
        self.topics: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        """One text for all objects of an identity: very many topics may have the same creator."""

    def add(self, topic: Topic) -> None:
        """Count a topic with its groups."""
        topic.creator = self._count(self.topics, topic.creator)
        for group in topic.groups.values():
            self.add_group(group)

    def add_group(self, group: Group) -> None:
        """Count a group."""
        group.creator = self._count(self.groups, group.creator)

    def remove(self, topic: Topic) -> None:
        """Count a topic and its groups no more."""
        self._end(self.topics, [topic.creator])
        self._end(self.groups, [group.creator for group in topic.groups.values()])

    def remove_group(self, group: Group) -> None:
        """Count a group no more."""
        self._end(self.groups, [group.creator])

    def _count(self, counter: Counter[str], creator: str) -> str:
        if creator:
            counter[creator] += 1
        return self._names.setdefault(creator, creator)

    def _end(self, counter: Counter[str], creators: Iterable[str]) -> None:
        for creator in filter(None, creators):
            counter[creator] -= 1
            if not counter[creator]:
                del counter[creator]
            if creator not in self.topics and creator not in self.groups:
                self._names.pop(creator, None)
