"""A client of a simulated cluster that pauses and resumes topics."""

import random
from typing import TYPE_CHECKING, Final

from timer.entries.policies import CATCH_UPS, ScopePolicy

if TYPE_CHECKING:
    from chaos.sim.timers.town import Town

PAUSING: Final = 0.1
"""Probability of a pause or resume at each action of the clients."""


class SimPauser:
    """Pauses and resumes scopes; exists in worlds with `policies`. All are resumed at the end."""

    def __init__(self, town: "Town", rng: random.Random) -> None:
        self._town = town
        self._rng = rng

    def act(self) -> None:
        """Pause or resume a scope, or unset its fields so that the wider scope decides."""
        app, rng = self._town.leader(), self._rng
        if app is None or self._town.closing or rng.random() > PAUSING:
            return
        scope = rng.choice(("", "n/", *2 * self._town.topics))
        if rng.random() < 0.4:
            said, unset = ScopePolicy(paused=True), []
        else:
            catch_up = rng.choice((None, *CATCH_UPS))
            paused = rng.choice((False, False, None))
            said = ScopePolicy(paused=paused, catch_up=catch_up)
            unset = [name for name in ("paused", "catch_up") if getattr(said, name) is None]
        self._town.line.ask(app, app.alter, scope, said, unset)

    def finish(self) -> None:
        """Unset `paused` in every scope that is paused."""
        app = self._town.leader()
        if app is None:
            return
        policies = app.engine.machine.policies
        for scope, said in policies:
            if said.paused:
                topic = app.engine.machine.topics.get(scope.topic)
                name = topic.name if topic is not None else scope.namespace
                name += "/" if scope.namespace else ""
                self._town.line.ask(app, app.alter, name, ScopePolicy(), ["paused"])
