"""The answers for the status page, as JSON's types: the overview, pages of topics, one timer.

An overview is put together from parts that all viewers share. A part that takes a while is a
`Measurement`: the answer holds the last result, and does not wait for a slow or absent node.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import grpc
from prometheus_client import Counter

from cluster.api.peer_queries import checkpoint_of, status_of
from cluster.api.topic_filter import TopicFilter
from cluster.observe.lateness import BOUNDS_MS
from cluster.observe.metrics import Telemetry
from cluster.observe.node_view import NodeState
from cluster.page.due_histogram import BUCKETS_S, DueCounts, DueHistogram
from cluster.page.leader_figures import Figures, LeaderAnswer, LeaderFigures
from cluster.page.measurement import Measurement
from cluster.page.timer_lookup import TimerLookup
from cluster.page.worst_lags import worst_lags
from cluster.rpc.http_call import HttpContext
from cluster.state.host import Host
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import LogIndex, MonoMs
from timerclient.proto import timer_pb2 as pb

PEER_EVERY_MS: Final = 1_500
COUNT_EVERY_MS: Final = 5_000
PART_WAIT_S: Final = 0.04
"""Seconds that an overview waits for each kind of part. All kinds are awaited at the same time."""
TOPICS_PAGE: Final = 20
TOPICS_PAGE_MAX: Final = 100
TOPIC_GROUPS_MAX: Final = 20
"""Groups shown of one topic, those with most lag."""


class _Peer(NamedTuple):
    """The answers of one node, and this node's knowledge when it asked."""

    status: pb.NodeStatus
    checkpoint: pb.NodeCheckpoint
    log_end: int
    shared_index: LogIndex
    """Index of the shared checkpoint, or 1, which holds no checkpoint."""
    digest: str
    """Digest there; empty: unknown."""


