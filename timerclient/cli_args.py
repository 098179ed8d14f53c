"""What timerctl's commands have in common: groups of them, durations, instants, when it fires."""

import argparse
import re
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

from timerclient.rows import When
from timerclient.sync import TimerClient

_UNITS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")


Connect = Callable[[argparse.Namespace], TimerClient]
Print = Callable[[argparse.Namespace, Any, str], None]
Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


class Commands:
    """Those under one word; `connect` makes a client, `put` prints a document or its text."""

    def __init__(self, connect: Connect, put: Print) -> None:
        self._connect = connect
        self._put = put

    @staticmethod
    def adding(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> Add:
        """Return what adds one to the parser of their word: its name, what it does, a line."""
        commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

        def add(
            name: str, run: Callable[[argparse.Namespace], int], text: str
        ) -> argparse.ArgumentParser:
            command = commands.add_parser(name, help=text, parents=[common])
            command.set_defaults(run=run)
            return command

        return add


def agreed(what: str, so: str) -> bool:
    """Ask the person at the terminal whether to do that; nobody there is no."""
    if sys.stdin is None or not sys.stdin.isatty():
        sys.stderr.write(f"timerctl: {what} needs --yes without a terminal\n")
    else:
        sys.stderr.write(f"{what}? {so} [y/N] ")  # what is printed may go into a file
        sys.stderr.flush()
        if sys.stdin.readline().strip() in ("y", "yes"):
            return True
    sys.stderr.write("nothing was changed\n")
    return False


def duration(text: str) -> timedelta:
    """Return the duration that "90s", "1h30m" or "250ms" stands for; a bare number is seconds."""
    plain = f"{text}s" if re.fullmatch(r"\d+(\.\d+)?", text) else text
    if not _DURATION.fullmatch(plain):
        msg = f"{text!r} is no duration; write 250ms, 90s, 1h30m or 2d"
        raise argparse.ArgumentTypeError(msg)
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", plain)
    try:
        return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
    except OverflowError:
        msg = f"{text!r} is longer than {timedelta.max.days}d"
        raise argparse.ArgumentTypeError(msg) from None


def aware(text: str) -> datetime:
    """Return the instant that an ISO 8601 text with an offset names."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        msg = f"{text!r} is no ISO 8601 time"
        raise argparse.ArgumentTypeError(msg) from None
    if moment.utcoffset() is None:
        msg = f"{text!r} names no instant without an offset, such as Z or +01:00"
        raise argparse.ArgumentTypeError(msg)
    return moment


def duration_text(span: timedelta) -> str:
    """Return a duration as `duration` reads it, in one unit."""
    seconds = round(span.total_seconds())
    unit = next(u for u in ("d", "h", "m", "s") if not seconds % int(_UNITS[u]) or u == "s")
    return f"{seconds // int(_UNITS[unit])}{unit}"


def add_when(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the ways to say when a timer fires; one of them at most."""
    when = parser.add_mutually_exclusive_group(required=required)
    when.add_argument("--delay", metavar="DURATION", type=duration, help="such as 90s or 1h30m")
    when.add_argument(
        "--delay-level", metavar="N", type=int, help="the Nth of the topic's delays; 0: at once"
    )
    when.add_argument("--due", metavar="ISO", type=aware, help="such as 2030-01-01T09:00:00+01:00")
    when.add_argument("--due-ms", metavar="MS", type=int, help="Unix milliseconds")


def when_of(args: argparse.Namespace) -> When:
    """Return what was said."""
    return When(delay=args.delay, delay_level=args.delay_level, due=args.due, due_ms=args.due_ms)
