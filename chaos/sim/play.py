"""Plays seeds, in several processes if asked, and returns the outcome of each."""

import multiprocessing
import random
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.options import FAULTS_MIN, WorldOptions
from chaos.sim.world.referee import Broken
from chaos.sim.world.world import World

APPS: Final[dict[str, type[World]]] = {"ledger": World, "timers": TimerWorld}
EXIT_PROMISE: Final = 2
EXIT_FAILED: Final = 3


@dataclass(frozen=True, slots=True)
class Task:
    """One seed to play. None in a field: the seed draws it."""

    seed: int
    app: str
    seconds: int
    nodes: int | None = None
    faults: tuple[str, ...] | None = None
    mischief: tuple[str, ...] | None = None

    def world(self) -> World:
        """Return the world of this task.

        Raises:
            ValueError: a fault, a mischief or the number of nodes is unknown.
        """
        drawn = WorldOptions.draw(random.Random(self.seed))
        options = drawn.aim(nodes=self.nodes, faults=self.faults, mischief=self.mischief)
        return APPS[self.app](self.seed, options=options)

    def arguments(self) -> str:
        """Return the command line that repeats this task, after `--seed`."""
        words = [f"--app {self.app} --seconds {self.seconds}"]
        words += [] if self.nodes is None else [f"--nodes {self.nodes}"]
        for name, chosen in (("faults", self.faults), ("mischief", self.mischief)):
            words += [] if chosen is None else [f"--{name} {','.join(chosen) or 'none'}"]
        return " ".join(words)


@dataclass(slots=True)
class SeedOutcome:
    """The outcome of one seed, or the sum of several."""

    exit_status: int = 0
    story: str = ""
    """Of a failure: the last events, the broken rule, the command that repeats it."""
    trace: str = ""
    """Of one seed: the hash of all events."""
    faults: Counter[str] = field(default_factory=Counter[str])
    """Faults that struck, by kind (chaos/sim/world/faults.py)."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """The seed's events, entries, epochs, snapshots, and

    rows      timers scheduled, timers fired and messages acked, by the log: each counts once
    stranded  worlds that ended waiting for repair (chaos/sim/world/disk_loss.py)
    calm      worlds with fewer than FAULTS_MIN faults, because the drawn faults could not strike
    """

    def add(self, other: "SeedOutcome") -> None:
        """Add the outcome of another seed."""
        self.trace = other.trace
        self.faults.update(other.faults)
        self.counts.update(other.counts)


def play(task: Task) -> SeedOutcome:
    """Run one seed."""
    world = task.world()
    try:
        world.run(task.seconds)
    except Exception as error:  # noqa: BLE001 - any error is reported with its seed
        kind, status = "PROMISE BROKEN", EXIT_PROMISE
        if not isinstance(error, Broken):
            kind, status = type(error).__name__, EXIT_FAILED
            traceback.print_exc()
        lines = [
            *world.story(),
            f"options: {world.options}",
            f"trace: {world.timeline.trace}",
            f"{kind}: {error}",
            f"reproduce: python -m chaos.sim --seed {task.seed} {task.arguments()}",
            f'       or: make sim SEED={task.seed} ARGS="{task.arguments()}"',
        ]
        return SeedOutcome(status, "\n".join(lines), trace=world.timeline.trace)
    struck = Counter(world.faults.struck)
    counts = Counter(
        events=world.timeline.events,
        entries=len(world.referee.committed),
        epochs=world.referee.epochs,
        snapshots=sum(node.snapshots for node in world.nodes),
        rows=world.rows(),
        stranded=int(world.stranded),
        calm=int(bool(world.options.faults) and struck.total() < FAULTS_MIN),
    )
    return SeedOutcome(trace=world.timeline.trace, faults=struck, counts=counts)


def play_all(tasks: Sequence[Task], jobs: int) -> Iterator[SeedOutcome]:
    """Yield the outcomes in the order of `tasks`."""
    if jobs == 1 or len(tasks) == 1:
        yield from map(play, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(play, tasks)
