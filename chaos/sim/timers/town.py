"""Clients of a simulated timer cluster. chaos/sim/checks/book.py checks the promises to them.

    SimProducer    schedules timers (callers.py)
    SimConsumer    consumes for a group: acks late or never, nacks, extends, reconnects, dies with
                   leases
    OPERATORS      act now and then in worlds that have their option (operators.py);
                   SimCaller gives its requests ids (callers.py)

Clients reach nodes through a lossy link of their own. They know the cluster only by its answers.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from chaos.sim.checks.book import DeliveredRow, PromiseBook
from chaos.sim.timers import operators
from chaos.sim.timers.callers import SimCaller, SimProducer, SimRequest
from chaos.sim.timers.node_results import Reply, ignore
from chaos.sim.timers.operators import GROUPS
from chaos.sim.timers.served_stream import LEASE_MS
from chaos.sim.world.options import fork
from chaos.sim.world.referee import Broken
from timer.entries.payloads import EXCLUSIVE, FAILOVER, TYPES, GroupSettings
from timer.leader.groups import dead_letters
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.group_leases import ACCEPT
from timer.leader.leader import Leader
from timer.model.columns import U64
from timer.model.timer_errors import EngineError
from timer.model.units import Epoch, LeaseId

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp
    from chaos.sim.world.sim_node import SimNode
    from chaos.sim.world.world import World

TOPICS: Final = ("a", "b")
NAMESPACED: Final = ("a", "n/b")
"""The topics of worlds with `policies`."""
CROWD: Final = ("a", "b", "c", "d", "e")
"""The topics of worlds with `crowds`."""
UP_TO: Final = 0.3
"""Share of the acks that acknowledge all messages up to one, in groups that allow such acks."""
SHEDDING: Final = 0.2
"""Probability that a consumer returns a delivery and ends its credit, where consumers do that."""
STALLING: Final = 0.1
"""Probability that a consumer stops reading before a delivery, where consumers do that."""
SETTLE_MS_MAX: Final = 200_000
"""Longest time to settle. Long, because a clock set ahead returns at half the rate of time."""
CLOSING_DELAY_US_MAX: Final = 20_000
"""Longest time from a delivery to its ack after the world is healed."""
LINE_US: Final = 300
"""Typical delay of a message between a client and a node."""
KEEPALIVE_MS: Final = 5_000
"""Time after which a node notices that a consumer died."""


class ClientLink:
    """The link between clients and nodes: it delays messages and loses some."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self.loss = world.options.client_loss

    def carry(self, call: Callable[..., None], *args: object) -> None:
        """Call `call(*args)` after a random delay, or never."""
        if self._rng.random() < self.loss:
            return
        delay_us = int(LINE_US * (0.2 + self._rng.expovariate(1.0)))
        self._world.timeline.after(delay_us, call, *args)

    def stream(self, call: Callable[..., None], *args: object) -> None:
        """Call `call(*args)` after LINE_US. A stream loses nothing until it breaks."""
        self._world.timeline.after(LINE_US, call, *args)

    def ask(self, app: "EngineApp", call: Callable[..., object], *args: object) -> None:
        """Call a method of an application on its node, if that process still runs on arrival."""

        def arrive() -> None:
            if app.node.alive and app.node.app is app:
                app.node.call(call, *args)

        self.carry(arrive)


class SimStream(NamedTuple):
    """A consumer's stream to a node."""

    consumer: "SimConsumer"
    number: int


class LeasedMessages(NamedTuple):
    """Messages that a consumer holds."""

    group: int
    epoch: int
    lease_id: int
    offsets: list[int]

    @property
    def columns(self) -> tuple[Epoch, LeaseId, U64]:
        """The epoch, the lease and the offsets, as a leader takes them."""
        return Epoch(self.epoch), LeaseId(self.lease_id), np.array(self.offsets, np.uint64)


