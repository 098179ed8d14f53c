"""The example clients in each language against three nodes whose leader is killed.

They need their toolchain on the PATH, and their modules from a cache or a registry. All keep their
caches outside the tree, and the tests build outside it, too.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.running import WAIT_S, Running, until

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "timerclient/proto"
FILE = PROTO / "timer" / "v1" / "timer.proto"
COUNT = 300
KILL_AFTER = 50
PLUGINS = (
    "google.golang.org/protobuf/cmd/protoc-gen-go",
    "google.golang.org/grpc/cmd/protoc-gen-go-grpc",
)
OPTIONS = "module=timers/timerv1,Mtimer/v1/timer.proto=timers/timerv1"


def run(*words: str | Path, within: Path) -> None:
    """Run a command of a build. Skips the test if it fails: its modules are not to be had."""
    done = subprocess.run(words, cwd=within, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{words[0]} {words[1]} failed: {done.stderr.strip()[-300:]}")


def built_go(place: Path) -> list[str]:
    bin_, stubs = place / "bin", place / "timerv1"
    bin_.mkdir()
    stubs.mkdir()
    run("go", "mod", "download", within=place)
    subprocess.run(["go", "build", "-o", f"{bin_}/", *PLUGINS], cwd=place, check=True)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}"]
    for plugin in ("go", "go-grpc"):
        command += [f"--{plugin}_out={stubs}", f"--{plugin}_opt={OPTIONS}"]
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    made = str(FILE.relative_to(PROTO))
    subprocess.run([*command, made], env={**os.environ, "PATH": path}, check=True)
    subprocess.run(["go", "vet", "./..."], cwd=place, check=True)
    subprocess.run(["go", "build", "-o", f"{bin_}/", ".", "./orders"], cwd=place, check=True)
    return [str(bin_ / "timers")]


def built_orders(place: Path) -> list[str]:
    built_go(place)
    return [str(place / "bin" / "orders")]


def built_node(place: Path) -> list[str]:
    run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", within=place)
    return ["node", str(place / "client.js")]


def built_java(place: Path) -> list[str]:
    maven = ["mvn", "-q", "-B", f"-Dcontract={PROTO}"]
    run(*maven, "dependency:build-classpath", "-Dmdep.outputFile=classpath", within=place)
    subprocess.run([*maven, "compile"], cwd=place, check=True)
    found = f"{place / 'target/classes'}{os.pathsep}{(place / 'classpath').read_text()}"
    return ["java", "-cp", found, "Client"]


def built_php(place: Path) -> list[str]:
    run("php", "-r", "exit(extension_loaded('curl') ? 0 : 1);", within=place)
    return ["php", str(place / "client.php")]


def built_ruby(place: Path) -> list[str]:
    return ["ruby", str(place / "client.rb")]


@pytest.mark.parametrize(
    ("language", "tool", "build"),
    [
        ("go", "go", built_go),
        ("go", "go", built_orders),
        ("node", "node", built_node),
        ("java", "mvn", built_java),
        ("php", "php", built_php),
        ("ruby", "ruby", built_ruby),
    ],
)
def test_example_client_schedules_and_acks_each_timer_once_over_a_failover(
    cluster: Running,
    topic: str,
    language: str,
    tool: str,
    build: Callable[[Path], list[str]],
    tmp_path: Path,
) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} on the PATH")
    place = tmp_path / language
    shutil.copytree(ROOT / "examples" / language, place)
    command = build(place)
    leader = cluster.up()
    found_at = [cluster.node(name) for name in cluster.nodes]
    over_http = language in ("php", "ruby")
    nodes = ",".join(f"http://{each.http}" if over_http else each.grpc for each in found_at)
    output = tmp_path / "output"
    with output.open("w") as file:
        client = subprocess.Popen(
            [*command, nodes, topic, "g", str(COUNT)],
            env={**os.environ, "TIMER_PROTO": str(PROTO)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: f"scheduled {KILL_AFTER}\n" in output.read_text())
        assert f"scheduled {COUNT}\n" not in output.read_text(), "the leader is killed too late"
        cluster.kill(leader)
        assert client.wait(2 * WAIT_S) == 0, output.read_text()[-500:]
    finally:
        client.kill()
        client.wait()
    assert f"acked {COUNT}\n" in output.read_text()
    with cluster.client() as clients:
        [found] = [each for each in clients.topics() if each.name == topic]
    [group] = found.groups
    assert (found.scheduled, found.fired + found.cancelled, group.unacked) == (COUNT, COUNT, 0)
    assert (found.cancelled > 0) == (build is built_orders), "only the shop cancels timers"
