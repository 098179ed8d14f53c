"""What a replica keeps in mind of others while it leads, waits or bids."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from replication.messages import Append, AppendAnswer, Fence, FenceAnswer, Message, Start
from replication.promise import Promise
from replication.quorum import Voters
from replication.steps import ClockSample
from timer.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs


@dataclass(slots=True)
class Progress:
    """What a leader knows of one follower."""

    next: LogIndex
    """First entry not sent yet."""
    match: LogIndex = LogIndex(0)
    """On the follower's disk, and the same as here."""
    probing: bool = True
    """It is not known where the logs agree: one append at a time, a small one."""
    waiting: bool = False
    """A probe is out."""
    inflight: deque[tuple[LogIndex, int]] = field(default_factory=deque[tuple[LogIndex, int]])
    """(last index, bytes) of appends not durable there."""
    inflight_bytes: int = 0
    sent_ms: MonoMs = MonoMs(0)
    acked_ms: MonoMs | None = None
    """When the newest of the answered messages was sent."""
    nonce: Nonce = Nonce(0)
    retired: set[Nonce] = field(default_factory=set[Nonce])
    reading: LogIndex | None = None
    stranded: bool = False
    """It lacks entries that were dropped here, as far as is known: a snapshot helps it."""

    def probe_from(self, index: LogIndex) -> None:
        """Find out where the logs agree, beginning at `index`."""
        self.next = index
        self.probing, self.waiting, self.reading = True, False, None
        self.inflight.clear()
        self.inflight_bytes = 0


@dataclass(slots=True)
class OwnDisk:
    """A leader's own disk, which syncs or hangs."""

    _durable: LogIndex = LogIndex(0)
    _since_ms: MonoMs | None = None

    def note(self, now_ms: MonoMs, durable: LogIndex, most: LogIndex) -> None:
        """Take note how far it is durable, and how far a majority is, it included."""
        if most <= durable:
            self._since_ms = None
        elif self._since_ms is None or self._durable != durable:
            self._durable, self._since_ms = durable, now_ms

    def for_ms(self, now_ms: MonoMs) -> int:
        """Return the milliseconds that it has not moved, with others alone a majority beyond it."""
        return 0 if self._since_ms is None else now_ms - self._since_ms


@dataclass(slots=True)
class Latency:
    """How long an entry takes until a disk, or a majority, has it; measured of one at a time."""

    _took_ms: int = 0
    _goal: LogIndex = LogIndex(0)
    _since_ms: MonoMs | None = None

    def note(self, now_ms: MonoMs, reached: LogIndex, end: LogIndex) -> None:
        """Take note how far it is, and where the log ends."""
        if self._since_ms is not None:
            if reached >= self._goal:
                self._took_ms = now_ms - self._since_ms
            if reached >= self._goal or end < self._goal:
                self._since_ms = None
        if self._since_ms is None and reached < end:
            self._goal, self._since_ms = end, now_ms

    def ms(self, now_ms: MonoMs) -> int:
        """Return how long the last one took, or the present one takes, whichever is longer."""
        return max(self._took_ms, 0 if self._since_ms is None else now_ms - self._since_ms)


@dataclass(slots=True)
class Held:
    """A fence that waits: for a leader's lease, or for the log to be flushed."""

    sender: ReplicaId
    fence: Fence
    since_ms: MonoMs


@dataclass(slots=True)
class Bid:
    """A candidate's way to its epoch."""

    under: Promise
    moved_ms: MonoMs
    """When a voter last said something new, or entries came."""
    send_at_ms: MonoMs
    voters: Voters | None = None
    """Proposed from this epoch on."""
    answers: dict[ReplicaId, FenceAnswer] = field(default_factory=dict[ReplicaId, FenceAnswer])
    source: ReplicaId | None = None
    prev: LogIndex = LogIndex(0)
    """Of the next fetch, or of the one that is out."""
    asked: bool = False
    """It is out."""
    source_moved_ms: MonoMs = MonoMs(0)
    _heard: dict[ReplicaId, tuple[Epoch, LogIndex, bool]] = field(
        default_factory=dict[ReplicaId, tuple[Epoch, LogIndex, bool]]
    )
    """The last answer of each voter, counted or not."""

    def hears(self, voter: ReplicaId, answer: FenceAnswer) -> bool:
        """Count an answer; return whether it differs from the voter's last one."""
        said = answer.last_epoch, answer.last_index, answer.unsure
        known, self._heard[voter] = self._heard.get(voter), said
        self.answers[voter] = answer
        return known != said

    def sets(self, own: tuple[Start, ...]) -> tuple[Voters, ...]:
        """Return the last committed voter set and every later one that the answers know.

        `own` are those that the candidate's log knows.
        """
        return in_force([own, *(answer.sets for answer in self.answers.values())])


def in_force(met: Iterable[tuple[Start, ...]]) -> tuple[Voters, ...]:
    """Return the last committed voter set and every later one, of those that several logs know."""
    known = [*met]
    committed = max((sets[0] for sets in known), key=lambda start: start.epoch)
    # One of an earlier epoch is committed already, or in a log that parts before, and never is.
    later = {start.voters for sets in known for start in sets if start.epoch > committed.epoch}
    return tuple({committed.voters, *later})


def has_forgotten(heard: Message, promise: Promise) -> bool:
    """Return whether an unsure voter, by what it hears, was one before its disk was lost.

    Founders begin unsure, so that the first leader of all had every founder's promise before there
    was an entry. An unsure voter that gave none and hears of entries is a founder formatted again.
    """
    founded = isinstance(heard, Append) or (isinstance(heard, Fence) and heard.last_epoch > 0)
    return founded and not promise.epoch


def sample_of(wall_ms: UnixMs, answer: AppendAnswer | FenceAnswer, now_ms: MonoMs) -> ClockSample:
    """Return what an answer that has just come tells of its sender's clock."""
    travelled_ms = max(now_ms - answer.echo_ms - answer.held_ms, 0)
    at_ms = MonoMs(now_ms - travelled_ms // 2)
    return ClockSample(wall_ms, at_ms, (travelled_ms + 1) // 2)
