"""The audit of topics that are deleted, limited and ruled: honest ones, and planted lies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from chaos.audit import job
from chaos.audit.rules import beside
from chaos.history import history
from chaos.history.history import OpOutcome, RunFolder
from chaos.history.history_check import check
from tests.chaos.world import Log, id_of, write_log
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import GroupOp, Op
from timer.entries.policies import Scope, ScopePolicy, encode_policy
from timer.model.units import TopicId

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

OK = OpOutcome.OK
DUE_MS = {1: 100, 2: 100, 3: 900, 4: 300, 5: 300, 6: 300}
"""Of the marks, which are the seqs."""
IDS = {mark: id_of(due_ms, mark) for mark, due_ms in DUE_MS.items()}


def said(log: Log, topic: int, **fields: Any) -> None:
    policy = ScopePolicy(**fields)
    log.entry(EntryKind.POLICY, encode_policy(Scope("", TopicId(topic)), policy))


class Lived:
    """A run in which topic "t" is deleted, and made again.

    Its first life: 1 is acked, 2 was handed out, 3 pending. Its second one: 4, 5 and 6, all acked.
    """

    def __init__(self, root: Path) -> None:
        self.run = RunFolder(root)
        self.quotas = {"pending_max": 3, "pending_bytes_max": 24, "ready_max": 1}
        """Of the second life, as it begins."""
        self.policies = 1
        self.scopes = ["t"]
        self.told_pending = 1
        self.acked = [0, 1, 2]
        """In the second life, by the log."""
        self.given = {4: 0, 5: 1, 6: 2}
        """Mark -> offset, in the second life, by the consumer."""

    def write(self) -> RunFolder:
        log = Log()
        log.epoch(1)
        first = log.topic("t")
        log.schedule(first, [(100, 1), (100, 2), (900, 3)], at_ms=10)
        group = log.group(first, "g")
        log.fire(120)
        log.reserve(first, group, 2)
        log.ack(first, group, [0], at_ms=130)
        log.delete_topic(first, at_ms=140)
        second = log.topic("t")
        said(log, second, **self.quotas)
        anew = log.group(second, "g")
        log.schedule(second, [(300, 4), (300, 5), (300, 6)], at_ms=150)
        log.fire(310)
        log.reserve(second, anew, 3)
        log.op(GroupOp(Op.ACK, second, anew, np.array(self.acked, np.uint64)), 330)
        log.entry(EntryKind.CHECKPOINT, b"", at_ms=340)
        for node in ("n1", "n2", "n3"):
            write_log(self.run.root / node / "log", log.frames)
        with history.History(self.run, "producer") as h:
            for marks, at_ms in (([1, 2, 3], 9), ([4, 5, 6], 149)):
                h.schedule(marks, ids=[IDS[m] for m in marks], due_ms=[DUE_MS[m] for m in marks],
                           topic="t", span_ms=(at_ms, at_ms + 3), outcome=OK)  # fmt: skip
            h.change("delete", span_ms=(139, 141), outcome=OK, topic="t", topic_id=1,
                     pending=self.told_pending)  # fmt: skip
            for name in self.scopes * self.policies:
                h.change("policy", span_ms=(142, 144), outcome=OK, topic=name,
                         said='{"pending_max": 3}')  # fmt: skip
            h.cancel([IDS[3]], results=["NOT_FOUND"], span_ms=(145, 146), outcome=OK)
            h.cancel([IDS[3]], results=["ALREADY_FIRED"], span_ms=(1145, 1146), outcome=OK)
        with history.History(self.run, "consumer") as h:
            h.open("t", "g", start_ms=0)
            self._deliver(h, 1, {1: 0, 2: 1}, 120)
            self._ack(h, 1, [0])
            self._deliver(h, 2, self.given, 310)
            self._ack(h, 2, [0, 1, 2])
        assert [str(p) for path in self.run.histories.iterdir() for p in check(path)] == []
        return self.run

    def _deliver(
        self, h: history.History, lease_id: int, given: dict[int, int], at_ms: int
    ) -> None:
        h.deliver("t", "g", received_ms=at_ms + 1, epoch=1, lease_id=lease_id,
                  offsets=[*given.values()], ids=[IDS[mark] for mark in given], marks=[*given],
                  attempts=[1] * len(given), fired_at_ms=[at_ms] * len(given),
                  due_ms=[DUE_MS[mark] for mark in given])  # fmt: skip

    def _ack(self, h: history.History, lease_id: int, offsets: list[int]) -> None:
        h.ack("t", "g", offsets, results=["ACKED"] * len(offsets), span_ms=(6_500, 6_510),
              outcome=OK, epoch=1, lease_id=lease_id)  # fmt: skip


def _ack_counts_in_the_other_life(lived: Lived) -> None:
    lived.acked = [0, 1]


def _dropped_timer_comes(lived: Lived) -> None:
    lived.given = {4: 0, 3: 1, 6: 2}  # in the place of 5


def _quotas_are_less(lived: Lived) -> None:
    lived.quotas |= {"pending_max": 2, "pending_bytes_max": 23}
    lived.quotas |= {"ready_max": 0, "ready_bytes_max": 0}


def _deletion_counts_more(lived: Lived) -> None:
    lived.told_pending = 2


def _policies_are_not_in_the_log(lived: Lived) -> None:
    lived.policies = 2
    lived.scopes = ["t", "default/", "/"]


LIES = {
    _ack_counts_in_the_other_life: {"ack_lost": 1},
    _dropped_timer_comes: {"phantom": 1, "lost": 1},
    _quotas_are_less: {"quota_exceeded": 4},
    _deletion_counts_more: {"delete_untrue": 1},
    _policies_are_not_in_the_log: {"policy_lost": 3, "policy_untrue": 3},
}
"""What the audit says of each: of another one's nothing, so one audit is enough for all."""


