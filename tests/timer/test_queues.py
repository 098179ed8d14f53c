"""Queues: offsets without gaps, whatever blocks the messages came in."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from timer.columns import ROW, RowArray
from timer.queues import BLOCK_ROWS_MAX, Queue
from timer.units import QueueOffset, UnixMs

quick = settings(derandomize=True, deadline=None)


def rows_of(seqs: list[int], size: int = 10) -> RowArray:
    rows = np.zeros(len(seqs), ROW)
    rows["seq"] = seqs
    rows["payload_size"] = size
    return rows


def queue_of(blocks: list[list[int]]) -> Queue:
    queue = Queue()
    for at, seqs in enumerate(blocks):
        queue.append(rows_of(seqs), {}, UnixMs(1000 + at))
    return queue


def seqs_at(queue: Queue, offsets: list[int]) -> list[int]:
    found = queue.slices(np.array(offsets, np.uint64))
    return [int(seq) for block, places in found for seq in block.rows[places]["seq"]]


blocks_of = st.lists(
    st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=4), min_size=1, max_size=5
)


@quick
@given(blocks_of, st.data())
def test_any_ascending_offsets_find_their_messages(
    blocks: list[list[int]], data: st.DataObject
) -> None:
    seqs = [seq for block in blocks for seq in block]
    offsets = sorted(data.draw(st.sets(st.integers(0, len(seqs) - 1))))
    queue = queue_of(blocks)
    assert (queue.begin, queue.end) == (0, len(seqs))
    assert seqs_at(queue, offsets) == [seqs[offset] for offset in offsets]


@quick
@given(blocks_of, st.data())
def test_chain_depends_on_the_messages_and_their_order_not_on_the_blocks(
    blocks: list[list[int]], data: st.DataObject
) -> None:
    seqs = [seq for block in blocks for seq in block]
    chain = queue_of(blocks).chain
    assert queue_of([[seq] for seq in seqs]).chain == chain
    other = data.draw(st.permutations(seqs))
    assert (queue_of([other]).chain == chain) == (other == seqs)
    assert queue_of([*blocks, [1]]).chain != chain


@quick
@given(blocks_of, st.lists(st.integers(0, 20), max_size=4))
def test_drop_below_keeps_every_message_from_there_on_and_no_block_before(
    blocks: list[list[int]], cuts: list[int]
) -> None:
    queue = queue_of(blocks)
    seqs = [seq for block in blocks for seq in block]
    begin = 0
    for cut in cuts:
        begin = max(begin, min(cut, len(seqs)))
        queue.drop_below(QueueOffset(min(cut, len(seqs))))
        assert (queue.begin, queue.end) == (begin, len(seqs))
        assert seqs_at(queue, list(range(begin, len(seqs)))) == seqs[begin:]
        assert all(block.end > begin for block in queue.blocks)
    queue.append(rows_of([7]), {}, UnixMs(1))
    assert seqs_at(queue, [len(seqs)]) == [7]


@quick
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6).map(sorted),
    st.integers(0, 25),
)
@example([1, 5, 5, 9], 5)
def test_expire_drops_exactly_the_blocks_fired_before(times: list[int], before: int) -> None:
    queue = Queue()
    for time_ms in times:
        queue.append(rows_of([1, 2]), {}, UnixMs(time_ms))
    queue.expire(UnixMs(before))
    assert [block.fired_at_ms for block in queue.blocks] == [t for t in times if t >= before]
    assert queue.begin == 2 * sum(t < before for t in times)


@pytest.mark.parametrize(
    ("limit", "fits"), [(0, 1), (9, 1), (10, 1), (19, 1), (20, 2), (49, 4), (50, 5), (1000, 5)]
)
def test_fitting_counts_bytes_over_blocks_and_lets_one_message_pass(limit: int, fits: int) -> None:
    queue = queue_of([[1, 2], [3], [4, 5, 6]])
    assert queue.fitting(np.array([0, 1, 2, 4, 5], np.uint64), limit) == fits


def test_block_of_the_maximum_size_is_taken_and_one_row_more_is_our_bug() -> None:
    queue = queue_of([list(range(1, BLOCK_ROWS_MAX + 1))])
    assert queue.end == BLOCK_ROWS_MAX
    assert (
        queue.chain
        == queue_of([[s] for s in range(1, 3)] + [list(range(3, BLOCK_ROWS_MAX + 1))]).chain
    )
    for size in (0, BLOCK_ROWS_MAX + 1):
        with pytest.raises(AssertionError):
            queue.append(rows_of([1] * size), {}, UnixMs(1))


def test_a_queued_row_does_not_keep_the_rest_of_its_entry_in_memory() -> None:
    queue = Queue()
    queue.append(rows_of([1, 2], size=10), {0: bytes(1_000_000)}, UnixMs(1))
    assert sum(map(len, queue.blocks[0].bufs.values())) == 20
    assert seqs_at(queue, [0, 1]) == [1, 2]
