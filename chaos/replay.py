"""Replay: what a node's log says became of every timer, told independently of production.

The log's entries decide everything (ADR 0002), so their meaning fits on a page,
and this module is that page: written for the audit, slow and plain, sharing only the codecs with
timer/. Where it and the machine disagree, one of them is wrong, and the audit says `diverged`.

    SCHEDULE  a part whose (producer, sequence) is the producer's next, or that has no producer,
              gives its rows the next seqs; any other part changes nothing. Rows due already
              (due <= last read time) fire at once, in the order of the entry.
    FIRE      pending rows with due <= read time fire in (due, seq) order, up to the limits
    CANCEL    pending rows with that (due, seq) are cancelled
    fires =   gets the next offset of its topic's queue, at this entry's time
    GROUP     ACK counts for offsets that were reserved and are not acked yet

One row of `FATE` per timer, at position seq - 1.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from chaos.history import MARK_NONE, MARK_SIZE
from timer import entry, payloads, segment
from timer.columns import I64, U64, RowArray, decode_schedule
from timer.entry import Damage, Entry, Kind
from timer.errors import CorruptFile
from timer.payloads import CreateGroup, Op, Start
from timer.units import LogIndex

FATE: Final = np.dtype(
    [
        ("due_ms", "<i8"),  # effective
        ("requested_ms", "<i8"),
        ("mark", "<i8"),  # MARK_NONE: the payload is too short to have one
        ("topic", "<u4"),
        ("size", "<u4"),  # of payload, key and headers
        ("payload_size", "<u4"),
        ("end", "<u1"),  # PENDING, FIRED or CANCELLED
        ("producer", "<i8"),
        ("sequence", "<i8"),
        ("schedule_index", "<i8"),
        ("schedule_epoch", "<i8"),
        ("scheduled_at_ms", "<i8"),
        ("end_index", "<i8"),  # this and the next three: 0 while pending
        ("end_epoch", "<i8"),
        ("ended_at_ms", "<i8"),
        ("queue_offset", "<i8"),
    ]
)
ACK: Final = np.dtype([("index", "<i8"), ("epoch", "<i8"), ("time_ms", "<i8")])
PENDING: Final = 0
FIRED: Final = 1
CANCELLED: Final = 2
ENDS: Final = ("pending", "fired", "cancelled")

_BUCKET_BITS: Final = 8
_SCAN_ROWS: Final = 4096
_ROWS_PER_WRITE: Final = 1 << 20


@dataclass(slots=True)
class Group:
    """One group, as far as the audit needs it."""

    group_id: int
    topic: int
    name: str
    start: int
    """First queue offset that it is given."""
    reserved: int
    cursor: int
    """Every offset below is acked."""
    acks: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, ACK))
    """Element i tells of the queue offset start + i: the entry that acked it; index 0: none."""

    def ack(self, offsets: U64, item: Entry) -> None:
        """Count the acks of offsets that were reserved and are not acked yet."""
        size = self.reserved - self.start
        if size > len(self.acks):
            grown = np.zeros(2 * size, ACK)
            grown[: len(self.acks)] = self.acks
            self.acks = grown
        at = offsets[(offsets >= self.start) & (offsets < self.reserved)].astype(np.int64)
        at -= self.start
        at = at[self.acks["index"][at] == 0]
        self.acks[at] = (item.index, item.epoch, item.time_ms)

    def advance(self) -> int:
        """Return the first offset that is not acked."""
        while True:
            at = self.cursor - self.start
            done = self.acks["index"][at : at + _SCAN_ROWS] != 0
            self.cursor += len(done) if done.all() else int(np.argmin(done))
            if not done.all() or not len(done):
                return self.cursor


class Replay:
    """The log's meaning up to the last entry given."""

    def __init__(self) -> None:
        self.last_index = 0
        self.last_read_time_ms = 0
        self.topics: dict[int, str] = {}
        self.groups: dict[int, Group] = {}
        self.timers = 0
        self._table = np.zeros(1024, FATE)
        self._queue_begin: dict[int, int] = {}
        self._queue_end: dict[int, int] = {}
        self._producers: dict[bytes, int] = {}
        self._last_sequence: dict[int, int] = {}
        # Pending rows by due time: bucket -> arrays of positions in the table.
        self._buckets: dict[int, list[I64]] = {}
        self._bucket_order: list[int] = []

    @property
    def table(self) -> npt.NDArray[np.void]:
        """The timers, (n, FATE)."""
        return self._table[: self.timers]

    def apply(self, item: Entry) -> None:
        """Take in the entry after the last one."""
        assert item.index == self.last_index + 1, (item.index, self.last_index)
        self.last_index = item.index
        match item.kind:
            case Kind.SCHEDULE:
                self._schedule(item)
            case Kind.FIRE:
                self._fire(item)
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
            case Kind.EPOCH | Kind.CHECKPOINT:
                pass

    # ---- timers

    def _schedule(self, item: Entry) -> None:
        schedule = decode_schedule(item.payload)
        start = 0
        for producer, sequence, size, _ in schedule.parts.tolist():
            if producer == 0 or self._last_sequence.get(producer, -2) + 1 == sequence:
                self._last_sequence[producer] = sequence
                self._add(item, schedule.rows[start : start + size], producer, sequence)
            start += size

    def _add(self, item: Entry, rows: RowArray, producer: int, sequence: int) -> None:
        first, self.timers = self.timers, self.timers + len(rows)
        if self.timers > len(self._table):
            grown = np.zeros(2 * self.timers, FATE)
            grown[:first] = self._table[:first]
            self._table = grown
        new = self._table[first : self.timers]
        for name in ("due_ms", "requested_ms", "topic", "payload_size"):
            new[name] = rows[name]
        new["size"] = rows["payload_size"] + rows["key_size"] + rows["headers_size"]
        new["mark"] = marks_of(item.payload, rows)
        new["producer"], new["sequence"] = producer, sequence
        new["schedule_index"], new["schedule_epoch"] = item.index, item.epoch
        new["scheduled_at_ms"] = item.time_ms
        at = np.arange(first, self.timers)
        due = new["due_ms"] <= self.last_read_time_ms
        self._enqueue(item, at[due])
        self._wait(at[~due])

    def _wait(self, at: I64) -> None:
        """Put rows among the pending ones."""
        bucket = self._table["due_ms"][at] >> _BUCKET_BITS
        order = np.argsort(bucket, kind="stable")
        at, bucket = at[order], bucket[order]
        for part in np.split(at, np.flatnonzero(np.diff(bucket)) + 1):
            if len(part):
                number = int(self._table["due_ms"][part[0]]) >> _BUCKET_BITS
                if number not in self._buckets:
                    self._buckets[number] = []
                    heapq.heappush(self._bucket_order, number)
                self._buckets[number].append(part)

    def _fire(self, item: Entry) -> None:
        fire = payloads.decode_fire(item.payload)
        found: list[I64] = [np.zeros(0, np.int64)]
        while self._bucket_order and self._bucket_order[0] <= fire.read_time_ms >> _BUCKET_BITS:
            found += self._buckets.pop(heapq.heappop(self._bucket_order))
        at = np.concatenate(found)
        at = at[self._table["end"][at] == PENDING]
        due_ms = self._table["due_ms"][at]
        is_due = due_ms <= fire.read_time_ms
        due = at[is_due][np.lexsort((at[is_due], due_ms[is_due]))]
        count = self._limit(due, fire)
        self._wait(at[~is_due])
        self._wait(due[count:])
        limited = count < len(due)
        self.last_read_time_ms = (
            int(self._table["due_ms"][due[count - 1]]) if limited else fire.read_time_ms
        )
        self._enqueue(item, due[:count])

    def _limit(self, due: I64, fire: payloads.Fire) -> int:
        """Return how many of the due rows one FIRE moves; at least one if there is any."""
        within = np.cumsum(self._table["size"][due], dtype=np.int64) <= fire.bytes_max
        count = min(len(due), fire.rows_max, int(np.count_nonzero(within)))
        return max(count, min(1, len(due)))

    def _enqueue(self, item: Entry, at: I64) -> None:
        """Fire rows, in this order."""
        topics = self._table["topic"][at]
        for topic in np.unique(topics).tolist():
            mine = at[topics == topic]
            start = self._queue_end.get(topic, 0)
            self._queue_end[topic] = start + len(mine)
            self._table["queue_offset"][mine] = np.arange(start, start + len(mine))
        self._end(item, at, FIRED)

    def _cancel(self, item: Entry) -> None:
        due_ms, seq = payloads.decode_cancel(item.payload)
        at = seq.astype(np.int64) - 1
        known = (at >= 0) & (at < self.timers)
        at, due_ms = at[known], due_ms[known]
        alive = (self._table["end"][at] == PENDING) & (self._table["due_ms"][at] == due_ms)
        self._end(item, at[alive], CANCELLED)

    def _end(self, item: Entry, at: I64, how: int) -> None:
        self._table["end"][at] = how
        self._table["end_index"][at] = item.index
        self._table["end_epoch"][at] = item.epoch
        self._table["ended_at_ms"][at] = item.time_ms

    # ---- groups

    def _group(self, item: Entry) -> None:
        for op in payloads.decode_group(item.payload):
            if isinstance(op, CreateGroup):
                self._create_group(op)
                continue
            group = self.groups[op.group]
            if op.op is Op.RESERVE:
                group.reserved = max(group.reserved, int(op.offsets[0]))
            elif op.op is Op.ACK:
                group.ack(op.offsets, item)
                # What every group has acked is gone: a later group does not start before it.
                mine = [each for each in self.groups.values() if each.topic == group.topic]
                begin = min(each.advance() for each in mine)
                self._queue_begin[group.topic] = max(begin, self._queue_begin.get(group.topic, 0))

    def _create_group(self, create: CreateGroup) -> None:
        known = {(group.topic, group.name) for group in self.groups.values()}
        if (create.topic, create.name) in known:
            return
        earliest = create.start is Start.EARLIEST
        start = (self._queue_begin if earliest else self._queue_end).get(create.topic, 0)
        number = len(self.groups) + 1
        self.groups[number] = Group(number, create.topic, create.name, start, start, start)


