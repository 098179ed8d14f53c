"""What cancels and acks are answered: the result enums of the contract, in Python."""

from enum import IntEnum


class CancelResult(IntEnum):
    """What became of a cancel; the truth while the timer is pending and for a while after."""

    CANCELLED = 1
    """It was pending and will never fire."""
    ALREADY_CANCELLED = 2
    """An earlier cancel did it: perhaps this one, if its answer was lost and it was retried."""
    ALREADY_FIRED = 3
    NOT_FOUND = 4
    """It never existed, or ended longer ago than the cluster remembers."""


class AckResult(IntEnum):
    """What became of an ack. The other two answers are raised: LeaseLost and NotDelivered."""

    ACKED = 1
    """On a majority of disks: the message is never delivered again to this group."""
    ALREADY_ACKED = 2
