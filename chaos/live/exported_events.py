"""Exported events: the input of the live audit, as Parquet files in one folder.

    kind       columns
    ENTRY      index, frame                   one committed entry of the log
    DIVERGED   index, node, detail            a node holds another entry there
    GIVEN      seq, due_ms, topic, queue_offset, fired_at_ms, handed_out_ms
                                              one message, as the witness received it
    REACH      topic, at_ms, read_ms          the witness has received all messages of the topic
                                              that were due by `read_ms`

`at_ms` is the witness's clock. `handed_out_ms` and `fired_at_ms` are the cluster's. Columns that do
not apply are 0 or "". The rows of a file became true before those of the files that the same
process wrote later.

A file is written under a name that Spark does not see, then renamed. So a reader finds a whole file
or none. The job moves the files that it has judged into the folder `judged`.
"""

import enum
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WITNESS_GROUP: Final = "live-audit"


class EventKind(enum.IntEnum):
    """The meaning of a row; the table is above."""

    ENTRY = 1
    DIVERGED = 2
    GIVEN = 3
    REACH = 4


NUMBERS: Final = (
    "kind", "index", "seq", "due_ms", "queue_offset", "fired_at_ms", "handed_out_ms", "at_ms",
    "read_ms",
)  # fmt: skip
TEXTS: Final = ("topic", "node", "detail")
ARROW: Final = pa.schema(
    [
        *((n, pa.int64()) for n in NUMBERS),
        *((n, pa.string()) for n in TEXTS),
        ("frame", pa.binary()),
    ]
)


class EventColumns(NamedTuple):
    """Some events of one kind."""

    kind: EventKind
    n: int
    columns: dict[str, Any]
    """Each is an array of n, or one value for all rows. Absent columns are 0 or ""."""


def table(told: Sequence[EventColumns]) -> pa.Table:
    """Return events as one table, in order."""
    empty: dict[str, Any] = dict.fromkeys(NUMBERS, 0) | dict.fromkeys(TEXTS, "") | {"frame": b""}
    parts = [pa.Table.from_pylist([], ARROW)]
    for each in told:
        columns = empty | {"kind": int(each.kind)} | each.columns
        arrays = [
            pa.array(value, field.type)
            if isinstance(value := columns[field.name], np.ndarray | list)
            else pa.repeat(pa.scalar(value, field.type), each.n)
            for field in ARROW
        ]
        parts.append(pa.Table.from_arrays(arrays, schema=ARROW))
    return pa.concat_tables(parts)


def put(folder: Path, name: str, told: Sequence[EventColumns]) -> None:
    """Write one file, `<name>.parquet`, whole or not at all."""
    hidden = folder / f".{name}.tmp"
    pq.write_table(table(told), hidden, use_dictionary=[*TEXTS, "kind"])
    hidden.rename(folder / f"{name}.parquet")


def now_ms() -> int:
    """Return this machine's clock, in Unix milliseconds."""
    return time.time_ns() // 1_000_000
