"""Planted bugs in pauses (see tests/chaos/planted/planted.py)."""

from collections.abc import Iterable
from typing import Any, Final
from unittest import mock

import numpy as np

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import Planting, patch
from timer.entries.entry_frame import Entry
from timer.model.columns import RowArray
from timer.model.firing_order import after
from timer.model.timer_id import SEQ_MAX
from timer.model.units import Seq
from timer.pending.memory.held_rows import HELD_OFFSET_MS
from timer.pending.memory.memtable import Memtable, RowsToFlush
from timer.pending.store import Store
from timer.ready.topic import Topic
from timer.state.apply_results import CancelApplied
from timer.state.machine import Machine
from timer.state.pauses import Pauses

_in_store = Store.cancel
_cancel = Machine._cancel


def _in_store_but_held(self: Store, due_ms: Any, seq: Any) -> tuple[Any, RowArray]:
    later = after(due_ms, seq, self.position)
    hit, rows = _in_store(self, due_ms[later], seq[later])
    every = np.zeros(len(seq), np.bool_)
    every[np.flatnonzero(later)[hit]] = True
    return every, rows


def _cancel_but_held(self: Machine, entry: Entry) -> CancelApplied:
    """Take every timer at or before the firing position for fired, held ones included."""
    with mock.patch.object(Store, "cancel", _in_store_but_held):
        return _cancel(self, entry)


_left = Memtable.rows_to_flush


def _left_but_held(self: Memtable) -> RowsToFlush:
    """Leave held timers out of a flush."""
    left = _left(self)
    left._alive &= left._due_ms < HELD_OFFSET_MS
    return left


_end = Store.cancel_rows


def _end_in_memory(self: Store, rows: RowArray) -> None:
    """Write no tombstones for timers that lie in runs."""
    with mock.patch.object(Store, "_add_tombstones"):
        _end(self, rows)


def _made_firing(self: Pauses, topics: Iterable[Topic]) -> None:
    """Ignore the pause of a namespace for topics that are created later."""
    for topic in topics:
        self._register(topic)


_divide = Pauses._divide


def _release_late_ones_too(self: Pauses, topic: Topic, *args: Any) -> Any:
    """Treat timers that were scheduled after the resume as overdue at the resume."""
    release = topic.release
    assert release is not None
    seq_end, release.seq_end = release.seq_end, Seq(SEQ_MAX)
    try:
        return _divide(self, topic, *args)
    finally:
        release.seq_end = seq_end


_mutation: Final = Planting(TimerWorld, policies=True, mischief=())

MUTATIONS: Final = (
    _mutation(
        "held_is_as_good_as_fired",
        "a cancel of a held timer has no effect, and the answer is that it has fired",
        {"held"},
        20,
        "a cancel while a topic is paused",
        patch(Machine, "_cancel", _cancel_but_held),
    ),
    _mutation(
        "flush_without_held",
        "held timers are lost by a flush",
        {"list", "held", "digest", "twice", "conservation"},
        20,
        "a flush while a topic is paused",
        patch(Memtable, "rows_to_flush", _left_but_held),
        manifest_every=20,
    ),
    _mutation(
        "released_from_runs_again",
        "held timers that lie in runs are released, and stay",
        {"list", "held", "digest", "twice", "conservation", "drop", "dropped"},
        20,
        "a resume after a flush",
        patch(Store, "cancel_rows", _end_in_memory),
        manifest_every=20,
    ),
    _mutation(
        "new_topic_fires",
        "a topic that is created in a paused namespace is not paused",
        {"pause", "digest"},
        40,
        "a new topic, or a restart, while the namespace is paused",
        patch(Pauses, "add_topics", _made_firing),
        manifest_every=20,
        faults=("kill", "power"),
        fault_gap_ms=1_500,
    ),
    _mutation(
        "resume_drops_what_came_after",
        "a resume that drops overdue timers drops timers scheduled after it, too",
        {"drop"},
        60,
        "a timer that is scheduled as due while its topic catches up",
        patch(Pauses, "_divide", _release_late_ones_too),
        proposals_per_s=16,
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
