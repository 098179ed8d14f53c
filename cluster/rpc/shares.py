"""Shares of a capacity: a caller uses at most as much of it as all callers together leave free.

So n callers that want more have one part in n + 1 each, and the last part is free for another one.
Without rules of access there are no callers, and only the capacity counts.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from timer.model.timer_errors import OVERLOAD_RETRY_MS, OverloadedError


class Shares:
    """The use of one capacity, in all and by caller. For the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.total = 0
        self._used: Counter[str] = Counter()
        """By caller; a caller that uses nothing is removed."""

    def add(self, caller: str | None, amount: int) -> None:
        """Add to the use of a caller; None: it counts in the total only. A negative one ends it."""
        self.total += amount
        if caller is not None:
            self._used[caller] += amount
            if not self._used[caller]:
                del self._used[caller]

    def free_share(self, caller: str | None) -> int:
        """Return the free capacity less the caller's use. Below 0: the caller is over its share."""
        return self._most - self.total - self.used(caller)

    def used(self, caller: str | None) -> int:
        """Return the use of a caller; None: 0."""
        return 0 if caller is None else self._used[caller]


class Places(Shares):
    """A limited number of places, one for each open request."""

    def __init__(self, name: str, most: int, *, retry_ms: int = OVERLOAD_RETRY_MS) -> None:
        """`name`: for errors."""
        super().__init__(most)
        self._name, self._retry_ms = name, retry_ms

    @contextmanager
    def hold(self, caller: str | None) -> Iterator[None]:
        """Take a place for one request of a caller.

        Raises:
            OverloadedError: with it the caller would have more places than it leaves free.
        """
        self.add(caller, 1)
        try:
            if self.free_share(caller) < 0:
                raise OverloadedError(self._name, retry_after_ms=self._retry_ms)
            yield
        finally:
            self.add(caller, -1)
