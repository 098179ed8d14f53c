"""Producers for operators: their ids, last sequences and expiry."""

from typing import Final

from timer.model.timer_errors import InvalidRequestError
from timer.state.machine import Machine
from timer.state.producers import ProducerState
from timerclient.proto import timer_pb2 as pb

PAGE_SIZE: Final = 100
PAGE_SIZE_MAX: Final = 1_000


def page_of(
    machine: Machine, request: pb.ListProducersRequest, idle_ms: int
) -> pb.ListProducersResponse:
    """Return a page of the producers applied on this node, or one of them.

    Raises:
        InvalidRequestError: the page is too large.
        UnknownProducerError: no producer has this name, or it has expired.
    """
    known, size = machine.producers, request.page_size or PAGE_SIZE
    if size > PAGE_SIZE_MAX:
        raise InvalidRequestError("page_size", size, f"must be at most {PAGE_SIZE_MAX}")
    if request.producer:
        status = _status(request.producer, known.by_name(request.producer), idle_ms)
        return pb.ListProducersResponse(producers=[status], count=len(known))
    found = known.page(request.after, size + 1)
    more = len(found) > size
    return pb.ListProducersResponse(
        producers=[_status(*each, idle_ms) for each in found[:size]],
        next_after=found[size - 1][0] if more else 0,
        count=len(known),
    )


def _status(name: int, producer: ProducerState, idle_ms: int) -> pb.ProducerStatus:
    return pb.ProducerStatus(
        producer=name,
        last_sequence=producer.last_sequence,
        used_at_ms=producer.used_at_ms,
        expires_at_ms=producer.used_at_ms + idle_ms,
        answers=len(producer.answers),
        answer_rows=producer.answer_rows,
    )
