"""Events of a client's life: each is logged, and passed to the application's `on_event`.

The logger is `timerclient`. An application that configures no logging sees the warnings on stderr,
as of any library. A warning that comes again within a minute is logged at level DEBUG.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LOG: Final = logging.getLogger("timerclient")
QUIET_S: Final = 60.0
"""The same warning is not logged as one again for so long."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The leader was found: for the first time, or after a `LeaderMissing`."""

    address: str
    epoch: int

    def __str__(self) -> str:
        return f"connected: {self.address} leads, epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """Another leadership began, on another node or on the same."""

    address: str
    epoch: int

    def __str__(self) -> str:
        return f"leader changed: {self.address} leads, epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class LeaderMissing:
    """No node that leads was found for a second; told again after 2, 4, 8 … seconds."""

    for_s: float
    trouble: str
    """The last error of a node."""

    def __str__(self) -> str:
        return f"unreachable: no leader for {self.for_s:.0f} s; the last trouble: {self.trouble}"


@dataclass(frozen=True, slots=True)
class LeasesLost:
    """The application had these messages, and they are not its consumer's any more."""

    topic: str
    group: str
    offsets: tuple[int, ...]
    """Queue offsets, ascending."""

    def __str__(self) -> str:
        return (
            f"lease lost: topic {self.topic!r}, group {self.group!r}: {len(self.offsets)} messages"
            f" from queue offset {self.offsets[0]}; their group gets them again"
        )


@dataclass(frozen=True, slots=True)
class SubmitBlocked:
    """A submit waits, as too many bytes are unanswered (`Settings.submitted_bytes_max`)."""

    unanswered_bytes: int

    def __str__(self) -> str:
        return f"submit blocked: {self.unanswered_bytes} submitted bytes are unanswered"


Event = Connected | LeaderChanged | LeaderMissing | LeasesLost | SubmitBlocked
OnEvent = Callable[[Event], object]
"""Is called on the thread that runs the client's event loop, or of SubmitBlocked on the caller's.
It must not wait. An error that it raises is logged."""

_SELDOM: Final = (LeasesLost, SubmitBlocked)


class Events:
    """One client's events, for any thread."""

    def __init__(self, on_event: OnEvent | None = None) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._warned_s: dict[object, float] = {}

    def tell(self, event: Event) -> None:
        """Log an event, and pass it on."""
        LOG.log(self._level(event), "%s", event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                LOG.exception("on_event failed at: %s", event)

    def _level(self, event: Event) -> int:
        if isinstance(event, Connected | LeaderChanged):
            return logging.INFO
        if not isinstance(event, _SELDOM):
            return logging.WARNING
        same: object = type(event)
        if isinstance(event, LeasesLost):
            same = event.topic, event.group
        now_s = time.monotonic()
        with self._lock:
            warned_s = self._warned_s.get(same)
            if warned_s is not None and now_s - warned_s < QUIET_S:
                return logging.DEBUG
            self._warned_s[same] = now_s
        return logging.WARNING
