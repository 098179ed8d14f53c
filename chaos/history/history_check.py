"""The format of histories (docs/history-format.md) as code: each line is checked against it.

An audit believes its histories, and Spark reads a value that it can't parse as null. A wrong unit,
a short list or a misspelt field would weaken the audit without a word. The check names each of
them: file, line, field, value, and the values that are allowed.

A history is JSON lines (*.jsonl) or Parquet (*.parquet) with the same columns. A null is an absent
field. A crash may cut the last line: without a newline, and no JSON, it is left out.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from chaos.history.history import MARK_NONE, MS_MAX, SCHEMA, OpOutcome

SHOWN_MAX: Final = 80
"""Most characters of a value in a problem's text."""
PROBLEMS_MAX: Final = 20
"""Most problems that the command prints for one file."""
_ROWS: Final = 1024
"""Rows of a Parquet file that are in memory at once."""


def _arrow_types() -> dict[str, pa.DataType]:
    of = {"STRING": pa.string(), "BIGINT": pa.int64(), "INT": pa.int32()}
    types = dict(column.split() for column in SCHEMA.replace("`", "").split(","))
    return {
        name: pa.list_(of[kind[6:-1]]) if kind.startswith("ARRAY<") else of[kind]
        for name, kind in types.items()
    }


COLUMNS: Final[Mapping[str, pa.DataType]] = _arrow_types()
"""The columns of a history in Parquet. A column without values may be left out."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One field of one line that the format does not allow."""

    path: Path
    line: int
    """Counted from 1; in Parquet the row. 0: the file as a whole is wrong."""
    field: str
    """Empty: the line as a whole is wrong."""
    value: str
    allowed: str

    def __str__(self) -> str:
        """Return it as one line: FILE:LINE: FIELD = VALUE: the values that are allowed."""
        place = f"{self.path}:{self.line}" if self.line else f"{self.path}"
        what = f"{self.field} = {self.value}" if self.field else self.value
        return f"{place}: {what}: {self.allowed}"


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value: its description, and the test of a value."""

    allowed: str
    fits: Callable[[Any], bool]


def _integer(low: int, high: int, unit: str) -> ValueKind:
    def fits(value: Any) -> bool:
        return type(value) is int and low <= value <= high

    return ValueKind(f"an integer {low} .. {high}{unit}", fits)


def _text(allowed: str, pattern: str) -> ValueKind:
    regex = re.compile(pattern, re.DOTALL)
    return ValueKind(allowed, lambda value: isinstance(value, str) and bool(regex.fullmatch(value)))


def _one_of(words: str) -> ValueKind:
    names = words.split()
    return ValueKind(f"one of {', '.join(names)}", lambda value: value in names)


def _is_map(value: Any) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except (TypeError, ValueError):
        return False


_I64: Final = (1 << 63) - 1
MS: Final = _integer(0, MS_MAX, ", Unix milliseconds")
COUNT: Final = _integer(0, _I64, "")
NAME: Final = _text("a string that is not empty", ".+")
ID: Final = _text("a timer id: 24 characters of 0-9 and a-v", "[0-9a-v]{24}")
OUTCOME: Final = _one_of("ok fail unknown")

_NOT_MOVED: Final = "ALREADY_CANCELLED ALREADY_FIRED NOT_FOUND DROPPED"
_REFUSED: Final = "ALREADY_ACKED ACK_LEASE_LOST ACK_NOT_DELIVERED EXPIRED DEAD_LETTERED"
KINDS: Final[Mapping[str, ValueKind]] = {
    **dict.fromkeys(("start_ms", "end_ms", "received_ms", "handed_out_ms", "due_ms"), MS),
    **dict.fromkeys(("fired_at_ms", "due_from_ms", "due_to_ms"), MS),
    **dict.fromkeys(("group", "key", "key_prefix", "keys", "ordering_keys"), NAME),
    **dict.fromkeys(("ids", "new_ids", "existing"), ID),
    **dict.fromkeys(("ack.outcome", "nack.outcome", "extend.outcome"), OUTCOME),
    "topic": _text("a topic's name; without default/, as the log has it", "(?!default/.).+"),
    "outcome": _one_of(" ".join(OpOutcome)),
    "detail": ValueKind("a string", lambda value: isinstance(value, str)),
    "said": ValueKind("a JSON object, as a string", _is_map),
    "on_conflict": _one_of("reject replace keep update"),
    "delay_ms": _integer(0, MS_MAX, ", milliseconds"),
    "schedule.marks": _integer(0, _I64, ", unique in the run"),
    "marks": _integer(MARK_NONE, _I64, ""),
    "attempts": _integer(1, (1 << 31) - 1, ""),
    "payload_crcs": _integer(0, (1 << 32) - 1, ""),
    "priorities": _integer(0, 9, ""),
    "schedule.results": _one_of("SCHEDULED REPLACED KEPT REJECTED NOT_PENDING"),
    "cancel.results": _one_of(f"CANCELLED TIMER_NOT_FOUND RESCHEDULED {_NOT_MOVED}"),
    "reschedule.results": _one_of(f"RESCHEDULED {_NOT_MOVED}"),
    "ack.results": _one_of(f"ACKED {_REFUSED}"),
    "nack.results": _one_of(f"NACKED {_REFUSED}"),
    "extend.results": _one_of(f"EXTENDED {_REFUSED}"),
}
"""FIELD or OP.FIELD -> the kind of its value, or of its elements. Others are COUNTs."""
NULLS: Final[Mapping[str, Sequence[str]]] = {
    "schedule.ids": ("REJECTED", "NOT_PENDING"),
    "schedule.existing": ("SCHEDULED", "NOT_PENDING"),
    "reschedule.new_ids": _NOT_MOVED.split(),
}
"""OP.FIELD -> the results for which an element is null, and no others."""
_GAPS: Final = ("schedule.keys", "schedule.ordering_keys", "deliver.series", "deliver.occurrences")
"""Lists with elements that may be null."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an operation."""

    kind: ValueKind
    many: bool
    """The field is a list. All lists of a line are equally long."""
    required: bool
    answer: bool
    """The field belongs to an answer: it is absent unless the outcome is ok. If it is required, it
    is present then."""
    gaps: bool
    """An element may be null."""
    null_if: Sequence[str]
    """An element is null exactly where the element of `results` is one of these."""


