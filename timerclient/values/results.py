"""Results of schedules, cancels, reschedules, acks, nacks and extensions."""

from enum import IntEnum


class Result(IntEnum):
    """An enum of the contract; a result prints as its name."""

    def __str__(self) -> str:
        return self.name


class CancelResult(Result):
    """Outcome of a cancel. It is exact until ten minutes after the timer's due time or end.

    Only CANCELLED is true: `if client.cancel(timer):`.
    """

    CANCELLED = 1
    """The timer was pending and will never fire."""
    ALREADY_CANCELLED = 2
    """An earlier cancel took effect: perhaps an attempt of this call whose answer was lost."""
    ALREADY_FIRED = 3
    """The timer fired; or it was due, and its topic was deleted, so that its end is not known."""
    NOT_FOUND = 4
    """The timer never existed; or was due or ended more than ten minutes ago; or its topic was
    deleted and its due time has not come."""
    DROPPED = 5
    """The timer was dropped when its topic was resumed after a pause. It never fires."""
    RESCHEDULED = 6
    """The timer was rescheduled before; `get_timer(…).replaced_by` fires instead."""

    def __bool__(self) -> bool:
        return self is CancelResult.CANCELLED


class ScheduleResult(Result):
    """Outcome of one timer of a request."""

    SCHEDULED = 1
    REPLACED = 2
    """Scheduled; the pending timer with its key was cancelled."""
    KEPT = 3
    """Not scheduled: a pending timer has its key; the id of that timer is returned."""
    REJECTED = 4
    """Not scheduled: a pending timer has its key."""
    NOT_PENDING = 5
    """Not scheduled: on_conflict was "update", and no pending timer has the key."""


class RescheduleResult(Result):
    """Outcome of a reschedule, exact as long as that of a cancel."""

    RESCHEDULED = 1
    ALREADY_CANCELLED = 2
    """The timer was already cancelled, replaced or rescheduled; see `replaced_by`."""
    ALREADY_FIRED = 3
    NOT_FOUND = 4
    """The timer never existed or is no longer known; or no pending timer has the key."""
    DROPPED = 6
    """As CancelResult.DROPPED."""


class TimerState(Result):
    """State of a timer, as far as the cluster knows it."""

    PENDING = 1
    FIRED = 2
    CANCELLED = 3
    """Cancelled, replaced or rescheduled."""
    DROPPED = 4
    """Dropped when its topic was resumed after a pause. In a story, also: deleted with its topic
    while it was pending."""


class AckResult(Result):
    """Outcome of an ack. The other two outcomes are raised: LeaseLost and NotDelivered."""

    ACKED = 1
    """On a majority of disks: the message is never delivered again to this group."""
    ALREADY_ACKED = 2
    EXPIRED = 7
    """The message is never delivered again. Its time to live was over before the ack, or an
    earlier ack took effect and its answer was lost."""
    DEAD_LETTERED = 8
    """Not acked: the message had failed too often and is a dead letter, or was redriven as a new
    message. Cumulative ack: true of at least one message; the others are acked."""


class NackResult(Result):
    """Outcome of a nack. The other two outcomes are raised: LeaseLost and NotDelivered."""

    ALREADY_ACKED = 2
    """The message was acked before; it is not delivered again."""
    NACKED = 5
    """On a majority of disks: the message is delivered again, after its delay."""
    EXPIRED = 7
    """The message is never delivered again: it expired or was acked."""
    DEAD_LETTERED = 8
    """The message is a dead letter, or was redriven."""


class ExtendResult(Result):
    """Outcome of an extension. The other two outcomes are raised: LeaseLost and NotDelivered."""

    ALREADY_ACKED = 2
    EXTENDED = 6
    """The lease is extended, as long as the same node leads."""
    EXPIRED = 7
    """As NackResult.EXPIRED."""
    DEAD_LETTERED = 8
    """As NackResult.DEAD_LETTERED."""
