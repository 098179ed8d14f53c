"""The story that a log tells: what became of every timer, told independently of production.

The log's entries decide everything (docs/adr/0002-log-entries.md), so their meaning fits on a
page, and this module is that page: written for the audit, sharing only the codecs with timer/.
Where it and the machine disagree, one of them is wrong, and the audit says `diverged`.

    SCHEDULE  a part whose (producer, sequence) is the producer's next, or that has no producer and
              no request id that is remembered, gives its rows the next seqs; any other part
              changes nothing. Rows due already
              (due <= last read time) fire at once, in the order of the entry. A row whose key a
              pending timer of its topic has is rejected or kept, or replaces that timer.
    FIRE      pending rows with due <= read time fire in (due, seq) order, up to the limits
    CANCEL    pending rows with that (due, seq), or topic and key, are cancelled
    RESCHEDULE  takes as many seqs as it has targets. Those that are pending end, and a row with
              the next seq, the new due time and the same key and payload begins: as many as have
              payloads of MOVED_BYTES_MAX together, but one at least
    fires =   gets the next offset of its topic's queue, at this entry's time
    GROUP     ACK counts for offsets that were reserved and are not acked yet, ENDED and NACK
              count an attempt more for them, and so does EPOCH for all that may have been handed
              out. MOVE takes as many seqs as it has offsets; those that are not acked yet are
              acked, and fire at once in another topic. That was not asked for by a client, so it
              has no row of its own in the tables

A row's fate leaves memory for a table as it ends, so a story of any length is told in one pass:
what is kept is pending rows (pending.py spills them), per group what is not acked, and who has
which key. 62 bits of a hash stand for topic and key: that two of a hundred million keys share them
has a chance of one in a thousand, and would be told as a divergence.
"""

import hashlib
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from chaos.history import MARK_NONE, MARK_SIZE
from chaos.replay.group import Group
from chaos.replay.pending import I64, ROW, ROWS_MAX, TOMBSTONE, Pending, Rows, Taken
from timer import payloads
from timer.columns import U32, Binary, OnConflict, RowArray, decode_schedule, gather, row_bytes
from timer.entry import Entry, Kind
from timer.payloads import (
    MOVED_GROUP,
    AlterGroup,
    CreateGroup,
    GroupOp,
    Ids,
    Move,
    Nack,
    Op,
    Start,
    Targets,
)
from timer.policies import decode_policy
from timer.producers import IDLE_MS_MAX
from timer.units import TopicId

PENDING: Final = 0
FIRED: Final = 1
CANCELLED: Final = 2
DROPPED: Final = 3
REPLACED: Final = 4
"""Its key was taken over by another timer."""
RESCHEDULED: Final = 5
"""Another row goes on with its key and payload."""
REJECTED: Final = 6
KEPT: Final = 7
"""As REJECTED, no timer: a pending one has its key."""
ENDS: Final = (
    *("pending", "fired", "cancelled", "dropped"),
    *("replaced", "rescheduled", "rejected", "kept"),
)
MOVED_BYTES_MAX: Final = 4 << 20
NONE: Final = -1
"""In an integer column: there is none."""


class Book(Protocol):
    """Where a story is written down, in any order; tables.py has the one that makes Parquet."""

    def fates(self, rows: Rows, **columns: I64 | int) -> None:
        """Take timers that reached their end: `end`, `end_index`, `ended_at_ms`, `queue_offset`."""

    def acks(self, group: Group, acks: Any) -> None:
        """Take acks that counted, of dtype group.ACK."""

    def nacks(self, group: Group, nacks: Any) -> None:
        """Take nacks that counted, of dtype group.NACK."""

    def checkpoint(self, **figures: int) -> None:
        """Take the figures at one CHECKPOINT entry."""


