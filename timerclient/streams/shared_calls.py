"""Single calls of many callers that share requests: cancels and reschedules of one timer each.

    call --> line --> request, at once while fewer than two of the line are on their way

All calls of a line fit into one request: they have one kind, topic, way of time and timeout. Calls
that come while two requests are on their way gather for the next one. A lone call does not wait.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from timerclient.values.errors import InvalidRequest, TimerError, Unreachable

R = TypeVar("R", bound=Hashable)
T = TypeVar("T")

SENDING_MAX: Final = 2
"""Requests of a line on their way, above which calls gather."""

Send = Callable[[Sequence[R], float], Awaitable[Sequence[T]]]
"""Sends a request for some targets, which may take so many seconds; returns their outcomes."""


class _Call(NamedTuple, Generic[R, T]):
    target: R
    """A timer, with its new time if it has one."""
    ends_s: float
    """Time of the loop at which the call fails."""
    outcome: asyncio.Future[T]


class _Line(Generic[R, T]):
    def __init__(self, send: Send[R, T], targets_max: int, on_idle: Callable[[], object]) -> None:
        """`on_idle`: called when no call waits or is on its way."""
        self._send, self._targets_max, self._on_idle = send, targets_max, on_idle
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Call[R, T]] = []
        self._sending: set[asyncio.Task[None]] = set()

    def add(self, target: R, within_s: float) -> asyncio.Future[T]:
        call = _Call(target, self._loop.time() + within_s, self._loop.create_future())
        self._waiting.append(call)
        self._begin()
        return call.outcome

    def _begin(self) -> None:
        while self._waiting and len(self._sending) < SENDING_MAX:
            calls, left = list[_Call[R, T]](), list[_Call[R, T]]()
            targets = set[R]()
            for call in self._waiting:
                if call.outcome.done():  # its caller was cancelled
                    continue
                # A timer that is named twice needs two requests.
                fits = len(calls) < self._targets_max and call.target not in targets
                (calls if fits else left).append(call)
                targets.add(call.target)
            self._waiting = left
            if calls:
                self._go(calls)

    def _go(self, calls: list[_Call[R, T]]) -> None:
        task = self._loop.create_task(self._run(calls))
        self._sending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._begin()
        if not self._sending:
            self._on_idle()

    async def _run(self, calls: list[_Call[R, T]]) -> None:
        try:
            within_s = max(calls[0].ends_s - self._loop.time(), 0.001)
            outcomes = await self._send([call.target for call in calls], within_s)
        except TimerError as error:
            self._failed(calls, error)
        except asyncio.CancelledError:  # the loop ends
            for call in calls:
                call.outcome.cancel()
            raise
        except Exception as error:  # noqa: BLE001 -- the callers raise it
            self._fail(calls, error)
        else:
            for call, outcome in zip(calls, outcomes, strict=True):
                if not call.outcome.done():
                    call.outcome.set_result(outcome)

    def _failed(self, calls: list[_Call[R, T]], error: TimerError) -> None:
        if isinstance(error, InvalidRequest) and error.outcome_known and len(calls) > 1:
            for call in calls:  # one of them is at fault
                self._go([call])
            return
        if isinstance(error, Unreachable) and error.outcome_known:
            now_s = self._loop.time()
            again = [call for call in calls if call.ends_s > now_s]
            self._waiting[:0] = again
            calls = [call for call in calls if call.ends_s <= now_s]
        self._fail(calls, error)

    def _fail(self, calls: list[_Call[R, T]], error: Exception) -> None:
        for call in calls:
            if not call.outcome.done():
                call.outcome.set_exception(copy.copy(error))


class SharedCalls:
    """The lines of a client, on one event loop; see the module."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line[Any, Any]] = {}

    async def call(
        self, name: Hashable, target: R, send: Send[R, T], targets_max: int, within_s: float
    ) -> T:
        """Return the outcome of a call.

        Args:
            name: Of the line: calls with the same name may share a request.
            target: The timer, with its new time if it has one.
            send: Sends a request.
            targets_max: Targets of one request.
            within_s: Seconds that the call may take.

        Raises:
            TimerError: As `send`. An invalid target fails its own call only.
        """
        line: _Line[R, T] | None = self._lines.get(name)
        if line is None:
            line = _Line(send, targets_max, partial(self._lines.pop, name))
            self._lines[name] = line
        return await line.add(target, within_s)
