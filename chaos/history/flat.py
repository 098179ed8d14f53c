"""Lines of histories as rows: lists that belong together become columns, in Arrow's own arrays.

A line is one row of `history.SCHEMA`, a batch of lines a table. Nothing here looks at single rows:
a million takes less than a second. Spark calls it in its Python workers
(chaos/audit/rules/client_tables.py).
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timer.model.columns import I64
from timer.model.timer_id import TEXT_SIZE

ASKED_OF: Final = (
    *("topic", "outcome", "on_conflict", "marks", "due_ms", "ids", "keys", "results", "existing"),
    *("start_ms", "end_ms", "delay_ms"),
)
"""What `asked` takes of a line."""
ASKED: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("topic", "outcome", "on_conflict")),
        *((name, pa.int64()) for name in ("mark", "asked_due_ms")),
        *((name, pa.string()) for name in ("id", "key", "told")),
        *((name, pa.int64()) for name in ("existing_seq", "answered_due_ms", "answered_seq")),
        *((name, pa.int64()) for name in ("least_due_ms", "most_due_ms")),
    ]
)
GIVEN_OF: Final = (
    *("topic", "group", "epoch", "received_ms", "group_id"),
    *("offsets", "ids", "marks", "attempts", "fired_at_ms"),
)
"""What `given` takes of a line."""
GIVEN: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("topic", "group")),
        *((name, pa.int64()) for name in ("epoch", "received_ms", "queue_offset", "mark")),
        ("attempt", pa.int32()),
        *((name, pa.int64()) for name in ("fired_at_ms", "due_ms", "seq", "group_id")),
    ]
)
NOBODY: Final = -1
"""The due time and the seq of an id that is none."""

_CHARACTERS: Final = b"0123456789abcdefghijklmnopqrstuv"
_DIGITS: Final = np.full(256, 0xFF, np.uint8)
for _text in (_CHARACTERS, _CHARACTERS.upper()):
    _DIGITS[np.frombuffer(_text, np.uint8)] = np.arange(len(_CHARACTERS))


class _Lines:
    """Some lines; each has as many rows as its list `of` has elements."""

    def __init__(self, lines: pa.Table, of: str) -> None:
        self._lines = lines.combine_chunks()
        self._sizes = self._lengths(of)
        self._line = np.repeat(np.arange(len(self._sizes)), self._sizes)
        ends = np.cumsum(self._sizes)
        self._at = np.arange(len(self._line)) - np.repeat(ends - self._sizes, self._sizes)

    def _list(self, name: str) -> Any:
        column = self._lines[name]
        return column.chunk(0) if column.num_chunks else pa.array([], column.type)

    def _lengths(self, name: str) -> I64:
        lengths = pc.fill_null(pc.list_value_length(self._list(name)), 0)
        return np.asarray(lengths.to_numpy(), np.int64)

    def head(self, name: str) -> Any:
        """Return what a line says of all its rows."""
        return self._list(name).take(pa.array(self._line))

    def each(self, name: str) -> Any:
        """Return the elements of a list; null where it has none for a row."""
        column, lengths = self._list(name), self._lengths(name)
        if np.array_equal(lengths, self._sizes):
            return column.flatten()
        if not lengths.any():
            return pa.nulls(len(self._line), column.type.value_type)
        at = np.asarray(column.offsets.to_numpy(), np.int64)[self._line] + self._at
        return column.values.take(pa.array(at, mask=self._at >= lengths[self._line]))


def asked(lines: pa.Table) -> pa.Table:
    """Return one row per timer that was asked for (ASKED), of lines `schedule` (ASKED_OF).

    `told`: of what was answered, what became of it, a ScheduleResult by name.
    `existing_seq`: the timer that it replaced, or that has its `key`. What made no timer has no id.
    `least_due_ms`, `most_due_ms`: between these it is due by its delay and the client's clock, as
    the request was taken between its begin and its answer.
    """
    rows = _Lines(lines, "marks")
    outcome = rows.head("outcome")
    told = pc.coalesce(rows.each("results"), pa.scalar("SCHEDULED"))
    none = pa.scalar(None, pa.string())
    told = pc.if_else(pc.fill_null(pc.equal(outcome, "ok"), False), told, none)  # noqa: FBT003
    made = pc.is_in(told, pa.array(["SCHEDULED", "REPLACED"]))
    ids = pc.if_else(made, rows.each("ids"), none)
    due_ms, seq = id_parts(ids)
    delay_ms = rows.head("delay_ms")
    answered_ms = pc.if_else(
        pc.equal(outcome, "ok"), rows.head("end_ms"), pa.scalar(None, pa.int64())
    )
    columns = {
        "topic": rows.head("topic"),
        "outcome": outcome,
        "on_conflict": pc.coalesce(rows.head("on_conflict"), pa.scalar("reject")),
        "mark": rows.each("marks"),
        "asked_due_ms": rows.each("due_ms"),
        "id": ids,
        "key": rows.each("keys"),
        "told": told,
        "existing_seq": id_parts(rows.each("existing"))[1],
        "answered_due_ms": due_ms,
        "answered_seq": seq,
        "least_due_ms": pc.add(rows.head("start_ms"), delay_ms),
        "most_due_ms": pc.add(answered_ms, delay_ms),
    }
    return pa.table([columns[name] for name in ASKED.names], schema=ASKED)


def given(lines: pa.Table) -> pa.Table:
    """Return every delivery of a message (GIVEN), none merged, of lines `deliver` (GIVEN_OF)."""
    rows = _Lines(lines, "offsets")
    due_ms, seq = id_parts(rows.each("ids"))
    columns = {name: rows.head(name) for name in GIVEN_OF[:5]}
    lists = {"queue_offset": "offsets", "mark": "marks", "attempt": "attempts"}
    columns |= {name: rows.each(of) for name, of in lists.items()}
    columns |= {"fired_at_ms": rows.each("fired_at_ms"), "due_ms": due_ms, "seq": seq}
    return pa.table([columns[name] for name in GIVEN.names], schema=GIVEN)


def asked_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return `asked` of each batch."""
    for batch in batches:
        yield from asked(pa.Table.from_batches([batch])).to_batches()


