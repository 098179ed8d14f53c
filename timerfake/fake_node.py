"""The one node of a fake cluster: a node's state plane and services over a log in memory."""

import dataclasses
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NoReturn

from cluster.api.peer_queries import Peers
from cluster.api.public_services import services_of
from cluster.control.membership import Change
from cluster.files.storage import leader_config
from cluster.observe.topic_view import TopicView
from cluster.rpc.handlers import Registrar
from cluster.settings.config import NodeConfig, build_config
from cluster.state.host import Host
from cluster.state.loop_io import LoopIo
from cluster.state.state_plane import FlushLimits
from timer.entries.entry_frame import Entry
from timer.leader.intake.cluster_clock import ClusterClock, Sample
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import LogIndex, MonoMs, UnixMs
from timer.recovery.engine import Engine
from timer.state.apply_results import Applied, FireApplied
from timer.state.machine import FIRE_MARK_MS
from timerclient.proto import timer_pb2 as pb
from timerfake.fake_log import NEVER, REPLICA, FakeClock, InlineExecutor, MemoryLog, NoDisk
from timerfake.loopback import Server

NAME: Final = "fake"
ADDRESS: Final = "127.0.0.1:1"
"""Only a name: no socket listens there."""


def config_of(settings: Mapping[str, object]) -> NodeConfig:
    """Return a node's configuration with settings by key, such as `limits.key_bytes_max`.

    Raises:
        ConfigError: A setting is unknown, of the wrong type or out of range.
    """
    named = {"name": NAME, "cluster_id": NAME, "data": Path("nowhere"), f"peers.{NAME}": ADDRESS}
    return build_config(settings, named)


