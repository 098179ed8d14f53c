"""Planted bugs in quotas (tests/chaos/planted/planted.py says what they are for)."""

from typing import Any, Final

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import ANY_WORLD, Planting, patch
from timer.leader.intake.quotas import Quotas
from timer.state.ledger import Ledger


def _count_nothing(self: Quotas, charges: Any, done: Any) -> Any:
    """What was taken and is not applied is not there."""
    del self, charges
    return done


_cancel = Ledger.cancel


def _cancelled_and_heavy(self: Ledger, rows: Any, *, were_pending: bool = True) -> None:
    """What is cancelled weighs on."""
    weights = [topic.pending_bytes for topic in self._state.topics.values()]
    _cancel(self, rows, were_pending=were_pending)
    for topic, weight in zip(self._state.topics.values(), weights, strict=True):
        topic.pending_bytes = weight


_mutation: Final = Planting(TimerWorld, quotas=True, mischief=())

QUOTA_MUTATIONS: Final = (
    _mutation(
        "quota_counts_what_is_applied",
        "a quota is judged by the state alone, not by what is on its way to it",
        {"quota"},
        20,
        "several requests on their way where a topic is nearly full",
        patch(Quotas, "charge", _count_nothing),
        faults=("slow_disk",),
        nodes=3,
        proposals_per_s=16,
        sync_us=8_000,
        fault_gap_ms=1_500,
    ),
    _mutation(
        "cancelled_payloads_weigh_on",
        "the bytes of what is cancelled or replaced still count",
        {"quota"},
        20,
        f"{ANY_WORLD}: a timer that is cancelled",
        patch(Ledger, "cancel", _cancelled_and_heavy),
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
