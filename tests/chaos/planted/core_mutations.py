"""Planted bugs in the protocol that need a rare moment (see tests/chaos/planted/planted.py).

The options of each mutation's worlds make its moment frequent. More bugs in the protocol are in
tests/chaos/planted/protocol_mutations.py.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

from chaos.sim.world.options import NEVER
from chaos.sim.world.sim_node import SimNode
from chaos.sim.world.simdisk import SimDisk
from chaos.sim.world.world import World
from replication.core import promise
from replication.core.core import Core
from replication.core.core_events import Effects, Persist
from replication.core.peer_messages import (
    Append,
    AppendAnswer,
    Conflict,
    FenceAnswer,
    Fetch,
    FetchAnswer,
    LogStart,
)
from replication.core.progress import Bid
from replication.core.promise import NO_PROMISE, PromiseFile
from replication.core.quorum import Voters
from tests.chaos.planted.planted import Mutation, Plant, patch
from tests.chaos.planted.protocol_mutations import plant_core
from timer.files.disk import Disk
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId, UnixMs


class _TakesForEqual(Core):
    """A voter takes a candidate's log for equal to its own up to an index, without a comparison of
    epochs."""

    def _equal_to(self) -> LogIndex:
        raise NotImplementedError

    def _on_fetch(self, sender: ReplicaId, fetch: Fetch, out: Effects) -> None:
        self._fetching = True
        super()._on_fetch(sender, fetch, out)
        self._fetching = False

    def _conflict(self, prev_epoch: Epoch, prev_index: LogIndex) -> Conflict | None:
        if getattr(self, "_fetching", False) and prev_index <= self._equal_to():
            return None
        return super()._conflict(prev_epoch, prev_index)


class _BaseNotCompared(_TakesForEqual):
    def _equal_to(self) -> LogIndex:
        return self.shape.base_index


class _CommittedIsEqual(_TakesForEqual):
    def _equal_to(self) -> LogIndex:
        return self.commit_index


class _AsksAtOnce(Core):
    def _on_fetch_answer(
        self, sender: ReplicaId, answer: FetchAnswer, sizes: Any, out: Effects
    ) -> None:
        bid = self._bid
        super()._on_fetch_answer(sender, answer, sizes, out)
        if bid is not None and bid.source is None:
            bid.send_at_ms = self._now


class _AnswersFencesFirst(SimNode):
    def persist(self, order: Persist) -> None:
        assert self.driver._blocked is not None
        effects, _ = self.driver._blocked
        if not any(isinstance(message, FenceAnswer) for _, message in effects.send):
            super().persist(order)
            return
        took_us = self._sync_us()
        self.world.faults.on_sync(self, took_us, promise=True)
        self.later(took_us, self._give, order)
        self.driver.on_persisted()

    def _give(self, order: Persist) -> None:
        if order.promise.epoch > self._promise.promise.epoch:
            self._promise.give(order.promise)
        self._promise.set_unsure(unsure=order.unsure)


class _LeaseFromAnswering(Core):
    def _on_append_answer(self, sender: ReplicaId, answer: AppendAnswer, wall_ms: UnixMs) -> None:
        super()._on_append_answer(sender, answer, wall_ms)
        progress = self._progress.get(sender)
        if progress is not None and progress.acked_ms is not None:
            told_ms = MonoMs(answer.echo_ms + answer.waited_ms)
            progress.acked_ms = max(progress.acked_ms, told_ms)


class _NewVotersAlone(Core):
    def _sets_in_force(self) -> tuple[Voters, ...]:
        return (self.shape.voters,)


def _newest_alone(self: Bid, own: tuple[LogStart, ...]) -> tuple[Voters, ...]:
    starts = [*own, *(start for answer in self.answers.values() for start in answer.sets)]
    return (max(starts, key=lambda start: start.epoch).voters,)


@contextlib.contextmanager
def _plant_new_voters() -> Iterator[None]:
    with (
        mock.patch.object(World, "make_core", _NewVotersAlone),
        mock.patch.object(Bid, "sets", _newest_alone),
    ):
        yield


class _SureByAnyProcess(Core):
    def _on_append(
        self, sender: ReplicaId, append: Append, sizes: Sequence[int], out: Effects
    ) -> None:
        super()._on_append(sender, replace(append, to_nonce=self.nonce), sizes, out)


class _CountsTheRetired(Core):
    def _on_append_answer(self, sender: ReplicaId, answer: AppendAnswer, wall_ms: UnixMs) -> None:
        progress = self._progress.get(sender)
        if progress is not None:
            progress.earlier_nonces.clear()
        super()._on_append_answer(sender, answer, wall_ms)


_load = PromiseFile.load


def _load_or_begin(disk: Disk, path: Path, *, last_epoch: Epoch = Epoch(0)) -> PromiseFile:
    if not disk.exists(path):
        never = promise._encode(NO_PROMISE, unsure=False)
        disk.write_atomic(path, never)
    return _load(disk, path, last_epoch=last_epoch)


def _node(mutant: type[SimNode]) -> Plant:
    return patch(World, "make_node", mutant)


STALE: Final[dict[str, Any]] = {
    "nodes": 3,
    "faults": ("stale_return", "kill"),
    "mischief": ("transfer",),
    "fault_gap_ms": 1_500,
    "proposals_per_s": 30,
    "hasty": True,
    "log_kept_bytes": 0,
    "segment_bytes": 2_000,
    "payload_bytes": 3_000,
    "cache_bytes": 1_000,
    "learners": 0,
    "member_changes": 0.0,
    "loss": 0.0,
    "manifest_every": 20,
}
"""A stale leader is appointed on its return, and the others keep little of their logs."""

LATE_ANSWERS: Final[dict[str, Any]] = {
    "nodes": 3,
    "faults": ("late_answer",),
    "mischief": (),
    "fault_gap_ms": 1_500,
    "proposals_per_s": 60,
    "payload_bytes": 3_000,
    "delay_us": 10_000,
    "sync_us": 1_000,
    "learners": 0,
    "member_changes": 0.0,
    "loss": 0.0,
    "duplicate": 0.0,
    "reorder": False,
    "manifest_every": NEVER,
}
"""Voters that lose the end of their logs while their answers are in flight."""

MUTATIONS: Final = (
    Mutation(
        "base_not_compared",
        "a voter takes a candidate's entry at the base of the voter's log for its own entry",
        frozenset({"agreement", "lost"}),
        40,
        "a stale leader that is appointed on its return, where the log was dropped",
        plant_core(_BaseNotCompared),
        STALE,
    ),
    Mutation(
        "frames_after_another_base",
        "the entries after a base that was not compared don't fit the candidate's log",
        frozenset({"frames"}),
        40,
        "a stale leader with a log that ends where the logs of the others begin now",
        plant_core(_BaseNotCompared),
        {**STALE, "hasty": False, "manifest_every": 1, "proposals_per_s": 3},
    ),
    Mutation(
        "committed_is_equal",
        "a voter takes a candidate's entries for its own up to its commit index",
        frozenset({"agreement", "lost", "frames"}),
        20,
        "a stale leader that is appointed on its return",
        plant_core(_CommittedIsEqual),
        STALE,
    ),
    Mutation(
        "asks_at_once",
        "a candidate repeats its question at once if a source can't serve it",
        frozenset({"pace"}),
        20,
        "a candidate that lacks entries that the others have dropped",
        plant_core(_AsksAtOnce),
        STALE,
    ),
    Mutation(
        "tear_is_always_in_doubt",
        "a replica that was killed inside a write is unsure",
        frozenset({"doubt"}),
        20,
        "a process that dies inside a write",
        patch(SimDisk, "boot_id", lambda _: bytes(16)),
        {"faults": ("torn_write",), "fault_gap_ms": 1_500},
    ),
    Mutation(
        "fence_before_promise",
        "a fence is answered before the promise is durable",
        frozenset({"promise", "storage"}),
        40,
        "a process that dies between its answer and the sync",
        _node(_AnswersFencesFirst),
        {
            "faults": ("mid_sync", "isolate"), "mischief": ("spurious", "transfer"),
            "sync_us": 8_000, "fault_gap_ms": 1_500, "proposals_per_s": 30,
        },
    ),
    Mutation(
        "lease_from_answering",
        "the leader's lease runs from the time of the answer instead of the time of the question",
        frozenset({"lease"}),
        60,
        "answers that wait for a slow disk, and a leader that can't reach the others meanwhile",
        plant_core(_LeaseFromAnswering),
        {
            "nodes": 3, "faults": ("usurp",), "mischief": (),
            "sync_us": 8_000, "learners": 0, "proposals_per_s": 30, "fault_gap_ms": 1_500,
            "loss": 0.0, "member_changes": 0.0,
        },
    ),
    Mutation(
        "sure_by_any_process",
        "a voter becomes sure by an append that the leader sent to its earlier process",
        frozenset({"agreement", "lost"}),
        60,
        "late answers of a dead process, a lost end of its log, and a leader that dies then",
        plant_core(_SureByAnyProcess),
        LATE_ANSWERS,
    ),
    Mutation(
        "counts_the_retired",
        "the leader counts late answers of a process after an answer of the next process",
        frozenset({"agreement", "lost"}),
        60,
        "answers that the next process overtakes, a lost end of the log, and two deaths then",
        plant_core(_CountsTheRetired),
        {**LATE_ANSWERS, "faults": ("overtaken",)},
    ),
    Mutation(
        "wiped_voter_is_sure",
        "a voter that lost its promise starts as a sure voter, without a promise",
        frozenset({"agreement", "lost", "lease", "promise", "epoch", "storage"}),
        60,
        "an added voter that loses promise, log and state",
        patch(PromiseFile, "load", _load_or_begin),
        {
            "nodes": 3, "learners": 1, "faults": ("forget", "kill"), "fault_gap_ms": 1_500,
            "mischief": ("spurious",), "member_changes": 0.1, "proposals_per_s": 30,
        },
    ),
    Mutation(
        "new_voters_alone",
        "during a change of the voters a majority of the new voters is enough",
        frozenset({"agreement", "lost", "lease"}),
        60,
        "a voter that is replaced while the nodes fall into two groups",
        _plant_new_voters,
        {
            "nodes": 3, "learners": 1, "faults": ("rival",), "fault_gap_ms": 1_500,
            "mischief": (), "member_changes": 0.1, "proposals_per_s": 30,
        },
    ),
)  # fmt: skip
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
