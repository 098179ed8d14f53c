"""One node, assembled: the planes, the ports, and the way in and out.

    DataDirectory -> Log, PromiseFile, Engine (manifest, runs)
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
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster import wire
from cluster.admin_service import AdminService
from cluster.config import NodeConfig
from cluster.consume_service import ConsumeService
from cluster.control import ControlState, SharedCheckpoint
from cluster.control_plane import ControlPlane, Outcome
from cluster.controller import Report, Role
from cluster.host import Host
from cluster.http import HttpServer
from cluster.loopwatch import LoopWatch
from cluster.peers import digests_at, judge
from cluster.raft_link import CHANNEL_OPTIONS
from cluster.status import reason_of
from cluster.telemetry import Telemetry
from cluster.timer_service import TimerService
from cluster.view import VERSION, NodeState
from cluster.wire import RequestLimits
from replication import steps as replication
from replication.promise import PromiseFile
from replication.replica import Replica
from timer.clock import ClusterClock, Sample
from timer.directory import open_directory
from timer.disk import RealDisk
from timer.engine import Engine
from timer.entry import Entry
from timer.errors import ConfigError, TimerError
from timer.leader import Delivery, LeaderConfig
from timer.log import Log
from timer.machine import (
    AcksApplied,
    Applied,
    Checkpoint,
    FireApplied,
    GroupApplied,
    ScheduleApplied,
)
from timer.payloads import GroupOp, Op
from timer.units import Epoch, LogIndex, MonoMs, Nonce, QueueOffset, UnixMs
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
SERVER_OPTIONS: Final = (*_MESSAGES, ("grpc.so_reuseport", 0))
PEER_OPTIONS: Final = (
    *_MESSAGES,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


_ROLES: Final = {
    replication.Role.LEARNER: Role.FOLLOWER,
    replication.Role.FOLLOWER: Role.FOLLOWER,
    replication.Role.CANDIDATE: Role.PROMOTING,
    replication.Role.LEADER: Role.LEADER,
}
"""A replica's role to what the controller cares about."""


class Diverged(Exception):
    """A majority holds another state at the same index than this replica, or none agrees (P6)."""


def mono_ms() -> MonoMs:
    """Return CLOCK_BOOTTIME in milliseconds: it goes on while the machine sleeps."""
    return MonoMs(time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000)


