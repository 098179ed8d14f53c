"""Planted bugs: proof that the referee can lose its patience.

Each mutation breaks one rule of the protocol, as a plausible mistake would. The simulator has
to find it with randomly drawn seeds, within the number stated, through one of the checkers
named (`assertion`: an invariant of the code itself). Production code knows nothing of this.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final
from unittest import mock

from chaos.sim.node import PROMISE_PATH, SimNode
from chaos.sim.options import Options
from chaos.sim.referee import Broken
from chaos.sim.world import World
from replication import promise
from replication.core import Core
from replication.knowledge import Bid, Held, Progress
from replication.messages import Append, AppendAnswer, Conflict
from replication.promise import Promise, PromiseFile
from replication.shape import Shape
from replication.steps import Durable, Effects, Role
from replication.writer import write_batch
from timer.units import Epoch, LogIndex, MonoMs, ReplicaId, UnixMs

ASSERTION: Final = "assertion"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One planted bug."""

    name: str
    breaks: str
    checkers: frozenset[str]
    """Any of these may be the first to see it."""
    seeds: int
    """It must be found within so many."""
    plant: Callable[[], contextlib.AbstractContextManager[object]]
    aim: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """(faults, mischief) of the worlds to hunt it in, where the usual mix would take too long."""


@dataclass(frozen=True, slots=True)
class Found:
    """What found a planted bug."""

    seed: int
    seeds: int
    """Tried, this one included."""
    checker: str
    detail: str


def hunt(
    mutation: Mutation, first_seed: int, seconds: int = 60, make_world: type[World] = World
) -> Found | None:
    """Return how the simulator finds `mutation`; None: not within its number of seeds."""
    for number in range(mutation.seeds):
        with mutation.plant():
            seed = first_seed + number
            options = Options.draw(random.Random(seed))
            if mutation.aim is not None:
                faults, mischief = mutation.aim
                options = replace(options, faults=faults, mischief=mischief)
            world = make_world(seed, options=options)
            try:
                world.run(seconds)
            except Broken as error:
                return Found(seed, number + 1, error.checker, str(error))
            except AssertionError as error:
                return Found(seed, number + 1, ASSERTION, str(error))
    return None


def _core(core: type[Core]) -> Callable[[], contextlib.AbstractContextManager[object]]:
    return lambda: mock.patch.object(World, "make_core", core)


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
    mark.put(promise._encode(given, unsure=unsure))  # noqa: SLF001
    mark.close()
    self._promise, self._unsure = given, unsure


class _LeaseFromReceipt(Core):
    def _on_append_answer(
        self, sender: ReplicaId, answer: AppendAnswer, wall_ms: UnixMs, out: Effects
    ) -> None:
        super()._on_append_answer(sender, answer, wall_ms, out)
        progress = self._progress.get(sender)
        if progress is not None and progress.acked_ms is not None:
            progress.acked_ms = self._now


class _NoGuard(Core):
    def _guarded(self) -> MonoMs:
        return super()._guarded() if self._role is Role.LEADER else self._now


class _LeadWithoutFetching(Core):
    def _fetch_from(self, bid: Bid, source: ReplicaId, out: Effects) -> None:
        self._begin(bid, out)


class _LongestLog(Core):
    def _greatest(self, bid: Bid, who: set[ReplicaId]) -> tuple[tuple[Epoch, LogIndex], ReplicaId]:
        ends = {voter: bid.answers[voter] for voter in who}
        _, voter = max((end.last_index, voter) for voter, end in ends.items())
        if bid.answers[self.me].last_index == ends[voter].last_index:
            voter = self.me
        answer = bid.answers[voter]
        return (answer.last_epoch, answer.last_index), voter


class _CountUnsure(Core):
    def _counted(self, bid: Bid, sets: tuple[frozenset[ReplicaId], ...]) -> set[ReplicaId]:
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

    def _on_appointed(self, epoch: Epoch, leader: ReplicaId) -> None:
        under = Promise(epoch, self.me, self.nonce)
        if leader == self.me and under == self.promise and self._role is Role.FOLLOWER:
            self._bid = Bid(under, moved_ms=self._now, send_at_ms=self._now)
            self._role = Role.CANDIDATE
            fence = mock.Mock(under=under, sent_ms=self._now)
            self._held = Held(self.me, fence, self._now)
            return
        super()._on_appointed(epoch, leader)

    def _count(self, voter: ReplicaId, answer: object) -> None:
        assert self._bid is not None
        self._bid.answers[voter] = answer  # type: ignore[assignment]

    def _begin(self, bid: Bid, out: Effects) -> None:
        if self.shape.last_epoch < bid.under.epoch:
            super()._begin(bid, out)
            return
        # It "continues" its epoch: the EPOCH entry is there already.
        self._bid, self._role, self.leader = None, Role.LEADER, self.me
        self._led_ms, self._start_index = self._now, self.shape.last_start
        last = LogIndex(self.shape.last_index + 1)
        self._progress = {peer: Progress(next=last) for peer in self.peers}


