"""Planted bugs: proof that the referee can lose its patience.

A `Mutation` breaks one rule, as a plausible mistake would; production code knows nothing of it.
The simulator has to find it with randomly drawn seeds, within the number stated, through one of
the checkers that it names: an assertion of production code does not count, nor does another
checker. Such a world only uses up its seed. And it must have something to find: a world in which
nothing goes wrong does not notice the bug, whatever the `needs` say is missing there.

Where the usual mix would take too long, `aim` chooses some of the options of the worlds to hunt in
(chaos/sim/world/options.py); the seed still draws the others.
"""

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

from chaos.sim.world.options import NEVER, RARE, WorldOptions
from chaos.sim.world.referee import CHECKERS, Broken
from chaos.sim.world.world import World

ANY_WORLD = "nothing goes wrong"
"""Begins the `needs` of a bug that shows in the calmest world: planted so that its checker is seen
to work, and not asked to hide."""

Plant = Callable[[], contextlib.AbstractContextManager[object]]


def patch(target: object, name: str, new: object) -> Plant:
    """Return what replaces an attribute while it is planted."""
    return lambda: mock.patch.object(target, name, new)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One planted bug."""

    name: str
    breaks: str
    checkers: frozenset[str]
    """One of these must find it."""
    seeds: int
    """Within so many."""
    needs: str
    """What has to go wrong before it shows."""
    plant: Plant
    aim: Mapping[str, Any] = field(default_factory=dict[str, Any])
    world: type[World] = World

    def __post_init__(self) -> None:
        assert self.checkers <= CHECKERS.keys(), self.checkers
        assert self.checkers
        assert self.needs


class Planting:
    """Makes bugs that are hunted in one kind of world."""

    def __init__(self, world: type[World], **aim: Any) -> None:
        """`aim`: options that all of them share, unless one says otherwise."""
        self._world, self._aim = world, aim

    def __call__(
        self,
        name: str,
        breaks: str,
        checkers: set[str],
        seeds: int,
        needs: str,
        plant: Plant,
        **aim: Any,
    ) -> Mutation:
        """Return a planted bug: see Mutation."""
        found_by = frozenset(checkers)
        return Mutation(name, breaks, found_by, seeds, needs, plant, self._aim | aim, self._world)


@dataclass(frozen=True, slots=True)
class Found:
    """What found a planted bug."""

    seed: int
    seeds: int
    """Tried, this one included."""
    checker: str
    detail: str


PLAIN: Final[dict[str, Any]] = dict.fromkeys(
    (
        "tight",
        "hasty",
        "policies",
        "requests",
        "types",
        "quotas",
        "expiry",
        "deletions",
        "redrives",
        "crowds",
        "controller",
        "again",
        "fleeting",
        "slow_files",
        "pressed",
    ),
    False,
)
"""Where a bug that aims at nothing of it is hunted: most worlds are like that."""

SLOW_LINKS: Final[dict[str, Any]] = {
    "delay_us": 10_000,
    "sync_us": 8_000,
    "loss": 0.0,
    "client_loss": 0.0,
    "duplicate": 0.0,
    "reorder": False,
    "learners": 0,
    "member_changes": 0.0,
    "manifest_every": NEVER,
    "segment_bytes": 1 << 20,
    "payload_bytes": 16,
    "mischief": (),
}
"""Where much is under way at any time, and little else costs time: for a bug that needs that."""


def hunt(mutation: Mutation, first_seed: int, seconds: int = 40) -> Found | None:
    """Return how the simulator finds `mutation`; None: not within its number of seeds."""
    for number in range(mutation.seeds):
        seed = first_seed + number
        drawn = WorldOptions.draw(random.Random(seed))
        faults = [fault for fault in drawn.faults if fault not in RARE]
        options = drawn.aim(**{**PLAIN, "faults": faults, **mutation.aim})
        with mutation.plant():
            try:
                mutation.world(seed, options=options).run(seconds)
            except Broken as error:
                if error.checker in mutation.checkers:
                    return Found(seed, number + 1, error.checker, str(error))
            except AssertionError:
                continue
    return None


def calm(seed: int) -> WorldOptions:
    """Return a world in which clients work, and nothing goes wrong or is restarted."""
    drawn = WorldOptions.draw(random.Random(seed))
    quiet: dict[str, Any] = {"loss": 0.0, "duplicate": 0.0, "client_loss": 0.0, "reorder": False}
    quiet |= {"drift_ppm": 0, "manifest_every": NEVER, "learners": 0, "member_changes": 0.0}
    return drawn.aim(faults=(), mischief=(), **quiet | PLAIN)
