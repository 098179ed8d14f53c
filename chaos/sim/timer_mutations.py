"""Planted bugs in the state plane: proof that the town's book can be broken.

As chaos/sim/mutations.py, for the timer machine: each is hunted in worlds of `TimerWorld`.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import numpy as np

from chaos.sim.mutations import ASSERTION, Mutation
from timer import leader, manifest
from timer.columns import I64
from timer.groups import Group
from timer.leader import Leader, Now
from timer.leases import ACCEPT
from timer.machine import Machine, Topic
from timer.memtable import Memtable
from timer.payloads import Fire
from timer.producers import Answer, Producers


def _patch(
    target: object, name: str, new: object
) -> Callable[[], contextlib.AbstractContextManager[object]]:
    return lambda: mock.patch.object(target, name, new)


def _repeated(self: Producers, producer_id: Any, sequence: int) -> Answer | None:
    """A retry is taken for a new request, as far as the table allows it."""
    producer = self._by_id[producer_id]
    producer.last_sequence = min(producer.last_sequence, sequence - 1)
    return None


_ack = Leader.ack


def _ack_at_once(
    self: Leader, group: Group, epoch: Any, lease_id: Any, offsets: Any, done: Any
) -> None:
    def answered(result: object) -> None:
        del result

    leases = self._leases.get(group.group_id)
    _ack(self, group, epoch, lease_id, offsets, answered)
    if leases is not None:
        done(np.full(len(offsets), ACCEPT, np.uint8))


def _read_ahead(read_time_ms: Any, *limits: int) -> Fire:
    """The read time is a little in the future; the entry's own time is not."""
    return Fire(read_time_ms + 25, *limits)


def _round_down(self: Leader, requested_ms: I64, now: Now) -> I64:
    rounded = requested_ms // 10 * 10
    due = np.maximum(requested_ms, self.machine.last_read_time_ms)
    return np.where(requested_ms <= now.clock_ms, due, rounded)


def _no_graves(self: Memtable) -> Any:
    return np.zeros(0, np.int64), np.zeros(0, np.uint64)


_capture = manifest.capture


def _capture_without_producers(machine: Machine) -> Any:
    state, fresh = _capture(machine)
    kept, machine.producers = machine.producers, Producers(machine.producers.next_id)
    state["producers"], state["digest"] = [], machine.digest()
    machine.producers = kept
    return state, fresh


def _trim_by_fastest(self: Topic) -> None:
    if self.groups:
        self.queue.drop_below(max(group.cursor for group in self.groups.values()))


def _no_mark(self: Group, queue_end: Any) -> None:
    del self, queue_end


def _cancel_says_yes(self: Machine, entry: Any) -> Any:
    applied = _cancel(self, entry)
    applied.results[:] = 1
    return applied


_cancel = Machine._cancel  # noqa: SLF001

TIMER_MUTATIONS: Final = (
    Mutation(
        "retry_is_new",
        "apply takes a repeated request for a new one",
        frozenset({"twice", "digest"}),
        30,
        _patch(Producers, "repeated", _repeated),
    ),
    Mutation(
        "ack_before_commit",
        "an ack is confirmed before a majority has it",
        frozenset({"acked", "lost"}),
        60,
        _patch(Leader, "ack", _ack_at_once),
    ),
    Mutation(
        "fire_ahead",
        "a FIRE reads a little ahead of the clock",
        frozenset({"early"}),
        10,
        _patch(leader, "Fire", _read_ahead),
    ),
    Mutation(
        "round_down",
        "due times are rounded down to the tick",
        frozenset({"early"}),
        10,
        _patch(Leader, "effective_due", _round_down),
    ),
    Mutation(
        "unmarked_after_failover",
        "a new epoch forgets that the old leader had handed messages out",
        frozenset({"unmarked"}),
        30,
        _patch(Group, "begin_epoch", _no_mark),
    ),
    Mutation(
        "flush_forgets_tombstones",
        "a flush drops the cancels of rows that lie in older runs",
        frozenset({"cancel", "digest", "liveness", "storage", ASSERTION}),
        60,
        _patch(Memtable, "graves_left", _no_graves),
        aim=(("kill", "power", "pause"), ()),
    ),
    Mutation(
        "manifest_without_producers",
        "a restart forgets what producers had sent",
        frozenset({"digest", "twice", "liveness", ASSERTION}),
        60,
        _patch(manifest, "capture", _capture_without_producers),
        aim=(("kill", "power", "pause"), ()),
    ),
    Mutation(
        "trim_by_fastest_group",
        "a message goes when the first group has acked it",
        frozenset({"liveness", "lost", ASSERTION}),
        30,
        _patch(Topic, "trim", _trim_by_fastest),
    ),
    Mutation(
        "cancel_says_yes",
        "a cancel is told CANCELLED whatever became of the timer",
        frozenset({"cancel"}),
        20,
        _patch(Machine, "_cancel", _cancel_says_yes),
    ),
)
"""The list; tests/chaos/test_sim_timers.py hunts each of them."""