def marks_of(payload: memoryview, rows: RowArray) -> I64:
    """Return the marks that a SCHEDULE entry's payloads carry, (n, int64)."""
    marks = np.full(len(rows), MARK_NONE, np.int64)
    has = rows["payload_size"] >= MARK_SIZE
    starts = rows["payload_start"][has].astype(np.int64)
    around = starts[:, None] + np.arange(MARK_SIZE)
    marks[has] = np.frombuffer(payload, np.uint8)[around].view("<i8").ravel()
    return marks


# ---- a node's files


def segments(log: Path) -> list[Path]:
    """Return a log's segment files, in order."""
    return sorted(path for path in log.iterdir() if segment.first_of(path.name) is not None)


def entries(path: Path, *, last: bool) -> Iterator[tuple[int, Entry]]:
    """Yield (crc32, entry) of one segment file. Only the `last` one of a log may end torn.

    Raises:
        CorruptFile: the segment is damaged.
    """
    data = memoryview(path.read_bytes())
    try:
        segment.decode_header(path, bytes(data[: segment.HEADER_SIZE]))
    except CorruptFile:
        if last and len(data) <= segment.HEADER_SIZE:
            return  # a crash left it unborn
        raise
    position = segment.HEADER_SIZE
    while (found := entry.frame_at(data, position)) is not None:
        if isinstance(found, Damage):
            if last:
                return
            raise CorruptFile(path, found.position, found.why)
        yield int.from_bytes(data[position : position + 4], "little"), found
        position += entry.HEADER_SIZE + len(found.payload)


