"""Topics, groups and producers of the state applied on this node, for operators."""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import numpy as np

from cluster.api import group_admin, wire_rows
from cluster.api.topic_filter import TopicFilter, span_of
from cluster.observe import lag, quota_view
from cluster.observe import producer_view as producers
from cluster.observe.lateness import BOUNDS_MS, Histogram, Lateness
from cluster.rpc.caller_turns import CallerTurns
from cluster.rpc.rpc_caller import CALLER, caller_name
from cluster.settings.config import NodeConfig
from cluster.state.host import Host
from timer.leader.groups.group_delivery import Delivery
from timer.model.columns import I64
from timer.model.timer_errors import EngineError, InvalidRequestError, NotFoundError
from timer.model.units import MonoMs, TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.state.apply_results import FireApplied
from timer.state.machine import Machine
from timerclient.proto import timer_pb2 as pb

TOPICS_AT_ONCE: Final = 256
"""Topics and groups converted without a pause: about three milliseconds of work."""
PAGE_SIZE_MAX: Final = 1_000
"""Topics in one answer, at most."""
PAGE_GROUPS_MAX: Final = 10_000
"""Topics and groups together in one answer; further topics follow in the next answer."""
LATE_WAIT_S: Final = 0.25
"""Seconds that a list of topics or a scrape waits for the topics' lags, which are a query."""
LATE_AGE_MS_MAX: Final = 20_000
"""Age above which measured lags of topics are not shown. Prometheus scrapes every 15 seconds."""


