"""Publication of the leader's checkpoints and voters through Raft.

The next leader reads the checkpoint as a hint. The replicas compare their digests with it. The
controller learns the voters, which the log decides.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from cluster.control.control_plane import CommandOutcome, ControlPlane
from cluster.control.control_state import SharedCheckpoint
from cluster.control.membership import id_name
from cluster.settings.rounds import next_round
from cluster.state.host import Host
from replication.shell.replica import Replica
from replication.shell.snapshot_service import Snapshots
from timer.model.units import LogIndex

ROUNDS: Final = 4
"""Rounds in one checkpoint interval."""


class CheckpointPublisher:
    """Publishes from `run` until it is cancelled, while this node leads."""

    def __init__(
        self,
        host: Host,
        replica: Replica,
        control: ControlPlane,
        snapshots: Snapshots,
        *,
        compare: Callable[[LogIndex, str], Awaitable[None]],
        interval_ms: int,
    ) -> None:
        """`compare` compares a published digest with the other replicas'.

        `interval_ms`: between two checkpoints of the leader.
        """
        self._host, self._replica, self._control = host, replica, control
        self._snapshots, self._compare = snapshots, compare
        self._round_s = interval_ms / 1000 / ROUNDS
        self._published = LogIndex(0)
        """The last checkpoint that this node published; 0: none."""

    async def run(self) -> None:
        """Publish each new checkpoint and each change of the voters; unpin idle snapshots."""
        while True:
            await next_round(self._round_s)
            await self._snapshots.expire()
            await self._publish_members()
            await self._publish_checkpoint()

    async def _publish_checkpoint(self) -> None:
        checkpoint = self._host.engine.machine.checkpoint
        leads = self._host.leader is not None
        if not leads or checkpoint is None or checkpoint.index <= self._published:
            return
        shared = SharedCheckpoint(
            epoch=checkpoint.epoch,
            index=checkpoint.index,
            last_read_time_ms=checkpoint.last_read_time_ms,
            queue_offsets=checkpoint.queue_offsets,
            digest=checkpoint.digest,
            published_at_ms=self._host.now().clock_ms,
        )
        outcome = await self._control.publish_checkpoint(shared, checkpoint.moved, checkpoint.since)
        if outcome is CommandOutcome.OK:
            self._published = checkpoint.index
            await self._compare(checkpoint.index, checkpoint.digest)

    async def _publish_members(self) -> None:
        """Publish the committed voters if the control plane has others, or a decided proposal.

        A leader that serves the appointed epoch has committed its EPOCH entry. The proposal is in
        force since then, or the log refused it.
        """
        state, leader = self._control.state, self._host.leader
        if leader is None:
            return
        known = {replica: name for name, replica in state.voters.items()}
        for name, replica in (state.proposed or {}).items():
            known.setdefault(replica, name)
        voters = self._host.engine.machine.voters  # committed
        named = {
            self._replica.name_of(voter) or known.get(voter) or id_name(voter): voter
            for voter in voters
        }
        if len(named) < len(voters):
            return  # two voters have one name until one of them is known by another
        if named != state.voters or (state.proposed is not None and leader.epoch == state.epoch):
            await self._control.publish_members(leader.epoch, named)
