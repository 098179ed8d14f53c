"""Errors of calls: one tree for those of the cluster, of the transport and of this client.

    TimerError
    +-- InvalidRequest         change the request; names field and limit (also a ValueError)
    +-- NotFound               the topic, group or timer does not exist
    |   +-- NotPending         the timer to reschedule is no longer pending; gives the reason
    +-- AlreadyExists          it exists with other settings, or a pending timer has the key
    +-- Unavailable            no node accepted the call in time; it certainly had no effect
    |   +-- NotLeader          (handled by the client)
    |   +-- NotReady           no leader, no majority, or the node is starting
    |   +-- ShuttingDown       the node is stopping
    |   +-- Unreachable        no node answers, or none leads
    +-- Overloaded             the cluster was busy until the call's time was up
    +-- DiskFull               the cluster's disks had too little space until the call's time was up
    +-- QuotaReached           a topic is at a quota; the client does not retry
    +-- OutcomeUnknown         MAY HAVE BEEN APPLIED: the answer did not arrive
    |   +-- CommitTimeout      no majority in time
    |   +-- LeadershipLost     the leader was deposed or stopped answering during the request
    |   +-- ConnectionLost     the connection broke during the request
    +-- SequenceGap            (handled by the client)
    +-- UnknownProducer        (handled by the client)
    +-- OutcomeForgotten       WAS APPLIED, long ago; its ids are no longer kept
    +-- PermissionDenied       no rule of access allows the call
    +-- TokenRejected          the bearer token is unknown or expired, or there is none
    +-- LeaseLost              an ack came after the lease had ended
    +-- GroupHeld              another consumer has the exclusive group
    +-- NotDelivered           an ack of a message that was never delivered
    +-- StorageFailed          a node's disk failed
    +-- Fenced                 between nodes only
    +-- BadConfig              between operator and node only
    +-- RpcFailed              rejected by the transport or a proxy, without a reason of the cluster
    +-- UndecodablePayload     a payload is not of the codec that decodes it (also a ValueError)
    +-- Closed                 you closed the client or the consumer

A misuse raises RuntimeError before anything is sent: use of a client that was created before a
fork, a fork while the parent had a client open (see timerclient/client/sync.py), or a wait in the
callback of a future.

Two flags help to handle an error: `retryable` (the identical call may succeed later) and
`outcome_known` (True: the call certainly had no effect). The client retries by itself, with the
same producer sequence, until the call's time is up. It raises the last error.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar

from timerclient.values.reasons import Reason
from timerclient.values.results import RescheduleResult


class TimerError(Exception):
    """Base class of the errors that a caller can handle."""

    reason: ClassVar[Reason] = Reason.REASON_UNSPECIFIED
    retryable: bool = False
    """The identical call may succeed later."""
    outcome_known: bool = True
    """True: the call certainly had no effect. False: it may have been applied."""
    retry_after_ms: int = 0
    """Milliseconds that the cluster asks to wait before a retry; 0: none."""
    done: int = 0
    """Of a call that sends several requests: the least that was done before one failed."""


class Described(str):
    """A description of a value, which an error shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _value_text(value: object) -> str:
    """Return how an error shows a value."""
    if isinstance(value, datetime):
        return value.isoformat()
    try:
        return repr(value)
    except ValueError:  # Python prints no whole number of so many digits
        return f"<{type(value).__name__}>"


class InvalidRequest(TimerError, ValueError):
    """The request exceeds a documented limit."""

    reason = Reason.INVALID_REQUEST
    field: str = ""
    limit: str = ""

    @classmethod
    def of(cls, field: str, value: object, limit: str) -> "InvalidRequest":
        """Return the error of a value that is rejected before anything is sent."""
        error = cls(
            f"{field}: {limit}" if value is None else f"{field} = {_value_text(value)}: {limit}"
        )
        error.field, error.limit = field, limit
        return error

    def with_field(self, field: str) -> "InvalidRequest":
        """Return the error with another name of its field, such as one with the row of a batch."""
        error = InvalidRequest(field + str(self).removeprefix(self.field))
        error.field, error.limit = field, self.limit
        return error


class NotFound(TimerError):
    """The named thing does not exist."""

    reason = Reason.NOT_FOUND


class NotPending(NotFound):
    """The timer fired, was cancelled, or is not known. It was not changed."""

    result: RescheduleResult = RescheduleResult.NOT_FOUND
    """The reason. NOT_FOUND if the timer was named by its key."""
    replaced_by: str | None = None
    """Id of the timer that fires instead, if this one was rescheduled before; None: not known."""

    @classmethod
    def of(cls, name: str, result: RescheduleResult, replaced_by: str | None) -> "NotPending":
        """Return the error of a timer that can't be rescheduled."""
        instead = f"; it was rescheduled as {replaced_by}" if replaced_by else ""
        error = cls(f"timer {name} is not pending: {result.name}{instead}")
        error.result, error.replaced_by = result, replaced_by
        return error

    @classmethod
    def of_key(cls, key: str, done: str = "scheduled") -> "NotPending":
        """Return the error of a key that no pending timer has; nothing was `done`."""
        named = f"key = {key!r}: " if key else ""
        return cls(f"{named}no pending timer of the topic has the key; nothing was {done}")


class AlreadyExists(TimerError):
    """The named thing exists with other settings, or a pending timer has the key."""

    reason = Reason.ALREADY_EXISTS
    existing: str = ""
    """Id of the pending timer that has the key."""

    @classmethod
    def of_timer(cls, existing: str, key: str = "") -> "AlreadyExists":
        """Return the error of a timer with the key of the pending timer `existing`."""
        named = f"key = {key!r}: " if key else ""
        error = cls(f"{named}a pending timer of the topic has the key: {existing}")
        error.existing = existing
        return error


