"""`timerctl verify`, and the scrub of running nodes: damage is named, and healed by itself."""

import asyncio
import errno
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.sim.world.simdisk import SimDisk
from cluster.files import scrubber as scrubbing
from cluster.files import verify
from cluster.files.scrubber import FIRST_S, HAND_OVER_S_MAX, RESULT_S, Scrubber
from cluster.files.verify import DAMAGED, UNCHECKED
from cluster.node.timerd import init
from cluster.settings.config import NodeConfig, build_config
from tests import waiting
from tests.cluster.running import Rotting, Running, flip, installs, kept_runs, until
from tests.timer.node_files import INCOMING, receive, taken
from timer.files.data_directory import LOCK_NAME, open_directory
from timer.files.disk import FreshDisk, RealDisk
from timer.model.timer_errors import CorruptFileError, NotReadyError
from timer.model.units import UnixMs
from timer.recovery.scrub import FileCheck
from timerclient import NotFound
from timerclient.cli import timerctl as cli
from timerclient.proto import timer_pb2 as pb

MIB = 1 << 20
SETTINGS = (
    f"storage.memtable_bytes_flush = {MIB}",
    f"storage.log_bytes_flush = {MIB}",
    "storage.flush_interval_ms = 1000",
    "storage.scrub_interval_ms = 300",
    "limits.payload_bytes_max = 65536",
    "limits.request_bytes_max = 524288",
)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Rotting(tmp_path_factory.mktemp("scrub"), SETTINGS).cleaned() as cluster:
        yield cluster


def timerctl(*words: str) -> int:
    return cli.main(["verify", *words])


def test_snapshot_that_is_going_to_be_installed_is_read_instead_of_state_and_log() -> None:
    disk, there, _ = taken()
    receive(disk, there, disk := SimDisk()).finish()
    paths = {INCOMING / part.path for part in there.parts}
    found = [*verify._install_order_files(disk, INCOMING)]
    assert {each.path for each in found} == paths | {INCOMING / "ready"}
    assert not [each for each in found if each.damage is not None]
    path = max(paths)
    for spoil in (disk.flip, lambda path, _: disk.remove(path)):
        spoil(path, 60)
        (damaged,) = (
            each for each in verify._install_order_files(disk, INCOMING) if each.damage is not None
        )
        assert damaged.path == path


