"""Writes runs: sorted rows become Arrow IPC files and their `RunMeta` (format:
timer/pending/runs/run.py).

    rows --> pending --(4,096 rows or 8 MB)--> batch --> file, in steps of 1 MB, each synced
                                                          |
                             `write_parts` begins the next file when one is full

It runs in a thread beside the event loop. The long steps (gathering payloads, checksums, writes)
release the interpreter's lock. After each step it calls `pace`, which may sleep.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal import isal_zlib

try:  # pyarrow.compute makes a Python function of every function of Arrow, which takes 50 ms
    from pyarrow._compute import CastOptions, call_function
except ImportError:  # in another release
    from pyarrow.compute import CastOptions, call_function

from timer.entries.crc import concat_crc32
from timer.files.disk import AppendFile, Disk
from timer.model.columns import Buffers, RowArray
from timer.model.firing_order import Position, concat
from timer.pending.memory.held_rows import HELD_OFFSET_MS, split_held
from timer.pending.memory.key_index import PLAIN_HASHER, KeyHasher
from timer.pending.runs import key_file
from timer.pending.runs.run import (
    BATCH,
    BATCH_ROWS_MAX,
    BATCH_SIZE_MAX,
    SUFFIX,
    RunMeta,
    head_size,
    is_tombstone,
    padded,
)
from timer.pending.runs.run_index import RunIndexes

STEP_SIZE: Final = 1 << 20
GATHER_SIZE: Final = 4 << 20
"""Bytes of the rows, of several batches, that are gathered together. The buffers that they point
into are then examined once for all of them."""

Pace = Callable[[int], None]
"""Called after each step with the number of bytes written and synced."""

_BINARIES: Final = ("payload", "key", "headers")
INLINE_SIZE: Final = 12
"""Strings of up to this many bytes are inside the view."""
_VIEW: Final = np.dtype(
    {
        "names": ["size", "text", "buffer", "start"],
        "formats": ["<i4", f"S{INLINE_SIZE}", "<i4", "<i4"],
        "offsets": [0, 4, 8, 12],
        "itemsize": 16,
    }
)
"""Arrow's view of a byte string: the string itself, or its place. Bytes 4 to 8 are its first ones,
for comparisons, which are not used here."""
_SCHEMA: Final = pa.schema(
    [
        pa.field("due_ms", pa.int64(), nullable=False),
        pa.field("seq", pa.uint64(), nullable=False),
        pa.field("requested_ms", pa.int64(), nullable=False),
        pa.field("topic", pa.uint32(), nullable=False),
        *(pa.field(name, pa.binary(), nullable=False) for name in _BINARIES),
    ]
)
TOMBSTONE_SIZE: Final = 8 + 8 + 8 + 4 + 3 * 4
"""Bytes of a row in a batch, without its payload, key and headers."""


def unpaced(_: int) -> None:
    """Do not wait between steps."""


def binary_column(rows: RowArray, bufs: Buffers, name: str) -> pa.BinaryArray:
    """Return payload, key or headers of `rows`, in their order.

    Arrow gathers them from their buffers, so only the bytes of these rows are copied. Strings that
    fit into a view are short, and are sliced one by one.
    """
    n, size = len(rows), rows[f"{name}_size"]
    if not size.any():
        return _binary(np.zeros(n + 1, np.int32), b"")
    views = np.zeros(n, _VIEW)
    views["size"] = size
    far = np.flatnonzero(size > INLINE_SIZE)
    numbers, views["buffer"][far] = _distinct(rows["buf"][far])
    views["start"][far] = rows[f"{name}_start"][far]
    near = np.flatnonzero((size > 0) & (size <= INLINE_SIZE))
    views["text"][near] = _slices(rows[near], bufs, name)
    buffers = [pa.py_buffer(bufs[number]) for number in numbers]
    found = pa.Array.from_buffers(pa.binary_view(), n, [None, pa.py_buffer(views), *buffers])
    return call_function("cast", [found], CastOptions.safe(pa.binary()))


def _distinct(values: npt.NDArray[np.uint32]) -> tuple[list[int], npt.NDArray[np.intp]]:
    """Return the different values, ascending, and the place of each value among them (n,)."""
    if not len(values):
        return [], np.empty(0, np.intp)
    low, high = int(values.min()), int(values.max())
    if high - low >= 8 * len(values):
        names, which = np.unique(values, return_inverse=True)
        return names.tolist(), which
    # Buffers with adjacent numbers: no sort is needed.
    there = np.zeros(high - low + 1, np.intp)
    there[values - low] = 1
    place = np.cumsum(there) - 1
    return (np.flatnonzero(there) + low).tolist(), place[values - low]


class RunWriter:
    """Writes one run. Rows come in (due, seq) order, at least one; then `finish`, then `close`."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        number: int,
        pace: Pace = unpaced,
        hasher: KeyHasher = PLAIN_HASHER,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._number = number
        self._pace = pace
        self._file: AppendFile | None = None
        self._sink = _Sink()
        self._arrow: Any = None
        self._pending: list[RowArray] = []
        self._bufs: dict[int, bytes | memoryview] = {}
        self._pending_rows = 0
        self._pending_size = 0
        self._unsynced = 0
        self._crc32 = 0
        self._batches: list[npt.NDArray[np.void]] = []
        self._tombstones = 0
        self._seqs: tuple[int, int] = ((1 << 64) - 1, 0)
        self._indexes = RunIndexes(hasher)

    def add(self, rows: RowArray, bufs: Buffers) -> None:
        """Append rows. `bufs` contains the buffers that they point into, and maybe others."""
        if not len(rows):
            return
        self._pending.append(rows)
        self._bufs.update(bufs)
        self._pending_rows += len(rows)
        self._pending_size += int(row_sizes(rows).sum())
        if self._pending_rows >= BATCH_ROWS_MAX or self._pending_size >= BATCH_SIZE_MAX:
            self._write_pending(everything=False)

    def finish(self) -> RunMeta:
        """Make the file durable. Return its description for the manifest."""
        if self._pending_rows:
            self._write_pending(everything=True)
        assert self._file is not None
        self._arrow.close()
        footer = self._sink.take_chunks()
        footer_crc32 = self._write(footer)
        self._file.sync()
        keys_size, keys_crc32 = self._indexes.write_keys(
            self._disk, self._directory / f"{self._number:010d}{key_file.SUFFIX}", self._pace
        )
        self._disk.sync_dir(self._directory)
        stripe, topics = self._indexes.topics()
        batches = np.concatenate(self._batches)
        first, last = batches[0], batches[-1]
        return RunMeta(
            number=self._number,
            size=self._file.size,
            crc32=self._crc32,
            footer_crc32=footer_crc32,
            rows=int(batches["rows"].sum()),
            tombstones=self._tombstones,
            first=Position(int(first["first_due"]), int(first["first_seq"])),
            last=Position(int(last["last_due"]), int(last["last_seq"])),
            seq_min=self._seqs[0],
            seq_max=self._seqs[1],
            batches=batches.tobytes(),
            stripe=stripe,
            topics=topics.tobytes(),
            keys_size=keys_size,
            keys_crc32=keys_crc32,
        )

    def close(self) -> None:
        """Close the file. The next recovery removes a file that is not finished."""
        if self._file is not None:
            self._file.close()

    def _write_pending(self, *, everything: bool) -> None:
        """Write full batches of the pending rows; the last, smaller one too if `everything`."""
        rows = concat(self._pending)
        sizes = np.concatenate([[0], np.cumsum(row_sizes(rows))])
        ends = _batch_ends(sizes, everything=everything)
        upto, done = sizes[ends], 0
        while done + 1 < len(ends):
            fits = int(upto.searchsorted(upto[done] + GATHER_SIZE, "right")) - 1
            stop = max(fits, done + 1)  # a batch may exceed the limit
            self._write_batches(rows[ends[done] : ends[stop]], ends[done : stop + 1] - ends[done])
            done = stop
        start = int(ends[-1])
        rows = rows[start:]
        self._pending = [rows] if len(rows) else []
        self._pending_rows = len(rows)
        self._pending_size = int(sizes[-1] - sizes[start])
        wanted = np.unique(rows["buf"][~is_tombstone(rows)]).tolist()
        self._bufs = {number: self._bufs[number] for number in wanted}

    def _write_batches(self, rows: RowArray, ends: npt.NDArray[np.int64]) -> None:
        """Write gathered rows as batches. `ends`: 0, then the end of each batch."""
        binaries = [binary_column(rows, self._bufs, name) for name in _BINARIES]
        for start, stop in pairwise(ends.tolist()):
            mine = [_part(binary, start, stop) for binary in binaries]
            self._write_batch(rows[start:stop], mine)

    def _write_batch(self, rows: RowArray, binaries: list[pa.BinaryArray]) -> None:
        file = self._open()
        n = len(rows)
        columns = [np.ascontiguousarray(rows[name]) for name in _SCHEMA.names[:4]]
        numbers = [_numbers(c, f.type) for c, f in zip(columns, _SCHEMA, strict=False)]
        batch = pa.record_batch([*numbers, *binaries], schema=_SCHEMA)
        assert self._arrow is not None
        self._arrow.write_batch(batch)
        data = self._sink.take_chunks()
        size = pa.ipc.get_record_batch_size(batch)
        extra = sum(map(len, data)) - size  # the schema is written before the first batch
        entry = np.zeros(1, BATCH)
        entry["position"] = file.size + extra
        entry["size"] = size
        entry["rows"] = n
        # The metadata come first, then the buffers, side by side: count from the end.
        blob_sizes = [padded(_size(binary)) for binary in binaries]
        offsets_size = padded(4 * (n + 1))
        entry["headers_at"] = headers_at = size - blob_sizes[2] - offsets_size
        entry["key_at"] = key_at = headers_at - blob_sizes[1] - offsets_size
        entry["payload_at"] = payload_at = key_at - blob_sizes[0]
        entry["due_at"] = due_at = payload_at - head_size(n)
        self._write(_byte_range(data, 0, extra))
        whole = _byte_range(data, extra, extra + size)
        entry["head_crc32"] = _crc32(_byte_range(whole, due_at, payload_at))
        for name, place in (("first", 0), ("last", -1)):
            entry[f"{name}_due"] = columns[0][place]
            entry[f"{name}_seq"] = columns[1][place]
        self._batches.append(entry)
        keys_at = int(entry["position"][0]) + int(key_at) + offsets_size
        self._indexes.add(rows, binaries[1], keys_at)
        timers = columns[1][~is_tombstone(rows)]
        self._tombstones += n - len(timers)
        if len(timers):
            least, greatest = self._seqs
            self._seqs = min(least, int(timers.min())), max(greatest, int(timers.max()))
        entry["crc32"] = self._write(whole)

    def _open(self) -> AppendFile:
        if self._file is None:
            path = self._directory / f"{self._number:010d}{SUFFIX}"
            assert not self._disk.exists(path), path
            self._file = self._disk.open_append(path)
            self._arrow = pa.ipc.new_file(self._sink, _SCHEMA)
        return self._file

    def _write(self, data: list[memoryview]) -> int:
        """Append to the file, and sync it after each STEP_SIZE bytes.

        Return the CRC-32 of the data.
        """
        file = self._file
        assert file is not None
        position, size, crc32 = 0, sum(map(len, data)), _crc32(data)
        self._crc32 = concat_crc32(self._crc32, crc32, size)
        while position < size:
            step = min(STEP_SIZE - self._unsynced, size - position)
            file.write(_byte_range(data, position, position + step))
            position += step
            self._unsynced += step
            if self._unsynced >= STEP_SIZE:
                file.sync()
                self._pace(self._unsynced)
                self._unsynced = 0
        return crc32


