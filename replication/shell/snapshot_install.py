"""Installs a snapshot without losing a promise.

A whole log that holds the snapshot's entry is kept. It equals the leader's up to that entry, and
later entries were acknowledged and may have counted towards a commit. Any other log is replaced.
Entries that the replica acknowledged may then be gone, so it is *unsure* until a leader has matched
its log. This is recorded before the first log file is deleted. The promise is kept. It rises to the
leadership that sent the snapshot, as an append of that epoch would have raised it.
"""

from pathlib import Path

from replication.core.promise import Promise, PromiseFile
from timer.files.disk import Disk
from timer.files.log import has_entry
from timer.recovery.snapshot import Snapshot
from timer.recovery.snapshot_receiver import drop_leftovers, install, snapshot_to_install


def install_if_ready(
    disk: Disk, incoming: Path, *, promise: Path, state: Path, log: Path, damaged: Path
) -> Snapshot | None:
    """Finish an install that was begun, before the replica opens. None: none was begun.

    Raises:
        CorruptFileError: the promise or the snapshot is damaged.
        DiskFailedError: the next start repeats the install.
    """
    found = snapshot_to_install(disk, incoming)
    if found is None:
        drop_leftovers(disk, incoming)
        return None
    there, leadership = found
    kept = PromiseFile.load(disk, promise)
    # An earlier attempt may have deleted half the log and set `unsure`. It stays set.
    keep_log = has_entry(disk, log, there.index, there.epoch)
    if not keep_log:
        kept.set_unsure(unsure=True)
    under = Promise(*leadership)
    if under.epoch > kept.promise.epoch:
        kept.give(under)
    install(disk, incoming, state=state, log=log, damaged=damaged, keep_log=keep_log)
    return there
