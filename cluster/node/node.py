"""One node, assembled: the planes, the ports, and the way in and out.

    Storage  -> data directory, Log, PromiseFile, Engine (manifest, runs)
    Replica  (log plane)     <- peers' streams
    Host     (state plane)   <- commits; services step it
    ControlPlane             -> appointed(epoch, leader) to the replica; reports back
    gRPC server: TimerService, ConsumeService, AdminService, health, reflection, peers
    HTTP server: metrics, health, JSON

Start: disk first, then ports, then the planes. Drain: take nothing new, commit a checkpoint,
hand the leadership over, write a manifest, stop.
"""

import asyncio
import functools
import logging
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.api.peer_queries import ask_all, digests_at, judge, majority_of, status_of
from cluster.api.public_services import services_of
from cluster.control.control_plane import CommandOutcome, ControlPlane
from cluster.control.control_state import ControlState, SharedCheckpoint
from cluster.control.controller import ControllerConfig, ReplicaReport
from cluster.control.raft import Exit, exit_process
from cluster.control.raft_link import CHANNEL_OPTIONS
from cluster.control.replica_report import report_of
from cluster.files.disk_room import Space
from cluster.files.repair import check_state, dials
from cluster.files.scrubber import Scrubber
from cluster.files.storage import open_storage
from cluster.observe.metrics import Telemetry
from cluster.observe.node_view import VERSION, NodeState
from cluster.rpc.connections import Connections
from cluster.rpc.grpc_errors import reason_of
from cluster.rpc.handlers import PINGED, PINGS, Registrar
from cluster.rpc.http import HttpServer
from cluster.rpc.memory import MemoryGuard
from cluster.rpc.open_files import connections_max, has_spare
from cluster.rpc.request_bounds import COLUMNS_BYTES_MAX
from cluster.settings.config import NodeConfig, parse_address
from cluster.settings.exit_codes import Diverged
from cluster.settings.wall_clock import wall_clock
from cluster.state.host import Host
from cluster.state.loop_watch import LoopWatch
from replication.shell.replica import Replica
from replication.shell.snapshot_fetch import SnapshotFetch
from replication.shell.snapshot_service import Snapshots
from timer.entries.entry_check import check_entry
from timer.entries.entry_frame import Entry
from timer.entries.payloads import GroupOp, Nack, Op
from timer.files.disk import FreshDisk, RealDisk, is_full
from timer.leader.intake.cluster_clock import ClusterClock, Sample
from timer.leader.leader import Delivery
from timer.model.timer_errors import ConfigError, EngineError, PromiseLostError
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs
from timer.state.apply_results import (
    AcksApplied,
    Applied,
    Checkpoint,
    DeleteTopicApplied,
    FireApplied,
    GroupApplied,
    GroupResult,
    MoveApplied,
    ScheduleApplied,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc

logger = logging.getLogger(__name__)

MESSAGE_BYTES_MAX: Final = 64 << 20
DRAIN_POLL_S: Final = 0.005
JUDGE_TRIES: Final = 10
JUDGE_AGAIN_S: Final = 0.5
"""A replica that lags behind the checkpoint in question is asked again, for so long."""
GRPC_GRACE_S: Final = 0.5
"""After leadership is handed over, how long open RPCs may still take."""
SERVICES: Final = ("timer.v1.TimerService", "timer.v1.ConsumeService", "timer.v1.AdminService")


_MESSAGES: Final = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)
SERVER_OPTIONS: Final = (
    *_MESSAGES,
    *PINGED,
    ("grpc.so_reuseport", 0),
    # A connection that says nothing, or has nothing to do, goes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
)
PEER_OPTIONS: Final = (
    *_MESSAGES,
    *PINGS,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


def mono_ms() -> MonoMs:
    """Return CLOCK_BOOTTIME in milliseconds: it goes on while the machine sleeps."""
    return MonoMs(time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000)


class Node:
    """One running node. `start`, then `stop`; `fatal` hears of what ends the process."""

    def __init__(
        self,
        config: NodeConfig,
        fatal: Callable[[BaseException], None],
        restart: Callable[[], None] = lambda: None,
        before_serving: Callable[[], None] = lambda: None,
        *,
        raft_lost: bool = False,
    ) -> None:
        """`restart` is called when a snapshot waits to be installed by the next start.

        `before_serving`: when what the disk held is in memory, and nobody can ask yet.
        `raft_lost`: an operator says that the Raft files of all absent nodes are gone.
        """
        self.config = config
        self._fatal = fatal
        self._restart = restart
        self._before_serving, self._raft_lost = before_serving, raft_lost
        self._disk = RealDisk()
        self._refetching = False
        self._wall_ms = wall_clock(config.test_clock)
        self._nonce = Nonce(secrets.randbits(62) + 1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._stranded: set[ReplicaId] = set()
        self._appointed = Epoch(0), 0.0
        """The last epoch that this node was appointed for, and when it heard of that."""

    async def start(self) -> None:
        """Open the disk, bind the ports, join the cluster.

        Raises:
            Damaged: state and log have to be fetched from the others; see cluster/files/repair.py.
            WrongDirectory, CorruptFile, UnknownVersion, DiskFailed: the data directory.
            ConfigError: a port is in use.
        """
        self._open_disk()
        self._assemble()
        self._before_serving()
        await self._serve()
        await self.replica.start()
        self.host.start()
        await self.control.start()
        self._spawn(self._publish_checkpoints())
        self._spawn(self._space.run())
        self._spawn(self.memory.run())
        self._spawn(self._scrubber.run())
        logger.info("started: grpc %s, http %s", self.config.grpc, self.config.http)

    @property
    def flushing(self) -> bool:
        """The state is being captured, or written."""
        return self._engine.cutting or self._engine.flushing

    # ---- assembly

    def _open_disk(self) -> None:
        storage = open_storage(self._disk, self.config, self._applied)
        self._directory, self._outgoing = storage.directory, storage.outgoing
        self._identity = storage.directory.identity
        self._engine, self._log, self._promise = storage.engine, storage.log, storage.promise

    def _assemble(self) -> None:
        config, identity = self.config, self._identity
        others = {name: a for name, a in config.peers.items() if name != config.name}
        self._dials = dials(config, [*PEER_OPTIONS])
        self._channels = {name: _channel(address) for name, address in others.items()}
        stubs = {name: rpc.AdminServiceStub(c) for name, c in self._channels.items()}
        self.replica = Replica(
            replica_id=identity.replica_id,
            name=config.name,
            nonce=self._nonce,
            cluster_id=config.cluster_id,
            founding=frozenset(identity.founding_voters.values()),
            voters=frozenset(self._engine.machine.voters) or None,
            state_time_ms=self._engine.machine.applied_time_ms,
            dials=self._dials,
            log=self._log,
            promise=self._promise,
            commit_index=self._engine.manifest_index,
            config=config.replication(),
            listener=self,
            mono_ms=mono_ms,
            wall_ms=self._wall_ms,
            fatal=self._fatal,
        )
        self.host = Host(
            self._engine,
            self.replica,
            make_clock=self._make_clock,
            samples=self._samples,
            mono_ms=mono_ms,
            wall_ms=self._wall_ms,
            fold_interval_ms=config.timing.fold_interval_ms,
            memtable_bytes_flush=config.storage.memtable_bytes_flush,
            log_bytes_flush=config.storage.log_bytes_flush,
            log_entries_flush=config.storage.log_entries_flush,
            flush_interval_ms=config.storage.flush_interval_ms,
            handed_out=self._handed_out,
            fatal=self._fatal,
        )
        self.control = self._control_plane(others)
        self.control.on_state(self._control_changed)
        self.control.set_report_source(self._report)
        self._snapshots = Snapshots(
            self._outgoing,
            cluster_id=config.cluster_id,
            bytes_per_s=config.storage.snapshot_bytes_per_s,
            leads=self.replica.leads_under,
            flush=self.host.flush,
            mono_ms=mono_ms,
            fatal=self._fatal,
        )
        self.replica.needed_from = lambda: self._snapshots.kept_from
        self._scrubber = Scrubber(
            FreshDisk(),
            config,
            self._directory,
            self.replica,
            others=self._others,
            hand_over=self._hand_over,
            wall_ms=self._wall_ms,
            fatal=self._fatal,
        )
        self.view = NodeState(
            config, self.replica, self.host, self.control, stubs, mono_ms, self._scrubber
        )
        self.host.leader_address = self.view.leader_address
        self.host.on_leading = self._leading_changed
        self.telemetry = Telemetry(node=config.name, version=VERSION, read_levels=self.view.levels)
        self.replica.on_fsync = self.telemetry.fsync_seconds.observe
        self._space = Space(
            self._disk,
            config,
            self.replica,
            self.host,
            peers=self.view.peers,
            transfer=self.control.request_transfer,
            mono_ms=mono_ms,
        )
        self._watch_loop()

    def _watch_loop(self) -> None:
        self.host.steps.observe = self.telemetry.observe_step
        observe = self.telemetry.loop_held_seconds.observe
        self._loop_watch = LoopWatch(asyncio.get_running_loop(), observe, self.host.steps)

    def _control_plane(self, others: Mapping[str, str]) -> ControlPlane:
        config, identity = self.config, self._identity
        return ControlPlane(
            name=config.name,
            replica_id=identity.replica_id,
            peers=others,
            directory=config.data,
            founding=identity.is_founder,
            raft_lost=self._raft_lost,
            cluster_id=config.cluster_id,
            voters=identity.founding_voters,
            channel_for=lambda name: grpc.aio.insecure_channel(
                config.peers[name], options=CHANNEL_OPTIONS
            ),
            clock=mono_ms,
            config=ControllerConfig.of_lease(config.leadership.lease_ms),
            fail=self._control_failed,
        )

    async def _serve(self) -> None:
        config, limits = self.config, self.config.limits
        services = services_of(self.host, self.view, config)
        self._consumers = services.consumers
        port = parse_address("grpc", config.grpc).port
        connections = Connections(port, services.consumers.outboxes.unread)
        self.memory = memory = MemoryGuard(limits.memory_bytes_max, connections)
        self.telemetry.memory_limit_bytes.set(memory.bytes_max)
        self.telemetry.memory_high.set_function(lambda: memory.high)
        self.telemetry.outbox_bytes.set_function(lambda: self._consumers.outboxes.total)
        memory.on_end = self.telemetry.connections_ended.inc
        for service in services:
            service.on_error = self._count_error
            service.admit, service.taken = self.memory.admit, connections.take
        services.timers.on_cancel = self.telemetry.cancel_seconds.observe
        self.host.on_committed = self.telemetry.observe_commit
        most = (
            ("grpc.max_concurrent_streams", limits.streams_max),
            ("grpc.max_allowed_incoming_connections", connections_max(limits.connections_max)),
        )
        self._server = grpc.aio.server(options=(*SERVER_OPTIONS, *most))
        self._server.add_generic_rpc_handlers(
            (
                *map(connections.of_nodes, self.control.handlers()),
                *map(connections.of_nodes, self.replica.handlers()),
                self._snapshots.handler(),
            )
        )
        request_bytes_max = limits.request_bytes_max + COLUMNS_BYTES_MAX
        services.add_to(Registrar(self._server, request_bytes_max))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        try:
            self._server.add_insecure_port(config.grpc)
        except RuntimeError:
            raise ConfigError("grpc", config.grpc, "can't listen: in use, or not ours") from None
        await self._server.start()
        self._http = HttpServer(config.http, self.view, self.telemetry.registry)
        try:
            await self._http.start()
        except ConfigError:
            await self._server.stop(None)  # or it complains, at the end of the loop
            raise
        self._loop_watch.start()
        await self._set_health()

    # ---- what the replica tells (Listener)

    def check(self, entry: Entry) -> None:
        """See Listener."""
        check_entry(entry)

    def on_commit(self, commit_index: LogIndex) -> None:
        """Apply."""
        self.host.on_commit(commit_index)

    def on_role(self, role: object, epoch: Epoch) -> None:
        """Tell the controller at once."""
        logger.info("role %s in epoch %d", role, epoch)
        self.control.report_now()

    def on_lead(self, epoch: Epoch) -> None:
        """Promote the state plane."""
        self.host.on_lead(epoch)

    def on_drain(self) -> None:
        """See Listener."""
        self.host.on_drain()

    def on_stepdown(self, epoch: Epoch) -> None:
        """Stop serving at once."""
        self.host.on_stepdown(epoch)

    def on_behind(self) -> None:
        """Fetch a snapshot beside following, as far as that goes; the next start installs it."""
        if not self._refetching and not self._stopping:
            self._refetching = True
            logger.warning("the leader has dropped what is needed next: fetching a snapshot")
            self._spawn(self._refetch())

    def on_forgotten(self) -> None:
        """End: who lost its promises is replaced by another replica."""
        name = self.config.name
        self._fatal(
            PromiseLostError(
                f"{self.config.data}: founding voter {name!r} has no promise and no log, but the"
                " cluster has entries, which takes every founder's promise: its disk was lost, and"
                " was formatted as a founder's again. Format it with `timerd init --learner`, start"
                f" it, then `timerctl members replace {name}` (docs/members.md)"
            )
        )

    async def _refetch(self) -> None:
        config, disk = self.config, self._disk
        refetch = SnapshotFetch(
            disk,
            self._directory.incoming,
            cluster_id=config.cluster_id,
            name=config.name,
            dials=self._dials,
            check=functools.partial(check_state, config, disk),
            known=lambda: self.replica.commit_index,
            fall_silent=self.replica.fall_silent,
        )
        await refetch.run()
        if self.replica.silent:  # the next process takes part again, with the snapshot or without
            self._stopping = True
            self._restart()
        self._refetching = False

    # ---- between the planes

    def _control_changed(self, state: ControlState) -> None:
        if state.leader is not None and not (
            self._stopping and state.leader == self.replica.replica_id
        ):
            if state.leader == self.replica.replica_id and state.epoch > self._appointed[0]:
                self._appointed = state.epoch, time.perf_counter()
            proposed = state.proposed
            voters = frozenset(proposed.values()) if proposed is not None else None
            self.replica.appointed(state.epoch, state.leader, voters)
        self._compare(state.checkpoint)

    def _report(self) -> ReplicaReport:
        report = self.replica.report()
        for replica in set(report.stranded) - self._stranded:
            logger.warning(
                "replica %016x lacks entries that the log has dropped: it needs a snapshot, unless"
                " they are on their way",
                replica,
            )
        self._stranded = set(report.stranded)
        return report_of(
            report,
            name=self.config.name,
            applied_index=self._engine.machine.applied_index,
            accepts=has_spare(),
        )

    def _make_clock(self, floor_ms: UnixMs) -> ClusterClock:
        now = mono_ms()
        voters = self.replica.voters
        return ClusterClock(
            voters, self._samples(), floor_ms=floor_ms, floor_at_ms=now, boot_ms=now
        )

    def _samples(self) -> Iterable[Sample]:
        now = mono_ms()
        own = Sample(
            voter=self._identity.replica_id,
            wall_ms=self._wall_ms(),
            sent_ms=now,
            received_ms=now,
        )
        others = self.replica.clock_samples.items()
        return [own, *(Sample.at(voter, s.wall_ms, s.at_ms, s.error_ms) for voter, s in others)]

    # ---- checkpoints

    async def _publish_checkpoints(self) -> None:
        """While leading, publish each checkpoint through Raft: a hint for the next leader."""
        published = LogIndex(0)
        while True:
            await asyncio.sleep(self.config.timing.checkpoint_interval_ms / 4000)
            await self._snapshots.expire()
            if self.host.leader is not None:
                await self._publish_members()
            checkpoint = self._engine.machine.checkpoint
            leader = self.host.leader
            if leader is None or checkpoint is None or checkpoint.index <= published:
                continue
            shared = SharedCheckpoint(
                epoch=checkpoint.epoch,
                index=checkpoint.index,
                last_read_time_ms=checkpoint.last_read_time_ms,
                queue_offsets=checkpoint.queue_offsets,
                digest=checkpoint.digest,
                published_at_ms=self.host.now().clock_ms,
            )
            outcome = await self.control.publish_checkpoint(
                shared, checkpoint.moved, checkpoint.since
            )
            if outcome is CommandOutcome.OK:
                published = checkpoint.index
                await self._judge(checkpoint.index, checkpoint.digest)

    async def _publish_members(self) -> None:
        """Tell the control plane who votes, if it thinks otherwise: the log decides."""
        known = {replica: name for name, replica in self.control.state.voters.items()}
        for name, replica in (self.control.state.proposed or {}).items():
            known.setdefault(replica, name)
        voters = self._engine.machine.voters  # committed
        names = {voter: self.replica.name_of(voter) or known.get(voter) for voter in voters}
        named = {name: voter for voter, name in names.items() if name is not None}
        if len(named) < len(voters):
            return  # until the last of them was met
        state = self.control.state
        if named != state.voters or (state.proposed is not None and named == state.proposed):
            await self.control.publish_members(self.replica.epoch, named)

    def _compare(self, shared: SharedCheckpoint | None) -> None:
        """Compare digests with the shared checkpoint; ask the others if they differ."""
        mine = self._engine.digests.get(shared.index) if shared is not None else None
        if shared is not None and mine is not None and mine != shared.digest:
            self._spawn(self._judge(shared.index, mine))

    async def _judge(self, index: LogIndex, mine: str) -> None:
        """Stop if a majority holds another state than this replica, or none holds any (P6)."""
        why, others = "", dict[str, str]()
        for _ in range(JUDGE_TRIES):
            others, lagging = await digests_at(self.view.peers(), index)
            voters = self.replica.voters
            votes = self.replica.replica_id in voters
            why = judge(mine, others, len(voters), votes=votes)
            if not (why and lagging):
                break
            await asyncio.sleep(JUDGE_AGAIN_S)  # who lags may agree with either side
        if why:
            agreed = majority_of(others, len(self.replica.voters))
            self._fatal(Diverged(f"state diverged at {index}: {why}", curable=agreed))

    # ---- telemetry

    def _applied(self, entry: Entry, applied: Applied) -> None:
        if isinstance(applied, Checkpoint):
            self._compare(self.control.state.checkpoint)
        if self.host.leader is None:
            return
        telemetry = self.telemetry
        if isinstance(applied, FireApplied):
            telemetry.observe_lateness(self.view.fired(applied, entry.time_ms))
        elif isinstance(applied, DeleteTopicApplied):
            self.view.deleted(applied.op.topic)
        elif isinstance(applied, ScheduleApplied):
            telemetry.append_rows.observe(
                sum(len(part[0].due_ms) for part in applied.parts if isinstance(part, tuple))
            )
        elif isinstance(applied, GroupApplied):
            for result in applied.results:
                self._count_group_op(result)

    def _count_group_op(self, result: GroupResult) -> None:
        telemetry = self.telemetry
        if isinstance(result, AcksApplied):
            nack = isinstance(result.op, Nack)
            (telemetry.nacked if nack else telemetry.acked).inc(int(result.new.sum()))
        elif isinstance(result, MoveApplied):
            telemetry.moved.inc(int(result.new.sum()))
        elif isinstance(result, GroupOp) and result.op is Op.ENDED:
            telemetry.leases_ended.inc(len(result.offsets))

    def _handed_out(self, delivery: Delivery) -> None:
        self.telemetry.delivered.inc(len(delivery.attempts))
        late_ms = self.view.handed_out(delivery)
        if len(late_ms) < len(delivery.attempts):
            self.telemetry.redelivered.inc(len(delivery.attempts) - len(late_ms))
        self.telemetry.observe_handed_out(late_ms)

    def _count_error(self, method: str, error: EngineError) -> None:
        self.telemetry.error(method, reason_of(error))

    def _leading_changed(self) -> None:
        self._spawn(self._set_health())
        self.control.report_now()
        if self.host.leader is None:
            self._consumers.end_streams()
        else:
            self.telemetry.promotions.inc()
            if self.host.leader.epoch == self._appointed[0]:
                self.telemetry.promotion_seconds.observe(time.perf_counter() - self._appointed[1])
            self.view.led()

    async def _set_health(self) -> None:
        """SERVING on the leader, for those services that only it offers; admin everywhere."""
        serving = health_pb2.HealthCheckResponse.SERVING
        leads = serving if self.host.leader else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in SERVICES[:2]:
            await self._health.set(service, leads)
        for service in ("", SERVICES[2]):
            await self._health.set(service, serving)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal(error)

    # ---- the way out

    async def _others(self) -> list[pb.NodeStatus]:
        return await ask_all(self.view.peers(), status_of)

    async def _hand_over(self) -> None:
        if self.host.leader is not None:
            await self.view.transfer("")

    def _control_failed(self, code: Exit, why: str) -> NoReturn:
        error = sys.exception()
        if is_full(error):
            assert error is not None
            self._fatal(error)
        exit_process(code, why)

    async def stop(self) -> None:
        """Drain and stop: nothing new, a checkpoint, leadership handed over, a manifest."""
        timeout_s = self.config.timing.drain_timeout_ms / 1000 * 0.7
        try:
            async with asyncio.timeout(timeout_s):
                await self._drain()
        except TimeoutError:
            logger.warning("not drained within %.1f s: stopping all the same", timeout_s)
        await self._health.enter_graceful_shutdown()
        self._consumers.end_streams()
        for task in list(self._tasks):
            task.cancel()
        self._scrubber.stop()
        await self.host.stop()
        await self.control.stop()
        await self._server.stop(GRPC_GRACE_S)
        await self.replica.stop()
        await self._http.stop()
        self._loop_watch.stop()
        for channel in self._channels.values():
            await channel.close()
        self._directory.close()
        logger.info("stopped")

    async def _drain(self) -> None:
        led = self.host.leader is not None
        await self.host.drain(lambda: asyncio.sleep(DRAIN_POLL_S))
        self._stopping = True
        if led:
            await self._resign()
        await self.host.flush()

    async def _resign(self) -> None:
        """Let somebody else lead, or nobody; the drain's timeout bounds it."""
        answer = await self.control.request_transfer(None)
        if answer.outcome is CommandOutcome.OK:
            # The successor's fence makes this replica commit its tail and release the epoch.
            while self.replica.serving and not self.control.is_alone:  # noqa: ASYNC110
                await asyncio.sleep(DRAIN_POLL_S)
        else:
            logger.warning("nobody takes over: %s", answer.why)
        await self.replica.release()


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=PEER_OPTIONS)
