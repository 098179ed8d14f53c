"""Backups in an object store: an S3 server in this process."""

import signal
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE, Popen
from typing import Any
from unittest.mock import Mock

import boto3
import pytest
from moto.server import ThreadedMotoServer
from pyarrow.fs import FileSystem

from cluster.backup.backup_store import BackupError, BackupStore, StoreUnavailable, with_retry_time
from cluster.backup.catalogue import Catalogue, read_catalogues
from cluster.backup.store_care import damages_of, prune
from tests.cluster.backups import OneNode, backed_up, restored
from tests.cluster.running import WAIT_S, until

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


def test_bucket_that_may_not_be_looked_up_is_used(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BackupStore(f"s3://kept/a?{server}")
    monkeypatch.setattr(store, "_fs", Mock(get_file_info=Mock(side_effect=PermissionError)))
    store.check_bucket()


def test_prune_deletes_no_part_while_a_catalogue_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, node = BackupStore(str(tmp_path / "store")), OneNode(tmp_path / "node")
    backed_up(node, store)
    node.grow(rows=3)
    backed_up(node, store)
    there, delete = store.sizes("parts"), BackupStore.delete

    def failing(store: BackupStore, name: str) -> None:
        if name.startswith("backups/"):
            raise StoreUnavailable("planted")
        delete(store, name)

    monkeypatch.setattr(BackupStore, "delete", failing)
    with pytest.raises(StoreUnavailable, match="planted"):
        prune(store, 1)
    assert store.sizes("parts") == there


class SlowStore(BaseHTTPRequestHandler):
    """A bucket that answers requests of one method late."""

    protocol_version = "HTTP/1.1"
    late = ""
    released: threading.Event
    methods: SimpleQueue[str]

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.methods.put(self.command)
        if self.command == self.late:
            self.released.wait(WAIT_S)
        kind = "Initiate" if self.path.endswith("uploads") else "Complete"
        kind += "MultipartUploadResult"
        text = f"<{kind}><UploadId>u</UploadId></{kind}>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("ETag", "x")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815 -- by their methods

    def log_message(self, *_: Any) -> None:
        pass


WRITER = """
import signal, sys
from concurrent.futures import wait
from cluster.backup import store_calls
from cluster.backup.backup_commands import with_extra
from cluster.backup.backup_store import BackupStore

root, number, grace_s, late = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
store, store_calls.GRACE_S = BackupStore(root), grace_s

def signalled(*_):
    store_calls.wait = wait
    sys.stdin.readline()
    print("signal", flush=True)
    signal.raise_signal(number)

def data():
    yield bytes(12 << 20)
    signalled()

def run(_):
    if late == "POST":  # otherwise the main thread waits for a node then
        store_calls.wait = signalled
    store.put("parts/x", data(), 12 << 20)

signal.signal(signal.SIGINT, signal.default_int_handler)
with_extra(run)(None)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("late", "answers"), [("POST", True), ("POST", False), ("PUT", False)])
@pytest.mark.usefixtures("server")
def test_signal_ends_a_writer_while_the_store_does_not_answer(
    number: int, late: str, answers: bool
) -> None:
    released, methods = threading.Event(), SimpleQueue[str]()
    handler = type("_", (SlowStore,), {"late": late, "released": released, "methods": methods})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever).start()
        root = "s3://kept/a?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:"
        words = f"{root}{serving.server_port}", str(int(number)), str(WAIT_S * answers), late
        child = Popen([sys.executable, "-c", WRITER, *words], stdin=PIPE, stdout=PIPE, text=True)
        try:
            until(lambda: methods.get(timeout=WAIT_S / 4) == late)
            assert child.stdin is not None
            assert child.stdout is not None
            print(file=child.stdin, flush=True)
            assert child.stdout.readline() == "signal\n"
            if answers:
                released.set()
            assert child.wait(WAIT_S / 2) == 128 + number
            assert released.is_set() == answers
        finally:
            released.set()
            child.kill()
            child.communicate()
            serving.shutdown()
    seen = [methods.get() for _ in range(methods.qsize())]
    # The upload is ended, which makes an object, and the object is deleted.
    assert ("POST" in seen and "DELETE" in seen) == answers


def test_google_cloud_storage_is_not_called_again_for_15_minutes() -> None:
    given = "gs://anonymous@bucket/x?retry_limit_seconds=5"
    for uri, limit_s in (("gs://anonymous@bucket/x", 60), (given, 5)):
        _, [options] = FileSystem.from_uri(with_retry_time(uri))[0].__reduce__()
        assert options["retry_time_limit"] == timedelta(seconds=limit_s)