class Unavailable(TimerError):
    """No node accepted the request; it certainly had no effect."""

    retryable = True


class NotLeader(Unavailable):
    """The node that received the request does not lead the cluster."""

    reason = Reason.NOT_LEADER
    leader: str = ""
    """Address (host:port) of the leader; empty: unknown."""


class NotReady(Unavailable):
    """The node can't serve at the moment: it is starting, or has no majority or leader."""

    reason = Reason.NOT_READY


class ShuttingDown(Unavailable):
    """The node is stopping and accepts no new requests."""

    reason = Reason.SHUTTING_DOWN


class Unreachable(Unavailable):
    """No node of the cluster answers, or none of them leads."""

    answered: bool = False
    """Some node answered."""


class Overloaded(TimerError):
    """A bounded queue of the cluster is full."""

    reason = Reason.OVERLOADED
    retryable = True


class DiskFull(TimerError):
    """The cluster's disks are nearly full. New timers are rejected until there is room."""

    reason = Reason.DISK_FULL
    retryable = True


class QuotaReached(TimerError):
    """A topic is at a quota of its policy, or the request would exceed the quota.

    The client raises it at once and does not retry: room may take any time, or depend on acks of
    the caller.
    """

    reason = Reason.QUOTA_REACHED
    retryable = True
    field: str = ""
    """Name of the quota, such as pending_max."""
    limit: str = ""


class OutcomeUnknown(TimerError):
    """The answer did not arrive; the request may have been applied."""

    retryable = True
    outcome_known = False


class CommitTimeout(OutcomeUnknown):
    """No majority acknowledged the request in time; it may still be committed."""

    reason = Reason.COMMIT_TIMEOUT


class LeadershipLost(OutcomeUnknown):
    """The leader was deposed or stopped answering during the request."""

    reason = Reason.LEADERSHIP_LOST


class ConnectionLost(OutcomeUnknown):
    """The connection broke during the request."""


class SequenceGap(TimerError):
    """A producer's sequence does not follow its last one."""

    reason = Reason.SEQUENCE_GAP
    expected_sequence: int = 0


class OutcomeForgotten(TimerError):
    """The request was applied long ago: its timers exist, and their ids are no longer kept."""

    reason = Reason.OUTCOME_FORGOTTEN
    outcome_known = False


class UnknownProducer(TimerError):
    """The producer id was never issued by this cluster, or has expired."""

    reason = Reason.UNKNOWN_PRODUCER


class PermissionDenied(TimerError):
    """The cluster's rules of access do not allow the call for the client's certificate."""

    reason = Reason.PERMISSION_DENIED


class TokenRejected(TimerError):
    """The client's bearer token is unknown or expired, or the port needs one and got none."""

    reason = Reason.TOKEN_REJECTED


class LeaseLost(TimerError):
    """The lease has ended: the message may be delivered again, or is acked. Drop its work."""

    reason = Reason.LEASE_LOST
    offsets: tuple[int, ...] = ()
    """Queue offsets of the messages whose leases have ended."""

    @classmethod
    def of(cls, lost: Sequence[int], among: int) -> "LeaseLost":
        """Return the error of the messages `lost`, of `among` messages of a call."""
        more = " …" if len(lost) > 1 else ""
        text = f"the leases of {len(lost)} of {among} messages have ended"
        error = cls(f"queue_offset = {lost[0]}{more}: {text}")
        error.offsets = tuple(lost)
        return error


class GroupHeld(TimerError):
    """Another consumer has the exclusive group; the error names both."""

    reason = Reason.GROUP_HELD


class NotDelivered(TimerError):
    """The message was never delivered to this group."""


class StorageFailed(TimerError):
    """The disk or the files of a node failed; the node stops or heals."""

    reason = Reason.STORAGE_FAILED


class Fenced(TimerError):
    """A newer epoch exists."""

    reason = Reason.FENCED


class BadConfig(TimerError):
    """A setting is unknown or out of range."""

    reason = Reason.CONFIG


class RpcFailed(TimerError):
    """The call was rejected without a reason of the cluster, for example by a proxy."""


class UndecodablePayload(TimerError, ValueError):
    """A message's payload is not of the codec that decodes it."""


class Closed(TimerError):
    """The client or the consumer was closed."""


def _family(base: type[TimerError]) -> list[type[TimerError]]:
    return [base, *(c for child in base.__subclasses__() for c in _family(child))]


BY_REASON: dict[Reason, type[TimerError]] = {
    c.reason: c for c in _family(TimerError) if "reason" in vars(c) and c is not TimerError
}
"""The class of each reason on the wire: the class that defines `reason`, no subclass of it."""

_MOVE = (Unavailable, LeadershipLost, ConnectionLost, StorageFailed, Fenced)
_WAIT = (Overloaded, CommitTimeout)
_NO_WAIT = (*_MOVE, QuotaReached)


def means_move(error: TimerError) -> bool:
    """Return whether to look for the leader again, as this node can't serve."""
    return isinstance(error, _MOVE)


def means_wait(error: TimerError) -> bool:
    """Return whether the same node may accept the same request after a pause."""
    return isinstance(error, _WAIT) or (error.retryable and not isinstance(error, _NO_WAIT))


def as_unknown(error: TimerError) -> TimerError:
    """Mark `error` and return it: an earlier attempt of the request may have been applied."""
    error.outcome_known = False
    return error
