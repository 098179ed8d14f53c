"""The form of a nemesis: one kind of fault, and the choice of its victim.

    @Nemesis
    def fault(stage, chance, …):    the other parameters are the arguments of a strike
        …                       it chooses a victim, injects the fault
        yield                   the fault lasts
        …                       it ends the fault: the cluster is whole again, or LaunchError names
                                the part that is not
    NoEffect, at any time       no victim, or no effect: the strike is not counted, and the nodes
                                that it left down are started by the run

The argument `who` is a role: leader, controller, follower or any. Some nemeses also allow `all`.

A schedule (plan.py) names nemeses with their arguments, start times and lengths. A role such as
"leader" is resolved at the time of the strike: the victim is the leader of that moment.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from chaos.suite.stage.plan import Need
from chaos.suite.stage.stage import Stage
from deploy.local import LaunchError


class NoEffect(Exception):
    """A strike had no victim or no effect: `fizzled` in records. Its text is the reason."""


class Nemesis:
    """One kind of fault, as a generator function."""

    def __init__(
        self, fault: Callable[..., Iterator[None]], *, needs: frozenset[Need] = frozenset()
    ) -> None:
        """`needs`: of the machine."""
        self.needs: Final = needs
        self.strike: Final = contextlib.contextmanager(fault)
        """A context manager of stage, chance and arguments: injects the fault, and ends it after
        the block. Both may raise NoEffect."""


ALL: Final = "all"
POLL_S: Final = 0.05
on_network: Final = partial(Nemesis, needs=frozenset({Need.NETWORK}))
on_disks: Final = partial(Nemesis, needs=frozenset({Need.DISKS}))


def survivors(stage: Stage) -> list[str]:
    """Return the nodes that are not lost for good. Only they can be victims."""
    return [name for name in stage.names if name not in stage.lost]


def choose(stage: Stage, who: str, chance: random.Random) -> str:
    """Return a node of role `who`: leader, controller, follower or any.

    Nodes that no other strike has taken away are preferred.

    Raises:
        LaunchError: no node leads within READY_S.
        NoEffect: all nodes of that role are lost for good, or no node knows the controller.
    """
    leader = stage.leader()
    if who == "leader":
        return leader
    if who == "controller":
        if (controller := stage.controller()) is None:
            raise NoEffect("no running node knows the controller")
        return controller
    fit = [name for name in survivors(stage) if who == "any" or name != leader]
    if not fit:
        raise NoEffect(f"no {who} is left: {' and '.join(sorted(stage.lost))} lost for good")
    there = [name for name in fit if name not in stage.away]
    return chance.choice(there or fit)


def victims(stage: Stage, who: str, chance: random.Random) -> list[str]:
    """Return the node of a role, or for `all` the nodes that are left."""
    return survivors(stage) if who == ALL else [choose(stage, who, chance)]


def label(stage: Stage, name: str, who: str) -> str:
    """Return a node's name with its role."""
    return f"{name}, the {who}" if who in ("leader", "controller") else name


def revive(stage: Stage, *names: str) -> None:
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
