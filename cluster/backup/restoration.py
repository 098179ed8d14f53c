"""A new cluster from a backup: data directories on which its nodes start (docs/adr/0073).

    parts --verified--> TARGET/restoring/state --the log--> the same at a later index
          --links--> TARGET/restoring/NODE --> TARGET/NODE

Each directory has the state at one index, that of the backup or a later one, and a log that begins
after it with two entries: an EPOCH entry that names the new voters, and an entry of the same epoch.
With these the voters of the old cluster count no more. All directories of one restore have the same
entries.

The epoch is far above the state's, so that it is above all that the old cluster has used since, and
differs from that of any other restore.
The replicas have new ids, from the ids of cluster, backup and restore and the nodes' names. Each
has promised the new epoch and is unsure, as a founder is: the first start needs all of them.
"""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from cluster.backup.backup_run import PartDigest
from cluster.backup.backup_store import BackupError, BackupStore, check_link
from cluster.backup.catalogue import Catalogue, StoredPart
from cluster.backup.log_parts import StoredLog
from cluster.backup.roll_forward import Until, roll_forward
from cluster.files.recover import EPOCH_STEP
from cluster.settings.names import NAME, NAME_RULE
from replication.core.promise import NEVER_GIVEN, Promise, PromiseFile
from replication.core.quorum import VOTERS_MAX
from timer.entries import entry_frame
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import EpochStart, encode_epoch
from timer.files.data_directory import IDENTITY_NAME, REPLICA_ID_MAX, format_directory
from timer.files.disk import Disk, RealDisk, create_file
from timer.files.disk_reserve import START_BYTES
from timer.files.log import Log, replace_by_empty
from timer.model.timer_errors import EngineError
from timer.model.units import EPOCH_MAX, Epoch, LogIndex, Nonce, ReplicaId, UnixMs
from timer.recovery import manifest
from timer.recovery.rows_at_rest import pending_rows
from timerclient.values.errors import InvalidRequest

STAGE: Final = "restoring"
"""Directory in the target, until all of it is complete."""
EPOCH_SPREAD: Final = 1 << 31
"""Epochs from which that of a restore is drawn."""
READERS: Final = 4
"""Parts that are read at the same time."""
_STATE: Final = "state"
_BACKUP: Final = ".state"
"""In STAGE: the backup's state. No node can have this name, nor the next."""
_LOCK: Final = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """The cluster to make of a backup."""

    catalogue: Catalogue
    """Of the backup; after the roll forward, of the state at the later index."""
    cluster_id: str
    voters: tuple[str, ...]
    """Names of all nodes of the new cluster."""
    restore_id: str
    """The same for all nodes of one restore, and another for each restore."""
    until: Until | None = None
    """The last entry of the log to apply. None: no log is read."""

    def __post_init__(self) -> None:
        """Check the names and the epoch.

        Raises:
            InvalidRequest: no cluster can have the names.
            BackupError: no epoch is left, or the program does not read the backup's version.
        """
        names = ", ".join(self.voters)
        if not 1 <= len(self.voters) <= VOTERS_MAX or len({*self.voters}) != len(self.voters):
            raise InvalidRequest.of("nodes", names, f"must be 1 to {VOTERS_MAX} different names")
        for what, name in (("cluster id", self.cluster_id), *(("node", n) for n in self.voters)):
            if not NAME.fullmatch(name) or name == STAGE:
                raise InvalidRequest.of(what, name, f"must be {NAME_RULE}, not {STAGE!r}")
        if self.epoch > EPOCH_MAX:
            raise BackupError(f"epoch = {self.epoch}: must be at most {EPOCH_MAX}")
        check_readable(self.catalogue)

    @property
    def epoch(self) -> Epoch:
        """The first epoch of the new cluster: another one for each restore.

        So an entry of the log has another epoch than that of any other restore at its index.
        """
        return Epoch(self.catalogue.epoch + EPOCH_STEP + self._number("epoch", "") % EPOCH_SPREAD)

    @property
    def replicas(self) -> dict[str, ReplicaId]:
        """Name -> id of each replica."""
        return {name: ReplicaId(self._number("voter", name)) for name in self.voters}

    @property
    def promise(self) -> Promise:
        """The promise that every replica has given."""
        leader = self.replicas[min(self.voters)]
        return Promise(self.epoch, leader, Nonce(self._number("process", "") >> 1 or 1))

    def _number(self, *words: str) -> int:
        state = f"{self.catalogue.backup} {self.catalogue.index}"
        text = "\0".join(("timer-cluster restore", self.cluster_id, state, self.restore_id))
        digest = hashlib.sha256("\0".join((text, *words)).encode()).digest()
        return (int.from_bytes(digest[:8], "little") & REPLICA_ID_MAX) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """The content of a restored cluster."""

    plan: RestorePlan
    """With the catalogue of the state at the restored index."""
    directories: dict[str, Path]
    """Node -> its data directory."""
    overdue: dict[str, int]
    """Topic -> pending timers that have come due since the backup's index."""
    held: int
    """Pending timers of paused topics that were due by then."""


