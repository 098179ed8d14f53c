"""What a node's process exits with, and because of what."""

from typing import Final

from timer.model.timer_errors import (
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


class Diverged(Exception):
    """A majority holds another state at the same index than this replica, or none agrees (P6)."""

    def __init__(self, why: str, *, curable: bool) -> None:
        """`curable`: a majority agrees, so its state can be fetched."""
        super().__init__(why)
        self.curable = curable


def exit_code(error: BaseException) -> int:
    """Return what the process exits with because of `error`."""
    match error:
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
