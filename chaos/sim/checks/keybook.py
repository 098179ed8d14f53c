"""What clients of a simulated cluster were promised of keys and reschedules; a part of the book.

Every row of a request has a seq, whatever became of it, so that answers can be put into the log's
order without looking at the log: the checks at the end go by that.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from chaos.sim.checks.quotabook import weigh
from chaos.sim.world.referee import Broken
from timer.model.columns import OnConflict, gather
from timer.model.units import DUE_MS_MAX
from timer.pending.read_view import Filter
from timer.state.key_conflicts import Verdict
from timer.state.machine import Machine

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode

ROWS_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class TimerName:
    """A timer as its id names it."""

    due_ms: int
    seq: int


Key = tuple[str, bytes]
"""A topic and a key."""


@dataclass(frozen=True, slots=True)
class ToldRow:
    """What a producer was told of one row."""

    seq: int
    verdict: Verdict
    name: TimerName
    """Of the timer that is there now; REJECTED: of the one that would have been."""
    other: TimerName | None
    """The timer that was replaced, or that has the key."""

    @property
    def is_timer(self) -> bool:
        """Whether the row became a timer."""
        return self.verdict in (Verdict.SCHEDULED, Verdict.REPLACED)


@dataclass(slots=True)
class KeyBook:
    """See the module. Every method raises Broken when a promise was not kept."""

    ended: dict[TimerName, int] = field(default_factory=dict)
    """Timers that were replaced, rescheduled or cancelled by key -> seq of the successor; 0: none.
    """
    keys: dict[TimerName, Key] = field(default_factory=dict)
    told: list[tuple[Key, OnConflict, ToldRow]] = field(default_factory=list)
    open: dict[Key, int] = field(default_factory=dict)
    """Changes asked by key and not answered."""
    changes_open: dict[TimerName, int] = field(default_factory=dict)
    """Timers -> reschedules asked and not answered."""

    def row(self, key: Key, mode: OnConflict, told: ToldRow, *, fired: bool) -> None:
        """A producer was told of a row with a key; `fired`: what it replaced was seen to fire."""
        self.told.append((key, mode, told))
        if told.is_timer:
            self.keys[told.name] = key
        if told.verdict is Verdict.REPLACED:
            assert told.other is not None
            self.end(told.other, told.seq, fired=fired)

    def end(self, name: TimerName, successor: int, *, fired: bool) -> None:
        """Somebody was told that a timer was pending, and ended for its successor."""
        if fired:
            raise Broken("key", f"{name} was delivered, then replaced by {successor}")
        if self.ended.setdefault(name, successor) != successor:
            raise Broken("key", f"{name} ended for {self.ended[name]} and for {successor}")

    def unique(self, node: "SimNode", machine: Machine) -> None:
        """No two pending timers of a topic have one key, on any replica; and all are listed, and
        weighed. Each time the replicas look at one topic each, and in time at all of them.
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
        """Everybody is answered: the answers fit each other, in the order of the log."""
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
        """No earlier timer with the key ended, for a successor, only after this one began."""
        for name, successor in self.ended.items():
            mine = self.keys.get(name) == key and name.seq < told.seq
            if mine and successor > told.seq:
                raise Broken("key", f"{name} was pending until {successor}; so was {told} of {key}")
