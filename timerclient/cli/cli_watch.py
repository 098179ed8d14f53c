"""The option --watch: a command's output again and again, until Ctrl-C.

A cluster that does not answer is shown as such, and the watch goes on.
"""

import argparse
import io
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from datetime import timedelta
from typing import Final

from timerclient.cli.cli_args import duration_text
from timerclient.cli.cli_errors import as_typed, print_error
from timerclient.cli.screen import Screen, interval
from timerclient.values.errors import OutcomeUnknown, TimerError, Unavailable

INTERVAL_DEFAULT: Final = timedelta(seconds=2)


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add the option --watch to the parser of a command that only shows something."""
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=interval,
        const=INTERVAL_DEFAULT,
        default=argparse.SUPPRESS,  # `topics --watch 2 list` is the option of the outer parser
        help=f"show it again every SECONDS, by default {duration_text(INTERVAL_DEFAULT)}, until "
        "Ctrl-C. A terminal's screen is redrawn; other output is appended, with -o json one line "
        "each time. Must follow the other arguments",
    )


class _Captured(io.StringIO):
    """Takes the output of a command, which formats it as for standard output."""

    def __init__(self) -> None:
        super().__init__()
        self._is_terminal = sys.stdout.isatty()

    def isatty(self) -> bool:
        """Return whether standard output is a terminal."""
        return self._is_terminal


def watch(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a command again and again.

    Raises:
        TimerError: The command fails in a way that another attempt can't mend.
        KeyboardInterrupt: Ctrl-C.
    """
    every: timedelta = args.watch
    screen = Screen(f"every {duration_text(every)}: timerctl {' '.join(words)}")
    next_s = time.monotonic()
    while True:
        text = _run_once(args, words)
        if args.output != "json":
            screen.draw(text.rstrip("\n"))
        elif text:
            sys.stdout.write(text)
            sys.stdout.flush()
        next_s = max(next_s + every.total_seconds(), time.monotonic())
        time.sleep(max(0.0, next_s - time.monotonic()))


def _run_once(args: argparse.Namespace, words: Sequence[str]) -> str:
    captured = _Captured()
    try:
        with redirect_stdout(captured):
            args.run(args)
    except (Unavailable, OutcomeUnknown) as error:
        return _error(args, words, error)
    except TimerError as error:
        if not error.retryable:
            raise
        return _error(args, words, error)
    return captured.getvalue()


def _error(args: argparse.Namespace, words: Sequence[str], error: TimerError) -> str:
    """Return an error for the frame; with -o json it goes to stderr, and there is no line."""
    if args.output != "json":
        return f"timerctl: {as_typed(error, args)}"
    print_error(error, words, args)
    return ""