def replay(log: Path, *, upto: LogIndex) -> Replay:
    """Return what a node's log says, up to and including the entry `upto`.

    Raises:
        CorruptFile: the log is damaged.
        ValueError: the log does not begin with the first entry, so it can't be replayed.
    """
    paths = segments(log)
    if paths and segment.first_of(paths[0].name) != 1:
        raise ValueError(f"{log} begins with {paths[0].name}: the audit needs the whole log")
    story = Replay()
    for path in paths:
        for _, item in entries(path, last=path == paths[-1]):
            if item.index > upto:
                return story
            story.apply(item)
    return story


# ---- for Spark


def write(story: Replay, node: str, into: Path) -> None:
    """Write `fates`, `acks` and `groups` as Parquet files <into>/<table>/<node>.parquet."""
    for name, batches in (
        ("fates", _fates(story, node)),
        ("acks", _acks(story, node)),
        ("groups", _groups(story, node)),
    ):
        first = next(batches)
        (into / name).mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(into / name / f"{node}.parquet", first.schema) as writer:
            writer.write_table(first)
            for batch in batches:
                writer.write_table(batch)


def _fates(story: Replay, node: str) -> Iterator[pa.Table]:
    names = _names(story)
    for start in range(0, max(story.timers, 1), _ROWS_PER_WRITE):
        rows = story.table[start : start + _ROWS_PER_WRITE]
        columns: dict[str, Any] = {
            "node": pa.repeat(node, len(rows)),
            "seq": np.arange(start + 1, start + len(rows) + 1),
            "topic": names.take(pa.array(rows["topic"])),
            "end": pa.array(ENDS).take(pa.array(rows["end"])),
        }
        for name in FATE.names or ():
            if name not in ("topic", "end", "size", "payload_size"):
                columns[name] = np.ascontiguousarray(rows[name])
        columns["payload_size"] = rows["payload_size"].astype(np.int32)
        ended = pa.array(rows["end"] != PENDING)
        fired = pa.array(rows["end"] == FIRED)
        for name in ("end_index", "end_epoch", "ended_at_ms", "queue_offset"):
            only = fired if name == "queue_offset" else ended
            columns[name] = pc.if_else(only, pa.array(columns[name]), None)
        yield pa.table(columns)


