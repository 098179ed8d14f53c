"""Signals, and bytes that are not HTTP: a node keeps running, and its log stays short."""

import os
import signal
import socket

import pytest

from tests.cluster.running import RPC_S, until
from tests.hostile.conftest import Victim

pytestmark = pytest.mark.slow


def test_signals_are_heard_and_end_nothing(town: Victim) -> None:
    name = town.followers()[0]
    pid, config = town.node(name).pid, town.directory / f"{name}.toml"
    settings = config.read_text()
    try:
        config.write_text(f'log_level = "debug"\nauto_create_topics = false\n{settings}')
        os.kill(pid, signal.SIGHUP)
        until(lambda: "log_level is debug now" in town.log(name))
        until(lambda: "settings that wait for a restart: auto_create_topics" in town.log(name))
        config.write_text(f'log_level = "loud"\n{settings}')
        os.kill(pid, signal.SIGHUP)
        until(lambda: "settings stay as they are: log_level = 'loud'" in town.log(name))
    finally:
        config.write_text(settings)
        os.kill(pid, signal.SIGHUP)
    until(lambda: "log_level is info now" in town.log(name))
    os.kill(pid, signal.SIGUSR2)
    os.kill(pid, signal.SIGUSR1)
    until(lambda: "Scrubber.run" in town.log(name) and "thread_name=MainThread" in town.log(name))
    assert town.get(name, "/healthz")[0] == 200
    assert town.node(name).pid == pid


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\nx"]
)
def test_what_is_no_http_costs_a_line(town: Victim, data: bytes) -> None:
    name = town.followers()[0]
    host, _, port = town.node(name).http.rpartition(":")
    before = len(town.log(name).splitlines())
    for _ in range(300):
        with socket.create_connection((host, int(port)), RPC_S) as one:
            one.sendall(data)
    assert town.get(name, "/healthz")[0] == 200
    said = town.log(name).splitlines()[before:]
    assert len(said) < 250, "one line each, and 100 of them"
    assert not [line for line in said if "Traceback" in line or "level=error" in line]