class TopicView:
    """A node's topics, groups and producers, for status."""

    def __init__(self, host: Host, config: NodeConfig) -> None:
        self._host = host
        self._config = config
        self._fired_late, self._handed_out_late = Lateness(), Lateness()
        """Lateness by topic since this node began to lead."""
        self._listing = CallerTurns(1)
        """Pages are made one by one: the pauses of many end in the same turn of the loop."""
        self._names: tuple[tuple[int, int], list[str]] = ((0, 0), [])
        """((next topic id, number of topics), their sorted names)."""
        self.late_topics: Callable[[], Awaitable[Mapping[TopicId, int]]] = _no_lags
        """Returns topic -> age of its oldest overdue timer in ms, on a leader with a lease."""
        self._late: Mapping[TopicId, int] = {}
        """The last result of `late_topics`."""
        self._late_at_ms = MonoMs(0)
        """Time of that result, on the monotonic clock."""
        self._late_refresh: asyncio.Task[None] | None = None

    # ---- events

    def on_lead(self) -> None:
        """Start new histograms: this node begins to lead."""
        self._fired_late, self._handed_out_late = Lateness(), Lateness()
        self._late = {}

    def on_fired(self, applied: FireApplied, at_ms: UnixMs) -> I64:
        """Count a firing; return the lateness of its timers in ms (n, int64)."""
        if not applied.fired:
            return np.zeros(0, np.int64)
        late_ms = [at_ms - rows["due_ms"] for _, rows in applied.fired]
        together = np.concatenate(late_ms)
        topics = [topic for topic, _ in applied.fired]
        self._fired_late.observe(topics, [*map(len, late_ms)], together)
        return together

    def on_delivery(self, delivery: Delivery) -> I64:
        """Count a delivery; return the lateness of its first attempts in ms (n, int64)."""
        topic = delivery.topic
        slices = topic.queue.slices(delivery.lease.offsets)
        due_ms = np.concatenate([page.rows["due_ms"][at.astype(np.int64)] for page, at in slices])
        late_ms: I64 = delivery.at_ms - due_ms[delivery.attempts == 1]
        self._handed_out_late.observe([topic.topic_id], [len(late_ms)], late_ms)
        return late_ms

    def on_topic_deleted(self, topic: TopicId) -> None:
        """Delete a topic's histograms."""
        self._fired_late.forget(topic)
        self._handed_out_late.forget(topic)

    # ---- answers

    async def topics(
        self, after: str, page_size: int, prefix: str = "", shown: TopicFilter | None = None
    ) -> pb.ListTopicsResponse:
        """Return a page of the topics whose names have the prefix, by name, after a name.

        `page_size`: 0 means PAGE_SIZE_MAX. `shown`: only these topics, and no count; None: all.

        Pages are made one after the other. The work pauses after TOPICS_AT_ONCE, so that the loop
        serves others meanwhile. Lags are those of `late_soon`: without a lease, or if many queries
        wait, they may be missing.

        Raises:
            InvalidRequestError: the page is too large.
        """
        if page_size > PAGE_SIZE_MAX:
            raise InvalidRequestError("page_size", page_size, f"must be at most {PAGE_SIZE_MAX}")
        late = await self.late_soon()
        async with self._listing.turn(caller_name()):
            return await self._page(late, after, page_size or PAGE_SIZE_MAX, prefix, shown)

    async def _page(
        self,
        late: Mapping[TopicId, int],
        after: str,
        size: int,
        prefix: str,
        shown: TopicFilter | None,
    ) -> pb.ListTopicsResponse:
        """Return a page of topics with these lags; see `topics`."""
        machine, clock_ms = self._machine, self._host.now().clock_ms
        begin, end = span_of(all_names := self._sorted_names(), prefix)
        names = all_names[begin:end] if prefix else all_names
        count = len(names)
        if shown is not None:
            names, count = await shown.after(names, after, size + 1), 0
        start = bisect_right(names, after)
        page = names[start : start + size]
        found: list[pb.TopicStatus] = []
        work = pause_at = 0
        for name in page:
            if (topic := machine.topic_by_name.get(name)) is not None:
                found.append(self._topic(topic, late, clock_ms))
                work += 1 + len(topic.groups)
            after = name
            if work >= PAGE_GROUPS_MAX:
                break
            if work >= pause_at:
                pause_at = work + TOPICS_AT_ONCE
                await asyncio.sleep(0)
        more = bool(page) and after != names[-1]
        return pb.ListTopicsResponse(topics=found, next_after=after if more else "", count=count)

    def topic(self, name: str, *, lateness: bool = False) -> pb.TopicStatus:
        """Return the topic of this name, without its lag. `lateness`: with its histograms.

        Raises:
            NotFoundError: the topic does not exist.
        """
        topic = self._machine.topic_by_name.get(name)
        if topic is None:
            raise NotFoundError("topic", name)
        status = self._topic(topic, {}, self._host.now().clock_ms)
        if lateness:
            status.fired_late.CopyFrom(_histogram(self._fired_late.of(status.topic_id)))
            handed_out = self._handed_out_late.of(status.topic_id)
            status.handed_out_late.CopyFrom(_histogram(handed_out))
        return status

    async def late(self) -> Mapping[TopicId, int]:
        """Return `late_topics` of a leader; of another node none: its timers fire elsewhere.

        Raises:
            EngineError: no lease, or too many queries wait already.
        """
        if (leader := self._host.leader) is None:
            return {}
        late = await self.late_topics()
        if self._host.leader is leader:
            self._late, self._late_at_ms = late, self._host.now().mono_ms
        return late

    async def late_soon(self) -> Mapping[TopicId, int]:
        """Return the result of `late`, or its last one if it fails or takes over LATE_WAIT_S.

        Calls at the same time share one query. It goes on after the wait.
        """
        if self._host.leader is None:
            return {}
        if self._late_refresh is None or self._late_refresh.done():
            self._late_refresh = asyncio.create_task(self._refresh_late())
        looking = self._late_refresh
        await asyncio.wait([looking], timeout=LATE_WAIT_S)
        if looking.done():
            looking.result()  # raises its error, if it failed
        return self.last_late()

    def last_late(self) -> Mapping[TopicId, int]:
        """Return the last result of `late`; {} if it is too old, or if this node does not lead."""
        age_ms = self._host.now().mono_ms - self._late_at_ms
        return self._late if self._host.leader is not None and age_ms <= LATE_AGE_MS_MAX else {}

    async def _refresh_late(self) -> None:
        CALLER.set(None)  # it is for all callers: none of them pays for it
        with suppress(EngineError):  # no lease, or many queries wait
            await self.late()

    def _sorted_names(self) -> list[str]:
        """Return the names of all topics; they are sorted again only after a change."""
        machine = self._machine
        made = int(machine.next_topic_id), len(machine.topics)
        if made != self._names[0]:
            self._names = made, sorted(machine.topic_by_name)
        return self._names[1]

    def group(self, topic: str, group: str) -> pb.GroupStatus:
        """Return a group.

        Raises:
            NotFoundError: the group does not exist, or was deleted.
        """
        of = self._machine.topic_by_name.get(wire_rows.topic_name(topic))
        found = of.groups.get(group) if of is not None else None
        if of is None or found is None:
            raise NotFoundError("group", group)
        return self._group(of, found, self._host.now().clock_ms)

    def producers(self, request: pb.ListProducersRequest) -> pb.ListProducersResponse:
        """Return a page of producers, or one of them.

        Raises:
            InvalidRequestError: the page is too large.
            UnknownProducerError: no producer has this name.
        """
        return producers.page_of(self._machine, request, self._config.limits.producer_idle_ms)

    def _topic(self, topic: Topic, late: Mapping[TopicId, int], clock_ms: UnixMs) -> pb.TopicStatus:
        counts, queue = topic.counts, topic.queue
        return pb.TopicStatus(
            name=topic.name,
            topic_id=topic.topic_id,
            pending=counts.pending,
            scheduled=counts.scheduled,
            fired=counts.fired,
            cancelled=counts.cancelled,
            dropped=counts.dropped,
            paused=topic.paused,
            held=topic.held,
            releasing=topic.release is not None,
            queue_end=queue.end,
            queue_begin=queue.begin,
            ready=topic.ready,
            expired=topic.expired,
            groups=[self._group(topic, group, clock_ms) for group in topic.groups.values()],
            lag_ms=max(0, late.get(topic.topic_id, 0)),
            quotas=quota_view.of_topic(self._machine, topic),
        )

    def _group(self, topic: Topic, group: Group, clock_ms: UnixMs) -> pb.GroupStatus:
        leader = self._host.leader
        leased, consumers = leader.groups.lease_counts(group) if leader is not None else (0, 0)
        status = group_admin.status_of(group, topic.queue.end, leased, consumers)
        if leader is not None:
            lags = lag.of_group(leader, topic, group, clock_ms)
            status.undelivered_lag_ms, status.unacked_lag_ms = lags.undelivered_ms, lags.unacked_ms
        return status

    @property
    def _machine(self) -> Machine:
        return self._host.engine.machine


def _histogram(found: Histogram) -> pb.Lateness:
    return pb.Lateness(counts=found.counts.tolist(), at_most_ms=BOUNDS_MS, sum_ms=found.sum_ms)


async def _no_lags() -> Mapping[TopicId, int]:
    return {}
