"""Why a request was refused or failed: the enum `timer.v1.Reason` of the contract, in Python."""

from enum import IntEnum


class Reason(IntEnum):
    """The reason that an error carries on the wire; its comments are in proto/timer.proto."""

    REASON_UNSPECIFIED = 0
    """None was given: the failure is the client's own, or the transport's."""
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

    @classmethod
    def _missing_(cls, value: object) -> "Reason":
        """Read a reason of a later version as unspecified: the error's flags still tell."""
        return cls.REASON_UNSPECIFIED
