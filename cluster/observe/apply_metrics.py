"""Metrics of a leader's own steps: applied entries, deliveries, promotions.

A follower applies the same entries, and counts only the messages of deleted topics.
"""

import time

from cluster.observe.metrics import Telemetry
from cluster.observe.topic_view import TopicView
from cluster.state.host import Host
from timer.entries.entry_frame import Entry
from timer.entries.payloads import GroupOp, Nack, Op
from timer.leader.groups.group_delivery import Delivery
from timer.model.timer_errors import EngineError
from timer.model.units import Epoch
from timer.state.apply_results import (
    AcksApplied,
    Applied,
    DeleteTopicApplied,
    FireApplied,
    GroupApplied,
    GroupResult,
    MoveApplied,
    ScheduleApplied,
)


class ApplyMetrics:
    """Counts the results of applied entries and the deliveries of this leader."""

    def __init__(self, telemetry: Telemetry, view: TopicView, host: Host) -> None:
        self._telemetry, self._view, self._host = telemetry, view, host

    def on_applied(self, entry: Entry, applied: Applied) -> None:
        """Count an applied entry; on a follower, only the messages of a deleted topic."""
        if isinstance(applied, DeleteTopicApplied) and applied.topic is not None:
            self._host.totals.on_topic_deleted(applied.topic)
        if self._host.leader is None:
            return
        if isinstance(applied, FireApplied):
            self._telemetry.lateness.observe_column(self._view.on_fired(applied, entry.time_ms))
        elif isinstance(applied, DeleteTopicApplied):
            self._view.on_topic_deleted(applied.op.topic)
        elif isinstance(applied, ScheduleApplied):
            self._telemetry.append_rows.observe(
                sum(
                    len(part.answer.due_ms)
                    for part in applied.parts
                    if not isinstance(part, EngineError)
                )
            )
        elif isinstance(applied, GroupApplied):
            for result in applied.results:
                self._count(result)

    def _count(self, result: GroupResult) -> None:
        telemetry = self._telemetry
        if isinstance(result, AcksApplied):
            nack = isinstance(result.op, Nack)
            (telemetry.nacked if nack else telemetry.acked).inc(int(result.new.sum()))
        elif isinstance(result, MoveApplied):
            telemetry.moved.inc(int(result.new.sum()))
        elif isinstance(result, GroupOp) and result.op is Op.ENDED:
            telemetry.leases_ended.inc(len(result.offsets))

    def on_delivery(self, delivery: Delivery) -> None:
        """Count a batch of messages that is sent to a consumer."""
        self._telemetry.delivered.inc(len(delivery.attempts))
        late_ms = self._view.on_delivery(delivery)
        if len(late_ms) < len(delivery.attempts):
            self._telemetry.redelivered.inc(len(delivery.attempts) - len(late_ms))
        self._telemetry.handed_out_lateness.observe_column(late_ms)


class PromotionMetrics:
    """Counts promotions of this node, and measures the time from appointment to serving."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._appointed = Epoch(0)
        """The highest epoch that this node was appointed for."""
        self._appointed_s = 0.0
        """When this node learned of that appointment, in seconds of `time.perf_counter`."""

    def on_appointed(self, epoch: Epoch) -> None:
        """Record an appointment of this node. The same appointment may come again."""
        if epoch > self._appointed:
            self._appointed, self._appointed_s = epoch, time.perf_counter()

    def on_serves(self, epoch: Epoch) -> None:
        """Count a promotion: this node serves as the leader of `epoch`."""
        self._telemetry.promotions.inc()
        if epoch == self._appointed:
            self._telemetry.promotion_seconds.observe(time.perf_counter() - self._appointed_s)