def _acks(story: Replay, node: str) -> Iterator[pa.Table]:
    names = ("node", "topic", "group", "queue_offset", "ack_index", "ack_epoch", "acked_at_ms")
    kinds = [pa.string()] * 3 + [pa.int64()] * 4
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    yield schema.empty_table()
    for group in story.groups.values():
        at = np.flatnonzero(group.acks["index"])
        acks = group.acks[at]
        head = [pa.repeat(text, len(at)) for text in (node, story.topics[group.topic], group.name)]
        columns = [at + group.start, *(np.ascontiguousarray(acks[n]) for n in ACK.names or ())]
        body = [pa.array(column) for column in columns]
        yield pa.table([*head, *body], schema=schema)


def _groups(story: Replay, node: str) -> Iterator[pa.Table]:
    groups = [*story.groups.values()]
    columns = {
        "node": pa.repeat(node, len(groups)),
        "topic": pa.array([story.topics[group.topic] for group in groups], pa.string()),
        "group": pa.array([group.name for group in groups], pa.string()),
        "start_offset": pa.array([group.start for group in groups], pa.int64()),
    }
    yield pa.table(columns)


def _names(story: Replay) -> pa.Array:
    """Return topic names by id; an id without a topic has none."""
    top = max([*story.topics, int(story.table["topic"].max(initial=0))], default=0)
    return pa.array([story.topics.get(topic) for topic in range(top + 1)], pa.string())


def job(log: Path, node: str, *, upto: LogIndex, into: Path) -> dict[str, Any]:
    """Replay one node, write its tables, return its figures: a row of `FIGURES`."""
    story = replay(log, upto=upto)
    write(story, node, into)
    counts = np.bincount(story.table["end"], minlength=len(ENDS)).tolist()
    return {
        "node": node,
        "last_index": story.last_index,
        "last_read_time_ms": story.last_read_time_ms,
        "scheduled": story.timers,
        **dict(zip(ENDS, counts, strict=True)),
    }


FIGURES: Final = (
    "node STRING, last_index BIGINT, last_read_time_ms BIGINT, scheduled BIGINT,"
    " pending BIGINT, fired BIGINT, cancelled BIGINT"
)
