"""Run files: reads return the written bytes, or an error that the file is corrupt."""

import contextlib
import itertools
import random
import tracemalloc
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from timer.files.disk import RealDisk
from timer.model.columns import ROW, TOMBSTONE, Buffers, RowArray
from timer.model.firing_order import START, Position
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.pending.runs import run_writer
from timer.pending.runs.run import (
    BATCH,
    BATCH_ROWS_MAX,
    Cursor,
    Finder,
    Range,
    Run,
    RunMeta,
    may_contain,
)
from timer.pending.runs.run_writer import RunWriter, binary_column, row_sizes, write_parts

Texts = list[tuple[bytes, bytes, bytes]]
NAMES = ("payload", "key", "headers")


def rows_with(texts: Texts) -> tuple[RowArray, Buffers]:
    """Return rows that point into three buffers, out of order and with gaps."""
    chance = random.Random(1)
    rows = np.zeros(len(texts), ROW)
    rows["due_ms"] = 1_000 + np.arange(len(texts)) // 3
    rows["seq"] = 1 + np.arange(len(texts))
    rows["requested_ms"] = rows["due_ms"] * 2
    rows["topic"] = 1 + rows["seq"] % 5
    bufs = {number: bytearray(b"x" * chance.randrange(3)) for number in (4, 9, 12)}
    for place in chance.sample(range(len(texts)), len(texts)):
        number = chance.choice([4, 9, 12])
        rows["buf"][place] = number
        for name, text in zip(NAMES, texts[place], strict=True):
            rows[f"{name}_start"][place] = len(bufs[number])
            rows[f"{name}_size"][place] = len(text)
            bufs[number] += text + b"?" * chance.randrange(2)
    return rows, {number: bytes(buf) for number, buf in bufs.items()}


def some_texts(count: int) -> Texts:
    return [
        (b"p%d" % i * (i % 4), b"k%d" % i * (i % 3 == 0), b"h%d" % i * (i % 7 == 0))
        for i in range(count)
    ]


def write(path: Path, *chunks: tuple[RowArray, Buffers]) -> RunMeta:
    writer = RunWriter(RealDisk(), path, 1)
    for rows, bufs in chunks:
        writer.add(rows, bufs)
    meta = writer.finish()
    writer.close()
    return meta


def texts_of(rows: RowArray, data: bytes) -> Texts:
    return [
        tuple(  # type: ignore[misc]
            data[int(row[f"{name}_start"]) :][: int(row[f"{name}_size"])] for name in NAMES
        )
        for row in rows
    ]


def read_all(
    run: Run, rows_min: int = 5, size_max: int = 50
) -> tuple[list[tuple[int, ...]], Texts]:
    cursor = Cursor(run, START)
    keys: list[tuple[int, ...]] = []
    texts: Texts = []
    while cursor.next is not None:
        rows, data = cursor.read(0, rows_min, size_max)
        keys += rows[["due_ms", "seq", "requested_ms", "topic"]].tolist()
        texts += texts_of(rows, data)
    return keys, texts


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "BATCH_ROWS_MAX", 16)
    monkeypatch.setattr(run_writer, "BATCH_SIZE_MAX", 1_000)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [1, 15, 16, 17, 100])
def test_what_was_written_is_read_in_slices_of_any_size(tmp_path: Path, count: int) -> None:
    texts = some_texts(count)
    rows, bufs = rows_with(texts)
    meta = write(tmp_path, *((rows[i : i + 7], bufs) for i in range(0, count, 7)))
    for rows_min, size_max in ((1, 1), (5, 50), (100, 1_000_000)):
        keys, found = read_all(Run(RealDisk(), tmp_path, meta), rows_min, size_max)
        assert keys == rows[["due_ms", "seq", "requested_ms", "topic"]].tolist()
        assert found == texts
    assert meta.rows == count
    assert (meta.seq_min, meta.seq_max) == (1, count)
    assert meta.crc32 == zlib.crc32((tmp_path / meta.name).read_bytes())


