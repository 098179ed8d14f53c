"""The exit codes of a node's process, by the error that ended it."""

from typing import Final

from timer.model.timer_errors import (
    CertificateDateError,
    ConfigError,
    CorruptFileError,
    PromiseLostError,
    StorageError,
    UnknownVersionError,
    WrongDirectoryError,
)

EXIT_OTHER: Final = 1
EXIT_CONFIG: Final = 64
EXIT_DIRECTORY: Final = 65
EXIT_CORRUPT: Final = 66
EXIT_DISK: Final = 67
EXIT_DIVERGED: Final = 68
EXIT_DATE: Final = 69


class Diverged(Exception):
    """At this replica's last index a majority holds another state, or no majority agrees."""

    def __init__(self, why: str, *, curable: bool) -> None:
        """`curable`: a majority agrees, so this replica can fetch its state."""
        super().__init__(why)
        self.curable = curable


def exit_code(error: BaseException) -> int:
    """Return the exit code for `error`."""
    match error:
        case CertificateDateError():  # the clock may be corrected, or the file be replaced
            return EXIT_DATE
        case ConfigError():
            return EXIT_CONFIG
        case WrongDirectoryError():
            return EXIT_DIRECTORY
        case CorruptFileError() | UnknownVersionError() | PromiseLostError():
            return EXIT_CORRUPT
        case StorageError():
            return EXIT_DISK
        case Diverged():
            return EXIT_DIVERGED
        case _:
            return EXIT_OTHER
