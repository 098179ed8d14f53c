"""Ordering keys and priorities that simulated timers have.

They follow from a timer's payload, so that requests that are sent again have the same ones, and
checkers know them without the product.
"""

import zlib
from typing import Final

import numpy as np

from timer.model.columns import Binary
from timer.model.row_traits import Traits, join

ORDERING: Final = (b"", b"k", b"o")
"""Ordering keys; b"k" is a key as well (chaos/sim/timers/town.py)."""
PRIORITIES: Final = (9, 9, 9, 9, 4, 0)


def ordering_of(payload: bytes) -> bytes:
    """Return the ordering key of a timer; empty: none."""
    return ORDERING[zlib.crc32(payload) % len(ORDERING)]


def priority_of(payload: bytes) -> int:
    """Return the priority of a timer."""
    return PRIORITIES[zlib.crc32(payload, 1) % len(PRIORITIES)]


def headers_of(payloads: list[bytes]) -> Binary:
    """Return the headers of timers: only their traits."""
    ordering = Binary.of([*map(ordering_of, payloads)])
    priority = np.array([*map(priority_of, payloads)], np.uint8)
    return join(Binary.of([b""] * len(payloads)), Traits(ordering, priority))
