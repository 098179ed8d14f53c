"""A run of all workloads, audited: a long test, because its audit takes a minute of processor time.

`make test` plays the same run and checks its histories (test_workloads_played.py), and audits
written runs, honest and planted (test_audit_run.py, test_audit_rules.py).
"""

import pytest
from pyspark.sql import SparkSession

from chaos.audit import job
from chaos.audit.report.report import describe
from chaos.history.history import RunFolder
from tests.chaos.workload_deeds import SECONDS


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
def test_run_of_all_workloads_is_ok_by_the_audit(spark: SparkSession, played: RunFolder) -> None:
    report = job.audit(spark, played)
    assert report.ok, [*describe(report)]
    verdicts = report.summary["verdicts"]
    assert {"ok", "cancelled", "pending", "unknown_fired_once"} <= {*verdicts}
    assert {"replaced", "rescheduled", "rejected", "kept"} <= {*verdicts}
    assert {"dropped", "expired", "refused"} <= {*verdicts}
    assert report.summary["redelivered"] > 0
    assert report.summary["acks_unasked"] == 0
    said = report.summary["conservation"]["said"]
    assert said["nodes"] == 3
    assert min(said["counts"], said["digests"]) > SECONDS
