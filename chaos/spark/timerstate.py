"""Pending timers of nodes' runs, as a table of Spark.

A node's newest manifest names its runs (timer/pending/runs/run.py). It gives the entry and the fire
position after which the runs hold the pending timers. Each run is one partition, with these
columns:

    node, seq, due_ms
    weight    1: a timer; -1: a tombstone, which cancels the timer in another run
    damage    the fault of the file; all other columns but `node` are null then

Rows of deleted topics are left out. The weights of a pending timer add up to 1, of a cancelled one
to 0. The key file of each run is checked, too; its damage has a row (state_files.py). pyarrow reads
the files, and the manifest's checksums are compared.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.history.history import RunFolder
from chaos.spark.state_files import batch_of, check_file, check_keys
from timer.files.disk import RealDisk
from timer.model.columns import TOMBSTONE
from timer.model.firing_order import START, Position
from timer.model.timer_errors import CorruptFileError, StorageError
from timer.pending.memory.held_rows import DUE_MASK, HELD_OFFSET_MS
from timer.pending.runs.run import TOPIC_ROWS, RunMeta
from timer.recovery import manifest

ROWS: Final = pa.schema(
    [
        ("node", pa.string()), ("seq", pa.int64()), ("due_ms", pa.int64()), ("weight", pa.int32()),
        ("damage", pa.string()),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ManifestState:
    """A node's newest manifest, as far as the audit needs it."""

    node: str
    index: int = 0
    """The last entry that is applied in it."""
    folder: Path = Path()
    """The folder of its runs."""
    runs: tuple[RunMeta, ...] = ()
    position: Position = START
    topics: frozenset[int] = frozenset()
    """Ids of the topics that exist."""
    blocks: tuple[tuple[Any, ...], ...] = ()
    """Blocks of their queues, as rows of state_files.BLOCKS."""
    secret: bytes = b""
    """Secret of the hashes in key files."""
    damage: str = ""
    """Reason why the manifest cannot be read; all other fields are defaults then."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """One run of one node, as its manifest describes it. Thousands are in memory at a time."""

    node: str
    damage: str = ""
    """Damage of the manifest; all other fields are defaults then."""
    path: Path = Path()
    meta: RunMeta | None = None
    """Without the places of its batches and topics."""
    position: Position = START
    """The fire position: rows at or before it have fired, except held ones."""
    topics: bytes = b""
    """Ids, u32, of the existing topics that have rows in the run."""
    secret: bytes = b""
    """Secret of the hashes in its key file."""


def node_states(run: RunFolder) -> Iterator[ManifestState]:
    """Yield each node's manifest.

    A node is left out if it has no manifest yet, if its state is not in the folder, or if a
    complete snapshot waits to replace its state.

    Raises:
        UnknownVersionError: another version wrote a manifest, or a run.
    """
    for node, data in run.data().items():
        folder = data / "state"
        if (data / "incoming" / "ready").exists():
            continue
        try:
            if (said := manifest.read(RealDisk(), folder)) is None:
                continue
        except CorruptFileError as error:
            yield ManifestState(node, damage=str(error))
            continue
        yield ManifestState(
            node,
            said["index"],
            folder / manifest.RUN_DIRECTORY,
            tuple(RunMeta.unpack(fields) for fields in said["runs"]),
            Position(*said["fire_position"]),
            frozenset(topic["id"] for topic in said["topics"]),
            tuple(
                (node, topic["name"], str(folder / manifest.SPILL_DIRECTORY), *block[:5])
                for topic in said["topics"]
                for block in topic["blocks"]
            ),
            said["key_secret"],
        )


def pending_rows(spark: SparkSession, states: Iterable[ManifestState]) -> DataFrame:
    """Return the rows of all runs that the manifests name (ROWS), a partition per run."""
    files = [file for state in states for file in run_files(state)]

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read_run(files[number])

    numbers = spark.range(len(files), numPartitions=max(1, len(files)))
    return numbers.mapInArrow(read, from_arrow_schema(ROWS))


def run_files(state: ManifestState) -> Iterator[RunFile]:
    """Yield the runs that a manifest names, or one item for a damaged manifest."""
    if state.damage:
        yield RunFile(state.node, state.damage)
    for meta in state.runs:
        counted = np.frombuffer(meta.topics, TOPIC_ROWS)["topic"]
        topics = [topic for topic in np.unique(counted).tolist() if topic in state.topics]
        yield RunFile(
            state.node,
            path=state.folder / meta.name,
            meta=replace(meta, batches=b"", topics=b""),
            position=state.position,
            topics=np.array(topics, np.uint32).tobytes(),
            secret=state.secret,
        )


def read_run(file: RunFile) -> Iterator[pa.RecordBatch]:
    """Yield one run's rows, and one row with its damage if it has any."""
    damage = file.damage
    if file.meta is not None:
        try:
            check_file(file.path, file.meta.size, file.meta.crc32)
            yield from _rows(file, file.meta)
            check_keys(file.path, file.meta, file.secret)
        except (OSError, StorageError, pa.ArrowException, KeyError) as error:
            damage = f"{file.path}: {error}"
    if damage:
        yield batch_of(ROWS, [file.node], [None], [None], [None], [damage])


