"""Networks and disks of a run: real ones, made and removed. Need root; else skipped, loudly."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.suite.stage import disks, network
from chaos.suite.stage.disks import MountedDisk
from chaos.suite.stage.network import CLIENTS, Network, run, start_of
from chaos.suite.stage.stage import capabilities
from tests.cluster.running import until

ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 7000))
print("up", flush=True)
while True:
    connection, _ = server.accept()
    connection.close()
"""
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 7000), float(sys.argv[2]))"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    if missing := capabilities(tmp_path_factory.mktemp("disks")):
        pytest.skip(f"NETWORKS AND DISKS WERE NOT TESTED: {missing}")


@pytest.fixture
def net(machine: None) -> Iterator[Network]:
    with Network(["n1", "n2", "n3"]) as made:
        yield made


class Servers:
    """Something that accepts connections on each node."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self._servers = []
        for name in ("n1", "n2", "n3"):
            command = [*net.host(name).inside, sys.executable, "-c", ECHO]
            server = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert server.stdout is not None
            assert server.stdout.readline() == b"up\n"
            self._servers.append(server)

    def reaches(self, a: str, b: str, timeout_s: float = 30) -> bool:
        inside = () if a == CLIENTS else self.net.host(a).inside
        command = [*inside, sys.executable, "-c", CALL, self.net.address(b), str(timeout_s)]
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0

    def close(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()


@pytest.fixture
def servers(net: Network) -> Iterator[Servers]:
    servers = Servers(net)
    yield servers
    servers.close()


def test_cut_link_carries_nothing_and_the_others_do(servers: Servers) -> None:
    assert servers.reaches(CLIENTS, "n1")
    assert servers.reaches("n2", "n1")
    with servers.net.cut([("n1", "n2")]):
        assert not servers.reaches("n1", "n2", 0.7)
        assert not servers.reaches("n2", "n1", 0.7)  # the answer is lost
        assert servers.reaches("n3", "n2")
        assert servers.reaches(CLIENTS, "n1")
    assert servers.reaches("n1", "n2")


def test_slow_link_takes_its_time_and_a_cut_goes_before(servers: Servers) -> None:
    net = servers.net
    with net.slow([("n1", "n2"), ("n2", "n1")], delay_ms=400):
        at = time.monotonic()
        assert servers.reaches("n1", "n2")
        assert time.monotonic() - at >= 0.8  # there and back
        with net.cut([("n1", "n2")]):
            assert not servers.reaches("n1", "n2", 2)
    assert servers.reaches("n1", "n2")


def test_network_is_gone_afterwards(machine: None) -> None:
    def ours() -> set[str]:
        spaces = {line.split()[0] for line in run("ip", "netns").splitlines()}
        links = run("ip", "-o", "link").split()
        return {each for each in spaces if str(os.getpid()) in each} | {
            each for each in links if each.startswith(f"tc{os.getpid()}")
        }

    with Network(["n1"]) as net:
        assert len(ours()) == 3
        address = net.address(CLIENTS)
    assert not ours()
    assert address not in run("ip", "addr")


def test_what_a_crashed_harness_left_is_removed_and_no_more(net: Network) -> None:
    crash = "from chaos.suite.stage.network import Network; import os, sys\n"
    crash += "net = Network(['n1']); net.__enter__(); print('made', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", crash], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        tag = f"-{other.pid}-{start_of(other.pid)}-"
        network.remove_stale()
        assert tag in run("ip", "netns")
        space = next(line.split()[0] for line in run("ip", "netns").splitlines() if tag in line)
        words = ["nsenter", f"--net=/run/netns/{space}", "sh", "-c", "echo inside; exec sleep 600"]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as node:
            try:
                assert node.stdout is not None
                assert node.stdout.readline() == b"inside\n"
                other.kill()
                other.wait()
                network.remove_stale()
                assert node.wait(60) == -9
            finally:
                node.kill()
    until(lambda: tag not in run("ip", "netns"))
    assert net.host("n1").inside[1].partition("/run/netns/")[2] in run("ip", "netns")


@pytest.fixture
def disk(machine: None, tmp_path: Path) -> Iterator[MountedDisk]:
    disk = MountedDisk(tmp_path / "nodes/n1")
    disk.make()
    yield disk
    if os.path.ismount(disk.path):
        run("umount", str(disk.path))


def test_power_cut_loses_what_was_not_synced_and_nothing_else(disk: MountedDisk) -> None:
    path = disk.path / "log"
    with path.open("wb") as file:
        file.write(b"synced" * 1000)
        file.flush()
        os.fsync(file.fileno())
        file.write(b"lost" * 1000)
        file.flush()
        assert path.stat().st_size == 10_000
    disk.cut_power()
    assert path.read_bytes() == b"synced" * 1000


def test_full_disk_takes_nothing_until_it_is_drained(disk: MountedDisk) -> None:
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        (disk.path / "big").write_bytes(bytes(1 << 20))
    disk.drain()
    (disk.path / "big").write_bytes(bytes(1 << 20))


def test_files_move_out_with_their_links(disk: MountedDisk) -> None:
    (disk.path / "a").write_text("text")
    (disk.path / "b").hardlink_to(disk.path / "a")
    assert disk in [*disks.mounted()]
    disk.move_out()
    assert not os.path.ismount(disk.path)
    assert (disk.path / "b").samefile(disk.path / "a")
    assert not disk.image.exists()
    assert disk not in [*disks.mounted()]


def test_packets_wait_for_their_time(machine: None) -> None:
    with Network(["n1"]) as net, net.slow([("n1", CLIENTS)], delay_ms=300):
        command = [*net.host("n1").inside, sys.executable, "-c", CALL, net.address(CLIENTS), "5"]
        at = time.monotonic()
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)  # it is refused, late
        assert time.monotonic() - at >= 0.3
