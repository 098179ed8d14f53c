"""Lag: how old the oldest thing is that waits, as of the moment of asking.

    timer is due      --> has it fired?                       per topic
    message has fired --> does it wait for a consumer?        per group: undelivered
                      --> is it acked?                        per group: unacked

Nothing is counted while work goes on: an age is taken from the clock and from the oldest one that
is there when somebody asks, so it grows while nothing moves, and a group that has caught up costs
one comparison. Only the leader can tell: who holds a message is its memory.
"""

import asyncio
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from timer.leader.leader import Leader
from timer.model.units import TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic

TOPICS_AT_ONCE: Final = 4096
GROUPS_AT_ONCE: Final = 16
"""Looked at in one go: some milliseconds' work."""
OVERDUE_ROWS_MAX: Final = 65_536
"""Timers that are due, the oldest first, among which each topic's oldest is looked for."""


class GroupLag(NamedTuple):
    """Ages in milliseconds; 0: there is no such message."""

    topic: Topic
    group: Group
    undelivered_ms: int
    unacked_ms: int


def of_group(leader: Leader, topic: Topic, group: Group, clock_ms: UnixMs) -> GroupLag:
    """Return a group's lag."""
    queue = topic.queue
    if group.cursor >= queue.end:
        return GroupLag(topic, group, 0, 0)
    unacked_ms = max(0, clock_ms - queue.fired_at_ms(group.cursor))
    waiting = leader.groups.waiting_from(group, clock_ms)
    if waiting is None:
        return GroupLag(topic, group, 0, unacked_ms)
    return GroupLag(topic, group, max(0, clock_ms - queue.fired_at_ms(waiting)), unacked_ms)


async def of_groups(leader: Leader, clock_ms: UnixMs, topics: Iterable[TopicId]) -> list[GroupLag]:
    """Return the lag of every group that has something unacked; `topics`: those that have some.

    Some at a time, between which the loop does other things.
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


def of_topics(leader: Leader, clock_ms: UnixMs) -> dict[TopicId, int]:
    """Return topic -> age of its oldest overdue timer in ms, for those that have one.

    Of a backlog of more than OVERDUE_ROWS_MAX timers those topics whose oldest is among the first.
    """
    rows = leader.machine.store.overdue(clock_ms, OVERDUE_ROWS_MAX)
    rows = rows[~leader.machine.pauses.holds(rows)]  # what will be held is not late
    topics, first = np.unique(rows["topic"], return_index=True)
    ages = clock_ms - rows["due_ms"][first]
    return {TopicId(topic): age for topic, age in zip(topics.tolist(), ages.tolist(), strict=True)}