def write_parts(  # noqa: PLR0913 -- place, sizes, pace and content
    disk: Disk,
    directory: Path,
    numbers: Iterator[int],
    chunks: Iterable[tuple[RowArray, Buffers]],
    part_size: int,
    pace: Pace = unpaced,
    hasher: KeyHasher = PLAIN_HASHER,
) -> list[RunMeta]:
    """Write sorted rows to durable runs of `part_size` bytes each. Return them in order.

    Each run exceeds `part_size` by less than a row, except the last one. Held rows get runs of
    their own; the run before those may be smaller, too.

    Raises:
        CorruptFileError: a chunk comes from a run that doesn't verify.
        DiskFailedError: the process must stop.
    """
    metas: list[RunMeta] = []
    writer: RunWriter | None = None
    room, held = part_size, False
    try:
        for part, bufs in ((part, bufs) for chunk, bufs in chunks for part in split_held(chunk)):
            rows, before = part, held
            held = int(rows["due_ms"][0]) >= HELD_OFFSET_MS
            if writer is not None and held != before:
                metas.append(writer.finish())
                writer.close()
                writer = None
            while len(rows):
                if writer is None:
                    writer = RunWriter(disk, directory, next(numbers), pace, hasher)
                    room = part_size
                sizes = np.cumsum(row_sizes(rows))
                stop = min(int(sizes.searchsorted(room)) + 1, len(rows))
                writer.add(rows[:stop], bufs)
                room -= int(sizes[stop - 1])
                if room <= 0:
                    metas.append(writer.finish())
                    writer.close()
                    writer = None
                rows = rows[stop:]
        if writer is not None:
            metas.append(writer.finish())
    finally:
        if writer is not None:
            writer.close()
    return metas


