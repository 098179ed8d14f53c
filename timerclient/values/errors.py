"""Everything that the cluster, or the way to it, lets a call of this package raise: one tree.

TimerError
+-- InvalidRequest         change the request; names field and limit (a ValueError, too)
+-- NotFound               the topic, group or timer does not exist
|   +-- NotPending         the timer to be rescheduled is pending no more; says why
+-- AlreadyExists          it exists with other settings; a pending timer has the key
+-- Unavailable            nobody took it in time; it certainly had no effect
|   +-- NotLeader          (followed by the client itself)
|   +-- NotReady           no leader, no majority, starting
|   +-- ShuttingDown       the node drains
|   +-- Unreachable        no node answers, or none leads
+-- Overloaded             the cluster asked for a pause; the client's own patience ended first
+-- DiskFull               the cluster's disks have too little room; likewise
+-- QuotaReached           a topic has as much as it may; it is not sent again by itself
+-- OutcomeUnknown         IT MAY HAVE HAPPENED: the answer did not come
|   +-- CommitTimeout      no majority in time
|   +-- LeadershipLost     the leader was deposed, or stopped answering, with it in flight
|   +-- ConnectionLost     the connection broke with it in flight
+-- SequenceGap            (handled by the client itself)
+-- UnknownProducer        (handled by the client itself)
+-- OutcomeForgotten       IT HAPPENED, long ago; its ids are no longer kept
+-- LeaseLost              an ack came too late: the message is somebody else's
+-- GroupHeld              another consumer has the exclusive group
+-- NotDelivered           an ack of a message that was never handed out
+-- StorageFailed          a node's disk
+-- Fenced                 between nodes
+-- BadConfig              between operator and node
+-- RpcFailed              the transport or a proxy refused it, without a reason of the cluster's
+-- Closed                 you closed the client or the consumer

A RuntimeError is none of these, but a misuse that nothing was asked by: a client that was made
before a fork, or while the parent had one open (see timerclient/client/sync.py); waiting in the
callback of a future.

Two flags decide what to do: `retryable` (the identical call may succeed later) and
`outcome_known` (True: it certainly had no effect). The client itself already retries, as the
same producer sequence, until the call's time is up; what it raises is what is left after that.
"""

from collections.abc import Sequence
from typing import ClassVar, Final

import grpc
from google.protobuf.message import DecodeError

from timerclient.proto import timer_pb2 as pb
from timerclient.values.reasons import Reason
from timerclient.values.results import RescheduleResult

TRAILER = "timer-error-bin"
"""The trailing metadata in which an RPC that failed carries its `timer.v1.Error`."""


class TimerError(Exception):
    """Base of every failure that a caller can act on."""

    reason: ClassVar[Reason] = Reason.REASON_UNSPECIFIED
    retryable: bool = False
    """The identical call may succeed later."""
    outcome_known: bool = True
    """True: it certainly had no effect. False: it may have been applied."""
    retry_after_ms: int = 0
    """How long the cluster asks to wait before it is sent again."""
    done: int = 0
    """Of a call that is many requests: so much was done before this one failed, at least."""


class InvalidRequest(TimerError, ValueError):
    """The request breaks a documented limit."""

    reason = Reason.INVALID_REQUEST
    field: str = ""
    limit: str = ""

    @classmethod
    def of(cls, field: str, value: object, limit: str) -> "InvalidRequest":
        """Return the refusal of a value, before anything was sent."""
        error = cls(f"{field} = {value!r}: {limit}")
        error.field, error.limit = field, limit
        return error


class NotFound(TimerError):
    """The named thing does not exist."""

    reason = Reason.NOT_FOUND


