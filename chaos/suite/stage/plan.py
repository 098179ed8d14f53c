"""The schedule of a run, drawn from the seed before any process starts.

A schedule is a list of strikes in lanes. Strikes of one lane never overlap: each waits until the
one before has healed.

    nodes     strikes that take nodes away: kills, stops, partitions
    leader    the kills of the leader that a mix promises
    around    strikes that leave all nodes up: clocks, slow links, dying consumers, floods

The lanes `nodes` and `leader` take turns, so only one strike takes nodes away at a time. There is
one exception. A strike at nodes that only waits, for example until a node has fetched its lost
files, lends its turn. Then the leader is killed as well, and started again at once. Strikes of the
lane `around` take no turns and coincide with all others.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final


class Lane(enum.StrEnum):
    """The lane of a strike; see the module."""

    NODES = "nodes"
    LEADER = "leader"
    AROUND = "around"


class Need(enum.StrEnum):
    """A privilege that some nemeses need from the machine."""

    NETWORK = "network"
    """Network namespaces, policy routes, a TUN device: root on most machines."""
    DISKS = "disks"
    """Loop mounts of ext4: root on most machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run. The schedule depends on them, the scenario and the seed only."""

    nodes: int = 3
    minutes: float = 10.0
    """For which strikes fall and clients produce."""
    workloads: tuple[str, ...] = ()
    """Names; empty: all."""
    rate_per_s: int = 200
    """Timers per second, all workloads together."""
    without: tuple[Need, ...] = ()
    """Needs that the machine does not meet. No strike of the schedule has them."""
    plain: bool = False
    """Plain processes on loopback were requested, even if the machine allows more."""

    @property
    def horizon_s(self) -> float:
        """Time in which strikes fall and clients produce."""
        return 60 * self.minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One nemesis at one time."""

    at_s: float
    """Planned start, since the clients started. The strike starts later if its lane is busy."""
    nemesis: str
    """Its name in NEMESES."""
    for_s: float = 0.0
    """From the fault to its undo."""
    lane: Lane = Lane.NODES
    args: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the nemesis: numbers and texts."""


QUIET_S: Final = 6.0
"""No strike is planned at the end of a run, so that the last one has healed before the drain."""

_CLOCKS: Final = frozenset({"clock-jump", "clock-drift"})


def clock_error_ms(schedule: Iterable[Strike]) -> int:
    """Return the bound on the difference between the clients' clocks and the cluster's, in ms.

    Clients and nodes share the clock of one machine. A strike moves the clock of one node, and that
    does not shift the median of all. A new leader may get answers from two nodes only, one of them
    with a slow clock. Then its clock continues from the last entry's time
    (docs/adr/0010-clock-median.md), so it is late by the time without a leader. This time is long
    if other strikes take several nodes away, so the bound is higher in a mix.
    """
    kinds = {strike.nemesis for strike in schedule}
    if not kinds & _CLOCKS:
        return 1_000
    return 5_000 if kinds <= _CLOCKS else 30_000
