"""A replica's records of the others while it leads, holds a fence, or bids."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from replication.core.core_events import ClockSample
from replication.core.peer_messages import (
    Append,
    AppendAnswer,
    Fence,
    FenceAnswer,
    LogStart,
    Message,
)
from replication.core.promise import Promise
from replication.core.quorum import Voters
from replication.core.replication_config import ReplicationConfig
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs


class FollowerState(Enum):
    """How a leader feeds one follower."""

    PROBE = "probe"
    """The last common index is unknown. Appends go out one at a time and are small."""
    REPLICATE = "replicate"
    """The logs agree below `next`. Appends go out until the window is full."""
    READ_LOG = "read log"
    """As REPLICATE. The next entry has left memory and is being read from the leader's disk."""
    STRANDED = "stranded"
    """The follower needs entries that this log has dropped, as far as is known. Heartbeats alone
    go out; a snapshot replaces the entries."""


_PROBE, _REPLICATE = FollowerState.PROBE, FollowerState.REPLICATE
_READ_LOG, _STRANDED = FollowerState.READ_LOG, FollowerState.STRANDED
MOVES: Final = {
    _PROBE: {_PROBE, _REPLICATE, _STRANDED},
    _REPLICATE: {_PROBE, _REPLICATE, _READ_LOG},
    _READ_LOG: {_PROBE, _REPLICATE},
    _STRANDED: {_PROBE, _STRANDED},
}
"""Every transition of a follower's state."""

RENEWALS_MAX: Final = 32
"""More than are in flight: one is sent each `heartbeat_ms`."""
EARLIER_NONCES_MAX: Final = 64
"""Earlier processes of a follower that a leader remembers. Their answers are dropped."""


def _no_nonces() -> deque[Nonce]:
    return deque(maxlen=EARLIER_NONCES_MAX)


