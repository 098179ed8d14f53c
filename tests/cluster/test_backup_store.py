"""Backups without processes: the store, the catalogue, damage, and the directories of a restore."""

import asyncio
import errno
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from pyarrow import parquet

from cluster.api.backup_desk import OPEN_MAX, BackupDesk
from cluster.api.log_shipping import LogShipping
from cluster.backup import restoration
from cluster.backup.backup_run import BackupRun, chosen_node, committed_index
from cluster.backup.backup_store import (
    INCOMPLETE_AGE_S,
    BackupError,
    BackupStore,
    StoreUnavailable,
)
from cluster.backup.catalogue import (
    CATALOGUES,
    Catalogue,
    catalogue_name,
    find_backup,
    read_catalogues,
)
from cluster.backup.parquet_export import ParquetExport
from cluster.backup.restoration import STAGE, receive
from cluster.backup.store_care import damages_of, prune
from cluster.security.access_rules import CLUSTER, Permission
from cluster.security.method_rules import METHOD_RULES
from cluster.state.host import Host
from replication.core.log_recovery import recover as shape_of
from replication.core.promise import PromiseFile
from tests.cluster.backups import DISK, OneNode, backed_up, plan_of, restored
from tests.timer.machines import START_MS, engine_on, part_of, state_of
from timer.files.data_directory import read_identity, sha256_of
from timer.files.disk import Disk, RealDisk
from timer.files.log import Log as TimerLog
from timer.model.columns import Binary, encode_headers
from timer.model.timer_errors import NotFoundError, NotReadyError, UnreadableFileError
from timer.model.timer_id import decode, from_text, salt_of
from timer.model.units import LogIndex, MonoMs, ReplicaId, TopicId, UnixMs
from timer.recovery import manifest
from timer.recovery.rows_at_rest import pending_rows
from timer.recovery.snapshot_source import PINNED_MS
from timerclient.cli.timerctl import main as timerctl
from timerclient.cli.timerctl import make_parser
from timerclient.client.timer_client import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import InvalidRequest, Unavailable


@pytest.fixture
def node(tmp_path: Path) -> OneNode:
    return OneNode(tmp_path)