def restore(
    store: BackupStore, plan: RestorePlan, places: dict[str, Path], target: Path, now_ms: int
) -> RestoreResult:
    """Make the data directories `places` of some or all nodes of the new cluster.

    `target`: a directory that contains the places, or is the only one. It is absent or empty.
    After an error, the files and directories that this call made are removed.
    `now_ms`: Unix time, for the count of timers that came due.

    Raises:
        BackupError: the target is not empty, in use or has too little room, or a part is missing or
            damaged.
        StoreUnavailable: the store does not answer.
    """
    disk = RealDisk()
    with converting_errors(target), _stage(disk, target) as (stage, undo):
        _check_disk_space(disk, stage, plan.catalogue.size + _log_bytes(store, plan))
        state_path = stage / _BACKUP
        found, state = receive(disk, store, plan.catalogue, state_path, plan.until)
        plan = replace(plan, catalogue=found)
        for name in places:
            _make_directory(disk, plan, name, stage / name, state, state_path)
        overdue, held = _overdue(state, disk, state_path, now_ms)
        for name, place in places.items():
            _install(disk, stage / name, place, undo)
    return RestoreResult(plan=plan, directories=places, overdue=overdue, held=held)


@contextmanager
def converting_errors(path: Path) -> Iterator[None]:
    """Convert errors of local files. `path`: for those that name no file.

    Raises:
        BackupError: with the file and the reason.
    """
    try:
        yield
    except EngineError as error:
        raise BackupError(str(error)) from None
    except OSError as error:
        where = path if error.filename is None else error.filename
        raise BackupError(f"{where}: {error.strerror or error}") from None


@contextmanager
def _stage(disk: Disk, target: Path) -> Iterator[tuple[Path, ExitStack]]:
    """Make the directory for incomplete files, and remove it at the end, as far as the disk allows.

    Yield the directory, and the callbacks that run after an error in the block. Each one is
    registered before its action, so that no signal comes between.

    Raises:
        BackupError: the target is not empty.
        WrongDirectoryError: another process restores into the target.
    """
    stage = target / STAGE
    with ExitStack() as held, ExitStack() as undo:
        if not target.exists():
            undo.callback(_remove_empty, target)
        _check_empty(target)
        undo.callback(_remove_empty, stage)
        disk.make_dir(stage)
        held.callback(disk.lock(stage / _LOCK).release)
        undo.callback(_remove, stage)
        _check_empty(target)  # another restore may have ended before the lock
        for each in stage.iterdir():  # of a restore that was killed
            if each.name != _LOCK:
                shutil.rmtree(each)
        yield stage, undo
        undo.pop_all()
        _remove(stage)


