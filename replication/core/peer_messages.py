"""Messages between replicas. Frames travel beside a message, never in it.

    candidate --Fence--> voter        request for a promise of this epoch and for the log's end
              <-FenceAnswer--         promised and flushed; delayed while another lease runs
    candidate --Fetch--> voter        request for the log's entries from an index on
              <-FetchAnswer--         frames, or where the logs differ
    leader ----Append--> follower     frames and the commit index; also the heartbeat
              <-AppendAnswer--        durable and matched indexes, or where the logs differ
    leader ----Behind--> follower     the log has dropped entries you need: fetch a snapshot
    leader ----Release-> all peers    the leadership is over; its lease binds no more
              <-Refused-----          (to any of these) another promise was given here

Every message names its leadership `under`: (epoch, leader's replica id, nonce of the leader's
process). An `Append` or `FetchAnswer` covers the entries (prev_index, last_index]. The first entry
of every epoch is an EPOCH entry. `prev_epoch` and `starts` therefore determine the epoch of each
covered entry.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from replication.core.promise import Promise
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId

ENTRIES_MAX: Final = 1024
"""Most entries of one message: their check takes 7 ms at the receiver, however small they are."""


@dataclass(frozen=True, slots=True)
class LogStart:
    """An EPOCH entry: the log is of `epoch` from `index` on, with these voters."""

    index: LogIndex
    epoch: Epoch
    voters: frozenset[ReplicaId]


class Conflict(NamedTuple):
    """Where the answering log differs from the requesting one, as far as the former can tell.

    The answering log holds entries of `epoch` from `first_index` to `last_index`. `last_index` is
    at or below the requested index. At that index the log has no entry of the requested epoch.
    """

    epoch: Epoch
    first_index: LogIndex
    last_index: LogIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A candidate's request for a promise."""

    under: Promise
    last_epoch: Epoch
    """Epoch of the candidate's last entry; 0: the log is empty."""
    sent_ms: MonoMs


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceAnswer:
    """A promise. It is durable, and so is the log up to (last_epoch, last_index)."""

    under: Promise
    last_epoch: Epoch
    last_index: LogIndex
    unsure: bool
    sets: tuple[LogStart, ...]
    """The last committed voter set in this log, and every later one."""
    echo_ms: MonoMs
    waited_ms: int
    """Milliseconds from the fence's arrival to this answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Entries from the leader; without entries, a heartbeat."""

    under: Promise
    sent_ms: MonoMs
    to_nonce: Nonce
    """The follower's process as the leader knows it; 0: unknown yet."""
    prev_epoch: Epoch
    prev_index: LogIndex
    last_index: LogIndex
    starts: tuple[LogStart, ...]
    commit_index: LogIndex
    kept_from: LogIndex
    """Every voter and every recent learner has the log below this index on its disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendAnswer:
    """The part of the follower's log that equals the leader's."""

    under: Promise
    nonce: Nonce
    """The follower's process. Another process may have lost the tail of this one's log."""
    prev_index: LogIndex
    """`prev_index` of the answered append."""
    matched_index: LogIndex
    durable_index: LogIndex
    """Up to this index the log is matched and on the follower's disk."""
    conflict: Conflict | None
    fenced_by: Epoch
    """A candidate of this epoch waits here for the leader's lease to end; 0: none."""
    echo_ms: MonoMs
    waited_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A candidate's request for the entries after (prev_epoch, prev_index)."""

    under: Promise
    prev_epoch: Epoch
    prev_index: LogIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchAnswer:
    """Entries after the requested index, or where the logs differ."""

    under: Promise
    prev_epoch: Epoch
    prev_index: LogIndex
    last_index: LogIndex
    starts: tuple[LogStart, ...]
    conflict: Conflict | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """The leader's log has dropped entries that this follower's process needs."""

    under: Promise
    to_nonce: Nonce


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """This leadership is over; its lease binds no follower any more."""

    under: Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The promise given here is of a higher epoch than `under`, or of another leader or process."""

    under: Promise
    promise: Promise


Message: TypeAlias = (
    Fence | FenceAnswer | Append | AppendAnswer | Fetch | FetchAnswer | Behind | Release | Refused
)
Entries: TypeAlias = Append | FetchAnswer
"""Messages that travel with frames."""
