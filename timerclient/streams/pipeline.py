"""The order of a producer's requests: a pure core that makes a retried request one request.

A producer numbers its requests 1, 2, 3, … The cluster applies the number after the last, repeats
its answer for a recent one, and refuses gaps. Requests are pipelined on one stream:

    add ──► queue ──next──► wire ──answer──► settled
              ▲              │
              │              ├─ not applied: refused ──(wire empty)──┐
              │              └─ stream broken: in doubt ─────────────┤
              └──────────────────────────────────────────────────────┘

Why nothing is scheduled twice, and nothing is lost behind a refusal:

- A number is given when a request is first sent, so that one that times out unsent leaves no gap.
- After a refusal nothing new is sent until everything on the wire is answered: what lay behind
  it is refused as a gap. Then all go out again, in order.
- A request that failed for good leaves a *hole*: those behind it are numbered anew. That is safe
  only if no copy with the old number can still arrive. One may, from an earlier stream; then
  the producer is *replaced* by a new one, to whom the old numbers mean nothing, as soon as all
  that carry a number of the old one are settled.
- What was on a stream that broke is *in doubt*: it keeps its number, whatever comes.
- A request that a quota refused would cost each one behind it another round trip, to be refused as
  well. Of those, what asks for as much of the same topic, or more, has the same answer. Not if the
  quota is one of what is ready: of that, what is due later asks for nothing.

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
    """One ScheduleRequest, and where it stands. The shell subclasses it."""

    __slots__ = ("abandoned", "in_doubt", "sequence", "stale_copy")

    size: int
    """Bytes that it will have on the wire, about."""
    timers: int = 1
    """How many it asks for."""
    held: bool = False
    """It is still being collected and may wait while others of its kind are on the wire."""

    def __init__(self) -> None:
        self.sequence = 0
        """0: not numbered yet."""
        self.in_doubt = False
        """An earlier sending may have been applied, or may be yet."""
        self.stale_copy = False
        """It was on a stream that broke, which may still bring it. Implies in_doubt."""
        self.abandoned = False
        """Nobody waits for it any more."""

    def split(self) -> list[Self]:
        """Return the requests that it was put together from; empty: it is one of its own."""
        return []

    def asks_for(self) -> tuple[str, int, int] | None:
        """Return topic, rows and bytes of payloads. None: several topics, or it can be split."""
        return None


R = TypeVar("R", bound=PipelinedRequest)


@dataclass(slots=True)
class Step(Generic[R]):
    """What an event leads to, carried out in field order."""

    settled: list[tuple[R, TimerError | None]] = field(default_factory=list)
    """These are over; None: applied, and its answer is the one just given."""
    pause_ms: int | None = None
    """Send nothing for so long. None: no pause."""
    move: TimerError | None = None
    """Leave this stream, call `broken`, and look for the leader."""


@dataclass(slots=True, kw_only=True)
class Pipeline(Generic[R]):
    """All unsettled requests of one client. Only its methods change it."""

    wire_requests_max: int
    wire_bytes_max: int
    held_on_wire_max: int = 2
    """So many collected requests may be on the wire before the next one waits to fill up."""
    producer_id: int = 0
    """0: register (again, with a new token) before the next request."""
    requests_kept: int = 0
    timers_kept: int = 0
    """Of so many requests and timers the cluster keeps the answers. More are never on the wire: of
    one whose answer is forgotten nothing is known but that it was applied. 0: no bound."""
    queue: deque[R] = field(default_factory=deque)
    wire: dict[int, R] = field(default_factory=dict)
    """Sent on this stream and not answered, by request_no."""
    _last: int = 0
    _request_no: int = 0
    _wire_bytes: int = 0
    _wire_timers: int = 0
    _held_on_wire: int = 0
    _refused: list[R] = field(default_factory=list)
    """Not applied; sent again when the wire is empty."""
    _draining: bool = False
    _hole: int = 0
    """The lowest number that will never be used. 0: none."""
    _hole_in_doubt: bool = False
    _replace: bool = False
    """A new producer numbers the requests that have no number."""
    _full: list[tuple[R, QuotaReached]] = field(default_factory=list)
    """What a quota of what is pending refused since the last time that the wire was empty."""

    # ---- events

    def add(self, request: R) -> None:
        """Queue a request behind all others."""
        self.queue.append(request)

    def registered(self, producer_id: int, requests_kept: int = 0, timers_kept: int = 0) -> None:
        """Number from 1 as this producer, of which so many answers are kept."""
        assert producer_id > 0, producer_id
        self.requests_kept, self.timers_kept = requests_kept, timers_kept
        assert not self.wire, len(self.wire)
        self.producer_id = producer_id
        self._last = 0
        self._replace = False

    def next(self) -> tuple[int, R] | None:
        """Return (request_no, the request to send now). None: nothing may be sent at the moment."""
        if self._draining or not self.queue or not self._window_open(self.queue[0]):
            return None
        request = self.queue[0]
        if request.sequence == 0:
            if self._replace and not self.wire:
                self.producer_id = 0
            if self._replace or not self.producer_id:
                return None
            self._last += 1
            request.sequence = self._last
        self.queue.popleft()
        self._request_no += 1
        self.wire[self._request_no] = request
        self._wire_bytes += request.size
        self._wire_timers += request.timers
        self._held_on_wire += request.held
        return self._request_no, request

    def answer(self, request_no: int, error: TimerError | None) -> Step[R]:
        """Take the answer to what was sent as `request_no` on this stream."""
        step: Step[R] = Step()
        request = self.wire.pop(request_no, None)
        if request is None:
            return step
        self._wire_bytes -= request.size
        self._wire_timers -= request.timers
        self._held_on_wire -= request.held
        if error is None or isinstance(error, OutcomeForgotten):
            step.settled.append((request, error))
        elif isinstance(error, SequenceGap):
            self._gap(request, step, error)
        elif isinstance(error, UnknownProducer):
            self._unknown_producer(request, step, error)
        elif means_move(error) or means_wait(error):
            request.in_doubt |= not error.outcome_known
            self._refuse(request)
            if means_move(error):
                step.move = error
            else:
                step.pause_ms = error.retry_after_ms
        else:
            self._failed(request, step, error)
        self._drained(step)
        return step

    def broken(self, *, taken: bool) -> Step[R]:
        """Take back what is on the wire: the stream is gone.

        `taken`: False if the node certainly took none of it.
        """
        step: Step[R] = Step()
        unanswered = list(self.wire.values())
        self.wire.clear()
        self._wire_bytes = self._wire_timers = self._held_on_wire = 0
        for request in unanswered:
            if taken:
                request.in_doubt = request.stale_copy = True
        self._refused += unanswered
        self._draining = bool(self._refused)
        self._drained(step)
        return step

    def withdraw(self, request: R) -> bool:
        """Forget a request that nobody waits for; return whether it was certainly not applied.

        One that is in doubt is still sent: those behind it need their numbers.
        """
        request.abandoned = True
        if self.may_be_applied(request):
            return False
        if request in self.queue:
            self.queue.remove(request)
            if request.sequence:
                self._open_hole(request)
                step: Step[R] = Step()
                self._drained(step)
                assert not step.settled, step
        return True

    def may_be_applied(self, request: R) -> bool:
        """Return whether an unsettled request may have been applied, or be yet."""
        return request.in_doubt or any(request is other for other in self.wire.values())

    def close(self) -> Step[R]:
        """Give up everything that is not settled."""
        waiting = [*self._refused_or_queued(), *self.wire.values()]
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
    def idle(self) -> bool:
        """Whether nothing is to be sent or answered."""
        return not (self.queue or self.wire or self._refused)

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for what is to be sent or answered."""
        return any(not r.abandoned for r in (*self.queue, *self.wire.values(), *self._refused))

    @property
    def needs_producer(self) -> bool:
        """Whether the next request waits for a producer id."""
        return not self.producer_id and not self.wire and not self._draining

    # ---- rules

    def _window_open(self, request: R) -> bool:
        if not self.wire:
            return True
        if request.held and len(self.queue) == 1 and self._held_on_wire >= self.held_on_wire_max:
            return False
        timers = self._wire_timers + request.timers
        return (
            self._wire_bytes + request.size <= self.wire_bytes_max
            and timers <= (self.timers_kept or timers)
            and len(self.wire) < min(self.wire_requests_max, self.requests_kept or 1 << 32)
        )

    def _refused_or_queued(self) -> list[R]:
        return [*self._refused, *self.queue]

    def _refuse(self, request: R) -> None:
        self._refused.append(request)
        self._draining = True

    def _gap(self, request: R, step: Step[R], error: SequenceGap) -> None:
        before = any(other.sequence < request.sequence for other in self.wire.values())
        if self._draining or before:
            # The number before it is not applied, so it isn't. A stale copy still may be, later.
            request.in_doubt = request.stale_copy
            self._refuse(request)
        else:
            # The cluster does not know numbers that it has answered: it lost its state, or is
            # another one. Start over with a new producer.
            self._unknown_producer(request, step, error)

    def _unknown_producer(self, request: R, step: Step[R], error: TimerError) -> None:
        self._open_hole(request)
        self._replace = True
        if request.in_doubt:
            # The number means nothing any more: nobody can tell whether it was applied.
            step.settled.append((request, OutcomeUnknown(f"may have been applied; then: {error}")))
        else:
            self._refuse(request)

    def _failed(self, request: R, step: Step[R], error: TimerError) -> None:
        self._open_hole(request, taken=not error.outcome_known)
        parts = [] if request.in_doubt or not error.outcome_known else request.split()
        if parts:
            # One bad row has failed the others: let each stand for itself.
            for part in parts:
                part.sequence = request.sequence
            self._refused += parts
        else:
            if (
                isinstance(error, QuotaReached)
                and not error.field.startswith("ready")
                and not request.in_doubt
            ):
                self._full.append((request, error))
            step.settled.append((request, as_unknown(error) if request.in_doubt else error))

    def _open_hole(self, request: R, *, taken: bool = False) -> None:
        """Never send `request` again. `taken`: its number may be in use all the same."""
        self._draining = True
        doubt = request.in_doubt or taken
        # Nobody else may get a number that is perhaps in use.
        self._replace |= doubt
        if not self._hole or request.sequence < self._hole:
            self._hole = request.sequence
            self._hole_in_doubt = doubt

    def _drained(self, step: Step[R]) -> None:
        """Put the refused back into the queue once nothing is on the wire."""
        if not self._draining or self.wire:
            return
        numbered = self._refused
        while self.queue and self.queue[0].sequence:
            numbered.append(self.queue.popleft())
        numbered.sort(key=lambda request: request.sequence)
        if self._full:
            numbered = self._without_full(numbered, step)
        for request in numbered:
            if request.abandoned and not request.in_doubt:
                self._open_hole(request)
        numbered = [request for request in numbered if request.in_doubt or not request.abandoned]
        if all(request.abandoned for request in numbered):
            # Nobody waits for any of them: their numbers die with the producer.
            self._replace |= bool(numbered)
            numbered = []
        if self._hole:
            numbered = self._renumbered(numbered, step)
        self.queue.extendleft(reversed(numbered))
        self._refused = []
        self._draining, self._hole, self._hole_in_doubt = False, 0, False

    def _without_full(self, numbered: list[R], step: Step[R]) -> list[R]:
        """Settle what certainly was not applied, and has no room where less had none before it.

        Only for quotas of what is pending: those of what is ready weigh only what is due by now,
        which nobody knows here. Each gets an error of its own: its traceback grows as it is raised.
        """
        full, self._full = [(one, one.asks_for(), error) for one, error in self._full], []
        kept: list[R] = []
        for request in numbered:
            asks = None if request.in_doubt else request.asks_for()
            for one, less, error in full:
                if (
                    (less and asks and less[0] == asks[0] and one.sequence <= request.sequence)
                    and less[1] <= asks[1]
                    and less[2] <= asks[2]
                ):
                    step.settled.append((request, copy.copy(error)))
                    break
            else:
                kept.append(request)
        return kept

    def _renumbered(self, numbered: list[R], step: Step[R]) -> list[R]:
        """Take the numbers from what lies behind the hole; settle what can't go without its own."""
        kept = [request for request in numbered if request.sequence < self._hole]
        for request in numbered[len(kept) :]:
            if request.in_doubt and self._hole_in_doubt:
                unknown = OutcomeUnknown("its sequence can't be repeated behind one that failed")
                step.settled.append((request, unknown))
                continue
            # The number of the hole was never applied, and never will be: nor is any behind it.
            self._replace |= request.stale_copy
            request.sequence, request.in_doubt, request.stale_copy = 0, False, False
            kept.append(request)
        if not self._replace:
            self._last = self._hole - 1
        return kept
