"""What a workload itself knows of its timers; decides when it is over, not whether it went well.

    asking ──► open in every group ──acked, or told EXPIRED──► closed in that group
                 │        cancelled, dropped, or the answer was no or lost: closed in all

A mark is open from before its request is sent, so that an ack that overtakes the answer finds it.
What stays in memory is what is open, and the gaps among the queue offsets that came.

Two things happen to messages that no client sees. They expire before they are handed out: nobody
knows which, but the group knows how many, and so many may be open, or gaps (`expired`). They go
with their topic: the one that is made next has offsets of its own (`begin_anew`).
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from chaos.history.history import MARK_NONE, OpOutcome, payload_of
from timerclient import Batch

GROUP: Final = "workers"
PAYLOAD_SIZE: Final = 100
_OF_LETTERS: Final = ("dead-letter-", "prior-")


@dataclass(slots=True)
class GivenOffsets:
    """Which queue offsets a group has been given: all below `below`, and those in `above`."""

    below: int | None = None
    above: set[int] = field(default_factory=set)

    def add(self, offsets: Sequence[int]) -> None:
        """Note offsets, given for the first time or again."""
        if not offsets:
            return
        if self.below is None:
            self.below = min(offsets)
        self.above.update(offset for offset in offsets if offset >= self.below)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1

    def close(self) -> None:
        """Let there be no gap: what lies in them does not come."""
        if self.above:
            self.below = max(self.above) + 1
            self.above.clear()

    @property
    def gaps(self) -> int:
        """How many offsets below the last one were not given."""
        if self.below is None or not self.above:
            return 0
        return max(self.above) + 1 - self.below - len(self.above)


def headers_of(mark: int) -> dict[str, str]:
    """Return the headers of a timer that has a key, by its mark."""
    return {"mark": str(mark), "empty": ""}


class Books:
    """The books of one workload; its threads share them."""

    def __init__(
        self, groups: Sequence[str] = (GROUP,), *, payload_size: int = PAYLOAD_SIZE
    ) -> None:
        self.payload_size: Final = payload_size
        """Of every timer that is asked for, in bytes."""
        self._lock = threading.Lock()
        self._open: dict[str, set[int]] = {group: set() for group in groups}
        self._reach: dict[str, GivenOffsets] = {group: GivenOffsets() for group in groups}
        self._failures: list[BaseException] = []
        self._keys: dict[int, str | None] = {}
        """Mark -> key, of what was asked for with keys and headers."""
        self._first_mark = MARK_NONE
        """What has a lesser one went with a topic of the same name."""
        self.asked = 0
        """Timers asked for, once their answer was there, or was given up."""
        self.unanswered = 0
        """Of those, how many were not answered OK."""
        self.delivered = 0
        """Messages that came, repetitions included."""

    # ---- what happens

    def join(self, group: str) -> None:
        """Expect everything that is asked for from now on in one more group."""
        with self._lock:
            self._open.setdefault(group, set())
            self._reach.setdefault(group, GivenOffsets())

    def asking(self, marks: Iterable[int]) -> None:
        """Note timers that are about to be asked for, and will be due within the run."""
        with self._lock:
            for marks_open in self._open.values():
                marks_open.update(marks)

    def keyed(self, marks: Sequence[int], keys: Sequence[str | None]) -> None:
        """Note timers that are asked for with `headers_of` each, and with these keys."""
        with self._lock:
            self._keys.update(zip(marks, keys, strict=True))

    def check_content(self, batch: Batch, marks: Sequence[int]) -> None:
        """Compare payloads, keys and headers with those that were asked for, byte for byte.

        A timer that is not `keyed` was asked for without both. A dead letter has more headers,
        which say what it was.

        Raises:
            AssertionError: they differ.
        """
        for at, (payload, mark) in enumerate(zip(batch.payloads, marks, strict=True)):
            key, headers = batch.key(at), batch.headers(at)
            own = {k: v for k, v in headers.items() if not k.startswith(_OF_LETTERS)}
            asked = self._keys.get(mark), headers_of(mark) if mark in self._keys else {}
            assert payload == payload_of(mark, self.payload_size), (mark, payload)
            assert (key, own) == asked, (mark, key, headers, asked)

    def answered(self, marks: Sequence[int], outcome: OpOutcome) -> None:
        """Note the answer; of what was not answered OK, nothing is expected."""
        with self._lock:
            self.asked += len(marks)
            if outcome is not OpOutcome.OK:
                self.unanswered += len(marks)
                self._close(marks)

    def given(self, group: str, offsets: Sequence[int], marks: Sequence[int]) -> None:
        """Note messages that came."""
        with self._lock:
            self.delivered += len(offsets)
            reach = self._reach.get(group)
            if reach is not None:
                both = zip(offsets, marks, strict=True)
                reach.add([offset for offset, mark in both if mark >= self._first_mark])

    def acked(self, group: str, marks: Iterable[int]) -> None:
        """Note timers whose ack was confirmed, or may have been, or that expired there."""
        with self._lock:
            self._open.get(group, set()).difference_update(marks)

    def cancelled(self, marks: Iterable[int]) -> None:
        """Note timers that were cancelled or dropped, or may have been."""
        with self._lock:
            self._close(marks)

    def expired(self, group: str, count: int) -> None:
        """Note that a group has none left of what fired, and that so many expired in it.

        More than that can't be missing for it; if less is, that is what expired.
        """
        with self._lock:
            marks, reach = self._open.get(group, set()), self._reach.get(group, GivenOffsets())
            if len(marks) <= count and reach.gaps <= count:
                marks.clear()
                reach.close()

    def settled(self, group: str) -> None:
        """Note that a group has nothing left: what did not come to it was passed over."""
        with self._lock:
            self._open.get(group, set()).clear()
            self._reach.get(group, GivenOffsets()).close()

    def begin_anew(self, first_mark: int) -> None:
        """Note that the topic was deleted; timers of the next one have this mark or later ones."""
        with self._lock:
            self._first_mark = first_mark
            for group, marks in self._open.items():
                self._open[group] = {mark for mark in marks if mark >= first_mark}
                self._reach[group] = GivenOffsets()

    def _close(self, marks: Iterable[int]) -> None:
        for marks_open in self._open.values():
            marks_open.difference_update(marks)

    # ---- where it stands

    @property
    def missing(self) -> int:
        """How many timers are expected yet by some group."""
        with self._lock:
            return max(map(len, self._open.values()), default=0)

    def waits_for(self, mark: int) -> bool:
        """Return whether some group still expects this timer."""
        with self._lock:
            return any(mark in marks for marks in self._open.values())

    @property
    def gapless(self) -> bool:
        """Whether every group was given every queue offset up to the last that it was given."""
        with self._lock:
            return not any(reach.above for reach in self._reach.values())

    # ---- threads that fail

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Keep what is raised inside for `check`: nobody else would see it on this thread."""
        try:
            yield
        except BaseException as failure:  # noqa: BLE001 -- raised again by `check`
            self._failures.append(failure)

    def check(self) -> None:
        """Raise the first failure of any thread, if there was one."""
        if self._failures:
            raise self._failures[0]
