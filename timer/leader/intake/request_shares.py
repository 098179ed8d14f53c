"""Shares in the table of request ids: no sender may use more than it leaves to the others.

    a new request of a sender --> sender's entries with it <= free entries after it?
                                      no --> rejected

One sender therefore gets at most half of the table, two get a third each, and some room is always
left for a sender that has none yet. The sender is an address. The counts are in the leader's
memory, by sender and step of time; a new leader starts them at zero. A part of
timer/leader/leader.py, and a pure core, too.
"""

from typing import Final, NamedTuple

from timer.model.columns import RequestId
from timer.model.timer_errors import OverloadedError
from timer.model.units import UnixMs
from timer.state.request_ids import REQUEST_ROWS_MAX, REQUESTS_MAX, RequestIds

RETRY_MS: Final = 1000
"""Pause before a rejected sender retries: the oldest ids are forgotten one by one."""
STEPS: Final = 256
"""Steps in a window. An id no longer counts for its sender when its last step begins."""


class Use(NamedTuple):
    """Entries of the table in use, and the rows of their answers."""

    ids: int = 0
    rows: int = 0

    def plus(self, other: "Use") -> "Use":
        """Return the sum of both."""
        return Use(self.ids + other.ids, self.rows + other.rows)

    def minus(self, other: "Use") -> "Use":
        """Return the difference."""
        return Use(self.ids - other.ids, self.rows - other.rows)


_NONE: Final = Use()
WHOLE: Final = Use(REQUESTS_MAX, REQUEST_ROWS_MAX)


class _Taken(NamedTuple):
    whose: str
    use: Use
    step: int
    """Step of time in which the id is forgotten."""


class RequestShares:
    """The senders' shares; see the module."""

    def __init__(self, requests: RequestIds, window_ms: int) -> None:
        self._requests = requests
        self._window_ms = window_ms
        self._step_ms = window_ms // STEPS + 1
        self._on_the_way: dict[tuple[bytes, int], _Taken] = {}
        """By id and body."""
        self._way = _NONE
        """Sum over `_on_the_way`."""
        self._of: dict[str, Use] = {}
        """Sum of each sender."""
        self._until: dict[int, dict[str, Use]] = {}
        """The same by the step in which it is forgotten, the first one first."""

    def check(self, whose: str, rows: int, now_ms: UnixMs) -> None:
        """Check that there is room for one more request.

        Raises:
            OverloadedError: the table or the sender's share is full; the message says which.
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
                full += f" with {rest} left for others"
            else:
                continue
            full += f"; each counts for {self._window_ms} ms, limits.request_window_ms)"
            raise OverloadedError(full, retry_after_ms=RETRY_MS)

    def take(self, request: RequestId, whose: str, rows: int) -> None:
        """Count an accepted request as in flight."""
        taken = _Taken(whose, Use(1, rows), request.until_ms // self._step_ms)
        self._on_the_way[request[:2]] = taken
        self._way = self._way.plus(taken.use)
        self._of[whose] = self._of.get(whose, _NONE).plus(taken.use)
        senders = self._until.setdefault(taken.step, {})
        senders[whose] = senders.get(whose, _NONE).plus(taken.use)

    def settle(self, request: RequestId, *, applied: bool = True) -> None:
        """Stop counting a request as in flight; forget it if it was not applied."""
        taken = self._on_the_way.pop(request[:2], None)
        if taken is None:
            return
        self._way = self._way.minus(taken.use)
        if not applied and taken.step in self._until:
            senders = self._until[taken.step]
            senders[taken.whose] = senders[taken.whose].minus(taken.use)
            self._give_back(taken.whose, taken.use)

    def _forget(self, now_ms: UnixMs) -> None:
        while self._until and (first := next(iter(self._until))) * self._step_ms <= now_ms:
            for whose, use in self._until.pop(first).items():
                self._give_back(whose, use)

    def _give_back(self, whose: str, use: Use) -> None:
        left = self._of.pop(whose, _NONE).minus(use)
        if left != _NONE:
            self._of[whose] = left
