"""Nemeses of clocks: one node's wall clock jumps or drifts (cluster/settings/wall_clock.py)."""

import random
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from chaos.suite.nemeses.nemesis import NOTHING, Undo, chosen, said
from chaos.suite.stage.stage import Stage


@dataclass(frozen=True, slots=True)
class ClockJump:
    """A node's wall clock jumps, and jumps back at the end."""

    needs: ClassVar = NOTHING
    who: str = "leader"
    """A role."""
    offset_ms: int = 60_000
    """Negative: backwards."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Set the clock's offset."""
        name = chosen(stage, self.who, chance)
        stage.say(f"the clock of {said(stage, name, self.who)} jumps by {self.offset_ms:+,} ms")
        stage.set_clock(name, offset_ms=self.offset_ms)
        return partial(_right, stage, name)


@dataclass(frozen=True, slots=True)
class ClockDrift:
    """A node's wall clock runs at another rate."""

    needs: ClassVar = NOTHING
    who: str = "any"
    """A role."""
    drift_ppm: int = 100_000
    """Microseconds gained per second. Negative: the clock is slow."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Set the clock's rate."""
        name = chosen(stage, self.who, chance)
        stage.say(f"the clock of {name} drifts by {self.drift_ppm / 10_000:+g} %")
        stage.set_clock(name, drift_ppm=self.drift_ppm)
        return partial(_right, stage, name)


def _right(stage: Stage, name: str) -> None:
    stage.set_clock(name)
    stage.say(f"the clock of {name} is right again")
