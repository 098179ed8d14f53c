"""Planted bugs in request ids (see tests/chaos/planted/planted.py)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from chaos.sim.timers.callers import SimRequest
from chaos.sim.timers.timers import EngineApp, TimerWorld
from tests.chaos.planted.planted import ANY_WORLD, Planting, patch
from timer.entries.entry_frame import Entry
from timer.model.columns import RequestId
from timer.model.timer_errors import EngineError
from timer.recovery import manifest
from timer.recovery.manifest import FlushSources
from timer.state.machine import Machine
from timer.state.producers import RequestAnswer
from timer.state.request_ids import RequestIds

_epoch = Machine._epoch


def _epoch_without_requests(self: Machine, entry: Entry) -> Any:
    """Forget all request ids at a new epoch."""
    self.requests = RequestIds()
    return _epoch(self, entry)


_capture = manifest.capture


def _capture_without_requests(machine: Machine, ahead: FlushSources) -> Any:
    kept, machine.requests = machine.requests, RequestIds()
    try:
        return _capture(machine, ahead)
    finally:
        machine.requests = kept


_repeated = RequestIds.stored_answer


def _stored(table: RequestIds, request: RequestId) -> RequestId:
    """Return the stored request that has this id, or the request itself."""
    for (text, body, until_ms), _ in table.pack():
        if text == request.text:
            return RequestId(text, body, until_ms)
    return request


def _repeated_for_ever(self: RequestIds, request: RequestId, now_ms: Any) -> RequestAnswer | None:
    """Count a stored id as valid after the end of its time."""
    return _repeated(self, request, min(now_ms, _stored(self, request).until_ms))


def _repeated_whatever_it_asks(
    self: RequestIds, request: RequestId, now_ms: Any
) -> RequestAnswer | None:
    """Compare only the id, not the body, of a request."""
    return _repeated(self, _stored(self, request), now_ms)


_schedule = EngineApp.schedule


def _schedule_topic_by_topic(
    self: EngineApp, request: SimRequest, reply: Callable[[object], None]
) -> None:
    """Split a request with an id into one per topic; the first rejection is the answer."""
    if not request.text:
        _schedule(self, request, reply)
        return
    told: dict[int, object] = {}
    refused: list[EngineError] = []

    def answered(places: list[int], result: Any) -> None:
        if isinstance(result, EngineError):
            refused.append(result)
            if len(refused) == 1:
                reply(result)
            return
        told.update(zip(places, result, strict=True))
        if len(told) == len(request.rows):
            reply([told[at] for at in range(len(request.rows))])

    for name in dict.fromkeys(topic for topic, _ in request.rows):
        places = [at for at, (topic, _) in enumerate(request.rows) if topic == name]
        piece = replace(
            request,
            text=request.text + b"." + name.encode(),
            rows=[request.rows[at] for at in places],
            payloads=[request.payloads[at] for at in places],
        )
        _schedule(self, piece, partial(answered, places))


_mutation: Final = Planting(TimerWorld, requests=True, mischief=())

MUTATIONS: Final = (
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
        "an expired id counts until the next checkpoint",
        {"request"},
        20,
        f"{ANY_WORLD}: an id that is used again just after its time",
        patch(RequestIds, "stored_answer", _repeated_for_ever),
    ),
    _mutation(
        "id_stands_for_any_request",
        "another request under an id is answered as the first",
        {"request"},
        20,
        f"{ANY_WORLD}: two requests under one id",
        patch(RequestIds, "stored_answer", _repeated_whatever_it_asks),
    ),
    _mutation(
        "topic_by_topic",
        "a request of several topics is one request for each of them",
        {"torn"},
        60,
        "a request of several topics, with a policy of one topic that rejects a part",
        patch(EngineApp, "schedule", _schedule_topic_by_topic),
        policies=True,
        proposals_per_s=1,  # the book checks whole requests only without dead letters
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
