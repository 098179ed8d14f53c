"""A running replica of the log: the driver with a clock, a disk thread and streams.

    event loop   driver, streams, timers
    writer       one thread: log writes and syncs (group commit), promises
    readers      threads of the loop's pool: entries for followers far behind, and for apply

A failed write ends the process through `fatal`. No message that depends on the write was sent.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from replication.core.codec import decode, encode
from replication.core.core import Core
from replication.core.core_events import (
    Appointed,
    ClockSample,
    Durable,
    Handover,
    Persist,
    Read,
    Reconnected,
    Role,
)
from replication.core.log_recovery import recover
from replication.core.peer_messages import Append, AppendAnswer, Message
from replication.core.promise import Promise, PromiseFile
from replication.core.replication_config import ReplicationConfig
from replication.driver.driver import BadPeerMessage, Driver, Listener, LogStatus
from replication.driver.write_order import Order, write_batch
from replication.shell.hop_recorder import Hop, HopRecorder
from replication.shell.tcp_stream import TcpEnds
from replication.shell.transport import Dial, Identify, Transport
from timer.entries.entry_frame import Entry, EntryKind, frames
from timer.files.disk import Bytes
from timer.files.log import Log
from timer.model.feature_level import FIRST_RELEASE, ProgramRelease
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs

_T = TypeVar("_T")

READ_BYTES = 4 << 20
"""Bytes of one read for apply."""


class Replica:
    """A replica with its threads and streams. Call it on the event loop."""

    def __init__(  # noqa: PLR0913 - the parts of a replica
        self,
        *,
        replica_id: ReplicaId,
        name: str,
        nonce: Nonce,
        cluster_id: str,
        founding: frozenset[ReplicaId],
        voters: frozenset[ReplicaId] | None,
        level: int = 0,
        state_time_ms: UnixMs,
        dials: Mapping[str, Dial],
        log: Log,
        promise: PromiseFile,
        commit_index: LogIndex,
        config: ReplicationConfig,
        listener: Listener,
        mono_ms: Callable[[], MonoMs],
        wall_ms: Callable[[], UnixMs],
        on_fsync: Callable[[float], None] = lambda seconds: None,
        needed_from: Callable[[], LogIndex | None] = lambda: None,
        shipped_from: Callable[[], LogIndex | None] = lambda: None,
        identify: Identify | None = None,
        release: ProgramRelease = FIRST_RELEASE,
        tcp: TcpEnds,
        hops: HopRecorder | None = None,
        fatal: Callable[[BaseException], None],
    ) -> None:
        """`name`: this node's name. `dials`: name of each other node -> its channel factory.

        `voters`: the voters at `commit_index`, from the manifest. None: there is no manifest.
        `level`: the manifest's feature level; 0: there is no manifest.
        `state_time_ms`: time of the manifest's last entry; 0: there is no manifest.
        `on_fsync`: called with the seconds that each sync of the log took.
        `needed_from`, `shipped_from`: return the first entry that a snapshot being sent, or a
        continuous backup, needs. None: there is none.
        `identify`, `release`, `tcp`: see Transport.
        `hops`: records the hops of entries while it is on. None: one of this replica's own.
        """
        self.replica_id = replica_id
        self._log, self._promise = log, promise
        self._mono_ms, self._wall_ms, self._fatal = mono_ms, wall_ms, fatal
        self._config = config
        self._loop = asyncio.get_running_loop()
        shape, last_time_ms, log_level = recover(log, voters or founding, state_time_ms)
        self._core = Core(
            me=replica_id,
            nonce=nonce,
            conf=config,
            promise=promise.promise,
            unsure=promise.unsure,
            shape=shape,
            commit_index=commit_index,
            now_ms=mono_ms(),
        )
        self._driver = Driver(self._core, self, listener, last_time_ms, max(level, log_level))
        self._transport = Transport(
            cluster_id=cluster_id,
            me=replica_id,
            name=name,
            dials=dials,
            on_message=self._receive,
            on_connected=self._on_reconnected,
            on_failure=fatal,
            identify=identify,
            release=release,
            level=lambda: self._driver.level,
            tcp=tcp,
        )
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="log-writer")
        self._orders: list[Order] = []
        self._writing = self._stopped = False
        self._sync_ended = asyncio.Event()
        """Wakes the calls that wait for a sync, at its end and once this replica falls silent."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms: MonoMs | None = None
        self._wake_ms: MonoMs | None = None
        self._heard_ms = mono_ms()
        self._on_fsync, self._needed_from, self._shipped_from = on_fsync, needed_from, shipped_from
        self._hops = hops or HopRecorder()

    # ---- lifetime

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """Return the handlers for the node's gRPC server. Call before the server starts."""
        return [self._transport.handler()]

    async def start(self) -> None:
        """Connect to the peers and begin to step."""
        self._transport.start()
        self._tick()

    async def fall_silent(self) -> None:
        """Stop receiving and sending. Afterwards this replica acknowledges nothing."""
        self._stopped = True
        self._sync_ended.set()
        if self._alarm is not None:
            self._alarm.cancel()
        await self._transport.stop()

    async def stop(self) -> None:
        """Close the streams, then the log after the disk work that is queued.

        Results of that work are ignored: nothing is acknowledged any more.
        """
        await self.fall_silent()
        await self._loop.run_in_executor(self._writer, self._log.close)
        self._writer.shutdown()

    # ---- the node's requests

    def on_appointment(
        self,
        epoch: Epoch,
        leader: ReplicaId,
        voters: frozenset[ReplicaId] | None = None,
        level: int = 0,
    ) -> None:
        """Process an appointment by the control plane. `voters` None: no change is proposed.

        `level`: the feature level that all nodes support. 0: unknown.
        """
        with self._fatal_errors():
            self._driver.handle(Appointed(epoch, leader, voters, level))

    def name_of(self, replica: ReplicaId) -> str | None:
        """Return the name of the node under which this replica was last connected."""
        return self._transport.name_of(replica)

    async def release(self) -> None:
        """Step down in good order: commit the last entries, then release the lease."""
        with self._fatal_errors():
            self._driver.handle(Handover())
        while self._core.role is Role.LEADER and not self._stopped:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    def propose(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        """Append an entry as the leader; see `Driver.propose`."""
        index = self._driver.propose(kind, payload, time_ms)
        if self._hops.on:
            self._hops.stamp(Hop.APPENDED, index)
        return index

    def cached_entries(self, first: LogIndex, last: LogIndex) -> Sequence[Entry] | None:
        """Return the entries [first, last] from memory. None: some are not in memory."""
        return self._driver.cached_entries(first, last)

    async def entries(self, first: LogIndex, last: LogIndex) -> Sequence[Entry]:
        """Return entries from `first` on, at least one, at most to `last`, from memory or disk."""
        cached = self._driver.cached_entries(first, last)
        if cached is not None:
            return cached
        return await asyncio.to_thread(self._read, first, last)

    def _read(self, first: LogIndex, last: LogIndex) -> list[Entry]:
        found = self.stored_entries(first, last, READ_BYTES)
        assert found, f"entry {first} is not in the log any more"
        return found

    @property
    def tcp_port(self) -> int:
        """The port at which peers may send over TCP without gRPC; 0: none is open."""
        return self._transport.tcp_port

    @property
    def first_index(self) -> LogIndex:
        """The first entry in the log. Safe on any thread."""
        return self._log.first_index

    def stored_entries(self, first: LogIndex, last: LogIndex, size_max: int) -> list[Entry]:
        """Return entries from `first` on from disk, at least one, about `size_max` bytes.

        Return an empty list if `first` is not in the log any more. Call on a thread: this blocks.
        """
        found = self._log.read(first, size_max, last)
        return [entry for frame in found for entry in frames(memoryview(frame))]

    def check_log(self) -> None:
        """See `Log.check_active`. Call on a thread: this blocks."""
        self._log.check_active()

    async def wait_until_synced(self, index: LogIndex) -> bool:
        """Wait until this disk has the log up to `index`, which is committed.

        Return False if this replica falls silent before.
        """
        while self._core.durable_index < index and not self._stopped:
            await self._sync_ended.wait()
        return self._core.durable_index >= index

    def drop_before(self, index: LogIndex, *, keep: bool = True) -> None:
        """Drop log entries below `index`. This node's restart does not need them.

        `keep`: keep up to `log_kept_bytes` of them for followers and backups that lack them.
        Without it, such a follower needs a snapshot.
        """
        size = self._config.log_kept_bytes if keep else 0
        beyond = self._log.first_within(size)
        shipped = max(self._shipped_from() or index, beyond)
        self._driver.drop_before(min(index, self._needed_from() or index, shipped), beyond)

    def leads_under(self) -> Promise | None:
        """Return the promise that this replica leads under. None: no leader, or no lease."""
        leads = self._core.role is Role.LEADER and self.holds_lease()
        return self._core.promise if leads else None

    def holds_lease(self) -> bool:
        """Return whether the lease excludes another leader now."""
        return self._core.holds_lease(self._mono_ms())

    # ---- knowledge

    @property
    def silent(self) -> bool:
        """Whether this replica has stopped receiving and sending."""
        return self._stopped

    @property
    def role(self) -> Role:
        """The present role."""
        return self._core.role

    @property
    def serving(self) -> bool:
        """Whether this replica leads and its EPOCH entry is committed."""
        return self._core.serving

    @property
    def epoch(self) -> Epoch:
        """Epoch of the present promise; 0: none was given."""
        return self._core.epoch

    @property
    def leader_id(self) -> ReplicaId | None:
        """The leader that this replica follows, or itself as the leader. None: unknown."""
        return self.replica_id if self._core.role is Role.LEADER else self._core.leader

    @property
    def voters(self) -> frozenset[ReplicaId]:
        """The newest voter set in the log, committed or not."""
        return self._core.voters

    @property
    def last_index(self) -> LogIndex:
        """Index of the log's last entry."""
        return self._core.shape.last_index

    @property
    def commit_index(self) -> LogIndex:
        """Up to this index the log is committed, as far as this replica knows."""
        return self._core.commit_index

    @property
    def last_time_ms(self) -> UnixMs:
        """Lowest time of the next entry: that of the last one, in the log or in the state."""
        return self._driver.last_time_ms

    @property
    def unsure(self) -> bool:
        """Whether acknowledged entries may be gone and no leader has matched the log since."""
        return self._core.unsure

    @property
    def silent_ms(self) -> int:
        """Milliseconds since the last message from any peer, or since the start."""
        return self._mono_ms() - self._heard_ms

    @property
    def behind_ms(self) -> int | None:
        """Milliseconds since a follower last had all that its leader had committed. None: never."""
        at_ms = self._core.caught_up_ms
        return None if at_ms is None else self._mono_ms() - at_ms

    @property
    def level(self) -> int:
        """The highest feature level of an epoch in the log or the state. 0: there is none."""
        return self._driver.level

    @property
    def clock_samples(self) -> Mapping[ReplicaId, ClockSample]:
        """Replica -> the last reading of its wall clock."""
        return self._core.clock_samples

    def report(self) -> LogStatus:
        """Return the replica's state for the controller."""
        return self._driver.report()

    # ---- streams

    def _on_reconnected(self, peer: ReplicaId) -> None:
        with self._fatal_errors():
            self._driver.handle(Reconnected(peer))

    def _receive(self, sender: ReplicaId, data: bytes) -> None:
        began_ns = time.monotonic_ns() if self._hops.on else 0
        message, wall_ms, beside = decode(data)
        if began_ns and isinstance(message, Append):
            self._hops.stamp(Hop.RECEIVED, message.last_index, began_ns)
        elif began_ns and isinstance(message, AppendAnswer):
            self._hops.stamp(Hop.ANSWERED, message.durable_index, began_ns)
        self._heard_ms = self._mono_ms()
        if not self._stopped:
            with self._fatal_errors():
                self._driver.receive(sender, message, wall_ms, beside)

    @contextlib.contextmanager
    def _fatal_errors(self) -> Iterator[None]:
        """End the process on any exception: a half-done step leaves a wrong core.

        `BadPeerMessage` is excepted, as it is raised before the step. Every entry into the core is
        wrapped, as gRPC would only log the exception.
        """
        try:
            yield
        except BadPeerMessage:
            raise
        except Exception as error:
            self._fatal(error)
            raise

    # ---- Io

    def mono_ms(self) -> MonoMs:
        """See Io."""
        return self._mono_ms()

    def persist(self, order: Persist) -> None:
        """See Io."""

        def store() -> None:
            self._promise.give(order.promise)
            self._promise.set_unsure(unsure=order.unsure)

        self._run_in_writer(store, lambda _: self._driver.on_persisted())

    def write(self, order: Order) -> None:
        """See Io."""
        self._orders.append(order)
        if not self._writing:
            self._write_batch()

    def _write_batch(self) -> None:
        self._writing = True
        orders, self._orders = self._orders, []

        def store() -> tuple[int, LogIndex, float]:
            began_ns = time.monotonic_ns() if self._hops.on else 0
            version = write_batch(self._log, orders)
            started = time.perf_counter()  # the loop's clock has whole milliseconds only
            self._log.sync()
            seconds, index = time.perf_counter() - started, self._log.durable_index
            if began_ns:
                self._hops.stamp(Hop.WRITING, index, began_ns)
                self._hops.stamp(Hop.DURABLE, index)
            return version, index, seconds

        self._run_in_writer(store, self._on_written)

    def _on_written(self, result: tuple[int, LogIndex, float]) -> None:
        version, index, seconds = result
        self._on_fsync(seconds)
        if self._orders:
            self._write_batch()
        else:
            self._writing = False
        self._driver.handle(Durable(version, index))
        self._sync_ended.set()
        self._sync_ended.clear()

    def _run_in_writer(self, work: Callable[[], _T], on_done: Callable[[_T], None]) -> None:
        def finished(result: _T) -> None:
            if not self._stopped:
                with self._fatal_errors():
                    on_done(result)

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - it ends the process
                self._loop.call_soon_threadsafe(self._fatal, error)
            else:
                # Called without a future: every commit waits for this, and a future costs a turn.
                self._loop.call_soon_threadsafe(finished, result)

        self._writer.submit(run)

    def read(self, order: Read) -> None:
        """See Io."""

        def finished(future: asyncio.Future[list[memoryview]]) -> None:
            error = future.exception()
            if error is not None:
                self._fatal(error)
                return
            found = future.result()
            if found and not self._stopped:  # empty: truncated meanwhile
                with self._fatal_errors():
                    self._driver.on_read(order, found)

        wanted = order.first, order.limit_bytes, order.last
        work = self._loop.run_in_executor(None, self._log.read, *wanted)
        work.add_done_callback(finished)

    def send(self, to: ReplicaId, message: Message, frames: Sequence[Bytes]) -> None:
        """See Io."""
        if self._hops.on and isinstance(message, Append):
            self._hops.stamp(Hop.SENT, message.last_index)
        elif self._hops.on and isinstance(message, AppendAnswer):
            self._hops.stamp(Hop.ANSWERING, message.durable_index)
        self._transport.send(to, encode(message, self._wall_ms(), frames))

    def overtake(self, to: ReplicaId, message: Message) -> None:
        """See Io."""
        self._transport.overtake(to, encode(message, self._wall_ms(), ()))

    def refuse(self, sender: ReplicaId, why: str) -> None:
        """See Io."""
        self._transport.refuse(sender, why)

    def wake_at(self, at_ms: MonoMs | None) -> None:
        """See Io."""
        self._wake_ms = at_ms
        if at_ms is None or self._stopped:
            return
        if self._alarm_ms is not None and self._alarm_ms <= at_ms:
            return  # the earlier alarm sets the next one
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_ms = at_ms
        wait_s = max(0, at_ms - self._mono_ms()) / 1000
        self._alarm = self._loop.call_later(wait_s, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = self._alarm_ms = None
        if self._wake_ms is not None and self._wake_ms <= self._mono_ms():
            self._tick()
        else:
            self.wake_at(self._wake_ms)

    def soon(self) -> None:
        """See Io."""
        self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        with self._fatal_errors():
            self._driver.tick()
