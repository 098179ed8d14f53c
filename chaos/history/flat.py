"""Lines of histories as rows: the lists of a line become columns, in Arrow arrays.

A line is one row of `history.SCHEMA`, and a batch of lines is a table. All operations work on whole
columns, so a million rows take less than a second. Spark calls these functions in its Python
workers (chaos/audit/rules/client_tables.py).
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
"""The fields of a line that `asked` reads."""
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
"""The fields of a line that `given` reads."""
GIVEN: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("topic", "group")),
        *((name, pa.int64()) for name in ("epoch", "received_ms", "queue_offset", "mark")),
        ("attempt", pa.int32()),
        *((name, pa.int64()) for name in ("fired_at_ms", "due_ms", "seq", "group_id")),
    ]
)
NOBODY: Final = -1
"""The due time and the seq of a malformed id."""

_CHARACTERS: Final = b"0123456789abcdefghijklmnopqrstuv"
_DIGITS: Final = np.full(256, 0xFF, np.uint8)
for _text in (_CHARACTERS, _CHARACTERS.upper()):
    _DIGITS[np.frombuffer(_text, np.uint8)] = np.arange(len(_CHARACTERS))


class _Lines:
    """Lines as rows: each line has one row for each element of its list `of`."""

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
        """Return a single field of the lines, repeated for each of their rows."""
        return self._list(name).take(pa.array(self._line))

    def each(self, name: str) -> Any:
        """Return the elements of a list; null for a row if the list is absent or shorter."""
        column, lengths = self._list(name), self._lengths(name)
        if np.array_equal(lengths, self._sizes):
            return column.flatten()
        if not lengths.any():
            return pa.nulls(len(self._line), column.type.value_type)
        at = np.asarray(column.offsets.to_numpy(), np.int64)[self._line] + self._at
        return column.values.take(pa.array(at, mask=self._at >= lengths[self._line]))


def asked(lines: pa.Table) -> pa.Table:
    """Return one row per requested timer (ASKED), from lines with op `schedule` (ASKED_OF).

    `id`: null if the request made no timer.
    `told`: the name of its ScheduleResult; null if the request was not answered OK.
    `existing_seq`: seq of the timer that it replaced, or that already has its key.
    `least_due_ms`, `most_due_ms`: bounds of the due time of a delay, on the client's clock. The
    cluster received the request between its start and its answer. Null without a delay.
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
    """Return one row per delivery of a message (GIVEN), from lines with op `deliver` (GIVEN_OF)."""
    rows = _Lines(lines, "offsets")
    due_ms, seq = id_parts(rows.each("ids"))
    columns = {name: rows.head(name) for name in GIVEN_OF[:5]}
    lists = {"queue_offset": "offsets", "mark": "marks", "attempt": "attempts"}
    columns |= {name: rows.each(of) for name, of in lists.items()}
    columns |= {"fired_at_ms": rows.each("fired_at_ms"), "due_ms": due_ms, "seq": seq}
    return pa.table([columns[name] for name in GIVEN.names], schema=GIVEN)


def asked_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield `asked` of each batch."""
    for batch in batches:
        yield from asked(pa.Table.from_batches([batch])).to_batches()


def given_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield `given` of each batch."""
    for batch in batches:
        yield from given(pa.Table.from_batches([batch])).to_batches()


def id_parts(ids: Any) -> tuple[Any, Any]:
    """Return (effective due, seq) of timer ids, two int64 arrays; see timer/model/timer_id.py.

    An id has 48 bits of due, 48 bits of seq and 24 bits of check, in 24 digits of base 32. Ten
    digits are 50 bits. A null id gives null, a malformed one gives -1.
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
    """Return the numbers (n,) of n times ten digits of base 32, (n, 10)."""
    number = np.zeros(len(digits), np.int64)
    for at in range(digits.shape[1]):
        number <<= 5
        number |= digits[:, at]
    return number
