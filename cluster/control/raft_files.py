"""Raft's files on one node, and whether they may be trusted to vote.

    <data directory>/raft-member         this node was a member: cluster id and name
    <data directory>/raft/journal, meta  raft_journal.py
    <data directory>/raft/snapshot       the state at some index; stands for all records before

A Raft node that loses its files forgets whom it voted for and what it acknowledged, and could
elect a leader that lacks committed commands. All of it is a hint: the timer log fences itself, and
its promises keep the epochs. So lost or damaged files stop no node. They are made anew. The node
*withholds* its votes and acknowledgements, as one that joins later does: until an entry of its own
was committed by the others without it, or all nodes are there and none of them leads (raft.py).
Only a founding voter, formatted together with all others, votes from the start, and a node alone.

    marker           raft/              what happens
    no               no                 created; votes if founding
    no               yes                a crash between creating the two: the marker is written
    yes              no                 created without a vote
    yes              yes                opened
    damaged          any                as if it were whole; written anew
    another node's   any                WrongDirectoryError
    any              damaged            set aside as `raft.damaged`, created without a vote

A snapshot is a sealed (checksummed) msgpack list: [version, state, last record, record before].
It and the journal must fit: the journal continues at the snapshot's records, or is replaced by
them when a crash interrupted a compaction or the installation of a leader's snapshot.
"""

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
    fsync_directory,
    read_meta,
    scan,
    seal,
    unseal,
    write_atomic,
)
from timer.model.timer_errors import CorruptFileError, UnknownVersionError, WrongDirectoryError

logger = logging.getLogger(__name__)

SNAPSHOT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftSnapshot:
    """The replicated state after applying `last`."""

    state: bytes
    last: Record
    previous: Record
    """The record before `last`; pysyncobj matches the two against a follower's journal."""


@dataclass(frozen=True, slots=True)
class RaftFiles:
    """Opened and checked files."""

    directory: Path
    journal: Journal

    @property
    def journal_path(self) -> Path:
        """Where the journal lies."""
        return self.directory / "journal"

    @property
    def snapshot_path(self) -> Path:
        """Where the snapshot lies, if there is one."""
        return self.directory / "snapshot"


def open_files(
    data_directory: Path, *, cluster_id: str, name: str, founding: bool, alone: bool = False
) -> RaftFiles:
    """Raft's directory and its marker exist, verify and fit each other; `alone`: no other node is.

    Raises:
        WrongDirectoryError: the marker is another node's.
        UnknownVersionError: another program wrote a file.
    """
    directory = data_directory / "raft"
    marker = data_directory / "raft-member"
    owner = msgpack.packb([SNAPSHOT_VERSION, cluster_id, name])
    is_member = marker.exists()
    is_marked = is_member and _is_owner(marker, owner)
    is_empty = not directory.exists() or not any(directory.iterdir())
    if is_empty:
        if is_member:
            logger.warning("%s is gone: it is made anew", directory)
        _create(directory, may_vote=alone or (founding and not is_member))
    if not is_marked:
        write_atomic(marker, seal(owner))
    try:
        return _opened(directory)
    except CorruptFileError as error:
        aside = directory.with_name("raft.damaged")
        logger.warning("%s; it is set aside as %s, and made anew", error, aside)
        if aside.exists():
            shutil.rmtree(aside)
        directory.rename(aside)
        _create(directory, may_vote=alone)
        return _opened(directory)


def _is_owner(marker: Path, owner: bytes) -> bool:
    """Return whether the marker is this node's; False: it is damaged.

    Raises:
        WrongDirectoryError: it is another node's.
    """
    try:
        body = unseal(marker)
    except CorruptFileError as error:
        logger.warning("%s; it is written anew", error)
        return False
    _check_version(marker, body)
    if body != owner:
        raise WrongDirectoryError(f"{marker}: of another node or cluster than the settings name")
    return True


def _opened(directory: Path) -> RaftFiles:
    files = RaftFiles(directory, Journal(directory))
    try:
        _fit(files)
    except CorruptFileError:
        files.journal.close()
        raise
    return files


def checks(data_directory: Path) -> dict[Path, Callable[[], object]]:
    """Return what reads and checks each of the files that are there; for a stopped node.

    They raise CorruptFileError or UnknownVersionError.
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
    return {path: check for path, check in found.items() if path.exists()}


def remove(data_directory: Path, *, alone: bool) -> None:
    """Remove the files of a stopped node, durably. The next start makes them anew.

    It makes them without a vote; with one if no other node is left (`alone`).
    """
    for name in ("raft", "raft.new", "raft.damaged"):
        if (data_directory / name).exists():
            shutil.rmtree(data_directory / name)
    if alone:
        (data_directory / "raft-member").unlink(missing_ok=True)
    fsync_directory(data_directory)


def write_snapshot(path: Path, snapshot: RaftSnapshot) -> None:
    """`path` durably holds `snapshot`."""
    body = [SNAPSHOT_VERSION, snapshot.state, snapshot.last, snapshot.previous]
    write_atomic(path, seal(msgpack.packb(body)))


def read_snapshot(path: Path) -> RaftSnapshot:
    """Return the snapshot at `path`.

    Raises:
        CorruptFileError: it doesn't verify.
        FileNotFoundError: there is none.
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


def fitted(path: Path, records: list[Record], snapshot: RaftSnapshot | None) -> list[Record]:
    """Return the records to go on with: they start with the snapshot's two, if there is one.

    Raises:
        CorruptFileError: records that the snapshot doesn't stand for are missing.
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
    # A leader's snapshot was installed, and the process died before the journal was replaced.
    return boundary


def _fit(files: RaftFiles) -> None:
    try:
        snapshot = read_snapshot(files.snapshot_path)
    except FileNotFoundError:
        snapshot = None
    records = files.journal.records
    kept = fitted(files.journal_path, records, snapshot)
    if kept != records:
        files.journal.replace(kept)


def _create(directory: Path, *, may_vote: bool) -> None:
    """Make the directory in one step: a crash leaves it empty or whole."""
    fresh = directory.with_name("raft.new")
    if fresh.exists():
        shutil.rmtree(fresh)
    fresh.mkdir(parents=True)
    Journal.create(fresh, may_vote=may_vote)
    if directory.exists():
        directory.rmdir()
    fresh.rename(directory)
    fsync_directory(directory.parent)
