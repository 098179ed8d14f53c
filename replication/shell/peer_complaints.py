"""Warnings about peers at a limited rate, as a faulty peer often repeats its fault at once.

`readable_details` makes gRPC's texts about connections readable.
"""

import logging
import time
from typing import Final

EVERY_S: Final = 60.0
_SHUT_DOWN: Final = "tcp handshaker shutdown"
"""gRPC's text about a connection that was not made in time, as to a host that is off."""


def readable_details(details: str) -> str:
    """Return gRPC's text about a failed call, with plain words for a host that is off."""
    return details.replace(_SHUT_DOWN, "no connection in time")


class Complaints:
    """Logs at most one warning per key in EVERY_S seconds, with the number left out since."""

    def __init__(self, logger: logging.Logger, *, level: int = logging.WARNING) -> None:
        self._logger, self._level = logger, level
        self._logged: dict[str, tuple[float, int]] = {}
        """Key -> (time of the last logged warning, number left out since)."""

    def log(self, key: str, text: str, /, **fields: object) -> None:
        """Log a line, except within EVERY_S seconds after another of this key.

        `key`: a peer, or a kind of warning about it. Empty: a warning about no known peer.
        `repeated` of the line: those of the key that were left out since the one before.
        """
        now_s = time.monotonic()
        logged_s, left_out = self._logged.get(key, (float("-inf"), 0))
        if now_s - logged_s < EVERY_S:
            self._logged[key] = logged_s, left_out + 1
            return
        self._logged[key] = now_s, 0
        self._logger.log(
            self._level, "%s", text, extra=fields | ({"repeated": left_out} if left_out else {})
        )
