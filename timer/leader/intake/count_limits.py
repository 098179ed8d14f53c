"""Limits on the numbers of topics, groups, producers and so on: new ones are rejected above.

Every replica holds each of them in memory and in each manifest, used or not. As with quotas
(timer/leader/intake/quotas.py), replicas check no limit at apply, and existing ones stay.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from timer.entries.policies import namespace_of
from timer.model.columns import TOMBSTONE
from timer.model.timer_errors import LimitReachedError
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.state.machine import Machine

RARE_SHARE: Final = 10
"""Once at most a tenth of producers_max is free, producers idle for RARE_MS are forgotten."""
RARE_MS: Final = 3_600_000
"""Holds even if limits.producer_idle_ms is longer: a crash loop leaves many idle producers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountLimits:
    """Most topics, groups, consumers, leases, producers and series; named as in the settings."""

    topics_max: int = 100_000
    namespace_topics_max: int = 10_000
    """In each namespace."""
    groups_max: int = 100_000
    """In all topics together."""
    topic_groups_max: int = 1_000
    """In each topic."""
    group_consumers_max: int = 5_000
    """In each group."""
    group_leases_max: int = 8_192
    """In each group. At the limit its deliveries pause."""
    producers_max: int = 100_000
    series_max: int = 200_000
    """Series of recurring timers, in all topics together."""


IDS_RESERVED: Final = 1 << 20
"""Topic and group ids reserved for internal use: topics of dead letters, seeks of groups. An id is
never used again."""
OPS_RESERVED: Final = 4096
"""Ids left free at the very end; more than the ops that can be in flight."""
TOPIC_IDS_MAX: Final = TOMBSTONE - IDS_RESERVED
GROUP_IDS_MAX: Final = (1 << 32) - IDS_RESERVED


class GroupName(NamedTuple):
    """A group that is being created."""

    topic: int
    name: str


def check_topics(
    limits: CountLimits, machine: Machine, names: Collection[str], creating: Collection[str] = ()
) -> None:
    """Check that new topics may all be created. `creating`: names of others being created.

    Raises:
        LimitReachedError: the cluster or a namespace would have more topics than it may have, or
            all topic ids are used.
    """
    ids, count = machine.next_topic_id + len(creating), len(machine.topics) + len(creating)
    if ids + len(names) > TOPIC_IDS_MAX:
        raise LimitReachedError("topic ids", TOPIC_IDS_MAX, "the cluster", ids)
    _check("topics_max", limits.topics_max, "the cluster", count, len(names))
    for namespace, more in Counter(map(namespace_of, names)).items():
        count = machine.namespaces[namespace]
        if count + len(creating) + more > limits.namespace_topics_max:
            count += sum(namespace_of(each) == namespace for each in creating)
        owner = f"namespace {namespace!r}"
        _check("namespace_topics_max", limits.namespace_topics_max, owner, count, more)


def may_have_topic(limits: CountLimits, machine: Machine, name: str) -> bool:
    """Return whether a topic exists or may be created."""
    try:
        if name not in machine.topic_by_name:
            check_topics(limits, machine, [name])
    except LimitReachedError:
        return False
    return True


def check_group(
    limits: CountLimits, machine: Machine, topic: Topic | None, creating: Collection[GroupName]
) -> None:
    """Check that a topic may have one more group. `topic`: None: it does not exist yet.

    Raises:
        LimitReachedError: the topic or the cluster has the most groups that it may have.
    """
    check_group_id(machine, len(creating))
    if topic is not None:
        count = len(topic.groups)
        if count + len(creating) >= limits.topic_groups_max:
            count += sum(each.topic == topic.topic_id for each in creating)
        _check("topic_groups_max", limits.topic_groups_max, f"topic {topic.name!r}", count)
    _check("groups_max", limits.groups_max, "the cluster", machine.groups + len(creating))


def check_consumer(limits: CountLimits, group: Group, count: int) -> None:
    """Check that a group with `count` consumers may have one more.

    Raises:
        LimitReachedError: it has the most consumers that it may have.
    """
    _check("group_consumers_max", limits.group_consumers_max, f"group {group.name!r}", count)


def check_group_id(machine: Machine, creating: int = 0) -> None:
    """Check that one more group id is free.

    Raises:
        LimitReachedError: all ids except the reserved ones are used.
    """
    ids = machine.next_group_id + creating
    if ids >= GROUP_IDS_MAX:
        raise LimitReachedError("group ids", GROUP_IDS_MAX, "the cluster", ids)


def has_free_ids(machine: Machine) -> bool:
    """Return whether ids are left for the topics and groups that dead letters create."""
    return max(machine.next_topic_id, machine.next_group_id) < TOMBSTONE - OPS_RESERVED


def check_producer(limits: CountLimits, machine: Machine, registering: int) -> None:
    """Check that one more producer may register.

    Raises:
        LimitReachedError: the cluster has the most producers that it may have.
    """
    count = len(machine.producers) + registering
    _check("producers_max", limits.producers_max, "the cluster", count)


def check_series(limits: CountLimits, machine: Machine, creating: int) -> None:
    """Check that one more series may be created.

    Raises:
        LimitReachedError: the cluster has the most series that it may have.
    """
    _check("series_max", limits.series_max, "the cluster", len(machine.series) + creating)


def producer_idle_ms(limits: CountLimits, machine: Machine, idle_ms: int) -> int:
    """Return the idle time after which producers are forgotten now, ms; at most `idle_ms`."""
    few = limits.producers_max // RARE_SHARE
    return idle_ms if limits.producers_max - len(machine.producers) > few else min(idle_ms, RARE_MS)


def _check(field: str, limit: int, owner: str, count: int, more: int = 1) -> None:
    if count + more > limit:
        raise LimitReachedError(f"limits.{field}", limit, owner, count)