class Story:
    """The log's meaning up to the last entry given."""

    def __init__(self, book: Book, spill: Path, *, pending_max: int = ROWS_MAX) -> None:
        self.last_index = 0
        self.last_read_time_ms = 0
        self.topics: dict[int, str] = {}
        self.groups: dict[int, Group] = {}
        self.seqs = 0
        """The last seq issued."""
        self.timers = 0
        """Rows that became timers."""
        self.fired = 0
        self.moved = 0
        """Of both, those that a MOVE made."""
        self.epoch_starts: list[tuple[int, int]] = []
        """(index, epoch) of every EPOCH entry."""
        self.queue_end: dict[int, int] = {}
        self._book = book
        self._pending = Pending(spill, rows_max=pending_max)
        self._queue_begin: dict[int, int] = {}
        self._producers: dict[bytes, int] = {}
        self._last_sequence: dict[int, int] = {}
        self._used_at_ms: dict[int, int] = {}
        """Of those that did not expire."""
        self._issued = 0
        self._requests: dict[bytes, int] = {}
        """Request id -> until when it is remembered."""
        self._holders: dict[int, tuple[int, int]] = {}
        """Key -> (due, seq) of the pending timer that has it."""
        self._key_of: dict[int, int] = {}
        """The seq of each of these -> its key."""

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
                self._reschedule(item)
            case Kind.CANCEL:
                self._cancel(item)
            case Kind.GROUP:
                self._group(item)
            case Kind.TOPIC | Kind.PRODUCER | Kind.POLICY:
                self._settings(item)
            case Kind.EPOCH:
                self.epoch_starts.append((item.index, item.epoch))
                for group in self.groups.values():
                    group.begin_epoch(self.queue_end.get(group.topic, 0))
            case Kind.CHECKPOINT:
                self._expire(item)
                self._book.checkpoint(
                    index=item.index,
                    time_ms=item.time_ms,
                    scheduled=self.timers - self.moved,
                    fired=self.fired - self.moved,
                )

    def _settings(self, item: Entry) -> None:
        if item.kind is Kind.POLICY:
            _check_policy(item)
        elif item.kind is Kind.TOPIC:
            self._topic_of(payloads.decode_topic(item.payload))
        else:
            token = payloads.decode_producer(item.payload)
            producer = self._producers.get(token, 0)
            if producer not in self._last_sequence:
                self._issued += 1
                self._producers[token] = producer = self._issued
                self._last_sequence[producer] = 0
            self._used_at_ms[producer] = item.time_ms

    def _expire(self, item: Entry) -> None:
        """Forget producers that were idle for long."""
        idle_ms = payloads.decode_checkpoint(item.payload) or IDLE_MS_MAX
        for producer, used_at_ms in [*self._used_at_ms.items()]:
            if item.time_ms - used_at_ms > idle_ms:
                del self._used_at_ms[producer], self._last_sequence[producer]

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
        for head, request in zip(schedule.parts.tolist(), schedule.requests, strict=True):
            producer, sequence, size, _ = head
            if request is not None:
                known_until_ms = self._requests.get(request.text, -1)
                if known_until_ms < item.time_ms:
                    self._requests[request.text] = request.until_ms
                else:  # repeated, or another one under its id
                    taken[start : start + size] = False
            elif self._last_sequence.get(producer, -2) + 1 == sequence:
                self._last_sequence[producer] = sequence
                self._used_at_ms[producer] = item.time_ms
            elif producer:
                taken[start : start + size] = False
            start += size
        rows = schedule.rows[taken]
        new = self._numbered(item, len(rows))
        for name in ("due_ms", "topic", "payload_size"):
            new[name] = rows[name]
        new["size"] = row_bytes(rows)
        new["mark"] = marks_of(item.payload, rows)
        keyed = np.flatnonzero(rows["key_size"])
        if len(keyed):
            column = gather(rows[keyed], {0: item.payload}, "key")
            new["key"][keyed] = hashed(rows["topic"][keyed], column)
            modes = np.repeat(schedule.parts["on_conflict"], schedule.parts["rows"])[taken]
            new = self._decided(item, new, keyed, modes)
        self._admit(item, new)

    def _numbered(self, item: Entry, count: int) -> Rows:
        """Return rows with the next seqs, scheduled by this entry."""
        new = np.zeros(count, ROW)
        new["index"], new["time_ms"] = item.index, item.time_ms
        new["seq"] = np.arange(self.seqs + 1, self.seqs + count + 1)
        self.seqs += count
        return new

    def _decided(self, item: Entry, new: Rows, keyed: I64, modes: U32) -> Rows:
        """Keep keys unique; write down the rows that become no timers, return the others."""
        ends = np.full(len(new), PENDING)
        for at in keyed.tolist():
            held = self._holders.get(int(new["key"][at]))
            if held is not None:
                new["other"][at] = held[1]
                if modes[at] != OnConflict.REPLACE:
                    ends[at] = KEPT if modes[at] == OnConflict.KEEP else REJECTED
                    continue
                self._end(item, held, REPLACED)
            self._hold(new[at])
        for end in (REJECTED, KEPT):
            rows, at_ms = new[ends == end], item.time_ms
            self._book.fates(
                rows, end=end, end_index=item.index, ended_at_ms=at_ms, queue_offset=NONE
            )
        made: Rows = new[ends == PENDING]
        return made

    def _hold(self, row: np.void) -> None:
        """Let a new timer have its key, which is free; one that is due already is never pending."""
        key, due_ms, seq = int(row["key"]), int(row["due_ms"]), int(row["seq"])
        assert key not in self._holders, (key, seq)
        if due_ms > self.last_read_time_ms:
            self._holders[key] = due_ms, seq
            self._key_of[seq] = key

    def _free(self, due_ms: I64, seq: I64) -> None:
        """Timers end: what keys they had, nobody has."""
        if not self._key_of:
            return
        for timer in zip(due_ms.tolist(), seq.tolist(), strict=True):
            key = self._key_of.get(timer[1])
            if key is not None and self._holders[key] == timer:
                del self._holders[key], self._key_of[timer[1]]

    def _admit(self, item: Entry, new: Rows) -> None:
        self.timers += len(new)
        due = new["due_ms"] <= self.last_read_time_ms
        self._enqueue(item, new[due])
        self._pending.add(new[~due])

    def _fire(self, item: Entry) -> None:
        fire = payloads.decode_fire(item.payload)
        taken = self._pending.take(fire.read_time_ms, fire.rows_max, fire.bytes_max)
        self.last_read_time_ms = (
            int(taken.fired["due_ms"][-1]) if taken.limited else fire.read_time_ms
        )
        keyed = taken.fired[taken.fired["key"] != 0]
        self._free(keyed["due_ms"], keyed["seq"])
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
        if not isinstance(targets, Ids):
            for held in dict.fromkeys(self._held(targets)):
                if held is not None:
                    self._end(item, held, CANCELLED)
            return
        seqs = targets.seq.astype(np.int64)
        known = (seqs > 0) & (seqs <= self.seqs)
        self._end_all(item, targets.due_ms[known], seqs[known], CANCELLED)

    def _reschedule(self, item: Entry) -> None:
        order = payloads.decode_reschedule(item.payload)
        new = self._numbered(item, len(order.due_ms))
        moved: list[int] = []
        asked: set[tuple[int, int]] = set()
        size = 0
        for at, target in enumerate(self._held(order.targets)):
            if target is None or target in asked or (old := self._pending.find(*target)) is None:
                continue
            asked.add(target)
            size += int(old["payload_size"])
            if moved and size > MOVED_BYTES_MAX:
                continue
            moved.append(at)
            for name in ("mark", "key", "topic", "size", "payload_size"):
                new[name][at] = old[name]
            new["old_due_ms"][at], new["other"][at] = target
            new["due_ms"][at] = order.due_ms[at]
        for row in new[moved]:
            self._end(item, (int(row["old_due_ms"]), int(row["other"])), RESCHEDULED)
            if row["key"]:
                self._hold(row)
        self._admit(item, new[moved])

    def _held(self, targets: Targets) -> list[tuple[int, int] | None]:
        """Return (due, seq) per target; None: nobody has the key."""
        if isinstance(targets, Ids):
            return list(zip(targets.due_ms.tolist(), targets.seq.tolist(), strict=True))
        return [*map(self._holders.get, hashed(targets.topic, targets.key).tolist())]

    def _end(self, item: Entry, timer: tuple[int, int], end: int) -> None:
        due_ms, seq = (np.array([value], np.int64) for value in timer)
        self._end_all(item, due_ms, seq, end)

    def _end_all(self, item: Entry, due_ms: I64, seq: I64, end: int) -> None:
        """End the pending ones of n timers."""
        self._free(due_ms, seq)
        rows = np.zeros(len(seq), ROW)
        rows["due_ms"], rows["seq"], rows["mark"] = due_ms, seq, end
        rows["index"], rows["time_ms"], rows["topic"] = item.index, item.time_ms, TOMBSTONE
        self._pending.add(rows)

    def _cancelled(self, taken: Taken) -> None:
        if len(taken.cancelled):
            by = taken.tombstones
            self._book.fates(
                taken.cancelled,
                end=by["mark"],
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
            if isinstance(op, Move):
                self._move(item, op, group)
            elif group.over or isinstance(op, AlterGroup):
                continue  # nobody is meant; or what a group allows, which the leader decides
            elif isinstance(op, Nack):
                self._book.nacks(group, group.nack(op.offsets, op.not_before_ms, item))
            elif op.op is Op.RESERVE:
                group.reserved = max(group.reserved, int(op.offsets[0]))
            elif op.op is Op.ENDED:
                group.end_leases(op.offsets)
            elif op.op is Op.RECALL:
                group.recall(op.offsets)
            elif op.op is Op.ACK:
                self._ack(item, op, group)
            elif op.op is Op.SEEK:
                self._seek(op, group)
            elif op.op is Op.DELETE:
                group.over = True
                self._trim(group.topic)

    def _ack(self, item: Entry, op: GroupOp, group: Group) -> int:
        """Take an ack; return how many offsets it was new for."""
        acks = group.ack(op.offsets, item)
        self._book.acks(group, acks)
        self._trim(group.topic)
        return len(acks)

    def _trim(self, topic: int) -> None:
        """What every group has acked is gone: a later group does not start before it."""
        cursors = [g.cursor for g in self.groups.values() if g.topic == topic and not g.over]
        if cursors:
            self._queue_begin[topic] = max(min(cursors), self._queue_begin.get(topic, 0))

    def _seek(self, op: GroupOp, group: Group) -> None:
        """A group goes on elsewhere, as another one of the same name."""
        begin, end = (places.get(group.topic, 0) for places in (self._queue_begin, self.queue_end))
        start = min(max(int(op.offsets[0]), begin), end)
        group.over = True
        number = len(self.groups) + 1
        anew = Group(number, group.topic, group.name, start, max(group.reserved, start), start)
        anew.base, anew.sought = start, True
        self.groups[number] = anew
        self._trim(group.topic)

    def _move(self, item: Entry, op: Move, group: Group) -> None:
        to = self._topic_of(op.to)
        if op.to_group:
            self._create_group(CreateGroup(to, op.to_group, Start.EARLIEST, MOVED_GROUP))
        moved = 0 if group.over else self._ack(item, op, group)
        self.seqs += len(op.offsets)
        self.timers += moved
        self.fired += moved
        self.moved += moved
        self.queue_end[to] = self.queue_end.get(to, 0) + moved

    def _topic_of(self, name: str) -> TopicId:
        """Return the number of a topic, which is made if it isn't there."""
        for number, known in self.topics.items():
            if known == name:
                return TopicId(number)
        self.topics[len(self.topics) + 1] = name
        return TopicId(len(self.topics))

    def _create_group(self, create: CreateGroup) -> None:
        known = [
            g for g in self.groups.values() if (g.topic, g.name) == (create.topic, create.name)
        ]
        if not all(group.over for group in known):
            return
        earliest = create.start is Start.EARLIEST
        start = (self._queue_begin if earliest else self.queue_end).get(create.topic, 0)
        number = len(self.groups) + 1
        self.groups[number] = Group(
            number, create.topic, create.name, start, start, start, base=start, sought=bool(known)
        )


def _check_policy(item: Entry) -> None:
    """Refuse what makes timers due before the time that was asked for: it would look early.

    Raises:
        ValueError: the policy is such a one.
    """
    _, policy = decode_policy(item.payload)
    for name in ("delayed_delivery", "fixed_delay_ms"):
        value = getattr(policy, name)
        if value is not None and value is not True:
            raise ValueError(f"entry {item.index}: the audit does not know {name} = {value}")


def hashed(topic: U32, keys: Binary) -> I64:
    """Return what stands for topics and keys, (n, int64), above 0."""
    ends = np.cumsum(keys.sizes, dtype=np.int64).tolist()
    blob, spans = bytes(keys.blob), zip([0, *ends], ends, strict=False)
    names = zip(topic.tolist(), spans, strict=True)
    digests = b"".join(
        hashlib.blake2b(blob[start:end], digest_size=8, salt=number.to_bytes(8, "little")).digest()
        for number, (start, end) in names
    )
    return (np.frombuffer(digests, "<u8") >> np.uint64(1)).astype(np.int64) | 1


def marks_of(payload: memoryview, rows: RowArray) -> I64:
    """Return the marks that a SCHEDULE entry's payloads carry, (n, int64)."""
    marks = np.full(len(rows), MARK_NONE, np.int64)
    has = rows["payload_size"] >= MARK_SIZE
    starts = rows["payload_start"][has].astype(np.int64)
    around = starts[:, None] + np.arange(MARK_SIZE)
    marks[has] = np.frombuffer(payload, np.uint8)[around].view("<i8").ravel()
    return marks
