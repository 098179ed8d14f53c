"""A fixed piece of work, by which results of different hours and machines are compared.

The speed of a shared machine changes by a factor of three within a day. So each run is preceded by
this work, and the table compares figures in units of its time:

    rate      timers per calibration   = timers/s * seconds
    cost      calibrations per call    = ms / seconds

The work consists of parts like those of a node: interpreted code, a sort of a column, a checksum of
bytes. Results with other work could not be compared: a change of it needs a new FORMAT of the
result files.
"""

import statistics
import time
import zlib
from typing import Final

import numpy as np

_ROUNDS: Final = 5
_ADDITIONS: Final = 200_000
_SORTED: Final = 200_000
_BYTES: Final = 16 << 20


def calibration_s() -> float:
    """Return the seconds that the work takes: the median of a few rounds."""
    column = np.random.default_rng(1).integers(0, 1 << 40, _SORTED)
    data = bytes(_BYTES)
    return statistics.median(_round_s(column, data) for _ in range(_ROUNDS))


def _round_s(column: "np.ndarray[tuple[int], np.dtype[np.int64]]", data: bytes) -> float:
    began = time.perf_counter()
    total = 0
    for number in range(_ADDITIONS):
        total += number & 7
    np.sort(column, kind="stable")
    zlib.crc32(data)
    return time.perf_counter() - began
