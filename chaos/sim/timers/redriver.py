"""A simulated operator that redrives dead letters."""

import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from chaos.sim.timers.town import Town

REDRIVING: Final = 0.1
"""Probability of a redrive at each action of the clients."""


class SimRedriver:
    """Redrives dead letters to their first topics."""

    def __init__(self, town: "Town", rng: random.Random) -> None:
        self._town = town
        self._rng = rng

    def act(self) -> None:
        """Now and then redrive 1, 3 or up to 256 dead letters of a random group."""
        app, rng = self._town.leader(), self._rng
        if app is None or self._town.closing or rng.random() > REDRIVING:
            return
        consumer = rng.choice(self._town.consumers)
        letters = f"{consumer.topic}.{consumer.group}.dead"
        self._town.line.ask(app, app.redrive, letters, rng.choice((1, 3, 256)))
