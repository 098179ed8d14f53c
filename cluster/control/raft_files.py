"""Raft's files on one node, and the check whether the node may vote with them.

    <data directory>/raft-member         this node was a member: cluster id and name
    <data directory>/raft/journal, meta  raft_journal.py
    <data directory>/raft/snapshot       the state at some index; stands for all records before

A Raft node that loses its files forgets its votes and acknowledgements. It could then elect a
leader that lacks committed commands. But Raft's state is only a hint: the promises of the timer log
fence its leaders and keep the epochs. So lost or damaged files stop no node, and are replaced. The
node then *withholds* its votes and acknowledgements, as a node that joins later does. It withholds
until the others have committed an entry of this node without it, or until all nodes are linked and
none leads (raft.py). A founding voter, formatted together with all others, and a node alone vote
from the start.

    marker           raft/              effect
    no               no                 created; votes if founding
    no               yes                a crash between creating the two: the marker is written
    yes              no                 created without a vote
    yes              yes                opened
    damaged          any                as with a valid marker; the marker is written again
    another node's   any                WrongDirectoryError
    any              damaged            set aside as `raft.damaged`, created without a vote

A snapshot is a sealed (checksummed) msgpack list: [version, state, last record, record before].
The journal must continue at the snapshot's two records. After a crash during a compaction, or
during the installation of a leader's snapshot, the journal is replaced by these records.
"""

import functools
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgpack

from cluster.control.raft_journal import (
    DISK,
    Journal,
    Record,
    read_meta,
    scan,
    seal,
    unseal,
)
from timer.files.disk import converting_os_errors
from timer.model.timer_errors import CorruptFileError, UnknownVersionError, WrongDirectoryError

logger = logging.getLogger(__name__)

SNAPSHOT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftSnapshot:
    """The replicated state after `last` was applied."""

    state: bytes
    last: Record
    previous: Record
    """The record before `last`; pysyncobj matches the two against a follower's journal."""


@dataclass(frozen=True, slots=True)
class RaftFiles:
    """Raft's open files, checked."""

    directory: Path
    journal: Journal

    @property
    def journal_path(self) -> Path:
        """Path of the journal."""
        return self.directory / "journal"

    @property
    def snapshot_path(self) -> Path:
        """Path of the snapshot, which may not exist."""
        return self.directory / "snapshot"


def open_files(
    data_directory: Path, *, cluster_id: str, name: str, founding: bool, alone: bool = False
) -> RaftFiles:
    """Open Raft's directory and its marker, or create them again. `alone`: there is no other node.

    Raises:
        WrongDirectoryError: the marker is another node's.
        UnknownVersionError: a file has another format version.
    """
    directory = data_directory / "raft"
    marker = data_directory / "raft-member"
    owner = msgpack.packb([SNAPSHOT_VERSION, cluster_id, name])
    is_member = marker.exists()
    is_marked = is_member and _is_owner(marker, owner)
    is_empty = not directory.exists() or not any(directory.iterdir())
    if is_empty:
        if is_member:
            logger.warning("%s is missing; created again, without a vote", directory)
        _create(directory, may_vote=alone or (founding and not is_member))
    if not is_marked:
        DISK.write_atomic(marker, seal(owner))
    try:
        return _open_files(directory)
    except CorruptFileError as error:
        aside = directory.with_name("raft.damaged")
        logger.warning("%s; moved to %s, and created again without a vote", error, aside)
        if aside.exists():
            shutil.rmtree(aside)
        directory.rename(aside)
        _create(directory, may_vote=alone)
        return _open_files(directory)


def _is_owner(marker: Path, owner: bytes) -> bool:
    """Return whether the marker is this node's; False: the marker is damaged.

    Raises:
        WrongDirectoryError: the marker is another node's.
    """
    try:
        body = unseal(marker)
    except CorruptFileError as error:
        logger.warning("%s; writing it again", error)
        return False
    _check_version(marker, body)
    if body != owner:
        raise WrongDirectoryError(f"{marker}: of another node or cluster than configured")
    return True


def _open_files(directory: Path) -> RaftFiles:
    files = RaftFiles(directory, Journal(directory))
    try:
        _fit(files)
    except CorruptFileError:
        files.journal.close()
        raise
    return files


