"""How late timers fire while nothing is wrong, the second half of P3; a part of the book.

A timer's wait begins when it is due, or when it was scheduled if that is later. It ends with the
commit of its FIRE, on the leader's clock. In a steady world it lasts LATE_MS at most: the leader's
step, the commit, and a lost message that is sent again. A world is not steady while

    a voter is dead, stopped or unsure, or has a slow or small disk
    a link is cut, slow, or loses more than it always does
    no leader serves and holds its lease, or a voter has promised a later epoch

A new leader or process, and a jump of the log's clock, end a steady phase, too. The next one begins
AFTER_MS later, and the wait of an overdue timer counts from then. Held timers of a paused topic
are judged in chaos/sim/checks/fatebook.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from chaos.sim.checks.fatebook import FateBook
from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry
from timer.state.apply_results import FireApplied

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp, TimerWorld
    from chaos.sim.world.sim_node import SimNode

LATE_MS: Final = 700
AFTER_MS: Final = 3_000
LOOK_US: Final = 50_000
"""How often it looks at the world."""
SHIFT_MS: Final = 10
"""A clock that moved by more between two looks was corrected; it drifts by 4 % at most."""


@dataclass(slots=True)
class LateBook:
    """See the module."""

    fates: FateBook
    steady_us: int = 0
    """The steady phase began then; in the future: the world is not steady."""
    judged: int = 0
    worst_ms: int = 0
    _seen: tuple[object, ...] = ()
    _shift_ms: int = 0

    def look(self, world: "TimerWorld") -> None:
        """See whether the world is steady."""
        now_us = world.timeline.now_us
        leader = steady_leader(world)
        clock_ms = None if leader is None else world.town.clock_of(leader)
        if leader is None or clock_ms is None:
            self.steady_us = now_us + AFTER_MS * 1_000
            return
        shift_ms = clock_ms - now_us // 1_000
        voters = leader.core.voters
        lives = [node.life for node in world.nodes if node.replica in voters]
        seen = leader.replica, leader.core.epoch, tuple(lives), world.heals
        if seen != self._seen or abs(shift_ms - self._shift_ms) > SHIFT_MS:
            self.steady_us = now_us + AFTER_MS * 1_000
        self._seen, self._shift_ms = seen, shift_ms

    def fired(self, app: "EngineApp", entry: Entry, applied: FireApplied, clock_ms: int) -> None:
        """Judge the timers that fire, as the leader applies the entry at its `clock_ms`."""
        now_us = app.node.world.timeline.now_us
        steady_ms = (now_us - self.steady_us) // 1_000
        for topic, rows in applied.fired:
            for due_ms, seq in zip(rows["due_ms"].tolist(), rows["seq"].tolist(), strict=True):
                since_ms = self.fates.since_ms.get(seq)
                if since_ms is None or steady_ms <= 0:
                    continue
                late_ms = min(clock_ms - max(due_ms, since_ms), steady_ms)
                self.judged += 1
                self.worst_ms = max(self.worst_ms, late_ms)
                if late_ms > LATE_MS:
                    raise Broken(
                        "late",
                        f"{entry.index}: {seq} of topic {topic}, due {due_ms}, scheduled"
                        f" {since_ms}, fired {clock_ms} on {app.node}",
                    )


def steady_leader(world: "TimerWorld") -> "SimNode | None":
    """Return the leader of a world without any fault at this moment; None: there is a fault."""
    leaders = [node for node in world.nodes if node.leading]
    network = world.network
    if len(leaders) != 1 or network.is_disturbed(world.options):
        return None
    leader = leaders[0]
    core = leader.core
    if not core.serving or not core.lease_held(leader.mono_ms()):
        return None
    voters = core.voters
    for node in world.nodes:
        if node.replica in voters and not _is_well(node, leader):
            return None
    return leader


def _is_well(node: "SimNode", leader: "SimNode") -> bool:
    if not node.alive or node.paused or node.slow_disk != 1 or node.core.unsure:
        return False
    small = node.disk.capacity_bytes is not None
    return not small and node.core.promise.epoch <= leader.core.epoch
