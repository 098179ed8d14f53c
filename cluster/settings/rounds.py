"""Rounds of a node's periodic work.

The CPU of an idle node is that of its wake-ups. So rounds begin at multiples of their interval on
the loop's clock: works with intervals of 0.25, 0.5 and 1 s share four wake-ups a second.
"""

import asyncio


def wait_s(now_s: float, interval_s: float) -> float:
    """Return the seconds from `now_s` to the next multiple of the interval; 1 ms at least.

    The count is in whole milliseconds, as that of uvloop's timers is.
    """
    interval_ms = max(1, round(interval_s * 1000))
    return (interval_ms - round(now_s * 1000) % interval_ms) / 1000


async def next_round(interval_s: float) -> None:
    """Sleep until the loop's clock shows the next multiple of the interval."""
    await asyncio.sleep(wait_s(asyncio.get_running_loop().time(), interval_s))
