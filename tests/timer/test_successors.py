"""Successors of rescheduled timers: over chains, bounded, and stored in manifests."""

import random

import numpy as np
import pytest

from tests.timer.machines import START_MS, Log, engine_on, ids_of, part_of
from tests.timer.node_files import flushed
from timer.model.columns import U64
from timer.state import successors
from timer.state.successors import HALF_ROWS, Successors, last_of


def seqs(*numbers: int) -> U64:
    return np.array(numbers, np.uint64)


def added(known: Successors, old: list[int], new: list[int]) -> None:
    due_ms = 1_000 + np.array(new, np.int64)
    known.add(seqs(*old), due_ms, seqs(*new))


def found(known: Successors, *numbers: int) -> list[int]:
    last = last_of(known.links, seqs(*numbers))
    assert last.due_ms[last.seq > 0].tolist() == (last.seq[last.seq > 0] + 1_000).tolist()
    return [int(seq) for seq in last.seq]


def test_last_of_a_chain_is_found_from_each_of_its_timers() -> None:
    known = Successors()
    assert found(known, 1) == [0]
    added(known, [9, 1], [11, 10])
    added(known, [10], [12])
    added(known, [], [])
    added(known, [12], [20])
    assert found(known, 1, 9, 10, 12, 20, 2, 1) == [20, 11, 20, 20, 0, 0, 20]


def test_answers_are_those_of_a_naive_model() -> None:
    rng, known, model = random.Random(7), Successors(), dict[int, int]()
    living, next_seq = list(range(1, 200)), 200
    for _ in range(2_000):
        some = rng.sample(range(len(living)), rng.randint(1, 5))
        old = [living[at] for at in some]
        new = list(range(next_seq, next_seq + len(some)))
        next_seq += len(some)
        for at, was, now in zip(some, old, new, strict=True):
            living[at] = model[was] = now
        added(known, old, new)

    def last(seq: int) -> int:
        while seq in model:
            seq = model[seq]
        return seq

    asked = rng.sample(range(1, next_seq), 500)
    assert found(known, *asked) == [last(seq) if seq in model else 0 for seq in asked]
    assert len(known.links) < 30


def test_so_many_are_known_and_half_are_forgotten_at_a_time() -> None:
    known, many = Successors(), HALF_ROWS // 4
    for part in range(13):
        old = list(range(1 + part * many, 1 + (part + 1) * many))
        added(known, old, [seq + 10_000_000 for seq in old])
        assert sum(len(each.old) for each in known.links) <= 2 * HALF_ROWS
    newest = 13 * many
    assert all(found(known, newest, newest - HALF_ROWS + 1))
    assert found(known, 1) == [0]


def test_very_long_chain_is_followed_in_part() -> None:
    known, length = Successors(), 3_000
    added(known, list(range(1, length)), list(range(2, length + 1)))
    [first] = found(known, 1)
    assert first == 1 + 1_024
    assert found(known, first) == [first + 1_024]
    many = list(range(1, length)) * 10
    assert max(found(known, *many)) == length


@pytest.mark.parametrize("half", [HALF_ROWS, 3])
def test_manifest_keeps_them(monkeypatch: pytest.MonkeyPatch, half: int) -> None:
    monkeypatch.setattr(successors, "HALF_ROWS", half)
    known = Successors()
    for start in range(1, 11, 2):
        added(known, [start, start + 1], [start + 100, start + 101])
    again = Successors()
    again.restore([[[column.tobytes() for column in each] for each in h] for h in known.pack()])
    everyone = range(1, 11)
    assert found(again, *everyone) == found(known, *everyone)
    added(known, [50], [60])
    added(again, [50], [60])
    assert [len(each.old) for each in again.links] == [len(each.old) for each in known.links]


def test_restart_knows_the_reschedules() -> None:
    log = Log()
    log.begin_epoch()
    log.topic("a")
    log.schedule(part_of([(1, START_MS + 10**6, b"x"), (1, START_MS + 10**6, b"y")]))
    dues = [START_MS + 2 * 10**6, START_MS + 3 * 10**6]
    log.reschedule(ids_of([(START_MS + 10**6, 1), (START_MS + 10**6, 9)]), dues)
    log.reschedule(ids_of([(dues[0], 3)]), [START_MS + 5 * 10**6])
    disk, _ = flushed(log)
    last = last_of(engine_on(disk).machine.successors.links, seqs(1, 2, 3, 9))
    assert last.seq.tolist() == [5, 0, 5, 0]
    assert last.due_ms[0] == START_MS + 5 * 10**6
