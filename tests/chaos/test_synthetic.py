"""Synthetic runs end to end: the audit finds every planted defect by its mark, and no other."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.testing import assertDataFrameEqual

from chaos.audit import job
from chaos.audit.rules.verdict import FINE, VIOLATIONS
from chaos.history.history import RunFolder
from tests.chaos.synthetic.synthetic_files import ids_of
from tests.chaos.synthetic.synthetic_world import (
    MOVE_EVERY,
    PLANTS,
    REJECT_EVERY,
    REPLACE_EVERY,
    UNANSWERED,
    SyntheticPlan,
    SyntheticWorld,
)
from tests.chaos.world import id_of
from tests.conftest import INTERPRETED, PARTS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]


def test_ids_are_those_of_timer_id() -> None:
    due, seq = np.array([5, 1_700_000_000_123]), np.array([1, (1 << 40) + 7])
    found = ids_of(due, seq).to_pylist()
    assert found == [id_of(d, s) for d, s in zip(due.tolist(), seq.tolist(), strict=True)]


def test_plan_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="misplaced"):
        SyntheticPlan(timers=1000, plant={"misplaced": 1})
    with pytest.raises(ValueError, match="timers = 100: must be at least 120"):
        SyntheticPlan(timers=100, plant={"lost": 1})
    with pytest.raises(ValueError, match=r"plant = {'lost': -3}: must be 1 or more of each"):
        SyntheticPlan(timers=1000, plant={"lost": -3})
    with pytest.raises(ValueError, match="nodes = 0: must be at least 1"):
        SyntheticPlan(timers=1000, nodes=0)
    with pytest.raises(ValueError, match=r"keyed = 1\.5: must be a share, 0 to 1"):
        SyntheticPlan(timers=1000, keyed=1.5)


@pytest.fixture
def compiled(spark: SparkSession) -> Iterator[SparkSession]:
    """The session with compiled queries and partitioned tables, as outside of tests."""
    for name in INTERPRETED:
        spark.conf.unset(name)
    spark.conf.set(PARTS, "2")
    yield spark
    for name, value in {**INTERPRETED, PARTS: "1"}.items():
        spark.conf.set(name, value)


@pytest.mark.long
def test_every_planted_defect_is_found_and_nothing_else(
    compiled: SparkSession, tmp_path: Path
) -> None:
    plant = dict.fromkeys(PLANTS, 2)
    plan = SyntheticPlan(
        timers=6_000, rows_per_tick=300, batch=40, spread=8, keyed=0.5, plant=plant,
        diverged_entry=True,
    )  # fmt: skip
    SyntheticWorld(tmp_path, plan).write()
    report = job.audit(compiled, RunFolder(tmp_path))
    planted = json.loads((tmp_path / "planted.json").read_text())
    expected = {row["mark"]: row["verdict"] for row in planted}
    assert {*expected.values()} - {*FINE} == {*VIOLATIONS}
    table = compiled.read.parquet(str(tmp_path / "audit/verdicts.parquet"))
    honest = ("ok", "cancelled", "replaced", "rescheduled", "rejected")
    told = table.where(~table.verdict.isin(*honest)).select("mark", "verdict").distinct()
    wanted = compiled.createDataFrame([*expected.items()], "mark BIGINT, verdict STRING")
    assertDataFrameEqual(told, wanted)
    named = {(row["mark"], row["id"], row["verdict"]) for row in table.collect()}
    with_ids = {(row["mark"], row["id"], row["verdict"]) for row in planted if row["id"]}
    no_id = (*UNANSWERED, "key_doubled", "conflict_untrue")
    assert len(with_ids) == 2 * (len(PLANTS) - len(no_id))
    assert with_ids <= named
    summary = report.summary
    assert summary["violations"]["diverged_entries"] == 1
    assert [(row["verdict"], row["node"]) for row in summary["other_offenders"]] == [
        ("diverged_entries", "n3")
    ]
    offenders = {row["mark"] for row in summary["offenders"]}
    assert offenders == {m for m, verdict in expected.items() if verdict in VIOLATIONS}
    # Timers that never reached the log, and timers that reached it twice.
    not_in_log = sum(plant[kind] for kind in ("lost", "unknown_not_fired", "refused"))
    changed = {end: summary[end] for end in ("replaced", "rescheduled", "rejected")}
    planted_too = {"replaced": 2, "rescheduled": 4, "rejected": 4}
    assert changed == {
        end: 6_000 // nth + planted_too[end]
        for end, nth in (
            ("replaced", REPLACE_EVERY), ("rescheduled", MOVE_EVERY), ("rejected", REJECT_EVERY)
        )
    }  # fmt: skip
    new = changed["replaced"] + changed["rescheduled"]
    assert summary["scheduled"] == 6_000 - not_in_log + plant["duplicate_fire"] + new
    assert summary["conservation"]["checkpoints"] == 2
    assert summary["replayed"]["node"] in ("n1", "n2")
