"""The roll forward of a restore: the state of a backup, and the log after it, to a later index.

    state of the backup --> engine --entries of the log, in order--> state at the wished point

The engine is that of a node (timer/recovery/engine.py), so the state is the one that the nodes had
at that index. It is written as a manifest in the same directory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.backup.log_parts import LogPart
from timer.entries.entry_frame import Entry
from timer.files.disk import Disk
from timer.leader.leader import LeaderConfig
from timer.model.units import LogIndex, UnixMs
from timer.recovery.engine import Engine

FLUSH_BYTES: Final = 64 << 20
"""New rows and messages in memory that are written to files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """The last entry of a roll forward. None: the last one that there is."""

    index: LogIndex | None = None
    time_ms: UnixMs | None = None
    """On the cluster's clock. Entries of this time are included."""

    def includes(self, index: int, time_ms: int) -> bool:
        """Return whether the entry `index`, of this time, is part of the wished state."""
        if self.index is not None:
            return index <= self.index
        return self.time_ms is None or time_ms <= self.time_ms

    def is_reached(self, part: LogPart) -> bool:
        """Return whether no entry after a part of the log is in the wished state."""
        if self.index is not None:
            return part.last >= self.index
        return self.time_ms is not None and part.time_ms > self.time_ms


def roll_forward(disk: Disk, directory: Path, log: Iterable[list[Entry]], until: Until) -> bool:
    """Apply the entries of `log`, which follow the manifest in `directory`.

    Return whether the wished point was reached. False: the log ended before it.

    Raises:
        BackupError, StoreUnavailable: from `log`.
        EngineError: a file of the state is damaged, or the disk failed.
    """
    engine = Engine(disk, directory, LeaderConfig())
    reached = engine.machine.applied_index == until.index
    for entries in () if reached else log:
        wished = [entry for entry in entries if until.includes(entry.index, entry.time_ms)]
        _apply(engine, wished)
        reached = len(wished) < len(entries) or engine.machine.applied_index == until.index
        if reached:
            break
        if engine.unflushed_bytes >= FLUSH_BYTES:
            _flush(engine)
    _flush(engine)
    return reached


def _apply(engine: Engine, entries: list[Entry]) -> None:
    if entries:
        engine.raise_commit_index(entries[-1].index)
    while entries:
        prefetch = engine.begin_prefetch(entries)
        if prefetch is not None:
            prefetch.read()
            engine.use_prefetch(prefetch)
        entries = entries[engine.fold(entries) :]
    while engine.keep_up():
        pass


def _flush(engine: Engine) -> None:
    flush = engine.begin_flush()
    if flush is None:  # no entry was applied since the last one
        return
    flush.write()
    engine.end_flush(flush)
    store = engine.machine.store
    while (merge := engine.begin_merge()) is not None:
        store.install_merge(merge, store.write_merge(merge))