class PageData:
    """Answers for the status page of one node; see the module."""

    def __init__(
        self,
        view: NodeState,
        host: Host,
        telemetry: Telemetry,
        timers: TimerLookup,
        mono_ms: Callable[[], MonoMs],
        channel: Callable[[str], grpc.aio.Channel],
    ) -> None:
        """`channel` returns the channel to another node, by its name."""
        self._view, self._host, self._telemetry = view, host, telemetry
        self._timers, self._mono_ms = timers, mono_ms
        self._histogram = DueHistogram(host)
        self._due = Measurement(
            self._histogram.measure,
            mono_ms,
            every_ms=COUNT_EVERY_MS,
            cost_ms=lambda due, took_ms: due.cpu_ms,
        )
        self._lags = Measurement(
            partial(worst_lags, host, view.late),
            mono_ms,
            every_ms=COUNT_EVERY_MS,
            cost_ms=lambda lags, took_ms: took_ms,
        )
        self._peers = {
            name: Measurement(partial(self._ask, name), mono_ms, every_ms=PEER_EVERY_MS)
            for name in view.peers()
        }
        self._leader = LeaderFigures(self._other_leader, channel, mono_ms)

    async def overview(self) -> dict[str, Any]:
        """Return the state of the cluster as this node knows it; see page_routes.py."""
        view = self._view
        reads = (peer.read(PART_WAIT_S) for peer in self._peers.values())
        due, found, answers = await asyncio.gather(
            self._due.read(PART_WAIT_S), self._fetch_figures(), asyncio.gather(*reads)
        )
        epoch, leader, controller = view.leadership()
        shared = view.shared_checkpoint(offsets=False)
        index, digest = _comparison_point(shared)
        mine = _Peer(view.node_status(), view.node_checkpoint(index), view.log_end, index, digest)
        nodes = [_node(mine)]
        for (name, (address, _)), answer in zip(view.peers().items(), answers, strict=True):
            nodes.append(_node(answer or _silent(name, address)))
        return {
            "cluster_id": view.cluster_id,
            "viewed": view.name,
            "epoch": epoch,
            "leader": leader,
            "controller": controller,
            "clock_ms": mine.status.clock_ms,
            "nodes": sorted(nodes, key=lambda node: str(node["name"])),
            "shared": None if shared is None else _shared_checkpoint(shared),
            "figures_of": view.name if found.figures is None else found.leader,
            "figures_error": found.why,
            **(self._own_figures() if found.figures is None else found.figures),
            "pending": self._pending_figures(due),
            "changes": [
                {
                    "epoch": each.epoch,
                    "leader": view.name_of(each.leader),
                    "time_ms": each.time_ms,
                    "reason": each.reason,
                    "earlier": each.earlier,
                }
                for each in view.history.newest_first()
            ],
        }

    async def leader_figures(self) -> Figures | None:
        """Return the figures that other nodes show of this one. None: it does not lead."""
        lags = await self._lags.read(PART_WAIT_S)
        return None if self._host.leader is None else self._own_figures(lags)

    async def topics(
        self, *, prefix: str, after: str, size: str, shown: TopicFilter | None
    ) -> dict[str, Any]:
        """Return a page of topics by name; `size`: decimal number, "" for TOPICS_PAGE.

        `shown`: only these topics, without their count; None: all.

        Raises:
            InvalidRequestError: `size` is not a number of 1 to TOPICS_PAGE_MAX.
        """
        limit = f"must be a number of 1 to {TOPICS_PAGE_MAX}"
        if size and not (size.isascii() and size.isdecimal() and len(size) <= 4):
            raise InvalidRequestError("size", size[:20], limit)
        rows = int(size or TOPICS_PAGE)
        if not 1 <= rows <= TOPICS_PAGE_MAX:
            raise InvalidRequestError("size", rows, limit)
        found = await self._view.topics(after, rows, prefix, shown)
        leads = self._host.leader is not None
        return {
            "topics": [_topic(topic, leads=leads) for topic in found.topics],
            "count": found.count if shown is None else None,
            "next_after": found.next_after,
        }

    async def timer(
        self, *, timer_id: str, topic: str, key: str, context: HttpContext
    ) -> dict[str, Any]:
        """Return a timer, by id or by topic and key, and its story; see TimerLookup.

        Raises:
            InvalidRequestError, ProblemError.
        """
        return await self._timers.timer(timer_id, topic, key, context)

    async def close(self) -> None:
        """End all work."""
        await self._due.stop()
        await self._lags.stop()
        await self._leader.stop()
        for peer in self._peers.values():
            await peer.stop()
        self._histogram.close()

    # ---- parts

    async def _ask(self, name: str) -> _Peer:
        """Return a node's answers; for an unreachable node: with the reason."""
        address, stub = self._view.peers()[name]  # a renewal of the certificate replaces the stub
        index, digest = _comparison_point(self._view.shared_checkpoint(offsets=False))
        log_end = self._view.log_end

        async def checkpoint() -> pb.NodeCheckpoint:
            return await checkpoint_of(name, address, stub, at_index=index)

        status, there = await asyncio.gather(status_of(name, address, stub), checkpoint())
        return _Peer(status, there, log_end, index, digest)

    def _other_leader(self) -> str:
        """Return the name of another node that leads; empty: none is known."""
        _, leader, _ = self._view.leadership()
        return leader if leader in self._peers else ""

    async def _fetch_figures(self) -> LeaderAnswer:
        """Return the figures of this node if it leads, otherwise of the leader."""
        figures = None if self._host.leader is None else await self.leader_figures()
        if figures is not None:
            return LeaderAnswer(self._view.name, figures, "")
        return await self._leader.read(PART_WAIT_S)

    def _own_figures(self, lags: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return this node's figures. Without `lags`: those of a node that does not lead."""
        return {
            "counters": self._counters(leads=self._host.leader is not None),
            "lateness": {
                "bounds_ms": BOUNDS_MS,
                "fired": self._telemetry.lateness.counts(),
                "delivered": self._telemetry.handed_out_lateness.counts(),
            },
            "lags": lags,
            "lags_age_ms": self._lags.age_ms,
        }

    def _counters(self, *, leads: bool) -> dict[str, Any]:
        """Return counters that only rise while the same node serves the same epoch."""
        telemetry, counts = self._telemetry, self._host.engine.machine.counts
        return {
            "at_ms": self._mono_ms(),
            "scheduled": counts.scheduled,
            "fired": counts.fired,
            "cancelled": counts.cancelled,
            "delivered": _value(telemetry.delivered) if leads else None,
            "redelivered": _value(telemetry.redelivered) if leads else None,
            "acked": _value(telemetry.acked) if leads else None,
        }

    def _pending_figures(self, due: DueCounts | None) -> dict[str, Any]:
        machine = self._host.engine.machine
        return {
            "total": machine.counts.pending,
            "ready": self._host.totals.ready,
            "topics": len(machine.topics),
            "buckets_s": BUCKETS_S,
            "counts": due and due.counts,
            "exact": due and due.exact,
            "held": due and due.held,
            "age_ms": self._due.age_ms,
        }


def _value(counter: Counter) -> int:
    [metric] = counter.collect()
    return int(metric.samples[0].value)


def _silent(name: str, address: str) -> _Peer:
    """Return the part of a node that has not answered since the first viewer came."""
    status = pb.NodeStatus(name=name, address=address, role="asked", error="no answer yet")
    return _Peer(status, pb.NodeCheckpoint(node=name), 0, LogIndex(0), "")


def _comparison_point(shared: pb.SharedCheckpoint | None) -> tuple[LogIndex, str]:
    """Return index and digest for a comparison of nodes. Index 1 holds none, and lists no topic."""
    return (LogIndex(1), "") if shared is None else (LogIndex(shared.index), shared.digest)


def _digest_state(answers: _Peer) -> str:
    """Return equal, differs, not_applied or unknown: the node's digest at the shared checkpoint."""
    there = answers.checkpoint
    if answers.digest and there.digest:
        return "equal" if there.digest == answers.digest else "differs"
    return "not_applied" if there.applied_index < answers.shared_index else "unknown"


def _node(answers: _Peer) -> dict[str, Any]:
    """Return a node. Figures of a node that does not answer are absent."""
    node, checkpoint = answers.status, answers.checkpoint
    known: dict[str, Any] = {
        "name": node.name,
        "address": node.address,
        "http_address": node.http_address,
        "reachable": node.reachable,
        "error": node.error,
        "role": node.role,
    }
    if not node.reachable:
        return known
    names = (
        *("serving", "epoch", "log_end", "commit_index", "applied_index", "unsure", "damage"),
        *("rss_bytes", "disk_bytes", "disk_free_bytes", "disk_reserve_bytes", "disk_low"),
        *("uptime_ms", "withholds_votes", "version", "feature_level", "clock_ms"),
        "scrubbed_at_ms",
    )
    known |= {name: getattr(node, name) for name in names} | {"warnings": [*node.warnings]}
    known["lag_entries"] = max(0, answers.log_end - node.log_end)
    if checkpoint.reachable:
        known["checkpoint"] = {
            "index": checkpoint.checkpoint_index,
            "applied_index": checkpoint.applied_index,
            "last_read_time_ms": checkpoint.last_read_time_ms,
            "age_ms": checkpoint.age_ms,
            "manifest_index": checkpoint.manifest_index,
            "runs": checkpoint.runs,
            "digest": _digest_state(answers),
            "digest_index": answers.shared_index,
        }
    return known


def _shared_checkpoint(shared: pb.SharedCheckpoint) -> Mapping[str, Any]:
    names = ("epoch", "index", "last_read_time_ms", "digest", "published_at_ms", "age_ms")
    return {name: getattr(shared, name) for name in names}


def _topic(topic: pb.TopicStatus, *, leads: bool) -> dict[str, Any]:
    """Return a topic. Only the leader knows lag and leases; elsewhere they are None."""
    names = ("name", "pending", "scheduled", "fired", "cancelled", "dropped", "ready", "expired")
    worst = sorted(topic.groups, key=lambda each: -each.unacked_lag_ms)
    return {name: getattr(topic, name) for name in names} | {
        "paused": topic.paused,
        "held": topic.held,
        "lag_ms": topic.lag_ms if leads else None,
        "group_count": len(topic.groups),
        "groups": [
            {
                "name": group.name,
                "type": group.type,
                "unacked": group.unacked,
                "leased": group.leased if leads else None,
                "consumers": group.consumers if leads else None,
                "undelivered_ms": group.undelivered_lag_ms if leads else None,
                "unacked_ms": group.unacked_lag_ms if leads else None,
            }
            for group in worst[:TOPIC_GROUPS_MAX]
        ],
    }
