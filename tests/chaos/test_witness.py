"""The witness, while a topic that was deleted comes back."""

from typing import Any

import pytest

from chaos.live import witness
from timerclient.values.errors import Closed, CommitTimeout, LeadershipLost, NotReady, TimerError


class Client:
    """A client whose calls fail, one after the other; then its only topic is there."""

    def __init__(self, *failures: TimerError) -> None:
        self.failures = [*failures]
        self.name = "t"

    def topics(self) -> list[Any]:
        if self.failures:
            raise self.failures.pop(0)
        return [self]


def waited(client: Any) -> object:
    return witness._when_there(client, "t", lambda: client)()


def test_witness_waits_for_a_topic_whatever_fails_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(witness, "LOOK_S", 0)
    client = Client(NotReady(), LeadershipLost(), CommitTimeout())
    assert waited(client) is client
    assert client.failures == []


def test_witness_that_is_closed_waits_no_more() -> None:
    with pytest.raises(Closed):
        waited(Client(Closed()))
