"""Waits of coroutines; those of threads are in tests/cluster/running.py."""

import asyncio
from collections.abc import Callable
from typing import Final

WITHIN_S: Final = 120.0
"""Longest wait for a condition that takes a second or two on an idle machine."""
POLL_S: Final = 0.002


async def until(holds: Callable[[], object], what: str = "") -> float:
    """Return the seconds that passed until `holds()` was true.

    Raises:
        AssertionError: it was false for `WITHIN_S` seconds; the message is `what`.
    """
    clock = asyncio.get_running_loop().time
    began_s = clock()
    while not holds():
        assert clock() - began_s < WITHIN_S, what or holds
        await asyncio.sleep(POLL_S)
    return clock() - began_s


async def settled() -> None:
    """Return when all tasks have done what they can do without a wait."""
    for _ in range(5):
        await asyncio.sleep(0)
