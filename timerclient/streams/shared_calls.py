"""Single calls of many callers that share requests: cancels and reschedules of one timer each.

    call --> line --> request, at once while fewer than two of the line are on their way

All calls of a line fit into one request: they have one kind, topic and way of time. Calls that
come while two requests are on their way gather for the next one. A lone call does not wait. A
request may take the longest time that one of its calls has; each call fails shortly after its
own end.
"""

import asyncio
import copy
import re
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

from timerclient.streams.nodes import timeout_error
from timerclient.streams.shared_deadlines import SharedDeadlines
from timerclient.values.errors import InvalidRequest

R = TypeVar("R")
T = TypeVar("T")

SENDING_MAX: Final = 2
"""Requests of a line on their way, at most."""
GRACE_S: Final = 0.05
"""Time after the end of a call in which its request may still say why it failed."""

Send = Callable[[Sequence[R], float], Awaitable[Sequence[T | None]]]
"""Sends a request of some rows with a time limit in seconds; returns an outcome for each row.
None: the row had no effect and must be sent again."""


@dataclass(slots=True, eq=False)
class _Call(Generic[R, T]):
    timer: Hashable
    """The timer that the call names."""
    row: R
    within_s: float
    ends_s: float
    """Time of the loop at which its time is up."""
    outcome: asyncio.Future[T]
    is_sent: bool = False
    """A request with the call is on its way."""


class _Line(Generic[R, T]):
    def __init__(self, send: Send[R, T], rows_max: int, on_idle: Callable[[], object]) -> None:
        """`on_idle`: called when no call waits or is on its way."""
        self._send, self._rows_max, self._on_idle = send, rows_max, on_idle
        self._loop = asyncio.get_running_loop()
        self._deadlines: SharedDeadlines[_Call[R, T]] = SharedDeadlines(self._expire)
        self._waiting: list[_Call[R, T]] = []
        self._parts: list[list[_Call[R, T]]] = []
        """Parts of an invalid request. Each is sent as it is, before the waiting calls."""
        self._sending: set[asyncio.Task[None]] = set()

    def add(self, timer: Hashable, row: R, within_s: float) -> asyncio.Future[T]:
        ends_s = self._loop.time() + within_s
        call = _Call(timer, row, within_s, ends_s, self._loop.create_future())
        alarm = self._deadlines.add(call, within_s + GRACE_S)
        call.outcome.add_done_callback(lambda _: alarm.remove(call))
        self._waiting.append(call)
        self._begin()
        return call.outcome

    def _expire(self, call: _Call[R, T]) -> None:
        if not call.outcome.done():
            call.outcome.set_exception(timeout_error(call.within_s, None, sent=call.is_sent))

    def _begin(self) -> None:
        while len(self._sending) < SENDING_MAX and (calls := self._next()):
            task = self._loop.create_task(self._run(calls))
            self._sending.add(task)
            task.add_done_callback(self._on_task_end)

    def _next(self) -> list[_Call[R, T]]:
        """Return the calls of the next request. Calls whose caller is gone are left out."""
        while self._parts:
            if part := [call for call in self._parts.pop(0) if not call.outcome.done()]:
                return part
        calls, left, timers = list[_Call[R, T]](), list[_Call[R, T]](), set[Hashable]()
        for at, call in enumerate(self._waiting):
            if len(calls) == self._rows_max:
                left += self._waiting[at:]
                break
            if not call.outcome.done():
                # A request names a timer once.
                (left if call.timer in timers else calls).append(call)
                timers.add(call.timer)
        self._waiting = left
        return calls

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._begin()
        if not self._sending:
            self._on_idle()

    async def _run(self, calls: list[_Call[R, T]]) -> None:
        within_s = max(call.ends_s for call in calls) - self._loop.time()
        _mark(calls, is_sent=True)
        try:
            outcomes = await self._send([call.row for call in calls], max(within_s, 0.001))
        except asyncio.CancelledError:  # the loop ends
            for call in calls:
                call.outcome.cancel()
            raise
        except Exception as error:  # noqa: BLE001 -- the callers raise it
            if isinstance(error, InvalidRequest) and error.outcome_known and len(calls) > 1:
                _mark(calls, is_sent=False)
                self._parts += _parts(calls, error)
                return
            for call in calls:
                if not call.outcome.done():
                    call.outcome.set_exception(copy.copy(error))
        else:
            unsent = []
            for call, outcome in zip(calls, outcomes, strict=True):
                if outcome is None:
                    unsent.append(call)
                elif not call.outcome.done():
                    call.outcome.set_result(outcome)
            _mark(unsent, is_sent=False)
            self._waiting[:0] = unsent


def _mark(calls: Sequence[_Call[R, T]], *, is_sent: bool) -> None:
    for call in calls:
        call.is_sent = is_sent


def _parts(calls: list[_Call[R, T]], error: InvalidRequest) -> list[list[_Call[R, T]]]:
    """Return the parts of an invalid request: the row at fault and the others, or both halves."""
    if (row := re.fullmatch(r"\w+\[(\d+)\]", error.field)) and int(row[1]) < len(calls):
        at = int(row[1])
        return [[calls[at]], calls[:at] + calls[at + 1 :]]
    half = len(calls) // 2
    return [calls[:half], calls[half:]]


class SharedCalls:
    """The lines of a client, on one event loop; see the module."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line[Any, Any]] = {}

    async def call(
        self,
        name: Hashable,
        timer: Hashable,
        row: R,
        send: Send[R, T],
        *,
        rows_max: int,
        within_s: float,
    ) -> T:
        """Return the outcome of a call.

        Args:
            name: Of the line: calls with the same name may share a request.
            timer: The timer that the call names.
            row: The timer, with its new time if it has one.
            send: Sends a request.
            rows_max: Rows of one request.
            within_s: Seconds that the call may take.

        Raises:
            TimerError: As `send`. An invalid row fails its own call only.
            OutcomeUnknown: The time is up; the call may have been applied.
            Unreachable: The time is up; the call was not sent.
        """
        line: _Line[R, T] | None = self._lines.get(name)
        if line is None:
            line = _Line(send, rows_max, partial(self._lines.pop, name))
            self._lines[name] = line
        return await line.add(timer, row, within_s)
