"""The audit of topics that are deleted, limited and ruled: honest ones, and planted lies."""

import pytest
from pyspark.sql import SparkSession

from chaos.audit.rules.findings import Findings
from tests.chaos.told_lies import Audited

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


VIOLATIONS = {
    "ack_lost": 1, "phantom": 1, "lost": 1, "quota_exceeded": 4, "delete_untrue": 1,
    "policy_lost": 3, "policy_untrue": 3,
}  # fmt: skip
"""What the audit says of it."""


def test_offenders_are_all_counted_and_the_first_collected(spark: SparkSession) -> None:
    columns = "at BIGINT, topic STRING"
    rows = spark.createDataFrame([(9, "a"), (7, "c"), (8, "b"), (7, "b")], columns)
    found = {"one": rows, "none": rows.limit(0), "two": rows.where("at = 9")}
    findings = Findings(3)
    findings.add(found)
    assert findings.violations == {"one": 4, "two": 1}
    assert [tuple(row.values()) for row in findings.offenders] == [
        ("one", 7, "b"), ("one", 7, "c"), ("one", 8, "b"), ("two", 9, "a"),
    ]  # fmt: skip
    findings = Findings(1)
    findings.add(found, order=["topic"])
    assert [tuple(row.values())[1:] for row in findings.offenders] == [(9, "a"), (9, "a")]
    findings.note("two", [{"at": 1}])
    findings.note("none", [])
    assert findings.violations == {"one": 4, "two": 2}
    assert findings.offenders[-1] == {"verdict": "two", "at": 1}


def test_lies_about_topics_of_one_name_quotas_deletions_and_policies_are_found(
    audited: Audited,
) -> None:
    assert audited.named(audited.stories["lived"]) == {
        ("ack_lost", 6, "lived"), ("lost", 5, "lived"), ("phantom", 3, "lived")
    }  # fmt: skip
    quotas = audited.rules("quota_exceeded")
    assert [(each["quota"], each["there"], each["most"]) for each in quotas] == [
        ("pending_bytes_max", 24, 23),
        ("pending_max", 3, 2),
        ("ready_bytes_max", 0, 0),
        ("ready_max", 0, 0),
    ]
    [deletion] = audited.rules("delete_untrue")
    assert (deletion["told"], deletion["dropped"]) == (2, 1)
    policies = audited.rules("policy_lost")
    assert [(each["topic"], each["told"], each["logged"]) for each in policies] == [
        ("/", 2, 0),
        ("default/", 2, 0),
        ("lived", 2, 1),
    ]
