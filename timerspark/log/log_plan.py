"""The plan of a read, made once: the segments of a log, and the names of topics and groups.

Entries name topics, groups and timers by numbers that count up. So the numbers follow from all
creations before them, in the log or in a manifest. The plan is made from the heads of all frames,
and from the whole entries that create, delete or number anything:

    names    from the first entry of the log if it is the cluster's first; and from the manifest
    seqs     from a mark of the manifest's trace on (timer/state/firing_trace.py), up to the
             manifest's entry: no other notes tell which requests were repeats
    lives    a log that began again replaces the end of its life before; a gap between them is an
             error
"""

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from pyspark.sql.datasource import InputPartition

from timer.entries import entry_frame, payloads
from timer.entries.entry_frame import Entry, EntryKind, FrameHead
from timer.entries.payloads import CreateGroup, DeleteTopic, GroupOp, Move, Op
from timer.entries.series_payloads import count_occurrences
from timer.files import segment
from timer.files.data_directory import read_identity
from timer.files.disk import RealDisk
from timer.model.columns import parts_of, rows_of
from timer.model.timer_errors import StorageError
from timer.model.timer_id import salt_of
from timer.model.units import LogIndex, Seq, UnixMs
from timer.recovery import manifest
from timer.state.firing_trace import SeqMark
from timerspark.log.log_options import LogFilter
from timerspark.log.node_folders import NodeFolders
from timerspark.log.segment_files import Segment

_NAMING: Final = frozenset({EntryKind.TOPIC, EntryKind.GROUP})
_NUMBERING: Final = frozenset(
    {EntryKind.SCHEDULE, EntryKind.RESCHEDULE, EntryKind.GROUP, EntryKind.OCCURRENCES}
)


class LogGap(Exception):
    """Entries are missing between two lives of a log, or before the first entry wanted."""


class Seqs:
    """The seqs that entries issue, as far as marks tell them."""

    def __init__(self, next_seq: int | None, marks: Mapping[int, SeqMark], end: int) -> None:
        self.next_seq = next_seq
        """Seq that the next entry issues first. None: not known."""
        self._marks = marks
        self.end = end
        """The first entry whose seqs are not known."""

    def at(self, index: int) -> SeqMark | None:
        """Come to an entry; return its mark, if it has one."""
        mark = self._marks.get(index)
        if mark is not None:
            self.next_seq = mark.next_seq
        if index >= self.end:
            self.next_seq = None
        return mark

    def are_issued_by(self, kind: EntryKind) -> bool:
        """Return whether the seqs of this entry are known, and its kind issues some."""
        return self.next_seq is not None and kind in _NUMBERING

    def issue(self, count: int) -> int | None:
        """Issue seqs; return the first one. None: not known."""
        first = self.next_seq
        if first is not None:
            self.next_seq = first + count
        return first


@dataclass
class PlannedSegment(InputPartition):
    """One segment of the log that is read."""

    part: Segment
    """Of a store: with a path in its folder."""
    end_index: int | None
    """The index before which a later life of the log continues. None: no later one does."""
    next_seq: int | None
    marks: tuple[SeqMark, ...]
    seqs_end: int

    def seqs(self) -> Seqs:
        """Return the seqs from its first entry on."""
        return Seqs(self.next_seq, {mark.entry: mark for mark in self.marks}, self.seqs_end)


@dataclass(slots=True)
class Names:
    """Names of topics and groups by their numbers, deleted ones included."""

    topics: dict[int, str] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)


