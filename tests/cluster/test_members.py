"""Against real processes: voters that are replaced, added and removed under load."""

import dataclasses
import json
import shutil
import tomllib
from collections.abc import Iterator

import pytest

from cluster.files.replacement import REPLACEABLE
from cluster.node.timerd import init
from deploy.local import LocalNode, free_ports
from tests.cluster.load import loaded
from tests.cluster.running import RPC_S, Running, flip, until
from timerclient import TimerError
from timerclient.cli.cli_errors import OK, UNKNOWN
from timerclient.cli.timerctl import main as timerctl
from timerclient.proto import timer_pb2 as pb

pytestmark = pytest.mark.slow

WAIT_S = 120.0


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("members")).cleaned() as cluster:
        yield cluster


def format_learner(cluster: Running, node: LocalNode) -> None:
    data = cluster.directory / node.data
    if data.exists():
        shutil.rmtree(data)
    config = tomllib.loads(cluster._config_path(node).read_text())
    words = ["--data", str(data), "--name", node.name, "--cluster-id", config["cluster_id"]]
    assert init([*words, "--voters", "n1,n2,n3", "--learner"]) == 0


def voters(cluster: Running) -> dict[str, int]:
    with cluster.client() as client:
        return {m.name: m.replica_id for m in client.members().members if m.voter}


def change(cluster: Running, action: str, name: str) -> None:
    """Ask until it is possible: the learner may have to catch up first."""
    before = voters(cluster)

    def done() -> bool:
        arguments = ["members", action, name, "--yes", "--timeout", "20s"]
        if timerctl([*arguments, "--endpoints", ",".join(cluster.endpoints)]) == 0:
            return True
        # It may be done all the same: the answer goes with the leader, if that is removed.
        now = voters(cluster)
        if action == "replace":
            return now.get(name) not in (None, before[name])
        return (name in now) == (action == "add")

    until(done, WAIT_S)


def role(cluster: Running, leader: str, name: str) -> str:
    """Return a node's role as the leader sees it."""
    nodes = cluster.admin(leader).GetStatus(pb.GetStatusRequest(), timeout=RPC_S).nodes
    return next(node.role for node in nodes if node.name == name)


def votes(cluster: Running, *names: str) -> None:
    """Return when every node reports exactly these voters; one node may not know them yet."""
    until(lambda: voters(cluster).keys() == {*names})


def settled(cluster: Running) -> None:
    """Every node is up and holds the same state."""
    cluster.up()
    cluster.digests_agree()


