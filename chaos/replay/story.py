"""The story that a log tells: what became of every timer, told independently of production.

The log's entries decide everything (docs/adr/0002-log-entries.md), so their meaning fits on a
page, and this module is that page: written for the audit, sharing only the codecs with timer/.
Where it and the machine disagree, one of them is wrong, and the audit says `diverged`.

    SCHEDULE  a part whose (producer, sequence) is the producer's next, or that has no producer,
              gives its rows the next seqs; any other part changes nothing. Rows due already
              (due <= last read time) fire at once, in the order of the entry.
    FIRE      pending rows with due <= read time fire in (due, seq) order, up to the limits
    CANCEL    pending rows with that (due, seq) are cancelled
    fires =   gets the next offset of its topic's queue, at this entry's time
    GROUP     ACK counts for offsets that were reserved and are not acked yet, ENDED counts an
              attempt more for them, and so does EPOCH for all that may have been handed out

A row's fate leaves memory for a table as it ends, so a story of any length is told in one pass:
what is kept is pending rows (pending.py spills them), and per group what is not acked.
"""

from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from chaos.history import MARK_NONE, MARK_SIZE
from chaos.replay.group import Group
from chaos.replay.pending import I64, ROW, ROWS_MAX, TOMBSTONE, Pending, Rows, Taken
from timer import payloads
from timer.columns import RowArray, decode_schedule, row_bytes
from timer.entry import Entry, Kind
from timer.payloads import CreateGroup, Op, Start

PENDING: Final = 0
FIRED: Final = 1
CANCELLED: Final = 2
DROPPED: Final = 3
ENDS: Final = ("pending", "fired", "cancelled", "dropped")
NONE: Final = -1
"""In an integer column: there is none."""


class Book(Protocol):
    """Where a story is written down, in any order; tables.py has the one that makes Parquet."""

    def fates(self, rows: Rows, **columns: I64 | int) -> None:
        """Take timers that reached their end: `end`, `end_index`, `ended_at_ms`, `queue_offset`."""

    def acks(self, group: Group, acks: Any) -> None:
        """Take acks that counted, of dtype group.ACK."""

    def checkpoint(self, **figures: int) -> None:
        """Take the figures at one CHECKPOINT entry."""


