"""Planted bugs in time to live and retention (see tests/chaos/planted/planted.py)."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import Planting, patch
from timer.leader.groups import expiry, group_batch
from timer.leader.groups.expiry import Expiry
from timer.ready.queue import Queue
from timer.ready.topic import Topic
from timer.state.ledger import Ledger

_prefix = expiry.expired_prefix


@contextlib.contextmanager
def _from_the_schedule() -> Iterator[None]:
    """Count the time to live from the time of the schedule."""
    scheduled_at: dict[int, int] = {}
    schedule = Ledger.schedule

    def counted(self: Ledger, rows: Any, *, pending: bool) -> None:
        for seq in rows["seq"].tolist():
            scheduled_at.setdefault(seq, self._state.applied_time_ms)
        schedule(self, rows, pending=pending)

    def prefix(queue: Queue, outlived_ms: int, limit: int) -> tuple[int, int | None]:
        offset, due_ms = _prefix(queue, outlived_ms, limit)
        for block in queue.blocks:
            if block.page is not None and block.first <= offset < min(block.end, limit):
                seq = int(block.page.rows["seq"][offset - block.first])
                begun_ms = scheduled_at.get(seq, due_ms or outlived_ms)
                return (offset + 1, None) if begun_ms <= outlived_ms else (offset, begun_ms)
        return offset, due_ms

    with (
        mock.patch.object(Ledger, "schedule", counted),
        mock.patch.object(expiry, "expired_prefix", prefix),
    ):
        yield


def _prefix_and_one(queue: Queue, outlived_ms: int, limit: int) -> tuple[int, int | None]:
    """Expire the first message that is still alive, too."""
    offset, due_ms = _prefix(queue, outlived_ms, limit)
    some = queue.begin < offset < min(queue.end, limit)
    return offset + some, due_ms


@contextlib.contextmanager
def _later_ones_only() -> Iterator[None]:
    """Let a new leader look for expired messages only when a timer fires."""
    with (
        mock.patch.object(Expiry, "check_all", return_value=None),
        mock.patch.object(Expiry, "outlived_ms", return_value=None),
    ):
        yield


def _trim(self: Topic) -> None:
    """Delete messages at once when all groups have acked them, without regard to retention."""
    if self.groups:
        self.queue.drop_below(self.unacked_from)


_answer = group_batch.answer_acks


def _answer_what_was_asked(acks: Any, new: Any) -> None:
    """Answer ACKED to an ack that came after the expiry."""
    _answer(acks, new | True)


def _busy_with_ends_alone(self: Expiry, topic: Topic) -> bool:
    """Look only at the expiries in flight, not at policies or deletions in flight."""
    return topic.topic_id in self._in_flight


_mutation: Final = Planting(TimerWorld, expiry=True, mischief=())

MUTATIONS: Final = (
    _mutation(
        "ttl_from_the_schedule",
        "a message's time to live counts from the schedule request",
        {"expiry"},
        20,
        "a delay, and a time to live",
        _from_the_schedule,
    ),
    _mutation(
        "one_too_many_expires",
        "the first message that is still alive expires with the messages before it",
        {"expiry"},
        20,
        "several messages, some of them expired",
        patch(expiry, "expired_prefix", _prefix_and_one),
    ),
    _mutation(
        "successor_hands_out_what_is_over",
        "a new leader looks for expired messages only when a timer fires",
        {"expiry"},
        20,
        "a failover, or a change of policy, while some messages are not acked",
        _later_ones_only,
        faults=("kill", "handover"),
        fault_gap_ms=1_500,
    ),
    _mutation(
        "acks_let_go_of_what_is_retained",
        "messages that all groups have acked are deleted at once, without regard to retention",
        {"retention"},
        20,
        "a retention",
        patch(Topic, "trim", _trim),
    ),
    _mutation(
        "late_ack_is_told_to_count",
        "an ack that is committed after the expiry of its message is answered ACKED",
        {"expiry"},
        60,
        "an ack that is in flight when its message expires",
        patch(group_batch, "answer_acks", _answer_what_was_asked),
        proposals_per_s=16,
        sync_us=8_000,
        faults=("slow_disk",),
    ),
    _mutation(
        "handed_out_by_what_may_be_lost",
        "messages are delivered by a longer time to live before its policy is committed",
        {"expiry"},
        60,
        "expired messages while a policy, or a deletion of a topic, is in flight",
        patch(Expiry, "is_busy", _busy_with_ends_alone),
        deletions=True,
        proposals_per_s=16,
        sync_us=60_000,
        faults=("slow_disk",),
        fault_gap_ms=800,
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
