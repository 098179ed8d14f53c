"""Nemeses of clients, without a cluster: whom they find, and what they write down."""

import contextlib
import random
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from chaos.history.history import RunFolder, read
from chaos.suite.nemeses import crowd
from chaos.suite.nemeses.crowd import flood, kill_consumer
from chaos.suite.nemeses.nemesis import NoEffect
from tests.chaos.blows import Blow
from tests.chaos.world import told
from timerclient.values.errors import Overloaded, Unreachable

ROWS = 2


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
            run=RunFolder(folder),
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
        with pytest.raises(NoEffect, match="group g, died with no messages leased"):
            Blow(kill_consumer, life_s=0).strike(stage, random.Random(1))
    assert [event["event"] for event in stage.events] == ["kill-consumer"]


def test_no_consumer_is_killed_where_nobody_consumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "TimerClient", FakeClient)
    monkeypatch.setattr(FakeClient, "consumers", 0)
    stage: Any = FakeStage(tmp_path)
    with pytest.raises(NoEffect, match="no group has a consumer"):
        Blow(kill_consumer).strike(stage, random.Random(1))
    assert stage.events == []


# ---- floods

Answer = Callable[[], Sequence[str]]


def flooded(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *sends: Answer,
    refusals: Sequence[int] = (7, 7),
    wanted: bool = False,
) -> tuple[FakeStage, BaseException | None, list[tuple[str, int]]]:
    """flood with one client whose requests end thus.

    Return the stage, what the strike raised, and outcome and first mark of what is written down.
    """
    fates, counts = iter(sends), iter(refusals)

    class Client(contextlib.nullcontext[None]):
        def __init__(self, _: object) -> None:
            super().__init__()

        async def schedule_batch(self, *_: object, **__: object) -> Any:
            return SimpleNamespace(ids=next(fates)())

    monkeypatch.setattr(crowd, "AsyncTimerClient", Client)
    monkeypatch.setattr(crowd, "_ROWS", ROWS)
    monkeypatch.setattr(crowd, "_SIZE", 1_000_000)
    stage: Any = FakeStage(folder)
    stage.refusals = lambda: next(counts)
    raised = None
    try:
        Blow(flood, clients=1, size_mb=ROWS * len(sends), has_to_be_refused=wanted).strike(
            stage, random.Random(1)
        )()
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        raised = error
    [history] = RunFolder(folder).histories.iterdir()
    outcomes = {line["request"]: line["outcome"] for line in told(history)}
    asked = [line for line in read(history) if line["outcome"] == "asked"]
    first = asked[0]["marks"][0]
    lines = [(outcomes.get(each["request"], "asked"), each["marks"][0] - first) for each in asked]
    return stage, raised, lines


def taken() -> Sequence[str]:
    return ["a", "b"]


def refused() -> Sequence[str]:
    raise Overloaded("too much")


def broken() -> Sequence[str]:
    raise ValueError("a bug")


def away() -> Sequence[str]:
    raise Unreachable("no node answers")


def test_flood_writes_down_what_was_taken_and_what_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends = (taken, refused, refused, taken, taken)
    stage, raised, lines = flooded(tmp_path, monkeypatch, *sends)
    assert raised is None
    assert lines == [("ok", 0), ("fail", 2), ("fail", 4), ("ok", 6), ("ok", 8)]
    assert stage.events == [{"event": "flood", "asked": 5, "taken": 3, "refused": 0}]


@pytest.mark.parametrize(
    ("sends", "known"),
    [
        ((taken, broken, taken, taken), ["ok", "asked", "ok", "ok"]),
        ((taken, taken, taken, taken, broken), ["ok"] * 4 + ["asked"]),
    ],
)
def test_flood_that_fails_midway_leaves_no_request_out_of_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sends: Sequence[Answer], known: list[str]
) -> None:
    _, raised, lines = flooded(tmp_path, monkeypatch, *sends)
    assert str(raised) == "a bug", "it must be told"
    assert lines == [(outcome, ROWS * number) for number, outcome in enumerate(known)]


def test_flood_that_meets_nobody_fizzles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, raised, lines = flooded(tmp_path, monkeypatch, away, away)
    assert isinstance(raised, NoEffect)
    assert lines == [("fail", 0), ("fail", 2)]


def test_flood_that_was_refused_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, raised, _ = flooded(tmp_path, monkeypatch, away, refused)
    assert raised is None


@pytest.mark.parametrize(
    ("refusals", "wanted", "has_no_effect", "told"),
    [
        ((7, 7), True, True, 0),
        ((7, 7), False, False, 0),
        ((7, 9), True, False, 2),
        ((7, 0), True, True, 0),
    ],
)
def test_flood_that_is_to_be_refused_and_is_not_fizzles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusals: Sequence[int],
    wanted: bool,
    has_no_effect: bool,
    told: int,
) -> None:
    stage, raised, _ = flooded(tmp_path, monkeypatch, taken, refusals=refusals, wanted=wanted)
    assert isinstance(raised, NoEffect) == has_no_effect
    assert (raised is None) != has_no_effect
    assert stage.events[0]["refused"] == told
