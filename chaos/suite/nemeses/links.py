"""Nemeses of links: cut, one way, in halves, flapping, slow. They need a network of the run's."""

import itertools
import random
import threading
import time
from dataclasses import dataclass
from typing import ClassVar, Final

from chaos.suite.nemeses.nemesis import NETWORK, Aside, Fizzled, Undo, chosen, remaining, said
from chaos.suite.stage.network import CLIENTS, Pair
from chaos.suite.stage.stage import Stage

RECOVERS_S: Final = 30.0
"""A leader is there within this after long round trips: a second or two on an idle machine. The
kill of another strike may fall into it."""


def both(a: str, b: str) -> list[Pair]:
    """Return both directions of a link."""
    return [(a, b), (b, a)]


@dataclass(frozen=True, slots=True)
class Isolate:
    """Cut a node off from the others, or from the clients, too."""

    needs: ClassVar = NETWORK
    who: str = "leader"
    clients: bool = True
    """Whether clients can't reach it either."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Cut it off."""
        name = chosen(stage, self.who, chance)
        others = [end for end in stage.names + [CLIENTS] * self.clients if end != name]
        seen = "" if self.clients else ", but not from the clients"
        stage.say(f"cut off {said(stage, name, self.who)}{seen}")
        return _healing(stage, name, [pair for end in others for pair in both(name, end)])


@dataclass(frozen=True, slots=True)
class CutClients:
    """Clients can't reach a node, nor it them; the nodes see each other."""

    needs: ClassVar = NETWORK
    who: str = "leader"

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Cut its links to the clients."""
        name = chosen(stage, self.who, chance)
        stage.say(f"clients can't reach {said(stage, name, self.who)}; the other nodes can")
        return _healing(stage, name, both(name, CLIENTS))


@dataclass(frozen=True, slots=True)
class OneWay:
    """A node hears nobody, or is heard by nobody."""

    needs: ClassVar = NETWORK
    who: str = "leader"
    hears: bool = True
    """Whether it hears the others, who don't hear it; or the other way round."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Cut one direction of each link."""
        name = chosen(stage, self.who, chance)
        others = [other for other in stage.names if other != name]
        how = "is not heard" if self.hears else "hears nobody"
        stage.say(f"{said(stage, name, self.who)} {how}")
        pairs = [(name, other) if self.hears else (other, name) for other in others]
        return _healing(stage, name, pairs)


@dataclass(frozen=True, slots=True)
class Bridge:
    """Two halves that see each other only through one node, which sees all."""

    needs: ClassVar = NETWORK

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Cut the halves apart; the leader is in one of them."""
        leader = chosen(stage, "leader", chance)
        bridge = chosen(stage, "follower", chance)
        rest = [name for name in remaining(stage) if name not in (leader, bridge)]
        if not rest:
            raise Fizzled(f"only {leader} and {bridge} are left: there are no halves")
        chance.shuffle(rest)
        half = len(rest) // 2
        left, right = [leader, *rest[:half]], rest[half:]
        stage.say(f"{' '.join(left)} and {' '.join(right)} see each other through {bridge} only")
        pairs = [pair for a in left for b in right for pair in both(a, b)]
        return _healing(stage, bridge, pairs)


@dataclass(frozen=True, slots=True)
class Flap:
    """A node's links to the others come and go."""

    needs: ClassVar = NETWORK
    who: str = "leader"
    period_s: float = 0.6

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Let them, until it is undone."""
        name = chosen(stage, self.who, chance)
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

        flapping = Aside("flap", flap)

        def undo() -> None:
            over.set()
            flapping.check()
            _healed(stage, name)

        return undo


@dataclass(frozen=True, slots=True)
class Slow:
    """A node's links are long and lossy, clients' ones included."""

    needs: ClassVar = NETWORK
    who: str = "any"
    delay_ms: int = 50
    jitter_ms: int = 20
    loss: float = 0.01

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Slow them down, in both directions."""
        name = chosen(stage, self.who, chance)
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

        def undo() -> None:
            heal()
            stage.say(f"links of {name}: fast again")

        return undo


@dataclass(frozen=True, slots=True)
class NearLease:
    """Round trips between nodes take nearly a lease. Clients' links stay as they are.

    The cluster may lose its leader again and again. Once links are fast it has one within
    RECOVERS_S.
    """

    needs: ClassVar = NETWORK
    share: float = 0.75
    """Of a lease: what a round trip takes at least."""
    jitter: float = 0.1
    """Of a lease: how much longer it may take."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Slow down all links between nodes."""
        del chance
        assert stage.network is not None
        pairs = [*itertools.permutations(stage.names, 2)]
        each_ms = stage.lease_ms / 2
        heal = stage.network.slow(
            pairs, delay_ms=int(self.share * each_ms), jitter_ms=int(self.jitter * each_ms)
        )
        stage.say(f"a round trip between nodes takes {100 * self.share:g} % of a lease")

        def undo() -> None:
            heal()
            began_s = time.monotonic()
            leader = stage.cluster.wait_for_leader(RECOVERS_S)
            took_s = round(time.monotonic() - began_s, 2)
            stage.record("recovered", leader=leader, took_s=took_s)
            stage.say(f"round trips are short again; {leader} leads, {took_s:g} s later")

        return undo


def _healing(stage: Stage, name: str, pairs: list[Pair]) -> Undo:
    assert stage.network is not None
    heal = stage.network.cut(pairs)

    def undo() -> None:
        heal()
        _healed(stage, name)

    return undo


def _healed(stage: Stage, name: str) -> None:
    stage.leader()
    stage.say(f"the links of {name} are whole")
