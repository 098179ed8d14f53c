"""Promise files for tests."""

from pathlib import Path

from replication.core.promise import NEVER_GIVEN, PromiseFile
from timer.files.disk import Disk


def matched(disk: Disk, path: Path) -> PromiseFile:
    """Return the promise file of a replica without a promise that is sure; create it if absent."""
    if not disk.exists(path):
        disk.write_atomic(path, NEVER_GIVEN)
        PromiseFile.load(disk, path).set_unsure(unsure=False)
    return PromiseFile.load(disk, path)
