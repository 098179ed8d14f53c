"""Dead letters and their redrives, from the log; a part of the book.

A plain model, independent of timer/leader/groups/dead_letters.py: per topic of dead letters, the
message at each offset and its origin. A redrive takes a letter once, and fires it in its original
topic with the same payload.
"""

from dataclasses import dataclass, field

from chaos.sim.checks.keybook import TimerName
from chaos.sim.world.referee import Broken
from timer.model.columns import decode_schedule
from timer.state.apply_results import MoveApplied
from timer.state.machine import Machine


@dataclass(slots=True)
class LetterBook:
    """See the module. Its methods raise Broken."""

    letters: dict[int, dict[int, tuple[str, bytes]]] = field(default_factory=dict)
    """Topic id of dead letters -> offset -> (original topic, payload) of its letters."""
    ends: dict[int, int] = field(default_factory=dict)
    """Topic id of dead letters -> the number of letters that came there."""
    home: dict[TimerName, bytes] = field(default_factory=dict)
    """Redriven timer -> its payload."""
    checked: int = 0
    """The last entry that was checked."""

    def buried(self, moved: MoveApplied, source: str) -> None:
        """Note messages of a topic that became dead letters."""
        there = self.letters.setdefault(moved.to, {})
        for _, _, payload in _arrivals(moved):
            end = self.ends.get(moved.to, 0)
            there[end] = source, payload
            self.ends[moved.to] = end + 1

    def redriven(self, machine: Machine, moved: MoveApplied, fired: set[TimerName]) -> None:
        """Check redriven letters. `fired`: the names of all fired timers."""
        there, to = self.letters.get(moved.op.topic, {}), machine.topics[moved.to].name
        for offset, name, payload in _arrivals(moved):
            letter = there.pop(offset, None)
            what = f"{offset} of topic {moved.op.topic}, {letter}, is {name} of {to}: {payload!r}"
            if letter != (to, payload):
                raise Broken("redrive", what)
            if name not in fired:
                raise Broken("lost", f"{what}, and never fired")
            self.home[name] = payload


def _arrivals(moved: MoveApplied) -> list[tuple[int, TimerName, bytes]]:
    """Return (old offset, new name, payload) of each moved message."""
    rows, out = decode_schedule(memoryview(moved.op.rows)).rows, []
    for at, (row, offset) in enumerate(zip(rows, moved.op.offsets.tolist(), strict=True)):
        start, size = int(row["payload_start"]), int(row["payload_size"])
        if moved.new[at]:
            name = TimerName(int(row["due_ms"]), moved.first_seq + at)
            out.append((offset, name, bytes(moved.op.rows[start : start + size])))
    return out
