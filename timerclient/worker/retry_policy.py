"""How often a handler's timer is tried: the backoff, and the rejection of a timer."""

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from timerclient.rows import rows
from timerclient.values.errors import InvalidRequest

if TYPE_CHECKING:  # loads gRPC
    from timerclient.client.group_calls import GroupOptions


@dataclass(frozen=True)
class Backoff:
    """Pauses between the attempts of a handler, kept by its group in the cluster.

        Backoff(30, max=3600, attempts=8)   # 30 s, 1 min, 2 min, … at most 1 h; then a dead letter

    Raises:
        InvalidRequest: A pause is not 1 ms to 30 days, or `attempts` is not 0 to 1000.
    """

    first: float | timedelta = 1.0
    """Pause after the first failure, a timedelta or seconds. It doubles with each further one."""
    max: float | timedelta = 3600.0
    """Longest pause."""
    attempts: int = 16
    """Failures after which the message becomes a dead letter. 0: it is tried for ever."""

    def __post_init__(self) -> None:
        first_ms, most_ms = self._ms("first"), self._ms("max")
        if not 1 <= first_ms <= most_ms:
            limit = f"must be 1 ms or more, and at most max = {self.max!r}"
            raise InvalidRequest.of("first", self.first, limit)
        rows.whole_number("attempts", self.attempts, 0, rows.ATTEMPTS_MAX)

    def _ms(self, name: str) -> int:
        return rows.span_ms(name, getattr(self, name), rows.PAUSE_MS_MAX)

    def settings(self) -> "GroupOptions":
        """Return the settings of a group."""
        return {
            "backoff_min": self._ms("first") / 1000,
            "backoff_max": self._ms("max") / 1000,
            "max_attempts": self.attempts,
        }

    def delay_s(self, failures: int) -> float:
        """Return the pause after `failures` earlier failures, in seconds; as the group's."""
        return min(self._ms("first") << min(failures, 40), self._ms("max")) / 1000


class Reject(Exception):
    """Raise it in a handler: no further attempt helps; the message becomes a dead letter now.

    The letter has the exception's text in its header `dead-letter-detail`, up to 1,024 bytes.
    """


class Retry(Exception):
    """Raise it in a handler: it failed, and the timer is tried again after `delay`.

        raise Retry("the provider is busy", delay=60)

    Raises:
        InvalidRequest: `delay` is negative, or longer than 30 days.
    """

    delay_s: float | None = None
    """Pause in place of the backoff, in seconds. None: the backoff, as for a subclass that does not
    call `Retry.__init__`."""

    def __init__(self, *reason: object, delay: float | timedelta) -> None:
        super().__init__(*reason)
        self.delay_s = rows.span_ms("delay", delay, rows.PAUSE_MS_MAX) / 1000


class RetryAfter(Retry):
    """The target of a push failed: tried again after `delay`, or the backoff if that is longer."""
