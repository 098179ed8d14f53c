"""Signals that a running node handles, besides those that end it.

SIGHUP    reads the settings again, applies `log_level`, and logs which others need a restart;
          reads the certificates again
SIGUSR1   logs the stack of every task and of every thread
SIGUSR2   has no effect
"""

import asyncio
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

from cluster.settings.config import NodeConfig
from timer.model.timer_errors import ConfigError

HANDLED: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TASKS_MAX: Final = 1_000
"""Tasks in one dump, at most."""
FRAMES_MAX: Final = 8
"""Frames logged of each stack, at most: the innermost ones."""

logger = logging.getLogger(__name__)


class Reloading:
    """The settings in force, and the function that reads them again."""

    def __init__(self, config: NodeConfig, load: Callable[[], NodeConfig]) -> None:
        self.config, self._load = config, load
        self.also: Callable[[], None] = lambda: None
        """Called at each reload, also if the settings stay as they are."""

    def reload(self) -> None:
        """Read the settings again, apply `log_level`, and log the other changes."""
        self.also()
        try:
            found = self._load()
        except ConfigError as wrong:
            logger.warning("settings stay as they are: %s", wrong)
            return
        if found.log_level != self.config.log_level:
            logging.getLogger().setLevel(found.log_level.upper())
            self.config = replace(self.config, log_level=found.log_level)
            logger.warning("log_level is %s now", found.log_level)
        others = [*_differing(self.config, found)]
        if others:
            logger.warning("settings that wait for a restart: %s", ", ".join(others))
        else:
            logger.info("settings are read again: nothing else has changed")


def _differing(one: Any, other: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if is_dataclass(mine):
            yield from _differing(mine, theirs, f"{field.name}.")
        elif mine != theirs:
            yield prefix + field.name


def dump() -> None:
    """Log the stack of every thread and of every task, one line each."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - there is no other way
        stack = traceback.extract_stack(frame)
        logger.warning("thread", extra={"thread_name": names.get(ident, "?"), "at": _text(stack)})
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    logger.warning("%d tasks", len(tasks))
    for task in tasks[:TASKS_MAX]:
        stack = traceback.StackSummary.extract(
            (frame, frame.f_lineno) for frame in task.get_stack(limit=FRAMES_MAX)
        )
        name = getattr(task.get_coro(), "__qualname__", "?")
        extra = {"task": f"{task.get_name()} {name}", "at": _text(stack)}
        logger.warning("task", extra=extra)


def _text(stack: traceback.StackSummary) -> str:
    return " < ".join(
        f"{frame.name} {frame.filename.rpartition('/')[2]}:{frame.lineno}"
        for frame in reversed(stack[-FRAMES_MAX:])
    )


def handle(loop: asyncio.AbstractEventLoop, reloading: Reloading) -> None:
    """Install the signal handlers on the loop."""
    loop.add_signal_handler(signal.SIGHUP, reloading.reload)
    loop.add_signal_handler(signal.SIGUSR1, dump)
