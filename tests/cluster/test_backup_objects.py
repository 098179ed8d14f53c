"""Backups in an object store: an S3 server in this process."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from pyarrow.fs import FileSystem

from cluster.backup import store_calls
from cluster.backup.backup_store import BackupError, BackupStore, StoreUnavailable, bounded
from cluster.backup.catalogue import Catalogue, read_catalogues
from cluster.backup.store_care import damages_of, prune
from tests.cluster.running import WAIT_S, until
from tests.cluster.test_backup_store import OneNode, backed_up, restored
from timerclient.cli.timerctl import main as timerctl

MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The options of a URI for a server with the bucket `kept`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(name, value)
        running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        running.start()
        try:
            host, port = running.get_host_and_port()
            where = f"http://{host}:{port}"
            client = boto3.client("s3", endpoint_url=where, region_name="us-east-1")
            client.create_bucket(Bucket="kept")
            client.close()
            yield f"scheme=http&region=us-east-1&endpoint_override={host}:{port}"
        finally:
            running.stop()


def test_backups_in_a_bucket_are_incremental_verified_restored_and_pruned(
    server: str, tmp_path: Path
) -> None:
    store, node = BackupStore(f"s3://kept/a/b?{server}"), OneNode(tmp_path)
    assert read_catalogues(store) == []
    first = backed_up(node, store)
    node.grow(rows=3)
    second = backed_up(node, store)
    assert 0 < second.sent_bytes < second.size
    assert read_catalogues(store) == [first, second]
    assert damages_of(store) == (len({*first.parts, *second.parts}), [])
    assert {*restored(store, first, tmp_path / "new")} == {"a", "b", "state"}
    assert prune(store, 1).backups == [first.backup]
    assert damages_of(store) == (len(second.parts), [])
    store.delete(second.parts[0].name)
    assert len(damages_of(store)[1]) == 1
    with pytest.raises(BackupError, match="is missing"):
        restored(store, second, tmp_path / "second")


def test_backup_that_is_interrupted_leaves_the_parts_of_another_one(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, node = BackupStore(f"s3://kept/two?{server}"), OneNode(tmp_path / "node")
    fetch, done = node.fetch_backup, list[Catalogue]()

    def interrupted(*request: Any) -> bytes:
        data = fetch(*request)
        if not done:  # within the upload of a part
            monkeypatch.setattr(node, "fetch_backup", fetch)
            done.append(backed_up(node, store))
            raise SystemExit(143)
        return data

    monkeypatch.setattr(node, "fetch_backup", interrupted)
    with pytest.raises(SystemExit):
        backed_up(node, store)
    [complete] = done
    assert read_catalogues(store) == done
    assert damages_of(store) == (len(complete.parts), [])
    assert {*store.sizes("parts")} == {part.name for part in complete.parts}
    assert {*restored(store, complete, tmp_path / "new")} == {"a", "b", "state"}


def test_object_of_many_pieces_is_whole_or_absent(server: str) -> None:
    store = BackupStore(f"s3://kept/pieces?{server}")
    store.put("parts/whole", (bytes([at]) * MIB for at in range(12)), 12 * MIB)
    assert b"".join(store.read("parts/whole"))[:: 6 * MIB] == b"\0\6"

    def cut() -> Iterator[bytes]:
        yield from (bytes(MIB) for _ in range(12))
        raise BackupError("the node is gone")

    with pytest.raises(BackupError, match="the node is gone"):
        store.put("parts/cut", cut(), 12 * MIB)
    assert store.sizes("parts") == {"parts/whole": 12 * MIB}
    with pytest.raises(StoreUnavailable, match="missing-bucket"):
        BackupStore(f"s3://missing-bucket/a?{server}").put("parts/x", [b"x"], 1)


def test_missing_bucket_is_named_before_a_node_opens_a_backup(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackupError, match="there is no such folder"):
        BackupStore(f"s3://kept/other?{server}").check_exists()
    store, node = BackupStore(f"s3://misspelt/a?{server}"), OneNode(tmp_path)
    monkeypatch.setattr(node, "open_backup", None)
    for work in (store.check_exists, lambda: backed_up(node, store)):
        with pytest.raises(BackupError, match="there is no bucket 'misspelt'"):
            work()


class Left(BaseException):
    """The process would have ended."""


def test_signal_ends_a_command_while_the_store_does_not_answer(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hang() -> None:
        with listener.accept()[0] as connection:
            connection.recv(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert released.wait(WAIT_S)

    def left(code: int) -> None:
        assert not released.is_set()
        raise Left(code)

    monkeypatch.setattr(os, "_exit", left)
    monkeypatch.setattr(store_calls, "GRACE_S", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hanging = threading.Thread(target=hang)
        hanging.start()
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        store = f"s3://kept?scheme=http&region=us-east-1&endpoint_override={where}"
        try:
            with pytest.raises(Left, match="143"):
                timerctl(["backup", "list", "--from", store])
        finally:
            released.set()
            hanging.join()
    until(store_calls.is_idle)


def test_google_cloud_storage_is_not_called_again_for_15_minutes() -> None:
    given = "gs://anonymous@bucket/x?retry_limit_seconds=5"
    for uri, limit_s in (("gs://anonymous@bucket/x", 60), (given, 5)):
        _, [options] = FileSystem.from_uri(bounded(uri))[0].__reduce__()
        assert options["retry_time_limit"] == timedelta(seconds=limit_s)
