"""A node's data directory: its owner, and the lock that admits one process at a time.

    identity.json   written by `timerd init` or when a learner joins, the last file written; and
                    again when the feature level rises
    LOCK            locked (flock) while a process uses the directory; contains its pid
    promise         replication/core/promise.py; written before identity.json, so never absent
    log/            timer/files/log.py
    raft/           the control plane's journal
    damaged         the reason to fetch the files again, or absent (timer/recovery/snapshot.py)
    state/          manifests, runs, queues
    incoming/       a snapshot that is being received (timer/recovery/snapshot.py)
    outgoing/       a snapshot that other nodes fetch
    backups/        snapshots that are fetched for backups (cluster/api/backup_desk.py)
    recovered.log   the steps that `timerctl recover` took (cluster/files/recover.py)

The directory *is* the replica: its replica id is created with it and never changes. A learner that
loses its disk comes back as another replica. The ids of the founding voters are derived from the
cluster's id and their names, so that each founder knows all of them before any message. A founder
that is formatted again is therefore the same replica without its memory. Every replica is formatted
*unsure*: its vote counts only if all voters answer, until a leader has matched its log. A founder
without a promise does not take part in a cluster that has entries (`PromiseLostError`).

    identity.json   {"format": 2, "cluster_id", "name", "replica_id", "founding_voters": {name: id},
                     "level", "sha256": of the JSON without it, keys sorted, no spaces}
                    replica ids as 16 hex digits, because some JSON readers round 63-bit numbers
                    format 1, at feature level 1: no "level"

The level is in the identity because each program reads that file first. It is raised before the
first entry of that level is appended, so an older program refuses the directory before any change.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from timer.files.disk import OWNER_FILE, Disk, FileLock
from timer.model.feature_level import is_supported
from timer.model.timer_errors import (
    CorruptFileError,
    UnknownVersionError,
    UnsupportedLevelError,
    WrongDirectoryError,
)
from timer.model.units import ReplicaId

FORMAT: Final = 2
FORMAT_OF_LEVEL_1: Final = 1
REPLICA_ID_MAX: Final = (1 << 63) - 1

IDENTITY_NAME: Final = OWNER_FILE
LOCK_NAME: Final = "LOCK"
PROMISE_NAME: Final = "promise"

_NOT_OURS: Final = frozenset({"lost+found", IDENTITY_NAME + ".tmp", PROMISE_NAME + ".tmp"})
"""Names that an empty directory may have: of a new file system, or of an interrupted format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The owner of a directory, and its level. Only `make_sole_founder` changes the owner."""

    cluster_id: str
    name: str
    """The node that uses it. A replacement of the same name has another replica id."""
    replica_id: ReplicaId
    founding_voters: Mapping[str, ReplicaId]
    """Node name -> replica id. The own id is among them only if the node is a founder."""
    level: int = 1
    """The feature level of the files: timer/model/feature_level.py."""

    @property
    def is_founder(self) -> bool:
        """Whether it has been a voter from the beginning."""
        return self.replica_id in self.founding_voters.values()


class DataDirectory:
    """A directory in use by this process, until `close`."""

    def __init__(self, disk: Disk, path: Path, identity: Identity, lock: FileLock) -> None:
        self.identity = identity
        self._disk, self._path = disk, path
        self.promise: Final = path / PROMISE_NAME
        self.log: Final = path / "log"
        self.raft: Final = path / "raft"
        self.state: Final = path / "state"
        self.incoming: Final = path / "incoming"
        self.outgoing: Final = path / "outgoing"
        self.backups: Final = path / "backups"
        self.damaged: Final = path / "damaged"
        self._lock = lock

    def raise_level(self, level: int) -> None:
        """Record, durably, that files of this feature level may follow. It never falls."""
        if level > self.identity.level:
            raised = replace(self.identity, level=level)
            self._disk.write_atomic(self._path / IDENTITY_NAME, _encode(raised))
            self.identity = raised

    def close(self) -> None:
        """Release the directory for other processes."""
        self._lock.release()


def founding_replica_id(cluster_id: str, name: str) -> ReplicaId:
    """Return the id of the founding voter `name`: 63 bits of a hash, never 0."""
    text = json.dumps(["timer-cluster founding voter", cluster_id, name])
    digest = hashlib.sha256(text.encode()).digest()
    return ReplicaId((int.from_bytes(digest[:8], "little") & REPLICA_ID_MAX) or 1)


def format_directory(  # noqa: PLR0913 - the content of a directory
    disk: Disk,
    path: Path,
    *,
    cluster_id: str,
    name: str,
    replica_id: ReplicaId,
    founding_voters: Mapping[str, ReplicaId],
    promise: bytes,
    level: int = 1,
) -> Identity:
    """Make an absent or empty directory this node's, durably. Return its identity.

    A founder's `replica_id` is its id in `founding_voters`. A learner is not among them, and has a
    random id. `promise`: the file of a replica that never promised
    (`replication.core.promise.NEVER_GIVEN`). `level`: feature level of the files that follow.

    Raises:
        WrongDirectoryError: the directory is not empty.
    """
    assert 1 <= replica_id <= REPLICA_ID_MAX, replica_id
    assert founding_voters.get(name, replica_id) == replica_id, (name, replica_id, founding_voters)
    disk.make_dir(path)
    found = _names(disk, path)
    if PROMISE_NAME in found and disk.read(path / PROMISE_NAME) == promise:
        found.remove(PROMISE_NAME)  # of an interrupted format
    if found:
        raise WrongDirectoryError(
            f"{path} is not empty ({', '.join(found[:5])}): format a new or empty directory"
        )
    identity = Identity(
        cluster_id=cluster_id,
        name=name,
        replica_id=replica_id,
        founding_voters=dict(founding_voters),
        level=level,
    )
    disk.write_atomic(path / PROMISE_NAME, promise)
    disk.write_atomic(path / IDENTITY_NAME, _encode(identity))
    return identity


def make_sole_founder(disk: Disk, path: Path, identity: Identity) -> None:
    """Make its replica the only founding voter, durably, because a majority is lost.

    Only an operator may order this, on a stopped node (cluster/files/recover.py).
    """
    founders = {identity.name: identity.replica_id}
    disk.write_atomic(path / IDENTITY_NAME, _encode(replace(identity, founding_voters=founders)))


def open_directory(disk: Disk, path: Path, *, cluster_id: str, name: str) -> DataDirectory:
    """Lock the directory for this process, check its identity, create its subdirectories.

    Raises:
        WrongDirectoryError: it is empty, in use, or of another program, cluster or node.
        CorruptFileError: its identity is damaged.
        UnknownVersionError: its identity is of another format.
        UnsupportedLevelError: its files may be of a feature level of another release.
    """
    found = _names(disk, path) if disk.exists(path) else []
    if not found:
        why = "is its disk mounted? A new node needs `timerd init` first"
        raise WrongDirectoryError(f"{path} is empty: {why}")
    check_formatted(disk, path)
    lock = disk.lock(path / LOCK_NAME)
    try:
        identity = read_identity(disk, path)
        _check(path, identity, cluster_id=cluster_id, name=name)
        directory = DataDirectory(disk, path, identity, lock)
        for child in (directory.log, directory.raft, directory.state):
            disk.make_dir(child)
    except BaseException:
        lock.release()
        raise
    return directory


def check_formatted(disk: Disk, path: Path) -> None:
    """Check that a directory has an identity.

    Raises:
        WrongDirectoryError: it has none.
    """
    if not disk.exists(path / IDENTITY_NAME):
        raise WrongDirectoryError(
            f"{path} has no {IDENTITY_NAME}: it is not a data directory of timerd"
        )


def _check(path: Path, identity: Identity, *, cluster_id: str, name: str) -> None:
    if identity.cluster_id != cluster_id:
        raise WrongDirectoryError(
            f"cluster_id = {cluster_id}: {path} belongs to cluster {identity.cluster_id}"
        )
    if identity.name != name:
        raise WrongDirectoryError(f"name = {name}: {path} belongs to node {identity.name}")
    if not is_supported(identity.level):
        raise UnsupportedLevelError(path, identity.level)


def read_identity(disk: Disk, path: Path) -> Identity:
    """Return the identity of a directory without locking it, for tools that only read.

    Raises:
        FileNotFoundError: it was never formatted.
        CorruptFileError: its identity is damaged.
        UnknownVersionError: its identity is of another format.
    """
    where = path / IDENTITY_NAME
    try:
        fields = json.loads(disk.read(where))
        sha256 = fields.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptFileError(where, 0, f"not an identity file: {error}") from error
    if sha256 != sha256_of(fields):
        raise CorruptFileError(where, 0, "checksum mismatch")
    if fields["format"] not in (FORMAT, FORMAT_OF_LEVEL_1):
        raise UnknownVersionError(where, fields["format"], FORMAT)
    return Identity(
        cluster_id=fields["cluster_id"],
        name=fields["name"],
        replica_id=ReplicaId(int(fields["replica_id"], 16)),
        founding_voters={
            voter: ReplicaId(int(each, 16)) for voter, each in fields["founding_voters"].items()
        },
        level=fields.get("level", 1),
    )


def _encode(identity: Identity) -> bytes:
    fields: dict[str, Any] = {
        "format": FORMAT if identity.level > 1 else FORMAT_OF_LEVEL_1,
        "cluster_id": identity.cluster_id,
        "name": identity.name,
        "replica_id": f"{identity.replica_id:016x}",
        "founding_voters": {
            name: f"{each:016x}" for name, each in sorted(identity.founding_voters.items())
        },
    }
    if identity.level > 1:
        fields["level"] = identity.level
    return json.dumps({**fields, "sha256": sha256_of(fields)}, indent=2).encode() + b"\n"


def sha256_of(fields: Mapping[str, Any]) -> str:
    """Return the checksum of a JSON document's fields, in hex: keys sorted, no spaces."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _names(disk: Disk, path: Path) -> list[str]:
    return [name for name in disk.list_dir(path) if name not in _NOT_OURS]
