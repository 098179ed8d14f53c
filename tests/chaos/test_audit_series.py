"""The audit of series of recurring timers: planned lies in a whole run, and planned times."""

import random
from typing import Any

import pytest

from chaos.history.history import OpOutcome, payload_of
from chaos.oracle.series_story import OneSeries, is_next
from cluster.api.cron_calendar import CronCalendar
from tests.chaos.told_history import ToldHistory
from tests.chaos.told_lies import Audited
from tests.chaos.world import Story, id_of
from timer.entries.series_payloads import CreateSeries, DeleteSeries
from timer.model.recurrence import Misfire, SeriesSpec, planned_time
from timer.model.units import UnixMs

OK = OpOutcome.OK
MARK = 77_000_001
"""In the payload of all occurrences; no other timer has it."""
DUE_MS = {1: 1000, 2: 2000, 3: 3500, 4: 5100, 5: 5100, 6: 6000, 7: 7000}
PLANNED_MS = DUE_MS | {4: 4000, 5: 5000}
TOLD = {1: (1, 1), 2: (9, 4), 3: (9, 3), 4: (1, 4), 6: (1, 1)}
"""Number of an occurrence -> the series and the number that its message names."""


class Recurred(Story):
    """A series whose occurrences are not what its definition or its messages say.

    2 and 3 name another series, 2 and 6 other numbers. 3 is planned for no time of the series, 4 is
    due a second too late, 5 is not delivered, and 7 is cancelled by the deletion of the series: no
    filter cancelled it. Series "b" was created by no client, and waits for its occurrence without
    end.
    """

    def write(self) -> None:
        run, log = self.run, self.log
        topic = log.topic("recurred")
        group = log.group(topic, "g")
        spec = SeriesSpec(
            every_ms=1000,
            start_ms=self.ms(1000),
            misfire=Misfire.FIRE_ALL,
            payload=payload_of(MARK),
        )
        for key in (b"a", b"b"):
            log.series(CreateSeries(topic, key, spec, UnixMs(self.ms(0))))
        for number, due_ms in DUE_MS.items():
            planned_ms = self.ms(PLANNED_MS[number])
            at_ms = self.ms(DUE_MS.get(number - 1, 10))
            log.occurrence(1, number, planned_ms, self.ms(due_ms), at_ms=at_ms)
            if number < 7:
                log.fire(self.ms(due_ms))
        log.series(DeleteSeries(1), at_ms=self.ms(6500))
        log.reserve(topic, group, 9)
        log.ack(topic, group, [0, 1, 2, 3, 4, 5], at_ms=self.ms(9000))
        self._tell(ToldHistory(run, "recurred"))

    def _tell(self, h: ToldHistory) -> None:
        span: dict[str, Any] = {"span_ms": self.span_ms(0, 20), "outcome": OK}
        span |= {"topic": "recurred", "key": "a"}
        h.change("create_series", **span, said='{"every_ms": 1000, "misfire": "fire_all"}')
        h.change("alter_series", **span, said='{"paused": true}')  # the log has no such change
        h.change("delete_series", **span)
        h.change("cancel", **span | {"key": None}, changed=0, due_to_ms=self.ms(1))
        h.open("recurred", "g", start_ms=self.start_ms)
        for number, (series, told) in TOLD.items():
            fired_ms = self.ms(DUE_MS[number])
            h.deliver(
                "recurred", "g", received_ms=fired_ms + 1, handed_out_ms=fired_ms, epoch=1,
                lease_id=number, offsets=[number - 1], attempts=[1], marks=[MARK],
                ids=[id_of(fired_ms, self.mark(number))], fired_at_ms=[fired_ms],
                due_ms=[fired_ms], series=[series], occurrences=[told],
            )  # fmt: skip
            h.ack("recurred", "g", [number - 1], results=["ACKED"], epoch=1, lease_id=number,
                  span_ms=(fired_ms + 1, fired_ms + 2), outcome=OK)  # fmt: skip
        h.close()


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
