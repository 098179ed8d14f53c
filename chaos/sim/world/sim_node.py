"""One simulated node: the real core, driver, log and promise file on a simulated machine."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chaos.sim.world import disk_loss
from chaos.sim.world.app import App
from chaos.sim.world.options import fork
from chaos.sim.world.referee import Broken
from chaos.sim.world.refetch import SimSnapshotFetch
from chaos.sim.world.simdisk import (
    DAMAGED_PATH,
    INCOMING_PATH,
    LOG_PATH,
    OUTGOING_PATH,
    PROMISE_PATH,
    STATE_PATH,
    Death,
    SimDisk,
)
from replication.core.core import Core
from replication.core.core_events import Durable, Event, Handover, Persist, Read, Reconnected, Role
from replication.core.log_recovery import recover
from replication.core.peer_messages import Message
from replication.core.promise import NEVER_GIVEN, PromiseFile
from replication.core.replication_config import ReplicationConfig
from replication.driver.driver import Driver
from replication.driver.write_order import Order, write_batch
from replication.shell.snapshot_install import install_if_ready
from timer.entries.entry_frame import Entry, EntryKind, frames
from timer.files.data_directory import format_directory, open_directory
from timer.files.disk import Bytes, is_full
from timer.files.log import Log
from timer.model.timer_errors import (
    CorruptFileError,
    DiskFailedError,
    NotLeaderError,
    OverloadedError,
    StorageError,
)
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs
from timer.recovery import snapshot_receiver
from timer.recovery.snapshot_source import OfferedSnapshot

if TYPE_CHECKING:
    from chaos.sim.world.world import World

ROOT: Final = Path("/")
CURABLE: Final = (STATE_PATH, LOG_PATH, DAMAGED_PATH)
"""Paths that a snapshot replaces after damage: others have state and log, too, and the last path is
an earlier process's note of damage."""
WALL_START_MS: Final = 1_800_000_000_000
READ_US: Final = 300
RESTART_MS: Final = 500
DRAIN_MS_MAX: Final = 5_000
RESIGN_MS: Final = 500
"""Time for a handover, and then again for the last manifest, before the process ends."""
CLUSTER_ID: Final = "simulated"


