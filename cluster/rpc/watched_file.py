"""A file of a node that is read again while the node runs."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from cluster.security.reread_files import RereadFile, RereadResult
from timer.model.timer_errors import ConfigError

logger = logging.getLogger(__name__)

FILE_CHARS_MAX: Final = 4 << 20
T = TypeVar("T")


class WatchedFile(Generic[T]):
    """The content in force of one file."""

    def __init__(self, setting: str, path: str, parse: Callable[[str], T], plural: str) -> None:
        """Read the file. `plural`: its content, for the log.

        Raises:
            ConfigError: it cannot be read, or `parse` rejects it.
        """
        self._setting, self._path, self._parse, self._plural = setting, Path(path), parse, plural
        self.content = self._read()
        self.on_change: list[Callable[[], None]] = []
        """Called when another content is in force."""
        self._complaint = ""

    def _read(self) -> T:
        path = str(self._path)
        try:
            with self._path.open(encoding="utf-8") as file:
                text = file.read(FILE_CHARS_MAX + 1)
        except UnicodeDecodeError:
            raise ConfigError(self._setting, path, "must be UTF-8") from None
        except OSError as error:
            raise ConfigError(self._setting, path, error.strerror or str(error)) from None
        if len(text) > FILE_CHARS_MAX:
            raise ConfigError(self._setting, path, f"at most {FILE_CHARS_MAX} characters")
        return self._parse(text)

    async def reread(self) -> RereadFile:
        """Put the file's content in force; if it is malformed, warn once for each reason.

        No content of the file may end a node, so every error keeps the present content.
        """
        path = str(self._path)
        try:
            found = await asyncio.to_thread(self._read)
        except Exception as wrong:  # noqa: BLE001
            if str(wrong) != self._complaint:
                logger.warning("the %s in force stay: %s", self._plural, wrong)
            self._complaint = str(wrong)
            return RereadFile(self._setting, path, RereadResult.KEPT, str(wrong))
        self._complaint = ""
        if found == self.content:
            return RereadFile(self._setting, path, RereadResult.UNCHANGED)
        self.content = found
        logger.warning("new %s in force", self._plural)
        for each in self.on_change:
            each()
        return RereadFile(self._setting, path, RereadResult.TAKEN)
