"""Spill files: what was fired comes back, and damage is told."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.simdisk import SimDisk
from timer.columns import ROW, gather
from timer.errors import CorruptFile, UnknownVersion
from timer.queues import Block, SpillRef
from timer.spill import read_spill, write_spill
from timer.units import QueueOffset, TopicId, UnixMs

PATH = Path("/queues/0001.spill")
Texts = tuple[bytes, bytes, bytes]


def block_of(first: int, texts: list[Texts]) -> Block:
    rows, buf = np.zeros(len(texts), ROW), bytearray(b"before")
    rows["seq"] = np.arange(len(texts)) * 7 + first
    rows["due_ms"], rows["requested_ms"], rows["topic"] = 50 + first, 40 + first, 3
    rows["buf"] = 9
    for row, each in zip(rows, texts, strict=True):
        for name, text in zip(("payload", "key", "headers"), each, strict=True):
            row[f"{name}_start"], row[f"{name}_size"] = len(buf), len(text)
            buf += text
    return Block(QueueOffset(first), UnixMs(first + 60), rows, {9: bytes(buf)})


def content(topic: TopicId, block: Block) -> tuple[object, ...]:
    columns = [gather(block.rows, block.bufs, name) for name in ("payload", "key", "headers")]
    fields = ["seq", "due_ms", "requested_ms", "topic"]
    return (
        (topic, block.first, block.end, block.fired_at_ms),
        block.rows[fields].tolist(),
        [(column.sizes.tolist(), bytes(column.blob)) for column in columns],
    )


def disk_with(blocks: list[tuple[TopicId, Block]]) -> tuple[SimDisk, list[SpillRef]]:
    disk = SimDisk()
    disk.make_dir(PATH.parent)
    return disk, write_spill(disk, PATH, blocks)


texts = st.binary(max_size=4)
blocks_of = st.lists(
    st.builds(
        lambda topic, first, rows: (TopicId(topic), block_of(first, rows)),
        st.integers(1, 2**32 - 2),
        st.integers(0, 2**40),
        st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=4,
)
SAMPLE = [
    (TopicId(3), block_of(5, [(b"a", b"", b"h")])),
    (TopicId(4), block_of(0, [(b"bc", b"", b"")])),
]


@settings(derandomize=True, deadline=None)
@given(blocks_of, st.data())
def test_blocks_come_back_in_the_order_asked_for(
    blocks: list[tuple[TopicId, Block]], data: st.DataObject
) -> None:
    disk, refs = disk_with(blocks)
    chosen = data.draw(st.lists(st.sampled_from(range(len(blocks))), unique=True))
    found = read_spill(disk, PATH, [refs[at] for at in chosen])
    assert [content(*item) for item in found] == [content(*blocks[at]) for at in chosen]
    assert [block.spill for _, block in found] == [refs[at] for at in chosen]


def test_spill_with_any_byte_flipped_is_corrupt_or_another_version() -> None:
    disk, refs = disk_with(SAMPLE)
    for position in range(disk.size(PATH)):
        if 12 <= position < 16:  # reserved
            continue
        disk.flip(PATH, position, mask=0x41)
        with pytest.raises((CorruptFile, UnknownVersion)):
            read_spill(disk, PATH, refs)
        disk.flip(PATH, position, mask=0x41)
    assert len(read_spill(disk, PATH, refs)) == 2


def test_spill_cut_at_every_byte_is_corrupt() -> None:
    disk, refs = disk_with(SAMPLE)
    data = disk.read(PATH)
    for size in range(len(data)):
        disk.write_atomic(PATH, data[:size])
        with pytest.raises(CorruptFile):
            read_spill(disk, PATH, refs)


def test_missing_spill_is_corrupt() -> None:
    disk, refs = disk_with(SAMPLE)
    disk.remove(PATH)
    with pytest.raises(CorruptFile, match="missing"):
        read_spill(disk, PATH, refs)