def given_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return `given` of each batch."""
    for batch in batches:
        yield from given(pa.Table.from_batches([batch])).to_batches()


def id_parts(ids: Any) -> tuple[Any, Any]:
    """Return (effective due, seq) of timer ids, as timer/model/timer_id.py lays them out.

    48 bits due, 48 bits seq, 24 bits check, in 24 digits of base 32: ten digits are 50 bits. Null
    of null, NOBODY of what is no id.
    """
    if ids.null_count == len(ids):
        return pa.nulls(len(ids), pa.int64()), pa.nulls(len(ids), pa.int64())
    there = pc.is_valid(ids).to_numpy(zero_copy_only=False)
    sized = pc.fill_null(pc.equal(pc.binary_length(ids), TEXT_SIZE), False)  # noqa: FBT003
    whole = sized.to_numpy(zero_copy_only=False)
    texts = ids if whole.all() else ids.filter(sized)
    _, ends, data = texts.buffers()
    first = int(np.frombuffer(ends, np.int32)[texts.offset]) if len(texts) else 0
    text = np.frombuffer(data or b"", np.uint8)[first : first + len(texts) * TEXT_SIZE]
    digits = _DIGITS[text.reshape(-1, TEXT_SIZE)]
    high, low = (_number(digits[:, at : at + 10]) for at in (0, 10))
    good = digits.max(axis=1, initial=0) < len(_CHARACTERS)
    found = []
    for part in (high >> 2, (high & 3) << 46 | low >> 4):
        full = np.full(len(ids), NOBODY, np.int64)
        full[whole] = np.where(good, part, NOBODY)
        found.append(pa.array(full, mask=~there))
    return found[0], found[1]


def _number(digits: npt.NDArray[np.uint8]) -> I64:
    """Return what ten digits of base 32 say, (n, 10)."""
    number = np.zeros(len(digits), np.int64)
    for at in range(digits.shape[1]):
        number <<= 5
        number |= digits[:, at]
    return number
