"""docs/formats.md says what the code does; files of unknown versions are refused, each of them."""

import json
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from chaos.sim.world.simdisk import SimDisk
from cluster.control import raft_files, raft_journal
from cluster.control.raft_journal import seal, unseal
from replication.core import promise
from replication.core.promise import Promise, PromiseFile
from tests.replication.promises import matched
from tests.timer.machines import STATE, engine_on
from tests.timer.node_files import INCOMING, LOG, receive, stored, taken
from timer.entries import entry_frame
from timer.files import data_directory, log, segment
from timer.files.disk import Disk, RealDisk
from timer.files.log import Log
from timer.model.timer_errors import UnknownVersionError
from timer.model.units import Epoch, Nonce, ReplicaId
from timer.pending.runs import key_file, run
from timer.ready import spill
from timer.recovery import manifest, snapshot_receiver

ROOT = Path(__file__).parent.parent
PROMISE = Path("/promise")

VERSIONS = {
    "`log/*.log`, header": segment.VERSION,
    "`log/*.log`, each frame": entry_frame.VERSION,
    "`log/durable`": log.MARK_VERSION,
    "`state/manifest`": manifest.VERSION,
    "`state/runs/*.arrow`": run.VERSION,
    "`state/runs/*.keys`": key_file.VERSION,
    "`state/queues/*.spill`": spill.VERSION,
    "`promise`": promise.VERSION,
    "`identity.json`": data_directory.FORMAT,
    "`incoming/plan`, `incoming/ready`": snapshot_receiver.VERSION,
    "`raft/journal`": raft_journal.VERSION,
    "`raft/meta`": raft_journal.VERSION,
    "`raft/snapshot`, `raft-member`": raft_files.SNAPSHOT_VERSION,
}


def test_page_has_every_format_with_its_version_and_where_its_layout_is() -> None:
    text = (ROOT / "docs" / "formats.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (\d+) \| .* \| (.*) \|$", text, re.MULTILINE)
    assert {name: int(version) for name, version, _ in rows} == VERSIONS
    for _, _, layout in rows:
        for path in re.findall(r"\]\(\.\./(.*?)\)", layout):
            opening = (ROOT / path).read_text().split('"""')[1]
            assert re.search(r"[Ff]ormat|format version|Version|version", opening), path


# ---- what a program of another version wrote


def crc_of(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def patched(disk: Disk, path: Path, change: Callable[[bytes], bytes]) -> None:
    disk.write_atomic(path, change(disk.read(path)))


def number(data: bytes, at: int, form: str) -> bytes:
    """Return `data` with the number at that place replaced by 99."""
    size = struct.calcsize(form)
    return data[:at] + struct.pack(form, 99) + data[at + size :]


def in_state(name: str, change: Callable[[bytes], bytes]) -> None:
    """Open a state one of whose files was changed."""
    disk, _ = stored()
    said = manifest.read(disk, STATE)
    assert said is not None
    paths = [STATE / path for path, _, _ in manifest.files(said)] + [STATE / manifest.NAME]
    path = next(path for path in paths if path.name.endswith(name))
    patched(disk, path, change)
    engine = engine_on(disk)
    for each in engine.machine.store._runs.runs:
        assert each.keys is not None


def in_log(name: str, change: Callable[[bytes], bytes]) -> None:
    disk, _ = stored()
    names = [each for each in disk.list_dir(LOG) if each.endswith(name)]
    patched(disk, LOG / names[-1], change)
    Log.open(disk, LOG)


def segment_header(data: bytes) -> bytes:
    head = number(data[:44], 8, "<H")
    return head + crc_of(head) + data[48:]


def frame(data: bytes) -> bytes:
    start = segment.HEADER_SIZE
    (length,) = struct.unpack_from("<I", data, start + 4)
    end = start + entry_frame.HEADER_SIZE + length
    body = number(data[start:end], 10, "<B")
    return data[:start] + crc_of(body[4:]) + body[4:] + data[end:]


def manifest_head(data: bytes) -> bytes:
    data = number(data, 8, "<I")
    return data[:12] + crc_of(data[:12] + data[16:]) + data[16:]


def tailed(data: bytes) -> bytes:
    body = number(data[:-4], 8, "<H")
    return body + crc_of(body)


def a_run() -> None:
    disk, _ = stored()
    said = manifest.read(disk, STATE)
    assert said is not None
    said["runs"][0]["version"] = 99
    manifest.write(disk, STATE, said)
    engine_on(disk)


def a_promise() -> None:
    disk = SimDisk()
    matched(disk, PROMISE).give(Promise(Epoch(1), ReplicaId(1), Nonce(1)))
    patched(disk, PROMISE, tailed)
    PromiseFile.load(disk, PROMISE)


def an_identity() -> None:
    disk, path = SimDisk(), Path("/data")
    data_directory.format_directory(
        disk,
        path,
        cluster_id="c",
        name="n",
        replica_id=ReplicaId(1),
        founding_voters={},
        promise=b"",
    )

    def change(data: bytes) -> bytes:
        fields = {**json.loads(data), "format": 99}
        del fields["sha256"]
        return json.dumps({**fields, "sha256": data_directory.sha256_of(fields)}).encode()

    patched(disk, path / data_directory.IDENTITY_NAME, change)
    data_directory.read_identity(disk, path)


def an_install() -> None:
    source, there, _ = taken()
    disk = SimDisk()
    receive(source, there, disk).finish()

    def change(data: bytes) -> bytes:
        body: bytes = msgpack.packb([99, *msgpack.unpackb(data[:-4])[1:]])
        return body + crc_of(body)

    patched(disk, INCOMING / "ready", change)
    snapshot_receiver.snapshot_to_install(disk, INCOMING)


def in_raft(name: str, change: Callable[[Path], bytes]) -> Callable[[Path], None]:
    def reopen(data: Path) -> None:
        def open_files() -> None:
            raft_files.open_files(data, cluster_id="c", name="n", founding=True)

        open_files()
        if name == "raft/snapshot":
            record = (b"", 1, 1)
            last = raft_files.RaftSnapshot(state=b"s", last=record, previous=record)
            raft_files.write_snapshot(data / name, last)
        RealDisk().write_atomic(data / name, change(data / name))
        open_files()

    return reopen


def sealed(path: Path) -> bytes:
    _, *fields = msgpack.unpackb(unseal(path))
    return seal(msgpack.packb([99, *fields]))


def journal(path: Path) -> bytes:
    data = path.read_bytes()
    head = number(data[:12], 8, "<I")
    return head + crc_of(head) + data[16:]


UNKNOWN: dict[str, Callable[[Path], None]] = {
    "segment": lambda _: in_log(".log", segment_header),
    "frame": lambda _: in_log(".log", frame),
    "durable mark": lambda _: in_log("durable", tailed),
    "manifest": lambda _: in_state(manifest.NAME, manifest_head),
    "run": lambda _: a_run(),
    "key file": lambda _: in_state(".keys", lambda data: number(data, 8, "<I")),
    "spill file": lambda _: in_state(".spill", lambda data: number(data, 8, "<I")),
    "promise": lambda _: a_promise(),
    "identity": lambda _: an_identity(),
    "snapshot": lambda _: an_install(),
    "raft journal": in_raft("raft/journal", journal),
    "raft meta": in_raft("raft/meta", sealed),
    "raft snapshot": in_raft("raft/snapshot", sealed),
    "raft member": in_raft("raft-member", sealed),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_file_of_an_unknown_version_is_refused_and_both_versions_are_named(
    what: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownVersionError, match=r": format version 99; this program knows \d+$"):
        UNKNOWN[what](tmp_path)
