"""The timer machine as the application of a simulated node: the production engine and leader.

The production state plane (cluster/state/state_plane.py) runs both on the world's timeline.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from chaos.sim.checks import latebook, workbook
from chaos.sim.checks.expected_traits import headers_of
from chaos.sim.checks.fatebook import APART_MAX, SWEEP_ROWS, SWEEP_TOPICS
from chaos.sim.checks.keybook import TimerName
from chaos.sim.checks.policybook import LEVELS_MS, TakenRequest
from chaos.sim.checks.progress_check import ProgressCheck
from chaos.sim.timers.callers import NamedRequest
from chaos.sim.timers.keeping import KeeperCalls, Reply
from chaos.sim.timers.node_results import ids_of, listed, named, rows_of, told
from chaos.sim.timers.slow_reader import SlowReader, UnsentDelivery
from chaos.sim.timers.timeline_io import TimelineIo
from chaos.sim.timers.town import LEASE_MS, HeldMessages, NumberedRequest, SimStream, Town
from chaos.sim.world.options import NEVER, WorldOptions
from chaos.sim.world.paths import STATE_PATH
from chaos.sim.world.referee import Broken
from chaos.sim.world.sim_node import WALL_START_MS
from chaos.sim.world.world import World
from cluster.state.state_plane import FlushLimits, StatePlane
from replication.core.quorum import Voters
from timer.entries.entry_check import check_entry
from timer.entries.entry_frame import Entry
from timer.entries.payloads import CreateGroup, GroupStart, Keys
from timer.entries.policies import CLUSTER, DEFAULTS, Scope, ScopePolicy
from timer.files.disk import Disk
from timer.files.disk_reserve import Rooms
from timer.leader.groups.lease_table import ConsumerStream
from timer.leader.intake.admission import WantedTimes
from timer.leader.leader import Delivery, Leader, LeaderConfig, Now
from timer.model.columns import Binary, Part
from timer.model.timer_errors import (
    EngineError,
    InvalidRequestError,
    NotLeaderError,
    TopicDeletedError,
)
from timer.model.units import Epoch, LeaseId, LogIndex, ProducerId, QueueOffset, ReplicaId, UnixMs
from timer.ready.group import Group
from timer.recovery.engine import Engine
from timer.state.apply_results import (
    CANCELLED,
    RESCHEDULED,
    Applied,
    CancelApplied,
    Checkpoint,
    FireApplied,
    RescheduleApplied,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from chaos.sim.world.sim_node import SimNode

CONFIG: Final = LeaderConfig(
    checkpoint_interval_ms=1_000, policy=replace(DEFAULTS, delay_levels_ms=LEVELS_MS)
)
CROWD_CONFIG: Final = replace(CONFIG, fire_topics_max=workbook.TOPICS_MAX)
TOPICS_AT_ONCE: Final = 1
"""Topics that a flush handles per step, before its cut and after its spill file. Topics can change
between the steps."""
PRODUCER_IDS: Final = 1_000
"""Number of producer ids; few, so that two registrations sometimes draw the same one."""
PRODUCER_IDLE_MS: Final = 2_000
"""Time after which an idle producer is forgotten in worlds with `fleeting`."""
RESERVE: Final = 300_000
"""Bytes of a small disk that are reserved for work that must go on."""
ROOM: Final = 100_000
"""Bytes of a small disk beside the reserve."""
DRAIN_LOOK_US: Final = 5_000
ROOM_LOOK_US: Final = 200_000
PRESSED_BYTES: Final = 200
"""The memtable's limit in worlds with `pressed`, where folding waits for flushes."""


class EngineWithoutPrefetch(Engine):
    """An engine that reads its runs while it folds, because no thread has read them before.

    Nodes with an even replica id use it. The result of a fold must not depend on a prefetch.
    """

    def begin_prefetch(self, entries: Sequence[Entry]) -> None:
        """Return None: no prefetch."""


def _limits(options: WorldOptions) -> FlushLimits:
    return FlushLimits(
        memtable_bytes=PRESSED_BYTES if options.pressed and not options.slow_files else NEVER,
        log_bytes=NEVER,
        log_entries=options.manifest_every,
        interval_ms=NEVER,
        topics_at_once=TOPICS_AT_ONCE,
    )


