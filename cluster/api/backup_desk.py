"""Open backups of one node: its state at one index, pinned while a client fetches the files.

    Open    waits for an index, writes a manifest, pins it with its files (hard links)
    Fetch   returns bytes of one file, at the rate of storage.snapshot_bytes_per_s
    Close   unpins it; so do a minute without a fetch, and the next start of the node

Each backup has a directory of its own, so several clients don't share one. A pinned file that a
merge has replaced still uses room on the disk. So their number is bounded, and a node with little
room opens none. The log is not pinned: a restored cluster begins a new one after the index.

Damage of the node's files goes to its scrubber, which ends the process only if the other nodes can
go on without it. The client calls again meanwhile.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.api.log_shipping import LogShipping
from cluster.state.host import Host
from replication.shell.send_rate import SendRate
from timer.files.disk import Disk
from timer.model.timer_errors import (
    CorruptFileError,
    FileDamage,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    UnknownVersionError,
)
from timer.model.units import LogIndex, MonoMs, ReplicaId, UnixMs
from timer.recovery.snapshot import Snapshot, SnapshotPart, remove_files
from timer.recovery.snapshot_source import PINNED_MS, pin

OPEN_MAX: Final = 4
"""Backups that may be open on one node."""
CHUNK_SIZE: Final = 1 << 20
"""Bytes of one fetch, at most."""
WAIT_MS: Final = 60_000
"""Longest time until the node has the index in a manifest."""
POLL_S: Final = 0.05
SWEEP_S: Final = 5.0


@dataclass(eq=False, slots=True)
class _OpenBackup:
    directory: Path
    pinning: "asyncio.Task[Snapshot]"
    used_ms: MonoMs
    parts: dict[str, SnapshotPart]
    """Path -> part. Empty until the files are pinned."""


class BackupDesk:
    """Opens, reads and closes the backups of one node. For the event loop."""

    def __init__(  # noqa: PLR0913 - dependencies on the node
        self,
        disk: Disk,
        state: Path,
        directory: Path,
        host: Host,
        *,
        log: LogShipping,
        replica_id: ReplicaId,
        bytes_per_s: int,
        mono_ms: Callable[[], MonoMs],
        wall_ms: Callable[[], UnixMs],
        on_damage: Callable[[FileDamage], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """Remove the files that an earlier process pinned in `directory`.

        `bytes_per_s`: maximum rate of all fetches. `on_damage`: called with damage of this node's
        own files, each time that a request meets it. `fatal`: called with any other error.
        """
        self.log: Final = log
        """The log after the backups."""
        self.replica_id: Final = replica_id
        self.completed_ms = UnixMs(0)
        """When the last complete backup ended, since the start; 0: none did."""
        self._disk, self._state, self._host = disk, state, host
        self._mono_ms, self._wall_ms = mono_ms, wall_ms
        self._damaged, self._fatal = on_damage, fatal
        self._pace = SendRate(bytes_per_s)
        self._open: dict[int, _OpenBackup] = {}
        self._free = pin_directories(directory)
        self._ending: set[asyncio.Task[None]] = set()
        for each in self._free:
            remove_files(disk, each)

    async def open(self, backup_id: int, min_index: LogIndex) -> Snapshot:
        """Pin a state that contains `min_index`. A repeated call returns the same one.

        Raises:
            InvalidRequestError: the id is 0.
            NotReadyError: the disk has little room, too many backups are open, the index did not
                come in time, or a file is damaged.
        """
        if not backup_id:
            raise InvalidRequestError("backup_id", 0, "must be a random number, not 0")
        backup = self._open.get(backup_id)
        if backup is None:
            if self._host.is_low:
                raise NotReadyError("the node's disk has little free space: use another node")
            if not self._free:
                raise NotReadyError(
                    f"{OPEN_MAX} backups are open on this node, the maximum: retry later"
                )
            directory = self._free.pop()
            pinning = asyncio.create_task(self._pin(directory, min_index))
            backup = _OpenBackup(directory, pinning, self._mono_ms(), {})
            self._open[backup_id] = backup
        try:
            snapshot = await asyncio.shield(backup.pinning)
        except Exception:
            self.close(backup_id)
            raise
        backup.used_ms = self._mono_ms()
        backup.parts = {part.path: part for part in snapshot.parts}
        return snapshot

    async def _pin(self, directory: Path, min_index: LogIndex) -> Snapshot:
        host, until_ms = self._host, self._mono_ms() + WAIT_MS
        wanted = max(min_index, LogIndex(1))
        while host.manifest_index < wanted:
            if self._mono_ms() > until_ms:
                raise NotReadyError(
                    f"min_index = {wanted}: the newest state on this node's disk is at index"
                    f" {host.manifest_index}; applied: {host.applied_index}"
                )
            if host.applied_index >= wanted:
                await host.flush()
            await asyncio.sleep(POLL_S)
        try:
            return await asyncio.to_thread(pin, self._disk, self._state, directory)
        except NotReadyError:
            raise
        except (CorruptFileError, UnknownVersionError) as error:
            raise self._repair_error(error) from error
        except Exception as error:
            self._fatal(error)
            raise

    def _repair_error(self, damage: FileDamage) -> NotReadyError:
        self._damaged(damage)
        return NotReadyError(f"this node has damaged files: {damage}")

    async def fetch(self, backup_id: int, path: str, offset: int) -> bytes:
        """Return up to CHUNK_SIZE bytes of a part from `offset` on; none after its end.

        Raises:
            NotFoundError: the backup is not open here, or has no such part.
            NotReadyError: the part is damaged.
        """
        backup, part = self._part(backup_id, path)
        size = max(0, min(CHUNK_SIZE, part.size - offset))
        if not size:
            return b""
        await self._pace.spend(size)
        self._part(backup_id, path)  # it may have been closed meanwhile
        backup.used_ms = self._mono_ms()
        try:
            return await asyncio.to_thread(self._disk.read, backup.directory / path, offset, size)
        except FileNotFoundError:
            raise NotFoundError("open backup", f"{backup_id:016x}") from None
        except (CorruptFileError, UnknownVersionError) as error:
            raise self._repair_error(error) from error

    def _part(self, backup_id: int, path: str) -> tuple[_OpenBackup, SnapshotPart]:
        backup = self._open.get(backup_id)
        if backup is None or not backup.parts:
            raise NotFoundError("open backup", f"{backup_id:016x}")
        if path not in backup.parts:
            raise NotFoundError("part of the backup", path)
        return backup, backup.parts[path]

    def close(self, backup_id: int, *, complete: bool = False) -> None:
        """Unpin a backup; no effect if it is not open. `complete`: the store has all parts."""
        backup = self._open.pop(backup_id, None)
        if backup is not None:
            if complete:
                self.completed_ms = self._wall_ms()
            ending = asyncio.create_task(self._end(backup))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end(self, backup: _OpenBackup) -> None:
        """Remove a backup's links. Its directory is free again afterwards."""
        with suppress(Exception):  # the caller of `open` has it
            await backup.pinning  # a thread can't be cancelled
        try:
            await asyncio.to_thread(remove_files, self._disk, backup.directory)
        except Exception as error:  # noqa: BLE001 -- no later write can be trusted
            self._fatal(error)
        self._free.append(backup.directory)

    async def run(self) -> None:
        """Close the backups that are not fetched any more, for as long as the node runs."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.expire()

    def expire(self) -> None:
        """Close the backups of which no byte was fetched within PINNED_MS."""
        now_ms = self._mono_ms()
        for backup_id, backup in [*self._open.items()]:
            if backup.pinning.done() and now_ms - backup.used_ms >= PINNED_MS:
                self.close(backup_id)


def pin_directories(directory: Path) -> list[Path]:
    """Return the directories in which backups are pinned."""
    return [directory / str(number) for number in range(OPEN_MAX)]
