"""The audit of topics that are deleted, limited and ruled: honest ones, and planted lies."""

from typing import Any

import pytest
from pyspark.sql import SparkSession

from chaos.audit.rules.findings import Findings
from chaos.history.history import OpOutcome
from tests.chaos.told_history import ToldHistory
from tests.chaos.told_lies import Audited
from tests.chaos.world import Log, Story, id_of
from timer.entries.entry_frame import EntryKind
from timer.entries.policies import Scope, ScopePolicy, encode_policy
from timer.model.units import TopicId

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

OK = OpOutcome.OK
DUE_MS = {1: 100, 2: 100, 3: 900, 4: 300, 5: 300, 6: 300}
"""Of the timers, by their numbers, from when the story begins."""


def said(log: Log, topic: int, **fields: Any) -> None:
    policy = ScopePolicy(**fields)
    log.entry(EntryKind.POLICY, encode_policy(Scope("", TopicId(topic)), policy))


class Lived(Story):
    """A story in which topic "lived" is deleted, and made again.

    Its first life: 1 is acked, 2 was handed out, 3 pending. Its second one: 4, 5 and 6, all acked.
    """

    def __init__(self) -> None:
        self.quotas = {"pending_max": 3, "pending_bytes_max": 24, "ready_max": 1}
        """Of the second life, as it begins."""
        self.policies = 1
        self.scopes = ["lived"]
        self.told_pending = 1
        self.acked = [0, 1, 2]
        """In the second life, by the log."""
        self.given = {4: 0, 5: 1, 6: 2}
        """Number -> offset, in the second life, by the consumer."""

    def write(self) -> None:
        run, log = self.run, self.log
        first = log.topic("lived")
        self._schedule(first, [1, 2, 3], 10)
        group = log.group(first, "g")
        log.fire(self.ms(120))
        log.reserve(first, group, 2)
        log.ack(first, group, [0], at_ms=self.ms(130))
        log.delete_topic(first, at_ms=self.ms(140))
        second = log.topic("lived")
        said(log, second, **self.quotas)
        anew = log.group(second, "g")
        self._schedule(second, [4, 5, 6], 150)
        log.fire(self.ms(310))
        log.reserve(second, anew, 3)
        log.ack(second, anew, self.acked, at_ms=self.ms(330))
        with ToldHistory(run, "lived-producer") as h:
            for numbers, at_ms in (([1, 2, 3], 9), ([4, 5, 6], 149)):
                h.schedule([*map(self.mark, numbers)], ids=[*map(self.id, numbers)],
                           due_ms=[*map(self.due_ms, numbers)], topic="lived",
                           span_ms=self.span_ms(at_ms, at_ms + 3), outcome=OK)  # fmt: skip
            h.change("delete", span_ms=self.span_ms(139, 141), outcome=OK, topic="lived",
                     topic_id=int(first), pending=self.told_pending)  # fmt: skip
            for name in self.scopes * self.policies:
                h.change("policy", span_ms=self.span_ms(142, 144), outcome=OK, topic=name,
                         said='{"pending_max": 3}')  # fmt: skip
            for result, at_ms in (("NOT_FOUND", 145), ("ALREADY_FIRED", 1145)):
                h.change("cancel", ids=[self.id(3)], results=[result],
                         span_ms=self.span_ms(at_ms, at_ms + 1), outcome=OK)  # fmt: skip
        with ToldHistory(run, "lived-consumer") as h:
            h.open("lived", "g", start_ms=self.start_ms)
            self._deliver(h, 1, {1: 0, 2: 1}, 120)
            self._ack(h, 1, [0])
            self._deliver(h, 2, self.given, 310)
            self._ack(h, 2, [0, 1, 2])

    def due_ms(self, number: int) -> int:
        return self.ms(DUE_MS[number])

    def id(self, number: int) -> str:
        return id_of(self.due_ms(number), self.mark(number))

    def _schedule(self, topic: TopicId, numbers: list[int], at_ms: int) -> None:
        rows = [(self.due_ms(number), self.mark(number)) for number in numbers]
        self.log.schedule(topic, rows, at_ms=self.ms(at_ms))

    def _deliver(self, h: ToldHistory, lease_id: int, given: dict[int, int], at_ms: int) -> None:
        h.deliver("lived", "g", received_ms=self.ms(at_ms + 1), epoch=1, lease_id=lease_id,
                  offsets=[*given.values()], ids=[*map(self.id, given)],
                  marks=[*map(self.mark, given)], attempts=[1] * len(given),
                  fired_at_ms=[self.ms(at_ms)] * len(given),
                  due_ms=[*map(self.due_ms, given)])  # fmt: skip

    def _ack(self, h: ToldHistory, lease_id: int, offsets: list[int]) -> None:
        h.ack("lived", "g", offsets, results=["ACKED"] * len(offsets), epoch=1, lease_id=lease_id,
              span_ms=self.span_ms(6_500, 6_510), outcome=OK)  # fmt: skip


def lied() -> Lived:
    """Return the story with lies about the lives of a topic, its quotas and policies."""
    lived = Lived()
    lived.acked = [0, 1]  # an ack counts in the other life
    lived.given = {4: 0, 3: 1, 6: 2}  # the timer that was dropped comes, in the place of 5
    lived.quotas |= {"pending_max": 2, "pending_bytes_max": 23}
    lived.quotas |= {"ready_max": 0, "ready_bytes_max": 0}
    lived.told_pending = 2
    lived.policies = 2  # each is told twice
    lived.scopes = ["lived", "default/", "/"]
    return lived


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
