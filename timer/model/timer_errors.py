"""Expected failures, as one tree. Bugs are not here: they are AssertionErrors.

EngineError
+-- InvalidRequestError       the caller must change the request; has field, value and limit
+-- NotFoundError             the topic, group or timer does not exist
|   +-- GroupDeletedError     the group was deleted during the request
|   +-- TopicDeletedError     the topic was deleted during the request
+-- AlreadyExistsError        it exists with other settings
+-- NotLeaderError            send the request to `leader`
+-- NotReadyError             this node can't serve yet (starting, no majority, no known leader)
+-- OverloadedError           back off `retry_after_ms`, then send it again
+-- DiskFullError             a majority's disks have too little space; send it again later
+-- QuotaReachedError         a topic has reached a quota; send it again when the topic has less
|   +-- LimitReachedError     the number of topics, groups or producers has reached its limit
+-- CommitTimeoutError        OUTCOME UNKNOWN; retry only as the same producer sequence
+-- LeadershipLostError       OUTCOME UNKNOWN; the leader was deposed with the entry in flight
+-- SequenceGapError          a producer's sequence is not the next one
+-- OutcomeForgottenError     a repeated sequence was applied; its result is no longer kept
+-- PermissionDeniedError     the caller's certificate or the access rules do not allow it
+-- TokenRejectedError        the bearer token is absent, unknown or expired
+-- UnknownProducerError      the producer id was never issued or has expired; register again
+-- GroupHeldError            an exclusive group has a consumer; try again when it has left
+-- ShuttingDownError         the node drains; another node will lead
+-- StorageError              this node's disk or files failed; it stops or heals
    +-- CorruptFileError      bytes that were durable are damaged; fetch them from a replica
    +-- UnknownVersionError   a file of another format version
    |   +-- UnsupportedLevelError   a feature level that another release supports
    +-- PromiseLostError      a founding voter's disk was lost and formatted again; replace the node
    +-- WrongDirectoryError   the data directory is of another cluster or node, in use, or empty
    +-- DiskFailedError       a write or fsync failed; the page cache can't be trusted after it
+-- ConfigError               a setting is unknown or out of range; has its name
    +-- CertificateDateError  a certificate is not valid at the time of this machine's clock
"""

from collections.abc import Sequence
from typing import ClassVar, Final, TypeAlias

from timer.model.feature_level import LEVEL_MAX, LEVEL_MIN

OVERLOAD_RETRY_MS: Final = 50
"""About the time in which a loaded cluster commits a full window."""
TEXT_MAX: Final = 512
"""Characters of a value in an error. A client may have sent megabytes."""


def _short(value: object) -> object:
    return value[:TEXT_MAX] + "…" if isinstance(value, str) and len(value) > TEXT_MAX else value


class EngineError(Exception):
    """Base of every failure that a caller can act on."""

    retryable: ClassVar[bool] = False
    """The identical request may succeed later."""
    outcome_known: ClassVar[bool] = True
    """True: the request certainly had no effect. False: it may have been applied."""


HIDDEN: Final = object()
"""In place of a value that is not at fault: the error does not show it."""


def _named(field: str, value: object) -> str:
    """Return `field = value`, or the field alone if its value is not shown."""
    if value is HIDDEN:
        return field
    shown = str(value).lower() if isinstance(value, bool) else repr(value)  # as in JSON and TOML
    return f"{field} = {shown}"