def test_wait_for_a_leader_is_told_once(
    node: OneNode, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    looks = iter([False, False, True])
    node.serving = False

    def again(_: float) -> None:
        node.serving = next(looks)

    monkeypatch.setattr(time, "sleep", again)
    BackupRun(cast("TimerClient", node), store, patience_s=60, on_progress=told.append).take()
    [line] = told
    assert line.startswith("waiting, up to 60 s: no serving leader answers")


@pytest.mark.parametrize("command", ["backup", "export"])
def test_timeout_before_the_command_counts(command: str) -> None:
    def timeout_s(*words: str) -> float:
        return float(make_parser().parse_args([*words, "--into", "d"]).timeout.total_seconds())

    assert timeout_s("--timeout", "3s", command) == 3
    assert timeout_s("--timeout", "3s", command, "--timeout", "4s") == 4
    assert timeout_s(command) == 120


@pytest.mark.parametrize("level", [1, 2])
def test_restored_directories_hold_the_state_and_a_log_of_new_voters(
    node: OneNode, store: BackupStore, tmp_path: Path, level: int
) -> None:
    node.log.begin_epoch(level)
    node.grow()
    found = backed_up(node, store)
    assert found.manifest_version == manifest.VERSION_OF_LEVEL_1 + level - 1
    places = restored(store, found, tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a", "b", "state"]
    old = engine_on(DISK, node.state)
    voters = set[ReplicaId]()
    for name, place in places.items():
        engine = engine_on(DISK, place / "state")
        assert state_of(engine.machine) == state_of(old.machine)
        identity = read_identity(DISK, place)
        assert (identity.name, identity.is_founder) == (name, True)
        voters.add(identity.replica_id)
        log = TimerLog.open(DISK, place / "log", committed_floor=engine.manifest_index)
        promise = PromiseFile.load(DISK, place / "promise", last_epoch=log.last_epoch)
        shape, _, level_of_log = shape_of(log, frozenset({ReplicaId(1)}), UnixMs(0))
        log.close()
        assert (level_of_log, identity.level) == (level, level)
        assert promise.unsure
        assert promise.promise.epoch == log.last_epoch > found.epoch
        assert shape.voters == {*identity.founding_voters.values()}
        assert log.first_index == found.index + 1
    assert voters == {*plan_of(found).replicas.values()}
    assert voters.isdisjoint(old.machine.voters)
    assert voters.isdisjoint(plan_of(found, restore_id="s").replicas.values())


def test_nodes_without_a_leader_give_no_backup_as_they_may_lack_acknowledged_timers(
    node: OneNode, store: BackupStore
) -> None:
    node.serving = False
    with pytest.raises(Unavailable, match="no serving leader"):
        backed_up(node, store)
    assert read_catalogues(store) == []
    former = pb.NodeStatus(name="n1", reachable=False, serving=True, commit_index=9)
    with pytest.raises(Unavailable, match="no serving leader"):
        committed_index([former])


def test_pending_rows_of_a_backup_are_those_of_the_machine(node: OneNode) -> None:
    engine = node.grow(rows=5)
    state = manifest.read(DISK, node.state)
    assert state is not None
    rows = [rows for rows, _ in pending_rows(state, DISK, node.state)]
    counts = Counter(topic for part in rows for topic in part["topic"].tolist())
    topics = engine.machine.topics.values()
    assert counts == {t.topic_id: t.counts.pending for t in topics if t.counts.pending}
    assert counts.total() == manifest.pending_of(state) > 5


def test_later_backup_fetches_new_files_only_and_one_that_was_cut_continues(
    node: OneNode, store: BackupStore
) -> None:
    first = backed_up(node, store)
    assert node.fetched == first.sent_bytes == first.size
    again = backed_up(node, store)
    assert (again.sent_bytes, again.index, again.parts) == (0, first.index, first.parts)

    node.grow(rows=3)
    node.left = node.state.joinpath("manifest").stat().st_size  # the first part that is sent
    with pytest.raises(BackupError, match="closed the backup"):
        backed_up(node, store)
    ended = [node.complete]
    assert len({each.index for each in read_catalogues(store)}) == 1
    head, node.left = node.left, None
    later = backed_up(node, store)
    assert [*ended, node.complete] == [False, True]
    assert later.index > first.index
    assert node.fetched == later.sent_bytes < later.size - head
    assert find_backup(store, at_index=first.index).index == first.index
    assert find_backup(store) == later


def test_newest_backup_is_that_of_the_cluster_clock(node: OneNode, store: BackupStore) -> None:
    year_ms = 365 * 86_400_000
    first = backed_up(node, store)
    ahead = replace(first, begun_ms=first.begun_ms + year_ms, ended_ms=first.ended_ms + year_ms)
    data = ahead.encode()
    store.put(catalogue_name(first.backup), [data], len(data))  # by a host with a wrong clock
    node.grow(rows=3)
    newest = backed_up(node, store)
    assert read_catalogues(store) == [ahead, newest]
    assert find_backup(store) == newest
    assert prune(store, 1).backups == [first.backup]


def test_bytes_that_change_on_their_way_are_refused_and_fetched_again(
    node: OneNode, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(_: str, __: int, path: str, offset: int) -> bytes:
        data = DISK.read(node.pinned / path, offset, 1000)
        return data[:-1] + bytes([data[-1] ^ 1])

    with monkeypatch.context() as patched:
        patched.setattr(node, "fetch_backup", spoiled)
        with pytest.raises(BackupError, match="CRC-32"):
            backed_up(node, store)
    assert store.sizes("parts") == {}
    found = backed_up(node, store)
    assert damages_of(store) == (len(found.parts), [])


def test_part_of_a_cut_backup_is_read_before_it_is_trusted(
    node: OneNode, store: BackupStore, tmp_path: Path
) -> None:
    cut = backed_up(node, store)
    for _ in range(2):  # an absent one is no error
        store.delete(catalogue_name(cut.backup))
    path = tmp_path / "store" / cut.parts[-1].name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    later = backed_up(node, store)
    assert later.sent_bytes == later.parts[-1].size
    assert damages_of(store) == (len(later.parts), [])


def test_lost_part_gets_its_old_name_though_a_cut_backup_left_it_by_another(
    node: OneNode, store: BackupStore, tmp_path: Path
) -> None:
    first = backed_up(node, store)
    path = tmp_path / "store" / first.parts[-1].name
    path.rename(path.with_suffix(".0"))
    later = backed_up(node, store)
    assert later.parts == first.parts
    assert damages_of(store) == (len(first.parts), [])


def test_parts_that_a_prune_deletes_during_a_verification_are_no_damage(
    node: OneNode, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = backed_up(node, store)
    node.grow(rows=3)
    second = backed_up(node, store)
    idle = {part.name for part in first.parts} - {part.name for part in second.parts}
    read = store.read

    def slow(name: str) -> Any:
        if name in idle:
            prune(store, 1)
        return read(name)

    assert idle
    monkeypatch.setattr(store, "read", slow)
    assert damages_of(store) == (len({*first.parts, *second.parts}), [])


@pytest.mark.parametrize("during", ["a fetch", "the write of the catalogue"])
def test_backup_fails_if_a_prune_has_deleted_one_of_its_parts(
    node: OneNode, store: BackupStore, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    fetch, put, deleted = node.fetch_backup, store.put, list[str]()

    def prune_a_part() -> None:
        found = [name for name in store.sizes("parts") if manifest.NAME not in name]
        if found and not deleted:
            deleted.append(found[0])
            store.delete(found[0])

    def slow_fetch(*request: Any) -> bytes:
        prune_a_part()
        return fetch(*request)

    def slow_put(name: str, data: Any, size: int) -> None:
        if name.startswith(CATALOGUES):
            prune_a_part()
        put(name, data, size)

    with monkeypatch.context() as patched:
        if during == "a fetch":
            patched.setattr(node, "fetch_backup", slow_fetch)
        else:
            patched.setattr(store, "put", slow_put)
        with pytest.raises(BackupError, match="a prune deleted parts of this backup"):
            backed_up(node, store)
    assert len(deleted) == 1
    assert read_catalogues(store) == []
    found = backed_up(node, store)
    assert damages_of(store) == (len(found.parts), [])


@pytest.mark.parametrize("harm", ["missing", "shorter", "changed"])
def test_harmed_part_is_named_and_leaves_no_directory(
    node: OneNode, store: BackupStore, tmp_path: Path, harm: str
) -> None:
    found = backed_up(node, store)
    part = random.Random(harm).choice(found.parts)
    path = tmp_path / "store" / part.name
    data = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if harm == "shorter" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BackupError, match=part.name):
        restored(store, found, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    [told] = damages_of(store)[1]
    assert told.endswith(f"; {found.backup} needs it")
    path.unlink(missing_ok=True)  # as docs/backup.md says
    assert backed_up(node, store).sent_bytes == part.size
    assert damages_of(store) == (len(found.parts), []), "the first backup is whole again, too"


def test_damaged_or_foreign_catalogues_and_targets_in_use_are_refused(
    node: OneNode, store: BackupStore, tmp_path: Path
) -> None:
    with pytest.raises(BackupError, match="no complete backup"):
        find_backup(store)
    found = backed_up(node, store)
    (path,) = (tmp_path / "store" / "backups").iterdir()
    good = path.read_bytes()
    for bad, why in (
        (good.replace(b'"pending": ', b'"pending": 1'), "damaged: checksum"),
        (b"[]", "not a catalogue"),
        (good[:-9], "not a catalogue"),
    ):
        path.write_bytes(bad)
        with pytest.raises(BackupError, match=why):
            read_catalogues(store)
    path.write_bytes(good)
    with pytest.raises(BackupError, match="no such backup: 'x'; the store has one backup, "):
        find_backup(store, backup="x")
    with pytest.raises(BackupError, match="no backup is that old"):
        find_backup(store, at_index=found.index - 1)
    with pytest.raises(InvalidRequest, match="1 to 7 different names"):
        plan_of(found, voters=("a", "a"))
    for name in ("../a", "a b", "."):  # no node can have them
        with pytest.raises(InvalidRequest, match=r"node = .* must be 1 to 63 letters, digits"):
            plan_of(found, voters=(name,))

    target = tmp_path / "new"
    (target / "a").mkdir(parents=True)
    with pytest.raises(BackupError, match=r"is not empty \(a\): restore into"):
        restored(store, found, target)
    (target / STAGE / "state").mkdir(parents=True)  # of a restore that was cut
    with pytest.raises(BackupError, match=r"is not empty \(a\); .* the rest may be incomplete"):
        restored(store, found, target)
    (target / "a").rmdir()
    assert restored(store, found, target).keys() == {"a", "b", "state"}

    other = OneNode.status(node)
    other.cluster_id = "d"
    node.status = lambda: other  # type: ignore[method-assign]
    with pytest.raises(BackupError, match="backups of cluster 'c'"):
        backed_up(node, store)


def test_copy_of_a_catalogue_is_named_and_prune_goes_on_without_it(
    node: OneNode, store: BackupStore, tmp_path: Path
) -> None:
    first = backed_up(node, store)
    node.grow(rows=3)
    second = backed_up(node, store)
    copy = tmp_path / "store" / catalogue_name(f"{first.backup} (1)")
    shutil.copy(tmp_path / "store" / catalogue_name(first.backup), copy)
    with pytest.raises(BackupError, match=r"\(1\).json: a copy of .*: remove it"):
        prune(store, 1)
    assert damages_of(store, first.backup) == (len(first.parts), [])
    copy.unlink()
    assert prune(store, 1).backups == [first.backup]
    assert read_catalogues(store) == [second]


def test_store_with_backups_of_two_clusters_is_listed_and_refused(
    node: OneNode, store: BackupStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = backed_up(node, store)
    foreign = replace(own, backup="foreign", cluster_id="d", time_ms=own.time_ms + 1)
    data = foreign.encode()
    store.put(catalogue_name(foreign.backup), [data], len(data))  # of files that were moved here
    target = tmp_path / "new"
    for command in (
        ("backup", "prune", "--keep", "1"),
        ("backup", "verify"),
        ("restore", "--into", str(target)),
    ):
        assert timerctl([*command, "--from", store.root]) == 1
        assert "has backups of the clusters c, d" in capsys.readouterr().err
    assert len(store.sizes(CATALOGUES)) == 2
    assert timerctl(["backup", "list", "--from", store.root]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        *("CLUSTER", "c", "d")
    ]
    restore_own = ["restore", "--into", str(target), "--backup", own.backup, "--from", store.root]
    assert timerctl(restore_own) == 0


@pytest.mark.parametrize(("option", "what"), [("--nodes", "node"), ("--cluster-id", "cluster id")])
def test_empty_option_of_a_restore_is_not_the_default(
    node: OneNode,
    store: BackupStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    what: str,
) -> None:
    backed_up(node, store)
    words = ("--from", store.root, "--into", str(tmp_path / "new"), option, "")
    assert timerctl(["restore", *words]) == 2
    assert f"{what} = ''" in capsys.readouterr().err


def test_restore_that_fails_while_it_moves_directories_leaves_none(
    node: OneNode, store: BackupStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, target = backed_up(node, store), tmp_path / "new"
    rename = Path.rename

    def failing(path: Path, to: Path) -> Path:
        if to == target / "b" / "log":
            raise OSError(errno.EIO, "planted", str(to))
        return rename(path, to)

    for kept in (set[str](), {"lost+found"}):
        for name in kept:
            (target / name).mkdir(parents=True)
        monkeypatch.setattr(Path, "rename", failing)
        with pytest.raises(BackupError, match="planted"):
            restored(store, found, target)
        monkeypatch.setattr(Path, "rename", rename)
        assert {path.name for path in tmp_path.glob("new/*")} == kept
    assert target.exists()
    assert restored(store, found, target).keys() == {"a", "b", "state"}


@pytest.mark.parametrize("gone", [False, True])
def test_restore_that_fails_removes_only_its_own_files_and_refuses_another_meanwhile(
    node: OneNode,
    store: BackupStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    gone: bool,
) -> None:
    found, target = backed_up(node, store), tmp_path / "new"

    def failing(*_: object) -> None:
        with pytest.raises(BackupError, match=f"{STAGE} is in use by process {os.getpid()}"):
            restored(store, found, target)
        assert (target / STAGE / "state" / "identity.json").exists(), "it removed nothing"
        (target / "a").mkdir()  # of another program
        if gone:
            shutil.rmtree(target)
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(restoration, "_overdue", failing)
    with pytest.raises(BackupError, match="planted"):
        restored(store, found, target)
    assert [path.name for path in tmp_path.glob("new/*")] == ([] if gone else ["a"])


@pytest.mark.parametrize("command", ["export", "restore"])
def test_command_that_sigterm_ends_deletes_its_temporary_files(
    node: OneNode,
    store: BackupStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    backed_up(node, store)
    there: list[str] = []

    def ended(disk: Disk, *words: Any) -> Any:
        receive(disk, *words)
        there.extend(path.name for path in tmp_path.glob("t*/**/manifest"))
        signal.raise_signal(signal.SIGTERM)

    def unexpected(*_: object) -> None:
        raise AssertionError("SIGTERM would end the process at once")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(restoration, "receive", ended)
    before = signal.signal(signal.SIGTERM, unexpected)
    try:
        with pytest.raises(SystemExit, match="143"):
            timerctl([command, "--from", store.root, "--into", str(tmp_path / "target")])
        assert signal.getsignal(signal.SIGTERM) is unexpected
    finally:
        signal.signal(signal.SIGTERM, before)
    assert there == ["manifest"]
    assert not [*tmp_path.glob("temporary/*"), *tmp_path.glob("target/*")]


def test_unusable_stores_are_named(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="no URI of a store"):
        BackupStore("nonsense://x/y")
    with pytest.raises(BackupError, match="names no bucket"):
        BackupStore("s3://?region=eu-west-1")
    (tmp_path / "file").write_text("")
    with pytest.raises(BackupError, match="file is a file: give a directory"):
        BackupStore(str(tmp_path / "file"))
    with pytest.raises(StoreUnavailable, match="file"):
        BackupStore(str(tmp_path / "file/store")).put("a/b", [b"x"], 1)


def test_new_folders_of_a_store_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[str]()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    BackupStore(str(tmp_path / "store")).put("parts/0001/x", [b"x"], 1)
    root = tmp_path / "store"
    assert synced[:3] == [str(tmp_path), str(root), str(root / "parts")]


def test_node_of_the_last_backup_sends_the_next_or_else_a_follower() -> None:
    def of(*nodes: pb.NodeStatus) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(nodes=nodes)

    leader = pb.NodeStatus(name="n1", reachable=True, role="leader", replica_id=1)
    follower = pb.NodeStatus(name="n2", reachable=True, role="follower", replica_id=2)
    last: Any = type("Last", (), {"node": "n1", "replica_id": 1})
    assert chosen_node(of(leader, follower), []) == "n2"
    assert chosen_node(of(leader, follower), [last]) == "n1"
    replaced = pb.NodeStatus(name="n1", reachable=True, role="leader", replica_id=9)
    assert chosen_node(of(replaced, follower), [last]) == "n2"
    with pytest.raises(BackupError, match="no node answers"):
        chosen_node(of(pb.NodeStatus(name="n1")), [])


class Source:
    """The state plane of a node, as the desk sees it."""

    applied_index = LogIndex(1 << 40)
    manifest_index = LogIndex(0)
    is_low = False

    def __init__(self, index: LogIndex) -> None:
        self._index = index

    async def flush(self) -> None:
        self.manifest_index = self._index


def desk_of(
    node: OneNode, source: Source, disk: Disk = DISK, now: Sequence[int] = (0,), **more: Any
) -> BackupDesk:
    return BackupDesk(
        disk,
        node.state,
        node.state.parent / "backups",
        cast("Host", source),
        log=cast("LogShipping", None),
        replica_id=ReplicaId(7),
        bytes_per_s=1 << 30,
        mono_ms=lambda: MonoMs(now[0]),
        wall_ms=lambda: UnixMs(START_MS),
        **more,
    )


async def test_open_backups_are_bounded_and_end_after_a_minute_without_a_fetch(
    node: OneNode, tmp_path: Path
) -> None:
    now, failed = [0], list[BaseException]()
    index = engine_on(DISK, node.state).manifest_index
    source = Source(index)
    desk = desk_of(node, source, now=now, on_damage=failed.append, fatal=failed.append)
    opened = await desk.open(1, index)
    assert opened.index == index
    assert await desk.open(1, index) is opened
    part = opened.parts[0]
    assert len(await desk.fetch(1, part.path, 0)) == part.size
    assert await desk.fetch(1, part.path, part.size) == b""
    for number, path in (2, part.path), (1, "../../state/manifest"):
        with pytest.raises(NotFoundError):
            await desk.fetch(number, path, 0)
    for number in range(2, OPEN_MAX + 1):
        await desk.open(number, index)
    with pytest.raises(NotReadyError, match="4 backups are open"):
        await desk.open(99, index)
    now[0] = PINNED_MS - 1
    await desk.fetch(1, part.path, 0)
    now[0] = PINNED_MS
    desk.expire()
    while len(desk._free) < OPEN_MAX - 1:
        await asyncio.wait(desk._ending)
        await asyncio.sleep(0)  # the end of a task is noticed after it
    assert len(await desk.fetch(1, part.path, 0)) == part.size
    with pytest.raises(NotFoundError):
        await desk.fetch(2, part.path, 0)
    assert sum(path.is_file() for path in (tmp_path / "backups").rglob("*")) == len(opened.parts)
    source.is_low = True
    with pytest.raises(NotReadyError, match="little free space"):
        await desk.open(5, index)
    desk.close(3)
    assert desk.completed_ms == 0
    for _ in range(2):
        desk.close(1, complete=True)
        assert desk.completed_ms == START_MS
    assert failed == []


async def test_damage_that_a_backup_meets_is_healed_by_the_node_and_refused(
    node: OneNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node may lead, or be needed by another that is being healed: it must not end at once."""
    index, damages, failed = engine_on(DISK, node.state).manifest_index, list[Any](), list[Any]()
    disk = RealDisk()
    desk = desk_of(node, Source(index), disk, on_damage=damages.append, fatal=failed.append)
    part = (await desk.open(1, index)).parts[0]
    unreadable = UnreadableFileError("part", 3, "EIO")

    def fails(*_: object) -> bytes:
        raise unreadable

    monkeypatch.setattr(disk, "read", fails)
    with pytest.raises(NotReadyError, match="this node has damaged files: part: corrupt at byte 3"):
        await desk.fetch(1, part.path, 0)
    monkeypatch.undo()
    head = node.state / manifest.NAME
    head.write_bytes(head.read_bytes()[:-1])
    with pytest.raises(NotReadyError, match=r"this node has damaged files: .*manifest"):
        await desk.open(2, index)
    assert damages[0] is unreadable
    assert [damage.path for damage in damages[1:]] == [head]
    assert failed == []
    await asyncio.wait(desk._ending)


def test_catalogue_is_a_document_for_programs(node: OneNode, store: BackupStore) -> None:
    found = backed_up(node, store)
    document = json.loads(found.encode())
    assert document["format"] == 1
    assert {part["name"] for part in document["parts"]} == {*store.sizes("parts")}
    assert Catalogue.decode("x", found.encode()) == found
    del document["sha256"]
    later = document | {"program": "9.1", "compression": "zstd"}
    data = json.dumps(later | {"sha256": sha256_of(later)}).encode()
    with pytest.raises(BackupError, match=r"x: written by timerctl 9\.1, .*'compression'"):
        Catalogue.decode("x", data)


def test_backups_need_operate_for_all_topics_and_have_audit_lines_at_their_ends() -> None:
    rules = {
        name: METHOD_RULES[f"/timer.v1.AdminService/{name}Backup"]
        for name in ("Open", "Fetch", "Close")
    }
    assert {rule.permission for rule in rules.values()} == {Permission.OPERATE}
    assert [*map(list, (rule.targets(None) for rule in rules.values()))] == 3 * [[CLUSTER]]
    assert {name for name, rule in rules.items() if rule.is_audited} == {"Open", "Close"}


def test_export_has_the_rows_of_the_backup_with_the_ids_of_clients(
    node: OneNode, store: BackupStore, tmp_path: Path
) -> None:
    topic = engine_on(DISK, node.state).machine.next_topic_id
    node.log.topic("t/headers")
    timers = [(topic, START_MS + 10**9, payload) for payload in (b"p", b"")]
    headers = Binary.of([encode_headers({"a": "1", "b": ""}), b""])
    node.log.schedule(replace(part_of(timers, keys=[b"k\xc3\xbc", b""]), headers=headers))
    engine = node.grow(rows=5)
    found, target = backed_up(node, store), BackupStore(str(tmp_path / "export"))
    receive(DISK, store, found, tmp_path / "received")
    tables = ParquetExport(DISK, tmp_path / "received", found).write(target)
    assert tables == {
        "pending": (found.pending, ["pending-00000.parquet"]),
        "messages": (found.messages, ["messages-00000.parquet"]),
    }
    pending, messages = (
        parquet.read_table(tmp_path / "export" / f"{name}-00000.parquet") for name in tables
    )
    for table in pending, messages:
        assert table.schema.metadata[b"schema_version"] == b"1"
        assert table.schema.metadata[b"log_index"] == b"%d" % found.index
    rows = pending.to_pylist()
    assert len(rows) == manifest.pending_of(manifest.read(DISK, node.state) or {}) > 5
    salt = salt_of("c")
    for row in (*rows, *messages.to_pylist()):
        due, seq, genuine = decode(from_text(row["timer_id"]), salt)
        due_ms = round(row["due"].timestamp() * 1000)
        assert (due[0], seq[0], genuine[0]) == (due_ms, row["seq"], True)
    last = {row["payload"]: row for row in rows if row["topic"] == "t/headers"}
    assert (last[b"p"]["key"], last[b"p"]["headers"]) == ("k\u00fc", [("a", "1"), ("b", "")])
    assert (last[b""]["key"], last[b""]["headers"]) == (None, [])
    queue = engine.machine.topics[TopicId(1)].queue
    offsets = [row["queue_offset"] for row in messages.to_pylist() if row["topic"] == "a"]
    assert offsets == [*range(queue.begin, queue.end)]
    assert json.loads((tmp_path / "export/export.json").read_text())["pending"]["rows"] == len(rows)
    with pytest.raises(BackupError, match="is not empty"):
        ParquetExport(DISK, tmp_path / "received", found).write(target)


def test_two_writers_of_a_part_do_not_meet_and_its_file_is_not_for_others(tmp_path: Path) -> None:
    store = BackupStore(str(tmp_path / "store"))

    def cut() -> None:
        with store.open_writer("parts/a") as slow:
            slow.write(b"part")
            store.put("parts/a", [b"parts"], 5)
            assert b"".join(store.read("parts/a")) == b"parts"
            raise OSError("the writer ends")

    with pytest.raises(StoreUnavailable):
        cut()
    assert store.sizes("parts") == {"parts/a": 5}
    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.rglob("*")}
    assert all(not mode & 0o007 for mode in modes.values()), modes
    rest = tmp_path / "store/parts/b.0.tmp"
    rest.write_bytes(b"of a writer that was killed")
    store.delete_incomplete("parts")
    assert rest.exists(), "its writer may live"
    old_s = time.time() - INCOMPLETE_AGE_S
    os.utime(rest, (old_s, old_s))
    store.delete_incomplete("parts")
    assert not rest.exists()


def test_a_backup_is_found_by_its_id_though_the_catalogue_of_another_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node, store = OneNode(tmp_path), BackupStore(str(tmp_path / "store"))
    first = backed_up(node, store)
    node.grow(3)
    second = backed_up(node, store)
    (tmp_path / "store" / catalogue_name(second.backup)).write_text("{}")
    with pytest.raises(BackupError, match=second.backup):
        find_backup(store)
    assert find_backup(store, backup=first.backup) == first
    assert damages_of(store, first.backup)[1] == []
    assert timerctl(["backup", "list", "--from", store.root, "-o", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [each["backup"] for each in told["backups"]] == [first.backup]
    assert [second.backup in each for each in told["damaged"]] == [True]
    node.grow(3)
    assert backed_up(node, store).index > second.index, "one damaged file stops no later backup"
