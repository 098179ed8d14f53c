"""The log between the backups of a store: parts of consecutive entries, format version 1.

    log/CLUSTER/FIRST-LAST-BEFORE-EPOCH-TIME-SIZE.zst

    CLUSTER         of the cluster's id: 16 hex digits of its SHA-256
    FIRST, LAST     indexes of the first and the last entry, 20 digits
    BEFORE, EPOCH   epochs of entry FIRST - 1 and of entry LAST
    TIME            Unix ms of entry LAST, on the cluster's clock
    SIZE            bytes of the frames
    content         the frames as in the log (timer/entries/entry_frame.py), compressed by zstd

Parts may overlap: two shippers may have run, or one that began again. Two logs with an entry of the
same index and epoch have the same entries up to it. So a part continues a state at (index, epoch)
if it has an entry of that index and epoch, or BEFORE is that epoch. A restored cluster has the
cluster's id and epochs that no other restore has. So its log may continue in the store of the old
cluster. Where two logs leave the same state, the one with the latest entry is read.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cluster.backup.backup_store import BackupError, BackupStore
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry
from timer.model.units import Epoch, LogIndex, UnixMs

LOG: Final = "log"
_NAME: Final = re.compile(r".*/(\d{20})-(\d{20})-(\d+)-(\d+)-(\d+)-(\d+)\.zst")


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The last entry of a state, or of a log."""

    index: LogIndex
    epoch: Epoch


@dataclass(frozen=True, slots=True, order=True)
class LogPart:
    """One part. See the module."""

    first: LogIndex
    last: LogIndex
    before: Epoch
    epoch: Epoch
    time_ms: UnixMs
    size: int

    @property
    def name(self) -> str:
        """Of the file, in its folder."""
        ends = f"{self.first:020d}-{self.last:020d}-{self.before}-{self.epoch}"
        return f"{ends}-{self.time_ms}-{self.size}.zst"

    @property
    def end(self) -> LogEnd:
        """The last entry."""
        return LogEnd(self.last, self.epoch)

    def follows(self, end: LogEnd) -> bool:
        """Return whether the first entry is the one after `end`."""
        return self.first == end.index + 1 and self.before == end.epoch

    def may_have(self, end: LogEnd) -> bool:
        """Return whether the entry `end` may be in this part, before the last one."""
        return self.first <= end.index < self.last and self.before <= end.epoch <= self.epoch


def folder_of(cluster_id: str) -> str:
    """Return the folder of a cluster's parts in a store."""
    return f"{LOG}/{hashlib.sha256(cluster_id.encode()).hexdigest()[:16]}"


