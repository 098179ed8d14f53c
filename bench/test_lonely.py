"""Micro-benchmarks of entries with one timer each: `pytest bench/test_lonely.py`.

An operation that is cheap for a thousand rows may be expensive for one: a numpy call takes at least
a microsecond for any input. No thread has looked the timers up before. A million rows lie in
sixteen runs. Each run has due times of the whole day, so that an id does not determine the run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.test_store import BATCH, DAY_MS, NOW, Entries, flush, measure
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import (
    Ids,
    Keys,
    Reschedule,
    encode_cancel,
    encode_reschedule,
    encode_topic,
)
from timer.files.disk import RealDisk
from timer.model.columns import Binary, Part, encode_schedule, values_at
from timer.model.units import Epoch, LogIndex, ProducerId, UnixMs
from timer.pending.store import Store
from timer.state.apply_results import (
    CANCELLED,
    RESCHEDULED,
    Applied,
    CancelApplied,
    RescheduleApplied,
)
from timer.state.machine import Machine

RUNS: Final = 16
ROWS: Final = 62_000
"""Rows of each run."""
ROUNDS: Final = 400


class KeyedMachine:
    """A machine with timers, each of which has a key."""

    def __init__(self, path: Path) -> None:
        self.store = Store(RealDisk(), path)
        self.store.lead()
        self.machine = Machine(self.store)
        self.entries = Entries()
        self.parts: list[Part] = []
        self.apply(EntryKind.TOPIC, [encode_topic("topic")])

    def apply(self, kind: EntryKind, payload: list[bytes]) -> Applied:
        """Apply the next entry."""
        index, data = LogIndex(self.machine.applied_index + 1), memoryview(b"".join(payload))
        return self.machine.apply(Entry(kind, Epoch(1), index, UnixMs(NOW), data))

    def fill(self, rows: int) -> None:
        """Schedule timers over a day, a thousand per entry."""
        for _ in range(rows // BATCH):
            batch = self.entries.next(1, DAY_MS)
            keys = [b"key of number %010d" % seq for seq in batch["seq"].tolist()]
            part = Part(
                producer_id=ProducerId(0),
                sequence=0,
                due_ms=batch["due_ms"].copy(),
                requested_ms=batch["due_ms"].copy(),
                topic=batch["topic"].copy(),
                payload=Binary(sizes=batch["payload_size"].copy(), blob=self.entries.buf),
                key=Binary.of(keys),
            )
            self.apply(EntryKind.SCHEDULE, encode_schedule([part]))
            self.parts.append(part)

    def timers(self) -> Iterator[tuple[Ids, Keys]]:
        """Yield timers in random order, each once: by id, and by key."""
        for seq in np.random.default_rng(5).permutation(len(self.parts) * BATCH).tolist():
            number, at = divmod(seq, BATCH)
            part = self.parts[number]
            assert part.key is not None
            ids = Ids(part.due_ms[at : at + 1], np.array([seq + 1], np.uint64))
            yield ids, Keys(part.topic[at : at + 1], values_at(part.key, np.array([at])))


@pytest.fixture(scope="module", params=["memtable", "runs"])
def pending(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[KeyedMachine, Iterator[tuple[Ids, Keys]]]:
    """The timers, in memory or in runs, and an iterator over those not chosen yet."""
    there = KeyedMachine(tmp_path_factory.mktemp("lonely"))
    for _ in range(RUNS):
        there.fill(ROWS)
        if request.param == "runs":
            flush(there.store)
    return there, there.timers()


@pytest.mark.parametrize("by", ["id", "key"])
def test_cancel(
    benchmark: BenchmarkFixture, pending: tuple[KeyedMachine, Iterator[tuple[Ids, Keys]]], by: str
) -> None:
    """Apply a CANCEL."""
    there, timers = pending

    def chosen() -> tuple[tuple[list[bytes]], dict[str, object]]:
        return (encode_cancel(next(timers)[by == "key"]),), {}

    def cancel(payload: list[bytes]) -> None:
        applied = there.apply(EntryKind.CANCEL, payload)
        assert isinstance(applied, CancelApplied)
        assert applied.results[0] == CANCELLED

    measure(benchmark, cancel, setup=chosen, rounds=ROUNDS)


def test_reschedule(
    benchmark: BenchmarkFixture, pending: tuple[KeyedMachine, Iterator[tuple[Ids, Keys]]]
) -> None:
    """Apply a RESCHEDULE by id. It verifies the timer's whole batch."""
    there, timers = pending
    later = np.array([NOW + DAY_MS])

    def chosen() -> tuple[tuple[list[bytes]], dict[str, object]]:
        return (encode_reschedule(Reschedule(next(timers)[0], later, later)),), {}

    def reschedule(payload: list[bytes]) -> None:
        applied = there.apply(EntryKind.RESCHEDULE, payload)
        assert isinstance(applied, RescheduleApplied)
        assert applied.results[0] == RESCHEDULED

    measure(benchmark, reschedule, setup=chosen, rounds=ROUNDS)


def test_schedule(
    benchmark: BenchmarkFixture, pending: tuple[KeyedMachine, Iterator[tuple[Ids, Keys]]]
) -> None:
    """Apply a SCHEDULE without a key."""
    there, _ = pending
    due_ms = np.array([NOW + DAY_MS])
    part = Part(
        producer_id=ProducerId(0),
        sequence=0,
        due_ms=due_ms,
        requested_ms=due_ms,
        topic=np.array([1], np.uint32),
        payload=Binary.of([bytes(100)]),
    )
    payload = encode_schedule([part])
    measure(benchmark, lambda: there.apply(EntryKind.SCHEDULE, payload), rounds=ROUNDS)


def test_find(
    benchmark: BenchmarkFixture, pending: tuple[KeyedMachine, Iterator[tuple[Ids, Keys]]]
) -> None:
    """Look one timer up by id."""
    there, timers = pending

    def chosen() -> tuple[tuple[UnixMs, int], dict[str, object]]:
        ids, _ = next(timers)
        return (UnixMs(int(ids.due_ms[0])), int(ids.seq[0])), {}

    measure(benchmark, there.store.find, setup=chosen, rounds=ROUNDS)
