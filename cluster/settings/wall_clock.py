"""The node's wall clock, and the file that moves it in test clusters.

A chaos run gives one node a wrong clock without changing the machine's. A node of a test cluster
(`test_clock`, see cluster/settings/config.py) adds a skew to the machine's clock. It reads the
skew from a file, again each time the file is replaced:

    {"offset_ms": 2500, "drift_ppm": 0, "from_ms": 1764000000000}

    skew = offset_ms + drift_ppm * (machine's clock - from_ms) / 1,000,000

This is the only place where timerd reads CLOCK_REALTIME. Leases and promises use CLOCK_BOOTTIME,
which is never moved. That clock has no wrong value, only a wrong rate. No lease is safe on a
machine whose oscillator is off by percents.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from timer.model.units import UnixMs


def machine_ms() -> UnixMs:
    """Return this machine's wall clock."""
    return UnixMs(time.time_ns() // 1_000_000)


def wall_clock(test_clock: str) -> Callable[[], UnixMs]:
    """Return this node's wall clock. `test_clock`: path of the skew file; "": no skew."""
    return SkewedClock(Path(test_clock)) if test_clock else machine_ms


class SkewedClock:
    """The machine's clock plus the skew of a file; a missing file means no skew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._offset_ms = 0
        self._drift_ppm = 0
        self._from_ms = 0

    def __call__(self) -> UnixMs:
        """Return the moved clock."""
        self._reread()
        now_ms = machine_ms()
        drifted_ms = self._drift_ppm * (now_ms - self._from_ms) // 1_000_000
        return UnixMs(now_ms + self._offset_ms + drifted_ms)

    def _reread(self) -> None:
        """Read the file again if it was replaced. Its writer renames it into place."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            self._offset_ms = self._drift_ppm = 0
            self._seen = None
            return
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != self._seen:
            clock = json.loads(self._path.read_text())
            self._offset_ms, self._drift_ppm = clock["offset_ms"], clock["drift_ppm"]
            self._from_ms = clock["from_ms"]
            self._seen = seen
