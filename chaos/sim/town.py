"""Clients of a simulated timer cluster, and the book of what they were promised.

    SimProducer   numbered requests, resent in order until answered; cancels some of its timers
    SimConsumer   one consumer of a group; takes, acks late or never, reconnects
    Book          what was asked, answered and seen; checks P1 - P5 against it, P6 as it happens

Clients reach nodes through a lossy line of their own and know nothing but answers.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from chaos.sim.referee import Broken
from timer.errors import TimerError
from timer.leader import Delivery
from timer.machine import CANCELLED, Checkpoint
from timer.units import LogIndex

if TYPE_CHECKING:
    from chaos.sim.timers import TimerApp
    from chaos.sim.world import World

TOPICS: Final = ("a", "b")
GROUPS: Final = ("g", "h")
RESEND_MS: Final = 1_500
LEASE_MS: Final = 2_000
SETTLE_MS_MAX: Final = 200_000
"""A clock that was led astray comes back at half the rate of time."""
LINE_US: Final = 300


@dataclass(frozen=True, slots=True)
class TimerName:
    """A timer as its id names it."""

    due_ms: int
    seq: int


@dataclass(frozen=True, slots=True)
class Row:
    """A delivered message."""

    name: TimerName
    fired_at_ms: int
    payload: bytes
    """Says which row of which request it is; see `Request.payloads`."""


@dataclass(slots=True)
class Asked:
    """One timer that a producer was told is scheduled."""

    topic: str
    requested_ms: int | None
    """None: a delay, which the leader resolved."""
    cancelled: bool = False
    """A cancel was answered CANCELLED."""
    cancel_open: int = 0
    """Cancels asked and not answered: their outcome is unknown."""


@dataclass(slots=True)
class Book:
    """What was promised."""

    timers: dict[TimerName, Asked] = field(default_factory=dict)
    digests: dict[LogIndex, str] = field(default_factory=dict)
    fired: dict[TimerName, tuple[str, int]] = field(default_factory=dict)
    """Timer -> (topic, queue offset), as consumers saw it."""
    payloads: dict[bytes, TimerName] = field(default_factory=dict)
    """Row of a request -> the one timer that it became."""
    acked: set[tuple[str, str, int]] = field(default_factory=set)
    """(topic, group, offset) whose ack was confirmed."""
    delivered: set[tuple[str, str, int]] = field(default_factory=set)
    deliveries: int = 0
    redeliveries: int = 0
    answers: int = 0

    def digest(self, node: object, checkpoint: Checkpoint) -> None:
        """P6: every replica records the same digest at an index."""
        known = self.digests.setdefault(checkpoint.index, checkpoint.digest)
        if known != checkpoint.digest:
            raise Broken("digest", f"{checkpoint.index}: {known} and, on {node}, {checkpoint}")

    def scheduled(self, name: TimerName, asked: Asked) -> None:
        """P2: a retried request is one timer; its id does not change."""
        self.timers.setdefault(name, asked)
        if asked.requested_ms is not None and name.due_ms < asked.requested_ms:
            raise Broken("early", f"{name} was asked for {asked.requested_ms}")

    def cancelled(self, name: TimerName) -> None:
        """P4: a cancel that said CANCELLED holds."""
        self.timers[name].cancelled = True
        if name in self.fired:
            raise Broken("cancel", f"{name} was delivered, then cancelled")

    def seen(self, key: tuple[str, str, int], row: Row, attempt: int) -> None:
        """P1 - P5: a consumer got a message."""
        topic, _, offset = key
        name, fired_at = row.name, row.fired_at_ms
        if self.payloads.setdefault(row.payload, name) != name:
            raise Broken("twice", f"{row} is {self.payloads[row.payload]} as well")
        if self.fired.setdefault(name, (topic, offset)) != (topic, offset):
            raise Broken("twice", f"{name} fired at {self.fired[name]} and {(topic, offset)}")
        if fired_at < name.due_ms:
            raise Broken("early", f"{name} fired at {fired_at}")
        if name in self.timers and self.timers[name].cancelled:
            raise Broken("cancel", f"{name} was cancelled, then delivered")
        if key in self.acked:
            raise Broken("acked", f"{key} was delivered after its ack was confirmed")
        if key in self.delivered:
            self.redeliveries += 1
            if attempt < 2:
                raise Broken("unmarked", f"{key} came again as attempt {attempt}")
        self.delivered.add(key)
        self.deliveries += 1

    def at_end(self, app: "TimerApp") -> None:
        """P1: everything scheduled has fired, unless it was cancelled."""
        machine = app.engine.machine
        fired = self.fired.keys() | {
            TimerName(int(row["due_ms"]), int(row["seq"]))
            for topic in machine.topics.values()
            for block in topic.queue.blocks
            for row in block.rows
        }
        for name, asked in self.timers.items():
            if name not in fired and not (asked.cancelled or asked.cancel_open):
                raise Broken("lost", f"{name} of {asked.topic} never fired")
        for topic in machine.topics.values():
            for group in topic.groups.values():
                key = (topic.name, group.name)
                mine = np.array(
                    [offset for (t, g, offset) in self.acked if (t, g) == key], np.uint64
                )
                if not group.is_acked(mine).all():
                    raise Broken("lost", f"a confirmed ack of {key} is gone")


@dataclass(slots=True)
class Request:
    """One numbered request of a producer."""

    sequence: int
    topic: str
    delays_ms: list[int]
    absolute: bool
    sent_us: int = -1

    def payloads(self, producer_id: int) -> list[bytes]:
        """Return one payload per timer, like no other's in the world."""
        count = len(self.delays_ms)
        return [b"%d/%d/%d" % (producer_id, self.sequence, row) for row in range(count)]