class InvalidRequestError(EngineError):
    """The request breaks a documented limit."""

    def __init__(self, field: str, value: object, limit: str, *, row: int | None = None) -> None:
        value = _short(value)
        super().__init__(f"{_named(field, value)}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit
        self.row = row
        """Index of the row at fault in its columns. None: the error is not about one row."""

    def at_rows(self, places: Sequence[int]) -> "InvalidRequestError":
        """Return the error with another row: `places` has that of each row that was checked.

        An error without a row gets one only if a single row was checked.
        """
        if self.row is None and len(places) > 1:
            return self
        row = places[self.row or 0]
        return InvalidRequestError(self.field, self.value, self.limit, row=row)

    def in_request(self, before: int, rows: int) -> "InvalidRequestError":
        """Return the error with its row in the name of the field, as in payload[7].

        `rows`: those of the whole request, of which `before` precede the columns. A request with
        one row needs no index.
        """
        if self.row is None or rows == 1:
            return self
        return InvalidRequestError(f"{self.field}[{before + self.row}]", self.value, self.limit)


class NotFoundError(EngineError):
    """The named topic, group, timer or other object does not exist."""

    denial: "PermissionDeniedError | None" = None
    """The denial that this error hides from the caller; for the node's audit log and counters."""

    def __init__(self, kind: str, name: object) -> None:
        name = _short(name)
        super().__init__(f"no such {kind}: {name!r}")


class GroupDeletedError(NotFoundError):
    """The group was deleted. Its messages are not delivered any more."""

    def __init__(self, topic: str, group: str) -> None:
        EngineError.__init__(self, f"group {group!r} of topic {topic!r} was deleted")


class TopicDeletedError(NotFoundError):
    """The topic was deleted, with its timers, messages and groups."""

    def __init__(self, topic: object) -> None:
        EngineError.__init__(self, f"topic {topic!r} was deleted")


class AlreadyExistsError(EngineError):
    """The named object exists, with other settings."""

    def __init__(self, kind: str, name: object, why: str) -> None:
        super().__init__(f"{kind} {name!r} exists already: {why}")


class NotLeaderError(EngineError):
    """This node does not lead the cluster."""

    retryable = True

    def __init__(self, leader: str | None) -> None:
        super().__init__(f"not the leader; try {leader or 'again in a moment: none is known'}")
        self.leader = leader
        """Address (host:port) of the leader. None: unknown at the moment."""


class NotReadyError(EngineError):
    """This node can't serve the request at the moment. The request certainly had no effect."""

    retryable = True


class OverloadedError(EngineError):
    """A bounded queue is full."""

    retryable = True

    def __init__(self, what: str, *, retry_after_ms: int) -> None:
        super().__init__(f"{what} is full; retry after {retry_after_ms} ms")
        self.retry_after_ms = retry_after_ms


class CallerLimitError(OverloadedError):
    """The caller's identity has reached a limit of the rules of access."""

    def __init__(self, what: str, limit: str, retry_after_ms: int) -> None:
        """`what`: the limit and the identity. `limit`: its value."""
        EngineError.__init__(self, f"{what}: {limit}; retry after {retry_after_ms} ms")
        self.retry_after_ms = retry_after_ms


class DiskFullError(EngineError):
    """Free space is kept for necessary work. New entries are rejected until there is more room."""

    retryable = True

    def __init__(self, disks: Sequence[tuple[str, int, int]], *, retry_after_ms: int) -> None:
        """`disks`: (node, free bytes, reserve in bytes) of the disks with too little room."""
        low = "; ".join(
            f"{node} has {free} bytes free, "
            + (
                "below its"
                if free < reserve
                else "and is full until it has an eighth more than its"
            )
            + f" storage.reserve_bytes = {reserve}"
            for node, free, reserve in disks
        )
        super().__init__(
            f"disks are nearly full: {low}: no new timer is accepted until there is free space"
        )
        self.retry_after_ms = retry_after_ms


_USES: Final = {
    "pending_max": "pending timer{s}",
    "pending_bytes_max": "byte{s} of pending payloads",
    "ready_max": "unacked message{s}",
    "ready_bytes_max": "byte{s} of payloads from the first unacked message on",
}
"""Field of a quota -> the things that it counts."""


class QuotaReachedError(EngineError):
    """A topic has reached a quota of timers or messages, or the request would exceed it."""

    retryable = True

    def __init__(
        self, topic: str, field: str, most: int, source: str, *, used: int, requested: int
    ) -> None:
        """`most`: value of the policy's `field`. `source`: its scope. `used`: the present use."""
        noun = _USES[field].format(s="" if used == 1 else "s")
        end = f"{requested:,} more would exceed its limit of {most:,}"
        if used >= most:
            end = f"its limit is {most:,}"
        of = f"({field} of the {source})"
        super().__init__(f"topic {topic!r} has {used:,} {noun}; {end} {of}")
        self.field = field
        self.limit = f"must be at most {most} {of}"


class LimitReachedError(QuotaReachedError):
    """The number of topics, groups or producers has reached its limit."""

    def __init__(self, field: str, limit: int, owner: str, count: int) -> None:
        """`field`: the setting. `owner`: the owner, such as the cluster, a namespace or a topic."""
        EngineError.__init__(self, f"{field}: {owner} has {count}: must be at most {limit}")
        self.field, self.limit = field, f"must be at most {limit}"


class CommitTimeoutError(EngineError):
    """No majority acknowledged in time. The entry may still commit."""

    retryable = True
    outcome_known = False


class LeadershipLostError(EngineError):
    """The leader was deposed or stopped with the entry in flight. The entry may still commit."""

    retryable = True
    outcome_known = False


class SequenceGapError(EngineError):
    """A producer skipped a sequence number."""

    def __init__(self, *, expected: int, got: int) -> None:
        super().__init__(f"sequence = {got}: the next of this producer is {expected}")
        self.expected = expected


class OutcomeForgottenError(EngineError):
    """A repeated sequence was applied long ago. Its ids are no longer kept."""

    outcome_known = False  # it was applied, so "certainly no effect" would be false

    def __init__(self, sequence: int) -> None:
        super().__init__(f"sequence = {sequence}: was applied, but its answer is no longer kept")


class UnknownProducerError(EngineError):
    """The producer id was never issued, or it expired idle."""

    def __init__(self, producer: int) -> None:
        why = "never issued here, or forgotten: it ended, or was idle for limits.producer_idle_ms"
        super().__init__(f"producer = {producer:016x}: {why}; register again")


class PermissionDeniedError(EngineError):
    """The caller's certificate or the rules of access do not allow the request."""


class TokenRejectedError(EngineError):
    """The caller's bearer token is absent, unknown or expired. No text of it has the token."""


class GroupHeldError(EngineError):
    """Another consumer has the exclusive group."""

    retryable = True

    def __init__(self, topic: str, group: str, holder: str) -> None:
        who = f"consumer {holder!r}" if holder else "a consumer without a name"
        super().__init__(f"group {group!r} of topic {topic!r} is exclusive, and {who} has it")


class ShuttingDownError(EngineError):
    """The node drains and accepts no new requests."""

    retryable = True


class StorageError(EngineError):
    """This node's disk or files failed. The process stops; after damage it heals."""


class CorruptFileError(StorageError):
    """Bytes that were durable are damaged or missing."""

    def __init__(self, path: object, position: int, why: str) -> None:
        super().__init__(f"{path}: corrupt at byte {position}: {why}")
        self.path, self.position, self.why = path, position, why


class UnreadableFileError(CorruptFileError):
    """The disk can't return bytes that were written: a bad sector or a passing failure."""


class UnopenedFileError(CorruptFileError):
    """A file or directory of a stopped node can't be opened."""

    def __init__(self, path: object, error: Exception) -> None:
        StorageError.__init__(self, str(error))
        self.path, self.position, self.why = path, 0, str(error)


class UnknownVersionError(StorageError):
    """A file of a format version that this program does not know."""

    def __init__(self, path: object, version: int, known: int) -> None:
        super().__init__(f"{path}: format version {version}; this program knows {known}")
        self.path = path


class UnsupportedLevelError(UnknownVersionError):
    """A directory or an entry of a feature level that this program does not support."""

    def __init__(self, where: object, level: int) -> None:
        other = "a newer" if level > LEVEL_MAX else "an older"
        StorageError.__init__(
            self,
            f"{where}: feature level {level}; this program supports {LEVEL_MIN} to {LEVEL_MAX}:"
            f" start {other} release (docs/upgrade.md)",
        )
        self.path = where


FileDamage: TypeAlias = CorruptFileError | UnknownVersionError
"""Damage of a file of state or log, of which the other nodes have copies."""


class PromiseLostError(StorageError):
    """This replica's promises are lost. It must not take part as the same voter."""


class WrongDirectoryError(StorageError):
    """The data directory can't be used by this node."""


class DiskFailedError(StorageError):
    """A read, write or fsync failed."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno
        """The system's errno, such as errno.ENOSPC. None: no system call failed."""


class ConfigError(EngineError):
    """A setting is unknown, of the wrong type or out of range."""

    def __init__(self, key: str, value: object, limit: str) -> None:
        super().__init__(f"{_named(key, value)}: {limit}")
        self.key = key


class CertificateDateError(ConfigError):
    """By this machine's clock a certificate is not valid yet, or not any more."""
