"""The launcher with a stand-in for timerd: it starts, restarts and stops only its own nodes."""

import contextlib
import errno
import json
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.files.replacement import REPLACEABLE
from deploy import local, local_commands
from deploy.local import LaunchError, LocalCluster, NodeHost, free_ports
from timerclient.cli import contexts, timerctl

FAKE = (sys.executable, str(Path(__file__).parent / "fake_timerd.py"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path / "d", settings=["insecure = false"], program=FAKE)
    yield cluster
    for name in cluster.nodes:
        with contextlib.suppress(LaunchError):  # it does not run
            cluster.kill(name)


def behave(cluster: LocalCluster, how: str) -> None:
    cluster.directory.mkdir(exist_ok=True)
    (cluster.directory / "behaviour").write_text(how)


def pids(cluster: LocalCluster) -> dict[str, int]:
    return {name: node.pid for name, node in cluster.nodes.items()}


def test_start_brings_all_nodes_up_and_writes_down_where_they_are(cluster: LocalCluster) -> None:
    cluster.start()
    written = json.loads((cluster.directory / "cluster.json").read_text())["nodes"]
    assert [sorted(node) for node in written] == [["data", "grpc", "http", "name", "pid"]] * 3
    assert [node["name"] for node in written] == ["n1", "n2", "n3"]
    assert cluster.endpoints == [node["grpc"] for node in written]
    assert all(map(cluster.is_running, cluster.nodes))
    config = tomllib.loads((cluster.directory / "n2.toml").read_text())
    assert config["peers"] == {node["name"]: node["grpc"] for node in written}
    assert (config["name"], config["insecure"]) == ("n2", False)
    assert config["data"] == str(cluster.directory / "n2")
    identity = (cluster.directory / "n2/identity.json").read_text()
    assert "('--name', 'n2'), ('--voters', 'n1,n2,n3')" in identity


def test_start_again_restarts_only_what_is_dead_on_the_same_ports(cluster: LocalCluster) -> None:
    cluster.start()
    before, endpoints = pids(cluster), cluster.endpoints
    cluster.kill("n2")
    assert not cluster.is_running("n2")
    LocalCluster(cluster.directory, program=FAKE).start()
    after = pids(cluster)
    assert cluster.endpoints == endpoints
    assert after["n2"] != before.pop("n2")
    assert before.items() <= after.items()


def test_node_that_is_named_twice_starts_once(cluster: LocalCluster) -> None:
    assert cluster.launch("n1", "n1")[0] == ["n1"]


def test_host_says_where_a_node_lives(tmp_path: Path) -> None:
    def host(name: str) -> NodeHost:
        settings = [f'test_clock = "{name}.json"']
        return NodeHost("127.0.0.2", ("env", "-"), f"disks/{name}", tuple(settings))

    (tmp_path / "disks").mkdir()
    cluster = LocalCluster(tmp_path, 1, program=FAKE, host=host, id_prefix="test")
    cluster.start()
    try:
        node = cluster.nodes["n1"]
        assert (node.grpc[:10], node.http[:10], node.data) == ("127.0.0.2:",) * 2 + ("disks/n1",)
        config = tomllib.loads((tmp_path / "n1.toml").read_text())
        assert config["test_clock"] == "n1.json"
        assert config["insecure"]
        assert config["cluster_id"].startswith("test-")
        assert (tmp_path / "disks/n1/identity.json").exists()
        assert cluster.exit_status("n1") is None
        assert Path(f"/proc/{node.pid}/environ").read_bytes() == b""
    finally:
        cluster.kill_together("n1")
    assert cluster.exit_status("n1") == -signal.SIGKILL


def test_node_that_can_not_be_listed_is_ended(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start()
    cluster.stop("n2")
    launch = cluster._launch
    children: list[Any] = []

    def launched(*given: Any) -> Any:
        children.append(launch(*given))
        return children[-1]

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cluster, "_launch", launched)
    monkeypatch.setattr(cluster, "_write", full)
    with pytest.raises(LaunchError, match=r"n2 was not started: .*cluster\.json: No space left"):
        cluster.start("n2")
    [child] = children
    assert child.wait(10) == -signal.SIGKILL


def test_port_of_another_process_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        cluster = LocalCluster(tmp_path / "d", 1, base_port=taken, program=FAKE)
        with pytest.raises(LaunchError, match=rf"n1 can't listen at 127.0.0.1:{taken}: .*in use"):
            cluster.start()
    assert not (tmp_path / "d/cluster.json").exists()
    assert not [*tmp_path.rglob("*.toml")]


@pytest.mark.parametrize("existed", [False, True])
def test_first_start_without_a_data_directory_leaves_nothing(
    tmp_path: Path, *, existed: bool
) -> None:
    mine = tmp_path / "d/certs/mine.txt"
    if existed:
        mine.parent.mkdir(parents=True)
        mine.write_text("stays")
    cluster = LocalCluster(tmp_path / "d", program=(sys.executable, "-c", "exit('no numpy')"))
    with pytest.raises(LaunchError, match="timerd init of n1 failed:\nno numpy"):
        cluster.start()
    files = [each for each in tmp_path.rglob("*") if not each.is_dir()]
    assert (files, (tmp_path / "d").exists()) == ([mine] if existed else [], existed)


def test_node_of_another_cluster_at_the_same_port_is_not_taken_for_ones_own(
    cluster: LocalCluster,
) -> None:
    behave(cluster, "stranger")
    with pytest.raises(LaunchError, match=r"n\d of cluster other answers at .* in place of n\d"):
        cluster.start()


def test_node_that_lost_its_data_comes_back_as_a_learner(cluster: LocalCluster) -> None:
    cluster.start()
    cluster.kill("n2")
    shutil.rmtree(cluster.directory / "n2")
    cluster.start("n2")
    identity = (cluster.directory / "n2/identity.json").read_text()
    assert "--learner" in identity
    assert "--learner" not in (cluster.directory / "n1/identity.json").read_text()


def test_stop_ends_the_named_node_or_all(cluster: LocalCluster) -> None:
    cluster.start()
    cluster.stop("n3")
    assert [cluster.is_running(name) for name in cluster.nodes] == [True, True, False]
    cluster.stop()
    cluster.stop()
    assert not any(map(cluster.is_running, cluster.nodes))


def test_node_that_ends_at_its_start_is_reported_with_its_last_words(
    cluster: LocalCluster,
) -> None:
    behave(cluster, "crash")
    with pytest.raises(LaunchError, match=r"(?s)n\d ended at its start.*the dog ate my disk"):
        cluster.start()


def test_node_that_never_is_ready_is_reported(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SILENT_S", 0.1)
    told: list[str] = []
    behave(cluster, "unready")
    with pytest.raises(LaunchError, match="n1, n2, n3 not ready within 4 s"):
        cluster.start(timeout_s=4, tell=told.append)
    assert sorted(line.partition(" ")[0] for line in told) == ["n1", "n2", "n3"], "each once"


def test_node_that_waits_to_be_replaced_is_not_waited_for(cluster: LocalCluster) -> None:
    assert local.UNFIT.decode() == REPLACEABLE
    behave(cluster, "unfit")
    with pytest.raises(LaunchError, match=r"^n\d is waiting to be replaced: its promise$"):
        cluster.start()


def test_minority_is_not_waited_for(cluster: LocalCluster) -> None:
    behave(cluster, "unready")
    cluster.start("n1", timeout_s=0.1)
    assert [cluster.is_running(name) for name in cluster.nodes] == [True, False, False]


def test_node_that_does_not_end_is_named_and_left(cluster: LocalCluster) -> None:
    behave(cluster, "stubborn")
    cluster.start()
    told = r"n1 \(pid \d+\) still runs after 0\.3 s; to end it at once: timerctl local kill n1"
    with pytest.raises(LaunchError, match=told):
        cluster.stop("n1", timeout_s=0.3)
    assert cluster.is_running("n1")


def test_cluster_is_destroyed_although_a_node_does_not_end(cluster: LocalCluster) -> None:
    cluster.start()
    cluster.kill("n1", signal.SIGSTOP)
    left = cluster.destroy()
    assert [path.name for path in left] == []
    assert not cluster.directory.exists()


def test_process_that_got_a_dead_nodes_pid_is_never_signalled(cluster: LocalCluster) -> None:
    cluster.start()
    cluster.kill("n1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        path = cluster.directory / "cluster.json"
        listed = json.loads(path.read_text())
        listed["nodes"][0]["pid"] = stranger.pid
        path.write_text(json.dumps(listed))
        assert not cluster.is_running("n1")
        with pytest.raises(LaunchError, match="n1 does not run"):
            cluster.kill("n1", signal.SIGTERM)
        cluster.stop()
        assert stranger.poll() is None
        stranger.communicate(b"\n")
        assert stranger.returncode == 0


def test_unknown_node_is_named(cluster: LocalCluster) -> None:
    cluster.start("n1")
    with pytest.raises(LaunchError, match="no node 'n9'; it has n1, n2, n3"):
        cluster.kill("n9")


def test_ports_are_free_distinct_and_not_for_outgoing_connections() -> None:
    ports = free_ports(10)
    assert len({*ports}) == 10
    assert max(ports) < int(local._EPHEMERAL.read_text().split()[0])


def test_commands_up_status_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "LocalCluster", partial(LocalCluster, program=FAKE))

    def run(*words: str) -> int:
        return timerctl.main(["local", *words, "--dir", str(tmp_path / "d")])

    assert run("status") == 1
    for nodes in ("-60", "0", "8"):
        assert run("up", "--nodes", nodes) == 2
        assert f"--nodes = {nodes}: must be 1 to 7" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()
    (tmp_path / "d").mkdir()
    node = {"name": "n1", "pid": 1, "grpc": "h:1", "http": "h:2", "data": "n1"}
    wrong = [{"nodes": [{**node, **each}]} for each in ({"pid": "1"}, {"grpc": 1}, {"http": "h"})]
    for listed in ("{", "{}", '{"nodes": [{"name": "n1"}]}', "[1]", *map(json.dumps, wrong)):
        (tmp_path / "d/cluster.json").write_text(listed)
        for action in ("status", "up", "down"):
            assert run(action) == 1
            assert "cluster.json does not list a local cluster: " in capsys.readouterr().err
    (tmp_path / "d/cluster.json").unlink()
    assert run("up", "--base-port", "65530") == 2
    assert "--base-port = 65530: must be 1 to " in capsys.readouterr().err
    assert run("up", "--nodes", "1") == 0
    up = capsys.readouterr().out
    assert "n1" in up
    assert "does not answer" in up  # the fake has no gRPC
    assert run("up", "--nodes", "1") == 0
    with monkeypatch.context() as patch:
        patch.setattr(local_commands, "_role", lambda *_: "learner")
        assert run("up") == 0
    assert "n1 has no vote; see timerctl members\n" in capsys.readouterr().out
    for other in (("--nodes", "5"), ("--base-port", "65000")):
        capsys.readouterr()
        assert run("up", *other) == 2
        assert "has 1 nodes at 127.0.0.1:" in capsys.readouterr().err
    assert run("up", "--tls") == 2, "the cluster would be believed to have TLS"
    assert "has no TLS; --tls applies to a new cluster" in capsys.readouterr().err
    assert run("down") == 0
    assert capsys.readouterr().out.rstrip().endswith("down")


def test_up_says_how_timerctl_and_applications_find_the_nodes_unless_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = LocalCluster(tmp_path / "d", nodes=1, program=FAKE)

    monkeypatch.setattr(local, "LocalCluster", lambda *_, **__: cluster)

    monkeypatch.delenv("TIMERS_URL", raising=False)

    def last_line() -> str:
        assert timerctl.main(["local", "up", "--dir", str(tmp_path / "d")]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    try:
        monkeypatch.setenv("TIMERCTL_ENDPOINTS", "127.0.0.1:1")
        assert timerctl.main(["local", "up", "--dir", str(tmp_path / "d")]) == 0
        url = f"timers://{cluster.endpoints[0]}"
        assert f"\nexport TIMERS_URL={url}\n" in capsys.readouterr().out
        monkeypatch.setenv("TIMERS_URL", url)
        monkeypatch.delenv("TIMERCTL_ENDPOINTS")
        said = last_line()
        [address] = cluster.endpoints
        assert said == f"export TIMERCTL_ENDPOINTS={address}"
        monkeypatch.setenv("TIMERCTL_ENDPOINTS", f"127.0.0.1:1, {address}")
        assert last_line().startswith("n1")
        monkeypatch.delenv("TIMERCTL_ENDPOINTS")
        monkeypatch.setattr(local_commands, "DEFAULT_ENDPOINTS", f"{address},127.0.0.1:1")
        assert last_line().startswith("n1")
    finally:
        cluster.stop()


def test_up_keeps_a_context_only_where_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = LocalCluster(tmp_path / "d", nodes=1, program=FAKE)
    monkeypatch.setattr(local, "LocalCluster", lambda *_, **__: cluster)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    up = ["local", "up", "--dir", str(tmp_path / "d")]
    try:
        assert timerctl.main([*up, "--add-context", "prod"]) == 2
        assert "must begin with 'local-'" in capsys.readouterr().err
        assert cluster.nodes == {}
        assert timerctl.main(up) == 0
        assert contexts.load().named == {}
        assert timerctl.main([*up, "--add-context", "local-d"]) == 0
        known = contexts.load()
        assert (known.current, known.named) == (
            "local-d",
            {"local-d": {"endpoints": cluster.endpoints[0]}},
        )
    finally:
        cluster.stop()


def test_leader_is_none_where_nobody_answers(cluster: LocalCluster) -> None:
    cluster.start("n1")
    assert cluster.state("n1") is None
    assert cluster.leader() is None
    with pytest.raises(LaunchError, match="no leader within"):
        cluster.wait_for_leader(timeout_s=0.1)
