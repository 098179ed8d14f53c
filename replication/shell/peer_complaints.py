"""Warnings about peers at a limited rate, as a faulty peer often repeats its fault at once."""

import logging
import time
from typing import Final

EVERY_S: Final = 60.0


class Complaints:
    """Logs at most one warning per peer in EVERY_S seconds, with the number left out since."""

    def __init__(self, logger: logging.Logger, *, level: int = logging.WARNING) -> None:
        self._logger, self._level = logger, level
        self._said: dict[str, tuple[float, int]] = {}
        """Peer -> (time of the last logged warning, number left out since)."""

    def say(self, peer: str, text: str, /, **fields: object) -> None:
        """Log a line, except within EVERY_S seconds after another warning about this peer.

        `repeated` of the line: warnings about the peer that were left out since the one before.
        """
        now_s = time.monotonic()
        said_s, unsaid = self._said.get(peer, (float("-inf"), 0))
        if now_s - said_s < EVERY_S:
            self._said[peer] = said_s, unsaid + 1
            return
        self._said[peer] = now_s, 0
        self._logger.log(
            self._level, "%s", text, extra=fields | ({"repeated": unsaid} if unsaid else {})
        )
