"""What is plainly fine is known by columns; whatever is odd about a timer makes it doubtful."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from chaos.audit.rules import plain_timers
from timer.model.columns import I64

MARKS = (1, 2, 3, 4)
DUE_MS = 1_000
STARTS = {"t": [0, 0], "silent": []}
"""Two groups, of topic t, were read from its beginning on."""

Rows = list[dict[str, Any]]
TEXTS = {"topic", "outcome", "id", "key", "told", "end", "group"}


def ints(*values: int) -> I64:
    return np.array(values, np.int64)


def ask(mark: int, **other: Any) -> dict[str, Any]:
    told = {"id": f"id {mark}", "told": "SCHEDULED", "answered_due_ms": DUE_MS + mark}
    row = {"mark": mark, "topic": "t", "outcome": "ok", "asked_due_ms": DUE_MS + mark, **told}
    row |= {"least_due_ms": None, "most_due_ms": None}
    return row | {"key": None, "existing_seq": None, "answered_seq": 100 + mark} | other


def fate(mark: int, **other: Any) -> dict[str, Any]:
    ended = {"end": "fired", "end_index": 9, "end_epoch": 1, "ended_at_ms": DUE_MS + mark + 3}
    row = {"mark": mark, "seq": 100 + mark, "topic": "t", "due_ms": DUE_MS + mark, **ended}
    row |= {"schedule_index": 7, "scheduled_at_ms": 5, "queue_offset": 10 + mark}
    return row | {"other_seq": None, "old_due_ms": None} | other


def delivery(mark: int, group: str | None = "g", **other: Any) -> dict[str, Any]:
    row = {"mark": mark, "seq": 100 + mark, "topic": "t", "group": group, "due_ms": DUE_MS + mark}
    row |= {"queue_offset": 10 + mark, "epoch": 1, "attempt": 1, "fired_at_ms": DUE_MS + mark + 3}
    return row | {"received_ms": DUE_MS + mark + (8 if group == "g" else 6)} | other


def honest() -> tuple[Rows, Rows, Rows]:
    """Return what is asked, in the log and given of MARKS: all fine."""
    given = [delivery(mark, group) for group in ("g", "h") for mark in reversed(MARKS)]
    return [ask(mark) for mark in MARKS], [fate(mark) for mark in MARKS], given


def table(rows: Rows, names: tuple[str, ...]) -> pa.Table:
    schema = pa.schema([(n, pa.string() if n in TEXTS else pa.int64()) for n in names])
    return pa.Table.from_pylist(rows, schema)


def facts(**other: Any) -> plain_timers.Facts:
    stretch = {"stretch": 0, "ack_epoch": 1, "attempts": 1}
    acked = [{"topic": "t", "group": group, **stretch} for group in ("g", "h")]
    known: dict[str, Any] = {
        "starts": {topic: ints(*first) for topic, first in STARTS.items()},
        "acked": table(acked, ("topic", "group", *stretch)),
        "named": ints(),
        "doubted": table([], ("topic", "queue_offset")),
        "disputed": ints(),
        "clock_error_ms": 10,
    }
    return plain_timers.Facts(**(known | other))


def sifted(
    asks: Rows, log: Rows, given: Rows, known: plain_timers.Facts, *crowded: int
) -> tuple[Rows, set[int], Any]:
    """Return the plain rows, the doubtful marks, and the seqs that were given by other marks."""
    told = (
        table(asks, plain_timers.ASKED),
        table(log, plain_timers.LOG),
        table(given, plain_timers.GIVEN),
    )
    found = plain_timers.sifted(*told, ints(*crowded), known)
    doubts = [*found.doubts.to_pylist()]
    marks = {row["mark"] for row in doubts} - {None}
    return found.plain.to_pylist(), marks, {row["seq"] for row in doubts} - {None}


def test_honest_timers_are_plain_with_all_that_the_verdict_table_says() -> None:
    rows, doubtful, foreign = sifted(*honest(), facts())
    assert (doubtful, foreign) == (set(), set())
    assert [row["mark"] for row in rows] == [*MARKS]
    said = ask(1) | fate(1)
    said |= {"verdict": "ok", "copies": 1, "deliveries": 2, "groups": 2, "received_ms": 1007}
    said |= {"from_topic": None}
    assert rows[0] == {name: said[name] for name in plain_timers.VERDICTS.names}


def test_nothing_is_plain_where_nothing_is() -> None:
    assert sifted([], [], [], facts()) == ([], set(), set())
    for at in range(3):
        asks, log, given = ([] if at == n else each for n, each in enumerate(honest()))
        rows, doubtful, _ = sifted(asks, log, given, facts())
        assert (rows, doubtful) == ([], {*MARKS})


def test_in_a_topic_that_nobody_read_nothing_has_to_be_given() -> None:
    rows, doubtful, _ = sifted([ask(1, topic="silent")], [fate(1, topic="silent")], [], facts())
    assert doubtful == set()
    assert [rows[0][name] for name in ("deliveries", "groups", "received_ms")] == [None] * 3


def test_a_key_is_doubtful_only_if_somebody_else_named_it() -> None:
    asks, log, given = honest()
    for at, key in ((0, "k1"), (1, "k2"), (3, "k3")):
        asks[at]["key"] = key
    rows, doubtful, _ = sifted(asks, log, given, facts(), 2, 99)
    assert [(row["mark"], row["key"]) for row in rows] == [(1, "k1"), (3, None), (4, "k3")]
    assert doubtful == {2}


@pytest.mark.parametrize(
    "odd",
    [
        *({"outcome": each} for each in ("unknown", "fail", None)),
        *({"told": each} for each in ("REPLACED", "KEPT", "REJECTED", None)),
        *({"existing_seq": 4}, {"topic": "other"}, {"topic": None}),
        *({"answered_seq": 103}, {"answered_seq": None}, {"answered_due_ms": DUE_MS + 3}),
        *({"answered_due_ms": None}, {"asked_due_ms": DUE_MS + 3}, {"mark": None}, {"mark": 9}),
        *({"least_due_ms": DUE_MS + 13}, {"most_due_ms": DUE_MS - 9}),
    ],
)
def test_an_odd_ask_makes_a_timer_doubtful(odd: dict[str, Any]) -> None:
    asks, log, given = honest()
    asks[1] |= odd
    rows, doubtful, _ = sifted(asks, log, given, facts())
    assert [row["mark"] for row in rows] == [1, 3, 4]
    assert doubtful == {2, odd.get("mark") or 2}


@pytest.mark.parametrize(
    "odd",
    [
        *({"end": end} for end in ("pending", "held", "cancelled", "dropped", "kept", None)),
        *({"seq": 103}, {"due_ms": DUE_MS + 3}, {"due_ms": DUE_MS + 1}, {"topic": "other"}),
        *({"other_seq": 4}, {"old_due_ms": 4}, {"ended_at_ms": DUE_MS + 1}, {"ended_at_ms": None}),
        *({"queue_offset": 13}, {"queue_offset": None}, {"mark": None}, {"mark": -1}, {"mark": 9}),
    ],
)
def test_an_odd_fate_makes_a_timer_doubtful(odd: dict[str, Any]) -> None:
    asks, log, given = honest()
    log[1] |= odd
    rows, doubtful, _ = sifted(asks, log, given, facts())
    assert [row["mark"] for row in rows] == [1, 3, 4]
    assert doubtful == {2, odd.get("mark") or 2}


def test_a_timer_that_all_say_fired_early_is_doubtful() -> None:
    asks, log, given = honest()
    log[1]["ended_at_ms"] = early = log[1]["due_ms"] - 1
    for row in given:
        if row["mark"] == 2:
            row["fired_at_ms"] = early
    assert sifted(asks, log, given, facts())[1] == {2}


@pytest.mark.parametrize(
    "odd",
    [
        *({name: 7} for name in ("seq", "queue_offset", "due_ms", "fired_at_ms")),
        *({"topic": "silent"}, {"topic": None}, {"group": None}, {"group": "g"}),
        *({"epoch": 2}, {"attempt": 2}),  # after the ack, or perhaps so
        {"received_ms": DUE_MS + 2 - 11},
        *({name: None} for name in ("seq", "epoch", "attempt", "received_ms", "mark")),
    ],
)
def test_an_odd_delivery_makes_a_timer_doubtful(odd: dict[str, Any]) -> None:
    asks, log, given = honest()
    given[6] |= odd
    assert (given[6]["mark"] or 2) == 2
    rows, doubtful, foreign = sifted(asks, log, given, facts())
    assert [row["mark"] for row in rows] == [1, 3, 4]
    assert doubtful == {2}
    assert foreign == ({7} if odd.get("seq") == 7 else set())


def test_clocks_are_believed_as_far_as_the_run_vouches_for_them() -> None:
    asks, log, given = honest()
    asks[0] |= {"least_due_ms": DUE_MS + 11, "most_due_ms": DUE_MS + 1}
    asks[1] |= {"least_due_ms": DUE_MS, "most_due_ms": DUE_MS + 2 - 10}
    given[5]["received_ms"] = DUE_MS + 3 - 10
    assert sifted(asks, log, given, facts())[1] == set()
    asks[0]["least_due_ms"] += 900
    asks[1]["most_due_ms"] -= 900
    given[5]["received_ms"] -= 900
    assert sifted(asks, log, given, facts())[1] == {1, 2, 3}
    assert sifted(asks, log, given, facts(clock_error_ms=None))[1] == set()


def test_what_is_there_twice_or_not_often_enough_is_doubtful() -> None:
    for at in range(3):
        rows = honest()
        rows[at].append(dict(rows[at][1]))
        assert sifted(*rows, facts())[1] == {rows[at][1]["mark"]}
        rows = honest()
        mark = rows[at].pop(1)["mark"]
        assert sifted(*rows, facts())[1] == {mark}


def test_a_message_before_a_groups_start_need_not_be_given_to_it() -> None:
    asks, log, given = honest()
    given = [row for row in given if not (row["mark"] == 1 and row["group"] == "h")]
    starts = {"t": ints(0, 12)}
    assert sifted(asks, log, given, facts(starts=starts))[1] == set()
    starts = {"t": ints(0, 11)}
    assert sifted(asks, log, given, facts(starts=starts))[1] == {1}
    assert sifted(asks, log, given, facts(starts={}))[1] == {*MARKS}


def test_facts_about_the_run_make_a_timer_doubtful() -> None:
    doubted = [{"topic": "t", "queue_offset": 13}, {"topic": "silent", "queue_offset": 12}]
    of = {"doubted": table(doubted, ("topic", "queue_offset"))}
    assert sifted(*honest(), facts(**of))[1] == {3}
    assert sifted(*honest(), facts(named=ints(50, 104)))[1] == {4}
    asks, log, given = honest()
    log[0]["schedule_index"], log[2]["end_index"] = 70, 90
    assert sifted(asks, log, given, facts(disputed=ints(70, 90)))[1] == {1, 3}


def test_a_seq_that_was_given_under_another_mark_is_handed_out() -> None:
    asks, log, given = honest()
    given.append(delivery(3) | {"mark": 999})
    rows, doubtful, foreign = sifted(asks, log, given, facts())
    assert [row["mark"] for row in rows] == [*MARKS]
    assert (doubtful, foreign) == ({999}, {103})
    # Once it is named, its timer is doubtful, and so there is nothing to hand out.
    rows, doubtful, foreign = sifted(asks, log, given, facts(named=ints(103)))
    assert (doubtful, foreign) == ({3, 999}, set())
