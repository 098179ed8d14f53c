"""The memtable, which receives new rows."""

import numpy as np
import pytest

from timer.model.columns import ROW, Binary, RowArray
from timer.model.firing_order import START, Position
from timer.model.timer_id import SEQ_MAX
from timer.pending.memory.key_index import PLAIN_HASHER
from timer.pending.memory.memtable import SPARE_ROWS, Memtable, Peek


def rows_of(dues: list[int], seqs: list[int]) -> RowArray:
    rows = np.zeros(len(dues), ROW)
    rows["due_ms"], rows["seq"] = dues, seqs
    return rows


def found(memtable: Memtable, dues: list[int], seqs: list[int]) -> list[int]:
    places = memtable.find(np.array(dues, np.int64), np.array(seqs, np.uint64))
    return [int(place) for place in places]


def peek(memtable: Memtable, after: Position, until_ms: int, count: int = 10) -> Peek:
    """Return the rows that its only index shows."""
    [shown] = memtable.peeks(after, until_ms, count)
    return shown


def test_rows_are_found_by_due_and_seq_across_gaps() -> None:
    memtable = Memtable(START)
    memtable.insert(rows_of([50, 40, 50], [3, 4, 9]), 7, b"abc")
    assert found(memtable, [50, 40, 50], [3, 4, 9]) == [0, 1, 2]
    assert found(memtable, [50, 41, 50, 50, 50], [4, 4, 8, 10, 1]) == [-1] * 5
    assert memtable.rows["buf"][:3].tolist() == [7, 7, 7]


def test_inserted_rows_are_copies() -> None:
    memtable = Memtable(START)
    rows = rows_of([5, 6], [1, 2])
    memtable.insert(rows, 1, b"")
    rows["due_ms"] = 99
    assert peek(memtable, START, 10, 10).rows["due_ms"].tolist() == [5, 6]


def test_dead_rows_stay_dead_in_a_larger_memtable() -> None:
    memtable = Memtable(START, capacity=2)
    for seq in range(1, 100):
        memtable.insert(rows_of([1_000], [seq]), seq, b"")
        if seq % 3 == 0:
            memtable.kill(np.array([seq - 1]))
    alive = [seq for seq in range(1, 100) if seq % 3]
    assert peek(memtable, START, 2_000, 1_000).rows["seq"].tolist() == alive
    assert memtable.rows_to_flush().live.tolist() == [seq - 1 for seq in alive]


def test_memory_of_a_larger_memtable_is_touched_from_its_first_free_place() -> None:
    grown, fresh = (Memtable(START, capacity=size * SPARE_ROWS) for size in (2, 4))
    assert list(grown.prepare_memory(SPARE_ROWS))
    portions = [len(list(each.prepare_memory(2 * SPARE_ROWS))) for each in (grown, fresh)]
    assert len(grown.rows) == len(fresh.rows)
    assert portions[0] == portions[1] > 0


def test_dropped_position_hides_rows_from_flush_and_tombstones_too() -> None:
    memtable = Memtable(START)
    memtable.insert(rows_of([5, 5, 6], [1, 2, 3]), 1, b"")
    memtable.add_tombstones(
        np.array([5, 5]), np.array([77, 1], np.uint64), np.array([8, 9], np.uint32)
    )
    [*memtable.peeks(START, 5, 1)]
    memtable.drop(Position(5, 1))
    left = memtable.rows_to_flush()
    assert left.live.tolist() == [1, 2]
    assert [column.tolist() for column in left.tombstones] == [[5], [77], [8]]
    assert memtable.next_due() == 5
    [*memtable.peeks(Position(5, 1), 6, 10)]
    memtable.drop(Position(6, SEQ_MAX))
    assert memtable.next_due() is None


def test_buried_timers_are_known_again() -> None:
    memtable = Memtable(START)
    assert memtable.have_tombstones(np.array([5]), np.array([1], np.uint64)).tolist() == [False]
    memtable.add_tombstones(
        np.array([5, 3]), np.array([1, 2], np.uint64), np.array([8, 8], np.uint32)
    )
    wanted = np.array([3, 5, 5, 4]), np.array([2, 1, 2, 1], np.uint64)
    assert memtable.have_tombstones(*wanted).tolist() == [True, True, False, False]
    assert peek(memtable, START, 4).rows["seq"].tolist() == [2]


def test_rows_of_a_follower_and_of_a_leader_lie_in_two_indices_and_none_is_moved() -> None:
    memtable = Memtable(START)
    for seq, change in enumerate((memtable.follow, memtable.lead) * 3, start=1):
        change()
        memtable.insert(rows_of([70_000 - seq, 1 << 40], [2 * seq, 2 * seq + 1]), seq, b"")
    memtable.kill(np.array([10]))
    assert memtable.next_due() == 70_000 - 5
    shown = [peek.rows["seq"].tolist() for peek in memtable.peeks(START, 1 << 41, 9)]
    assert shown == [[10, 6, 2, 3, 7, 11], [8, 4, 5, 9, 13]]
    memtable.drop(Position(70_000 - 4, SEQ_MAX))
    assert memtable.next_due() == 70_000 - 3


def test_tombstones_of_before_stay_as_they_were_while_others_come() -> None:
    memtable = Memtable(START)

    def bury(*seqs: int) -> None:
        for seq in seqs:
            due, of = np.array([9_000 - seq]), np.array([7], np.uint32)
            memtable.add_tombstones(due, np.array([seq], np.uint64), of)

    bury(*range(1, 2_000))
    left = memtable.rows_to_flush()
    bury(*range(2_000, 3_000))
    due, seq, topic = left.tombstones
    assert due.tolist() == [*range(9_000 - 1_999, 9_000)]
    assert seq.tolist() == [*range(1_999, 0, -1)]
    assert topic.tolist() == [7] * 1_999


def test_key_that_fires_and_is_set_again_does_not_gather() -> None:
    memtable = Memtable(START)
    topic, key = np.array([1], np.uint32), Binary.of([b"hot"])
    for due in range(1, 2_000):
        row = rows_of([due], [due])
        row["topic"], row["key_size"] = 1, 3
        memtable.insert(row, due, b"hot")
        which, _ = memtable.find_keys(PLAIN_HASHER(topic, key), topic, key)
        assert which.tolist() == [0]
        memtable.drop(Position(due, SEQ_MAX))
    assert sum(len(hashes) for hashes, _ in memtable._keys._tiers) < 10


def test_row_that_is_not_after_the_fire_position_is_refused() -> None:
    memtable = Memtable(Position(10, SEQ_MAX))
    with pytest.raises(AssertionError):
        memtable.insert(rows_of([10], [1]), 1, b"")
    memtable.insert(rows_of([11], [5]), 1, b"")
    with pytest.raises(AssertionError):
        memtable.insert(rows_of([12], [5]), 1, b"")


def test_size_counts_rows_buffers_and_tombstones() -> None:
    memtable = Memtable(START)
    assert memtable.size == 0
    memtable.insert(rows_of([5], [1]), 1, bytes(1_000))
    assert 1_000 + ROW.itemsize < memtable.size < 1_200
    before = memtable.size
    memtable.add_tombstones(np.array([5]), np.array([77], np.uint64), np.array([8], np.uint32))
    assert memtable.size > before
