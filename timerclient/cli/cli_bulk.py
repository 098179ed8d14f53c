"""`timerctl schedule TOPIC --from FILE`: many timers, one JSON object in each line.

    {"payload": "remind me", "delay": "30m", "key": "order-4711", "headers": {"a": "b"}}
    {"payload_base64": "AAE=", "due": "2030-01-01T09:00:00+01:00", "request_id": "mail-17"}

Lines are sent in requests of up to 500 lines and about a mebibyte. A request has the id
ID.LINE, with the ID of --request-id or a random one and the number of its first line. So a command
that failed can be repeated: `--skip N --request-id ID` continues with the request that failed, and
the cluster recognizes a request that it had accepted. A line with a `request_id` is a request of
its own. While the cluster is overloaded, requests wait: it remembers the timers of requests with
ids, and takes no more than it can remember.

A file is read once before its first line is sent, so that a wrong line schedules nothing. The check
has the default limits of a cluster. Standard input is checked request by request, and the cluster
alone checks its sizes.
"""

import argparse
import base64
import binascii
import json
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Final, TypeVar

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import when_of
from timerclient.cli.cli_errors import INTERRUPTED, NOT_CHANGED, OK, as_typed, put_failure
from timerclient.client.aio import make_row
from timerclient.client.timer_client import TimerClient
from timerclient.rows import rows
from timerclient.rows.rows import NewTimer, OnConflict
from timerclient.streams.producer import SingleRow
from timerclient.values.errors import (
    AlreadyExists,
    Described,
    InvalidRequest,
    NotPending,
    Overloaded,
    TimerError,
)
from timerclient.values.results import ScheduleResult

