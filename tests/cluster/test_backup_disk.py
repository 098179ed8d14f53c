"""Backups, restores and exports on disks and stores that fail or are slow, or ended by a signal."""

import errno
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.backup import backup_store, pin_keeper, store_calls
from cluster.backup.backup_store import BackupError, BackupStore, StoreUnavailable
from cluster.backup.catalogue import Catalogue, catalogue_name
from cluster.backup.parquet_export import CLAIM, ParquetExport
from cluster.backup.restoration import STAGE, receive
from tests.cluster.backups import DISK, OneNode, backed_up, restored
from tests.cluster.running import WAIT_S, until
from timer.files.disk import RealDisk, create_file
from timer.recovery.rows_at_rest import pending_rows
from timerclient.cli.timerctl import main as timerctl
from timerclient.client import timer_client
from timerclient.values.errors import Unavailable


@pytest.fixture
def found(store: BackupStore, tmp_path: Path) -> Catalogue:
    return backed_up(OneNode(tmp_path / "node"), store)


@pytest.fixture
def export(store: BackupStore, found: Catalogue, tmp_path: Path) -> ParquetExport:
    receive(DISK, store, found, tmp_path / "received")
    return ParquetExport(DISK, tmp_path / "received", found)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_node_keeps_a_backup_open_while_stored_parts_are_read_again(
    store: BackupStore, found: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, asked = OneNode(tmp_path / "again"), threading.Event()
    read, fetch = store.read, node.fetch_backup

    def slow(name: str) -> Iterator[bytes]:
        asked.clear()
        assert asked.wait(WAIT_S)
        return read(name)

    def fetched(*request: Any) -> bytes:
        asked.set()
        return fetch(*request)

    store.delete(catalogue_name(found.backup))
    monkeypatch.setattr(pin_keeper, "KEEP_S", 0.001)
    monkeypatch.setattr(store, "read", slow)
    monkeypatch.setattr(node, "fetch_backup", fetched)
    assert backed_up(node, store).sent_bytes == 0


def test_request_that_fails_is_made_again_until_the_end_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = SimpleQueue[str]()

    def fails() -> None:
        made.put(threading.current_thread().name)
        raise Unavailable("planted")

    monkeypatch.setattr(pin_keeper, "KEEP_S", 0.001)
    with pin_keeper.keeping_pin(fails):
        names = {made.get(timeout=WAIT_S) for _ in range(3)}
    until(lambda: names.isdisjoint(each.name for each in threading.enumerate()))


@pytest.mark.parametrize("command", ["backup", "export"])
def test_node_counts_a_backup_and_not_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    node = OneNode(tmp_path / "node")
    monkeypatch.setattr(timer_client, "TimerClient", lambda *_, **__: nullcontext(node))
    assert timerctl([command, "--into", str(tmp_path / "place")]) == 0
    assert node.complete is (command == "backup")


def test_backup_and_its_copy_that_root_makes_are_for_the_owner_of_the_directory(
    tmp_path: Path, given: dict[str, tuple[int, int]]
) -> None:
    store = BackupStore(str(tmp_path / "store"))
    found = backed_up(OneNode(tmp_path / "node"), store)
    made = {each.name for each in tmp_path.joinpath("store").rglob("*") if each.is_dir()}
    stored = {name.partition(".tmp")[0].rpartition(".")[0] for name in given if ".tmp" in name}
    assert {"store", *made} <= given.keys()
    assert {Path(part.name).name for part in found.parts} <= stored
    given.clear()
    receive(DISK, store, found, tmp_path / "received")
    copies = {path.name for path in tmp_path.joinpath("received").rglob("*") if path.is_file()}
    assert copies
    assert copies <= given.keys()
    assert {*given.values()} == {(4242, 4243)}


def test_file_is_written_where_it_was_created_if_its_name_becomes_a_link(
    store: BackupStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"of root")

    def created(path: Path, flags: int) -> int:
        fd = create_file(path, flags)
        path.unlink()
        path.symlink_to(victim)
        return fd

    monkeypatch.setattr(backup_store, "create_file", created)
    with pytest.raises(StoreUnavailable):
        store.put("parts/a", [b"new"], 3)
    assert victim.read_bytes() == b"of root"


@pytest.mark.parametrize("failing", [".tmp", "parts"])
def test_file_whose_sync_fails_is_deleted_and_one_that_was_there_stays(
    store: BackupStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    store.put("parts/a", [b"a"], 1)
    sizes = list[int]()

    def fails(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(failing):
            raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreUnavailable, match="planted"):
        store.put("parts/b", [b"b"], 1)
    with pytest.raises(StoreUnavailable, match="planted"):
        store.put("parts/a", [b"a"], 1)  # as a second node that stores the same part of the log
    assert sizes[0] == 1, "the bytes were not yet in the file"
    assert files(tmp_path) == ["a"]


def test_of_two_exports_into_one_place_one_is_refused(
    export: ParquetExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "export"
    refused: list[str] = []
    name = "cluster.backup.parquet_export.pending_rows"

    def meanwhile(*words: Any) -> Any:
        monkeypatch.setattr(name, pending_rows)
        with pytest.raises(BackupError, match="is not empty") as caught:
            export.write(BackupStore(str(place)))
        refused.append(str(caught.value))
        return pending_rows(*words)

    monkeypatch.setattr(name, meanwhile)
    tables = export.write(BackupStore(str(place)))
    # Between the check of a place and the claim, another export begins.
    sizes = iter([{}, {"/_exporting.a": 0, "/_exporting.b": 0}])
    monkeypatch.setattr(BackupStore, "sizes", lambda *_: next(sizes))
    with pytest.raises(BackupError, match="is of an export that runs"):
        export.write(BackupStore(str(tmp_path / "other")))
    assert ["is of an export that runs or was killed" in each for each in refused] == [True]
    assert files(place) == [
        "export.json",
        *sorted(f for table in tables.values() for f in table[1]),
    ]


@pytest.mark.parametrize("failing", ["messages-00000.parquet", "export.json"])
def test_export_that_ends_before_its_end_deletes_its_tables_at_the_same_time(
    export: ParquetExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target, writing = BackupStore(str(tmp_path / "export")), BackupStore.open_writer
    delete, all_are_deleted = BackupStore.delete, threading.Barrier(2, timeout=WAIT_S)
    deleted: list[str] = []

    def ended(store: BackupStore, name: str) -> Any:
        if name == failing:
            raise SystemExit(143)
        return writing(store, name)

    def slow(store: BackupStore, name: str) -> None:
        if name.endswith(".parquet"):
            all_are_deleted.wait()
        delete(store, name)
        deleted.append(name)

    monkeypatch.setattr(BackupStore, "open_writer", ended)
    monkeypatch.setattr(BackupStore, "delete", slow)
    with pytest.raises(SystemExit):
        export.write(target)
    assert files(tmp_path / "export") == []
    tables = ["messages-00000.parquet", "pending-00000.parquet"]
    assert deleted[-1].startswith(CLAIM)
    assert deleted[:-3] == ["export.json"] * (failing == "export.json")
    assert sorted(deleted[-3:-1]) == tables
    monkeypatch.undo()
    assert export.write(target)


def test_files_that_an_export_has_no_time_to_delete_are_left(
    export: ParquetExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, released = BackupStore.delete, threading.Event()

    def slow(store: BackupStore, name: str) -> None:
        if name.startswith(CLAIM):
            released.wait(WAIT_S)
        delete(store, name)

    def end(*_: object) -> None:
        """End the time for calls when the other files are deleted."""
        until(lambda: len(export.leftovers) == 1)
        store_calls._command.until_s = 0.0

    monkeypatch.setattr(BackupStore, "put", Mock(side_effect=[None, SystemExit(143)]))
    monkeypatch.setattr(BackupStore, "delete", slow)
    monkeypatch.setattr(store_calls, "wait", end)
    monkeypatch.setattr(store_calls._command, "until_s", inf)
    with pytest.raises(SystemExit):
        export.write(BackupStore(str(tmp_path / "export")))
    [claim] = export.leftovers
    released.set()
    assert claim.startswith(CLAIM)
    assert files(tmp_path / "export") == []


def test_second_signal_gives_a_command_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_calls, "_command", store_calls._command)  # restored at the end
    monkeypatch.setattr(store_calls, "time", Mock(monotonic=Mock(side_effect=[100.0, 103.0])))
    handled = Mock()
    before = signal.signal(signal.SIGTERM, handled)
    try:
        with store_calls.leaving_calls():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert store_calls._command.until_s == 100.0 + store_calls.GRACE_S
        assert signal.getsignal(signal.SIGTERM) is handled
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled.call_count == 2


@pytest.mark.parametrize("failing", ["", "export.json"])
def test_files_of_an_export_that_can_not_be_deleted_are_named(
    store: BackupStore,
    found: Catalogue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: str,
) -> None:
    put, delete, place = BackupStore.put, BackupStore.delete, tmp_path / "export"

    def denied(store: BackupStore, name: str) -> None:
        if not name.endswith(".parquet"):
            raise StoreUnavailable(f"{store.root}: {name}: denied")
        delete(store, name)

    def fails(store: BackupStore, name: str, *more: Any) -> None:
        if name == failing:
            denied(store, name)
        put(store, name, *more)

    monkeypatch.setattr(BackupStore, "delete", denied)
    monkeypatch.setattr(BackupStore, "put", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile.TemporaryDirectory, "_rmtree", lambda *_, **__: None)
    code = timerctl(["export", "--from", store.root, "--into", str(place)])
    told = capsys.readouterr().err
    [claim] = place.glob("_exporting.*")
    tables = ", export.json, messages-00000.parquet, pending-00000.parquet" if failing else ""
    assert (code == 0) is (failing == "")
    assert f"{place}: could not delete {claim.name}{tables}: delete them\n" in told
    assert "has readable payloads: remove it" in told
    assert [*place.glob("*.parquet")], "no table goes before the index"


@pytest.mark.parametrize("last", ["restoring", "b", "b/log", "b/identity.json"])
def test_restore_that_a_signal_ends_leaves_nothing(
    store: BackupStore,
    found: Catalogue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: str,
) -> None:
    target = tmp_path / "new"
    make_dir, rename = RealDisk.make_dir, Path.rename

    def made(disk: RealDisk, path: Path) -> None:
        make_dir(disk, path)
        if path == target / last:
            raise SystemExit(143)

    def renamed(path: Path, to: Path) -> Path:
        rename(path, to)
        if to == target / last:
            raise SystemExit(143)
        return to

    monkeypatch.setattr(RealDisk, "make_dir", made)
    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(SystemExit):
        restored(store, found, target)
    assert not target.exists()


def test_restore_that_fails_keeps_the_files_of_another_program(
    store: BackupStore, found: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "new", Path.rename

    def foreign(path: Path, to: Path) -> Path:
        if to == target / "b" / "log":  # made just before the move
            (to / "foreign").mkdir(parents=True)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", foreign)
    with pytest.raises(BackupError, match="log: Directory not empty"):
        restored(store, found, target)
    assert [*(target / "b").rglob("*")] == [target / "b" / "log", target / "b" / "log" / "foreign"]


def test_restore_whose_temporary_files_stay_is_complete_and_names_them(
    store: BackupStore,
    found: Catalogue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, rmdir = tmp_path / "new", os.rmdir

    def fails(path: str, **more: Any) -> None:
        if str(path).endswith(STAGE):
            raise OSError(errno.EIO, "planted", path)
        rmdir(path, **more)

    monkeypatch.setattr(os, "rmdir", fails)
    assert timerctl(["restore", "--from", store.root, "--into", str(target)]) == 0
    told = capsys.readouterr()
    assert "restored backup" in told.out
    assert f"{target / STAGE} could not be removed" in told.err
    assert (f"{target / 'n1'} is root's" in told.err) is (os.geteuid() == 0)


@pytest.mark.parametrize("command", ["export", "restore"])
@pytest.mark.parametrize("failing", ["state/manifest", "state/runs"])
def test_failed_write_of_a_received_part_is_named(
    store: BackupStore,
    found: Catalogue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    failing: str,
) -> None:
    def fails(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(failing):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = ["--from", store.root, "--into", str(tmp_path / "new")]
    assert timerctl([command, *words]) == 1
    told = capsys.readouterr().err
    assert f"{failing}: " in told
    assert "No space left on device" in told


@pytest.mark.parametrize("command", ["export", "restore"])
def test_target_that_is_a_link_to_nothing_is_refused(
    store: BackupStore,
    found: Catalogue,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    words = ["--from", store.root, "--into", str(tmp_path / "link")]
    assert timerctl([command, *words]) == 1
    assert f"link is a link to {tmp_path / 'gone'}, which is missing" in capsys.readouterr().err