class NotPending(NotFound):
    """The timer fired, was cancelled, or is not known: it was not changed."""

    result: RescheduleResult = RescheduleResult.NOT_FOUND
    """Why. NOT_FOUND if the timer was named by its key."""
    replaced_by: str | None = None
    """Id of the timer that fires instead, if this one was rescheduled before; None: not known."""

    @classmethod
    def of(cls, name: str, result: RescheduleResult, replaced_by: str | None) -> "NotPending":
        """Return the refusal to reschedule a timer."""
        instead = f"; it was rescheduled, and goes on as {replaced_by}" if replaced_by else ""
        error = cls(f"timer {name}: {result.name}{instead}")
        error.result, error.replaced_by = result, replaced_by
        return error

    @classmethod
    def of_key(cls, key: str) -> "NotPending":
        """Return the refusal to update a timer."""
        named = f"key = {key!r}: " if key else ""
        return cls(f"{named}no pending timer of the topic has the key; nothing was scheduled")


class AlreadyExists(TimerError):
    """The named thing exists, with other settings; or a pending timer has the key."""

    reason = Reason.ALREADY_EXISTS
    existing: str = ""
    """Id of the pending timer that has the key."""

    @classmethod
    def of_timer(cls, existing: str, key: str = "") -> "AlreadyExists":
        """Return the refusal of a timer whose key is taken."""
        named = f"key = {key!r}: " if key else ""
        error = cls(f"{named}a pending timer of the topic has the key: {existing}")
        error.existing = existing
        return error


class Unavailable(TimerError):
    """No node took the request; it certainly had no effect."""

    retryable = True


class NotLeader(Unavailable):
    """The node that was asked does not lead the cluster."""

    reason = Reason.NOT_LEADER
    leader: str = ""
    """Address (host:port) of the leader; empty: unknown at the moment."""


class NotReady(Unavailable):
    """The node can't serve at the moment: it starts, or has no majority or leader."""

    reason = Reason.NOT_READY


class ShuttingDown(Unavailable):
    """The node drains and takes nothing new."""

    reason = Reason.SHUTTING_DOWN


class Unreachable(Unavailable):
    """No node of the cluster answers, or none of them leads."""


class Overloaded(TimerError):
    """A bounded queue of the cluster is full."""

    reason = Reason.OVERLOADED
    retryable = True


class DiskFull(TimerError):
    """The cluster's disks are nearly full: it takes nothing new until there is room."""

    reason = Reason.DISK_FULL
    retryable = True


class QuotaReached(TimerError):
    """A topic has as many timers or messages as its policy allows, or would have more.

    It is told at once: what makes room, such as an ack, may take any time, or be the caller's own.
    """

    reason = Reason.QUOTA_REACHED
    retryable = True
    field: str = ""
    """Of the policy, such as pending_max."""
    limit: str = ""


class OutcomeUnknown(TimerError):
    """The answer did not come; the request may have been applied."""

    retryable = True
    outcome_known = False


class CommitTimeout(OutcomeUnknown):
    """No majority acknowledged in time; it may still commit."""

    reason = Reason.COMMIT_TIMEOUT


class LeadershipLost(OutcomeUnknown):
    """The leader was deposed or stopped answering with the request in flight."""

    reason = Reason.LEADERSHIP_LOST


class ConnectionLost(OutcomeUnknown):
    """The connection broke with the request in flight."""


class SequenceGap(TimerError):
    """A producer's sequence was not the one after its last."""

    reason = Reason.SEQUENCE_GAP
    expected_sequence: int = 0


class OutcomeForgotten(TimerError):
    """A repeated sequence was applied long ago: its timers exist, their ids are no longer kept."""

    reason = Reason.OUTCOME_FORGOTTEN
    outcome_known = False


class UnknownProducer(TimerError):
    """The producer id was never issued by this cluster, or it expired idle."""

    reason = Reason.UNKNOWN_PRODUCER


