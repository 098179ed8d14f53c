"""Deleting topics, by a client, against a scripted cluster."""

from collections.abc import AsyncIterator

import pytest

from tests.timerclient.conftest import once
from tests.timerclient.fake_cluster import NOW_MS, Cluster
from timerclient import AsyncTimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values import errors


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncTimerClient]:
    async with AsyncTimerClient(cluster.address) as client:
        yield client


async def test_deletion_tells_what_went_along(cluster: Cluster, client: AsyncTimerClient) -> None:
    await client.schedule_batch("orders", [b""] * 3, due_ms=[NOW_MS, NOW_MS, NOW_MS + 60_000])
    await client.create_group("orders", "g", start="earliest")
    gone = await client.delete_topic("orders")
    assert gone is not None
    assert (gone.pending, gone.messages, [each.unacked for each in gone.groups]) == (1, 2, [2])
    with pytest.raises(errors.NotFound):
        await client.delete_topic("nothing")
    with pytest.raises(errors.InvalidRequest):
        await client.delete_topic("half a character: \ud800")
    assert [each.topic for each in cluster.called(pb.DeleteTopicRequest)] == ["orders", "nothing"]


async def test_deletion_whose_answer_was_lost_is_done_and_nobody_knows_what_went(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await client.create_topic("orders")
    cluster.on_call = once("lose")
    assert await client.delete_topic("orders") is None
    assert await client.topics() == []