def _rows(file: RunFile, meta: RunMeta) -> Iterator[pa.RecordBatch]:
    """Yield a run's rows that are still pending, with the columns ROWS.

    Raises:
        CorruptFileError: the rows are not in order, or their counts and ends differ from the
            manifest's.
    """
    topics = np.frombuffer(file.topics, np.uint32)
    rows = graves = 0
    ends: list[tuple[int, int]] = []
    with pa.memory_map(str(file.path)) as source, pa.ipc.open_file(source) as batches:
        for number in range(batches.num_record_batches):
            batch = batches.get_batch(number)
            names = "due_ms", "seq", "requested_ms", "topic"
            due, seq, requested, topic = (batch.column(name).to_numpy() for name in names)
            grave = topic == TOMBSTONE
            rows, graves = rows + len(due), graves + int(grave.sum())
            ends += [(int(due[at]), int(seq[at])) for at in (0, -1) if len(due)]
            if not _ascend(due, seq) or (len(ends) > 2 and ends[-2] <= ends[-3]):
                raise CorruptFileError(file.path, 0, f"batch {number} is not in order")
            there = np.isin(np.where(grave, requested, topic), topics)
            # A row after the fire position is pending. A row at or before it has fired, except a
            # held one: its stored due time has the HELD_OFFSET_MS bit.
            there &= _after(due & DUE_MASK, seq, *file.position) != (due >= HELD_OFFSET_MS)
            n = int(there.sum())
            yield batch_of(
                ROWS,
                pa.repeat(file.node, n),
                seq[there].astype(np.int64),
                due[there] & DUE_MASK,
                np.where(grave[there], -1, 1).astype(np.int32),
                pa.nulls(n, pa.string()),
            )
    found = (rows, graves, *ends[0], *ends[-1]) if ends else (0, 0)
    wanted = (meta.rows, meta.tombstones, *meta.first, *meta.last)
    if found != wanted:
        why = f"(rows, tombstones, first, last) = {found}; the manifest says {wanted}"
        raise CorruptFileError(file.path, 0, why)


def _ascend(due: npt.NDArray[np.int64], seq: npt.NDArray[np.uint64]) -> bool:
    later = (due[1:] > due[:-1]) | ((due[1:] == due[:-1]) & (seq[1:] > seq[:-1]))
    return bool(later.all())


def _after(
    due: npt.NDArray[np.int64], seq: npt.NDArray[np.uint64], due_at: int, seq_at: int
) -> npt.NDArray[np.bool_]:
    after: npt.NDArray[np.bool_] = (due > due_at) | ((due == due_at) & (seq > np.uint64(seq_at)))
    return after
