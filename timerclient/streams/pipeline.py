"""The order of a producer's requests: a pure core that applies each request once, despite retries.

A producer numbers its requests 1, 2, 3, … The cluster applies the number after the last one,
repeats its answer for a recent number, and rejects gaps. Requests are pipelined on one stream:

    add ──► queue ──next──► wire ──answer──► settled
              ▲              │
              │              ├─ not applied: refused ──(wire empty)──┐
              │              └─ stream broken: in doubt ─────────────┤
              └──────────────────────────────────────────────────────┘

No request is scheduled twice, and none is lost behind a rejected one:

- A request gets its number when it is first sent. A request that times out unsent leaves no gap.
- After a rejection no new request is sent until all on the wire are answered. The cluster rejects
  those behind the rejected one as gaps. Then all are sent again, in order.
- A request that failed for good leaves a *hole*. The requests behind it get new numbers. This is
  safe only if no copy with an old number can still arrive. If a copy from an earlier stream can,
  the producer is *replaced* by a new one, for which the old numbers have no meaning. The
  replacement takes place when all requests with a number of the old producer are settled.
- A request on a stream that broke is *in doubt*. It keeps its number.
- After a request that a quota rejected, each request behind it would cost a further round trip and
  be rejected, too. A request for as much of the same topic, or more, is therefore settled with the
  same error. Quotas of ready messages are excepted: they do not count timers that are due later.

No clock, no socket: times, streams and futures are the shell's (timerclient/streams/producer.py).
"""

import copy
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from timerclient.values.errors import (
    Closed,
    OutcomeForgotten,
    OutcomeUnknown,
    QuotaReached,
    SequenceGap,
    TimerError,
    UnknownProducer,
    as_unknown,
    means_move,
    means_wait,
)


class PipelinedRequest:
    """One ScheduleRequest and its state. The shell subclasses it."""

    __slots__ = ("abandoned", "in_doubt", "sequence", "stale_copy")

    size: int
    """Approximate bytes on the wire."""
    timers: int = 1
    """Number of its timers."""
    is_collecting: bool = False
    """Single calls are still added to it; it may wait while others of its kind are on the wire."""

    def __init__(self) -> None:
        self.sequence = 0
        """0: not numbered yet."""
        self.in_doubt = False
        """An earlier attempt may have been applied, or may still be."""
        self.stale_copy = False
        """A copy on a broken stream may still arrive. Implies in_doubt."""
        self.abandoned = False
        """No caller waits for its answer."""

    def split(self) -> list[Self]:
        """Return the single requests that were collected in it; empty: it is a single request."""
        return []

    def demand(self) -> tuple[str, int, int] | None:
        """Return topic, rows and bytes of payloads. None: several topics, or it can be split."""
        return None


R = TypeVar("R", bound=PipelinedRequest)


@dataclass(slots=True)
class Step(Generic[R]):
    """Effects of an event, carried out in field order."""

    settled: list[tuple[R, TimerError | None]] = field(default_factory=list)
    """Requests that are settled, each with its error. None: applied, with the present answer."""
    pause_ms: int | None = None
    """Milliseconds in which to send nothing. None: no pause."""
    move: TimerError | None = None
    """If set: leave this stream, call `on_stream_broken`, and look for the leader."""


