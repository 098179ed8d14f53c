"""Checks all bytes of a store of backups, and deletes old backups."""

from dataclasses import dataclass

from cluster.backup.backup_run import PartDigest
from cluster.backup.backup_store import BackupError, BackupStore
from cluster.backup.catalogue import (
    CATALOGUES,
    PARTS,
    Catalogue,
    StoredPart,
    catalogue_name,
    find_backup,
    read_catalogues,
    readable_catalogues,
)
from cluster.backup.log_parts import LOG, StoredLog
from cluster.backup.restoration import check_part
from timer.model.units import UnixMs


def damages_of(store: BackupStore, backup: str | None = None) -> tuple[int, list[str]]:
    """Read the parts of one backup again. Return their number, and a sentence for each bad part.

    `backup`: its id; None: all backups, and the log between them.

    Raises:
        BackupError: the store has no such backup, or none at all; or see `read_catalogues`.
        StoreUnavailable: the store does not answer.
    """
    found = _backups(store, backup)
    parts = _parts_of(found)
    damages: dict[str, str] = {}
    for part in parts.values():
        try:
            check_part(store, part, PartDigest.of(store.read(part.name)))
        except BackupError as error:
            needed = [each.backup for each in found if part in each.parts]
            many = f"{len(needed)} backups, {needed[0]} to {needed[-1]}, need it"
            damages[part.name] = f"{error}; {many if needed[1:] else f'{needed[0]} needs it'}"
    log = StoredLog(store, found[0].cluster_id)
    logged = log.parts if backup is None else []
    for part_of_log in logged:
        try:
            log.read(part_of_log)
        except BackupError as error:
            damages[f"{log.folder}/{part_of_log.name}"] = str(error)
    if not damages:
        return len(parts) + len(logged), []
    # A prune may have deleted parts meanwhile.
    left = {*_parts_of(_backups(store, backup)), *store.sizes(LOG)}
    return len(parts) + len(logged), [text for name, text in damages.items() if name in left]


def gaps_of(store: BackupStore) -> list[str]:
    """Return a sentence for each gap of the log that follows a backup.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    found, _ = readable_catalogues(store)
    log = StoredLog(store, found[0].cluster_id if found else "")
    gaps: dict[str, None] = {}
    for each in found:
        reach = log.reach(each.end)
        time_ms = UnixMs(each.time_ms) if reach is None else reach.time_ms
        end = each.end if reach is None else reach.end
        if any(new.index <= end.index and new.time_ms > time_ms for new in found):
            continue  # a restore to an earlier index ended this log
        if (beyond := log.behind_gap(end, time_ms)) is not None:
            span = f"{end.index + 1} to {beyond.first - 1}"
            gaps[f"gap in the log: entries {span} are missing"] = None
    return [*gaps]


def _backups(store: BackupStore, backup: str | None) -> list[Catalogue]:
    every = read_catalogues(store) if backup is None else []
    return every or [find_backup(store, backup=backup)]  # an empty store has nothing to verify


def _parts_of(backups: list[Catalogue]) -> dict[str, StoredPart]:
    return {part.name: part for each in backups for part in each.parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedFiles:
    """The deleted files of a store."""

    backups: list[str]
    """Their ids."""
    parts: int
    """Number of parts, those of the log included."""
    size: int
    """Bytes of the parts."""


def prune(store: BackupStore, keep: int) -> PrunedFiles:
    """Delete all backups except the newest `keep`, then all parts that no backup needs.

    The log before the oldest backup that is kept is deleted, too.

    No backup into the same store may run meanwhile: its parts have no catalogue yet, so they would
    be deleted, and so would the files that it writes.

    Raises:
        BackupError: a catalogue is damaged, or the backups are of several clusters.
        StoreUnavailable: the store does not answer.
    """
    found = read_catalogues(store)
    old: list[Catalogue] = found[:-keep]
    # First: a backup without all its parts must not be listed.
    store.delete_all([catalogue_name(each.backup) for each in old])
    needed = {part.name for each in found[-keep:] for part in each.parts}
    idle = {name: size for name, size in store.sizes(PARTS).items() if name not in needed}
    if found:
        oldest = min(each.index for each in found[-keep:])
        log = StoredLog(store, found[-1].cluster_id)
        old_log = {f"{log.folder}/{part.name}" for part in log.parts if part.last <= oldest}
        idle |= {name: size for name, size in store.sizes(LOG).items() if name in old_log}
    store.delete_all(idle)
    for folder in (CATALOGUES, PARTS, LOG):
        store.delete_incomplete(folder)
    return PrunedFiles(
        backups=[each.backup for each in old], parts=len(idle), size=sum(idle.values())
    )
