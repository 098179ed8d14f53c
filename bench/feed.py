"""Input of the measures: batches of random payloads, which no codec can compress."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import AsyncIterator
from typing import Final

import numpy as np

PAYLOAD_SIZE: Final = 100
BATCH_SIZE: Final = 1_000
HOUR_MS: Final = 3_600_000
PACE_MS: Final = 50
FIRST_PACE_MS: Final = 200
"""Milliseconds until the first pace."""
_PREPARED: Final = 64


def now_ms() -> int:
    """Return this machine's clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


async def paces(lasting_s: float = math.inf) -> AsyncIterator[int]:
    """Yield the time of each pace of PACE_MS when it has come, Unix milliseconds."""
    start_ms = now_ms() + FIRST_PACE_MS
    for at_ms in itertools.count(start_ms, PACE_MS):
        if at_ms >= start_ms + 1000 * lasting_s:
            return
        await asyncio.sleep((at_ms - time.time_ns() / 1e6) / 1000)
        yield at_ms


class Feed:
    """Payloads made in advance, so that no random source is measured."""

    def __init__(self, seed: int = 1, size: int = BATCH_SIZE) -> None:
        chance = random.Random(seed)
        self._random = np.random.default_rng(seed)
        self.size = size
        self._batches = [
            [chance.randbytes(PAYLOAD_SIZE) for _ in range(size)] for _ in range(_PREPARED)
        ]
        self._next = 0

    def payloads(self) -> list[bytes]:
        """Return the next batch of payloads. The batches repeat after a while."""
        self._next = (self._next + 1) % _PREPARED
        return self._batches[self._next]

    def spread(self, from_ms: int, over_ms: int) -> list[int]:
        """Return a batch's due times: whole milliseconds in [from_ms, from_ms + over_ms)."""
        due: list[int] = self._random.integers(from_ms, from_ms + over_ms, self.size).tolist()
        return due

    def far(self) -> list[int]:
        """Return a batch's due times, from one hour to a day ahead."""
        return self.spread(now_ms() + HOUR_MS, 23 * HOUR_MS)
