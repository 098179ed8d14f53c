"""The fair queue: while timers fire late, requests take turns, and few are worked on at a time.

    request --> fits into the window? --yes--> the handler works on it
                     \\--no--> waits; next is the caller that has had least so far

    a FIRE is committed late, --> the window is half of the present work
    and callers are several
    as time passes            --> the window doubles each WIDEN_S; wide open it limits nothing

Clients and firing share the event loop, the log and the processors of all replicas. A client that
always has many requests open takes all of them, and every FIRE then waits behind its work. Such a
client sends the next request after an answer, so less work at a time slows it down.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from cluster.rpc.caller_turns import CallerTurns
from cluster.rpc.request_bounds import size_of
from timer.model.timer_errors import OverloadedError

LATE_S: Final = 0.03
"""A FIRE that is committed after this time is late, seconds."""
WIDEN_S: Final = 1.0
"""Time in which the window doubles, seconds."""
WINDOW_MIN: Final = 1_024
"""Weight: a batch of a thousand short timers, or sixty requests of one timer."""
WINDOW_MAX: Final = 1 << 17
"""Weight from which on the window limits nothing."""
WAITING_MAX: Final = 1 << 19
"""Weight of waiting requests above which a caller gets no second one into the queue: 64 MiB."""
RETRY_MS: Final = 200

_REQUEST: Final = 16
_BYTES: Final = 128
_ID_BYTES: Final = 16


def weight_of(request: Any) -> int:
    """Return the weight of a request: about one for each of its timers."""
    return (
        _REQUEST + size_of(request) // _BYTES + len(getattr(request, "timer_ids", b"")) // _ID_BYTES
    )


class FairQueue(CallerTurns):
    """See the module. For the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        super().__init__(WINDOW_MAX)
        self._clock = clock
        self._window = float(WINDOW_MAX)
        self._at_s = clock()
        """The window had that size then."""
        self._present: Counter[Hashable] = Counter()
        """Number of open requests and streams by caller; without those that have none."""

    def on_fired(self, took_s: float) -> None:
        """Note that a FIRE was committed `took_s` seconds after its append.

        If there is one caller, only its own timers are late, and the window stays. The time of a
        late FIRE does not widen it: on a full link between nodes that time is seconds.
        """
        if took_s > LATE_S and len(self._present) > 1:
            now_s = self._clock()
            narrowed = min(self._window_at(now_s - took_s), self._used) / 2
            self._window, self._at_s = max(float(WINDOW_MIN), narrowed), now_s
        self._let_in()

    @property
    def window(self) -> float:
        """Highest weight of the requests that are worked on at a time, if there are several."""
        return self._window_at(self._clock())

    def _window_at(self, time_s: float) -> float:
        doublings = min(32.0, max(0.0, time_s - self._at_s) / WIDEN_S)
        return min(float(WINDOW_MAX), self._window * 2**doublings)

    async def enter(self, caller: Hashable, request: Any) -> int:
        """Return the weight of a caller's request, for `leave`, when its turn has come.

        Raises:
            OverloadedError: too much waits already, of this caller as well.
        """
        weight = weight_of(request)
        self._present[caller] += 1
        try:
            await self._begin(caller, weight)
        except BaseException:
            self._depart(caller)
            raise
        return weight

    def leave(self, caller: Hashable, weight: int) -> None:
        """End the work on a request."""
        self._depart(caller)
        self._end(weight)

    @contextmanager
    def present(self, caller: Hashable) -> Iterator[None]:
        """Count a caller that waits for messages, or has an open stream."""
        self._present[caller] += 1
        try:
            yield
        finally:
            self._depart(caller)

    def _depart(self, caller: Hashable) -> None:
        self._present[caller] -= 1
        if not self._present[caller]:
            del self._present[caller]

    def _queue_up(self, caller: Hashable, weight: int) -> "asyncio.Future[None]":
        if self._waiting_weight + weight > WAITING_MAX and self._queues.get(caller):
            raise OverloadedError("the queue of requests", retry_after_ms=RETRY_MS)
        return super()._queue_up(caller, weight)

    def _fits(self, weight: int) -> bool:
        if not self._used:
            return True
        window = self.window
        return window >= WINDOW_MAX or self._used + weight <= window
