"""The timer machine as the application of a simulated node: the production engine and leader.

What cluster/host.py does on an event loop is done here on the world's timeline.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from chaos.sim.options import Options
from chaos.sim.town import LEASE_MS, Request, Row, SimConsumer, TimerName, Town
from chaos.sim.world import World
from timer.clock import ClusterClock, Sample
from timer.columns import Binary, Part
from timer.engine import Engine, Flush
from timer.entry import Entry
from timer.errors import NotLeader, TimerError
from timer.groups import Group
from timer.leader import Delivery, LeaderConfig, Now
from timer.leases import Consumer
from timer.machine import Applied, Checkpoint
from timer.payloads import CreateGroup, Start
from timer.producers import Answer
from timer.units import Epoch, LeaseId, LogIndex, ProducerId, ReplicaId, UnixMs

if TYPE_CHECKING:
    from collections.abc import Callable

    from chaos.sim.node import SimNode

STATE_PATH: Final = Path("/state")
CONFIG: Final = LeaderConfig(checkpoint_interval_ms=1_000)


class TimerApp:
    """State plane of one simulated process."""

    def __init__(self, node: "SimNode", town: Town) -> None:
        self.node = node
        self._town = town
        self.engine = Engine(node.disk, STATE_PATH, CONFIG, self._observe)
        self.voters: frozenset[ReplicaId] | None = (
            frozenset(self.engine.machine.voters) or None if self.engine.manifest_index else None
        )
        self._clock: ClusterClock | None = None
        self._kicked = False
        self._wake_us: int | None = None
        self._joined: dict[tuple[SimConsumer, int], tuple[Group, Consumer]] = {}
        self._rng = random.Random(node.world.rng.getrandbits(64))
        self._flush_every = node.world.options.manifest_every

    @property
    def applied_index(self) -> LogIndex:
        """See App."""
        return self.engine.machine.applied_index

    # ---- what the node tells

    def on_commit(self, entries: Sequence[Entry]) -> None:
        """See App."""
        self.engine.committed(entries[-1].index)
        done = 0
        while done < len(entries):
            done += self.engine.fold(entries[done:])
        since = self.applied_index - self.engine.manifest_index
        if since >= self._flush_every and (flush := self.engine.begin_flush()) is not None:
            self.node.later(self._rng.randrange(100_000), self._write, flush)
        self._kick()

    def _write(self, flush: Flush) -> None:
        flush.write()
        self.engine.end_flush(flush)
        self.node.drop_before(LogIndex(flush.index + 1))

    def on_lead(self, epoch: Epoch) -> None:
        """See App."""
        mono_ms = self.node.mono_ms()
        floor_ms = max(self.node.driver.last_time_ms, self.engine.machine.last_read_time_ms)
        self._clock = ClusterClock(
            self.node.core.voters,
            self._samples(),
            floor_ms=floor_ms,
            floor_at_ms=mono_ms,
            boot_ms=mono_ms,
        )
        self.engine.lead(epoch, self.node.driver.propose, self._now())
        self._kick()

    def on_stepdown(self, epoch: Epoch) -> None:
        """See App."""
        del epoch
        self._joined.clear()
        self.engine.step_down(NotLeader(None))
        self._clock = None

    def on_stop(self) -> None:
        """See App."""
        self._joined.clear()

    def _observe(self, entry: Entry, applied: Applied) -> None:
        del entry
        if isinstance(applied, Checkpoint):
            self._town.book.digest(self.node, applied)

    # ---- time

    def _samples(self) -> list[Sample]:
        now = self.node.mono_ms()
        own = Sample(
            voter=self.node.replica, wall_ms=self.node.wall_ms(), sent_ms=now, received_ms=now
        )
        others = self.node.core.clock_samples.items()
        return [own, *(Sample.at(v, s.wall_ms, s.at_ms, s.error_ms) for v, s in others)]

    def _now(self) -> Now:
        assert self._clock is not None
        mono_ms = self.node.mono_ms()
        clock_ms = max(self._clock.now(mono_ms), self.node.driver.last_time_ms)
        return Now(mono_ms, UnixMs(clock_ms))

    def _kick(self) -> None:
        if not self._kicked:
            self._kicked = True
            self.node.later(0, self._step)

    def _step(self) -> None:
        self._kicked = False
        leader = self.engine.leader
        if leader is None or self._clock is None:
            return
        for sample in self._samples():
            self._clock.observe(sample)
        now = self._now()
        leader.step(now)
        if self.may_hand_out():
            for delivery in leader.hand_out(now):
                delivery.lease.consumer.sink(delivery)
            leader.step(now)
        wait_ms = min(500, max(1, leader.wake_at_ms(now) - now.mono_ms))
        wake_us = self.node.world.timeline.now_us + wait_ms * 1000
        if self._wake_us is None or wake_us < self._wake_us:
            self._wake_us = wake_us
            self.node.later(wait_ms * 1000, self._wake, wake_us)

    def may_hand_out(self) -> bool:
        """Whether nobody else can lead at this moment."""
        return self.node.core.lease_held(self.node.mono_ms())

    def _wake(self, wake_us: int) -> None:
        if self._wake_us == wake_us:
            self._wake_us = None
        self._kick()

    # ---- what clients ask; each answers through `reply`

    def register(self, token: bytes, reply: "Callable[[object], None]") -> None:
        """Register a producer."""
        leader = self.engine.leader
        if leader is None:
            reply(NotLeader(None))
            return
        try:
            leader.register(token, self._now(), reply)
        except TimerError as refused:
            reply(refused)

    def schedule(
        self, producer_id: int, request: Request, reply: "Callable[[object], None]"
    ) -> None:
        """Schedule a request's timers; the answer is a list of TimerName, or an error."""
        leader = self.engine.leader
        if leader is None:
            reply(NotLeader(None))
            return
        topic = self.engine.machine.topic_by_name.get(request.topic)
        now = self._now()
        try:
            if topic is None:
                leader.topic(request.topic, now, lambda _: None)
                self._kick()
                return  # the client asks again
            requested = np.array(request.delays_ms, np.int64)
            if not request.absolute:
                requested += now.clock_ms
            rows = len(requested)
            part = Part(
                producer_id=ProducerId(producer_id),
                sequence=request.sequence,
                due_ms=leader.effective_due(requested, now),
                requested_ms=requested,
                topic=np.full(rows, topic.topic_id, np.uint32),
                payload=Binary.of(request.payloads(producer_id)),
            )
            leader.schedule(part, lambda result: reply(_names(result)))
        except TimerError as refused:
            reply(refused)
        self._kick()

    def cancel(self, names: list[TimerName], reply: "Callable[[object], None]") -> None:
        """Cancel timers; the answer is a list of the machine's results."""
        leader = self.engine.leader
        if leader is None:
            reply(NotLeader(None))
            return
        due = np.array([name.due_ms for name in names], np.int64)
        seq = np.array([name.seq for name in names], np.uint64)
        try:
            leader.cancel(due, seq, lambda result: reply(_listed(result)))
        except TimerError as refused:
            reply(refused)
        self._kick()

    def open(self, consumer: SimConsumer, stream: int, credit: int) -> None:
        """Open a consumer's stream."""
        leader = self.engine.leader
        topic = self.engine.machine.topic_by_name.get(consumer.topic)
        if leader is None or topic is None:
            return

        def join(group: object) -> None:
            if isinstance(group, Group) and leader.closed is None:
                self._join(consumer, stream, group, credit)

        create = CreateGroup(topic.topic_id, consumer.group, Start.EARLIEST, LEASE_MS)
        leader.create_group(create, join)
        self._kick()

    def _join(self, consumer: SimConsumer, stream: int, group: Group, credit: int) -> None:
        leader = self.engine.leader
        assert leader is not None

        def sink(delivery: Delivery) -> None:
            self._town.line.stream(consumer.take, stream, delivery, self, _rows(delivery))

        joined = Consumer("sim", LEASE_MS, sink)
        self._joined[consumer, stream] = (group, joined)
        leader.join(group, joined)
        leader.credit(group, joined, credit)
        self._kick()

    def leave(self, consumer: SimConsumer, stream: int) -> None:
        """A stream broke."""
        joined = self._joined.pop((consumer, stream), None)
        if joined is not None and self.engine.leader is not None:
            self.engine.leader.leave(*joined)
            self._kick()

    def credit(self, consumer: SimConsumer, stream: int, messages: int) -> None:
        """A consumer takes more."""
        joined = self._joined.get((consumer, stream))
        if joined is not None and self.engine.leader is not None:
            self.engine.leader.credit(*joined, messages)
            self._kick()

    def ack(
        self,
        consumer: SimConsumer,
        stream: int,
        epoch: int,
        lease_id: int,
        offsets: list[int],
        reply: "Callable[[object], None]",
    ) -> None:
        """Ack messages; the answer is a list of verdicts (timer.leases)."""
        joined = self._joined.get((consumer, stream))
        leader = self.engine.leader
        if joined is None or leader is None:
            reply(NotLeader(None))
            return
        column = np.array(offsets, np.uint64)
        try:
            leader.ack(
                joined[0],
                Epoch(epoch),
                LeaseId(lease_id),
                column,
                lambda result: reply(_listed(result)),
            )
        except TimerError as refused:
            reply(refused)
        self._kick()


