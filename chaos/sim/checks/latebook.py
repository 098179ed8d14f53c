"""How late timers fire while nothing is wrong, and replicas that are stuck; a part of the book.

The second half of P3: a timer's wait begins when it is due, or when it was scheduled if that is
later. It ends with the commit of its FIRE, on the leader's clock. In a steady world it lasts
LATE_MS at most: the leader's step, the commit, and a lost message that is sent again. For timers
that did not fit into a FIRE, it counts from that FIRE. A world is not steady while

    a voter is dead, stopped or unsure, or has a slow or small disk
    a link is cut or slow
    no leader serves and holds its lease, or a voter has promised a later epoch

A new leader or process, and a jump of the log's clock, end a steady phase, too. The next one begins
AFTER_MS later, and the wait of an overdue timer counts from then. Held timers of a paused topic
are judged in chaos/sim/checks/fatebook.py.
"""

from dataclasses import dataclass, field
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
STUCK_MS: Final = 5_000
"""Ten times the longest flush while no disk is slow."""
CHECK_INTERVAL_US: Final = 50_000
"""How often the books look at the world."""
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
    limited_ms: int = 0
    """The leader's clock at the last FIRE that left due timers out, Unix milliseconds; 0: none."""
    _seen: tuple[object, ...] = ()
    _shift_ms: int = 0

    def observe(self, world: "TimerWorld") -> None:
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

    def judge(self, app: "EngineApp", entry: Entry, applied: FireApplied, clock_ms: int) -> None:
        """Judge the timers that fire, as the leader applies the entry at its `clock_ms`."""
        now_us = app.node.world.timeline.now_us
        steady_ms = (now_us - self.steady_us) // 1_000
        jumped = abs(clock_ms - now_us // 1_000 - self._shift_ms) > SHIFT_MS  # since the last look
        for topic, rows in applied.fired:
            for due_ms, seq in zip(rows["due_ms"].tolist(), rows["seq"].tolist(), strict=True):
                since_ms = self.fates.since_ms.get(seq)
                if since_ms is None or steady_ms <= 0 or jumped:
                    continue
                late_ms = min(clock_ms - max(due_ms, since_ms, self.limited_ms), steady_ms)
                self.judged += 1
                self.worst_ms = max(self.worst_ms, late_ms)
                if late_ms > LATE_MS:
                    times = f"due {due_ms}, scheduled {since_ms}, fired {clock_ms}"
                    raise Broken("late", f"{entry.index}: {seq} of topic {topic}, {times}")
        self.limited_ms = clock_ms if applied.limited else self.limited_ms


def steady_leader(world: "TimerWorld") -> "SimNode | None":
    """Return the leader of a world without any fault at this moment; None: there is a fault."""
    leaders = [node for node in world.nodes if node.leading]
    if len(leaders) != 1 or world.network.is_disturbed():
        return None
    leader = leaders[0]
    core = leader.core
    if not core.serving or not core.holds_lease(leader.mono_ms()):
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


@dataclass(slots=True)
class ProgressCheck:
    """A running replica makes progress: it folds, flushes and serves soon after it can.

    A state that allows progress may last STUCK_MS at most, while the process runs without a pause.
    """

    _since: dict[tuple[object, ...], int] = field(default_factory=dict)
    """(replica, life, waiting step, its position) -> microseconds at which it was seen first."""

    def observe(self, world: "TimerWorld") -> None:
        """Judge all running nodes: none is stuck."""
        now_us = world.timeline.now_us
        before, self._since = self._since, {}
        for node in world.nodes:
            if not node.alive or node.paused or node.slow_disk != 1:
                continue
            app: EngineApp = node.app  # type: ignore[assignment]
            for step, reached in _waits(app):
                key = node.replica, node.life, step, reached
                since_us = self._since[key] = before.get(key, now_us)
                if now_us - since_us > STUCK_MS * 1_000:
                    raise Broken("stuck", f"{node} waits with its {step} at {reached}")


def _waits(app: "EngineApp") -> list[tuple[str, int]]:
    """Return the waiting steps with their positions. A changed position is progress."""
    engine, found = app.engine, list[tuple[str, int]]()
    if not engine.flush_fits:
        return found
    if engine.is_behind:
        found.append(("fold", app.applied_index))
    elif app.node.core.serving and engine.leader is None:
        found.append(("promotion", app.node.core.epoch))
    limits = app.limits
    full = engine.wants_flush(
        memtable_bytes=limits.memtable_bytes,
        log_bytes=limits.log_bytes,
        log_entries=limits.log_entries,
    )
    if full and not app.draining:
        found.append(("flush", engine.manifest_index))
    return found