class SimConsumer:
    """One consumer of a group, with a stream to a node that serves."""

    def __init__(self, town: "Town", topic: str, group: str, rng: random.Random) -> None:
        self._town = town
        self.topic, self.group = topic, group
        self._rng = rng
        self._app: EngineApp | None = None
        self._stream = SimStream(self, 0)
        """The current stream. Deliveries of earlier streams are dropped."""
        self._epoch = 0
        self._laziness = rng.choice((0.0, 0.1, 0.5))
        self._temper = self._rng.choice((0.0, 0.0, 0.3, 0.6))
        """Probability that a delivery leads to a nack, an extension or a return, 0 to 1."""
        self._shedding = 0
        """Returned parts whose answers are due: no credit is granted meanwhile."""

    def act(self) -> None:
        """Reconnect if the stream is gone; now and then close the stream, or die."""
        app = self._town.leader()
        gone = self._app is None or self._app.engine.leader is None or not self._app.node.alive
        if self._app is not None and (gone or self._rng.random() < 0.01):
            if self._rng.random() < 0.3 and not self._town.closing:
                self.die()
            else:
                self.close()
        if self._app is None and app is not None:
            self._app = app
            self._stream = SimStream(self, self._stream.number + 1)
            self._shedding = 0
            app.node.call(app.open, self._stream, self._rng.choice((1, 5, 1000)))

    def stall_us(self) -> int:
        """Return for how long the consumer reads nothing now, microseconds; 0: it reads."""
        stalls = self._town.world.options.stalls and not self._town.closing
        if not stalls or self._rng.random() >= STALLING:
            return 0
        return int(self._rng.choice((0.1, 0.5, 1.5, 3.0)) * LEASE_MS * 1000)

    def close(self) -> None:
        """Close the stream; the node notices at once."""
        app, self._app = self._app, None
        if app is not None and app.node.alive and app.node.app is app:
            app.node.call(app.on_stream, self._stream, "leave")

    def on_end(self, stream: SimStream) -> None:
        """Note that the node ended the stream, such as for a deleted group."""
        if stream == self._stream:
            self._app = None

    def die(self) -> None:
        """Die without a notice. Leases continue and the node sends more, until KEEPALIVE_MS."""
        app, stream = self._app, self._stream
        self._app = None
        self._stream = SimStream(self, stream.number + 1)
        if app is not None:
            app.node.later(KEEPALIVE_MS * 1000, app.on_stream, stream, "leave")

    def take(
        self,
        stream: SimStream,
        delivery: Delivery,
        app: "EngineApp",
        group: int,
        rows: list[DeliveredRow],
    ) -> None:
        """Receive a delivery: record it, give credit and acknowledge it later, or never."""
        if stream != self._stream or delivery.epoch < self._epoch:
            return
        self._epoch = delivery.epoch
        offsets = delivery.lease.offsets.tolist()
        for offset, row, attempt in zip(offsets, rows, delivery.attempts.tolist(), strict=True):
            self._town.book.seen((group, offset), row, attempt)
        held = LeasedMessages(group, delivery.epoch, delivery.lease.lease_id, offsets)
        sheds = self._town.world.options.sheds and not self._town.closing
        if sheds and self._rng.random() < SHEDDING:
            self._shed(app, stream, held)
            return
        if self._app is app and not self._shedding:
            app.node.call(app.on_stream, stream, "credit", len(offsets))
        if self._rng.random() < self._laziness and not self._town.closing:
            return  # never acknowledged: the lease will end
        delay_us = int(self._rng.choice((1, 20, 500, LEASE_MS + 200)) * 1000 * self._rng.random())
        if self._town.closing:  # a group with three messages in flight must end in time, too
            delay_us = min(delay_us, CLOSING_DELAY_US_MAX)
        if self._rng.random() < self._temper and not self._town.closing:
            delay_us += LEASE_MS * 500 * self._complain(delay_us // 2, held)
        self._town.world.timeline.after(delay_us, self._ack, held)

    def _shed(self, app: "EngineApp", stream: SimStream, leased: LeasedMessages) -> None:
        """Return what came, as a consumer does that falls behind; grant credit once answered."""
        self._shedding += 1
        done = partial(self._town.line.stream, self._went_back, app, stream)
        app.node.later(LINE_US, app.on_stream, stream, "shed", leased, done)

    def _went_back(self, app: "EngineApp", stream: SimStream) -> None:
        if stream == self._stream and self._app is app:
            self._shedding -= 1
            if not self._shedding:
                app.node.call(app.on_stream, stream, "credit", self._rng.choice((1, 5, 1000)))

    def _complain(self, delay_us: int, leased: LeasedMessages) -> bool:
        """Nack, extend or return some messages of a delivery. Return whether to ack later."""
        rng, timeline = self._rng, self._town.world.timeline
        some = [offset for offset in leased.offsets if rng.random() < 0.5] or leased.offsets[:1]
        leased = leased._replace(offsets=some)
        if rng.random() < 0.2:
            timeline.after(delay_us, self._ask, "extend", leased)
            return True
        if self._rng.random() < 0.2:
            timeline.after(delay_us, self._ask, "give_back", leased)
        else:
            delay_ms = rng.choice((None, 0, 30, 1_000, 4_000))
            timeline.after(delay_us, self._nack, leased, delay_ms)
        return False

    def _ask(self, method: str, *args: object, reply: Reply = ignore) -> None:
        """Call a method of the stream at the node, if the stream is there."""
        if self._app is not None:
            call = partial(self._app.on_stream, reply=reply)
            self._town.line.ask(self._app, call, self._stream, method, *args)

    def _nack(self, leased: LeasedMessages, delay_ms: int | None) -> None:
        def answered(result: tuple[int, list[int]]) -> None:
            group_id, verdicts = result
            for offset, verdict in zip(leased.offsets, verdicts, strict=True):
                if verdict == ACCEPT:
                    self._town.book.answered_nacks.add((group_id, offset))

        self._ask("nack", leased, delay_ms, self._town.reply(answered))

    def _ack(self, held: LeasedMessages) -> None:
        book, options = self._town.book, self._town.world.options
        if self._app is None:
            return
        alone = self._town.settings(self.topic, self.group).type in (EXCLUSIVE, FAILOVER)
        up_to = options.redrives and alone and self._rng.random() < UP_TO

        def answered(result: list[int]) -> None:
            if up_to:
                if result == [ACCEPT]:
                    book.acked_up_to(held.group, held.offsets[-1])
                return
            for offset, verdict in zip(held.offsets, result, strict=True):
                if verdict in (1, 2):
                    book.check_ack((held.group, offset), counts=verdict == ACCEPT)

        reply = self._town.reply(answered)
        if up_to:
            book.asks_up_to(held.group, held.offsets[-1])
        self._ask("ack_up_to" if up_to else "ack", held, reply, reply=reply)


OPERATORS: Final[tuple[tuple[str, str, type[operators.SimOperator]], ...]] = (
    ("policies", "operator", operators.SimRuler),
    ("policies", "pauser", operators.SimPauser),
    ("series", "recurrer", operators.SimRecurrer),
    ("expiry", "ager", operators.SimAger),
    ("requests", "x", SimCaller),
    ("requests", "y", SimCaller),
    ("types", "keeper", operators.SimKeeper),
    ("quotas", "quotas", operators.SimWarden),
    ("deletions", "remover", operators.SimRemover),
    ("redrives", "redriver", operators.SimRedriver),
    ("traits", "pacer", operators.SimPacer),
)
"""Option of a world, name of the operator, class; in the order of acting."""


class Town:
    """All clients of one world."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self.world = world
        self.book = PromiseBook()
        self.line = ClientLink(world, rng)
        self.closing = False
        self.padding = b""
        """The end of each payload of a producer."""
        self._rng = rng
        options = world.options
        self.topics = CROWD if options.crowds else NAMESPACED if options.policies else TOPICS
        self.book.order.has_traits = options.traits
        self.operators = [
            kind(self, name, fork(rng))
            for option, name, kind in OPERATORS
            if getattr(options, option)
        ]
        self._types_seed = rng.random()
        self._settings_seed = rng.random()
        self.producers = [
            SimProducer(self, bytes([number]) * 16, fork(rng))
            for number in range(rng.choice((1, 2, 3)))
        ]
        self.consumers = [
            SimConsumer(self, topic, group, fork(rng))
            for topic in self.topics
            for group in GROUPS[: rng.choice((1, 2))]
            for _ in range(rng.choice((1, 1, 2)))
        ]
        if options.types:  # more consumers, so that groups share keys and take turns
            places = sorted({(each.topic, each.group) for each in self.consumers})
            self.consumers += [
                SimConsumer(self, *place, random.Random(f"{self._types_seed} {place}"))
                for place in places
            ]

    def settings(self, topic: str, group: str) -> GroupSettings:
        """Return the settings of a group, the same at each call."""
        rng = random.Random(f"{self._settings_seed} {topic} {group}")
        backoff = rng.choice(((0, 0), (50, 400)))
        settings = GroupSettings(
            lease_ms=LEASE_MS,
            max_attempts=rng.choice((0, 0, 1, 3)),
            backoff_ms_min=backoff[0],
            backoff_ms_max=backoff[1],
        )
        if not self.world.options.types:
            return settings
        rng = random.Random(f"{self._types_seed} {topic} {group}")
        return replace(settings, type=rng.choice(TYPES), max_in_flight=rng.choice((0, 0, 3)))

    @property
    def clients(self) -> "list[SimProducer | SimCaller]":
        """The clients that schedule timers."""
        callers = [each for each in self.operators if isinstance(each, SimCaller)]
        return [*self.producers, *callers]

    def leader(self) -> "EngineApp | None":
        """Return a random node's application that serves, or believes so. None: there is none."""
        nodes = [node for node in self.world.nodes if node.alive]
        serving = [app for node in nodes if (app := self._app(node)).engine.leader]
        return self._rng.choice(serving) if serving else None

    def reply(self, answered: Callable[[Any], None], *, errors: bool = False) -> Reply:
        """Return a function that carries a result back to a client over the lossy link.

        `errors`: the client takes errors, too.
        """

        def heard(result: object) -> None:
            if errors or not isinstance(result, EngineError):
                answered(result)

        return lambda result: self.line.carry(heard, result)

    def ask(
        self,
        app: "EngineApp",
        work: Callable[[Leader, Reply], object],
        answered: Callable[[Any], None],
    ) -> None:
        """Let a node do some work with its leader; `answered` gets the result, but no error."""
        reply = self.reply(answered)
        self.line.ask(app, app.take, lambda leader: work(leader, reply), reply)

    def send(
        self, app: "EngineApp", request: SimRequest, answered: Callable[[SimRequest, object], None]
    ) -> None:
        """Send a request to schedule timers; `answered` gets its result, or the error."""
        request.sent_us = self.world.timeline.now_us
        reply = self.reply(partial(answered, request), errors=True)
        self.line.ask(app, app.schedule, request, reply)

    def act(self) -> None:
        """Let some clients act; this is the world's workload."""
        self._rng.choice(self.producers).act()
        self._rng.choice(self.consumers).act()
        for operator in self.operators:
            operator.act()

    def settle(self) -> None:
        """Finish open requests of a healed world, wait for pending timers and check the book."""
        self.closing = True
        for node in self.world.nodes:
            node.mend_clock()
        timeline = self.world.timeline
        give_up_us = timeline.now_us + SETTLE_MS_MAX * 1000
        while timeline.now_us < give_up_us and not self._is_settled():
            for client in self.clients:
                client.act()
            for consumer in self.consumers:
                consumer.act()
            for operator in self.operators:
                operator.finish()
            timeline.run_until(timeline.now_us + 200_000)
        if not self._is_settled():
            states = [str(app.engine.machine.counts) for app in self.apps()]
            open_requests = [request for each in self.clients for request in each.waiting]
            raise Broken(
                "liveness",
                f"not settled within {SETTLE_MS_MAX} ms: counts {states}, open {open_requests}",
            )
        for app in self._newest_apps():
            self.book.at_end(app)

    def _newest_apps(self) -> "list[EngineApp]":
        """Return the applications with the highest applied index on undamaged disks.

        A node that is behind had settled earlier. A damaged disk may hold an unread damaged file.
        """
        last = max((app.applied_index for app in self.apps()), default=0)
        return [each for each in self.apps() if each.applied_index == last and not each.node.damage]

    @staticmethod
    def _app(node: "SimNode") -> "EngineApp":
        return node.app  # type: ignore[return-value]

    def clock_of(self, leader: "SimNode") -> int | None:
        """Return the time of a leader's clock in Unix ms; None if its application does not lead."""
        app = self._app(leader)
        return None if app.engine.leader is None else app.clock_ms()

    def apps(self) -> "list[EngineApp]":
        """Return the applications of all nodes that were started and can still run."""
        return [self._app(node) for node in self.world.able_nodes() if hasattr(node, "app")]

    def _is_settled(self) -> bool:
        return not any(each.waiting for each in self.clients) and all(
            app.engine.machine.counts.pending == 0
            and app.engine.machine.series.idle
            and all(
                group.cursor == topic.queue.end or group.name == dead_letters.GROUP
                for topic in app.engine.machine.topics.values()
                for group in topic.groups.values()
            )
            for app in self.apps()
        )
