"""A running replica makes progress: it folds, flushes and serves soon after it can.

The check looks at all worlds every 50 ms. A state that allows progress may last STUCK_MS at most,
while the process runs without a pause.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from chaos.sim.world.referee import Broken

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp, TimerWorld

STUCK_MS: Final = 5_000
"""Ten times the longest flush while no disk is slow."""


@dataclass(slots=True)
class ProgressCheck:
    """See the module."""

    _since: dict[tuple[object, ...], int] = field(default_factory=dict)
    """(replica, life, waiting step, its position) -> microseconds at which it was seen first."""

    def look(self, world: "TimerWorld") -> None:
        """Judge all running nodes: none is stuck."""
        now_us = world.timeline.now_us
        before, self._since = self._since, {}
        for node in world.nodes:
            if not node.alive or node.paused or node.slow_disk != 1:
                continue
            app: EngineApp = node.app  # type: ignore[assignment]
            for what, reached in _waits(app):
                key = node.replica, node.life, what, reached
                since_us = self._since[key] = before.get(key, now_us)
                if now_us - since_us > STUCK_MS * 1_000:
                    raise Broken("stuck", f"{node} waits with its {what} at {reached}")


def _waits(app: "EngineApp") -> list[tuple[str, int]]:
    """Return the waiting steps with their positions. A changed position is progress."""
    engine, found = app.engine, list[tuple[str, int]]()
    if not engine.flush_fits:
        return found
    if engine.behind:
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
