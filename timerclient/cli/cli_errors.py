"""timerctl's exit codes, and its errors in the words of the command line.

The client and the cluster name a value by its field. Here it gets the name of its option.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from timerclient.cli import output
from timerclient.cli.cli_args import (
    DEFAULT_ENDPOINTS,
    ENDPOINTS_VARIABLE,
    UsageError,
    duration_text,
)
from timerclient.values.errors import (
    InvalidRequest,
    OutcomeUnknown,
    TimerError,
    Unavailable,
    Unreachable,
)

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
UNKNOWN: Final = 4
NOT_CHANGED: Final = 5
TOO_FEW: Final = 6
INTERRUPTED: Final = 130

EXIT_MEANINGS: Final = {
    OK: "done",
    FAILED: "rejected or failed; certainly without effect",
    USAGE: "the command line, a value in it or the file of contexts is wrong, or the cluster"
    " rejects a value; a confirmation is needed, without `--yes` and without a terminal; or"
    " standard output is closed. Nothing is done",
    UNREACHABLE: "the cluster can't be reached, or no leader serves; or the store of backups can't"
    " be used",
    UNKNOWN: "the outcome is unknown: the command may have taken effect; or its output can't be"
    " written",
    NOT_CHANGED: "`cancel`, `reschedule`: some timer was not changed, because it fired, was"
    " dropped, or is not known; `schedule --from`: some line was not scheduled, because of its key",
    TOO_FEW: "`consume --count`: fewer messages arrived. Without `--no-ack`, the printed messages"
    " are acked",
    INTERRUPTED: "interrupted",
}
"""Exit code -> its meaning, as in docs/timerctl.md."""


def exit_codes() -> str:
    """Return the exit codes and their meanings, for the help."""
    lines = ["exit codes:"]
    for code, meaning in EXIT_MEANINGS.items():
        text, head = meaning.replace("`", ""), f"  {code:<5}"
        lines += textwrap.wrap(text, 100, initial_indent=head, subsequent_indent=" " * len(head))
    return "\n".join(lines) + "\n"


_OPTIONS: Final = {
    "attempts": ("--max-attempts",),
    "backoff_max": ("--backoff-max",),
    "backoff_min": ("--backoff-min",),
    "backoff_ms_max": ("--backoff-max",),
    "backoff_ms_min": ("--backoff-min",),
    "ca": ("--ca",),
    "cluster": ("--endpoints",),
    "concurrency": ("--concurrency",),
    "delay": ("--delay",),
    "delay_ms": ("--delay",),
    "dead_letter_topic": ("--dead-letter-topic",),
    "delay_level": ("--delay-level",),
    "due": ("--due",),
    "due_ms": ("--due-ms", "--due"),
    "due_from": ("--from",),
    "due_from_ms": ("--from",),
    "due_to": ("--to",),
    "due_to_ms": ("--to",),
    "count": ("--next", "--preview"),
    "cron": ("--cron",),
    "end": ("--end",),
    "end_ms": ("--end",),
    "every": ("--every",),
    "every_ms": ("--every",),
    "group": ("--group",),
    "header_file": ("--header-file",),
    "key": ("--key",),
    "key_prefix": ("--key-prefix",),
    "lease": ("--lease",),
    "lease_ms": ("--lease",),
    "max_attempts": ("--max-attempts",),
    "max_in_flight": ("--max-in-flight",),
    "max_count": ("--max-count",),
    "max_messages": ("--limit", "--count"),
    "namespace": ("--namespace",),
    "offset": ("--offset",),
    "offsets": ("--offset",),
    "on_conflict": ("--on-conflict",),
    "ordering_key": ("--ordering-key",),
    "priority": ("--priority",),
    "request_id": ("--request-id",),
    "secret_file": ("--secret-file",),
    "start": ("--start",),
    "start_ms": ("--start",),
    "time": ("--time",),
    "timeout": ("--request-timeout", "--timeout"),
    "topic": ("--topic",),
    "url": ("--to",),
    "zone": ("--zone",),
}
"""Field of the client or the cluster -> options that may have given its value.

If a command does not have the option, its argument has the name of the field in capitals.
"""
_DESTS: Final = {
    "offsets": "offsets",
    "due_from": "due_from",
    "due_from_ms": "due_from",
    "due_to": "due_to",
    "due_to_ms": "due_to",
}
"""Fields whose options are parsed to another name than the option's."""

_FIELD_MS: Final = re.compile(r"\b\w+_ms(?:_\w+)?\b")
_NUMBER: Final = re.compile(r"\b\d+(?:\.\d+)?\b")
_INSTANT: Final = re.compile(r"\b\d{11,}\b")
"""Unix milliseconds since 1973."""

_DEFAULT_ADDRESSES: Final = (
    f". These are the default addresses: set --endpoints or {ENDPOINTS_VARIABLE}; "
    "`timerctl local status` prints the addresses of a local cluster"
)


