"""What nodes' runs hold, as a Spark table: `spark.read.format("timerstate").load(run_folder)`.

A node's newest manifest names its runs (timer/run.py), and says after which entry, and beyond which
fire position, they hold what is pending. One partition per run; of these rows

    node, index (the manifest's), seq, due_ms, weight: 1, a timer; -1, that it is not pending any
    more, though it lies in another run; damage: why a file can't be read, and all else is null

which are of topics that are there, so that what is pending is what has weight 1 in all. Files are
read as Arrow's, by pyarrow, and held against the manifest's checksum: of production no more than
the formats is shared.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from chaos.history import Run
from timer import manifest
from timer.aside import MASK
from timer.columns import TOMBSTONE
from timer.disk import RealDisk
from timer.errors import CorruptFile, UnknownVersion
from timer.order import START, Position
from timer.run import RunMeta

ROWS: Final = "node STRING, index BIGINT, seq BIGINT, due_ms BIGINT, weight INT, damage STRING"

_READ_SIZE: Final = 1 << 20
_TYPES: Final = (pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.int32(), pa.string())


@dataclass(frozen=True, slots=True)
class Held:
    """What a node's newest manifest says."""

    node: str
    index: int = 0
    """The last entry that is in it."""
    folder: Path = Path()
    """Of its runs."""
    runs: tuple[RunMeta, ...] = ()
    position: Position = START
    topics: bytes = b""
    """Ids of those that are there, u32."""
    damage: str = ""
    """Why it can't be read, and the rest is not known."""


@dataclass
class RunFile(InputPartition):
    """One run of one node; None: what its manifest says is all."""

    held: Held
    meta: RunMeta | None


def held(run: Run) -> Iterator[Held]:
    """Yield what each node's manifest says.

    A node that has none yet, or whose state is not in the folder, is left out.
    """
    for node, data in run.data().items():
        folder = data / "state"
        try:
            if (said := manifest.read(RealDisk(), folder)) is None:
                continue
            runs = tuple(RunMeta.unpack(fields) for fields in said["runs"])
        except (CorruptFile, UnknownVersion) as error:
            yield Held(node, damage=str(error))
            continue
        yield Held(
            node,
            said["index"],
            folder / manifest.RUN_DIRECTORY,
            runs,
            Position(*said["fire_position"]),
            np.array([topic["id"] for topic in said["topics"]], np.uint32).tobytes(),
        )


class TimerState(DataSource):
    """The format "timerstate"."""

    @classmethod
    def name(cls) -> str:
        """Return the name that `spark.read.format` knows it by."""
        return "timerstate"

    def schema(self) -> str:
        """Return the columns."""
        return ROWS

    def reader(self, schema: StructType) -> "TimerStateReader":
        """Return what reads the runs."""
        del schema
        return TimerStateReader(self.options)


class TimerStateReader(DataSourceReader):
    """Reads runs; in Spark's Python workers."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._path = options["path"]

    def partitions(self) -> list[InputPartition]:
        """Return the runs of all nodes' newest manifests; those that can't be read once."""
        return [
            RunFile(each, meta)
            for each in held(Run(Path(self._path)))
            for meta in (each.runs if not each.damage else (None,))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one run's rows, or its damage."""
        if not isinstance(partition, RunFile):
            return  # so Spark says that there is none
        of, meta = partition.held, partition.meta
        if meta is None:
            yield _batch([of.node], [of.index], [None], [None], [None], [of.damage])
            return
        try:
            check(of.folder / meta.name, meta)
        except (OSError, CorruptFile) as error:
            yield _batch([of.node], [of.index], [None], [None], [None], [str(error)])
        else:
            yield from _rows(of, of.folder / meta.name)


def check(path: Path, meta: RunMeta) -> None:
    """Read a run whole.

    Raises:
        CorruptFile: it is not what the manifest names.
        OSError: it can't be read.
    """
    crc32 = 0
    with path.open("rb") as file:
        while data := file.read(_READ_SIZE):
            crc32 = zlib.crc32(data, crc32)
        size = file.tell()
    if (size, crc32) != (meta.size, meta.crc32):
        why = f"{size} bytes, CRC-32 {crc32:08x}; the manifest says {meta.size}, {meta.crc32:08x}"
        raise CorruptFile(path, 0, why)


def _rows(of: Held, path: Path) -> Iterator[pa.RecordBatch]:
    topics, (due_at, seq_at) = np.frombuffer(of.topics, np.uint32), of.position
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as batches:
        for number in range(batches.num_record_batches):
            batch = batches.get_batch(number)
            due, seq, requested, topic = (
                batch.column(name).to_numpy() for name in ("due_ms", "seq", "requested_ms", "topic")
            )
            grave = topic == TOMBSTONE
            there = np.isin(np.where(grave, requested, topic), topics)
            there &= (due > due_at) | ((due == due_at) & (seq > np.uint64(seq_at)))
            n = int(there.sum())
            yield _batch(
                pa.repeat(of.node, n),
                np.full(n, of.index, np.int64),
                seq[there].astype(np.int64),
                due[there] & MASK,  # what is held lies beyond all dues
                np.where(grave[there], -1, 1).astype(np.int32),
                pa.nulls(n, pa.string()),
            )


def _batch(*columns: Any) -> pa.RecordBatch:
    arrays = [pa.array(each, kind) for each, kind in zip(columns, _TYPES, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=[each.split()[0] for each in ROWS.split(", ")])


def register(spark: SparkSession) -> None:
    """Make the format known to a session."""
    spark.dataSource.register(TimerState)
