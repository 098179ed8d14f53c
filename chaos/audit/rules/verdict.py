"""Verdicts: each timer that any of the three witnesses knows gets one, by joins of their tables.

docs/audit.md lists the fine verdicts and the violations, each with its promise. `FINE` and
`VIOLATIONS` have their names, and verdicts.sql the conditions.

**Dead letters.** A dead letter is a message of its own, and so is the message that a redrive makes
of it. No client requests them: the log makes them, by the entry that ends the original message in
its group. They are judged as fired timers.

**Lives of a group.** A seek, or a deletion and new creation, begins another life of the group. The
life must receive all messages from its start on. P5 holds within a life. In an earlier life no
message needs to be delivered.

**Reschedules.** A reschedule ends one timer, by seq, and begins another. Each has a verdict. The
first must not be delivered. The second was requested by the reschedule, for the new time.

**Clocks.** P5 is judged by the log's order. The log counts an attempt when a lease ends (ENDED,
which is applied before the next delivery), or when a new epoch finds the message delivered. So each
(group, message, attempt) is delivered at most once. The replay knows the highest attempt before the
ack's entry. A delivery is after the ack if its attempt or its epoch is higher than the ack's.

The time of a receipt proves nothing: a message that was delivered before the ack may have been in
flight, or its client may have been suspended. Such receipts are counted (`arrived_after_ack`) and
not judged. Clocks are compared only if the run states their greatest difference (clock_error_ms),
and only beyond it. These comparisons find a cluster with a wrong clock, whose log looks right.
"""

from typing import Final, NamedTuple

FINE: Final = (
    *("ok", "cancelled", "dropped", "replaced", "rescheduled", "rejected", "kept", "expired"),
    *("carried", "pending", "held", "refused", "unknown_not_fired", "unknown_fired_once"),
)
VIOLATIONS: Final = (
    *("diverged", "duplicate_fire", "phantom", "key_doubled", "cancelled_delivered"),
    *("replaced_delivered", "rescheduled_delivered", "early", "misdated", "acked_again"),
    *("expired_delivered", "expired_early", "ack_lost", "unmarked_redelivery", "cancel_untrue"),
    *("conflict_untrue", "reschedule_untrue", "lost"),
)
"""In order of precedence: a timer that breaks several promises counts for the first."""


class Clocks(NamedTuple):
    """The run's end, and the greatest differences between clocks."""

    until_ms: int
    """The time of the last look by the clients or the harness, Unix ms."""
    error_ms: int | None = None
    """Greatest difference between the clients' clocks and the cluster's; None: unknown."""
    clients_error_ms: int | None = None
    """Greatest difference among the clients' clocks; None: unknown."""