class _TrustOldProcess(Core):
    def _on_append_answer(
        self, sender: ReplicaId, answer: AppendAnswer, wall_ms: UnixMs, out: Effects
    ) -> None:
        progress = self._progress.get(sender)
        if progress is not None:
            progress.nonce = answer.nonce
        super()._on_append_answer(sender, answer, wall_ms, out)


class _AppendWithoutPromise(Core):
    def _on_append(
        self, sender: ReplicaId, append: Append, sizes: Sequence[int], out: Effects
    ) -> None:
        super()._on_append(sender, append, sizes, out)
        if append.under.leader == sender and not self.unsure:
            out.persist = None


class _AckUnmatched(Core):
    def _acked(self) -> LogIndex:
        return self.durable_index

    def _answer_append(
        self,
        to: ReplicaId,
        append: Append,
        conflict: Conflict | None,
        since_ms: MonoMs,
        out: Effects,
    ) -> None:
        # As if whatever is on the disk were the leader's.
        matched, self._matched = self._matched, max(self._matched, self.durable_index)
        super()._answer_append(to, append, conflict, since_ms, out)
        self._matched = matched


MUTATIONS: Final = (
    Mutation(
        "ack_before_sync",
        "a follower answers for entries that are not on its disk yet",
        frozenset({"agreement", "lost", "storage", "frames", ASSERTION}),
        60,
        lambda: mock.patch.object(World, "make_node", _AckBeforeSync),
        aim=(("power_all", "slow_disk"), ()),
    ),
    Mutation(
        "any_leader_of_the_epoch",
        "a promise binds to the epoch alone, not to its leader and process",
        frozenset({"promise", "epoch", "agreement"}),
        60,
        _plant_any_leader,
    ),
    Mutation(
        "promise_not_synced",
        "a promise is written and acted on, but not synced",
        frozenset({"promise", "storage"}),
        60,
        lambda: mock.patch.object(PromiseFile, "_store", _store_unsynced),
    ),
    Mutation(
        "append_without_promise",
        "an append of a higher epoch is taken without a durable promise",
        frozenset({"promise", "storage"}),
        60,
        _core(_AppendWithoutPromise),
    ),
    Mutation(
        "lease_from_receipt",
        "the leader's lease runs from receiving an answer instead of from sending the question",
        frozenset({"lease"}),
        100,
        _core(_LeaseFromReceipt),
        aim=(("isolate", "pause", "one_way"), ("spurious", "double")),
    ),
    Mutation(
        "no_guard",
        "a follower promises a new epoch without waiting for its leader's lease to end",
        frozenset({"lease"}),
        60,
        _core(_NoGuard),
    ),
    Mutation(
        "lead_without_fetching",
        "a candidate with a majority of promises leads with the log that it has",
        frozenset({"agreement", "lost", ASSERTION}),
        60,
        _core(_LeadWithoutFetching),
    ),
    Mutation(
        "longest_log",
        "a candidate takes the longest log for the greatest, whatever its epoch",
        frozenset({"agreement", "lost", ASSERTION}),
        200,
        _core(_LongestLog),
        aim=(("newborn", "power", "isolate"), ("spurious", "dead")),
    ),
    Mutation(
        "count_unsure",
        "a replica that lost its tail counts as one that lost nothing",
        frozenset({"agreement", "lost", ASSERTION}),
        200,
        _core(_CountUnsure),
        aim=(("lying_disk",), ("spurious",)),
    ),
    Mutation(
        "keep_conflicting_tail",
        "a follower keeps entries that its leader's log does not have",
        frozenset({"agreement", "lost", ASSERTION}),
        60,
        lambda: mock.patch.object(Shape, "parts_at", return_value=None),
        aim=(("newborn", "isolate", "power"), ("spurious", "dead")),
    ),
    Mutation(
        "apply_beyond_matched",
        "a follower applies up to the commit index entries that it never compared",
        frozenset({"agreement"}),
        200,
        _core(_ApplyBeyondMatched),
        aim=(("newborn", "isolate", "power"), ("spurious", "dead")),
    ),
    Mutation(
        "ack_unmatched",
        "a follower answers for what is on its disk, compared or not",
        frozenset({"agreement", "lost", ASSERTION}),
        60,
        _core(_AckUnmatched),
    ),
    Mutation(
        "lead_again_after_restart",
        "a restarted process goes on leading its old epoch",
        frozenset({"epoch", "agreement", "lost", ASSERTION}),
        60,
        _core(_LeadAgainAfterRestart),
    ),
    Mutation(
        "trust_old_process",
        "the leader believes what a follower's earlier process had on disk",
        frozenset({"agreement", "lost", "liveness", ASSERTION}),
        100,
        _core(_TrustOldProcess),
        aim=(("lying_disk",), ()),
    ),
)
"""The list; tests/chaos/test_sim_mutations.py hunts each of them."""
