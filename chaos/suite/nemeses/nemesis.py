"""What a nemesis is, and whom it hits.

    strike(stage, chance) ──► does it, returns the undo; whom it hits is decided here and now
    undo()                ──► the cluster is whole again, or LaunchError says what is not
    Fizzled, of either    ──► nobody was hit or nothing was changed: it does not count as struck

A schedule (plan.py) says when and how long, by name and arguments. Roles are resolved when it
strikes: "leader" is who leads by then.
"""

import random
import threading
from collections.abc import Callable
from typing import ClassVar, Final, Protocol

from chaos.suite.stage.plan import Need
from chaos.suite.stage.stage import Stage

Undo = Callable[[], None]


class Fizzled(Exception):
    """A strike hit nobody, or changed nothing that anybody saw; says why. It is undone."""


class Aside:
    """A nemesis's work in a thread of its own, begun at once."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as failure:  # noqa: BLE001 -- raised again by `check`
            self._failure = failure

    def wait(self) -> None:
        """Return when it has ended."""
        self._thread.join()

    def check(self) -> None:
        """Raise what it failed with, if it did: nobody else would see it."""
        self.wait()
        if self._failure is not None:
            raise self._failure


class Nemesis(Protocol):
    """One kind of fault. Its fields are a strike's arguments."""

    needs: ClassVar[frozenset[Need]]

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Do it; return what undoes it.

        Raises:
            Fizzled: it had no effect. The undo may find that, too.
        """


NOTHING: Final[frozenset[Need]] = frozenset()
NETWORK: Final = frozenset({Need.NETWORK})
DISKS: Final = frozenset({Need.DISKS})


def remaining(stage: Stage) -> list[str]:
    """Return the nodes that are not lost for good: no other can be a victim."""
    return [name for name in stage.names if name not in stage.lost]


def chosen(stage: Stage, who: str, chance: random.Random) -> str:
    """Return a node by role: leader, controller, follower, any; one that is there, if one is.

    Raises:
        LaunchError: nobody leads.
        Fizzled: all of that role are lost for good; or no node knows who the controller is.
    """
    leader = stage.leader()
    if who == "leader":
        return leader
    if who == "controller":
        if (controller := stage.controller()) is None:
            raise Fizzled("no node that is there knows of a controller")
        return controller
    fit = [name for name in remaining(stage) if who == "any" or name != leader]
    if not fit:
        raise Fizzled(f"no {who} is left: {' and '.join(sorted(stage.lost))} lost for good")
    there = [name for name in fit if name not in stage.away]
    return chance.choice(there or fit)


def said(stage: Stage, name: str, who: str) -> str:
    """Return a node's name with its role."""
    return f"{name}, the {who}" if who in ("leader", "controller") else name


def back(stage: Stage, *names: str) -> None:
    """Bring nodes up again, and wait until somebody leads."""
    stage.restart(*names)
    stage.leader()
    stage.say(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} back")


def nothing() -> None:
    """Undo what is over already."""
