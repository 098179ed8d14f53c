"""The exit codes of a node's process, by the error that ended it."""

from enum import IntEnum

from timer.model.timer_errors import (
    CertificateDateError,
    ConfigError,
    CorruptFileError,
    PromiseLostError,
    StorageError,
    UnknownVersionError,
    WrongDirectoryError,
)


class ExitCode(IntEnum):
    """The codes, as `timerd --help` and docs/runbook.md explain them."""

    OTHER = 1
    CONFIG = 64
    DIRECTORY = 65
    CORRUPT = 66
    DISK = 67
    STATE_DIVERGED = 68
    DATE = 69
    APPLY_FAILED = 70
    """From here on: Raft cannot continue, and a restart is safe."""
    SNAPSHOT_FAILED = 71
    TICK_FAILED = 72
    TICK_STALLED = 73
    RAFT_DIVERGED = 74
    SHELL_FAILED = 75


class Diverged(Exception):
    """At this replica's last index a majority holds another state, or no majority agrees."""

    def __init__(self, why: str, *, repairable: bool) -> None:
        """`repairable`: a majority agrees, so this replica can fetch its state."""
        super().__init__(why)
        self.repairable = repairable


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code for `error`."""
    match error:
        case CertificateDateError():  # the clock may be corrected, or the file be replaced
            return ExitCode.DATE
        case ConfigError():
            return ExitCode.CONFIG
        case WrongDirectoryError():
            return ExitCode.DIRECTORY
        case CorruptFileError() | UnknownVersionError() | PromiseLostError():
            return ExitCode.CORRUPT
        case StorageError():
            return ExitCode.DISK
        case Diverged():
            return ExitCode.STATE_DIVERGED
        case _:
            return ExitCode.OTHER
