"""Series on the leader: their next times, exactly once, over promotions, outages and pauses."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.calls import calls_of
from tests.timer.leading import Play
from tests.timer.machines import queue_of
from timer.entries.entry_frame import EntryKind
from timer.entries.series_payloads import ENDED
from timer.leader.intake.admission import UNBOUNDED
from timer.leader.intake.count_limits import CountLimits
from timer.leader.intake.occurrence_planner import (
    CALLS_MAX,
    NoCalendar,
    OccurrencePlanner,
    interval_times,
)
from timer.leader.leader import LeaderConfig
from timer.model.recurrence import Misfire, SeriesSpec, planned_time, planned_times
from timer.model.timer_errors import (
    DiskFullError,
    InvalidRequestError,
    LimitReachedError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
)
from timer.model.units import MonoMs, Now, TopicId, UnixMs
from timer.state.apply_results import SeriesApplied
from timer.state.series_table import SERIES, SeriesTable, SeriesView

TEN_S = SeriesSpec(every_ms=10_000, payload=b"p")


class Quarters:
    """A calendar whose only expression occurs every 15 seconds, and whose only zone is Z."""

    def check(self, cron: str, zone: str) -> None:
        if zone != "Z":
            raise InvalidRequestError("zone", zone, "must be Z")

    def next_after(self, cron: str, zone: str, after_ms: UnixMs) -> UnixMs | None:
        self.check(cron, zone)
        return UnixMs((after_ms // 15_000 + 1) * 15_000)


def playing(**config: Any) -> Play:
    play = Play(LeaderConfig(calendar=Quarters(), **config))
    play.machine.apply(play.log.begin_epoch(2))
    play.lead()
    return play


def created(play: Play, spec: SeriesSpec = TEN_S, key: bytes = b"k") -> int:
    play.leader.series.create(play.topic_id, key, spec, play.now, play.done("create"))
    play.settle()
    applied = play.answers.pop("create")
    assert isinstance(applied, SeriesApplied)
    assert applied.refusal is None
    return applied.series


def altered(play: Play, series: int, **changes: Any) -> None:
    play.leader.series.alter(series, changes, play.now, play.done("alter"))
    play.settle()
    assert play.answers.pop("alter").refusal is None


def view_of(play: Play, series: int) -> SeriesView:
    view = play.machine.series.view(series)
    assert view is not None
    return view


def fired(play: Play) -> int:
    return len(queue_of(play.machine, play.topic_id))


def test_series_fires_at_each_of_its_times_until_its_count() -> None:
    play = playing()
    series = created(play, replace(TEN_S, max_count=3))
    began = play.now.clock_ms
    assert view_of(play, series).spec.start_ms == began + 10_000
    planned = []
    for _ in range(3):
        planned.append(view_of(play, series).planned_ms - began)
        play.wait(10_000)
        play.settle()
    assert planned == [10_000, 20_000, 30_000]
    view = view_of(play, series)
    assert (fired(play), view.number, view.finished, view.seq) == (3, 3, True, 0)
    altered(play, series, max_count=4)
    assert view_of(play, series).planned_ms == began + 40_000


def test_occurrence_behind_a_change_in_flight_is_planned_by_the_new_definition() -> None:
    play = playing()
    series = created(play)
    play.wait(10_000)
    play.step()
    play.commit()  # the FIRE
    assert play.machine.series.waiting.keys() == {series}
    play.leader.series.alter(series, {"every_ms": 7_000}, play.now, play.done("alter"))
    assert EntryKind.OCCURRENCES not in play.step()
    play.settle()
    view = view_of(play, series)
    assert view.seq
    assert (view.planned_ms - view.spec.start_ms) % 7_000 == 0


def test_cron_series_takes_its_times_from_the_calendar_and_ends() -> None:
    play = playing()
    end_ms = (play.now.clock_ms // 15_000 + 2) * 15_000
    series = created(play, SeriesSpec(cron="q", zone="Z", end_ms=end_ms))
    for _ in range(5):
        play.wait(15_000)
        play.settle()
    assert (fired(play), view_of(play, series).finished) == (2, True)


@pytest.mark.parametrize("committed", [False, True])
def test_new_leader_neither_misses_nor_doubles_an_occurrence(committed: bool) -> None:
    play = playing()
    series = created(play)
    play.wait(10_000)
    play.step()
    play.commit()  # the FIRE
    play.step()
    assert EntryKind.OCCURRENCES in play.appended
    if not committed:
        del play.log.entries[play.machine.applied_index :]
    play.machine.apply(play.log.begin_epoch(2)) if not committed else play.commit()
    play.lead()
    play.settle()
    view = view_of(play, series)
    assert (view.number, fired(play), play.machine.counts.pending) == (1, 1, 1)
    play.wait(10_000)
    play.settle()
    assert fired(play) == 2


@pytest.mark.parametrize(
    ("misfire", "at_once"), [(Misfire.FIRE_ONCE, 1), (Misfire.FIRE_ALL, 5), (Misfire.SKIP, 0)]
)
@pytest.mark.parametrize("cron", ["", "q"])
def test_times_missed_in_a_pause_follow_the_policy(
    misfire: Misfire, at_once: int, cron: str
) -> None:
    play = playing()
    play.wait(-play.now.clock_ms % 15_000)
    spec = SeriesSpec(cron="q", zone="Z") if cron else SeriesSpec(every_ms=15_000)
    series = created(play, replace(spec, misfire=misfire))
    began = play.now.clock_ms
    play.wait(1_000)
    altered(play, series, paused=True)
    play.wait(75_000)
    play.settle()
    assert (fired(play), play.machine.counts.pending) == (0, 0)
    altered(play, series, paused=False)
    assert fired(play) == at_once
    view = view_of(play, series)
    assert (view.number, view.planned_ms) == (at_once, began + 90_000)


def test_times_before_a_change_of_the_interval_are_not_missed() -> None:
    play = playing()
    series = created(play, replace(TEN_S, misfire=Misfire.FIRE_ALL))
    altered(play, series, paused=True)
    play.wait(95_000)
    altered(play, series, paused=False, every_ms=1_000)
    assert fired(play) == 0
    play.wait(1_000)
    play.settle()
    assert fired(play) == 1


def test_change_of_the_start_does_not_repeat_times_and_its_repetition_changes_nothing() -> None:
    play = playing()
    began = play.now.clock_ms
    series = created(play, replace(TEN_S, every_ms=1_000, start_ms=began, misfire=Misfire.FIRE_ALL))
    for _ in range(5):
        play.wait(1_000)
        play.settle()
    assert fired(play) == 6
    for _ in range(2):  # a client repeats a request whose answer is lost
        altered(play, series, start_ms=began + 2_500)
        assert (fired(play), view_of(play, series).planned_ms) == (6, began + 5_500)
        play.wait(100)
    play.wait(400)
    altered(play, series, start_ms=began + 2_500)
    assert (fired(play), view_of(play, series).planned_ms) == (7, began + 6_500)


@pytest.mark.parametrize("limit", ["max_count", "end_ms"])
def test_times_between_the_end_of_a_series_and_its_continuation_do_not_occur(limit: str) -> None:
    play = playing()
    began = play.now.clock_ms
    ends = {"max_count": 2, "end_ms": began + 25_000}
    series = created(play, TEN_S.with_changes({"misfire": Misfire.FIRE_ALL, limit: ends[limit]}))
    for _ in range(10):
        play.wait(10_000)
        play.settle()
    assert (fired(play), view_of(play, series).finished) == (2, True)
    altered(play, series, **{limit: 10 * ends[limit]})
    assert (fired(play), view_of(play, series).planned_ms) == (2, began + 110_000)


def test_change_before_the_first_time_replaces_a_default_start_and_keeps_a_given_one() -> None:
    play = playing()
    daily = replace(TEN_S, every_ms=86_400_000)
    series = created(play, daily)
    for every_ms in (3_600_000, 2_000):
        play.wait(3_000)
        altered(play, series, every_ms=every_ms)
        assert view_of(play, series).planned_ms == play.now.clock_ms + every_ms
    other = created(play, daily, b"cron")
    altered(play, other, cron="q", zone="Z")
    view = view_of(play, other)
    assert (view.spec.start_ms, view.planned_ms) == (
        0,
        play.now.clock_ms // 15_000 * 15_000 + 15_000,
    )
    altered(play, other, every_ms=5_000)
    assert view_of(play, other).planned_ms == play.now.clock_ms + 5_000
    start_ms = play.now.clock_ms + 7_000
    given = created(play, replace(daily, start_ms=start_ms), b"given")
    for every_ms in (5_000, 6_000):
        altered(play, given, every_ms=every_ms)
        assert view_of(play, given).planned_ms == start_ms


def test_pause_before_the_time_and_resume_keep_the_occurrence() -> None:
    play = playing()
    series = created(play)
    before = view_of(play, series).planned_ms
    altered(play, series, paused=True)
    altered(play, series, paused=False)
    assert view_of(play, series).planned_ms == before


def test_start_in_the_past_is_the_phase_and_a_start_just_now_is_due_at_once() -> None:
    play = playing()
    now = play.now.clock_ms
    created(play, replace(TEN_S, start_ms=now - 5))
    assert fired(play) == 1
    series = created(play, replace(TEN_S, start_ms=now - 10**9 - 3_000), b"old")
    assert view_of(play, series).planned_ms == now + 7_000 or fired(play) == 2


def test_no_occurrence_is_appended_on_a_full_disk_or_log_and_they_follow_later() -> None:
    play = playing()
    created(play)
    play.leader.disk_error = DiskFullError([("n", 0, 1)], retry_after_ms=1)
    play.wait(10_000)
    play.settle()
    assert (fired(play), play.machine.counts.pending) == (1, 0)
    with pytest.raises(DiskFullError):
        play.leader.series.create(play.topic_id, b"x", TEN_S, play.now, lambda _: None)
    play.leader.disk_error = None
    play.full = OverloadedError("the log", retry_after_ms=1)
    play.step()
    assert play.leader.series.rejected
    play.full = None
    play.settle()
    assert play.machine.counts.pending == 1


def test_series_of_a_zone_that_this_node_does_not_know_waits_and_the_others_go_on() -> None:
    noted: list[tuple[bytes, str]] = []
    play = playing(on_unplanned=lambda view, why: noted.append((view.key, why.field)))
    series = created(play, SeriesSpec(cron="q", zone="Z"))
    same = created(play, SeriesSpec(cron="q", zone="Z"), b"same")
    play.leader.series._calendar = play.leader.series._planner._calendar = NoCalendar()
    play.wait(15_000)
    play.settle()
    assert play.machine.counts.pending == 0
    created(play, TEN_S, b"other")
    assert play.machine.counts.pending == 1
    assert (noted, play.leader.series.unplanned) == ([(b"k", "cron")], 2)
    assert not play.machine.series.waiting, "no later look passes over them"
    play.leader.series._planner._calendar = Quarters()
    play.lead()
    play.settle()
    assert play.machine.counts.pending == 3
    assert (len(noted), play.leader.series.unplanned) == (1, 0)
    play.leader.series._planner._calendar = NoCalendar()
    play.wait(15_000)
    play.settle()
    assert play.leader.series.unplanned == 2
    play.leader.series.delete(series, play.now, play.done("delete"))
    play.settle()
    assert (play.leader.series.unplanned, play.machine.counts.pending) == (1, 1)
    play.leader.series._calendar = NoCalendar()
    altered(play, same, payload=b"other")
    assert (play.leader.series.unplanned, play.machine.counts.pending) == (1, 1)
    play.leader.series._calendar = play.leader.series._planner._calendar = Quarters()
    altered(play, same, payload=b"changed")
    assert (play.leader.series.unplanned, play.machine.counts.pending) == (0, 2)


def test_an_entry_after_a_long_outage_calls_the_calendar_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the different expressions missed a month: a search for its latest time."""
    table, calls = SeriesTable(), 0
    for number in range(200):
        spec = SeriesSpec(cron=f"{number}", zone="Z")
        table.add(TopicId(1), b"%d" % number, spec, 0)

    class Counted(Quarters):
        def next_after(self, cron: str, zone: str, after_ms: UnixMs) -> UnixMs | None:
            nonlocal calls
            calls += 1
            return super().next_after(cron, zone, after_ms)

    machine: Any = SimpleNamespace(series=table, last_read_time_ms=UnixMs(0))
    admission: Any = SimpleNamespace(rules=lambda _: UNBOUNDED)
    planner = OccurrencePlanner(machine, admission, Counted())
    now, views = Now(MonoMs(0), UnixMs(30 * 86_400_000)), calls_of(monkeypatch, table, "view")
    planned = planner.next(now)
    assert planned is not None
    assert 0 < len(planned.series) < 200, "the others follow in later entries"
    assert len(views) == len(planned.series)
    assert CALLS_MAX <= calls <= CALLS_MAX + 64


