"""Planted bugs in request ids (chaos/sim/planted.py says what they are for)."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from chaos.sim.planted import ANY_WORLD, Planting, patch
from chaos.sim.requestbook import Call
from chaos.sim.timers import TimerApp, TimerWorld
from timer import manifest
from timer.columns import RequestId
from timer.entry import Entry
from timer.errors import TimerError
from timer.machine import Machine
from timer.manifest import Ahead
from timer.producers import Answer
from timer.requests import Requests

_epoch = Machine._epoch  # noqa: SLF001


def _epoch_without_requests(self: Machine, entry: Entry) -> Any:
    """What a leader remembered goes with it."""
    self.requests = Requests()
    return _epoch(self, entry)


_capture = manifest.capture


def _capture_without_requests(machine: Machine, ahead: Ahead) -> Any:
    kept, machine.requests = machine.requests, Requests()
    try:
        return _capture(machine, ahead)
    finally:
        machine.requests = kept


_repeated = Requests.repeated


def _repeated_for_ever(self: Requests, request: RequestId, now_ms: Any) -> Answer | None:
    """As long as it is there an id counts, also when its time is over."""
    kept = self._kept.get(request.text)
    return _repeated(self, request, now_ms if kept is None else kept.request.until_ms)


def _repeated_whatever_it_asks(self: Requests, request: RequestId, now_ms: Any) -> Answer | None:
    """The id alone is looked at."""
    kept = self._kept.get(request.text)
    return None if kept is None or kept.request.until_ms < now_ms else kept.answer


class _Piece(Call):
    """What of a request is of one topic, under an id of its own."""

    def __init__(self, whole: Call, topic: str, places: list[int]) -> None:
        text = whole.text + b"." + topic.encode()
        super().__init__(text, whole.body, [whole.rows[at] for at in places], whole.window_ms)
        self._whole = whole
        self.places = places

    @property
    def payloads(self) -> list[bytes]:
        return [self._whole.payloads[at] for at in self.places]


_call = TimerApp.call


def _call_topic_by_topic(self: TimerApp, call: Call, reply: Callable[[object], None]) -> None:
    """A request is taken as one of each topic; the first that is refused is the answer."""
    topics = dict.fromkeys(topic for topic, _ in call.rows)
    places = {name: [at for at, row in enumerate(call.rows) if row[0] == name] for name in topics}
    told: dict[int, object] = {}
    refused: list[TimerError] = []

    def answered(piece: _Piece, result: Any) -> None:
        if isinstance(result, TimerError):
            refused.append(result)
            if len(refused) == 1:
                reply(result)
            return
        told.update(zip(piece.places, result, strict=True))
        if len(told) == len(call.rows):
            reply([told[at] for at in range(len(call.rows))])

    for name in topics:
        piece = _Piece(call, name, places[name])
        _call(self, piece, partial(answered, piece))


_mutation: Final = Planting(TimerWorld, requests=True, mischief=())

REQUEST_MUTATIONS: Final = (
    _mutation(
        "requests_die_with_the_leader",
        "a new leader takes a repeated request for a new one",
        {"request", "twice"},
        20,
        "a failover between a request and its repetition",
        patch(Machine, "_epoch", _epoch_without_requests),
        faults=("kill", "handover"),
        fault_gap_ms=1_500,
    ),
    _mutation(
        "manifest_without_requests",
        "a restart forgets which requests were answered",
        {"request", "twice", "digest"},
        20,
        "a restart from a manifest",
        patch(manifest, "capture", _capture_without_requests),
        faults=("kill", "power"),
        manifest_every=20,
        fault_gap_ms=1_500,
    ),
    _mutation(
        "id_counts_until_it_is_cleared",
        "an id whose time is over counts until a checkpoint comes",
        {"request"},
        20,
        f"{ANY_WORLD}: an id that is used again just after its time",
        patch(Requests, "repeated", _repeated_for_ever),
    ),
    _mutation(
        "id_stands_for_any_request",
        "another request under an id is answered as the first",
        {"request"},
        20,
        f"{ANY_WORLD}: two requests under one id",
        patch(Requests, "repeated", _repeated_whatever_it_asks),
    ),
    _mutation(
        "topic_by_topic",
        "a request of several topics is one request for each of them",
        {"torn"},
        60,
        "a request of which one topic's policies refuse a part",
        patch(TimerApp, "call", _call_topic_by_topic),
        policies=True,
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