LINES_MAX: Final = 500
BYTES_MAX: Final = 1 << 20
HEADER_BYTES: Final = 64
"""Least size of a header here. So a request has at most 32,768 names and values, as it may."""
LINE_BYTES: Final = 32 << 20
ID_BYTES: Final = 40
"""Of --request-id: the number of a line follows it, and the cluster takes ids of 64 bytes."""
SINGLES_AT_ONCE: Final = 16
"""Requests of single lines that are sent together."""
_DUE: Final = ("due", "due_ms", "delay", "delay_level")
_PAYLOADS: Final = ("payload", "payload_base64")
_FIELDS: Final = (*(*_PAYLOADS, *_DUE, "key", "ordering_key", "priority", "headers", "request_id"),)
SIZES: Final = {"payload": 4 << 20, "key": 1_024, "ordering_key": 1_024, "headers": 32 << 10}
"""Most bytes of a line's field by the defaults of a cluster (`LimitsConfig`)."""
_LIMITS: Final = {"due": "a string", "delay": "a string or a number of seconds"}
WAIT_S: Final = 600.0
"""Longest wait of a request for room: the cluster forgets an id after five minutes by default."""
FAILED_SHOWN_MAX: Final = 10
"""Lines without a timer that the command names, except with -o wide or json."""
VALUE_SHOWN_MAX: Final = 40
"""Characters of a value in an error."""
_ROW: Final = re.compile(r"timers\[(\d+)\]\.")
"""The place of a timer among those of a request, in an error."""
_DONE: Final = (ScheduleResult.SCHEDULED, ScheduleResult.REPLACED, ScheduleResult.KEPT)
T = TypeVar("T")
_WHY: Final = {
    ScheduleResult.REJECTED: "a pending timer has its key",
    ScheduleResult.NOT_PENDING: "no pending timer has its key",
}


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line of the input."""

    number: int
    """From 1."""
    timer: NewTimer
    size: int
    """Approximate bytes in a request."""
    request_id: str | None


@dataclass(frozen=True, slots=True)
class LineResult:
    """The outcome of one line."""

    result: ScheduleResult
    timer_id: str | None
    due_ms: int | None
    duplicate: bool


# ---- lines


def lines_of(file: IO[bytes], args: argparse.Namespace) -> Iterator[InputLine]:
    """Yield the lines after --skip; empty ones are left out.

    Raises:
        InvalidRequest: A line is wrong. The error names its number.
    """
    named: dict[str, int] = {}
    for number, text in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), 1):
        if number <= args.skip or not text.strip():
            continue
        if len(text) > LINE_BYTES:
            raise InvalidRequest(f"line {number}: must have at most {LINE_BYTES} bytes")
        try:
            line = _line(number, text, args)
            if line.request_id is not None and args.source != "-":  # a pipe may have no end
                first = named.setdefault(line.request_id, number)
                if first != number:
                    limit = f"line {first} has the same"
                    raise InvalidRequest.of("request_id", line.request_id, limit)
        except (ValueError, InvalidRequest) as error:
            raise InvalidRequest(f"line {number}: {error}") from error
        yield line


def _line(number: int, text: bytes, args: argparse.Namespace) -> InputLine:
    try:
        fields = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{_value_text(fields)}: must be an object")
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(_FIELDS)}")
    key, own_id, headers = fields.get("key"), fields.get("request_id"), fields.get("headers")
    ordering_key, priority = fields.get("ordering_key"), fields.get("priority")
    for name, value in (("key", key), ("ordering_key", ordering_key), ("request_id", own_id)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} = {_value_text(value)}: must be a string")
    if headers is not None and not _are_texts(headers):
        raise ValueError(f"headers = {_value_text(headers)}: must be an object of strings")
    if priority is not None and type(priority) is not int:
        raise ValueError(f"priority = {_value_text(priority)}: must be a whole number")
    when = _when(fields) or {**when_of(args)}
    payload = _payload(fields)
    timer = NewTimer(
        args.topic,
        payload,
        key=key,
        headers=headers,
        ordering_key=ordering_key,
        priority=priority,
        **when,
    )
    mode: OnConflict = args.on_conflict or "reject"
    try:
        row = make_row(args.topic, payload, key, headers, mode, timer.when, ordering_key, priority)
    except InvalidRequest as error:
        if error.field in fields:
            why = f"{error.field} = {_value_text(fields[error.field])}: {error.limit}"
        else:
            why = as_typed(error, args)
        raise ValueError(why) from error
    if own_id is not None:
        rows.request_name(own_id)
    if args.source != "-":
        _check_sizes(row)
    size = max(row.size, HEADER_BYTES * len(headers or ()))
    return InputLine(number, timer, size, own_id)


def _check_sizes(row: SingleRow) -> None:
    """Check a line of a file against SIZES.

    Raises:
        InvalidRequest: A field is longer.
    """
    for name, most in SIZES.items():
        if (size := len(getattr(row, name))) > most:
            limit = f"must have at most {most} bytes, the default of a cluster; for a cluster that "
            limit += "takes more, read standard input (--from -)"
            raise InvalidRequest.of(name, Described(f"{size} bytes"), limit)


def _value_text(value: object) -> str:
    """Return a value as the line has it, in JSON; a long one is cut."""
    text = output.to_json(value, indent=None)
    return output.escape_controls(
        text if len(text) <= VALUE_SHOWN_MAX else f"{text[:VALUE_SHOWN_MAX]}…"
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: A name is given twice.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} is given twice")
        found[name] = value
    return found


def _are_texts(headers: Any) -> bool:
    return isinstance(headers, dict) and all(isinstance(each, str) for each in headers.values())


def _payload(fields: dict[str, Any]) -> bytes:
    given = [name for name in _PAYLOADS if fields.get(name) is not None]
    if len(given) != 1:
        raise ValueError("give one of payload and payload_base64")
    value = fields[given[0]]
    if not isinstance(value, str):
        raise ValueError(f"{given[0]} = {_value_text(value)}: must be a string")
    if given == ["payload"]:
        return rows.utf8("payload", value)
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"payload_base64: {error}") from error


def _when(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the due time of a line, as an argument of NewTimer; empty: it has none."""
    given = [name for name in _DUE if fields.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"give one of {', '.join(given)}")
    if not given:
        return {}
    [name] = given
    value = fields[name]
    try:
        if name == "due" and isinstance(value, str):
            return {"due": cli_args.aware_time(value)}
        if name == "delay" and type(value) in (str, int, float):
            return {"delay": cli_args.duration(str(value))}
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{name}: {error}") from None
    if name in _LIMITS or type(value) is not int:
        limit = _LIMITS.get(name, "a whole number")
        raise ValueError(f"{name} = {_value_text(value)}: must be {limit}")
    return {name: value}


