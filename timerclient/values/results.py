"""What schedules, changes and acks are answered: the result enums of the contract, in Python."""

from enum import IntEnum


class Result(IntEnum):
    """A result prints as its name."""

    def __str__(self) -> str:
        return self.name


class CancelResult(Result):
    """What became of a cancel; the truth while the timer is pending and for a while after.

    Only CANCELLED is true: `if client.cancel(timer):`.
    """

    CANCELLED = 1
    """It was pending and will never fire."""
    ALREADY_CANCELLED = 2
    """An earlier cancel did it: perhaps this one, if its answer was lost and it was retried."""
    ALREADY_FIRED = 3
    """Or it was due, and had gone with its topic: nothing is kept of that."""
    NOT_FOUND = 4
    """It never existed; was due, or ended, over ten minutes ago; or went with its topic, and is not
    due yet."""
    DROPPED = 5
    """Its topic was paused, and went on without it: it never fires."""
    RESCHEDULED = 6
    """It was rescheduled before, and another timer fires instead: `get_timer(…).replaced_by`."""

    def __bool__(self) -> bool:
        return self is CancelResult.CANCELLED


class ScheduleResult(Result):
    """What became of one timer of a request."""

    SCHEDULED = 1
    REPLACED = 2
    """Scheduled; the pending timer with its key was cancelled."""
    KEPT = 3
    """Not scheduled: the pending timer with its key stands for it."""
    REJECTED = 4
    """Not scheduled: a pending timer has its key."""
    NOT_PENDING = 5
    """Not scheduled: on_conflict was "update", and no pending timer has the key."""


class RescheduleResult(Result):
    """What became of a reschedule; true as a cancel's."""

    RESCHEDULED = 1
    ALREADY_CANCELLED = 2
    """Cancelled, replaced or rescheduled before: see `replaced_by`."""
    ALREADY_FIRED = 3
    NOT_FOUND = 4
    """It never existed, or ended longer ago than the cluster remembers; nobody has the key."""
    DROPPED = 6
    """As of a cancel."""


class TimerState(Result):
    """What the cluster knows of a timer."""

    PENDING = 1
    FIRED = 2
    CANCELLED = 3
    """Or replaced, or rescheduled."""
    DROPPED = 4
    """Its topic was deleted while it was pending (told by a story only), or was paused, and went on
    without it."""


class AckResult(Result):
    """What became of an ack. The other two answers are raised: LeaseLost and NotDelivered."""

    ACKED = 1
    """On a majority of disks: the message is never delivered again to this group."""
    ALREADY_ACKED = 2
    EXPIRED = 7
    """It is over, and is never delivered again: the time to live of its topic was over before the
    ack, unless an earlier ack of it, whose answer was lost, has counted."""
    DEAD_LETTERED = 8
    """The message failed too often before the ack: it is a dead letter, or was redriven as a new
    message, and stays so. Of a cumulative ack: at least one message is, the others are acked."""


class NackResult(Result):
    """What became of a nack. The other two answers are raised: LeaseLost and NotDelivered."""

    ALREADY_ACKED = 2
    """It is done: it does not come again."""
    NACKED = 5
    """On a majority of disks: the message comes again, not before its delay is over."""
    EXPIRED = 7
    """It is over: it does not come again."""
    DEAD_LETTERED = 8
    """It is a dead letter by now, or was redriven."""


class ExtendResult(Result):
    """What became of an extension. The other two answers are raised, as of a nack."""

    ALREADY_ACKED = 2
    EXTENDED = 6
    """The message is this consumer's for so much longer, as long as the same node leads."""
    EXPIRED = 7
    """It is over, as of a nack."""
    DEAD_LETTERED = 8
    """It is a dead letter, as of a nack."""
