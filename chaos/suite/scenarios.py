"""The scenarios: faults of a cluster, by name.

A scenario of one fault repeats this fault in all its variants. `mix` has the faults of all
scenarios, each variant once before any comes twice. In a mix, a kill of the leader is
planned every 9 seconds, in a lane of its own, so that one falls at least every 15. The run reports
the gaps between the kills, and fails if too many other strikes fall in one (STRIKES_APART_MAX).
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from chaos.suite.nemeses import NEMESES
from chaos.suite.nemeses.file_damage import CUT, FLIPPED, LOG, REMOVED, STATE
from chaos.suite.nemeses.nemesis import ALL
from chaos.suite.nemeses.voter_damage import RAFT
from chaos.suite.stage.disk_faults import Calls
from chaos.suite.stage.plan import QUIET_S, Lane, Need, RunOptions, Strike
from timer.files.data_directory import IDENTITY_NAME, PROMISE_NAME

FIRST_S: Final = 4.0
"""Clients produce for this long before the first strike."""
KILLS_S: Final = 9.0
KILL_JITTER_S: Final = 0.5
STRIKES_APART_MAX: Final = 8
"""A mix fails if more strikes than this fall between two kills of a leader.

Two are planned. Other strikes take turns with the kills, and give up their turn if they take long.
A kill is not counted if the victim did not report that it led. Strikes are counted instead of
seconds, because all of them come late on a slow machine."""
LONG_S: Final = (14.0, 18.0)
"""Length of strikes at clocks. A cluster that wrongly follows the moved clock, by half a second per
second, exceeds in this time the clock error that scenarios of clocks allow."""
BETWEEN_S: Final = 2.5
"""From a kill of the leader in a mix to the next strike at nodes."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One fault in one variant: a strike without its time."""

    model: Strike
    for_s: tuple[float, float]
    """Least and greatest length, in seconds."""

    def strike(self, at_s: float, chance: random.Random) -> Strike:
        """Return a strike at `at_s`, of a random length."""
        return replace(self.model, at_s=at_s, for_s=chance.uniform(*self.for_s))


def fault(
    nemesis: str, for_s: tuple[float, float] = (2.0, 4.0), lane: Lane = Lane.NODES, **args: Any
) -> list[Variant]:
    """Return variants whose strikes take nodes away.

    An argument may be a tuple of values: there is a variant for each combination of values.
    """
    each = [value if isinstance(value, tuple) else (value,) for value in args.values()]
    chosen = (dict(zip(args, values, strict=True)) for values in itertools.product(*each))
    return [Variant(Strike(at_s=0, nemesis=nemesis, lane=lane, args=of), for_s) for of in chosen]