def exit_code(error: TimerError | UsageError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, OutcomeUnknown) or not error.outcome_known:
        return UNKNOWN
    if isinstance(error, InvalidRequest):
        return USAGE
    return UNREACHABLE if isinstance(error, Unavailable) else FAILED


def wants_json(words: Sequence[str]) -> bool:
    """Return whether a command line has `-o json`, even if it can't be parsed."""
    text = " ".join(words)
    return re.search(r"(?:^| )(?:-o ?|--output[ =])json(?: |$)", text) is not None


def print_error(
    error: TimerError | UsageError, words: Sequence[str], args: argparse.Namespace | None
) -> None:
    """Print an error on stderr. `args`: the parsed command line; None: it can't be parsed.

    A command may set `args.of_error`: further fields of the JSON document.
    """
    args = args or argparse.Namespace()
    text = as_typed(error, args)
    done = error.done if isinstance(error, TimerError) else 0
    if wants_json(words):
        document: dict[str, Any] = {"reason": "USAGE", "message": text}
        if isinstance(error, TimerError):
            document["reason"] = reason(error)
            document |= {"retryable": error.retryable, "outcome_known": error.outcome_known}
            document["field"] = getattr(error, "field", "") or None
            document["limit"] = getattr(error, "limit", "") or None
            document["done"] = done
        document["exit_code"] = exit_code(error)
        _put_document(args, document)
        return
    before = f" (at least {done} were done before the error)" if done else ""
    command = error.command if isinstance(error, UsageError) else ""
    more = f"see: {command} --help\n" if command else ""
    unknown = "; the outcome is unknown" if isinstance(error, OutcomeUnknown) else ""
    sys.stderr.write(f"timerctl: {text}{before}{unknown}\n{more}")


def put_failure(
    args: argparse.Namespace, code: str, error: Exception | str, status: int = FAILED
) -> int:
    """Print the error of a command that asks no cluster; return the exit status.

    `code`: the `reason` of the JSON document, for `-o json`.
    """
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    if getattr(args, "output", "table") == "json":
        _put_document(args, {"reason": code, "message": text, "exit_code": status})
    else:
        sys.stderr.write(f"timerctl: {text}\n")
    return status


def _put_document(args: argparse.Namespace, document: dict[str, Any]) -> None:
    document |= getattr(args, "of_error", {})
    sys.stderr.write(output.to_json({"error": document}) + "\n")


def reason(error: TimerError) -> str:
    """Return an error's reason: that of the contract, else the class in the same spelling."""
    if error.reason:
        return error.reason.name
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper()


def as_typed(error: TimerError | UsageError, args: argparse.Namespace) -> str:
    """Return an error's text in one line, with options in place of the contract's fields."""
    text = one_line(error)
    if isinstance(error, Unreachable) and error.answered:
        return f"{text}; see: timerctl status"
    if isinstance(error, Unreachable) and getattr(args, "endpoints", "") == DEFAULT_ENDPOINTS:
        return text + _DEFAULT_ADDRESSES
    if not isinstance(error, InvalidRequest) or not error.limit:
        return text
    if error.field == "timer_id":
        return re.sub(r"^timer_id = ", "ID = ", text) + _by_key(args)
    field = error.field.removeprefix("filter.")
    for option in _OPTIONS.get(field, ()):
        dest = _DESTS.get(field, option[2:].replace("-", "_"))
        value = getattr(args, dest, None)
        if value is None:
            continue
        name = option if option in getattr(args, "options", (option,)) else field.upper()
        shown, limit = _value_as_typed(value, error)
        return f"{name}{shown}: {limit}"
    return text


def _value_as_typed(value: object, error: InvalidRequest) -> tuple[str, str]:
    """Return an option's value, after " = ", and the limit that it exceeds, in the same form.

    Returns:
        The value of the error if it is neither a duration nor a time; empty: the error has none.
    """
    limit = _FIELD_MS.sub(lambda n: _OPTIONS.get(n[0], (n[0],))[0], _plain_line(error.limit))
    if isinstance(value, timedelta):
        unit = timedelta(milliseconds=1) if "_ms" in error.field else timedelta(seconds=1)
        limit = _NUMBER.sub(lambda n: duration_text(float(n[0]) * unit), limit.removesuffix(" s"))
        return f" = {duration_text(value)}", limit
    if isinstance(value, datetime):
        limit = _INSTANT.sub(lambda n: output.instant(int(n[0])), limit)
        return f" = {value.isoformat()}", limit
    shown = one_line(error).removeprefix(error.field)
    return shown.removesuffix(f": {_plain_line(error.limit)}"), limit


def _by_key(args: argparse.Namespace) -> str:
    """Return how the command takes a key instead of an id."""
    words = getattr(args, "by_key", "")
    return f". By key: {words} --topic TOPIC --key KEY" if words else ""


def one_line(error: object) -> str:
    """Return an error's text in one line; without a text, its class."""
    return _plain_line(str(error)) or type(error).__name__


def _plain_line(text: str) -> str:
    return output.escape_controls(" ".join(text.split()))
