"""The shape of a log against the plain list of epochs that it stands for."""

import random

import pytest

from replication.core.log_shape import AGED_MAX, ENTRY_SIZE, EntrySizes, LogShape
from replication.core.peer_messages import ENTRIES_MAX, LogStart
from replication.core.quorum import is_granted, majority_value
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId

VOTERS = frozenset(map(ReplicaId, (1, 2, 3)))
OTHERS = frozenset(map(ReplicaId, (3, 4, 5)))


def shape_of(epochs: list[int]) -> LogShape:
    """`epochs[i]` is that of entry i + 1."""
    shape = LogShape(LogIndex(0), Epoch(0), VOTERS, LogIndex(0))
    if epochs:
        shape.extend(LogIndex(len(epochs)), starts_of(epochs))
    return shape


def starts_of(epochs: list[int]) -> list[LogStart]:
    return [
        LogStart(LogIndex(number + 1), Epoch(epoch), VOTERS)
        for number, epoch in enumerate(epochs)
        if number == 0 or epochs[number - 1] != epoch
    ]


def two_logs(rng: random.Random) -> tuple[list[int], list[int]]:
    """Two logs that a cluster could have: each epoch has one leader, so one beginning."""
    common = sorted(rng.choices(range(1, 4), k=rng.randint(0, 6)))
    base = common[-1] if common else 0
    mine = sorted(rng.choices([base + 1, base + 3], k=rng.randint(0, 5)))
    other = sorted(rng.choices([base + 2, base + 4], k=rng.randint(0, 5)))
    return common + mine, common + other


def test_logs_find_where_they_agree() -> None:
    for seed in range(300):
        find_where_they_agree(seed)


def find_where_they_agree(seed: int) -> None:
    ours, theirs = two_logs(random.Random(seed))
    us, them = shape_of(ours), shape_of(theirs)
    agree = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    prev, rounds = LogIndex(len(ours)), 0
    while not (prev <= len(theirs) and us.epoch_at(prev) == them.epoch_at(prev)):
        following = us.resume_at(them.conflict_at(prev))
        assert agree <= following < prev
        prev = following
        rounds += 1
    assert prev == agree
    assert rounds <= 4, "one step per epoch, not per entry"


def test_parting_index_is_the_first_that_differs() -> None:
    for seed in range(300):
        find_where_they_part(seed)


