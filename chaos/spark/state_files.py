"""Key files and spill files of nodes' states, read row by row for the audit.

A key file names each row of its run that has a key exactly once, and no other row. The entry's
hash is computed with the node's secret.

A spill file holds blocks of a topic's queue at the positions that the manifest names. Each row has
a seq, a due time and a firing time. The audit compares them with the messages of the log. The
columns of `queued`:

    node, topic (a name), queue_offset, seq, due_ms, fired_at_ms
    damage    the fault of the file; all other columns but `node` are null then

docs/formats.md has the layouts. The product's hash, filter and decoder of blocks are used.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timer.files.disk import RealDisk
from timer.model.columns import Binary
from timer.model.timer_errors import CorruptFileError, StorageError
from timer.pending.memory.key_index import KeyHasher
from timer.pending.runs import key_file
from timer.pending.runs.run import RunMeta
from timer.ready.page_cache import SpillRef
from timer.ready.spill import check_spill, read_page

QUEUED: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("node", "topic")),
        *((name, pa.int64()) for name in ("queue_offset", "seq", "due_ms", "fired_at_ms")),
        ("damage", pa.string()),
    ]
)
BLOCKS: Final = (
    "node STRING, topic STRING, folder STRING, file STRING, position BIGINT, size BIGINT,"
    " first BIGINT, end BIGINT"
)
"""The columns of the input of `queued`: one row per block that a manifest names."""

_COLUMNS: Final = ("due_ms", "seq", "key_size", "topic", "payload_size", "key_at", "hash")
_HEAD: Final = 32
_PAGE: Final = 8 + key_file.PAGE_ENTRIES * key_file.ENTRY.itemsize
_BLOCK: Final = 64
_HASHES: Final = 65_536
_READ_SIZE: Final = 1 << 20


def check_file(path: Path, size: int, crc32: int) -> None:
    """Compare a file's size and checksum with those in the manifest.

    Raises:
        CorruptFileError: they differ.
        OSError: the file can't be read.
    """
    found = 0
    with path.open("rb") as source:
        while data := source.read(_READ_SIZE):
            found = zlib.crc32(data, found)
        end = source.tell()
    if (end, found) != (size, crc32):
        why = f"{end} bytes, CRC-32 {found:08x}; the manifest says {size}, {crc32:08x}"
        raise CorruptFileError(path, 0, why)


def check_keys(run: Path, meta: RunMeta, secret: bytes) -> None:
    """Check that the key file of a run matches its manifest and holds exactly the run's keys.

    `secret`: of the node's hashes.

    Raises:
        CorruptFileError: it does not.
        OSError: a file can't be read.
    """
    wanted = _keys_of(run, KeyHasher(secret))
    if not meta.keys_size:
        if len(wanted):
            why = f"{len(wanted)} rows have keys, and there is no key file"
            raise CorruptFileError(run, 0, why)
        return
    path = run.with_name(meta.keys_name)
    check_file(path, meta.keys_size, meta.keys_crc32)
    checked = key_file.KeyFile(RealDisk(), path)  # reads its head; look-ups are checked below
    checked.check(lambda _: None)
    entries = np.sort(_entries(path.read_bytes(), checked.entries), order=_COLUMNS)
    if not np.array_equal(entries, np.sort(wanted, order=_COLUMNS)):
        why = f"its {len(entries)} keys differ from the {len(wanted)} keys of its run"
        raise CorruptFileError(path, 0, why)
    for hashes in np.array_split(np.unique(wanted["hash"]), -(-len(wanted) // _HASHES)):
        lost = len(hashes) - len(np.unique(checked.find(hashes)[0]))
        if lost:
            raise CorruptFileError(path, 0, f"look-ups miss {lost} of {len(hashes)} hashes")


def _entries(data: bytes, entries: int) -> npt.NDArray[np.void]:
    """Return all entries of a key file, in the file's order."""
    blocks, pages = np.frombuffer(data, "<u4", 2, _HEAD - 8).tolist()
    first = _HEAD + _BLOCK * blocks + 8 * pages
    rows = b"".join(data[at + 8 : at + _PAGE] for at in range(first, len(data), _PAGE))
    return np.frombuffer(rows, key_file.ENTRY, entries)


def _keys_of(run: Path, hasher: KeyHasher) -> npt.NDArray[np.void]:
    """Return the entries that the key file of this run must have."""
    found = [np.empty(0, key_file.ENTRY)]
    with pa.memory_map(str(run)) as file:
        whole = file.read_buffer()
        batches = pa.ipc.open_file(pa.BufferReader(whole))  # arrays point into `whole`
        for number in range(batches.num_record_batches):
            batch = batches.get_batch(number)
            keys = batch.column("key")
            ends, sizes = _offsets(keys), np.diff(_offsets(keys))
            keyed = np.flatnonzero(sizes)
            if not len(keyed):
                continue
            entries = np.zeros(len(keyed), key_file.ENTRY)
            for name in ("due_ms", "seq", "topic"):
                entries[name] = batch.column(name).to_numpy()[keyed]
            entries["key_size"] = sizes[keyed]
            entries["payload_size"] = np.diff(_offsets(batch.column("payload")))[keyed]
            values = keys.buffers()[2]
            entries["key_at"] = values.address - whole.address + ends[keyed]
            blob = memoryview(values)[int(ends[0]) : int(ends[-1])]
            column = Binary(sizes=sizes[keyed].astype(np.uint32), blob=blob)
            entries["hash"] = hasher(entries["topic"], column)
            found.append(entries)
    return np.concatenate(found)


def _offsets(column: Any) -> npt.NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)


def queued(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of blocks: from batches with the columns BLOCKS to batches with QUEUED."""
    for batch in batches:
        for block in batch.to_pylist():
            yield _rows_of(**block)


def _rows_of(*, node: str, topic: str, folder: str, first: int, end: int, **ref: Any) -> Any:
    disk, place = RealDisk(), SpillRef(**ref)
    path, n = Path(folder) / place.file, end - first
    try:
        check_spill(disk, path, [place])
        page = read_page(disk, Path(folder), place)
        if len(page) != n:
            why = f"{len(page)} rows; the manifest says {n}"
            raise CorruptFileError(path, place.position, why)
    except (OSError, StorageError) as error:
        return batch_of(QUEUED, [node], *5 * [[None]], [str(error)])
    seq, due_ms = (page.rows[name].astype(np.int64) for name in ("seq", "due_ms"))
    names = pa.repeat(node, n), pa.repeat(topic, n)
    offsets = np.arange(first, end)
    return batch_of(QUEUED, *names, offsets, seq, due_ms, page.fired_at_ms, pa.nulls(n))


def batch_of(schema: pa.Schema, *columns: Any) -> pa.RecordBatch:
    """Return a batch with the columns of a schema."""
    arrays = [pa.array(each).cast(kind) for each, kind in zip(columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
