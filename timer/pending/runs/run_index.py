"""A run's indexes: its key file, and the number of rows per topic in each stripe.

The writer passes every batch as it is written. Rows are counted per topic and *stripe*. A stripe is
a number of adjacent batches, the smallest that keeps the table small. The table is part of the
run's `RunMeta`. So a count up to some time is a sum over stripes and a search of one more stripe.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal import isal_zlib

from timer.files.disk import Disk
from timer.model.columns import Binary, RowArray
from timer.pending.memory.key_index import KeyHasher
from timer.pending.runs.key_file import ENTRY, Entries, encode
from timer.pending.runs.run import TOPIC_ROWS, is_tombstone

TOPIC_ROWS_MAX: Final = 4_096
"""Elements of the table, except if one stripe alone has more topics."""


class RunIndexes:
    """The indexes of one run while it is written. See the module."""

    def __init__(self, hasher: KeyHasher) -> None:
        self._hasher = hasher
        self._entries: list[Entries] = []
        self._topics: list[npt.NDArray[np.void]] = []

    def add(self, rows: RowArray, keys: pa.BinaryArray, keys_at: int) -> None:
        """Add the next batch: its rows, its keys, and the position of its keys in the file."""
        self._topics.append(_topic_counts(len(self._topics), rows))
        keyed = np.flatnonzero(rows["key_size"])
        if not len(keyed):
            return
        mine = rows[keyed]
        offsets = np.frombuffer(keys.buffers()[1], np.int32, len(keys) + 1, 4 * keys.offset)
        blob = memoryview(keys.buffers()[2])[int(offsets[0]) : int(offsets[-1])]
        entries = np.zeros(len(keyed), ENTRY)
        for name in ("due_ms", "seq", "key_size", "topic", "payload_size"):
            entries[name] = mine[name]
        column = Binary(sizes=mine["key_size"].astype(np.uint32), blob=blob)
        entries["hash"] = self._hasher(mine["topic"], column)
        entries["key_at"] = keys_at + (offsets[:-1][keyed] - offsets[0]).astype(np.uint64)
        self._entries.append(entries)

    def write_keys(self, disk: Disk, path: Path, pace: Callable[[int], None]) -> tuple[int, int]:
        """Write the key file; only its name is not durable yet. Return (size, crc32); 0, 0: none.

        Raises:
            DiskFailedError: the process must stop.
        """
        if not self._entries:
            return 0, 0
        file = disk.open_append(path)
        crc32 = 0
        try:
            for piece in encode(np.concatenate(self._entries)):
                file.write([piece])
                file.sync()
                crc32 = isal_zlib.crc32(piece, crc32)
                pace(len(piece))
            return file.size, crc32
        finally:
            file.close()

    def topics(self) -> tuple[int, npt.NDArray[np.void]]:
        """Return the number of batches in a stripe, and the counts (dtype TOPIC_ROWS)."""
        stripe = 1
        counts = np.concatenate(self._topics)
        while len(counts) > TOPIC_ROWS_MAX and int(counts["stripe"][-1]) > 0:
            stripe *= 2
            counts = _with_double_stripes(counts)
        return stripe, counts


def _topic_counts(stripe: int, rows: RowArray) -> npt.NDArray[np.void]:
    """Return the rows of one stripe per topic. A tombstone counts for its target's topic."""
    dead = is_tombstone(rows)
    if (rows["topic"] == rows["topic"][0]).all() and not dead[0]:
        return np.array([(stripe, rows["topic"][0], len(rows), 0)], TOPIC_ROWS)
    topic = np.where(dead, rows["requested_ms"], rows["topic"])
    names, which = np.unique(topic, return_inverse=True)
    counts = np.zeros(len(names), TOPIC_ROWS)
    counts["stripe"] = stripe
    counts["topic"] = names
    counts["timers"] = np.bincount(which[~dead], minlength=len(names))
    counts["tombstones"] = np.bincount(which[dead], minlength=len(names))
    return counts


def _with_double_stripes(counts: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return the counts for stripes of twice the length."""
    key = (counts["stripe"].astype(np.uint64) >> np.uint64(1)) << np.uint64(32)
    names, which = np.unique(key | counts["topic"], return_inverse=True)
    out = np.zeros(len(names), TOPIC_ROWS)
    out["stripe"] = names >> np.uint64(32)
    out["topic"] = names & np.uint64(0xFFFF_FFFF)
    for name in ("timers", "tombstones"):
        out[name] = np.bincount(which, counts[name], len(names)).astype(np.uint32)
    return out
