"""Planted bugs in deleting topics (chaos/sim/planted.py says what they are for)."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from chaos.sim.planted import Plant, Planting
from chaos.sim.timers import TimerWorld
from timer.columns import RowArray
from timer.gone import NONE
from timer.machine import Machine
from timer.memtable import Memtable
from timer.runs import Runs
from timer.shares import Share
from timer.store import Store
from timer.topic import Topic

_by_topic = Machine.by_topic
_delete_topic = Machine._delete_topic  # noqa: SLF001
_due = Store._due  # noqa: SLF001
_drop_topic = Store.drop_topic
_find = Runs.find


def _of_those_there(self: Machine, rows: RowArray) -> list[tuple[Topic, Share]]:
    """Who is no more is passed over, where rows come out."""
    return _by_topic(self, rows[~self.store.gone.of(rows["topic"])])


def _all_that_is_due(self: Store, *args: Any) -> Any:
    """A FIRE's limit counts what is gone, too."""
    gone, self.gone = self.gone, NONE
    try:
        return _due(self, *args)
    finally:
        self.gone = gone


def _any_in_runs(self: Runs, *args: Any) -> Any:
    """What lies in a run is found, whatever became of its topic."""
    gone, self.gone = self.gone, NONE
    try:
        return _find(self, *args)
    finally:
        self.gone = gone


def _still_pending(self: Store, topic: Any, pending: int, held: int) -> None:
    """What is dropped is counted as pending."""
    del pending
    _drop_topic(self, topic, 0, held)


def _keep_name(self: Machine, op: Any) -> Any:
    """The name stays with the topic that is gone."""
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

DROP_MUTATIONS: Final = (
    _mutation(
        "dropped_is_still_pending",
        "the store counts what went with its topic",
        {"conservation"},
        10,
        "a topic that is deleted while timers are pending",
        _patches((Store, "drop_topic", _still_pending)),
    ),
    _mutation(
        "limit_counts_the_gone",
        "a FIRE takes rows of topics that are gone, and passes them over",
        {"conservation", "digest"},
        40,
        "timers in runs when their topic is deleted, whose time comes",
        _patches((Store, "_due", _all_that_is_due), (Machine, "by_topic", _of_those_there)),
        manifest_every=20,
        proposals_per_s=16,
    ),
    _mutation(
        "dropped_can_be_cancelled",
        "a cancel finds what went with its topic, and says that it was cancelled",
        {"dropped", "conservation"},
        40,
        "a cancel or a reschedule of a timer whose topic was deleted",
        _patches(
            (Memtable, "kill_topic", lambda self, topic: None),
            (Runs, "find", _any_in_runs),
            (Machine, "by_topic", _of_those_there),
        ),
        proposals_per_s=16,
    ),
    _mutation(
        "name_of_the_gone",
        "a deleted topic keeps its name: nothing can be scheduled under it",
        {"liveness", "digest"},
        10,
        "a topic that is deleted",
        _patches((Machine, "_delete_topic", _keep_name)),
        faults=("slow_disk",),
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
