"""Effects of clumsy and hostile clients on groups, on a node's real cores; each was a defect."""

from datetime import timedelta
from typing import Any

import grpc
import pytest

from tests.cluster.running import error_of
from timerclient import AckResult, InvalidRequest, TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.threads.background import Background
from timerfake import FakeCluster


def ask(cluster: FakeCluster, method: str, request: Any) -> Any:
    stubs: Any = rpc.ConsumeServiceStub, rpc.AdminServiceStub
    [call] = [c for stub in stubs if (c := getattr(stub(cluster.dial("")), method, None))]
    return Background().call(call(request))


def group(client: TimerClient, topic: str, name: str) -> pb.GroupStatus:
    return next(each for each in client.describe_topic(topic).groups if each.name == name)


@pytest.mark.parametrize(
    "name", ["x" * 30_000, "../../etc", "default/orders", "letters", "new", "orders"]
)
def test_forged_dead_letter_goes_nowhere(
    cluster: FakeCluster, client: TimerClient, name: str
) -> None:
    client.create_group("orders", "g", max_attempts=1)
    client.create_group("letters", "dead-letters")
    headers = {"dead-letter-topic": name, "dead-letter-group": "g"}
    client.schedule("letters", b"forged", headers=headers)
    redriven = client.redrive("letters")
    assert (redriven, redriven.homeless) == (0, 1)
    assert {topic.name for topic in client.topics()} == {"orders", "letters"}
    cluster.advance(60)
    assert group(client, "letters", "dead-letters").unacked == 1


def test_dead_letter_goes_back_only_while_its_group_exists_and_sends_its_letters_here(
    cluster: FakeCluster, client: TimerClient
) -> None:
    dead = "orders.eu.ledger.dead"  # also the default name for group `eu.ledger` of `orders`
    client.create_topic("orders")
    client.create_group("orders.eu", "ledger", max_attempts=1)
    client.schedule("orders.eu", b"real")
    with client.consumer("orders.eu", "ledger") as consumer:
        consumer.receive(1, timeout=5)[0].nack().result(5)
    headers = {"dead-letter-topic": "orders", "dead-letter-group": "eu.ledger"}
    client.schedule(dead, b"forged", headers=headers)
    cluster.advance(60)
    client.delete_group("orders.eu", "ledger")
    assert client.redrive(dead).homeless == 2
    cluster.advance(60)
    client.create_group("orders.eu", "ledger", dead_letter_topic="graves")
    redriven = client.redrive(dead)  # the default is the group's own, whatever its present setting
    assert (redriven.topics, redriven.homeless) == ({"orders.eu": 1}, 1)


