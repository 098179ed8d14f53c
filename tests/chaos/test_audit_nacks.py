"""The audit of nacks against planted faults: each is found, and honest ones are not blamed."""

from typing import Any

import pytest
from pyspark.sql import SparkSession

from chaos.audit.rules.queries import BOUNDS
from chaos.audit.rules.verdict import Clocks
from chaos.history import history
from chaos.history.history_check import check_line
from chaos.oracle.group_story import ENDED, NACKED, RECALLED
from tests.chaos.evidence import evidence_of

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

NACKED_MS = 1_000_000
UNTIL_MS = 2_000_000
SLOT = "topic STRING, `group` STRING, queue_offset BIGINT"
HEAD = {"client": "c", "topic": "t", "group": "g"}


class Played:
    """What clients and the log say of messages; each is nacked once, to come after a second."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = [{"op": "open", "start_ms": 0} | HEAD]
        self.nacks: list[tuple[Any, ...]] = []
        self.acks: list[tuple[Any, ...]] = []

    def nack(self, offset: int, at_ms: int = NACKED_MS, attempts: int = 1) -> None:
        self.told(offset)
        self.nacks.append(("t", "g", offset, attempts, NACKED, at_ms + 1_000, 7 + attempts))

    def told(self, offset: int, result: str = "NACKED") -> None:
        span = {"start_ms": 1, "end_ms": 2, "outcome": "ok", "delay_ms": 1_000}
        self.lines.append({"op": "nack", "offsets": [offset], "results": [result]} | HEAD | span)

    def given(self, offset: int, attempt: int, at_ms: int | None) -> None:
        columns = {"offsets": [offset], "ids": ["0" * 24], "marks": [offset], "due_ms": [5]}
        columns |= {"attempts": [attempt], "fired_at_ms": [6]}
        when = {"received_ms": 9, "epoch": 1, "handed_out_ms": at_ms}
        self.lines.append({"op": "deliver"} | HEAD | columns | when)

    def ack(self, offset: int) -> None:
        self.acks.append(("t", "g", offset, 1))

    def tables(self, spark: SparkSession) -> tuple[Any, dict[str, Any]]:
        assert [complaint for line in self.lines for complaint in check_line(line)] == []
        columns = f"{SLOT}, attempts BIGINT, why STRING, not_before_ms BIGINT, return_index BIGINT"
        return spark.createDataFrame(self.lines, history.SCHEMA), {
            "returns": spark.createDataFrame(self.nacks, columns),
            "acks": spark.createDataFrame(self.acks, f"{SLOT}, count BIGINT").selectExpr(
                "*", "1 AS ack_epoch", "1 AS attempts"
            ),
            "expired": spark.createDataFrame([], SLOT),
            "groups": spark.createDataFrame([], "topic STRING, `group` STRING, over BOOLEAN"),
        }

    def wrong(self, spark: SparkSession) -> dict[str, set[int]]:
        lines, story = self.tables(spark)
        found = evidence_of(lines, story, [], Clocks(UNTIL_MS)).violations("nacks")
        return {
            name: {row["queue_offset"] for row in rows.collect()} for name, rows in found.items()
        }


def test_planted_faults_of_nacks_are_found_and_nothing_else(spark: SparkSession) -> None:
    p = Played()
    for offset in range(1, 12):
        p.given(offset, 1, NACKED_MS - 5)
        p.nack(offset)
    p.given(1, 2, NACKED_MS + 1_000)  # at its time
    p.given(2, 2, NACKED_MS + 999)  # a millisecond early
    # 3: never again
    p.ack(4)  # acked after all, by its old holder
    p.given(5, 2, NACKED_MS + 5_000)
    p.nack(5, NACKED_MS + 6_000, attempts=2)  # and never again
    p.given(6, 2, NACKED_MS + 1_000)
    p.nack(6, NACKED_MS + 2_000, attempts=2)
    p.given(6, 3, NACKED_MS + 2_500)  # early, the second time
    p.given(7, 2, None)  # a client that does not write down when
    p.given(8, 1, NACKED_MS + 1)  # handed out before the nack, arrived twice: not its affair
    p.given(8, 2, NACKED_MS + 1_000)
    p.nacks = [nack for nack in p.nacks if nack[2] not in (9, 10)]
    p.given(9, 2, NACKED_MS + 1_000)  # told, but not in the log
    p.given(10, 3, NACKED_MS + 1)
    p.given(11, 2, NACKED_MS + 1_000)
    ends_ms = UNTIL_MS - BOUNDS["grace_ms"]
    p.nack(11, ends_ms - 1_000 + 1, attempts=2)  # its time is not long enough ago
    p.told(12, "ACK_LEASE_LOST")
    assert p.wrong(spark) == {
        "nacked_early": {2, 6},
        "nacked_lost": {3, 5},
        "nack_lost": {9, 10},
    }


def test_only_nacks_are_judged_and_each_message_is_named(spark: SparkSession) -> None:
    p = Played()
    p.given(1, 1, NACKED_MS)
    p.nack(1)
    p.given(1, 2, NACKED_MS)
    p.nack(2)
    p.told(3)
    for offset, why in ((4, ENDED), (5, RECALLED)):  # long ago, too, and none of them a nack
        p.nacks.append(("t", "g", offset, 1, why, 0, 8))
    assert p.wrong(spark) == {"nacked_early": {1}, "nacked_lost": {2}, "nack_lost": {3}}
