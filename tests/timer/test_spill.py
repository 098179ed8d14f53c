"""Spill files: fired messages are read back, and damage is an error."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.sim.world.simdisk import SimDisk
from timer.model.columns import ROW, gather
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.model.units import QueueOffset, TopicId, UnixMs
from timer.ready import spill as spill_module
from timer.ready.page_cache import BlockRows, SpillRef
from timer.ready.queue import Queue
from timer.ready.spill import PageFetch, Spill, check_spill, read_page, write_spill

DIRECTORY = Path("/queues")
PATH = DIRECTORY / "0001.spill"
Texts = tuple[bytes, bytes, bytes]


def append(queue: Queue, texts: list[Texts]) -> None:
    first = queue.end
    rows, buf = np.zeros(len(texts), ROW), bytearray(b"before")
    rows["seq"] = np.arange(len(texts)) * 7 + first
    rows["due_ms"], rows["requested_ms"], rows["topic"] = 50 + first, 40 + first, 3
    rows["buf"] = 9
    for row, each in zip(rows, texts, strict=True):
        for name, text in zip(("payload", "key", "headers"), each, strict=True):
            row[f"{name}_start"], row[f"{name}_size"] = len(buf), len(text)
            buf += text
    queue.append(rows, {9: bytes(buf)}, UnixMs(first + 60))


def queue_with(first: int, blocks: list[list[Texts]]) -> Queue:
    queue = Queue(begin=QueueOffset(first), end=QueueOffset(first))
    for texts in blocks:
        append(queue, texts)
    return queue


def spills_of(queues: list[Queue]) -> list[Spill]:
    return [
        Spill(TopicId(1 + at), queue, queue.unspilled_blocks(), [])
        for at, queue in enumerate(queues)
    ]


def content(pages: list[BlockRows]) -> list[Any]:
    found: list[Any] = []
    for page in pages:
        columns = [gather(page.rows, page.bufs, n).values() for n in ("payload", "key", "headers")]
        fields = page.rows[["seq", "due_ms", "requested_ms", "topic"]].tolist()
        found += zip(fields, page.fired_at_ms.tolist(), *columns, strict=True)
    return found


def pages_of(queue: Queue) -> list[BlockRows]:
    return [block.page for block in queue.blocks if block.page is not None]


def disk_with(spills: list[Spill]) -> SimDisk:
    disk = SimDisk()
    disk.make_dir(DIRECTORY)
    write_spill(disk, PATH, spills)
    return disk


texts = st.binary(max_size=4)
queues_of = st.lists(
    st.builds(
        queue_with,
        st.integers(0, 2**40),
        st.lists(
            st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=9),
            min_size=1,
            max_size=5,
        ),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize(("rows", "size"), [(1, 100), (3, 100), (4096, 7), (4096, 1 << 20)])
@settings(derandomize=True, deadline=None, max_examples=40)
@given(queues=queues_of)
def test_messages_come_back_whatever_blocks_they_were_in(
    rows: int, size: int, queues: list[Queue]
) -> None:
    before = [content(pages_of(queue)) for queue in queues]
    spills = spills_of(queues)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill_module, "BLOCK_ROWS_MAX", rows)
        patch.setattr(spill_module, "BLOCK_SIZE_MAX", size)
        disk = disk_with(spills)
    disk.crash(random.Random(1))
    for queue, spill, expected in zip(queues, spills, before, strict=True):
        assert spill.new[0].first == queue.begin
        assert all(len(block.page or ()) <= rows for block in spill.new)
        spill.install()
        assert content(pages_of(queue)) == expected
        assert queue.unspilled_blocks() == []
        assert queue.pages.unspilled_size == 0
        queue.pages.evict(0)
        assert pages_of(queue) == []
        for block in queue.blocks:
            queue.pages.request(block)
        fetch = PageFetch(disk, DIRECTORY, queue.pages.requested_blocks(1 << 20))
        fetch.read()
        fetch.install(queue.pages)
        assert content(pages_of(queue)) == expected
        refs = [block.spill for block in queue.blocks if block.spill is not None]
        check_spill(disk, PATH, refs)


def sample() -> tuple[SimDisk, list[SpillRef]]:
    queues = [queue_with(5, [[(b"a", b"", b"h")]]), queue_with(0, [[(b"bc", b"", b"")]])]
    spills = spills_of(queues)
    disk = disk_with(spills)
    return disk, [ref for spill in spills for block in spill.new if (ref := block.spill)]


def read_all(disk: SimDisk, refs: list[SpillRef]) -> list[BlockRows]:
    check_spill(disk, PATH, refs)
    return [read_page(disk, DIRECTORY, ref) for ref in refs]


def test_spill_with_any_byte_flipped_is_corrupt_or_another_version() -> None:
    disk, refs = sample()
    for position in range(disk.size(PATH)):
        if 12 <= position < 16:  # reserved
            continue
        disk.flip(PATH, position, mask=0x41)
        with pytest.raises((CorruptFileError, UnknownVersionError)):
            read_all(disk, refs)
        disk.flip(PATH, position, mask=0x41)
    assert len(read_all(disk, refs)) == 2


def test_spill_cut_at_every_byte_is_corrupt_at_start() -> None:
    disk, refs = sample()
    data = disk.read(PATH)
    for size in range(len(data)):
        disk.write_atomic(PATH, data[:size])
        with pytest.raises(CorruptFileError):
            check_spill(disk, PATH, refs)


def test_missing_spill_is_corrupt_at_start() -> None:
    disk, refs = sample()
    disk.remove(PATH)
    with pytest.raises(CorruptFileError, match="missing"):
        check_spill(disk, PATH, refs)


def test_fetch_of_a_file_that_is_gone_is_an_error_only_while_it_is_wanted() -> None:
    queue = queue_with(0, [[(b"a", b"", b"")]])
    spills = spills_of([queue])
    disk = disk_with(spills)
    spills[0].install()
    queue.pages.evict(0)
    queue.pages.request(queue.blocks[0])
    disk.remove(PATH)
    fetch = PageFetch(disk, DIRECTORY, spills[0].new)
    fetch.read()
    with pytest.raises(CorruptFileError, match="missing"):
        fetch.install(queue.pages)
    queue.drop_below(queue.end)
    fetch.install(queue.pages)
