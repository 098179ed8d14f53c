"""Malformed or far too large requests: each is rejected at once, at no lasting cost."""

import contextlib
import gzip
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
import pytest

from tests.cluster.running import RPC_S, code_of
from tests.hostile.conftest import MIB, Victim
from timerclient.proto import timer_pb2 as pb

pytestmark = pytest.mark.slow

ROWS: Final = 2_000_000
BIG: Final = 16 * MIB


def _empty_columns() -> bytes:
    return bytes([3 << 3 | 2, 0]) * (BIG // 2)


def _unset() -> bytes:
    return bytes([3 << 3 | 2, 0]) * (BIG // 2)


def _levels() -> bytes:
    policy = pb.Policy(delay_levels_ms=pb.DelayLevels(ms=[1] * ROWS))
    return pb.AlterPoliciesRequest(set=policy).SerializeToString()


def _times(way: str) -> bytes:
    timers = pb.TimerColumns(topic="t", payload_sizes=[1], payloads=b"x")
    getattr(timers, way).extend([1] * ROWS)
    return pb.ScheduleRequest(timers=[timers], request_id="a").SerializeToString()


def _offsets(request: pb.AckRequest | pb.NackRequest | pb.ExtendRequest) -> bytes:
    request.topic, request.group = "canary-warm", "canary"
    request.offsets.extend(range(ROWS))
    return request.SerializeToString()


ATTACKS: Final[dict[str, tuple[str, Callable[[], bytes]]]] = {
    "columns": ("TimerService/Schedule", _empty_columns),
    "unset": ("AdminService/AlterPolicies", _unset),
    "levels": ("AdminService/AlterPolicies", _levels),
    "delay_level": ("TimerService/Schedule", lambda: _times("delay_level")),
    "delay_ms": ("TimerService/Schedule", lambda: _times("delay_ms")),
    "key_sizes": ("TimerService/Schedule", lambda: _times("key_sizes")),
    "timer_ids": (
        "TimerService/Cancel",
        lambda: pb.CancelRequest(timer_ids=bytes(15 * ROWS // 2)).SerializeToString(),
    ),
    "ack": ("ConsumeService/Ack", lambda: _offsets(pb.AckRequest())),
    "nack": ("ConsumeService/Nack", lambda: _offsets(pb.NackRequest())),
    "extend": ("ConsumeService/Extend", lambda: _offsets(pb.ExtendRequest())),
    "name": (
        "AdminService/CreateTopic",
        lambda: pb.CreateTopicRequest(topic="\x01" * BIG).SerializeToString(),
    ),
    "too large": ("TimerService/Schedule", lambda: bytes(60 * MIB)),
    "no message": ("TimerService/Schedule", lambda: b"\xff" * 100),
    "no text": ("AdminService/CreateTopic", lambda: b"\x0a\x02\xff\xff"),
}
STREAMS: Final = ("TimerService/ScheduleStream", "ConsumeService/Consume")


@pytest.mark.parametrize("attack", ATTACKS)
def test_request_is_refused_and_forgotten(town: Victim, attack: str) -> None:
    method, make = ATTACKS[attack]
    data = make()
    leader = town.wait_for_leader()
    call: Any = town.channel(leader).unary_unary(f"/timer.v1.{method}")
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as refused:
            call(data, timeout=RPC_S)
        assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT, refused.value


def test_compressed_message_is_refused_before_it_is_expanded(town: Victim) -> None:
    call: Any = town.channel(town.wait_for_leader()).unary_unary("/timer.v1.TimerService/Schedule")
    with pytest.raises(grpc.RpcError) as refused:
        call(bytes(BIG), timeout=RPC_S, compression=grpc.Compression.Gzip)
    assert code_of(refused.value) is grpc.StatusCode.UNIMPLEMENTED, refused.value


def test_compressed_bodies_do_not_hold_the_event_loop(town: Victim) -> None:
    url = f"http://{town.node(town.wait_for_leader()).http}/healthz"
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    body = gzip.compress(bytes(MIB)) * 512

    def post(_: object) -> None:
        with contextlib.suppress(OSError):  # the node may close the connection early
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=RPC_S)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(post, range(24)))


@pytest.mark.parametrize("method", STREAMS)
def test_stream_ends_at_what_is_no_message(town: Victim, method: str) -> None:
    def requests() -> Iterator[bytes]:
        yield b"\xff" * 100

    call: Any = town.channel(town.wait_for_leader()).stream_stream(f"/timer.v1.{method}")
    with pytest.raises(grpc.RpcError) as refused:
        list(call(requests(), timeout=RPC_S))
    assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT, refused.value
