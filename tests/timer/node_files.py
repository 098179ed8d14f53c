"""Files of a node: a busy log, its snapshots and what is stored of it."""

from pathlib import Path

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import START_MS, STATE, Log, catch_up, engine_on, flush, part_of
from timer.entries.entry_frame import encode
from timer.entries.payloads import Op
from timer.entries.policies import CLUSTER, Scope
from timer.files import log as timer_log
from timer.model.units import Epoch, Nonce, ReplicaId, TopicId
from timer.recovery.engine import Engine
from timer.recovery.manifest import SPILL_DIRECTORY
from timer.recovery.snapshot import OfferLeadership, Snapshot
from timer.recovery.snapshot_receiver import IncomingSnapshot
from timer.recovery.snapshot_source import pin

SPILLS = STATE / SPILL_DIRECTORY


def busy_log() -> Log:
    """Return a log that fills every part of the state."""
    log = Log()
    log.begin_epoch()
    log.topic("a")
    log.topic("empty")
    log.producer(b"p")
    log.producer(b"never used")
    timers = [(1, START_MS + d, b"x%d" % d) for d in range(1, 20)]
    log.schedule(part_of(timers, 1, 1, keys=[b"k%d" % (d % 17) for d in range(1, 20)]))
    log.schedule(part_of([(1, START_MS + 10**6, b"far")]))
    log.cancel([(START_MS + 7, 7), (START_MS + 18, 18)])
    log.fire(START_MS + 9)
    for name in ("g", "h"):
        log.create_group(1, name)
    log.op(Op.RESERVE, 1, 1, [100])
    log.op(Op.ACK, 1, 1, [0, 1, 4])
    log.op(Op.RESERVE, 1, 2, [4])
    log.op(Op.ACK, 1, 2, [0])
    log.op(Op.ENDED, 1, 1, [2, 3])
    log.policy(CLUSTER, tick_ms=5, delay_levels_ms=(1_000, 60_000))
    log.policy(Scope("ns"), fixed_delay_ms=7)
    log.policy(Scope("", TopicId(1)), delayed_delivery=False, delay_ms_min=1, delay_ms_max=2)
    log.nack(1, 1, [3, 5], START_MS + 100)
    log.nack(1, 1, [5], START_MS + 10**6)
    log.alter(1, 1, max_attempts=3, backoff_ms_min=10, dead_letter_topic="dead")
    log.move(1, 2, [2], "dead", "h")
    log.create_group(1, "deleted")
    log.op(Op.DELETE, 1, 4, [])
    log.create_group(1, "anew", type="key_shared")
    log.op(Op.RESERVE, 1, 5, [3])
    log.op(Op.RECALL, 1, 5, [1])
    log.create_group(1, "sought")
    log.op(Op.RESERVE, 1, 6, [5])
    log.op(Op.SEEK, 1, 6, [2])
    log.begin_epoch()
    log.fire(START_MS + 12)
    log.now_ms += 5000
    log.checkpoint()
    log.cancel([(START_MS + 19, 19)])
    log.op(Op.DELETE, 1, 5, [])
    log.op(Op.DELETE, 1, 7, [])
    return log


def flushed(log: Log) -> tuple[SimDisk, Engine]:
    disk = SimDisk()
    engine = engine_on(disk)
    catch_up(engine, log)
    flush(engine)
    return disk, engine


PINNED = Path("/outgoing")


INCOMING = Path("/incoming")


UNDER = OfferLeadership(Epoch(9), ReplicaId(3), Nonce(77))


def taken() -> tuple[SimDisk, Snapshot, Log]:
    log = busy_log()
    disk, _ = flushed(log)
    return disk, pin(disk, STATE, PINNED), log


def receive(
    source: SimDisk, there: Snapshot, disk: SimDisk, size: int = 100, limit: int = 1 << 30
) -> IncomingSnapshot:
    """Fetch up to `limit` chunks of `size` bytes."""
    incoming = IncomingSnapshot(disk, INCOMING)
    incoming.begin(there, UNDER)
    while limit and (wanted := incoming.next_missing()) is not None:
        part, offset = wanted
        incoming.put(part, offset, source.read(PINNED / part.path, offset, size))
        limit -= 1
    return incoming


def frame_of(log: Log, at: int) -> bytes:
    entry = log.entries[at]
    return bytes(
        encode(entry.kind, entry.epoch, entry.index, entry.time_ms, [bytes(entry.payload)])
    )


LOG = Path("/log")


SEGMENT = 600


def stored() -> tuple[SimDisk, Log]:
    """Return a disk with runs, key file, spills, a manifest, and a log of several segments."""
    disk, log = SimDisk(), busy_log()
    engine = engine_on(disk)
    for _ in range(3):
        log.schedule(part_of([(1, START_MS + 10**7, b"far")] * 3, keys=[b"k", b"l", b"m"]))
        log.schedule(part_of([(1, START_MS + 10**8, b"further")] * 20))
        catch_up(engine, log)
        flush(engine)
    kept = timer_log.Log.open(disk, LOG, segment_size=SEGMENT)
    kept.append([frame_of(log, index) for index in range(len(log.entries))])
    kept.close()
    return disk, log
