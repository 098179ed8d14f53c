"""A node's files at start: damage, and deleted files of a full disk."""

import asyncio
import errno
import logging
from pathlib import Path

import pytest

from chaos.sim.world.simdisk import SimDisk
from cluster.files import verify
from cluster.files.disk_room import wait_for_disk_space
from cluster.files.recover import open_stopped_node
from cluster.files.storage import (
    REPAIRED_NAME,
    Damaged,
    NodeFiles,
    free_disk_space,
    last_repair,
    note_repair,
    open_storage,
)
from cluster.node import process
from cluster.settings.config import NodeConfig, build_config
from cluster.settings.wall_clock import machine_ms
from replication.core.promise import NEVER_GIVEN, Promise
from tests.timer.machines import Log, catch_up, flush
from tests.timer.node_files import UNDER, busy_log, frame_of
from timer.files.data_directory import format_directory, founding_replica_id, open_directory
from timer.files.disk_reserve import START_BYTES
from timer.files.log import Log as TimerLog
from timer.model.timer_errors import CorruptFileError, NotReadyError
from timer.model.units import Epoch, LogIndex
from timer.recovery import manifest
from timer.recovery.snapshot import Snapshot, files
from timer.recovery.snapshot_receiver import IncomingSnapshot
from timer.recovery.snapshot_source import OfferedSnapshot, pin

DATA = Path("/data")
VOTERS = {name: founding_replica_id("c", name) for name in ("n1", "n2", "n3")}


def node() -> NodeConfig:
    peers = {f"peers.n{n}": f"127.0.0.1:{7000 + n}" for n in (1, 2, 3)}
    return build_config({"name": "n1", "cluster_id": "c", "data": str(DATA), **peers})


def opened(disk: SimDisk) -> NodeFiles:
    return open_storage(disk, node(), lambda *_: None)


def closed(storage: NodeFiles) -> None:
    storage.log.close()
    storage.directory.close()


def formatted(disk: SimDisk) -> None:
    format_directory(
        disk,
        DATA,
        cluster_id="c",
        name="n1",
        replica_id=VOTERS["n1"],
        founding_voters=VOTERS,
        promise=NEVER_GIVEN,
    )


def damages(disk: SimDisk) -> list[str]:
    """Return the damage that `timerctl verify --data` prints."""
    return [str(each.damage) for each in verify.verify(disk, DATA) if each.damage is not None]


def lived(disk: SimDisk, log: Log) -> None:
    """Write a node's files to the disk: a promise, a manifest, and a log of small segments."""
    formatted(disk)
    storage = opened(disk)
    storage.promise.set_unsure(unsure=False)  # a leader has matched it
    storage.promise.give(Promise(Epoch(9), VOTERS["n1"], UNDER.nonce))
    catch_up(storage.engine, log)
    flush(storage.engine)
    closed(storage)
    kept = TimerLog.open(disk, DATA / "log", segment_size=600)
    kept.append([frame_of(log, index) for index in range(len(log.entries))])
    kept.close()


def test_file_that_was_removed_while_in_use_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, restarts = SimDisk(), list[str]()
    lived(disk, busy_log())
    monkeypatch.setattr(process, "exec_again", lambda: restarts.append("again"))
    for path in ("/etc/elsewhere", str(DATA / "state/runs/0000000001.arrow")):
        assert not restarts
        process._restart_if_it_helps(
            disk, node(), process.EndState(), FileNotFoundError(errno.ENOENT, "gone", path)
        )
    assert restarts == ["again"]
    with pytest.raises(Damaged, match=r"0000000001\.arrow: .* the file is missing"):
        opened(disk)


def test_manifest_that_is_missing_is_damage_once_the_log_begins_after_it() -> None:
    disk, log = SimDisk(), busy_log()
    lived(disk, log)
    disk.remove(DATA / "state" / manifest.NAME)
    storage = opened(disk)
    assert (storage.engine.manifest_index, storage.log.first_index) == (0, 1), "the log holds all"
    storage.log.drop_before(storage.log.last_index)
    closed(storage)
    kept = TimerLog.open(disk, DATA / "log", segment_size=600)
    kept.drop_before(kept.last_index)
    assert kept.first_index > 1
    kept.close()
    with pytest.raises(Damaged, match=r"the log begins with entry .*; entry 1 is missing"):
        opened(disk)
    open_directory(disk, DATA, cluster_id="c", name="n1").close()  # nothing is locked


