"""Installing a snapshot without forgetting a promise.

A log that is whole and holds the snapshot's entry is kept: equal in that entry, it is equal in all
before it, and what follows was acknowledged and may have been counted. Any other is replaced, and
entries that the replica once acknowledged may be gone: it is *unsure* from before the first file of
the log goes until a leader has matched it. Its promise is kept; it rises to the leadership that the
snapshot came from, as an append of that epoch would have raised it.
"""

from pathlib import Path

from replication.promise import Promise, PromiseFile
from timer.disk import Disk
from timer.incoming import drop_leftovers, install, ready
from timer.log import holds
from timer.snapshot import Snapshot


def install_if_ready(
    disk: Disk, incoming: Path, *, promise: Path, state: Path, log: Path, damaged: Path
) -> Snapshot | None:
    """Carry out the install that was begun, before the replica is opened. None: there is none.

    Raises:
        CorruptFile: the promise, or the snapshot that was to be installed, is damaged.
        DiskFailed: the next start repeats it.
    """
    found = ready(disk, incoming)
    if found is None:
        drop_leftovers(disk, incoming)
        return None
    there, leadership = found
    kept = PromiseFile.load(disk, promise)
    # An earlier attempt that died with half a log gone has left it unsure: that stays.
    keep_log = holds(disk, log, there.index, there.epoch)
    if not keep_log:
        kept.set_unsure(unsure=True)
    under = Promise(*leadership)
    if under.epoch > kept.promise.epoch:
        kept.give(under)
    install(disk, incoming, state=state, log=log, damaged=damaged, keep_log=keep_log)
    return there
