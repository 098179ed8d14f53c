"""Planted bugs: proof that the simulator's checkers find errors.

A `Mutation` breaks one rule, as a plausible mistake would. Production code has no trace of it. The
simulator must find the bug within a stated number of random seeds, through one of the checkers that
the mutation names. A failed assertion of production code, or another checker, does not count; such
a world only uses up its seed. A world without faults must not show the bug, except for bugs with
ANY_WORLD: such a world lacks the events that `needs` names.

Where the usual mix of worlds would take too long, `aim` sets some options of the worlds
(chaos/sim/world/options.py). The seed draws the others.
"""

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

from chaos.sim.world.options import NEVER, OPTIONAL, RARE, WorldOptions
from chaos.sim.world.referee import CHECKERS, Broken
from chaos.sim.world.world import World

ANY_WORLD = "nothing goes wrong"
"""Start of the `needs` of a bug that shows in the calmest world. Such a bug only proves that its
checker works."""

Plant = Callable[[], contextlib.AbstractContextManager[object]]


def patch(target: object, name: str, new: object) -> Plant:
    """Return a context that replaces an attribute of `target`."""
    return lambda: mock.patch.object(target, name, new)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One planted bug."""

    name: str
    breaks: str
    """The wrong behaviour, in a sentence."""
    checkers: frozenset[str]
    """Names of the checkers that may find it; at least one."""
    seeds: int
    """Number of seeds within which a checker must find it."""
    needs: str
    """The events that must occur before the bug shows."""
    plant: Plant
    """Makes the context in which the bug is active."""
    aim: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the worlds, in place of drawn ones."""
    world: type[World] = World

    def __post_init__(self) -> None:
        assert self.checkers <= CHECKERS.keys(), self.checkers
        assert self.checkers
        assert self.needs


class Planting:
    """Makes mutations for one kind of world."""

    def __init__(self, world: type[World], **aim: Any) -> None:
        """`aim`: options that all these mutations share; a mutation may override them."""
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
        """Return a mutation. `aim` overrides the shared options."""
        found_by = frozenset(checkers)
        return Mutation(name, breaks, found_by, seeds, needs, plant, self._aim | aim, self._world)


@dataclass(frozen=True, slots=True)
class Found:
    """The failure that shows a planted bug."""

    seed: int
    seeds: int
    """Number of seeds played, this one included."""
    checker: str
    detail: str


PLAIN: Final[dict[str, Any]] = dict.fromkeys(OPTIONAL, False)
"""Options that are off in a hunt, except where a mutation sets them. Most drawn worlds have few."""

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
"""Slow links and disks, so that many messages are under way at any time; the rest is cheap."""


def hunt(mutation: Mutation, first_seed: int) -> Found | None:
    """Return the first failure that shows `mutation`. None: none within its number of seeds."""
    for number in range(mutation.seeds):
        seed = first_seed + number
        drawn = WorldOptions.draw(random.Random(seed))
        faults = [fault for fault in drawn.faults if fault not in RARE]
        options = drawn.aim(**{**PLAIN, "faults": faults, **mutation.aim})
        with mutation.plant():
            try:
                mutation.world(seed, options=options).run(40)
            except Broken as error:
                if error.checker in mutation.checkers:
                    return Found(seed, number + 1, error.checker, str(error))
            except (AssertionError, LookupError):  # the product or a book fails in another way
                continue
    return None


def calm(seed: int) -> WorldOptions:
    """Return the options of a world with working clients, without faults and restarts."""
    drawn = WorldOptions.draw(random.Random(seed))
    quiet: dict[str, Any] = {"loss": 0.0, "duplicate": 0.0, "client_loss": 0.0, "reorder": False}
    quiet |= {"drift_ppm": 0, "manifest_every": NEVER, "learners": 0, "member_changes": 0.0}
    return drawn.aim(faults=(), mischief=(), **quiet | PLAIN)
