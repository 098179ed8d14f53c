"""Files of a node for the audit."""

from collections.abc import Container
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit.rules import file_rules
from chaos.audit.rules.findings import Findings
from chaos.history.history import RunFolder
from chaos.oracle import tables
from tests.chaos.world import write_log
from tests.timer.machines import START_MS, Log
from tests.timer.node_files import frame_of
from timer.files.disk import RealDisk
from timer.model.units import LogIndex
from timerspark.log.segment_files import Piece, segments

FAR_MS = START_MS + 10**9


DISK = RealDisk()


def tell(run: RunFolder, log: Log, names: list[str]) -> None:
    """Write nodes' logs, and the tale of one."""
    frames = [frame_of(log, at) for at in range(len(log.entries))]
    for name in names:
        write_log(run.root / name / "log", frames)
    piece = Piece(segments(run.root / names[0] / "log"), LogIndex(1), LogIndex(len(frames)))
    tables.replay([piece], run.root / "tale", run.root / "spill")


def judged(
    spark: SparkSession, run: RunFolder, lost: Container[str] = (), end: int = 99, most: int = 3
) -> tuple[dict[str, Any], Findings]:
    story = {
        name: spark.read.schema(from_arrow_schema(schema)).parquet(str(run.root / "tale" / name))
        for name, schema in tables.STORY.items()
    }
    states = file_rules.states_within(run, lost=lost, end=end)
    findings = Findings(most)
    return file_rules.judge_files(findings, run, story, states), findings