def requests_of(lines: Iterable[InputLine]) -> Iterator[list[InputLine]]:
    """Yield the lines request by request; those of equal input begin at equal lines."""
    batch: list[InputLine] = []
    size = 0
    for line in lines:
        size += line.size
        if batch and (len(batch) == LINES_MAX or size > BYTES_MAX):
            yield batch
            batch, size = [], line.size
        batch.append(line)
    if batch:
        yield batch


# ---- the command


class BulkSchedule:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._id = args.request_id or secrets.token_hex(8)
        self._counts: Counter[ScheduleResult] = Counter()
        self._repeated_count = self._sent_count = 0
        self._last_line = args.skip
        """Number of the last line of an answered request."""
        self._failed_count = 0
        """Lines without a timer."""
        self._was_sent = False
        """A request was sent, and may have taken effect."""
        self._began_s = time.monotonic()

    def run(self, client: TimerClient) -> int:
        """Schedule all lines; print their number, or with -o json a line for each."""
        with _open_input(self._args.source) as file:
            if self._args.source != "-" and file.seekable():
                for _ in lines_of(file, self._args):  # a wrong line raises
                    pass
                file.seek(0)
            try:
                for batch in requests_of(lines_of(file, self._args)):
                    self._send(client, batch)
            except (TimerError, KeyboardInterrupt) as error:
                self._end()
                if isinstance(error, TimerError):
                    error.done = sum(self._counts[each] for each in _DONE)
                if self._was_sent:
                    self._hint()
                if isinstance(error, KeyboardInterrupt) and self._args.output == "json":
                    return put_failure(self._args, "INTERRUPTED", "interrupted", INTERRUPTED)
                raise
        self._end()
        if self._args.output != "json":
            counts = ", ".join(f"{n} {each.name}" for each, n in sorted(self._counts.items()))
            repeated = f"; {self._repeated_count} of them repeated" if self._repeated_count else ""
            sys.stdout.write(f"{counts or 'no lines'}{repeated}\n")
        return OK if all(each in _DONE for each in self._counts) else NOT_CHANGED

    def _send(self, client: TimerClient, batch: Sequence[InputLine]) -> None:
        self._was_sent = True
        named = [line for line in batch if line.request_id is not None]
        others = [line for line in batch if line.request_id is None]
        results: dict[int, LineResult] = {}

        def single(line: InputLine) -> None:
            results[line.number] = self._schedule_single(client, line)

        try:
            if others:
                results |= self._schedule_together(client, others)
            with ThreadPoolExecutor(SINGLES_AT_ONCE) as pool:
                _ = [*pool.map(single, named)]  # raises the error of the first line that has one
        finally:
            self._report(results)
        self._last_line = batch[-1].number

    def _schedule_together(
        self, client: TimerClient, lines: Sequence[InputLine]
    ) -> dict[int, LineResult]:
        """Schedule lines in one request; return their outcomes by line."""
        first, last = lines[0].number, lines[-1].number
        try:
            timers = self._retry_overload(
                first,
                lambda: client.schedule_all(
                    [line.timer for line in lines],
                    on_conflict=self._args.on_conflict or "reject",
                    request_id=f"{self._id}.{first}",
                ),
            )
        except InvalidRequest as error:
            named, text = f"lines {first} to {last}", str(error)
            if row := _ROW.match(text):
                named, text = f"line {lines[int(row[1])].number}", text[row.end() :]
            elif first == last:
                named = f"line {first}"
            raise InvalidRequest(f"{named}: {text}") from error
        results = {}
        for at, (line, result) in enumerate(zip(lines, timers.results, strict=True)):
            made = timers[at] if result in _DONE else None
            is_repeated = timers.duplicate
            results[line.number] = (
                LineResult(result, made.id, made.due_ms, is_repeated)
                if made
                else LineResult(result, None, None, is_repeated)
            )
        return results

    def _schedule_single(self, client: TimerClient, line: InputLine) -> LineResult:
        timer = line.timer
        try:
            made = self._retry_overload(
                line.number,
                lambda: client.schedule(
                    timer.topic,
                    timer.payload,
                    key=timer.key,
                    on_conflict=self._args.on_conflict or "reject",
                    headers=timer.headers,
                    ordering_key=timer.ordering_key,
                    priority=timer.priority,
                    request_id=line.request_id,
                    **timer.when,
                ),
            )
        except AlreadyExists:
            return LineResult(ScheduleResult.REJECTED, None, None, duplicate=False)
        except NotPending:
            return LineResult(ScheduleResult.NOT_PENDING, None, None, duplicate=False)
        except InvalidRequest as error:
            raise InvalidRequest(f"line {line.number}: {error}") from error
        return LineResult(made.result, made.id, made.due_ms, made.duplicate)

    def _retry_overload(self, first: int, call: Callable[[], T]) -> T:
        """Repeat a call while the cluster is overloaded. `first`: the request's first line."""
        began_s, is_reported = time.monotonic(), False
        while True:
            try:
                return call()
            except Overloaded as error:  # without effect
                if time.monotonic() - began_s > WAIT_S:
                    raise
                if not is_reported and self._args.output != "json":
                    self._progress(is_last=True)
                    sys.stderr.write(f"timerctl: line {first} waits: {error}\n")
                    is_reported = True

    def _report(self, results: dict[int, LineResult]) -> None:
        for number, one in sorted(results.items()):
            self._counts[one.result] += 1
            self._repeated_count += one.duplicate
            if self._args.output == "json":
                document = {"line": number, "id": one.timer_id, "due_ms": one.due_ms}
                document |= {"result": one.result.name, "duplicate": one.duplicate}
                sys.stdout.write(output.to_json(document, indent=None) + "\n")
            elif one.result not in _DONE:
                self._failed_count += 1
                if self._failed_count > FAILED_SHOWN_MAX and self._args.output != "wide":
                    continue
                self._progress(is_last=True)
                sys.stderr.write(
                    f"timerctl: line {number}: {one.result.name}: {_WHY[one.result]}\n"
                )
        sys.stdout.flush()
        self._sent_count += len(results)
        self._progress()

    def _progress(self, *, is_last: bool = False) -> None:
        """Rewrite the line of progress on a terminal's stderr. `is_last`: remove it."""
        if not sys.stderr.isatty():
            return
        per_s = self._sent_count / max(time.monotonic() - self._began_s, 0.001)
        text = "" if is_last else f"{self._sent_count} lines, {per_s:.0f} a second"
        sys.stderr.write(f"\r{text:40}\r")
        sys.stderr.flush()

    def _end(self) -> None:
        """Remove the line of progress, and print the number of failed lines that were not named."""
        self._progress(is_last=True)
        if (more := self._failed_count - FAILED_SHOWN_MAX) > 0 and self._args.output != "wide":
            sys.stderr.write(f"timerctl: {more} more not scheduled; -o wide names each line\n")

    def _hint(self) -> None:
        """Print the options that continue the command; with -o json the error has them."""
        self._args.of_error = {"skip": self._last_line, "request_id": self._id}
        if self._args.output == "json":
            return
        sys.stderr.write(
            f"timerctl: lines up to {self._last_line} are answered. To continue, within minutes: "
            f"the same command with --skip {self._last_line} --request-id {self._id}\n"
        )


@contextmanager
def _open_input(name: str) -> Iterator[IO[bytes]]:
    """Open the input.

    Raises:
        InvalidRequest: It can't be opened.
    """
    if name == "-":
        yield cli_args.standard_input()
        return
    try:
        file = open(name, "rb")  # noqa: SIM115 -- closed below
    except OSError as error:
        raise InvalidRequest.of("--from", name, error.strerror or "can't be opened") from error
    with file:
        yield file
