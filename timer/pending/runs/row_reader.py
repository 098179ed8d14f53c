"""Pending timers in runs: finding them by key, and reading them with their bytes.

The store searches its memtables itself and its runs here. All reads are bounded: a page of a key
file and one key for a candidate, the head of a batch and the row's bytes for a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, ROW, TOMBSTONE, U32, U64, Binary, Buffers, RowArray
from timer.model.firing_order import find_one
from timer.model.timer_errors import CorruptFileError
from timer.pending.runs.key_file import Entries
from timer.pending.runs.run import Finder, Run, may_contain


class WholeRows(NamedTuple):
    """Rows with their bytes."""

    rows: RowArray
    """(n,) with starts into `blob`. seq = 0: no row."""
    blob: bytes


class Packer:
    """Copies rows into one buffer."""

    def __init__(self, n: int) -> None:
        self._rows: RowArray = np.zeros(n, ROW)
        self._parts: list[memoryview] = []
        self._size = 0

    def put(self, at: int, row: np.void, bufs: Buffers) -> None:
        """Put a row, and its bytes from `bufs`, at place `at`. They are copied once, at the end."""
        *names, buf, payload, payload_size, key, key_size, headers, headers_size = row.item()
        data = memoryview(bufs[buf])
        packed: list[int] = []  # plain numbers: access to a numpy field is ten times slower
        for start, size in ((payload, payload_size), (key, key_size), (headers, headers_size)):
            packed += self._size, size
            self._parts.append(data[start : start + size])
            self._size += size
        self._rows[at] = (*names, 0, *packed)

    def packed_rows(self) -> WholeRows:
        """Return all rows."""
        return WholeRows(self._rows, b"".join(self._parts))


def find_in_run(
    run: Run, hashes: U64, topic: U32, keys: Binary
) -> tuple[npt.NDArray[np.intp], RowArray]:
    """Return (number of the key, row) of a run's timers with the keys, pending or not.

    Valid are due, seq, topic, and the sizes of payload and key.

    Raises:
        CorruptFileError: the key file or a key doesn't verify.
    """
    if run.keys is None:
        return np.empty(0, np.intp), np.empty(0, ROW)
    number, entries = run.keys.find(hashes)
    if not len(number):  # the usual case
        return number, np.empty(0, ROW)
    ends = np.cumsum(keys.sizes, dtype=np.int64)[number]
    starts = ends - keys.sizes[number]
    parts = list(zip(entries["key_at"].tolist(), entries["key_size"].tolist(), strict=True))
    same = entries["topic"] == topic[number]
    wanted = zip(starts.tolist(), ends.tolist(), strict=True)
    for at, (data, (start, end)) in enumerate(zip(run.read_parts(parts), wanted, strict=True)):
        if not same[at] or data != keys.blob[start:end]:
            same[at] = False
            _check_key(run, entries[at], data)
    return number[same], _rows_of(entries[same])


def _check_key(run: Run, entry: np.void, key: bytes) -> None:
    """Check the key of a row against its hash, which is its checksum."""
    sizes = np.array([len(key)], np.uint32)
    [hashed] = run.hasher(np.array([entry["topic"]], np.uint32), Binary(sizes=sizes, blob=key))
    if hashed != entry["hash"]:
        why = "the key does not match its hash in the key file"
        raise CorruptFileError(run.path, int(entry["key_at"]), why)


def _rows_of(entries: Entries) -> RowArray:
    rows = np.zeros(len(entries), ROW)
    for name in ("due_ms", "seq", "topic", "payload_size", "key_size"):
        rows[name] = entries[name]
    return rows


def read_rows(
    runs: Sequence[Run], finder: Finder, due_ms: I64, seq: U64, to: Packer, places: Sequence[int]
) -> None:
    """Put the rows of n timers, all of which are in runs, with their bytes at `places`.

    Raises:
        CorruptFileError: a batch doesn't verify.
    """
    left = np.ones(len(seq), np.bool_)
    for run in runs:
        batches = run.batches_of(due_ms, seq)
        inside = left & may_contain(run.meta, due_ms, seq) & (batches < len(run))
        for at in np.flatnonzero(inside).tolist():
            head = finder.head(run, int(batches[at]))
            place = find_one(head.due_ms, head.seq, due_ms.item(at), seq.item(at))
            if place >= 0 and head.topic[place] != TOMBSTONE:
                rows, data = run.rows(head, place, place + 1)
                to.put(places[at], rows[0], {0: data})
                left[at] = False
    assert not left.any(), (due_ms[left], seq[left])
