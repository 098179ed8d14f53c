"""Nemeses of links: cut, one way, in halves, flapping, slow. They need the run's own network."""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from chaos.suite.nemeses.nemesis import NoEffect, choose, label, on_network, survivors
from chaos.suite.stage.network import CLIENTS, Pair
from chaos.suite.stage.stage import Stage

RECOVERS_S: Final = 30.0
"""A node leads within this once round trips are short again: a second or two on an idle machine.
Another strike may kill the leader meanwhile."""
LEASE_JITTER: Final = 0.1
"""Greatest additional length of a round trip of `near_lease`, as a share of the lease."""


def links(stage: Stage, name: str, *ends: str) -> list[Pair]:
    """Return both directions of a node's links to these ends; none: to all other nodes."""
    others = ends or [other for other in stage.names if other != name]
    return [pair for other in others for pair in ((name, other), (other, name))]


@on_network
def isolate(
    stage: Stage, chance: random.Random, who: str = "leader", *, clients: bool = True
) -> Iterator[None]:
    """A node is cut off from the other nodes, or from the clients as well.

    `clients`: whether the clients are cut off as well.
    """
    name = choose(stage, who, chance)
    seen = "" if clients else ", but not from the clients"
    stage.say(f"cut off {label(stage, name, who)}{seen}")
    more = links(stage, name, CLIENTS) if clients else []
    yield from _cut(stage, name, links(stage, name) + more)


@on_network
def cut_clients(stage: Stage, chance: random.Random, who: str = "leader") -> Iterator[None]:
    """The link between a node and the clients is cut; links between nodes work."""
    name = choose(stage, who, chance)
    stage.say(f"clients can't reach {label(stage, name, who)}; the other nodes can")
    yield from _cut(stage, name, links(stage, name, CLIENTS))


@on_network
def one_way(
    stage: Stage, chance: random.Random, who: str = "leader", *, hears: bool = True
) -> Iterator[None]:
    """A node's packets to the other nodes are lost, or theirs to it.

    `hears`: true: the node receives and its own packets are lost. False: the other way round.
    """
    name = choose(stage, who, chance)
    how = "can receive, not send" if hears else "can send, not receive"
    stage.say(f"{label(stage, name, who)} {how}")
    pairs = links(stage, name)
    yield from _cut(stage, name, [pair for pair in pairs if (pair[0] == name) == hears])


@on_network
def bridge(stage: Stage, chance: random.Random) -> Iterator[None]:
    """Two halves of the nodes reach each other only through one node; the leader is in a half."""
    leader = choose(stage, "leader", chance)
    middle = choose(stage, "follower", chance)
    rest = [name for name in survivors(stage) if name not in (leader, middle)]
    if not rest:
        raise NoEffect(f"only {leader} and {middle} are left: there are no halves")
    chance.shuffle(rest)
    half = len(rest) // 2
    left, right = [leader, *rest[:half]], rest[half:]
    stage.say(f"{' '.join(left)} and {' '.join(right)} reach each other through {middle} only")
    yield from _cut(stage, middle, [pair for a in left for pair in links(stage, a, *right)])


@on_network
def flap(
    stage: Stage, chance: random.Random, who: str = "leader", period_s: float = 0.6
) -> Iterator[None]:
    """A node's links to the others are cut and healed in turn.

    `period_s`: mean length of a cut, and of the time between two cuts.
    """
    name = choose(stage, who, chance)
    stage.say(f"the links of {label(stage, name, who)} flap")
    over = threading.Event()

    def cut_and_heal() -> None:
        while not over.is_set():
            with stage.network.cut(links(stage, name)):
                over.wait(period_s * chance.uniform(0.5, 1.5))
            over.wait(period_s * chance.uniform(0.5, 1.5))

    pool = ThreadPoolExecutor(1, "flap")
    flapping = pool.submit(cut_and_heal)
    yield
    over.set()
    pool.shutdown()
    flapping.result()
    _healed(stage, name)


@on_network
def slow(
    stage: Stage, chance: random.Random, who: str = "any", delay_ms: int = 50, jitter_ms: int = 20,
    loss: float = 0.01,
) -> Iterator[None]:  # fmt: skip
    """All links of a node, those to the clients included, delay packets and lose some.

    `delay_ms`: each way. `jitter_ms`: greatest additional delay, each way. `loss`: share of the
    packets.
    """
    name = choose(stage, who, chance)
    pairs = links(stage, name) + links(stage, name, CLIENTS)
    stage.say(f"links of {label(stage, name, who)}: {delay_ms} ms each way, {100 * loss:g} % lost")
    with stage.network.slow(pairs, delay_ms=delay_ms, jitter_ms=jitter_ms, loss=loss):
        yield
    stage.say(f"links of {name}: fast again")


@on_network
def near_lease(stage: Stage, chance: random.Random, share: float = 0.75) -> Iterator[None]:
    """Round trips between nodes take nearly a leader's lease. Links to clients stay fast.

    The cluster may lose its leader again and again. A node leads within RECOVERS_S of the undo.

    `share`: least length of a round trip, as a share of the lease.
    """
    del chance
    pairs = [*itertools.permutations(stage.names, 2)]
    each_ms = stage.lease_ms / 2
    stage.say(f"a round trip between nodes takes {100 * share:g} % of a lease")
    delay_ms, jitter_ms = int(share * each_ms), int(LEASE_JITTER * each_ms)
    with stage.network.slow(pairs, delay_ms=delay_ms, jitter_ms=jitter_ms):
        yield
    began_s = time.monotonic()
    leader = stage.cluster.wait_for_leader(RECOVERS_S)
    took_s = round(time.monotonic() - began_s, 2)
    stage.record("recovered", leader=leader, took_s=took_s)
    stage.say(f"round trips are short again; {leader} leads, {took_s:g} s later")


def _cut(stage: Stage, name: str, pairs: list[Pair]) -> Iterator[None]:
    with stage.network.cut(pairs):
        yield
    _healed(stage, name)


def _healed(stage: Stage, name: str) -> None:
    stage.leader()
    stage.say(f"the links of {name} are whole")
