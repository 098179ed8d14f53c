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
)
from cluster.backup.restoration import check_part


def damages_of(store: BackupStore, backup: str | None = None) -> tuple[int, list[str]]:
    """Read the parts of one backup again. Return their number, and a sentence for each bad part.

    `backup`: its id; None: all backups.

    Raises:
        BackupError: the store has no such backup, or none at all, or a catalogue is damaged.
        StoreUnavailable: the store does not answer.
    """
    parts = _parts_of(store, backup)
    damages: dict[str, str] = {}
    for part in parts.values():
        try:
            check_part(store, part, PartDigest.of(store.read(part.name)))
        except BackupError as error:
            damages[part.name] = str(error)
    left = _parts_of(store, backup) if damages else {}  # a prune may have deleted parts meanwhile
    return len(parts), [text for name, text in damages.items() if name in left]


def _parts_of(store: BackupStore, backup: str | None) -> dict[str, StoredPart]:
    every = read_catalogues(store) if backup is None else []
    found = every or [find_backup(store, backup=backup)]  # an empty store has nothing to verify
    return {part.name: part for each in found for part in each.parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """The deleted files of a store."""

    backups: list[str]
    """Their ids."""
    parts: int
    """Number of parts."""
    size: int
    """Bytes of the parts."""


def prune(store: BackupStore, keep: int) -> Pruned:
    """Delete all backups except the newest `keep`, then all parts that no backup needs.

    No backup into the same store may run meanwhile: its parts have no catalogue yet, so they would
    be deleted, and so would the files that it writes.

    Raises:
        BackupError: a catalogue is damaged.
        StoreUnavailable: the store does not answer.
    """
    found = read_catalogues(store)
    old: list[Catalogue] = found[:-keep]
    for each in old:  # first: a backup without all its parts must not be listed
        store.delete(catalogue_name(each.backup))
    needed = {part.name for each in found[-keep:] for part in each.parts}
    idle = {name: size for name, size in store.sizes(PARTS).items() if name not in needed}
    for name in idle:
        store.delete(name)
    for folder in (CATALOGUES, PARTS):
        store.delete_incomplete(folder)
    return Pruned(backups=[each.backup for each in old], parts=len(idle), size=sum(idle.values()))
