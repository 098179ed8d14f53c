"""Frames of text that follow each other: redrawn on a terminal, appended elsewhere.

A terminal without a name, or with the name `dumb`, gets appended frames, too.
"""

import argparse
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from timerclient.cli import output
from timerclient.cli.cli_args import duration, duration_text

_LEAST: Final = timedelta(milliseconds=100)
_MOST: Final = timedelta(days=1)
_TOP_LEFT, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def interval(text: str) -> timedelta:
    """Return the time between two frames: 100 ms to a day; a bare number is in seconds."""
    span = duration(text)
    if not _LEAST <= span <= _MOST:
        limit = f"must be {duration_text(_LEAST)} to {duration_text(_MOST)}"
        raise argparse.ArgumentTypeError(f"{text!r} {limit}")
    return span


def redraws() -> bool:
    """Return whether standard output is a terminal that can redraw."""
    is_terminal = sys.stdout.isatty()
    return is_terminal and os.environ.get("TERM", "") not in ("", "dumb")


class Screen:
    """Draws frames. A frame is a text of lines without terminal commands, except colours."""

    def __init__(self, title: str) -> None:
        """Use standard output. `title`: the first line of each frame, before the time."""
        self._title = title
        self._is_first = True

    def draw(self, text: str) -> None:
        """Replace the last frame on a terminal; append a frame elsewhere."""
        now = output.instant(int(time.time() * 1000))
        lines = [f"{self._title}  {now}", "", *text.split("\n")]
        if not redraws():
            sys.stdout.write(("" if self._is_first else "\n") + "\n".join(lines) + "\n")
        else:
            columns, rows = shutil.get_terminal_size()
            lines[0] = lines[0][:columns]
            if len(lines) >= rows > 1:
                left = len(lines) - rows + 2
                lines = [*lines[: rows - 2], f"… {left} more lines"]
            text = "".join(f"{line}{_REST_OF_LINE}\n" for line in lines)
            sys.stdout.write(f"{_TOP_LEFT}{text}{_REST_OF_SCREEN}")
        self._is_first = False
        sys.stdout.flush()


@contextmanager
def keys() -> Iterator[None]:
    """Let a terminal deliver each key at once, without showing it, within the block."""
    if sys.stdin is None or not sys.stdin.isatty() or not redraws():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)  # Ctrl-C still interrupts
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def wait_or_quit(until_s: float) -> bool:
    """Wait until a time of the monotonic clock. Return True early if the key q was pressed."""
    reads = sys.stdin is not None and sys.stdin.isatty() and redraws()
    while (left_s := until_s - time.monotonic()) > 0:
        if not reads:
            time.sleep(left_s)
        elif select.select([sys.stdin], [], [], left_s)[0]:
            pressed = os.read(sys.stdin.fileno(), 64)
            if b"q" in pressed.lower():
                return True
            reads = bool(pressed)  # empty: the terminal is gone
    return False
