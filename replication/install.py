"""Installing a snapshot without forgetting a promise.

The replica's log is replaced, so entries that it once acknowledged are gone: it is *unsure* from
before the first of its files goes until a leader has matched it. Its promise is kept; it rises to
the leadership that the snapshot came from, as an append of that epoch would have raised it.
"""

from pathlib import Path

from replication.promise import Promise, PromiseFile
from timer import snapshot
from timer.disk import Disk
from timer.snapshot import Snapshot


def install_if_ready(
    disk: Disk, incoming: Path, *, promise: Path, state: Path, log: Path, damaged: Path
) -> Snapshot | None:
    """Carry out the install that was begun, before the replica is opened. None: there is none.

    Raises:
        CorruptFile: the promise, or the snapshot that was to be installed, is damaged.
        DiskFailed: the next start repeats it.
    """
    found = snapshot.ready(disk, incoming)
    if found is None:
        snapshot.drop_leftovers(disk, incoming)
        return None
    kept = PromiseFile.load(disk, promise)
    kept.set_unsure(unsure=True)
    under = Promise(*found[1])
    if under.epoch > kept.promise.epoch:
        kept.give(under)
    snapshot.install(disk, incoming, state=state, log=log, damaged=damaged)
    return found[0]
