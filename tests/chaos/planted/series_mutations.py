"""Planted bugs in recurring timers (see tests/chaos/planted/planted.py)."""

from collections import Counter
from typing import Any, Final

import numpy as np

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import ANY_WORLD, Planting, patch
from timer.entries.series_payloads import ENDED, AlterSeries
from timer.leader.intake import occurrence_planner
from timer.leader.intake.series_intake import SeriesIntake
from timer.model.columns import I64, U64, RowArray
from timer.state.apply_results import SeriesApplied
from timer.state.recurring import Recurring
from timer.state.series_table import SeriesTable

_begin_leading = SeriesIntake.__init__


def _begin_without_waiting(self: SeriesIntake, machine: Any, *parts: Any) -> None:
    """Take only series that begin to wait in this epoch."""
    _begin_leading(self, machine, *parts)
    machine.series.waiting.clear()


def _not_moved(self: SeriesTable, old: U64, due_ms: I64, seq: U64) -> None:
    """Take a rescheduled occurrence for one that has ended."""


def _revoke_in_the_table(self: Recurring, series_id: int) -> None:
    """Leave the pending occurrence of a changed series in the store."""
    self._state.series.revoke(series_id)


_alter = Recurring._alter


def _alter_anew(self: Recurring, op: AlterSeries) -> SeriesApplied:
    """Count the occurrence that a change cancels."""
    view = self._state.series.view(op.series)
    applied = _alter(self, op)
    if view is not None and view.seq:
        table = self._state.series
        table._rows["number"][table._place(op.series)] += 1
    return applied


_intervals = occurrence_planner.interval_times


def _intervals_from_there(rows: RowArray, now_ms: int) -> I64:
    """Leave out the next time of series that had an occurrence already."""
    planned = _intervals(rows, now_ms)
    again = (rows["number"] > 0) & (planned != ENDED)
    return np.where(again, planned + rows["every_ms"], planned)


class _Forgetful(Counter[int]):
    """Notes no changes in flight."""

    def __setitem__(self, series: int, changes: int) -> None:
        """Do nothing."""


_mutation: Final = Planting(TimerWorld, series=True, mischief=())

MUTATIONS: Final = (
    _mutation(
        "series_of_the_last_leader",
        "a new leader plans no occurrence of series that waited before: they are missed",
        {"liveness"},
        60,
        "a leader is lost between the end of an occurrence and the entry with the next one",
        patch(SeriesIntake, "__init__", _begin_without_waiting),
        faults=("kill", "power"),
        fault_gap_ms=1_500,
    ),
    _mutation(
        "moved_occurrence_has_ended",
        "a rescheduled occurrence is pending beside the next one: both fire",
        {"series", "liveness"},
        20,
        f"{ANY_WORLD}: an occurrence is rescheduled",
        patch(SeriesTable, "on_rescheduled", _not_moved),
    ),
    _mutation(
        "paused_occurrence_fires",
        "a pause or a change leaves the pending occurrence, which fires afterwards",
        {"series", "conservation", "cancel", "liveness"},
        20,
        f"{ANY_WORLD}: a pause while an occurrence is pending",
        patch(Recurring, "_revoke", _revoke_in_the_table),
    ),
    _mutation(
        "change_uses_the_number",
        "a change counts the occurrence that it cancels: its number is missed",
        {"series"},
        20,
        f"{ANY_WORLD}: a change while an occurrence is pending",
        patch(Recurring, "_alter", _alter_anew),
    ),
    _mutation(
        "intervals_pass_a_time",
        "a leader plans the time after the next one: an occurrence is missed, its number is not",
        {"series"},
        20,
        f"{ANY_WORLD}: a series has a second occurrence",
        patch(occurrence_planner, "interval_times", _intervals_from_there),
    ),
    _mutation(
        "plans_behind_a_change",
        "a leader plans by the definition before a change that is in flight",
        {"series"},
        100,
        "a series is changed while it waits for its occurrence",
        patch(occurrence_planner, "Counter", _Forgetful),
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
