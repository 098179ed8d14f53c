"""A workload's own records of its timers: their requested content, and numbers of events.

Clients compare the content of each message with them. The audit judges everything else.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from chaos.history.history import OpOutcome, payload_of
from timerclient import Batch
from timerclient.rows.series_fields import SERIES_KEY_HEADER

GROUP: Final = "workers"
PAYLOAD_SIZE: Final = 100
_OF_CLUSTER: Final = ("dead-letter-", "prior-", "timer-")
"""Prefixes of headers that the cluster adds to dead letters and occurrences."""


class Content(NamedTuple):
    """The requested content of a timer, beside its payload."""

    key: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    ordering_key: str | None = None
    priority: int = 4
    series: str | None = None
    """Key of the series, if the mark is that of its occurrences."""


def headers_of(mark: int) -> dict[str, str]:
    """Return the headers of the timer with this mark, if it is scheduled with headers."""
    return {"mark": str(mark), "empty": ""}


class Books:
    """The records of one workload."""

    def __init__(self, *, payload_size: int = PAYLOAD_SIZE) -> None:
        self.payload_size: Final = payload_size
        """Of every timer, in bytes."""
        self._contents: dict[int, Content] = {}
        """By mark. Other timers have a payload only."""
        self.asked = 0
        """Timers of ended requests, with or without an answer."""
        self.unanswered = 0
        """Those among them of requests that did not end with OK."""
        self.delivered = 0
        """Delivered messages, repetitions included."""

    def expect(self, marks: Sequence[int], **columns: Sequence[Any]) -> None:
        """Record the content of timers before they are scheduled. `columns`: of Content."""
        if not columns:
            return
        rows = zip(marks, *columns.values(), strict=True)
        for mark, *row in rows:
            self._contents[mark] = Content(**dict(zip(columns, row, strict=True)))

    def check_content(self, batch: Batch, marks: Sequence[int]) -> None:
        """Compare messages with their requested content, byte for byte.

        A dead letter or an occurrence has additional headers, which describe its origin.

        Raises:
            AssertionError: they differ.
        """
        for at, (payload, mark) in enumerate(zip(batch.payloads, marks, strict=True)):
            headers = batch.headers(at)
            own = {k: v for k, v in headers.items() if not k.startswith(_OF_CLUSTER)}
            traits = batch.ordering_key(at), batch.priority(at), headers.get(SERIES_KEY_HEADER)
            content, asked = Content(batch.key(at), own, *traits), self._contents.get(mark)
            assert payload == payload_of(mark, self.payload_size), (mark, payload)
            assert content == (asked or Content()), (mark, content, asked)

    def count_end(self, marks: Sequence[int], outcome: OpOutcome) -> None:
        """Count the timers of a request that ended."""
        self.asked += len(marks)
        self.unanswered += len(marks) * (outcome is not OpOutcome.OK)