def _check_empty(target: Path) -> None:
    """Check that a target has no files except those of a restore that was killed.

    Raises:
        BackupError: it has others, or is a link to nothing.
    """
    check_link(target)
    found = {each.name for each in target.iterdir()} if target.exists() else set()
    others = sorted(found - {"lost+found", STAGE})
    if others:
        why = f"{target} is not empty ({', '.join(others[:5])})"
        if STAGE in found:
            why += (
                f"; {STAGE}/ is of a restore that runs or was killed, so the rest may be incomplete"
            )
        raise BackupError(f"{why}: restore into a new or empty directory")


def _remove(path: Path) -> None:
    """Remove a file, or a directory with all its files, as far as the disk allows it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _undo_move(made: Path, moved: Path) -> None:
    """Remove a file or directory that was moved. If it was not, another program made `moved`."""
    if not made.exists():
        _remove(moved)


def _remove_empty(directory: Path) -> None:
    """Remove a directory, except if it has files."""
    with suppress(OSError):
        directory.rmdir()


def _log_bytes(store: BackupStore, plan: RestorePlan) -> int:
    """Return the bytes of the log to apply; each becomes at most about one byte of state."""
    found = 0
    if plan.until is None:
        return found
    for part in StoredLog(store, plan.catalogue.cluster_id).plan(plan.catalogue.end):
        found += part.size
        if plan.until.is_reached(part):
            break
    return found


def _check_disk_space(disk: Disk, stage: Path, needed: int) -> None:
    free = disk.free_bytes(stage)
    if needed + START_BYTES > free:
        raise BackupError(
            f"{stage.parent}: the disk has {free} free bytes; the backup needs {needed}, and"
            f" {START_BYTES} must stay free"
        )


def receive(
    disk: Disk,
    store: BackupStore,
    catalogue: Catalogue,
    state: Path,
    until: Until | None = None,
) -> tuple[Catalogue, manifest.ManifestBody]:
    """Copy all parts of a backup into the directory `state`, and apply the log after it.

    Return the catalogue and the manifest of the state that is there then. `until`: see RestorePlan.

    Raises:
        BackupError: a part is missing or damaged, or the disk failed.
        StoreUnavailable: the store does not answer.
    """
    with converting_errors(state):
        _fetch(disk, store, catalogue, state)
        if until is None:
            return _catalogue_and_state(disk, catalogue, state)
        log = StoredLog(store, catalogue.cluster_id)
        reached = roll_forward(disk, state, log.after(catalogue.end), until)
        there, found = _catalogue_and_state(disk, catalogue, state)
    beyond = None if reached else log.behind_gap(there.end, UnixMs(there.time_ms))
    if beyond is not None:
        raise BackupError(
            f"{store.root}: the log has a gap: entry {there.index + 1} is missing, and the next one"
            f" is {beyond.first}; --at-index {there.index} restores the state before it"
        )
    return there, found


def _fetch(disk: Disk, store: BackupStore, catalogue: Catalogue, state: Path) -> None:
    folders = ("", *manifest.DIRECTORIES)
    for name in folders:
        disk.make_dir(state / name)
    with ThreadPoolExecutor(READERS) as threads:
        tasks = [threads.submit(_copy, store, part, state / part.path) for part in catalogue.parts]
        try:
            for task in tasks:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
    for name in folders:
        disk.sync_dir(state / name)


def _catalogue_and_state(
    disk: Disk, catalogue: Catalogue, state: Path
) -> tuple[Catalogue, manifest.ManifestBody]:
    found = manifest.read(disk, state)
    assert found is not None, state
    return catalogue.at(found), found


def _copy(store: BackupStore, part: StoredPart, path: Path) -> None:
    digest = PartDigest()
    with converting_errors(path), os.fdopen(create_file(path, os.O_WRONLY), "wb") as file:
        for piece in digest.through(store.read(part.name)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    check_part(store, part, digest)


def check_part(store: BackupStore, part: StoredPart, digest: PartDigest) -> None:
    """Compare the bytes of a part with its catalogue.

    Raises:
        BackupError: they differ.
    """
    if (digest.size, digest.sha256) != (part.size, part.sha256):
        raise BackupError(
            f"{store.root}: {part.name} is damaged: it has {digest.size} bytes with SHA-256"
            f" {digest.sha256[:16]}…; the catalogue says {part.size} with {part.sha256[:16]}…"
        )


def _make_directory(
    disk: Disk,
    plan: RestorePlan,
    name: str,
    place: Path,
    state: manifest.ManifestBody,
    state_path: Path,
) -> None:
    """Make one node's directory, with links to the files of the state."""
    catalogue, replicas, promise = plan.catalogue, plan.replicas, plan.promise
    level = manifest.level_of(state)
    format_directory(
        disk,
        place,
        cluster_id=plan.cluster_id,
        name=name,
        replica_id=replicas[name],
        founding_voters=replicas,
        promise=NEVER_GIVEN,
        level=level,
    )
    PromiseFile.load(disk, place / "promise").give(promise)
    folders = ("", *manifest.DIRECTORIES)
    for folder in folders:
        disk.make_dir(place / _STATE / folder)
    for path in (manifest.NAME, *(path for path, _, _ in manifest.files(state))):
        disk.link(state_path / path, place / _STATE / path)
    for folder in folders:
        disk.sync_dir(place / _STATE / folder)
    index = LogIndex(catalogue.index)
    replace_by_empty(disk, place / "log", index, Epoch(catalogue.epoch))
    log = Log.open(disk, place / "log", committed_floor=index)
    try:
        voters = tuple(sorted(replicas.values()))
        start = encode_epoch(EpochStart(plan.epoch, promise.leader, voters, level))
        time_ms = UnixMs(catalogue.time_ms)
        log.append(
            [
                entry_frame.encode(kind, plan.epoch, LogIndex(index + step), time_ms, payload)
                for step, kind, payload in (
                    (1, EntryKind.EPOCH, [start]),
                    (2, EntryKind.CHECKPOINT, []),
                )
            ]
        )
        log.sync()
    finally:
        log.close()


