"""A client of a simulated cluster that sets a rate of delivery and a jitter."""

import random
from typing import TYPE_CHECKING, Final

from timer.entries.policies import CLUSTER, ScopePolicy

if TYPE_CHECKING:
    from chaos.sim.timers.town import Town

RATES: Final = (8, 20)
JITTER_MS: Final = 40


class SimPacer:
    """Sets one rate and one jitter of the cluster; exists in worlds with `traits`."""

    def __init__(self, town: "Town", rng: random.Random) -> None:
        self._town = town
        self.rate = rng.choice(RATES)

    def act(self) -> None:
        """Set the fields; in a healed world, end the rate: a backlog would delay its rest."""
        app = self._town.leader()
        if app is None:
            return
        rate = app.engine.machine.policies.of(CLUSTER).group_rate_max
        if rate is None and not self._town.world.heals:
            said = ScopePolicy(group_rate_max=self.rate, jitter_ms=JITTER_MS)
            self._town.line.ask(app, app.alter, "", said, [])
        elif rate is not None and self._town.world.heals:
            self._town.line.ask(app, app.alter, "", ScopePolicy(), ["group_rate_max"])