class Story:
    """The log's meaning up to the last entry given."""

    def __init__(self, book: Book, spill: Path, *, pending_max: int = ROWS_MAX) -> None:
        self.last_index = 0
        self.last_read_time_ms = 0
        self.topics: dict[int, str] = {}
        self.groups: dict[int, Group] = {}
        self.timers = 0
        self.fired = 0
        self.epoch_starts: list[tuple[int, int]] = []
        """(index, epoch) of every EPOCH entry."""
        self.queue_end: dict[int, int] = {}
        self._book = book
        self._pending = Pending(spill, rows_max=pending_max)
        self._queue_begin: dict[int, int] = {}
        self._producers: dict[bytes, int] = {}
        self._last_sequence: dict[int, int] = {}

    def apply(self, item: Entry) -> None:
        """Take in the entry after the last one."""
        assert item.index == self.last_index + 1, (item.index, self.last_index)
        self.last_index = item.index
        match item.kind:
            case Kind.SCHEDULE:
                self._schedule(item)
            case Kind.FIRE:
                self._fire(item)
            case Kind.RESCHEDULE:
                raise AssertionError("reschedules are not replayed yet")
            case Kind.CANCEL:
                self._cancel(item)
            case Kind.GROUP:
                self._group(item)
            case Kind.TOPIC:
                name = payloads.decode_topic(item.payload)
                if name not in self.topics.values():
                    self.topics[len(self.topics) + 1] = name
            case Kind.PRODUCER:
                token = payloads.decode_producer(item.payload)
                producer = self._producers.setdefault(token, len(self._producers) + 1)
                self._last_sequence.setdefault(producer, 0)
            case Kind.EPOCH:
                self.epoch_starts.append((item.index, item.epoch))
                for group in self.groups.values():
                    group.begin_epoch(self.queue_end.get(group.topic, 0))
            case Kind.CHECKPOINT:
                self._book.checkpoint(
                    index=item.index,
                    time_ms=item.time_ms,
                    scheduled=self.timers,
                    fired=self.fired,
                )

    def end(self) -> None:
        """Write down what is still pending."""
        for taken in self._pending.rest():
            self._cancelled(taken)
            rows = taken.fired
            self._book.fates(rows, end=PENDING, end_index=NONE, ended_at_ms=NONE, queue_offset=NONE)

    # ---- timers

    def _schedule(self, item: Entry) -> None:
        schedule = decode_schedule(item.payload)
        taken = np.ones(len(schedule.rows), np.bool_)
        start = 0
        for producer, sequence, size, _ in schedule.parts.tolist():
            if producer == 0 or self._last_sequence.get(producer, -2) + 1 == sequence:
                self._last_sequence[producer] = sequence
            else:
                taken[start : start + size] = False
            start += size
        rows = schedule.rows if taken.all() else schedule.rows[taken]
        self._add(item, rows)

    def _add(self, item: Entry, rows: RowArray) -> None:
        new = np.zeros(len(rows), ROW)
        new["due_ms"], new["topic"] = rows["due_ms"], rows["topic"]
        new["size"] = row_bytes(rows)
        new["mark"] = marks_of(item.payload, rows)
        new["index"], new["time_ms"] = item.index, item.time_ms
        new["seq"] = np.arange(self.timers + 1, self.timers + len(rows) + 1)
        self.timers += len(rows)
        due = new["due_ms"] <= self.last_read_time_ms
        self._enqueue(item, new[due])
        self._pending.add(new[~due])

    def _fire(self, item: Entry) -> None:
        fire = payloads.decode_fire(item.payload)
        taken = self._pending.take(fire.read_time_ms, fire.rows_max, fire.bytes_max)
        self.last_read_time_ms = (
            int(taken.fired["due_ms"][-1]) if taken.limited else fire.read_time_ms
        )
        self._cancelled(taken)
        self._enqueue(item, taken.fired)

    def _enqueue(self, item: Entry, rows: Rows) -> None:
        """Fire rows, in this order."""
        if not len(rows):
            return
        offsets = np.zeros(len(rows), np.int64)
        for topic in np.unique(rows["topic"]).tolist():
            mine = rows["topic"] == topic
            start, count = self.queue_end.get(topic, 0), int(np.count_nonzero(mine))
            self.queue_end[topic] = start + count
            offsets[mine] = np.arange(start, start + count)
        self.fired += len(rows)
        self._book.fates(
            rows, end=FIRED, end_index=item.index, ended_at_ms=item.time_ms, queue_offset=offsets
        )

    def _cancel(self, item: Entry) -> None:
        targets = payloads.decode_cancel(item.payload)
        assert isinstance(targets, payloads.Ids), "cancels by key are not replayed yet"
        due_ms, seq = targets.due_ms, targets.seq
        seqs = seq.astype(np.int64)
        known = (seqs > 0) & (seqs <= self.timers)
        rows = np.zeros(int(np.count_nonzero(known)), ROW)
        rows["due_ms"], rows["seq"] = due_ms[known], seqs[known]
        rows["index"], rows["time_ms"], rows["topic"] = item.index, item.time_ms, TOMBSTONE
        self._pending.add(rows)

    def _cancelled(self, taken: Taken) -> None:
        if len(taken.cancelled):
            by = taken.tombstones
            self._book.fates(
                taken.cancelled,
                end=CANCELLED,
                end_index=by["index"],
                ended_at_ms=by["time_ms"],
                queue_offset=NONE,
            )

    # ---- groups

    def _group(self, item: Entry) -> None:
        for op in payloads.decode_group(item.payload):
            if isinstance(op, CreateGroup):
                self._create_group(op)
                continue
            group = self.groups[op.group]
            if op.op is Op.RESERVE:
                group.reserved = max(group.reserved, int(op.offsets[0]))
            elif op.op is Op.ENDED:
                group.end_leases(op.offsets)
            elif op.op is Op.ACK:
                self._book.acks(group, group.ack(op.offsets, item))
                # What every group has acked is gone: a later group does not start before it.
                begin = min(g.cursor for g in self.groups.values() if g.topic == group.topic)
                self._queue_begin[group.topic] = max(begin, self._queue_begin.get(group.topic, 0))

    def _create_group(self, create: CreateGroup) -> None:
        known = {(group.topic, group.name) for group in self.groups.values()}
        if (create.topic, create.name) in known:
            return
        earliest = create.start is Start.EARLIEST
        start = (self._queue_begin if earliest else self.queue_end).get(create.topic, 0)
        number = len(self.groups) + 1
        self.groups[number] = Group(
            number, create.topic, create.name, start, start, start, base=start
        )


def marks_of(payload: memoryview, rows: RowArray) -> I64:
    """Return the marks that a SCHEDULE entry's payloads carry, (n, int64)."""
    marks = np.full(len(rows), MARK_NONE, np.int64)
    has = rows["payload_size"] >= MARK_SIZE
    starts = rows["payload_start"][has].astype(np.int64)
    around = starts[:, None] + np.arange(MARK_SIZE)
    marks[has] = np.frombuffer(payload, np.uint8)[around].view("<i8").ravel()
    return marks
