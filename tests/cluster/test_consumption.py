"""Nacks, extensions, dead letters and unary calls against three real processes, over failovers."""

import re
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cluster.running import WAIT_S, Running, code_of, error_of, receive, redriven, until
from timerclient import ExtendResult, NackResult, TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values import errors

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[2] / "docs/consuming.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_nacked_message_comes_back_after_its_delay_over_a_failover(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.schedule_batch(topic, [b"later", b"held"])
    with client.consumer(topic, "g") as consumer:
        later, held = receive(consumer, 2)
        assert later.nack(delay=4).result(WAIT_S) == NackResult.NACKED
        assert held.extend(lease=60).result(WAIT_S) == ExtendResult.EXTENDED
        cluster.change_leader(client)
        again = {message.payload: message for message in receive(consumer, 2)}
        assert set(again) == {b"later", b"held"}
        counts = {payload: (m.attempt, m.failures) for payload, m in again.items()}
        assert counts == {b"later": (2, 1), b"held": (2, 0)}, "the transfer counts for nothing"
        handed_out_ms = again[b"later"].handed_out_ms
        assert handed_out_ms >= later.handed_out_ms + 4_000
        for message in again.values():
            _ = message.ack()
    cluster.digests_agree()


def test_transfers_count_as_no_attempt_of_a_message_that_nobody_has_seen(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.schedule(topic, b"seen")
    with client.consumer(topic, "g") as consumer:
        [seen] = receive(consumer, 1)
        assert seen.ack().result(WAIT_S)
    client.schedule_batch(topic, [b"%d" % at for at in range(10)])
    for _ in range(3):
        cluster.change_leader(client)
    with client.consumer(topic, "g") as consumer:
        assert {(m.attempt, m.failures) for m in receive(consumer, 10)} == {(1, 0)}
    cluster.digests_agree()


def test_dead_letters_say_what_they_were_and_are_redriven_once(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    status = client.create_group(topic, "g", max_attempts=2, backoff_min=0.05, backoff_max=1)
    assert (status.settings.max_attempts, status.settings.backoff_ms_min) == (2, 50)
    client.schedule_batch(topic, [b"bad %d" % n for n in range(600)], headers={"mine": "1"})
    timer = client.schedule(topic, b"worst")
    with client.consumer(topic, "g") as consumer:
        for _ in range(2 * 601):
            _ = receive(consumer, 1)[0].nack()
        consumer.flush()
    dead = f"{topic}.g.dead"
    until(lambda: unacked(client, dead) == 601)
    assert unacked(client, topic) == 0
    with client.consumer(dead, "look", max_messages=601) as consumer:
        letters = {message.payload: message.headers for message in consumer}
    assert letters[b"worst"]["dead-letter-timer-id"] == timer.id
    assert letters[b"bad 0"]["mine"] == "1"
    assert letters[b"bad 0"]["dead-letter-reason"] == "nacked"
    assert letters[b"bad 0"]["dead-letter-attempts"] == "2"
    redriven(client, dead, 601)
    assert client.redrive(dead) == 0
    with client.consumer(topic, "g", max_messages=601) as consumer:
        back = [(message.payload, message.headers) for message in consumer]
    assert len(back) == len({payload for payload, _ in back}) == 601
    assert {b"worst"} == {payload for payload, headers in back if headers != {"mine": "1"}}
    cluster.digests_agree()
    cluster.counts_add_up()


def unacked(client: TimerClient, topic: str) -> int:
    """Return the number of messages that a topic's first group has not acked; -1: no group."""
    groups = [each.groups for each in client.topics() if each.name == topic]
    return groups[0][0].unacked if groups and groups[0] else -1


def test_simple_client_receives_and_settles_by_unary_calls(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    stub = cluster.consuming(cluster.up())
    asked: dict[str, Any] = {"topic": topic, "group": "g"}
    assert not stub.Receive(pb.ReceiveRequest(**asked, wait_ms=100)).queue_offsets
    waiting = stub.Receive.future(pb.ReceiveRequest(**asked, wait_ms=20_000, max_messages=3))
    client.schedule_batch(topic, [b"a", b"b", b"c"])
    got = waiting.result(WAIT_S)
    assert (got.payloads, list(got.attempts)) == (b"abc", [1, 1, 1])
    assert not stub.Receive(pb.ReceiveRequest(**asked, wait_ms=100)).queue_offsets, "they are held"
    held = asked | {"lease_id": got.lease_id, "epoch": got.epoch}
    extended = stub.Extend(pb.ExtendRequest(**held, offsets=[0, 9], lease_ms=60_000))
    assert list(extended.results) == [pb.ACK_RESULT_EXTENDED, pb.ACK_RESULT_NOT_DELIVERED]
    guesses = [struct.pack("<QQQ", got.epoch, guess, 1) for guess in range(1, 200)]  # 4 portions
    lost = stub.Ack(pb.AckRequest(**asked, leases=guesses)).results
    assert list(lost) == [pb.ACK_RESULT_LEASE_LOST] * len(guesses)
    assert list(stub.Ack(pb.AckRequest(**held, offsets=[0])).results) == [pb.ACK_RESULT_ACKED]
    nacked = stub.Nack(pb.NackRequest(**held, offsets=[0, 1, 1], delay_ms=0))
    assert list(nacked.results) == [
        pb.ACK_RESULT_ALREADY_ACKED,
        pb.ACK_RESULT_NACKED,
        pb.ACK_RESULT_LEASE_LOST,
    ]
    again = stub.Receive(pb.ReceiveRequest(**asked, wait_ms=5_000, max_messages=3))
    assert (again.payloads, list(again.attempts)) == (b"b", [2])
    assert again.handed_out_ms >= got.handed_out_ms > 0


REFUSED: dict[str, tuple[str, Any, str]] = {
    "too many messages": ("Receive", pb.ReceiveRequest(max_messages=1001), "max_messages"),
    "too long a wait": ("Receive", pb.ReceiveRequest(wait_ms=20_001), "wait_ms"),
    "too short a lease": ("Receive", pb.ReceiveRequest(lease_ms=1), "lease_ms"),
    "no offset": ("Nack", pb.NackRequest(), "offsets"),
    "too many offsets": ("Nack", pb.NackRequest(offsets=range(16_385)), "offsets"),
    "too long a delay": ("Nack", pb.NackRequest(offsets=[1], delay_ms=1 << 40), "delay_ms"),
    "too long a text": ("Nack", pb.NackRequest(offsets=[1], detail="é" * 513), "detail"),
    "too long a lease": ("Extend", pb.ExtendRequest(offsets=[1], lease_ms=1 << 31), "lease_ms"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unary_call_beyond_a_limit_names_it(
    cluster: Running, client: TimerClient, case: str
) -> None:
    client.create_group("limits", "g")
    method, request, field = REFUSED[case]
    request.topic, request.group = "limits", "g"
    with pytest.raises(grpc.RpcError) as caught:
        getattr(cluster.consuming(cluster.up()), method)(request)
    assert code_of(caught.value) == grpc.StatusCode.INVALID_ARGUMENT
    assert error_of(caught.value).field == field


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_of_the_documentation_runs(cluster: Running, number: int) -> None:
    with cluster.client() as client:
        topic = f"orders-{number}"
        client.schedule(topic, b"broken" if "broken" in EXAMPLES[number] else b"fine")
        source = EXAMPLES[0] + EXAMPLES[number]  # the first has the imports
        exec(source.replace("orders", topic), {"client": client})


def test_group_settings_are_checked_changed_in_part_and_told(client: TimerClient) -> None:
    client.create_group("settings", "g", lease=5, max_attempts=3)
    assert client.create_group("settings", "g", lease=9).settings.lease_ms == 5_000, "it was there"
    altered = client.alter_group("settings", "g", max_attempts=0, backoff_min=2).settings
    assert (altered.lease_ms, altered.max_attempts, altered.backoff_ms_min) == (5_000, 0, 2_000)
    wrong: list[dict[str, Any]] = [
        {"max_attempts": 1001},
        {"lease": 0.001},
        {"backoff_min": 9, "backoff_max": 3},
        {"backoff_max": 1},
        {"dead_letter_topic": "settings"},
        {"dead_letter_topic": "no spaces"},
    ]
    for options in wrong:
        with pytest.raises(errors.InvalidRequest):
            client.alter_group("settings", "g", **options)
    with pytest.raises(errors.NotFound):
        client.alter_group("settings", "nobody", max_attempts=1)
    with pytest.raises(errors.NotFound):
        client.redrive("settings")
