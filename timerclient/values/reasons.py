"""Reasons why a request was rejected or failed: `timer.v1.Reason` by its short names."""

from enum import IntEnum


class Reason(IntEnum):
    """The reason in an error on the wire. Each is explained in proto/timer/v1/timer.proto."""

    REASON_UNSPECIFIED = 0
    """No reason was sent: the failure is one of the client or of the transport."""
    INVALID_REQUEST = 1
    NOT_FOUND = 2
    ALREADY_EXISTS = 3
    NOT_LEADER = 4
    NOT_READY = 5
    OVERLOADED = 6
    COMMIT_TIMEOUT = 7
    LEADERSHIP_LOST = 8
    SEQUENCE_GAP = 9
    OUTCOME_FORGOTTEN = 10
    UNKNOWN_PRODUCER = 11
    LEASE_LOST = 12
    SHUTTING_DOWN = 13
    STORAGE_FAILED = 14
    FENCED = 15
    CONFIG = 16
    DISK_FULL = 17
    GROUP_HELD = 18
    QUOTA_REACHED = 20
    PERMISSION_DENIED = 21
    TOKEN_REJECTED = 22

    @classmethod
    def _missing_(cls, value: object) -> "Reason":
        """Return REASON_UNSPECIFIED for a later version's reason; the error's flags stay valid."""
        return cls.REASON_UNSPECIFIED
