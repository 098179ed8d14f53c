"""The metrics of a node, for Prometheus.

    levels       read at each scrape from one snapshot of the state: they agree with each other
                 (scheduled = pending + fired + cancelled + dropped), and cost nothing else
    flows        counters that a batch moves once
    histograms   filled by a batch at once, from a column

Metrics have Prometheus's units, seconds and bytes; the code uses milliseconds. Every node has its
own registry; nothing is global.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from cluster.observe.busiest_topics import COUNTERS, GAUGES, TopicFigures
from cluster.observe.lateness import BOUNDS_MS
from cluster.observe.rpc_metrics import RpcMetrics
from timer.entries.entry_frame import EntryKind

ROLES: Final = ("leader", "follower", "candidate", "learner", "stopping")

_LATENESS_S: Final = tuple(bound_ms / 1000 for bound_ms in BOUNDS_MS)
_LATENCY_S: Final = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
_HOLD_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_ROWS: Final = tuple(float(4**power) for power in range(9))  # 1 .. 65,536


WORST_MAX: Final = 100
"""Groups, topics and quotas with a label of their own: those with the greatest figures. Ten
thousand series would cost more than they are worth."""
NamedFigures: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]
"""Values of the labels, and figures: ages in milliseconds, or numbers."""


class NodeRegistry(CollectorRegistry):
    """A registry without the times at which counters and histograms were made.

    They double the series of a scrape, and the start of the process says the same.
    """

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        for family in super().collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family


class BatchHistogram(Collector):
    """A histogram that takes a column in one call. Any thread may feed it."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], *, scale: float = 1) -> None:
        """`bounds`: ascending, in the metric's unit. `scale`: converts observed values to it."""
        self._name, self._text, self._scale = name, text, scale
        self._labels = [str(bound) for bound in bounds] + ["+Inf"]
        # Rounded: 30 ms must be in the bucket "<= 0.03 s".
        self._bounds = np.round(np.asarray(bounds, np.float64) / scale, 9)
        self._limits: list[float] = self._bounds.tolist()
        """The bounds as a list: for single values, of which one comes every few milliseconds."""
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one value."""
        at = bisect_left(self._limits, value)
        with self._lock:
            self._counts[at] += 1
            self._sum += value

    def observe_column(self, values: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> None:
        """Count all values of a column, (n,)."""
        if not len(values):
            return
        at = np.searchsorted(self._bounds, values)
        counts = np.bincount(at, minlength=len(self._counts))
        total = float(values.sum(dtype=np.float64))
        with self._lock:
            self._counts += counts
            self._sum += total

    def counts(self) -> list[int]:
        """Return the counts: one for each bound, not those before it, and one above all bounds."""
        with self._lock:
            counts: list[int] = self._counts.tolist()
        return counts

    def collect(self) -> Iterable[Metric]:
        """Yield the histogram in Prometheus's form: each bucket includes those before it."""
        with self._lock:
            counts, total = np.cumsum(self._counts).tolist(), self._sum * self._scale
        buckets = list(zip(self._labels, counts, strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """One consistent snapshot of a node; all fields have values also while the node starts."""

    role: str = "follower"
    """One of ROLES."""
    current: bool = True
    """The node has applied what was committed before its start. False: the metrics of the state
    are left out, since their values are of an earlier time."""
    serving: bool = False
    epoch: int = 0
    raft_term: int = 0
    controller_reached: bool = False
    feature_level: int = 0
    voters: int = 0
    log_end: int = 0
    commit_index: int = 0
    applied_index: int = 0
    scheduled: int = 0
    fired: int = 0
    cancelled: int = 0
    dropped: int = 0
    expired: int = 0
    """Fired messages that expired before every group had acked them."""
    pending: int = 0
    producers: int = 0
    """Registered producers."""
    request_ids: int = 0
    request_id_timers: int = 0
    """Timers in the remembered answers to requests with an id."""
    held: int = 0
    ready: int = 0
    """Sum over topics: unacked messages of the group that has the most."""
    leased: int = 0
    consumers: int = 0
    inflight_bytes: int = 0
    """Bytes of the leader's entries that are not on a majority yet."""
    memtable_bytes: int = 0
    read_time_lag_ms: int = 0
    """How long the earliest pending timer has been overdue on the cluster's clock; 0: none is."""
    series_lag_ms: int = 0
    """Age of the oldest missed time that a series with FIRE_ALL makes up for; 0: there is none."""
    undelivered_lag_ms: int = 0
    """Age of the oldest fired message that waits for a consumer, in any group; 0: none waits."""
    unacked_lag_ms: int = 0
    """Age of the oldest fired message that is not acked, in any group; 0: there is none."""
    lagging_groups: tuple[NamedFigures, ...] = ()
    """((topic, group), (undelivered, unacked)) of the groups with most lag."""
    late_topics: tuple[NamedFigures, ...] = ()
    """((topic,), (age of its oldest overdue timer,)) of the topics with most lag."""
    fullest_quotas: tuple[NamedFigures, ...] = ()
    """((topic, field), (used, limit)) of the quotas with the greatest share used."""
    groups: tuple[NamedFigures, ...] = ()
    """((topic, group), (consumers, leased)) of the groups with most lag or most consumers."""
    topics: Sequence[TopicFigures] = ()
    """The busiest topics, and all others together."""
    connections: Mapping[str, int] = field(default_factory=dict)
    """Setting of the port -> open connections."""
    connections_limits: Mapping[str, int] = field(default_factory=dict)
    """Setting of a gRPC port of clients -> connections that it takes, at most."""
    clock_spread_ms: int = 0
    """Greatest difference between two voters' clocks, as the leader sees it."""
    clock_jumped_ms: int = 0
    """How far the cluster's clock has jumped ahead since the start, while this node led."""
    clock_error_ms: int = 0
    """How far the leader's cluster clock is ahead of the median of the voters' clocks."""
    clock_offsets: tuple[NamedFigures, ...] = ()
    """((voter,), (how far its clock is ahead of the median,)), as the leader sees it."""
    disk_free_bytes: int = 0
    disk_reserve_bytes: int = 0
    disk_low: bool = False
    """Free space is below the reserve."""
    refusing: bool = False
    """This leader rejects new timers because disks have too little free space."""
    unplanned_series: int = 0
    """Series whose cron expression or time zone this leader does not know."""
    scrubbed_bytes: int = 0
    scrub_passes: int = 0
    damaged: bool = False
    """The node has found a damaged file, and is not healed yet."""
    last_repair_ms: int = 0
    """When the node last began to fetch state and log again; 0: never."""
    concerns: int = 0
    """States of this node that an operator has to end."""
    backup_completed_ms: int = 0
    """When the last complete backup of this node ended, since its start; 0: none did."""
    backup_log_index: int = 0
    """The last log entry that the store of a continuous backup has; 0: unknown."""
    backup_log_ms: int = 0
    """When that store had got further, or had the whole log; 0: never since this node's start."""


_GAUGES: Final = {
    "epoch": "Current epoch of this node",
    "raft_term": "Term of Raft in the control plane",
    "controller_reached": "1: this node is the controller, or has a link to it",
    "feature_level": "Feature level of the last epoch in this node's log",
    "voters": "Voters in this node's log",
    "log_end": "Index of the last entry of this node's log",
    "commit_index": "Index of the last entry that a majority has",
    "applied_index": "Index of the last entry that this node has applied",
    "backup_log_index": "Last log entry in the store of a continuous backup that asks this node",
    "pending": "Timers scheduled, and not fired, cancelled or dropped",
    "producers": "Registered producers",
    "request_ids": "Ids of requests that are remembered, of at most 524,288",
    "request_id_timers": "Timers of the requests whose ids are remembered, of at most 4,194,304",
    "held": "Pending timers that are overdue because their topic is paused",
    "ready": "Unacked messages: of each topic those of the group that has the most",
    "leased": "Messages that consumers hold under a lease",
    "consumers": "Open consumer streams",
    "inflight_bytes": "Bytes of the leader's log entries that are not on a majority yet",
    "memtable_bytes": "Bytes of timers added since the last flush",
    "disk_free_bytes": "Free space on the disk of this node's data",
    "disk_reserve_bytes": "Free space below which new work is rejected: storage.reserve_bytes",
    "disk_low": "1: free space is below the reserve",
    "damaged": "1: the node has found a damaged file, and is not healed yet",
    "concerns": "States of this node that an operator has to end; its status names them",
    "unplanned_series": "Series whose cron expression or time zone this leader does not know",
    "refusing": "1: this leader rejects new timers because disks have too little free space",
}
_LAGS: Final = {
    "undelivered": "Age of the oldest fired message that waits for a consumer, over all groups",
    "unacked": "Age of the oldest fired message that is not acked, over all groups",
}
_SECONDS: Final = {
    "last_repair": "Unix time at which this node last began to fetch state and log; 0: never",
    "backup_completed": "Unix time of the last complete backup since this node's start; 0: none",
    "backup_log": "Unix time at which a continuous backup last stored entries; 0: none did",
    "read_time_lag": "How long the oldest overdue timer has been due; 0: none is overdue",
    "series_lag": "Age of the oldest missed time that a series with misfire=fire_all makes up for",
    **{f"{kind}_lag": text for kind, text in _LAGS.items()},
    "clock_spread": "Greatest difference between the clocks of two voters",
    "clock_error": "How far the cluster's clock is ahead of the median of the voters' clocks",
}
_COUNTERS: Final = {
    "scheduled": "Timers scheduled",
    "fired": "Timers fired",
    "cancelled": "Timers cancelled",
    "dropped": "Timers dropped because their topic was deleted, or by a resume",
    "expired": "Messages that expired before all groups had acked them",
    "scrubbed_bytes": "Bytes that the scrub has read since the start",
    "scrub_passes": "Complete passes of the scrub since the start",
}


_STATE: Final = frozenset(
    (
        *("scheduled", "fired", "cancelled", "dropped", "expired", "pending", "producers"),
        *("request_ids", "request_id_timers", "held", "ready"),
    )
)
"""Metrics of the replicated state."""


_GROUPS: Final = {
    "consumers": "Open consumer streams of a group",
    "leased": "Messages of a group that its consumers hold under a lease",
}


def _topics(figures: Sequence[TopicFigures]) -> Iterator[Metric]:
    for at, name in enumerate(COUNTERS):
        text = f"{_COUNTERS[name]}; the busiest topics"
        counter = CounterMetricFamily(f"timer_topic_{name}", text, labels=["topic"])
        for each in figures:
            counter.add_metric([each.name], each.counters[at])
        yield counter
    for at, name in enumerate(GAUGES):
        text = f"{_GAUGES[name]}; the busiest topics"
        gauge = GaugeMetricFamily(f"timer_topic_{name}", text, labels=["topic"])
        for each in figures:
            gauge.add_metric([each.name], each.gauges[at])
        yield gauge


def _clocks(levels: Levels) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "timer_clock_jumped_seconds",
        "Time by which the cluster's clock has jumped ahead",
        value=levels.clock_jumped_ms / 1000,
    )
    yield _gauge_of(
        "timer_clock_offset_seconds",
        "How far a voter's clock is ahead of the median of the voters' clocks",
        ["voter"],
        levels.clock_offsets,
        0,
        unit=1_000,
    )


def _gauge_of(
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[NamedFigures],
    at: int,
    *,
    unit: int = 1,
) -> GaugeMetricFamily:
    """Return a gauge of the figures at one place of each row; `unit`: figures in one of its own."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for names, figures in rows:
        family.add_metric(names, figures[at] / unit)
    return family


class _LevelsCollector(Collector):
    """Reads the levels at each scrape."""

    def __init__(self, read: Callable[[], Levels]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics' names without values: the node may not exist yet."""
        return self._metrics(Levels())

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of one snapshot of the node."""
        return self._metrics(self._read())

    @staticmethod
    def _metrics(levels: Levels) -> Iterator[Metric]:
        left_out = frozenset[str]() if levels.current else _STATE
        for name, text in _COUNTERS.items():
            if name not in left_out:
                yield CounterMetricFamily(f"timer_{name}", text, value=getattr(levels, name))
        for name, text in _GAUGES.items():
            if name not in left_out:
                yield GaugeMetricFamily(f"timer_{name}", text, value=getattr(levels, name))
        role = StateSetMetricFamily("timer_role", "Current role of this node")
        role.add_metric([], {each: each == levels.role for each in ROLES})
        yield role
        yield GaugeMetricFamily(
            "timer_serving", "1: this node leads and holds its lease", value=int(levels.serving)
        )
        for name, text in _SECONDS.items():
            value = getattr(levels, f"{name}_ms") / 1000
            yield GaugeMetricFamily(f"timer_{name}_seconds", text, value=value)
        yield _gauge_of(
            "timer_topic_lag_seconds",
            f"Age of the oldest overdue timer of a topic; the {WORST_MAX} topics that lag most",
            ["topic"],
            levels.late_topics,
            0,
            unit=1_000,
        )
        for at, (kind, text) in enumerate(_LAGS.items()):
            worst = (
                f"{text.removesuffix(', over all groups')}; the {WORST_MAX} groups that lag most"
            )
            name = f"timer_group_{kind}_lag_seconds"
            labels, rows = ["topic", "group"], levels.lagging_groups
            yield _gauge_of(name, worst, labels, rows, at, unit=1_000)
        for at, what in enumerate(("used", "limit")):
            text = f"Quotas of topics, {what}; the {WORST_MAX} most used"
            name = f"timer_quota_{what}"
            yield _gauge_of(name, text, ["topic", "quota"], levels.fullest_quotas, at)
        for at, (kind, text) in enumerate(_GROUPS.items()):
            yield _gauge_of(f"timer_group_{kind}", text, ["topic", "group"], levels.groups, at)
        yield from _topics(levels.topics)
        for suffix, text, by_port in (
            ("", "Open connections by port, with unfinished handshakes", levels.connections),
            ("_limit", "Connections that a port takes, at most", levels.connections_limits),
        ):
            family = GaugeMetricFamily(f"timer_connections{suffix}", text, labels=["port"])
            for port, number in by_port.items():
                family.add_metric([port], number)
            yield family
        yield from _clocks(levels)


class ExpiryDates(Collector):
    """The dates at which certificates or tokens in use expire."""

    def __init__(self, name: str, text: str, label: str, registry: CollectorRegistry) -> None:
        """Name, text and label of the metric, which is made in a registry."""
        self._name, self._text, self._label = name, text, label
        self.not_after_s: Callable[[], Mapping[str, float]] = dict
        """Returns value of the label -> Unix time; without TLS there are none."""
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the dates."""
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for value, end_s in self.not_after_s().items():
            family.add_metric([value], end_s)
        yield family


_CERTIFICATES: Final = (
    "timer_tls_not_after_seconds",
    "Unix time at which the certificate expires; of authorities the earliest",
    "which",
)
_TOKENS: Final = (
    "timer_token_not_after_seconds",
    "Unix time at which the bearer token expires; of two with one name the later",
    "token",
)


class Telemetry:
    """The metrics of one node. Frequent events are observed once per batch."""

    def __init__(self, *, node: str, version: str, read_levels: Callable[[], Levels]) -> None:
        """`read_levels` is called at each rendering, on the event loop."""
        self.registry = NodeRegistry()
        self.rpcs = RpcMetrics(self.registry)
        self.delivered = self._counter(
            "delivered", "Messages delivered to consumers, including redeliveries"
        )
        self.redelivered = self._counter("redelivered", "Messages delivered again")
        self.acked = self._counter("acked", "Messages acked")
        self.leases_ended = self._counter("leases_ended", "Messages whose lease ended unacked")
        self.nacked = self._counter("nacked", "Nacked messages")
        self.moved = self._counter("moved", "Messages that became dead letters or were redriven")
        self.promotions = self._counter("promotions", "How often this node became the leader")
        self.errors = Counter(
            "timer_grpc_errors",
            "RPCs that failed, by method and reason",
            ["method", "reason"],
            registry=self.registry,
        )
        self.lateness = self._histogram(
            "lateness_seconds",
            "Time from the effective due time to the firing",
            _LATENESS_S,
            scale=0.001,
        )
        text = "Time from the effective due time to the first delivery to a group"
        self.handed_out_lateness = self._histogram(
            "handed_out_lateness_seconds", text, _LATENESS_S, scale=0.001
        )
        commits = Histogram(
            "timer_commit_seconds",
            "Time from append to commit, per log entry, by kind of entry",
            ["kind"],
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self._commit_seconds = {kind: commits.labels(kind.name.lower()) for kind in EntryKind}
        self._step_seconds = Histogram(
            "timer_loop_step_seconds",
            "Calls that held the event loop for a millisecond or longer, by function",
            ["step"],
            buckets=_HOLD_S,
            registry=self.registry,
        )
        text = "Timers per log entry that schedules timers"
        self.append_rows = self._histogram("append_rows", text, _ROWS)
        self.fsync_seconds = self._histogram(
            "fsync_seconds", "Duration of each fdatasync of the log", _LATENCY_S
        )
        self.outbox_bytes = self._gauge(
            "outbox_bytes", "Bytes of deliveries that consumers have not read yet"
        )
        self.memory_limit_bytes = self._gauge(
            "memory_limit_bytes", "Limit of memory: limits.memory_bytes_max"
        )
        self.certificates = ExpiryDates(*_CERTIFICATES, self.registry)
        self.tokens = ExpiryDates(*_TOKENS, self.registry)
        self.insecure = self._gauge("insecure", "1: ports beyond loopback are open without TLS")
        self.memory_high = self._gauge(
            "memory_high", "1: new work is rejected because memory is above the limit"
        )
        self.requests_waiting = self._gauge(
            "requests_waiting", "Requests that wait for their turn, as timers have fired late"
        )
        self.promotion_seconds = self._histogram(
            "promotion_seconds", "Time from appointment to serving", _LATENCY_S
        )
        self.loop_held_seconds = self._histogram(
            "loop_held_seconds", "How long a step held the event loop", _HOLD_S
        )
        self.registry.register(_LevelsCollector(read_levels))
        build = Info(
            "timer_build", "Name of this node and version of its program", registry=self.registry
        )
        build.info({"node": node, "version": version})
        ProcessCollector(registry=self.registry)  # resident memory, CPU, open files, start time

    def observe_step(self, name: str, seconds: float) -> None:
        """Count a call that held the event loop."""
        self._step_seconds.labels(name).observe(seconds)

    def observe_commit(self, kind: EntryKind, seconds: float) -> None:
        """Count an entry that this leader appended and a majority has."""
        self._commit_seconds[kind].observe(seconds)

    def error(self, method: str, reason: str) -> None:
        """Count a failed RPC. `method` is a name of this program, never text from a caller."""
        self.errors.labels(method, reason).inc()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"timer_{name}", text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"timer_{name}", text, registry=self.registry)

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], *, scale: float = 1
    ) -> BatchHistogram:
        histogram = BatchHistogram(f"timer_{name}", text, bounds, scale=scale)
        self.registry.register(histogram)
        return histogram
