"""The protocol of one replica: a pure state machine.

        appointed(e, me)            every entry of the greatest log fetched,
    FOLLOWER ----------> CANDIDATE  EPOCH appended          EPOCH committed
        ^                    |  `-----------------> LEADER -----------------> serving
        |   refused, or      |                        |
        +--------------------+------------------------+
            a higher epoch; no lease for long; the leadership handed over (`Release`)

Promises alone decide the leader. A promise is (epoch, leader, nonce of the leader's process). It is
durable before the replica acts on it. Only a promise of a higher epoch replaces it.

    fence     A candidate leads after a majority promised, once its log reaches the greatest
              (epoch, index) of that majority. Its log then holds every committed entry.
    commit    An entry is committed when a majority has on disk both it and the leader's EPOCH
              entry, matched with the leader's log. The leader's own disk need not be one of them.
    lease     The lease runs from the time at which the leader *sent* a message that a majority
              answered. Each of those voters promises no other candidate for the lease + 10 % after
              *receiving* the message. A leader's `Release` ends that wait at once.

The rules are Raft's (Ongaro and Ousterhout 2014, sections 5.3 to 5.4.2; for leases, section 6.4.1
of Ongaro's thesis). The appointment from outside is that of Vertical Paxos.

An entry is (epoch, index) and a size here; replication/driver/driver.py holds the bytes.
"""

from collections.abc import Sequence
from typing import Final

from replication.core.core_events import (
    Appointed,
    ClockSample,
    Durable,
    Effects,
    Event,
    Handover,
    Loaded,
    OutgoingMessage,
    Persist,
    Proposed,
    Read,
    Received,
    Reconnected,
    Role,
    Tick,
)
from replication.core.log_shape import EntrySizes, LogShape
from replication.core.peer_messages import (
    ENTRIES_MAX,
    Append,
    AppendAnswer,
    Behind,
    Conflict,
    Fence,
    FenceAnswer,
    Fetch,
    FetchAnswer,
    LogStart,
    Refused,
    Release,
)
from replication.core.progress import Bid, OwnDisk, Progress, WaitingFence, has_forgotten, sample_of
from replication.core.promise import Promise
from replication.core.quorum import Voters, is_granted, majority_value, one_change
from replication.core.replication_config import ReplicationConfig
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs

ROLE_CHANGES: Final = {
    Role.FOLLOWER: {Role.CANDIDATE},
    Role.CANDIDATE: {Role.LEADER, Role.FOLLOWER},
    Role.LEADER: {Role.FOLLOWER},
}
"""Every change of role; the drawing above says when."""


