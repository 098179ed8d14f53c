"""A value that comes from a text file, and is read again when the file changes."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from timerclient.values.client_tls import stamp_of
from timerclient.values.errors import InvalidRequest

T = TypeVar("T")

LOG: Final = logging.getLogger("timerclient.worker")
CHECK_INTERVAL_S: Final = 1.0
"""Least seconds between two checks of the file."""
SIZE_MAX: Final = 65_536


class RenewedFile(Generic[T]):
    """The value of a text file. It stays while the file can't be found, or does not fit.

    A pipe is read once. The event loop reads the file: it has at most SIZE_MAX characters.

    Args:
        field: Name of the argument, for errors.
        path: Of the file.
        read: Returns the value of the file's text, or raises InvalidRequest.

    Raises:
        InvalidRequest: The file can't be read, or its text does not fit.
    """

    def __init__(self, field: str, path: Path, read: Callable[[str], T]) -> None:
        self._field, self._path, self._read = field, path, read
        self._stamp = stamp_of(path)
        self._unfit_stamp: tuple[int, int] | None = None
        """Stamp of a file that did not fit at the last check."""
        self._is_missing = False
        """No file was found at the last check."""
        self._value = self._content()
        self._checked_s = time.monotonic()

    @property
    def value(self) -> T:
        """The value of the file as it is, or was a second ago."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_INTERVAL_S:
            self._checked_s = now_s
            # These functions raise no error, such as that of a folder without access.
            if os.path.isfile(self._path) and (stamp := stamp_of(self._path)) != self._stamp:
                self._renew(stamp)
            is_missing = not os.path.exists(self._path)
            if is_missing and not self._is_missing:
                LOG.warning("file can't be found, its last value is used: %s", self._path)
            self._is_missing = is_missing
        return self._value

    def _renew(self, stamp: tuple[int, int]) -> None:
        try:
            self._value = self._content()
        except InvalidRequest as error:
            if stamp != self._unfit_stamp:
                self._unfit_stamp = stamp  # a writer may be at work: the file is read again soon
                return
            LOG.warning("file does not fit, the former one is used: %s", error)
        self._stamp = stamp

    def _content(self) -> T:
        try:
            with self._path.open(encoding="utf-8-sig", errors="replace") as file:
                text = file.read(SIZE_MAX)
        except OSError as error:
            limit = f"must be a readable file: {error.strerror}"
            raise InvalidRequest.of(self._field, str(self._path), limit) from None
        try:
            return self._read(text)
        except InvalidRequest as error:
            raise InvalidRequest.of(self._field, str(self._path), str(error)) from None
