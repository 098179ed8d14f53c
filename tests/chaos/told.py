"""Read the event files that a run under way has exported so far."""

from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from chaos.live import exported_events
from chaos.live.exported_events import EventKind

Row = dict[str, Any]


class EventFiles:
    """The event files of a folder. The folder may be created later; each file is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        self._read: set[Path] = set()
        self._rows: dict[int, list[Row]] = defaultdict(list)

    def of(self, kind: EventKind) -> list[Row]:
        """Return the rows of one kind, from all files so far."""
        for path in sorted({*self.folder.glob("*.parquet")} - self._read):
            for row in pq.read_table(path, schema=exported_events.ARROW).to_pylist():
                self._rows[row["kind"]].append(row)
            self._read.add(path)
        return self._rows[int(kind)]

    def seqs(self, *kinds: EventKind) -> set[int]:
        """Return the seqs of the rows of these kinds."""
        return {row["seq"] for kind in kinds for row in self.of(kind)}

    def clock_ms(self) -> int:
        """Return the latest exported time of the log in Unix milliseconds. 0: there is none."""
        return max((row["at_ms"] for row in self.of(EventKind.CLOCK)), default=0)
