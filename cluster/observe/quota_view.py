"""Use of the topics' quotas, for operators."""

import asyncio
import heapq
from typing import Final, TypeAlias

from timer.entries.policies import QUOTAS
from timer.leader.intake.quotas import USAGE
from timer.ready.topic import Topic
from timer.state.machine import Machine
from timerclient.proto import timer_pb2 as pb

Use: TypeAlias = tuple[tuple[str, str], tuple[int, int]]
"""((topic, field), (used, limit))."""
TOPICS_AT_ONCE: Final = 256
"""Number of topics read without a pause: some milliseconds of work."""


def of_topic(machine: Machine, topic: Topic) -> list[pb.QuotaStatus]:
    """Return a topic's quotas and their use on this node. Nodes' settings have no quotas."""
    found: list[pb.QuotaStatus] = []
    for field in QUOTAS:
        limit, source = machine.policies.value_and_source(field, topic.name, topic.topic_id)
        if limit is not None:
            used = USAGE[field](topic)
            found.append(pb.QuotaStatus(field=field, used=used, limit=limit, source=source))
    return found


async def fullest(machine: Machine, count: int) -> tuple[Use, ...]:
    """Return the `count` fullest quotas of all topics, those of the greatest used / limit first.

    Quotas of 0 are left out: they close a topic and have no share. The event loop serves others
    after each TOPICS_AT_ONCE.
    """
    found: list[Use] = []
    topics = [*machine.topics.values()] if machine.policies.has(*QUOTAS) else []
    for number, topic in enumerate(topics, 1):
        found += (
            ((topic.name, quota.field), (quota.used, quota.limit))
            for quota in of_topic(machine, topic)
            if quota.limit
        )
        if not number % TOPICS_AT_ONCE:
            await asyncio.sleep(0)
    return tuple(heapq.nlargest(count, found, key=_share))


def _share(use: Use) -> float:
    used, limit = use[1]
    return used / limit
