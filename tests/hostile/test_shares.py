"""Ids of other clients are not guessed, and each client leaves the others their share of tables."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import grpc
import pytest

from tests.cluster.running import CALL_S, code_of, error_of, until
from tests.hostile.conftest import GROUPS_MAX, MIB, Victim
from timerclient import QuotaReached, TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc

pytestmark = pytest.mark.slow

ROWS: Final = 65_536
HOUR_MS: Final = 3_600_000
KEPT: Final = 64 * MIB
"""The memtable's size at a flush: so long the deleted timers of an attack may lie there."""


def numbered(producer_id: int, sequence: int, payload: bytes = b"x") -> pb.ScheduleRequest:
    timers = pb.TimerColumns(
        topic="shares", delay_ms=[HOUR_MS], payload_sizes=[len(payload)], payloads=payload
    )
    return pb.ScheduleRequest(producer_id=producer_id, sequence=sequence, timers=[timers])


def test_the_producer_of_another_client_is_not_guessed_and_a_lost_timer_is_an_error(
    town: Victim,
) -> None:
    stub = rpc.TimerServiceStub(town.channel(town.wait_for_leader()))
    token = pb.RegisterProducerRequest(token=bytes(16))
    own = stub.RegisterProducer(token, timeout=CALL_S).producer_id
    assert stub.Schedule(numbered(own, 1), timeout=CALL_S).timer_ids
    guesses = [*range(1, 40), own - 1, own + 1]
    for guess in guesses:
        with pytest.raises(grpc.RpcError) as caught:
            stub.Schedule(numbered(guess, 2), timeout=CALL_S)
        assert code_of(caught.value) is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as caught:
        stub.Schedule(numbered(own, 1, b"other"), timeout=CALL_S)
    assert "sequence = 1: was used by another request" in error_of(caught.value).message
    assert stub.Schedule(numbered(own, 2), timeout=CALL_S).timer_ids


def test_the_lease_of_another_consumer_is_not_guessed(town: Victim, client: TimerClient) -> None:
    stub = rpc.ConsumeServiceStub(town.channel(town.wait_for_leader()))
    client.schedule("guessed", b"x", delay=0)
    wanted = pb.ReceiveRequest(topic="guessed", group="g", wait_ms=10_000)
    held = until(lambda: next(iter([d] if (d := stub.Receive(wanted)).queue_offsets else []), None))
    settle: dict[str, Any] = {
        "epoch": held.epoch,
        "offsets": held.queue_offsets,
        "topic": "guessed",
        "group": "g",
    }
    for guess in (*range(40), held.lease_id - 1, held.lease_id + 1):
        request = pb.AckRequest(lease_id=guess, **settle)
        assert [*stub.Ack(request, timeout=CALL_S).results] == [pb.ACK_RESULT_LEASE_LOST], guess
    request = pb.AckRequest(lease_id=held.lease_id, **settle)
    assert [*stub.Ack(request, timeout=CALL_S).results] == [pb.ACK_RESULT_ACKED]


def test_groups_end_at_their_limit(client: TimerClient) -> None:
    for number in range(GROUPS_MAX):
        client.create_group("crowded", f"g{number}")
    with pytest.raises(QuotaReached, match=f"topic_groups_max.*must be at most {GROUPS_MAX}"):
        client.create_group("crowded", "one-more")
    client.delete_topic("crowded")


@contextlib.contextmanager
def from_another_address(endpoint: str) -> Iterator[str]:
    """Yield an endpoint whose connections reach `endpoint` from 127.0.0.2."""
    host, _, port = endpoint.rpartition(":")

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:

        def accept() -> None:
            with contextlib.suppress(OSError):
                near, _ = server.accept()
                far = socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0))
                ends = stack.enter_context(near), stack.enter_context(far)
                threads = [threading.Thread(target=copy, args=pair) for pair in (ends, ends[::-1])]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        accepting.join()


def test_a_sender_of_request_ids_leaves_others_their_share(
    town: Victim, client: TimerClient
) -> None:
    def named(name: str, rows: int) -> Any:
        timers = pb.TimerColumns(topic="named", delay_ms=[HOUR_MS], payload_sizes=[0] * rows)
        return pb.ScheduleRequest(request_id=name, timers=[timers])

    def fill() -> str:
        """Send requests until one is rejected for its share; return the error's text."""
        for number in range(64):
            try:
                until(partial(sent, f"fill-{number}"))
            except grpc.RpcError as error:
                return str(error_of(error).message)
        return "none was rejected"

    def sent(name: str) -> bool:
        try:
            stub.Schedule(named(name, ROWS), timeout=CALL_S)
        except grpc.RpcError as error:
            if "the share of" in error_of(error).message:
                raise
            return False  # busy
        return True

    leader = town.node(town.wait_for_leader()).grpc
    stub = rpc.TimerServiceStub(town.channel(town.wait_for_leader()))
    assert "in the table of request ids" in fill()
    with from_another_address(leader) as endpoint, grpc.insecure_channel(endpoint) as channel:
        other = rpc.TimerServiceStub(channel)
        assert other.Schedule(named("other", 1_000), timeout=CALL_S).timer_ids
    client.delete_topic("named")