class EngineApp(KeeperCalls):
    """State plane of one simulated process."""

    def __init__(self, node: "SimNode", town: Town) -> None:
        self.node = node
        self._town = town
        secret = f"{node.replica} {node.nonce}".encode()  # differs between processes
        config = CROWD_CONFIG if node.world.options.crowds else CONFIG
        self._producer_ids = PRODUCER_IDS
        if node.world.options.fleeting:
            config = replace(config, producer_idle_ms=PRODUCER_IDLE_MS)
            self._producer_ids = 1 << 48  # the id of a forgotten producer is never drawn again
        engine = Engine if node.replica % 2 else EngineWithoutPrefetch
        self.engine = engine(node.disk, STATE_PATH, config, self._observe, secret)
        if node.world.options.crowds:
            store = self.engine.machine.store
            store.dead_max, store.chunk = workbook.DEAD_MAX, workbook.CHUNK
        pauses = self.engine.machine.pauses
        pauses.portion, pauses.together, pauses.apart_max = SWEEP_ROWS, SWEEP_TOPICS, APART_MAX
        self.voters: Voters | None = (
            frozenset(self.engine.machine.voters) or None if self.engine.manifest_index else None
        )
        self.state_time_ms = self.engine.machine.applied_time_ms
        self.level = self.engine.machine.level
        self._joined: dict[SimStream, tuple[Group, ConsumerStream]] = {}
        self._readers: dict[SimStream, SlowReader] = {}
        self._rng = random.Random(node.world.rng.getrandbits(64))
        io = TimelineIo(self, random.Random(self._rng.getrandbits(64)))
        self.limits = _limits(node.world.options)
        self.plane = StatePlane(self.engine, self.limits, io)
        self.draining = False
        self._open: dict[object, Leader] = {}
        """The schedule requests that this process has accepted and not answered."""
        self._rooms: tuple[Leader, Rooms] | None = None
        if node.world.options.tight:
            node.later(0, self._look_at_room)
        self.plane.kick()

    @property
    def applied_index(self) -> LogIndex:
        return self.engine.machine.applied_index

    # ---- calls of the node

    def check_entry(self, entry: Entry) -> None:
        check_entry(entry)

    def on_commit(self, entries: Sequence[Entry]) -> None:
        book = self._town.book
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
        self._joined.clear()
        self._readers.clear()
        self.plane.on_stepdown(epoch)

    def drain(self, done: "Callable[[], None]") -> None:
        self.draining = True
        self.plane.drain()
        self._look_at_drain(done)

    def _look_at_drain(self, done: "Callable[[], None]") -> None:
        if not self.plane.is_drained():
            self.node.later(DRAIN_LOOK_US, self._look_at_drain, done)
            return
        waiting = [leader for leader in self._open.values() if leader.closed is None]
        if waiting:
            raise Broken("drain", f"{self.node} drained with {len(waiting)} requests unanswered")
        done()

    def on_stop(self) -> None:
        self._joined.clear()
        self._readers.clear()

    @staticmethod
    def check(disk: Disk, directory: Path) -> None:
        Engine(disk, directory, CONFIG)

    def _observe(self, entry: Entry, applied: Applied) -> None:
        book, machine = self._town.book, self.engine.machine
        if self.node.world.options.crowds:
            asks = self.node.replica % 2 == 1
            workbook.check(entry, applied, machine.store, asks=asks)
        if entry.index > book.first_applied:
            book.first_applied = entry.index
            book.fates.check(entry, applied, machine)
            book.policies.check(entry, applied)
            book.quotas.check(entry, applied, machine)
        book.applied(self.node, machine, applied)
        if isinstance(applied, FireApplied) and self.engine.leader is not None:
            book.late.fired(self, entry, applied, self.clock_ms())
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

    def _now(self) -> Now:
        return self.plane.now()

    def clock_ms(self) -> int:
        """Return the time of this leader's clock in Unix milliseconds."""
        return self._now().clock_ms

    def _kick(self) -> None:
        self.plane.kick()

    def handed_out(self, delivery: Delivery) -> None:
        """Check a delivery that is about to be sent."""
        book, leader = self._town.book, self.engine.leader
        assert leader is not None
        book.handed_out(self.node, delivery, self.node.world.referee.served)
        book.check_due(self.node, delivery)
        # A policy counts from the first portion of its entry.
        following = self.applied_index + 1 + self.engine.machine.portions.begun
        book.check_expiry(delivery, following)
        book.leases.handed_out(leader, delivery, self.node.mono_ms())
        options = self.node.world.options
        if options.traits:
            rate = self.engine.machine.policies.of(CLUSTER).group_rate_max or 0
            if not self.node.world.heals:  # a healed world has no rate
                book.pace.handed_out(delivery, rate, self.node.world.timeline.now_us)
            if not options.expiry:  # the turns of expired messages are not seen
                book.order.by_priority(delivery, leader.groups.states)

    def may_hand_out(self) -> bool:
        """Return whether this node's leadership lease is valid now."""
        return self.node.core.lease_held(self.node.mono_ms())

    # ---- room on disks, as in cluster/files/disk_room.py

    def _look_at_room(self) -> None:
        node, before = self.node, self.engine.room
        node.later(ROOM_LOOK_US, self._look_at_room)
        room = before.after(node.disk.free_bytes(STATE_PATH), RESERVE)
        self.plane.use_room(room)
        leader, now_ms = self.engine.leader, node.mono_ms()
        if leader is None:
            return
        if self._rooms is None or self._rooms[0] is not leader:
            self._rooms = leader, Rooms(node.replica, now_ms)
        rooms = self._rooms[1]
        rooms.heard(node.replica, str(node.replica), room, now_ms)
        for other in node.world.nodes:
            if other is not node and other.alive:
                link, back = (node.replica, other.replica), (other.replica, node.replica)
                node.world.network.carry(link, other.call, _tell_room, other, rooms, back)
        leader.full = rooms.refusal(node.core.voters, now_ms)

    # ---- requests of clients; each answers through `reply`

    def register(self, token: bytes, reply: Reply) -> None:
        """Register a producer."""
        with self._taking(reply, kick=False):
            leader = self._leading()
            drawn = ProducerId(self._rng.randrange(1, self._producer_ids))
            leader.register(token, drawn, self._now(), reply)

    def schedule(self, producer_id: int, request: NumberedRequest, reply: Reply) -> None:
        """Schedule a request's timers; the answer is a list of ToldRow, or an error."""
        with self._taking(reply):
            leader, now = self._leading(), self._now()
            topic = leader.topic_named(request.topic)
            if topic is None:
                leader.topic(request.topic, now, lambda _: None)
                return  # the client resends the request
            rows, payload = len(request.values), Binary.of(request.payloads(producer_id))
            rules = leader.rules(topic.topic_id, ProducerId(producer_id), request.sequence)
            limit, size = rules.payload_limit[0], int(payload.sizes.max())
            if size > limit:
                raise InvalidRequestError("payload", f"{size} bytes", f"at most {limit}")
            floor_ms = self.engine.machine.last_read_time_ms
            asked = WantedTimes(request.way, np.array(request.values, np.int64))
            times = rules.times(asked, rows, now, floor_ms)
            taken = TakenRequest(request.way, tuple(request.values), now.clock_ms, floor_ms)
            takings = self._town.book.policies.requests
            takings.setdefault((producer_id, request.sequence), []).append(taken)
            part = Part(
                producer_id=ProducerId(producer_id),
                sequence=request.sequence,
                due_ms=times.due_ms,
                requested_ms=times.requested_ms,
                topic=np.full(rows, topic.topic_id, np.uint32),
                payload=payload,
                key=Binary.of(request.keys) if request.keys else None,
                headers=self._headers(request.payloads(producer_id)),
                on_conflict=request.mode,
                body=zlib.crc32(payload.blob),
            )
            self._take(leader, (producer_id, request.sequence), part, now, reply)

    def _headers(self, payloads: list[bytes]) -> Binary | None:
        return headers_of(payloads) if self.node.world.options.traits else None

    def call(self, call: NamedRequest, reply: Reply) -> None:
        """Schedule a request that has an id; the answer is the same as for `schedule`."""
        with self._taking(reply):
            leader, now = self._leading(), self._now()
            topics = {topic: leader.topic_named(topic) for topic, _ in call.rows}
            request = leader.request_id(call.text, call.body, now)
            request = request._replace(until_ms=UnixMs(now.clock_ms + call.window_ms))
            floor_ms = self.engine.machine.last_read_time_ms
            known = {name: topic for name, topic in topics.items() if topic is not None}
            if missing := [name for name in topics if name not in known]:
                leader.topic(missing[0], now, lambda _: None)
                return  # the client resends the request
            ids = [known[topic].topic_id for topic, _ in call.rows]
            times = []
            for topic_id, (_, delay_ms) in zip(ids, call.rows, strict=True):
                rules = leader.rules(topic_id, ProducerId(0), 0, request)
                times.append(rules.times(_after(delay_ms), 1, now, floor_ms))
            part = Part(
                producer_id=ProducerId(0),
                sequence=0,
                due_ms=np.concatenate([each.due_ms for each in times]),
                requested_ms=np.concatenate([each.requested_ms for each in times]),
                topic=np.array(ids, np.uint32),
                payload=Binary.of(call.payloads),
                headers=self._headers(call.payloads),
                request=request,
            )
            self._take(leader, request[:2], part, now, reply)

    def _take(self, leader: Leader, key: object, part: Part, now: Now, reply: Reply) -> None:
        """Give a schedule request to the leader."""
        last = leader.machine.producers.last_sequence(part.producer_id)
        repeated = part.request is not None or (last is not None and part.sequence <= last)
        taken = object()

        def answered(result: object) -> None:
            del self._open[taken]
            reply(told(result))

        self._open[taken] = leader
        try:
            leader.schedule(part, answered, now)
        except EngineError:
            self._open.pop(taken, None)
            raise
        self._town.book.quotas.took(leader, key, part, repeated=repeated)

    def cancel(self, names: list[TimerName], reply: Reply) -> None:
        """Cancel timers; the answer is a list of the machine's results."""
        with self._taking(reply):
            targets = ids_of(names)
            leader = self._leading()
            leader.cancel(targets.due_ms, targets.seq, lambda result: reply(listed(result)))

    def reschedule(self, names: list[TimerName], delay_ms: int, reply: Reply) -> None:
        """Reschedule timers; the answer is a list of (the machine's result, new name)."""

        def answer(result: object) -> None:
            if isinstance(result, RescheduleApplied):
                reply([*zip(result.results.tolist(), named(result.timers), strict=True)])
            else:
                reply(result)

        with self._taking(reply):
            leader, targets = self._leading(), ids_of(names)
            book, now = self._town.book, self._now()
            for name in names:
                if name in book.timers:
                    self._note_move(name.seq, book.timers[name][0], delay_ms, now)
            topics = self.engine.machine.store.topics(targets.due_ms, targets.seq)
            leader.reschedule(targets, topics, _after(delay_ms), now, answer)

    def change_key(self, key: tuple[str, bytes], delay_ms: int | None, reply: Reply) -> None:
        """Cancel or reschedule the timer with a key.

        Args:
            key: topic and key
            delay_ms: the new delay; None cancels
            reply: gets a list of (old name, new name), new is None after a cancel; or an error
        """

        def answer(result: object) -> None:
            if isinstance(result, CancelApplied):
                done = zip(result.results.tolist(), named(result.targets), strict=True)
                reply([(old, None) for outcome, old in done if outcome == CANCELLED])
            elif isinstance(result, RescheduleApplied):
                ids = named(result.targets), named(result.timers)
                rows = zip(result.results.tolist(), *ids, strict=True)
                reply([(old, new) for outcome, old, new in rows if outcome == RESCHEDULED])
            else:
                reply(result)

        with self._taking(reply):
            leader, now = self._leading(), self._now()
            topic = self._topic(key[0])
            targets = Keys(np.array([topic.topic_id], np.uint32), Binary.of([key[1]]))
            if delay_ms is None:
                leader.cancel_keys(targets, answer)
            else:
                self._note_move(key, key[0], delay_ms, now)
                leader.reschedule(targets, targets.topic, _after(delay_ms), now, answer)

    def _note_move(self, target: object, topic: str, delay_ms: int, now: Now) -> None:
        floor_ms = self.engine.machine.last_read_time_ms
        taken = TakenRequest("delay_ms", (delay_ms,), now.clock_ms, floor_ms)
        self._town.book.policies.moves.setdefault(target, []).append((topic, taken))

    def alter(self, where: str, said: ScopePolicy, unset: list[str]) -> None:
        """Change the policy of the cluster (""), a namespace ("ns/") or a topic; no answer."""
        with self._taking():
            is_wide = not where or where.endswith("/")
            scope = Scope(where.rstrip("/")) if is_wide else Scope("", self._topic(where).topic_id)
            self._leading().alter(scope, said, unset, self._now(), lambda _: None)

    def open(self, stream: SimStream, credit: int) -> None:
        """Open a consumer's stream."""

        def ended(_: object) -> None:  # the consumer opens a stream again
            self._town.line.stream(stream.consumer.ended, stream)

        def join(group: object) -> None:
            if isinstance(group, Group) and leader.closed is None:
                self._join(stream, group, credit)
            elif isinstance(group, TopicDeletedError):
                ended(group)

        consumer = stream.consumer
        with self._taking(ended):
            leader, topic = self._leading(), self._topic(consumer.topic)
            settings = self._town.settings(consumer.topic, consumer.group)
            create = CreateGroup(topic.topic_id, consumer.group, GroupStart.EARLIEST, settings)
            leader.groups.create(create, join)

    def _join(self, stream: SimStream, group: Group, credit: int) -> None:
        leader = self.engine.leader
        assert leader is not None

        def sink(delivery: Delivery) -> None:
            self._town.book.credit.delivered(stream, len(delivery.lease.offsets))
            group_id, rows = delivery.group.group_id, rows_of(delivery)
            takes = partial(stream.consumer.take, stream, delivery, self, group_id, rows)
            reader.deliver(delivery, lambda: self._town.line.stream(takes))

        def holds(delivery: Delivery) -> bool:
            lease = delivery.lease
            whole = lease.lease_id in joined.leases and lease.left == len(lease.offsets)
            return self.engine.leader is leader and whole

        def withdraw(lease_id: LeaseId) -> list[LeaseId]:
            dropped = reader.withdraw(lease_id, joined)
            messages = sum(each.messages for each in dropped)
            self._town.book.credit.granted(stream, messages)
            return self._not_sent(dropped)

        def drained(messages: int) -> None:
            joined.paused = False
            self.credit(stream, messages)

        def end(why: EngineError) -> None:
            del why
            self._joined.pop(stream, None)
            self._readers.pop(stream, None)
            self._town.line.stream(stream.consumer.ended, stream)

        reader = SlowReader(self.node, stream.consumer.stall_us, holds, drained)
        joined = ConsumerStream("sim", LEASE_MS, sink, end=end, withdraw=withdraw)
        try:
            leader.groups.join(group, joined)
        except EngineError as refused:
            end(refused)
            return
        self._joined[stream] = (group, joined)
        self._readers[stream] = reader
        self.credit(stream, credit)

    def leave(self, stream: SimStream) -> None:
        """Detach a consumer after its stream broke."""
        joined = self._joined.pop(stream, None)
        if joined is not None and self.engine.leader is not None:
            self._town.book.leases.left(joined[1])
            unsent = self._not_sent(self._readers.pop(stream).close())
            self.engine.leader.groups.leave(*joined, unsent)
            self._kick()

    def _not_sent(self, dropped: Sequence[UnsentDelivery]) -> list[LeaseId]:
        for each in dropped:
            self._town.book.leases.not_sent(self.engine.leader, each.delivery)
            self._town.book.order.not_sent(each.delivery)
        return [each.lease for each in dropped]

    def credit(self, stream: SimStream, messages: int) -> None:
        """Give a consumer credit for more messages."""
        with self._taking():
            leader, group, joined = self._serving(stream)
            self._town.book.credit.granted(stream, messages)
            leader.groups.credit(group, joined, messages)

    def ack(self, stream: SimStream, held: HeldMessages, reply: Reply) -> None:
        """Acknowledge messages; the answer is a list of verdicts.

        The verdicts are those of timer/leader/groups/group_leases.py.
        """
        with self._taking(reply):
            leader, group, _ = self._serving(stream)
            self._town.book.order.ack_asked(group.group_id, held.offsets)
            leader.groups.ack(group, *held.columns, lambda result: reply(listed(result)))

    def ack_up_to(self, stream: SimStream, held: HeldMessages, reply: Reply) -> None:
        """Acknowledge all messages up to the last held one; the answer is a list of one verdict."""
        with self._taking():
            leader, group, _ = self._serving(stream)
            last = QueueOffset(held.offsets[-1])
            self._town.book.order.ack_asked(group.group_id, range(group.cursor, last + 1))
            lease = held.columns[:2]
            leader.groups.ack_up_to(group, *lease, last, lambda result: reply(listed(result)))

    def nack(
        self, stream: SimStream, held: HeldMessages, delay_ms: int | None, reply: Reply
    ) -> None:
        """Nack messages; the answer is (group id, verdicts). None after an error."""
        with self._taking():
            leader, group, _ = self._serving(stream)
            group_id = group.group_id

            def answer(result: object) -> None:
                if not isinstance(result, EngineError):
                    reply((group_id, listed(result)))

            self._town.book.leases.returned(group, held.offsets)
            leader.groups.nack(group, *held.columns, delay_ms, self._now(), answer)

    def give_back(self, stream: SimStream, held: HeldMessages) -> None:
        """Return messages that were not seen."""
        with self._taking():
            leader, group, _ = self._serving(stream)
            self._town.book.leases.returned(group, held.offsets)
            leader.groups.give_back(group, *held.columns)

    def shed(self, stream: SimStream, held: HeldMessages, reply: "Callable[[], None]") -> None:
        """Give messages back unseen, and end the stream's credit."""
        with self._taking():
            leader, _, joined = self._serving(stream)
            self.give_back(stream, held)
            self._town.book.credit.ended(stream)
            leader.groups.end_credit(joined)
            self._readers[stream].end_credit()
            reply()

    def extend(self, stream: SimStream, held: HeldMessages) -> None:
        """Extend the leases of messages; no answer."""
        with self._taking():
            leader, group, joined = self._serving(stream)
            now = self._now()
            verdicts = leader.groups.extend(group, *held.columns, LEASE_MS, now)
            judged = zip(held.offsets, verdicts.tolist(), strict=True)
            until_ms = now.mono_ms + LEASE_MS
            self._town.book.leases.extended(leader, (group, joined), judged, until_ms)

    def _serving(self, stream: SimStream) -> tuple[Leader, Group, ConsumerStream]:
        """Return the leader, the group and the stream of a consumer.

        Raises:
            NotLeaderError: the node does not serve this stream.
        """
        joined = self._joined.get(stream)
        if joined is None:
            raise NotLeaderError(None)
        return self._leading(), *joined


