"""Lag: the age of the oldest waiting timer or message, at the time of the request.

    timer is due      --> has it fired?                       per topic
    message has fired --> does it wait for a consumer?        per group: undelivered
                      --> is it acked?                        per group: unacked

Nothing is counted while timers fire. The age is the clock minus the time of the oldest one. So it
also grows while nothing moves, and a group without lag costs one comparison. Only the leader knows
lag, because only the leader knows which messages are leased.
"""

import asyncio
import heapq
from collections.abc import Iterable
from typing import Final, NamedTuple

from timer.leader.groups import dead_letters
from timer.leader.leader import Leader
from timer.model.units import TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic

TOPICS_AT_ONCE: Final = 4096
"""Topics that are checked without a pause."""
GROUPS_AT_ONCE: Final = 16
"""Groups whose lag is computed without a pause: some milliseconds of work."""


class GroupLag(NamedTuple):
    """Ages in milliseconds; 0: no message waits."""

    topic: Topic
    group: Group
    undelivered_ms: int
    unacked_ms: int


def of_group(leader: Leader, topic: Topic, group: Group, clock_ms: UnixMs) -> GroupLag:
    """Return the lag of a group."""
    queue = topic.queue
    if group.cursor >= queue.end:
        return GroupLag(topic, group, 0, 0)
    unacked_ms = max(0, clock_ms - queue.fired_at_ms(group.cursor))
    waiting = leader.groups.waiting_from(group, clock_ms)
    if waiting is None:
        return GroupLag(topic, group, 0, unacked_ms)
    return GroupLag(topic, group, max(0, clock_ms - queue.fired_at_ms(waiting)), unacked_ms)


async def of_groups(leader: Leader, clock_ms: UnixMs, topics: Iterable[TopicId]) -> list[GroupLag]:
    """Return the lag of every group with unacked messages. `topics`: those with ready messages.

    The work pauses now and then, so that the loop serves others meanwhile.
    """
    lags: list[GroupLag] = []
    for number, topic_id in enumerate(topics, 1):
        topic = leader.machine.topics.get(topic_id)
        if topic is None:  # deleted meanwhile
            continue
        for group in [*topic.groups.values()]:
            if group.cursor < topic.queue.end and not group.deleted:
                lags.append(of_group(leader, topic, group, clock_ms))
                if not len(lags) % GROUPS_AT_ONCE:
                    await asyncio.sleep(0)
        if not number % TOPICS_AT_ONCE:
            await asyncio.sleep(0)
    return lags


def of_consumers(lags: Iterable[GroupLag]) -> list[GroupLag]:
    """Return the lag of groups that consumers are to read: all except those of dead letters."""
    return [each for each in lags if each.group.name != dead_letters.GROUP]


def worst(lags: Iterable[GroupLag], count: int) -> list[GroupLag]:
    """Return the `count` groups with most lag, and as many groups of dead letters.

    Dead letters wait for days, so their groups would take all places.
    """
    lags = [*lags]
    letters = [each for each in lags if each.group.name == dead_letters.GROUP]
    return [
        *heapq.nlargest(count, of_consumers(lags), key=lambda each: each[2:]),
        *heapq.nlargest(count, letters, key=lambda each: each[2:]),
    ]
