"""A limit of the bytes per second that a node sends for one purpose."""

import asyncio
import time
from collections.abc import Awaitable, Callable


class SendRate:
    """Limits the bytes per second of all senders together."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._free_s = 0.0

    async def spend(self, size: int) -> None:
        """Wait until `size` more bytes may be sent."""
        now_s = self._clock()
        start_s = max(self._free_s, now_s)
        self._free_s = start_s + size / self._bytes_per_s
        if start_s > now_s:
            try:
                await self._sleep(start_s - now_s)
            except asyncio.CancelledError:
                self._free_s -= size / self._bytes_per_s  # nothing is sent for this call
                raise
