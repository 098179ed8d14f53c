"""Nemesis of clocks: one node's wall clock jumps or drifts (cluster/settings/wall_clock.py)."""

import random
from collections.abc import Iterator

from chaos.suite.nemeses.nemesis import Nemesis, chosen, said
from chaos.suite.stage.stage import Stage


def _move_clock(
    stage: Stage, chance: random.Random, who: str = "leader", offset_ms: int = 0, drift_ppm: int = 0
) -> Iterator[None]:
    """A node's wall clock jumps, or runs at another rate; it is right again at the end.

    `offset_ms`: negative: backwards. `drift_ppm`: microseconds gained per second. Negative: the
    clock is slow.
    """
    name = chosen(stage, who, chance)
    how = f"by {offset_ms:+,} ms and {drift_ppm / 10_000:+g} %"
    stage.say(f"the clock of {said(stage, name, who)} is wrong {how}")
    stage.set_clock(name, offset_ms=offset_ms, drift_ppm=drift_ppm)
    yield
    stage.set_clock(name)
    stage.say(f"the clock of {name} is right again")


clock_jump = clock_drift = Nemesis(_move_clock)