class FakeNode(TopicView):
    """The node of a fake cluster. It always leads. Use it only on the event loop that made it."""

    name = NAME
    cluster_id = NAME

    def __init__(self, clock: FakeClock, settings: Mapping[str, object]) -> None:
        config = config_of(settings)
        self.clock = clock
        self._checkpoint_index = LogIndex(0)
        """Index of the last entry when the last checkpoint was appended."""
        self._checkpoint_at_ms: MonoMs | None = None
        """Due time of the next checkpoint. None: no entry has followed the last one."""
        # Checkpoints follow entries only: an advance by a year must not append millions.
        leader = dataclasses.replace(leader_config(config), checkpoint_interval_ms=NEVER)
        self.log = MemoryLog()
        self.server = Server()
        io = LoopIo(
            self.log,
            make_clock=self._make_clock,
            samples=self._samples,
            mono_ms=clock.mono_ms,
            wall_ms=clock.wall_ms,
            fold_interval_ms=config.timing.fold_interval_ms,
            on_delivery=self.on_delivery,
            on_leading=self._on_leading,
        )
        self.host = Host(
            Engine(NoDisk(), config.data, leader, self._on_applied),
            io,
            FlushLimits(NEVER, NEVER, NEVER, NEVER, NEVER),
            draw_id=random.Random(0).getrandbits,  # noqa: S311 -- the same steps, the same state
            fatal=self.server.fail,
        )
        super().__init__(self.host, config)
        self.log.on_commit = self.host.on_commit
        services = services_of(self.host, self, self, config, threads=InlineExecutor())
        self._consumers = services.consumers
        services.add_to(Registrar(self.server, config.limits.request_bytes_max))

    def start(self) -> None:
        """Start to lead."""
        self.host.on_lead(self.log.begin_epoch())
        self.host.kick()

    def fail_over(self) -> None:
        """Begin the next epoch, as another leader would."""
        self.host.on_stepdown(self.log.epoch)
        self.host.on_lead(self.log.begin_epoch())

    async def stop(self) -> None:
        """Answer all calls, and end the consumers' streams."""
        await self.host.stop()
        self._consumers.end_streams()

    # ---- time

    def wake_at_ms(self) -> MonoMs:
        """Return when `step` must be called next, on the monotonic clock."""
        wake_ms = self.host.require_leader().wake_at_ms(self.host.now())
        if self._checkpoint_at_ms is None and self.log.last_index > self._checkpoint_index:
            self._checkpoint_at_ms = MonoMs(self.clock.mono_ms() + FIRE_MARK_MS)
        return wake_ms if self._checkpoint_at_ms is None else min(wake_ms, self._checkpoint_at_ms)

    def step(self) -> None:
        """Carry out all work that is due by now."""
        self.host.kick()
        if self._checkpoint_at_ms is not None and self.clock.mono_ms() >= self._checkpoint_at_ms:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Append a CHECKPOINT, which forgets outcomes, producers and messages at their times."""
        self.host.require_leader().checkpoint(self.host.now())
        self._checkpoint_index, self._checkpoint_at_ms = self.log.last_index, None

    @property
    def steps(self) -> tuple[int, int, int]:
        """Return counts, at least one of which rises with every event."""
        applied = self.host.engine.machine.applied_index
        return self.server.event_count, self.log.last_index, applied

    def _on_applied(self, entry: Entry, applied: Applied) -> None:
        if isinstance(applied, FireApplied):
            self.on_fired(applied, entry.time_ms)

    def _on_leading(self) -> None:
        if self.host.leader is None:
            self._consumers.end_streams()
        else:
            self.on_lead()

    def _make_clock(self, floor_ms: UnixMs) -> ClusterClock:
        now = self.clock.mono_ms()
        samples = self._samples()
        return ClusterClock({REPLICA}, samples, floor_ms=floor_ms, floor_at_ms=now, boot_ms=now)

    def _samples(self) -> Iterable[Sample]:
        return [Sample.at(REPLICA, self.clock.wall_ms(), self.clock.mono_ms(), 0)]

    # ---- the View of cluster/api/admin_service.py

    def node_status(self) -> pb.NodeStatus:
        """Return the status of the one node."""
        machine, counts = self.host.engine.machine, self.host.engine.machine.counts
        return pb.NodeStatus(
            name=NAME,
            address=ADDRESS,
            reachable=True,
            replica_id=REPLICA,
            role="leader",
            serving=self.host.leader is not None,
            epoch=self.log.epoch,
            log_end=self.log.last_index,
            commit_index=self.host.engine.commit_index,
            applied_index=machine.applied_index,
            pending=counts.pending,
            ready=sum(topic.ready for topic in machine.topics.values()),
            scheduled=counts.scheduled,
            fired=counts.fired,
            cancelled=counts.cancelled,
            dropped=counts.dropped,
            clock_ms=self.host.now().clock_ms,
            version=NAME,
            uptime_ms=self.clock.mono_ms(),
        )

    def node_leadership(self) -> pb.NodeStatus:
        """Return `node_status()`, which costs little here."""
        return self.node_status()

    def node_checkpoint(self, at_index: LogIndex = LogIndex(0)) -> pb.NodeCheckpoint:
        """Return the last checkpoint, or with `at_index` only the digest at that entry."""
        engine, checkpoint = self.host.engine, self.host.engine.machine.checkpoint
        machine = engine.machine
        digest = checkpoint.digest if checkpoint else ""
        topics = () if at_index else machine.topics.values()
        return pb.NodeCheckpoint(
            node=NAME,
            role="leader",
            epoch=self.log.epoch,
            log_end=self.log.last_index,
            commit_index=engine.commit_index,
            applied_index=machine.applied_index,
            last_read_time_ms=machine.last_read_time_ms,
            queue_offsets={topic.name: int(topic.queue.end) for topic in topics},
            digest=engine.digests.get(at_index, "") if at_index else digest,
            checkpoint_index=checkpoint.index if checkpoint else 0,
            reachable=True,
        )

    def shared_checkpoint(self, *, offsets: bool = True) -> None:
        """Return None: no other node shares a checkpoint."""

    def is_voter(self, name: str) -> bool:
        """Return whether it is this node: there is no other."""
        return name == NAME

    def leadership(self) -> tuple[int, str, str]:
        """Return (epoch, leader's name, controller's name)."""
        return self.log.epoch, NAME, NAME

    def hears_leader(self) -> bool:
        """Return False: this node leads."""
        return False

    def leader_address(self) -> None:
        """Return None: no other node leads."""

    def peers(self) -> Peers:
        """Return an empty mapping: there are no other nodes."""
        return {}

    async def transfer(self, target: str) -> bool:
        """Begin the next epoch; no other node could lead it."""
        del target
        self.host.on_drain()
        self.fail_over()
        return True

    async def members(self) -> pb.ListMembersResponse:
        """Return the one voter."""
        status = self.node_status()
        member = pb.Member(
            name=NAME,
            replica_id=REPLICA,
            voter=True,
            role=status.role,
            log_end=status.log_end,
            address=ADDRESS,
        )
        return pb.ListMembersResponse(epoch=status.epoch, leader=NAME, members=[member])

    async def drain(self, *, undo: bool, holder: str) -> bool:
        """Reject a drain; to undo one has no effect.

        Raises:
            InvalidRequestError: There is no other node.
        """
        if not undo:
            raise InvalidRequestError("node", NAME, "can't drain: a fake cluster has one node")
        return False

    async def change_members(self, change: Change, name: str) -> NoReturn:
        """Reject every change of members.

        Raises:
            InvalidRequestError: Always: there is no other node, and the last voter can't leave.
        """
        raise InvalidRequestError("name", name, f"can't {change}: a fake cluster has one node")