@pytest.mark.usefixtures("small")
def test_any_arrow_reader_opens_it_and_finds_the_buffers_where_the_manifest_says(
    tmp_path: Path,
) -> None:
    texts = some_texts(50)
    meta = write(tmp_path, rows_with(texts))
    content = (tmp_path / meta.name).read_bytes()
    with pa.ipc.open_file(pa.py_buffer(content)) as file:
        table = file.read_all()
        assert file.num_record_batches == len(meta.batches) // BATCH.itemsize > 3
        schema = file.schema
    assert [*zip(*(table[name].to_pylist() for name in NAMES), strict=True)] == texts
    for entry in np.frombuffer(meta.batches, BATCH):
        message = pa.py_buffer(content).slice(int(entry["position"]), int(entry["size"]))
        columns = pa.ipc.read_record_batch(message, schema).columns
        at = {
            name: column.buffers()[1].address - message.address
            for name, column in zip(schema.names, columns, strict=True)
        }
        assert at["due_ms"] == entry["due_at"]
        assert columns[4].buffers()[2].address - message.address == entry["payload_at"]
        assert (at["key"], at["headers"]) == (entry["key_at"], entry["headers_at"])


@pytest.mark.usefixtures("small")
def test_flip_of_any_byte_is_reported_or_harmless(tmp_path: Path) -> None:
    meta = write(tmp_path, rows_with(some_texts(40)))
    path = tmp_path / meta.name
    content = path.read_bytes()
    good = read_all(Run(RealDisk(), tmp_path, meta))
    first = int(np.frombuffer(meta.batches, BATCH)[0]["position"])
    unnoticed = []
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with contextlib.suppress(CorruptFileError):
            assert read_all(Run(RealDisk(), tmp_path, meta)) == good
            unnoticed.append(position)
    assert max(unnoticed) < first  # only the schema, which the manifest replaces


@pytest.mark.usefixtures("small")
def test_flip_in_a_head_is_reported_to_who_reads_the_head_alone(tmp_path: Path) -> None:
    rows, bufs = rows_with(some_texts(16))
    meta = write(tmp_path, (rows, bufs))
    path = tmp_path / meta.name
    content = path.read_bytes()
    [entry] = np.frombuffer(meta.batches, BATCH)
    start = int(entry["position"])
    for position in range(start + int(entry["due_at"]), start + int(entry["payload_at"])):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match="head of batch 0"):
            Finder().find(Run(RealDisk(), tmp_path, meta), rows["due_ms"][:1], rows["seq"][:1])


@pytest.mark.usefixtures("small")
def test_file_that_is_cut_extended_or_missing_is_refused_at_open(tmp_path: Path) -> None:
    meta = write(tmp_path, rows_with(some_texts(40)))
    path = tmp_path / meta.name
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(CorruptFileError):
            Run(RealDisk(), tmp_path, meta)
    path.write_bytes(content + b"\0")
    with pytest.raises(CorruptFileError):
        Run(RealDisk(), tmp_path, meta)
    path.unlink()
    with pytest.raises(CorruptFileError, match="missing"):
        Run(RealDisk(), tmp_path, meta)


@pytest.mark.usefixtures("small")
def test_cursor_starts_after_any_position(tmp_path: Path) -> None:
    rows, bufs = rows_with(some_texts(60))
    run = Run(RealDisk(), tmp_path, write(tmp_path, (rows, bufs)))
    keys = [Position(*key) for key in rows[["due_ms", "seq"]].tolist()]
    for place, key in enumerate(keys):
        following = keys[place + 1] if place + 1 < len(keys) else None
        assert Cursor(run, key).next == following
        assert Cursor(run, Position(key.due_ms, key.seq - 1)).next == key
    assert Cursor(run, START).next == keys[0]