def test_log_that_is_lost_before_the_first_manifest_is_damage() -> None:
    """The replica would else forget entries that it acknowledged, and its vote would count."""
    disk = SimDisk()
    formatted(disk)
    storage = opened(disk)
    storage.promise.give(Promise(Epoch(1), VOTERS["n1"], UNDER.nonce))
    storage.promise.set_unsure(unsure=False)
    closed(storage)
    assert not damages(disk)
    for name in disk.list_dir(DATA / "log"):
        disk.remove(DATA / "log" / name)
    (found,) = damages(disk)
    assert "log: corrupt at byte 0: the log has no segments" in found
    with pytest.raises(Damaged) as error:
        opened(disk)
    assert str(error.value) == found
    with pytest.raises(CorruptFileError) as refused, open_stopped_node(disk, DATA):
        pass  # `timerctl recover` would make a cluster of its own of an empty log
    assert str(refused.value) == found


def test_promise_older_than_the_log_is_found_before_the_start_that_it_prevents() -> None:
    disk = SimDisk()
    lived(disk, busy_log())
    assert not damages(disk)
    disk.write_atomic(DATA / "promise", NEVER_GIVEN)
    (found,) = damages(disk)
    with pytest.raises(CorruptFileError) as error:
        opened(disk)
    assert str(error.value) == found


@pytest.mark.parametrize("name", ["damaged", "state/manifest", "log/durable"])
def test_page_that_can_not_be_read_is_damage(name: str) -> None:
    disk = SimDisk()
    lived(disk, busy_log())
    if name == "damaged":
        disk.write_atomic(DATA / name, b"byte 7")
    disk.spoil(DATA / name, 0)
    if name == "log/durable":  # a mark that is damaged costs a leader's word, no more
        for _ in range(2):
            storage = opened(disk)
            assert storage.promise.unsure
            closed(storage)
        return
    with pytest.raises(Damaged, match="bad sector"):
        opened(disk)


def test_recovery_refuses_a_directory_whose_damage_the_node_has_noted() -> None:
    disk = SimDisk()
    lived(disk, busy_log())
    disk.write_atomic(DATA / "damaged", b"byte 7")
    why = "noted by the node: byte 7"
    with pytest.raises(CorruptFileError, match=why), open_stopped_node(disk, DATA):
        pass


def test_install_order_that_is_damaged_is_fetched_again() -> None:
    disk, source, log = SimDisk(), SimDisk(), busy_log()
    lived(disk, log)
    lived(source, log)
    incoming, _ = half_fetched(disk, source, -1)
    incoming.finish()
    disk.flip(DATA / "incoming/ready", 9)
    with pytest.raises(Damaged, match="the install order is damaged"):
        opened(disk)
    incoming, there = half_fetched(disk, source, -1)
    incoming.finish()
    storage = opened(disk)
    assert storage.engine.manifest_index == there.index


def test_snapshot_that_can_not_be_pinned_leaves_no_links() -> None:
    disk, log = SimDisk(), busy_log()
    lived(disk, log)
    disk.remove(next(path for path in files(disk, DATA / "state") if path.suffix == ".arrow"))
    with pytest.raises(NotReadyError, match="is missing"):
        OfferedSnapshot(disk, DATA / "state", DATA / "outgoing").offer()
    assert not [*files(disk, DATA / "outgoing")]


def half_fetched(disk: SimDisk, source: SimDisk, limit: int) -> tuple[IncomingSnapshot, Snapshot]:
    """Begin to receive a snapshot of `source`'s; stop after some chunks."""
    there = pin(source, DATA / "state", Path("/pinned"))
    incoming = IncomingSnapshot(disk, DATA / "incoming")
    incoming.begin(there, UNDER)
    while limit and (wanted := incoming.next_missing()) is not None:
        part, offset = wanted
        incoming.put(part, offset, source.read(Path("/pinned") / part.path, offset, 100))
        limit -= 1
    return incoming, there


