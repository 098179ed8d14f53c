"""Fairness in the table of request ids: whoever sends most leaves as much to the others.

    a new request, from an address --> its share, with this <= what is left then?  no --> refused

So one sender gets half of the table at most, two get a third each, and there is always some room
for one that has nothing yet. What each has is the leader's memory: a new leader counts from nothing
on. A part of timer/leader/leader.py, and as pure.
"""

from typing import Final, NamedTuple

from timer.model.columns import RequestId
from timer.model.timer_errors import OverloadedError
from timer.model.units import UnixMs
from timer.state.request_ids import REQUEST_ROWS_MAX, REQUESTS_MAX, RequestIds

RETRY_MS: Final = 1000
"""When ids that were refused may find room: the oldest are forgotten one by one."""


class Use(NamedTuple):
    """Of the table."""

    ids: int = 0
    rows: int = 0

    def plus(self, other: "Use") -> "Use":
        """Return both together."""
        return Use(self.ids + other.ids, self.rows + other.rows)

    def minus(self, other: "Use") -> "Use":
        """Return what is left without the other."""
        return Use(self.ids - other.ids, self.rows - other.rows)


_NONE: Final = Use()
WHOLE: Final = Use(REQUESTS_MAX, REQUEST_ROWS_MAX)


class _Taken(NamedTuple):
    until_ms: UnixMs
    whose: str
    use: Use


class Fairness:
    """See the module."""

    def __init__(self, requests: RequestIds, window_ms: int) -> None:
        self._requests = requests
        self._window_ms = window_ms
        self._taken: dict[bytes, _Taken] = {}
        """By id, in the order in which they are forgotten."""
        self._on_the_way: dict[bytes, Use] = {}
        self._way = _NONE
        """All of these."""
        self._of: dict[str, Use] = {}

    def check(self, whose: str, rows: int, now_ms: UnixMs) -> None:
        """Check that there is room for one more request.

        Raises:
            OverloadedError: there is none, or not in this sender's share; says which.
        """
        self._forget(now_ms)
        there = Use(len(self._requests), self._requests.rows).plus(self._way)
        asked = Use(1, rows)
        mine, left = self._of.get(whose, _NONE).plus(asked), WHOLE.minus(there.plus(asked))
        for name, has, rest, whole in zip(Use._fields, mine, left, WHOLE, strict=True):
            if rest < 0:
                full = f"the table of request ids ({whole - rest} of {whole} {name}"
            elif has > rest:
                full = f"the share of {whose} in the table of request ids ({has} {name} of {whole},"
                full += f" where {rest} would be left for others"
            else:
                continue
            full += f"; of the last {self._window_ms} ms, limits.request_window_ms)"
            raise OverloadedError(full, retry_after_ms=RETRY_MS)

    def take(self, request: RequestId, whose: str, rows: int) -> None:
        """A request was taken: it is on its way."""
        self.settle(request)
        use = self._on_the_way[request.text] = Use(1, rows)
        self._way = self._way.plus(use)
        self._end(request.text)
        self._taken[request.text] = _Taken(request.until_ms, whose, use)
        self._of[whose] = self._of.get(whose, _NONE).plus(use)

    def settle(self, request: RequestId, *, applied: bool = True) -> None:
        """It is not on its way any more, and remembered only if it was applied."""
        self._way = self._way.minus(self._on_the_way.pop(request.text, _NONE))
        if not applied:
            self._end(request.text)

    def _forget(self, now_ms: UnixMs) -> None:
        while self._taken:
            text, first = next(iter(self._taken.items()))
            if first.until_ms >= now_ms:
                break
            self._end(text)

    def _end(self, text: bytes) -> None:
        taken = self._taken.pop(text, None)
        if taken is None:
            return
        left = self._of[taken.whose].minus(taken.use)
        if left == _NONE:
            del self._of[taken.whose]
        else:
            self._of[taken.whose] = left
