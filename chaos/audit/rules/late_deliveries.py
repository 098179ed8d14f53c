"""Late deliveries to a free consumer, without an excuse (waits.sql).

    delivered_late  P3  a message waited for a consumer that held no message, for longer than
                        `late_ms` plus a millisecond for each message that came to the group

A wait begins when the message fired, was moved from another topic, or came back and its delay was
over. It begins anew with each event that explains it:

- its consumer opened the group
- the group was sought, redriven or deleted
- a fault or a change of leader ended, and its excuse was over (late_firing.AFTER_MS)

So a message that waits long after an excuse is late, too.

A consumer is free while each message that it received is acked, nacked or over. In an ordered
group, or one with `max_in_flight`, all consumers of the group must be free. The time of a receipt
is on a client's clock: the run must state the greatest difference between clocks.

A long wait is not judged if an excuse covers the receipt, if the consumer was not free for that
long, or if the topic ever had a rate of delivery. Such waits are counted. With too many of them no
verdict is OK.
"""

from collections.abc import Sequence

from pyspark.sql import SparkSession

from chaos.audit.rules.client_tables import Tables
from chaos.audit.rules.late_firing import Stretch
from chaos.audit.rules.queries import RunEvidence


def judged(
    evidence: RunEvidence, spark: SparkSession, excused: Sequence[Stretch]
) -> tuple[Tables, dict[str, int]]:
    """Return violation -> offenders; and the numbers of long waits, and of those not judged.

    `excused`: from `late_firing.excuses`. Nothing is judged if the difference of clocks is unknown.
    """
    bound_ms = evidence.values["bound_ms"]
    if bound_ms is None:
        return {}, {"long": 0, "unjudged": 0}
    excuses = spark.createDataFrame([*excused], "excused_from_ms LONG, excused_to_ms LONG")
    found = evidence.ask("waits", "long_waits", excuses=excuses).cache()
    long, covered = found.count(), found.where("since_ms >= received_ms").count()
    waiting = found.where(f"received_ms - since_ms > {bound_ms}")
    left = waiting.count()
    if not left:
        return {}, {"long": long, "unjudged": covered}
    late = evidence.ask("waits", "delivered_late", waiting=waiting).cache()
    return {"delivered_late": late}, {"long": long, "unjudged": covered + left - late.count()}
