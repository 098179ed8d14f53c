"""The files of a store of backups, and the catalogue of one backup, format version 1.

    backups/20261126T045512042Z-81230.json    catalogue of one backup, the last file written
    log/…                                     the log between backups: log_parts.py
    parts/REPLICA/runs-0000000012.arrow.SIZE.CRC32.WRITER
                                              one file of a node's state, immutable

A catalogue names the parts of its backup. Several name the same part: a later backup writes only
the files that are new. A part without a catalogue comes from an interrupted backup. The name of a
part has the replica, the file's name there, its size, its CRC-32, and a random number of the backup
that wrote it, so that a backup which fails deletes no part of another one. Earlier versions wrote
names without it. A replica never uses the name of an immutable file twice.

    {"format": 1, "backup", "cluster_id", "nodes", "node", "replica_id" (16 hex digits), "index",
     "epoch", "time_ms", "begun_ms", "ended_ms", "program", "manifest_version", "pending",
     "messages", "sent_bytes", "parts": [{"path", "size", "crc32", "sha256", "name"}],
     "sha256": of the JSON without it, keys sorted, no spaces}
"""

import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from cluster.backup.backup_store import BackupError, BackupStore, WrongStore
from cluster.backup.log_parts import LogEnd
from timer.files.data_directory import sha256_of
from timer.model.units import Epoch, LogIndex
from timer.recovery import manifest
from timer.recovery.snapshot import is_part_path

FORMAT: Final = 1
CATALOGUES: Final = "backups"
PARTS: Final = "parts"
_SUFFIX: Final = ".json"


class StoredPart(NamedTuple):
    """One file of a node's state, in a store."""

    path: str
    """In the state's directory."""
    size: int
    crc32: int
    sha256: str
    """Hexadecimal."""
    name: str
    """In the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """One complete backup."""

    backup: str
    """Its id: the time of its beginning, and the index."""
    cluster_id: str
    nodes: tuple[str, ...]
    """Names of the cluster's nodes."""
    node: str
    """The node that sent it."""
    replica_id: int
    index: int
    """The last log entry in it."""
    epoch: int
    time_ms: int
    """Time of that entry, Unix ms on the cluster's clock."""
    begun_ms: int
    """Unix ms on the clock of `timerctl`, as `ended_ms`."""
    ended_ms: int
    program: str
    """Version of `timerctl`."""
    manifest_version: int
    """Format of the manifest. A restore needs a program that reads it."""
    pending: int
    """Timers that have not fired."""
    messages: int
    """Fired messages that topics keep."""
    sent_bytes: int
    """Bytes that the node sent for it."""
    parts: tuple[StoredPart, ...]

    def at(self, state: manifest.ManifestBody) -> "Catalogue":
        """Return the catalogue of this backup's state at a later index."""
        return replace(
            self,
            index=state["index"],
            epoch=state["epoch"],
            time_ms=state["time_ms"],
            manifest_version=manifest.version_of(state),
            pending=manifest.pending_of(state),
            messages=manifest.messages_of(state),
        )

    @property
    def end(self) -> LogEnd:
        """The last entry in it."""
        return LogEnd(LogIndex(self.index), Epoch(self.epoch))

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)

    def encode(self) -> bytes:
        """Return the JSON document."""
        fields = asdict(self) | {"format": FORMAT, "replica_id": f"{self.replica_id:016x}"}
        fields["parts"] = [part._asdict() for part in self.parts]
        return json.dumps({**fields, "sha256": sha256_of(fields)}, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, name: str, data: bytes) -> "Catalogue":
        """Return the catalogue of a JSON document. `name`: of its file, for errors.

        Raises:
            BackupError: it is damaged, or of another format.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            sha256, format_ = fields.pop("sha256"), fields["format"]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise BackupError(f"{name}: not a catalogue of a backup: {error!r}") from None
        if sha256 != sha256_of(fields):
            raise BackupError(f"{name}: the catalogue is damaged: checksum mismatch")
        if format_ != FORMAT:
            raise BackupError(f"{name}: format = {format_}: this program reads {FORMAT}")
        del fields["format"]
        try:
            fields["replica_id"] = int(fields["replica_id"], 16)
            fields["nodes"] = tuple(fields["nodes"])
            fields["parts"] = tuple(StoredPart(**part) for part in fields["parts"])
            found = cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            writer = f"timerctl {fields.get('program', 'of an unknown version')}"
            raise BackupError(f"{name}: written by {writer}, with other fields: {error}") from None
        for part in found.parts:
            if not is_part_path(part.path) or not part.name.startswith(f"{PARTS}/"):
                raise BackupError(f"{name}: {part.path!r} is no part of a state")
        return found


def catalogue_name(backup: str) -> str:
    """Return the name of a catalogue's file in the store."""
    return f"{CATALOGUES}/{backup}{_SUFFIX}"


