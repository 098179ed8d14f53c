"""The timer machine as the application of a simulated node: the production engine and leader.

The production state plane (cluster/state/state_plane.py) runs both on the world's timeline.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from chaos.sim.checks import latebook, workbook
from chaos.sim.checks.fatebook import SEARCH_ROWS_MAX, SWEEP_ROWS, SWEEP_TOPICS
from chaos.sim.checks.orderbook import headers_of
from chaos.sim.checks.policybook import LEVELS_MS, Acceptance
from chaos.sim.timers.callers import SimRequest
from chaos.sim.timers.node_results import Reply, ignore, outcomes_of
from chaos.sim.timers.served_stream import ServedStream
from chaos.sim.timers.timeline_io import TimelineIo
from chaos.sim.timers.town import SimStream, Town
from chaos.sim.world.app import App
from chaos.sim.world.options import NEVER, WorldOptions, fork
from chaos.sim.world.referee import Broken
from chaos.sim.world.sim_node import WALL_START_MS
from chaos.sim.world.simdisk import STATE_PATH
from chaos.sim.world.world import World
from cluster.state.state_plane import FlushLimits, StatePlane
from replication.core.quorum import Voters
from timer.entries.entry_check import check_entry
from timer.entries.entry_frame import Entry
from timer.entries.payloads import CreateGroup, GroupStart
from timer.entries.policies import CLUSTER, DEFAULTS
from timer.files.disk import Disk
from timer.leader.groups.group_delivery import Delivery
from timer.leader.intake.admission import WantedTimes
from timer.leader.leader import Leader, LeaderConfig
from timer.model.columns import Binary, Part, RequestId
from timer.model.timer_errors import (
    EngineError,
    InvalidRequestError,
    NotLeaderError,
    TopicDeletedError,
)
from timer.model.units import Epoch, LogIndex, Now, ProducerId, UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.recovery.engine import Engine
from timer.state.apply_results import Applied, Checkpoint, FireApplied

if TYPE_CHECKING:
    from collections.abc import Callable

    from chaos.sim.world.sim_node import SimNode

_POLICY: Final = replace(DEFAULTS, delay_levels_ms=LEVELS_MS)
CONFIG: Final = LeaderConfig(checkpoint_interval_ms=1_000, policy=_POLICY)
CROWD_CONFIG: Final = replace(CONFIG, fire_topics_max=workbook.TOPICS_MAX)
TOPICS_AT_ONCE: Final = 1
"""Topics that a flush handles per step, before its cut and after its spill file. Topics can change
between the steps."""
PRODUCER_IDS: Final = 1_000
"""Number of producer ids; few, so that two registrations sometimes draw the same one."""
PRODUCER_IDLE_MS: Final = 2_000
"""Time after which an idle producer is forgotten in worlds with `fleeting`."""
DRAIN_CHECK_US: Final = 5_000
PRESSED_BYTES: Final = 200
"""The memtable's limit in worlds with `pressed`, where folding waits for flushes."""


class EngineWithoutPrefetch(Engine):
    """An engine that reads its runs while it folds, because no thread has read them before.

    Nodes with an even replica id use it. The result of a fold must not depend on a prefetch.
    """

    def begin_prefetch(self, entries: Sequence[Entry]) -> None:
        """Return None: no prefetch."""


def _limits(options: WorldOptions) -> FlushLimits:
    memory = PRESSED_BYTES if options.pressed and not options.slow_files else NEVER
    entries = options.manifest_every
    return FlushLimits(memory, NEVER, entries, NEVER, 4 * memory, topics_at_once=TOPICS_AT_ONCE)