def test_stopped_node_on_a_read_only_disk_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "n1"
    names = ["--name", "n1", "--voters", "n1", "--cluster-id", "c"]
    assert init(["--data", str(data), *names]) == 0
    opened = os.open

    def read_only(path: Any, flags: int, *words: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and path != os.devnull:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opened(path, flags, *words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        assert timerctl("--data", str(data)) == UNCHECKED, "there is no lock yet"
        assert "LOCK: lock failed: EROFS" in capsys.readouterr().err
    RealDisk().lock(data / LOCK_NAME).release()
    monkeypatch.setattr(os, "open", read_only)
    assert timerctl("--data", str(data)) == 0
    lock = RealDisk().lock(data / LOCK_NAME)
    assert timerctl("--data", str(data)) == UNCHECKED
    assert "is in use by process" in capsys.readouterr().err
    lock.release()


# The first has nodes of its own: none of the others run beside them.


@pytest.mark.slow
def test_verify_reads_a_stopped_node_and_names_file_and_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(tmp_path, SETTINGS).cleaned() as cluster:
        with cluster.client() as client:
            client.schedule_batch("far", [b"x" * 20_000] * 10, delay=86_400)
        data = cluster.directory / "n1"
        until(lambda: kept_runs(data), WAIT_S)
        assert timerctl("--data", str(data)) == UNCHECKED
        assert "is in use by process" in capsys.readouterr().err
        cluster.kill("n1")

        assert timerctl("--data", str(data)) == 0
        assert "none damaged" in capsys.readouterr().out
        (run, *_) = kept_runs(data)
        names = ["promise", "identity.json", "raft/meta", "raft/journal", "raft-member"]
        paths = [data / "state" / "manifest", run, *(data / name for name in names)]
        whole = {path: path.read_bytes() for path in paths}
        for path in paths:
            at = 5 if path.name == "journal" else len(whole[path]) // 2
            flip(path, at)
            assert timerctl("--data", str(data), "-o", "json") == DAMAGED
            told = json.loads(capsys.readouterr().out)["damaged"]
            assert [each["file"] for each in told] == [str(path)]
            path.write_bytes(whole[path])
        assert timerctl("--data", str(data)) == 0
        assert "There is no manifest" not in capsys.readouterr().out
        (data / "state" / "manifest").rename(data / "kept")
        assert timerctl("--data", str(data)) == 0, "the log holds all"
        assert "There is no manifest" in capsys.readouterr().out
        (data / "kept").rename(data / "state" / "manifest")
        assert timerctl("--data", str(tmp_path)) == UNCHECKED
        assert "it is not a data directory of timerd" in capsys.readouterr().err
        (data / "log").rename(data / "lost")
        assert timerctl("--data", str(data)) == DAMAGED
        assert (
            f"{data / 'log'}: corrupt at byte 0: the log has no segments" in capsys.readouterr().out
        )
        (data / "raft").rename(data / "kept")
        (data / "raft").touch()
        assert timerctl("--data", str(data)) == DAMAGED
        assert f"{data / 'raft'}: list failed: ENOTDIR" in capsys.readouterr().out
        (data / "raft").unlink()
        (data / "kept").rename(data / "raft")
        (data / "lost").rename(data / "log")
        unopened = [data / "log" / "durable", data / "promise", data / "state" / "manifest"]
        for path in unopened:
            path.rename(path.with_name("kept"))
            path.mkdir()
        assert timerctl("--data", str(data), "-o", "json") == DAMAGED
        found = json.loads(capsys.readouterr().out)
        assert {each["file"] for each in found["damaged"]} == {*map(str, unopened)}
        assert all("read failed: EISDIR" in each["what"] for each in found["damaged"])
        for path in unopened:
            path.rmdir()
            path.with_name("kept").rename(path)
        (data / "log").rename(data / "lost")
        order = data / "incoming" / "ready"
        order.parent.mkdir(exist_ok=True)
        order.write_bytes(b"no order")
        assert timerctl("--data", str(data)) == DAMAGED
        assert str(order) in capsys.readouterr().out
        order.unlink()
        (data / "lost").rename(data / "log")


@pytest.mark.slow
def test_damage_that_nobody_reads_is_found_and_healed_under_the_same_pid(cluster: Running) -> None:
    leader = cluster.up()
    data = cluster.directory / leader
    pid = cluster.node(leader).pid
    with cluster.client() as client:
        client.schedule_batch("far", [b"x" * 20_000] * 10, delay=86_400)
        (path, *_) = until(lambda: kept_runs(data), WAIT_S)
        until(lambda: cluster.metric(leader, "timer_scrubbed_bytes_total") > 200_000, WAIT_S)
        until(lambda: cluster.metric(leader, "timer_scrub_passes_total") > 0, WAIT_S)
        before = installs(cluster, leader)
        flip(path, path.stat().st_size // 2)
        until(lambda: installs(cluster, leader) > before, WAIT_S)
        assert "a file is damaged, to be repaired" in cluster.log(leader)
        assert f"{path}: corrupt at byte" in cluster.log(leader)
        assert cluster.node(leader).pid == pid
        cluster.start(timeout_s=WAIT_S)  # waits until it is ready
        client.schedule("far", b"after", delay=3600)
    cluster.digests_agree()
    until(lambda: cluster.metric(leader, "timer_scrub_passes_total") >= 1, WAIT_S)
    assert cluster.metric(leader, "timer_damaged") == 0


# ---- when it may heal


def formatted(tmp_path: Path) -> NodeConfig:
    """Format the directory of n2, of three nodes; return the settings."""
    from replication.core.promise import NEVER_GIVEN
    from timer.files.data_directory import format_directory, founding_replica_id

    replica = founding_replica_id("test", "n2")
    format_directory(
        RealDisk(), tmp_path / "data", cluster_id="test", name="n2", replica_id=replica,
        founding_voters={"n2": replica}, promise=NEVER_GIVEN,
    )  # fmt: skip
    addresses = {f"peers.n{number}": f"127.0.0.1:{7400 + number}" for number in (1, 2, 3)}
    return build_config(
        {"name": "n2", "cluster_id": "test", "data": str(tmp_path / "data"), **addresses}
    )


def scrubber(
    config: NodeConfig, others: list[pb.NodeStatus], ended: list[BaseException]
) -> Scrubber:
    class Replica:
        voters = frozenset({1, 2, 3})

    async def asked() -> list[pb.NodeStatus]:
        return others

    async def nothing(target: str) -> bool:
        return not target

    directory = open_directory(RealDisk(), config.data, cluster_id="test", name="n2")
    return Scrubber(
        FreshDisk(),
        config,
        directory,
        Replica(),  # type: ignore[arg-type]
        others=asked,
        hand_over=nothing,
        wall_ms=lambda: UnixMs(1),
        fatal=ended.append,
    )


def status(number: int, **more: object) -> pb.NodeStatus:
    fields: dict[str, object] = {"reachable": True, **more}
    return pb.NodeStatus(name=f"n{number}", replica_id=number, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "waits"),
    [
        ([status(1), status(3)], ""),
        ([status(1), status(3, reachable=False)], "1 of 3 voters would be left"),
        ([status(1), status(3, unsure=True)], "1 of 3 voters would be left"),
        ([status(1), status(4)], "1 of 3 voters would be left"),
        ([status(1, damage="x"), status(3)], "n1 is repaired first"),
        ([status(1), status(3, damage="x")], ""),
    ],
)
def test_damaged_node_leaves_only_if_the_others_can_go_on(
    tmp_path: Path, others: list[pb.NodeStatus], waits: str
) -> None:
    config = formatted(tmp_path)
    ended: list[BaseException] = []
    damaged = scrubber(config, others, ended)
    assert damaged._why_wait(others) == waits
    if not waits:
        error = CorruptFileError("a", 0, "b")
        asyncio.run(damaged._end_for_repair(error))
        assert ended == [error]
    damaged.stop()


def test_first_pass_of_the_scrub_waits_and_later_ones_keep_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = formatted(tmp_path)
    waiting, pauses = scrubber(config, [], []), list[tuple[float, int]]()

    class Clock:
        """Stands still."""

        @staticmethod
        def get_running_loop() -> Any:
            loop = asyncio.get_running_loop()
            return SimpleNamespace(time=lambda: 7.0, run_in_executor=loop.run_in_executor)

    async def pause(seconds: float) -> None:
        pauses.append((seconds, waiting.passes))
        if len(pauses) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(scrubbing, "asyncio", Clock)
    monkeypatch.setattr(waiting, "_pause", pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(waiting.run())
    waiting.stop()
    interval_s = config.storage.scrub_interval_ms / 1000
    assert interval_s > FIRST_S
    assert pauses == [(FIRST_S, 0), (interval_s, 1), (interval_s, 2)]


def test_result_of_a_pass_that_was_asked_for_stays_before_the_next_that_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that take longer than the interval follow each other at once."""
    asked, pauses = scrubber(formatted(tmp_path), [], []), list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise asyncio.CancelledError
        if len(pauses) == 2:
            asked.begin()

    monkeypatch.setattr(asked, "_interval_s", 0.0)
    monkeypatch.setattr(asked, "_pause", pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asked.run())
    asked.stop()
    assert pauses == [0, 0, RESULT_S, 0]


@pytest.mark.parametrize("rate", [0, MIB])
async def test_pass_that_is_asked_for_begins_at_once_and_one_that_runs_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: int
) -> None:
    config, ended, damaged = formatted(tmp_path), list[BaseException](), "log/0.log"
    config = replace(config, storage=replace(config.storage, scrub_bytes_per_s=rate))
    asked, go, passes = scrubber(config, [status(1), status(3)], ended), threading.Event(), [0]

    def scrub(*_: object, **__: object) -> Iterator[FileCheck]:
        passes[0] += 1
        yield FileCheck(Path("whole"), 7, None)
        assert go.wait(WAIT_S)
        yield FileCheck(
            Path(damaged), 0, CorruptFileError(damaged, 9, "why") if passes[0] > 1 else None
        )

    monkeypatch.setattr(scrubbing, "TELL_S", 0.1)
    monkeypatch.setattr(scrubbing, "scrub", scrub)
    work = asyncio.create_task(asked.run())
    assert asked.last_pass() == pb.NodeVerification(node="n2", reachable=True)
    for number in (1, 2):
        go.clear()
        asked.begin()
        assert asked.last_pass().began_at_ms, "it is known before its thread runs"
        await waiting.until(lambda: asked.last_pass().files == 1)
        asked.begin()
        go.set()
        await waiting.until(lambda: asked.last_pass().ended_at_ms)
        assert (passes[0], asked.last_pass().files, asked.last_pass().bytes) == (number, 2, 7)
    (found,) = asked.last_pass().damages
    assert (found.file, found.byte) == (damaged, 9)
    assert asked.last_pass().repair == "the node fetches its state and its log from the leader"
    asked.begin()  # it would hide the damage
    assert asked.last_pass().damages
    await waiting.until(lambda: ended)
    work.cancel()
    asked.stop()
    assert len(ended) == 1


def test_damaged_leader_gives_the_leadership_to_a_node_without_damage_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is being healed fetches from the leader, which can't send what is damaged."""
    answers = [
        [status(1, reachable=False), status(3, drained=True)],
        [status(1, reachable=False), status(3)],
        [status(1), status(3, damage="x")],
    ]
    ended, targets = list[BaseException](), list[str]()
    damaged = scrubber(formatted(tmp_path), [], ended)

    async def others() -> list[pb.NodeStatus]:
        return answers.pop(0)

    async def hand_over(target: str) -> bool:
        targets.append(target)
        return True

    monkeypatch.setattr(damaged, "_others", others)
    monkeypatch.setattr(damaged, "_hand_over", hand_over)
    monkeypatch.setattr(scrubbing, "RETRY_S", 0.0)
    asyncio.run(damaged._end_for_repair(CorruptFileError("a", 0, "b")))
    damaged.stop()
    assert (targets, len(ended)) == (["n3", "n1"], 1)


def test_transfers_that_fail_or_do_not_last_are_asked_for_at_growing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = [status(1, reachable=False), status(3)]
    damaged, asked = scrubber(formatted(tmp_path), [], []), list[float]()
    clock = SimpleNamespace(s=0, leads=True)

    async def others() -> list[pb.NodeStatus]:
        return waits if clock.s < 4000 else [status(1), status(3)]

    async def hand_over(target: str) -> bool:
        if not clock.leads:
            return False
        if target == "n3":
            asked.append(clock.s)
        if len(asked) % 2:
            raise NotReadyError("no transfer")
        return True

    async def sleep(seconds: float) -> None:
        clock.s += seconds
        clock.leads = not 20 < clock.s < 50

    monkeypatch.setattr(damaged, "_others", others)
    monkeypatch.setattr(damaged, "_hand_over", hand_over)
    loop = SimpleNamespace(time=lambda: clock.s)
    stub = SimpleNamespace(get_running_loop=lambda: loop, sleep=sleep)
    monkeypatch.setattr(scrubbing, "asyncio", stub)
    asyncio.run(damaged._end_for_repair(CorruptFileError("a", 0, "b")))
    damaged.stop()
    assert asked[:5] == [0, 2, 6, 14, 50], "it did not lead at 30"
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked[4:])]
    assert pauses[:2] == [32, 64]
    assert max(pauses) == HAND_OVER_S_MAX


@pytest.mark.parametrize("runs", [False, True])
async def test_damage_that_another_reader_met_is_healed_once_as_that_of_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, runs: bool
) -> None:
    """A follower that fetches a snapshot lets the leader meet its damage again and again."""
    config, others, ended = formatted(tmp_path), [status(3)], list[BaseException]()
    config = replace(config, storage=replace(config.storage, scrub_bytes_per_s=1 if runs else 0))
    damaged, targets = scrubber(config, others, ended), list[str]()
    error = CorruptFileError("state/runs/1", 7, "why")

    def scrub(*_: object, pace: Callable[[int], None], **__: object) -> Iterator[FileCheck]:
        pace(1 << 20)  # for days, at a byte a second
        pace(1)
        yield FileCheck(Path("whole"), 7, None)

    async def hand_over(target: str) -> bool:
        targets.append(target)
        return True

    monkeypatch.setattr(scrubbing, "RETRY_S", 0.01)
    monkeypatch.setattr(scrubbing, "TELL_S", 0.0)
    monkeypatch.setattr(scrubbing, "scrub", scrub)
    monkeypatch.setattr(damaged, "_hand_over", hand_over)
    work = asyncio.create_task(damaged.run())
    if runs:
        damaged.begin()
        await waiting.until(lambda: damaged.bytes_read)
    for _ in range(2):
        damaged.on_damage(error)
        assert damaged.damage == str(error)
    await waiting.until(lambda: damaged.last_pass().repair == "waits: 1 of 3 voters would be left")
    damaged.on_damage(error)
    damaged.on_damage(CorruptFileError("another", 0, "why"))
    (shown,) = damaged.last_pass().damages
    assert (shown.file, shown.byte, shown.what) == ("state/runs/1", 7, str(error))
    assert (targets[:1], ended) == (["n3"], [])
    others.append(status(1))
    await waiting.until(lambda: ended)
    assert not damaged._requested.is_set()
    work.cancel()
    damaged.stop()
    assert ended == [error]


