"""Raft's files: cut at every byte, flip every byte, interrupt every replacement."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.control import raft_journal
from cluster.control.raft_files import (
    RaftSnapshot,
    checks,
    fitting_records,
    open_files,
    read_snapshot,
    write_snapshot,
)
from cluster.control.raft_journal import HEADER_SIZE, RECORD_HEAD_SIZE, Journal, Record, read_meta
from cluster.settings.exit_codes import ExitCode, exit_code
from timer.model.timer_errors import (
    CorruptFileError,
    DiskFailedError,
    UnknownVersionError,
    WrongDirectoryError,
)

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
        with pytest.raises(CorruptFileError):
            Journal(directory)


def test_torn_record_before_a_valid_one_raises_corrupt(directory: Path) -> None:
    path = directory / "journal"
    damaged = bytearray(path.read_bytes())
    first_end = HEADER_SIZE + RECORD_HEAD_SIZE + 1
    damaged[HEADER_SIZE:first_end] = bytes(first_end - HEADER_SIZE)
    path.write_bytes(damaged)
    with pytest.raises(CorruptFileError):
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
    with pytest.raises(CorruptFileError):
        Journal(directory)


def test_meta_cut_or_flipped_anywhere_raises_corrupt(directory: Path) -> None:
    path = directory / "meta"
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        for damaged in (whole[:position], bytes(flipped)):
            path.write_bytes(damaged)
            with pytest.raises(CorruptFileError):
                Journal(directory)


def test_journal_of_another_version_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft_journal, "VERSION", 2)
    with pytest.raises(UnknownVersionError):
        Journal(directory)


def test_journal_that_may_not_be_opened_for_writing_is_a_failed_disk(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refusing(path: Path, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_WRONLY:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(DiskFailedError, match=r"journal: open failed: EACCES") as failed:
        Journal(directory)
    assert exit_code(failed.value) == ExitCode.DISK


def test_journal_behind_a_symbolic_link_is_not_opened_for_writing(directory: Path) -> None:
    (directory / "journal").rename(directory / "elsewhere")
    (directory / "journal").symlink_to(directory / "elsewhere")
    with pytest.raises(DiskFailedError, match="journal: open failed: ELOOP"):
        Journal(directory)


def test_directory_that_vanishes_under_an_open_journal_is_a_failed_disk(directory: Path) -> None:
    journal = Journal(directory)
    shutil.rmtree(directory)
    with pytest.raises(DiskFailedError, match="journal: replacement failed: ENOENT"):
        journal.replace([])
    with pytest.raises(DiskFailedError, match="meta: replacement failed: ENOENT"):
        journal.setCurrentTerm(9, "a")
    journal.close()


class Calls:
    """What is asked of the system, in order, with the file's name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        for name in ("write", "ftruncate", "fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))
        monkeypatch.setattr(os, "replace", self._replacing(os.replace))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(fd: int, *more: object) -> Any:
            self.made.append(f"{name} {Path(f'/proc/self/fd/{fd}').readlink().name}")
            return call(fd, *more)

        return noted

    def _replacing(self, call: Callable[..., None]) -> Callable[..., None]:
        def noted(old: Path, new: Path) -> None:
            self.made.append(f"rename {Path(old).name} {Path(new).name}")
            call(old, new)

        return noted

    def take(self) -> list[str]:
        made, self.made = self.made, []
        return made


def test_what_is_said_to_be_durable_was_synced_in_order(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(name: str) -> list[str]:
        return [f"fsync {name}.tmp", f"rename {name}.tmp {name}", f"fsync {directory.name}"]

    journal, calls = Journal(directory), Calls(monkeypatch)
    for vote in (None, "b", "c"):  # a vote counts as much as a term
        journal.setCurrentTerm(9, vote)
        assert calls.take() == replaced("meta")
        assert read_meta(directory / "meta") == (9, vote, True)
    journal.setCurrentTerm(9, "c")
    assert calls.take() == []
    journal.allow_votes()
    assert calls.take() == replaced("meta")
    journal.add(b"x", 5, 9)
    journal.add(b"y", 6, 9)
    assert calls.take() == ["write journal"] * 2
    journal.flush()
    assert calls.take() == ["fdatasync journal"]
    journal.flush()
    assert calls.take() == []
    journal.deleteEntriesFrom(5)
    journal.add(b"z", 6, 9)
    journal.flush()
    cut = ["ftruncate journal", "fsync journal"]  # the old records are gone, for good
    assert calls.take() == [*cut, "write journal", "fdatasync journal"]
    # A snapshot that was renamed into the directory before is durable before the records go.
    journal.replace(journal.records[2:])
    assert calls.take() == [f"fsync {directory.name}", *replaced("journal")]
    journal.clear()
    journal.add(b"a", 1, 9)
    assert calls.take() == []
    journal.flush()
    assert calls.take() == [f"fsync {directory.name}", *replaced("journal")]
    (directory / "raft").mkdir()
    Journal.create(directory / "raft", may_vote=True)
    made = [
        call.replace(directory.name, "raft")
        for name in ("journal", "meta")
        for call in replaced(name)
    ]
    assert calls.take() == made


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


def test_size_without_a_snapshot_follows_each_change_of_the_journal(directory: Path) -> None:
    journal = Journal(directory)
    sizes = [RECORD_HEAD_SIZE + len(command) for command, _, _ in RECORDS]
    assert journal.uncovered_size == sum(sizes)
    journal.deleteEntriesTo(3)
    assert journal.records == RECORDS
    assert journal.uncovered_size == sizes[3]
    journal.deleteEntriesFrom(2)
    assert journal.uncovered_size == 0
    journal.add(*RECORDS[2])
    assert journal.uncovered_size == sizes[2]
    journal.clear()
    for record in RECORDS:
        journal.add(*record)
    journal.flush()
    assert journal.uncovered_size == sum(sizes)


def snapshot_at(position: int) -> RaftSnapshot:
    return RaftSnapshot(state=b"state", previous=RECORDS[position - 1], last=RECORDS[position])


def test_snapshot_survives_and_any_flipped_byte_raises_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    write_snapshot(path, snapshot_at(2))
    assert read_snapshot(path) == snapshot_at(2)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError):
            read_snapshot(path)


