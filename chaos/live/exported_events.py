"""Exported events: what the live audit is told, as Parquet files in one folder.

    kind       seq       due_ms  at_ms            index  epoch    other columns
    SCHEDULED  the row's the row's  log's time    entry  entry's  topic, topic_id
    CANCELLED  its       its     log's time       entry  entry's  it was pending: cancelled
    RACED      its       its     log's time       entry  entry's  it may have come too late
    CLOCK      last one  -       log's time       entry  entry's  read_ms, since_ms, first_seq
    DIVERGED   -         -       log's time       entry  -        node, detail
    GIVEN      the id's  the id's  witness's time -      leader's topic, queue_offset, fired_at_ms,
                                                                  handed_out_ms
    REACH      -         -       witness's time   -      -        topic, read_ms
  of a topic, with topic and topic_id:
    MADE       -         -       log's time       entry  entry's  or was there as the export began
    WITNESSED  -         -       log's time       entry  entry's  the witness's group is there
    PAUSED     -         -       log's time       entry  entry's
    RESUMED    last one  -       log's time       entry  entry's  detail: its catch_up; read_ms
    LIVES      -         -       log's time       entry  entry's  ttl_ms; 0: it has none any more
    EXPIRED    -         -       log's time       entry  entry's  read_ms
    DELETED    -         -       log's time       entry  entry's

CLOCK says how far the log is exported: `at_ms` is its clock, `read_ms` the greatest read time of a
FIRE, `since_ms` when the present epoch began, `first_seq` the first timer that this export knows.
REACH says how far a witness was given a topic: what fired with a due time up to `read_ms` must
have reached it. RESUMED fixes what is overdue: scheduled by then, and due up to `read_ms`.
EXPIRED says that messages have expired, and may have if they were due up to `read_ms`. What does
not apply is 0 or "". Every row of a file became true before those of the files written after it by
the same process.

A file is written under a name that Spark does not see, then renamed: it is there whole or not at
all. It is kept for a while, for a job that is down, then removed.
"""

import enum
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KEEP_S: Final = 3600.0
"""How long a file is kept: the job may be down for that long."""
WITNESS_GROUP: Final = "live-audit"
RELEASE_MS: Final = 120_000
"""What was held has left within this after a resume, or a failover soon after it. It leaves in its
turn, sixteen topics at a time (docs/adr/0027): a FIRE moves a sweep on by up to 4,096 rows, and the
next FIRE follows at once."""


class EventKind(enum.IntEnum):
    """What a row tells; the table is above."""

    SCHEDULED = 1
    CANCELLED = 2
    RACED = 3
    CLOCK = 4
    DIVERGED = 5
    GIVEN = 6
    REACH = 7
    MADE = 8
    WITNESSED = 9
    PAUSED = 10
    RESUMED = 11
    LIVES = 12
    EXPIRED = 13
    DELETED = 14


OF_TOPICS: Final = (
    *(EventKind.MADE, EventKind.WITNESSED, EventKind.PAUSED, EventKind.RESUMED),
    *(EventKind.LIVES, EventKind.EXPIRED, EventKind.DELETED),
)
NUMBERS: Final = (
    "kind", "seq", "due_ms", "at_ms", "index", "epoch", "queue_offset", "fired_at_ms", "read_ms",
    "since_ms", "first_seq", "topic_id", "ttl_ms", "handed_out_ms",
)  # fmt: skip
TEXTS: Final = ("topic", "node", "detail")
ARROW: Final = pa.schema(
    [(name, pa.int64()) for name in NUMBERS] + [(name, pa.string()) for name in TEXTS]
)
SCHEMA: Final = ", ".join(
    [f"`{name}` BIGINT" for name in NUMBERS] + [f"{name} STRING" for name in TEXTS]
)
"""As Spark says it."""


class EventColumns(NamedTuple):
    """Some events of one kind, not yet a table: many small ones are cheap."""

    kind: EventKind
    n: int
    columns: dict[str, Any]
    """Each is an array of n, or one value for all; what is not named is 0 or ""."""


def table(told: Sequence[EventColumns]) -> pa.Table:
    """Return events as one table, in order."""
    ends = np.cumsum([each.n for each in told], dtype=np.int64).tolist()
    total = ends[-1] if ends else 0
    named = {name for each in told for name in each.columns}
    assert named <= {*ARROW.names}, named
    columns: dict[str, Any] = {name: np.zeros(total, np.int64) for name in NUMBERS}
    columns |= {name: np.full(total, "", object) for name in named.intersection(TEXTS)}
    for each, end in zip(told, ends, strict=True):
        span = slice(end - each.n, end)
        columns["kind"][span] = int(each.kind)
        for name, values in each.columns.items():
            columns[name][span] = values
    empty = pa.repeat(pa.scalar(""), total)
    arrays = [pa.array(columns[f.name], f.type) if f.name in columns else empty for f in ARROW]
    return pa.Table.from_arrays(arrays, schema=ARROW)


def rows(kind: EventKind, n: int = 1, **columns: Any) -> pa.Table:
    """Return n events of one kind as a table."""
    return table([EventColumns(kind, n, columns)])


class Outbox:
    """A folder of event files, written by one process under names of its own."""

    def __init__(self, folder: Path, *, keep_s: float = KEEP_S) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._keep_s = keep_s

    def put(self, name: str, told: Sequence[EventColumns]) -> Path:
        """Write one file, `<name>.parquet`, whole or not at all."""
        path = self._folder / f"{name}.parquet"
        hidden = self._folder / f".{name}.tmp"
        pq.write_table(table(told), hidden, use_dictionary=[*TEXTS, "kind"])
        hidden.rename(path)
        return path

    def names(self, prefix: str) -> list[str]:
        """Return the names of the files that begin so, in order."""
        return sorted(path.stem for path in self._folder.glob(f"{prefix}*.parquet"))

    def prune(self, prefix: str, now_s: float) -> None:
        """Remove the files of this process that were kept long enough, but never its last one."""
        for name in self.names(prefix)[:-1]:
            path = self._folder / f"{name}.parquet"
            if path.stat().st_mtime >= now_s - self._keep_s:
                return
            path.unlink()


def newest(folder: Path, prefix: str) -> pa.Table | None:
    """Return the last file whose name begins so; None: there is none."""
    names = sorted(path.name for path in folder.glob(f"{prefix}*.parquet"))
    return pq.read_table(folder / names[-1], schema=ARROW) if names else None


def write_whole(path: Path, text: str) -> None:
    """Replace a small file; a reader finds the old one or the new one."""
    hidden = path.with_name(f".{path.name}.tmp")
    with hidden.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(path)


def now_ms() -> int:
    """Return this machine's clock, in Unix milliseconds."""
    return time.time_ns() // 1_000_000


Columns = Mapping[str, Any]
"""Events as columns: numpy arrays of int64, and of objects for texts."""
