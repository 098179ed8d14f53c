"""Planted bugs that make timers fire late (see tests/chaos/planted/planted.py)."""

from typing import Any, Final

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import ANY_WORLD, Planting, patch
from timer.leader.leader import Leader
from timer.model.units import Now
from timer.pending.runs.run_set import Runs
from timer.pending.store import Store

BUCKET_MS: Final = 2_048

_next_due = Store.next_due
_step_fire = Leader._step_fire


def _end_of_bucket(self: Store) -> Any:
    """Round the next due time up to the end of its bucket."""
    due = _next_due(self)
    return None if due is None else due | (BUCKET_MS - 1)


def _fire_as_armed(self: Leader, now: Now) -> None:
    """Do not move the next FIRE forward when an earlier timer is scheduled."""
    armed_ms = vars(self).get("armed_ms")
    if armed_ms is None or armed_ms <= now.clock_ms:
        _step_fire(self, now)
        vars(self)["armed_ms"] = self.machine.store.next_due()


def _due_without_the_newest(self: Runs) -> int | None:
    """Return the next due time of all runs except the newest."""
    dues = [window.next_due() for window in self._windows[:-1]]
    return min((due for due in dues if due is not None), default=None)


_mutation: Final = Planting(TimerWorld, mischief=(), fault_gap_ms=10_000)

MUTATIONS: Final = (
    _mutation(
        "bucket_waits_for_its_end",
        "timers of a bucket fire at the end of the bucket, or with a CHECKPOINT",
        {"late"},
        10,
        f"{ANY_WORLD}: a timer",
        patch(Store, "next_due", _end_of_bucket),
    ),
    _mutation(
        "armed_once",
        "a new timer that is due before all others does not move the next FIRE forward",
        {"late"},
        10,
        f"{ANY_WORLD}: a timer that is due before the pending ones",
        patch(Leader, "_step_fire", _fire_as_armed),
    ),
    _mutation(
        "flush_hides_what_is_due",
        "the next due time does not count the run that was added last",
        {"late"},
        20,
        "a flush on the leader, of timers that are due soon",
        patch(Runs, "next_due", _due_without_the_newest),
        manifest_every=20,
        proposals_per_s=16,
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
