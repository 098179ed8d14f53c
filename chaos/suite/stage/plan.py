"""What a run will do, and when: the schedule, drawn from the seed before anything is started.

A schedule is a list of strikes in lanes. Strikes of one lane never overlap: the next waits until
the one before has healed. What takes nodes away, by death, sleep or silence, is in the lane
`nodes`. The kills of its leader that a mix promises are in the lane `leader`: these two take turns,
and no more nodes are away at a time than one strike takes, except that a strike at nodes that only
waits (for a node to fetch what it has lost, say) lends its turn: then the leader dies as well, and
is started again at once. What only hurts (clocks, slow links, dying consumers, floods) is in the
lane `around`, and meets whatever the others do.
"""

import dataclasses
import enum
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final


class Lane(enum.StrEnum):
    """Which strikes a strike waits for."""

    NODES = "nodes"
    LEADER = "leader"
    AROUND = "around"


class Need(enum.StrEnum):
    """What a machine has to allow for some nemeses."""

    NETWORK = "network"
    """Network namespaces, policy routes, a TUN device: root on most machines."""
    DISKS = "disks"
    """Loop mounts of ext4: root on most machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run was asked for; with the scenario's name and the seed, all that its schedule
    depends on."""

    nodes: int = 3
    minutes: float = 10.0
    workloads: tuple[str, ...] = ()
    """Names; empty: all there are."""
    rate_per_s: int = 200
    """Timers per second, all workloads together."""
    without: tuple[Need, ...] = ()
    """What the machine does not allow; no strike needs it."""
    plain: bool = False
    """Plain processes on loopback were asked for, whatever the machine allows."""

    @property
    def horizon_s(self) -> float:
        """How long strikes fall and clients produce."""
        return 60 * self.minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One nemesis at one time."""

    at_s: float
    """Since the first schedule; later if the lane is busy."""
    nemesis: str
    for_s: float = 0.0
    """Until it is undone."""
    lane: Lane = Lane.NODES
    args: Mapping[str, Any] = field(default_factory=dict)
    """What the nemesis is told: numbers and texts."""


QUIET_S: Final = 6.0
"""At a run's end nothing strikes: what was struck last has healed when the drain begins."""


class Draw:
    """Draws a scenario's strikes. Collects them in order of time."""

    def __init__(self, seed: int, options: RunOptions) -> None:
        self.random = random.Random(f"{seed} {options.nodes} {options.minutes} {options.without}")
        self.options = options
        self._strikes: list[Strike] = []

    @property
    def end_s(self) -> float:
        """No strike begins or lasts after this."""
        return self.options.horizon_s - QUIET_S

    def strike(
        self, at_s: float, nemesis: str, for_s: float, lane: Lane = Lane.NODES, **args: Any
    ) -> None:
        """Add a strike, unless it would not be over in time."""
        if at_s + for_s <= self.end_s:
            rounded = {"at_s": round(at_s, 2), "for_s": round(for_s, 2)}
            self._strikes.append(Strike(nemesis=nemesis, lane=lane, args=args, **rounded))

    def uniform(self, low: float, high: float) -> float:
        """Return a number in [low, high)."""
        return self.random.uniform(low, high)

    def strikes(self) -> list[Strike]:
        """Return all of them, the earliest first."""
        return sorted(self._strikes, key=lambda strike: strike.at_s)


_CLOCKS: Final = frozenset({"clock-jump", "clock-drift"})


def clock_error_ms(schedule: Iterable[Strike]) -> int:
    """Return how far the clients' clocks and the cluster's differ at most while this is played.

    Clients and nodes have one machine's clock, but for one node that a strike moves, which shifts
    no median. But while only two answer a new leader, one of them with a slow clock, it goes on
    from the last entry's time (docs/adr/0010-clock-median.md): it is late by as long as nobody led,
    and that is long where strikes take several nodes away, too.
    """
    kinds = {strike.nemesis for strike in schedule}
    if not kinds & _CLOCKS:
        return 1_000
    return 5_000 if kinds <= _CLOCKS else 30_000


def to_json(strikes: Iterable[Strike]) -> list[dict[str, Any]]:
    """Return a schedule as it stands in run.json."""
    return [dataclasses.asdict(strike) for strike in strikes]


def from_json(lines: Sequence[Mapping[str, Any]]) -> list[Strike]:
    """Return the schedule that `to_json` wrote."""
    return [Strike(**{**line, "lane": Lane(line["lane"])}) for line in lines]


def options_from_json(line: Mapping[str, Any]) -> RunOptions:
    """Return the options that stand in run.json; who did not say `plain` had nothing of a need."""
    without = tuple(map(Need, line["without"]))
    plain = {"plain": {*without} == {*Need}}
    told = {"workloads": tuple(line["workloads"]), "without": without}
    return RunOptions(**(plain | {**line} | told))
