"""A simulated operator who redrives dead letters."""

import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from chaos.sim.timers.town import Town

REDRIVING: Final = 0.1
"""How likely somebody redrives letters at a moment at which a client acts."""


class SimRedriver:
    """Sends dead letters back where they came from."""

    def __init__(self, town: "Town", rng: random.Random) -> None:
        self._town = town
        self._rng = rng

    def act(self) -> None:
        """Do so with some, or all, of some group's, now and then."""
        app, rng = self._town.leader(), self._rng
        if app is None or self._town.closing or rng.random() > REDRIVING:
            return
        consumer = rng.choice(self._town.consumers)
        letters = f"{consumer.topic}.{consumer.group}.dead"
        self._town.line.ask(app, app.redrive, letters, rng.choice((1, 3, 256)))
