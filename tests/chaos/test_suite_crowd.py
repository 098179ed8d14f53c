"""Nemeses of clients, without a cluster: what they do when there is nobody to be unkind to."""

import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from chaos.history import Run
from chaos.suite import crowd
from chaos.suite.crowd import KillConsumer


class FakeClient:
    """Knows of one group with a consumer."""

    def __init__(self, _: object) -> None:
        group = SimpleNamespace(name="g", consumers=1)
        self.topics = lambda: [SimpleNamespace(name="t", groups=[group])]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_consumer_that_gets_nothing_is_killed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "TimerClient", FakeClient)
    monkeypatch.setattr(crowd, "TAKE_S", 0.1)
    events: list[dict[str, Any]] = []
    said: list[str] = []
    with socket.socket() as silent:  # it connects, and is never answered
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        stage: Any = SimpleNamespace(
            cluster=SimpleNamespace(endpoints=[f"127.0.0.1:{silent.getsockname()[1]}"]),
            run=Run(tmp_path),
            record=lambda event, **more: events.append({"event": event, **more}),
            say=said.append,
        )
        KillConsumer(life_s=0).strike(stage, random.Random(1))()
    assert [event["event"] for event in events] == ["kill-consumer"]
    assert said == ["a consumer of t, group g, died with nothing in hand"]
