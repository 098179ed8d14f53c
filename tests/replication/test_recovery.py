"""The protocol's state after a log is opened."""

from pathlib import Path

from chaos.sim.world.simdisk import SimDisk
from replication.core.log_recovery import recover
from timer.files.log import Log, replace_by_empty
from timer.model.units import Epoch, LogIndex, ReplicaId, UnixMs

VOTERS = frozenset({ReplicaId(1)})


def test_log_that_is_empty_after_a_snapshot_goes_on_at_the_snapshots_time() -> None:
    disk, directory = SimDisk(), Path("/log")
    disk.make_dir(directory)
    replace_by_empty(disk, directory, LogIndex(7), Epoch(2))
    log = Log.open(disk, directory, committed_floor=LogIndex(7))
    shape, time_ms, level = recover(log, VOTERS, UnixMs(5_000))
    assert (shape.last_index, shape.last_epoch) == (7, 2)
    assert level == 0
    assert time_ms == 5_000, "an EPOCH with an earlier time would end every replica"
