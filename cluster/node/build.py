"""The assembly of a node: it opens the disk, makes every part, and returns them, not started.

    NodeFiles -> data directory, Log, PromiseFile, Engine (manifest, runs)
    Replica      (log plane)      <- the other nodes' streams
    Host         (state plane)    <- commits; the services step it
    ControlPlane                  -> appointments; reports of the replica go back
    Ports                         gRPC and HTTP, over all of these

The parts form cycles: the replica asks the snapshots how much log they need, and a snapshot asks
the replica whether it leads. An inner function closes each cycle. It runs after the assembly only.
"""

import asyncio
import functools
import secrets
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, Protocol

from cluster.api.admin_service import no_files
from cluster.api.backup_desk import BackupDesk
from cluster.api.consume_service import ConsumeService
from cluster.api.log_shipping import LogShipping
from cluster.api.peer_queries import ask_all, status_of
from cluster.api.public_services import Services, services_of
from cluster.control.control_plane import ControlPlane
from cluster.control.control_state import ControlState
from cluster.control.controller_config import ControllerConfig
from cluster.control.leader_fitness import DiskRecord
from cluster.control.raft import exit_process
from cluster.control.raft_link import CHANNEL_OPTIONS
from cluster.control.replica_report import ReportSource
from cluster.files.disk_room import DiskWatch
from cluster.files.repair import check_state
from cluster.files.scrubber import Scrubber
from cluster.files.storage import NodeFiles, last_repair, open_storage
from cluster.node.allocator import release_free_pages
from cluster.node.checkpoint_publisher import CheckpointPublisher
from cluster.node.digest_comparison import DigestComparison
from cluster.node.operator_commands import OperatorCommands
from cluster.node.ports import Ports, grpc_servers_of
from cluster.observe.apply_metrics import ApplyMetrics, PromotionMetrics
from cluster.observe.metrics import Levels, Telemetry
from cluster.observe.node_view import NodeState, connections_limits
from cluster.page import leader_figures
from cluster.page.page_data import PageData
from cluster.page.page_routes import StatusPages
from cluster.page.timer_lookup import TimerLookup
from cluster.rpc.connections import Connections
from cluster.rpc.endpoints import RELAY_OPTIONS, AdminChannels, Endpoints
from cluster.rpc.fair_queue import FairQueue
from cluster.rpc.grpc_errors import reason_of
from cluster.rpc.handlers import ServiceHooks
from cluster.rpc.health_service import HealthService
from cluster.rpc.http import HttpHooks
from cluster.rpc.http_api import HttpApi
from cluster.rpc.http_call import HttpContext, LocalCalls
from cluster.rpc.memory import MemoryGuard, limit_of
from cluster.rpc.outboxes import MEMORY_PART, Outboxes
from cluster.rpc.port_guard import PortGuard
from cluster.rpc.relay import Relay
from cluster.rpc.rpc_caller import CALLER, check_request, denial_in
from cluster.settings.config import NodeConfig, parse_address
from cluster.settings.exit_codes import ExitCode
from cluster.settings.release import RELEASE
from cluster.settings.wall_clock import wall_clock
from cluster.state.alarm import KernelAlarm
from cluster.state.host import Host
from cluster.state.loop_io import LoopIo
from cluster.state.loop_watch import LoopWatch, Steps
from cluster.state.state_plane import FlushLimits
from cluster.state.voter_clocks import VoterClocks
from replication.driver.driver import Listener, LogStatus
from replication.shell.hop_recorder import HopRecorder
from replication.shell.replica import Replica
from replication.shell.snapshot_fetch import SnapshotFetch
from replication.shell.snapshot_service import Snapshots
from timer.entries.entry_frame import Entry, EntryKind
from timer.files.data_directory import DataDirectory
from timer.files.disk import Disk, FreshDisk, RealDisk, is_full
from timer.leader.groups.group_delivery import Delivery
from timer.leader.intake.cluster_clock import ClockReport
from timer.model import timer_id
from timer.model.timer_errors import EngineError, FileDamage
from timer.model.units import LogIndex, MonoMs, Nonce, UnixMs
from timer.ready.page_cache import PAGES_SIZE_MAX
from timer.recovery.engine import Engine
from timer.state.apply_results import Applied, Checkpoint

