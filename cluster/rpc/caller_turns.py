"""Fair queueing of callers: a limited weight of requests is worked on at a time, the others wait.

The next request is that of the caller that was served least while it had requests waiting. So a
caller with many requests delays each one of another caller by one of its own, and not by all.
A request that is cancelled while it waits counts for nothing.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from heapq import heappop, heappush, heapreplace


class CallerTurns:
    """See the module. For the event loop."""

    def __init__(self, most: int) -> None:
        """`most`: weight of the requests that are worked on at a time."""
        self._most = most
        self._used = 0
        """Weight of the requests that are worked on."""
        self._queues: dict[Hashable, OrderedDict[asyncio.Future[None], int]] = {}
        """Caller -> its waiting turns, each with its weight; for each caller in the line."""
        self._line: list[tuple[int, int, Hashable]] = []
        """A heap of (start, number, caller). A start is the weight that the caller has had. One
        without waiting requests leaves when it is first."""
        self._numbers = itertools.count()
        self._waiting_weight = 0
        self._start = 0
        """Start of the caller that was first last. A caller that comes begins there."""

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait for their turn."""
        return sum(map(len, self._queues.values()))

    @asynccontextmanager
    async def turn(self, caller: Hashable) -> AsyncIterator[None]:
        """Return a context of one request of weight 1. It begins when its turn has come."""
        await self._begin(caller, 1)
        try:
            yield
        finally:
            self._end(1)

    async def _begin(self, caller: Hashable, weight: int) -> None:
        if not self._waiting_weight and self._fits(weight):
            self._used += weight
            return
        turn = self._queue_up(caller, weight)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(caller, turn)
                self._let_in()
            else:  # its turn came just now
                self._end(weight)
            raise

    def _end(self, weight: int) -> None:
        self._used -= weight
        self._let_in()

    def _queue_up(self, caller: Hashable, weight: int) -> "asyncio.Future[None]":
        if caller not in self._queues:
            self._queues[caller] = OrderedDict()
            heappush(self._line, (self._start, next(self._numbers), caller))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues[caller][turn] = weight
        self._waiting_weight += weight
        return turn

    def _remove(self, caller: Hashable, turn: "asyncio.Future[None]") -> None:
        """Remove a turn from the queue of a caller, if it is still there."""
        if queue := self._queues.get(caller):
            self._waiting_weight -= queue.pop(turn, 0)

    def _let_in(self) -> None:
        while self._line:
            start, _, caller = self._line[0]
            turn, weight = next(iter(self._queues[caller].items()), (None, 0))
            if turn is None:
                heappop(self._line)
                del self._queues[caller]
            elif turn.cancelled():
                self._remove(caller, turn)
            elif self._fits(weight):
                self._remove(caller, turn)
                self._used += weight
                turn.set_result(None)
                heapreplace(self._line, (start + weight, next(self._numbers), caller))
            else:
                return
            self._start = start

    def _fits(self, weight: int) -> bool:
        return not self._used or self._used + weight <= self._most
