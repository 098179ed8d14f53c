"""Runs: pending rows sorted by (due, seq) in one immutable Arrow IPC file, format version 2.

    ARROW1  schema  batch  batch  ...  footer  ARROW1        any Arrow reader can open it

    due_ms int64, seq uint64, requested_ms int64, topic uint32, payload, key, headers binary

Uncompressed, no column has nulls. A batch has at most 4,096 rows, so that one timer is found by
reading one small head. It has at most 8 MB, except if one row alone is larger. Readers accept
batches of any size. A row with topic = TOMBSTONE means that the timer with its (due_ms, seq), which
is in another run, was cancelled; requested_ms is then that timer's topic. The manifest has a
`RunMeta` for each run: it allows to read a part of a batch without the rest. In a batch the buffers
lie as Arrow writes them:

    metadata | due_ms | seq | requested_ms | topic | payload offsets | payloads | key offsets | ...
             |<--------- head: head_crc32, checked at every read --->|
    |<------- whole batch: crc32, checked at the first read ---------------------------------->|

Each buffer starts at a multiple of 8 in the batch. Reads are bounded: a head has up to 128 KB, a
slice of payloads the requested size. A file is in use once a manifest names it, so it needs no
rename. A change of this format needs VERSION += 1 and a reader for the old version.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from timer.files.disk import Disk
from timer.model.columns import I64, ROW, TOMBSTONE, U32, U64, RowArray
from timer.model.firing_order import Position, find, find_one, lower_bound, place_of, rank
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.memory.key_index import PLAIN_HASHER, KeyHasher
from timer.pending.runs import key_file
from timer.pending.runs.key_file import KeyFile

VERSION: Final = 2
SUFFIX: Final = ".arrow"
MAGIC: Final = b"ARROW1"
BATCH_ROWS_MAX: Final = 4_096
BATCH_SIZE_MAX: Final = 8 << 20
OFFSET_MAX: Final = (1 << 31) - 1

BATCH: Final = np.dtype(
    [
        ("position", "<u8"),  # of its metadata, in the file
        ("size", "<u4"),  # of metadata and buffers, in bytes
        ("rows", "<u4"),
        ("crc32", "<u4"),  # of all its bytes
        ("head_crc32", "<u4"),
        ("due_at", "<u4"),  # positions of buffers, from the start of the batch
        ("payload_at", "<u4"),
        ("key_at", "<u4"),  # of its offsets
        ("headers_at", "<u4"),  # of its offsets
        ("first_due", "<i8"),
        ("first_seq", "<u8"),
        ("last_due", "<i8"),
        ("last_seq", "<u8"),
    ]
)

TOPIC_ROWS: Final = np.dtype(
    [("stripe", "<u4"), ("topic", "<u4"), ("timers", "<u4"), ("tombstones", "<u4")]
)


def padded(size: int) -> int:
    """Return `size` rounded up to a multiple of 8, as Arrow rounds a buffer."""
    return size + -size % 8


def head_size(rows: int) -> int:
    """Return the bytes of due_ms, seq, requested_ms, topic and payload offsets."""
    return 24 * rows + padded(4 * rows) + padded(4 * (rows + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeta:
    """A manifest's description of a run. The file can't be read without it."""

    number: int
    """Part of the file's name. Never used twice."""
    size: int
    """Bytes in the file."""
    crc32: int
    """Of the whole file."""
    footer_crc32: int
    """Of the bytes after the last batch."""
    rows: int
    """Tombstones included."""
    tombstones: int
    first: Position
    last: Position
    seq_min: int
    """Least seq of its timers, tombstones not counted. Above `seq_max` if it has no timers."""
    seq_max: int
    batches: bytes
    """Array of dtype BATCH."""
    stripe: int
    """Batches in a stripe."""
    topics: bytes
    """Array of dtype TOPIC_ROWS: rows per stripe and topic, by stripe."""
    keys_size: int
    """Bytes in the key file beside it (timer/pending/runs/key_file.py). 0: there is none."""
    keys_crc32: int
    """Of the whole key file."""

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.number:010d}{SUFFIX}"

    @property
    def keys_name(self) -> str:
        """The key file's name."""
        return f"{self.number:010d}{key_file.SUFFIX}"

    @property
    def names(self) -> list[str]:
        """The names of all its files."""
        return [self.name, self.keys_name] if self.keys_size else [self.name]

    def may_contain(self, due_ms: int, seq: int) -> bool:
        """Return whether one timer may have a row in the run: `may_contain` for one timer."""
        if not self.first.due_ms <= due_ms <= self.last.due_ms:
            return False
        return self.tombstones > 0 or self.seq_min <= seq <= self.seq_max

    def pack(self) -> dict[str, Any]:
        """Return the fields as plain values, for a manifest."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {"version": VERSION} | fields | {"first": [*self.first], "last": [*self.last]}

    @classmethod
    def unpack(cls, fields: dict[str, Any]) -> "RunMeta":
        """Return the RunMeta that `pack` was called on.

        Raises:
            UnknownVersionError: the run is of another format.
        """
        fields = dict(fields)
        version = fields.pop("version")
        if version != VERSION:
            raise UnknownVersionError(f"run {fields['number']}", version, VERSION)
        first, last = Position(*fields.pop("first")), Position(*fields.pop("last"))
        return cls(first=first, last=last, **fields)


class BatchColumns:
    """The columns of a batch except payloads, keys and headers, as views of the bytes read."""

    __slots__ = ("batch", "due_ms", "offsets", "requested_ms", "seq", "topic")

    def __init__(self, batch: int, data: bytes, rows: int) -> None:
        self.batch = batch
        self.due_ms: I64 = np.frombuffer(data, "<i8", rows)
        self.seq: U64 = np.frombuffer(data, "<u8", rows, 8 * rows)
        self.requested_ms: I64 = np.frombuffer(data, "<i8", rows, 16 * rows)
        self.topic: U32 = np.frombuffer(data, "<u4", rows, 24 * rows)
        position = 24 * rows + padded(4 * rows)
        self.offsets: npt.NDArray[np.int32] = np.frombuffer(data, "<i4", rows + 1, position)

    def rows(self, places: slice | npt.NDArray[np.intp]) -> RowArray:
        """Return the rows at these places, without key and headers, and without a buffer."""
        due = self.due_ms[places]
        rows = np.zeros(len(due), ROW)
        rows["due_ms"] = due
        rows["seq"] = self.seq[places]
        rows["requested_ms"] = self.requested_ms[places]
        rows["topic"] = self.topic[places]
        rows["payload_size"] = self.offsets[1:][places] - self.offsets[:-1][places]
        return rows


class Run:
    """A run that any thread can read. In memory is only the index of its batches."""

    def __init__(
        self, disk: Disk, directory: Path, meta: RunMeta, hasher: KeyHasher = PLAIN_HASHER
    ) -> None:
        """Check length and footer.

        Raises:
            CorruptFileError: the file is missing, or is not the one that `meta` describes.
        """
        self.meta = meta
        self.hasher = hasher
        """The hasher of its key file."""
        self._disk = disk
        self._path = directory / meta.name
        self._batches = np.frombuffer(meta.batches, BATCH)
        self._last_due: I64 = np.ascontiguousarray(self._batches["last_due"])
        self._last_seq: U64 = np.ascontiguousarray(self._batches["last_seq"])
        self._rows = self._batches["rows"].astype(np.int64)
        self._sizes = self._batches["size"].astype(np.int64) - self._batches["due_at"]
        self._verified: set[int] = set()
        self._keys: KeyFile | None = None
        end = self._batches[-1]
        start = int(end["position"]) + int(end["size"])
        try:
            size = disk.size(self._path)
            footer = disk.read(self._path, start)
            keys_size = disk.size(directory / meta.keys_name) if meta.keys_size else 0
        except FileNotFoundError as error:
            why = "the run or its key file is missing"
            raise CorruptFileError(self._path, 0, why) from error
        if size != meta.size:
            why = f"the file has {size} bytes; {meta.size} were written"
            raise CorruptFileError(self._path, size, why)
        if keys_size != meta.keys_size:
            path = directory / meta.keys_name
            why = f"the file has {keys_size} bytes; {meta.keys_size} were written"
            raise CorruptFileError(path, keys_size, why)
        if isal_zlib.crc32(footer) != meta.footer_crc32 or not footer.endswith(MAGIC):
            raise CorruptFileError(self._path, start, "checksum mismatch in the footer")

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    @property
    def path(self) -> Path:
        """The file's path."""
        return self._path

    @property
    def keys(self) -> KeyFile | None:
        """The key file, read at the first access. None: no row has a key.

        Raises:
            CorruptFileError: it is damaged.
        """
        if self._keys is None and self.meta.keys_size:
            self._keys = KeyFile(self._disk, self._path.with_name(self.meta.keys_name))
        return self._keys

    @property
    def has_read_keys(self) -> bool:
        """Whether access to `keys` reads no file."""
        return self._keys is not None or not self.meta.keys_size

    def batch_after(self, position: Position) -> int:
        """Return the first batch with a row after `position`; `len(self)` if there is none."""
        return rank(self._last_due, self._last_seq, position)

    def stripes_of(self, topic: int) -> npt.NDArray[np.void]:
        """Return the elements of `meta.topics` for one topic, by stripe (dtype TOPIC_ROWS)."""
        table = np.frombuffer(self.meta.topics, TOPIC_ROWS)
        found: npt.NDArray[np.void] = table[table["topic"] == topic]
        return found

    def first_due(self, batch: int) -> int:
        """Return the due of a batch's first row."""
        return int(self._batches["first_due"][batch])

    def first(self, batch: int) -> Position:
        """Return due and seq of a batch's first row."""
        found = self._batches[batch]
        return Position(int(found["first_due"]), int(found["first_seq"]))

    def keys_of(self, head: BatchColumns) -> tuple[npt.NDArray[np.int32], bytes]:
        """Return (offsets, bytes) of the keys of a batch: row i has [offsets[i], offsets[i + 1]).

        Raises:
            CorruptFileError: the batch doesn't verify.
        """
        self.verify(head.batch)
        found, n = self._batches[head.batch], len(head.seq)
        start = int(found["position"]) + int(found["key_at"])
        size = int(found["headers_at"]) - int(found["key_at"])
        data = self.read(start, size)
        return np.frombuffer(data, "<i4", n + 1), data[padded(4 * (n + 1)) :]

    def rows_after(self, position: Position) -> int:
        """Return the number of rows in batches that end after `position`."""
        return int(self._rows[self.batch_after(position) :].sum())

    def size_after(self, position: Position) -> int:
        """Return the bytes of the columns in batches that end after `position`."""
        return int(self._sizes[self.batch_after(position) :].sum())

    def batches_of(self, due_ms: I64, seq: U64) -> npt.NDArray[np.intp]:
        """Return the only batch that may contain each timer (n,); `len(self)`: none."""
        return lower_bound(self._last_due, self._last_seq, due_ms, seq)

    def batch_of(self, due_ms: int, seq: int) -> int:
        """Return the only batch that may contain one timer; `len(self)`: none."""
        return place_of(self._last_due, self._last_seq, due_ms, seq)

    def head(self, batch: int) -> BatchColumns:
        """Read the head of a batch (up to 128 KB).

        Raises:
            CorruptFileError: it doesn't verify.
        """
        found = self._batches[batch]
        rows, start = int(found["rows"]), int(found["position"]) + int(found["due_at"])
        data = self.read(start, head_size(rows))
        if isal_zlib.crc32(data) != int(found["head_crc32"]):
            raise CorruptFileError(
                self._path, start, f"checksum mismatch in the head of batch {batch}"
            )
        return BatchColumns(batch, data, rows)

    def verify(self, batch: int) -> None:
        """Check all bytes of a batch (up to 8 MB), except if this was done before.

        Raises:
            CorruptFileError: they don't verify.
        """
        if batch in self._verified:
            return
        found = self._batches[batch]
        start = int(found["position"])
        if isal_zlib.crc32(self.read(start, int(found["size"]))) != int(found["crc32"]):
            raise CorruptFileError(self._path, start, f"checksum mismatch in batch {batch}")
        self._verified.add(batch)

    def check(self, pace: Callable[[int], None]) -> None:
        """Read and check the whole file. `pace` is called with each step's bytes.

        Raises:
            CorruptFileError: it doesn't verify. The error has the position.
        """
        whole = position = 0
        for number, found in enumerate(self._batches):
            start, size = int(found["position"]), int(found["size"])
            before, data = self.read(position, start - position), self.read(start, size)
            if isal_zlib.crc32(data) != int(found["crc32"]):
                raise CorruptFileError(self._path, start, f"checksum mismatch in batch {number}")
            whole = isal_zlib.crc32(data, isal_zlib.crc32(before, whole))
            position = start + size
            pace(len(before) + size)
        whole = isal_zlib.crc32(self.read(position, self.meta.size - position), whole)
        if whole != self.meta.crc32:
            raise CorruptFileError(self._path, 0, "checksum mismatch between the batches")

    def rows(self, head: BatchColumns, start: int, stop: int) -> tuple[RowArray, bytes]:
        """Return rows [start, stop) of a batch, and the buffer that they point into. `buf` is 0.

        Raises:
            CorruptFileError: the batch doesn't verify.
        """
        self.verify(head.batch)
        rows = head.rows(slice(start, stop))
        found = self._batches[head.batch]
        n, position = int(found["rows"]), int(found["position"])
        payload_at, key_at, headers_at = (
            int(found[name]) for name in ("payload_at", "key_at", "headers_at")
        )
        low, high = int(head.offsets[start]), int(head.offsets[stop])
        rows["payload_start"] = head.offsets[start:stop] - low
        padding = padded(4 * (n + 1))
        columns = [
            (name, at)
            for name, at, end in (
                ("key", key_at, headers_at),
                ("headers", headers_at, int(found["size"])),
            )
            if at + padding < end  # some row in this batch has one
        ]
        parts = [(position + at + 4 * start, 4 * (stop - start + 1)) for _, at in columns]
        payload, *ends = self.read_parts([(position + payload_at + low, high - low), *parts])
        parts, size = [], len(payload)
        for (name, at), data in zip(columns, ends, strict=True):
            offsets = np.frombuffer(data, "<i4")
            low, high = int(offsets[0]), int(offsets[-1])
            rows[f"{name}_start"] = offsets[:-1] - low + size
            rows[f"{name}_size"] = np.diff(offsets)
            if high > low:
                parts.append((position + at + padding + low, high - low))
                size += high - low
        return rows, b"".join([payload, *self.read_parts(parts)]) if parts else payload

    def read(self, start: int, size: int) -> bytes:
        """Return bytes of the file, unchecked.

        Raises:
            CorruptFileError: the file is shorter.
        """
        return self.read_parts([(start, size)])[0]

    def read_parts(self, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several parts (start, size) of the file, unchecked.

        Raises:
            CorruptFileError: the file is shorter.
        """
        found = self._disk.read_parts(self._path, parts)
        for (start, size), data in zip(parts, found, strict=True):
            if len(data) != size:
                why = f"{len(data)} bytes are left of {size} that were written"
                raise CorruptFileError(self._path, start, why)
        return found


class Cursor:
    """A place in a run, from which rows are read in order. It caches the head of one batch."""

    def __init__(self, run: Run, after: Position) -> None:
        self.run = run
        self.next: Position | None = None
        """(due, seq) of the next row. None: none is left."""
        self._row = 0
        self._head: BatchColumns | None = None
        batch = run.batch_after(after)
        if batch < len(run):
            self._head = run.head(batch)
            self._row = rank(self._head.due_ms, self._head.seq, after)
            self._set_next()

    def read(self, until_ms: int, rows_min: int, size_max: int) -> tuple[RowArray, bytes]:
        """Return the next rows of this batch: those with due <= `until_ms`, at least `rows_min`.

        Fewer if the batch ends, or if their payloads would exceed `size_max` bytes; at least one.
        A next row must exist.

        Raises:
            CorruptFileError: the batch doesn't verify.
        """
        head, start = self._head, self._row
        assert head is not None
        stop = max(int(head.due_ms.searchsorted(until_ms, "right")), start + rows_min)
        end = np.int32(min(int(head.offsets[start]) + size_max, OFFSET_MAX))
        fits = int(head.offsets.searchsorted(end, "right")) - 1
        stop = max(start + 1, min(stop, fits, len(head.seq)))
        rows, data = self.run.rows(head, start, stop)
        self._row = stop
        if stop == len(head.seq):
            self._next_batch(head)
        self._set_next()
        return rows, data

    def skip(self, deleted_topics: DeletedTopics) -> None:
        """Pass over batches with rows of deleted topics only."""
        while (head := self._head) is not None:
            rest = slice(self._row, None)
            if not deleted_topics.of_columns(head.topic[rest], head.requested_ms[rest]).all():
                break
            self._next_batch(head)
        self._set_next()

    def _next_batch(self, head: BatchColumns) -> None:
        following = head.batch + 1
        self._head = self.run.head(following) if following < len(self.run) else None
        self._row = 0

    def _set_next(self) -> None:
        head, row = self._head, self._row
        self.next = None if head is None else Position(int(head.due_ms[row]), int(head.seq[row]))


HEADS_MAX: Final = 4


class Finder:
    """Finds single timers in runs. It caches the last few heads that it read."""

    def __init__(self) -> None:
        self._heads: dict[tuple[int, int], BatchColumns] = {}

    def find(self, run: Run, due_ms: I64, seq: U64) -> tuple[npt.NDArray[np.bool_], RowArray]:
        """Return which of n timers have a row in `run` (n, bool), and those rows.

        A tombstone is a row. Valid fields: see BatchColumns.rows.
        """
        found = np.zeros(len(seq), np.bool_)
        rows = np.zeros(len(seq), ROW)
        wanted = np.flatnonzero(may_contain(run.meta, due_ms, seq))
        batches = run.batches_of(due_ms[wanted], seq[wanted])
        for batch in np.unique(batches).tolist():
            if batch == len(run):
                continue
            mine = wanted[batches == batch]
            head = self.head(run, batch)
            places = find(head.due_ms, head.seq, due_ms[mine], seq[mine])
            here = places >= 0
            found[mine[here]] = True
            rows[mine[here]] = head.rows(places[here])
        return found, rows[found]

    def find_one(self, run: Run, due_ms: int, seq: int) -> RowArray:
        """Return the row of one timer in `run`, as `find` does, or no row. A tombstone is a row."""
        batch = run.batch_of(due_ms, seq)
        if batch == len(run):
            return np.empty(0, ROW)
        head = self.head(run, batch)
        place = find_one(head.due_ms, head.seq, due_ms, seq)
        return np.empty(0, ROW) if place < 0 else head.rows(slice(place, place + 1))

    def head(self, run: Run, batch: int) -> BatchColumns:
        """Return the head of a batch, cached or read."""
        key = (run.meta.number, batch)
        head = self._heads.pop(key, None) or run.head(batch)
        self._heads[key] = head  # the newest is last
        if len(self._heads) > HEADS_MAX:
            del self._heads[next(iter(self._heads))]
        return head


def may_contain(meta: RunMeta, due_ms: I64, seq: U64) -> npt.NDArray[np.bool_]:
    """Return which timers may have a row in the run, by its ranges alone (n, bool)."""
    inside = (due_ms >= meta.first.due_ms) & (due_ms <= meta.last.due_ms)
    if meta.tombstones == 0:
        inside &= (seq >= np.uint64(meta.seq_min)) & (seq <= np.uint64(meta.seq_max))
    return np.asarray(inside)


class Range(NamedTuple):
    """The ranges of due and seq of some timers, both ends included."""

    due_min: int
    due_max: int
    seq_min: int
    seq_max: int

    @classmethod
    def of(cls, due_ms: I64, seq: U64) -> "Range":
        """Return the ranges of n timers, at least one."""
        return cls(int(due_ms.min()), int(due_ms.max()), int(seq.min()), int(seq.max()))

    def overlaps(self, meta: RunMeta) -> bool:
        """Return whether the run may have a row of one of them. If not, `may_contain` is all False.

        Few of many runs may have a given timer. This test takes less than a microsecond.
        """
        if meta.first.due_ms > self.due_max or meta.last.due_ms < self.due_min:
            return False
        seqs = meta.seq_min <= self.seq_max and meta.seq_max >= self.seq_min
        return seqs or meta.tombstones > 0


def is_tombstone(rows: RowArray) -> npt.NDArray[np.bool_]:
    """Return which rows are tombstones (n, bool)."""
    return np.asarray(rows["topic"] == TOMBSTONE)
