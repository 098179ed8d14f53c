"""Use of the topics' quotas, for operators."""

import asyncio
import heapq
from typing import Final, TypeAlias

from timer.entries.policies import ScopePolicy, namespace_of
from timer.leader.intake.admission import Rules
from timer.leader.intake.quotas import USED
from timer.ready.topic import Topic
from timer.state.machine import Machine
from timerclient.proto import timer_pb2 as pb

Use: TypeAlias = tuple[tuple[str, str], tuple[int, int]]
"""((topic, field), (used, limit))."""
TOPICS_AT_ONCE: Final = 256
"""Topics whose quotas are read without a pause: some milliseconds of work."""


def of_topic(machine: Machine, node: ScopePolicy, topic: Topic) -> list[pb.QuotaStatus]:
    """Return a topic's quotas and their use on this node; `node`: the node's own policy."""
    if not machine.policies.limited:
        return []
    rules = Rules(machine.policies.effective(node, namespace_of(topic.name), topic.topic_id))
    return [
        pb.QuotaStatus(
            field=quota.field,
            used=USED[quota.field](topic),
            limit=quota.limit,
            source=quota.source,
        )
        for quota in rules.quotas
    ]


async def fullest(machine: Machine, node: ScopePolicy, count: int) -> tuple[Use, ...]:
    """Return the `count` quotas of all topics with the greatest share used.

    Quotas of 0 are left out: they close a topic and have no share. The event loop serves others
    after each TOPICS_AT_ONCE.
    """
    found: list[Use] = []
    topics = [*machine.topics.values()] if machine.policies.limited else []
    for number, topic in enumerate(topics, 1):
        found += (
            ((topic.name, quota.field), (quota.used, quota.limit))
            for quota in of_topic(machine, node, topic)
            if quota.limit
        )
        if not number % TOPICS_AT_ONCE:
            await asyncio.sleep(0)
    return tuple(heapq.nlargest(count, found, key=_share))


def _share(use: Use) -> float:
    used, limit = use[1]
    return used / limit
