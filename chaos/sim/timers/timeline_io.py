"""The timeline, disk and driver of a world, as the state plane of a simulated process uses them.

Implements StateIo (cluster/state/state_plane.py). The work of a thread runs in one instant, a
random time after its order. Its result is used in that instant, or seconds later.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from chaos.sim.checks import workbook
from chaos.sim.world.sim_node import READ_US
from cluster.state.state_plane import ThreadWork
from timer.entries.entry_frame import Entry, EntryKind
from timer.leader.groups.group_delivery import Delivery
from timer.leader.intake.cluster_clock import ClockReport, ClusterClock, Sample
from timer.model.timer_errors import FileDamage
from timer.model.units import LogIndex, MonoMs, UnixMs
from timer.pending.runs.run_writer import Pace, unpaced

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp

_P = ParamSpec("_P")
_T = TypeVar("_T")

FOLD_US: Final = (1_000, 50_000, 250_000)
"""Intervals of a follower's folds; each process draws one."""
SHARE_MIN: Final = 0.75
SYNC_CHECK_US: Final = 1_000
"""Interval at which a flush checks that the log is durable up to the flush's index."""
WORK_US: Final = {
    ThreadWork.PREFETCH: 2_000,
    ThreadWork.FLUSH: 100_000,
    ThreadWork.MERGE: 100_000,
    ThreadWork.READ_AHEAD: 20_000,
    ThreadWork.FETCH: 20_000,
}
"""Longest time from an order to the end of the work, per kind of work."""
SLOW_FILES_US: Final = 8_000_000
"""Longest delay of a result; longer than a new run is loaded ahead of its use
(timer/pending/runs/run_set.py)."""
SLOW_FILES: Final = (ThreadWork.FLUSH, ThreadWork.MERGE, ThreadWork.READ_AHEAD)
HEAL_US: Final = 5_000_000
"""Longest time from damage that a merge or reading ahead met to the repair."""
INSTALLS: Final = ("end_flush", "install_merge", "end_read_ahead")
"""Names of the calls that bring new rows of files into use."""


class TimelineIo:
    """The StateIo of one process."""

    def __init__(self, app: "EngineApp", rng: random.Random) -> None:
        self._app, self._node, self._rng = app, app.node, rng
        self._wake_us = 0
        self._fold_us = rng.choice(FOLD_US)
        self._slow = app.node.world.options.slow_files

    @property
    def flush_pace(self) -> Pace:
        return unpaced

    merge_pace = flush_pace

    # ---- time and turns

    def mono_ms(self) -> MonoMs:
        return self._node.mono_ms()

    def wall_ms(self) -> UnixMs:
        return self._node.wall_ms()

    def samples(self) -> Iterable[Sample]:
        node, now = self._node, self._node.mono_ms()
        own = Sample(voter=node.replica, wall_ms=node.wall_ms(), sent_ms=now, received_ms=now)
        others = node.core.clock_samples.items()
        return [own, *(Sample.at(v, s.wall_ms, s.at_ms, s.error_ms) for v, s in others)]

    def make_clock(self, floor_ms: UnixMs) -> ClusterClock:
        now, voters = self._node.mono_ms(), self._node.core.voters
        return ClusterClock(voters, self.samples(), floor_ms=floor_ms, floor_at_ms=now, boot_ms=now)

    def draw_share(self) -> float:
        return self._rng.uniform(SHARE_MIN, 1)

    def soon(self, call: Callable[[], None]) -> None:
        self._node.later(0, call)

    def wake_in(self, wait_ms: int) -> None:
        """See StateIo. Waits at least 1 ms, because virtual time stands still during a step."""
        wait_us = max(1, wait_ms) * 1_000
        self._wake_us = self._node.world.timeline.now_us + wait_us
        self._node.later(wait_us, self._wake, self._wake_us)

    def _wake(self, wake_us: int) -> None:
        if wake_us == self._wake_us:
            self._app.plane.kick()

    def fold_in(self) -> None:
        self._node.later(self._fold_us, self._app.plane.fold_later)

    def run(self, kind: ThreadWork, work: Callable[[], _T], done: Callable[[_T], None]) -> None:
        """See StateIo."""

        def finish() -> None:
            result = work()
            if self._slow and kind in SLOW_FILES:
                self._node.later(self._rng.randrange(SLOW_FILES_US), done, result)
            else:
                done(result)

        self._node.later(self._rng.randrange(WORK_US[kind]), finish)

    def run_timed(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """See StateIo. Measures no time. Checks the store after each call of INSTALLS."""
        result = work(*args, **kwargs)
        if work.__name__ in INSTALLS:
            workbook.check_windows(self._node, self._app.engine.machine.store)
        return result

    # ---- the log

    def append(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        return self._node.driver.propose(kind, payload, time_ms)

    def last_time_ms(self) -> UnixMs:
        return self._node.driver.last_time_ms

    def lease_held(self) -> bool:
        return self._app.may_hand_out()

    def cached(self, first: LogIndex, last: LogIndex) -> Sequence[Entry] | None:
        return self._node.driver.cached_entries(first, last)

    def read(
        self, first: LogIndex, last: LogIndex, done: Callable[[Sequence[Entry]], None]
    ) -> None:
        self._node.later(READ_US, lambda: done(self._node.entries(first, last)))

    def when_synced(self, index: LogIndex, done: Callable[[], None]) -> None:
        if self._node.log.durable_index < index:
            self._node.later(SYNC_CHECK_US, self.when_synced, index, done)
        else:
            self._node.later(0, done)

    def drop_before(self, index: LogIndex, *, keep: bool) -> None:
        self._node.drop_before(index, keep=keep and not self._node.world.options.hasty)

    # ---- notices to the node

    def leader_address(self) -> str | None:
        """See StateIo. Simulated clients try every node."""
        return None

    def on_delivery(self, delivery: Delivery) -> None:
        self._app.handed_out(delivery)

    def on_leading_changed(self) -> None:
        """See StateIo."""

    def clocks_read(self, report: ClockReport) -> None:
        """See StateIo."""

    def on_damage(self, damage: FileDamage) -> None:
        """See StateIo. The repair begins later: the product waits for the other nodes."""
        self._node.later(self._rng.randrange(HEAL_US), self._node.damage_found, damage)
