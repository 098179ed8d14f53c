"""A leader with a slow disk: no commit waits for it, and the controller replaces it."""

from chaos.sim.world.options import NEVER
from chaos.sim.world.sim_control import report_of
from chaos.sim.world.world import World
from tests.chaos.planted.planted import calm

SLOW_US = 5_000_000
SECONDS = 25


class Watched:
    """A world; the leader's disk becomes slow after five seconds."""

    def __init__(self, seed: int, slowed: int) -> None:
        calmly = calm(seed).aim(nodes=3, manifest_every=NEVER)
        options = calmly.aim(sync_us=1_000, delay_us=500, proposals_per_s=20)
        self.world, self.slowed = World(seed, options=options), slowed
        self.longest_us, self._committed = 0, (0, SLOW_US)
        self.worst = 0, 0
        """Longest sync of the slow leader's disk, and longest time to commit, in microseconds."""
        self.world.timeline.after(SLOW_US, self._begin)
        self.world.run(SECONDS)
        self.appointed = [
            (at_us - SLOW_US, appoint, reason)
            for at_us, appoint, reason in self.world.control.appointed
            if at_us >= SLOW_US
        ]

    def _begin(self) -> None:
        self.leader = next(node for node in self.world.nodes if node.leading)
        self.leader.slow_disk = self.slowed
        self._look()

    def _look(self) -> None:
        now_us, committed = self.world.timeline.now_us, len(self.world.referee.committed)
        if committed != self._committed[0]:
            self._committed = committed, now_us
        self.longest_us = max(self.longest_us, now_us - self._committed[1])
        if now_us >= (SECONDS - 2) * 1_000_000:
            return  # the world is being healed
        self.world.timeline.after(10_000, self._look)
        report = report_of(self.leader, "it")
        if report.serving:
            self.worst = max(self.worst, (report.disk_ms, report.commit_ms))


def test_leader_whose_syncs_take_seconds_is_relieved_and_no_commit_waits_for_it() -> None:
    seen = Watched(5, slowed=2_000)
    ((after_us, appoint, reason),) = seen.appointed
    assert after_us <= 10_000_000
    assert appoint.unfit == (seen.leader.replica,)
    assert "to become durable" in reason
    disk_ms, commit_ms = seen.worst
    assert disk_ms >= 1_000
    assert commit_ms <= 100
    assert seen.longest_us <= 500_000, "proposals are 50 ms apart"
    assert next(node.replica for node in seen.world.nodes if node.leading) == appoint.leader


def test_leader_with_a_disk_as_fast_as_the_others_stays() -> None:
    seen = Watched(5, slowed=1)
    assert seen.appointed == []
    assert seen.worst[0] < 50
