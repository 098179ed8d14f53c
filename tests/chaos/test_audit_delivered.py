"""Found: messages that reach a consumer with free hands long after they fired."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit.rules.late_rules import EXCUSES, deliveries
from chaos.audit.rules.queries import BOUNDS
from chaos.audit.rules.verdict import Clocks
from chaos.history import history
from chaos.oracle import tables
from chaos.oracle.group_story import ENDED
from tests.chaos.evidence import evidence_of

pytestmark = pytest.mark.spark

ERROR_MS = 100
FIRED_MS = 1_000_000
LATE_MS, HELD_MS = BOUNDS["late_ms"], BOUNDS["held_ms"]
LATE = FIRED_MS + LATE_MS + ERROR_MS + 50
"""When a message that fired at FIRED_MS comes too late, though a few came before it."""
EXCUSED = [(0, 1000), (3_000_000, 3_050_000)]
_OFFSETS = count()


class World:
    """Lines and tables under construction; each case has a topic of its own."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.tables: dict[str, list[dict[str, Any]]] = {name: [] for name in tables.STORY}
        self.topic = ""

    def say(self, op: str, client: str = "c", group: str = "g", **fields: Any) -> None:
        line = {"op": op, "client": client, "topic": self.topic, "group": group}
        self.lines.append(line | fields)

    def deliver(self, at_ms: int, *, fired_ms: int = FIRED_MS, n: int = 1, **more: Any) -> int:
        """Tell of messages that come together, each acked at once unless `acked_ms` is None."""
        acked_ms = more.pop("acked_ms", at_ms + 1)
        offsets = [next(_OFFSETS) for _ in range(n)]
        client = more.pop("client", "c")
        attempts, fired_at_ms = n * [more.pop("attempt", 1)], n * [fired_ms]
        self.say("deliver", client, received_ms=at_ms, offsets=offsets, attempts=attempts,
                 fired_at_ms=fired_at_ms)  # fmt: skip
        if acked_ms is not None:
            self.say("ack", client, start_ms=at_ms, end_ms=acked_ms, offsets=offsets)
        return offsets[0]

    def back(self, offset: int, at_ms: int, not_before_ms: int = 0) -> None:
        """Let the log say that a first attempt came back."""
        slot = {"topic": self.topic, "group": "g", "queue_offset": offset}
        how = {"attempts": 1, "why": ENDED, "not_before_ms": not_before_ms, "return_index": 1}
        self.tables["returns"].append(slot | how | {"returned_at_ms": at_ms})


def free(world: World) -> None:
    world.deliver(FIRED_MS - 1)
    world.deliver(LATE)


def never_given_before(world: World) -> None:
    world.say("open", start_ms=FIRED_MS - 1)
    world.deliver(LATE)


def pipelined(world: World) -> None:
    """Every message comes a minute late, and one comes each second."""
    for second in range(120):
        at_ms = FIRED_MS + 1000 * second
        world.deliver(at_ms, fired_ms=at_ms - 60_000)


def long_after_an_excuse(world: World) -> None:
    world.deliver(EXCUSED[1][0] + 60_100 + LATE_MS, fired_ms=EXCUSED[1][0] - 1)
    world.deliver(EXCUSED[1][0] - 1, fired_ms=EXCUSED[1][0] - 1)


def long_after_it_came_back(world: World) -> None:
    offset = world.deliver(FIRED_MS, acked_ms=FIRED_MS)
    world.back(offset, FIRED_MS + 1)
    world.say("deliver", received_ms=LATE + 1, offsets=[offset], attempts=[2],
              fired_at_ms=[FIRED_MS])  # fmt: skip


def in_order_with_free_hands(world: World) -> None:
    world.tables["groups"].append({"topic": world.topic, "group": "g", "type": "failover"})
    world.deliver(FIRED_MS - 1, client="other")
    world.deliver(LATE)


def another_client_is_busy(world: World) -> None:
    """In a shared group without a limit that is no reason."""
    world.deliver(FIRED_MS - 1, client="other", acked_ms=LATE)
    world.deliver(FIRED_MS - 1)
    world.deliver(LATE)


def soon(world: World) -> None:
    world.deliver(FIRED_MS - 1)
    world.deliver(FIRED_MS + LATE_MS + ERROR_MS)


def in_an_excuse(world: World) -> None:
    world.deliver(EXCUSED[1][0] - 60_000, fired_ms=EXCUSED[1][0] - 60_000)
    world.deliver(EXCUSED[1][0] + 1, fired_ms=EXCUSED[1][0] - 60_000)


def opened_late(world: World) -> None:
    world.deliver(FIRED_MS - 1)
    world.say("open", start_ms=LATE - 10)
    world.deliver(LATE)


