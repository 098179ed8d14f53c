"""Nemeses of processes: they die, sleep, restart, hand over, lose their power."""

import random
import time
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from chaos.suite.nemeses.nemesis import (
    DISKS,
    NOTHING,
    Fizzled,
    Undo,
    back,
    chosen,
    nothing,
    remaining,
    said,
)
from chaos.suite.stage.stage import Stage
from timerclient import TimerClient
from timerclient.values.errors import TimerError


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill -9; the node stays down, then starts again."""

    needs: ClassVar = NOTHING
    who: str = "leader"

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Kill it, and wait for its successor if the others are enough for one.

        While another node is waited for, all that is being written is written first: a torn log,
        which does not count either, is more than a cluster stands then.
        """
        name = chosen(stage, self.who, chance)
        if name in stage.waited_for:
            raise Fizzled(f"{name}, the {self.who}, is not whole yet")
        state = stage.cluster.state(name)
        led = state is not None and state.role == "leader"
        stage.say(f"kill -9 {said(stage, name, self.who)}")
        at = time.monotonic()
        stage.kill(name, whole=bool(stage.waited_for))
        enough = len({*stage.names} - stage.away - stage.waited_for) >= stage.majority
        if state is not None and led and enough:
            successor = stage.leader(above_epoch=state.epoch)
            stage.say(f"{successor} leads, {time.monotonic() - at:.2f} s later")
        return partial(back, stage, name)


@dataclass(frozen=True, slots=True)
class KillMany:
    """Kill -9 of several nodes together, the leader among them: a majority is gone, or all."""

    needs: ClassVar = NOTHING
    count: int = 2

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Kill them."""
        leader = chosen(stage, "leader", chance)
        others = [name for name in remaining(stage) if name != leader]
        names = [leader, *chance.sample(others, min(self.count - 1, len(others)))]
        stage.say(f"kill -9 {' and '.join(names)} together")
        stage.kill(*names)
        return partial(back, stage, *names)


@dataclass(frozen=True, slots=True)
class SuspendNode:
    """SIGSTOP, for longer than any lease; SIGCONT."""

    needs: ClassVar = NOTHING
    who: str = "leader"

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Stop it."""
        name = chosen(stage, self.who, chance)
        stage.say(f"SIGSTOP {said(stage, name, self.who)}")
        stage.pause(name)

        def undo() -> None:
            stage.resume(name)
            stage.say(f"{name} goes on")

        return undo


@dataclass(frozen=True, slots=True)
class RollingRestart:
    """SIGTERM to one node after the other; each is back before the next goes.

    Between two of them others have their turn.
    """

    needs: ClassVar = NOTHING

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Do all of it."""
        names = remaining(stage)
        for name in chance.sample(names, len(names)):
            stage.say(f"SIGTERM {name}")
            stage.away.add(name)
            stage.cluster.stop(name)
            stage.check_end(name)
            stage.record("term", node=name)
            stage.restart(name)
            stage.leader()
            with stage.turn.lent():
                pass
            if left := sorted(stage.away - stage.lost):  # by one that failed
                stage.restart(*left)
            stage.wait_until_sure()
        stage.say("all nodes were restarted, one by one")
        return nothing


@dataclass(frozen=True, slots=True)
class TransferStorm:
    """An operator hands the leadership over, again and again."""

    needs: ClassVar = NOTHING
    times: int = 5

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Do all of it; it had no effect if all transfers were refused."""
        done = refused = 0
        with TimerClient(stage.cluster.endpoints) as client:
            for _ in range(self.times):
                try:
                    client.transfer(chance.choice(["", *remaining(stage)]))
                    done += 1
                except TimerError as error:
                    refused += error.outcome_known
                time.sleep(chance.uniform(0, 0.5))
        if refused == self.times:
            raise Fizzled(f"all {refused} transfers of the leadership were refused")
        stage.say(f"{done} of {self.times} transfers of the leadership")
        return nothing


@dataclass(frozen=True, slots=True)
class PowerCut:
    """Nodes die and lose what they had written and not synced."""

    needs: ClassVar = DISKS
    who: str = "leader"
    """A role, or `all`."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Cut it."""
        names = remaining(stage) if self.who == "all" else [chosen(stage, self.who, chance)]
        stage.say(f"power cut: {' '.join(names)}")
        stage.cut_power(*names)
        return partial(back, stage, *names)
