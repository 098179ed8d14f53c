"""Raft's files: cut at every byte, flip every byte, interrupt every replacement."""

import shutil
from pathlib import Path

import pytest

from cluster import raft_journal
from cluster.raft_files import (
    Snapshot,
    fitted,
    open_files,
    read_snapshot,
    write_snapshot,
)
from cluster.raft_journal import HEADER_SIZE, RECORD_HEAD_SIZE, Journal, Record
from timer.errors import CorruptFile, UnknownVersion, WrongDirectory

RECORDS: list[Record] = [(b"\1", 1, 0), (b"\0one", 2, 1), (b"\0two, longer", 3, 1), (b"\0", 4, 7)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    Journal.create(tmp_path, may_vote=True)
    fill(tmp_path, RECORDS)
    return tmp_path


def fill(directory: Path, records: list[Record]) -> None:
    journal = Journal(directory)
    for record in records:
        journal.add(*record)
    journal._destroy()


def test_records_term_and_vote_survive_reopening(directory: Path) -> None:
    Journal(directory).setCurrentTerm(9, "b")
    journal = Journal(directory)
    assert journal.records == RECORDS
    assert (journal.getCurrentTerm(), journal.getVotedForNodeId()) == (9, "b")
    assert journal.may_vote


def test_journal_cut_at_every_byte_yields_a_prefix_and_goes_on(directory: Path) -> None:
    path = directory / "journal"
    whole = path.read_bytes()
    lengths = set[int]()
    for size in range(HEADER_SIZE, len(whole)):
        path.write_bytes(whole[:size])
        journal = Journal(directory)
        kept = journal.records
        assert kept == RECORDS[: len(kept)]
        lengths.add(len(kept))
        fill(directory, RECORDS[len(kept) :])
        assert path.read_bytes() == whole
    assert lengths == {0, 1, 2, 3}


def test_any_flipped_byte_raises_corrupt(directory: Path) -> None:
    path = directory / "journal"
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile):
            Journal(directory)


def test_torn_record_before_a_valid_one_raises_corrupt(directory: Path) -> None:
    path = directory / "journal"
    damaged = bytearray(path.read_bytes())
    first_end = HEADER_SIZE + RECORD_HEAD_SIZE + 1
    damaged[HEADER_SIZE:first_end] = bytes(first_end - HEADER_SIZE)
    path.write_bytes(damaged)
    with pytest.raises(CorruptFile):
        Journal(directory)


def test_tail_whose_sectors_were_never_written_is_cut(directory: Path) -> None:
    path = directory / "journal"
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(1_500))
    assert Journal(directory).records == RECORDS
    assert path.read_bytes() == whole


@pytest.mark.parametrize("name", ["journal", "meta"])
def test_missing_file_raises_corrupt(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(CorruptFile):
        Journal(directory)


def test_meta_cut_or_flipped_anywhere_raises_corrupt(directory: Path) -> None:
    path = directory / "meta"
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        for damaged in (whole[:position], bytes(flipped)):
            path.write_bytes(damaged)
            with pytest.raises(CorruptFile):
                Journal(directory)


def test_journal_of_another_version_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft_journal, "VERSION", 2)
    with pytest.raises(UnknownVersion):
        Journal(directory)


def test_deleted_tail_is_gone_after_reopening(directory: Path) -> None:
    journal = Journal(directory)
    journal.deleteEntriesFrom(2)
    journal.add(b"\0other", 3, 8)
    journal._destroy()
    assert Journal(directory).records == [*RECORDS[:2], (b"\0other", 3, 8)]


def test_clear_keeps_the_old_file_until_the_new_records_are_flushed(directory: Path) -> None:
    whole = (directory / "journal").read_bytes()
    journal = Journal(directory)
    journal.clear()
    journal.add(b"\0p", 70, 8)
    journal.add(b"\0q", 71, 8)
    assert (directory / "journal").read_bytes() == whole
    journal.flush()
    journal.add(b"\0r", 72, 8)
    journal.deleteEntriesFrom(2)
    journal.add(b"\0s", 72, 9)
    journal._destroy()
    assert Journal(directory).records == [(b"\0p", 70, 8), (b"\0q", 71, 8), (b"\0s", 72, 9)]


def test_compaction_keeps_trailing_records(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft_journal, "TRAILING_RECORDS", 1)
    journal = Journal(directory)
    journal.deleteEntriesTo(1)
    assert journal.records == RECORDS
    journal.deleteEntriesTo(3)
    journal._destroy()
    assert Journal(directory).records == RECORDS[2:]


def snapshot_at(position: int) -> Snapshot:
    return Snapshot(state=b"state", previous=RECORDS[position - 1], last=RECORDS[position])


def test_snapshot_survives_and_any_flipped_byte_raises_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    write_snapshot(path, snapshot_at(2))
    assert read_snapshot(path) == snapshot_at(2)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile):
            read_snapshot(path)


@pytest.mark.parametrize("first", [0, 1])
def test_journal_behind_a_snapshot_is_kept_from_its_records_on(first: int) -> None:
    assert fitted(Path("j"), RECORDS[first:], snapshot_at(2)) == RECORDS[1:]


def test_interrupted_installation_of_a_snapshot_is_finished() -> None:
    ahead = Snapshot(state=b"", previous=(b"\0x", 90, 8), last=(b"\0y", 91, 8))
    assert fitted(Path("j"), RECORDS, ahead) == [ahead.previous, ahead.last]


@pytest.mark.parametrize(
    ("records", "snapshot"),
    [
        (RECORDS[1:], None),
        ([], snapshot_at(2)),
        (RECORDS[3:], snapshot_at(2)),
        ([RECORDS[0], (b"\0other", 2, 1), *RECORDS[2:]], snapshot_at(2)),
    ],
    ids=["compacted without snapshot", "empty", "gap", "another command"],
)
def test_journal_that_contradicts_its_snapshot_raises_corrupt(
    records: list[Record], snapshot: Snapshot | None
) -> None:
    with pytest.raises(CorruptFile):
        fitted(Path("j"), records, snapshot)


def opened(
    path: Path, *, founding: bool = True, allow_empty: bool = False, name: str = "a"
) -> bool:
    """Open the files; return whether the node may vote."""
    files = open_files(
        path, cluster_id="test", name=name, founding=founding, allow_empty=allow_empty
    )
    return files.journal.may_vote


def test_founder_votes_and_anybody_else_withholds(tmp_path: Path) -> None:
    assert opened(tmp_path / "founder", founding=True)
    assert opened(tmp_path / "founder", founding=True)
    assert not opened(tmp_path / "joins", founding=False)
    assert not opened(tmp_path / "joins", founding=True), "founding is decided once"


def test_wiped_member_is_refused_until_allowed_and_then_withholds(tmp_path: Path) -> None:
    assert opened(tmp_path)
    shutil.rmtree(tmp_path / "raft")
    with pytest.raises(WrongDirectory, match="--raft-lost"):
        opened(tmp_path)
    assert not opened(tmp_path, allow_empty=True)
    assert not opened(tmp_path)


def test_directory_of_another_node_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(WrongDirectory, match="not written by node 'b'"):
        opened(tmp_path, name="b")


def test_crash_before_the_marker_is_made_good(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "raft-member").unlink()
    assert opened(tmp_path)
    assert (tmp_path / "raft-member").exists()