def checks(data_directory: Path) -> dict[Path, Callable[[], object]]:
    """Return a check for each file that exists or should, by path; for a stopped node.

    A check raises CorruptFileError or UnknownVersionError.
    """
    directory = data_directory / "raft"
    marker, journal = data_directory / "raft-member", directory / "journal"
    meta, snapshot = directory / "meta", directory / "snapshot"
    found: dict[Path, Callable[[], object]] = {
        marker: lambda: _check_version(marker, unseal(marker)),
        journal: lambda: scan(journal, DISK.read(journal)),
        meta: lambda: read_meta(meta),
        snapshot: lambda: read_snapshot(snapshot),
    }
    there = {path: check for path, check in found.items() if path.exists()}
    for path in (journal, meta):  # they are made together
        if path not in there and there.keys() - {marker}:
            there[path] = functools.partial(_raise_missing, path)
    return there


def _raise_missing(path: Path) -> None:
    raise CorruptFileError(path, 0, "it is missing")


def remove(data_directory: Path, *, alone: bool) -> None:
    """Delete the files of a stopped node, durably. The next start creates them again.

    The new files are without a vote, except if no other node is left (`alone`).

    Raises:
        DiskFailedError: some of them may be left.
    """
    for path in (data_directory / name for name in ("raft", "raft.new", "raft.damaged")):
        if path.exists():
            with converting_os_errors(path, "remove"):
                shutil.rmtree(path)
    if alone:
        with converting_os_errors(data_directory / "raft-member", "remove"):
            (data_directory / "raft-member").unlink(missing_ok=True)
    DISK.sync_dir(data_directory)


def write_snapshot(path: Path, snapshot: RaftSnapshot) -> None:
    """Write `snapshot` to `path`, durably."""
    body = [SNAPSHOT_VERSION, snapshot.state, snapshot.last, snapshot.previous]
    DISK.write_atomic(path, seal(msgpack.packb(body)))


def read_snapshot(path: Path) -> RaftSnapshot:
    """Return the snapshot at `path`.

    Raises:
        CorruptFileError: the file does not verify.
        FileNotFoundError: the file does not exist.
    """
    body = unseal(path)
    _check_version(path, body)
    match msgpack.unpackb(body, use_list=False):
        case (
            _,
            bytes(state),
            (bytes(), int(), int()) as last,
            (bytes(), int(), int()) as previous,
        ):
            if 0 < previous[1] == last[1] - 1 and 0 <= previous[2] <= last[2]:
                return RaftSnapshot(state=state, last=last, previous=previous)
        case _:
            pass
    raise CorruptFileError(path, 0, "not a state between two records")


def _check_version(path: Path, body: bytes) -> None:
    try:
        version = msgpack.unpackb(body, use_list=False)[0]
    except (ValueError, TypeError, LookupError) as error:
        raise CorruptFileError(path, 0, f"no list that begins with a version: {error}") from error
    if version != SNAPSHOT_VERSION:
        raise UnknownVersionError(path, version, SNAPSHOT_VERSION)


def fitting_records(
    path: Path, records: list[Record], snapshot: RaftSnapshot | None
) -> list[Record]:
    """Return the records to continue with; they start with the snapshot's two, if there is one.

    Raises:
        CorruptFileError: records are missing that the snapshot does not stand for.
    """
    first_index = records[0][1] if records else None
    if snapshot is None:
        if first_index not in {None, 1}:
            raise CorruptFileError(
                path, 0, f"starts at index {first_index}, and there is no snapshot"
            )
        return records
    boundary = [snapshot.previous, snapshot.last]
    if first_index is None:
        raise CorruptFileError(path, 0, f"empty beside a snapshot at index {snapshot.last[1]}")
    if first_index > snapshot.previous[1]:
        raise CorruptFileError(
            path, 0, f"starts at index {first_index}, the snapshot ends at {snapshot.last[1]}"
        )
    start = snapshot.previous[1] - first_index
    held = records[start : start + 2]
    if held == boundary:
        return records[start:]
    if [record[1:] for record in held] == [record[1:] for record in boundary]:
        raise CorruptFileError(
            path, 0, f"another command at index {snapshot.last[1]} than the snapshot"
        )
    # The process died after it installed a leader's snapshot, before it replaced the journal.
    return boundary


def _fit(files: RaftFiles) -> None:
    try:
        snapshot = read_snapshot(files.snapshot_path)
    except FileNotFoundError:
        snapshot = None
    records = files.journal.records
    kept = fitting_records(files.journal_path, records, snapshot)
    if kept != records:
        files.journal.replace(kept)


def _create(directory: Path, *, may_vote: bool) -> None:
    """Make the directory in one step. After a crash it is empty or complete."""
    fresh = directory.with_name("raft.new")
    if fresh.exists():
        shutil.rmtree(fresh)
    DISK.make_dir(fresh)
    Journal.create(fresh, may_vote=may_vote)
    if directory.exists():
        directory.rmdir()
    fresh.rename(directory)
    DISK.sync_dir(directory.parent)
