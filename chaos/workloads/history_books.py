"""A workload's own records of its timers. They decide when the workload is drained, not a verdict.

    asking ──► open in every group ──acked, or expired──► closed in that group
                 │        cancelled, dropped, refused, or no answer: closed in all groups

A mark is open before its request is sent, because an ack may overtake the answer. In memory are
only the open marks, and the gaps between the queue offsets of delivered messages.

Clients do not see the end of two kinds of messages:
  * Messages that expire before their delivery. Their group only counts them, so as many marks may
    stay open, and as many gaps (`expired`).
  * Messages that are deleted with their topic. The next topic of the name begins its offsets anew
    (`begin_anew`).
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from chaos.history.history import MARK_NONE, OpOutcome, payload_of
from timerclient import Batch
from timerclient.rows.series_fields import SERIES_KEY_HEADER

GROUP: Final = "workers"
PAYLOAD_SIZE: Final = 100
_OF_CLUSTER: Final = ("dead-letter-", "prior-", "timer-")
"""Prefixes of headers that the cluster adds to dead letters and occurrences."""
NO_TRAITS: Final = (None, 4)
"""Ordering key and priority of a timer without them."""


@dataclass(slots=True)
class GivenOffsets:
    """The queue offsets of one group's delivered messages: all below `below`, and `above`.

    Counting begins at the lowest offset of the first batch.
    """

    below: int | None = None
    above: set[int] = field(default_factory=set)

    def add(self, offsets: Sequence[int]) -> None:
        """Add the offsets of delivered messages; repetitions are ignored."""
        if not offsets:
            return
        if self.below is None:
            self.below = min(offsets)
        self.above.update(offset for offset in offsets if offset >= self.below)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1

    def close(self) -> None:
        """Close all gaps, because their messages will not be delivered."""
        if self.above:
            self.below = max(self.above) + 1
            self.above.clear()

    @property
    def gaps(self) -> int:
        """Number of missing offsets below the highest delivered one."""
        if self.below is None or not self.above:
            return 0
        return max(self.above) + 1 - self.below - len(self.above)


def headers_of(mark: int) -> dict[str, str]:
    """Return the headers of the timer with this mark, if it is scheduled with a key or headers."""
    return {"mark": str(mark), "empty": ""}


class Books:
    """The records of one workload, shared by its threads."""

    def __init__(
        self, groups: Sequence[str] = (GROUP,), *, payload_size: int = PAYLOAD_SIZE
    ) -> None:
        self.payload_size: Final = payload_size
        """Of every timer, in bytes."""
        self._lock = threading.Lock()
        self._open: dict[str, set[int]] = {group: set() for group in groups}
        self._reach: dict[str, GivenOffsets] = {group: GivenOffsets() for group in groups}
        self._failures: list[BaseException] = []
        self._keys: dict[int, str | None] = {}
        """Mark -> key, of the timers that were scheduled with headers."""
        self._traits: dict[int, tuple[str | None, int]] = {}
        """Mark -> (ordering key, priority), of the timers that were scheduled with them."""
        self._series: dict[int, str] = {}
        """Mark in the payload of a series -> its key."""
        self._first_mark = MARK_NONE
        """Timers with lower marks belonged to a deleted topic of the same name."""
        self.asked = 0
        """Timers whose request has ended, with or without an answer."""
        self.unanswered = 0
        """Those of them whose request did not end with OK."""
        self.delivered = 0
        """Delivered messages, repetitions included."""

    # ---- events

    def join(self, group: str) -> None:
        """Add a group, in which all timers that are requested from now on are expected."""
        with self._lock:
            self._open.setdefault(group, set())
            self._reach.setdefault(group, GivenOffsets())

    def asking(self, marks: Iterable[int]) -> None:
        """Open the marks of timers that are about to be requested and are due within the run."""
        with self._lock:
            for marks_open in self._open.values():
                marks_open.update(marks)

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
        """Record the outcome of a request. Its marks are closed if it is not OK."""
        with self._lock:
            self.asked += len(marks)
            if outcome is not OpOutcome.OK:
                self.unanswered += len(marks)
                self._close(marks)

    def given(self, group: str, offsets: Sequence[int], marks: Sequence[int]) -> None:
        """Record delivered messages."""
        with self._lock:
            self.delivered += len(offsets)
            reach = self._reach.get(group)
            if reach is not None:
                both = zip(offsets, marks, strict=True)
                reach.add([offset for offset, mark in both if mark >= self._first_mark])

    def acked(self, group: str, marks: Iterable[int]) -> None:
        """Close marks in one group: their ack succeeded or may have, or the message expired."""
        with self._lock:
            self._open.get(group, set()).difference_update(marks)

    def cancelled(self, marks: Iterable[int]) -> None:
        """Close marks in all groups: their timers were cancelled or dropped, or may have been."""
        with self._lock:
            self._close(marks)

    def expired(self, group: str, count: int) -> None:
        """Close the marks and gaps of a group without unacked messages, in which `count` expired.

        At most `count` marks and `count` gaps may be left; they are the expired messages. If there
        are more, nothing is closed.
        """
        with self._lock:
            marks, reach = self._open.get(group, set()), self._reach.get(group, GivenOffsets())
            if len(marks) <= count and reach.gaps <= count:
                marks.clear()
                reach.close()

    def buried(self, group: str, count: int) -> None:
        """Close the gaps of a group without unacked messages, of which `count` became dead letters.

        A lease that ends is a failure, also of a message that the consumer had fetched ahead and
        not looked at. If there are more gaps than dead letters, none is closed.
        """
        with self._lock:
            reach = self._reach.get(group, GivenOffsets())
            if reach.gaps <= count:
                reach.close()

    def settled(self, group: str) -> None:
        """Close all marks and gaps of a group that has no messages left: a seek skipped them."""
        with self._lock:
            self._open.get(group, set()).clear()
            self._reach.get(group, GivenOffsets()).close()

    def begin_anew(self, first_mark: int) -> None:
        """Close all marks below `first_mark`, the first of the topic after a deleted one."""
        with self._lock:
            self._first_mark = first_mark
            for group, marks in self._open.items():
                self._open[group] = {mark for mark in marks if mark >= first_mark}
                self._reach[group] = GivenOffsets()

    def _close(self, marks: Iterable[int]) -> None:
        for marks_open in self._open.values():
            marks_open.difference_update(marks)

    # ---- progress

    @property
    def missing(self) -> int:
        """Number of open marks in the group that has most of them."""
        with self._lock:
            return max(map(len, self._open.values()), default=0)

    def waits_for(self, mark: int) -> bool:
        """Return whether the mark is open in any group."""
        with self._lock:
            return any(mark in marks for marks in self._open.values())

    @property
    def gapless(self) -> bool:
        """Whether every group received all queue offsets up to its highest one."""
        with self._lock:
            return not any(reach.above for reach in self._reach.values())

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
