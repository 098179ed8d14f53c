"""How much a consumer fetches ahead: two pure cores, which take the time as an argument.

`WorkPace` measures how long the application works on a message. `Credit` counts the messages that
are granted, that wait here, and that may come in all.
"""

from typing import Final

FIRST: Final = 100
"""Messages fetched ahead, one by one, before the pace is known."""
WEIGHT: Final = 0.2
"""Of the last measurement in the mean."""


class WorkPace:
    """The time that an application works on one message: a moving mean."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._since_s = 0.0
        self.given = 0
        """Messages that it works on, since then. 0: it waits, or has asked for none yet."""

    def asked(self, now_s: float) -> None:
        """Note that the application asks for more: its work on what it was given is done."""
        if not self.given:
            return
        each_s = (now_s - self._since_s) / self.given
        mean_s = each_s if self._mean_s is None else self._mean_s
        self._mean_s = mean_s + WEIGHT * (each_s - mean_s)
        self.given = 0

    def begins(self, n: int, now_s: float) -> None:
        """Note that the application got `n` messages."""
        self.given, self._since_s = n, now_s

    def within(self, span_s: float, now_s: float) -> int | None:
        """Return how many messages are worked on in so many seconds. None: not known yet.

        Work that takes longer than the mean, up to now, counts as it is.
        """
        each_s = self._mean_s or 0.0
        if self.given:
            running_s = (now_s - self._since_s) / self.given
            each_s = running_s if self._mean_s is None else max(each_s, running_s)
        elif self._mean_s is None:
            return None
        return int(span_s / each_s) if each_s > 0 else 1 << 62


class Credit:
    """How many messages may come: a window that refills, and perhaps an end."""

    def __init__(self, window: int, total: int | None = None) -> None:
        self.window = window
        """Granted, or waiting here, at most."""
        self.limit = window
        """The same, as the application's pace has it."""
        self.wanted = 0
        """Messages that the application waits for, and nothing is here."""
        self._left = total
        """Messages that may be granted yet. None: no end."""
        self._granted = 0
        """Granted and not arrived."""
        self.waiting = 0
        """Arrived and not taken."""

    @property
    def most(self) -> int:
        """How many messages may be granted or wait here at present."""
        return min(self.window, max(self.limit, self.wanted))

    def due(self) -> bool:
        """Whether enough is free to be worth a request: half the limit, or all that is left."""
        free = self._free()
        return free > 0 and (free >= (self.limit + 1) // 2 or free == self._left)

    def grant(self) -> int:
        """Return how many messages may come more, and count them as granted."""
        free = max(0, self._free())
        self._granted += free
        if self._left is not None:
            self._left -= free
        return free

    def lost(self) -> None:
        """Take back what was granted: the stream is gone, or its credit was ended."""
        if self._left is not None:
            self._left += self._granted
        self._granted = 0

    def arrived(self, n: int) -> None:
        """Count `n` granted messages as arrived."""
        self._granted = max(0, self._granted - n)
        self.waiting += n

    def taken(self, n: int) -> None:
        """Count `n` arrived messages as taken."""
        self.waiting -= n

    def dropped(self, n: int) -> None:
        """Count `n` arrived messages as not come."""
        self.waiting -= n
        if self._left is not None:
            self._left += n

    @property
    def exhausted(self) -> bool:
        """Whether all have come and were taken."""
        return self._left == 0 and not self._granted and not self.waiting

    def _free(self) -> int:
        free = self.most - self._granted - self.waiting
        return free if self._left is None else min(free, self._left)