class Naming:
    """Follows the creations and deletions in a log, as timer/state/machine.py numbers them."""

    def __init__(self, state: manifest.ManifestBody | None) -> None:
        """`state`: the manifest from which names are known. None: the log begins with entry 1."""
        self.names = Names()
        self._begin = 0 if state is None else int(state["index"])
        numbers: list[int] = state["next"] if state is not None else [1, 1, 1]
        _, self._next_topic, self._next_group = numbers
        self._live: dict[int, dict[str, int]] = {}
        """Existing topic -> its groups by name."""
        self._by_name: dict[str, int] = {}
        for topic in state["topics"] if state else ():
            self._add_topic(topic["id"], topic["name"])
            for group in topic["groups"]:
                self._add_group(topic["id"], group["name"], group["id"])

    def apply(self, kind: EntryKind, index: int, payload: memoryview) -> None:
        """Take the next entry of the kinds TOPIC and GROUP."""
        if index <= self._begin:
            return
        if kind is EntryKind.GROUP:
            for op in payloads.decode_group(payload):
                self._group_op(op)
            return
        topic_op = payloads.decode_topic(payload)
        if isinstance(topic_op, DeleteTopic):
            if self._live.pop(topic_op.topic, None) is not None:
                del self._by_name[self.names.topics[topic_op.topic]]
        else:
            self._topic_of(topic_op.name)

    def _topic_of(self, name: str) -> int:
        if name not in self._by_name:
            self._add_topic(self._next_topic, name)
            self._next_topic += 1
        return self._by_name[name]

    def _add_topic(self, topic: int, name: str) -> None:
        self.names.topics[topic] = name
        self._by_name[name] = topic
        self._live[topic] = {}

    def _add_group(self, topic: int, name: str, number: int | None = None) -> None:
        if number is None:
            number, self._next_group = self._next_group, self._next_group + 1
        self.names.groups[number] = name
        self._live[topic][name] = number

    def _group_op(self, op: payloads.AnyOp) -> None:
        groups = self._live.get(op.topic)
        if groups is None:
            return
        if isinstance(op, CreateGroup):
            if op.name not in groups:
                self._add_group(op.topic, op.name)
        elif isinstance(op, Move):
            to = self._topic_of(op.to)
            if op.to_group and op.to_group not in self._live[to]:
                self._add_group(to, op.to_group)
        elif isinstance(op, GroupOp) and op.op in (Op.SEEK, Op.DELETE):
            name = self.names.groups.get(op.group, "")
            if groups.get(name) == op.group:
                del groups[name]
                if op.op is Op.SEEK:
                    self._add_group(op.topic, name)


@dataclass(slots=True)
class LogPlan:
    """The segments that tasks read, and the names of their topics and groups."""

    segments: list[PlannedSegment]
    names: Names
    salt: int | None
    """The salt of the cluster's timer ids. None: not known."""


def plan(folders: NodeFolders, log_filter: LogFilter, *, fail_on_loss: bool) -> LogPlan:
    """Return the plan to read one node's log.

    Raises:
        FileNotFoundError: there is no segment of a log.
        LogGap: entries are missing between its lives, or it begins after the first entry wanted.
        ValueError: several nodes are wanted, or an entry can't be decoded.
    """
    logs = folders.logs()
    log_filter.check_nodes(logs)
    if log_filter.nodes is not None and len(log_filter.nodes) != 1:
        raise ValueError(
            f"node = {', '.join(sorted(log_filter.nodes))}: events are read of one node"
        )
    node = min(log_filter.nodes or logs, key=lambda name: _span(logs[name]))
    lives = [life for life in logs[node] if life]
    data = folders.data()[node]
    if not lives:
        raise FileNotFoundError(f"{data}: has no segment of a log")
    state = manifest.read(RealDisk(), data / "state")
    first = lives[0][0].first
    if fail_on_loss and first > log_filter.index_min > 0:
        raise _gap(log_filter.index_min, lives[0][0])
    naming = None
    if first == 1 or (state is not None and first <= int(state["index"]) + 1):
        naming = Naming(None if first == 1 else state)
    scan = _Scan(log_filter, naming, _seqs(state))
    for number, life in enumerate(lives, 1):
        until = min((later[0].first for later in lives[number:]), default=None)
        scan.life(life, until, fail_on_loss=fail_on_loss)
    names = Names() if naming is None else naming.names
    for topic in () if state is None else state["topics"]:
        names.topics[topic["id"]] = topic["name"]
        names.groups.update((group["id"], group["name"]) for group in topic["groups"])
    return LogPlan(scan.segments, names, _salt(data))


def _span(lives: list[list[Segment]]) -> tuple[float, int]:
    """Return a key for `min`: the log that begins first; among equals, the one that ends last."""
    parts = [part for life in lives for part in life]
    if not parts:
        return float("inf"), 0
    last = max((head.index for head, _ in frame_heads(parts[-1].path)), default=parts[-1].first - 1)
    return parts[0].first, -last


def _seqs(state: manifest.ManifestBody | None) -> Seqs:
    if state is None:
        return Seqs(None, {}, 0)
    marks = [SeqMark(LogIndex(at), Seq(seq), refused) for at, seq, refused in state["trace"][0]]
    return Seqs(None, {mark.entry: mark for mark in marks}, int(state["index"]) + 1)


def _salt(data: Path) -> int | None:
    try:
        return salt_of(read_identity(RealDisk(), data).cluster_id)
    except (FileNotFoundError, StorageError):
        return None


