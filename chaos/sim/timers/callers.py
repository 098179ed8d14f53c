"""Clients of a simulated cluster that schedule timers.

SimProducer  numbers its requests, and resends them in order until they are answered; cancels,
             reschedules
SimCaller    gives its requests ids. It sends each for timers of several topics until it is
             answered, and sometimes once more after that. It gives some requests up. Now and
             then it sends another request under an old id. The cluster remembers most ids for
             longer than the world lasts, and some for 1.5 seconds (SHORT_MS).
"""

import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from chaos.oracle.story import CANCELLED
from chaos.sim.checks.keybook import AnsweredRow, Key, TimerName
from chaos.sim.checks.policybook import Acceptance
from chaos.sim.timers.node_results import Reply, ids_of, names_of
from chaos.sim.timers.operators import SimOperator, after
from chaos.sim.world.sim_node import WALL_START_MS
from timer.entries.payloads import Keys, Targets
from timer.leader.leader import Leader
from timer.model.columns import Binary, OnConflict
from timer.model.timer_errors import (
    EngineError,
    InvalidRequestError,
    QuotaReachedError,
    UnknownProducerError,
)
from timer.model.units import ProducerId
from timer.state import apply_results
from timer.state.apply_results import CancelApplied, RescheduleApplied

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp
    from chaos.sim.timers.town import Town

CROWD_MS: Final = 6_000
"""The timers of a crowd are due at multiples of this."""
CROWDED: Final = 0.7
"""Share of the requests that join a crowd."""
KEYS: Final = (b"k", b"l", b"m")
KEYED: Final = 0.4
"""Share of the requests that have keys."""
RESEND_US: Final = 1_500_000
"""Time after which a producer resends a request."""
REPEATED: Final = 0.05
"""Probability that a producer resends an answered request, in worlds with `again`."""
REPEATABLE: Final = 8
"""The resent request is one of this many last answered ones."""
LONG_MS: Final = 10 * 365 * 86_400_000
"""Ten years: more than any fault moves a clock."""
SHORT_MS: Final = 1_500
RETRY_US: Final = 900_000
"""Time after which a caller resends a request."""
OTHER: Final = 0.1
"""Share of new requests that get an id used before, if there is one."""


@dataclass(slots=True)
class SimRequest:
    """One request for timers, of a producer or with an id."""

    way: str
    """due_ms, delay_ms or delay_level."""
    rows: list[tuple[str, int]]
    """(topic, value) of each timer."""
    payloads: list[bytes]
    """One per timer, unique in the world."""
    producer: tuple[ProducerId, int] = (ProducerId(0), 0)
    """The producer, and the number of its request."""
    keys: list[bytes] = field(default_factory=list)
    """One per timer; empty if the timers have no keys."""
    mode: OnConflict = OnConflict.REJECT
    text: bytes = b""
    """The request's id; empty: a producer sends it."""
    body: int = 0
    window_ms: int = 0
    """Time for which the cluster remembers the id."""
    sent_us: int = -(1 << 60)
    names: list[AnsweredRow] | None = None
    """The first answer. None before it."""
    other: tuple[str, list[tuple[str, int]], list[bytes]] | None = None
    """Way, rows and payloads of another request that was sent under the same number. None if there
    was no other."""


