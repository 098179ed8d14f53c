"""Clients of a simulated timer cluster. chaos/sim/checks/book.py checks the promises to them.

    SimProducer    sends numbered requests, resent in order until answered; cancels and reschedules
    SimConsumer    consumes for a group: acks late or never, nacks, extends, reconnects, dies with
                   leases
    OPERATORS      act now and then in worlds that have their option (chaos/sim/timers/operators.py,
                   recurrer.py); SimCaller gives its requests ids (callers.py)

Clients reach nodes through a lossy link of their own. They know the cluster only by its answers.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from chaos.oracle.story import CANCELLED
from chaos.sim.checks.book import DeliveredRow, PromiseBook
from chaos.sim.checks.keybook import TimerName, ToldRow
from chaos.sim.timers.callers import SimCaller
from chaos.sim.timers.operators import (
    GROUPS,
    SimAger,
    SimKeeper,
    SimOperator,
    SimPacer,
    SimPauser,
    SimRedriver,
    SimRemover,
    SimRuler,
    SimWarden,
)
from chaos.sim.timers.recurrer import SimRecurrer
from chaos.sim.world.options import aside
from chaos.sim.world.referee import Broken
from timer.entries.payloads import EXCLUSIVE, FAILOVER, TYPES, GroupSettings
from timer.leader.groups import dead_letters
from timer.leader.groups.group_leases import ACCEPT
from timer.leader.leader import Delivery
from timer.model.columns import U64, OnConflict
from timer.model.timer_errors import (
    EngineError,
    InvalidRequestError,
    QuotaReachedError,
    UnknownProducerError,
)
from timer.model.units import Epoch, LeaseId
from timer.state.apply_results import RESCHEDULED

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp
    from chaos.sim.world.sim_node import SimNode
    from chaos.sim.world.world import World

TOPICS: Final = ("a", "b")
NAMESPACED: Final = ("a", "n/b")
"""The topics of worlds with `policies`."""
CROWD: Final = ("a", "b", "c", "d", "e")
"""The topics of worlds with `crowds`."""
CROWD_MS: Final = 6_000
"""The timers of a crowd are due at multiples of this."""
CROWDED: Final = 0.7
"""Share of the requests that join a crowd."""
UP_TO: Final = 0.3
"""Share of the acks that acknowledge all messages up to one, in groups that allow such acks."""
SHEDDING: Final = 0.2
"""Probability that a consumer returns a delivery and ends its credit, where consumers do that."""
STALLING: Final = 0.1
"""Probability that a consumer stops reading before a delivery, where consumers do that."""
KEYS: Final = (b"k", b"l", b"m")
KEYED: Final = 0.4
"""Share of the requests that have keys."""
TIGHT_PAYLOAD: Final = 3_000
"""Bytes that are added to each payload in worlds with `tight`, where disks are small."""
RESEND_MS: Final = 1_500
AGAIN: Final = 0.05
"""Probability that a producer resends an answered request, in worlds with `again`."""
AGAIN_OF: Final = 8
"""The resent request is one of this many last answered ones."""
LEASE_MS: Final = 2_000
SETTLE_MS_MAX: Final = 200_000
"""Longest time to settle. Long, because a clock set ahead returns at half the rate of time."""
CLOSING_DELAY_US_MAX: Final = 20_000
"""Longest time from a delivery to its ack after the world is healed."""
LINE_US: Final = 300
"""Typical delay of a message between a client and a node."""
KEEPALIVE_MS: Final = 5_000
"""Time after which a node notices that a consumer died."""


@dataclass(slots=True)
class NumberedRequest:
    """One numbered request of a producer."""

    sequence: int
    topic: str
    way: str
    """due_ms, delay_ms or delay_level."""
    values: list[int]
    keys: list[bytes]
    """One per timer; empty if the timers have no keys."""
    mode: OnConflict
    padding: bytes
    """The end of each payload."""
    sent_us: int = -1
    names: "list[ToldRow] | None" = None
    """The first answer. None before it."""
    other: tuple[str, list[int], bytes] | None = None
    """Way, values and padding of another request that was sent under the same number. None if
    there was no other."""

    def payloads(self, producer_id: int) -> list[bytes]:
        """Return one payload per timer, unique in the world."""
        count = len(self.values)
        names = [b"%d/%d/%d" % (producer_id, self.sequence, row) for row in range(count)]
        return [name + self.padding for name in names]


class ClientLink:
    """The link between clients and nodes: it delays messages and loses some."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self._world = world
        self._rng = rng
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


