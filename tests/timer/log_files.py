"""Logs on a simulated disk, whole and torn."""

from pathlib import Path

from chaos.sim.world.simdisk import SimDisk
from timer.entries import entry_frame
from timer.entries.entry_frame import EntryKind
from timer.files import segment
from timer.files.disk import Disk
from timer.files.log import Log
from timer.model.units import Epoch, LogIndex, UnixMs

LOG = Path("/data/log")


FIRST = segment.path_of(LOG, LogIndex(1))


TINY = 400


def frame(index: int, epoch: int = 1, size: int = 50) -> bytes:
    payload = bytes([index % 251]) * size
    return entry_frame.encode(
        EntryKind.SCHEDULE, Epoch(epoch), LogIndex(index), UnixMs(index), [b"%d" % epoch, payload]
    )


def frames(first: int, last: int, epoch: int = 1, size: int = 50) -> list[bytes]:
    return [frame(index, epoch, size) for index in range(first, last + 1)]


def open_log(
    disk: Disk, path: Path = LOG, floor: int | None = None, segment_size: int = TINY
) -> Log:
    committed_floor = None if floor is None else LogIndex(floor)
    return Log.open(disk, path, committed_floor=committed_floor, segment_size=segment_size)


def image(disk: SimDisk) -> dict[Path, bytes]:
    return {LOG / name: disk.read(LOG / name) for name in disk.list_dir(LOG)}


def written(*batches: list[bytes], segment_size: int = TINY) -> dict[Path, bytes]:
    """Return the files of a log to which the batches were appended, each synced."""
    disk = SimDisk()
    log = open_log(disk, segment_size=segment_size)
    for batch in batches:
        log.append(batch)
        log.sync()
    log.close()
    return image(disk)


TORN = written(frames(1, 3), segment_size=10_000)
"""Three durable entries in one segment; the tests add entries 4..6 that were never synced."""


TAIL = frames(4, 6)


ENDS = [segment.HEADER_SIZE + n * len(frame(1)) for n in range(7)]
