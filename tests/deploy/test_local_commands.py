"""`timerctl local kill`, `restart`, `logs` and `destroy`, on real nodes."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.local import LocalCluster, remove_files
from tests.cluster.running import Forking
from timerclient.cli import timerctl

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The directory of a cluster, whose nodes are stopped at the end."""
    yield tmp_path / "d"
    for name in LocalCluster(tmp_path / "d").nodes:
        if LocalCluster(tmp_path / "d").is_running(name):
            LocalCluster(tmp_path / "d").kill(name)


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `timerctl local` fork its nodes from a template; the imports of each take a second."""
    monkeypatch.setattr("deploy.local.LocalCluster", Forking)


@pytest.fixture
def local(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `timerctl local`: (exit code, stdout, stderr)."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = timerctl.main(["local", *argv, "--dir", str(folder)])
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forking")
def test_a_node_is_killed_restarted_followed_and_its_cluster_destroyed(
    local: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert local("up", "--nodes", "1")[0] == 0
    code, out, _ = local("kill", "n1")
    start = f"Killed. Start again: timerctl local up n1 --dir {folder}\n"
    assert (code, start in out) == (0, True)
    code, _, err = local("kill", "n1")
    assert (code, err) == (1, "timerctl: not running: n1; no node was killed\n")
    pid = LocalCluster(folder).nodes["n1"].pid
    for _ in range(2):  # of a node that is down, and of one that runs
        code, out, _ = local("restart", "n1", "-o", "json")
        [node] = json.loads(out)["nodes"]
        assert (code, node["pid"] not in (None, pid)) == (0, True)
        pid = node["pid"]
    code, out, _ = local("logs", "n1", "--lines", "2")
    assert (code, out.count("\n")) == (0, 2)
    lines = json.loads(local("logs", "n1", "-o", "json", "--lines", "1000")[1])["lines"]
    assert any("role=leader" in line for line in lines)
    assert {*out.splitlines()} <= {*lines}  # the node may have logged meanwhile
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "timerclient.cli.timerctl"),
            *("local", "logs", "n1", "-f", "--lines", "1", "--dir", str(folder)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as follower:
        assert follower.stdout is not None
        try:
            assert follower.stdout.readline() != ""
            LocalCluster(folder).stop()  # the node logs its end
            assert follower.stdout.readline() != ""
        finally:
            follower.kill()
    assert local("up", "--add-context", "local-d")[0] == 0
    (folder / "mine.txt").write_text("stays")
    code, _, err = local("destroy")
    assert (code, "needs --yes without a terminal" in err) == (2, True)
    assert LocalCluster(folder).is_running("n1")
    code, out, _ = local("destroy", "--yes")
    assert (code, "left: " + str(folder / "mine.txt") in out) == (0, True)
    assert "timerctl context remove local-d\n" in out
    assert [*folder.iterdir()] == [folder / "mine.txt"]
    assert local("destroy", "--yes")[0] == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forking")
def test_several_nodes_are_killed_and_restarted_by_one_command(local: Run, folder: Path) -> None:
    assert local("up", "--nodes", "2")[0] == 0
    cluster = LocalCluster(folder)
    cluster.kill("n2")
    code, _, err = local("kill", "n1", "n2")
    assert (code, "not running: n2" in err, cluster.is_running("n1")) == (1, True, True)
    assert local("restart", "n1", "n2")[0] == 0
    pids = {node.pid for node in cluster.nodes.values()}
    assert local("kill", "n1", "n2")[0] == 0
    assert not any(cluster.is_running(name) for name in cluster.nodes)
    assert local("restart", "n1", "n2")[0] == 0
    assert pids.isdisjoint(node.pid for node in cluster.nodes.values())


def test_a_wrong_start_makes_no_cluster(local: Run, folder: Path) -> None:
    code, _, err = local("up", "n9")
    assert (code, "has no node 'n9'; it has n1, n2, n3" in err) == (1, True)
    assert not (folder / "cluster.json").exists()


def test_directory_that_is_a_file_is_named(local: Run, folder: Path) -> None:
    folder.touch()
    assert local("up") == (1, "", f"timerctl: {folder}: File exists\n")


def test_tls_without_its_package_names_the_extra(
    local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "deploy.certificate_store", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    code, _, err = local("up", "--tls")
    assert (
        code,
        err.startswith("timerctl: needs cryptography: pip install '.[server,certs]'"),
    ) == (1, True)


def test_wrong_names_and_numbers_are_errors(local: Run, folder: Path) -> None:
    for command in (("kill", "n1"), ("restart", "n1"), ("logs", "n1")):
        code, out, err = local(*command)
        assert (code, out) == (1, ""), err
        assert "has no node 'n1'" in err
    for option, value in (("--base-port", "99999"), ("--nodes", "9")):
        code, _, err = local("up", option, value)
        assert (code, err[: err.index(": must be 1 to ")]) == (2, f"timerctl: {option} = {value}")
    assert local("logs", "n1", "--lines", "-1")[0] == 2
    assert local("logs", "n1", "-f", "-o", "json")[0] == 2
    code, _, err = local("destroy", "--yes")
    assert (code, "no cluster was started there yet" in err) == (1, True)


def test_files_beyond_the_cluster_are_never_removed(tmp_path: Path) -> None:
    folder, beyond = tmp_path / "d", tmp_path / "beyond"
    for path in (folder / "n1", folder / "logs", beyond):
        path.mkdir(parents=True)
        (path / "file").touch()
    (folder / "n3").symlink_to(beyond)
    nodes = [("n1", "n1"), ("n2", "../beyond"), ("n3", "n3"), ("../beyond/file", ".")]
    left = remove_files(folder, nodes)
    assert {*left} == {beyond, folder, folder / "n3"}
    assert [*folder.iterdir()] == [folder / "n3"]
    assert (beyond / "file").exists()