def around(nemesis: str, for_s: tuple[float, float] = (4.0, 9.0), **args: Any) -> list[Variant]:
    """Return variants whose strikes leave all nodes up."""
    return fault(nemesis, for_s, Lane.AROUND, **args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Faults and the function that draws their schedule."""

    line: str
    """One line for the list of scenarios."""
    faults: Sequence[Variant]
    every_s: float = 9.0
    is_mixed: bool = False
    """Faults of several kinds coincide. Else one comes after the other."""
    complete: bool = False
    """True: the run waits for late strikes, and fails if one does not fall. False: strikes end when
    the clients stop producing."""

    @property
    def strikes_apart_max(self) -> int | None:
        """Most strikes between two kills of a leader. None: the scenario promises no kills."""
        return STRIKES_APART_MAX if self.is_mixed else None

    @property
    def needs(self) -> frozenset[Need]:
        """Needs that the machine has to meet, or the scenario is refused; none for a mix."""
        if self.is_mixed:
            return frozenset()
        return frozenset().union(*(NEMESES[each.model.nemesis].needs for each in self.faults))


def schedule(name: str, seed: int, options: RunOptions) -> list[Strike]:
    """Return the strikes with their times. Equal arguments give equal strikes on every machine."""
    chance = random.Random(f"{seed} {options.nodes} {options.minutes} {options.without}")
    scenario, end_s = SCENARIOS[name], options.horizon_s - QUIET_S
    allowed = _allowed(scenario.faults, options)
    if scenario.is_mixed:
        drawn = _mixed_strikes(allowed, end_s, chance)
    else:
        drawn = _strikes_in_turn(allowed, scenario.every_s, end_s, chance)
    fit = (each for each in drawn if each.at_s + each.for_s <= end_s)
    rounded = [replace(s, at_s=round(s.at_s, 2), for_s=round(s.for_s, 2)) for s in fit]
    return sorted(rounded, key=lambda strike: strike.at_s)


def _allowed(of: Sequence[Variant], options: RunOptions) -> list[Variant]:
    return [each for each in of if NEMESES[each.model.nemesis].needs.isdisjoint(options.without)]


def _shuffled(of: Sequence[Variant], chance: random.Random) -> Iterator[Variant]:
    """Yield all variants in a random order, again and again; none if there are none."""
    while of:
        yield from chance.sample(of, len(of))


def _strikes_in_turn(
    of: Sequence[Variant], every_s: float, end_s: float, chance: random.Random
) -> Iterator[Strike]:
    at_s = FIRST_S
    for each in _shuffled(of, chance):
        if at_s >= end_s:
            return
        yield each.strike(at_s, chance)
        at_s += every_s * chance.uniform(0.8, 1.2)


def _mixed_strikes(of: Sequence[Variant], end_s: float, chance: random.Random) -> Iterator[Strike]:
    nodes = _shuffled([each for each in of if each.model.lane is Lane.NODES], chance)
    rest = _shuffled([each for each in of if each.model.lane is Lane.AROUND], chance)
    [kill] = fault("kill", (0.2, 1.0), Lane.LEADER, who="leader")
    at_s = FIRST_S
    while at_s < end_s:
        kill_s = at_s + chance.uniform(0, KILL_JITTER_S)
        yield kill.strike(kill_s, chance)
        yield next(nodes).strike(kill_s + BETWEEN_S, chance)
        yield next(rest).strike(at_s + chance.uniform(0, KILLS_S / 2), chance)
        at_s += KILLS_S


def _of(line: str, *kinds: Sequence[Variant], every_s: float = 9.0) -> Scenario:
    return Scenario(line=line, faults=[*itertools.chain(*kinds)], every_s=every_s)


NEARLY: Final = 64 << 20
"""Bytes left on a disk: half of the reserve (`storage.reserve_bytes`) of the suite's nodes."""
_BOTH: Final = ("leader", "follower")
_PARTS: Final = (LOG, STATE)

_SINGLE: Final = {
    "kill-leader": _of("kill -9 of the leader, with timers pending", fault("kill", who="leader")),
    "kill-controller": _of("kill -9 of the controller", fault("kill", who="controller")),
    "kill-follower": _of("kill -9 of a follower", fault("kill", who="follower")),
    "kill-two": _of("kill -9 of two nodes together, the leader among them",
                    fault("kill-many", count=2), every_s=12),
    "kill-all": _of("kill -9 of all nodes together", fault("kill-many", count=7), every_s=14),
    "pause": _of("SIGSTOP of a node for longer than every lease, then SIGCONT",
                 fault("pause", who=_BOTH)),
    "rolling-restart": _of("SIGTERM to one node after the other",
                           fault("rolling-restart", (0, 0)), every_s=20),
    "transfer-storm": _of("the leadership is transferred again and again",
                          fault("transfers", (0, 0), times=5)),
    "isolate": _of("a node cut off from the others, or from the clients as well",
                   fault("isolate", who="leader", clients=(True, False)),
                   fault("isolate", who="follower", clients=True)),
    "one-way": _of("a node that can only receive, or only send",
                   fault("one-way", who=_BOTH, hears=(True, False))),
    "bridge": _of("halves that reach each other through one node only", fault("bridge", (3, 6))),
    "flapping": _of("links that are cut and healed in turn", fault("flap", (3, 6), who=_BOTH)),
    "slow-links": _of("long, lossy links of one node",
                      around("slow", who="leader", delay_ms=15, jitter_ms=10, loss=0.005),
                      around("slow", who="leader", delay_ms=100, jitter_ms=50, loss=0.01),
                      around("slow", who="follower", delay_ms=250, jitter_ms=100, loss=0.03)),
    "near-lease": _of("round trips between nodes take nearly a lease",
                      around("near-lease", share=(0.6, 0.75, 0.9))),
    "cut-clients": _of("clients can't reach the leader; the other nodes can",
                       fault("cut-clients", (3, 6), who="leader")),
    "clock-jump": _of("a node's wall clock jumps, and later back",
                      around("clock-jump", LONG_S, who="leader", offset_ms=(60_000, -60_000)),
                      around("clock-jump", who="follower", offset_ms=900), every_s=20),
    "clock-drift": _of("a node's wall clock runs fast or slow",
                       around("clock-drift", LONG_S, who="leader", drift_ppm=500_000),
                       around("clock-drift", LONG_S, who="any", drift_ppm=-500_000), every_s=20),
    "power-cut": _of("nodes die and lose all unsynced bytes",
                     fault("power-cut", who=("leader", "follower", ALL)), every_s=12),
    "kill-consumers": _of("consumers die while they lease messages",
                          around("kill-consumer", (0, 0)), every_s=4),
    "overload": _of("floods of requests, more than the cluster accepts",
                    around("flood", (0, 0), size_mb=128, has_to_be_refused=True), every_s=60),
    "truncated": _of("the end of a node's log, or of a file of its state, is gone",
                     fault("damage", (0, 0), who=_BOTH, part=_PARTS, how=CUT), every_s=20),
    "flipped": _of("one bit of a node's log, or of a file of its state, has changed",
                   fault("damage", (0, 0), who=_BOTH, part=_PARTS, how=FLIPPED), every_s=20),
    "removed": _of("the last segment of a node's log, or a file of its state, is gone",
                   fault("damage", (0, 0), who=_BOTH, part=_PARTS, how=REMOVED), every_s=20),
    "bad-sector": _of("reads of a file of a node's log or state fail with EIO",
                      fault("bad-sector", (0, 0), who=_BOTH, part=_PARTS), every_s=20),
    "slow-disk": _of("a sync of a node's disk takes most of a lease, or two leases",
                     around("slow-disk", (8, 12), who="leader", delay_ms=(300, 1000)),
                     around("slow-disk", (4, 9), who="follower", delay_ms=1000), every_s=14),
    "hanging-disk": _of("syncs of a node's disk do not return, or no call returns",
                        fault("hanging-disk", (3, 6), who="leader", calls=(Calls.SYNCS, Calls.ALL)),
                        fault("hanging-disk", (3, 6), who="follower", calls=Calls.ALL)),
    "disk-errors": _of("syncs or writes of a node's disk fail with EIO",
                       fault("disk-errors", who=_BOTH, calls=(Calls.SYNCS, Calls.WRITES))),
    "torn-write": _of("a node dies inside a write while another is down, and starts again",
                      fault("torn-write", who=_BOTH), every_s=12),
    "forgotten": _of("a node's promise or identity is damaged; a new replica replaces it",
                     fault("forget", (0, 0), who="leader", file=PROMISE_NAME, how=FLIPPED),
                     fault("forget", (0, 0), who="follower", file=PROMISE_NAME, how=REMOVED),
                     fault("forget", (0, 0), who="leader", file=IDENTITY_NAME, how=CUT),
                     fault("forget", (0, 0), who="follower", file=IDENTITY_NAME, how=FLIPPED),
                     fault("forget", (0, 0), who="leader", file=PROMISE_NAME, how=CUT, runs_on_s=5),
                     every_s=20),
    "hurt-leader": _of("a file of the leader is damaged while it leads",
                       fault("hurt-running", (0, 0), who="leader", part=_PARTS,
                             how=(FLIPPED, CUT, REMOVED)), every_s=20),
    "raft-files": _of("Raft files of a node are damaged or gone; the node creates new ones",
                      fault("hurt-raft", (0, 0), who="leader", file="raft/journal", how=FLIPPED),
                      fault("hurt-raft", (0, 0), who="leader", file=RAFT, how=REMOVED),
                      fault("hurt-raft", (0, 0), who="follower", file="raft/journal", how=REMOVED),
                      fault("hurt-raft", (0, 0), who="follower", file="raft/meta", how=FLIPPED),
                      fault("hurt-raft", (0, 0), who="leader", file="raft/meta", how=REMOVED),
                      fault("hurt-raft", (0, 0), who="follower", file="raft-member", how=FLIPPED),
                      fault("hurt-raft", (0, 0), who="leader", file="raft/snapshot", how=FLIPPED),
                      fault("hurt-raft", (0, 0), who="follower", file="raft/snapshot", how=REMOVED),
                      every_s=12),
    "raft-lost": _of("Raft files of all nodes are lost at once, while none runs",
                     fault("hurt-raft", (0, 0), who=ALL, file=RAFT, how=REMOVED),
                     fault("hurt-raft", (0, 0), who=ALL, file="raft/journal", how=FLIPPED),
                     every_s=45),
    "members": _of("voters are changed during a partition",
                   fault("remove-cut-off", who=_BOTH), fault("replace-cut-off"), every_s=20),
    "full-disk": _of("one disk is full or nearly full, or all disks",
                     fault("fill", who=_BOTH),
                     fault("fill", (4, 6), who=("leader", ALL), leave=NEARLY), every_s=14),
    "wiped": _of("a follower comes back with an empty disk", fault("wipe"), every_s=20),
}  # fmt: skip
_ALL: Final = [each for one in _SINGLE.values() for each in one.faults]
_BURST: Final = around("flood", (0, 0), size_mb=32)
"""Small enough for the disks during hours of mix, even if the cluster accepts all floods."""
_ELSEWHERE: Final = (*_SINGLE["kill-leader"].faults, *_SINGLE["overload"].faults)
_OTHERS: Final = [*(each for each in _ALL if each not in _ELSEWHERE), *_BURST]
SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    _SINGLE
    | {
        "demo": Scenario(
            line="kill-leader, and every planned kill has to happen: for `make demo`",
            faults=_SINGLE["kill-leader"].faults,
            complete=True,
        ),
        "mix": Scenario(
            line="all of these, and a kill of the leader planned every 9 s",
            faults=_OTHERS,
            is_mixed=True,
        ),
        "short": Scenario(
            line="the mix, without floods: for continuous integration",
            faults=[each for each in _OTHERS if each.model.nemesis != "flood"],
            is_mixed=True,
        ),
    }
)


def left_out_lines(name: str, options: RunOptions) -> list[str]:
    """Return a line that lists the faults that a run leaves out, or nothing."""
    scenario = SCENARIOS[name]
    allowed = _allowed(scenario.faults, options)
    missing = sorted({each.model.nemesis for each in scenario.faults if each not in allowed})
    return [f"not allowed here: {', '.join(missing)}"] if missing else []
