"""A store whose timers lie in every place, for look-ups."""

from pathlib import Path

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import START_MS, Log, catch_up, engine_on, flush, part_of
from timer.recovery.engine import Engine

FAR = START_MS + 10**7


def filled(where: str) -> tuple[Log, SimDisk, Engine]:
    """Return an engine with timers 1, 2, 3 of topic 1 with keys a, b, c, in the place `where`."""
    log, disk = Log(), SimDisk()
    engine = engine_on(disk)
    log.begin_epoch()
    log.topic("t")
    log.schedule(part_of([(1, FAR + at, b"p%d" % at) for at in range(3)], keys=[b"a", b"b", b"c"]))
    catch_up(engine, log)
    if where == "frozen memtable":
        assert engine.begin_flush() is not None
    elif where != "memtable":
        flush(engine)
    if where == "merged run":
        for at in range(7):
            log.schedule(part_of([(1, FAR + 9, b"")], keys=[b"other%d" % at]))
            catch_up(engine, log)
            flush(engine)
        merge = engine.machine.store.begin_merge()
        assert merge is not None
        store = engine.machine.store
        store.install_merge(merge, store.write_merge(merge))
    if where == "restarted":
        engine = engine_on(disk)
    return log, disk, engine


PLACES = ["memtable", "frozen memtable", "run", "merged run", "restarted"]


def flip(disk: SimDisk, path: Path, at: int) -> None:
    """Damage one byte of a file."""
    data = bytearray(disk.read(path))
    data[at] ^= 0x40
    disk.remove(path)
    file = disk.open_append(path)
    file.write([bytes(data)])
    file.sync()
    file.close()