def test_offenders_are_all_counted_and_the_first_collected(spark: SparkSession) -> None:
    columns = "at BIGINT, topic STRING"
    rows = spark.createDataFrame([(9, "a"), (7, "c"), (8, "b"), (7, "b")], columns)
    found = {"one": rows, "none": rows.limit(0), "two": rows.where("at = 9")}
    told = beside.judged({"violations": {"lost": 1}}, "rule", found, offenders_max=3)
    assert told["violations"] == {"lost": 1, "one": 4, "two": 1}
    assert told["verdict"] == "VIOLATED"
    assert [tuple(row.values()) for row in told["rule_offenders"]] == [
        ("one", 7, "b"), ("one", 7, "c"), ("one", 8, "b"), ("two", 9, "a"),
    ]  # fmt: skip
    told = beside.judged({"violations": {}}, "x", found, offenders_max=1, order=["topic"])
    assert [tuple(row.values())[1:] for row in told["x_offenders"]] == [(9, "a"), (9, "a")]
    fine = beside.judged({"violations": {}}, "x", {"none": rows.limit(0)}, offenders_max=1)
    assert fine == {"verdict": "OK", "violations": {}, "x_offenders": []}


def test_lies_about_topics_of_one_name_quotas_deletions_and_policies_are_found(
    spark: SparkSession, tmp_path: Path
) -> None:
    lived = Lived(tmp_path)
    for lie in LIES:
        lie(lived)
    found = job.audit(spark, lived.write()).summary
    expected = [said for violations in LIES.values() for said in violations.items()]
    assert len(dict(expected)) == len(expected)
    assert found["violations"] == dict(expected)
    assert (found["verdicts"]["ok"], found["delivered"]) == (3, 5)
    broken = found["rule_offenders"]
    quotas = [each for each in broken if each["verdict"] == "quota_exceeded"]
    assert [(each["quota"], each["there"], each["most"]) for each in quotas] == [
        ("pending_bytes_max", 24, 23),
        ("pending_max", 3, 2),
        ("ready_bytes_max", 0, 0),
        ("ready_max", 0, 0),
    ]
    [deletion] = [each for each in broken if each["verdict"] == "delete_untrue"]
    assert (deletion["told"], deletion["dropped"]) == (2, 1)
    policies = [each for each in broken if each["verdict"] == "policy_lost"]
    assert [(each["topic"], each["told"], each["logged"]) for each in policies] == [
        ("/", 2, 0),
        ("default/", 2, 0),
        ("t", 2, 1),
    ]
