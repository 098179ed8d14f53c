"""What replicas say to each other. Bytes travel beside a message, never in it.

    candidate --Fence--> voter        promise me this epoch, tell me your log's end
              <-FenceAnswer--         promised, flushed; held back while another leads
    candidate --Fetch--> voter        give me your log from here on
              <-FetchAnswer--         frames, or where our logs part
    leader ----Append--> follower     frames, commit index; also the heartbeat
              <-AppendAnswer--        what is durable and matched, or where our logs part
    leader ----Behind--> follower     you need what I have dropped: fetch a snapshot
    leader ----Release-> everybody    I lead no more, don't wait for my lease
              <-Refused-----          (to any of these) I promised somebody else

Every message names the leadership `under` which it is said: (epoch, leader's replica id, nonce
of the leader's process). An `Append` or `FetchAnswer` stands for the entries (prev_index,
last_index]. The first entry of every epoch is an EPOCH entry, so `starts` and `prev_epoch` say
the epoch of each of them.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from replication.promise import Promise
from timer.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId


@dataclass(frozen=True, slots=True)
class Start:
    """An EPOCH entry: from `index` on the log is of `epoch`, whose voters these are."""

    index: LogIndex
    epoch: Epoch
    voters: frozenset[ReplicaId]


class Conflict(NamedTuple):
    """Where the answering log parts from the asker's, as far as it can tell.

    It holds entries of `epoch` from `first_index` to `last_index`, which is at or below the
    index it was asked about, and nothing of the asker's epoch there.
    """

    epoch: Epoch
    first_index: LogIndex
    last_index: LogIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A candidate asks for a promise."""

    under: Promise
    last_epoch: Epoch
    """Of its log; 0: the log is empty."""
    sent_ms: MonoMs


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceAnswer:
    """The promise is durable, and so is the log up to its end."""

    under: Promise
    last_epoch: Epoch
    last_index: LogIndex
    unsure: bool
    sets: tuple[Start, ...]
    """The last committed voter set that this log knows, and every later one."""
    echo_ms: MonoMs
    held_ms: int
    """How long the fence waited here before it was answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Entries from the leader; without entries, a heartbeat."""

    under: Promise
    sent_ms: MonoMs
    to_nonce: Nonce
    """The follower's process as the leader knows it; 0: not yet."""
    prev_epoch: Epoch
    prev_index: LogIndex
    last_index: LogIndex
    starts: tuple[Start, ...]
    commit_index: LogIndex
    kept_from: LogIndex
    """Every follower had the log below this on its disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendAnswer:
    """How far the follower's log is the leader's."""

    under: Promise
    nonce: Nonce
    """The follower's process: another one may have lost its tail."""
    prev_index: LogIndex
    """Of the append that is answered."""
    matched_index: LogIndex
    durable_index: LogIndex
    """Matched and on the follower's disk."""
    conflict: Conflict | None
    fenced_by: Epoch
    """A candidate of this epoch waits here for the leader to go; 0: none."""
    echo_ms: MonoMs
    held_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A candidate asks for what follows (prev_epoch, prev_index)."""

    under: Promise
    prev_epoch: Epoch
    prev_index: LogIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchAnswer:
    """What follows it, or where the logs part."""

    under: Promise
    prev_epoch: Epoch
    prev_index: LogIndex
    last_index: LogIndex
    starts: tuple[Start, ...]
    conflict: Conflict | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """The leader's log begins after what this follower's process lacks."""

    under: Promise
    to_nonce: Nonce


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """This leadership is over; its lease holds nobody back."""

    under: Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The sender of `under` is older than, or another than, the promise given here."""

    under: Promise
    promise: Promise


Message: TypeAlias = (
    Fence | FenceAnswer | Append | AppendAnswer | Fetch | FetchAnswer | Behind | Release | Refused
)
Entries: TypeAlias = Append | FetchAnswer
"""Messages that frames travel with."""