MEMTABLE_DIVISOR: Final = 16
"""A flush begins at 1/16 of the memory limit if that is below `storage.memtable_bytes_flush`."""
UNSPILLED_FACTOR: Final = 4
"""Folding waits at this many times `storage.memtable_bytes_flush` of messages in no file."""
UNSPILLED_DIVISOR: Final = 12
"""Or at 1/12 of the memory limit if that is less. With 4 GiB both are equal by default."""
PAGES_DIVISOR: Final = 8
"""The page cache takes 1/8 of the memory limit."""
PART_MIN: Final = 1 << 20
"""Bytes that such a part has at least."""


class NodeCalls(Listener, Protocol):
    """The calls of the parts to their node."""

    def fatal(self, error: BaseException) -> None:
        """End the process because of `error`."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task until the node stops. An exception of it is fatal."""

    def on_leading(self) -> None:
        """The leadership of this node began or ended."""

    def on_clocks(self, report: ClockReport) -> None:
        """This leader has read the voters' clocks again."""

    def on_control_state(self, state: ControlState) -> None:
        """The state of the control plane changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """The parts of one node that the node itself starts, stops or calls."""

    directory: DataDirectory
    engine: Engine
    replica: Replica
    host: Host
    control: ControlPlane
    consumers: ConsumeService
    ports: Ports
    view: NodeState
    publisher: CheckpointPublisher
    digests: DigestComparison
    promotions: PromotionMetrics
    space: DiskWatch
    guards: tuple[MemoryGuard, PortGuard]
    backups: BackupDesk
    scrubber: Scrubber
    loop_watch: LoopWatch
    new_fetch: Callable[[], SnapshotFetch]
    """Returns a fetch of a snapshot from the leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Basis:
    """The parts that need no other part."""

    config: NodeConfig
    node: NodeCalls
    disk: Disk
    files: NodeFiles
    endpoints: Endpoints
    channels: AdminChannels
    telemetry: Telemetry
    wall_ms: Callable[[], UnixMs]
    hops: HopRecorder = field(default_factory=HopRecorder)
    queue: FairQueue = field(default_factory=FairQueue)
    disk_record: DiskRecord = field(default_factory=DiskRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planes:
    """The planes of the node, and the parts that need each other through them."""

    replica: Replica
    host: Host
    control: ControlPlane
    snapshots: Snapshots
    backups: BackupDesk
    scrubber: Scrubber
    view: NodeState
    commands: OperatorCommands
    metrics: ApplyMetrics
    digests: DigestComparison

    def on_applied(self, entry: Entry, result: Applied) -> None:
        """Observe an applied entry."""
        if isinstance(result, Checkpoint):
            self.digests.compare(self.control.state.checkpoint)
        self.metrics.on_applied(entry, result)

    def leads(self) -> bool:
        """Return whether this node serves as the leader."""
        return self.host.leader is not None


def mono_ms() -> MonoMs:
    """Return CLOCK_BOOTTIME in milliseconds. It continues while the machine sleeps."""
    return MonoMs(time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000)


def build(config: NodeConfig, node: NodeCalls, *, raft_lost: bool) -> NodeParts:
    """Open the disk and make the parts of a node. Nothing runs, and no port is open yet.

    `raft_lost`: an operator has declared the Raft files of all absent nodes lost.

    Raises:
        Damaged: state and log have to be fetched from the others; see cluster/files/repair.py.
        WrongDirectoryError, CorruptFileError, UnknownVersionError, DiskFailedError: the data.
    """

    def on_applied(entry: Entry, result: Applied) -> None:
        planes.on_applied(entry, result)

    def read_levels() -> Levels:
        return planes.view.levels()

    telemetry = Telemetry(node=config.name, version=RELEASE.program, read_levels=read_levels)
    disk, endpoints = RealDisk(), Endpoints(config, on_denied=telemetry.rpcs.denied.inc)
    basis = _Basis(
        config=config,
        node=node,
        disk=disk,
        files=open_storage(disk, config, on_applied),
        endpoints=endpoints,
        channels=AdminChannels(endpoints),
        telemetry=telemetry,
        wall_ms=wall_clock(config.test_clock),
    )
    telemetry.insecure.set(config.insecure)
    tls = endpoints.tls
    if tls is not None:
        telemetry.certificates.not_after_s = lambda: tls.certificate.not_after_s
        if (tokens := tls.tokens) is not None:
            telemetry.tokens.not_after_s = lambda: tokens.content.not_after_s()  # noqa: PLW0108  # the content changes
    planes = _planes(basis, raft_lost=raft_lost)
    replica, host, control = planes.replica, planes.host, planes.control
    relay = Relay(
        config.name,
        planes.view.leader_name,
        lambda name: endpoints.channel(name, RELAY_OPTIONS),
        telemetry.rpcs.relayed.inc,
        cluster_id=config.cluster_id,
    )
    services, connections, guards = _services(basis, planes, relay)
    return NodeParts(
        directory=basis.files.directory,
        engine=basis.files.engine,
        replica=replica,
        host=host,
        control=control,
        consumers=services.consumers,
        ports=_ports(basis, planes, services, connections, relay),
        view=planes.view,
        publisher=CheckpointPublisher(
            host,
            replica,
            control,
            planes.snapshots,
            compare=planes.digests.compare_at,
            interval_ms=config.timing.checkpoint_interval_ms,
        ),
        digests=planes.digests,
        promotions=PromotionMetrics(telemetry),
        space=DiskWatch(
            disk,
            config,
            replica,
            host,
            peers=planes.view.peers,
            transfer=control.request_transfer,
            mono_ms=mono_ms,
        ),
        guards=guards,
        backups=planes.backups,
        scrubber=planes.scrubber,
        loop_watch=LoopWatch(
            asyncio.get_running_loop(), telemetry.loop_held_seconds.observe, host.steps
        ),
        new_fetch=functools.partial(_snapshot_fetch, basis, replica),
    )


def _planes(basis: _Basis, *, raft_lost: bool) -> _Planes:
    config, node, files = basis.config, basis.node, basis.files

    def on_delivery(delivery: Delivery) -> None:
        planes.metrics.on_delivery(delivery)

    def leader_address() -> str | None:
        return planes.view.leader_address()

    def is_drained() -> bool:
        return planes.commands.drained

    async def hand_over(target: str) -> bool:
        if leads := planes.leads():
            await planes.commands.transfer(target)
        return leads

    replica = _replica(
        basis,
        needed_from=lambda: planes.snapshots.kept_from,
        shipped_from=lambda: planes.backups.log.needed_from,
    )
    scrubber = Scrubber(
        FreshDisk(),
        config,
        files.directory,
        replica,
        others=lambda: ask_all(planes.view.peers(), status_of),
        hand_over=hand_over,
        wall_ms=basis.wall_ms,
        fatal=node.fatal,
    )
    host = _host(
        basis,
        replica,
        on_delivery=on_delivery,
        leader_address=leader_address,
        on_damage=scrubber.on_damage if len(config.peers) > 1 else None,
    )
    control = _control_plane(basis, replica, raft_lost=raft_lost, is_drained=is_drained)
    backups = _backup_desk(basis, host, scrubber)
    view = NodeState(
        config,
        replica,
        host,
        control,
        basis.channels.stubs,
        mono_ms,
        scrubber,
        backups,
        is_drained=is_drained,
        not_after_s=basis.telemetry.certificates.not_after_s,
        last_repair=last_repair(basis.disk, config),
    )
    planes = _Planes(
        replica=replica,
        host=host,
        control=control,
        snapshots=Snapshots(
            files.outgoing,
            cluster_id=config.cluster_id,
            bytes_per_s=config.storage.snapshot_bytes_per_s,
            leads=replica.leads_under,
            flush=host.flush,
            mono_ms=mono_ms,
            identify=basis.endpoints.identify,
            damaged=scrubber.on_damage,
            fatal=node.fatal,
        ),
        backups=backups,
        scrubber=scrubber,
        view=view,
        commands=OperatorCommands(view, replica, host, control, mono_ms),
        metrics=ApplyMetrics(basis.telemetry, view, host),
        digests=DigestComparison(
            files.engine, replica, peers=view.peers, spawn=node.spawn, fatal=node.fatal
        ),
    )
    return planes


def _backup_desk(basis: _Basis, host: Host, scrubber: Scrubber) -> BackupDesk:
    directory = basis.files.directory
    return BackupDesk(
        FreshDisk(),
        directory.state,
        directory.backups,
        host,
        log=LogShipping(
            basis.files.log,
            applied=lambda: host.applied_index,
            mono_ms=mono_ms,
            wall_ms=basis.wall_ms,
            on_damage=scrubber.on_damage,
        ),
        replica_id=directory.identity.replica_id,
        bytes_per_s=basis.config.storage.snapshot_bytes_per_s,
        mono_ms=mono_ms,
        wall_ms=basis.wall_ms,
        on_damage=scrubber.on_damage,
        fatal=basis.node.fatal,
    )


def _replica(
    basis: _Basis,
    *,
    needed_from: Callable[[], LogIndex | None],
    shipped_from: Callable[[], LogIndex | None],
) -> Replica:
    config, files = basis.config, basis.files
    identity, machine = files.directory.identity, files.engine.machine
    return Replica(
        replica_id=identity.replica_id,
        name=config.name,
        nonce=Nonce(secrets.randbits(62) + 1),
        cluster_id=config.cluster_id,
        founding=frozenset(identity.founding_voters.values()),
        voters=frozenset(machine.voters) or None,
        level=machine.level,
        state_time_ms=machine.applied_time_ms,
        dials=basis.endpoints.dials(),
        log=files.log,
        promise=files.promise,
        commit_index=files.engine.manifest_index,
        config=config.replication_config(),
        listener=basis.node,
        mono_ms=mono_ms,
        wall_ms=basis.wall_ms,
        on_fsync=basis.telemetry.fsync_seconds.observe,
        needed_from=needed_from,
        shipped_from=shipped_from,
        identify=basis.endpoints.identify,
        release=RELEASE,
        tcp=basis.endpoints.tcp,
        hops=basis.hops,
        fatal=basis.node.fatal,
    )


def flush_limits(config: NodeConfig) -> FlushLimits:
    """Return the limits of flushes: the settings', or a part of the node's memory limit if less."""
    storage, memory = config.storage, limit_of(config.limits.memory_bytes_max)
    unspilled = UNSPILLED_FACTOR * storage.memtable_bytes_flush
    return FlushLimits(
        memtable_bytes=_least(storage.memtable_bytes_flush, memory // MEMTABLE_DIVISOR),
        log_bytes=storage.log_bytes_flush,
        log_entries=storage.log_entries_flush,
        interval_ms=storage.flush_interval_ms,
        unspilled_bytes=_least(unspilled, memory // UNSPILLED_DIVISOR),
    )


def _least(setting: int, part: int) -> int:
    return min(setting, max(part, PART_MIN))


def _host(
    basis: _Basis,
    replica: Replica,
    *,
    on_delivery: Callable[[Delivery], None],
    leader_address: Callable[[], str | None],
    on_damage: Callable[[FileDamage], None] | None,
) -> Host:
    telemetry = basis.telemetry
    pages, memory_max = basis.files.engine.machine.pages, basis.config.limits.memory_bytes_max
    pages.size_max = _least(PAGES_SIZE_MAX, limit_of(memory_max) // PAGES_DIVISOR)

    def on_commit(kind: EntryKind, seconds: float) -> None:
        telemetry.observe_commit(kind, seconds)
        if kind is EntryKind.FIRE:
            basis.queue.on_fired(seconds)

    clocks = VoterClocks(replica, mono_ms, basis.wall_ms)
    io = LoopIo(
        replica,
        make_clock=clocks.cluster_clock,
        samples=clocks.samples,
        mono_ms=mono_ms,
        wall_ms=basis.wall_ms,
        fold_interval_ms=basis.config.timing.fold_interval_ms,
        make_alarm=KernelAlarm,
        on_delivery=on_delivery,
        leader_address=leader_address,
        on_leading=basis.node.on_leading,
        on_clocks=basis.node.on_clocks,
        on_committed=on_commit,
        steps=Steps(telemetry.observe_step),
    )
    return Host(
        basis.files.engine,
        io,
        flush_limits(basis.config),
        hops=basis.hops,
        on_damage=on_damage,
        fatal=basis.node.fatal,
    )


def _control_plane(
    basis: _Basis, replica: Replica, *, raft_lost: bool, is_drained: Callable[[], bool]
) -> ControlPlane:
    config, identity = basis.config, basis.files.directory.identity
    engine, fatal, tls = basis.files.engine, basis.node.fatal, basis.endpoints.tls

    def is_closed_to_leadership() -> bool:
        return is_drained() or (tls is not None and tls.expires_soon())

    def status() -> LogStatus:
        found = replica.report()
        basis.disk_record.note(
            mono_ms(),
            disk_ms=found.disk_ms,
            durable=found.last_index,
            lease_ms=config.leadership.lease_ms,
        )
        return found

    def on_failure(code: ExitCode, why: str) -> NoReturn:
        error = sys.exception()
        if is_full(error):
            assert error is not None
            fatal(error)
        exit_process(code, why)

    return ControlPlane(
        name=config.name,
        replica_id=identity.replica_id,
        peers=basis.endpoints.others,
        directory=config.data,
        founding=identity.is_founder,
        raft_lost=raft_lost,
        cluster_id=config.cluster_id,
        voters=identity.founding_voters,
        channel_for=lambda name: basis.endpoints.channel(name, CHANNEL_OPTIONS),
        clock=mono_ms,
        report=ReportSource(
            config.name, status, lambda: engine.machine.applied_index, is_closed_to_leadership
        ).report,
        on_state=basis.node.on_control_state,
        config=ControllerConfig.of_lease(config.leadership.lease_ms),
        identify=basis.endpoints.identify,
        release=replace(RELEASE, level_max=config.feature_level_max),
        tcp=basis.endpoints.tcp,
        fail=on_failure,
    )


def _services(
    basis: _Basis, planes: _Planes, relay: Relay
) -> tuple[Services, Connections, tuple[MemoryGuard, PortGuard]]:
    """Return the public services, and the limits on the connections that call these."""
    config, telemetry = basis.config, basis.telemetry
    most = limit_of(config.limits.memory_bytes_max) // MEMORY_PART
    outboxes = Outboxes(min(config.limits.outbox_bytes_max, most))
    addresses = filter(None, (config.grpc, config.tokens))
    ports = {parse_address("grpc", each).port for each in addresses}
    connections = Connections(ports, outboxes.unread)
    on_end = telemetry.rpcs.connections_ended.inc

    memory = MemoryGuard(
        config.limits.memory_bytes_max,
        connections,
        on_end,
        on_check=lambda: planes.host.use_memory(high=memory.high),
        release_pages=release_free_pages,
    )
    port_guard = PortGuard(connections, connections_limits(config)["grpc"], on_end)
    telemetry.memory_limit_bytes.set(memory.bytes_max)
    planes.view.memory_high = lambda: memory.high
    telemetry.memory_high.set_function(planes.view.memory_high)
    if (tls := basis.endpoints.tls) is not None:
        planes.view.concerns += [tls.complaints, basis.endpoints.audit.complaints]
    planes.view.concerns += [memory.complaints, basis.disk_record.complaints]
    telemetry.requests_waiting.set_function(lambda: basis.queue.n_waiting)
    telemetry.outbox_bytes.set_function(lambda: outboxes.total)

    def on_error(method: str, error: EngineError) -> None:
        telemetry.error(method, reason_of(error))
        caller, denial = CALLER.get(), denial_in(error)
        if caller is not None and denial is not None:
            basis.endpoints.audit.record_denial(
                method, str(caller.identity), caller.address, denial
            )

    def on_request(request: Any, context: Any) -> None:
        if not isinstance(context, HttpContext):  # it may have a connection for each request
            connections.count_request(request, context)
        check_request(request)

    hooks = ServiceHooks(
        on_error=on_error,
        admit=memory.admit,
        on_request=on_request,
        while_unread=outboxes.relayed,
        on_answer=telemetry.rpcs.on_answer,
        on_stream=telemetry.rpcs.on_stream,
        on_stream_end=telemetry.rpcs.on_stream_end,
        relay=relay,
        queue=basis.queue,
    )
    tls = basis.endpoints.tls
    services = services_of(
        planes.host,
        planes.view,
        planes.commands,
        config,
        outboxes=outboxes,
        hooks=hooks,
        backups=planes.backups,
        reload=tls.reload if tls is not None else no_files,
        scrub=planes.scrubber,
    )
    return services, connections, (memory, port_guard)


def _ports(
    basis: _Basis, planes: _Planes, services: Services, connections: Connections, relay: Relay
) -> Ports:
    calls = LocalCalls(services, basis.endpoints.http_guard())
    lookup = TimerLookup(calls, timer_id.salt_of(basis.config.cluster_id))
    view, host, telemetry = planes.view, planes.host, basis.telemetry
    data = PageData(view, host, telemetry, lookup, mono_ms, basis.channels.channel)
    peers = (
        *planes.control.handlers(),
        *planes.replica.handlers(),
        planes.snapshots.handler(),
        leader_figures.handler_of(data.leader_figures),
    )
    health = HealthService(planes.leads)
    servers = grpc_servers_of(
        basis.endpoints,
        basis.config.limits,
        services=services,
        health_service=health,
        peers=map(connections.of_nodes, peers),
    )
    config = basis.config
    ports = (config.http, *config.peers.values())
    hosts = [parse_address("http", each, port_min=0).host for each in ports]
    names = [each.strip() for each in config.http_names.split(",")]
    api = HttpApi(calls, (*hosts, *names), secure=config.tls.on)
    rpcs = telemetry.rpcs
    hooks = HttpHooks(rpcs.handshakes_failed.inc, rpcs.connections_ended.inc)
    http = basis.endpoints.http_server(view, telemetry.registry, StatusPages(data, api), hooks)
    return Ports(
        basis.endpoints,
        basis.channels,
        http,
        relay=relay,
        servers=servers,
        health_service=health,
    )


def _snapshot_fetch(basis: _Basis, replica: Replica) -> SnapshotFetch:
    config, disk = basis.config, basis.disk
    return SnapshotFetch(
        disk,
        basis.files.directory.incoming,
        cluster_id=config.cluster_id,
        name=config.name,
        dials=basis.endpoints.dials(),
        check=functools.partial(check_state, config, disk),
        known=lambda: replica.commit_index,
        fall_silent=replica.fall_silent,
    )