def garbage(disk: SimDisk) -> None:
    """Write the files that a dead process leaves behind."""
    OfferedSnapshot(disk, DATA / "state", DATA / "outgoing").offer()
    for name in ("manifest.tmp", "runs/unnamed.arrow", "queues/unnamed.spill"):
        disk.write_atomic(DATA / "state" / name, bytes(1_000))


def test_full_disk_gets_back_what_nothing_names() -> None:
    disk, source, log = SimDisk(), SimDisk(), busy_log()
    lived(disk, log)
    lived(source, log)
    before = {*files(disk, DATA / "state")}
    garbage(disk)
    half_fetched(disk, source, 10)
    free_disk_space(disk, node())
    assert {*files(disk, DATA / "state")} == before
    assert not {*files(disk, DATA / "outgoing"), *files(disk, DATA / "incoming")}
    storage = opened(disk)
    whole = opened(source)
    assert storage.engine.machine.digest() == whole.engine.machine.digest()
    assert storage.log.last_index == len(log.entries)


def test_full_disk_gets_back_what_a_whole_snapshot_replaces() -> None:
    disk, source, log = SimDisk(), SimDisk(), busy_log()
    lived(disk, log)
    log.checkpoint()
    lived(source, log)
    incoming, there = half_fetched(disk, source, -1)
    incoming.finish()
    garbage(disk)
    old = {path.name for path in files(disk, DATA / "state")}
    disk.capacity_bytes = disk.used_bytes()
    free_disk_space(disk, node())
    disk.capacity_bytes = None
    assert {path.name for path in files(disk, DATA / "state")} != old
    storage = opened(disk)
    assert storage.engine.manifest_index == there.index == LogIndex(len(log.entries))


def test_node_does_not_wait_for_room_that_it_takes_itself() -> None:
    disk = SimDisk()
    lived(disk, busy_log())
    garbage(disk)
    disk.capacity_bytes = disk.used_bytes() + START_BYTES - 1
    asyncio.run(asyncio.wait_for(wait_for_disk_space(disk, node()), 60))
    assert disk.free_bytes(DATA) >= START_BYTES


def test_last_repair_is_read_only_if_its_time_is_possible() -> None:
    disk, later_ms = SimDisk(), machine_ms() + 2 * 86_400_000
    formatted(disk)
    assert last_repair(disk, node()) is None
    for text in (b"", b"x y", b"\xff 1", b"-5 x", b"%d x" % later_ms, b"9" * 20 + b" x"):
        disk.write_atomic(DATA / REPAIRED_NAME, text)
        assert last_repair(disk, node()) is None, text
    note_repair(
        disk, node(), "damaged: corrupt at byte 0: noted by an earlier process: a flipped bit"
    )
    noted = last_repair(disk, node())
    assert noted is not None
    assert noted.why == "a flipped bit"
    assert later_ms - 2 * 86_400_000 <= noted.began_ms <= machine_ms()


def test_nothing_is_taken_from_a_process_that_runs(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimDisk()
    lived(disk, busy_log())
    garbage(disk)
    before = {*files(disk, DATA / "state"), *files(disk, DATA / "outgoing")}
    lock = open_directory(disk, DATA, cluster_id="c", name="n1")
    with caplog.at_level(logging.WARNING):
        free_disk_space(disk, node())
    assert "is in use by process" in str(vars(caplog.records[-1])["error"])
    assert {*files(disk, DATA / "state"), *files(disk, DATA / "outgoing")} == before
    lock.close()


def test_damaged_manifest_keeps_what_it_may_name() -> None:
    disk = SimDisk()
    lived(disk, busy_log())
    before = {*files(disk, DATA / "state")}
    disk.flip(DATA / "state" / manifest.NAME, 100)
    free_disk_space(disk, node())
    assert {*files(disk, DATA / "state")} == before
    with pytest.raises(Damaged):
        opened(disk)
