"""Counters of a worker, and their text for Prometheus.

    timers_worker_handled_total{topic,group,outcome}   outcome: see `Outcome`
    timers_worker_handler_seconds{topic,group}         histogram of the handler's time
    timers_worker_running{topic,group}                 handlers that run now
    timers_worker_overdue{topic,group}                 of these, for longer than `hold_max`
    timers_worker_connected{topic,group}               1: its consumer is connected
    timers_worker_braked{topic,group}                  1: its push target is unavailable

The client depends on no metrics library, so the text is written here.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Final

BUCKETS_S: Final = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)


class Outcome(StrEnum):
    """The end of one delivery in a worker."""

    DONE = "done"
    """The handler returned; the message is acked."""
    FAILED = "failed"
    """The handler raised or nacked; the message is tried again, or is a dead letter."""
    REJECTED = "rejected"
    """The handler raised Reject; the message is a dead letter."""
    UNREADABLE = "unreadable"
    """The payload has no arguments of the handler; as FAILED."""
    TIMEOUT = "timeout"
    """The handler ran for longer than `hold_max` and was cancelled; as FAILED."""
    INTERRUPTED = "interrupted"
    """The worker stopped before the handler ended. The message is tried again at once, and has not
    failed."""
    RETURNED = "returned"
    """The handler gave the message back, or a push had no connection to its target. The message is
    tried again, and has not failed."""
    LOST = "lost"
    """The lease ended before the ack; counted beside DONE. The message is tried again, or is a dead
    letter, or has expired."""


@dataclass(slots=True)
class HandlerMetrics:
    """The counters of one handler."""

    topic: str
    group: str
    running: int = 0
    overdue: int = 0
    is_connected: bool = False
    is_braked: bool = False
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))

    def add(self, outcome: Outcome, took_s: float) -> None:
        """Count the end of a handler."""
        self.outcomes[outcome] += 1
        self.seconds += took_s
        self.buckets[bisect_left(BUCKETS_S, took_s)] += 1


def exposition(handlers: Iterable[HandlerMetrics]) -> str:
    """Return the counters in the text format of Prometheus."""
    return "\n".join([*_lines([*handlers]), ""])


def _lines(handlers: list[HandlerMetrics]) -> Iterator[str]:
    labels = [f'topic="{_quoted(each.topic)}",group="{_quoted(each.group)}"' for each in handlers]
    both = [*zip(handlers, labels, strict=True)]
    yield "# HELP timers_worker_handled_total Deliveries by their end."
    yield "# TYPE timers_worker_handled_total counter"
    for each, label in both:
        for outcome, count in each.outcomes.items():
            yield f'timers_worker_handled_total{{{label},outcome="{outcome}"}} {count}'
    yield "# HELP timers_worker_handler_seconds Time of a handler."
    yield "# TYPE timers_worker_handler_seconds histogram"
    for each, label in both:
        total = 0
        for bound, count in zip([*BUCKETS_S, "+Inf"], each.buckets, strict=True):
            total += count
            yield f'timers_worker_handler_seconds_bucket{{{label},le="{bound}"}} {total}'
        yield f"timers_worker_handler_seconds_sum{{{label}}} {each.seconds}"
        yield f"timers_worker_handler_seconds_count{{{label}}} {total}"
    for name, text, read in (
        ("running", "Handlers that run.", attrgetter("running")),
        ("overdue", "Handlers that run for longer than hold_max.", attrgetter("overdue")),
        ("connected", "1: the consumer is connected.", attrgetter("is_connected")),
        ("braked", "1: the target of a push is unavailable.", attrgetter("is_braked")),
    ):
        yield f"# HELP timers_worker_{name} {text}"
        yield f"# TYPE timers_worker_{name} gauge"
        for each, label in both:
            yield f"timers_worker_{name}{{{label}}} {int(read(each))}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
