"""Cron expressions: fields, time zones, and the hours that a change of the clock moves."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from cluster.api.cron_calendar import CronCalendar
from cluster.api.series_desk import SeriesDesk
from cluster.api.wire_rows import RequestLimits
from cluster.files.storage import leader_config
from cluster.settings.config import NodeConfig
from cluster.settings.log_format import LineFormatter
from tests.calls import calls_of
from timer.model.recurrence import TIMES_MAX, TIMES_PORTION, Misfire, SeriesSpec, planned_time
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import MonoMs, Now, TopicId, UnixMs
from timer.state.series_table import SeriesTable
from timerclient.proto import timer_pb2 as pb

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> UnixMs:
    """Return a local time of Berlin, the first one of a doubled hour."""
    return UnixMs(int(datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp() * 1000))


def times(cron: str, after: str, count: int, zone: str = "Europe/Berlin") -> list[str]:
    found, after_ms = [], at(after)
    for _ in range(count):
        next_ms = CronCalendar().next_after(cron, zone, after_ms)
        assert next_ms is not None
        assert next_ms > after_ms
        after_ms = next_ms
        found.append(datetime.fromtimestamp(after_ms / 1000, BERLIN).strftime("%d %H:%M:%S%z"))
    return found


def test_five_fields_have_minutes_and_six_have_seconds_first() -> None:
    assert times("30 9 * * *", "2026-01-01", 2) == ["01 09:30:00+0100", "02 09:30:00+0100"]
    assert times("*/20 * * * * *", "2026-01-01", 2) == ["01 00:00:20+0100", "01 00:00:40+0100"]
    assert times("0 0 L * *", "2026-01-01", 1) == ["31 00:00:00+0100"]
    assert times("0 0 5 * *", "2026-01-20", 1) == ["05 00:00:00+0100"]
    assert times("0 0 * * *", "2026-01-01", 1, zone="") == ["01 01:00:00+0100"]


def test_time_of_day_in_the_skipped_hour_occurs_once_right_after_it() -> None:
    assert times("30 2 * * *", "2026-03-28T12:00", 2) == ["29 03:00:00+0200", "30 02:30:00+0200"]


def test_time_of_day_in_the_doubled_hour_occurs_once() -> None:
    assert times("30 2 * * *", "2026-10-24T12:00", 2) == ["25 02:30:00+0200", "26 02:30:00+0100"]


def test_repeated_times_and_six_fields_follow_the_clock() -> None:
    assert times("*/30 * * * *", "2026-10-25T02:20", 4) == [
        *("25 02:30:00+0200", "25 02:00:00+0100", "25 02:30:00+0100", "25 03:00:00+0100"),
    ]
    assert times("*/30 * * * *", "2026-03-29T01:40", 1) == ["29 03:00:00+0200"]
    assert times("0 30 2 * * *", "2026-03-28T12:00", 1) == ["30 02:30:00+0200"]
    assert times("0 30 2 * * *", "2026-10-24T12:00", 2) == ["25 02:30:00+0200", "25 02:30:00+0100"]
    each_skipped = "0 30 2 * 3 7L"  # the last Sunday of March
    assert CronCalendar().next_after(each_skipped, "Europe/Berlin", at("2026-01-01")) is None


@pytest.mark.parametrize(
    ("zone", "day"),
    [
        ("Australia/Lord_Howe", "2026-04-04"),  # at 02:00 back by half an hour
        ("Australia/Lord_Howe", "2026-10-03"),
        ("Pacific/Chatham", "2026-04-04"),  # at 03:45 back by an hour
        ("Pacific/Chatham", "2026-09-26"),
        ("Asia/Beirut", "2024-03-30"),  # at midnight ahead by an hour
    ],
)
@pytest.mark.parametrize(
    ("cron", "occurs"),
    [
        ("*/10 3 * * *", lambda local: local.hour == 3 and local.minute % 10 == 0),
        ("0 15 2 * * *", lambda local: (local.hour, local.minute) == (2, 15)),
        ("0 */2 * * *", lambda local: local.hour % 2 == local.minute == 0),
        ("0 0 0 L * *", lambda local: local.hour == local.minute == 0 and next_day(local) == 1),
    ],
)
def test_shifts_of_half_an_hour_and_at_midnight_lose_no_time_and_add_none(
    zone: str, day: str, cron: str, occurs: Callable[[datetime], bool]
) -> None:
    info = ZoneInfo(zone)
    minutes = [datetime.fromisoformat(day).replace(tzinfo=info).astimezone(UTC)]
    while len(minutes) < 3 * 24 * 60:
        minutes.append(minutes[-1] + timedelta(minutes=1))
    expected = [each for each in minutes[1:] if occurs(each.astimezone(info))]
    found, after_ms = list[datetime](), UnixMs(int(minutes[0].timestamp() * 1000))
    while (next_ms := CronCalendar().next_after(cron, zone, after_ms)) is not None:
        after_ms = next_ms
        if (time := datetime.fromtimestamp(after_ms / 1000, UTC)) > minutes[-1]:
            break
        found.append(time)
    assert found == expected


def next_day(local: datetime) -> int:
    return (local + timedelta(days=1)).day


def test_latest_missed_time_is_found_by_halves() -> None:
    spec = SeriesSpec(cron="0 9 * * MON", zone="Europe/Berlin", misfire=Misfire.FIRE_ONCE)
    planned = planned_time(spec, at("2026-01-01"), at("2026-11-26T16:00"), CronCalendar())
    assert planned == at("2026-11-23T09:00")
    skip = SeriesSpec(cron=spec.cron, zone=spec.zone, misfire=Misfire.SKIP)
    planned = planned_time(skip, at("2026-01-01"), at("2026-11-26T16:00"), CronCalendar())
    assert planned == at("2026-11-30T09:00")


async def test_a_preview_of_rare_times_tests_few_days_and_lets_other_work_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tested = calls_of(monkeypatch, CronSim, "match_day")
    now = Now(MonoMs(0), at("2026-03-01"))
    host: Any = SimpleNamespace(require_leader=lambda: None, now=lambda: now)
    limits = RequestLimits(
        key_bytes_max=100, headers_bytes_max=100, request_rows_max=100, request_bytes_max=1_000
    )
    request = pb.CreateSeriesRequest(topic="t", key="k", preview=TIMES_MAX)
    request.fields.cron = "17 5 * 2 SUN#5"
    unused: Any = None
    task = asyncio.create_task(SeriesDesk(host, unused, unused, limits, salt=0).create(request))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    answer = task.result()
    assert len(answer.next_ms) == TIMES_MAX
    assert answer.next_ms[0] == datetime(2032, 2, 29, 5, 17, tzinfo=UTC).timestamp() * 1000
    assert len(tested) < 10 * TIMES_MAX
    assert turns > TIMES_MAX / TIMES_PORTION


@pytest.mark.parametrize(
    ("cron", "zone", "begin"),
    [
        ("* * * *", "", "cron = '* * * *': Wrong number of fields; it must have five fields"),
        ("61 * * * *", "", "cron = '61 * * * *': Bad minute; it must be 0 to 59; "),
        ("60 * * * * *", "", "cron = '60 * * * * *': Bad second; it must be 0 to 59; "),
        ("0 24 * * *", "", "cron = '0 24 * * *': Bad hour; it must be 0 to 23; "),
        (
            "0 22-2 * * *",
            "",
            "cron = '0 22-2 * * *': Bad hour; it must be 0 to 23; *, lists, ascending ranges and",
        ),
        ("0 7 31 2 *", "", "cron = '0 7 31 2 *': Bad day-of-month; it must be 1 to 31, in a "),
        ("0 7 * 13 *", "", "cron = '0 7 * 13 *': Bad month; it must be 1 to 12, or JAN to "),
        ("0 7 * * FUN", "", "cron = '0 7 * * FUN': Bad day-of-week; it must be 0 to 7, or "),
        ("* * * * 5L/2", "", "cron = '* * * * 5L/2': Bad day-of-week; "),
        ("²,1 * * * *", "", "cron = '²,1 * * * *': Bad minute; "),
        ("* * * * *", "Mars/Olympus", "zone = 'Mars/Olympus': must be an IANA time zone"),
        ("* * * * *", "../../etc/passwd", "zone = "),
        ("* * * * *", "localtime", "zone = 'localtime': must be an IANA time zone"),
        ("* * * * *", "posix/Europe/Berlin", "zone = 'posix/Europe/Berlin': must be an IANA"),
    ],
)
def test_unknown_expression_or_zone_names_field_value_and_limit(
    cron: str, zone: str, begin: str
) -> None:
    with pytest.raises(InvalidRequestError) as why:
        CronCalendar().check(cron, zone)
    assert str(why.value).startswith(begin)


@pytest.mark.parametrize(
    "cron", ["8-8/2 * * * *", "0 7 L/2 * *", "0 7 * * 1,FRI-5/1", "0 7 * JUN-JUN/3 *"]
)
def test_step_of_one_value_is_rejected_and_known_series_keep_it(cron: str) -> None:
    with pytest.raises(InvalidRequestError, match="its step follows a single value"):
        CronCalendar().check(cron, "")
    assert CronCalendar().next_after(cron, "", at("2026-11-26")) is not None
    for good in ("8/2 * * * *", "8-9/5 * * * *", "0 7 * JUN/3 MON/2", "0 7 L,LW * 5L,FRI#2"):
        CronCalendar().check(good, "")


def test_series_that_a_leader_cannot_plan_has_a_line_in_its_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InvalidRequestError) as unknown:
        CronCalendar().next_after("0 7 * * *", "Mars/Olympus", UnixMs(0))
    table = SeriesTable()
    spec = SeriesSpec(cron="0 7 * * *", zone="Mars/Olympus")
    view = table.view(table.add(TopicId(1), b"daily", spec, UnixMs(0)))
    assert view is not None
    node = NodeConfig(name="n1", cluster_id="c", data=Path("d"), peers={"n1": "127.0.0.1:1"})
    leader_config(node).on_unplanned(view, unknown.value)
    [line] = caplog.records
    shown = LineFormatter("n1").format(line)
    assert "level=warning" in shown
    assert f"series={view.series_id} key=daily" in shown
    assert "Mars/Olympus" in shown