def write_part(store: BackupStore, folder: str, end: LogEnd, last: Entry, frames: bytes) -> LogPart:
    """Write whole, checked frames as one part: the entries after `end`, up to `last`.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    import pyarrow

    first = LogIndex(end.index + 1)
    part = LogPart(first, last.index, end.epoch, last.epoch, last.time_ms, len(frames))
    data = pyarrow.compress(frames, "zstd", asbytes=True)
    store.put(f"{folder}/{part.name}", [data], len(data))
    return part


def read_part(store: BackupStore, folder: str, part: LogPart) -> list[Entry]:
    """Return all entries of a part, checked.

    Raises:
        BackupError: the part is missing or damaged.
        StoreUnavailable: the store does not answer.
    """
    import pyarrow

    name = f"{folder}/{part.name}"
    where = f"{store.root}: {name}"
    try:
        data = b"".join(store.read(name))
        frames = pyarrow.decompress(data, part.size, "zstd", asbytes=True)
    except (OSError, ValueError) as error:
        raise BackupError(f"{where} is damaged: {error}") from None
    entries = entries_after(LogEnd(LogIndex(part.first - 1), part.before), frames, where)
    if LogEnd(entries[-1].index, entries[-1].epoch) != part.end:
        raise BackupError(f"{where} is damaged: it ends with entry {entries[-1].index}")
    return entries


def entries_after(end: LogEnd, frames: bytes, where: str) -> list[Entry]:
    """Return the entries of frames that follow `end`. `where`: place of the frames, for errors.

    Raises:
        BackupError: they don't, a frame is damaged, or there is none.
    """
    data, position = memoryview(frames), 0
    found: list[Entry] = []
    while (entry := entry_frame.frame_at(data, position)) is not None:
        if isinstance(entry, entry_frame.Damage):
            raise BackupError(f"{where}, byte {entry.position}: {entry.why}")
        if entry.index != end.index + 1 or entry.epoch < end.epoch:
            entry_text = f"entry {entry.index} of epoch {entry.epoch} does not follow"
            raise BackupError(f"{where}: {entry_text} entry {end.index} of epoch {end.epoch}")
        end = LogEnd(entry.index, entry.epoch)
        position += entry_frame.HEADER_SIZE + len(entry.payload)
        found.append(entry)
    if not found:
        raise BackupError(f"{where} has no entry")
    return found


class StoredLog:
    """The parts of one cluster in a store, at one moment."""

    def __init__(self, store: BackupStore, cluster_id: str) -> None:
        """List the parts.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        self._store = store
        self.folder: Final = folder_of(cluster_id)
        matches = filter(None, map(_NAME.fullmatch, store.sizes(self.folder)))
        found = (_part(*map(int, match.groups())) for match in matches)
        self.parts = sorted(part for part in found if part.first <= part.last)
        """By first index."""
        self._by_first: defaultdict[int, list[LogPart]] = defaultdict(list)
        for part in self.parts:
            self._by_first[part.first].append(part)
        self._reaches: dict[LogEnd, LogPart | None] = {}
        """Answers of `reach`: the logs after most backups end alike."""

    def read(self, part: LogPart) -> list[Entry]:
        """Return all entries of a part; see `read_part`."""
        return read_part(self._store, self.folder, part)

    def after(self, end: LogEnd) -> Iterator[list[Entry]]:
        """Yield the entries after one entry, part by part, up to the first gap.

        Raises:
            BackupError: a part is damaged, and no other one has its entries.
            StoreUnavailable: the store does not answer.
        """
        while candidates := self._candidates(end):
            entries = self._read_one(candidates)
            yield [entry for entry in entries if entry.index > end.index]
            end = LogEnd(entries[-1].index, entries[-1].epoch)

    def _read_one(self, parts: list[LogPart]) -> list[Entry]:
        """Return the entries of the first part that is sound."""
        for part in parts[:-1]:
            with suppress(BackupError):
                return self.read(part)
        return self.read(parts[-1])

    def _candidates(self, end: LogEnd) -> list[LogPart]:
        """Return the parts with the entry after `end`; first that with the latest entry."""
        found = [part for part in self._by_first.get(end.index + 1, []) if part.follows(end)]
        if not found:  # rare: after the index of a backup, and where two shippers have run
            found = [part for part in self.parts if part.may_have(end) and self._has(part, end)]
        return sorted(found, key=lambda part: (-part.time_ms, -part.last))

    def _has(self, part: LogPart, end: LogEnd) -> bool:
        """Return whether an entry is in a part. It is, as far as is known, in a damaged one."""
        try:
            return self.read(part)[end.index - part.first].epoch == end.epoch
        except BackupError:
            return True

    def reach(self, end: LogEnd) -> LogPart | None:
        """Return the last part that `after` would read; None: the log has no entry after `end`.

        Only names are read, except if `end` is within a part.
        """
        path: list[LogEnd] = []
        last, at = None, end
        while at not in self._reaches and (candidates := self._candidates(at)):
            path.append(at)
            last, at = candidates[0], candidates[0].end
        last = self._reaches.get(at) or last
        self._reaches |= dict.fromkeys(path, last)
        return last

    def plan(self, end: LogEnd) -> list[LogPart]:
        """Return the parts that `after` would read; see `reach`."""
        found: list[LogPart] = []
        while candidates := self._candidates(found[-1].end if found else end):
            found.append(candidates[0])
        return found

    def behind_gap(self, end: LogEnd, time_ms: UnixMs) -> LogPart | None:
        """Return the first part after a gap that follows `end`, an entry of `time_ms`.

        None: there is no later part. Parts that a dead cluster left are older.
        """
        beyond = (
            part
            for part in self.parts
            if part.first > end.index + 1 and (part.time_ms, part.epoch) >= (time_ms, end.epoch)
        )
        return next(beyond, None)


def _part(*fields: int) -> LogPart:
    first, last, before, epoch, time_ms, size = fields
    ends = LogIndex(first), LogIndex(last), Epoch(before), Epoch(epoch)
    return LogPart(*ends, UnixMs(time_ms), size)