def row_sizes(rows: RowArray) -> npt.NDArray[np.int64]:
    """Return about how many bytes each row takes in a batch (n,)."""
    size = rows["payload_size"].astype(np.int64)
    size += rows["key_size"]
    size += rows["headers_size"]
    size += TOMBSTONE_SIZE
    return size


class _Sink:
    """The file object that Arrow writes to. It only collects the bytes."""

    closed = False

    def __init__(self) -> None:
        self._chunks: list[memoryview] = []
        self._size = 0

    def write(self, data: bytes) -> int:
        self._chunks.append(memoryview(data))
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: the sink has no buffer."""

    def close(self) -> None:
        """Do nothing: the sink has no file."""

    def take_chunks(self) -> list[memoryview]:
        chunks, self._chunks = self._chunks, []
        return chunks


def _numbers(column: npt.NDArray[Any], of: pa.DataType) -> pa.Array:
    """Wrap a column without a copy. `pa.array` would import pandas, which takes a second."""
    return pa.Array.from_buffers(of, len(column), [None, pa.py_buffer(column)])


def _binary(offsets: npt.NDArray[np.int32], data: bytes | pa.Buffer) -> pa.BinaryArray:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.BinaryArray.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _part(binary: pa.BinaryArray, start: int, stop: int) -> pa.BinaryArray:
    """Return some of the strings as a column of its own, without a copy.

    Arrow would write more bytes than those of a slice, up to a multiple of 64.
    """
    _, offsets, data = binary.buffers()
    ends = np.frombuffer(offsets, np.int32)[start : stop + 1]
    low, high = int(ends[0]), int(ends[-1])
    return _binary(ends - low, data.slice(low, high - low) if high > low else b"")


def _slices(rows: RowArray, bufs: Buffers, name: str) -> list[bytes]:
    starts, sizes = rows[f"{name}_start"].tolist(), rows[f"{name}_size"].tolist()
    places = zip(rows["buf"].tolist(), starts, sizes, strict=True)
    return [bytes(bufs[buf][start : start + size]) for buf, start, size in places]


def _size(binary: pa.BinaryArray) -> int:
    """Return the number of bytes that Arrow writes for the strings."""
    offsets = np.frombuffer(binary.buffers()[1], np.int32, len(binary) + 1, 4 * binary.offset)
    return int(offsets[-1]) - int(offsets[0])


def _batch_ends(sizes: npt.NDArray[np.int64], *, everything: bool) -> npt.NDArray[np.int64]:
    """Return 0, the ends of n rows' full batches, and n if `everything`.

    `sizes`: bytes of the rows before each place (n + 1,).
    """
    ends = [0]
    while (start := ends[-1]) < len(sizes) - 1:
        stop = int(sizes.searchsorted(sizes[start] + BATCH_SIZE_MAX, "right")) - 1
        stop = min(max(stop, start + 1), start + BATCH_ROWS_MAX)
        full = stop == start + BATCH_ROWS_MAX <= len(sizes) - 1
        if stop >= len(sizes) - 1 and not (everything or full):
            break
        ends.append(min(stop, len(sizes) - 1))
    return np.array(ends, np.int64)


def _byte_range(chunks: list[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return bytes [start, stop) of the concatenated chunks."""
    found, position = [], 0
    for chunk in chunks:
        part = chunk[max(0, start - position) : max(0, stop - position)]
        position += len(chunk)
        if len(part):
            found.append(part)
    return found


def _crc32(chunks: list[memoryview]) -> int:
    crc32 = 0
    for chunk in chunks:
        crc32 = isal_zlib.crc32(chunk, crc32)
    return crc32