class SimNode:
    """A machine with its disk and, while `alive`, a process. Implements Io and Listener."""

    driver: Driver
    core: Core
    log: Log
    app: App
    nonce: Nonce
    outgoing: OfferedSnapshot

    def __init__(self, world: "World", replica: ReplicaId) -> None:
        self.world = world
        self.replica = replica
        self.disk = SimDisk()
        self.alive = False
        self.leading = False
        self.commit_seen = LogIndex(0)
        self.lied = False
        """Whether its disk lost synced entries that no leader has replaced yet."""
        self.damage: list[Path] = []
        """Permanently damaged paths of its disk (chaos/sim/world/disk_loss.py)."""
        self.refused: StorageError | None = None
        """The error that ended its last process for good. None: it can run."""
        self.refetch: SimSnapshotFetch | None = None
        """The fetch of a snapshot under way. If the node is not alive, its process only fetches."""
        self.healed: list[StorageError] = []
        """Errors of damaged files for which the node fetched a snapshot."""
        self.snapshots = 0
        """Number of snapshots installed so far."""
        self.slow_disk = 1
        """Factor of the duration of syncs."""
        self.in_doubt = True
        """Whether its machine went down, or its disk was damaged, since it was last sure."""
        self.clock_was_wrong = False
        """Whether its wall clock was changed at any time so far."""
        self._wall_offset_ms = 0
        self._wall_ppm = 0
        self._wall_set_us = 0
        self._rng = fork(world.rng)
        drift = world.options.drift_ppm
        self._ppm = 1_000_000 + self._rng.randint(-drift, drift)
        self._mono_base_ms = self._rng.randrange(1_000_000)
        self.life = 0
        """Number of starts and ends of processes so far."""
        self._committed = LogIndex(0)
        """Index of the last entry that the application received."""
        self.paused = False
        """Whether the process is stopped by SIGSTOP."""
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
        """Start a process from the files on the disk, if none runs and the node can run."""
        if self.alive or self.refused or self.refetch is not None:
            return
        world = self.world
        world.timeline.note(f"node {self.replica}", "starts")
        self.life += 1
        self.alive, self.paused = True, False
        self._orders, self._backlog = [], []
        self._writing = False
        self._wake_ms = self._alarm_us = None
        self.nonce = world.next_nonce()
        if not self._survives(self._open):
            return
        self.commit_seen = self.core.commit_index
        for peer in world.nodes:
            if peer is not self:
                peer.on_reconnected(self.replica)
                if peer.alive:
                    self.on_reconnected(peer.replica)
        world.control.welcome(self)

    def _open(self) -> None:
        world = self.world
        open_directory(self.disk, ROOT, cluster_id=CLUSTER_ID, name=str(self.replica))
        kept_to = self._install_bound()
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
            self.damage = [_installed_path(each) for each in self.damage if not _is_curable(each)]
        unsure = PromiseFile.load(self.disk, PROMISE_PATH).unsure
        self.lied |= installed is not None and unsure  # until a leader has matched the log
        if self.disk.exists(DAMAGED_PATH):
            noted = self.disk.read(DAMAGED_PATH).decode(errors="replace")  # maybe damaged, too
            raise CorruptFileError(DAMAGED_PATH, 0, noted)
        self.outgoing = OfferedSnapshot(self.disk, STATE_PATH, OUTGOING_PATH)
        self.app = world.make_app(self)
        floor = self._committed = self.app.applied_index
        self.log = Log.open(
            self.disk,
            LOG_PATH,
            committed_floor=floor,
            segment_size=world.options.segment_bytes,
            is_used=PromiseFile.load(self.disk, PROMISE_PATH).is_given,
        )
        if self.log.last_index < kept_to:
            raise Broken(
                "storage",
                f"{self}: an install lost the entries after {self.log.last_index}, to {kept_to}",
            )
        self._promise = PromiseFile.load(self.disk, PROMISE_PATH, last_epoch=self.log.last_epoch)
        if self.log.tail_was_cut:
            self._promise.set_unsure(unsure=True)
            self.log.clear_tail_was_cut()
        self.in_doubt |= installed is not None or bool(self.damage)
        if self._promise.unsure and not self.in_doubt:
            raise Broken("doubt", f"node {self.replica} is unsure, but its machine stayed up")
        self.in_doubt = self._promise.unsure
        voters = self.app.voters or world.voters
        shape, time_ms, level = recover(self.log, voters, self.app.state_time_ms)
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
        level = max(level, self.app.level)
        self.driver = Driver(self.core, self, self, time_ms, level)

    def _install_bound(self) -> LogIndex:
        """Return the index that the log must reach after an install now. 0: no bound."""
        found = snapshot_receiver.snapshot_to_install(self.disk, INCOMING_PATH)
        hurt = self.lied or any(LOG_PATH in (path, *path.parents) for path in self.damage)
        if found is None or hurt or ROOT in self.damage or not hasattr(self, "log"):
            return LogIndex(0)
        there, _ = found
        held = self.log.epoch_at(there.index) == there.epoch  # as an earlier process saw it
        return self.log.durable_index if held else LogIndex(0)

    def damage_found(self, error: StorageError) -> None:
        """Fetch a snapshot, or stay down if the damage is outside of CURABLE."""
        disk_loss.check_refusal(self, error)
        self.world.timeline.note(f"node {self.replica}", error)
        named = any(str(path) in str(error) for path in CURABLE)
        if not (named and isinstance(error, CorruptFileError)):
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
        self._end("is damaged", self.disk.die)
        self.refetch = SimSnapshotFetch(self)

    def stop(self) -> bool:
        """Kill the process, if one runs; its unsynced writes stay in the machine's memory.

        Returns whether one ran.
        """
        return self._end("is killed", self.disk.die)

    def terminate(self) -> None:
        """End the process as SIGTERM does: drain, hand over, write a manifest. Then restart."""
        self.world.timeline.note(f"node {self.replica}", "terminates")
        self.world.timeline.after(DRAIN_MS_MAX * 1_000, self._ended_in_time, self.life)
        self.call(self.app.drain, self._on_drained)

    def _on_drained(self) -> None:
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

    def stop_hard(self) -> bool:
        """Cut the machine's power: unsynced writes are lost, or torn. Return as `stop`."""
        self.in_doubt = True
        return self._end("loses power", partial(self.disk.crash, self._rng))

    def _end(self, how: str, then: Callable[[], None]) -> bool:
        """End the process, if one runs, and do something to the disk; return whether one ran."""
        if not self.alive and self.refetch is None:
            return False
        self.world.timeline.note(f"node {self.replica}", how)
        if self.alive and hasattr(self, "app"):
            self.app.on_stop()
        self.alive = self.leading = False
        self.refetch = None
        self.life += 1
        then()
        return True

    def fail(self, error: DiskFailedError) -> None:
        """End the process after a disk error; start the next process after RESTART_MS."""
        self.world.timeline.note(f"node {self.replica}", error)
        self.world.faults.on_disk_failed(full=is_full(error))
        self.stop()
        self.world.timeline.after(RESTART_MS * 1000, self.start)

    def pause(self) -> None:
        """Stop the process as SIGSTOP does; the world around it continues."""
        self.paused = True

    def resume(self) -> None:
        """Continue the process and run the calls that came while it was stopped."""
        if not self.paused:
            return
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for call, args in backlog:
            self._run(self.life, call, *args)

    def later(self, delay_us: int, call: Callable[..., object], *args: object) -> None:
        """Call `call(*args)` in this process after a delay, if it still runs then."""
        self.world.timeline.after(delay_us, self._run, self.life, call, *args)

    def call(self, call: Callable[..., object], *args: object) -> None:
        """Call `call(*args)` in this process now, or after a pause."""
        self._run(self.life, call, *args)

    def _run(self, life: int, call: Callable[..., object], *args: object) -> None:
        if life != self.life or not self.alive:
            return
        if self.paused:
            self._backlog.append((call, args))
            return
        if not self._survives(call, *args) or life != self.life or not self.alive:
            return
        self.world.referee.after_step(self)
        if self.lied and not self.core.unsure:
            self.lied = False

    def _survives(self, call: Callable[..., object], *args: object) -> bool:
        """Call `call(*args)`; return whether no fault of the disk has ended the process."""
        try:
            call(*args)
        except Death:
            self._killed_in_write()
        except DiskFailedError as error:
            self.fail(error)
        except StorageError as error:
            self.damage_found(error)
        else:
            return True
        return False

    # ---------------------------------------------------------------- input from outside

    def receive(self, sender: ReplicaId, message: Message, wall_ms: UnixMs, data: bytes) -> None:
        """Receive a message."""
        self.world.timeline.note(f"{sender} -> {self.replica}", message)
        try:
            self.driver.receive(sender, message, wall_ms, memoryview(data))
        except ValueError as error:
            raise Broken("frames", f"{sender} -> {self}: {error}") from error

    def on_reconnected(self, peer: ReplicaId) -> None:
        """Note that a peer can be reached again, as after a new stream."""
        if self.alive:
            self.later(1_000, self.handle, Reconnected(peer))

    def propose(self, payload: bytes) -> None:
        """Propose an entry, if this node believes to lead and has room for it."""
        with suppress(NotLeaderError, OverloadedError):
            self.driver.propose(EntryKind.SCHEDULE, [payload], self.driver.last_time_ms)

    def handle(self, event: Event) -> None:
        """Process an event from outside the protocol."""
        if not isinstance(event, Reconnected):
            self.world.timeline.note(f"node {self.replica}", event)
        self.driver.handle(event)

    def drop_before(self, index: LogIndex, *, keep: bool = True) -> None:
        """Drop the log below `index`; `keep` keeps `log_kept_bytes` of it for slow followers."""
        self.outgoing.expire(self.mono_ms())
        if self.outgoing.pinned is not None:
            index = min(index, LogIndex(self.outgoing.pinned.index + 1))
        size = self.world.options.log_kept_bytes if keep else 0
        self.driver.drop_before(index, self.log.first_within(size))

    # ---------------------------------------------------------------- Io

    def mono_ms(self) -> MonoMs:
        return MonoMs(self.world.timeline.now_us * self._ppm // 1_000_000_000 + self._mono_base_ms)

    def wall_ms(self) -> UnixMs:
        """Return this node's wall clock in Unix milliseconds."""
        now_us = self.world.timeline.now_us
        drifted_ms = (now_us - self._wall_set_us) * self._wall_ppm // 1_000_000_000
        return UnixMs(WALL_START_MS + now_us // 1_000 + self._wall_offset_ms + drifted_ms)

    def set_clock(self, *, jump_ms: int = 0, drift_ppm: int = 0) -> None:
        """Move this node's wall clock by `jump_ms`, and set its rate error."""
        self.clock_was_wrong = True
        now_us = self.world.timeline.now_us
        self._wall_offset_ms = self.wall_ms() - WALL_START_MS - now_us // 1_000 + jump_ms
        self._wall_ppm, self._wall_set_us = drift_ppm, now_us

    def mend_clock(self) -> None:
        """Set this node's wall clock right."""
        self._wall_offset_ms = self._wall_ppm = 0

    def _sync_us(self) -> int:
        return int(self.world.options.sync_us * self.slow_disk * (0.5 + self._rng.expovariate(2.0)))

    def refuse(self, sender: ReplicaId, why: str) -> None:
        """See Io. Every peer here is correct."""
        raise Broken("frames", f"{sender} -> {self}: {why}")

    def persist(self, order: Persist) -> None:
        took_us = self._sync_us()
        self.world.faults.on_sync(self, took_us, promise=True)
        self.later(took_us, self._persist, order)

    def _persist(self, order: Persist) -> None:
        self._promise.give(order.promise)
        self._promise.set_unsure(unsure=order.unsure)
        self.driver.on_persisted()

    def write(self, order: Order) -> None:
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
        self.later(READ_US, self._read, order)

    def _read(self, order: Read) -> None:
        found = self.log.read(order.first, order.limit_bytes, order.last)
        if found:  # else the entries were truncated meanwhile
            self.driver.on_read(order, found)

    def send(self, to: ReplicaId, message: Message, frames: Sequence[Bytes] = ()) -> None:
        self.world.referee.on_send(self, to, message)
        self.world.network.send(self.replica, to, message, self.wall_ms(), b"".join(frames))

    overtake = send

    def wake_at(self, at_ms: MonoMs | None) -> None:
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
            return  # an earlier alarm replaced this one
        self._alarm_us = None
        if self._wake_ms is not None and self._wake_ms <= self.mono_ms():
            self.driver.tick()
        else:
            self.wake_at(self._wake_ms)

    def soon(self) -> None:
        self.later(0, self.driver.tick)

    # ---------------------------------------------------------------- Listener

    def check(self, entry: Entry) -> None:
        self.app.check_entry(entry)

    def on_commit(self, commit_index: LogIndex) -> None:
        entries = self.entries(LogIndex(self._committed + 1), commit_index)
        self._committed = commit_index
        self.world.referee.on_commit(self, entries)
        self.app.on_commit(entries)

    def entries(self, first: LogIndex, last: LogIndex) -> list[Entry]:
        """Return the entries [first, last], from memory or the log."""
        found: list[Entry] = []
        while first <= last:
            cached = self.driver.cached_entries(first, last)
            if cached is not None:
                return found + cached
            for frame in self.log.read(first, 1 << 16, last):
                found += frames(frame)
            first = LogIndex(found[-1].index + 1)
        return found

    def on_role(self, role: Role, epoch: Epoch) -> None:
        self.world.timeline.note(f"node {self.replica}", f"{role.value} of epoch {epoch}")
        if role is Role.LEADER:
            self.world.faults.on_leader(self)

    def on_lead(self, epoch: Epoch) -> None:
        self.world.timeline.note(f"node {self.replica}", f"serves epoch {epoch}")
        self.world.referee.on_lead(self, epoch)
        self.app.on_lead(epoch)

    def on_behind(self) -> None:
        if self.refetch is None:
            self.world.timeline.note(f"node {self.replica}", "is behind the kept log")
            self.refetch = SimSnapshotFetch(self)

    def on_forgotten(self) -> None:
        raise Broken("storage", f"{self} counts as formatted again; no founder is, in a world")

    def on_drain(self) -> bool:
        return self.app.on_drain()

    def on_stepdown(self, epoch: Epoch) -> None:
        self.app.on_stepdown(epoch)


def _installed_path(path: Path) -> Path:
    """Return a file's path after an install: a file of the incoming snapshot moves to the state."""
    inside = path.is_relative_to(INCOMING_PATH)
    return STATE_PATH / path.relative_to(INCOMING_PATH) if inside else path


def _is_curable(path: Path) -> bool:
    return any(path.is_relative_to(each) for each in CURABLE)
