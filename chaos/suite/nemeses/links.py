"""Nemeses of links: cut, one way, in halves, flapping, slow. They need the run's own network."""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Final

from chaos.suite.nemeses.nemesis import (
    NETWORK,
    Fizzled,
    Nemesis,
    NodeNemesis,
    chosen,
    remaining,
    said,
)
from chaos.suite.stage.network import CLIENTS, Pair
from chaos.suite.stage.stage import Stage

RECOVERS_S: Final = 30.0
"""A node leads within this once round trips are short again: a second or two on an idle machine.
Another strike may kill the leader meanwhile."""


def both(a: str, b: str) -> list[Pair]:
    """Return both directions of a link."""
    return [(a, b), (b, a)]


@dataclass(frozen=True, slots=True)
class Isolate(NodeNemesis):
    """A node is cut off from the other nodes, or from the clients as well."""

    needs: ClassVar = NETWORK
    clients: bool = True
    """Whether the clients are cut off as well."""

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        name = self.victim(stage, chance)
        others = [end for end in stage.names + [CLIENTS] * self.clients if end != name]
        seen = "" if self.clients else ", but not from the clients"
        stage.say(f"cut off {said(stage, name, self.who)}{seen}")
        yield from _cut(stage, name, [pair for end in others for pair in both(name, end)])


@dataclass(frozen=True, slots=True)
class CutClients(NodeNemesis):
    """The link between a node and the clients is cut; links between nodes work."""

    needs: ClassVar = NETWORK

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        name = self.victim(stage, chance)
        stage.say(f"clients can't reach {said(stage, name, self.who)}; the other nodes can")
        yield from _cut(stage, name, both(name, CLIENTS))


@dataclass(frozen=True, slots=True)
class OneWay(NodeNemesis):
    """A node's packets to the other nodes are lost, or theirs to it."""

    needs: ClassVar = NETWORK
    hears: bool = True
    """True: the node receives and its own packets are lost. False: the other way round."""

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        name = self.victim(stage, chance)
        others = [other for other in stage.names if other != name]
        how = "can receive, not send" if self.hears else "can send, not receive"
        stage.say(f"{said(stage, name, self.who)} {how}")
        pairs = [(name, other) if self.hears else (other, name) for other in others]
        yield from _cut(stage, name, pairs)


@dataclass(frozen=True, slots=True)
class Bridge(Nemesis):
    """Two halves of the nodes reach each other only through one node, which reaches all."""

    needs: ClassVar = NETWORK

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        """Cut all links between the halves; the leader is in one of them."""
        leader = chosen(stage, "leader", chance)
        bridge = chosen(stage, "follower", chance)
        rest = [name for name in remaining(stage) if name not in (leader, bridge)]
        if not rest:
            raise Fizzled(f"only {leader} and {bridge} are left: there are no halves")
        chance.shuffle(rest)
        half = len(rest) // 2
        left, right = [leader, *rest[:half]], rest[half:]
        stage.say(f"{' '.join(left)} and {' '.join(right)} reach each other through {bridge} only")
        pairs = [pair for a in left for b in right for pair in both(a, b)]
        yield from _cut(stage, bridge, pairs)


@dataclass(frozen=True, slots=True)
class Flap(NodeNemesis):
    """A node's links to the others are cut and healed in turn."""

    needs: ClassVar = NETWORK
    period_s: float = 0.6
    """Mean length of a cut, and of the time between two cuts."""

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        name = self.victim(stage, chance)
        assert stage.network is not None
        network = stage.network
        stage.say(f"the links of {said(stage, name, self.who)} flap")
        pairs = [pair for other in stage.names if other != name for pair in both(name, other)]
        over = threading.Event()

        def flap() -> None:
            while not over.is_set():
                heal = network.cut(pairs)
                over.wait(self.period_s * chance.uniform(0.5, 1.5))
                heal()
                over.wait(self.period_s * chance.uniform(0.5, 1.5))

        pool = ThreadPoolExecutor(1, "flap")
        flapping = pool.submit(flap)
        yield
        over.set()
        pool.shutdown()
        flapping.result()
        _healed(stage, name)


@dataclass(frozen=True, slots=True)
class Slow(NodeNemesis):
    """All links of a node, those to the clients included, delay packets and lose some."""

    needs: ClassVar = NETWORK
    who: str = "any"
    delay_ms: int = 50
    """Each way."""
    jitter_ms: int = 20
    """Greatest additional delay, each way."""
    loss: float = 0.01
    """Share of the packets."""

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        name = self.victim(stage, chance)
        assert stage.network is not None
        others = [end for end in stage.network.ends() if end != name]
        pairs = [pair for other in others for pair in both(name, other)]
        stage.say(
            f"links of {said(stage, name, self.who)}: {self.delay_ms} ms each way,"
            f" {100 * self.loss:g} % lost"
        )
        heal = stage.network.slow(
            pairs, delay_ms=self.delay_ms, jitter_ms=self.jitter_ms, loss=self.loss
        )
        yield
        heal()
        stage.say(f"links of {name}: fast again")


@dataclass(frozen=True, slots=True)
class NearLease(Nemesis):
    """Round trips between nodes take nearly a leader's lease. Links to clients stay fast.

    The cluster may lose its leader again and again. A node leads within RECOVERS_S of the undo.
    """

    needs: ClassVar = NETWORK
    share: float = 0.75
    """Least length of a round trip, as a share of the lease."""
    jitter: float = 0.1
    """Greatest additional length of a round trip, as a share of the lease."""

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        del chance
        assert stage.network is not None
        pairs = [*itertools.permutations(stage.names, 2)]
        each_ms = stage.lease_ms / 2
        heal = stage.network.slow(
            pairs, delay_ms=int(self.share * each_ms), jitter_ms=int(self.jitter * each_ms)
        )
        stage.say(f"a round trip between nodes takes {100 * self.share:g} % of a lease")
        yield
        heal()
        began_s = time.monotonic()
        leader = stage.cluster.wait_for_leader(RECOVERS_S)
        took_s = round(time.monotonic() - began_s, 2)
        stage.record("recovered", leader=leader, took_s=took_s)
        stage.say(f"round trips are short again; {leader} leads, {took_s:g} s later")


def _cut(stage: Stage, name: str, pairs: list[Pair]) -> Iterator[None]:
    assert stage.network is not None
    heal = stage.network.cut(pairs)
    yield
    heal()
    _healed(stage, name)


def _healed(stage: Stage, name: str) -> None:
    stage.leader()
    stage.say(f"the links of {name} are whole")
