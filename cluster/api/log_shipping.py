"""Log entries of one node for a continuous backup (cluster/backup/log_shipper.py).

Only applied entries are read. They are committed, so every node returns the same ones. The node
keeps the log that the store lacks while a shipper asks, within `log_kept_bytes_max`. A shipper that
was away for longer finds its next entry missing, and begins with a new backup.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from timer.entries.entry_frame import frames
from timer.files.log import Log
from timer.model.timer_errors import (
    CorruptFileError,
    FileDamage,
    NotReadyError,
    UnknownVersionError,
)
from timer.model.units import Epoch, LogIndex, MonoMs, UnixMs
from timer.recovery.snapshot_source import PINNED_MS

READS_MAX: Final = 2
"""Reads of the log at the same time."""
ASKERS_MAX: Final = 16
"""Shippers that are remembered."""
CHUNK_SIZE: Final = 1 << 20
"""Bytes of one fetch, at most, except if one entry alone is larger."""


@dataclass(frozen=True, slots=True)
class ShippedEntries:
    """The entries after one index."""

    epoch: Epoch
    """Of the entry at that index; 0: the node has not applied it."""
    applied: tuple[LogIndex, Epoch]
    """The last entry that the node has applied."""
    frames: bytes
    """Whole frames; empty: there are none."""
    is_dropped: bool = False
    """The first of the entries is not in the log any more."""


@dataclass(slots=True)
class _Asker:
    stored: LogIndex
    request_ms: MonoMs
    moved_ms: UnixMs
    """When its store got further, or had all; of a new shipper: until when its store had all."""


class LogShipping:
    """Reads applied entries of one node's log. For the event loop."""

    def __init__(
        self,
        log: Log,
        *,
        applied: Callable[[], LogIndex],
        mono_ms: Callable[[], MonoMs],
        wall_ms: Callable[[], UnixMs],
        on_damage: Callable[[FileDamage], None],
    ) -> None:
        """`on_damage`: called with damage of the log, each time that a request meets it."""
        self._log, self._applied = log, applied
        self._mono_ms, self._wall_ms, self._damaged = mono_ms, wall_ms, on_damage
        self._askers: dict[int, _Asker] = {}
        """Shipper id -> its last request, the latest one last."""
        self._reads = asyncio.Semaphore(READS_MAX)
        """Reads share their threads with those of the replica."""

    async def fetch(
        self, after: LogIndex, stored: LogIndex = LogIndex(0), shipper_id: int = 0
    ) -> ShippedEntries:
        """Return the entries after one index, about CHUNK_SIZE of them.

        `stored`: the shipper's store has all entries up to this one; 0: unknown.

        Raises:
            NotReadyError: the log is damaged.
        """
        moved_ms = self._wall_ms()
        async with self._reads:
            try:
                found = await asyncio.to_thread(self._fetch, after)
                applied = found.applied[0]
                if 0 < stored < applied and shipper_id not in self._askers:
                    moved_ms = await asyncio.to_thread(self._had_all_ms, stored, moved_ms)
            except (CorruptFileError, UnknownVersionError) as error:
                self._damaged(error)
                raise NotReadyError(f"this node has damaged files: {error}") from error
        if 0 < stored <= applied:
            last = self._askers.pop(shipper_id, None)
            if last is not None and last.stored == stored < applied:
                moved_ms = last.moved_ms  # the store does not answer, as it seems
            self._note(shipper_id, _Asker(stored, self._mono_ms(), moved_ms))
        return found

    def _note(self, shipper_id: int, asker: _Asker) -> None:
        self._askers[shipper_id] = asker
        while len(self._askers) > ASKERS_MAX:
            del self._askers[next(iter(self._askers))]

    def _fetch(self, after: LogIndex) -> ShippedEntries:
        # A leader applies entries that its own log writes a moment later.
        last = min(self._applied(), self._log.last_index)
        last_epoch = self._log.epoch_at(last)
        assert last_epoch is not None, last  # the log keeps the entries after the manifest
        end = last, last_epoch
        if after > last:
            return ShippedEntries(Epoch(0), end, b"")
        epoch = self._log.epoch_at(after)
        found = self._log.read(LogIndex(after + 1), CHUNK_SIZE, last) if after < last else []
        if epoch is None or (after < last and not found):
            return ShippedEntries(Epoch(0), end, b"", is_dropped=True)
        return ShippedEntries(epoch, end, b"".join(found))

    def _had_all_ms(self, stored: LogIndex, now_ms: UnixMs) -> UnixMs:
        """Return the time of the first entry that a store lacks; if it is gone, of the first kept.

        At most `now_ms`: the entry has the cluster's time.
        """
        first = LogIndex(max(stored + 1, self._log.first_index))
        lacking = [each for frame in self._log.read(first, 1, first) for each in frames(frame)]
        return min([now_ms, *(entry.time_ms for entry in lacking)])

    def _present(self) -> list[_Asker]:
        """Return the shippers that asked within the last minute."""
        now_ms = self._mono_ms()
        return [each for each in self._askers.values() if now_ms - each.request_ms < PINNED_MS]

    @property
    def needed_from(self) -> LogIndex | None:
        """The first entry that a store lacks. None: no shipper has asked for a minute."""
        present = self._present()
        return LogIndex(min(each.stored for each in present) + 1) if present else None

    @property
    def stored_index(self) -> LogIndex:
        """The last entry that the stores have, of those that asked last; 0: unknown."""
        askers = self._present() or [*self._askers.values()][-1:]
        return min((each.stored for each in askers), default=LogIndex(0))

    @property
    def stored_ms(self) -> UnixMs:
        """When the last one of these stores got further, or had all; 0: none has asked."""
        askers = self._present() or [*self._askers.values()][-1:]
        return min((each.moved_ms for each in askers), default=UnixMs(0))
