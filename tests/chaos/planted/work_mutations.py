"""Planted bugs in one step of the event loop (see tests/chaos/planted/planted.py)."""

from typing import Any, Final

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import ANY_WORLD, Planting, patch
from timer.pending import store
from timer.pending.fire_limits import count_fitting
from timer.pending.store import Store


def _of_any_topics(rows: Any, rows_max: int, bytes_max: int, topics_max: Any = None) -> int:
    """Limit a FIRE entry in rows and bytes, and not in topics."""
    del topics_max
    return count_fitting(rows, rows_max, bytes_max)


def _whatever_it_passes(self: Store, fire: Any) -> bool:
    """Apply a FIRE entry without a limit on the dead rows before its timers."""
    del self, fire
    return True


_mutation: Final = Planting(TimerWorld, crowds=True, mischief=())

MUTATIONS: Final = (
    _mutation(
        "fire_of_any_topics",
        "a FIRE moves timers of any number of topics",
        {"work"},
        5,
        f"{ANY_WORLD}: many topics with timers that are due at one instant",
        patch(store, "count_fitting", _of_any_topics),
    ),
    _mutation(
        "fire_passes_all_that_is_dead",
        "no thread passes the dead rows before a FIRE that meets many of them",
        {"work"},
        20,
        "many flushed timers of one instant that were then cancelled or deleted",
        patch(Store, "try_find_due", _whatever_it_passes),
        deletions=True,
        manifest_every=20,
        proposals_per_s=16,
        client_loss=0.0,
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
