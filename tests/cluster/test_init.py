"""`timerd init`: the right to vote after a directory was formatted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.control import raft_files
from cluster.files.storage import open_storage
from cluster.node.timerd import init, main
from cluster.settings.config import build_config
from replication.core.promise import PromiseFile
from timer.files.data_directory import founding_replica_id, read_identity
from timer.files.disk import RealDisk
from timer.model.timer_errors import ConfigError, PromiseLostError
from timerclient.cli.timerctl import main as timerctl


def arguments(data: Path, *more: str, name: str = "n1") -> list[str]:
    words = ["--data", str(data), "--name", name, "--cluster-id", "c", "--voters", "n1,n2,n3"]
    return [*words, *more]


def opened(data: Path) -> PromiseFile:
    """Open the node's files as a process does; return its promise."""
    peers = {f"peers.n{n}": f"127.0.0.1:{7000 + n}" for n in (1, 2, 3)}
    config = build_config({"name": "n1", "cluster_id": "c", "data": str(data), **peers})
    storage = open_storage(RealDisk(), config, lambda *_: None)
    storage.log.close()
    storage.directory.close()
    return storage.promise


@pytest.mark.parametrize("more", [(), ("--learner",)])
def test_replica_begins_unsure_as_its_disk_may_not_be_its_first(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    assert init(arguments(tmp_path / "d", *more)) == 0
    identity = read_identity(RealDisk(), tmp_path / "d")
    assert (identity.replica_id == founding_replica_id("c", "n1")) == (not more)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"identity.json", "promise"}
    promise = opened(tmp_path / "d")
    assert promise.unsure
    promise.set_unsure(unsure=False)  # a leader has matched it
    assert not opened(tmp_path / "d").unsure


@pytest.mark.parametrize("more", [(), ("--learner",)])
def test_replica_whose_promise_is_gone_does_not_start(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    # An added voter with an empty log and no promise would help a stale peer to lead.
    assert init(arguments(tmp_path / "d", *more)) == 0
    opened(tmp_path / "d")
    for name in ("promise", "log/0000000000000001.log", "log/durable"):
        (tmp_path / "d" / name).unlink()
    with pytest.raises(PromiseLostError, match="members replace"):
        opened(tmp_path / "d")


def test_learner_is_another_replica_than_the_founder_of_its_name(tmp_path: Path) -> None:
    assert init(arguments(tmp_path / "d", "--learner")) == 0
    identity = read_identity(RealDisk(), tmp_path / "d")
    assert identity.replica_id != founding_replica_id("c", "n1")
    assert "n1" not in identity.founding_voters


def test_name_that_is_no_voter_must_say_that_it_is_a_learner(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--learner"):
        init(arguments(tmp_path / "d", name="n4"))
    assert not (tmp_path / "d").exists()
    assert init(arguments(tmp_path / "d", "--learner", name="n4")) == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("--cluster-id", ""), ("--cluster-id", "a b"), ("--voters", "n1,n/2"), ("--name", "n\n1")],
)
def test_name_that_no_node_can_have_is_refused(tmp_path: Path, option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} = .* 1 to 63 letters, digits"):
        init(arguments(tmp_path / "d", option, value))
    assert not (tmp_path / "d").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_files_that_root_makes_belong_to_the_owner_of_the_directory_around(tmp_path: Path) -> None:
    os.chown(tmp_path, 4242, 4243)
    data = tmp_path / "d"
    assert init(arguments(data)) == 0
    opened(data)
    raft_files.open_files(data, cluster_id="c", name="n1", founding=True)
    assert timerctl(["recover", "epoch", "--data", str(data), "--yes"]) == 0
    raft_files.open_files(data, cluster_id="c", name="n1", founding=True)
    owners = {path: (path.stat().st_uid, path.stat().st_gid) for path in [data, *data.rglob("*")]}
    assert {data / "LOCK", data / "recovered.log", data / "raft" / "meta"} <= owners.keys()
    assert owners == dict.fromkeys(owners, (4242, 4243))
    os.chown(data, 0, 4243)  # as a volume with fsGroup
    (data / "recovered.log").unlink()
    (data / "LOCK").chmod(0o600)
    os.chown(data / "LOCK", 0, 0)  # a file of root that was there
    assert timerctl(["recover", "epoch", "--data", str(data), "--yes"]) == 0
    assert (data / "recovered.log").stat().st_uid == 4242
    assert (data / "LOCK").stat().st_uid == 0


@pytest.mark.parametrize("module", ["isal", "numpy", "uvloop"])
def test_extra_that_is_missing_is_named_and_how_to_install_it(module: str, tmp_path: Path) -> None:
    words = ["--name", "n1", "--data", str(tmp_path / "d"), "--set", "cluster_id=c"]
    words += ["--set", "peers=n1=127.0.0.1:7001"]
    blocked = f"import sys; sys.modules[{module!r}] = None; from cluster.node.timerd import main"
    command = [sys.executable, "-c", f"{blocked}; sys.exit(main({words}))"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"timerd: needs {module}: pip install '.[server]'")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("main", ["cluster.node.timerd", "timerclient.cli.timerctl"])
def test_closed_standard_streams_are_no_files_of_the_process(main: str) -> None:
    code = (
        f"import os; from {main} import main; main(['--config', '/absent'])\n"
        "for fd in (0, 2):\n"
        "    print(os.readlink(f'/proc/self/fd/{fd}'), os.get_inheritable(fd))"
    )
    words = ["sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, code]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "/dev/null True\n" * 2)


def test_help_tells_of_init_of_set_and_of_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for word in ("timerd init --data", "any setting", "70-75", "  66 "):
        assert word in out


def test_start_loads_no_client_and_no_authority_of_the_system() -> None:
    unneeded = ["importlib.metadata", "opentelemetry", "pyarrow.compute", "timerclient.client"]
    code = (
        "import os, sys; os.environ['SSL_CERT_DIR'] = 'kept'; os.environ.pop('SSL_CERT_FILE', 0)\n"
        "from cluster.node import process\n"
        "from aiohttp import connector\n"
        "assert not connector._SSL_CONTEXT_VERIFIED.cert_store_stats()['x509']\n"
        "assert (os.environ['SSL_CERT_DIR'], os.getenv('SSL_CERT_FILE')) == ('kept', None)\n"
        f"print([m for m in {unneeded} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
