"""The first single calls of a client, which need no producer.

    one call after the other    each request has a random id, which the cluster remembers a while
    concurrent calls            they wait for the first one; then the client registers a producer
    more than FIRST_CALLS       the client registers a producer

A client that makes only a call or two leaves no producer behind, even if it is killed. The cluster
would keep such a producer for days (ADR 0061).
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Final, TypeVar

from timerclient.streams.nodes import timeout_error
from timerclient.values.errors import TimerError

FIRST_CALLS: Final = 3
REPEAT_S: Final = 45.0
"""Seconds in which a request is retried. Every cluster remembers its id for at least a minute."""

T = TypeVar("T")


class FirstCalls:
    """Runs the first calls; later calls wait for them. For one event loop."""

    def __init__(self) -> None:
        self._calls_left = FIRST_CALLS
        self._open_count = 0
        """Calls that have begun and were neither answered nor passed to the producer."""
        self._order = asyncio.Lock()

    @property
    def is_one(self) -> bool:
        """Whether a call that begins now is one of the first."""
        return self._calls_left > 0 and not self._open_count

    async def run(self, work: Awaitable[T]) -> T:
        """Run a first call and return its result."""
        self._calls_left -= 1
        self._open_count += 1
        try:
            async with self._order:
                return await work
        finally:
            self._open_count -= 1

    async def close(self, within_s: float) -> None:
        """Return when the first call is over, or when the time is up."""
        with contextlib.suppress(TimerError):
            await self.wait(within_s)

    async def wait(self, within_s: float) -> None:
        """Wait until earlier calls are over, so that requests keep the order of the calls.

        Raises:
            Unreachable: They are not over within `within_s`.
        """
        if not self._open_count:
            return
        self._calls_left = 0
        self._open_count += 1
        try:
            async with asyncio.timeout(within_s), self._order:
                pass
        except TimeoutError:
            raise timeout_error(within_s, None, sent=False) from None
        finally:
            self._open_count -= 1
