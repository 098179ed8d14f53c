"""The audit of series of recurring timers: planned lies in a whole run, and planned times."""

import random
from typing import Any

import pytest

from chaos.oracle.series_story import OneSeries, is_next
from cluster.api.cron_calendar import CronCalendar
from tests.chaos.told_lies import Audited
from timer.model.recurrence import Misfire, SeriesSpec, planned_time
from timer.model.units import UnixMs

VIOLATIONS = {
    "series_untrue": 1, "series_unasked": 1, "misplanned": 1, "planned_late": 1,
    "occurrence_untrue": 3, "occurrence_doubled": 1, "misdated": 1, "lost": 1,
}  # fmt: skip


@pytest.mark.spark
def test_each_lie_about_a_series_is_found_by_name(audited: Audited) -> None:
    story = audited.stories["recurred"]
    named = {
        (row["verdict"], row["seq"] - story.before)
        for row in audited.summary["offenders"]
        if row["topic"] == "recurred"
    }
    assert named == {("misdated", 4), ("lost", 5)}
    rows: dict[str, Any] = {}
    for row in audited.summary["other_offenders"]:
        rows.setdefault(row["verdict"], []).append(row)
    untrue = [row["seq"] - story.before for row in rows["occurrence_untrue"]]
    assert sorted(untrue) == [2, 3, 6]
    [twice] = rows["occurrence_doubled"]
    assert twice["number"] == 1
    assert [twice[name] - story.before for name in ("first", "last")] == [1, 6]
    [planned] = rows["misplanned"]
    assert (planned["key"], planned["number"]) == ("a", 3)
    assert [(row["key"], row["op"]) for row in rows["series_untrue"]] == [("a", "alter_series")]
    assert [(row["key"], row["op"]) for row in rows["series_unasked"]] == [("b", "create_series")]
    assert [row["key"] for row in rows["planned_late"]] == ["b"]


BEGIN_MS = 1_700_000_000_000
CALENDAR = CronCalendar()


def any_series(chance: random.Random) -> OneSeries:
    every = {
        "every_ms": chance.choice((1000, 1300)),
        "start_ms": BEGIN_MS + chance.randint(0, 4000),
    }
    cron = {
        "cron": chance.choice(("*/2 * * * * *", "* * * * *")),
        "zone": chance.choice(("", "Asia/Tokyo")),
    }
    spec = SeriesSpec(
        **chance.choice((every, cron)), misfire=chance.choice([*Misfire]),
        end_ms=chance.choice((0, BEGIN_MS + 30_000)), max_count=chance.choice((0, 3)),
    )  # fmt: skip
    last_ms = BEGIN_MS + chance.randint(-3000, 20_000)
    return OneSeries(1, b"k", spec, last_ms, 0, ended=chance.randint(0, 4))


def test_planned_time_may_have_an_offset_that_the_zone_first_has_in_the_days_before() -> None:
    """Greenland's first summer time at UTC-1 began on 30 March 2024, a day before the time."""
    cron, zone, after_ms = "30 43,51 23 L 3 *", "America/Godthab", 1_680_313_890_000
    one = OneSeries(1, b"k", SeriesSpec(cron=cron, zone=zone), after_ms, 0)
    planned_ms = CALENDAR.next_after(cron, zone, UnixMs(after_ms))
    assert planned_ms is not None
    assert is_next(one, planned_ms, after_ms)


def test_planned_times_of_a_leader_are_right_and_others_are_not() -> None:
    chance, planned = random.Random(7), 0
    for _ in range(3_000):
        one = any_series(chance)
        now_ms = one.last_ms + chance.randint(-3000, 20_000)
        planned_ms = planned_time(one.spec, one.last_ms, now_ms, CALENDAR)
        if one.spec.max_count and one.ended >= one.spec.max_count:
            planned_ms = None
        assert is_next(one, -1 if planned_ms is None else planned_ms, now_ms), (one, now_ms)
        if planned_ms is None:
            assert not is_next(one, now_ms // 60_000 * 60_000 + 600_000, now_ms), one
        else:
            assert not is_next(one, -1, now_ms), (one, now_ms)
            assert not is_next(one, planned_ms + 1, now_ms), (one, now_ms)
            assert not is_next(one, planned_ms + (one.spec.every_ms or 60_000), now_ms), one
            planned += 1
    assert planned > 1_000
