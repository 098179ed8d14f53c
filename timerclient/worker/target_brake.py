"""The brake of a push target that is unavailable: one request at a time, until one is answered.

    off ──unavailable──► on: one request at a time, after a pause of 1 s, 2 s, 4 s, … 30 s
     ▲                   │
     └─────answered──────┘

Messages then wait, and do not fail one after the other. The core is pure: the time is an argument.
"""

from typing import Final

FIRST_S: Final = 1.0
"""Pause before the first request after the target became unavailable. It doubles each time."""
LONGEST_S: Final = 30.0
"""Longest pause."""


class TargetUnreached(Exception):
    """No connection to a target: the message returns to its group, and has not failed."""


class TargetBrake:
    """See the module."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        """Length of the present pause. 0: the brake is off."""
        self._until_s = 0.0
        """End of the present pause."""

    @property
    def is_on(self) -> bool:
        """Whether the target is unavailable."""
        return self._pause_s > 0

    def calls_max(self, concurrency: int) -> int:
        """Return the number of requests that may run at a time."""
        return 1 if self.is_on else concurrency

    def left_s(self, now_s: float) -> float:
        """Return the rest of the pause before the next request, in seconds; 0: none."""
        return max(0.0, self._until_s - now_s) if self.is_on else 0.0

    def on_unavailable(self, began_s: float, now_s: float, least_s: float = 0.0) -> None:
        """Note that a request, which began at `began_s`, found the target unavailable.

        Requests that began before the end of the pause do not lengthen it. `least_s`: shortest
        pause that the target requested.
        """
        if self.is_on and began_s < self._until_s:
            return
        self._pause_s = min(max(FIRST_S, 2 * self._pause_s, least_s), LONGEST_S)
        self._until_s = now_s + self._pause_s

    def on_answer(self) -> None:
        """Note that the target answered a request."""
        self._pause_s = 0.0
