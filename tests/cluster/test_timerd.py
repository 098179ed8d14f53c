"""`timerd` for an operator: settings and files that end a start, and exit codes.

A start that has to end by itself is forked (tests/cluster/template.py), because the imports of some
thirty programs take longer than all the rest. Programs with an environment of their own, and the
node that serves, are executed.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.local import free_ports
from tests.cluster import template
from tests.cluster.running import CALL_S, RPC_S, Running, flip, in_time, take, until
from timerclient import TimerClient
from timerclient.proto import timer_pb2 as pb

pytestmark = pytest.mark.slow

TIMERD = (sys.executable, "-m", "cluster.node.timerd")
MIB = 1 << 20
SETTINGS = (
    "limits.request_bytes_max = 524288",
    "limits.payload_bytes_max = 65536",
    f"storage.memtable_bytes_flush = {MIB}",
    "storage.flush_interval_ms = 1000",
)
CONFIG, DIRECTORY, CORRUPT = 64, 65, 66


@dataclass(frozen=True, slots=True)
class Site:
    """A killed node's directory, to be copied, damaged and started again."""

    config: Path
    data: Path

    def run(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run timerd on it until it ends, which it must by itself."""
        return run(["--config", str(self.config), "--data", str(self.data), *arguments], **env)


def run(arguments: Sequence[str], **env: str) -> "subprocess.CompletedProcess[str]":
    if not env:
        return forked([*TIMERD, *arguments])
    return subprocess.run(
        [*TIMERD, *arguments],
        capture_output=True,
        text=True,
        timeout=CALL_S,
        check=False,
        env={**os.environ, **env},
    )


def forked(words: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a node's program, forked instead of executed, until it ends by itself."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = template.launch("n1", words, out.fileno(), errors.fileno())
        try:
            until(lambda: process.poll() is not None, timeout_s=CALL_S)
        except AssertionError:
            os.kill(process.pid, signal.SIGKILL)
            raise
        status = process.poll()
        assert status is not None
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, status, out.read(), errors.read())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A cluster of one node, with a log, a manifest, runs, and messages in its queue."""
    directory = tmp_path_factory.mktemp("alone")
    with Running(directory, SETTINGS, nodes=1).cleaned() as running:
        with running.client() as client:
            client.schedule_batch("t", [b"%d" % at for at in range(100)])
            for _ in range(4):
                client.schedule_batch("t", [bytes(60_000)] * 8, delay=3600)

        def killed(due_ms: int) -> None:
            """Kill it with timers in its runs that are soon due."""
            running.up()
            with running.client() as client:
                client.schedule_batch("soon", [b"soon"] * 10, due_ms=due_ms)
            stub = running.admin()
            end = running.log_end()

            def flushed() -> bool:
                local = pb.GetCheckpointRequest(local=True)
                (node,) = stub.GetCheckpoint(local, timeout=RPC_S).nodes
                return node.runs > 0 and node.manifest_index >= end

            until(flushed)
            running.kill("n1")

        in_time(killed, 6_000)
        shutil.copytree(directory / "n1", directory / "copy")
        running.restart("n1")
        yield running


@pytest.fixture
def site(alone: Running, tmp_path: Path) -> Site:
    """A copy of the killed node's files, with other ports."""
    data = tmp_path / "n1"
    shutil.copytree(alone.directory / "copy", data)
    grpc, http = free_ports(2)
    config = tmp_path / "n1.toml"
    text = (alone.directory / "n1.toml").read_text()
    node = alone.node("n1")
    text = text.replace(node.grpc, f"127.0.0.1:{grpc}").replace(node.http, f"127.0.0.1:{http}")
    config.write_text(text)
    return Site(config, data)


def refused(done: "subprocess.CompletedProcess[str]", code: int, *words: str) -> None:
    """Check that a process ended with a code, and one line with the reason."""
    assert done.returncode == code, done
    assert not done.stdout
    *_, last = done.stderr.splitlines()
    for word in words:
        assert word in last, last
    assert "Traceback" not in done.stderr


def test_node_of_a_killed_test_process_ends(site: Site) -> None:
    launched = "template.launch('n1', sys.argv[1:], 2).pid"
    code = f"import sys; from tests.cluster import template; print({launched}, flush=True); input()"
    words = [sys.executable, "-c", code, *TIMERD, "--config", str(site.config)]
    with subprocess.Popen(
        [*words, "--data", str(site.data)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as tester:  # fmt: skip
        assert tester.stdout is not None
        node = template.Forked(int(tester.stdout.readline()))
        tester.kill()
    try:  # it is a child of this process now
        until(lambda: node.poll() is not None)
    except AssertionError:
        os.kill(node.pid, signal.SIGKILL)
        raise


# ---- settings


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("nonsense=1", ("nonsense", "unknown")),
        ("timing=5", ("timing = '5': must be a table: [timing]",)),
        ("timing.tick_ms=ten", ("timing.tick_ms", "must be a whole number")),
        ("http=nowhere", ("http", "host:port")),
        ("grpc=0.0.0.0:7000", ("grpc", "insecure")),
        ("leadership.heartbeat_ms=2900", ("leadership.heartbeat_ms", "leadership.lease_ms")),
        ("limits.inflight_bytes_max=1048576", ("limits.inflight_bytes_max", "at least")),
        ("log_level=loud", ("log_level", "debug")),
        ("no equals sign", ("--set", "KEY=VALUE")),
    ],
)
def test_a_wrong_setting_is_named_with_its_limit(
    site: Site, setting: str, words: tuple[str, ...]
) -> None:
    refused(site.run("--set", setting), CONFIG, *words)


def test_settings_of_file_and_environment_are_checked_too(site: Site, tmp_path: Path) -> None:
    refused(
        site.run(TIMERD_TIMING__TICK="1"), CONFIG, "TIMERD_TIMING__TICK", "TIMERD_TIMING__TICK_MS"
    )
    refused(run(["--config", str(tmp_path / "none.toml")]), CONFIG, "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    refused(run(["--config", str(broken)]), CONFIG, "must be TOML")
    shown = site.run("--print-config", "--set", "timing.tick_ms=20")
    assert shown.returncode == 0
    assert "tick_ms = 20" in shown.stdout


@pytest.mark.parametrize("key", ["peers.n1", "grpc", "replication"])
def test_an_address_that_does_not_resolve_is_named(site: Site, key: str) -> None:
    address = "nosuch.invalid:7999"
    settings = ["insecure=true", f"{key}={address}", *(["grpc="] if key == "peers.n1" else [])]
    done = site.run(*(f"--set={each}" for each in settings))
    refused(done, CONFIG, f"{key} = '{address}'", "does not resolve")


def test_a_file_in_place_of_the_data_directory_is_named(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    refused(site.run("--data", str(file)), CONFIG, f"data = '{file}'", "must be a directory")
    voter = ("--name", "n1", "--cluster-id", "c", "--voters", "n1")
    refused(run(["init", "--data", str(file), *voter]), CONFIG, "--data", "must be a directory")


@pytest.mark.parametrize("flag", ["grpc", "http"])
def test_a_port_in_use_is_named(site: Site, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused(site.run(f"--{flag}", address), CONFIG, flag, address, "in use")


# ---- the data directory


def test_a_directory_that_is_absent_empty_or_anothers_is_refused(
    site: Site, alone: Running, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for other in (empty, tmp_path / "absent"):
        done = run(["--config", str(site.config), "--data", str(other)])
        refused(done, DIRECTORY, str(other), "init")
    assert not (tmp_path / "absent").exists()
    refused(site.run("--set", "cluster_id=other"), DIRECTORY, "local-", "cluster_id = other")
    port = free_ports(1)[0]
    refused(
        site.run("--set", "name=n2", "--set", f"peers.n2=127.0.0.1:{port}"), DIRECTORY, "n1", "n2"
    )
    in_use = run(["--config", str(site.config), "--data", str(alone.directory / "n1")])
    refused(in_use, DIRECTORY, "in use", str(alone.node("n1").pid))
    again = ["init", "--data", str(site.data), "--name", "n1", "--cluster-id", "local"]
    refused(run([*again, "--voters", "n1"]), DIRECTORY, str(site.data))


# ---- damage


@pytest.mark.parametrize("part", [0.0, 0.6])
def test_a_damaged_file_below_the_durable_mark_is_named(site: Site, part: float) -> None:
    (log,) = (site.data / "log").glob("*.log")
    (spill,) = (site.data / "state" / "queues").iterdir()
    manifest = site.data / "state" / "manifest"
    # Of a spill file a start reads the head.
    spills = [spill] if not part else []
    for path in (log, manifest, *spills, site.data / "identity.json", site.data / "promise"):
        whole = path.read_bytes()
        flip(path, int(part * len(whole)))
        refused(site.run(), CORRUPT, str(path))
        path.write_bytes(whole)
    manifest.write_bytes(manifest.read_bytes()[: int(part * 100)])
    refused(site.run(), CORRUPT, str(manifest))


def test_a_damaged_run_is_named_at_the_start_or_when_it_is_read(site: Site) -> None:
    (path, *_) = (site.data / "state" / "runs").glob("*.arrow")
    whole = path.read_bytes()
    for at in (-1, -20):
        flip(path, at)
        refused(site.run(), CORRUPT, str(path), "footer")
        path.write_bytes(whole)
    for path in (site.data / "state" / "runs").glob("*.arrow"):
        flip(path, path.stat().st_size // 2)  # what is due soon lies in one, and has to be read
    done = site.run()
    assert done.returncode == CORRUPT, done
    assert ".arrow: corrupt at byte" in done.stderr


def test_a_missing_run_is_named(site: Site) -> None:
    (path, *_) = (site.data / "state" / "runs").glob("*.arrow")
    path.unlink()
    done = site.run()
    assert done.returncode in (CORRUPT, 67), done
    assert path.name in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_torn_tail_is_cut_and_nothing_durable_is_lost(site: Site, alone: Running) -> None:
    (log,) = (site.data / "log").glob("*.log")
    with log.open("ab") as file:
        file.write(b"\x5a" * 100)
    http = next(
        line.split('"')[1] for line in site.config.read_text().splitlines() if "http" in line
    )
    grpc = next(
        line.split('"')[1] for line in site.config.read_text().splitlines() if "grpc" in line
    )
    arguments = ["--config", str(site.config), "--data", str(site.data), "--http", http]
    with subprocess.Popen([*TIMERD, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            with (
                TimerClient(grpc, timeout=CALL_S) as client,
                client.consumer("t", group="g") as consumer,
            ):
                assert [m.payload for m in take(consumer, 100)] == [b"%d" % at for at in range(100)]
                assert client.status().nodes[0].scheduled == alone.counts_add_up().scheduled
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=CALL_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "the log's tail was torn" in said
    assert "level=error" not in said