def _after(delay_ms: int) -> WantedTimes:
    return WantedTimes("delay_ms", np.array([delay_ms], np.int64))


def _tell_room(node: "SimNode", rooms: Rooms, back: tuple[ReplicaId, ReplicaId]) -> None:
    """Report the room on this node's disk to the leader."""
    app = node.app
    assert isinstance(app, EngineApp)
    room, world = app.engine.room, node.world

    def heard() -> None:
        asker = next(each for each in world.nodes if each.replica == back[1])
        if asker.alive:
            rooms.heard(node.replica, str(node.replica), room, asker.mono_ms())

    world.network.carry(back, heard)


class TimerWorld(World):
    """A world of nodes that run the timer machine, with producers and consumers."""

    app_type = EngineApp

    def __init__(self, seed: int, options: WorldOptions | None = None) -> None:
        holder: list[Town] = []
        super().__init__(seed, lambda node: EngineApp(node, holder[0]), options)
        self._progress = ProgressCheck()
        self.town = Town(self, random.Random(self.rng.getrandbits(64)))
        holder.append(self.town)
        self.workload = self.town.act
        if self.options.tight:
            self._make_tight(random.Random(f"tight {seed}"))

    def run(self, seconds: int) -> None:
        """Run as a World does, then wait until every timer has fired and every message is acked."""
        self._look()
        super().run(seconds)
        if not self.stranded:
            self.town.settle()

    def _look(self) -> None:
        self.timeline.after(latebook.LOOK_US, self._look)
        self._progress.look(self)
        self.town.book.late.look(self)

    def _make_tight(self, rng: random.Random) -> None:
        """Give small disks to all voters, or to so many that the others are no majority."""
        voters = [node for node in self.nodes if node.replica in self.voters]
        fewest = (len(voters) + 1) // 2
        for node in rng.sample(voters, rng.choice((fewest, len(voters)))):
            node.capacity_bytes = node.disk.capacity_bytes = RESERVE + ROOM

    def ran_out(self, node: "SimNode") -> None:
        """See World. The leader must reject requests before a disk uses up its reserve."""
        used = node.disk.used_bytes()
        raise Broken("space", f"{node} filled its disk: {used} bytes, {RESERVE} in reserve")

    def rows(self) -> int:
        """See World."""
        machines = [app.engine.machine for app in self.town.apps()]
        machine = max(machines, key=lambda each: each.applied_index)
        groups = [group for topic in machine.topics.values() for group in topic.groups.values()]
        acked = sum(group.acked_count for group in groups)
        return machine.counts.scheduled + machine.counts.fired + acked