def _install(disk: Disk, made: Path, place: Path, undo: ExitStack) -> None:
    """Move a complete directory to its place, its identity last: no node starts without it.

    `undo`: gets the callbacks that remove the moved files again.
    """
    if not place.exists():
        undo.callback(_remove_empty, place)
        disk.make_dir(place)
    for child in sorted(made.iterdir(), key=lambda path: path.name == IDENTITY_NAME):
        undo.callback(_undo_move, child, place / child.name)
        child.rename(place / child.name)
        disk.sync_dir(place)


def _overdue(
    state: manifest.ManifestBody, disk: Disk, directory: Path, now_ms: int
) -> tuple[dict[str, int], int]:
    """Return (topic -> timers that came due since the index, held timers)."""
    found: Counter[int] = Counter()
    for rows, _ in pending_rows(state, disk, directory):
        due = rows["topic"][rows["due_ms"] <= now_ms]
        topics, counts = np.unique(due, return_counts=True)
        found.update(dict(zip(topics.tolist(), counts.tolist(), strict=True)))
        if len(due) < len(rows):
            break
    names = {topic["id"]: topic["name"] for topic in state["topics"]}
    held = sum(topic["held"] for topic in state["topics"])
    return {names[topic]: count for topic, count in sorted(found.items())}, held


def check_readable(catalogue: Catalogue) -> None:
    """Check that this program reads a backup.

    Raises:
        BackupError: it is of another version.
    """
    known = (manifest.VERSION_OF_LEVEL_1, manifest.VERSION)
    if catalogue.manifest_version not in known:
        raise BackupError(
            f"backup {catalogue.backup} has a manifest of version {catalogue.manifest_version};"
            f" this program reads {known[0]} and {known[1]}. timerctl {catalogue.program} took it:"
            " use that release"
        )