def _field(op: str, name: str, marks: str) -> Field:
    """Return a field of an operation. `marks`: ? for an optional field, ! for an answer."""
    at = f"{op}.{name}"
    return Field(
        KINDS.get(at) or KINDS.get(name, COUNT),
        many=pa.types.is_list(COLUMNS[name]),
        required="?" not in marks,
        answer="!" in marks,
        gaps=at in _GAPS,
        null_if=NULLS.get(at, ()),
    )


_CHANGE: Final = "start_ms outcome end_ms? request? answered? detail?"
"""Of an operation that may have a line before it is sent."""
_HELD: Final = "start_ms end_ms outcome topic group offsets detail? epoch? lease_id? results!"
"""Of an operation on messages that a consumer holds."""
_FILTER: Final = "due_from_ms? due_to_ms? key_prefix?"
_FORMAT: Final[Mapping[str, str]] = {
    "schedule": f"{_CHANGE} topic marks payload_crcs? due_ms? delay_ms? producer? sequence? keys?"
    " on_conflict? ordering_keys? priorities? ids! results?! existing?!",
    "cancel": f"{_CHANGE} ids results!",
    "cancel by key": f"{_CHANGE} topic keys results!",
    "cancel by filter": f"{_CHANGE} topic {_FILTER} changed!",
    "reschedule": f"{_CHANGE} ids due_ms? results! new_ids!",
    "reschedule by key": f"{_CHANGE} topic keys due_ms? results! new_ids!",
    "reschedule by filter": f"{_CHANGE} topic {_FILTER} due_ms? changed!",
    "open": "topic group start_ms lease_ms? group_lease_ms? max_attempts? max_in_flight?",
    "deliver": "topic group received_ms epoch offsets ids marks attempts fired_at_ms due_ms"
    " lease_id? group_id? stream? handed_out_ms? series? occurrences?",
    "ack": _HELD,
    "nack": f"{_HELD} delay_ms?",
    "extend": f"{_HELD} lease_ms?",
    "policy": f"{_CHANGE} topic said",
    "delete": f"{_CHANGE} topic topic_id?! pending?!",
    "seek": f"{_CHANGE} topic group to_offset? group_id!",
    "delete_group": f"{_CHANGE} topic group",
    "redrive": f"{_CHANGE} topic changed!",
    "create_series": f"{_CHANGE} topic key said",
    "alter_series": f"{_CHANGE} topic key said",
    "delete_series": f"{_CHANGE} topic key",
}
OPS: Final[Mapping[str, Mapping[str, Field]]] = {
    kind: {
        name: _field(kind.split()[0], name, marks)
        for name, marks in re.findall(r"(\w+)([?!]*)", fields)
    }
    for kind, fields in _FORMAT.items()
}
"""Operation -> its fields. `op` and `client` are in every line besides."""
NAMES: Final = tuple(dict.fromkeys(name.split()[0] for name in OPS))
"""The values of `op`."""
_OF_MESSAGES: Final = ("deliver", "ack", "nack", "extend")
_DISTINCT: Final = {"schedule": "marks"} | dict.fromkeys(_OF_MESSAGES, "offsets")
"""Operation -> the list in which no element may be repeated."""

