"""Deleting topics, by a client, against a scripted cluster."""

from collections.abc import AsyncIterator

import pytest

from tests.timerclient.fake_cluster import Cluster
from timerclient import AsyncTimerClient
from timerclient.values import errors


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncTimerClient]:
    async with AsyncTimerClient(cluster.address) as client:
        yield client


async def test_deletion_tells_what_went_along(cluster: Cluster, client: AsyncTimerClient) -> None:
    gone = await client.delete_topic("orders")
    assert gone is not None
    assert (gone.pending, gone.messages) == (7, 5)
    with pytest.raises(errors.NotFound):
        await client.delete_topic("nothing")
    with pytest.raises(errors.InvalidRequest):
        await client.delete_topic("half a character: \ud800")
    assert cluster.deleted == ["orders"]


async def test_deletion_whose_answer_was_lost_is_done_and_nobody_knows_what_went(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.lose_alters = True
    assert await client.delete_topic("orders") is None
    assert cluster.deleted == ["orders"]
