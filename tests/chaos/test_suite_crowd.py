"""Nemeses of clients, without a cluster: whom they find, and what they write down."""

import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from chaos.history import Run
from chaos.suite import crowd
from chaos.suite.crowd import KillConsumer
from chaos.suite.nemesis import Fizzled


class FakeClient:
    """Knows of one group, with so many consumers."""

    consumers = 1

    def __init__(self, _: object) -> None:
        group = SimpleNamespace(name="g", consumers=self.consumers)
        self.topics = lambda: [SimpleNamespace(name="t", groups=[group])]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeStage(SimpleNamespace):
    """Has a run's folder, and remembers what it is told."""

    def __init__(self, folder: Path, endpoint: str = "") -> None:
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []
        super().__init__(
            cluster=SimpleNamespace(endpoints=[endpoint]),
            run=Run(folder),
            record=lambda event, **more: self.events.append({"event": event, **more}),
            say=self.said.append,
        )


def test_consumer_that_gets_nothing_is_killed_all_the_same_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "TimerClient", FakeClient)
    monkeypatch.setattr(crowd, "TAKE_S", 0.1)
    with socket.socket() as silent:  # it connects, and is never answered
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        stage: Any = FakeStage(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Fizzled, match="a consumer of t, group g, died with nothing in hand"):
            KillConsumer(life_s=0).strike(stage, random.Random(1))
    assert [event["event"] for event in stage.events] == ["kill-consumer"]


def test_no_consumer_is_killed_where_nobody_consumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "TimerClient", FakeClient)
    monkeypatch.setattr(FakeClient, "consumers", 0)
    stage: Any = FakeStage(tmp_path)
    with pytest.raises(Fizzled, match="nobody consumes anything"):
        KillConsumer().strike(stage, random.Random(1))
    assert stage.events == []
