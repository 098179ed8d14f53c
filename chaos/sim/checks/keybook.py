"""Timers as simulated clients know them, and the lists of pending timers; a part of the book.

Every row of a request has a seq, also if it becomes no timer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from chaos.sim.world.referee import Broken
from timer.model.columns import RowArray, gather
from timer.model.units import DUE_MS_MAX
from timer.pending.read_view import Filter
from timer.ready.topic import Topic
from timer.state.key_conflicts import Verdict
from timer.state.machine import Machine

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode

ROWS_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class TimerName:
    """The parts of a timer's id."""

    due_ms: int
    seq: int


Key = tuple[str, bytes]
"""A topic and a key."""


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """The answer to a producer about one row."""

    seq: int
    verdict: Verdict
    name: TimerName
    """The row's timer; with REJECTED, the timer that it would have become."""
    other: TimerName | None
    """The replaced timer, or the holder of the key."""

    @property
    def is_timer(self) -> bool:
        """Whether the row became a timer."""
        return self.verdict in (Verdict.SCHEDULED, Verdict.REPLACED)


def check_list(node: "SimNode", machine: Machine) -> None:
    """Check that pending timers of a topic have unique keys, and that lists and counts agree.

    A call checks one topic of one replica. The topics take turns.
    """
    if not machine.topics:
        return
    turn = (machine.applied_index + node.replica) % len(machine.topics)
    topic = [*machine.topics.values()][turn]
    what = Filter(topic=topic.topic_id, due_from_ms=0, due_to_ms=DUE_MS_MAX + 1)
    page = machine.store.read_view().page(what, what.start, ROWS_MAX)
    rows, blob = page.timers
    if page.next is None and len(rows) != topic.counts.pending:
        raise Broken("list", f"{node}: {len(rows)} listed of {topic.counts}")
    if page.next is None:
        weigh(node, topic, rows)
    keyed = [key for key in gather(rows, {0: blob}, "key").values() if key]
    if len({*keyed}) < len(keyed):
        raise Broken("key", f"{node}: two of {sorted(keyed)} in {topic.name}")


def weigh(node: object, topic: Topic, pending: RowArray) -> None:
    """Check a topic's count of pending bytes against its pending timers."""
    found = int(pending["payload_size"].sum())
    if found != topic.pending_bytes:
        raise Broken("quota", f"{node}: {found} bytes in {topic.name}, not {topic.pending_bytes}")