async def test_alone_node_reads_on_after_damage_and_says_that_nothing_heals_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = formatted(tmp_path)
    config = replace(config, peers={"n2": config.peers["n2"]})
    alone = scrubber(config, [], [])
    found = [FileCheck(Path(n), 0, CorruptFileError(n, 1, "why")) for n in ("a", "b")]
    monkeypatch.setattr(scrubbing, "scrub", lambda *_, **__: iter(found))
    monkeypatch.setattr(scrubbing, "TELL_S", 0.0)
    work = asyncio.create_task(alone.run())
    alone.begin()
    await waiting.until(lambda: alone.last_pass().ended_at_ms)
    assert [each.file for each in alone.last_pass().damages] == ["a", "b"]
    assert alone.last_pass().repair.startswith("none")
    work.cancel()
    alone.stop()


async def test_alone_node_reads_all_files_after_damage_that_a_backup_met_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ended, passes = formatted(tmp_path), list[BaseException](), [0]
    config = replace(config, peers={"n2": config.peers["n2"]})
    alone = scrubber(config, [], ended)
    errors = {name: CorruptFileError(name, 1, "why") for name in ("a", "b")}

    def scrub(*_: object, **__: object) -> Iterator[FileCheck]:
        passes[0] += 1
        yield from (FileCheck(Path(name), 0, error) for name, error in errors.items())

    monkeypatch.setattr(scrubbing, "scrub", scrub)
    work = asyncio.create_task(alone.run())
    for _ in range(2):
        alone.on_damage(errors["b"])
        await waiting.until(lambda: alone.last_pass().repair.startswith("none"))
        assert sorted(each.file for each in alone.last_pass().damages) == ["a", "b"]
        assert not alone._requested.is_set(), "the damage is known"
    work.cancel()
    alone.stop()
    assert (passes, ended) == ([1], [])


