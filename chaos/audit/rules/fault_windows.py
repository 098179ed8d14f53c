"""The fault timeline: the faults of a run, as windows from strike to heal.

These lines of faults.jsonl are read. Other fields, and other events, are ignored:

    {"event": "strike", "at_ms": …, "strike": 7, "nemesis": "partition"}      begins
    {"event": "healed", "at_ms": …, "strike": 7}                              ends
    {"event": "fizzled", "at_ms": …, "strike": 7}                             had no effect
    {"event": "kill",    "at_ms": …, "node": "n1", "role": "leader", "epoch": 3}
    {"event": "restart", "at_ms": …, "node": "n1"}
    {"event": "pause",   …}, {"event": "resume", …}                           likewise

A kill or a pause within an open strike belongs to the strike, and gives the strike its node. Any
other kill or pause is a fault of its own, which ends with the restart or resume of its node. A
fault that does not end in the timeline lasts to the run's end. A strike that fizzled is no fault; a
kill or a pause within it is a fault of its own.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Final

_ENDS: Final = {"restart": "kill", "resume": "pause"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: it lasts for [start_ms, heal_ms), and then its recovery begins. Unix ms."""

    number: int
    kind: str
    node: str | None
    role: str | None
    start_ms: int
    heal_ms: int
    recovered_ms: int
    """When both schedules were answered and timers fired again. `windows` sets it to heal_ms. The
    run's end if the cluster did not recover."""
    recovered: bool = True
    """Whether the cluster recovered."""

    @property
    def label(self) -> str:
        """The fault's name in the report: kind, role and node."""
        return " ".join(filter(None, (self.kind, self.role, self.node)))


def windows(lines: Iterable[dict[str, Any]], until_ms: int) -> list[Fault]:
    """Return the faults of a timeline, in order of their strikes. `until_ms`: the run's end."""
    found: list[Fault] = []
    strikes: dict[Any, int] = {}  # open strikes: number -> place in `found`
    alone: dict[tuple[str, str | None], int] = {}  # open kills and pauses: (event, node) -> place
    lines = sorted(lines, key=lambda line: int(line["at_ms"]))
    fizzled = {line.get("strike") for line in lines if line["event"] == "fizzled"}
    for line in lines:
        event, at_ms, strike = line["event"], int(line["at_ms"]), line.get("strike")
        if event == "strike" and strike in fizzled:
            continue
        node, role = _text(line.get("node")), _text(line.get("role"))
        if event in ("kill", "pause") and strike in strikes:
            at = strikes[strike]
            if found[at].node is None:
                found[at] = replace(found[at], node=node, role=role)
        elif event in ("strike", "kill", "pause"):
            kind = str(line.get("nemesis") or event)
            if event == "strike":
                strikes[strike] = len(found)
            else:
                alone[event, node] = len(found)
            found.append(Fault(len(found), kind, node, role, at_ms, until_ms, until_ms))
        else:
            ended = (
                strikes.pop(strike, None)
                if event == "healed"
                else alone.pop((_ENDS.get(event, ""), node), None)
            )
            if ended is not None:
                found[ended] = replace(found[ended], heal_ms=at_ms, recovered_ms=at_ms)
    return found


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return ",".join(map(str, value)) if isinstance(value, list) else json.dumps(value)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the run, [start_ms, end_ms), in one phase."""

    name: str
    """fault or recovery. Times outside all phases are steady."""
    start_ms: int
    end_ms: int


def phases(faults: Sequence[Fault]) -> list[Phase]:
    """Return disjoint phases, in order. A time in a fault and a recovery belongs to the fault."""
    times = ((each.start_ms, each.heal_ms, each.recovered_ms) for each in faults)
    edges = sorted({*chain.from_iterable(times)})
    found: list[Phase] = []
    for start, end in pairwise(edges):
        if any(f.start_ms <= start < f.heal_ms for f in faults):
            name = "fault"
        elif any(f.heal_ms <= start < f.recovered_ms for f in faults):
            name = "recovery"
        else:
            continue
        if found and found[-1].name == name and found[-1].end_ms == start:
            found[-1] = replace(found[-1], end_ms=end)
        else:
            found.append(Phase(name, start, end))
    return found
