"""A workload's own records of its timers: their requested content, and numbers of events.

Clients compare the content of each message with them. The audit judges everything else.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from chaos.history.history import OpOutcome, payload_of
from timerclient import Batch
from timerclient.rows.series_fields import SERIES_KEY_HEADER

GROUP: Final = "workers"
PAYLOAD_SIZE: Final = 100
_OF_CLUSTER: Final = ("dead-letter-", "prior-", "timer-")
"""Prefixes of headers that the cluster adds to dead letters and occurrences."""
NO_TRAITS: Final = (None, 4)
"""Ordering key and priority of a timer without them."""


def headers_of(mark: int) -> dict[str, str]:
    """Return the headers of the timer with this mark, if it is scheduled with a key or headers."""
    return {"mark": str(mark), "empty": ""}


class Books:
    """The records of one workload, shared by its threads."""

    def __init__(self, *, payload_size: int = PAYLOAD_SIZE) -> None:
        self.payload_size: Final = payload_size
        """Of every timer, in bytes."""
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []
        self._keys: dict[int, str | None] = {}
        """Mark -> key, of the timers that were scheduled with headers."""
        self._traits: dict[int, tuple[str | None, int]] = {}
        """Mark -> (ordering key, priority), of the timers that were scheduled with them."""
        self._series: dict[int, str] = {}
        """Mark in the payload of a series -> its key."""
        self.asked = 0
        """Timers whose request has ended, with or without an answer."""
        self.unanswered = 0
        """Those of them whose request did not end with OK."""
        self.delivered = 0
        """Delivered messages, repetitions included."""

    # ---- events

    def keyed(self, marks: Sequence[int], keys: Sequence[str | None]) -> None:
        """Record timers that are scheduled with these keys and the headers of `headers_of`."""
        with self._lock:
            self._keys.update(zip(marks, keys, strict=True))

    def with_traits(self, marks: Sequence[int], traits: Sequence[tuple[str | None, int]]) -> None:
        """Record timers that are scheduled with these ordering keys and priorities."""
        with self._lock:
            self._traits.update(zip(marks, traits, strict=True))

    def recurring(self, mark: int, key: str) -> None:
        """Record a series: each of its occurrences has this mark in the payload."""
        with self._lock:
            self._series[mark] = key

    def check_content(self, batch: Batch, marks: Sequence[int]) -> None:
        """Compare payloads, keys and headers with the requested ones, byte for byte.

        A timer that is not `keyed` was scheduled without key and headers. A dead letter or an
        occurrence has additional headers, which describe its origin.

        Raises:
            AssertionError: they differ.
        """
        for at, (payload, mark) in enumerate(zip(batch.payloads, marks, strict=True)):
            key, headers = batch.key(at), batch.headers(at)
            own = {k: v for k, v in headers.items() if not k.startswith(_OF_CLUSTER)}
            asked = self._keys.get(mark), headers_of(mark) if mark in self._keys else {}
            assert payload == payload_of(mark, self.payload_size), (mark, payload)
            assert (key, own) == asked, (mark, key, headers, asked)
            traits = batch.ordering_key(at), batch.priority(at)
            assert traits == self._traits.get(mark, NO_TRAITS), (mark, traits)
            assert headers.get(SERIES_KEY_HEADER) == self._series.get(mark), (mark, headers)

    def answered(self, marks: Sequence[int], outcome: OpOutcome) -> None:
        """Count the timers of a request that ended."""
        with self._lock:
            self.asked += len(marks)
            self.unanswered += len(marks) * (outcome is not OpOutcome.OK)

    def given(self, messages: int) -> None:
        """Count delivered messages."""
        with self._lock:
            self.delivered += messages

    # ---- threads that fail

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Keep an exception of the block for `check`, because no other code sees it."""
        try:
            yield
        except BaseException as failure:  # noqa: BLE001 -- raised again by `check`
            self._failures.append(failure)

    def check(self) -> None:
        """Raise the first exception that a thread of the workload kept, if there is one."""
        if self._failures:
            raise self._failures[0]
