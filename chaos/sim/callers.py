"""Simple clients of a simulated cluster: they have no producer and name their requests.

    SimCaller    requests of several topics under an id, sent until they are answered, and once
                 more; gives up, tries another request under an old id
    RequestBook  what the ids in the log mean, told independently of timer/requests.py

Most ids are remembered for longer than the world lasts: what is sent under one is one set of
timers. Some are for a moment only: of them the book knows from the log which sending is a new one.
"""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from chaos.sim.keybook import Told
from chaos.sim.referee import Broken
from timer.applied import ScheduleApplied
from timer.columns import decode_schedule
from timer.entry import Entry
from timer.errors import InvalidRequest, TimerError, TopicDeleted

if TYPE_CHECKING:
    from chaos.sim.timers import TimerApp
    from chaos.sim.town import Town

LONG_MS: Final = 10 * 365 * 86_400_000
"""Longer than any clock is led astray."""
SHORT_MS: Final = 1_500
RESEND_US: Final = 900_000
OTHER: Final = 0.1
"""How often a caller tries another request under an id that it has used."""


@dataclass(slots=True)
class Call:
    """One request under an id: a row for each of `rows`."""

    text: bytes
    body: int
    rows: list[tuple[str, int]]
    """(topic, delay in ms)."""
    window_ms: int
    sent_us: int = -(1 << 60)
    names: list[Told] | None = None
    """As it was first answered."""

    @property
    def payloads(self) -> list[bytes]:
        """One per timer, like no other's in the world."""
        return [b"%s/%d/%d" % (self.text, self.body, at) for at in range(len(self.rows))]


class SimCaller:
    """One simple client."""

    def __init__(self, town: "Town", name: bytes, rng: random.Random) -> None:
        self._town = town
        self._name = name
        self._rng = rng
        self._made = 0
        self.waiting: list[Call] = []
        self._past: list[Call] = []

    def act(self) -> None:
        """Do one thing: a new request, or send an old one again."""
        app, rng = self._town.leader(), self._rng
        if app is None:
            return
        now_us = self._town.world.timeline.now_us
        if self.waiting and now_us - self.waiting[0].sent_us > RESEND_US:
            call = self.waiting[0]
            if rng.random() < 0.1 and not self._town.closing:
                self.waiting.remove(call)  # it has died: nobody knows what became of it
                self._past.append(call)
            else:
                self._send(app, call)
        elif self._town.closing:
            return
        elif self._past and rng.random() < 0.3:
            self._send(app, rng.choice(self._past[-6:]))
        elif len(self.waiting) < 3:
            self._new(app)

    def _new(self, app: "TimerApp") -> None:
        rng = self._rng
        self._made += 1
        text, window_ms = b"%s-%d" % (self._name, self._made), LONG_MS
        body = 0
        if rng.random() < 0.2:
            window_ms = SHORT_MS
        elif self._past and rng.random() < OTHER:
            old = rng.choice(self._past)
            text, body = old.text, self._made
        count = rng.choice((1, 2, 5))
        rows = [
            (rng.choice(self._town.topics), int(rng.choice((0, 50, 3_000)) * rng.random()))
            for _ in range(count)
        ]
        call = Call(text, body, rows, window_ms)
        self._town.book.asked(call.payloads)
        if window_ms == SHORT_MS:
            self._town.book.repeatable.update(call.payloads)
        else:
            self._town.book.whole.append(call.payloads)
        self.waiting.append(call)
        self._send(app, call)

    def _send(self, app: "TimerApp", call: Call) -> None:
        call.sent_us = self._town.world.timeline.now_us
        reply = self._town.reply(lambda result: self._answered(call, result))
        self._town.line.ask(app, app.call, call, reply)

    def _answered(self, call: Call, result: object) -> None:
        if isinstance(result, InvalidRequest):  # by policy, or the id is another's
            if self._town.operator is None:
                self._town.book.requests.refusal(call.text, call.body)
            if call in self.waiting:
                self.waiting.remove(call)
        if isinstance(result, TimerError):
            return  # sent again when it is due
        assert isinstance(result, list)
        book = self._town.book
        if call.window_ms == LONG_MS and call.names is not None:
            book.answered_again(call.names, result)
        if call.names is None or call.window_ms == SHORT_MS:
            for told, (topic, _) in zip(result, call.rows, strict=True):
                book.scheduled(told.name, topic, None)
        call.names = result
        if call in self.waiting:
            self.waiting.remove(call)
            self._past.append(call)


@dataclass(slots=True)
class RequestBook:
    """See the module. `check` raises Broken when an id was not taken for what it is."""

    known: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)
    """Id -> (body, remembered until, first seq)."""
    repeated: int = 0
    refused: int = 0
    checked: int = 0

    def refusal(self, text: bytes, body: int) -> None:
        """A caller was told that its id is another request's."""
        self.refused += 1
        known = self.known.get(text)
        if known is None or known[0] == body:
            raise Broken("request", f"{text!r} of {body} was refused, known as {known}")

    def check(self, entry: Entry, applied: object) -> None:
        """P2 for ids, by the first replica that applies an entry."""
        if entry.index <= self.checked:
            return
        self.checked = entry.index
        if not isinstance(applied, ScheduleApplied):
            return
        requests = decode_schedule(entry.payload).requests
        for request, result in zip(requests, applied.parts, strict=True):
            if request is None:
                continue
            known = self.known.get(request.text)
            if known is None or known[1] < entry.time_ms:
                told = isinstance(result, tuple) and not result[1]
                told |= isinstance(result, TopicDeleted)  # nothing was remembered
                if isinstance(result, tuple):
                    answer = result[0]
                    self.known[request.text] = (request.body, request.until_ms, answer.first_seq)
            elif known[0] != request.body:
                told = isinstance(result, InvalidRequest)
            else:
                told = isinstance(result, tuple) and result[1]
                told = told and isinstance(result, tuple) and result[0].first_seq == known[2]
                self.repeated += 1
            if not told:
                raise Broken("request", f"{entry.index}: {request} known as {known}: {result}")
