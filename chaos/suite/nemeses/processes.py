"""Nemeses of processes and their clocks: kills, stops, restarts, transfers, power cuts, wrong time.

A wrong clock is one node's wall clock that jumps or drifts (cluster/settings/wall_clock.py).
"""

import random
import time
from collections.abc import Iterator

from chaos.suite.nemeses.nemesis import (
    Nemesis,
    NoEffect,
    choose,
    label,
    on_disks,
    revive,
    survivors,
    victims,
)
from chaos.suite.stage.stage import Stage
from timerclient import TimerClient
from timerclient.values.errors import TimerError


@Nemesis
def kill(stage: Stage, chance: random.Random, who: str = "leader") -> Iterator[None]:
    """Kill -9; the node stays down, then starts again."""
    name = choose(stage, who, chance)
    if name in stage.waited_for:
        raise NoEffect(f"{name}, the {who}, is not whole yet")
    state = stage.cluster.state(name)
    stage.say(f"kill -9 {label(stage, name, who)}")
    at = time.monotonic()
    stage.kill(name)
    enough = len({*stage.names} - stage.away - stage.waited_for) >= stage.majority
    if state is not None and state.role == "leader" and enough:
        successor = stage.leader(above_epoch=state.epoch)
        stage.say(f"{successor} leads, {time.monotonic() - at:.2f} s later")
    yield
    revive(stage, name)


@Nemesis
def kill_many(stage: Stage, chance: random.Random, count: int = 2) -> Iterator[None]:
    """Kill -9 of several nodes together, the leader among them: a majority is down, or all.

    `count`: at most; all nodes if there are fewer.
    """
    leader = choose(stage, "leader", chance)
    others = [name for name in survivors(stage) if name != leader]
    names = [leader, *chance.sample(others, min(count - 1, len(others)))]
    stage.say(f"kill -9 {' and '.join(names)} together")
    stage.kill(*names)
    yield
    revive(stage, *names)


@Nemesis
def pause(stage: Stage, chance: random.Random, who: str = "leader") -> Iterator[None]:
    """SIGSTOP of a node, for longer than any lease, then SIGCONT."""
    name = choose(stage, who, chance)
    stage.say(f"SIGSTOP {label(stage, name, who)}")
    stage.pause(name)
    yield
    stage.resume(name)
    stage.say(f"{name} goes on")


@Nemesis
def rolling_restart(stage: Stage, chance: random.Random) -> Iterator[None]:
    """SIGTERM to one node after the other; each is back before the next one ends.

    After each node the strike lends its turn, so that another strike may begin.
    """
    names = survivors(stage)
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
        if left := sorted(stage.away - stage.lost):  # by another strike that failed
            stage.restart(*left)
        stage.wait_until_sure()
    stage.say("all nodes were restarted, one by one")
    yield


@Nemesis
def transfers(stage: Stage, chance: random.Random, times: int = 5) -> Iterator[None]:
    """An operator transfers the leadership again and again; no effect if all were refused."""
    done = refused = 0
    with TimerClient(stage.cluster.endpoints) as client:
        for _ in range(times):
            try:
                client.transfer(chance.choice(["", *survivors(stage)]))
                done += 1
            except TimerError as error:
                refused += error.outcome_known
            time.sleep(chance.uniform(0, 0.5))
    if refused == times:
        raise NoEffect(f"all {refused} transfers of the leadership were refused")
    stage.say(f"{done} of {times} transfers of the leadership")
    yield


@on_disks
def power_cut(stage: Stage, chance: random.Random, who: str = "leader") -> Iterator[None]:
    """Nodes die and lose all bytes that they had written and not synced."""
    names = victims(stage, who, chance)
    stage.say(f"power cut: {' '.join(names)}")
    stage.cut_power(*names)
    yield
    revive(stage, *names)


def _move_clock(
    stage: Stage, chance: random.Random, who: str = "leader", offset_ms: int = 0, drift_ppm: int = 0
) -> Iterator[None]:
    """A node's wall clock jumps, or runs at another rate; it is right again at the end.

    `offset_ms`: negative: backwards. `drift_ppm`: microseconds gained per second. Negative: the
    clock is slow.
    """
    name = choose(stage, who, chance)
    how = f"by {offset_ms:+,} ms and {drift_ppm / 10_000:+g} %"
    stage.say(f"the clock of {label(stage, name, who)} is wrong {how}")
    stage.set_clock(name, offset_ms=offset_ms, drift_ppm=drift_ppm)
    yield
    stage.set_clock(name)
    stage.say(f"the clock of {name} is right again")


clock_jump = clock_drift = Nemesis(_move_clock)
