"""Complaints about peers, logged sparingly: a peer that is wrong is often wrong again at once."""

import logging
import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 60.0


class Complaints:
    """Logs at most one complaint about each peer in EVERY_S, and how many it left out."""

    def __init__(
        self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._clock = logger, clock
        self._said: dict[str, tuple[float, int]] = {}
        """Peer -> when a complaint was logged, and how many were not since."""

    def say(self, peer: str, text: str) -> None:
        """Log `text`, unless a complaint about this peer was logged just before."""
        now_s = self._clock()
        said_s, unsaid = self._said.get(peer, (float("-inf"), 0))
        if now_s - said_s < EVERY_S:
            self._said[peer] = said_s, unsaid + 1
            return
        self._said[peer] = now_s, 0
        more = f" ({unsaid} more like it in the last {now_s - said_s:.0f} s)" if unsaid else ""
        self._logger.warning("%s%s", text, more)
