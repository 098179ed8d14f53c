"""A simulated operator that sets and unsets quotas, and unsets all at the end of a world."""

import random
from typing import TYPE_CHECKING, Any, Final

from timer.entries.policies import ScopePolicy

if TYPE_CHECKING:
    from chaos.sim.timers.town import Town

ACTING: Final = 0.15
"""Probability of a change of quotas at each action of the clients."""
VALUES: Final = {
    "pending_max": (0, 3, 8, 8, 20),
    "pending_bytes_max": (30, 100, 10_000),
    "ready_max": (3, 10, 30),
    "ready_bytes_max": (30, 100, 10_000),
}


class SimWarden:
    """Sets quotas of the cluster, a namespace and topics."""

    def __init__(self, town: "Town", rng: random.Random) -> None:
        self._town = town
        self._rng = rng

    def act(self) -> None:
        """Now and then set or unset one or two quotas of a scope. At the end unset all quotas."""
        app, rng = self._town.leader(), self._rng
        if app is None:
            return
        ask = self._town.line.ask
        if self._town.closing:
            machine = app.engine.machine
            for scope, said in machine.policies:
                unset = [name for name in VALUES if name in said.pack()]
                name = machine.topics[scope.topic].name if scope.topic else scope.namespace
                if unset:
                    ask(app, app.alter, name + "/" * bool(scope.namespace), ScopePolicy(), unset)
        elif rng.random() < ACTING:
            scope_name = rng.choice(("", "default/", *self._town.topics, *self._town.topics))
            names = rng.sample(sorted(VALUES), rng.choice((1, 1, 2)))
            unset = names if rng.random() < 0.5 else []
            values: dict[str, Any] = {
                name: rng.choice(VALUES[name]) for name in names if name not in unset
            }
            ask(app, app.alter, scope_name, ScopePolicy(**values), unset)