def test_refused_requests_name_field_value_and_limit_and_append_nothing() -> None:
    play = Play(LeaderConfig(calendar=Quarters(), limits=CountLimits(series_max=1)))
    with pytest.raises(InvalidRequestError, match=r"^feature_level = 1: recurring timers need 2"):
        play.leader.series.create(play.topic_id, b"k", TEN_S, play.now, lambda _: None)
    play.machine.apply(play.log.begin_epoch(2))
    play.lead()
    before = len(play.log.entries)
    for spec, text in (
        (replace(TEN_S, every_ms=999), "every_ms = 999: must be 1000 to "),
        (replace(TEN_S, end_ms=1), "end_ms = 1: must be at least start_ms = "),
        (SeriesSpec(cron="q", zone="Mars"), "zone = 'Mars': must be Z"),
        (SeriesSpec(), "every_ms, cron = 'neither': exactly one must be given"),
        (replace(TEN_S, payload=bytes(20_000)), "payload = '20001 bytes in all': "),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{text}"):
            play.leader.series.create(play.topic_id, b"k", spec, play.now, lambda _: None)
    assert len(play.log.entries) == before
    series = created(play)
    with pytest.raises(LimitReachedError, match=r"limits.series_max: the cluster has 1"):
        play.leader.series.create(play.topic_id, b"l", TEN_S, play.now, lambda _: None)
    with pytest.raises(NotFoundError):
        play.leader.series.alter(9, {}, play.now, lambda _: None)
    with pytest.raises(InvalidRequestError, match=r"^every_ms = 1: "):
        play.leader.series.alter(series, {"every_ms": 1}, play.now, lambda _: None)
    play.leader.series.delete(series, play.now, play.done("delete"))
    play.settle()
    assert (len(play.machine.series), play.machine.counts.pending) == (0, 0)
    play.leader.delete_topic(play.topic_id, play.now, lambda _: None)
    with pytest.raises(NotReadyError, match="being deleted"):
        play.leader.series.create(play.topic_id, b"k", TEN_S, play.now, lambda _: None)


def test_columns_of_intervals_are_the_times_of_each_series() -> None:
    rng = random.Random(5)
    rows = np.zeros(3_000, SERIES)
    specs = []
    for row in rows:
        spec = SeriesSpec(
            every_ms=rng.randint(1, 9),
            start_ms=rng.randint(1, 60),
            end_ms=rng.choice((0, rng.randint(60, 99))),
            misfire=rng.choice([*Misfire]),
        )
        specs.append(spec)
        row["every_ms"], row["start_ms"], row["end_ms"] = spec.every_ms, spec.start_ms, spec.end_ms
        row["flags"], row["last_ms"] = spec.misfire, rng.randint(0, 99)
    found = interval_times(rows, 50).tolist()
    for row, spec, planned in zip(rows, specs, found, strict=True):
        expected = planned_time(spec, int(row["last_ms"]), 50, NoCalendar())
        assert planned == (ENDED if expected is None else expected), (row, spec)
        times = [t for t in range(spec.start_ms, 200, spec.every_ms) if t > row["last_ms"]]
        times = [t for t in times if t <= (spec.end_ms or 999)][:3]
        found = planned_times(spec, int(row["last_ms"]), 0, 3, NoCalendar())
        assert [*found][: len(times)] == times
    assert TopicId(1)
