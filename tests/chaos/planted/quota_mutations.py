"""Planted bugs in quotas (see tests/chaos/planted/planted.py)."""

from typing import Any, Final

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import ANY_WORLD, Planting, patch
from timer.leader.intake.quotas import Quotas
from timer.state.ledger import Ledger


def _count_nothing(self: Quotas, charges: Any, done: Any) -> Any:
    """Ignore requests that are accepted and not applied yet."""
    del self, charges
    return done


_cancel = Ledger.cancel


def _cancelled_and_heavy(self: Ledger, rows: Any, *, were_pending: bool = True) -> None:
    """Keep the bytes of cancelled timers in the topic's count."""
    weights = [topic.pending_bytes for topic in self._state.topics.values()]
    _cancel(self, rows, were_pending=were_pending)
    for topic, weight in zip(self._state.topics.values(), weights, strict=True):
        topic.pending_bytes = weight


_mutation: Final = Planting(TimerWorld, quotas=True, mischief=())

MUTATIONS: Final = (
    _mutation(
        "quota_counts_what_is_applied",
        "a quota counts only the applied state, not the accepted requests",
        {"quota"},
        20,
        "several requests under way for a topic that is nearly full",
        patch(Quotas, "charge", _count_nothing),
        faults=("slow_disk",),
        nodes=3,
        proposals_per_s=16,
        sync_us=8_000,
        fault_gap_ms=1_500,
    ),
    _mutation(
        "cancelled_payloads_weigh_on",
        "the bytes of cancelled or replaced timers still count",
        {"quota"},
        20,
        f"{ANY_WORLD}: a timer that is cancelled",
        patch(Ledger, "cancel", _cancelled_and_heavy),
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