@pytest.mark.parametrize("first", [0, 1])
def test_journal_behind_a_snapshot_is_kept_from_its_records_on(first: int) -> None:
    assert fitting_records(Path("j"), RECORDS[first:], snapshot_at(2)) == RECORDS[1:]


def test_interrupted_installation_of_a_snapshot_is_finished() -> None:
    ahead = RaftSnapshot(state=b"", previous=(b"\0x", 90, 8), last=(b"\0y", 91, 8))
    assert fitting_records(Path("j"), RECORDS, ahead) == [ahead.previous, ahead.last]


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
    records: list[Record], snapshot: RaftSnapshot | None
) -> None:
    with pytest.raises(CorruptFileError):
        fitting_records(Path("j"), records, snapshot)


def opened(path: Path, *, founding: bool = True, alone: bool = False, name: str = "a") -> bool:
    """Open the files; return whether the node may vote."""
    files = open_files(path, cluster_id="test", name=name, founding=founding, alone=alone)
    files.journal.close()
    return files.journal.may_vote


def test_founder_votes_and_anybody_else_withholds(tmp_path: Path) -> None:
    assert opened(tmp_path / "founder", founding=True)
    assert opened(tmp_path / "founder", founding=True)
    assert not opened(tmp_path / "joins", founding=False)
    assert not opened(tmp_path / "joins", founding=True), "founding is decided once"


def test_wiped_member_comes_back_and_withholds(tmp_path: Path) -> None:
    assert opened(tmp_path)
    shutil.rmtree(tmp_path / "raft")
    assert not opened(tmp_path)
    assert not opened(tmp_path)


@pytest.mark.parametrize("name", ["journal", "meta", "snapshot"])
def test_damaged_files_are_set_aside_and_made_anew_without_a_vote(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path)
    snapshot = RaftSnapshot(state=b"state", last=RECORDS[1], previous=RECORDS[0])
    write_snapshot(tmp_path / "raft" / "snapshot", snapshot)
    fill(tmp_path / "raft", RECORDS)
    path = tmp_path / "raft" / name
    whole = path.read_bytes()
    for at in (0, HEADER_SIZE + 5 if name == "journal" else len(whole) // 2):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        damaged = path.read_bytes()
        assert not opened(tmp_path)
        assert Journal(tmp_path / "raft").records == []
        assert (tmp_path / "raft.damaged" / name).read_bytes() == damaged
        assert f"{path}: corrupt at byte" in caplog.text
        shutil.rmtree(tmp_path / "raft")
        shutil.copytree(tmp_path / "raft.damaged", tmp_path / "raft")
    path.write_bytes(whole)
    assert opened(tmp_path)


@pytest.mark.parametrize("name", ["journal", "meta"])
def test_missing_file_beside_another_is_named_before_a_start(tmp_path: Path, name: str) -> None:
    assert checks(tmp_path) == {}
    opened(tmp_path)
    for check in checks(tmp_path).values():
        check()
    path = tmp_path / "raft" / name
    path.unlink()
    with pytest.raises(CorruptFileError, match=f"{path}: .* it is missing"):
        checks(tmp_path)[path]()


def test_damaged_marker_is_written_anew_and_costs_no_vote(tmp_path: Path) -> None:
    opened(tmp_path)
    marker = tmp_path / "raft-member"
    whole = marker.read_bytes()
    marker.write_bytes(whole[:-1])
    assert opened(tmp_path)
    assert marker.read_bytes() == whole
    marker.write_bytes(b"")
    shutil.rmtree(tmp_path / "raft")
    assert not opened(tmp_path), "it was a member, whatever its marker says"


def test_node_alone_votes_whatever_was_lost(tmp_path: Path) -> None:
    opened(tmp_path)
    shutil.rmtree(tmp_path / "raft")
    assert opened(tmp_path, alone=True)
    (tmp_path / "raft" / "meta").write_bytes(b"")
    assert opened(tmp_path, alone=True)


def test_directory_of_another_node_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(WrongDirectoryError, match="of another node"):
        opened(tmp_path, name="b")


def test_crash_before_the_marker_is_made_good(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "raft-member").unlink()
    assert opened(tmp_path)
    assert (tmp_path / "raft-member").exists()
