"""Entries of the log as rows of the view `events`: Arrow columns of what one entry says.

    SCHEDULE     a row for each timer; its id if the seq is known and the request is no repeat
    CANCEL, RESCHEDULE   a row for each target, by id or by key
    GROUP        a row for each queue offset of an op; none of RESERVE and HAND_OVER
    OCCURRENCES  a row for each series
    others       one row

Only the wanted columns are made.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import (
    AlterGroup,
    AnyOp,
    CreateGroup,
    DeleteTopic,
    EndProducer,
    Ids,
    Move,
    Nack,
    Op,
    Targets,
)
from timer.entries.policies import decode_policy
from timer.entries.series_payloads import (
    ENDED,
    AlterSeries,
    CreateSeries,
    DeleteSeries,
    decode_occurrences,
    decode_series,
)
from timer.model import timer_id
from timer.model.columns import Binary, OnConflict, Schedule, decode_schedule, gather
from timer.model.row_traits import none_of, split
from timer.state.producers import name_of
from timerspark import arrow_columns
from timerspark.log.log_options import EVENT_COLUMNS
from timerspark.log.log_plan import Names, Seqs, issued_count

_ARROW: Final = {
    "STRING": pa.string(),
    "BIGINT": pa.int64(),
    "INT": pa.int32(),
    "BINARY": pa.binary(),
    "TIMESTAMP": arrow_columns.STAMP,
    "MAP<STRING, STRING>": arrow_columns.TEXTS,
}
_OF_OP: Final = {
    Op.ACK: "ack",
    Op.NACK: "nack",
    Op.ENDED: "lease_ended",
    Op.RECALL: "recall",
    Op.EXPIRE: "expire",
    Op.EXPIRE_BELOW: "expire_below",
    Op.SEEK: "seek",
    Op.DELETE: "delete_group",
}

Column = Any
"""A value for all rows, an Arrow array, or a function that makes one."""


class Rows(NamedTuple):
    """Rows of one event."""

    event: str
    number: int
    columns: Mapping[str, Column]


class EventReader:
    """Reads one segment's entries, in their order."""

    def __init__(self, names: Names, seqs: Seqs, salt: int | None, columns: Sequence[str]) -> None:
        self._names = names
        self._seqs = seqs
        self._salt = salt
        self._columns = columns
        self._types = [_ARROW[EVENT_COLUMNS[name]] for name in columns]

    def skip(self, entry: Entry) -> None:
        """Count the seqs of an entry that is not wanted."""
        mark = self._seqs.at(entry.index)
        if self._seqs.are_issued_by(entry.kind):
            self._seqs.issue(issued_count(entry.kind, entry.payload, mark))

    def read(self, entry: Entry) -> Iterator[pa.RecordBatch]:
        """Yield the rows of an entry.

        Raises:
            ValueError: it can't be decoded.
        """
        head = {"index": entry.index, "epoch": entry.epoch}
        head["time"] = arrow_columns.stamps([entry.time_ms])[0]
        position = 0
        for event, count, columns in self._rows(entry):
            first, position = position, position + count
            places = np.arange(first, position, dtype=np.int32)
            known = {**head, "event": event, "position": pa.array(places), **columns}
            arrays = [
                self._array(known.get(name), kind, count)
                for name, kind in zip(self._columns, self._types, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=[*self._columns])

    def _array(self, column: Column, kind: pa.DataType, count: int) -> pa.Array:
        if callable(column):
            column = column()
        if isinstance(column, np.ndarray):
            column = pa.array(column.astype(kind.to_pandas_dtype()))
        if isinstance(column, pa.Array):
            return column
        return arrow_columns.repeat(column, kind, count)

    def _rows(self, entry: Entry) -> Iterator[Rows]:
        mark = self._seqs.at(entry.index)
        payload = entry.payload
        match entry.kind:
            case EntryKind.SCHEDULE:
                schedule = decode_schedule(payload)
                refused = [
                    mark is not None and mark.is_refused(n) for n in range(len(schedule.parts))
                ]
                yield self._schedule(schedule, payload, np.array(refused))
            case EntryKind.CANCEL:
                targets = payloads.decode_cancel(payload)
                yield Rows("cancel", len(targets), self._target_columns(targets))
            case EntryKind.RESCHEDULE:
                yield self._reschedule(payloads.decode_reschedule(payload))
            case EntryKind.GROUP:
                for op in payloads.decode_group(payload):
                    yield from self._group_op(op)
            case EntryKind.OCCURRENCES:
                yield self._occurrences(payload)
            case _:
                yield self._single_row(entry)

    # ---- timers

    def _schedule(self, schedule: Schedule, payload: memoryview, refused: Any) -> Rows:
        rows, parts = schedule.rows, schedule.parts
        sizes = parts["rows"]
        accepted = np.repeat(~refused, sizes)
        first = self._seqs.issue(int(accepted.sum()))
        seqs = np.zeros(len(rows), np.uint64)
        if first is not None:
            seqs[accepted] = np.arange(first, first + int(accepted.sum()), dtype=np.uint64)
        return Rows(
            "schedule",
            len(rows),
            {
                **self._body_columns(rows, payload),
                **self._topic_columns(rows["topic"]),
                "id": lambda: self._ids(rows["due_ms"], seqs),
                "due": lambda: arrow_columns.stamps(rows["due_ms"]),
                "requested": lambda: arrow_columns.stamps(rows["requested_ms"]),
                "on_conflict": lambda: _spread(_modes(parts["on_conflict"]), sizes),
                "producer": lambda: _spread(map(_producer, parts["producer_id"].tolist()), sizes),
                "sequence": lambda: _spread([n or None for n in parts["sequence"].tolist()], sizes),
                "request_id": lambda: _spread(
                    [each and each.text.decode() for each in schedule.requests], sizes
                ),
            },
        )

    def _body_columns(self, rows: Any, payload: memoryview) -> dict[str, Column]:
        bufs = {0: payload}

        @cache
        def headers() -> tuple[Binary, Any]:
            plain, traits = split(gather(rows, bufs, "headers"))
            return plain, traits or none_of(len(rows))

        def texts(of: Binary) -> pa.Array:
            return arrow_columns.binary(of.sizes, of.blob, pa.string(), nulls=True)

        def bodies() -> pa.Array:
            of = gather(rows, bufs, "payload")
            return arrow_columns.binary(of.sizes, of.blob, pa.binary())

        return {
            "key": lambda: texts(gather(rows, bufs, "key")),
            "payload": bodies,
            "headers": lambda: arrow_columns.headers(headers()[0].sizes, headers()[0].blob),
            "ordering_key": lambda: texts(headers()[1].ordering),
            "priority": lambda: headers()[1].priority,
        }

    def _target_columns(self, targets: Targets) -> dict[str, Column]:
        if isinstance(targets, Ids):
            return {"id": lambda: self._ids(targets.due_ms, targets.seq)}
        key = targets.key
        return {
            **self._topic_columns(targets.topic),
            "key": lambda: arrow_columns.binary(key.sizes, key.blob, pa.string(), nulls=True),
        }

    def _reschedule(self, order: payloads.Reschedule) -> Rows:
        count = len(order.due_ms)
        columns = self._target_columns(order.targets)
        columns["new_id"] = self._issue_ids(count, order.due_ms)
        columns["due"] = lambda: arrow_columns.stamps(order.due_ms)
        columns["requested"] = lambda: arrow_columns.stamps(order.requested_ms)
        return Rows("reschedule", count, columns)

    def _occurrences(self, payload: memoryview) -> Rows:
        planned = decode_occurrences(payload)
        there = planned.planned_ms != ENDED
        count = len(there)
        columns: dict[str, Column] = {
            "id": self._issue_ids(count, planned.due_ms),
            "series": planned.series,
            "sequence": planned.number,
            "due": lambda: _where(there, arrow_columns.stamps(planned.due_ms)),
            "requested": lambda: _where(there, arrow_columns.stamps(planned.planned_ms)),
        }
        return Rows("occurrence", count, columns)

    def _issue_ids(self, count: int, due_ms: Any) -> Column:
        """Issue seqs, and return the ids of the timers that begin."""
        first = self._seqs.issue(count)
        if first is None:
            return None
        seqs = np.arange(first, first + count, dtype=np.uint64)
        return lambda: self._ids(due_ms, seqs)

    def _ids(self, due_ms: Any, seqs: Any) -> Column:
        """Return ids as text; null where the seq is 0, and without a salt."""
        if self._salt is None:
            return pa.nulls(len(seqs), pa.string())
        raw = timer_id.encode(due_ms.astype(np.int64), seqs.astype(np.uint64), self._salt)
        table = np.frombuffer(raw, np.uint8).reshape(-1, timer_id.SIZE)
        return _where(seqs > 0, arrow_columns.id_texts(table))

    def _topic_columns(self, topics: Any) -> dict[str, Column]:
        def names() -> pa.Array:
            different, places = np.unique(topics, return_inverse=True)
            known = [self._names.topics.get(topic) for topic in different.tolist()]
            return pa.array(known, pa.string()).take(pa.array(places))

        return {"topic": names, "topic_id": topics}

    # ---- groups

    def _group_op(self, op: AnyOp) -> Iterator[Rows]:
        columns: dict[str, Column] = {
            "topic": self._names.topics.get(op.topic),
            "topic_id": op.topic,
        }
        if isinstance(op, CreateGroup):
            details = {"start": str(op.start), **asdict(op.settings)}
            yield Rows("create_group", 1, {**columns, "group": op.name, "details": _json(details)})
            return
        columns["group"] = self._names.groups.get(op.group)
        if isinstance(op, AlterGroup):
            yield Rows("alter_group", 1, {**columns, "details": _json(op.changes)})
            return
        columns["offset"] = op.offsets
        if isinstance(op, Move):
            moved = memoryview(op.rows)
            rows = decode_schedule(moved).rows
            new_id = self._issue_ids(len(rows), rows["due_ms"])
            more = {**self._body_columns(rows, moved), "new_id": new_id, "to_topic": op.to}
            yield Rows("move", len(rows), {**columns, **more})
        elif op.op is Op.DELETE:
            yield Rows(_OF_OP[op.op], 1, {**columns, "offset": None})
        elif op.op in _OF_OP:
            if isinstance(op, Nack):
                columns["until"] = lambda: arrow_columns.stamps(op.not_before_ms)
            yield Rows(_OF_OP[op.op], len(op.offsets), columns)

    # ---- entries of one row

    def _single_row(self, entry: Entry) -> Rows:
        payload = entry.payload
        match entry.kind:
            case EntryKind.FIRE:
                until = arrow_columns.stamps([payloads.decode_fire(payload).read_time_ms])
                return Rows("fire", 1, {"until": until})
            case EntryKind.TOPIC:
                topic = payloads.decode_topic(payload)
                if isinstance(topic, DeleteTopic):
                    name = self._names.topics.get(topic.topic)
                    return Rows("delete_topic", 1, {"topic": name, "topic_id": topic.topic})
                return Rows("create_topic", 1, {"topic": topic.name})
            case EntryKind.PRODUCER:
                change = payloads.decode_producer(payload)
                if isinstance(change, EndProducer):
                    return Rows("end_producer", 1, {"producer": _producer(change.producer_id)})
                return Rows("register_producer", 1, {"producer": _producer(change[1])})
            case EntryKind.POLICY:
                return self._policy(payload)
            case EntryKind.SERIES:
                return self._series(payload)
            case EntryKind.EPOCH:
                start = payloads.decode_epoch(payload)
                voters = [f"{voter:016x}" for voter in start.voters]
                details = {"leader": f"{start.leader:016x}", "voters": voters, "level": start.level}
                return Rows("epoch", 1, {"details": _json(details)})
            case _:
                return Rows(entry.kind.name.lower(), 1, {})

    def _policy(self, payload: memoryview) -> Rows:
        scope, policy = decode_policy(payload)
        details = {name: value for name, value in asdict(policy).items() if value is not None}
        if scope.namespace:
            details["namespace"] = scope.namespace
        topic = {"topic": self._names.topics.get(scope.topic), "topic_id": scope.topic or None}
        return Rows("policy", 1, {**topic, "details": _json(details)})

    def _series(self, payload: memoryview) -> Rows:
        op = decode_series(payload)
        if isinstance(op, DeleteSeries):
            return Rows("delete_series", 1, {"series": op.series})
        fields = op.changes if isinstance(op, AlterSeries) else asdict(op.spec)
        columns: dict[str, Column] = {"payload": fields.get("payload")}
        if headers := fields.get("headers"):
            columns["headers"] = lambda: arrow_columns.headers([len(headers)], headers)
        bodies = ("payload", "headers")
        columns["details"] = _json({n: each for n, each in fields.items() if n not in bodies})
        if isinstance(op, CreateSeries):
            name = self._names.topics.get(op.topic)
            columns |= {"topic": name, "topic_id": op.topic, "key": op.key.decode()}
            return Rows("create_series", 1, columns)
        return Rows("alter_series", 1, {**columns, "series": op.series})


def _producer(producer_id: int) -> str | None:
    """Return a producer's public name; the id itself is its client's secret."""
    return f"{name_of(producer_id):016x}" if producer_id else None  # type: ignore[arg-type]


def _modes(modes: Any) -> list[str]:
    return [OnConflict(mode).name.lower() for mode in modes.tolist()]


def _spread(values: Any, sizes: Any) -> Column:
    """Return a value of each part, a text or a number, as a column of its rows."""
    each = pa.array([*values])
    if pa.types.is_null(each.type):
        return None
    return each.take(pa.array(np.repeat(np.arange(len(sizes)), sizes)))


def _where(mask: Any, column: pa.Array) -> pa.Array:
    """Return a column with nulls where the mask is false."""
    return column if mask.all() else pa.compute.if_else(pa.array(mask), column, None)


def _json(details: Mapping[str, Any]) -> str:
    return json.dumps(details, default=str)