def sought(world: World) -> None:
    world.deliver(FIRED_MS - 1)
    world.say("seek", client="admin", start_ms=LATE - 20, end_ms=LATE - 10)
    world.deliver(LATE)


def busy(world: World) -> None:
    world.deliver(FIRED_MS - 1, acked_ms=LATE - 10)
    world.deliver(LATE)


def never_acks(world: World) -> None:
    world.deliver(LATE - HELD_MS + 10, fired_ms=LATE - HELD_MS, acked_ms=None)
    world.deliver(LATE)


def backlog(world: World) -> None:
    world.deliver(FIRED_MS - 1)
    for part in range(4):  # all of it fired together
        world.deliver(LATE + part * (LATE_MS + ERROR_MS) - 100, n=LATE_MS + ERROR_MS + 100)


def delayed(world: World) -> None:
    offset = world.deliver(FIRED_MS)
    world.back(offset, FIRED_MS + 1, not_before_ms=LATE - 10)
    world.say("deliver", received_ms=LATE, offsets=[offset], attempts=[2], fired_at_ms=[FIRED_MS])


def carried(world: World) -> None:
    world.deliver(FIRED_MS - 1)
    offset = world.deliver(LATE)
    slot = {"topic": world.topic, "queue_offset": offset}
    world.tables["carried"].append(slot | {"ended_at_ms": LATE - 10})


def another_client_keeps_the_order(world: World) -> None:
    world.tables["groups"].append({"topic": world.topic, "group": "g", "type": "key_shared"})
    world.deliver(FIRED_MS - 1, client="other", acked_ms=LATE - 10)
    world.deliver(LATE)


def put_off_in_order(world: World) -> None:
    world.tables["groups"].append({"topic": world.topic, "group": "g", "type": "exclusive"})
    first = world.deliver(FIRED_MS - 1, acked_ms=None)
    world.say("nack", start_ms=FIRED_MS, end_ms=FIRED_MS, offsets=[first], delay_ms=LATE_MS + 100)
    world.deliver(LATE)


def another_client_has_all_that_may_be_in_flight(world: World) -> None:
    limit = {"topic": world.topic, "group": "g", "max_in_flight": 1}
    world.tables["settings"].append(limit)
    world.deliver(FIRED_MS - 1, client="other", acked_ms=LATE - 10)
    world.deliver(LATE)


def paced(world: World) -> None:
    world.tables["rates"].append({"topic": world.topic, "from_ms": 0, "topic_rate": 1})
    world.deliver(FIRED_MS - 1)
    world.deliver(LATE)


FOUND: dict[Callable[[World], None], int] = {
    free: 1,
    never_given_before: 1,
    pipelined: 120,
    long_after_an_excuse: 1,
    long_after_it_came_back: 1,
    in_order_with_free_hands: 1,
    another_client_is_busy: 1,
}
JUDGED = (soon, opened_late, sought, delayed, carried)
"""They waited for a reason that is known to its end."""
EXPLAINED = (
    in_an_excuse, busy, never_acks, backlog, another_client_keeps_the_order, put_off_in_order,
    another_client_has_all_that_may_be_in_flight, paced,
)  # fmt: skip
"""They waited long, and by how much that is too long nobody knows."""


def frames(spark: SparkSession, world: World) -> tuple[DataFrame, dict[str, DataFrame]]:
    story = {
        name: spark.createDataFrame(
            [tuple(row.get(field) for field in schema.names) for row in world.tables[name]],
            from_arrow_schema(schema),
        )
        for name, schema in tables.STORY.items()
    }
    columns = [each.split()[0].strip("`") for each in history.SCHEMA.split(", ")]
    rows = [tuple(line.get(name) for name in columns) for line in world.lines]
    return spark.createDataFrame(rows, history.SCHEMA), story


@pytest.mark.long  # late deliveries are audited twice
def test_message_that_comes_late_to_free_hands_is_found_and_no_other(spark: SparkSession) -> None:
    world = World()
    for case in (*FOUND, *JUDGED, *EXPLAINED):
        world.topic = case.__name__
        case(world)
    lines, story = frames(spark, world)
    story["excuses"] = spark.createDataFrame(EXCUSED, EXCUSES)
    evidence = evidence_of(lines, story, [], Clocks(0, ERROR_MS))
    violations, figures = deliveries(evidence)
    rows = violations["delivered_late"].groupBy("topic").count().collect()
    assert {row["topic"]: row["count"] for row in rows} == {
        case.__name__: n for case, n in FOUND.items()
    }
    assert figures["long"] > figures["unjudged"] >= len(EXPLAINED)
    evidence = evidence_of(lines, story, [], Clocks(0, None))
    assert deliveries(evidence) == ({}, {"long": 0, "unjudged": 0})
