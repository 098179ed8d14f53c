"""Against real processes: last means on the directories of stopped nodes."""

import errno
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from cluster.node.timerd import init
from deploy.local import LocalNode
from replication.core.promise import Promise, PromiseFile
from tests.cluster.running import Running, in_time, take, until
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import EpochStart, encode_epoch
from timer.files.disk import RealDisk
from timer.files.log import Log
from timer.model.units import Epoch, LogIndex, Nonce, ReplicaId, UnixMs
from timerclient import TimerClient
from timerclient.cli.timerctl import main as timerctl

pytestmark = pytest.mark.slow

COUNT = 50


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("recover")).cleaned() as cluster:
        yield cluster


def recover(cluster: Running, name: str, *words: str) -> int:
    data = str(cluster.directory / cluster.node(name).data)
    return timerctl(["recover", *words, "--data", data])


def record(cluster: Running, name: str) -> list[str]:
    path = cluster.directory / cluster.node(name).data / "recovered.log"
    return path.read_text().splitlines() if path.exists() else []


def peers(cluster: Running, *names: str) -> None:
    """Let these be all the nodes there are."""
    nodes = [cluster.node(name) for name in names]
    cluster_id = tomllib.loads(cluster._config_path(nodes[0]).read_text())["cluster_id"]
    cluster._write(nodes)
    for node in nodes:
        cluster._config_path(node).write_text(cluster._config(cluster_id, node, nodes))


def schedule(client: TimerClient, due_ms: int) -> None:
    client.schedule_batch("t", [b"%d" % at for at in range(COUNT)], due_ms=due_ms)


