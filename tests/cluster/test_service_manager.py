"""Notices of `timerd` to a service manager, read from the socket that systemd would open."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.files.standby_ports import WAITING, Standby, Wait
from cluster.node import timerd
from cluster.settings.config import build_config
from cluster.settings.service_manager import notice_opening, notice_ready, send_notice
from deploy.local import free_ports
from tests.cluster.running import WAIT_S, full_pipe


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(str(path))
        receiving.settimeout(WAIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "20000000")
        yield receiving


def settings(tmp_path: Path) -> dict[str, object]:
    grpc, http = free_ports(2)
    return {
        "name": "n1",
        "cluster_id": "c",
        "data": str(tmp_path / "n1"),
        "http": f"127.0.0.1:{http}",
        "peers": f"n1=127.0.0.1:{grpc}",
    }


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["2>/dev/null", "2>/dev/full", "<&- >&- 2>&-", ""])
def test_node_reports_that_it_is_ready_alive_and_stopping(
    manager: socket.socket, tmp_path: Path, streams: str
) -> None:
    chosen = settings(tmp_path) | {"http": "127.0.0.1:0"}
    timerd.init(["--data", str(chosen["data"]), "--name", "n1", "--cluster-id", "c", "--voters=n1"])
    words = ["sh", "-c", f'exec "$0" -m cluster.node.timerd {streams}', sys.executable]
    env = {
        **os.environ,
        "PYTHONUNBUFFERED": "",
        **{f"TIMERD_{key.upper()}": str(chosen[key]) for key in chosen},
    }
    with (
        full_pipe() as (_, full),
        subprocess.Popen(words, env=env, stderr=full) as node,
    ):
        try:
            told = [manager.recv(4096).decode()]
            while not told[-1].startswith("READY=1\n"):
                told.append(manager.recv(4096).decode())
            assert "STATUS=opening the data directory\nWATCHDOG_USEC=0" in told[:-1]
            started = f"STATUS=started: grpc {chosen['peers']}, http 127.0.0.1:".replace("n1=", "")
            status = told[-1].splitlines()[1]
            assert status.startswith(started)
            with socket.create_connection(("127.0.0.1", int(status.removeprefix(started)))):
                pass
            assert told[-1].splitlines()[2] == "WATCHDOG_USEC=20000000"
            node.send_signal(signal.SIGTERM)
            while not told[-1].startswith("STOPPING=1\n"):
                told.append(manager.recv(4096).decode())
            assert "WATCHDOG=1" in told
            assert node.wait(WAIT_S) == 0
        finally:
            node.kill()


async def test_node_that_waits_is_ready_for_the_manager(
    manager: socket.socket, tmp_path: Path
) -> None:
    config = build_config(settings(tmp_path))
    standby = Standby(config, lambda: Wait(WAITING, "7 bytes"))
    await standby.start()
    try:
        assert b"READY=1\nSTATUS=waiting for room: 7 bytes\n" in manager.recv(4096)
    finally:
        await standby.stop()


def test_notices_need_neither_a_manager_nor_one_that_reads(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(10_000):  # more than the socket holds
        send_notice("WATCHDOG=1")
    manager.close()
    send_notice("WATCHDOG=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    monkeypatch.delenv("WATCHDOG_USEC")
    notice_opening()
    notice_ready("")
