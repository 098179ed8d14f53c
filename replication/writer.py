"""What the log's one writer does with the orders that have piled up: group commit.

While a sync runs, more orders gather; the next batch writes them all and syncs once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from timer.disk import Bytes
from timer.log import Log
from timer.units import LogIndex


@dataclass(frozen=True, slots=True)
class Write:
    """Append these frames."""

    version: int
    frames: Sequence[Bytes]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Remove what lies after `after`; what lies up to `committed` can't be meant."""

    version: int
    after: LogIndex
    committed: LogIndex


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove whole segments below `before`."""

    version: int
    before: LogIndex


Order: TypeAlias = Write | Truncate | Drop


def write_batch(log: Log, orders: Sequence[Order]) -> int:
    """Carry out `orders`; after the next sync all of it is durable. Return the last version.

    Raises:
        DiskFailed: the process stops.
    """
    frames: list[Bytes] = []
    for order in orders:
        if isinstance(order, Write):
            frames += order.frames
            continue
        if frames:
            log.append(frames)
            frames = []
        if isinstance(order, Truncate):
            log.raise_committed_floor(order.committed)
            log.truncate_after(order.after)
        else:
            log.drop_before(order.before)
    if frames:
        log.append(frames)
    return orders[-1].version
