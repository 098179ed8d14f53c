"""Policies of cluster, namespaces and topics by POLICY entries; the narrowest scope wins."""

from dataclasses import dataclass, field
from typing import Any, Final

from timer.entries.entry_frame import Entry
from timer.entries.policies import Scope, ScopePolicy, decode_policy
from timer.model.units import TopicId

_NOTHING: Final = ScopePolicy()


@dataclass(slots=True)
class Said:
    """The fields that each scope sets."""

    records: dict[Scope, ScopePolicy] = field(default_factory=dict)

    def take(self, item: Entry) -> Scope:
        """Apply a POLICY entry; return its scope."""
        scope, policy = decode_policy(item.payload)
        self.records[scope] = policy
        return scope

    def of(self, name: str, topic: int, topic_name: str) -> Any:
        """Return the value of the field `name` for a topic; None if no scope sets it."""
        namespace, slash, _ = topic_name.partition("/")
        scopes = Scope("", TopicId(topic)), Scope(namespace if slash else "default"), Scope()
        said = (getattr(self.records.get(scope, _NOTHING), name) for scope in scopes)
        return next((value for value in said if value is not None), None)

    def firing(self, topic: int, topic_name: str) -> tuple[bool, str]:
        """Return whether a topic is paused, and the fate of its overdue timers at a resume."""
        paused, catch_up = (self.of(name, topic, topic_name) for name in ("paused", "catch_up"))
        return bool(paused), catch_up or "all"
