"""Recorded runs of measures: the audit finds the lies that are planted in their history."""

import asyncio
import copy
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from bench import bench_audit, delivery, failover, ingest
from bench.recording import SCHEMA
from bench.rig import new_rig
from chaos.audit import job
from chaos.history import history_check
from chaos.history.history import RunFolder

pytestmark = [pytest.mark.spark, pytest.mark.long]  # 160 s: a cluster, a failover, an audit

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The folder of short runs of several measures, with one kill of the leader."""
    folder = tmp_path_factory.mktemp("bench") / "run"
    with (
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner() as loop,
        new_rig(folder, loop, evidence=True) as rig,
    ):
        patch.setattr(delivery, "PRODUCERS", 2)
        patch.setattr(delivery, "WARM_UP_S", 0.0)
        patch.setattr(delivery, "SINGLE_UNRECEIVED_MAX", 2_000)
        patch.setattr(ingest, "CALLERS", 20)
        rig.within(60, delivery._end_to_end(rig, 0.2))
        delivery._one_by_one(rig, 0.1)
        rig.within(60, ingest._singles(rig, 0.1))
        rig.within(120, failover._failover(rig, 1))
    return RunFolder(folder)


def test_the_audit_finds_each_lie_and_nothing_else(spark: SparkSession, run: RunFolder) -> None:
    """A lost delivery, a doubled one, a timer without a request, another payload."""
    [history] = run.history_files()
    assert [*history_check.check(history)] == []
    lines = pq.read_table(history).to_pylist()
    schedules = [line for line in lines if line["op"] == "schedule"]
    sent = sum(len(line["marks"]) for line in schedules)
    confirmed = sum(len(line["marks"]) for line in schedules if line["outcome"] == "ok")
    lie(lines)
    pq.write_table(pa.Table.from_pylist(lines, SCHEMA), history)
    summary = job.audit(spark, run).summary
    assert summary["violations"] == {
        "lost": 1, "unmarked_redelivery": 1, "phantom": 1, "payload_untrue": 1
    }  # fmt: skip
    assert summary["not_looked_at"] == []
    assert 1_000 < confirmed <= summary["scheduled"] <= sent, "unanswered calls may count"
    assert summary["pending"] > 0, "of the single calls"
    fired = summary["scheduled"] - summary["pending"]
    assert summary["fired"] == fired == summary["delivered"] + 1
    assert summary["failovers"] >= 1
    assert summary["kills"] == 1


def lie(lines: Lines) -> None:
    """Change the history of the batches' topic: a delivery each is lost and doubled, and so on."""
    delivers = [line for line in lines if line["op"] == "deliver" and len(line["offsets"]) > 2]
    schedules = [line for line in lines if line["op"] == "schedule" and len(line["marks"]) > 2]
    lost, doubled = delivers[0], copy.deepcopy(delivers[1])
    keep(lost, slice(1, None))
    keep(doubled, slice(0, 1))
    lines.append(doubled)
    keep(schedules[0], slice(1, None))
    schedules[1]["payload_crcs"][0] ^= 1


def keep(line: dict[str, Any], which: slice) -> None:
    """Keep some elements of all lists of a line."""
    for name, value in line.items():
        if isinstance(value, list):
            line[name] = value[which]


@pytest.mark.parametrize(
    ("summary", "ok", "told"),
    [
        ({"verdict": "OK"}, True, "OK, 5 scheduled"),
        ({"verdict": "VIOLATED", "violations": {"lost": 2}}, False, "; 2 lost"),
        ({"verdict": "INCOMPLETE", "not_looked_at": ["x"]}, False, "; not judged: x"),
        (None, False, "failed: no java"),
    ],
)
def test_the_verdict_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    summary: dict[str, Any] | None,
    *,
    ok: bool,
    told: str,
) -> None:
    """The audit's command is replaced by one that only writes its summary."""
    counts = dict.fromkeys(bench_audit.SUMMARY_FIELDS[3:], 5)
    text = json.dumps({"violations": {}, "not_looked_at": [], **counts, **(summary or {})})
    script = tmp_path / "audit.py"
    script.write_text(
        "import sys; print('no java', file=sys.stderr); sys.exit(2)"
        if summary is None
        else f"import pathlib; at = pathlib.Path({str(tmp_path)!r}) / 'audit'; at.mkdir()\n"
        f"(at / 'summary.json').write_text({text!r})"
    )
    monkeypatch.setattr(bench_audit, "AUDIT", (sys.executable, str(script)))
    outcome = bench_audit.audit(tmp_path)
    assert outcome.ok == ok
    assert told in outcome.text()
