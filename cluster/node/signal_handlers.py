"""The signals of a running node, besides those that end it.

SIGHUP    reads the settings again, applies `log_level`, and logs the settings that need a restart;
          reads the certificates again
SIGUSR1   logs the stacks of all threads and tasks (cluster/settings/stack_dump.py)
SIGUSR2   has no effect
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

from cluster.settings.config import NodeConfig
from cluster.settings.stack_dump import dump_stacks_now
from timer.model.timer_errors import ConfigError

HANDLED: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

logger = logging.getLogger(__name__)


class SettingsReload:
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
        others = [*_changed_names(self.config, found)]
        if others:
            logger.warning("settings that wait for a restart: %s", ", ".join(others))
        else:
            logger.info("settings are read again: nothing else has changed")


def _changed_names(one: Any, other: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if is_dataclass(mine):
            yield from _changed_names(mine, theirs, f"{field.name}.")
        elif mine != theirs:
            yield prefix + field.name


def dump() -> None:
    """Log the stacks of all threads and tasks, one line for each."""
    found = dump_stacks_now()
    for each in found.threads:
        where = {"thread_name": each.name, "at": " < ".join(each.frames)}
        logger.warning("stack of a thread", extra=where)
    logger.warning("stacks of %d tasks", found.task_count, extra={"tasks_left_out": found.left_out})
    for each in found.tasks:
        extra = {"task": each.name, "count": each.count, "at": " < ".join(each.frames)}
        logger.warning("stack of a task", extra=extra)


def handle(loop: asyncio.AbstractEventLoop, reloading: SettingsReload) -> None:
    """Install the signal handlers on the loop."""
    loop.add_signal_handler(signal.SIGHUP, reloading.reload)
    loop.add_signal_handler(signal.SIGUSR1, dump)
