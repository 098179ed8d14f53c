"""One simulated node: the real core, driver, log and promise file on a simulated machine."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chaos.sim.world import disk_loss
from chaos.sim.world.app import App, MakeApp
from chaos.sim.world.paths import (
    DAMAGED_PATH,
    INCOMING_PATH,
    LOG_PATH,
    OUTGOING_PATH,
    PROMISE_PATH,
    STATE_PATH,
)
from chaos.sim.world.referee import Broken
from chaos.sim.world.refetch import SimSnapshotFetch
from chaos.sim.world.simdisk import Death, SimDisk
from replication.core.core import Core
from replication.core.core_events import (
    Appointed,
    Durable,
    Event,
    Handover,
    Persist,
    Read,
    Reconnected,
    Role,
)
from replication.core.log_recovery import recover
from replication.core.peer_messages import Message
from replication.core.promise import NEVER_GIVEN, PromiseFile
from replication.core.replication_config import ReplicationConfig
from replication.driver.driver import Driver
from replication.driver.write_order import Order, write_batch
from replication.shell.snapshot_install import install_if_ready
from timer.entries.entry_frame import Entry, frames
from timer.files.data_directory import format_directory, open_directory
from timer.files.disk import Bytes, is_full
from timer.files.log import Log
from timer.model.timer_errors import CorruptFileError, DiskFailedError, StorageError
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs
from timer.recovery import snapshot_receiver
from timer.recovery.snapshot_source import OfferedSnapshot

if TYPE_CHECKING:
    from chaos.sim.world.world import World

ROOT: Final = Path("/")
CURABLE: Final = (STATE_PATH, LOG_PATH, DAMAGED_PATH)
"""What others have, too; and the word of an earlier process that it is damaged."""
WALL_START_MS: Final = 1_800_000_000_000
READ_US: Final = 300
RESTART_MS: Final = 500
DRAIN_MS_MAX: Final = 5_000
RESIGN_MS: Final = 500
"""For a handover, and for the last manifest."""
CLUSTER_ID: Final = "simulated"


class SimNode:
    """A machine, its disk and, while `alive`, a process. Implements Io and Listener."""

    driver: Driver
    core: Core
    log: Log
    app: App
    nonce: Nonce
    outgoing: OfferedSnapshot

    def __init__(self, world: "World", replica: ReplicaId, make_app: MakeApp) -> None:
        self.world = world
        self.replica = replica
        self.disk = SimDisk()
        self.capacity_bytes: int | None = None
        """Of its disk, when nobody else fills that; None: it has no end."""
        self.founding = world.voters
        self.alive = False
        self.leading = False
        self.commit_seen = LogIndex(0)
        self.lied = False
        """Its disk lost what it had promised to keep, and no leader has made up for it yet."""
        self.damage: list[Path] = []
        """What of its disk is gone for good (chaos/sim/world/disk_loss.py)."""
        self.refused: StorageError | None = None
        """Why it can't run any more."""
        self.refetch: SimSnapshotFetch | None = None
        """Under way; if the node is not alive, that is all that its process does."""
        self.healed: list[StorageError] = []
        """Damage that it found, and fetched everything anew for."""
        self.snapshots = 0
        """Installed so far."""
        self.slow_disk = 1
        self.in_doubt = True
        """Its machine went down, or its disk was damaged, since it was sure."""
        self.clock_was_wrong = False
        """At any time so far."""
        self._wall_offset_ms = 0
        self._wall_ppm = 0
        self._wall_set_us = 0
        self._make_app = make_app
        self._rng: random.Random = random.Random(world.rng.getrandbits(64))
        drift = world.options.drift_ppm
        self._ppm = 1_000_000 + self._rng.randint(-drift, drift)
        self._mono_base_ms = self._rng.randrange(1_000_000)
        self.life = 0
        """Counts processes and their ends."""
        self._committed = LogIndex(0)
        """Up to here the application knows of the log."""
        self._paused = False
        self._backlog: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._orders: list[Order] = []
        self._writing = False
        self._wake_ms: MonoMs | None = None
        self._alarm_us: int | None = None
        format_directory(
            self.disk,
            ROOT,
            cluster_id=CLUSTER_ID,
            name=str(replica),
            replica_id=replica,
            founding_voters={str(each): each for each in world.voters},
            promise=NEVER_GIVEN,
        )

    def __str__(self) -> str:
        state = self.core if self.alive else self.refused or "dead"
        return f"node {self.replica} ({state})"

    # ---------------------------------------------------------------- machine and process

    def start(self) -> None:
        """Start a process from what is on the disk; nothing if one runs, or none can any more."""
        if self.alive or self.refused or self.refetch is not None:
            return
        world = self.world
        world.timeline.note(f"node {self.replica}", "starts")
        self.life += 1
        self.alive, self._paused = True, False
        self._orders, self._backlog = [], []
        self._writing = False
        self._wake_ms = self._alarm_us = None
        self.nonce = world.next_nonce()
        try:
            self._open()
        except Death:
            self._killed_in_write()
            return
        except DiskFailedError as error:
            self.fail(error)
            return
        except StorageError as error:
            self._damage_found(error)
            return
        self.commit_seen = self.core.commit_index
        for peer in world.nodes:
            if peer is not self:
                peer.reconnected(self.replica)
                if peer.alive:
                    self.reconnected(peer.replica)
        if world.control is not None:
            world.control.welcome(self)

    def _open(self) -> None:
        world = self.world
        open_directory(self.disk, ROOT, cluster_id=CLUSTER_ID, name=str(self.replica))
        kept_to = self._kept_by_install()
        installed = install_if_ready(
            self.disk,
            INCOMING_PATH,
            promise=PROMISE_PATH,
            state=STATE_PATH,
            log=LOG_PATH,
            damaged=DAMAGED_PATH,
        )
        if installed is not None:
            self.snapshots += 1
            self.damage = [_installed(each) for each in self.damage if not _is_curable(each)]
        unsure = PromiseFile.load(self.disk, PROMISE_PATH).unsure
        self.lied |= installed is not None and unsure  # until a leader has matched it
        if self.disk.exists(DAMAGED_PATH):
            noted = self.disk.read(DAMAGED_PATH).decode(errors="replace")  # it may be damaged, too
            raise CorruptFileError(DAMAGED_PATH, 0, noted)
        self.outgoing = OfferedSnapshot(self.disk, STATE_PATH, OUTGOING_PATH)
        self.app = self._make_app(self)
        floor = self._committed = self.app.applied_index
        self.log = Log.open(
            self.disk,
            LOG_PATH,
            committed_floor=floor,
            segment_size=world.options.segment_bytes,
        )
        if self.log.last_index < kept_to:
            raise Broken(
                "storage", f"{self}: an install threw {self.log.last_index}..{kept_to} away"
            )
        self._promise = PromiseFile.load(self.disk, PROMISE_PATH, last_epoch=self.log.last_epoch)
        if self.log.tail_was_cut:
            self._promise.set_unsure(unsure=True)
            self.log.cut_noted()
        self.in_doubt |= installed is not None or bool(self.damage)
        if self._promise.unsure and not self.in_doubt:
            raise Broken("doubt", f"node {self.replica} is unsure; its machine never went down")
        self.in_doubt = self._promise.unsure
        shape, time_ms = recover(self.log, self.app.voters or self.founding, self.app.state_time_ms)
        self.core = world.make_core(
            me=self.replica,
            nonce=self.nonce,
            conf=ReplicationConfig(cache_bytes=world.options.cache_bytes),
            promise=self._promise.promise,
            unsure=self._promise.unsure,
            shape=shape,
            commit_index=floor,
            now_ms=self.mono_ms(),
        )
        self.driver = Driver(self.core, self, self, time_ms)

    def _kept_by_install(self) -> LogIndex:
        """Return up to where the log has to go on if a snapshot is installed now."""
        found = snapshot_receiver.ready(self.disk, INCOMING_PATH)
        hurt = self.lied or any(LOG_PATH in (path, *path.parents) for path in self.damage)
        if found is None or hurt or ROOT in self.damage or not hasattr(self, "log"):
            return LogIndex(0)
        there, _ = found
        held = self.log.epoch_at(there.index) == there.epoch  # as an earlier process saw it
        return self.log.durable_index if held else LogIndex(0)

    def _damage_found(self, error: StorageError) -> None:
        """Fetch everything anew; stay down if nobody else has what is damaged."""
        disk_loss.check_refusal(self, error)
        self.world.timeline.note(f"node {self.replica}", error)
        curable = isinstance(error, CorruptFileError) and any(
            str(path) in str(error) for path in CURABLE
        )
        if not curable:
            self.refused = error
            self.stop()
            return
        if not self.disk.exists(DAMAGED_PATH):
            try:
                self.disk.write_atomic(DAMAGED_PATH, str(error).encode())
            except DiskFailedError as failed:
                self.fail(failed)  # the next process finds the damage again
                return
        self.healed.append(error)
        self._end("is damaged")
        self.disk.die()
        self.refetch = SimSnapshotFetch(self)

    def stop(self) -> None:
        """Kill the process; what it wrote is still in the machine's memory."""
        if self.alive or self.refetch is not None:
            self._end("is killed")
            self.disk.die()

    def terminate(self) -> None:
        """End the process as SIGTERM does: drain, hand over, write a manifest; start it again."""
        self.world.timeline.note(f"node {self.replica}", "terminates")
        self.world.timeline.after(DRAIN_MS_MAX * 1_000, self._ended_in_time, self.life)
        self.call(self.app.drain, self._drained)

    def _drained(self) -> None:
        self.driver.handle(Handover())
        self.later(RESIGN_MS * 1_000, self.app.flush)
        self.later(2 * RESIGN_MS * 1_000, self._ended_in_time, self.life)

    def _ended_in_time(self, life: int) -> None:
        if life == self.life:
            self.stop()
            self.world.timeline.after(RESTART_MS * 1_000, self.start)

    def _killed_in_write(self) -> None:
        self.stop()
        self.world.faults.on_killed_in_write(self)

    def stop_hard(self) -> None:
        """Cut the machine's power: what was not synced is lost, or torn."""
        self.in_doubt = True
        if self.alive or self.refetch is not None:
            self._end("loses power")
            self.disk.crash(self._rng)

    def _end(self, how: str) -> None:
        self.world.timeline.note(f"node {self.replica}", how)
        if self.alive and hasattr(self, "app"):
            self.app.on_stop()
        self.alive = self.leading = False
        self.refetch = None
        self.life += 1

    def fail(self, error: DiskFailedError) -> None:
        """End the process, as a failed disk does; start another soon."""
        self.world.timeline.note(f"node {self.replica}", error)
        full = is_full(error)
        self.world.faults.on_disk_failed(self, full=full)
        if full and self.disk.capacity_bytes == self.capacity_bytes:
            self.world.ran_out(self)
        self.stop()
        self.world.timeline.after(RESTART_MS * 1000, self.start)

    def app_check(self, disk: SimDisk, directory: Path) -> None:
        """Raise CorruptFileError if no process could start from the state in `directory`."""
        self.world.app_type.check(disk, directory)

    def saved_index(self) -> LogIndex:
        """Return up to where the state on this disk needs no log."""
        return self._make_app(self).applied_index

    @property
    def paused(self) -> bool:
        """Whether the process is stopped for now."""
        return self._paused

    def pause(self) -> None:
        """Stop the process as SIGSTOP does: everything goes on around it."""
        self._paused = True

    def resume(self) -> None:
        """Let it go on, with all that has come meanwhile."""
        if not self._paused:
            return
        self._paused = False
        backlog, self._backlog = self._backlog, []
        for call, args in backlog:
            self._run(self.life, call, *args)

    def later(self, delay_us: int, call: Callable[..., None], *args: object) -> None:
        """Call it in this process, unless that dies first."""
        self.world.timeline.after(delay_us, self._run, self.life, call, *args)

    def call(self, call: Callable[..., object], *args: object) -> None:
        """Call it in this process now, or when it goes on."""
        self._run(self.life, call, *args)

    def _run(self, life: int, call: Callable[..., object], *args: object) -> None:
        if life != self.life or not self.alive:
            return
        if self._paused:
            self._backlog.append((call, args))
            return
        try:
            call(*args)
        except Death:
            self._killed_in_write()
            return
        except DiskFailedError as error:
            self.fail(error)
            return
        except StorageError as error:
            self._damage_found(error)
            return
        if life != self.life or not self.alive:
            return
        self.world.referee.after_step(self)
        if self.lied and not self.core.unsure:
            self.lied = False

    # ---------------------------------------------------------------- what comes from outside

    def receive(self, sender: ReplicaId, message: Message, wall_ms: UnixMs, data: bytes) -> None:
        """Take a message."""
        self._run(self.life, self._receive, sender, message, wall_ms, data)

    def _receive(self, sender: ReplicaId, message: Message, wall_ms: UnixMs, data: bytes) -> None:
        self.world.timeline.note(f"{sender} -> {self.replica}", message)
        try:
            self.driver.receive(sender, message, wall_ms, memoryview(data))
        except ValueError as error:
            raise Broken("frames", f"{sender} -> {self}: {error}") from error

    def reconnected(self, peer: ReplicaId) -> None:
        """Hear that a peer can be reached again, as a stream's rebuilding says."""
        if self.alive:
            self.later(1_000, self._handle, Reconnected(peer))

    def appointed(
        self, epoch: Epoch, leader: ReplicaId, voters: frozenset[ReplicaId] | None
    ) -> None:
        """Hear from the control plane."""
        self._run(self.life, self._handle, Appointed(epoch, leader, voters))

    def hand_over(self) -> None:
        """Be asked to end the leadership."""
        self._run(self.life, self._handle, Handover())

    def _handle(self, event: Event) -> None:
        if not isinstance(event, Reconnected):
            self.world.timeline.note(f"node {self.replica}", event)
        self.driver.handle(event)

    def drop_before(self, index: LogIndex, *, keep: bool = True) -> None:
        """Drop the log's prefix, as a manifest allows; keep some of it for those who lack it."""
        self.outgoing.expire(self.mono_ms())
        if self.outgoing.pinned is not None:
            index = min(index, LogIndex(self.outgoing.pinned.index + 1))
        size = self.world.options.log_kept_bytes if keep else 0
        self.driver.drop_before(index, self.log.first_within(size))

    # ---------------------------------------------------------------- Io

    def mono_ms(self) -> MonoMs:
        """See Io."""
        return MonoMs(self.world.timeline.now_us * self._ppm // 1_000_000_000 + self._mono_base_ms)

    def wall_ms(self) -> UnixMs:
        """Return what this node takes for Unix time."""
        now_us = self.world.timeline.now_us
        drifted_ms = (now_us - self._wall_set_us) * self._wall_ppm // 1_000_000_000
        return UnixMs(WALL_START_MS + now_us // 1_000 + self._wall_offset_ms + drifted_ms)

    def set_clock(self, *, jump_ms: int = 0, drift_ppm: int = 0) -> None:
        """Move this node's wall clock, and let it run so much fast from now on."""
        self.clock_was_wrong = True
        now_us = self.world.timeline.now_us
        self._wall_offset_ms = self.wall_ms() - WALL_START_MS - now_us // 1_000 + jump_ms
        self._wall_ppm, self._wall_set_us = drift_ppm, now_us

    def mend_clock(self) -> None:
        """Let it show the right time again."""
        self._wall_offset_ms = self._wall_ppm = 0

    def _sync_us(self) -> int:
        return int(self.world.options.sync_us * self.slow_disk * (0.5 + self._rng.expovariate(2.0)))

    def refuse(self, sender: ReplicaId, why: str) -> None:
        """See Io. Every peer here is correct."""
        raise Broken("frames", f"{sender} -> {self}: {why}")

    def persist(self, order: Persist) -> None:
        """See Io."""
        took_us = self._sync_us()
        self.world.faults.on_sync(self, took_us, promise=True)
        self.later(took_us, self._persist, order)

    def _persist(self, order: Persist) -> None:
        self._promise.give(order.promise)
        self._promise.set_unsure(unsure=order.unsure)
        self.driver.persisted()

    def write(self, order: Order) -> None:
        """See Io."""
        self._orders.append(order)
        if not self._writing:
            self._writing = True
            self.later(0, self._begin_batch)

    def _begin_batch(self) -> None:
        orders, self._orders = self._orders, []
        version = write_batch(self.log, orders)
        took_us = self._sync_us()
        self.world.faults.on_sync(self, took_us, promise=False)
        self.later(took_us, self._end_batch, version)

    def _end_batch(self, version: int) -> None:
        self.log.sync()
        index = self.log.durable_index
        if self._orders:
            self.later(0, self._begin_batch)
        else:
            self._writing = False
        self.driver.handle(Durable(version, index))

    def read(self, order: Read) -> None:
        """See Io."""
        self.later(READ_US, self._read, order)

    def _read(self, order: Read) -> None:
        found = self.log.read(order.first, order.limit_bytes, order.last)
        if found:  # else it was truncated meanwhile
            self.driver.loaded(order, found)

    def send(self, to: ReplicaId, message: Message, frames: Sequence[Bytes]) -> None:
        """See Io."""
        self.world.referee.on_send(self, to, message)
        self.world.network.send(self.replica, to, message, self.wall_ms(), b"".join(frames))

    def wake_at(self, at_ms: MonoMs | None) -> None:
        """See Io."""
        self._wake_ms = at_ms
        if at_ms is None:
            return
        due_us = -(-(at_ms - self._mono_base_ms) * 1_000_000_000 // self._ppm)
        due_us = max(due_us, self.world.timeline.now_us)
        if self._alarm_us is None or due_us < self._alarm_us:
            self._alarm_us = due_us
            self.later(due_us - self.world.timeline.now_us, self._alarm, due_us)

    def _alarm(self, due_us: int) -> None:
        if due_us != self._alarm_us:
            return  # an earlier one was asked for since
        self._alarm_us = None
        if self._wake_ms is not None and self._wake_ms <= self.mono_ms():
            self.driver.tick()
        else:
            self.wake_at(self._wake_ms)

    def soon(self) -> None:
        """See Io."""
        self.later(0, self.driver.tick)

    # ---------------------------------------------------------------- Listener

    def check(self, entry: Entry) -> None:
        """See Listener."""
        self.app.check_entry(entry)

    def on_commit(self, commit_index: LogIndex) -> None:
        """See Listener."""
        entries = self.entries(LogIndex(self._committed + 1), commit_index)
        self._committed = commit_index
        self.world.referee.on_commit(self, entries)
        self.app.on_commit(entries)

    def entries(self, first: LogIndex, last: LogIndex) -> list[Entry]:
        """Return the entries [first, last], from memory or the log."""
        found: list[Entry] = []
        while first <= last:
            cached = self.driver.cached(first, last)
            if cached is not None:
                return found + cached
            for frame in self.log.read(first, 1 << 16, last):
                found += frames(frame)
            first = LogIndex(found[-1].index + 1)
        return found

    def on_role(self, role: Role, epoch: Epoch) -> None:
        """See Listener."""
        self.world.timeline.note(f"node {self.replica}", f"{role.value} of epoch {epoch}")
        if role is Role.LEADER:
            self.world.faults.on_leader(self)

    def on_lead(self, epoch: Epoch) -> None:
        """See Listener."""
        self.world.timeline.note(f"node {self.replica}", f"serves epoch {epoch}")
        self.world.referee.on_lead(self, epoch)
        self.app.on_lead(epoch)

    def on_behind(self) -> None:
        """See Listener."""
        if self.refetch is None:
            self.world.timeline.note(f"node {self.replica}", "is behind the kept log")
            self.refetch = SimSnapshotFetch(self)

    def on_forgotten(self) -> None:
        """See Listener."""
        raise Broken("storage", f"{self}: no founder is formatted again here")

    def on_drain(self) -> None:
        """See Listener."""
        self.app.on_drain()

    def on_stepdown(self, epoch: Epoch) -> None:
        """See Listener."""
        self.app.on_stepdown(epoch)


def _installed(path: Path) -> Path:
    """Return where a file lies after an install: what had arrived may be damaged since."""
    inside = path.is_relative_to(INCOMING_PATH)
    return STATE_PATH / path.relative_to(INCOMING_PATH) if inside else path


def _is_curable(path: Path) -> bool:
    return any(path.is_relative_to(each) for each in CURABLE)
