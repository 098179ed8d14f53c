"""Use of the topics' quotas, for operators."""

import asyncio
import heapq
from typing import Final, TypeAlias

from timer.entries.policies import QUOTAS
from timer.leader.intake.quotas import USED
from timer.ready.topic import Topic
from timer.state.machine import Machine
from timerclient.proto import timer_pb2 as pb

Use: TypeAlias = tuple[tuple[str, str], tuple[int, int]]
"""((topic, field), (used, limit))."""
TOPICS_AT_ONCE: Final = 256
"""Topics whose quotas are read without a pause: some milliseconds of work."""


def of_topic(machine: Machine, topic: Topic) -> list[pb.QuotaStatus]:
    """Return a topic's quotas and their use on this node. Nodes' settings have no quotas."""
    said = machine.policies.said_by
    found = ((field, *said(field, topic.name, topic.topic_id)) for field in QUOTAS)
    return [
        pb.QuotaStatus(field=field, used=USED[field](topic), limit=limit, source=source)
        for field, limit, source in found
        if limit is not None
    ]


async def fullest(machine: Machine, count: int) -> tuple[Use, ...]:
    """Return the `count` quotas of all topics with the greatest share used.

    Quotas of 0 are left out: they close a topic and have no share. The event loop serves others
    after each TOPICS_AT_ONCE.
    """
    found: list[Use] = []
    topics = [*machine.topics.values()] if machine.policies.limited else []
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