class _Scan:
    """Reads the heads of all frames of a log, in their order."""

    def __init__(self, log_filter: LogFilter, naming: Naming | None, seqs: Seqs) -> None:
        self.segments: list[PlannedSegment] = []
        self._filter = log_filter
        self._naming = naming
        self._seqs = seqs
        self._last = 0
        """The last entry that was seen. 0: none."""

    def life(self, parts: list[Segment], until: int | None, *, fail_on_loss: bool) -> None:
        """Read one life of the log, up to the entry with which a later one begins.

        A gap in the life is a missing or damaged segment. The task that reads it reports that.
        """
        for part in parts:
            if until is not None and part.first >= until:
                return
            if self._last and part.first > self._last + 1:
                if fail_on_loss and part is parts[0]:
                    raise _gap(self._last + 1, part)
                self._naming = self._seqs.next_seq = None  # the gap may have issued numbers
            self._segment(part, until)

    def _segment(self, part: Segment, until: int | None) -> None:
        seqs, naming, marks = self._seqs, self._naming, list[SeqMark]()
        next_seq, times = seqs.next_seq, list[UnixMs]()
        for head, payload in frame_heads(part.path):
            if until is not None and head.index >= until:
                break
            mark = seqs.at(head.index)
            if mark is not None:
                marks.append(mark)
            numbers = seqs.are_issued_by(head.kind)
            names = head.kind in _NAMING and naming is not None
            if numbers or names:
                if (data := payload()) is None:
                    break
                try:
                    if numbers:
                        seqs.issue(issued_count(head.kind, data, mark))
                    if naming is not None and names:
                        naming.apply(head.kind, head.index, data)
                except (ValueError, struct.error) as error:
                    raise decode_error(part, head.index, error) from error
            self._last = head.index
            times[1:] = [head.time_ms] if times else [head.time_ms] * 2
        end = part.end if until is None else min(until, part.end or until)
        begin_ms = times[0] if times else UnixMs(0)
        end_ms = times[-1] if self._last + 1 == end else None  # else its heads were not all read
        if self._filter.accepts_span(part.first, end) and self._filter.accepts_times(
            begin_ms, end_ms
        ):
            self.segments.append(PlannedSegment(part, until, next_seq, tuple(marks), seqs.end))


def _gap(first: int, part: Segment) -> LogGap:
    """Return the error of entries that are missing before a segment, from `first` on."""
    gap = f"entries {first} to {part.first - 1} are missing before {part.path}"
    return LogGap(f"{gap}: set fail_on_loss to false to read the others")


def frame_heads(path: Path) -> Iterator[tuple[FrameHead, Callable[[], memoryview | None]]]:
    """Yield the head of each frame with a function that reads its payload. None: it is damaged.

    At a damaged head it ends: the task that reads the segment reports it, or accepts a torn end.
    """
    with path.open("rb") as file:  # not mapped: a running node may cut it
        size, at = os.fstat(file.fileno()).st_size, segment.HEADER_SIZE
        while head := entry_frame.head_at(_bytes(file, at, entry_frame.HEADER_SIZE), 0, size - at):
            length = entry_frame.HEADER_SIZE + head.length
            yield head, partial(_payload, file, at, length)
            at += length


def _bytes(file: BinaryIO, at: int, size: int) -> memoryview:
    """Return `size` bytes at a position, fewer at the end of the file."""
    return memoryview(os.pread(file.fileno(), size, at))


def _payload(file: BinaryIO, at: int, size: int) -> memoryview | None:
    found = entry_frame.frame_at(_bytes(file, at, size), 0)
    return memoryview(bytes(found.payload)) if isinstance(found, Entry) else None


def decode_error(part: Segment, index: int, error: Exception) -> ValueError:
    """Return the error of an entry whose checksum is right, and whose payload is not."""
    return ValueError(f"{part.path}: entry {index} can't be decoded: {error}")


def issued_count(kind: EntryKind, payload: memoryview, mark: SeqMark | None) -> int:
    """Return how many seqs an entry of a kind that issues seqs does issue.

    Raises:
        ValueError, struct.error: the payload is malformed.
    """
    if kind is EntryKind.RESCHEDULE:
        return payloads.count_targets(payload)[0]
    if kind is EntryKind.OCCURRENCES:
        return count_occurrences(payload)
    if kind is EntryKind.GROUP:
        ops = payloads.decode_group(payload)
        return sum(len(op.offsets) for op in ops if isinstance(op, Move))
    if mark is None:
        return rows_of(payload)
    parts, _ = parts_of(payload)
    sizes = parts["rows"].tolist()
    return sum(size for number, size in enumerate(sizes) if not mark.is_refused(number))
