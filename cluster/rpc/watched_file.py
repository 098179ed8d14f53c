"""A file of a node that is read again while the node runs."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from cluster.security.plain_file import read_plain
from cluster.security.reread_files import RereadFile, RereadResult
from timer.model.timer_errors import ConfigError

logger = logging.getLogger(__name__)

FILE_BYTES_MAX: Final = 4 << 20
T = TypeVar("T")


class WatchedFile(Generic[T]):
    """The content in force of one file."""

    def __init__(self, setting: str, path: str, parse: Callable[[str], T], plural: str) -> None:
        """Read the file. `plural`: its content, for the log.

        Raises:
            ConfigError: it cannot be read, or `parse` rejects it.
        """
        self._setting, self._path, self._parse, self._plural = setting, path, parse, plural
        self._rejected: tuple[bytes, ConfigError] = b"", ConfigError(setting, path, "")
        """The bytes that were rejected last, and the error."""
        self._data, self.content = self._read(b"")
        self.on_change: list[Callable[[], None]] = []
        """Called when another content is in force."""
        self.complaint = ""
        """Why the file's content is not in force; empty: it is."""

    def _read(self, before: bytes) -> tuple[bytes, T]:
        """Return the file's bytes and content.

        Bytes as `before` are not parsed: that may take a second of processor, every few seconds.
        """
        try:
            data = read_plain(self._path, FILE_BYTES_MAX)
        except OSError as error:
            raise ConfigError(self._setting, self._path, error.strerror or str(error)) from None
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(
                self._setting, self._path, f"must have at most {FILE_BYTES_MAX} bytes"
            )
        if data and data == before:
            return data, self.content
        if data and data == self._rejected[0]:
            raise self._rejected[1]
        try:
            return data, self._parse(data.decode())
        except UnicodeDecodeError:
            wrong = ConfigError(self._setting, self._path, "must be UTF-8")
        except ConfigError as malformed:
            wrong = ConfigError(self._setting, self._path, str(malformed))
        self._rejected = data, wrong.with_traceback(None)
        raise wrong from None

    async def reread(self) -> RereadFile:
        """Put the file's content in force; if it is malformed, warn once for each reason.

        No content of the file may end a node, so every error keeps the present content.
        """
        path = self._path
        try:
            data, found = await asyncio.to_thread(self._read, self._data)
        except Exception as wrong:  # noqa: BLE001
            complaint = f"the {self._plural} in force stay: {wrong}"
            if complaint != self.complaint:
                logger.warning("%s", complaint)
            self.complaint = complaint
            return RereadFile(self._setting, path, RereadResult.KEPT, str(wrong))
        self._data, self.complaint = data, ""
        if found == self.content:
            return RereadFile(self._setting, path, RereadResult.UNCHANGED)
        self.content = found
        logger.warning("new %s in force", self._plural)
        for each in self.on_change:
            each()
        return RereadFile(self._setting, path, RereadResult.TAKEN)
