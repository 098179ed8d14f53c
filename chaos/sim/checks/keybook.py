"""Promises to simulated clients about keys and reschedules; a part of the book.

Every row of a request has a seq, also if it becomes no timer. So the answers alone give the order
of the log, which the checks at the end use.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from chaos.sim.world.referee import Broken
from timer.model.columns import OnConflict, RowArray, gather
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
class ToldRow:
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


@dataclass(slots=True)
class KeyBook:
    """See the module. Every method raises Broken if a promise was not kept."""

    ended: dict[TimerName, int] = field(default_factory=dict)
    """Timers replaced, rescheduled, or cancelled by key -> the successor's seq; 0: none."""
    keys: dict[TimerName, Key] = field(default_factory=dict)
    told: list[tuple[Key, OnConflict, ToldRow]] = field(default_factory=list)
    open: dict[Key, int] = field(default_factory=dict)
    """Changes by key without an answer."""
    changes_open: dict[TimerName, int] = field(default_factory=dict)
    """Timer -> reschedules without an answer."""

    def row(self, key: Key, mode: OnConflict, told: ToldRow, *, fired: bool) -> None:
        """Note the answer about a row with a key; `fired`: the replaced one was delivered."""
        self.told.append((key, mode, told))
        if told.is_timer:
            self.keys[told.name] = key
        if told.verdict is Verdict.REPLACED:
            assert told.other is not None
            self.end(told.other, told.seq, fired=fired)

    def end(self, name: TimerName, successor: int, *, fired: bool) -> None:
        """Note an answer by which a pending timer ended for a successor."""
        if fired:
            raise Broken("key", f"{name} was delivered, then replaced by {successor}")
        if self.ended.setdefault(name, successor) != successor:
            raise Broken("key", f"{name} ended for {self.ended[name]} and for {successor}")

    def unique(self, node: "SimNode", machine: Machine) -> None:
        """Check that pending timers of a topic have unique keys, and that lists and counts agree.

        A call checks one topic of one replica. The topics take turns.
        """
        if not machine.topics:
            return
        turn = (machine.applied_index + node.replica) % len(machine.topics)
        topic = [*machine.topics.values()][turn]
        what = Filter(topic=topic.topic_id, due_from_ms=0, due_to_ms=DUE_MS_MAX + 1)
        page = machine.store.cut().page(what, what.start, ROWS_MAX)
        rows, blob = page.timers
        if page.next is None and len(rows) != topic.counts.pending:
            raise Broken("list", f"{node}: {len(rows)} listed of {topic.counts}")
        if page.next is None:
            weigh(node, topic, rows)
        column = gather(rows, {0: blob}, "key")
        ends = column.sizes.cumsum().tolist()
        keys = [bytes(column.blob[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        keyed = [key for key in keys if key]
        if len({*keyed}) < len(keyed):
            raise Broken("key", f"{node}: two of {sorted(keyed)} in {topic.name}")

    def at_end(self, timers: "set[TimerName]") -> None:
        """Check that all answers agree with each other, in the order of the log."""
        for key, mode, told in self.told:
            other = told.other
            if told.verdict in (Verdict.KEPT, Verdict.REJECTED):
                assert other is not None
                wanted = Verdict.KEPT if mode is OnConflict.KEEP else Verdict.REJECTED
                if told.verdict is not wanted or mode is OnConflict.REPLACE:
                    raise Broken("key", f"{told} though {mode.name}")
                if other in timers and self.keys.get(other, key) != key:
                    raise Broken("key", f"{told}: that one has {self.keys[other]}, not {key}")
                if other.seq >= told.seq or 0 < self.ended.get(other, 0) < told.seq:
                    raise Broken("key", f"{told}: that one was not pending then")
            updated = told.verdict in (Verdict.REPLACED, Verdict.NOT_PENDING)
            if not updated and mode is OnConflict.UPDATE:
                raise Broken("key", f"{told} though {mode.name}")
            if told.verdict is Verdict.NOT_PENDING and mode is not OnConflict.UPDATE:
                raise Broken("key", f"{told} though {mode.name}")
            if told.is_timer or told.verdict is Verdict.NOT_PENDING:
                self._alone(key, told)

    def _alone(self, key: Key, told: ToldRow) -> None:
        """Check that no earlier timer of the key was still pending when this one began."""
        for name, successor in self.ended.items():
            mine = self.keys.get(name) == key and name.seq < told.seq
            if mine and successor > told.seq:
                raise Broken("key", f"{name} was pending until {successor}; so was {told} of {key}")


def weigh(node: object, topic: Topic, pending: RowArray) -> None:
    """Check a topic's count of pending bytes against its pending timers.

    Raises:
        Broken: they differ.
    """
    found = int(pending["payload_size"].sum())
    if found != topic.pending_bytes:
        raise Broken("quota", f"{node}: {found} bytes in {topic.name}, not {topic.pending_bytes}")