class SimProducer:
    """One idempotent producer."""

    def __init__(self, town: "Town", token: bytes, rng: random.Random) -> None:
        self._town, self._rng = town, rng
        self._token, self._lives = token, 0
        self.producer_id: ProducerId | None = None
        self._next = 1
        self.waiting: list[SimRequest] = []
        self._mine: list[TimerName] = []
        self._registering_us = -(1 << 60)
        self._last_answered: deque[SimRequest] = deque(maxlen=REPEATABLE)

    def act(self) -> None:
        """Do one thing: schedule, resend, or cancel."""
        app = self._town.leader()
        if app is None:
            return
        again = self._town.world.options.again and self._last_answered
        if again and self._rng.random() < REPEATED:
            self._town.send(app, self._rng.choice(self._last_answered), self._on_answer)
        now_us = self._town.world.timeline.now_us
        if self.producer_id is None:
            if now_us - self._registering_us > RESEND_US:
                self._registering_us = now_us
                self._town.line.ask(app, app.register, self._token, self._town.reply(self._on_id))
            return
        if self.waiting and now_us - self.waiting[0].sent_us > RESEND_US:
            for request in self.waiting:
                self._town.send(app, request, self._on_answer)
            return
        if self._town.closing or len(self.waiting) >= 4:
            return
        if self._rng.random() < 0.3:
            self._change(app)
            return
        self._schedule(app, self.producer_id)

    def _on_id(self, result: int) -> None:
        if result:  # 0: another producer has the drawn id
            self.producer_id = ProducerId(result)

    def _schedule(self, app: "EngineApp", producer_id: ProducerId) -> None:
        rng, options = self._rng, self._town.world.options
        scale = rng.choice((0, 0, 5, 10, 11, 300, 3_000, 20_000))
        values = [int(scale * rng.random()) for _ in range(rng.choice((1, 1, 2, 5)))]
        absolute = rng.random() < 0.5
        if absolute and rng.random() < 0.2:
            values = [-delay - 1 for delay in values]
        keys = [rng.choice(KEYS) for _ in values] if rng.random() < KEYED else []
        mode = rng.choice([*OnConflict]) if keys else OnConflict.REJECT
        topic = rng.choice(self._town.topics)
        wall_ms = WALL_START_MS + self._town.world.timeline.now_us // 1000
        way = "due_ms" if absolute else "delay_ms"
        if absolute:
            values = [wall_ms + delay for delay in values]
        elif options.policies and rng.random() < 0.3:
            way, values = "delay_level", [rng.choice((0, 1, 2, 4, 40)) for _ in values]
        if options.crowds and rng.random() < CROWDED:
            way, values = "due_ms", [(wall_ms // CROWD_MS + 2) * CROWD_MS] * 5
            keys = []
        rows = [(topic, value) for value in values]
        number = producer_id, self._next
        request = SimRequest(way, rows, _payloads(*number, len(rows)), number, keys, mode)
        request.payloads = [each + self._town.padding for each in request.payloads]
        self._next += 1
        self._town.book.note_request(request.payloads)
        self._town.book.requested_ends.update((topic, key) for key in keys)
        self.waiting.append(request)
        self._town.send(app, request, self._on_answer)

    def _give_up(self) -> None:
        """Begin as another producer: this one was idle for too long, so the cluster forgot it."""
        self._lives += 1
        self._token = self._token[:8] + self._lives.to_bytes(8, "little")
        self.producer_id, self._next = None, 1
        self.waiting.clear()
        self._last_answered.clear()

    def _on_answer(self, request: SimRequest, result: object) -> None:
        book = self._town.book
        if request.names is None and request not in self.waiting:
            return  # the request was given up
        forgotten = isinstance(result, UnknownProducerError) and self._town.world.options.fleeting
        if forgotten and request.names is None:
            self._give_up()
            return
        if isinstance(result, InvalidRequestError) and request.names is None:
            asked = request.way, request.rows, request.payloads
            if result.field == "sequence":
                # The other request was applied and its answer lost: resend the other one.
                request.way, request.rows, request.payloads = request.other or asked
                request.other = asked
            else:  # rejected by policy: send a smaller request under the same number
                request.other = request.other or asked
                request.way, request.rows = "delay_ms", [(topic, 0) for topic, _ in request.rows]
                request.payloads = _payloads(*request.producer, len(request.rows))
                book.note_request(request.payloads)
        book.quotas.refused += isinstance(result, QuotaReachedError)
        if isinstance(result, EngineError):
            return  # act() sends it again after RESEND_US
        assert isinstance(result, list)
        if request.names is not None:
            book.check_repeat(request.names, result)
            return
        request.names = result
        self._last_answered.append(request)
        self.waiting.remove(request)
        keys = request.keys or [b""] * len(result)
        plain = request.way == "due_ms" and not self._town.world.options.policies
        for told, (topic, wanted), key in zip(result, request.rows, keys, strict=True):
            if told.is_timer:
                book.check_scheduled(told.name, (topic, key), wanted if plain else None)
                self._mine.append(told.name)
            if key:
                book.check_key(told)

    def _change(self, app: "EngineApp") -> None:
        """Cancel or reschedule timers of this producer, or the timer that has a random key."""
        rng, book = self._rng, self._town.book
        delay_ms = rng.choice((None, int(rng.choice((0, 20, 2_000)) * rng.random())))
        key, names = None, list[TimerName]()
        if not self._mine or rng.random() < 0.3:
            key = rng.choice(self._town.topics), rng.choice(KEYS)
            book.requested_ends.add(key)
        elif delay_ms is None and self._town.world.options.crowds:
            names = self._mine[-20:]
        else:
            names = [rng.choice(self._mine[-8:])] * rng.choice((1, 1, 1 + (delay_ms is None)))
        book.requested_ends.update(names)

        def work(leader: Leader, reply: Reply) -> None:
            if key is not None:
                topics = np.array([app.topic(key[0]).topic_id], np.uint32)
                targets: Targets = Keys(topics, Binary.of([key[1]]))
            else:
                targets = ids_of(names)
                topics = leader.machine.store.topics(targets.due_ms, targets.seq)
            if delay_ms is not None:
                topic, target = key or book.timers.get(names[0], ("", b"")), key or names[0].seq
                self._note_move(app, target, topic[0], delay_ms)
                leader.reschedule(targets, topics, after(delay_ms), app.now(), reply)
            elif isinstance(targets, Keys):
                leader.cancel_keys(targets, reply)
            else:
                leader.cancel(targets.due_ms, targets.seq, reply)

        self._town.ask(app, work, partial(self._check_change, names, key))

    def _check_change(self, names: list[TimerName], key: Key | None, result: Any) -> None:
        """Check the answer to a change of timers by their names, or of the one with a key."""
        book = self._town.book
        if isinstance(result, RescheduleApplied):
            if result.results.tolist() == [apply_results.RESCHEDULED]:
                [old], [new] = names_of(result.targets), names_of(result.timers)
                book.check_reschedule(old, new, key)
                self._mine.append(new)
        elif isinstance(result, CancelApplied):
            if result.results.tolist() == [apply_results.CANCELLED]:
                book.check_change(names_of(result.targets)[0], CANCELLED, None)
        else:
            for name, outcome in zip(names, result.tolist(), strict=True):
                book.check_cancel(name, outcome)

    def _note_move(self, app: "EngineApp", target: object, topic: str, delay_ms: int) -> None:
        floor_ms = app.engine.machine.last_read_time_ms
        taken = Acceptance("delay_ms", (delay_ms,), app.clock_ms(), floor_ms)
        self._town.book.policies.moves[target].append((topic, taken))


def _payloads(producer_id: ProducerId, sequence: int, rows: int) -> list[bytes]:
    """Return the names of a request's rows."""
    return [b"%d/%d/%d" % (producer_id, sequence, row) for row in range(rows)]


class SimCaller(SimOperator):
    """One client without a producer."""

    def __init__(self, town: "Town", name: str, rng: random.Random) -> None:
        super().__init__(town, name, rng)
        self._made = 0
        self.waiting: list[SimRequest] = []
        self._past: list[SimRequest] = []

    def act(self) -> None:
        """Send a new request, or an old one again."""
        app, rng = self.town.leader(), self.rng
        if app is None:
            return
        now_us = self.town.world.timeline.now_us
        if self.waiting and now_us - self.waiting[0].sent_us > RETRY_US:
            request = self.waiting[0]
            if rng.random() < 0.1 and not self.town.closing:
                self.waiting.remove(request)  # the client died; the outcome stays unknown
                self._past.append(request)
            else:
                self.town.send(app, request, self._on_answer)
        elif self.town.closing:
            return
        elif self._past and rng.random() < 0.3:
            self.town.send(app, rng.choice(self._past[-6:]), self._on_answer)
        elif len(self.waiting) < 3:
            self._new(app)

    def _new(self, app: "EngineApp") -> None:
        rng, book = self.rng, self.town.book
        self._made += 1
        text, window_ms = b"%s-%d" % (self.name.encode(), self._made), LONG_MS
        body = 0
        if rng.random() < 0.2:
            window_ms = SHORT_MS
        elif self._past and rng.random() < OTHER:
            old = rng.choice(self._past)
            text, body = old.text, self._made
        count = rng.choice((1, 2, 5))
        rows = [
            (rng.choice(self.town.topics), int(rng.choice((0, 50, 3_000)) * rng.random()))
            for _ in range(count)
        ]
        payloads = [b"%s/%d/%d" % (text, body, at) for at in range(count)]
        request = SimRequest("delay_ms", rows, payloads, text=text, body=body, window_ms=window_ms)
        book.note_request(payloads)
        if window_ms == SHORT_MS:
            book.repeatable.update(payloads)
        else:
            book.whole.append(payloads)
        self.waiting.append(request)
        self.town.send(app, request, self._on_answer)

    def _on_answer(self, request: SimRequest, result: object) -> None:
        book = self.town.book
        if isinstance(result, InvalidRequestError):  # by policy, or another request has the id
            if not self.town.world.options.policies:
                book.refusal(request.text, request.body)
            if request in self.waiting:
                self.waiting.remove(request)
        if isinstance(result, EngineError):
            return  # act() sends it again after CALL_AGAIN_US
        assert isinstance(result, list)
        if request.window_ms == LONG_MS and request.names is not None:
            book.check_repeat(request.names, result)
        if request.names is None or request.window_ms == SHORT_MS:
            for told, (topic, _) in zip(result, request.rows, strict=True):
                book.check_scheduled(told.name, (topic, b""))
        request.names = result
        if request in self.waiting:
            self.waiting.remove(request)
            self._past.append(request)