def _rows(delivery: Delivery) -> list[Row]:
    """Return the messages of a lease."""
    out: list[Row] = []
    for block, at in delivery.topic.queue.slices(delivery.lease.offsets):
        for row in block.rows[at.astype(np.int64)]:
            start = int(row["payload_start"])
            payload = bytes(block.bufs[int(row["buf"])][start : start + int(row["payload_size"])])
            name = TimerName(int(row["due_ms"]), int(row["seq"]))
            out.append(Row(name, int(block.fired_at_ms), payload))
    return out


def _names(result: object) -> object:
    if isinstance(result, TimerError):
        return result
    assert isinstance(result, tuple)
    answer, _ = result
    assert isinstance(answer, Answer)
    dues = answer.due_ms.tolist()
    return [TimerName(due, answer.first_seq + i) for i, due in enumerate(dues)]


def _listed(result: object) -> object:
    return result if isinstance(result, TimerError) else np.asarray(result).tolist()


class TimerWorld(World):
    """A world whose nodes run the timer machine, with producers and consumers."""

    def __init__(self, seed: int, options: Options | None = None) -> None:
        holder: list[Town] = []
        super().__init__(seed, lambda node: TimerApp(node, holder[0]), options)
        self.town = Town(self, random.Random(self.rng.getrandbits(64)))
        holder.append(self.town)
        self.workload = self.town.act

    def run(self, seconds: int) -> None:
        """Play as a World does, then wait until everything has fired and was acked.

        Raises:
            Broken: a promise was.
        """
        super().run(seconds)
        self.town.settle()
