"""Comparison of state digests between the replicas, after each CHECKPOINT.

It checks P6 (docs/guarantees.md). The leader publishes its digest through Raft. A replica with
another digest at that index asks the other nodes for theirs. It stops if a majority holds another
state, or if no state has a majority.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from cluster.api.peer_queries import Peers, digests_at, majority_of, stop_reason
from cluster.control.control_state import SharedCheckpoint
from cluster.settings.exit_codes import Diverged
from replication.shell.replica import Replica
from timer.model.units import LogIndex
from timer.recovery.engine import Engine

ROUNDS_MAX: Final = 10
ROUND_S: Final = 0.5
"""Between two rounds. A replica that has not applied the checkpoint yet is asked again."""


class DigestComparison:
    """Compares the digests of one replica with those of the other voters."""

    def __init__(
        self,
        engine: Engine,
        replica: Replica,
        *,
        peers: Callable[[], Peers],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """`spawn` runs a coroutine as a task of the node. `fatal` ends the process."""
        self._engine, self._replica = engine, replica
        self._peers, self._spawn, self._fatal = peers, spawn, fatal

    def compare(self, shared: SharedCheckpoint | None) -> None:
        """Compare with the shared checkpoint. If the digests differ, ask the other voters."""
        mine = self._engine.digests.get(shared.index) if shared is not None else None
        if shared is not None and mine is not None and mine != shared.digest:
            self._spawn(self.compare_at(shared.index, mine))

    async def compare_at(self, index: LogIndex, mine: str) -> None:
        """Ask the other voters for their digests at `index`; end the process on divergence.

        The process ends if a majority holds a state other than `mine`, or if no state has one.
        """
        why, others = "", dict[str, str]()
        for _ in range(ROUNDS_MAX):
            others, lagging = await digests_at(self._peers(), index)
            voters = self._replica.voters
            votes = self._replica.replica_id in voters
            why = stop_reason(mine, others, len(voters), votes=votes)
            if not (why and lagging):
                break
            await asyncio.sleep(ROUND_S)  # a lagging replica may agree with either side
        if why:
            agreed = majority_of(others, len(self._replica.voters))
            self._fatal(Diverged(f"state diverged at {index}: {why}", repairable=agreed))
