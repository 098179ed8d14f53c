"""The story of a log: the fate of every timer, told independently of the product.

The log's entries decide everything (docs/adr/0002-log-entries.md), so their meaning fits on a page.
This module is that page. It was written for the audit and shares only the codecs with timer/. If it
and the machine disagree, one of them is wrong, and the audit reports `diverged`.

    SCHEDULE  A part counts if its (producer, sequence) is the producer's next, or if it has no
              producer and no remembered request id. Its rows get the next seqs. Any other part
              changes nothing. Rows that are due already (due <= last read time) fire at once, in
              the order of the entry. A row whose key a pending timer of its topic has is rejected,
              is left out, or replaces that timer.
    FIRE      Pending rows with due <= read time fire in (due, seq) order, up to the limits.
    CANCEL    Pending rows with that (due, seq), or topic and key, are cancelled.
    RESCHEDULE  The entry takes as many seqs as it has targets. The pending targets end. For each, a
              row with the next seq, the new due time and the same key and payload begins. Payloads
              of MOVED_BYTES_MAX together are the limit, except for the first row.
    POLICY    Topics are paused and resumed (held_story.py). Quotas hold for new timers
              (policy_story.py).
    fires =   gets the next offset of its topic's queue, at this entry's time.
    GROUP     ACK counts for reserved offsets that are not acked yet. ENDED and NACK count an
              attempt more for them, and EPOCH does so for all messages that may have been
              delivered. MOVE takes as many seqs as it has offsets. Those without an ack are acked,
              and fire at once in another topic. No client scheduled them, so they have no fate:
              they are *carried*. EXPIRE and EXPIRE_BELOW end messages without an ack. SEEK ends
              one life of a group and begins another, under the next id. DELETE ends one.
    POLICY    A retention keeps messages that all groups have acked, up to a CHECKPOINT
              (queue_story.py).
    TOPIC     A topic is made or deleted. A deletion drops its pending rows and ends its groups.
              Later parts with a row of it, and later ops, change nothing; a MOVE takes its seqs.
              A later topic of the same name has the next number.
    SERIES, OCCURRENCES  The rows of series that wait for them become timers (series_story.py). An
              OCCURRENCES entry takes as many seqs as it has rows.

A row's fate leaves memory for a table when the row ends, so one pass tells a story of any length.
Memory holds pending rows (pending_rows.py spills them), per group the messages without an ack, and
the holders of keys. 62 bits of a hash stand for topic and key. Two of a hundred million keys share
them with a chance of one in a thousand; the audit would report that as a divergence.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from chaos.history.history import MARK_NONE, MARK_SIZE
from chaos.oracle.group_story import ENDED, NACKED, RECALLED, GroupStory
from chaos.oracle.held_story import HeldStory
from chaos.oracle.intake_story import IntakeStory
from chaos.oracle.pending_rows import I64, ROW, ROWS_MAX, TOMBSTONE, RemovedRows, Rows, WaitingRows
from chaos.oracle.policy_story import QuotaStory, ScopeFields
from chaos.oracle.queue_story import QueueStory
from chaos.oracle.series_story import SeriesStory
from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import (
    MOVED_GROUP,
    AlterGroup,
    CreateGroup,
    DeleteTopic,
    EpochStart,
    GroupOp,
    GroupStart,
    Ids,
    Move,
    Nack,
    Op,
    Targets,
)
from timer.entries.policies import QUOTAS, Scope
from timer.entries.series_payloads import decode_occurrences, decode_series
from timer.model.columns import (
    U32,
    Binary,
    OnConflict,
    RowArray,
    decode_schedule,
    gather,
    row_bytes,
)
from timer.model.timer_id import SEQ_MAX
from timer.model.units import TopicId

PENDING: Final = 0
FIRED: Final = 1
CANCELLED: Final = 2
DROPPED: Final = 3
REPLACED: Final = 4
"""Another timer took its key."""
RESCHEDULED: Final = 5
"""Another row continues with its key and payload."""
REJECTED: Final = 6
KEPT: Final = 7
"""Like REJECTED, the row became no timer: a pending one has its key. REJECTED without another timer
is an update, and no pending timer has its key.
"""
HELD: Final = 8
"""Pending and due: its topic is paused, or was."""
ENDS: Final = (
    *("pending", "fired", "cancelled", "dropped"),
    *("replaced", "rescheduled", "rejected", "kept", "held"),
)
MOVED_BYTES_MAX: Final = 4 << 20
LIFE: Final = "\N{THIN SPACE}#"
"""Between the name of a topic and its number, if others had the name before."""
NEVER: Final = 1 << 62
NONE: Final = -1
"""In an integer column: no value."""


class StoryBook:
    """The place where a story is written, in any order; tables.py has one that makes Parquet.

    A subclass has the methods of the parts that it needs. The others are dropped.
    """

    def fates(self, rows: Rows, **columns: I64 | int) -> None:
        """Add timers that ended: `end`, `end_index`, `ended_at_ms`, `queue_offset`."""

    def carried(self, group: GroupStory, rows: Rows, offsets: I64, **columns: I64 | int) -> None:
        """Add messages that a MOVE took from these offsets of a group (tables.py)."""

    def messages(self, table: str, group: GroupStory, rows: Any) -> None:
        """Add messages of a group, as group_story.py has them.

        `table`: `acks` that counted (ACK), `returns` from consumers (RETURN), `expired` (EXPIRED).
        """

    def payloads(self, marks: I64, crcs: I64) -> None:
        """Add the marks and the CRC-32 of scheduled payloads."""


class LogStory:
    """The meaning of the log up to the last applied entry."""

    def __init__(
        self, book: StoryBook, spill: Path, *, pending_max: int = ROWS_MAX, checksums: bool = False
    ) -> None:
        """`checksums`: also report the CRC-32 of each scheduled payload."""
        self.last_index, self.last_read_time_ms = 0, 0
        self.topics: dict[int, str] = {}
        self.deleted: dict[int, tuple[int, int]] = {}
        """Deleted topic -> (index of the entry that deleted it, its time)."""
        self.groups: dict[int, GroupStory] = {}
        self.seqs = 0
        """The last seq issued."""
        self.timers = 0
        """Rows that became timers."""
        self.fired = 0
        self.epoch_starts: list[tuple[int, int]] = []
        """(index, epoch) of every EPOCH entry."""
        self.leaders: list[EpochStart] = []
        """The contents of every EPOCH entry."""
        self.checkpoints: list[tuple[int, int, int, int]] = []
        """(index, time, timers, fired ones) at every CHECKPOINT entry."""
        self.queues: dict[int, QueueStory] = {}
        """Topic -> its queue."""
        self.policies: list[tuple[Scope, int, str]] = []
        """(scope, index, JSON of all its fields from then on) of every POLICY entry."""
        self.postponed: dict[int, int] = {}
        """Topic -> the most milliseconds by which its policies ever moved a due time back."""
        self.ttls: dict[int, list[tuple[int, int]]] = {}
        """Topic -> (from, time to live in ms), in order; 0: none."""
        self.rates: dict[int, list[tuple[int, int, int]]] = {}
        """Topic -> (from, most deliveries a second, to all and to each group), in order; 0: any."""
        self.pauses: dict[int, list[tuple[int, int]]] = {}
        """Topic -> [from, until) of each pause, in order; NEVER ends a pause that continues."""
        self.moved_early: list[tuple[GroupStory, int, int, int]] = []
        """(group, queue offset, failures, index) of messages moved before enough failures."""
        self.quotas = QuotaStory(self._ready)
        self._book, self._checksums = book, checksums
        self._pending = WaitingRows(spill, rows_max=pending_max)
        self._fields = ScopeFields()
        self.intake = IntakeStory()
        self._holders: dict[int, tuple[int, int]] = {}
        """Key -> (due, seq) of the pending timer that has it."""
        self._key_of: dict[int, int] = {}
        """Seq of a timer with a key -> its key."""
        self.held = HeldStory(self.topics.__getitem__, self._fields)
        self.series = SeriesStory()
        self.decided = np.zeros(0, ROW)
        """The rows of the last SCHEDULE with keys. `other` is the timer that had a row's key."""
        self._undone: list[tuple[int, int]] = []
        """(due, seq) of rows of this entry that a later row of it replaced."""

    def apply(self, item: Entry) -> None:
        """Apply the next entry."""
        assert item.index == self.last_index + 1, (item.index, self.last_index)
        self.last_index = item.index
        self.series.index, self.series.now_ms = item.index, item.time_ms
        match item.kind:
            case EntryKind.SCHEDULE:
                self._schedule(item)
            case EntryKind.FIRE:
                self._fire(item)
            case EntryKind.RESCHEDULE:
                self._reschedule(item)
            case EntryKind.CANCEL:
                self._cancel(item)
            case EntryKind.GROUP:
                self._group(item)
            case EntryKind.TOPIC | EntryKind.PRODUCER | EntryKind.POLICY:
                self._settings(item)
            case EntryKind.SERIES | EntryKind.OCCURRENCES:
                self._apply_series(item)
            case EntryKind.EPOCH:
                self.epoch_starts.append((item.index, item.epoch))
                self.leaders.append(payloads.decode_epoch(item.payload))
                self.quotas.begin_epoch()
                for group in self.groups.values():
                    group.begin_epoch(self.queues[group.topic].end)
            case EntryKind.CHECKPOINT:
                self.intake.checkpoint(item)
                for topic, queue in self.queues.items():
                    queue.checkpoint(self.cursors(topic), item.time_ms)
                self.checkpoints.append((item.index, item.time_ms, self.timers, self.fired))
        self.quotas.count_ready()

    def _settings(self, item: Entry) -> None:
        if item.kind is EntryKind.POLICY:
            self._policy(item)
            self.held.policy(item.time_ms, self._topic_ids(), self.last_read_time_ms, self.seqs + 1)
        elif item.kind is EntryKind.TOPIC:
            op = payloads.decode_topic(item.payload)
            self._delete(item, op) if isinstance(op, DeleteTopic) else self._topic_of(op.name)
        else:
            self.intake.producer(item)

    def _delete(self, item: Entry, deletion: DeleteTopic) -> None:
        if deletion.topic not in self.topics or deletion.topic in self.deleted:
            return
        self.deleted[deletion.topic] = item.index, item.time_ms
        self._pending.drop(deletion.topic)
        self.series.delete_topic(deletion.topic)
        held = self.held.delete_topic(deletion.topic)
        self._free(held["due_ms"], held["seq"])
        self._write_dropped(held)
        for group in self.groups.values():
            if group.topic == deletion.topic:
                group.over = True

    def _policy(self, item: Entry) -> None:
        scope = self._fields.apply(item)
        self.policies.append((scope, item.index, json.dumps(asdict(self._fields.records[scope]))))
        meant = {scope.topic} & self.topics.keys() if scope.topic else self.topics
        for topic in meant:
            self._retain(topic, item.time_ms)
            self._note_times(topic, item.time_ms)

    def rule_of(self, topic: int, name: str) -> Any:
        """Return the value of the narrowest scope for a topic; None if no scope sets it."""
        return self._fields.of(name, topic, self.topics[topic])

    def life(self, topic: int) -> str:
        """Return a topic's name, with its number if others of that name were deleted before."""
        name = self.topics[topic]
        again = any(self.topics[number] == name for number in self.deleted if number < topic)
        return f"{name}{LIFE}{topic}" if again else name

    def life_of(self, group: GroupStory) -> str:
        """Return a group's name, with its number if an earlier life of it ended."""
        return f"{group.name}{LIFE}{group.group_id}" if group.later_life else group.name

    def _topic_ids(self) -> list[int]:
        return [topic for topic in self.topics if topic not in self.deleted]

    def _retain(self, topic: int, at_ms: int) -> None:
        """Set a topic's retention, by the narrowest scope, from a moment on."""
        self.queues[topic].retain(self.rule_of(topic, "retention_ms"), at_ms)

    def end(self) -> None:
        """Write the rows that are still pending."""
        for taken in self._pending.rest():
            self._write_cancelled(taken)
            self._write_ends(taken.fired, PENDING, NONE, NONE)
        held, late = self.held.remaining_rows(self.last_read_time_ms)
        self._write_ends(held, HELD, NONE, NONE)
        self._write_ends(late, PENDING, NONE, NONE)
        self.series.end()

    def _write_ends(
        self, rows: Rows, end: I64 | int, index: I64 | int, at_ms: I64 | int,
        offsets: I64 | int = NONE,
    ) -> None:  # fmt: skip
        self._book.fates(rows, end=end, end_index=index, ended_at_ms=at_ms, queue_offset=offsets)

    # ---- pending timers

    def overdue(self, due_ms: int, resumed_ms: int) -> Rows:
        """Return the pending timers that had to fire by now.

        Those due by `due_ms` in topics that hold no timers, and the held ones of topics that
        resumed more than RELEASE_MS before `resumed_ms`. Some spilled rows are left out.
        """
        rows = self._pending.overdue(due_ms)
        return np.concatenate([rows, self.held.late_rows(resumed_ms)])

    def pending_of(self, topic: int) -> Rows:
        """Return the pending timers of a topic, held ones included. Spilled rows are left out."""
        rows = np.concatenate([self._pending.overdue(NEVER), *self.held.rows_of(topic)])
        mine: Rows = rows[rows["topic"] == topic]
        return mine

    def state_of(self, due_ms: int, seq: int) -> int | None:
        """Return PENDING, HELD, or the end of a timer that is not due yet; None: none of these."""
        if (due_ms, seq) in self.held.rows:
            return HELD
        rows = self._pending.rows_of((due_ms, seq))
        is_end = rows["topic"] == TOMBSTONE
        if is_end.all():
            return None
        deleted, _ = self.deleted.get(int(rows["topic"][~is_end][0]), (NEVER, 0))
        ends = rows["mark"][is_end & (rows["index"] < deleted)].tolist()
        return int(ends[0]) if ends else PENDING if deleted == NEVER else DROPPED

    # ---- timers

    def _schedule(self, item: Entry) -> None:
        schedule = decode_schedule(item.payload)
        nowhere = np.isin(schedule.rows["topic"], [0, *self.deleted])
        taken = self.intake.timer_rows(item, schedule, nowhere)
        rows = schedule.rows[taken]
        self._note_quotas(item, rows)
        new = self._numbered_rows(item, len(rows))
        for name in ("due_ms", "topic", "payload_size"):
            new[name] = rows[name]
        new["size"] = row_bytes(rows)
        new["mark"] = marks_of(item.payload, rows)
        if self._checksums:
            self._book.payloads(new["mark"], crcs_of(item.payload, rows))
        keyed = np.flatnonzero(rows["key_size"])
        if len(keyed):
            column = gather(rows[keyed], {0: item.payload}, "key")
            new["key"][keyed] = hashed(rows["topic"][keyed], column)
            modes = np.repeat(schedule.parts["on_conflict"], schedule.parts["rows"])[taken]
            new = self._decide_keys(item, new, keyed, modes)
        self._admit(item, new)

    def _apply_series(self, item: Entry) -> None:
        if item.kind is EntryKind.SERIES:
            cancelled = self.series.change(decode_series(item.payload), self._topic_ids())
            if cancelled is not None:
                self._end(item, cancelled, CANCELLED)
            return
        planned = decode_occurrences(item.payload)
        new = self._numbered_rows(item, len(planned.series))
        taken = self.series.occur(planned, int(new["seq"][0]))
        for at in taken:
            series, number = int(planned.series[at]), int(planned.number[at])
            new["topic"][at] = self.series.series[series].topic
            size, headers = self.series.sizes(series, number)
            new["payload_size"][at], new["size"][at] = size, size + headers
            new["mark"][at] = self.series.mark(series)
        new["due_ms"] = planned.due_ms
        self._admit(item, new[taken])

    def _note_times(self, topic: int, at_ms: int) -> None:
        """Note a topic's policies about due times, from a moment on."""
        rates = (int(self.rule_of(topic, f"{whose}_rate_max") or 0) for whose in ("topic", "group"))
        _note(self.ttls.setdefault(topic, []), (at_ms, self._ttl_ms(topic)))
        _note(self.rates.setdefault(topic, []), (at_ms, *rates))
        spans = self.pauses.setdefault(topic, [])
        paused, was_paused = (
            bool(self.rule_of(topic, "paused")),
            spans[-1:] and spans[-1][1] == NEVER,
        )
        if paused and not was_paused:
            spans.append((at_ms, NEVER))
        elif was_paused and not paused:
            spans[-1] = spans[-1][0], at_ms
        said = (self.rule_of(topic, name) or 0 for name in ("tick_ms", "delay_ms_min", "jitter_ms"))
        self.postponed[topic] = max(self.postponed.get(topic, 0), sum(said))

    def _note_quotas(self, item: Entry, rows: RowArray) -> None:
        said = self._fields.records.values()
        if any(getattr(policy, name) is not None for policy in said for name in QUOTAS):
            self.quotas.note(np.unique(rows["topic"]).tolist(), item.index, self.rule_of)

    def _ready(self, topic: int) -> int:
        """Return the most messages that one group of a topic has not acked; 0 without groups."""
        groups = [g for g in self.groups.values() if g.topic == topic and not g.over]
        return max((self.queues[topic].end - g.start - g.done for g in groups), default=0)

    def _numbered_rows(self, item: Entry, count: int) -> Rows:
        """Return rows with the next seqs, scheduled by this entry."""
        new = np.zeros(count, ROW)
        new["index"], new["time_ms"] = item.index, item.time_ms
        new["seq"] = np.arange(self.seqs + 1, self.seqs + count + 1)
        self.seqs += count
        return new

    def _decide_keys(self, item: Entry, new: Rows, keyed: I64, modes: U32) -> Rows:
        """Make keys unique; write the rows that become no timers, return the others."""
        self.decided, keys = new, new["key"][keyed].tolist()
        updates = (modes[keyed] == OnConflict.UPDATE).any()
        if not updates and len({*keys}) == len(keys) and self._holders.keys().isdisjoint(keys):
            self._hold(new[keyed])
            return new
        ends = np.full(len(new), PENDING)
        for at in keyed.tolist():
            held = self._holders.get(int(new["key"][at]))
            if held is None and modes[at] == OnConflict.UPDATE:
                ends[at] = REJECTED
                continue
            if held is not None:
                new["other"][at] = held[1]
                if modes[at] not in (OnConflict.REPLACE, OnConflict.UPDATE):
                    ends[at] = KEPT if modes[at] == OnConflict.KEEP else REJECTED
                    continue
                if held[1] < int(new["seq"][0]):
                    self._end(item, held, REPLACED)
                else:
                    self._free(*(np.array([value], np.int64) for value in held))
                    self._undone.append(held)
            self._hold(new[at : at + 1])
        for end in (REJECTED, KEPT):
            rows = new[ends == end]
            self._write_ends(rows, end, item.index, item.time_ms)
        made: Rows = new[ends == PENDING]
        return made

    def _hold(self, rows: Rows) -> None:
        """Give new timers their keys, which differ and are free.

        Timers that are due already are never pending.
        """
        waits = (rows["due_ms"] > self.last_read_time_ms) | self.held.holds(rows["topic"])
        key, due_ms, seq = (rows[name][waits].tolist() for name in ("key", "due_ms", "seq"))
        assert self._holders.keys().isdisjoint(key), (key, seq)
        self._holders.update(zip(key, zip(due_ms, seq, strict=True), strict=True))
        self._key_of.update(zip(seq, key, strict=True))

    def _free(self, due_ms: I64, seq: I64) -> None:
        """Free the keys of timers that end."""
        if not self._key_of:
            return
        for timer in zip(due_ms.tolist(), seq.tolist(), strict=True):
            key = self._key_of.get(timer[1])
            if key is not None and self._holders[key] == timer:
                del self._holders[key], self._key_of[timer[1]]

    def _admit(self, item: Entry, new: Rows) -> None:
        self.timers += len(new)
        due = new["due_ms"] <= self.last_read_time_ms
        held = due & self.held.holds(new["topic"])
        past = held & self.held.is_past(new)
        self.held.add(new[past])
        self._enqueue(item, new[due & ~held])
        self._pending.add(new[~due | (held & ~past)])
        undone, self._undone = self._undone, []
        for timer in undone:
            self._end(item, timer, REPLACED)

    def _fire(self, item: Entry) -> None:
        fire = payloads.decode_fire(item.payload)
        taken = self._pending.take(*fire)
        self.last_read_time_ms, last = int(fire.read_time_ms), SEQ_MAX
        if taken.limited:
            self.last_read_time_ms, last = (taken.fired[of].item(-1) for of in ("due_ms", "seq"))
        self.held.position = self.last_read_time_ms, last
        self._write_cancelled(taken)
        self._free(taken.dropped["due_ms"], taken.dropped["seq"])
        held = self.held.holds(taken.fired["topic"])
        self.held.add(taken.fired[held])
        self._fire_rows(item, taken.fired[~held])
        bounded = self.leaders and self.leaders[-1].level >= 2
        topics_max = max(fire.topics_max // 2, 1) if bounded else SEQ_MAX
        for freed in self.held.sweep(fire.rows_max, fire.bytes_max, topics_max):
            if freed.fired:
                self._fire_rows(item, freed.rows)
            else:
                self._end_held(item, freed.rows, DROPPED)

    def _fire_rows(self, item: Entry, rows: Rows) -> None:
        keyed = rows[rows["key"] != 0]
        self._free(keyed["due_ms"], keyed["seq"])
        self._enqueue(item, rows)

    def _end_held(self, item: Entry, rows: Rows, end: int) -> None:
        self._free(rows["due_ms"], rows["seq"])
        self.series.note_ends(timers_of(rows))
        self._write_ends(rows, end, item.index, item.time_ms)

    def _enqueue(self, item: Entry, rows: Rows) -> None:
        """Fire rows, in this order."""
        if not len(rows):
            return
        offsets = np.zeros(len(rows), np.int64)
        for topic in np.unique(rows["topic"]).tolist():
            mine = rows["topic"] == topic
            count = int(np.count_nonzero(mine))
            start = self.queues[topic].fire(count, item.time_ms)
            offsets[mine] = np.arange(start, start + count)
            self.quotas.touched.add(topic)
        self.fired += len(rows)
        self.series.note_ends(timers_of(rows))
        self._write_ends(rows, FIRED, item.index, item.time_ms, offsets)

    def _cancel(self, item: Entry) -> None:
        targets = payloads.decode_cancel(item.payload)
        if not isinstance(targets, Ids):
            for held in dict.fromkeys(self.holders_of(targets)):
                if held is not None:
                    self._end(item, held, CANCELLED)
            return
        seqs = targets.seq.astype(np.int64)
        known = (seqs > 0) & (seqs <= self.seqs)
        self._end_all(item, targets.due_ms[known], seqs[known], CANCELLED)

    def _reschedule(self, item: Entry) -> None:
        order = payloads.decode_reschedule(item.payload)
        new = self._numbered_rows(item, len(order.due_ms))
        moved: list[int] = []
        targeted: set[tuple[int, int]] = set()
        size = 0
        for at, target in enumerate(self.holders_of(order.targets)):
            if target is None or target in targeted or (old := self._find(target)) is None:
                continue
            targeted.add(target)
            size += int(old["payload_size"])
            if moved and size > MOVED_BYTES_MAX:
                continue
            moved.append(at)
            self.series.note_move(target, (int(order.due_ms[at]), int(new["seq"][at])))
            for name in ("mark", "key", "topic", "size", "payload_size"):
                new[name][at] = old[name]
            new["old_due_ms"][at], new["other"][at] = target
            new["due_ms"][at] = order.due_ms[at]
        for at in moved:
            row = new[at]
            self._end(item, (int(row["old_due_ms"]), int(row["other"])), RESCHEDULED)
            if row["key"]:
                self._hold(new[at : at + 1])
        self._admit(item, new[moved])

    def _find(self, target: tuple[int, int]) -> np.void | None:
        held: np.void | None = self.held.rows.get(target)
        return self._pending.find(*target) if held is None else held

    def holders_of(self, targets: Targets) -> list[tuple[int, int] | None]:
        """Return (due, seq) per target; None if no pending timer has the key."""
        if isinstance(targets, Ids):
            return list(zip(targets.due_ms.tolist(), targets.seq.tolist(), strict=True))
        keys = zip(targets.topic.tolist(), hashed(targets.topic, targets.key).tolist(), strict=True)
        return [None if topic in self.deleted else self._holders.get(key) for topic, key in keys]

    def _end(self, item: Entry, timer: tuple[int, int], end: int) -> None:
        due_ms, seq = (np.array([value], np.int64) for value in timer)
        self._end_all(item, due_ms, seq, end)

    def _end_all(self, item: Entry, due_ms: I64, seq: I64, end: int) -> None:
        """End the pending ones of n timers."""
        held, others = self.held.split(due_ms, seq)
        if len(held):
            self._end_held(item, held, end)
            due_ms, seq = due_ms[others], seq[others]
        self._free(due_ms, seq)
        self.series.note_ends(zip(due_ms.tolist(), seq.tolist(), strict=True))
        rows = np.zeros(len(seq), ROW)
        rows["due_ms"], rows["seq"], rows["mark"] = due_ms, seq, end
        rows["index"], rows["time_ms"], rows["topic"] = item.index, item.time_ms, TOMBSTONE
        self._pending.add(rows)

    def _write_cancelled(self, taken: RemovedRows) -> None:
        """Write the rows that ended before their time. The first end counts."""
        self._write_dropped(taken.dropped)
        rows, by = taken.cancelled, taken.tombstones
        if len(rows) and self.deleted:
            since = np.array([self.deleted.get(t, (NEVER,))[0] for t in rows["topic"].tolist()])
            late = since < by["index"]
            self._write_dropped(rows[late])
            rows, by = rows[~late], by[~late]
        if len(rows):
            self._write_ends(rows, by["mark"], by["index"], by["time_ms"])

    def _write_dropped(self, rows: Rows) -> None:
        for topic in np.unique(rows["topic"]).tolist():
            index, at_ms = self.deleted[topic]
            mine = rows[rows["topic"] == topic]
            self._write_ends(mine, DROPPED, index, at_ms)

    # ---- groups

    def _group(self, item: Entry) -> None:
        for op in payloads.decode_group(item.payload):
            if isinstance(op, CreateGroup):
                self._create_group(op)
                continue
            if isinstance(op, GroupOp) and op.op is Op.EXPIRE_BELOW:
                self._expire_below(item, op)
                continue
            group = self.groups[op.group]
            if isinstance(op, Move):
                self._move(item, op, group)
            elif isinstance(op, AlterGroup):
                group.settings.append(op.of(group.settings[-1]))
            elif group.over:
                continue  # no such group, or settings that only the leader applies
            elif isinstance(op, Nack):
                back = group.take_back(NACKED, op.offsets, item, op.not_before_ms)
                self._book.messages("returns", group, back)
            elif op.op is Op.RESERVE:
                group.reserved = max(group.reserved, int(op.offsets[0]))
            elif op.op is Op.HAND_OVER:
                group.hand_over(int(op.offsets[0]))
            elif op.op in (Op.ENDED, Op.RECALL):
                why = ENDED if op.op is Op.ENDED else RECALLED
                self._book.messages("returns", group, group.take_back(why, op.offsets, item))
            elif op.op is Op.ACK:
                self._ack(item, op, group)
            else:
                self._end_some(item, op, group)

    def _end_some(self, item: Entry, op: GroupOp, group: GroupStory) -> None:
        """End some messages of a group, or its life."""
        if op.op is Op.SEEK:
            self._seek(op, group)
            return
        assert op.op in (Op.DELETE, Op.EXPIRE), op
        if op.op is Op.DELETE:
            group.over = group.deleted = True
        else:
            gone = group.expire(op.offsets, item, self._ttl_ms(op.topic))
            self._book.messages("expired", group, gone)
        self._trim(group.topic)

    def _expire_below(self, item: Entry, op: GroupOp) -> None:
        """Expire all messages below an offset, in all groups of a topic, and delete them."""
        offset = int(op.offsets[0])
        for group in self.groups.values():
            if group.topic == op.topic and not group.over:
                below = np.arange(group.cursor, offset, dtype=np.uint64)
                gone = group.expire(below, item, self._ttl_ms(op.topic))
                self._book.messages("expired", group, gone)
        self.queues[op.topic].drop_below(offset)
        self.quotas.touched.add(op.topic)

    def _ttl_ms(self, topic: int) -> int:
        return int(self.rule_of(topic, "ttl_ms") or 0)

    def _ack(self, item: Entry, op: GroupOp, group: GroupStory) -> npt.NDArray[np.bool_]:
        """Apply an ack of different offsets; return for which of them it was new (n, bool)."""
        acks = group.ack(op.offsets, item)
        self._book.messages("acks", group, acks)
        self._trim(group.topic)
        return np.isin(op.offsets.astype(np.int64), acks["queue_offset"])

    def _trim(self, topic: int) -> None:
        """Delete messages that every group has acked: a later group does not start before them."""
        self.queues[topic].drop_acked(self.cursors(topic))
        self.quotas.touched.add(topic)

    def cursors(self, topic: int) -> list[int]:
        """Return the cursors of a topic's groups."""
        return [g.cursor for g in self.groups.values() if g.topic == topic and not g.over]

    def _seek(self, op: GroupOp, group: GroupStory) -> None:
        """Continue a group at another offset, as another group of the same name."""
        kept = self.queues[group.topic]
        start = min(max(int(op.offsets[0]), kept.begin), kept.end)
        number = len(self.groups) + 1
        self.groups[number] = group.next_life(number, start, kept.begin, kept.end)
        self._trim(group.topic)

    def _move(self, item: Entry, op: Move, group: GroupStory) -> None:
        if op.topic in self.deleted:
            self.seqs += len(op.offsets)
            return
        to = self._topic_of(op.to)
        if op.to_group:
            self._create_group(CreateGroup(to, op.to_group, GroupStart.EARLIEST, MOVED_GROUP))
        new = self._numbered_rows(item, len(op.offsets))
        if group.over:
            return
        if op.to_group:
            self._note_move(item, op, group)
        taken = self._ack(item, op, group)
        moved = int(np.count_nonzero(taken))
        self.timers += moved
        self.fired += moved
        if moved:
            raw = memoryview(op.rows)
            rows = decode_schedule(raw).rows
            for name in ("due_ms", "payload_size"):
                new[name] = rows[name]
            new["topic"], new["mark"] = to, marks_of(raw, rows)
            start = self.queues[to].fire(moved, item.time_ms)
            self._book.carried(
                group, new[taken], op.offsets[taken].astype(np.int64), redriven=not op.to_group,
                queue_offset=np.arange(start, start + moved),
            )  # fmt: skip
            self.quotas.touched.add(to)

    def _note_move(self, item: Entry, op: Move, group: GroupStory) -> None:
        """Note dead letters with fewer failures than their group allows.

        The settings of now count or, because an ALTER may come in between, those before.
        """
        allowed = [each.max_attempts or NEVER for each in group.settings[-2:]]
        for offset, failures in zip(op.offsets.tolist(), group.failures(op.offsets).tolist(),
                                    strict=True):  # fmt: skip
            if failures < min(allowed):
                self.moved_early.append((group, offset, failures, item.index))

    def _topic_of(self, name: str) -> TopicId:
        """Return the number of a topic; make the topic if it does not exist."""
        for number, known in self.topics.items():
            if known == name and number not in self.deleted:
                return TopicId(number)
        made = TopicId(len(self.topics) + 1)
        self.topics[made], self.queues[made] = name, QueueStory()
        self._retain(made, 0)
        self._note_times(made, 0)
        self.held.add_topic(made)
        return made

    def _create_group(self, create: CreateGroup) -> None:
        name = create.topic, create.name
        known = [group for group in self.groups.values() if (group.topic, group.name) == name]
        if create.topic in self.deleted or not all(group.over for group in known):
            return
        kept = self.queues[create.topic]
        self.quotas.touched.add(create.topic)
        start = kept.begin if create.start is GroupStart.EARLIEST else kept.end
        number = len(self.groups) + 1
        self.groups[number] = GroupStory(
            number, create.topic, create.name, start, start, start, base=start, oldest=kept.begin,
            type=create.settings.type, later_life=bool(known), settings=[create.settings],
        )  # fmt: skip


def _note(known: list[Any], value: tuple[int, ...]) -> None:
    """Note values that hold from a moment on, which is the first of them."""
    if known and known[-1][0] == value[0]:
        known[-1] = value
    elif not known or known[-1][1:] != value[1:]:
        known.append(value)


def timers_of(rows: Rows) -> Iterator[tuple[int, int]]:
    """Return (due, seq) of each row."""
    return zip(rows["due_ms"].tolist(), rows["seq"].tolist(), strict=True)


def hashed(topic: U32, keys: Binary) -> I64:
    """Return the hashes of topics and keys, (n, int64), above 0."""
    digests = b"".join(
        hashlib.blake2b(key, digest_size=8, salt=number.to_bytes(8, "little")).digest()
        for number, key in zip(topic.tolist(), keys.values(), strict=True)
    )
    return (np.frombuffer(digests, "<u8") >> np.uint64(1)).astype(np.int64) | 1


def crcs_of(payload: memoryview, rows: RowArray) -> I64:
    """Return the CRC-32 of each payload of a SCHEDULE entry, (n, int64)."""
    starts = rows["payload_start"].tolist()
    ends = (rows["payload_start"] + rows["payload_size"]).tolist()
    spans = zip(starts, ends, strict=True)
    return np.fromiter((zlib.crc32(payload[a:b]) for a, b in spans), np.int64, len(rows))


def marks_of(payload: memoryview, rows: RowArray) -> I64:
    """Return the marks in the payloads of a SCHEDULE entry, (n, int64)."""
    marks = np.full(len(rows), MARK_NONE, np.int64)
    has = rows["payload_size"] >= MARK_SIZE
    starts = rows["payload_start"][has].astype(np.int64)
    around = starts[:, None] + np.arange(MARK_SIZE)
    marks[has] = np.frombuffer(payload, np.uint8)[around].view("<i8").ravel()
    return marks
