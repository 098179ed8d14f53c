"""Simple clients of a simulated cluster: they have no producer and give each request an id.

A caller sends a request for timers of several topics until it is answered, and sometimes once more
after that. It gives some requests up. Now and then it sends another request under an old id. The
cluster remembers most ids for longer than the world lasts, and some for 1.5 seconds (SHORT_MS).
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from chaos.sim.checks.keybook import ToldRow
from chaos.sim.timers.operators import SimOperator
from timer.model.timer_errors import EngineError, InvalidRequestError

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp
    from chaos.sim.timers.town import Town

LONG_MS: Final = 10 * 365 * 86_400_000
"""Ten years: more than any fault moves a clock."""
SHORT_MS: Final = 1_500
RESEND_US: Final = 900_000
OTHER: Final = 0.1
"""Share of new requests that get an id used before, if there is one."""


@dataclass(slots=True)
class NamedRequest:
    """One request under an id: a row for each of `rows`."""

    text: bytes
    body: int
    rows: list[tuple[str, int]]
    """(topic, delay in ms)."""
    window_ms: int
    sent_us: int = -(1 << 60)
    names: list[ToldRow] | None = None
    """As it was first answered."""

    @property
    def payloads(self) -> list[bytes]:
        """One per timer, like no other's in the world."""
        return [b"%s/%d/%d" % (self.text, self.body, at) for at in range(len(self.rows))]


class SimCaller(SimOperator):
    """One simple client."""

    def __init__(self, town: "Town", name: str, rng: random.Random) -> None:
        super().__init__(town, name, rng)
        self._made = 0
        self.waiting: list[NamedRequest] = []
        self._past: list[NamedRequest] = []

    def act(self) -> None:
        """Send a new request, or an old one again."""
        app, rng = self.town.leader(), self.rng
        if app is None:
            return
        now_us = self.town.world.timeline.now_us
        if self.waiting and now_us - self.waiting[0].sent_us > RESEND_US:
            call = self.waiting[0]
            if rng.random() < 0.1 and not self.town.closing:
                self.waiting.remove(call)  # the client died; the outcome stays unknown
                self._past.append(call)
            else:
                self._send(app, call)
        elif self.town.closing:
            return
        elif self._past and rng.random() < 0.3:
            self._send(app, rng.choice(self._past[-6:]))
        elif len(self.waiting) < 3:
            self._new(app)

    def _new(self, app: "EngineApp") -> None:
        rng = self.rng
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
        call = NamedRequest(text, body, rows, window_ms)
        self.town.book.asked(call.payloads)
        if window_ms == SHORT_MS:
            self.town.book.repeatable.update(call.payloads)
        else:
            self.town.book.whole.append(call.payloads)
        self.waiting.append(call)
        self._send(app, call)

    def _send(self, app: "EngineApp", call: NamedRequest) -> None:
        call.sent_us = self.town.world.timeline.now_us
        reply = self.town.reply(lambda result: self._answered(call, result))
        self.town.line.ask(app, app.call, call, reply)

    def _answered(self, call: NamedRequest, result: object) -> None:
        if isinstance(result, InvalidRequestError):  # by policy, or another request has the id
            if not self.town.world.options.policies:
                self.town.book.refusal(call.text, call.body)
            if call in self.waiting:
                self.waiting.remove(call)
        if isinstance(result, EngineError):
            return  # act() sends it again after RESEND_US
        assert isinstance(result, list)
        book = self.town.book
        if call.window_ms == LONG_MS and call.names is not None:
            book.answered_again(call.names, result)
        if call.names is None or call.window_ms == SHORT_MS:
            for told, (topic, _) in zip(result, call.rows, strict=True):
                book.scheduled(told.name, (topic, b""))
        call.names = result
        if call in self.waiting:
            self.waiting.remove(call)
            self._past.append(call)
