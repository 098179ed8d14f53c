"""Planted bugs in the deletion of topics (see tests/chaos/planted/planted.py)."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import Plant, Planting
from timer.model.columns import RowArray
from timer.pending.memory.deleted_topics import NONE_DELETED
from timer.pending.memory.memtable import Memtable
from timer.pending.runs.run_set import Runs
from timer.pending.store import Store
from timer.ready.topic import Topic
from timer.ready.topic_shares import TopicRows
from timer.state.ledger import Ledger
from timer.state.machine import Machine

_by_topic = Machine.by_topic
_delete_topic = Machine._delete_topic
_due = Store._live_due_rows
_drop_topic = Store.drop_topic
_find = Runs.find


def _of_those_there(self: Machine, rows: RowArray, *, sums: bool) -> list[tuple[Topic, TopicRows]]:
    """Leave out rows of deleted topics when rows are grouped by topic."""
    return _by_topic(self, rows[~self.store.deleted_topics.of(rows["topic"])], sums=sums)


def _all_that_is_due(self: Store, *args: Any) -> Any:
    """Count rows of deleted topics towards the limit of a FIRE."""
    deleted = self.deleted_topics
    self.restore_deleted_topics(NONE_DELETED)
    try:
        return _due(self, *args)
    finally:
        self.restore_deleted_topics(deleted)


def _any_in_runs(self: Runs, *args: Any) -> Any:
    """Find rows in runs even if their topic is deleted."""
    deleted, self.deleted_topics = self.deleted_topics, NONE_DELETED
    try:
        return _find(self, *args)
    finally:
        self.deleted_topics = deleted


def _still_pending(self: Store, topic: Any, pending: int, held: int) -> None:
    """Keep the timers of a deleted topic in the count of pending timers."""
    del pending
    _drop_topic(self, topic, 0, held)


def _keep_name(self: Machine, op: Any) -> Any:
    """Keep the name of a deleted topic in use."""
    applied = _delete_topic(self, op)
    if applied.topic is not None:
        self.topic_by_name[applied.topic.name] = applied.topic
    return applied


def _patches(*patches: tuple[object, str, object]) -> Plant:
    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for target, name, new in patches:
                stack.enter_context(mock.patch.object(target, name, new))
            yield

    return plant


_mutation: Final = Planting(TimerWorld, deletions=True, mischief=())

MUTATIONS: Final = (
    _mutation(
        "dropped_is_still_pending",
        "the store still counts the timers of a deleted topic as pending",
        {"conservation"},
        10,
        "a topic that is deleted while timers are pending",
        # The machine's own check comes first: it is off, so that the simulator's has to find it.
        _patches((Store, "drop_topic", _still_pending), (Ledger, "check", lambda self: None)),
    ),
    _mutation(
        "limit_counts_the_gone",
        "a FIRE takes rows of deleted topics, and fires fewer timers than its limit",
        {"conservation", "digest"},
        40,
        "a topic that is deleted while its timers lie in runs, and their due time",
        _patches(
            (Store, "_live_due_rows", _all_that_is_due), (Machine, "by_topic", _of_those_there)
        ),
        manifest_every=20,
        proposals_per_s=16,
    ),
    _mutation(
        "dropped_can_be_cancelled",
        "a cancel finds a timer of a deleted topic, and answers CANCELLED",
        {"dropped", "conservation"},
        40,
        "a cancel or a reschedule of a timer of a deleted topic",
        _patches(
            (Memtable, "kill_topic", lambda self, topic: iter(())),
            (Runs, "find", _any_in_runs),
            (Machine, "by_topic", _of_those_there),
        ),
        proposals_per_s=16,
    ),
    _mutation(
        "name_of_the_gone",
        "a deleted topic keeps its name, so no timer can be scheduled under that name",
        {"liveness", "digest"},
        10,
        "a topic that is deleted",
        _patches((Machine, "_delete_topic", _keep_name)),
        faults=("slow_disk",),
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
