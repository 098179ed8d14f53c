"""Events of a client. Each is logged, and passed to the application's `on_event`.

The logger is `timerclient`. If the application configures no logging, Python writes the warnings
to stderr. A warning that is repeated within a minute is logged at level DEBUG.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LOG: Final = logging.getLogger("timerclient")
MISSING_S: Final = 1.0
"""Seconds without a leader before a `LeaderMissing`. A failover takes half of that."""
REPEAT_INTERVAL_S: Final = 60.0
"""Seconds after a warning in which the same warning is logged at level DEBUG."""


def _role(relayed: bool) -> str:  # noqa: FBT001 -- a field of an event
    return "relays to the leader" if relayed else "leads"


@dataclass(frozen=True, slots=True)
class Connected:
    """The client found the leader, for the first time or after a `LeaderMissing`."""

    address: str
    epoch: int
    relayed: bool = False
    """The leader is out of reach, and the node at `address` relays the requests to it."""

    def __str__(self) -> str:
        return f"connected: {self.address} {_role(self.relayed)}, epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """A new epoch began, on another node or on the same one."""

    address: str
    epoch: int
    relayed: bool = False
    """The leader is out of reach, and the node at `address` relays the requests to it."""

    def __str__(self) -> str:
        return f"leader changed: {self.address} {_role(self.relayed)}, epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class LeaderMissing:
    """The client has found no leader for a second. Repeated after 2, 4, 8 … seconds."""

    for_s: float
    trouble: str
    """The last error of a node."""

    def __str__(self) -> str:
        return f"unreachable: no leader for {self.for_s:.0f} s; the last error: {self.trouble}"


@dataclass(frozen=True, slots=True)
class LeasesLost:
    """The leases of these messages ended while the application had the messages."""

    topic: str
    group: str
    offsets: tuple[int, ...]
    """Queue offsets, ascending."""

    def __str__(self) -> str:
        return (
            f"lease lost: topic {self.topic!r}, group {self.group!r}: {len(self.offsets)} messages"
            f" from queue offset {self.offsets[0]}; the group receives them again"
        )


@dataclass(frozen=True, slots=True)
class SubmitBlocked:
    """A submit blocks: `ClientSettings.submitted_bytes_max` bytes are unanswered."""

    unanswered_bytes: int

    def __str__(self) -> str:
        return f"submit blocked: {self.unanswered_bytes} submitted bytes are unanswered"


Event = Connected | LeaderChanged | LeaderMissing | LeasesLost | SubmitBlocked
OnEvent = Callable[[Event], object]
"""Called on the thread of the client's event loop; for SubmitBlocked, on the caller's thread.
It must not block. An error that it raises is logged."""

_RARE_EVENTS: Final = (LeasesLost, SubmitBlocked)


class Events:
    """Reports one client's events; for any thread."""

    def __init__(self, on_event: OnEvent | None = None) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._warned_s: dict[object, float] = {}

    def report(self, event: Event) -> None:
        """Log an event, and pass it to `on_event`."""
        LOG.log(self._level(event), "%s", event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except BaseException as error:
                # Any other thread is the client's, which an error must not end.
                is_main = threading.current_thread() is threading.main_thread()
                if is_main and isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                LOG.exception("on_event failed at: %s", event)

    def _level(self, event: Event) -> int:
        if isinstance(event, Connected | LeaderChanged):
            return logging.INFO
        if not isinstance(event, _RARE_EVENTS):
            return logging.WARNING
        same: object = type(event)
        if isinstance(event, LeasesLost):
            same = event.topic, event.group
        now_s = time.monotonic()
        with self._lock:
            warned_s = self._warned_s.get(same)
            if warned_s is not None and now_s - warned_s < REPEAT_INTERVAL_S:
                return logging.DEBUG
            self._warned_s[same] = now_s
        return logging.WARNING
