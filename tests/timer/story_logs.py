"""A log of which stories are told."""

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import START_MS, Log, ids_of, machine_on
from timer.entries.entry_frame import Entry
from timer.model.timer_id import TimerKey
from timer.model.units import GroupId, LogIndex, Seq, UnixMs
from timer.state import firing_trace
from timer.state.machine import Machine
from timer.state.timer_story import KnownTimer, StoryEvent, StoryReader

DUE = START_MS + 1_000


class Told:
    """A log, the machine that has applied it, and the stories from both."""

    def __init__(self) -> None:
        self.log = Log()
        self.machine: Machine = machine_on(SimDisk(), leads=False)
        self.do(self.log.begin_epoch(), self.log.topic("a"), self.log.topic("b"))
        self.read = 0
        """Number of entries that the last story read."""

    def do(self, *entries: Entry) -> int:
        """Apply entries; return the index of the last."""
        for entry in entries:
            self.machine.apply(entry)
        return entries[-1].index

    def story(
        self, due_ms: int, seq: int, *, first: int = 1, known: KnownTimer | None = None
    ) -> list[StoryEvent]:
        machine, target = self.machine, TimerKey(UnixMs(due_ms), Seq(seq))
        fired = firing_trace.find_firing(machine.trace.firings, target.seq)
        row = machine.store.read(ids_of([target]).due_ms, ids_of([target]).seq, 0)[0].rows[0]
        state = int(machine.outcomes_of(ids_of([target]))[0])
        if known is None:
            ended = state == 2
            known = KnownTimer(
                pending=bool(row["seq"]), ended=ended, fired=fired, topic=None, key=b""
            )
        groups = frozenset[GroupId]()
        if fired is not None:
            groups = frozenset(machine.topics[fired.topic].group_by_id)
        story = StoryReader(target, known, [*machine.trace.marks], groups)
        story.skip_to(LogIndex(first))
        events: list[StoryEvent] = []
        self.read = 0
        while not story.over and story.next <= machine.applied_index:
            events += story.feed(self.log.entries[story.next - 1])
            self.read += 1
        return events