@pytest.mark.long  # two replacements of a node
def test_node_with_a_damaged_promise_or_identity_is_replaced_by_one_command(
    cluster: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    with loaded(cluster, "damaged") as load:
        for name, file in zip(cluster.followers(), ("promise", "identity.json"), strict=True):
            before = voters(cluster)
            cluster.kill(name)
            path = cluster.directory / cluster.node(name).data / file
            flip(path, path.stat().st_size // 2)
            cluster._spawn(cluster.node(name))
            command = f"timerctl members replace {name}"
            until(lambda name=name, command=command: command in cluster.log(name))  # type: ignore[misc]
            leader = cluster.wait_for_leader()
            until(lambda name=name, leader=leader: role(cluster, leader, name) == REPLACEABLE)  # type: ignore[misc]
            load.wait_for_acks(50)
            words = [*command.split()[1:], "--yes", "--timeout", "60s"]
            words += ["--endpoints", ",".join(cluster.endpoints)]
            for _ in range(3):
                # Unknown, if the leader changes meanwhile. Then the command is repeated.
                if voters(cluster)[name] == before[name]:
                    assert timerctl(words) in (OK, UNKNOWN), capsys.readouterr().err
            after = voters(cluster)
            assert after[name] != before[name], capsys.readouterr().err
            assert after.keys() == before.keys()
            cluster.start(name)
            load.wait_for_acks(50)
    settled(cluster)


def test_dead_node_is_replaced_under_its_name_and_its_successor_counts(cluster: Running) -> None:
    dead, other = cluster.followers()
    before = voters(cluster)
    with loaded(cluster, "replaced") as load:
        cluster.kill(dead)
        format_learner(cluster, cluster.node(dead))
        cluster._spawn(cluster.node(dead))
        change(cluster, "replace", dead)

        def replaced() -> bool:  # the asked node may not know it yet
            after = voters(cluster)
            changed = [name for name in before if after.get(name) != before[name]]
            return after.keys() == before.keys() and changed == [dead]

        until(replaced)
        load.wait_for_acks(20)
        cluster.kill(other)  # the majority is now the leader and the new one
        load.wait_for_acks(50)
        cluster.restart(other)
        with cluster.client() as client, pytest.raises(TimerError, match="needs no replacement"):
            client.change_members("replace", dead)
    settled(cluster)


def join(cluster: Running, *names: str, without: str = "") -> None:
    """Let every node know these among its peers, one restart after the other.

    `without`: a node that the others leave out of their peers.
    """
    nodes = {name: node for name, node in cluster.nodes.items() if name != without}
    ports = free_ports(2 * len(names))
    for number, name in enumerate(names):
        grpc, http = ports[2 * number : 2 * number + 2]
        nodes[name] = LocalNode(name, 0, f"127.0.0.1:{grpc}", f"127.0.0.1:{http}", name)
    cluster._write([*nodes.values()])
    cluster_id = cluster._cluster_id(next(iter(nodes.values())))
    for node in nodes.values():
        text = cluster._config(cluster_id, node, [*nodes.values()])
        cluster._config_path(node).write_text(text)
    for name in names:
        format_learner(cluster, nodes[name])
    for node in [*nodes.values()]:
        if cluster.is_running(node.name):
            cluster.stop(node.name)
        cluster._spawn(dataclasses.replace(node))
        cluster.wait_for_leader()


def test_dead_node_is_replaced_by_one_of_another_name(
    cluster: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--endpoints", ",".join(cluster.endpoints)]
    dead, other = cluster.followers()
    with loaded(cluster, "renamed") as load:
        cluster.kill(dead)
        restart = ["rolling-restart", "--restart-with", "false {node}", "--dry-run", *asked]
        until(lambda: f"{dead} does not answer" in refusal(capsys, restart))
        assert "gone for good: docs/members.md" in refusal(capsys, restart)
        assert "in peers of" in refusal(capsys, ["members", "add", "n4", *asked])
        change(cluster, "remove", dead)
        join(cluster, "n4", without=dead)
        change(cluster, "add", "n4")
        votes(cluster, *cluster.nodes)
        cluster.kill(other)  # the majority is now the leader and the new one
        load.wait_for_acks(50)
        cluster.restart(other)
    settled(cluster)


def refusal(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """Return the error of a command that fails."""
    capsys.readouterr()
    assert timerctl(words) != OK
    return capsys.readouterr().err


@pytest.mark.long  # four changes of members, and five nodes
def test_cluster_grows_to_five_and_shrinks_to_three_under_load(
    cluster: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    with loaded(cluster, "growing") as load:
        join(cluster, "n4")
        change(cluster, "add", "n4")
        votes(cluster, "n1", "n2", "n3", "n4")
        join(cluster, "n5")
        change(cluster, "add", "n5")
        votes(cluster, "n1", "n2", "n3", "n4", "n5")
        capsys.readouterr()
        leader = cluster.wait_for_leader()
        followers = [name for name in cluster.nodes if name != leader]
        cluster.kill_together(*followers[:2])  # three of five go on
        load.wait_for_acks(30)
        cluster.start(*followers[:2], timeout_s=WAIT_S)
        change(cluster, "remove", leader)  # another leads then
        gone = next(
            name for name in cluster.nodes if name not in (leader, cluster.wait_for_leader())
        )
        change(cluster, "remove", gone)
        left = {*cluster.nodes} - {leader, gone}
        votes(cluster, *left)
        load.wait_for_acks(30)
        cluster.kill_together(leader, gone)  # they count for nothing any more
        load.wait_for_acks(30)
        cluster.start(leader, gone)
    settled(cluster)
    capsys.readouterr()
    asked = ["members", "-o", "json", "--endpoints", ",".join(cluster.endpoints)]
    assert timerctl(asked) == 0
    listed = json.loads(capsys.readouterr().out)["members"]
    assert [row["name"] for row in listed if row["voter"]] == sorted(left)
    assert {row["role"] for row in listed if not row["voter"]} == {"learner"}