@pytest.mark.usefixtures("small")
def test_cursor_reads_to_the_time_asked_for_within_its_batch(tmp_path: Path) -> None:
    run = Run(RealDisk(), tmp_path, write(tmp_path, rows_with(some_texts(60))))
    rows, _ = Cursor(run, START).read(1_003, 1, 1 << 20)
    assert rows["due_ms"].tolist() == [1_000 + i // 3 for i in range(12)]


@pytest.mark.usefixtures("small")
def test_single_timers_are_found_with_what_a_cancel_must_know(tmp_path: Path) -> None:
    rows, bufs = rows_with(some_texts(100))
    run = Run(RealDisk(), tmp_path, write(tmp_path, (rows, bufs)))
    wanted = rows[[99, 3, 50, 17]]
    due = np.append(wanted["due_ms"], [1_000, 1_001, 5, 9_999])
    seq = np.append(wanted["seq"], np.array([4, 3, 1, 100], np.uint64))
    found, here = Finder().find(run, due, seq)
    assert found.tolist() == [True] * 4 + [False] * 4
    for name in ("due_ms", "seq", "requested_ms", "topic", "payload_size"):
        assert here[name].tolist() == wanted[name].tolist()


@pytest.mark.usefixtures("small")
def test_one_timer_is_found_as_among_many(tmp_path: Path) -> None:
    rows, bufs = rows_with(some_texts(100))
    rows["topic"][::7] = TOMBSTONE
    run = Run(RealDisk(), tmp_path, write(tmp_path, (rows, bufs)))
    last = int(rows["due_ms"][-1])
    for due, seq in itertools.product((0, 999, *range(1_000, last + 2)), (0, 1, 4, 50, 100, 101)):
        due_ms, number = np.array([due], np.int64), np.array([seq], np.uint64)
        _, here = Finder().find(run, due_ms, number)
        assert Finder().find_one(run, due, seq).tolist() == here.tolist()
        assert run.meta.may_contain(due, seq) == may_contain(run.meta, due_ms, number)[0]
    for due, seq in zip(rows["due_ms"].tolist(), rows["seq"].tolist(), strict=True):
        assert len(Finder().find_one(run, due, seq)) == 1


@pytest.mark.parametrize("buried", [0, 1, 30])
def test_run_that_may_hold_a_timer_is_not_passed_over(tmp_path: Path, buried: int) -> None:
    rows, bufs = rows_with(some_texts(30))
    rows["topic"][:buried] = TOMBSTONE
    meta = write(tmp_path, (rows, bufs))
    edges = [(due, seq) for due in (999, 1_000, 1_009, 1_010) for seq in (0, 1, 2, 30, 31)]
    passed = 0
    for count in (1, 2):
        for some in itertools.combinations(edges, count):
            due, seq = np.array(some, np.int64).T
            number = seq.astype(np.uint64)
            meets = Range.of(due, number).overlaps(meta)
            assert meets or not may_contain(meta, due, number).any(), some
            passed += not meets
    assert passed, "it must spare something"


def test_tombstones_are_rows_but_count_apart(tmp_path: Path) -> None:
    rows, bufs = rows_with(some_texts(30))
    rows["topic"][[0, 29]] = TOMBSTONE
    for name in NAMES:
        rows[f"{name}_size"][[0, 29]] = 0
    rows["buf"][[0, 29]] = 0  # points at no buffer
    meta = write(tmp_path, (rows, bufs))
    assert (meta.rows, meta.tombstones) == (30, 2)
    assert (meta.seq_min, meta.seq_max) == (2, 29)


def test_run_of_tombstones_alone_needs_no_buffers(tmp_path: Path) -> None:
    rows, _ = rows_with([(b"", b"", b"")] * 3)
    rows["topic"] = TOMBSTONE
    meta = write(tmp_path, (rows, {}))
    assert meta.seq_min > meta.seq_max
    assert len(read_all(Run(RealDisk(), tmp_path, meta))[0]) == 3


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    chunks: list[tuple[RowArray, Buffers]] = [(np.empty(0, ROW), {})]
    assert write_parts(RealDisk(), tmp_path, iter(range(9)), chunks, 1_000) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chunk", [1, 7, 200])
@pytest.mark.parametrize("part_size", [1, 100, 999, 1_000_000])
def test_parts_end_with_the_row_that_makes_them_large_enough(
    tmp_path: Path, chunk: int, part_size: int
) -> None:
    texts = some_texts(200)
    rows, bufs = rows_with(texts)
    chunks = [(rows[i : i + chunk], bufs) for i in range(0, 200, chunk)]
    metas = write_parts(RealDisk(), tmp_path, iter(range(5, 999)), chunks, part_size)
    assert [meta.number for meta in metas] == [*range(5, 5 + len(metas))]
    assert all(a.last < b.first for a, b in pairwise(metas))
    read = [read_all(Run(RealDisk(), tmp_path, meta)) for meta in metas]
    assert [text for _, found in read for text in found] == texts
    start = 0
    for meta in metas:
        sizes = row_sizes(rows[start : start + meta.rows])
        start += meta.rows
        assert sizes.sum() >= part_size or start == 200
        assert sizes[:-1].sum() < part_size
    assert start == 200


def test_writer_syncs_and_paces_each_megabyte(tmp_path: Path) -> None:
    steps: list[int] = []
    writer = RunWriter(RealDisk(), tmp_path, 1, steps.append)
    writer.add(*rows_with([(bytes(1_000), b"", b"")] * 6_000))
    meta = writer.finish()
    assert 4 <= len(steps) <= 7
    assert all(1 << 20 <= step < 2 << 20 for step in steps)
    assert sum(steps) <= meta.size


def test_row_larger_than_a_batch_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_writer, "BATCH_SIZE_MAX", 1_000)
    texts = [(b"a", b"", b""), (bytes(5_000), b"", b""), (b"b", b"", b"")]
    meta = write(tmp_path, rows_with(texts))
    assert np.frombuffer(meta.batches, BATCH)["rows"].tolist() == [1, 1, 1]
    assert read_all(Run(RealDisk(), tmp_path, meta))[1] == texts


