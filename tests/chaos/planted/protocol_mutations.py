"""Planted bugs in the protocol (see tests/chaos/planted/planted.py)."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final
from unittest import mock

from chaos.sim.world.sim_node import SimNode
from chaos.sim.world.simdisk import PROMISE_PATH
from chaos.sim.world.world import World
from replication.core import core, promise
from replication.core.core import Core
from replication.core.core_events import Durable, Effects, Role
from replication.core.log_shape import LogShape
from replication.core.peer_messages import Append, AppendAnswer, Conflict, Fetch, FetchAnswer
from replication.core.progress import Bid, Progress, WaitingFence
from replication.core.promise import Promise, PromiseFile
from replication.core.quorum import Voters
from replication.core.replication_config import ReplicationConfig
from replication.driver.write_order import write_batch
from tests.chaos.planted.planted import Mutation, Plant, patch
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId, UnixMs


def plant_core(mutant: type[Core]) -> Plant:
    """Return a context in which every node of a world runs this core."""
    return lambda: mock.patch.object(World, "make_core", mutant)


class _AckBeforeSync(SimNode):
    def _begin_batch(self) -> None:
        orders, self._orders = self._orders, []
        version = write_batch(self.log, orders)
        self.later(self._sync_us(), self._end_batch, version)
        self.driver.handle(Durable(version, self.log.last_index))


class _AnyLeaderOfTheEpoch(Core):
    def _admits(self, under: Promise) -> bool:
        return under.epoch >= self.promise.epoch

    def _adopt(self, under: Promise, out: Effects) -> None:
        if under.epoch == self.promise.epoch:
            lower = Epoch(under.epoch - 1)
            self._cease(out)
            self.promise = Promise(lower, self.promise.leader, self.promise.nonce)
        super()._adopt(under, out)


@contextlib.contextmanager
def _plant_any_leader() -> Iterator[None]:
    def give(self: PromiseFile, given: Promise) -> None:
        if given != self.promise:
            self._store(given, unsure=self.unsure)

    with (
        mock.patch.object(World, "make_core", _AnyLeaderOfTheEpoch),
        mock.patch.object(PromiseFile, "give", give),
    ):
        yield


def _store_unsynced(self: PromiseFile, given: Promise, *, unsure: bool) -> None:
    mark = self._disk.open_mark(PROMISE_PATH)
    mark.put(promise._encode(given, unsure=unsure))
    mark.close()
    self._promise, self._unsure = given, unsure


class _LeaseFromReceipt(Core):
    def _on_append_answer(self, sender: ReplicaId, answer: AppendAnswer, wall_ms: UnixMs) -> None:
        super()._on_append_answer(sender, answer, wall_ms)
        progress = self._progress.get(sender)
        if progress is not None and progress.acked_ms is not None:
            progress.acked_ms = self._now


class _NoGuard(Core):
    def _no_other_until(self) -> MonoMs:
        return super()._no_other_until() if self._role is Role.LEADER else self._now


class _LeadWithoutFetching(Core):
    def _fetch_from(self, bid: Bid, source: ReplicaId, out: Effects) -> None:
        self._begin(bid, out)


class _CountUnsure(Core):
    def _counting_voters(self, bid: Bid, sets: tuple[frozenset[ReplicaId], ...]) -> set[ReplicaId]:
        return set(bid.answers)


class _ApplyBeyondMatched(Core):
    @property
    def matched_index(self) -> LogIndex:
        return self.shape.last_index

    def _follow(self, out: Effects) -> None:
        index = LogIndex(min(self._heard_commit, self.durable_index))
        if index > self.commit_index:
            self._commit(index)
        super()._follow(out)


class _LeadAgainAfterRestart(Core):
    def __init__(self, **survived: object) -> None:
        given = survived["promise"]
        assert isinstance(given, Promise)
        if given.leader == survived["me"]:
            survived["nonce"] = given.nonce
        super().__init__(**survived)  # type: ignore[arg-type]

    def _on_appointed(
        self, epoch: Epoch, leader: ReplicaId, voters: frozenset[ReplicaId] | None
    ) -> None:
        under = Promise(epoch, self.me, self.nonce)
        if leader == self.me and under == self.promise and self._role is Role.FOLLOWER:
            self._bid = Bid(under, moved_ms=self._now, send_at_ms=self._now)
            fence = mock.Mock(under=under, sent_ms=self._now)
            self._waiting_fence = WaitingFence(self.me, fence, self._now)
            return
        super()._on_appointed(epoch, leader, voters)

    def _note_fence_answer(self, voter: ReplicaId, answer: object) -> None:
        assert self._bid is not None
        self._bid.answers[voter] = answer  # type: ignore[assignment]

    def _begin(self, bid: Bid, out: Effects) -> None:
        if self.shape.last_epoch < bid.under.epoch:
            super()._begin(bid, out)
            return
        # The process "continues" its epoch: the EPOCH entry is already in the log.
        self._bid, self._role, self.leader = None, Role.LEADER, self.me
        self._led_ms, self._start_index = self._now, self.shape.last_start
        last = LogIndex(self.shape.last_index + 1)
        self._progress = {peer: self._fresh(last) for peer in self._peers()}


class _TrustOldProcess(Core):
    def _on_append_answer(self, sender: ReplicaId, answer: AppendAnswer, wall_ms: UnixMs) -> None:
        progress = self._progress.get(sender)
        if progress is not None:
            progress.nonce = answer.nonce
        super()._on_append_answer(sender, answer, wall_ms)


class _AppendWithoutPromise(Core):
    def _on_append(
        self, sender: ReplicaId, append: Append, sizes: Sequence[int], out: Effects
    ) -> None:
        super()._on_append(sender, append, sizes, out)
        if append.under.leader == sender and not self.unsure:
            out.persist = None


class _AckUnmatched(Core):
    def _answer_append(
        self,
        to: ReplicaId,
        append: Append,
        conflict: Conflict | None,
        since_ms: MonoMs,
        out: Effects,
    ) -> None:
        # Take every entry on the disk for an entry of the leader.
        matched, self._matched_index = (
            self._matched_index,
            max(self._matched_index, self.durable_index),
        )
        super()._answer_append(to, append, conflict, since_ms, out)
        self._matched_index = matched


class _IgnoreEpoch(Core):
    def _on_append(
        self, sender: ReplicaId, append: Append, sizes: Sequence[int], out: Effects
    ) -> None:
        given = self.promise
        if append.under.epoch < given.epoch and self._role is Role.FOLLOWER:
            self.promise = append.under
            super()._on_append(sender, append, sizes, out)
            self.promise = given
            return
        super()._on_append(sender, append, sizes, out)


def _reached_by_half(sets: tuple[Voters, ...], values: Mapping[ReplicaId, int]) -> int:
    return min(
        sorted((values.get(voter, 0) for voter in voters), reverse=True)[len(voters) // 2 - 1]
        for voters in sets
    )


class _HalfIsEnough(Core):
    def _advance_commit(self, out: Effects) -> None:
        with mock.patch.object(core, "majority_value", _reached_by_half):
            super()._advance_commit(out)


def _never_go_back(self: Progress, prev: LogIndex, resume: LogIndex) -> None:
    """Ignore that the follower lacks entries."""
    del self, prev, resume


class _CommitByTheLeadersWord(Core):
    def _on_append(
        self, sender: ReplicaId, append: Append, sizes: Sequence[int], out: Effects
    ) -> None:
        if append.under == self.promise:
            self._heard_commit = LogIndex(0)
        super()._on_append(sender, append, sizes, out)

    def _follow(self, out: Effects) -> None:
        if 0 < self._heard_commit < self.commit_index:
            self.commit_index = self._heard_commit
        super()._follow(out)


class _FetchWithoutStarts(Core):
    def _answer_fetch(
        self,
        to: ReplicaId,
        fetch: Fetch,
        last: LogIndex,
        conflict: Conflict | None,
        out: Effects,
    ) -> None:
        super()._answer_fetch(to, fetch, last, conflict, out)
        sent = out.send[-1]
        assert isinstance(sent.message, FetchAnswer)
        out.send[-1] = sent._replace(message=replace(sent.message, starts=()))


_MANY: Final = {"fault_gap_ms": 1_500, "proposals_per_s": 30}
_CHANGES: Final = {"faults": ("newborn", "isolate", "power"), "mischief": ("spurious", "blind")}
"""Leaders change before their entries are on other nodes."""

MUTATIONS: Final = (
    Mutation(
        "ack_before_sync",
        "a follower acknowledges entries that are not on its disk yet",
        frozenset({"agreement", "lost", "storage"}),
        60,
        "a power cut that takes a majority",
        lambda: mock.patch.object(World, "make_node", _AckBeforeSync),
        {"faults": ("power_all", "slow_disk"), "nodes": 3, "sync_us": 8_000, **_MANY},
    ),
    Mutation(
        "any_leader_of_the_epoch",
        "a promise binds to the epoch alone, not to its leader and process",
        frozenset({"promise", "epoch", "agreement"}),
        40,
        "two leaders appointed in one epoch, or a leader that restarts",
        _plant_any_leader,
    ),
    Mutation(
        "ignore_epoch",
        "a follower accepts appends of a leader after a promise to a later one",
        frozenset({"promise"}),
        30,
        "a deposed leader that does not know it",
        plant_core(_IgnoreEpoch),
        aim={"faults": ("handover", "isolate", "one_way", "pause"), "member_changes": 0.0},
    ),
    Mutation(
        "promise_not_synced",
        "a promise takes effect after its write, without a sync",
        frozenset({"promise", "storage"}),
        40,
        "a power cut",
        lambda: mock.patch.object(PromiseFile, "_store", _store_unsynced),
    ),
    Mutation(
        "append_without_promise",
        "an append of a higher epoch is accepted without a durable promise",
        frozenset({"promise", "storage"}),
        40,
        "a follower that missed the fence, then a restart",
        plant_core(_AppendWithoutPromise),
    ),
    Mutation(
        "lease_from_receipt",
        "the leader's lease runs from the arrival of an answer instead of the time of the question",
        frozenset({"lease"}),
        60,
        "answers that take as long as a lease",
        plant_core(_LeaseFromReceipt),
        {"faults": ("isolate", "pause", "one_way"), "mischief": ("spurious", "blind")},
    ),
    Mutation(
        "no_guard",
        "a follower promises a new epoch without waiting for its leader's lease to end",
        frozenset({"lease"}),
        60,
        "an appointment while the leader lives",
        plant_core(_NoGuard),
        {"faults": ("isolate", "split", "one_way"), "mischief": ("spurious",), **_MANY},
    ),
    Mutation(
        "guard_under_lease",
        "followers wait only half of a silent leader's lease before they promise a new epoch",
        frozenset({"lease"}),
        60,
        "a leader that is cut off, and another appointed at once",
        lambda: mock.patch.object(ReplicationConfig, "guard_ms", 250),
        {"faults": ("isolate", "split", "one_way"), "mischief": ("spurious",), **_MANY},
    ),
    Mutation(
        "half_is_enough",
        "an entry is committed when half of the voters have it",
        frozenset({"agreement", "lost"}),
        40,
        "a lost leader with entries that the others do not have",
        plant_core(_HalfIsEnough),
        {"faults": ("isolate", "power", "split"), **_MANY},
    ),
    Mutation(
        "lead_without_fetching",
        "a candidate with a majority of promises leads with the log that it has",
        frozenset({"agreement", "lost"}),
        120,
        "a candidate that lags behind",
        plant_core(_LeadWithoutFetching),
    ),
    Mutation(
        "count_unsure",
        "a replica that lost its log's end counts as if it had lost nothing",
        frozenset({"agreement", "lost"}),
        60,
        "a disk that loses synced data",
        plant_core(_CountUnsure),
        {"faults": ("lying_disk",), "mischief": ("spurious",)},
    ),
    Mutation(
        "keep_conflicting_tail",
        "a follower keeps entries that its leader's log does not have",
        frozenset({"agreement", "lost"}),
        40,
        "entries that were never committed",
        lambda: mock.patch.object(LogShape, "divergence_at", return_value=None),
        _CHANGES,
    ),
    Mutation(
        "apply_beyond_matched",
        "a follower applies up to the commit index entries that it never compared",
        frozenset({"agreement"}),
        60,
        "entries that were never committed",
        plant_core(_ApplyBeyondMatched),
        _CHANGES,
    ),
    Mutation(
        "ack_unmatched",
        "a follower acknowledges all entries on its disk, compared or not",
        frozenset({"agreement", "lost", "liveness"}),
        120,
        "entries that were never committed",
        plant_core(_AckUnmatched),
        _CHANGES,
    ),
    Mutation(
        "lead_again_after_restart",
        "a restarted process continues to lead its old epoch",
        frozenset({"epoch", "frames"}),
        30,
        "a leader that restarts and is appointed again",
        plant_core(_LeadAgainAfterRestart),
    ),
    Mutation(
        "trust_old_process",
        "the leader counts entries that a follower's earlier process had on disk",
        frozenset({"agreement", "lost", "liveness"}),
        60,
        "a disk that loses synced data",
        plant_core(_TrustOldProcess),
        {"faults": ("lying_disk",), "mischief": ()},
    ),
    Mutation(
        "never_goes_back",
        "a leader does not go back when a follower answers that it lacks entries",
        frozenset({"liveness"}),
        40,
        "a lost message",
        patch(Progress, "note_conflict", _never_go_back),
    ),
    Mutation(
        "commit_by_the_leaders_word",
        "a follower adopts a received commit index, even if it is below its own",
        frozenset({"commit"}),
        20,
        "messages that overtake each other, or a new leader with a lower commit index",
        plant_core(_CommitByTheLeadersWord),
        {"reorder": False, "duplicate": 0.0, "faults": ("handover", "kill", "isolate")},
    ),
    Mutation(
        "fetch_without_starts",
        "the entries that a candidate fetches come without the starts of their epochs",
        frozenset({"frames"}),
        20,
        "a candidate that lacks an epoch's start",
        plant_core(_FetchWithoutStarts),
        {**_CHANGES, "fault_gap_ms": 800},
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