Complaint = tuple[str, Any, str]
"""Field, value, the values that are allowed."""


def check(path: Path) -> Iterator[Problem]:
    """Yield the problems of a history, in the order of its lines. A history without any is sound.

    The file is read once, a line or _ROWS rows at a time.

    Raises:
        OSError: the file can't be read.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        yield Problem(path, 0, "", path.suffix or "no suffix", f"must be {' or '.join(_READERS)}")
        return
    for number, line in reader(path):
        for field, value, allowed in [line] if isinstance(line, tuple) else check_line(line):
            yield Problem(path, number, field, _shown(value) if field else value, allowed)


def kind_of(line: Mapping[str, Any]) -> str:
    """Return the operation (one of OPS) of a line whose `op` is one of NAMES.

    A cancel or a reschedule names its timers by ids, by keys or by a filter.
    """
    op = str(line["op"])
    if op not in ("cancel", "reschedule") or line.get("ids") is not None:
        return op
    if line.get("keys") is not None:
        return f"{op} by key"
    names = ("topic", "changed", "due_from_ms", "due_to_ms", "key_prefix")
    return f"{op} by filter" if any(line.get(name) is not None for name in names) else op


def check_line(line: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield the problems of one line. A null is an absent field."""
    given = {name: value for name, value in line.items() if value is not None}
    op = given.pop("op", None)
    if not isinstance(op, str) or op not in NAMES:
        yield "op", op, f"must be one of {', '.join(NAMES)}"
        return
    if not NAME.fits(given.get("client")):
        yield "client", given.get("client"), f"must be {NAME.allowed}"
    given.pop("client", None)
    kind = kind_of(line)
    fields = OPS[kind]
    for name in sorted(given.keys() - fields.keys()):
        yield name, given[name], f"{kind} has no such field; it has {', '.join(fields)}"
    wrong = [*_wrong_fields(given, fields)]
    yield from wrong
    if not wrong:
        yield from _wrong_relations(op, given, fields)


def _wrong_fields(given: Mapping[str, Any], fields: Mapping[str, Field]) -> Iterator[Complaint]:
    """Yield the fields that are missing, or have a value of another kind."""
    for name, field in fields.items():
        value, kind = given.get(name), field.kind
        if value is None:
            if field.required and not field.answer:
                yield name, None, f"must be {'a list, each ' if field.many else ''}{kind.allowed}"
        elif not field.many:
            if not kind.fits(value):
                yield name, value, f"must be {kind.allowed}"
        elif not isinstance(value, list) or not value:
            yield name, value, f"must be a list of one or more, each {kind.allowed}"
        else:
            may_lack = field.gaps or field.null_if
            fits = (kind.fits(each) or (each is None and may_lack) for each in value)
            at = next((at for at, fine in enumerate(fits) if not fine), None)
            if at is not None:
                yield f"{name}[{at}]", value[at], f"must be {kind.allowed}"