class SimProducer:
    """One idempotent producer."""

    def __init__(self, town: "Town", token: bytes, rng: random.Random) -> None:
        self._town = town
        self._rng = rng
        self._token = token
        self._lives = 0
        self.producer_id: int | None = None
        self._next = 1
        self.waiting: list[NumberedRequest] = []
        self._mine: list[TimerName] = []
        self._registering_us = -(1 << 60)
        self._answered_last: deque[NumberedRequest] = deque(maxlen=AGAIN_OF)
        self._again: random.Random | None = None
        if town.world.options.again:
            self._again = aside(rng, "again")

    def act(self) -> None:
        """Do one thing: schedule, resend, or cancel."""
        app = self._town.leader()
        if app is None:
            return
        again = self._again
        if again is not None and self._answered_last and again.random() < AGAIN:
            self._send(app, again.choice(self._answered_last))
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
            self._rng.choice((self._cancel, self._reschedule))(app)
            return
        if self._rng.random() < 0.1:
            self._change_key(app)
            return
        self._schedule(app)

    def _known(self, result: object) -> None:
        if isinstance(result, int) and result:  # 0: another producer has the drawn id
            self.producer_id = result

    def _schedule(self, app: "EngineApp") -> None:
        rng = self._rng
        scale = rng.choice((0, 0, 5, 10, 11, 300, 3_000, 20_000))
        delays = [int(scale * rng.random()) for _ in range(rng.choice((1, 1, 2, 5)))]
        absolute = rng.random() < 0.5
        if absolute and rng.random() < 0.2:
            delays = [-delay - 1 for delay in delays]
        keys = [rng.choice(KEYS) for _ in delays] if rng.random() < KEYED else []
        mode = rng.choice((OnConflict.REJECT, OnConflict.REPLACE, OnConflict.KEEP))
        if mode is OnConflict.REPLACE and keys and self._next % 3 == 0:  # kept seeds draw as before
            mode = OnConflict.UPDATE
        topic, padding = rng.choice(self._town.topics), self._town.padding
        way = "due_ms" if absolute else "delay_ms"
        if absolute:
            wall_ms = 1_800_000_000_000 + self._town.world.timeline.now_us // 1000
            delays = [wall_ms + delay for delay in delays]
        elif self._town.world.options.policies and rng.random() < 0.3:
            way, delays = "delay_level", [rng.choice((0, 1, 2, 4, 40)) for _ in delays]
        if self._town.crowds and rng.random() < CROWDED:
            wall_ms = 1_800_000_000_000 + self._town.world.timeline.now_us // 1000
            way, delays = "due_ms", [(wall_ms // CROWD_MS + 2) * CROWD_MS] * 5
            keys = []
        request = NumberedRequest(self._next, topic, way, delays, keys, mode, padding)
        self._next += 1
        self._town.book.asked(request.payloads(self.producer_id or 0))
        self._town.book.asked_ends.update((topic, key) for key in keys)
        self.waiting.append(request)
        self._send(app, request)

    def _send(self, app: "EngineApp", request: NumberedRequest) -> None:
        request.sent_us = self._town.world.timeline.now_us
        reply = self._town.reply(lambda result: self._answered(request, result))
        self._town.line.ask(app, app.schedule, self.producer_id, request, reply)

    def _give_up(self) -> None:
        """Begin as another producer: this one was idle for too long, so the cluster forgot it."""
        self._lives += 1
        self._token = self._token[:8] + self._lives.to_bytes(8, "little")
        self.producer_id, self._next = None, 1
        self.waiting.clear()
        self._answered_last.clear()

    def _answered(self, request: NumberedRequest, result: object) -> None:
        if request.names is None and request not in self.waiting:
            return  # the request was given up
        forgotten = isinstance(result, UnknownProducerError) and self._town.world.options.fleeting
        if forgotten and request.names is None:
            self._give_up()
            return
        if isinstance(result, InvalidRequestError) and request.names is None:
            asked = request.way, request.values, request.padding
            if result.field == "sequence":
                # The other request was applied and its answer lost: resend the other one.
                request.way, request.values, request.padding = request.other or asked
                request.other = asked
            else:  # rejected by policy: send a smaller request under the same number
                request.other = request.other or asked
                request.way, request.values = "delay_ms", [0] * len(request.values)
                request.padding = b""
                self._town.book.asked(request.payloads(self.producer_id or 0))
        self._town.book.quotas.refused += isinstance(result, QuotaReachedError)
        if isinstance(result, EngineError):
            return  # act() sends it again after RESEND_MS
        assert isinstance(result, list)
        if request.names is not None:
            self._town.book.answered_again(request.names, result)
            return
        request.names = result
        self._answered_last.append(request)
        self._town.book.answers += 1
        self.waiting.remove(request)
        book, keys = self._town.book, request.keys or [b""] * len(result)
        plain = request.way == "due_ms" and not self._town.world.options.policies
        for told, wanted, key in zip(result, request.values, keys, strict=True):
            if told.is_timer:
                book.scheduled(told.name, (request.topic, key), wanted if plain else None)
                self._mine.append(told.name)
            if key:
                book.check_key(told)

    def _cancel(self, app: "EngineApp") -> None:
        names = [self._mine[self._rng.randrange(max(0, len(self._mine) - 8), len(self._mine))]]
        if self._rng.random() < 0.3:
            names.append(names[0])
        if self._town.crowds:
            names = self._mine[-20:]

        def answered(result: object) -> None:
            if isinstance(result, EngineError):
                return
            assert isinstance(result, list)
            for name, outcome in zip(names, result, strict=True):
                self._town.book.cancel_answered(name, outcome)

        self._town.book.asked_ends.update(names)
        self._town.line.ask(app, app.cancel, names, self._town.reply(answered))

    def _reschedule(self, app: "EngineApp") -> None:
        old = self._mine[self._rng.randrange(max(0, len(self._mine) - 8), len(self._mine))]
        delay_ms = int(self._rng.choice((0, 20, 2_000)) * self._rng.random())
        book = self._town.book
        book.asked_ends.add(old)

        def answered(result: object) -> None:
            if isinstance(result, EngineError):
                return
            assert isinstance(result, list)
            [(outcome, new)] = result
            if outcome == RESCHEDULED:
                book.rescheduled(old, new)
                self._mine.append(new)

        self._town.line.ask(app, app.reschedule, [old], delay_ms, self._town.reply(answered))

    def _change_key(self, app: "EngineApp") -> None:
        """Cancel or reschedule the timer that has a random key."""
        key = self._rng.choice(self._town.topics), self._rng.choice(KEYS)
        delay_ms = self._rng.choice((None, int(2_000 * self._rng.random())))
        book = self._town.book
        book.asked_ends.add(key)

        def answered(result: object) -> None:
            if not isinstance(result, EngineError):
                assert isinstance(result, list)
                for old, new in result:
                    if new is None:
                        book.changed(old, CANCELLED, None)
                    else:
                        book.rescheduled(old, new, key)

        self._town.line.ask(app, app.change_key, key, delay_ms, self._town.reply(answered))


class SimStream(NamedTuple):
    """A consumer's stream to a node."""

    consumer: "SimConsumer"
    number: int


class HeldMessages(NamedTuple):
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
        self._moods = aside(rng, "moods")
        self._temper = self._moods.choice((0.0, 0.0, 0.3, 0.6))
        """Probability that a delivery leads to a nack, an extension or a return, 0 to 1."""
        self._unseen = aside(rng, "unseen")
        """Chooses the messages that are returned unseen and the acks up to an offset."""
        self._stalls = aside(rng, "stalls") if town.world.options.stalls else None
        self._sheds = aside(rng, "sheds") if town.world.options.sheds else None
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
        if self._stalls is None or self._town.closing or self._stalls.random() >= STALLING:
            return 0
        return int(self._stalls.choice((0.1, 0.5, 1.5, 3.0)) * LEASE_MS * 1000)

    def close(self) -> None:
        """Close the stream; the node notices at once."""
        app, self._app = self._app, None
        if app is not None and app.node.alive and app.node.app is app:
            app.node.call(app.leave, self._stream)

    def ended(self, stream: SimStream) -> None:
        """Note that the node ended the stream, such as for a deleted group."""
        if stream == self._stream:
            self._app = None

    def die(self) -> None:
        """Die without a notice. Leases continue and the node sends more, until KEEPALIVE_MS."""
        app, stream = self._app, self._stream
        self._app = None
        self._stream = SimStream(self, stream.number + 1)
        if app is not None:
            app.node.later(KEEPALIVE_MS * 1000, app.leave, stream)

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
        held = HeldMessages(group, delivery.epoch, delivery.lease.lease_id, offsets)
        if self._sheds and self._sheds.random() < SHEDDING and not self._town.closing:
            self._shed(app, stream, held)
            return
        if self._app is app and not self._shedding:
            app.node.call(app.credit, stream, len(offsets))
        if self._rng.random() < self._laziness and not self._town.closing:
            return  # never acknowledged: the lease will end
        delay_us = int(self._rng.choice((1, 20, 500, LEASE_MS + 200)) * 1000 * self._rng.random())
        if self._town.closing:  # a group with three messages in flight must end in time, too
            delay_us = min(delay_us, CLOSING_DELAY_US_MAX)
        if self._moods.random() < self._temper and not self._town.closing:
            delay_us += LEASE_MS * 500 * self._complain(delay_us // 2, held)
        self._town.world.timeline.after(delay_us, self._ack, held)

    def _shed(self, app: "EngineApp", stream: SimStream, held: HeldMessages) -> None:
        """Return what came, as a consumer does that falls behind; grant credit once answered."""
        self._shedding += 1
        done = partial(self._town.line.stream, self._went_back, app, stream)
        app.node.later(LINE_US, app.shed, stream, held, done)

    def _went_back(self, app: "EngineApp", stream: SimStream) -> None:
        if stream == self._stream and self._app is app:
            self._shedding -= 1
            if not self._shedding and self._sheds:
                app.node.call(app.credit, stream, self._sheds.choice((1, 5, 1000)))

    def _complain(self, delay_us: int, held: HeldMessages) -> bool:
        """Nack, extend or return some messages of a delivery. Return whether to ack later."""
        moods, timeline = self._moods, self._town.world.timeline
        some = [offset for offset in held.offsets if moods.random() < 0.5] or held.offsets[:1]
        held = held._replace(offsets=some)
        if moods.random() < 0.2:
            timeline.after(delay_us, self._ask, "extend", held)
            return True
        if self._unseen.random() < 0.2:
            timeline.after(delay_us, self._ask, "give_back", held)
        else:
            delay_ms = moods.choice((None, 0, 30, 1_000, 4_000))
            timeline.after(delay_us, self._nack, held, delay_ms)
        return False

    def _ask(self, call: str, held: HeldMessages, *more: object) -> None:
        """Call a method of the node about held messages, if the stream is there."""
        if self._app is not None:
            self._town.line.ask(self._app, getattr(self._app, call), self._stream, held, *more)

    def _nack(self, held: HeldMessages, delay_ms: int | None) -> None:
        def answered(result: object) -> None:
            assert isinstance(result, tuple), result
            group_id, verdicts = result
            for offset, verdict in zip(held.offsets, verdicts, strict=True):
                if verdict == ACCEPT:
                    self._town.book.nacks_told.add((group_id, offset))

        self._ask("nack", held, delay_ms, self._town.reply(answered))

    def _ack(self, held: HeldMessages) -> None:
        book, options = self._town.book, self._town.world.options
        if self._app is None:
            return
        alone = self._town.settings(self.topic, self.group).type in (EXCLUSIVE, FAILOVER)
        up_to = options.redrives and alone and self._unseen.random() < UP_TO

        def answered(result: object) -> None:
            if isinstance(result, EngineError):
                return
            assert isinstance(result, list)
            if up_to:
                if result == [ACCEPT]:
                    book.acked_up_to(held.group, held.offsets[-1])
                return
            for offset, verdict in zip(held.offsets, result, strict=True):
                if verdict in (1, 2):
                    book.told_acked((held.group, offset), counts=verdict == ACCEPT)

        if up_to:
            book.asks_up_to(held.group, held.offsets[-1])
        self._ask("ack_up_to" if up_to else "ack", held, self._town.reply(answered))


OPERATORS: Final[tuple[tuple[str, str, type[SimOperator]], ...]] = (
    ("policies", "operator", SimRuler),
    ("policies", "pauser", SimPauser),
    ("series", "recurrer", SimRecurrer),
    ("expiry", "ager", SimAger),
    ("requests", "x", SimCaller),
    ("requests", "y", SimCaller),
    ("types", "keeper", SimKeeper),
    ("quotas", "quotas", SimWarden),
    ("deletions", "remover", SimRemover),
    ("redrives", "redriver", SimRedriver),
    ("traits", "pacer", SimPacer),
)
"""Option of a world, name of the generator of random numbers, class; in the order of acting."""


class Town:
    """All clients of one world."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self.world = world
        self.book = PromiseBook()
        self.line = ClientLink(world, rng)
        self.closing = False
        self.padding = bytes(TIGHT_PAYLOAD if world.options.tight else 0)
        self._rng = rng
        options = world.options
        self.crowds = options.crowds
        self.topics = CROWD if self.crowds else NAMESPACED if options.policies else TOPICS
        self.book.order.has_traits = options.traits
        self.operators = [
            kind(self, name, aside(rng, name))
            for option, name, kind in OPERATORS
            if getattr(options, option)
        ]
        self._types_seed = aside(rng, "types").random()
        self._settings_seed = aside(rng, "settings").random()
        self.producers = [
            SimProducer(self, bytes([number]) * 16, random.Random(rng.getrandbits(64)))
            for number in range(rng.choice((1, 2, 3)))
        ]
        self.consumers = [
            SimConsumer(self, topic, group, random.Random(rng.getrandbits(64)))
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

    def reply(self, answered: Callable[[object], None]) -> Callable[[object], None]:
        """Return a function that carries a result back to a client over the lossy link."""
        return lambda result: self.line.carry(answered, result)

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
        while timeline.now_us < give_up_us and not self._settled():
            for client in self.clients:
                client.act()
            for consumer in self.consumers:
                consumer.act()
            for operator in self.operators:
                operator.finish()
            timeline.run_until(timeline.now_us + 200_000)
        if not self._settled():
            states = [str(app.engine.machine.counts) for app in self.apps()]
            open_requests = [request for each in self.clients for request in each.waiting]
            raise Broken(
                "liveness",
                f"not settled within {SETTLE_MS_MAX} ms: counts {states}, open {open_requests}",
            )
        for app in self._whole():
            self.book.at_end(app)

    def _whole(self) -> "list[EngineApp]":
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
        return [self._app(node) for node in self.world.kept_up() if hasattr(node, "app")]

    def _settled(self) -> bool:
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
