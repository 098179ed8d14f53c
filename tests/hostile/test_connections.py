"""Connections that send nothing, send half a message, or do not read."""

import contextlib
import resource
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, Final

import grpc
import pytest

from tests.cluster.running import RPC_S, until
from tests.hostile.conftest import GROUPS_MAX, MIB, Victim
from timerclient import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc

pytestmark = pytest.mark.slow

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS_FRAME: Final = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
IDLE: Final = 2_000


@contextlib.contextmanager
def sockets(address: str, count: int) -> Iterator[list[socket.socket]]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((host, int(port)), RPC_S))
            for _ in range(count)
        ]


@pytest.mark.parametrize("port", ["grpc", "http"])
def test_idle_sockets_cost_nothing(town: Victim, client: TimerClient, port: str) -> None:
    leader = town.node(town.wait_for_leader())
    with sockets(getattr(leader, port), IDLE) as open_:
        for each in open_[: IDLE // 2]:
            with contextlib.suppress(OSError):  # it was closed already
                each.sendall(PREFACE[:8])
        for number in range(20):
            client.schedule("idle", b"x", delay=3600, key=f"{port}-{number}")
        assert town.metric(leader.name, "process_max_fds") > IDLE
        status, _ = town.get(town.followers()[0], "/healthz")
        assert status == 200


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return (
        struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body
    )


def _text(text: bytes) -> bytes:
    return bytes([len(text)]) + text  # of HPACK, as it is


def _headers(path: bytes) -> bytes:
    fields = {b":path": path, b":authority": b"x", b"te": b"trailers"}
    fields[b"content-type"] = b"application/grpc"
    literal = b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())
    return b"\x83\x86" + literal  # POST, http


def test_half_sent_messages_end_with_their_connection(town: Victim) -> None:
    """Many calls that each announce 60 MiB, and send most of them."""
    leader = town.node(town.wait_for_leader())
    before = town.metric(leader.name, "timer_connections_ended_total")
    with sockets(leader.grpc, 1) as (attacker,):
        attacker.sendall(PREFACE + SETTINGS_FRAME)
        body = b"\0" + struct.pack(">I", 60 * MIB)
        with contextlib.suppress(OSError):  # until it is ended
            attacker.settimeout(RPC_S)
            window = dict.fromkeys(range(1, 200, 2), 0)
            for stream in window:
                attacker.sendall(_frame(1, 4, stream, _headers(b"/timer.v1.TimerService/Schedule")))
                attacker.sendall(_frame(0, 0, stream, body))
            _pour(attacker, [*window])
        until(lambda: town.metric(leader.name, "timer_connections_ended_total") > before)


def _pour(attacker: socket.socket, streams: list[int]) -> None:
    """Send as much as the windows allow; they grow, because the other side reads the messages."""
    connection, windows = 65_535 - 5 * len(streams), dict.fromkeys(streams, 65_530)
    buffered, chunk = b"", bytes(16_384)
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        for stream in streams:
            while windows[stream] >= len(chunk) and connection >= len(chunk):
                attacker.sendall(_frame(0, 0, stream, chunk))
                windows[stream] -= len(chunk)
                connection -= len(chunk)
        data = attacker.recv(1 << 16)
        if not data:
            return
        buffered += data
        while len(buffered) >= 9:
            size = int.from_bytes(buffered[:3], "big")
            if len(buffered) < 9 + size:
                break
            kind, flags, stream = buffered[3], buffered[4], int.from_bytes(buffered[5:9], "big")
            body, buffered = buffered[9 : 9 + size], buffered[9 + size :]
            if kind == 8:
                more = int.from_bytes(body, "big")
                if stream:
                    windows[stream] += more
                else:
                    connection += more
            elif kind == 6 and not flags & 1:
                attacker.sendall(_frame(6, 1, 0, body))
            elif kind == 4 and not flags & 1:
                attacker.sendall(_frame(4, 1, 0, b""))


def test_consumers_that_never_read_have_one_limit(town: Victim, client: TimerClient) -> None:
    """Forty streams on one connection are given 8 MiB each by right; in all 64 MiB are allowed."""
    leader, groups = town.wait_for_leader(), GROUPS_MAX
    payloads = [bytes(MIB)] * 12
    client.schedule_batch("unread", payloads, delay=0)
    with contextlib.ExitStack() as stack:
        options = [("grpc.http2.lookahead_bytes", 65_535), ("grpc.http2.bdp_probe", 0)]
        channel = grpc.insecure_channel(town.node(leader).grpc, options=options)
        stack.enter_context(channel)
        calls = []
        for number in range(groups):
            opening = pb.OpenConsumer(topic="unread", group=f"g{number}", credit=1000)
            call: Any = rpc.ConsumeServiceStub(channel).Consume(_forever(opening), timeout=120)
            stack.callback(call.cancel)
            assert next(call).HasField("opened")
            calls.append(call)
        until(lambda: town.metric(leader, "timer_outbox_bytes") > 16 * MIB)
        assert town.metric(leader, "timer_outbox_bytes") < 2 * 64 * MIB
    until(lambda: town.metric(leader, "timer_outbox_bytes") == 0)
    client.delete_topic("unread")


def _forever(opening: pb.OpenConsumer) -> Iterator[pb.ConsumeRequest]:
    yield pb.ConsumeRequest(open=opening)
    time.sleep(3600)
