"""What the log says of whole topics: a part of the exporter's story (chaos/live/export.py).

    TOPIC    one is made, or deleted: all that is of it is over; another of its name is another one
    POLICY   pauses topics, lets them go on, says how long messages live: what holds for a topic may
             change, and only that is told
    GROUP    CREATE of the witness's group; EXPIRE and EXPIRE_BELOW say that messages have expired,
             by the time to live that the policies before them say

No timer is known here. Whether one is held, dropped or over follows from its topic, its due time,
when it was scheduled, and these facts, which the judge is told (chaos/live/standing.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from chaos.live.exported_events import RELEASE_MS, WITNESS_GROUP, EventColumns, EventKind
from chaos.live.holders import Stand
from chaos.oracle.policy_story import Said
from timer.entries.entry_frame import Entry
from timer.entries.payloads import AnyOp, CreateGroup, DeleteTopic, GroupOp, Op
from timer.entries.policies import Scope, ScopePolicy, decode_policy, namespace_of
from timer.model.units import TopicId

NEVER: Final = 1 << 62


@dataclass(slots=True)
class Topics:
    """The topics as of the last entry."""

    names: dict[int, str] = field(default_factory=dict)
    next_topic: int = 1
    """The number of the next one: those of topics that were deleted are not used again."""
    stands: dict[int, Stand] = field(default_factory=dict)
    """Of those that hold what comes due."""
    lives_ms: dict[int, int] = field(default_factory=dict)
    """Topic -> its time to live; without one it is not here."""
    gone: set[int] = field(default_factory=set)
    said: Said = field(default_factory=Said)

    @classmethod
    def of_manifest(cls, state: dict[str, Any]) -> "Topics":
        """Return what a node's manifest holds."""
        names = {topic["id"]: topic["name"] for topic in state["topics"]}
        found = cls(names=names, next_topic=state["next"][1])
        found.gone = {*range(1, found.next_topic)} - {*names}
        found.said = Said(dict(map(decode_policy, state["policies"])))
        read_ms = state["last_read_time_ms"]
        for topic in state["topics"]:
            number = topic["id"]
            if found.said.firing(number, topic["name"])[0]:
                found.stands[number] = Stand(read_ms, read_ms, NEVER)
            elif topic["release"]:
                over_ms = state["time_ms"] + RELEASE_MS
                found.stands[number] = Stand(read_ms, read_ms, over_ms)
            if ttl_ms := found._ttl_ms(number):
                found.lives_ms[number] = ttl_ms
        return found

    def dumps(self) -> dict[str, Any]:
        """Return it for JSON; what is not in it follows from the rest."""
        said = [(*scope, policy.pack()) for scope, policy in self.said.records.items()]
        stands = [*self.stands.items()]
        return {"names": [*self.names.items()], "next": self.next_topic, "stands": stands,
                "lives_ms": [*self.lives_ms.items()], "said": said}  # fmt: skip

    @classmethod
    def loads(cls, fields: dict[str, Any]) -> "Topics":
        """Return what `dumps` has made, perhaps read from JSON."""
        found = cls(dict(fields["names"]), fields["next"], lives_ms=dict(fields["lives_ms"]))
        found.stands = {topic: Stand(*stand) for topic, stand in fields["stands"]}
        found.gone = {*range(1, found.next_topic)} - {*found.names}
        for namespace, topic, policy in fields["said"]:
            found.said.records[Scope(namespace, TopicId(topic))] = ScopePolicy.unpack(policy)
        return found

    def facts(self, state: dict[str, Any]) -> Iterator[EventColumns]:
        """Yield what a judge has to know of the topics of a manifest."""
        when = {"at_ms": state["time_ms"], "index": state["index"]}
        for topic in state["topics"]:
            number = topic["id"]
            yield self._told(EventKind.MADE, number, when)
            if any(group["name"] == WITNESS_GROUP for group in topic["groups"]):
                yield self._told(EventKind.WITNESSED, number, when | {"at_ms": 0})
            if number in self.stands and self.stands[number].over_ms == NEVER:
                yield self._told(EventKind.PAUSED, number, when)
            elif topic["release"]:
                catch_up, until_ms, seq_end, *_ = topic["release"]
                columns = when | {"at_ms": until_ms}
                yield self._resumed(number, columns, catch_up, until_ms, seq_end)
            if number in self.lives_ms:
                yield self._told(EventKind.LIVES, number, when, ttl_ms=self.lives_ms[number])

    # ---- entries

    def move_on(self, item: Entry, *, new_epoch: bool) -> None:
        """The log's time has moved on; what goes on has to begin anew in a new epoch."""
        for topic, stand in [*self.stands.items()]:
            if stand.over_ms == NEVER:
                continue
            if stand.over_ms < item.time_ms:
                del self.stands[topic]
            elif new_epoch:
                self.stands[topic] = stand._replace(over_ms=item.time_ms + RELEASE_MS)

    def make(self, item: Entry, name: str, read_ms: int) -> tuple[int, list[EventColumns]]:
        """Return the number of a topic, which is made if it isn't there, and what is told of it."""
        for number, known in self.names.items():
            if known == name:
                return number, []
        number, self.next_topic = self.next_topic, self.next_topic + 1
        self.names[number] = name
        told = [self._told(EventKind.MADE, number, _at(item))]
        return number, [*told, *self._changes(item, number, read_ms, 0)]

    def delete(self, item: Entry, said: DeleteTopic) -> list[EventColumns]:
        """Return what is told of a deletion; nothing if there is no such topic."""
        if said.topic not in self.names:
            return []
        told = self._told(EventKind.DELETED, said.topic, _at(item))
        del self.names[said.topic]
        self.gone.add(said.topic)
        self.stands.pop(said.topic, None)
        self.lives_ms.pop(said.topic, None)
        self.said.records.pop(Scope("", said.topic), None)
        return [told]

    def policy(self, item: Entry, read_ms: int, next_seq: int) -> list[EventColumns]:
        """Return what is told of a POLICY entry."""
        scope = self.said.take(item)
        topics = [
            topic
            for topic in ([scope.topic] if scope.topic else self.names)
            if topic in self.names and scope.namespace in ("", namespace_of(self.names[topic]))
        ]
        changes = (self._changes(item, topic, read_ms, next_seq) for topic in topics)
        return [told for each in changes for told in each]

    def op(self, item: Entry, op: AnyOp) -> list[EventColumns]:
        """Return what is told of an op of a GROUP entry, other than of a MOVE."""
        if isinstance(op, CreateGroup):
            return self.group_made(item, op.topic, op.name)
        expires = isinstance(op, GroupOp) and op.op in (Op.EXPIRE, Op.EXPIRE_BELOW)
        ttl_ms = self.lives_ms.get(op.topic)
        if not expires or ttl_ms is None:
            return []  # what expires without a time to live is lost
        return [self._told(EventKind.EXPIRED, op.topic, _at(item), read_ms=item.time_ms - ttl_ms)]

    def group_made(self, item: Entry, topic: int, name: str) -> list[EventColumns]:
        """Return what is told of the creation of a group, which may be there already."""
        if name != WITNESS_GROUP or topic not in self.names:
            return []
        return [self._told(EventKind.WITNESSED, topic, _at(item))]

    # ---- inside

    def _changes(
        self, item: Entry, topic: int, read_ms: int, next_seq: int
    ) -> Iterator[EventColumns]:
        """Yield how a topic fares otherwise than before, by what is said now."""
        paused, catch_up = self.said.firing(topic, self.names[topic])
        stand = self.stands.get(topic)
        was_paused = stand is not None and stand.over_ms == NEVER
        if paused and not was_paused:
            if stand is None:
                self.stands[topic] = Stand(read_ms, read_ms, NEVER)
            else:  # what the pause before this one held may be left, or not
                held_ms = max(read_ms, stand.held_ms + 1)
                self.stands[topic] = Stand(stand.gone_ms, held_ms, NEVER)
            yield self._told(EventKind.PAUSED, topic, _at(item))
        if was_paused and not paused:
            assert stand is not None
            self.stands[topic] = stand._replace(over_ms=item.time_ms + RELEASE_MS)
            until_ms = max(item.time_ms, read_ms)
            yield self._resumed(topic, _at(item), catch_up, until_ms, next_seq)
        ttl_ms = self._ttl_ms(topic)
        if ttl_ms != self.lives_ms.get(topic, 0):
            self.lives_ms[topic] = ttl_ms
            if not ttl_ms:
                del self.lives_ms[topic]
            yield self._told(EventKind.LIVES, topic, _at(item), ttl_ms=ttl_ms)

    def _ttl_ms(self, topic: int) -> int:
        return int(self.said.of("ttl_ms", topic, self.names[topic]) or 0)

    def _resumed(
        self, topic: int, when: dict[str, int], catch_up: str, until_ms: int, seq_end: int
    ) -> EventColumns:
        columns = {"read_ms": until_ms, "seq": seq_end - 1, "detail": catch_up}
        return self._told(EventKind.RESUMED, topic, when, **columns)

    def _told(
        self, kind: EventKind, topic: int, when: dict[str, int], **columns: Any
    ) -> EventColumns:
        name = self.names[topic]
        return EventColumns(kind, 1, {"topic_id": topic, "topic": name, **when, **columns})


def _at(item: Entry) -> dict[str, int]:
    return {"at_ms": item.time_ms, "index": item.index, "epoch": item.epoch}