def find_where_they_part(seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = two_logs(rng)
    agree = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    end = min(len(ours), len(theirs)) if agree is None else agree
    prev, last = LogIndex(rng.randint(0, end)), LogIndex(len(theirs))
    parts = shape_of(ours).divergence_at(prev, starts_of(theirs), last)
    assert parts == (None if agree is None else agree + 1)


def test_truncated_and_dropped_log_keeps_epochs_and_voters() -> None:
    shape = shape_of([1, 1, 2, 2, 5, 5])
    shape.truncate_after(LogIndex(4))
    assert (shape.last_epoch, shape.last_index) == (2, 4)
    shape.drop_before(LogIndex(4))
    assert shape.epoch_at(LogIndex(3)) == 2
    assert shape.voters == VOTERS
    assert shape.starts_in(LogIndex(3), LogIndex(4)) == ()
    shape.extend(LogIndex(5), [LogStart(LogIndex(5), Epoch(7), OTHERS)])
    assert [start.epoch for start in shape.sets_from(LogIndex(4))] == [2, 7]
    assert [start.epoch for start in shape.sets_from(LogIndex(5))] == [7]


@pytest.mark.parametrize(
    ("epochs", "commit_index", "expected"),
    [
        ([], 0, [0]),
        ([1], 0, [0, 1]),
        ([1], 1, [1]),
        ([1, 1], 0, [1]),
        ([1, 2, 3], 0, [0, 1, 2, 3]),
        ([1, 2, 3], 2, [2, 3]),
        ([1, 1, 2, 3], 0, [1, 2, 3]),
        ([1, 1, 2, 2, 3, 4], 0, [2, 3, 4]),
        ([1, 1, 2, 2, 3, 4, 4], 1, [4]),
    ],
)
def test_sets_begin_with_the_last_epoch_that_took_an_entry(
    epochs: list[int], commit_index: int, expected: list[int]
) -> None:
    found = shape_of(epochs).sets_from(LogIndex(commit_index))
    assert [start.epoch for start in found] == expected


def test_epoch_that_goes_back_is_refused() -> None:
    with pytest.raises(AssertionError, match="epoch goes back"):
        shape_of([1, 2]).extend(LogIndex(3), [LogStart(LogIndex(3), Epoch(2), VOTERS)])


def test_tail_spans_a_bounded_number_of_entries_however_small() -> None:
    tail = EntrySizes(LogIndex(1))
    tail.extend([60] * 3 * ENTRIES_MAX)
    assert tail.span(LogIndex(1), 4 << 20) == ENTRIES_MAX
    assert tail.span(LogIndex(2 * ENTRIES_MAX + 1), 4 << 20) == 3 * ENTRIES_MAX


def test_tail_spans_at_least_one_entry_and_at_most_the_limit() -> None:
    tail = EntrySizes(LogIndex(11))
    tail.extend([100, 50, 50, 900])
    assert tail.span(LogIndex(11), 1) == 11
    assert tail.span(LogIndex(11), 199) == 12
    assert tail.span(LogIndex(11), 200) == 13
    assert tail.span(LogIndex(14), 10) == 14
    assert tail.size(LogIndex(11), LogIndex(13)) == 100
    tail.trim(LogIndex(13), keep_bytes=300 + ENTRY_SIZE)
    assert tail.first_index == 14, "durable entries only, oldest first"
    tail.truncate_after(LogIndex(13))
    assert len(tail) == 0


def test_tail_of_small_entries_counts_the_memory_that_each_takes_besides_its_frame() -> None:
    tail, keep = EntrySizes(LogIndex(1)), 100 * (ENTRY_SIZE + 60)
    for last in range(1, 1_001):
        tail.extend([60])
        tail.trim(LogIndex(last), keep)
        assert min(last, 100) <= len(tail) <= 100 + 100 // 8 + 1
    assert tail.first_index + len(tail) == 1_001


def test_tail_keeps_durable_entries_for_a_while_and_others_for_as_long_as_it_takes() -> None:
    tail = EntrySizes(LogIndex(1))
    tail.age(MonoMs(1_000), LogIndex(0), keep_ms=100)
    tail.extend([60] * 4)
    for now_ms, first_index in ((1_099, 1), (1_100, 1), (1_199, 1), (1_200, 4), (1_300, 4)):
        tail.age(MonoMs(now_ms), LogIndex(3), keep_ms=100)
        assert tail.first_index == first_index, now_ms
    tail.age(MonoMs(1_400), LogIndex(4), keep_ms=100)
    assert (tail.first_index, len(tail), tail.bytes) == (5, 0, 0)
    tail.extend([60] * 4)
    tail.age(MonoMs(1_500), LogIndex(8), keep_ms=100)
    tail.truncate_after(LogIndex(6))
    tail.age(MonoMs(1_600), LogIndex(8), keep_ms=100)
    assert (tail.first_index, len(tail)) == (7, 0)
    tail.extend([60] * (AGED_MAX + 9))
    last = LogIndex(6 + AGED_MAX + 9)
    tail.age(MonoMs(1_700), last, keep_ms=100)
    tail.extend([60])
    for left in (AGED_MAX + 10, 10, 1, 1):
        assert len(tail) == left
        tail.age(MonoMs(1_800), last, keep_ms=100)


def test_majority_is_of_every_set() -> None:
    sets = (VOTERS, OTHERS)
    assert not is_granted(sets, {ReplicaId(1), ReplicaId(2)})
    assert is_granted(sets, {ReplicaId(1), ReplicaId(3), ReplicaId(4)})
    values = {ReplicaId(1): 9, ReplicaId(2): 8, ReplicaId(3): 7, ReplicaId(4): 2}
    assert majority_value((VOTERS,), values) == 8
    assert majority_value(sets, values) == 2