@dataclass(slots=True)
class Progress:
    """A leader's record of one follower."""

    next: LogIndex
    """First entry that was not sent yet; in PROBE and STRANDED the one after the probed index."""
    window: int
    """Maximum of `inflight_bytes`. It follows the time of messages to the follower and back."""
    match: LogIndex = LogIndex(0)
    """Up to this index the follower's disk holds the leader's entries."""
    state: FollowerState = _PROBE
    probe_in_flight: bool = False
    """In PROBE: a probe is in flight."""
    inflight: deque[tuple[LogIndex, int]] = field(default_factory=deque[tuple[LogIndex, int]])
    """(last index, bytes) of each append that the follower has not made durable."""
    inflight_bytes: int = 0
    window_since_ms: MonoMs = MonoMs(0)
    """Time of the window's last change."""
    filled_ms: MonoMs | None = None
    """Time at which the window was first full since its last change. None: it was not."""
    idle_sent_ms: MonoMs | None = None
    """Send time of a heartbeat with no entries in flight. None: it was answered, or lost."""
    idle_travel_ms: int | None = None
    """Time of such a heartbeat and its answer on their way, or of a quicker message since."""
    sent_ms: MonoMs = MonoMs(0)
    acked_ms: MonoMs | None = None
    """Send time of the newest message that was answered. None: no answer came yet."""
    renewals: deque[MonoMs] = field(default_factory=lambda: deque(maxlen=RENEWALS_MAX))
    """Send times of the last heartbeats that did not wait for the entries in flight."""
    nonce: Nonce = Nonce(0)
    earlier_nonces: deque[Nonce] = field(default_factory=_no_nonces)
    """The follower's last earlier processes."""

    @property
    def is_searching(self) -> bool:
        """Whether the last common index is unknown."""
        return self.state in (_PROBE, _STRANDED)

    @property
    def is_stranded(self) -> bool:
        """Whether a snapshot must replace entries that this log has dropped."""
        return self.state is _STRANDED

    def may_send(self, conf: ReplicationConfig) -> bool:
        """Return whether an append with entries may go out now."""
        if self.state is _PROBE:
            return not self.probe_in_flight
        return (
            self.state is _REPLICATE
            and len(self.inflight) < conf.window_messages
            and self.inflight_bytes < self.window
        )

    def probe_from(self, index: LogIndex) -> None:
        """Search for the last common index, beginning below `index`. A stranded follower stays so
        until an answer shows that it has an entry of this log."""
        self._restart(_STRANDED if self.is_stranded else _PROBE, index)

    def replicate_from(self, index: LogIndex) -> None:
        """Send the entries from `index` on: the logs agree below it."""
        self._restart(_REPLICATE, index)

    def read_log(self) -> None:
        """Wait until `next` and the entries after it are read from disk."""
        self._move(_READ_LOG)

    def end_read(self, first: LogIndex) -> bool:
        """Record that a read which began at `first` is done. Return whether it was awaited."""
        if self.state is not _READ_LOG or first != self.next:
            return False
        self._move(_REPLICATE)
        return True

    def note_append(self, now_ms: MonoMs, last: LogIndex, size: int) -> None:
        """Record an append of the entries [next, last], `size` bytes in all."""
        self.sent_ms, self.probe_in_flight = now_ms, True
        if not size and not self.inflight and self.idle_sent_ms is None:
            self.idle_sent_ms = now_ms
        if self.state is _REPLICATE and last >= self.next:
            self.inflight.append((last, size))
            self.inflight_bytes += size
            if self.filled_ms is None and self.inflight_bytes >= self.window:
                self.filled_ms = now_ms
            self.next = LogIndex(last + 1)

    def timed_index(self, conf: ReplicationConfig) -> LogIndex:
        """Return the end of what was sent; of a link with much in flight what the follower has."""
        if self.is_searching or self.inflight_bytes > conf.window_bytes_start:
            return self.match
        return LogIndex(self.next - 1)

    def is_late(self, now_ms: MonoMs, conf: ReplicationConfig) -> bool:
        """Return whether entries are in flight and two heartbeats' answers should have come."""
        late_ms = conf.heartbeat_ms + max(conf.heartbeat_ms, self.idle_travel_ms or 0)
        return bool(self.inflight) and now_ms - (self.acked_ms or 0) >= late_ms

    def note_answer(self, now_ms: MonoMs, answer: AppendAnswer, conf: ReplicationConfig) -> None:
        """Record the time of an answer, and adapt the window to it."""
        sent_ms = answer.echo_ms
        self.acked_ms = max(self.acked_ms or sent_ms, sent_ms)
        if sent_ms in self.renewals:
            return  # it overtook the others: it shows nothing of their way
        travelled = travelled_ms(answer, now_ms)
        if sent_ms == self.idle_sent_ms or self.idle_travel_ms is None:
            self.idle_travel_ms = travelled
        self.idle_travel_ms = min(self.idle_travel_ms, travelled)
        if self.idle_sent_ms is not None and sent_ms >= self.idle_sent_ms:
            self.idle_sent_ms = None
        if sent_ms < self.window_since_ms:
            return  # it shows the time in an earlier window
        window, queued_ms = self.window, travelled - self.idle_travel_ms
        was_full = self.filled_ms is not None and sent_ms > self.filled_ms
        is_quick = queued_ms <= conf.queued_ms_max // 2 and 2 * travelled <= conf.lease_ms
        if queued_ms > conf.queued_ms_max:
            window = max(window // 2, conf.window_bytes_min)
            if window == self.window:  # so little is no queue: the way has become longer
                self.idle_travel_ms = travelled
        elif was_full and is_quick:
            window = min(2 * window, conf.window_bytes)
        if window != self.window:
            self.window, self.window_since_ms, self.filled_ms = window, now_ms, None

    def note_nonce(self, nonce: Nonce, index: LogIndex) -> None:
        """Record the follower's process. A new process may have lost entries of the earlier one's
        disk (a torn tail): the search begins below `index`."""
        if nonce == self.nonce:
            return
        if self.nonce:
            self.earlier_nonces.append(self.nonce)
            self.match = LogIndex(0)
            self._restart(_PROBE, index)
        self.nonce = nonce

    def note_match(self, matched: LogIndex, durable: LogIndex, base: LogIndex) -> None:
        """Record the follower's answer: equal up to `matched`, on its disk up to `durable`.

        `base`: the entry below the first one of the leader's log.
        """
        self.match = max(self.match, durable)
        if self.is_stranded and matched >= base:
            self._move(_PROBE)  # the missing entries were still in flight
        # In REPLICATE an append from before the last search can match late.
        if matched >= (self.next - 1 if self.is_searching else self.next):
            self.replicate_from(LogIndex(matched + 1))
        while self.inflight and self.inflight[0][0] <= self.match:
            self.inflight_bytes -= self.inflight.popleft()[1]

    def note_conflict(self, prev: LogIndex, resume: LogIndex) -> None:
        """Record that the follower has no equal entry `prev`; the logs may agree at `resume`."""
        if prev <= self.match or prev >= self.next:
            return  # outdated: more has matched since, or another probe is in flight
        if self.is_searching and prev != self.next - 1:
            return
        resume = max(resume, self.match)
        if self.is_searching and resume >= prev:
            self._move(_STRANDED)
        else:
            self.probe_from(LogIndex(resume + 1))

    def _restart(self, state: FollowerState, index: LogIndex) -> None:
        self._move(state)
        self.next, self.probe_in_flight = index, False
        self.inflight.clear()
        self.inflight_bytes = 0

    def _move(self, state: FollowerState) -> None:
        assert state in MOVES[self.state], (self.state, state, self)
        self.state = state


@dataclass(slots=True)
class OwnDisk:
    """Whether a leader's own disk still syncs."""

    _durable: LogIndex = LogIndex(0)
    _since_ms: MonoMs | None = None

    def note(self, now_ms: MonoMs, durable: LogIndex, most: LogIndex) -> None:
        """Record the index `durable` on this disk and the index `most` that a majority has."""
        if most <= durable:
            self._since_ms = None
        elif self._since_ms is None or self._durable != durable:
            self._durable, self._since_ms = durable, now_ms

    def for_ms(self, now_ms: MonoMs) -> int:
        """Return for how many ms this disk stood still while a majority was ahead of it; 0: not."""
        return 0 if self._since_ms is None else now_ms - self._since_ms


@dataclass(slots=True)
class Latency:
    """The time until an entry reaches a disk or a majority. One entry is measured at a time."""

    _took_ms: int = 0
    _goal: LogIndex = LogIndex(0)
    _since_ms: MonoMs | None = None

    def note(self, now_ms: MonoMs, reached: LogIndex, end: LogIndex) -> None:
        """Record the index `reached` so far and the log's last index `end`."""
        if self._since_ms is not None:
            if reached >= self._goal:
                self._took_ms = now_ms - self._since_ms
            if reached >= self._goal or end < self._goal:
                self._since_ms = None
        if self._since_ms is None and reached < end:
            self._goal, self._since_ms = end, now_ms

    def ms(self, now_ms: MonoMs) -> int:
        """Return the ms of the last measured entry or of the present one, whichever is longer."""
        return max(self._took_ms, 0 if self._since_ms is None else now_ms - self._since_ms)


@dataclass(slots=True)
class WaitingFence:
    """A fence that waits for a leader's lease to end, or for the log to be flushed."""

    sender: ReplicaId
    fence: Fence
    since_ms: MonoMs


@dataclass(slots=True)
class Bid:
    """A candidate's progress towards its epoch."""

    under: Promise
    moved_ms: MonoMs
    """Time of the last new answer or new entries."""
    send_at_ms: MonoMs
    voters: Voters | None = None
    """The voter set proposed from this epoch on. None: no change."""
    answers: dict[ReplicaId, FenceAnswer] = field(default_factory=dict[ReplicaId, FenceAnswer])
    source: ReplicaId | None = None
    prev: LogIndex = LogIndex(0)
    """`prev_index` of the next fetch, or of the fetch in flight."""
    fetch_in_flight: bool = False
    """A fetch is in flight."""
    source_moved_ms: MonoMs = MonoMs(0)
    _heard: dict[ReplicaId, tuple[Epoch, LogIndex, bool]] = field(
        default_factory=dict[ReplicaId, tuple[Epoch, LogIndex, bool]]
    )
    """The last answer of each voter, even if it no longer counts."""

    def is_news(self, voter: ReplicaId, answer: FenceAnswer) -> bool:
        """Record an answer; return whether it differs from the voter's previous one."""
        state = answer.last_epoch, answer.last_index, answer.unsure
        known, self._heard[voter] = self._heard.get(voter), state
        self.answers[voter] = answer
        return known != state

    def sets(self, own: tuple[LogStart, ...]) -> tuple[Voters, ...]:
        """Return the last committed voter set and every later one, from all answers.

        `own`: the sets in the candidate's log.
        """
        return in_force([own, *(answer.sets for answer in self.answers.values())])


def in_force(met: Iterable[tuple[LogStart, ...]]) -> tuple[Voters, ...]:
    """Return the last committed voter set and every later one that any of several logs holds."""
    known = [*met]
    committed = max((sets[0] for sets in known), key=lambda start: start.epoch)
    # A set of an earlier epoch is committed already, or was replaced and never will be.
    later = {start.voters for sets in known for start in sets if start.epoch > committed.epoch}
    return tuple({committed.voters, *later})


def has_forgotten(heard: Message, promise: Promise) -> bool:
    """Return whether an unsure voter had a vote before its disk was lost.

    Founders begin unsure, so the very first leader needs the promise of every founder before the
    first entry. An unsure voter without a promise that learns of entries was formatted again.
    """
    founded = isinstance(heard, Append) or (isinstance(heard, Fence) and heard.last_epoch > 0)
    return founded and not promise.epoch


def travelled_ms(answer: AppendAnswer | FenceAnswer, now_ms: MonoMs) -> int:
    """Return how long a message and its answer, which has just arrived, were on their way."""
    return max(now_ms - answer.echo_ms - answer.waited_ms, 0)


def sample_of(wall_ms: UnixMs, answer: AppendAnswer | FenceAnswer, now_ms: MonoMs) -> ClockSample:
    """Return the reading of the sender's wall clock in an answer that has just arrived."""
    travelled = travelled_ms(answer, now_ms)
    at_ms = MonoMs(now_ms - travelled // 2)
    return ClockSample(wall_ms, at_ms, (travelled + 1) // 2)