class Core:
    """One replica. Only `step` changes it."""

    def __init__(  # noqa: PLR0913 - the state that the shell recovered
        self,
        *,
        me: ReplicaId,
        nonce: Nonce,
        conf: ReplicationConfig,
        promise: Promise,
        unsure: bool,
        shape: LogShape,
        commit_index: LogIndex,
        now_ms: MonoMs,
    ) -> None:
        """Begin as a follower. `shape` is durable; `commit_index` is the manifest's index."""
        assert shape.base_index <= commit_index <= shape.last_index, (
            f"log {shape.base_index}..{shape.last_index} without committed {commit_index}"
        )
        assert shape.last_epoch <= promise.epoch, (shape.last_epoch, promise)
        self.me = me
        self.nonce = nonce
        self.conf = conf
        self.promise = promise
        self.unsure = unsure
        self.shape = shape
        self.tail = EntrySizes(LogIndex(shape.last_index + 1))
        self.version = 0
        """Number of truncations so far. A completion that carries an older version is ignored."""
        self.durable_index = shape.last_index
        self.commit_index = commit_index
        self.kept_from = LogIndex(0)
        """Every voter and every recent learner has the log below this index on its disk."""
        self.leader: ReplicaId | None = None
        self.caught_up_ms: MonoMs | None = None
        """When this replica last led, or had all that its leader had committed. None: not yet."""
        self.highest_met = promise.epoch
        """Highest epoch promised by this replica or by a voter that refused it."""
        self.refused_epoch = Epoch(0)
        """Epoch of the highest promise that refused this leadership; 0: none. If it equals `epoch`,
        a voter promised another candidate of the same epoch. That voter follows again only from
        the next epoch on."""
        self.clock_samples: dict[ReplicaId, ClockSample] = {}
        self.wake_at_ms: MonoMs | None = None
        """Time of the next step at the latest. None: nothing is pending."""

        self._now = now_ms
        self._role = Role.FOLLOWER
        self._waiting_fence: WaitingFence | None = None
        self._bid: Bid | None = None
        self._met: set[ReplicaId] = set()
        """Replicas that were connected since the start, voters or not."""
        self._sets = self._sets_in_force()
        # Follower. A leader from before this start may still count this replica's answers in its
        # lease. Not if no promise was ever given, or the last was to an earlier process of our own.
        self._guard_ends_ms = now_ms
        if promise.epoch and promise.leader != me:
            self._guard_ends_ms = MonoMs(now_ms + conf.guard_ms)
        self._released = False
        self._matched_index = commit_index
        self._heard_commit = commit_index
        self._sure_from: LogIndex | None = None
        self._owed_answer: tuple[ReplicaId, Append, MonoMs] | None = None
        self._fetch: tuple[ReplicaId, Fetch] | None = None
        # Leader.
        self.serving = False
        self.draining = False
        self.takes_last_entries = False
        """The handover has begun; the shell may still propose its last entries."""
        self._progress: dict[ReplicaId, Progress] = {}
        self._led_ms = now_ms
        self._own_disk = OwnDisk()
        self._drain_ms = now_ms
        self._start_index = LogIndex(0)

    # ---------------------------------------------------------------- knowledge

    @property
    def role(self) -> Role:
        """The present role. A follower outside the voter sets in force is a learner."""
        if self._role is Role.FOLLOWER and not self._is_voter():
            return Role.LEARNER
        return self._role

    @property
    def epoch(self) -> Epoch:
        """Epoch of the present promise; 0: none was given."""
        return self.promise.epoch

    @property
    def voters(self) -> Voters:
        """The newest voter set in the log, committed or not."""
        return self.shape.voters

    @property
    def matched_index(self) -> LogIndex:
        """Up to this index the log equals that of the leader being followed."""
        return self.shape.last_index if self._role is Role.LEADER else self._matched_index

    @property
    def uncommitted_bytes(self) -> int:
        """Bytes of entries that are not committed or not on this disk. They stay in memory."""
        return self.tail.size(min(self.commit_index, self.durable_index), self.shape.last_index)

    @property
    def timed_index(self) -> LogIndex:
        """A leader's commits up to this index show how quick it is: no full link delays them."""
        ends = {peer: each.timed_index(self.conf) for peer, each in self._progress.items()}
        return LogIndex(majority_value(self._sets, {self.me: self.shape.last_index, **ends}))

    @property
    def bid_epoch(self) -> Epoch:
        """The epoch that this replica bids to lead; 0: none."""
        return self._bid.under.epoch if self._bid else Epoch(0)

    def lease_until_ms(self, now_ms: MonoMs) -> MonoMs | None:
        """Return the end of the leader's lease if it is not renewed. None: not a leader."""
        if self._role is not Role.LEADER:
            return None
        values = {self.me: int(now_ms)}
        for peer, progress in self._progress.items():
            if progress.acked_ms is not None:
                # 0 means "absent" in `majority_value`, and the clock may start at 0.
                values[peer] = max(progress.acked_ms, 1)
        sent_ms = majority_value(self._sets, values)
        return MonoMs(sent_ms + self.conf.lease_ms) if sent_ms else self._led_ms

    def holds_lease(self, now_ms: MonoMs) -> bool:
        """Return whether the lease excludes another leader at `now_ms`."""
        until_ms = self.lease_until_ms(now_ms)
        return until_ms is not None and now_ms < until_ms

    def _is_voter(self) -> bool:
        return any(self.me in voters for voters in self._sets)

    def _peers(self) -> list[ReplicaId]:
        return sorted(self._met.union(*self._sets) - {self.me})

    def _sets_in_force(self) -> tuple[Voters, ...]:
        return tuple({start.voters for start in self.shape.sets_from(self.commit_index)})

    # ---------------------------------------------------------------- steps

    def step(self, now_ms: MonoMs, event: Event) -> Effects:
        """Advance to `now_ms`, apply `event`, and return the orders for the shell."""
        assert now_ms >= self._now, f"time went back: {self._now} -> {now_ms}"
        self._now = now_ms
        out = Effects()
        if isinstance(event, Proposed):
            # Proposals come in bursts. All other work waits for the tick at the burst's end.
            self._on_proposed(event.sizes)
            return out
        match event:
            case Received():
                self._on_received(event, out)
            case Durable(version, index):
                self._on_durable(version, index)
            case Loaded():
                self._on_loaded(event, out)
            case Appointed(epoch, leader, voters):  # the level is for the driver
                self._on_appointed(epoch, leader, voters)
            case Handover():
                self._drain()
            case Reconnected(peer):
                self._on_reconnected(peer)
            case Tick():
                pass
        self._settle(out)
        return out

    def _settle(self, out: Effects) -> None:
        """Do everything that has become possible or due."""
        if self._waiting_fence is not None:
            self._consider_fence(self._waiting_fence, out)
        if self._bid is not None:
            self._pursue(self._bid, out)
        if self._role is Role.LEADER:
            self._advance_commit(out)
            self._lead(out)
        else:
            self._follow(out)
        self.tail.trim(self.durable_index, self.conf.cache_bytes)
        done = LogIndex(min(self.durable_index, self.commit_index))
        self.tail.age(self._now, done, self.conf.cache_ms)
        self.wake_at_ms = self._wake_at()
        assert self.commit_index <= self.matched_index, (
            f"commit {self.commit_index}, matched {self.matched_index}"
        )

    def _wake_at(self) -> MonoMs | None:
        at: list[int] = []
        if self._bid is not None:
            at.append(self._bid.send_at_ms)
        if self._waiting_fence is not None:
            at.append(max(self._no_other_until(), self._now + 1))
        if self._role is Role.LEADER:
            sent_ms = min((p.sent_ms for p in self._progress.values()), default=self._now)
            at.append(sent_ms + self.conf.heartbeat_ms)
        return MonoMs(max(min(at), self._now)) if at else None

    def _on_received(self, event: Received, out: Effects) -> None:
        sender = event.sender
        match event.message:
            case heard if self.unsure and self._is_voter() and has_forgotten(heard, self.promise):
                out.forgotten = True
            case Append() as message:
                self._on_append(sender, message, event.sizes, out)
            case AppendAnswer() as message:
                self._on_append_answer(sender, message, event.wall_ms)
            case Fence() as message:
                self._on_fence(sender, message, out)
            case FenceAnswer() as message:
                self._on_fence_answer(sender, message, event.wall_ms)
            case Fetch() as message:
                self._on_fetch(sender, message, out)
            case FetchAnswer() as message:
                self._on_fetch_answer(sender, message, event.sizes, out)
            case Behind() as message:
                leads = message.under == self.promise and sender == self.leader
                out.behind = leads and message.to_nonce == self.nonce
            case Release() as message:
                if message.under == self.promise and message.under.leader == sender:
                    self._released = True
            case Refused() as message:
                self._on_refused(message.under, message.promise, out)

    def _on_durable(self, version: int, index: LogIndex) -> None:
        if version == self.version:
            assert self.durable_index <= index <= self.shape.last_index, (
                f"durable {self.durable_index} -> {index} of {self.shape.last_index}"
            )
            self.durable_index = index

    # ---------------------------------------------------------------- promises

    def _admits(self, under: Promise) -> bool:
        return under.epoch > self.promise.epoch or under == self.promise

    def _refuse(self, to: ReplicaId, under: Promise, out: Effects) -> None:
        out.send.append(OutgoingMessage(to, Refused(under=under, promise=self.promise)))

    def _adopt(self, under: Promise, out: Effects) -> None:
        """Promise `under` and become a follower."""
        assert under.epoch > self.promise.epoch, f"promise goes back: {self.promise} -> {under}"
        self._cease(out)
        self.promise = under
        self.refused_epoch = Epoch(0)
        self.highest_met = max(self.highest_met, under.epoch)
        out.persist = Persist(under, self.unsure)
        self.leader = None
        self._released = False
        self._guard_ends_ms = self._now
        self._matched_index = self._heard_commit = self.commit_index
        self._sure_from = None
        self._owed_answer = self._fetch = None
        if self._bid is not None and not self._admits(self._bid.under):
            self._drop_bid()

    def _no_other_until(self) -> MonoMs:
        """Return the time until which this replica promises no other leader."""
        if self._role is Role.LEADER:
            # A leader counts its own answer like the others'.
            return self.lease_until_ms(self._now) or self._now
        return self._now if self._released else self._guard_ends_ms

    def _on_fence(self, sender: ReplicaId, fence: Fence, out: Effects) -> None:
        # A replica that is no voter in its own log answers too: the candidate may know a newer set.
        if not self._admits(fence.under):
            self._refuse(sender, fence.under, out)
            return
        waiting = self._waiting_fence
        if waiting is None or waiting.fence.under.epoch < fence.under.epoch:
            self._waiting_fence = WaitingFence(sender, fence, self._now)
        elif waiting.fence.under == fence.under:
            waiting.fence, waiting.since_ms = fence, self._now

    def _consider_fence(self, waiting: WaitingFence, out: Effects) -> None:
        """Answer the waiting fence if no lease and no unflushed log forbids it any more."""
        under = waiting.fence.under
        if not self._admits(under):
            self._waiting_fence = None
            self._refuse(waiting.sender, under, out)
            return
        if under != self.promise:
            if self._role is Role.LEADER and self.holds_lease(self._now):
                self._drain()  # a higher epoch was appointed, and its candidate is alive
                return
            if self._now < self._no_other_until():
                return
        if self.durable_index < self.shape.last_index:
            return
        self._waiting_fence = None
        if under != self.promise:
            self._adopt(under, out)
        answer = FenceAnswer(
            under=under,
            last_epoch=self.shape.last_epoch,
            last_index=self.shape.last_index,
            unsure=self.unsure,
            sets=self.shape.sets_from(self.commit_index),
            echo_ms=waiting.fence.sent_ms,
            waited_ms=self._now - waiting.since_ms,
        )
        if waiting.sender == self.me:
            self._become(Role.CANDIDATE)
            self._note_fence_answer(self.me, answer)
        else:
            out.send.append(OutgoingMessage(waiting.sender, answer))

    def _on_refused(self, under: Promise, promise: Promise, out: Effects) -> None:
        self.highest_met = max(self.highest_met, promise.epoch)
        if self._bid is not None and self._bid.under == under:
            self._drop_bid()
        if self._role is Role.LEADER and under == self.promise:
            self.refused_epoch = max(self.refused_epoch, promise.epoch)
            if promise.epoch > under.epoch:
                self._cease(out)

    def _become(self, role: Role) -> None:
        assert role in ROLE_CHANGES[self._role], (self._role, role)
        assert role is Role.FOLLOWER or self.promise.leader == self.me, (role, self.promise)
        self._role = role

    # ---------------------------------------------------------------- candidate

    def _on_appointed(self, epoch: Epoch, leader: ReplicaId, voters: Voters | None) -> None:
        if leader != self.me or epoch <= max(self.promise.epoch, self.bid_epoch):
            return
        if not self._is_voter():
            return
        under = Promise(epoch, self.me, self.nonce)
        self._bid = Bid(under, moved_ms=self._now, send_at_ms=self._now, voters=voters)
        if self._waiting_fence is not None and self._waiting_fence.fence.under.epoch >= epoch:
            return  # another candidate was first; the bid ends when that one is promised
        # Our own vote waits for the same conditions as every other vote.
        fence = Fence(under=under, last_epoch=self.shape.last_epoch, sent_ms=self._now)
        self._waiting_fence = WaitingFence(self.me, fence, self._now)

    def _drop_bid(self) -> None:
        self._bid = None
        if self._role is Role.CANDIDATE:
            self._become(Role.FOLLOWER)
        if self._waiting_fence is not None and self._waiting_fence.sender == self.me:
            self._waiting_fence = None

    def _on_fence_answer(self, sender: ReplicaId, answer: FenceAnswer, wall_ms: UnixMs) -> None:
        self.clock_samples[sender] = sample_of(wall_ms, answer, self._now)
        if self._bid is not None and self._bid.under == answer.under:
            self._note_fence_answer(sender, answer)

    def _note_fence_answer(self, voter: ReplicaId, answer: FenceAnswer) -> None:
        bid = self._bid
        assert bid is not None, answer
        assert answer.last_epoch < bid.under.epoch, f"entries of an epoch not led yet: {answer}"
        if self._now - bid.moved_ms >= self.conf.bid_ms:
            return  # the bid has expired: voters may have dropped what they answered before a pause
        if bid.is_news(voter, answer):
            bid.moved_ms = self._now

    def _counting_voters(self, bid: Bid, sets: tuple[Voters, ...]) -> set[ReplicaId]:
        """Return the voters whose promises count."""
        if bid.answers.keys() >= frozenset().union(*sets):
            return set(bid.answers)
        # An unsure voter may have lost a tail that it helped to commit. Its promise counts only if
        # every voter has answered.
        return {voter for voter, answer in bid.answers.items() if not answer.unsure}

    def _greatest_end(
        self, bid: Bid, voters: set[ReplicaId]
    ) -> tuple[tuple[Epoch, LogIndex], ReplicaId]:
        """Return the greatest log end among the voters `who`, and a voter that has it."""
        ends = {voter: bid.answers[voter] for voter in voters}
        return max(((end.last_epoch, end.last_index), voter) for voter, end in ends.items())

    def _pursue(self, bid: Bid, out: Effects) -> None:
        if self._now - bid.moved_ms >= self.conf.bid_ms:
            self._drop_bid()
            return
        sets = bid.sets(self.shape.sets_from(self.commit_index))
        if self.promise == bid.under:
            voters = self._counting_voters(bid, sets)
            if self.me in bid.answers and is_granted(sets, voters):
                goal, source = self._greatest_end(bid, voters)
                if (self.shape.last_epoch, self.shape.last_index) >= goal:
                    self._begin(bid, out)
                    return
                self._fetch_from(bid, source, out)
        if self._now >= bid.send_at_ms:
            self._send_fences(bid, sets, out)

    def _send_fences(self, bid: Bid, sets: tuple[Voters, ...], out: Effects) -> None:
        """Send or repeat the fences and the fetch that have no answer yet."""
        bid.send_at_ms = MonoMs(self._now + self.conf.heartbeat_ms)
        fence = Fence(under=bid.under, last_epoch=self.shape.last_epoch, sent_ms=self._now)
        for voter in sorted(frozenset().union(*sets) - bid.answers.keys() - {self.me}):
            out.send.append(OutgoingMessage(voter, fence))
        if bid.source is not None:
            self._send_fetch(bid, bid.source, out)

    def _fetch_from(self, bid: Bid, source: ReplicaId, out: Effects) -> None:
        """Fetch the entries of `source`. Drop its answer if it has been silent for `source_ms`."""
        if bid.source != source:
            bid.source, bid.fetch_in_flight = source, False
            bid.source_moved_ms = self._now
            bid.prev = min(self.shape.last_index, bid.answers[source].last_index)
        elif self._now - bid.source_moved_ms >= self.conf.source_ms:
            # The source's answer counts no longer. If it is alive, it answers the next fence.
            del bid.answers[source]
            bid.source = None
            return
        if not bid.fetch_in_flight:
            self._send_fetch(bid, source, out)

    def _send_fetch(self, bid: Bid, source: ReplicaId, out: Effects) -> None:
        bid.fetch_in_flight, prev = True, bid.prev
        fetch = Fetch(under=bid.under, prev_epoch=self.shape.epoch_at(prev), prev_index=prev)
        out.send.append(OutgoingMessage(source, fetch))

    def _on_fetch(self, sender: ReplicaId, fetch: Fetch, out: Effects) -> None:
        if fetch.under != self.promise:
            if not self._admits(fetch.under):
                self._refuse(sender, fetch.under, out)
            return
        prev, shape = fetch.prev_index, self.shape
        conflict = None
        if prev >= shape.base_index:
            # The candidate's entry may differ even below our commit index, or at our base.
            conflict = self._conflict(fetch.prev_epoch, prev)
        if conflict is not None or prev < shape.base_index or prev == shape.last_index:
            self._answer_fetch(sender, fetch, fetch.prev_index, conflict, out)
            return
        first = LogIndex(fetch.prev_index + 1)
        if first >= self.tail.first_index:
            last = self.tail.span(first, self.conf.fetch_bytes)
            self._answer_fetch(sender, fetch, last, None, out)
        elif self._fetch is None or self._fetch[1] != fetch:
            self._fetch = (sender, fetch)
            out.read.append(self._read(sender, first, self.conf.fetch_bytes))

    def _answer_fetch(
        self,
        to: ReplicaId,
        fetch: Fetch,
        last: LogIndex,
        conflict: Conflict | None,
        out: Effects,
    ) -> None:
        answer = FetchAnswer(
            under=fetch.under,
            prev_epoch=fetch.prev_epoch,
            prev_index=fetch.prev_index,
            last_index=last,
            starts=self.shape.starts_in(fetch.prev_index, last),
            conflict=conflict,
        )
        out.send.append(OutgoingMessage(to, answer))

    def _on_fetch_answer(
        self, sender: ReplicaId, answer: FetchAnswer, sizes: Sequence[int], out: Effects
    ) -> None:
        bid = self._bid
        if bid is None or bid.under != answer.under or bid.source != sender:
            return
        if (answer.prev_index, answer.prev_epoch) != (bid.prev, self.shape.epoch_at(bid.prev)):
            return  # the answer to an earlier fetch
        resume = self.shape.resume_at(answer.conflict) if answer.conflict is not None else None
        if resume is not None and self.commit_index <= resume < answer.prev_index:
            bid.prev = resume
        elif resume is None and answer.last_index > bid.prev:
            self._splice(answer.prev_index, answer.last_index, answer.starts, sizes, out)
            bid.prev = answer.last_index
            bid.moved_ms = self._now
        else:
            # The source lost entries that it had reported, or dropped the ones that were fetched.
            # The next fence goes to it again; an unchanged answer does not extend the bid.
            del bid.answers[sender]
            bid.source = None
            return
        bid.source_moved_ms, bid.fetch_in_flight = self._now, False

    # ---------------------------------------------------------------- leader

    def _begin(self, bid: Bid, out: Effects) -> None:
        """Lead: a majority promised, and this log holds every committed entry."""
        assert self.promise == bid.under, (self.promise, bid.under)
        self._bid = None
        self._become(Role.LEADER)
        self.leader = self.me
        self.serving = self.draining = False
        self._led_ms = self._now
        prev = self.shape.last_index
        start = LogStart(LogIndex(prev + 1), bid.under.epoch, self._next_voters(bid.voters))
        self.shape.extend(start.index, (start,))
        self._start_index = start.index
        out.start = start
        self._sets = self._sets_in_force()
        self._progress = {}
        for peer in self._peers():
            answer = bid.answers.get(peer)
            index = min(prev, answer.last_index) if answer else prev
            self._progress[peer] = self._fresh(LogIndex(max(index, self.shape.base_index) + 1))

    def _next_voters(self, proposed: Voters | None) -> Voters:
        """Return the voters from the next EPOCH entry on.

        These are `proposed` if it differs from the log's set by one change, contains this replica,
        and no earlier change is still open. Otherwise the log's set stays.
        """
        voters = self.shape.voters
        settled = self._sets_in_force() == (voters,)
        if proposed is None or not settled or self.me not in proposed:
            return voters
        return proposed if one_change(voters, proposed) else voters

    def set_start_size(self, size: int) -> None:
        """Record the size of the EPOCH entry that `start` ordered. Call before the next step."""
        assert len(self.tail) == self.shape.last_index - self.tail.first_index, len(self.tail)
        self.tail.extend((size,))

    def _cease(self, out: Effects) -> None:
        """Follow. A leader sends `Release` first, so that no follower waits for its lease."""
        if self._role is Role.LEADER:
            out.send += [
                OutgoingMessage(peer, Release(under=self.promise)) for peer in self._progress
            ]
            self._released = True
            self._progress = {}
            self._matched_index = self._heard_commit = self.commit_index
            self.serving = self.draining = self.takes_last_entries = False
            self.leader, self._own_disk = None, OwnDisk()
            self.caught_up_ms = self._now
        if self._role is not Role.FOLLOWER:
            self._become(Role.FOLLOWER)

    def _drain(self) -> None:
        if self._role is Role.LEADER and not self.draining:
            self.draining = self.takes_last_entries = True
            self._drain_ms = self._now

    def _on_proposed(self, sizes: Sequence[int]) -> None:
        assert self._role is Role.LEADER, self._role
        assert self.serving, "proposed before the EPOCH entry committed"
        assert self.takes_last_entries or not self.draining, "proposed while handing over"
        self.shape.extend(LogIndex(self.shape.last_index + len(sizes)), ())
        self.tail.extend(sizes)

    def end_proposals(self) -> None:
        """Record that the shell has proposed its last entries. A `Tick` must follow."""
        self.takes_last_entries = False

    def _lead(self, out: Effects) -> None:
        until_ms = self.lease_until_ms(self._now)
        assert until_ms is not None
        leases = (self._now - max(until_ms, self._led_ms)) // self.conf.lease_ms
        stuck = self._own_disk.for_ms(self._now) // self.conf.lease_ms
        if leases >= self.conf.stepdown_leases or stuck >= self.conf.stuck_leases:
            self._cease(out)
            return
        if self.draining and not self.takes_last_entries:
            waited_ms = self._now - self._drain_ms
            if (
                self.commit_index == self.shape.last_index
                or waited_ms >= self.conf.drain_leases * self.conf.lease_ms
            ):
                self._cease(out)
                return
        if out.start is not None:
            return  # the EPOCH frame does not exist yet; the shell ticks once it does
        for peer, progress in self._progress.items():
            self._feed(peer, progress, out)
            if self._now - progress.sent_ms >= self.conf.heartbeat_ms:
                progress.probe_in_flight = False
                if not self._feed(peer, progress, out):
                    self._send_append(peer, progress, LogIndex(progress.next - 1), 0, out)
                if progress.is_late(self._now, self.conf):
                    self._renew(peer, progress, out)
                if progress.is_stranded:
                    behind = Behind(under=self.promise, to_nonce=progress.nonce)
                    out.send.append(OutgoingMessage(peer, behind))

    def _feed(self, peer: ReplicaId, progress: Progress, out: Effects) -> bool:
        """Send new entries until the follower's window is full. Return whether any were sent."""
        sent = False
        while progress.next <= self.shape.last_index and progress.may_send(self.conf):
            if progress.next < self.tail.first_index:
                # While searching, a heartbeat finds the common index without reading the disk.
                if not progress.is_searching:
                    progress.read_log()
                    limit = min(self.conf.message_bytes, progress.window // 2)
                    out.read.append(self._read(peer, progress.next, limit))
                break
            limit = min(self.conf.message_bytes, progress.window // 2)
            if progress.is_searching:
                limit = self.conf.probe_bytes
            last = self.tail.span(progress.next, limit)
            size = self.tail.size(LogIndex(progress.next - 1), last)
            self._send_append(peer, progress, last, size, out)
            sent = True
        return sent

    def _send_append(
        self, peer: ReplicaId, progress: Progress, last: LogIndex, size: int, out: Effects
    ) -> None:
        """Send the entries [next, last], `size` bytes; a heartbeat if there are none."""
        prev = LogIndex(progress.next - 1)
        progress.note_append(self._now, last, size)
        out.send.append(OutgoingMessage(peer, self._append(progress, prev, last)))

    def _renew(self, peer: ReplicaId, progress: Progress, out: Effects) -> None:
        """Send a heartbeat that need not wait for the entries in flight: it follows none of them.

        A single large entry may take a slow link for longer than the lease.
        """
        progress.renewals.append(self._now)
        prev = LogIndex(max(progress.match, self.shape.base_index))
        out.overtake.append(OutgoingMessage(peer, self._append(progress, prev, prev)))

    def _append(self, progress: Progress, prev: LogIndex, last: LogIndex) -> Append:
        return Append(
            under=self.promise,
            sent_ms=self._now,
            to_nonce=progress.nonce,
            prev_epoch=self.shape.epoch_at(prev),
            prev_index=prev,
            last_index=last,
            starts=self.shape.starts_in(prev, last),
            commit_index=self.commit_index,
            kept_from=self.kept_from,
        )

    def _read(self, peer: ReplicaId, first: LogIndex, limit: int) -> Read:
        # An entry outside memory is durable, so the log has it.
        end = LogIndex(min(self.tail.first_index, first + ENTRIES_MAX) - 1)
        last = min(self.durable_index, end)
        assert first <= last, (first, self.durable_index, self.tail.first_index)
        assert first > self.shape.base_index, (
            f"entry {first} for replica {peer} was dropped; the log begins at"
            f" {self.shape.base_index + 1}"
        )
        return Read(self.version, peer, first, last, limit)

    def _on_loaded(self, event: Loaded, out: Effects) -> None:
        if event.version != self.version:
            return
        if self._role is Role.LEADER:
            progress = self._progress.get(event.peer)
            if progress is not None and progress.end_read(event.first):
                self._send_append(event.peer, progress, event.last, event.size, out)
        elif self._fetch is not None:
            to, fetch = self._fetch
            if to == event.peer and event.first == fetch.prev_index + 1:
                self._fetch = None
                self._answer_fetch(to, fetch, event.last, None, out)

    def _on_append_answer(self, sender: ReplicaId, answer: AppendAnswer, wall_ms: UnixMs) -> None:
        if self._role is not Role.LEADER or answer.under != self.promise:
            return
        progress = self._progress.get(sender)
        if progress is None or answer.nonce in progress.earlier_nonces:
            return
        base = self.shape.base_index
        progress.note_nonce(answer.nonce, LogIndex(max(answer.prev_index, base) + 1))
        self.clock_samples[sender] = sample_of(wall_ms, answer, self._now)
        progress.note_answer(self._now, answer, self.conf)
        if answer.fenced_by > self.epoch:
            self._drain()
        if answer.conflict is not None:
            progress.note_conflict(answer.prev_index, self.shape.resume_at(answer.conflict))
            return
        assert answer.durable_index <= answer.matched_index <= self.shape.last_index, (
            f"replica {sender} matched an entry that was never sent: {answer},"
            f" last index {self.shape.last_index}"
        )
        progress.note_match(answer.matched_index, answer.durable_index, base)

    def _fresh(self, first: LogIndex) -> Progress:
        return Progress(next=first, window=self.conf.window_bytes_start)

    def _on_reconnected(self, peer: ReplicaId) -> None:
        self._met.add(peer)
        if self._role is Role.LEADER:
            progress = self._progress.get(peer)
            if progress is None:
                # A new learner. It receives the log and counts in no majority.
                progress = self._fresh(LogIndex(self.shape.last_index + 1))
                self._progress[peer] = progress
            else:
                progress.probe_from(LogIndex(max(progress.match, self.shape.base_index) + 1))
            progress.sent_ms = MonoMs(min(progress.sent_ms, self._now - self.conf.heartbeat_ms))
        if self._bid is not None:
            self._bid.send_at_ms = self._now

    def _advance_commit(self, out: Effects) -> None:
        values: dict[ReplicaId, int] = {self.me: self.durable_index}
        for peer, progress in self._progress.items():
            values[peer] = progress.match
        most = majority_value(self._sets, values)
        self._own_disk.note(self._now, self.durable_index, LogIndex(most))
        # This may pass our own durable index. Such entries stay in memory until our disk has them.
        if most > self.commit_index and self._may_commit(LogIndex(most)):
            self._commit(LogIndex(most))
            self.serving = True
        if self.unsure and self.serving and self.durable_index >= self._start_index:
            self.unsure = False
            out.persist = Persist(self.promise, self.unsure)
        since_ms = self._now - self.conf.learner_ms
        fed = {peer for peer, p in self._progress.items() if (p.acked_ms or 0) > since_ms}
        floor = min(values.get(peer, 0) for peer in fed.union(*self._sets))
        self.kept_from = max(self.kept_from, LogIndex(min(floor, self.commit_index) + 1))

    def _may_commit(self, index: LogIndex) -> bool:
        """Return whether `index` reaches this epoch's EPOCH entry; lower entries can be lost."""
        return index >= self._start_index

    def _commit(self, index: LogIndex) -> None:
        assert index > self.commit_index, f"commit goes back: {self.commit_index} -> {index}"
        self.commit_index = index
        if len(self._sets) > 1 or self.shape.last_start <= index:
            self._sets = self._sets_in_force()

    # ---------------------------------------------------------------- follower

    def _on_append(
        self, sender: ReplicaId, append: Append, sizes: Sequence[int], out: Effects
    ) -> None:
        if not self._admits(append.under):
            self._refuse(sender, append.under, out)
            return
        if append.under != self.promise:
            self._adopt(append.under, out)
        assert self._role is not Role.LEADER, f"replica {sender} leads our own epoch: {append}"
        assert append.under.leader == sender, (sender, append.under)
        self.leader = sender
        if not self._released:
            self._guard_ends_ms = MonoMs(self._now + self.conf.guard_ms)
        conflict = None
        if append.prev_index > self.commit_index:  # a leader's log holds every committed entry
            conflict = self._conflict(append.prev_epoch, append.prev_index)
        if conflict is None:
            self._splice(append.prev_index, append.last_index, append.starts, sizes, out)
            self._matched_index = max(self._matched_index, append.last_index)
            self._heard_commit = max(self._heard_commit, append.commit_index)
            if append.commit_index <= self._matched_index:
                self.caught_up_ms = self._now
            self.kept_from = max(self.kept_from, append.kept_from)
            if append.to_nonce == self.nonce:
                self._sure_from = max(self._sure_from or append.commit_index, append.commit_index)
            if append.last_index > max(self.durable_index, append.prev_index):
                self._owed_answer = (sender, append, self._now)
                return
        self._answer_append(sender, append, conflict, self._now, out)

    def _answer_append(
        self,
        to: ReplicaId,
        append: Append,
        conflict: Conflict | None,
        since_ms: MonoMs,
        out: Effects,
    ) -> None:
        answer = AppendAnswer(
            under=append.under,
            nonce=self.nonce,
            prev_index=append.prev_index,
            matched_index=self._matched_index,
            durable_index=self._acked_index(),
            conflict=conflict,
            fenced_by=self._waiting_fence.fence.under.epoch if self._waiting_fence else Epoch(0),
            echo_ms=append.sent_ms,
            waited_ms=self._now - since_ms,
        )
        out.send.append(OutgoingMessage(to, answer))

    def _acked_index(self) -> LogIndex:
        return min(self.durable_index, self._matched_index)

    def _conflict(self, prev_epoch: Epoch, prev_index: LogIndex) -> Conflict | None:
        """Return where this log differs from one with that entry. None: this log has the entry."""
        if prev_index <= self.shape.last_index and self.shape.epoch_at(prev_index) == prev_epoch:
            return None
        return self.shape.conflict_at(prev_index)

    def _splice(
        self,
        prev: LogIndex,
        last: LogIndex,
        starts: Sequence[LogStart],
        sizes: Sequence[int],
        out: Effects,
    ) -> None:
        """Replace (prev, last] of this log by the received entries. `prev` has matched."""
        assert len(sizes) == last - prev, (len(sizes), prev, last)
        known = max(prev, min(self.commit_index, last))
        divergence = self.shape.divergence_at(known, starts, last)
        if divergence is not None:
            self._truncate(LogIndex(divergence - 1), out)
        first = LogIndex(max(self.shape.last_index, prev) + 1)
        if last >= first:
            assert first == self.shape.last_index + 1, (first, self.shape.last_index)
            self.shape.extend(last, [start for start in starts if start.index >= first])
            self.tail.extend(sizes[first - prev - 1 :])
            self._sets = self._sets_in_force()
            out.append = (first, last)

    def _truncate(self, after: LogIndex, out: Effects) -> None:
        assert after >= self.commit_index, (
            f"truncating to {after}, below the committed {self.commit_index}"
        )
        assert after >= self._matched_index or self._bid is not None, (
            f"truncating to {after}, below the matched {self._matched_index}"
        )
        self.shape.truncate_after(after)
        self.tail.truncate_after(after)
        self.durable_index = min(self.durable_index, after)
        self.version += 1
        self._fetch = None
        self._sets = self._sets_in_force()
        out.truncate_after = after

    def _follow(self, out: Effects) -> None:
        index = LogIndex(min(self._heard_commit, self._acked_index()))
        if index > self.commit_index:
            self._commit(index)
        if self._owed_answer is not None:
            to, append, since_ms = self._owed_answer
            if self._acked_index() > append.prev_index or self._acked_index() >= append.last_index:
                self._answer_append(to, append, None, since_ms, out)
                if self._acked_index() >= append.last_index:
                    self._owed_answer = None
        if (
            self.unsure
            and self._sure_from is not None
            and self._sure_from <= self._acked_index()
            and self.shape.last_epoch == self.promise.epoch
            and self._sure_from >= self.shape.last_start
        ):
            # The leader knows this process. Its commit index therefore counts no entry that only an
            # earlier process had on disk.
            self.unsure = False
            out.persist = Persist(self.promise, self.unsure)

    # ---------------------------------------------------------------- upkeep

    def drop_before(self, index: LogIndex, beyond: LogIndex = LogIndex(0)) -> LogIndex:
        """Drop the log below `index`, and return its first index afterwards.

        Entries are dropped once every voter and every recent learner has them. Below `beyond` they
        are dropped in any case; a follower that lacks them fetches a snapshot.
        """
        index = min(index, max(self.kept_from, beyond), self.commit_index, self.tail.first_index)
        if index > self.shape.base_index + 1:
            self.shape.drop_before(index)
            for progress in self._progress.values():
                if progress.next < index:  # a conflict at the new base marks it stranded
                    progress.probe_from(index)
        return LogIndex(self.shape.base_index + 1)

    @property
    def stranded(self) -> tuple[ReplicaId, ...]:
        """Followers that need entries which this leader's log has dropped."""
        return tuple(peer for peer, progress in self._progress.items() if progress.is_stranded)

    def __str__(self) -> str:
        """Return one line for scenario texts and failure reports."""
        words = [
            f"{self.role.value} epoch={self.epoch}",
            f"log={self.shape.last_epoch}:{self.shape.last_index}",
            f"durable={self.durable_index}",
            f"matched={self.matched_index}",
            f"commit={self.commit_index}",
        ]
        words += [word for word in ("serving", "draining", "unsure") if getattr(self, word)]
        words += [f"bid={self.bid_epoch}"] if self._bid else []
        words += [f"held={self._waiting_fence.fence.under.epoch}"] if self._waiting_fence else []
        return " ".join(words)