def wall_ms() -> UnixMs:
    """Return this machine's wall clock."""
    return UnixMs(time.time_ns() // 1_000_000)


class Node:
    """One running node. `start`, then `stop`; `fatal` hears of what ends the process."""

    def __init__(self, config: NodeConfig, fatal: Callable[[BaseException], None]) -> None:
        self.config = config
        self._fatal = fatal
        self._nonce = Nonce(secrets.randbits(62) + 1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        """Open the disk, bind the ports, join the cluster.

        Raises:
            WrongDirectory, CorruptFile, UnknownVersion, DiskFailed: the data directory.
            ConfigError: a port is in use.
        """
        self._open_disk()
        self._assemble()
        await self._serve()
        await self.replica.start()
        self.host.start()
        await self.control.start()
        self._spawn(self._publish_checkpoints())
        logger.info("started: grpc %s, http %s", self.config.grpc, self.config.http)

    # ---- assembly

    def _open_disk(self) -> None:
        config, disk = self.config, RealDisk()
        self._directory = open_directory(
            disk, config.data, cluster_id=config.cluster_id, name=config.name
        )
        self._identity = self._directory.identity
        leader_config = LeaderConfig(
            tick_ms=config.timing.tick_ms,
            checkpoint_interval_ms=config.timing.checkpoint_interval_ms,
            waiting_bytes_max=config.limits.inflight_bytes_max // 2,
        )
        self._engine = Engine(disk, self._directory.state, leader_config, self._applied)
        floor = self._engine.manifest_index
        self._log = Log.open(disk, self._directory.log, committed_floor=floor)
        self._promise = PromiseFile.load(
            disk, self._directory.promise, last_epoch=self._log.last_epoch
        )
        if self._log.tail_was_cut:
            logger.warning("the log's tail was torn: unsure until a leader has matched it")
            self._promise.set_unsure(unsure=True)
            self._log.cut_noted()

    def _assemble(self) -> None:
        config, identity = self.config, self._identity
        others = {name: a for name, a in config.peers.items() if name != config.name}
        self._channels = {name: _channel(address) for name, address in others.items()}
        stubs = {name: rpc.AdminServiceStub(c) for name, c in self._channels.items()}
        self.replica = Replica(
            replica_id=identity.replica_id,
            nonce=self._nonce,
            cluster_id=config.cluster_id,
            founding=frozenset(identity.founding_voters.values()),
            voters=frozenset(self._engine.machine.voters) or None,
            peers={
                replica_id: functools.partial(_channel, config.peers[name])
                for name, replica_id in identity.founding_voters.items()
                if name in others
            },
            log=self._log,
            promise=self._promise,
            commit_index=self._engine.manifest_index,
            config=config.replication(),
            listener=self,
            mono_ms=mono_ms,
            wall_ms=wall_ms,
            fatal=self._fatal,
        )
        self.host = Host(
            self._engine,
            self.replica,
            make_clock=self._make_clock,
            samples=self._samples,
            mono_ms=mono_ms,
            wall_ms=wall_ms,
            fold_interval_ms=config.timing.fold_interval_ms,
            memtable_bytes_flush=config.storage.memtable_bytes_flush,
            log_bytes_flush=config.storage.log_bytes_flush,
            flush_interval_ms=config.storage.flush_interval_ms,
            handed_out=self._handed_out,
            fatal=self._fatal,
        )
        self.control = ControlPlane(
            name=config.name,
            replica_id=identity.replica_id,
            peers=others,
            directory=config.data,
            founding=config.name in identity.founding_voters
            and identity.founding_voters[config.name] == identity.replica_id,
            cluster_id=config.cluster_id,
            voters=identity.founding_voters,
            channel_for=lambda name: grpc.aio.insecure_channel(
                config.peers[name], options=CHANNEL_OPTIONS
            ),
            clock=mono_ms,
        )
        self.control.on_state(self._control_changed)
        self.control.set_report_source(self._report)
        self.view = NodeState(config, self.replica, self.host, self.control, stubs, mono_ms)
        self.host.leader_address = self.view.leader_address
        self.host.on_leading = self._leading_changed
        self.telemetry = Telemetry(node=config.name, version=VERSION, read_levels=self.view.levels)
        self.replica.on_fsync = self.telemetry.fsync_seconds.observe
        self._loop_watch = LoopWatch(
            asyncio.get_running_loop(), self.telemetry.loop_held_seconds.observe
        )

    async def _serve(self) -> None:
        config, limits = self.config, self.config.limits
        salt = wire.id_salt(config.cluster_id)
        request_limits = RequestLimits(
            payload_bytes_max=limits.payload_bytes_max,
            key_bytes_max=limits.key_bytes_max,
            headers_bytes_max=limits.headers_bytes_max,
            request_rows_max=limits.request_rows_max,
            request_bytes_max=limits.request_bytes_max,
            delay_ms_max=limits.delay_ms_max,
        )
        timers = TimerService(
            self.host,
            limits=request_limits,
            salt=salt,
            auto_create_topics=config.auto_create_topics,
            topic_name_bytes_max=limits.topic_name_bytes_max,
        )
        self._consumers = ConsumeService(
            self.host,
            timers,
            salt=salt,
            groups=config.groups,
            group_name_bytes_max=limits.group_name_bytes_max,
        )
        admin = AdminService(self.view, timers, self.host.require_leader)
        for service in (timers, self._consumers, admin):
            service.on_error = self._count_error
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((*self.control.handlers(), *self.replica.handlers()))
        rpc.add_TimerServiceServicer_to_server(timers, self._server)
        rpc.add_ConsumeServiceServicer_to_server(self._consumers, self._server)
        rpc.add_AdminServiceServicer_to_server(admin, self._server)
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

    def on_stepdown(self, epoch: Epoch) -> None:
        """Stop serving at once."""
        self.host.on_stepdown(epoch)

    # ---- between the planes

    def _control_changed(self, state: ControlState) -> None:
        if state.leader is not None and not (
            self._stopping and state.leader == self.replica.replica_id
        ):
            self.replica.appointed(state.epoch, state.leader)
        self._compare(state.checkpoint)

    def _report(self) -> Report:
        report = self.replica.report()
        return Report(
            replica_id=report.replica,
            name=self.config.name,
            role=_ROLES[report.role],
            epoch=report.bid_epoch or report.epoch,
            serving=report.serving,
            lease_ok=report.lease_ok,
            last_epoch=report.last_epoch,
            last_index=report.last_index,
            highest_promise=report.highest_promise,
            unsure=report.unsure,
            refused_epoch=report.refused_epoch,
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
            voter=self._identity.replica_id, wall_ms=wall_ms(), sent_ms=now, received_ms=now
        )
        others = self.replica.clock_samples.items()
        return [own, *(Sample.at(voter, s.wall_ms, s.at_ms, s.error_ms) for voter, s in others)]

    # ---- checkpoints

    async def _publish_checkpoints(self) -> None:
        """While leading, publish each checkpoint through Raft: a hint for the next leader."""
        published = LogIndex(0)
        while True:
            await asyncio.sleep(self.config.timing.checkpoint_interval_ms / 4000)
            checkpoint = self._engine.machine.checkpoint
            leader = self.host.leader
            if leader is None or checkpoint is None or checkpoint.index <= published:
                continue
            shared = SharedCheckpoint(
                epoch=checkpoint.epoch,
                index=checkpoint.index,
                last_read_time_ms=checkpoint.last_read_time_ms,
                queue_offsets={t: QueueOffset(o) for t, o in checkpoint.queue_offsets.items()},
                digest=checkpoint.digest,
                published_at_ms=self.host.now().clock_ms,
            )
            outcome = await self.control.publish_checkpoint(shared)
            if outcome is Outcome.OK:
                published = checkpoint.index
                await self._judge(checkpoint.index, checkpoint.digest)

    def _compare(self, shared: SharedCheckpoint | None) -> None:
        """Compare digests with the shared checkpoint; ask the others if they differ."""
        mine = self._engine.digests.get(shared.index) if shared is not None else None
        if shared is not None and mine is not None and mine != shared.digest:
            self._spawn(self._judge(shared.index, mine))

    async def _judge(self, index: LogIndex, mine: str) -> None:
        """Stop if a majority holds another state than this replica, or none holds any (P6)."""
        why = ""
        for _ in range(JUDGE_TRIES):
            others, lagging = await digests_at(self.view.peers(), index)
            why = judge(mine, others, len(self.replica.voters))
            if not (why and lagging):
                break
            await asyncio.sleep(JUDGE_AGAIN_S)  # who lags may agree with either side
        if why:
            self._fatal(Diverged(f"state diverged at {index}: {why}"))

    # ---- telemetry

    def _applied(self, entry: Entry, applied: Applied) -> None:
        if isinstance(applied, Checkpoint):
            self._compare(self.control.state.checkpoint)
        if self.host.leader is None:
            return
        telemetry = self.telemetry
        if isinstance(applied, FireApplied):
            for _, rows in applied.fired:
                telemetry.observe_lateness(entry.time_ms - rows["due_ms"])
        elif isinstance(applied, ScheduleApplied):
            telemetry.append_rows.observe(
                sum(len(part[0].due_ms) for part in applied.parts if isinstance(part, tuple))
            )
        elif isinstance(applied, GroupApplied):
            for result in applied.results:
                if isinstance(result, AcksApplied):
                    telemetry.acked.inc(int(result.new.sum()))
                elif isinstance(result, GroupOp) and result.op is Op.ENDED:
                    telemetry.leases_ended.inc(len(result.offsets))

    def _handed_out(self, delivery: Delivery) -> None:
        self.telemetry.delivered.inc(len(delivery.attempts))
        again = int((delivery.attempts > 1).sum())
        if again:
            self.telemetry.redelivered.inc(again)

    def _count_error(self, method: str, error: TimerError) -> None:
        self.telemetry.error(method, reason_of(error))

    def _leading_changed(self) -> None:
        self._spawn(self._set_health())
        self.control.report_now()
        if self.host.leader is None:
            self._consumers.end_streams()
        else:
            self.telemetry.promotions.inc()

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
            # The successor's fence makes this replica commit its tail and release the epoch.
            answer = await self.control.request_transfer(None)
            if answer.outcome is not Outcome.OK:
                logger.warning("nobody takes over: %s", answer.why)
                await self.replica.release()
            while self.replica.serving:  # noqa: ASYNC110 - bounded by the drain's timeout
                await asyncio.sleep(DRAIN_POLL_S)
        await self.host.flush()


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=PEER_OPTIONS)