def test_payloads_of_any_size_are_gathered_from_where_they_lie() -> None:
    bufs: Buffers = {7: bytes(range(40)), 3: memoryview(bytes(range(100, 140))), 9: b"nobody's"}
    spans = [(buf, at, size) for buf in (7, 3) for at in (0, 1, 15) for size in (0, 1, 12, 13, 25)]
    random.Random(5).shuffle(spans)
    rows = np.zeros(len(spans), ROW)
    rows["buf"], rows["payload_start"], rows["payload_size"] = zip(*spans, strict=True)
    column = binary_column(rows, bufs, "payload")
    column.validate(full=True)
    assert column.to_pylist() == [bytes(bufs[buf][at : at + size]) for buf, at, size in spans]
    assert binary_column(rows, bufs, "key").to_pylist() == [b""] * len(rows)


@pytest.mark.parametrize("size", [1, 700, 5_000])
def test_file_is_the_same_however_many_batches_are_gathered_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(run_writer, "BATCH_ROWS_MAX", 7)
    monkeypatch.setattr(run_writer, "BATCH_SIZE_MAX", 600)
    chance = random.Random(size)
    texts = [
        tuple(bytes([at % 250]) * chance.choice([0, 3, 30, 90]) for _ in NAMES) for at in range(300)
    ]
    rows, bufs = rows_with(texts)  # type: ignore[arg-type]
    cuts = [0, 5, 40, 41, 150, 300]
    chunks = [(rows[start:stop], bufs) for start, stop in pairwise(cuts)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(run_writer, "GATHER_SIZE", 1)
    alone = write(tmp_path / "a", *chunks)
    monkeypatch.setattr(run_writer, "GATHER_SIZE", size)
    together = write(tmp_path / "b", *chunks)
    assert together == alone
    assert len(np.frombuffer(alone.batches, BATCH)) > 300 / 7
    assert read_all(Run(RealDisk(), tmp_path / "b", together))[1] == texts


@pytest.mark.parametrize("spread", [1, 3, 50, 1 << 31])
def test_buffers_are_numbered_in_order(spread: int) -> None:
    chance = np.random.default_rng(spread)
    for n in (1, 2, 30, 400):
        values = chance.integers(0, spread, n).astype(np.uint32)
        names, which = run_writer._distinct(values)
        assert names == sorted({*values.tolist()})
        assert [names[place] for place in which] == values.tolist()
    names, which = run_writer._distinct(np.empty(0, np.uint32))
    assert (names, len(which)) == ([], 0)


def test_flush_copies_no_payloads_but_those_of_a_batch(tmp_path: Path) -> None:
    texts = [(bytes(1_000), b"", b"")] * (4 * BATCH_ROWS_MAX)
    rows, bufs = rows_with(texts)
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        writer = RunWriter(RealDisk(), tmp_path, 1)
        writer.add(rows, bufs)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    copied = peak + pool.max_memory()  # its own, since it was made
    assert BATCH_ROWS_MAX * 1_000 <= copied < 2.5 * BATCH_ROWS_MAX * 1_000


def test_meta_survives_a_manifest_and_another_version_is_refused(tmp_path: Path) -> None:
    meta = write(tmp_path, rows_with(some_texts(10)))
    assert RunMeta.unpack(meta.pack()) == meta
    assert replace(meta, number=12).name == "0000000012.arrow"
    with pytest.raises(UnknownVersionError):
        RunMeta.unpack(meta.pack() | {"version": 3})
