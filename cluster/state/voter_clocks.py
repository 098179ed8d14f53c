"""Readings of the voters' wall clocks, and the cluster's clock made of these readings."""

from collections.abc import Callable

from replication.shell.replica import Replica
from timer.leader.intake.cluster_clock import ClusterClock, Sample
from timer.model.units import MonoMs, UnixMs


class VoterClocks:
    """The wall clocks of this node and of the nodes that it hears."""

    def __init__(
        self, replica: Replica, mono_ms: Callable[[], MonoMs], wall_ms: Callable[[], UnixMs]
    ) -> None:
        self._replica = replica
        self._mono_ms, self._wall_ms = mono_ms, wall_ms

    def samples(self) -> list[Sample]:
        """Return this node's reading, made now, and the last reading of each other node."""
        sent_ms, wall_ms = self._mono_ms(), self._wall_ms()
        own = Sample(  # this thread may have lost its processor between the clocks
            voter=self._replica.replica_id,
            wall_ms=wall_ms,
            sent_ms=sent_ms,
            received_ms=self._mono_ms(),
        )
        others = self._replica.clock_samples.items()
        return [own, *(Sample.at(voter, s.wall_ms, s.at_ms, s.error_ms) for voter, s in others)]

    def cluster_clock(self, floor_ms: UnixMs) -> ClusterClock:
        """Return the cluster's clock for a new leader. It begins at `floor_ms` or later."""
        now = self._mono_ms()
        voters = self._replica.voters
        return ClusterClock(voters, self.samples(), floor_ms=floor_ms, floor_at_ms=now, boot_ms=now)
