"""Turns of callers: a limited weight of requests is worked on at a time, the others wait.

The next request is that of the caller that has had least since it last had none waiting. So a
caller with many requests delays each one of another caller by one of its own, and not by all.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from heapq import heappop, heappush


class CallerTurns:
    """See the module. For the event loop."""

    def __init__(self, most: int) -> None:
        """`most`: weight of the requests that are worked on at a time."""
        self._most = most
        self._used = 0
        """Weight of the requests that are worked on."""
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        """A heap of (start, number, weight, turn)."""
        self._numbers = itertools.count()
        self._waiting_weight = 0
        self._start = 0
        """Start of the last request that left the queue. A caller without requests begins there."""
        self._ends: dict[Hashable, int] = {}
        """Caller -> end of its last request."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, caller: Hashable, weight: int = 1) -> AsyncIterator[None]:
        """Return a context of one request. It begins when the request's turn has come."""
        await self._begin(caller, weight)
        try:
            yield
        finally:
            self._end(weight)

    async def _begin(self, caller: Hashable, weight: int) -> None:
        if not self._waiting and self._fits(weight):
            self._used += weight
            return
        turn = self._queue_up(caller, weight)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came just now
                self._end(weight)
            raise

    def _end(self, weight: int) -> None:
        self._used -= weight
        self._let_in()

    def _queue_up(self, caller: Hashable, weight: int) -> "asyncio.Future[None]":
        start = max(self._start, self._ends.get(caller, 0))
        self._ends[caller] = start + weight
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (start, next(self._numbers), weight, turn))
        self._waiting_weight += weight
        return turn

    def _let_in(self) -> None:
        while self._waiting and (self._waiting[0][3].done() or self._fits(self._waiting[0][2])):
            self._start, _, weight, turn = heappop(self._waiting)
            self._waiting_weight -= weight
            if not turn.done():
                self._used += weight
                turn.set_result(None)
        if not self._waiting:
            self._ends.clear()

    def _fits(self, weight: int) -> bool:
        return not self._used or self._used + weight <= self._most
