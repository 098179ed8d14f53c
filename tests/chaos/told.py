"""The events of a running export, as they come."""

from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from chaos.live import exported_events
from chaos.live.exported_events import EventKind
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry

Row = dict[str, Any]


class EventFiles:
    """The event files of a folder, which may come later; each is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        self._read: set[Path] = set()
        self._rows: dict[int, list[Row]] = defaultdict(list)

    def of(self, kind: EventKind) -> list[Row]:
        """Return the rows of one kind so far."""
        for path in sorted({*self.folder.glob("*.parquet")} - self._read):
            for row in pq.read_table(path, schema=exported_events.ARROW).to_pylist():
                self._rows[row["kind"]].append(row)
            self._read.add(path)
        return self._rows[int(kind)]

    def seqs(self) -> set[int]:
        """Return the seqs of the messages that the witness received."""
        return {row["seq"] for row in self.of(EventKind.GIVEN)}

    def clock_ms(self) -> int:
        """Return the time of the last exported entry; 0: there is none."""
        entries = self.of(EventKind.ENTRY)
        if not entries:
            return 0
        last = entry_frame.frame_at(memoryview(max(entries, key=_index)["frame"]), 0)
        assert isinstance(last, Entry)
        return last.time_ms


def _index(row: Row) -> int:
    index: int = row["index"]
    return index