@dataclass(slots=True, kw_only=True)
class Pipeline(Generic[R]):
    """All unsettled requests of one client. Only its methods change it."""

    wire_requests_max: int
    wire_bytes_max: int
    collected_on_wire_max: int = 2
    """Collected requests on the wire; beyond it, the next one waits for more calls."""
    producer_id: int = 0
    """0: register, with a new token, before the next request."""
    requests_kept: int = 0
    timers_kept: int = 0
    """Most requests, and most timers, on the wire. The cluster keeps the answers of as many: if it
    forgets one, the ids of the request's timers are lost. 0: no bound."""
    queue: deque[R] = field(default_factory=deque)
    wire: dict[int, R] = field(default_factory=dict)
    """Requests sent on this stream and not answered, by request_no."""
    _last: int = 0
    _request_no: int = 0
    _wire_bytes: int = 0
    _wire_timers: int = 0
    _collected_on_wire: int = 0
    _refused: list[R] = field(default_factory=list)
    """Requests that were not applied; sent again when the wire is empty."""
    _draining: bool = False
    _hole: int = 0
    """The lowest number that will never be used. 0: none."""
    _hole_in_doubt: bool = False
    _needs_replacement: bool = False
    """A new producer numbers the requests that have no number."""
    _over_quota: list[tuple[R, QuotaReached]] = field(default_factory=list)
    """Requests that a quota of pending timers has rejected since the wire was last empty."""

    # ---- events

    def add(self, request: R) -> None:
        """Queue a request behind all others."""
        self.queue.append(request)

    def on_registered(self, producer_id: int, requests_kept: int = 0, timers_kept: int = 0) -> None:
        """Number requests from 1, as this producer; see `requests_kept` and `timers_kept`."""
        assert producer_id > 0, producer_id
        self.requests_kept, self.timers_kept = requests_kept, timers_kept
        assert not self.wire, len(self.wire)
        self.producer_id = producer_id
        self._last = 0
        self._needs_replacement = False

    def next(self) -> tuple[int, R] | None:
        """Return (request_no, the request to send now). None: none may be sent at the moment."""
        if self._draining or not self.queue or not self._is_window_open(self.queue[0]):
            return None
        request = self.queue[0]
        if request.sequence == 0:
            if self._needs_replacement and not self.wire:
                self.producer_id = 0
            if self._needs_replacement or not self.producer_id:
                return None
            self._last += 1
            request.sequence = self._last
        self.queue.popleft()
        self._request_no += 1
        self.wire[self._request_no] = request
        self._wire_bytes += request.size
        self._wire_timers += request.timers
        self._collected_on_wire += request.is_collecting
        return self._request_no, request

    def on_answer(self, request_no: int, error: TimerError | None) -> Step[R]:
        """Take the answer to the request `request_no` of this stream."""
        step: Step[R] = Step()
        request = self.wire.pop(request_no, None)
        if request is None:
            return step
        self._wire_bytes -= request.size
        self._wire_timers -= request.timers
        self._collected_on_wire -= request.is_collecting
        if error is None or isinstance(error, OutcomeForgotten):
            step.settled.append((request, error))
        elif isinstance(error, SequenceGap):
            self._on_gap(request, step, error)
        elif isinstance(error, UnknownProducer):
            self._on_unknown_producer(request, step, error)
        elif means_move(error) or means_wait(error):
            request.in_doubt |= not error.outcome_known
            self._refuse(request)
            if means_move(error):
                step.move = error
            else:
                step.pause_ms = error.retry_after_ms
        else:
            self._on_failure(request, step, error)
        self._requeue_if_drained(step)
        return step

    def on_stream_broken(self, *, received: bool) -> Step[R]:
        """Take back the requests on the wire, as the stream is broken.

        `received`: False if the node certainly received none of them.
        """
        step: Step[R] = Step()
        unanswered = list(self.wire.values())
        self.wire.clear()
        self._wire_bytes = self._wire_timers = self._collected_on_wire = 0
        for request in unanswered:
            if received:
                request.in_doubt = request.stale_copy = True
        self._refused += unanswered
        self._draining = bool(self._refused)
        self._requeue_if_drained(step)
        return step

    def withdraw(self, request: R) -> bool:
        """Abandon a request; return whether it was certainly not applied.

        A request in doubt is still sent, because the requests behind it keep their numbers.
        """
        request.abandoned = True
        if self.may_be_applied(request):
            return False
        if request in self.queue:
            self.queue.remove(request)
            if request.sequence:
                self._open_hole(request)
                step: Step[R] = Step()
                self._requeue_if_drained(step)
                assert not step.settled, step
        return True

    def may_be_applied(self, request: R) -> bool:
        """Return whether an unsettled request may have been applied, or may still be."""
        return request.in_doubt or any(request is other for other in self.wire.values())

    def close(self) -> Step[R]:
        """Settle all requests with an error: unknown, or closed before they were sent."""
        waiting = [*self._unsent_requests(), *self.wire.values()]
        doubtful = set(map(id, self.wire.values()))
        step: Step[R] = Step()
        for request in waiting:
            if request.in_doubt or id(request) in doubtful:
                error: TimerError = OutcomeUnknown("the client was closed before the answer came")
            else:
                error = Closed("the client was closed before it was sent")
            step.settled.append((request, error))
        self.queue.clear()
        self.wire.clear()
        self._refused.clear()
        return step

    @property
    def is_idle(self) -> bool:
        """Whether all requests are settled."""
        return not (self.queue or self.wire or self._refused)

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for an unsettled request."""
        return any(not r.abandoned for r in (*self.queue, *self.wire.values(), *self._refused))

    @property
    def needs_producer(self) -> bool:
        """Whether the next request waits for a producer id."""
        return not self.producer_id and not self.wire and not self._draining

    # ---- rules

    def _is_window_open(self, request: R) -> bool:
        if not self.wire:
            return True
        if (
            request.is_collecting
            and len(self.queue) == 1
            and self._collected_on_wire >= self.collected_on_wire_max
        ):
            return False
        timers = self._wire_timers + request.timers
        return (
            self._wire_bytes + request.size <= self.wire_bytes_max
            and timers <= (self.timers_kept or timers)
            and len(self.wire) < min(self.wire_requests_max, self.requests_kept or 1 << 32)
        )

    def _unsent_requests(self) -> list[R]:
        return [*self._refused, *self.queue]

    def _refuse(self, request: R) -> None:
        self._refused.append(request)
        self._draining = True

    def _on_gap(self, request: R, step: Step[R], error: SequenceGap) -> None:
        before = any(other.sequence < request.sequence for other in self.wire.values())
        if self._draining or before:
            # The number before it is not applied, so this one is not. A stale copy may be later.
            request.in_doubt = request.stale_copy
            self._refuse(request)
        else:
            # The cluster does not know numbers that it has answered: it lost its state, or is
            # another cluster. Start again with a new producer.
            self._on_unknown_producer(request, step, error)

    def _on_unknown_producer(self, request: R, step: Step[R], error: TimerError) -> None:
        self._open_hole(request)
        self._needs_replacement = True
        if request.in_doubt:
            # The number has no meaning any more, so a retry can't find out whether it was applied.
            step.settled.append((request, OutcomeUnknown(f"may have been applied; then: {error}")))
        else:
            self._refuse(request)

    def _on_failure(self, request: R, step: Step[R], error: TimerError) -> None:
        self._open_hole(request, received=not error.outcome_known)
        parts = [] if request.in_doubt or not error.outcome_known else request.split()
        if parts:
            # One bad row has failed the others: send each by itself.
            for part in parts:
                part.sequence = request.sequence
            self._refused += parts
        else:
            if (
                isinstance(error, QuotaReached)
                and not error.field.startswith("ready")
                and not request.in_doubt
            ):
                self._over_quota.append((request, error))
            step.settled.append((request, as_unknown(error) if request.in_doubt else error))

    def _open_hole(self, request: R, *, received: bool = False) -> None:
        """Never send `request` again. `received`: its number may nevertheless be in use."""
        self._draining = True
        doubt = request.in_doubt or received
        # No other request may have a number that may be in use.
        self._needs_replacement |= doubt
        if not self._hole or request.sequence < self._hole:
            self._hole = request.sequence
            self._hole_in_doubt = doubt

    def _requeue_if_drained(self, step: Step[R]) -> None:
        """Once the wire is empty, put the rejected requests back into the queue."""
        if not self._draining or self.wire:
            return
        numbered = self._refused
        while self.queue and self.queue[0].sequence:
            numbered.append(self.queue.popleft())
        numbered.sort(key=lambda request: request.sequence)
        if self._over_quota:
            numbered = self._settle_over_quota(numbered, step)
        for request in numbered:
            if request.abandoned and not request.in_doubt:
                self._open_hole(request)
        numbered = [request for request in numbered if request.in_doubt or not request.abandoned]
        if all(request.abandoned for request in numbered):
            # No caller waits for any of them: their numbers end with the producer.
            self._needs_replacement |= bool(numbered)
            numbered = []
        if self._hole:
            numbered = self._renumber(numbered, step)
        self.queue.extendleft(reversed(numbered))
        self._refused = []
        self._draining, self._hole, self._hole_in_doubt = False, 0, False

    def _settle_over_quota(self, numbered: list[R], step: Step[R]) -> list[R]:
        """Settle requests that a quota would reject, as it rejected a smaller one before them.

        Requests in doubt are excepted. Only quotas of pending timers count here: those of ready
        messages depend on the timers that are due by now, which the client does not know. Each
        request has its own copy of the error, because a traceback grows each time it is raised.
        """
        full, self._over_quota = [(one, one.demand(), error) for one, error in self._over_quota], []
        allowed: list[R] = []
        for request in numbered:
            asks = None if request.in_doubt else request.demand()
            for one, less, error in full:
                if (
                    (less and asks and less[0] == asks[0] and one.sequence <= request.sequence)
                    and less[1] <= asks[1]
                    and less[2] <= asks[2]
                ):
                    step.settled.append((request, copy.copy(error)))
                    break
            else:
                allowed.append(request)
        return allowed

    def _renumber(self, numbered: list[R], step: Step[R]) -> list[R]:
        """Remove the numbers of requests behind the hole; settle those that can't lose theirs."""
        kept = [request for request in numbered if request.sequence < self._hole]
        for request in numbered[len(kept) :]:
            if request.in_doubt and self._hole_in_doubt:
                unknown = OutcomeUnknown("its sequence can't be repeated behind one that failed")
                step.settled.append((request, unknown))
                continue
            # The number of the hole is never applied, so no number behind it is.
            self._needs_replacement |= request.stale_copy
            request.sequence, request.in_doubt, request.stale_copy = 0, False, False
            kept.append(request)
        if not self._needs_replacement:
            self._last = self._hole - 1
        return kept
