"""A node's results in the form of simulated clients: plain lists of names and numbers."""

from collections.abc import Callable

import numpy as np

from chaos.sim.checks.book import DeliveredRow
from chaos.sim.checks.keybook import AnsweredRow, TimerName
from timer.entries.payloads import Ids
from timer.leader.groups.group_delivery import Delivery
from timer.model.timer_errors import EngineError
from timer.state.apply_results import Accepted, Repeated
from timer.state.key_conflicts import Verdict

Reply = Callable[[object], None]
"""Takes the result of a request, or its error, back to the client."""


def ignore(result: object) -> None:
    """Drop an answer."""


def rows_of(delivery: Delivery) -> list[DeliveredRow]:
    """Return the messages of a lease."""
    out: list[DeliveredRow] = []
    for page, at in delivery.topic.queue.slices(delivery.lease.offsets):
        places = at.astype(np.int64)
        for row, fired_at_ms in zip(page.rows[places], page.fired_at_ms[places], strict=True):
            start = int(row["payload_start"])
            payload = bytes(page.bufs[int(row["buf"])][start : start + int(row["payload_size"])])
            name = TimerName(int(row["due_ms"]), int(row["seq"]))
            out.append(DeliveredRow(name, int(fired_at_ms), payload))
    return out


def outcomes_of(result: object) -> object:
    """Return the outcome of each row of a request, or the error of the request."""
    if isinstance(result, EngineError):
        return result
    assert isinstance(result, Accepted | Repeated)
    answer = result.answer
    out = []
    for at, due in enumerate(answer.due_ms.tolist()):
        name, other, verdict = TimerName(due, answer.first_seq + at), None, Verdict.SCHEDULED
        if answer.verdicts is not None:
            verdict = Verdict(int(answer.verdicts.verdict[at]))
            if answer.verdicts.seq[at]:
                other = TimerName(int(answer.verdicts.due_ms[at]), int(answer.verdicts.seq[at]))
        if verdict is Verdict.KEPT and other is not None:
            name = other
        out.append(AnsweredRow(answer.first_seq + at, verdict, name, other))
    return out


def names_of(timers: Ids) -> list[TimerName]:
    """Return the names of timers as a list."""
    return [*map(TimerName, timers.due_ms.tolist(), timers.seq.tolist())]


def ids_of(names: list[TimerName]) -> Ids:
    """Return the columns of names."""
    due, seq = [name.due_ms for name in names], [name.seq for name in names]
    return Ids(np.array(due, np.int64), np.array(seq, np.uint64))


def list_of(result: object) -> object:
    """Return an array as a list, and an error unchanged."""
    return result if isinstance(result, EngineError) else np.asarray(result).tolist()
