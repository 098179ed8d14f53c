"""The messages of one measure, judged: lost, doubled, early, late.

A payload names its timer, so that no peer's metadata is needed:

    0          8          16                      100
    | number   | due_ms   | random bytes          |
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.feed import PAYLOAD_SIZE

RECORD: Final = np.dtype([("number", "<u8"), ("due_ms", "<u8"), ("fill", f"V{PAYLOAD_SIZE - 16}")])
LATE_MS: Final = 1_000
"""Lateness above which a message counts as late."""
MISSED_MAX: Final = 5
"""Polls without a further message after which the rest counts as lost."""
_POLL_S: Final = 1.0


class NumberedTimers:
    """Payloads of numbered timers; no two timers of a run share a number."""

    def __init__(self) -> None:
        self._next = 0
        self._random = np.random.default_rng(1)

    def make(self, due_ms: Sequence[int]) -> list[bytes]:
        """Return a payload for each due time, with the next numbers."""
        count = len(due_ms)
        data = np.empty(count, RECORD)
        data["number"] = np.arange(self._next, self._next + count)
        data["due_ms"] = due_ms
        fill = self._random.bytes(count * (PAYLOAD_SIZE - 16))
        data["fill"] = np.frombuffer(fill, RECORD["fill"])
        self._next += count
        whole = data.tobytes()
        return [whole[at : at + PAYLOAD_SIZE] for at in range(0, len(whole), PAYLOAD_SIZE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryVerdict:
    """The fate of the scheduled timers. A timer is scheduled if its call succeeded."""

    scheduled: int
    lost: int
    """Not received by the end."""
    doubled: int
    """Received more than once, or in an earlier measure too."""
    early: int
    """Received before the due time."""
    late: int
    """Received more than `LATE_MS` after the due time."""
    worst_ms: float
    """Greatest lateness. 0: nothing was received."""


class Deliveries:
    """A measure's scheduled timers and received messages. It is the `Receipts` of a consumer."""

    def __init__(self, earlier: "Deliveries | None" = None) -> None:
        """Follow the measure `earlier`. Its messages count as doubled if they come again."""
        self._before = earlier.numbers() if earlier else _NONE["number"]
        self._parts: list[npt.NDArray[np.void]] = []
        self._at_ms: list[float] = []
        self._scheduled: list[npt.NDArray[np.void]] = []
        self._punctual: list[npt.NDArray[np.void]] = []
        """The scheduled parts with a call that returned before their first due time."""
        self.count = 0
        self.acked_count = 0
        self.last_ack_ms = 0.0

    # ---- recorded by the producer and the consumer

    def scheduled(self, payloads: Sequence[bytes]) -> None:
        """Record timers of a schedule call that has just succeeded."""
        part = _records(payloads)
        self._scheduled.append(part)
        if now_ms() < float(part["due_ms"].min()):
            self._punctual.append(part)

    def received(self, payloads: Sequence[bytes]) -> None:
        """Record messages that arrive now."""
        self._at_ms.append(now_ms())
        self._parts.append(_records(payloads))
        self.count += len(payloads)

    def acked(self, count: int) -> None:
        """Record that `count` further messages are acknowledged."""
        self.acked_count += count
        self.last_ack_ms = now_ms()

    # ---- judged at the end

    async def complete(self, limit_s: float) -> bool:
        """Wait until all scheduled timers are acked; False after `limit_s` or without progress."""
        expected = sum(map(len, self._scheduled))
        until, before, missed = time.monotonic() + limit_s, -1, 0
        while self.acked_count < expected or self.verdict().lost:
            missed = missed + 1 if self.count == before else 0
            if time.monotonic() > until or missed > MISSED_MAX:
                return False
            before = self.count
            await asyncio.sleep(_POLL_S if self.acked_count >= expected or missed else 0.05)
        return True

    def lateness_ms(self) -> npt.NDArray[np.float64]:
        """Return the lateness of each timer's first message."""
        data, at_ms = self._own()
        _, first = np.unique(data["number"], return_index=True)
        return at_ms[first] - data["due_ms"][first].astype(np.float64)

    def numbers(self) -> npt.NDArray[np.uint64]:
        """Return the numbers received so far, in this measure and those before."""
        return np.union1d(self._all()[0]["number"], self._before)

    def verdict(self) -> DeliveryVerdict:
        """Judge the messages received so far.

        Lateness counts for timers that were scheduled before their due time.
        """
        data, at_ms = self._all()
        scheduled = np.concatenate([_NONE, *self._scheduled])["number"]
        numbers, first, times = np.unique(data["number"], return_index=True, return_counts=True)
        late_ms = at_ms[first] - data["due_ms"][first].astype(np.float64)
        judged = late_ms[np.isin(numbers, np.concatenate([_NONE, *self._punctual])["number"])]
        return DeliveryVerdict(
            scheduled=len(scheduled),
            lost=int((~np.isin(scheduled, numbers)).sum()),
            doubled=int(((times > 1) | np.isin(numbers, self._before)).sum()),
            early=int((late_ms < 0).sum()),
            late=int((judged > LATE_MS).sum()),
            worst_ms=float(judged.max(initial=0.0)),
        )

    def longest_gap_ms(self, from_ms: float) -> float:
        """Return the longest time without a message, of the times that end after `from_ms`."""
        at_ms = np.sort(np.array(self._at_ms))
        return float(np.diff(at_ms)[at_ms[1:] > from_ms].max(initial=0.0))

    def first_ms(self) -> float:
        """Return the time of the first message of this measure. 0: there is none."""
        _, at_ms = self._own()
        return float(at_ms[0]) if len(at_ms) else 0.0

    def per_tenth(self, from_ms: float, lasting_ms: int) -> list[float]:
        """Return the messages received in each 100 ms from `from_ms` on."""
        _, at_ms = self._all()
        edges = from_ms + np.arange(0, lasting_ms + 1, 100)
        counts: list[float] = np.histogram(at_ms, edges)[0].astype(float).tolist()
        return counts

    def _own(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.float64]]:
        """Return the messages of this measure's timers, and the time of each."""
        data, at_ms = self._all()
        own = np.isin(data["number"], np.concatenate([_NONE, *self._scheduled])["number"])
        return data[own], at_ms[own]

    def _all(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.float64]]:
        """Return the messages in order of arrival, and the time of each."""
        data = np.concatenate([_NONE, *self._parts])
        return data, np.repeat(np.array(self._at_ms), [len(part) for part in self._parts])


def now_ms() -> float:
    """Return this machine's clock in Unix milliseconds, with a fraction."""
    return time.time_ns() / 1e6


def _records(payloads: Sequence[bytes]) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join(payloads), RECORD)


_NONE: Final = np.empty(0, RECORD)
