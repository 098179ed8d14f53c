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


class _Entry(NamedTuple):
    sender: str
    use: Use
    step: int
    """Step of time in which the id is forgotten."""


class RequestShares:
    """The senders' shares; see the module."""

    def __init__(self, requests: RequestIds, window_ms: int) -> None:
        self._requests = requests
        self._window_ms = window_ms
        self._step_ms = window_ms // STEPS + 1
        self._in_flight: dict[tuple[bytes, int], _Entry] = {}
        """By id and body."""
        self._in_flight_use = _NONE
        """Sum over `_in_flight`."""
        self._by_sender: dict[str, Use] = {}
        """Sum of each sender."""
        self._by_step: dict[int, dict[str, Use]] = {}
        """The same by the step in which it is forgotten, the first one first."""

    def check(self, sender: str, rows: int, now_ms: UnixMs) -> None:
        """Check that there is room for one more request.

        Raises:
            OverloadedError: the table or the sender's share is full; the message says which.
        """
        self._forget(now_ms)
        used = Use(len(self._requests), self._requests.rows).plus(self._in_flight_use)
        wanted = Use(1, rows)
        mine, free = self._by_sender.get(sender, _NONE).plus(wanted), WHOLE.minus(used.plus(wanted))
        for name, own, rest, whole in zip(Use._fields, mine, free, WHOLE, strict=True):
            if rest < 0:
                full = f"the table of request ids ({whole - rest} of {whole} {name}"
            elif own > rest:
                full = f"the share of {sender} in the table of request ids"
                full += f" ({own} {name} of {whole}, with {rest} left for others"
            else:
                continue
            full += f"; each counts for {self._window_ms} ms, limits.request_window_ms)"
            raise OverloadedError(full, retry_after_ms=RETRY_MS)

    def take(self, request: RequestId, sender: str, rows: int) -> None:
        """Count an accepted request as in flight."""
        entry = _Entry(sender, Use(1, rows), request.until_ms // self._step_ms)
        self._in_flight[request[:2]] = entry
        self._in_flight_use = self._in_flight_use.plus(entry.use)
        self._by_sender[sender] = self._by_sender.get(sender, _NONE).plus(entry.use)
        senders = self._by_step.setdefault(entry.step, {})
        senders[sender] = senders.get(sender, _NONE).plus(entry.use)

    def settle(self, request: RequestId, *, applied: bool = True) -> None:
        """Stop counting a request as in flight; forget it if it was not applied."""
        entry = self._in_flight.pop(request[:2], None)
        if entry is None:
            return
        self._in_flight_use = self._in_flight_use.minus(entry.use)
        if not applied and entry.step in self._by_step:
            senders = self._by_step[entry.step]
            senders[entry.sender] = senders[entry.sender].minus(entry.use)
            self._release(entry.sender, entry.use)

    def _forget(self, now_ms: UnixMs) -> None:
        while self._by_step and (first := next(iter(self._by_step))) * self._step_ms <= now_ms:
            for sender, use in self._by_step.pop(first).items():
                self._release(sender, use)

    def _release(self, sender: str, use: Use) -> None:
        rest = self._by_sender.pop(sender, _NONE).minus(use)
        if rest != _NONE:
            self._by_sender[sender] = rest
