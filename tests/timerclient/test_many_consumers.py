"""A client with very many consumers."""

import pytest

from timerclient import AsyncTimerClient
from timerclient.client.consumers import AsyncConsumer


async def test_client_looks_seldom_for_consumers_that_are_over(
    client: AsyncTimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[AsyncConsumer] = []
    monkeypatch.setattr(AsyncConsumer, "_is_over", property(looks.append))  # never
    for _ in range(1_000):
        _ = client.consumer("orders", "a")
    assert len(looks) <= 2_000
