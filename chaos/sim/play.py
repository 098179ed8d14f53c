"""Plays seeds, in several processes if asked, and tells what came of each."""

import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from chaos.sim.referee import Broken
from chaos.sim.timers import TimerWorld
from chaos.sim.world import World

APPS: Final[dict[str, type[World]]] = {"ledger": World, "timers": TimerWorld}
EXIT_PROMISE: Final = 2
EXIT_ASSERTION: Final = 3


@dataclass(frozen=True, slots=True)
class Task:
    """One seed to play."""

    seed: int
    app: str
    seconds: int


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    exit_status: int = 0
    story: str = ""
    """Of a failure: the last events, what broke, how to run it again."""
    events: int = 0
    entries: int = 0
    epochs: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])


def play(task: Task) -> Outcome:
    """Run one seed."""
    world = APPS[task.app](task.seed)
    try:
        world.run(task.seconds)
    except AssertionError as error:
        kind, status = "PROMISE BROKEN", EXIT_PROMISE
        if not isinstance(error, Broken):
            kind, status = "ASSERTION", EXIT_ASSERTION
            traceback.print_exc()
        again = f"--seed {task.seed} --app {task.app} --seconds {task.seconds}"
        lines = [*world.story(), f"options: {world.options}", f"{kind}: {error}"]
        return Outcome(status, "\n".join([*lines, f"reproduce: python -m chaos.sim {again}"]))
    return Outcome(
        events=world.timeline.events,
        entries=len(world.referee.committed),
        epochs=world.referee.epochs,
        faults=Counter(world.faults.injected),
    )


def play_all(tasks: Sequence[Task], jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes in the order of `tasks`."""
    if jobs == 1 or len(tasks) == 1:
        yield from map(play, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(play, tasks)
