"""A machine whose topics are paused."""

import random
from collections.abc import Iterator
from typing import Any

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import (
    START_MS,
    Log,
    answer_of,
    catch_up,
    engine_on,
    pages,
    part_of,
    queue_of,
)
from timer.entries.policies import Scope
from timer.model.units import TopicId
from timer.pending.read_view import Filter
from timer.state.machine import Machine


class Paused:
    """A machine with two topics, the first of them paused."""

    def __init__(self, **said: Any) -> None:
        self.log, self.disk = Log(), SimDisk()
        self.log.begin_epoch()
        self.log.topic("a")
        self.log.topic("b")
        self.say(paused=True, **said)
        self.engine = engine_on(self.disk)
        catch_up(self.engine, self.log)

    @property
    def machine(self) -> Machine:
        return self.engine.machine

    def say(self, scope: Scope = Scope("", TopicId(1)), **said: Any) -> None:  # noqa: B008
        self.log.policy(scope, **said)

    def schedule(self, *dues: int, topic: int = 1, key: bytes = b"") -> list[tuple[int, int]]:
        """Schedule timers, due in ms from the start; return (due, seq) of each."""
        first = int(self.machine.next_seq)
        rows = [(topic, START_MS + due, b"p%d" % due) for due in dues]
        self.log.schedule(part_of(rows, keys=[key] * len(rows) if key else None))
        self.catch_up()
        return [(START_MS + due, first + at) for at, due in enumerate(dues)]

    def fire(self, at_ms: int, rows_max: int = 16_384) -> Any:
        """Apply a FIRE; return its result."""
        self.log.now_ms = START_MS + at_ms
        self.catch_up()
        entry = self.log.fire(START_MS + at_ms, rows_max)
        self.engine.raise_commit_index(entry.index)
        answers: list[Any] = []
        self.engine._observe = lambda _, applied: answers.append(answer_of(applied))
        while not self.engine.fold([entry]):  # a thread would read before, or it is read here
            pass
        self.engine._observe = None
        return answers[0]

    def catch_up(self) -> None:
        catch_up(self.engine, self.log)

    def cancel(self, *targets: tuple[int, int]) -> list[int]:
        self.catch_up()
        results: list[int] = self._answered(self.log.cancel(targets))[0]
        return results

    def _answered(self, entry: Any) -> Any:
        answers: list[Any] = []
        self.engine._observe = lambda _, applied: answers.append(answer_of(applied))
        self.catch_up()
        self.engine._observe = None
        return answers[-1]

    def flush(self) -> None:
        self.catch_up()
        flush = self.engine.begin_flush()
        if flush is not None:
            flush.write()
            self.engine.end_flush(flush)
        while merge := self.engine.begin_merge():
            self.machine.store.install_merge(merge, self.machine.store.write_merge(merge))

    def restart(self) -> None:
        self.flush()
        self.disk.crash(random.Random(1))
        self.engine = engine_on(self.disk)
        self.catch_up()

    def resume(self, catch_up: str = "all", at_ms: int = 0) -> None:
        self.log.now_ms = max(self.log.now_ms, START_MS + at_ms)
        self.say(catch_up=catch_up)
        self.catch_up()

    def fired(self, topic: int = 1) -> list[int]:
        return [int(body[1:]) for _, _, body in queue_of(self.machine, topic)]

    def pending(self, topic: int = 1) -> list[int]:
        what = Filter(topic=topic, due_from_ms=0, due_to_ms=1 << 48)
        found = pages(self.machine.store.read_view(), what, 3)
        return [int(body[1:]) for page in found for _, _, body, _ in page]


def settle(paused: Paused, at_ms: int, rows_max: int = 16_384) -> Iterator[Any]:
    """Fire until nothing is left to do."""
    answer = paused.fire(at_ms, rows_max)
    yield answer
    while answer[1]:
        answer = paused.fire(at_ms, rows_max)
        yield answer
