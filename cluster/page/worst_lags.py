"""The topics and groups with most lag, for the status page. Only the leader knows lag."""

import heapq
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from cluster.observe import lag
from cluster.state.host import Host
from timer.model.units import TopicId

WORST_MAX: Final = 20


async def worst_lags(
    host: Host, read_late: Callable[[], Awaitable[Mapping[TopicId, int]]]
) -> dict[str, Any] | None:
    """Return the WORST_MAX worst topics and groups, worst first. None: this node does not lead.

    As many groups of dead letters follow the groups. Topics are ordered by the age of their oldest
    overdue timer, groups by that of their oldest message that waits for a consumer, then of their
    oldest unacked one. The work pauses now and then.

    `read_late` returns topic -> age of its oldest overdue timer in ms.
    """
    leader, clock_ms = host.leader, host.now().clock_ms
    if leader is None:
        return None
    late = await read_late()
    groups = await lag.of_groups(leader, clock_ms, host.totals.unacked_topics())
    topics = leader.machine.topics
    return {
        "topics": [
            {"topic": topics[topic].name, "overdue_ms": ms, "pending": pending}
            for topic, ms in heapq.nlargest(WORST_MAX, late.items(), key=lambda item: item[1])
            if topic in topics and (pending := topics[topic].counts.pending)
        ],
        "groups": [
            {
                "topic": each.topic.name,
                "group": each.group.name,
                "undelivered_ms": each.undelivered_ms,
                "unacked_ms": each.unacked_ms,
                "unacked": each.topic.queue.end - each.group.cursor,
            }
            for each in lag.worst(groups, WORST_MAX)
        ],
    }
