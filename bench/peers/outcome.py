"""The outcome of a contest, as a JSON file.

    {"format": 1, "utc": ..., "commit": ..., "form": "short", "machine": {...},
     "versions": {"ours": ..., "redis": ...}, "left_out": {"rocketmq": "mvn is needed"},
     "turns": [{"peer": "ours", "figures": {"single_p50_ms": ...}, "samples": {...}, "errors": []},
               {"peer": "redis", ...}]}

The turns stand in the order in which they were taken. A peer's ratio is to our turns of the same
file.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Self

from bench import bench_results
from bench.bench_results import ResultHead
from bench.peers.contest import PeerResult
from bench.peers.contestants import OURS

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class PeerTurn:
    """One turn of one peer."""

    peer: str
    result: PeerResult


@dataclass(slots=True, kw_only=True)
class ContestOutcome:
    """The turns of one invocation."""

    head: ResultHead
    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Peer -> reason why it could not be installed."""
    turns: list[PeerTurn] = field(default_factory=list)

    def values(self, peer: str, figure: str) -> list[float]:
        """Return a figure of each turn of a peer that has it."""
        return [
            turn.result.figures[figure]
            for turn in self.turns
            if turn.peer == peer and figure in turn.result.figures
        ]

    def ratio(
        self, peer: str, figure: str, of_turns: Callable[[Sequence[float]], float]
    ) -> float | None:
        """Return a peer's figure over ours. None: one of them is missing, or ours is 0."""
        own, other = self.values(OURS, figure), self.values(peer, figure)
        return of_turns(other) / of_turns(own) if own and other and of_turns(own) else None

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        content = {"format": FORMAT, **asdict(self.head)}
        content |= {"versions": self.versions, "left_out": self.left_out}
        turns = [{"peer": turn.peer, **asdict(turn.result)} for turn in self.turns]
        bench_results.write(path, content | {"turns": turns})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` has written.

        Raises:
            ValueError: it has another format.
        """
        content = json.loads(path.read_text())
        if content.pop("format") != FORMAT:
            raise ValueError(f"{path} has another format")
        turns = [PeerTurn(each.pop("peer"), PeerResult(**each)) for each in content.pop("turns")]
        of_peers = {name: content.pop(name) for name in ("versions", "left_out")}
        return cls(head=ResultHead(**content), **of_peers, turns=turns)
