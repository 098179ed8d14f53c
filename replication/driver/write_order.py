"""Group commit: how the log's single writer executes the queued orders.

Orders queue while a sync runs. The next batch writes them all and is synced once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from timer.files.disk import Bytes
from timer.files.log import Log
from timer.model.units import LogIndex


@dataclass(frozen=True, slots=True)
class Write:
    """Append these frames."""

    version: int
    frames: Sequence[Bytes]


@dataclass(frozen=True, slots=True)
class TruncateLog:
    """Remove the entries after `after`. `committed`: the log refuses a cut below this index."""

    version: int
    after: LogIndex
    committed: LogIndex


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove whole segments below `before`."""

    version: int
    before: LogIndex


Order: TypeAlias = Write | TruncateLog | Drop


def write_batch(log: Log, orders: Sequence[Order]) -> int:
    """Execute `orders`, and return the last version. The next sync makes all of it durable.

    Raises:
        DiskFailedError: the process stops.
    """
    frames: list[Bytes] = []
    for order in orders:
        if isinstance(order, Write):
            frames += order.frames
            continue
        if frames:
            log.append(frames)
            frames = []
        if isinstance(order, TruncateLog):
            log.raise_committed_floor(order.committed)
            log.truncate_after(order.after)
        else:
            log.drop_before(order.before)
    if frames:
        log.append(frames)
    return orders[-1].version