# ---- of a running cluster


@pytest.mark.slow
def test_verify_of_a_running_cluster_names_the_damage_and_compares_the_states(
    cluster: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.up()
    victim, other = cluster.followers()
    with cluster.client() as client:
        client.schedule_batch("far", [b"x" * 20_000] * 10, delay=86_400)
        (path, *_) = until(lambda: kept_runs(cluster.directory / victim), WAIT_S)
        with pytest.raises(NotFound, match="n9"):
            client.begin_verification("n9")
        with pytest.raises(NotFound, match="n9"):
            client.verification("n9")
    words = [f"--endpoints={cluster.node(other).grpc}", "--timeout=30s", "-ojson", "verify"]

    def told(*more: str) -> dict[str, Any]:
        code = cli.main([*words, *more])
        found: dict[str, Any] = json.loads(capsys.readouterr().out) | {"code": code}
        return found

    whole = told()
    assert (whole["code"], whole["verdict"], whole["agreement"]) == (0, "ok", "SAME")
    assert [each["node"] for each in whole["nodes"]] == [*cluster.nodes]
    assert len({each["digest"] for each in whole["nodes"]}) == 1
    assert all(each["ended_at_ms"] for each in whole["nodes"])
    [mine] = [each for each in whole["nodes"] if each["node"] == victim]
    assert mine["files"] >= 2
    assert mine["bytes"] > 100_000

    before = installs(cluster, victim)
    flip(path, path.stat().st_size // 2)
    found = told(victim)  # another node passes the request on
    assert (found["code"], found["verdict"], found["agreement"]) == (1, "damaged", None)
    [damage] = found["nodes"][0]["damages"]
    assert damage["file"] == str(path)
    assert f"{path}: corrupt at byte {damage['byte']}" in damage["what"]
    assert "fetches its state and its log" in found["nodes"][0]["repair"]
    until(lambda: installs(cluster, victim) > before, WAIT_S)
    cluster.start(timeout_s=WAIT_S)  # waits until it is ready
    cluster.digests_agree()

    cluster.kill(victim)
    words[1] = "--timeout=1s"
    found = told()
    assert (found["code"], found["verdict"], found["agreement"]) == (3, "incomplete", "UNKNOWN")
    [gone] = [each for each in found["nodes"] if not each["reachable"]]
    assert (gone["node"], gone["bytes"]) == (victim, None)
    assert gone["error"]
    cluster.start(victim)
