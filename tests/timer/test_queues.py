"""Queues: offsets without gaps, for blocks of any sizes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from timer.model.columns import ROW, RowArray, gather
from timer.model.units import QueueOffset, UnixMs
from timer.ready.page_cache import Block, BlockRows, SpillRef, constant_ms
from timer.ready.queue import AHEAD_BLOCKS, BLOCK_ROWS_MAX, INTERVAL_MS, LOOSE_BLOCKS, Queue

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
    return [int(seq) for page, places in found for seq in page.rows[places]["seq"]]


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
def test_expire_drops_the_stretches_that_lie_before_whatever_the_blocks_are(
    times: list[int], before: int
) -> None:
    queue, other = Queue(), Queue()
    for time_ms in times:
        for each in (queue, other):
            each.append(rows_of([1, 2]), {}, UnixMs(time_ms * INTERVAL_MS // 2))
    other.replace_blocks(other.unspilled_blocks(), [spilled_block(0, 2 * len(times))])
    for each in (queue, other):
        each.expire(UnixMs(before * INTERVAL_MS // 2))
        assert each.begin == 2 * sum(t // 2 + 1 <= before / 2 for t in times)
        each.drop_below(QueueOffset(each.begin + 1) if each.begin < each.end else each.end)
        each.expire(UnixMs(30 * INTERVAL_MS))
        assert (each.begin, len(each.intervals), each.blocks) == (each.end, 1, [])


def spilled_block(first: int, end: int) -> Block:
    page = BlockRows(rows_of([*range(first, end)]), {}, constant_ms(1, end - first))
    return Block.of(QueueOffset(first), page, SpillRef("f", first, end - first))


@quick
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.lists(st.integers(1, 4), max_size=6),
    st.integers(0, 24),
)
def test_spilled_blocks_take_the_place_of_those_that_are_left(
    sizes: list[int], cuts: list[int], dropped: int
) -> None:
    queue = Queue()
    ends = np.cumsum(sizes).tolist()
    for first, end in zip([0, *ends], ends, strict=False):
        queue.append(rows_of([*range(first, end)]), {}, UnixMs(1))
    old = queue.unspilled_blocks()
    queue.append(rows_of([ends[-1]]), {}, UnixMs(2))
    edges = sorted({0, ends[-1], *(min(cut * 3, ends[-1]) for cut in cuts)})
    new = [spilled_block(first, end) for first, end in pairwise(edges)]
    queue.drop_below(QueueOffset(min(dropped, queue.end)))
    queue.replace_blocks(old, new)
    assert seqs_at(queue, [*range(queue.begin, queue.end)]) == [*range(queue.begin, queue.end)]
    assert all(one.end == next_one.first for one, next_one in pairwise(queue.blocks))
    for offset in range(queue.begin, queue.end + 1):
        assert queue.payload_bytes_from(QueueOffset(offset)) == 10 * (queue.end - offset)
    left = [block for block in queue.blocks if block.spill is not None]
    weights = [b.page.size for b in queue.blocks if b.page is not None and b.spill is None]
    assert queue.pages.unspilled_size == sum(weights)
    assert queue.pages.spilled_size == sum(b.page.size for b in left if b.page is not None)
    queue.pages.evict(0)
    assert queue.pages.spilled_size == 0
    assert [block.page for block in left] == [None] * len(left)
    queue.drop_below(queue.end)
    assert queue.pages.unspilled_size == 0


def test_small_blocks_are_joined_except_those_that_a_flush_has_taken() -> None:
    queue, taken, count = Queue(), 10, 2 * LOOSE_BLOCKS + 5
    old: list[Block] = []
    for at in range(taken + count):
        if at == taken:
            old = queue.unspilled_blocks()
        rows = rows_of([at, 1_000 + at], size=3)
        bufs = {at: b"head%03d" % at, 900: b"%03d" % (at + 1)}
        rows["payload_start"], rows["buf"] = (4, 0), (at, 900)
        queue.append(rows, bufs, UnixMs(at))
    assert [*queue.blocks[:taken]] == old
    assert [block.end - block.first for block in queue.blocks[taken:]] == [
        *(2 * [2 * LOOSE_BLOCKS]),
        *(5 * [2]),
    ]
    for page, places in queue.slices(np.arange(queue.end, dtype=np.uint64)):
        mine = page.rows[places.astype(np.int64)]
        seqs, fired = mine["seq"].tolist(), page.fired_at_ms[places].tolist()
        assert bytes(gather(mine, page.bufs, "payload").blob) == b"".join(
            b"%03d" % (at + (seq >= 1_000)) for at, seq in zip(fired, seqs, strict=True)
        )
        assert [seq % 1_000 for seq in seqs] == fired
    assert queue.pages.unspilled_size == sum(b.page.size for b in queue.blocks if b.page)
    assert queue.payload_bytes_from(QueueOffset(6)) == 3 * (queue.end - 6)


def test_seek_to_a_time_finds_the_first_of_equal_times_and_nothing_below_the_begin() -> None:
    queue = Queue()
    for at, time_ms in enumerate((1_000, 1_000, 1_001)):
        queue.append(rows_of([2 * at, 2 * at + 1]), {}, UnixMs(time_ms))
    assert len(queue.blocks) == 3
    times = [UnixMs(each) for each in (999, 1_000, 1_001, 1_002)]
    assert [*map(queue.offset_fired_from, times)] == [0, 0, 4, 6]
    joined = BlockRows(rows_of([*range(6)]), {}, np.array([1_000] * 4 + [1_001] * 2))
    queue.replace_blocks(
        queue.unspilled_blocks(), [Block.of(QueueOffset(0), joined, SpillRef("f", 0, 6))]
    )
    queue.drop_below(QueueOffset(5))
    assert [*map(queue.offset_fired_from, times)] == [5, 5, 5, 6]


def cold_queue(count: int) -> Queue:
    """Return a queue of `count` blocks of two messages, none of them in memory."""
    queue = Queue()
    for at in range(count):
        queue.append(rows_of([2 * at, 2 * at + 1]), {}, UnixMs(1))
    blocks = [spilled_block(2 * at, 2 * at + 2) for at in range(count)]
    queue.replace_blocks(queue.unspilled_blocks(), blocks)
    queue.pages.evict(0)
    return queue


def fetch(queue: Queue, size: int = 1 << 20) -> int:
    wanted = queue.pages.requested_blocks(size)
    for block in wanted:
        page = spilled_block(block.first, block.end).page
        assert page is not None
        queue.pages.install_page(block, page)
    return len(wanted)


def test_what_is_not_in_memory_is_wanted_and_so_is_what_comes_next() -> None:
    queue = cold_queue(30)
    offsets = np.arange(0, 6, dtype=np.uint64)
    assert queue.count_in_memory(offsets) == 0
    assert fetch(queue) == AHEAD_BLOCKS
    assert queue.count_in_memory(offsets) == 6
    assert fetch(queue) == 2  # it was three blocks on
    assert queue.count_in_memory(np.array([17, 18, 19, 20, 58], np.uint64)) == 3
    assert [block.first for block in queue.pages.requested_blocks(1)] == [20]
    assert seqs_at(queue, [17, 18]) == [17, 18]


def test_large_blocks_that_come_next_are_wanted_up_to_a_size() -> None:
    queue = cold_queue(30)
    queue.pages.size_max = 82  # a block has 20 bytes
    offsets = np.arange(0, 6, dtype=np.uint64)
    assert queue.count_in_memory(offsets) == 0
    assert fetch(queue) == 3
    assert queue.count_in_memory(offsets) == 6
    assert [block.first for block in queue.pages.requested_blocks(1 << 20)] == [6, 8]


def test_pages_of_blocks_that_left_while_they_were_read_are_not_kept() -> None:
    queue = cold_queue(4)
    queue.count_in_memory(np.arange(0, 8, dtype=np.uint64))
    wanted = queue.pages.requested_blocks(1 << 20)
    queue.drop_below(QueueOffset(5))
    for block in wanted:
        page = spilled_block(block.first, block.end).page
        assert page is not None
        queue.pages.install_page(block, page)
    assert [block.page is not None for block in wanted] == [False, False, True, True]
    assert queue.pages.requested_blocks(1 << 20) == []
    queue.drop_below(QueueOffset(8))
    assert queue.pages.spilled_size == 0


def test_oldest_pages_leave_first_and_only_those_that_a_file_holds() -> None:
    queue = cold_queue(4)
    queue.append(rows_of([8]), {}, UnixMs(1))
    queue.count_in_memory(np.arange(0, 8, dtype=np.uint64))
    fetch(queue)
    queue.pages.evict(queue.pages.spilled_size - 1)
    assert [block.page is not None for block in queue.blocks] == [False, True, True, True, True]
    queue.pages.evict(0)
    assert [block.page is not None for block in queue.blocks] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("limit", "fits"), [(0, 1), (9, 1), (10, 1), (19, 1), (20, 2), (49, 4), (50, 5), (1000, 5)]
)
def test_fitting_counts_bytes_over_blocks_and_lets_one_message_pass(limit: int, fits: int) -> None:
    queue = queue_of([[1, 2], [3], [4, 5, 6]])
    assert queue.count_fitting(np.array([0, 1, 2, 4, 5], np.uint64), limit) == fits


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
    [block] = queue.blocks
    assert block.page is not None
    assert sum(map(len, block.page.bufs.values())) == 20
    assert seqs_at(queue, [0, 1]) == [1, 2]