class EngineApp(App):
    """State plane of one simulated process."""

    def __init__(self, node: "SimNode", town: Town) -> None:
        self.node, self.town = node, town
        secret = f"{node.replica} {node.nonce}".encode()  # differs between processes
        config = CROWD_CONFIG if node.world.options.crowds else CONFIG
        self._producer_ids = PRODUCER_IDS
        if node.world.options.fleeting:
            config = replace(config, producer_idle_ms=PRODUCER_IDLE_MS)
            self._producer_ids = 1 << 48  # the id of a forgotten producer is never drawn again
        engine = Engine if node.replica % 2 else EngineWithoutPrefetch
        self.engine = engine(node.disk, STATE_PATH, config, self._observe, secret)
        machine = self.engine.machine
        if node.world.options.crowds:
            machine.store.dead_max, machine.store.chunk = workbook.DEAD_MAX, workbook.CHUNK
        machine.pauses.portion_rows, machine.pauses.sweep_topics = SWEEP_ROWS, SWEEP_TOPICS
        machine.pauses.search_rows_max = SEARCH_ROWS_MAX
        known = frozenset(machine.voters) if self.engine.manifest_index else None
        self.voters: Voters | None = known or None
        self.state_time_ms = machine.applied_time_ms
        self.level = machine.level
        self.streams: dict[SimStream, ServedStream] = {}
        self._rng = fork(node.world.rng)
        io = TimelineIo(self, fork(self._rng))
        self.limits = _limits(node.world.options)
        self.plane = StatePlane(self.engine, self.limits, io)
        self.draining = False
        self._open: dict[object, Leader] = {}
        """The schedule requests that this process has accepted and not answered."""
        self.plane.kick()

    @property
    def applied_index(self) -> LogIndex:
        return self.engine.machine.applied_index

    # ---- calls of the node

    def check_entry(self, entry: Entry) -> None:
        check_entry(entry)

    def on_commit(self, entries: Sequence[Entry]) -> None:
        book = self.town.book
        if entries[-1].index > book.committed:  # the book reads each entry once
            true_ms = self._true_ms()
            for entry in entries:
                book.on_commit(entry, true_ms)
        self.plane.on_commit(entries[-1].index)

    def flush(self) -> None:
        self.plane.flush()

    def on_lead(self, epoch: Epoch) -> None:
        self.plane.on_lead(epoch)

    def on_drain(self) -> bool:
        return self.plane.on_drain()

    def on_stepdown(self, epoch: Epoch) -> None:
        self.streams.clear()
        self.plane.on_stepdown(epoch)

    def drain(self, done: "Callable[[], None]") -> None:
        self.draining = True
        self.plane.drain()
        self._check_drain(done)

    def _check_drain(self, done: "Callable[[], None]") -> None:
        if not self.plane.is_drained():
            self.node.later(DRAIN_CHECK_US, self._check_drain, done)
            return
        waiting = [leader for leader in self._open.values() if leader.closed is None]
        if waiting:
            raise Broken("drain", f"{self.node} drained with {len(waiting)} requests unanswered")
        done()

    def on_stop(self) -> None:
        self.streams.clear()

    @staticmethod
    def check(disk: Disk, directory: Path) -> None:
        Engine(disk, directory, CONFIG)

    def _observe(self, entry: Entry, applied: Applied) -> None:
        book, machine = self.town.book, self.engine.machine
        if self.node.world.options.crowds:
            asks = self.node.replica % 2 == 1
            workbook.check(entry, applied, machine.store, asks=asks)
        if entry.index > book.first_applied:
            book.first_applied = entry.index
            book.fates.check(entry, applied, machine)
            book.policies.check(entry, applied)
            book.quotas.check(entry, applied, machine)
        book.check_counts(self.node, machine, applied)
        if isinstance(applied, FireApplied) and self.engine.leader is not None:
            book.late.judge(self, entry, applied, self.clock_ms())
        if isinstance(applied, Checkpoint):
            book.digest(self.node, applied, machine)

    # ---- time

    def _true_ms(self) -> int | None:
        """Return the time of a correct clock in Unix milliseconds.

        None if two voters of one voter set had a wrong clock at any time. Of five clocks the median
        is still right then, but the median of the first three answers may be wrong.
        """
        world = self.node.world
        world.sets_seen.update(node.core.voters for node in world.nodes if node.alive)
        wrong = {node.replica for node in world.nodes if node.clock_was_wrong}
        if any(len(wrong & voters) > 1 for voters in world.sets_seen):
            return None
        return WALL_START_MS + world.timeline.now_us // 1000

    def now(self) -> Now:
        """Return this instant on the node's clock and on the cluster's."""
        return self.plane.now()

    def clock_ms(self) -> int:
        """Return the time of this leader's clock in Unix milliseconds."""
        return self.now().clock_ms

    def handed_out(self, delivery: Delivery) -> None:
        """Check a delivery that is about to be sent."""
        book, leader = self.town.book, self.engine.leader
        assert leader is not None
        book.check_delivery(self.node, delivery, self.node.world.referee.served)
        book.check_due(self.node, delivery)
        # A policy counts from the first portion of its entry.
        following = self.applied_index + 1 + self.engine.machine.portions.has_begun
        book.check_expiry(delivery, following)
        book.leases.check_delivery(leader, delivery, self.node.mono_ms())
        options = self.node.world.options
        if options.traits:
            rate = self.engine.machine.policies.of(CLUSTER).group_rate_max or 0
            if not self.node.world.heals:  # a healed world has no rate
                book.pace.check_delivery(delivery, rate, self.node.world.timeline.now_us)
            if not options.expiry:  # the turns of expired messages are not seen
                book.order.by_priority(delivery, leader.groups.states)

    def may_hand_out(self) -> bool:
        """Return whether this node's leadership lease is valid now."""
        return self.node.core.holds_lease(self.node.mono_ms())

    # ---- requests of clients

    def take(
        self, work: "Callable[[Leader], object]", reply: Reply = ignore, *, kick: bool = True
    ) -> None:
        """Do a client's work with the leader, then let the plane step.

        The work passes its result to `reply`, which gets the error, if any.
        """
        if self.engine.leader is None:
            reply(NotLeaderError(None))
            return
        try:
            work(self.engine.leader)
        except NotLeaderError as refused:
            reply(refused)
            return
        except EngineError as refused:
            reply(refused)
        if kick:
            self.plane.kick()

    def topic(self, name: str) -> Topic:
        """Return a topic. Raises NotLeaderError if there is none: a client tries again."""
        topic = self.engine.machine.topic_by_name.get(name)
        if topic is None:
            raise NotLeaderError(None)
        return topic

    def group(self, topic: str, name: str) -> Group:
        """Return a group. Raises NotLeaderError as `topic`."""
        group = self.topic(topic).groups.get(name)
        if group is None:
            raise NotLeaderError(None)
        return group

    def register(self, token: bytes, reply: Reply) -> None:
        """Register a producer."""

        def work(leader: Leader) -> None:
            drawn = ProducerId(self._rng.randrange(1, self._producer_ids))
            leader.register(token, drawn, self.now(), reply)

        self.take(work, reply, kick=False)

    def schedule(self, request: SimRequest, reply: Reply) -> None:
        """Schedule a request's timers; the answer is a list of AnsweredRow, or an error."""
        self.take(partial(self._schedule, request, reply), reply)

    def _schedule(self, request: SimRequest, reply: Reply, leader: Leader) -> None:
        now, floor_ms = self.now(), self.engine.machine.last_read_time_ms
        topics = {name: leader.topic_or_none(name) for name, _ in request.rows}
        identity = None
        if request.text:
            until_ms = UnixMs(now.clock_ms + request.window_ms)
            identity = RequestId(request.text, request.body, until_ms)
        known = {name: topic.topic_id for name, topic in topics.items() if topic is not None}
        if missing := [name for name in topics if name not in known]:
            leader.create_topic(missing[0], now, ignore)
            return  # the client resends the request
        payload = Binary.of(request.payloads)
        rows = np.array([known[name] for name, _ in request.rows], np.uint32)
        values = np.array([value for _, value in request.rows], np.int64)
        times = np.zeros((2, len(rows)), np.int64)
        for topic_id in known.values():
            mine = rows == topic_id
            rules = leader.rules(topic_id, *request.producer, identity)
            limit, size = rules.payload_limit[0], int(payload.sizes[mine].max())
            if size > limit:
                raise InvalidRequestError("payload", f"{size} bytes", f"at most {limit}")
            wanted = WantedTimes(request.way, values[mine])
            found = rules.times(wanted, int(mine.sum()), now, floor_ms)
            times[:, mine] = found.requested_ms, found.due_ms
        if identity is None:
            taken = Acceptance(request.way, tuple(values.tolist()), now.clock_ms, floor_ms)
            self.town.book.policies.requests[request.producer].append(taken)
        part = Part(
            producer_id=request.producer[0],
            sequence=request.producer[1],
            requested_ms=times[0],
            due_ms=times[1],
            topic=rows,
            payload=payload,
            key=Binary.of(request.keys) if request.keys else None,
            headers=headers_of(request.payloads) if self.node.world.options.traits else None,
            on_conflict=request.mode,
            request=identity,
            body=0 if identity else zlib.crc32(payload.blob),
        )
        self._give(leader, part, reply)

    def _give(self, leader: Leader, part: Part, reply: Reply) -> None:
        """Give a schedule request to the leader."""
        last = leader.machine.producers.last_sequence(part.producer_id)
        repeated = part.request is not None or (last is not None and part.sequence <= last)
        taken = object()

        def answered(result: object) -> None:
            del self._open[taken]
            reply(outcomes_of(result))

        self._open[taken] = leader
        try:
            leader.schedule(part, answered, self.now())
        except EngineError:
            self._open.pop(taken, None)
            raise
        self.town.book.quotas.took(leader, part, repeated=repeated)

    # ---- streams of consumers

    def open(self, stream: SimStream, credit: int) -> None:
        """Open a consumer's stream."""
        consumer = stream.consumer

        def ended(_: object) -> None:  # the consumer opens a stream again
            self.town.line.stream(consumer.on_end, stream)

        def work(leader: Leader) -> None:
            def join(group: object) -> None:
                if isinstance(group, Group) and leader.closed is None:
                    ServedStream(self, stream, group).join(credit)
                elif isinstance(group, TopicDeletedError):
                    ended(group)

            topic = self.topic(consumer.topic)
            settings = self.town.settings(consumer.topic, consumer.group)
            create = CreateGroup(topic.topic_id, consumer.group, GroupStart.EARLIEST, settings)
            leader.groups.create(create, join)

        self.take(work, ended)

    def on_stream(
        self, stream: SimStream, method: str, *args: object, reply: Reply = ignore
    ) -> None:
        """Call a method of a served stream; `reply` gets the error, if any."""

        def work(leader: Leader) -> None:
            if stream not in self.streams:
                raise NotLeaderError(None)
            getattr(self.streams[stream], method)(leader, *args)

        self.take(work, reply)


class TimerWorld(World):
    """A world of nodes that run the timer machine, with producers and consumers."""

    app_type: type[EngineApp] = EngineApp

    def __init__(self, seed: int, options: WorldOptions | None = None) -> None:
        super().__init__(seed, options)
        self._progress = latebook.ProgressCheck()
        self.town = Town(self, fork(self.rng))
        self.workload = self.town.act

    def make_app(self, node: "SimNode") -> EngineApp:
        """See World."""
        return self.app_type(node, self.town)

    def run(self, seconds: int) -> None:
        """Run as a World does, then wait until every timer has fired and every message is acked."""
        self._observe()
        super().run(seconds)
        if not self.stranded:
            self.town.settle()

    def _observe(self) -> None:
        self.timeline.after(latebook.CHECK_INTERVAL_US, self._observe)
        self._progress.observe(self)
        self.town.book.late.observe(self)

    def rows(self) -> int:
        """See World."""
        machines = [app.engine.machine for app in self.town.apps()]
        machine = max(machines, key=lambda each: each.applied_index)
        groups = [group for topic in machine.topics.values() for group in topic.groups.values()]
        acked = sum(group.acked_count for group in groups)
        return machine.counts.scheduled + machine.counts.fired + acked
