"""Policies by POLICY entries, and the quotas in force at each schedule; a part of the story.

Of the scopes of a topic, namespace and cluster the narrowest wins.

The leader judges a request by the entries that it has applied at that time, which the log does not
record. Its count of pending timers includes requests in flight, so the log up to the SCHEDULE entry
gives the exact count. Its count of ready messages lags: firings and acks may follow. A leader has
applied the whole log when it begins, so its state is at least that of its own EPOCH entry. If the
quota was reached at every entry since then, the leader had to reject the request. The leader
estimates the bytes of ready messages. The log shows only that they are not below zero.

A topic without groups counts as one without ready messages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from timer.entries.entry_frame import Entry
from timer.entries.policies import Scope, ScopePolicy, decode_policy
from timer.model.units import TopicId

_NOTHING: Final = ScopePolicy()
PENDING: Final = ("pending_max", "pending_bytes_max")
READY: Final = ("ready_max", "ready_bytes_max")


@dataclass(slots=True)
class ScopeFields:
    """The fields that each scope sets."""

    records: dict[Scope, ScopePolicy] = field(default_factory=dict)

    def apply(self, item: Entry) -> Scope:
        """Apply a POLICY entry; return its scope."""
        scope, policy = decode_policy(item.payload)
        self.records[scope] = policy
        return scope

    def of(self, name: str, topic: int, topic_name: str) -> Any:
        """Return the value of the field `name` for a topic; None if no scope sets it."""
        namespace, slash, _ = topic_name.partition("/")
        scopes = Scope("", TopicId(topic)), Scope(namespace if slash else "default"), Scope()
        values = (getattr(self.records.get(scope, _NOTHING), name) for scope in scopes)
        return next((value for value in values if value is not None), None)

    def pause_of(self, topic: int, topic_name: str) -> tuple[bool, str]:
        """Return whether a topic is paused, and the fate of its overdue timers at a resume."""
        paused, catch_up = (self.of(name, topic, topic_name) for name in ("paused", "catch_up"))
        return bool(paused), catch_up or "all"


class QuotaInForce(NamedTuple):
    """A quota in force at a schedule of its topic."""

    topic: int
    entry: int
    quota: str
    most: int
    ready: int | None
    """The least number of ready messages that the leader can have seen; None: a quota of pending
    timers."""


@dataclass(slots=True)
class QuotaStory:
    """Quotas in force at schedules. `ready_of` returns the number of ready messages of a topic."""

    ready_of: Callable[[int], int]
    in_force: list[QuotaInForce] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    """Topics whose ready messages may have changed since the last entry."""
    _ready: dict[int, int] = field(default_factory=dict)
    _least: dict[int, int] = field(default_factory=dict)
    """The least number of ready messages since the epoch began, if it has changed since."""

    def count_ready(self) -> None:
        """Note the ready messages after an entry."""
        for topic in self.touched:
            ready, before = self.ready_of(topic), self._ready.get(topic, 0)
            self._ready[topic] = ready
            self._least[topic] = min(self._least.get(topic, before), ready)
        self.touched.clear()

    def begin_epoch(self) -> None:
        """Forget the least numbers: a new leader has applied all entries before this one."""
        self._least.clear()

    def note(self, topics: Sequence[int], index: int, field_of: Callable[[int, str], Any]) -> None:
        """Note the quotas of the topics of a SCHEDULE entry."""
        self.in_force += (
            QuotaInForce(topic, index, name, most, ready)
            for topic in topics
            for name, ready in self._rules(topic)
            if (most := field_of(topic, name)) is not None
        )

    def _rules(self, topic: int) -> Iterator[tuple[str, int | None]]:
        yield from ((name, None) for name in PENDING)
        yield READY[0], self._least.get(topic, self._ready.get(topic, 0))
        yield READY[1], 0
