"""Old objects are collected in sweeps; each sweep visits only new objects."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.node import process, python_garbage
from cluster.node.node import Node
from cluster.node.python_garbage import (
    ALL_EVERY_S,
    LEFT_MAX,
    NEVER,
    RETRIM_SWEEPS,
    SINCE_MIN,
    SWEEP_S,
    TRIM_SWEEPS,
    YOUNG_ROUNDS,
    Sweeper,
)


@dataclass
class FakeCollector:
    """Holds a number of objects, and records how many each collection visited."""

    old: int = 0
    aside: int = 0
    rounds: int = 0
    threshold: tuple[int, int, int] = (700, 10, 10)
    looked_at: list[int] = field(default_factory=list)

    def make(self, objects: int) -> None:
        self.old += objects
        self.rounds = YOUNG_ROUNDS

    def collect(self) -> int:
        self.looked_at.append(self.old)
        self.rounds = 0
        return 0

    def freeze(self) -> None:
        self.old, self.aside = 0, self.aside + self.old

    def unfreeze(self) -> None:
        self.old, self.aside = self.old + self.aside, 0

    def get_freeze_count(self) -> int:
        return self.aside

    def get_count(self) -> tuple[int, int, int]:
        return 0, 0, self.rounds

    def get_objects(self, generation: int | None = None) -> list[Any]:
        del generation
        return [None] * self.old

    def get_threshold(self) -> tuple[int, int, int]:
        return self.threshold

    def set_threshold(self, young: int, middle: int, old: int, /) -> None:
        self.threshold = young, middle, old


def started(held: int = 0) -> tuple[FakeCollector, Sweeper]:
    """Return a collector that held objects as its sweeper started, and the sweeper."""
    collector = FakeCollector()
    collector.make(held)
    sweeper = Sweeper(collector, lambda: 0)
    sweeper.start()
    return collector, sweeper


@pytest.mark.parametrize("held", [10 * LEFT_MAX, 2 * SINCE_MIN])
def test_what_is_held_is_looked_at_again_only_once_there_is_twice_as_much_or_many_more(
    held: int,
) -> None:
    collector = FakeCollector()
    collector.make(held)
    sweeper = Sweeper(collector, lambda: 0)
    assert collector.threshold == (NEVER, NEVER, NEVER), "no visits while the state is read"
    sweeper.start()
    assert collector.threshold == (700, 10, NEVER)
    more = LEFT_MAX + 1
    sweeps = max(held, SINCE_MIN) // more + 1
    for _ in range(sweeps):
        collector.make(more)
        sweeper.sweep()
    assert collector.looked_at == [more] * sweeps + [held + sweeps * more]
    assert collector.aside == held + sweeps * more
    assert collector.old == 0


def test_what_comes_and_goes_is_never_set_aside() -> None:
    collector, sweeper = started()
    for _ in range(5):
        collector.make(LEFT_MAX)
        sweeper.sweep()
        collector.old = 0
    assert collector.aside == 0


def test_what_was_set_aside_and_went_does_not_count() -> None:
    collector, sweeper = started(10 * LEFT_MAX)
    more = LEFT_MAX + 1
    for _ in range(2 * SINCE_MIN // more):
        collector.make(more)
        sweeper.sweep()
        collector.aside -= more
    assert max(collector.looked_at) == more


def test_once_in_a_long_time_all_is_looked_at() -> None:
    collector, sweeper = started(10 * LEFT_MAX)
    for _ in range(int(2 * ALL_EVERY_S / SWEEP_S)):
        sweeper.sweep()
    assert collector.looked_at == [0] + [10 * LEFT_MAX] * 2


async def test_nothing_is_swept_while_much_is_there_that_soon_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(python_garbage, "SWEEP_S", 0)
    collector, answers = FakeCollector(), [True, True, False]
    sweeper = Sweeper(collector, lambda: 0)
    collector.make(7)
    with pytest.raises(IndexError):
        await sweeper.run(lambda: answers.pop(0))
    assert collector.looked_at == [7]


def test_node_is_busy_while_its_state_is_captured_and_while_it_is_written() -> None:
    node: Any = SimpleNamespace()
    told = []
    for cutting, flushing in ((False, False), (True, False), (False, True)):
        engine = SimpleNamespace(capture_begun=cutting, flushing=flushing)
        node._parts = SimpleNamespace(engine=engine)
        told.append(Node.is_flushing.fget(node))  # type: ignore[attr-defined]
    assert told == [False, True, True]


def test_little_that_is_new_is_left_alone() -> None:
    collector, sweeper = started()
    collector.make(7)
    collector.rounds = YOUNG_ROUNDS - 1
    sweeper.sweep()
    assert collector.looked_at == []


class Cycle:
    def __init__(self) -> None:
        self.myself = self


@pytest.fixture
def collector() -> Iterator[Any]:
    threshold = gc.get_threshold()
    yield gc
    gc.set_threshold(*threshold)
    gc.unfreeze()


def test_cycle_that_was_made_since_is_collected_by_the_next_sweep(collector: Any) -> None:
    sweeper = Sweeper(collector, lambda: 0)
    sweeper.start()
    held = [Cycle() for _ in range(1_000)]
    for _ in range(YOUNG_ROUNDS):
        gc.collect(1)  # they are old now
    gone = [weakref.ref(one) for one in held]
    del held
    assert gc.get_count()[2] >= YOUNG_ROUNDS
    sweeper.sweep()
    assert not any(one() for one in gone)


async def test_node_sets_aside_what_the_disk_held_before_anybody_can_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps: list[str] = []

    async def open_ports() -> None:
        steps.append("open ports")
        raise EOFError

    def build(config: object, node: object, *, raft_lost: bool) -> object:
        del config, node, raft_lost
        steps.append("read disk")
        return SimpleNamespace(ports=SimpleNamespace(open=open_ports))

    monkeypatch.setattr("cluster.node.node.build", build)
    monkeypatch.setattr(Sweeper, "start", lambda sweeper: steps.append("set aside"))
    config: Any = SimpleNamespace(data=tmp_path / "absent")
    with pytest.raises(EOFError):
        await process._run(config, process.EndState(), lambda: config, raft_lost=False)
    assert steps == ["read disk", "set aside", "open ports"]


async def test_free_pages_return_after_a_burst_and_once_more_when_the_rest_of_it_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(python_garbage, "SWEEP_S", 0)
    rounds, trims = [0], list[int]()
    monkeypatch.setattr(python_garbage, "release_free_pages", lambda: trims.append(rounds[0]))
    burst = range(300, 320)

    def resident() -> int:
        return (100 + max(0, min(rounds[0], burst.stop) - burst.start) * 10) << 20

    def busy() -> bool:
        rounds[0] += 1
        if rounds[0] == 900:
            raise EOFError
        return False

    with pytest.raises(EOFError):
        await Sweeper(FakeCollector(), resident).run(busy)
    after = burst.stop + TRIM_SWEEPS
    assert [trim for trim in trims if trim >= burst.start] == [after, after + RETRIM_SWEEPS]