class LeaseLost(TimerError):
    """The message was redelivered or acked meanwhile; drop the work."""

    reason = Reason.LEASE_LOST
    offsets: tuple[int, ...] = ()
    """Queue offsets of the messages whose lease was lost."""

    @classmethod
    def of(cls, lost: Sequence[int], among: int) -> "LeaseLost":
        """Return the error of some messages among those of a call."""
        more = " …" if len(lost) > 1 else ""
        text = f"{len(lost)} of {among} messages are not this consumer's any more"
        error = cls(f"queue_offset = {lost[0]}{more}: {text}")
        error.offsets = tuple(lost)
        return error


class GroupHeld(TimerError):
    """Another consumer has the group, which is exclusive; the error names both."""

    reason = Reason.GROUP_HELD


class NotDelivered(TimerError):
    """The acked message was never handed out to this group."""


class StorageFailed(TimerError):
    """A node's disk failed; the node stops."""

    reason = Reason.STORAGE_FAILED


class Fenced(TimerError):
    """A newer epoch exists."""

    reason = Reason.FENCED


class BadConfig(TimerError):
    """A setting is unknown or out of range."""

    reason = Reason.CONFIG


class RpcFailed(TimerError):
    """The call was refused without one of the cluster's reasons: a proxy, another version."""


class Closed(TimerError):
    """The client or the consumer was closed."""


def _family(base: type[TimerError]) -> list[type[TimerError]]:
    return [base, *(c for child in base.__subclasses__() for c in _family(child))]


BY_REASON: dict[Reason, type[TimerError]] = {
    c.reason: c for c in _family(TimerError) if "reason" in vars(c) and c is not TimerError
}
"""The class of each reason on the wire: the one that names it, not what is derived from that."""

_MOVE = (Unavailable, LeadershipLost, ConnectionLost, StorageFailed, Fenced)
_WAIT = (Overloaded, CommitTimeout)
_NO_WAIT = (*_MOVE, QuotaReached)


def means_move(error: TimerError) -> bool:
    """Return whether this node is of no use at the moment: look for the leader again."""
    return isinstance(error, _MOVE)


def means_wait(error: TimerError) -> bool:
    """Return whether the same node may take the same request after a pause."""
    return isinstance(error, _WAIT) or (error.retryable and not isinstance(error, _NO_WAIT))


def from_wire(wire: pb.Error) -> TimerError:
    """Return the exception that an error of the contract stands for."""
    error = BY_REASON.get(Reason(wire.reason), RpcFailed)(wire.message)
    error.retryable = wire.retryable
    error.outcome_known = wire.outcome_known
    error.retry_after_ms = wire.retry_after_ms
    if isinstance(error, InvalidRequest | QuotaReached):
        error.field, error.limit = wire.field, wire.limit
    elif isinstance(error, NotLeader):
        error.leader = wire.leader
    elif isinstance(error, SequenceGap):
        error.expected_sequence = wire.expected_sequence
    return error


_REFUSED = frozenset(
    {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)
"""Statuses of a call that nobody took up; all others may come in the middle of the work."""


_HTTP_SIGNS: Final = ("Failed parsing HTTP/2", "Trying to connect an http1.x server")
"""In what gRPC says of a server that answers in HTTP/1."""


def from_rpc(failed: grpc.aio.AioRpcError) -> TimerError:
    """Return the exception for an RPC that failed, by its trailer, else by its status."""
    for name, value in failed.trailing_metadata() or ():
        if name == TRAILER and isinstance(value, bytes):
            try:
                return from_wire(pb.Error.FromString(value))
            except DecodeError:
                break
    details = failed.details() or "no details"
    text = f"{failed.code().name}: {details}"
    if any(sign in details for sign in _HTTP_SIGNS):
        text = f"this port speaks HTTP/1: give the node's gRPC port, not its HTTP port ({text})"
    return RpcFailed(text) if failed.code() in _REFUSED else ConnectionLost(text)


def as_unknown(error: TimerError) -> TimerError:
    """Return `error`, marked: an earlier sending of the same request may have been applied."""
    error.outcome_known = False
    return error
