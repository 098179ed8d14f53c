"""Late firings and late deliveries without an excuse (waits.sql).

    late            P3  fired too long after the timer was due, or was scheduled if that was later;
                        time that is excused does not count
    delivered_late  P3  a message waited for a consumer that held no message, for longer than
                        `late_ms` plus a millisecond for each message that came to the group

The excuses of both are a fault of the timeline and its recovery, and a change of leader by the log.
A firing is also excused by the backlog after one of these, and by a pause of its topic.

The wait for a consumer begins when the message fired, was moved from another topic, or came back
and its delay was over. It begins again when the consumer opened the group, when the group was
sought, redriven or deleted, and at the end of an excuse. So a message that waits long after an
excuse is late, too. A consumer is free while each message that it received is acked, nacked or
over. In an ordered group, or one with `max_in_flight`, all consumers of the group must be free. The
time of a receipt is on a client's clock: the run must state the greatest difference between clocks.

A long wait is not judged if an excuse covers the receipt, if the consumer was not free for that
long, or if the topic ever had a rate of delivery. Such waits are counted. With too many of them no
verdict is OK.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from pyspark.sql import Row

from chaos.audit.rules.fault_windows import Phase
from chaos.audit.rules.queries import BOUNDS, RunEvidence, Tables

RECOVERY_MS: Final = 120_000
"""The recovery from a fault is an excuse for at most this long."""
EXCUSES: Final = "excused_from_ms LONG, excused_to_ms LONG"
"""The columns of the table of excuses."""

Stretch = tuple[int, int]
"""[from, to), Unix milliseconds."""


def excuses(phases: Iterable[Phase], epochs: Sequence[Row]) -> list[Stretch]:
    """Return the stretches in which timers may be late: faults, and changes of leader.

    They do not overlap. `epochs`: from the query `epochs`, in order.
    """
    found, after_ms = [], BOUNDS["after_ms"]
    for phase in phases:
        end_ms = phase.end_ms
        if phase.name == "recovery":  # it lasts until a timer fires, so a stall prolongs it
            end_ms = min(end_ms, phase.start_ms + RECOVERY_MS)
        found.append((phase.start_ms, end_ms + after_ms))
    for row in epochs:
        times = [row[name] for name in ("since_ms", "began_ms", "fired_ms")]
        end_ms = max(time_ms for time_ms in times if time_ms is not None)
        found.append((row["since_ms"], end_ms + after_ms))
    return _merged(found)


def _merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    merged: list[Stretch] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def firings(evidence: RunEvidence, excused: Sequence[Stretch]) -> tuple[Tables, dict[str, int]]:
    """Return violation -> offenders; and the numbers of long waits, and of those not judged."""
    evidence.tables["excuses"] = evidence.spark.createDataFrame([*excused], EXCUSES)
    late = {"late": evidence.query("waits", "late")}
    if evidence.has("occurrences"):
        late["planned_late"] = evidence.query("waits", "planned_late")
    delivered, figures = deliveries(evidence)
    return late | delivered, figures


def deliveries(evidence: RunEvidence) -> tuple[Tables, dict[str, int]]:
    """Return the same for deliveries. Nothing is judged if the difference of clocks is unknown."""
    bound_ms = evidence.values["bound_ms"]
    if bound_ms is None:
        return {}, {"long": 0, "unjudged": 0}
    found = evidence.query("waits", "long_waits").cache()
    long, covered = found.count(), found.where("since_ms >= received_ms").count()
    waiting = found.where(f"received_ms - since_ms > {bound_ms}")
    left = waiting.count()
    if not left:
        return {}, {"long": long, "unjudged": covered}
    late = evidence.query("waits", "delivered_late", waiting=waiting).cache()
    return {"delivered_late": late}, {"long": long, "unjudged": covered + left - late.count()}
