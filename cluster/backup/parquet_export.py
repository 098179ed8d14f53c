"""Pending timers and kept messages of a backup as Parquet files, schema version 1.

    pending-00000.parquet ...     timers that have not fired, in the order of due and seq; held
                                  ones follow the others
    messages-00000.parquet ...    fired messages that topics keep, by topic and queue offset
    export.json                   written last: schema version, index, time, rows and files
    _exporting.ID                 during the export only

    column        type                   meaning
    timer_id      string, not null       as clients have it
    topic         string, not null
    seq           uint64, not null       number of the timer in the cluster
    due           timestamp[ms, UTC]     effective due time
    requested     timestamp[ms, UTC]     requested due time
    key           string                 null: none
    ordering_key  string                 null: none
    priority      uint8, not null        0 to 9
    headers       map<string, string>    empty: none
    payload       binary, not null
    held          bool, not null         pending only: due, and its topic is paused
    queue_offset  uint64, not null       messages only
    fired         timestamp[ms, UTC]     messages only

The metadata of each file has `schema_version`, `cluster_id`, `log_index` and `time_ms`. A change of
the meaning or type of a column, and its removal, need another version. New columns may come.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from cluster.backup.backup_store import BackupError, BackupStore
from cluster.backup.catalogue import Catalogue
from timer.files.disk import Disk
from timer.model import row_traits, timer_id
from timer.model.columns import Binary, Buffers, RowArray, gather
from timer.model.timer_errors import EngineError
from timer.pending.memory.held_rows import HELD_OFFSET_MS, restore_dues
from timer.ready.page_cache import SpillRef
from timer.ready.spill import read_page
from timer.recovery import manifest
from timer.recovery.rows_at_rest import pending_rows

SCHEMA_VERSION: Final = 1
INDEX_NAME: Final = "export.json"
CLAIM: Final = "_exporting."
"""Start of the name of a file that is in the place during an export."""
FILE_ROWS: Final = 5_000_000
"""Rows of one file, about."""
GROUP_ROWS: Final = 65_536
"""Rows of a row group, about; fewer of GROUP_BYTES."""
GROUP_BYTES: Final = 64 << 20

_MOMENT: Final = pa.timestamp("ms", tz="UTC")
_COMMON: Final = (
    pa.field("timer_id", pa.string(), nullable=False),
    pa.field("topic", pa.string(), nullable=False),
    pa.field("seq", pa.uint64(), nullable=False),
    pa.field("due", _MOMENT, nullable=False),
    pa.field("requested", _MOMENT, nullable=False),
    pa.field("key", pa.string()),
    pa.field("ordering_key", pa.string()),
    pa.field("priority", pa.uint8(), nullable=False),
    pa.field("headers", pa.map_(pa.string(), pa.string()), nullable=False),
    pa.field("payload", pa.binary(), nullable=False),
)
PENDING: Final = (*_COMMON, pa.field("held", pa.bool_(), nullable=False))
MESSAGES: Final = (
    *_COMMON,
    pa.field("queue_offset", pa.uint64(), nullable=False),
    pa.field("fired", _MOMENT, nullable=False),
)

_ALPHABET: Final = np.frombuffer(b"0123456789abcdefghijklmnopqrstuv", np.uint8)


class ExportedTable(NamedTuple):
    """The files of one table."""

    rows: int
    files: list[str]


class ParquetExport:
    """Writes the tables of one state."""

    def __init__(self, disk: Disk, state_path: Path, catalogue: Catalogue) -> None:
        """Read the manifest.

        `state_path`: directory with the parts of the backup. `catalogue`: of the backup.
        """
        state = manifest.read(disk, state_path)
        assert state is not None, state_path
        self._state, self._disk, self._path = state, disk, state_path
        self._catalogue = catalogue
        self._salt = timer_id.salt_of(catalogue.cluster_id)
        self._topics = {topic["id"]: topic["name"] for topic in state["topics"]}
        self.leftovers: set[str] = set()
        """Names of files that should be deleted from the target, and could not be."""

    def write(self, target: BackupStore) -> dict[str, ExportedTable]:
        """Write both tables, then `export.json`; return the tables by name.

        After an error, the files that this call wrote are deleted, except those in `leftovers`.

        Raises:
            BackupError: the target has files already, another export writes into it, or the state
                does not hold what it should.
            StoreUnavailable: the target can't be written.
        """
        with _claim(target, self.leftovers):
            try:
                tables = {
                    "pending": self._table(target, "pending", PENDING, self._pending_tables()),
                    "messages": self._table(target, "messages", MESSAGES, self._messages()),
                }
            except EngineError as error:
                raise BackupError(str(error)) from None
            found, wanted = tables["pending"].rows, self._catalogue.pending
            if found != wanted:
                raise BackupError(
                    f"the state has {found} pending timers; its manifest says {wanted}"
                )
            index = self._facts() | {name: table._asdict() for name, table in tables.items()}
            data = json.dumps(index, indent=1).encode() + b"\n"
            self.leftovers.add(INDEX_NAME)
            target.put(INDEX_NAME, [data], len(data))
        return tables

    def _facts(self) -> dict[str, Any]:
        catalogue = self._catalogue
        return {
            "schema_version": SCHEMA_VERSION,
            "cluster_id": catalogue.cluster_id,
            "log_index": catalogue.index,
            "time_ms": catalogue.time_ms,
        }

    def _table(
        self,
        target: BackupStore,
        name: str,
        fields: tuple[Any, ...],
        batches: Iterator[Any],
    ) -> ExportedTable:
        """Write one table, in one file or more of about FILE_ROWS. Add them to `leftovers`."""
        facts = {key: str(value) for key, value in self._facts().items()}
        schema = pa.schema(fields, metadata=facts)
        files: list[str] = []
        writer: Any = None
        total = leftovers = 0
        with ExitStack() as stack:
            for group in _row_groups(batches, schema):
                if leftovers <= 0:
                    stack.close()
                    files.append(f"{name}-{len(files):05d}.parquet")
                    self.leftovers.add(files[-1])
                    out = stack.enter_context(target.open_writer(files[-1]))
                    writer = stack.enter_context(
                        parquet.ParquetWriter(out, schema, compression="zstd")
                    )
                    leftovers = FILE_ROWS
                writer.write_table(group)
                total, leftovers = total + len(group), leftovers - len(group)
        return ExportedTable(total, files)

    # ---- rows

    def _pending_tables(self) -> Iterator[Any]:
        for stored, bufs in pending_rows(self._state, self._disk, self._path):
            rows = stored.copy()
            held = rows["due_ms"] >= HELD_OFFSET_MS
            yield pa.record_batch(
                [*self._common(restore_dues(rows), bufs), pa.array(held)], schema=pa.schema(PENDING)
            )

    def _messages(self) -> Iterator[Any]:
        folder = self._path / manifest.SPILL_DIRECTORY
        for topic in self._state["topics"]:
            for file, position, size, first, end, *_ in topic["blocks"]:
                page = read_page(self._disk, folder, SpillRef(file, position, size))
                kept = slice(max(0, topic["begin"] - first), None)
                rows, offsets = page.rows[kept], np.arange(first, end, dtype=np.uint64)[kept]
                if len(rows):
                    fired = pa.array(page.fired_at_ms[kept]).cast(_MOMENT)
                    columns = [*self._common(rows, page.bufs), pa.array(offsets), fired]
                    yield pa.record_batch(columns, schema=pa.schema(MESSAGES))

    def _common(self, rows: RowArray, bufs: Buffers) -> list[Any]:
        """Return the columns of both tables for n rows with plain dues."""
        due, seq = rows["due_ms"].copy(), rows["seq"].copy()
        ids, topics = np.unique(rows["topic"], return_inverse=True)
        names = pa.array([self._topics[topic] for topic in ids.tolist()], pa.string())
        keys = gather(rows, bufs, "key")
        headers, traits = row_traits.split(gather(rows, bufs, "headers"))
        ordering, priority = traits or row_traits.none_of(len(rows))
        return [
            _id_column(timer_id.encode(due, seq, self._salt)),
            names.take(pa.array(topics.reshape(-1))),
            pa.array(seq),
            pa.array(due).cast(_MOMENT),
            pa.array(rows["requested_ms"].copy()).cast(_MOMENT),
            _bytes_column(keys, pa.string(), keys.sizes > 0),
            _bytes_column(ordering, pa.string(), ordering.sizes > 0),
            pa.array(priority),
            _headers_column(headers),
            _bytes_column(gather(rows, bufs, "payload"), pa.binary()),
        ]


@contextmanager
def _claim(target: BackupStore, leftovers: set[str]) -> Iterator[None]:
    """Keep other exports out of an empty place during the block.

    A claim is a file in the place. Each export writes its own and then lists the place, so of two
    exports one at least sees the claim of the other.

    `leftovers`: gets the names of the files that are written in the block. They are deleted after
    an error, the index first, and the claim always, if no other file is left. The names of those
    that can't be deleted stay.

    Raises:
        BackupError: the place has files, or another claim.
        StoreUnavailable: it can't be read or written.
    """
    claim = f"{CLAIM}{secrets.token_hex(8)}"
    _check_empty(target)
    leftovers.add(claim)
    try:
        target.put(claim, [], 0)
        _check_empty(target, claim)
        yield
        leftovers.intersection_update([claim])
    finally:
        index = leftovers & {INDEX_NAME}
        target.discard([index, leftovers - index - {claim}, {claim}], leftovers)


def _check_empty(target: BackupStore, claim: str = "") -> None:
    there = sorted({name.strip("/") for name in target.sizes("")} - {claim})
    if there:
        what = ", ".join(there[:5])
        why = f"{target.root} is not empty ({what})"
        if any(name.startswith(CLAIM) for name in there):
            why += f"; {CLAIM}… is of an export that runs or was killed"
        raise BackupError(f"{why}: export into an empty place")


def _row_groups(batches: Iterator[Any], schema: Any) -> Iterator[Any]:
    """Yield tables of about GROUP_ROWS rows; an empty one if there are no batches."""
    waiting: list[Any] = []
    rows = size = groups = 0
    for batch in batches:
        waiting.append(batch)
        rows, size = rows + len(batch), size + batch.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield _one_table(waiting, schema)
            waiting, rows, size, groups = [], 0, 0, groups + 1
    if waiting or not groups:
        yield _one_table(waiting, schema)


def _one_table(batches: list[Any], schema: Any) -> Any:
    fields = pa.schema([*schema])
    table = pa.Table.from_batches(batches, fields)
    return table.replace_schema_metadata(schema.metadata)


# ---- columns


def _bytes_column(column: Binary, kind: Any, present: npt.NDArray[np.bool_] | None = None) -> Any:
    """Return an Arrow column of byte strings. `present`: the rows that are not null; None: all."""
    offsets = np.zeros(len(column.sizes) + 1, np.int32)
    np.cumsum(column.sizes, out=offsets[1:])
    valid = None
    if present is not None and not present.all():
        valid = pa.py_buffer(np.packbits(present, bitorder="little").tobytes())
    buffers = [valid, pa.py_buffer(offsets.tobytes()), pa.py_buffer(bytes(column.blob))]
    return pa.Array.from_buffers(kind, len(column.sizes), buffers)


def _headers_column(column: Binary) -> Any:
    """Return an Arrow column of maps. The names and values of a row follow each other in `blob`."""
    blob, texts, pairs = bytes(column.blob), list[bytes](), [0]
    position = 0
    for end in np.cumsum(column.sizes, dtype=np.int64).tolist() if blob else ():
        while position < end:
            start = position + 2
            position = start + int.from_bytes(blob[position:start], "little")
            texts.append(blob[start:position])
        pairs.append(len(texts) // 2)
    offsets = pairs if blob else [0] * (len(column.sizes) + 1)
    names, values = (
        pa.array([text.decode() for text in texts[at::2]], pa.string()) for at in (0, 1)
    )
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), names, values)


def _id_column(raw: bytes) -> Any:
    """Return the texts of raw ids (timer/model/timer_id.py): eight characters for five bytes."""
    fives = np.frombuffer(raw, np.uint8).reshape(-1, 5).astype(np.uint64)
    values = fives @ (np.uint64(1) << np.arange(32, -1, -8, dtype=np.uint64))
    digits = values[:, None] >> np.arange(35, -1, -5, dtype=np.uint64) & np.uint64(31)
    text = _ALPHABET[digits.astype(np.intp)].tobytes()
    sizes = np.full(len(raw) // timer_id.SIZE, timer_id.TEXT_SIZE, np.uint32)
    return _bytes_column(Binary(sizes=sizes, blob=text), pa.string())
