"""How many topics, groups and producers there may be: the leader refuses what would exceed it.

Each is kept by every replica, in memory and in each manifest, whether anybody uses it or not. As
with quotas (timer/leader/intake/quotas.py) nothing of this is decided at apply, and what is there
stays.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from timer.entries.policies import namespace_of
from timer.model.columns import TOMBSTONE
from timer.model.timer_errors import LimitReachedError
from timer.ready.topic import Topic
from timer.state.machine import Machine

RARE_SHARE: Final = 10
"""Once no more than a tenth of all producers may come, those that sent nothing for …"""
RARE_MS: Final = 3_600_000
"""… so long are forgotten, whatever limits.producer_idle_ms says: those of a crash loop, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountLimits:
    """Names are those of the settings."""

    topics_max: int = 100_000
    namespace_topics_max: int = 10_000
    """Of each namespace."""
    groups_max: int = 100_000
    """Of all topics together."""
    topic_groups_max: int = 1_000
    """Of each topic."""
    producers_max: int = 100_000


IDS_LEFT: Final = 1 << 20
"""Ids of topics, and of groups, that are kept for what nobody asks for: dead letters' topics, seeks
of groups. Ids are never used again."""
OPS_LEFT: Final = 4096
"""More than ops that are on their way."""
TOPIC_IDS_MAX: Final = TOMBSTONE - IDS_LEFT
GROUP_IDS_MAX: Final = (1 << 32) - IDS_LEFT


class GroupName(NamedTuple):
    """A group that is about to be made."""

    topic: int
    name: str


def check_topic(
    limits: CountLimits, machine: Machine, name: str, on_the_way: Collection[str] = ()
) -> None:
    """Check that one more topic may be made.

    Raises:
        LimitReachedError: the cluster, or its namespace, has as many as it may; or has ever had.
    """
    made = machine.next_topic_id + len(on_the_way)
    if made >= TOPIC_IDS_MAX:
        raise LimitReachedError("topic ids", TOPIC_IDS_MAX, "the cluster", made)
    _check("topics_max", limits.topics_max, "the cluster", len(machine.topics) + len(on_the_way))
    namespace = namespace_of(name)
    there = machine.namespaces[namespace]
    there += sum(namespace_of(each) == namespace for each in on_the_way)
    whose = f"namespace {namespace!r}"
    _check("namespace_topics_max", limits.namespace_topics_max, whose, there)


def check_group(
    limits: CountLimits, machine: Machine, topic: Topic, on_the_way: Collection[GroupName] = ()
) -> None:
    """Check that a topic may have one more group.

    Raises:
        LimitReachedError: it, or the cluster, has as many as it may.
    """
    check_group_id(machine, len(on_the_way))
    there = len(topic.groups) + sum(each.topic == topic.topic_id for each in on_the_way)
    _check("topic_groups_max", limits.topic_groups_max, f"topic {topic.name!r}", there)
    _check("groups_max", limits.groups_max, "the cluster", machine.groups + len(on_the_way))


def check_group_id(machine: Machine, on_the_way: int = 0) -> None:
    """Check that there is one more id for a group.

    Raises:
        LimitReachedError: all but a few have been used.
    """
    made = machine.next_group_id + on_the_way
    if made >= GROUP_IDS_MAX:
        raise LimitReachedError("group ids", GROUP_IDS_MAX, "the cluster", made)


def has_ids(machine: Machine) -> bool:
    """Return whether there are ids for topics, and groups, that dead letters make."""
    return max(machine.next_topic_id, machine.next_group_id) < TOMBSTONE - OPS_LEFT


def check_producer(limits: CountLimits, machine: Machine, on_the_way: int) -> None:
    """Check that one more producer may register.

    Raises:
        LimitReachedError: the cluster has as many as it may.
    """
    there = len(machine.producers) + on_the_way
    _check("producers_max", limits.producers_max, "the cluster", there)


def producer_idle_ms(limits: CountLimits, machine: Machine, idle_ms: int) -> int:
    """Return how long a producer may be idle from now on, of `idle_ms` at most."""
    few = limits.producers_max // RARE_SHARE
    return idle_ms if limits.producers_max - len(machine.producers) > few else min(idle_ms, RARE_MS)


def _check(field: str, limit: int, whose: str, there: int) -> None:
    if there >= limit:
        raise LimitReachedError(f"limits.{field}", limit, whose, there)
