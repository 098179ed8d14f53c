"""The intake: tells new schedule requests from repeated ones.

    Intake.classify(request) --> NEW        checked: it may be rejected for want of room or a quota
                                 UNDECIDED  perhaps in flight: not checked, as an error would mean
                                            "no effect"
                                 REPEAT     applied: it gets its first answer and has no effect

`classify` changes nothing. A request is counted by `accept`, after every check has passed, and no
longer by `settle`, once it is applied or rejected.
"""

import enum
from collections import Counter

from timer.leader.intake.request_shares import RequestShares
from timer.model.columns import Part, RequestId
from timer.model.timer_errors import SequenceGapError, UnknownProducerError
from timer.model.units import ProducerId, UnixMs
from timer.state.state import State


class Freshness(enum.Enum):
    """What the leader knows about a request before it is applied."""

    NEW = "new"
    """It was certainly not applied."""
    UNDECIDED = "undecided"
    """The same request, or a later one of its producer, is in flight."""
    REPEAT = "repeat"
    """It was applied."""


class Intake:
    """The schedule requests in flight, by producer and by request id."""

    def __init__(self, state: State, window_ms: int) -> None:
        """`window_ms`: time for which a request id is remembered, on the log's clock."""
        self._state, self._window_ms = state, window_ms
        self._sequences_in_flight: dict[ProducerId, int] = {}
        """Last accepted sequence of each producer that has requests in flight."""
        self._ids_in_flight: Counter[tuple[bytes, int]] = Counter()
        """Number of requests in flight by (request id, hash of the request's body)."""
        self._shares = RequestShares(state.requests, window_ms)

    @property
    def empty(self) -> bool:
        """Whether no request is in flight."""
        return not self._sequences_in_flight and not self._ids_in_flight

    def classify(self, part: Part, log_ms: UnixMs) -> Freshness:
        """Return what is known about a request. `log_ms`: the time of the log's last entry.

        Raises:
            UnknownProducerError: the producer id was never issued, or has expired.
            SequenceGapError: a request of this producer is missing before this one.
            InvalidRequestError: the request id belongs to another request.
        """
        if part.producer_id:
            return self._by_sequence(part.producer_id, part.sequence)
        if part.request is None:
            return Freshness.NEW
        if self._is_remembered(part.request, log_ms):
            return Freshness.REPEAT
        return Freshness.UNDECIDED if part.request[:2] in self._ids_in_flight else Freshness.NEW

    def _by_sequence(self, producer_id: ProducerId, sequence: int) -> Freshness:
        applied = self._state.producers.last_sequence(producer_id)
        last = self._sequences_in_flight.get(producer_id, applied)
        if last is None:
            raise UnknownProducerError(producer_id)
        if sequence > last + 1:
            raise SequenceGapError(expected=last + 1, got=sequence)
        if applied is not None and sequence <= applied:
            return Freshness.REPEAT
        return Freshness.NEW if sequence > last else Freshness.UNDECIDED

    def check_share(self, part: Part, sender: str, log_ms: UnixMs) -> None:
        """Check that the sender of a new request may add one more request id.

        Raises:
            OverloadedError: too many request ids are remembered.
        """
        if part.request is not None:
            at_ms = self._accepted_at_ms(part.request, log_ms)
            self._shares.check(sender, len(part.due_ms), at_ms)

    def accept(self, part: Part, freshness: Freshness, sender: str) -> None:
        """Count a request as in flight."""
        assert not part.producer_id or part.request is None, "a request has one name at most"
        if part.producer_id and freshness is Freshness.NEW:
            self._sequences_in_flight[part.producer_id] = part.sequence
        elif part.request is not None:
            if freshness is Freshness.NEW:
                self._shares.take(part.request, sender, len(part.due_ms))
            self._ids_in_flight[part.request[:2]] += 1

    def settle(self, part: Part, *, applied: bool) -> None:
        """Stop counting a request as in flight: it was applied or rejected."""
        if self._sequences_in_flight.get(part.producer_id) == part.sequence:
            del self._sequences_in_flight[part.producer_id]
        if part.request is not None:
            self._shares.settle(part.request, applied=applied)
            self._ids_in_flight[part.request[:2]] -= 1
            if not self._ids_in_flight[part.request[:2]]:
                del self._ids_in_flight[part.request[:2]]

    def was_applied(
        self,
        producer_id: ProducerId,
        sequence: int,
        request: RequestId | None,
        log_ms: UnixMs,
    ) -> bool:
        """Return whether a request repeats an applied one.

        Raises:
            InvalidRequestError: the request id belongs to another request.
        """
        last = self._state.producers.last_sequence(producer_id)
        if last is not None and sequence <= last:
            return True
        return request is not None and self._is_remembered(request, log_ms)

    def _is_remembered(self, request: RequestId, log_ms: UnixMs) -> bool:
        """Return whether a request with that id was applied.

        Raises:
            InvalidRequestError: the id belongs to another request.
        """
        at_ms = self._accepted_at_ms(request, log_ms)
        return self._state.requests.stored_answer(request, at_ms) is not None

    def _accepted_at_ms(self, request: RequestId, log_ms: UnixMs) -> UnixMs:
        """Return when a request was accepted; the last time of an idle log may be long before."""
        return UnixMs(max(log_ms, request.until_ms - self._window_ms))