def part_name(replica_id: int, path: str, size: int, crc32: int) -> str:
    """Return the name of a part's file in the store, without its writer."""
    return f"{PARTS}/{replica_id:016x}/{path.replace('/', '-')}.{size}.{crc32:08x}"


def read_catalogues(store: BackupStore) -> list[Catalogue]:
    """Return the complete backups of a store, the oldest on the cluster's clock first.

    Raises:
        BackupError: a catalogue is damaged.
        WrongStore: the backups are of several clusters.
        StoreUnavailable: the store can't be read.
    """
    found, damages = readable_catalogues(store)
    if damages:
        others = "`timerctl backup list` shows the other backups, and --backup ID reads one of them"
        raise BackupError(f"{damages[0]}; {others}")
    clusters = sorted({each.cluster_id for each in found})
    if clusters[1:]:
        choice = "`timerctl backup list` shows them, and --backup ID reads one of them"
        raise WrongStore(
            f"{store.root} has backups of the clusters {', '.join(clusters)}: use a store for each"
            f" cluster; {choice}"
        )
    return found


def readable_catalogues(store: BackupStore) -> tuple[list[Catalogue], list[str]]:
    """Return the complete backups of a store, and a sentence for each other one.

    The oldest on the cluster's clock is first: clocks of `timerctl` may be wrong.

    Raises:
        StoreUnavailable: the store can't be read.
    """
    found: list[Catalogue] = []
    damages: list[str] = []
    for name in sorted(name for name in store.sizes(CATALOGUES) if name.endswith(_SUFFIX)):
        try:
            found.append(_read(store, name))
        except BackupError as error:
            damages.append(str(error))
    return sorted(found, key=lambda each: (each.time_ms, each.index, each.begun_ms)), damages


def find_backup(
    store: BackupStore,
    *,
    backup: str | None = None,
    at_index: int | None = None,
    at: datetime | None = None,
) -> Catalogue:
    """Return the backup with an id, or the newest at or before an index or a time.

    Without any of them, the newest.

    Raises:
        BackupError: there is none; or see `read_catalogues`.
    """
    if backup is not None and (name := catalogue_name(backup)) in store.sizes(CATALOGUES):
        return _read(store, name)  # others may be damaged
    found = read_catalogues(store)
    if not found:
        raise BackupError(f"{store.root} has no complete backup")
    span = f"the store has {len(found)} backups, {found[0].backup} to {found[-1].backup}"
    if len(found) == 1:
        span = f"the store has one backup, {found[0].backup}"
    if backup is not None:
        raise BackupError(f"no such backup: {backup!r}; {span}")
    if at_index is not None:
        found = [each for each in found if each.index <= at_index]
    if at is not None:
        at_ms = at.timestamp() * 1000
        found = [each for each in found if each.time_ms <= at_ms]
    if not found:
        raise BackupError(f"no backup is that old; {span}")
    return found[-1]


def _read(store: BackupStore, name: str) -> Catalogue:
    """Return the catalogue of a file.

    Raises:
        BackupError: it is damaged, or a copy under another name.
        StoreUnavailable: the store can't be read.
    """
    found = Catalogue.decode(name, b"".join(store.read(name)))
    if name != catalogue_name(found.backup):
        raise BackupError(f"{name}: a copy of {catalogue_name(found.backup)}: remove it")
    return found
