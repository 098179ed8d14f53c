"""Nemesis of clocks: one node's wall clock jumps or drifts (cluster/settings/wall_clock.py)."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from chaos.suite.nemeses.nemesis import NodeNemesis, said
from chaos.suite.stage.stage import Stage


@dataclass(frozen=True, slots=True)
class MoveClock(NodeNemesis):
    """A node's wall clock jumps, or runs at another rate; it is right again at the end."""

    offset_ms: int = 0
    """Negative: backwards."""
    drift_ppm: int = 0
    """Microseconds gained per second. Negative: the clock is slow."""

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        name = self.victim(stage, chance)
        how = f"by {self.offset_ms:+,} ms and {self.drift_ppm / 10_000:+g} %"
        stage.say(f"the clock of {said(stage, name, self.who)} is wrong {how}")
        stage.set_clock(name, offset_ms=self.offset_ms, drift_ppm=self.drift_ppm)
        yield
        stage.set_clock(name)
        stage.say(f"the clock of {name} is right again")