def test_receive_holds_what_it_answers_and_nothing_else(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.create_group("orders", "g", max_attempts=1)
    client.schedule_batch("orders", [b"x" * 100_000] * 40)
    request = pb.ReceiveRequest(topic="orders", group="g", max_messages=100)
    got = [ask(cluster, "Receive", request) for _ in range(2)]
    offsets = [offset for answer in got for offset in answer.queue_offsets]
    assert offsets == [*range(len(offsets))]
    assert len(offsets) < 40
    assert group(client, "orders", "g").leased == len(offsets)


def test_receive_that_gives_up_costs_no_attempt(cluster: FakeCluster, client: TimerClient) -> None:
    client.create_group("orders", "g", max_attempts=1)
    request = pb.ReceiveRequest(topic="orders", group="g")
    assert not ask(cluster, "Receive", request).queue_offsets
    client.schedule("orders", b"x")
    assert list(ask(cluster, "Receive", request).attempts) == [1]


def test_messages_of_another_consumer_are_not_settled_by_their_lease_id(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.schedule_batch("orders", [b"0", b"1"])
    with client.consumer("orders", "g") as consumer:
        [mine] = consumer.receive(1, timeout=5)
        batch = mine._batch
        said: dict[str, Any] = {"topic": "orders", "group": "g", "epoch": batch.epoch}
        said["offsets"] = [0]
        for lease_id in (batch.lease_id, *range(100)):
            got = ask(cluster, "Ack", pb.AckRequest(**said, lease_id=lease_id))
            assert list(got.results) == [pb.ACK_RESULT_LEASE_LOST], lease_id
        got = ask(cluster, "Nack", pb.NackRequest(**said, lease_id=batch.lease_id))
        assert list(got.results) == [pb.ACK_RESULT_LEASE_LOST]
        assert mine.ack().result(5) is AckResult.ACKED


def test_consumer_that_lets_its_leases_end_leaves_the_messages_to_another(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.create_group("orders", "g", max_attempts=3, lease=1)
    with (
        client.consumer("orders", "g", hold_max=0),
        client.consumer("orders", "g", window=10) as other,
    ):
        client.schedule_batch("orders", [b"x"] * 100)
        for _ in range(20):  # the first consumer takes and renews nothing, as a frozen one does
            cluster.settle()
            for message in other.receive(10, timeout=0):
                _ = message.ack()
            cluster.advance(0.5)
        assert group(client, "orders", "g").unacked == 0
    assert {topic.name for topic in client.topics()} == {"orders"}, "none is a dead letter"


def test_redrive_takes_all_however_large_and_leaves_nothing_leased(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.create_group("orders", "g", max_attempts=1)
    client.create_group("orders.g.dead", "dead-letters", max_in_flight=30)
    client.schedule_batch("orders", [b"x" * 100_000] * 40)
    with client.consumer("orders", "g") as consumer:
        for _ in range(40):
            _ = consumer.receive(1, timeout=5)[0].nack()
        consumer.flush()
    cluster.settle()
    assert group(client, "orders.g.dead", "dead-letters").unacked == 40
    assert client.redrive("orders.g.dead") == 40
    letters = group(client, "orders.g.dead", "dead-letters")
    assert (letters.unacked, letters.leased) == (0, 0)


def test_nack_and_extension_out_of_range_are_refused_and_the_consumer_lives(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.schedule_batch("orders", [b"1", b"2"])
    with client.consumer("orders", "g") as consumer:
        cluster.settle()
        first, second = consumer.receive(2, timeout=5)
        with pytest.raises(InvalidRequest, match=r"delay = .* must be 0 to 2592000 s"):
            first.nack(delay=timedelta(days=31)).result(5)
        with pytest.raises(InvalidRequest, match="lease_ms"):
            first.extend(lease=0.001).result(5)
        with pytest.raises(InvalidRequest, match="lease"):
            _ = first.extend(lease=timedelta(days=60))
        assert [each.ack().result(5) for each in (first, second)] == [AckResult.ACKED] * 2


def test_topic_is_not_its_own_dead_letter_topic_by_another_name(client: TimerClient) -> None:
    client.create_group("orders", "g")
    with pytest.raises(InvalidRequest, match="dead_letter_topic"):
        client.alter_group("default/orders", "g", dead_letter_topic="orders")


@pytest.mark.parametrize("start", [7, -1, 2**31 - 1])
def test_unknown_start_is_not_taken_for_another(
    cluster: FakeCluster, client: TimerClient, start: Any
) -> None:
    client.create_group("orders", "g")
    for method, request in (
        ("SeekGroup", pb.SeekGroupRequest(topic="orders", group="g", start=start)),
        ("CreateGroup", pb.CreateGroupRequest(topic="orders", group="h", start=start)),
        ("Receive", pb.ReceiveRequest(topic="orders", group="h", start=start)),
    ):
        with pytest.raises((grpc.RpcError, grpc.aio.AioRpcError)) as refused:
            ask(cluster, method, request)
        assert error_of(refused.value).field == "start"


def test_lease_too_long_for_a_group_is_named(client: TimerClient) -> None:
    with pytest.raises(InvalidRequest, match="lease"):
        client.create_group("orders", "g", lease=timedelta(days=60))
    with pytest.raises(InvalidRequest, match="max_messages"):
        client.redrive("orders", -1)


@pytest.mark.parametrize("seconds", [10**9, 10**10 - 1, -1])
def test_group_is_not_sought_to_a_time_in_seconds(
    cluster: FakeCluster, client: TimerClient, seconds: int
) -> None:
    client.create_group("orders", "g")
    request = pb.SeekGroupRequest(topic="orders", group="g", time_ms=seconds)
    with pytest.raises((grpc.RpcError, grpc.aio.AioRpcError)) as refused:
        ask(cluster, "SeekGroup", request)
    assert error_of(refused.value).field == "time_ms"
