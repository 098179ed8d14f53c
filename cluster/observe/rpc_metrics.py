"""RPCs by method and result, streams, and connections that came to nothing.

The event loop alone records and reads these, so they need no lock. A record takes about a
microsecond. Methods and codes are names of this program, never text from a caller.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
_LABELS: Final = (*map(str, BOUNDS_S), "+Inf")


class RpcMetrics(Collector):
    """The RPCs of one node; see the module."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Make all metrics of the module in a registry."""

        def counter(name: str, text: str) -> PrometheusCounter:
            return PrometheusCounter(f"timer_{name}", text, registry=registry)

        self.denied = counter("denied", "RPCs that a port or the rules of access denied")
        self.handshakes_failed = counter(
            "http_tls_handshakes_failed", "TLS handshakes that failed on the HTTP port"
        )
        text = "Connections closed: with too much memory, unread answers, or unused at a full port"
        self.connections_ended = counter("connections_ended", text)
        text = "RPCs that this node sent on to the leader for a client"
        self.relayed = counter("relayed", text)
        self._counts: dict[tuple[str, str, str], list[int]] = {}
        """(method, code, relayed) -> number of durations at most each bound, and above all."""
        self._sums: dict[tuple[str, str, str], float] = {}
        """The same key -> sum of the durations, in seconds."""
        self._open: Counter[str] = Counter()
        self._ended: Counter[tuple[str, str, str]] = Counter()
        registry.register(self)

    def on_answer(self, method: str, code: str, relayed: str, seconds: float) -> None:
        """Count an answered request.

        `code`: name of its gRPC status, such as OK. `relayed`: "yes" if this node sent it on to the
        leader, otherwise "no".
        """
        key = method, code, relayed
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * len(_LABELS)
            self._sums[key] = 0.0
        counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sums[key] += seconds

    def on_stream(self, method: str) -> None:
        """Count an open stream."""
        self._open[method] += 1

    def on_stream_end(self, method: str, code: str, relayed: str) -> None:
        """Count the end of a stream; see `on_answer`."""
        self._open[method] -= 1
        self._ended[method, code, relayed] += 1

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics in Prometheus's form."""
        labels = ["method", "code", "relayed"]
        text = "Time from a request to its answer, within this node"
        durations = HistogramMetricFamily("timer_rpc_seconds", text, labels=labels)
        for (method, code, relayed), counts in self._counts.items():
            total = self._sums[method, code, relayed]
            buckets = [*zip(_LABELS, accumulate(counts), strict=True)]
            named = [method, code, relayed]
            durations.add_metric(named, buckets=buckets, sum_value=total)
        yield durations
        streams = GaugeMetricFamily("timer_streams", "Open streams of clients", labels=["method"])
        for method, number in self._open.items():
            streams.add_metric([method], number)
        yield streams
        ended = CounterMetricFamily("timer_streams_ended", "Streams that ended", labels=labels)
        for (method, code, relayed), number in self._ended.items():
            ended.add_metric([method, code, relayed], number)
        yield ended