class Line:
    """How clients reach nodes: late, and not always."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self.loss = rng.choice((0.0, 0.01, 0.1))

    def carry(self, call: Callable[..., None], *args: object) -> None:
        """Call in a while, or never."""
        if self._rng.random() < self.loss:
            return
        delay_us = int(LINE_US * (0.2 + self._rng.expovariate(1.0)))
        self._world.timeline.after(delay_us, call, *args)

    def stream(self, call: Callable[..., None], *args: object) -> None:
        """Call in a while: a stream loses nothing until it breaks."""
        self._world.timeline.after(LINE_US, call, *args)

    def ask(self, app: "TimerApp", call: Callable[..., object], *args: object) -> None:
        """Call a method of an application on its node, unless the node is dead by then."""

        def arrive() -> None:
            if app.node.alive and app.node.app is app:
                app.node.call(call, *args)

        self.carry(arrive)


class SimProducer:
    """One idempotent producer."""

    def __init__(self, town: "Town", token: bytes, rng: random.Random) -> None:
        self._town = town
        self._rng = rng
        self._token = token
        self.producer_id: int | None = None
        self._next = 1
        self.waiting: list[Request] = []
        self._mine: list[TimerName] = []
        self._registering_us = -(1 << 60)

    def act(self) -> None:
        """Do one thing: schedule, resend, or cancel."""
        app = self._town.leader()
        if app is None:
            return
        now_us = self._town.world.timeline.now_us
        if self.producer_id is None:
            if now_us - self._registering_us > RESEND_MS * 1000:
                self._registering_us = now_us
                self._town.line.ask(app, app.register, self._token, self._town.reply(self._known))
            return
        if self.waiting and now_us - self.waiting[0].sent_us > RESEND_MS * 1000:
            for request in self.waiting:
                self._send(app, request)
            return
        if self._town.closing or len(self.waiting) >= 4:
            return
        if self._mine and self._rng.random() < 0.25:
            self._cancel(app)
            return
        self._schedule(app)

    def _known(self, result: object) -> None:
        if isinstance(result, int):
            self.producer_id = result

    def _schedule(self, app: "TimerApp") -> None:
        rng = self._rng
        scale = rng.choice((0, 0, 5, 10, 11, 300, 3_000, 20_000))
        delays = [int(scale * rng.random()) for _ in range(rng.choice((1, 1, 2, 5)))]
        absolute = rng.random() < 0.5
        if absolute and rng.random() < 0.2:
            delays = [-delay - 1 for delay in delays]
        request = Request(self._next, rng.choice(TOPICS), delays, absolute)
        if absolute:
            wall_ms = 1_800_000_000_000 + self._town.world.timeline.now_us // 1000
            request.delays_ms = [wall_ms + delay for delay in delays]
        self._next += 1
        self.waiting.append(request)
        self._send(app, request)

    def _send(self, app: "TimerApp", request: Request) -> None:
        request.sent_us = self._town.world.timeline.now_us
        reply = self._town.reply(lambda result: self._answered(request, result))
        self._town.line.ask(app, app.schedule, self.producer_id, request, reply)

    def _answered(self, request: Request, result: object) -> None:
        if isinstance(result, TimerError) or request not in self.waiting:
            return  # resent when it is due
        assert isinstance(result, list)
        self._town.book.answers += 1
        self.waiting.remove(request)
        for name, wanted in zip(result, request.delays_ms, strict=True):
            asked = Asked(request.topic, wanted if request.absolute else None)
            self._town.book.scheduled(name, asked)
            self._mine.append(name)

    def _cancel(self, app: "TimerApp") -> None:
        names = [self._mine[self._rng.randrange(max(0, len(self._mine) - 8), len(self._mine))]]
        if self._rng.random() < 0.3:
            names.append(names[0])

        def answered(result: object) -> None:
            if isinstance(result, TimerError):
                return
            assert isinstance(result, list)
            for name, outcome in zip(names, result, strict=True):
                self._town.book.timers[name].cancel_open -= 1
                if outcome == CANCELLED:
                    self._town.book.cancelled(name)

        for name in names:
            self._town.book.timers[name].cancel_open += 1
        self._town.line.ask(app, app.cancel, names, self._town.reply(answered))


class SimConsumer:
    """One consumer of a group: a stream to whoever leads."""

    def __init__(self, town: "Town", topic: str, group: str, rng: random.Random) -> None:
        self._town = town
        self.topic, self.group = topic, group
        self._rng = rng
        self._app: TimerApp | None = None
        self._stream = 0
        """Counts streams: what an earlier one still brings is dropped."""
        self._epoch = 0
        self._laziness = rng.choice((0.0, 0.1, 0.5))

    def act(self) -> None:
        """Reconnect if the stream is gone; now and then break it."""
        app = self._town.leader()
        gone = self._app is None or self._app.engine.leader is None or not self._app.node.alive
        if self._app is not None and (gone or self._rng.random() < 0.01):
            self.close()
        if self._app is None and app is not None:
            self._app = app
            self._stream += 1
            stream = self._stream
            credit = self._rng.choice((1, 5, 1000))
            app.node.call(app.open, self, stream, credit)

    def close(self) -> None:
        """Break the stream; the node notices."""
        app, self._app = self._app, None
        if app is not None and app.node.alive and app.node.app is app:
            app.node.call(app.leave, self, self._stream)

    def take(self, stream: int, delivery: Delivery, app: "TimerApp", rows: list[Row]) -> None:
        """A delivery arrives."""
        if stream != self._stream or delivery.epoch < self._epoch:
            return
        self._epoch = delivery.epoch
        offsets = delivery.lease.offsets.tolist()
        for offset, row, attempt in zip(offsets, rows, delivery.attempts.tolist(), strict=True):
            key = (self.topic, self.group, offset)
            self._town.book.seen(key, row, attempt)
        if self._app is app:
            app.node.call(app.credit, self, stream, len(offsets))
        if self._rng.random() < self._laziness and not self._town.closing:
            return  # its lease will end
        delay_us = int(self._rng.choice((1, 20, 500, LEASE_MS + 200)) * 1000 * self._rng.random())
        epoch, lease_id = delivery.epoch, delivery.lease.lease_id
        self._town.world.timeline.after(delay_us, self._ack, epoch, lease_id, offsets)

    def _ack(self, epoch: int, lease_id: int, offsets: list[int]) -> None:
        app = self._app
        if app is None:
            return

        def answered(result: object) -> None:
            if isinstance(result, TimerError):
                return
            assert isinstance(result, list)
            for offset, verdict in zip(offsets, result, strict=True):
                if verdict in (1, 2):
                    self._town.book.acked.add((self.topic, self.group, offset))

        reply = self._town.reply(answered)
        self._town.line.ask(app, app.ack, self, self._stream, epoch, lease_id, offsets, reply)


class Town:
    """All clients of one world."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self.world = world
        self.book = Book()
        self.line = Line(world, rng)
        self.closing = False
        self._rng = rng
        self.producers = [
            SimProducer(self, bytes([number]) * 16, random.Random(rng.getrandbits(64)))
            for number in range(rng.choice((1, 2, 3)))
        ]
        self.consumers = [
            SimConsumer(self, topic, group, random.Random(rng.getrandbits(64)))
            for topic in TOPICS
            for group in GROUPS[: rng.choice((1, 2))]
            for _ in range(rng.choice((1, 1, 2)))
        ]

    def leader(self) -> "TimerApp | None":
        """Return somebody who believes to serve; deposed leaders included."""
        serving = [app for app in self._apps() if app.node.alive and app.engine.leader]
        return self._rng.choice(serving) if serving else None

    def reply(self, answered: Callable[[object], None]) -> Callable[[object], None]:
        """Return what carries a result back to a client, perhaps."""
        return lambda result: self.line.carry(answered, result)

    def act(self) -> None:
        """The world's workload: some client does something."""
        self._rng.choice(self.producers).act()
        self._rng.choice(self.consumers).act()

    def settle(self) -> None:
        """The world is healed: finish what is open, wait for what is pending, check the book.

        Raises:
            Broken: a promise was.
        """
        self.closing = True
        for node in self.world.nodes:
            node.wall_offset_ms = 0
        timeline = self.world.timeline
        give_up_us = timeline.now_us + SETTLE_MS_MAX * 1000
        while timeline.now_us < give_up_us and not self._settled():
            for producer in self.producers:
                producer.act()
            for consumer in self.consumers:
                consumer.act()
            timeline.run_until(timeline.now_us + 200_000)
        if not self._settled():
            states = [str(app.engine.machine.counts) for app in self._apps()]
            open_requests = [request for p in self.producers for request in p.waiting]
            raise Broken("liveness", f"not settled: {states}, {open_requests}")
        for app in self._apps():
            self.book.at_end(app)

    def _apps(self) -> "list[TimerApp]":
        """Return the applications of all nodes that were ever started."""
        return [node.app for node in self.world.nodes if hasattr(node, "app")]  # type: ignore[misc]

    def _settled(self) -> bool:
        return not any(p.waiting for p in self.producers) and all(
            app.engine.machine.counts.pending == 0
            and all(
                group.cursor == topic.queue.end
                for topic in app.engine.machine.topics.values()
                for group in topic.groups.values()
            )
            for app in self._apps()
        )
