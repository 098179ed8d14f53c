"""The protocol of a nemesis: one kind of fault, and the choice of its victim.

    fault(stage, chance)
        chooses a victim, injects the fault
        yield                   the fault lasts
        ends it                 the cluster is whole again; LaunchError names the part that is not
    Fizzled, at any time        no victim, or no effect: the strike is not counted

A schedule (plan.py) names nemeses with their arguments, start times and lengths. A role such as
"leader" is resolved at the time of the strike: the victim is the leader of that moment.
"""

import abc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from chaos.suite.stage.plan import Need
from chaos.suite.stage.stage import Stage
from deploy.local import LaunchError

Undo = Callable[[], object]


class Fizzled(Exception):
    """A strike had no victim or no effect. Its text is the reason. The fault is undone."""


class Nemesis(abc.ABC):
    """One kind of fault. Its fields are the arguments of a strike."""

    __slots__ = ()
    needs: ClassVar[frozenset[Need]] = frozenset()

    @abc.abstractmethod
    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        """Inject the fault, yield once while it lasts, and end it.

        Raises:
            Fizzled: the strike had no effect.
        """

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Inject the fault and return the function that ends it. Both may raise Fizzled."""
        lasting = self.fault(stage, chance)
        next(lasting)
        return partial(next, lasting, None)


@dataclass(frozen=True, slots=True)
class NodeNemesis(Nemesis):
    """One kind of fault of the node that has a role at the time of the strike."""

    who: str = "leader"
    """The role: leader, controller, follower or any. Some nemeses also allow `all`."""

    def victim(self, stage: Stage, chance: random.Random) -> str:
        """Return the node; see `chosen`."""
        return chosen(stage, self.who, chance)

    def victims(self, stage: Stage, chance: random.Random) -> list[str]:
        """Return the node, or for `all` the nodes that are left."""
        return remaining(stage) if self.who == ALL else [self.victim(stage, chance)]


ALL: Final = "all"
POLL_S: Final = 0.05
NETWORK: Final = frozenset({Need.NETWORK})
DISKS: Final = frozenset({Need.DISKS})


def remaining(stage: Stage) -> list[str]:
    """Return the nodes that are not lost for good. Only they can be victims."""
    return [name for name in stage.names if name not in stage.lost]


def chosen(stage: Stage, who: str, chance: random.Random) -> str:
    """Return a node of role `who`: leader, controller, follower or any.

    Nodes that no other strike has taken away are preferred.

    Raises:
        LaunchError: no node leads within READY_S.
        Fizzled: all nodes of that role are lost for good, or no node knows the controller.
    """
    leader = stage.leader()
    if who == "leader":
        return leader
    if who == "controller":
        if (controller := stage.controller()) is None:
            raise Fizzled("no running node knows the controller")
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
    """Start nodes again and wait for a leader."""
    stage.restart(*names)
    stage.leader()
    stage.say(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} back")


def until(
    condition: Callable[[], bool], stage: Stage, name: str, within_s: float, otherwise: str,
    error: type[Exception] = LaunchError,
) -> None:  # fmt: skip
    """Return as soon as the condition holds.

    Raises:
        Exception: an `error`. The condition does not hold in time, or the node has ended. The text
            begins with `otherwise`.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline or not stage.cluster.is_running(name):
            raise error(f"{otherwise}, after {within_s:g} s or its end")
        time.sleep(POLL_S)