@pytest.mark.long  # a cluster is lost, and created again from one node
def test_one_directory_of_three_becomes_a_cluster_that_delivers_and_grows(
    cluster: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster.client() as client:
        client.create_group("t", "g")
        in_time(lambda due_ms: schedule(client, due_ms + 8_000))
    cluster.digests_agree()  # every node has them
    left = cluster.followers()[0]
    lost = [name for name in cluster.nodes if name != left]
    words = ["majority", "--voters", left]
    assert recover(cluster, left, *words, "--yes") == 1
    assert "is in use by process" in capsys.readouterr().err
    cluster.kill_together(*cluster.nodes)
    nodes = {name: cluster.node(name) for name in lost}
    for node in nodes.values():
        shutil.rmtree(cluster.directory / node.data)

    assert recover(cluster, left, "majority", "--voters", "n1,n2,n3", "--yes") == 1
    assert f"must be {left}" in capsys.readouterr().err
    assert recover(cluster, left, *words) == 2
    told = capsys.readouterr()
    assert "later entries of other nodes will be lost" in told.out
    assert "needs --yes without a terminal" in told.err
    assert record(cluster, left) == []
    assert recover(cluster, left, *words, "--yes") == 0
    assert len(record(cluster, left)) == 1

    peers(cluster, left)
    assert cluster.up() == left
    with cluster.client() as client, client.consumer("t", "g") as consumer:
        assert {m.payload for m in take(consumer, COUNT)} == {b"%d" % at for at in range(COUNT)}

    joins(cluster, left, nodes[lost[0]])
    cluster.digests_agree()


def joins(cluster: Running, left: str, node: LocalNode) -> None:
    """A learner joins the only voter, and votes."""
    cluster_id = tomllib.loads(cluster._config_path(node).read_text())["cluster_id"]
    data = str(cluster.directory / node.data)
    words = ["--data", data, "--name", node.name, "--cluster-id", cluster_id]
    assert init([*words, "--voters", left, "--learner"]) == 0
    cluster._write([cluster.node(left), node])
    cluster.stop(left)
    peers(cluster, left, node.name)
    cluster.up()
    asked = ["members", "add", node.name, "--yes", "--endpoints", ",".join(cluster.endpoints)]
    until(lambda: timerctl(asked) == 0)
    with cluster.client() as client:
        until(lambda: {m.name for m in client.members().members if m.voter} == {left, node.name})


def test_node_whose_promise_is_out_of_reach_takes_part_again(
    cluster: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    hurt, other = cluster.followers()
    cluster.stop(hurt)
    path = cluster.directory / cluster.node(hurt).data / "promise"
    far = Promise(Epoch(1 << 62), ReplicaId(1), Nonce(1))
    PromiseFile.load(RealDisk(), path).give(far)
    assert recover(cluster, hurt, "epoch", "--yes") == 0
    assert "will be forgotten" in capsys.readouterr().out
    found = PromiseFile.load(RealDisk(), path)
    assert (found.unsure, found.promise.epoch < 1_000) == (True, True)
    assert "raft" not in [each.name for each in path.parent.iterdir()]
    assert len(record(cluster, hurt)) == 1

    cluster.restart(hurt)
    with cluster.client() as client:
        sure = _sure(client, hurt)
        until(sure)
        cluster.kill(other)  # the majority needs it now
        client.schedule("t", b"x", delay=3600)
    promised = PromiseFile.load(RealDisk(), path).promise.epoch
    assert recover(cluster, other, "epoch", "--yes") == 0
    assert "is within reach and is kept" in capsys.readouterr().out
    assert promised < 1_000


def test_files_of_raft_that_can_not_be_removed_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = str(tmp_path / "n1")
    assert init(["--data", data, "--name", "n1", "--voters", "n1", "--cluster-id", "c"]) == 0
    (tmp_path / "n1" / "raft").mkdir()
    failed = OSError(errno.EIO, "planted")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", mock.Mock(side_effect=failed))
        assert timerctl(["recover", "epoch", "--data", data, "--yes"]) == 1
    assert f"timerctl: {data}/raft: remove failed: EIO" in capsys.readouterr().err
    assert timerctl(["recover", "epoch", "--data", data, "--yes"]) == 0


def test_majority_is_refused_for_an_empty_log_and_names_a_learner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "n1"
    words = ["--data", str(data), "--name", "n1", "--voters", "n1,n2,n3", "--cluster-id", "c"]
    assert init([*words, "--learner"]) == 0
    command = ["recover", "majority", "--voters", "n1", "--data", str(data)]
    assert timerctl([*command, "--yes"]) == 1
    assert "the log of n1 is empty, so it has no timer" in capsys.readouterr().err
    epoch, leader = Epoch(1), ReplicaId(1)
    PromiseFile.load(RealDisk(), data / "promise").give(Promise(epoch, leader, Nonce(1)))
    start = encode_epoch(EpochStart(epoch, leader, (leader,), 1))
    log = Log.open(RealDisk(), data / "log")
    log.append([entry_frame.encode(EntryKind.EPOCH, epoch, LogIndex(1), UnixMs(0), [start])])
    log.sync()
    log.close()
    assert timerctl(command) == 2
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "n1 is not among the voters of its log: it may lack any entry"


def _sure(client: TimerClient, name: str) -> Callable[[], bool]:
    def sure() -> bool:
        return any(n.name == name and n.reachable and not n.unsure for n in client.status().nodes)

    return sure


class Poisoned(Running):
    """Its nodes meet an entry that they can't apply, and say so."""

    def complaints(self) -> list[str]:
        return []


def poison(*nodes: Path) -> tuple[int, int]:
    """Append an entry that no node can apply, as a faulty one might have; return index and crc.

    What one log lacks of the longest it gets, as it would from a leader.
    """
    logs = [Log.open(RealDisk(), data / "log") for data in nodes]
    longest = max(logs, key=lambda log: log.end)
    last = entry_frame.frame_at(longest.read(longest.last_index, 1)[0], 0)
    assert isinstance(last, Entry)
    index = LogIndex(last.index + 1)
    frame = entry_frame.encode(EntryKind.SCHEDULE, last.epoch, index, last.time_ms, [b"no columns"])
    for log in logs:
        while log.last_index < last.index:
            log.append(longest.read(LogIndex(log.last_index + 1), 1 << 20, last.index))
        log.append([frame])
    for log in logs:
        log.close()
    return index, int.from_bytes(frame[:4], "little")


@pytest.mark.long  # all nodes end at an entry, and start again
def test_entry_that_ends_every_node_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Poisoned(tmp_path).cleaned() as cluster:
        with cluster.client() as client:
            client.create_group("t", "g")
            in_time(lambda due_ms: schedule(client, due_ms + 8_000))
        cluster.stop()
        index, crc32 = poison(*(cluster.directory / name for name in cluster.nodes))
        for node in cluster.nodes.values():
            cluster._spawn(node)

        def ended() -> list[str]:
            return [name for name in cluster.nodes if not cluster.is_running(name)]

        until(lambda: len(ended()) >= 2)
        assert f"it is entry {index}, SCHEDULE of epoch" in cluster.log(ended()[0])
        cluster.kill_together(*cluster.nodes)

        words = ["entry", "--index", str(index), "--yes", "--crc32"]
        assert recover(cluster, "n1", *words, f"{crc32 ^ 1:08x}") == 1
        assert f"must be {crc32:08x}, that of entry {index}" in capsys.readouterr().err
        for name in cluster.nodes:
            assert recover(cluster, name, *words, f"{crc32:08x}") == 0
            assert len(record(cluster, name)) == 1
        assert recover(cluster, "n1", *words, f"{crc32:08x}") == 0  # as if it was cut short
        assert "already has no effect" in capsys.readouterr().out

        cluster.up()
        with cluster.client() as client, client.consumer("t", "g") as consumer:
            assert len(take(consumer, COUNT)) == COUNT
        cluster.digests_agree()