def _wrong_relations(
    op: str, given: Mapping[str, Any], fields: Mapping[str, Field]
) -> Iterator[Complaint]:
    """Yield the fields that contradict each other. Each is right by itself."""
    if "end_ms" in given and given["end_ms"] < given["start_ms"]:
        yield "end_ms", given["end_ms"], f"must not be before start_ms ({given['start_ms']})"
    for name, field in fields.items():
        if not field.answer or (name not in given and not field.required):
            continue
        if (name in given) != (given["outcome"] == OpOutcome.OK):
            rule = f"must be there if, and only if, outcome is ok; it is {given['outcome']}"
            yield name, given.get(name), rule
    if "request" in fields:
        asked = given["outcome"] == OpOutcome.ASKED
        if asked == ("end_ms" in given):
            must = "must not be there" if asked else "must be there"
            yield "end_ms", given.get("end_ms"), f"{must}: outcome is {given['outcome']}"
        if asked and "request" not in given:
            yield "request", None, "must be there: outcome is asked"
        if "answered" in given and (asked or given["answered"] <= given.get("request", _I64)):
            above = f"must be above request ({given.get('request', 'absent')})"
            yield "answered", given["answered"], f"{above}, in the line of an outcome"
    lists = [name for name, field in fields.items() if field.many and name in given]
    for name in lists[1:]:
        if len(given[name]) != len(given[lists[0]]):
            rule = f"must have one element for each of {lists[0]} ({len(given[lists[0]])})"
            yield name, f"{len(given[name])} elements", rule
    yield from _wrong_gaps(given, fields)
    distinct = _DISTINCT.get(op)
    if distinct and len({*given[distinct]}) < len(given[distinct]):
        yield distinct, given[distinct], "must all be different"


def _wrong_gaps(given: Mapping[str, Any], fields: Mapping[str, Field]) -> Iterator[Complaint]:
    """Yield elements that are null where `results` demands an id, or the reverse."""
    for name, field in fields.items():
        if not field.null_if or name not in given:
            continue
        if fields["results"].required and "results" not in given:
            continue  # the missing results are a problem already
        results = given.get("results") or [""] * len(given[name])
        for at, (each, result) in enumerate(zip(given[name], results, strict=False)):
            if (each is None) != (result in field.null_if):
                nulls = " or ".join(sorted(field.null_if))
                rule = f"must be null if, and only if, results[{at}] is {nulls}"
                yield f"{name}[{at}]", each, f"{rule}; it is {result or 'absent'}"
                break


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


# ---- reading: the number of a line, and the line itself or the complaint that it is malformed

Line = tuple[int, "dict[str, Any] | Complaint"]


def _json_lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError
                if not raw.endswith(b"\n") and b"\r" not in raw:
                    return  # a crash of the writer cut this line
                yield number, ("", _shown(raw.decode(errors="replace")), f"not JSON: {error}")
                continue
            if isinstance(line, dict):
                yield number, line
            else:
                yield number, ("", _shown(line), "must be a JSON object")


def _parquet_rows(path: Path) -> Iterator[Line]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        yield 0, ("", "not Parquet", str(error))
        return
    with file:
        wrong = [*_wrong_columns(file.schema_arrow)]
        yield from ((0, complaint) for complaint in wrong)
        if wrong:
            return
        number = 0
        for batch in file.iter_batches(batch_size=_ROWS):
            for line in batch.to_pylist():
                number += 1
                yield number, line


def _wrong_columns(schema: pa.Schema) -> Iterator[Complaint]:
    for column in schema:
        wanted = COLUMNS.get(column.name)
        if wanted is None:
            yield column.name, str(column.type), f"no such column; there are {', '.join(COLUMNS)}"
        elif _plain(column.type) != _plain(wanted):
            yield column.name, str(column.type), f"must be {wanted}"


def _plain(kind: pa.DataType) -> str:
    """Return the type without the width of Arrow's offsets and the name of elements."""
    return re.sub(r"large_|\w+: | not null", "", str(kind))


_READERS: Final = {".jsonl": _json_lines, ".parquet": _parquet_rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.history.history_check`. Return 0: sound; 1: problems; 2: unreadable."""
    parser = argparse.ArgumentParser(description="check histories: docs/history-format.md")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    status = 0
    for path in parser.parse_args(argv).files:
        try:
            count = 0
            for count, problem in enumerate(check(path), start=1):
                if count <= PROBLEMS_MAX:
                    print(problem, file=sys.stderr)
        except OSError as error:
            print(error, file=sys.stderr)
            status = 2
            continue
        if count > PROBLEMS_MAX:
            print(f"{path}: {count - PROBLEMS_MAX:,} more problems", file=sys.stderr)
        print(f"{path}: {f'{count:,} problems' if count else 'all right'}")
        status = max(status, int(count > 0))
    return status


if __name__ == "__main__":
    sys.exit(main())
