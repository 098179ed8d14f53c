"""The files of a synthetic run: equal logs on several nodes, and histories as Parquet."""

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from chaos.history.history import RunFolder
from timer.entries import entry_frame
from timer.entries.entry_frame import EntryKind
from timer.files import segment
from timer.model import timer_id
from timer.model.columns import I64
from timer.model.units import Epoch, LogIndex, UnixMs

SALT: Final = 42
SEGMENT_SIZE: Final = 64 << 20
_DIGITS: Final = np.frombuffer(b"0123456789abcdefghijklmnopqrstuv", np.uint8)
_LINES_PER_GROUP: Final = 400


class Logs:
    """The same log on every node, except for frames set with `alter_next`."""

    def __init__(self, folders: list[Path]) -> None:
        self.index = 0
        self.epoch = 0
        self._folders = folders
        self._frames: list[bytes] = []
        self._size = 0
        self._first = 1
        self._before: tuple[int, int] = (0, 0)  # last epoch and first index of the last segment
        self._altered: dict[tuple[Path, int], bytes] = {}
        for folder in folders:
            folder.mkdir(parents=True)

    def append(self, kind: EntryKind, *payload: bytes, at_ms: int) -> int:
        """Append an entry to every node's log; return its index."""
        self.index += 1
        frame = self._frame(kind, self.index, at_ms, payload)
        self._frames.append(frame)
        self._size += len(frame)
        if self._size >= SEGMENT_SIZE:
            self._flush()
        return self.index

    def alter_next(self, node: int, kind: EntryKind, *payload: bytes, at_ms: int) -> None:
        """Write another entry to one node's log in place of the next entry."""
        index = self.index + 1
        self._altered[self._folders[node], index] = self._frame(kind, index, at_ms, payload)

    def _frame(self, kind: EntryKind, index: int, at_ms: int, payload: tuple[bytes, ...]) -> bytes:
        return entry_frame.encode(
            kind, Epoch(self.epoch), LogIndex(index), UnixMs(at_ms), [*payload]
        )

    def _flush(self) -> None:
        if not self._frames:
            return
        epoch, before = self._before
        header = segment.Header(LogIndex(self._first), Epoch(epoch), LogIndex(before))
        common: Path | None = None
        for folder in self._folders:
            path = segment.path_of(folder, header.first)
            mine = {at: f for (where, at), f in self._altered.items() if where == folder}
            if common and not mine:
                shutil.copyfile(common, path)
                continue
            with path.open("wb") as file:
                file.write(header.encode())
                for index, frame in enumerate(self._frames, self._first):
                    file.write(mine.get(index, frame))
            common = common if mine else path
        self._before = (self.epoch, self._first)
        self._first += len(self._frames)
        self._frames, self._size, self._altered = [], 0, {}

    def close(self) -> None:
        """Write all buffered entries."""
        self._flush()


_LIST: Final = {
    name: pa.list_(pa.int64()) for name in ("marks", "due_ms", "offsets", "fired_at_ms")
}
_SCHEMA: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("op", "client", "outcome", "topic", "group")),
        *(
            (name, pa.int64())
            for name in ("start_ms", "end_ms", "epoch", "received_ms", "delay_ms")
        ),
        *_LIST.items(),
        *((name, pa.list_(pa.string())) for name in ("ids", "results", "keys")),
        *((name, pa.list_(pa.string())) for name in ("existing", "new_ids")),
        ("on_conflict", pa.string()),
        ("attempts", pa.list_(pa.int32())),
    ]
)


class Client:
    """One client's history as a Parquet file. A column that a line does not name is null."""

    def __init__(self, run: RunFolder, name: str) -> None:
        run.histories.mkdir(parents=True, exist_ok=True)
        path = run.histories / f"{name}.parquet"
        self._writer = pq.ParquetWriter(path, _SCHEMA, compression="lz4")
        self._name = name
        self._lines: list[dict[str, Any]] = []

    def line(self, op: str, **columns: Any) -> None:
        """Record one operation; a list may be a numpy or Arrow array."""
        self._lines.append({"op": op, "client": self._name, **columns})
        if len(self._lines) >= _LINES_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        columns = [_column([line.get(f.name) for line in self._lines], f.type) for f in _SCHEMA]
        self._writer.write_table(pa.table(columns, schema=_SCHEMA))
        self._lines.clear()

    def close(self) -> None:
        """Write all buffered lines and close the file."""
        if self._lines:
            self._flush()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    sizes = [0 if value is None else len(value) for value in values]
    parts = [pa.array(value, kind.value_type) for value in values if value is not None]
    items = pa.concat_arrays(parts) if parts else pa.array([], kind.value_type)
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
    mask = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(offsets, items, type=kind, mask=mask)


def ids_of(due_ms: I64, seq: I64) -> pa.Array:
    """Return timer ids as text; no Python object is made per id."""
    raw = timer_id.encode(due_ms, seq.astype(np.uint64), SALT)
    bits = np.unpackbits(np.frombuffer(raw, np.uint8)).reshape(-1, 5)
    weights = np.array([16, 8, 4, 2, 1], np.uint8)
    text: npt.NDArray[np.uint8] = _DIGITS[bits @ weights]
    offsets = timer_id.TEXT_SIZE * np.arange(len(due_ms) + 1, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(text))]
    return pa.StringArray.from_buffers(len(due_ms), buffers[1], buffers[2])


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(value, indent=1) + "\n")
