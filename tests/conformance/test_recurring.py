"""Recurring timers: series, their occurrences, changes and misfire policies."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Unpack

import pytest

from tests.conformance.worlds import World, refusal
from timerclient import AlreadyExists, InvalidRequest, NotFound, TimerState
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.series_fields import Misfire, Occurrence, Series, SeriesOptions


def every(world: World) -> timedelta:
    """Return an interval of four moments: on real nodes one second, the shortest."""
    return timedelta(seconds=4 * world.moment)


def test_occurrences_fire_with_their_number_over_a_change_of_the_leader(
    world: World, topic: str
) -> None:
    series = world.client.create_series(
        topic, "tick", b"p", every=every(world), max_count=4, headers={"h": "v"}
    )
    assert (series.every, series.ended, series.finished) == (every(world), 0, False)
    with world.client.consumer(topic, "g") as consumer:
        world.pass_time(4)
        [message] = world.take(consumer, 1)
        assert (message.payload, message.headers["h"]) == (b"p", "v")
        assert message.occurrence == Occurrence(series.id, "tick", 1)
        world.change_leader()
        found = []
        for _ in range(3):
            world.pass_time(4)
            found += world.take(consumer, 1)
        assert [each.occurrence and each.occurrence.number for each in found] == [2, 3, 4]
        world.pass_time(8)
        world.nothing_waits(consumer, topic)
    after = world.client.get_series(topic, "tick")
    assert (after.ended, after.finished, after.timer_id, after.next) == (4, True, None, None)
    changed = world.client.alter_series(topic, "tick", headers={"h": "w"})
    assert (changed.headers, changed.finished, changed.next) == ({"h": "w"}, True, None)


def planned(world: World, topic: str) -> str:
    """Return the id of the pending occurrence of the series k."""
    return world.until(lambda: world.client.get_series(topic, "k").timer_id)


def test_pending_occurrence_is_an_ordinary_timer(world: World, topic: str) -> None:
    client = world.client
    series = client.create_series(topic, "k", b"p", every=3600.0)
    timer_id = planned(world, topic)
    info = client.get_timer(timer_id)
    assert (info.state, info.payload, info.key) == (TimerState.PENDING, b"p", None)
    assert [one.id for one in client.list_timers(topic)] == [timer_id]
    client.cancel(timer_id)
    world.until(lambda: client.get_series(topic, "k").ended == 1)
    story = client.tell_story(planned(world, topic))
    after = client.get_series(topic, "k")
    assert after.ended == 1
    assert after.next is not None
    assert series.next is not None
    assert after.next - series.next == timedelta(hours=1)
    times = client.next_occurrences(topic, "k", 3)
    assert times == [after.next + timedelta(hours=at) for at in range(3)]
    assert [(event.series, event.number) for event in story.events] == [(series.id, 2)]


def test_repeated_creation_returns_the_series_and_another_definition_is_refused(
    world: World, topic: str
) -> None:
    client = world.client
    first = client.create_series(topic, "k", json={"a": 1}, every=60)
    assert client.create_series(topic, "k", json={"a": 1}, every=60).id == first.id
    with pytest.raises(AlreadyExists, match="it differs in max_count, payload; on_conflict"):
        client.create_series(topic, "k", json={"a": 2}, every=60, max_count=1)
    client.schedule(topic, b"single", key="k", delay=3600)  # keys of single timers are others
    client.create_series(topic, "other", every=60)
    assert [each.key for each in client.list_series(topic)] == ["k", "other"]
    assert {"k", "other"} <= {each.key for each in client.list_series()}
    client.alter_policies({"payload_bytes_max": 1}, topic=topic)
    assert client.create_series(topic, "k", json={"a": 1}, every=60).id == first.id


def test_named_expressions_are_kept_as_their_five_fields(world: World, topic: str) -> None:
    client = world.client
    names = ("hourly", "daily", "weekly", "monthly", "yearly")
    found = [client.create_series(topic, name, cron=f"@{name}").cron for name in names]
    assert found == ["0 * * * *", "0 0 * * *", "0 0 * * 0", "0 0 1 * *", "0 0 1 1 *"]
    again = client.create_series(topic, "daily", cron="@daily")
    assert again.id == client.get_series(topic, "daily").id
    assert client.alter_series(topic, "daily", cron="@weekly").cron == "0 0 * * 0"
    with pytest.raises(InvalidRequest, match=r"'@reboot': .*, or be @hourly, @daily, @weekly"):
        client.create_series(topic, "r", cron="@reboot")


def test_declaration_alters_a_series_that_differs_and_keeps_an_equal_one(
    world: World, topic: str
) -> None:
    client = world.client

    def declare(payload: bytes = b"", **options: Unpack[SeriesOptions]) -> Series:
        return client.create_series(topic, "k", payload, on_conflict="alter", **options)

    daily: SeriesOptions = {"cron": "0 7 * * *", "zone": "Europe/Berlin"}
    bounded: SeriesOptions = {**daily, "headers": {"h": "v", "i": "w"}, "max_count": 9}
    first = declare(b"a", **bounded)
    timer_id = planned(world, topic)
    bounded["headers"] = {"i": "w", "h": "v"}
    assert declare(b"a", **bounded).timer_id == timer_id
    client.pause_series(topic, "k")
    after = declare(b"b", **daily)  # without the other options: their defaults
    assert (after.id, after.payload, after.headers, after.max_count) == (first.id, b"b", {}, None)
    assert (after.paused, after.zone) == (True, "Europe/Berlin")
    assert client.resume_series(topic, "k").next == first.next
    timer_id = planned(world, topic)
    assert declare(b"b", **daily).timer_id == timer_id
    now = datetime.fromtimestamp(world.clock_ms() / 1000, UTC)
    monthly = declare(every=timedelta(days=30))
    assert (monthly.cron, monthly.zone, monthly.every) == (None, "", timedelta(days=30))
    hourly = declare(every=3600)
    for series, span in ((monthly, timedelta(days=30)), (hourly, timedelta(hours=1))):
        assert series.next is not None
        assert timedelta(0) <= series.next - now - span < timedelta(minutes=1), "begins anew"
    assert declare(every=3600).start == hourly.start
    late: SeriesOptions = {**daily, "start": now + timedelta(days=9)}
    start = declare(**late).start
    assert start == late["start"]
    assert [declare(cron=cron).start for cron in ("0 7 * * *", "0 8 * * *")] == [start, start]
    assert client.alter_series(topic, "k", cron="0 9 * * *").start == start


def test_declarations_at_the_same_time_leave_one_of_them(world: World, topic: str) -> None:
    def declare(wanted: tuple[int, bytes]) -> tuple[int, bytes]:
        every_s, payload = wanted
        made = world.client.create_series(topic, "k", payload, every=every_s, on_conflict="alter")
        assert made.every is not None
        return int(made.every.total_seconds()), made.payload

    wanted = [(3600, b"new"), (7200, b"old")]  # each differs in another field
    with ThreadPoolExecutor(2) as threads:
        for _ in range(10):
            assert declare((3600, b"old")) == (3600, b"old")
            assert set(threads.map(declare, wanted)) <= {*wanted}


@pytest.mark.parametrize(("misfire", "at_once"), [("fire_once", 1), ("fire_all", 3), ("skip", 0)])
def test_pause_cancels_the_occurrence_and_the_resume_follows_the_policy(
    world: World, topic: str, misfire: Misfire, at_once: int
) -> None:
    client = world.client
    start_ms = world.clock_ms() + 3 * world.moment_ms
    series = client.create_series(
        topic, "k", every=every(world), start=start_ms, misfire=misfire, max_count=at_once + 1
    )
    paused = client.pause_series(topic, "k")
    assert (paused.paused, paused.timer_id) == (True, None)
    assert not [*client.list_timers(topic)]
    world.pass_time(13)  # three times are missed; on a slow machine more
    start, now = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (start_ms, world.clock_ms()))
    earliest = {"fire_once": now - every(world), "fire_all": start, "skip": now}[misfire]
    assert client.next_occurrences(topic, "k", 1)[0] >= earliest
    client.alter_series(topic, "k", end=start + 2 * every(world))
    resumed = client.resume_series(topic, "k")
    assert resumed.id == series.id
    with client.consumer(topic, "g") as consumer:
        world.until(lambda: client.get_series(topic, "k").finished)
        found = world.take(consumer, at_once) if at_once else []
        assert [each.occurrence and each.occurrence.number for each in found] == [
            *range(1, at_once + 1)
        ]
        world.nothing_waits(consumer, topic)


def test_change_and_deletion(world: World, topic: str) -> None:
    client = world.client
    client.create_series(topic, "k", b"old", every=3600)
    cron = client.alter_series(topic, "k", b"new", cron="0 9 * * *", zone="Europe/Berlin")
    assert (cron.every, cron.cron, cron.zone) == (None, "0 9 * * *", "Europe/Berlin")
    assert cron.next is not None
    assert cron.next.minute == 0
    assert client.get_timer(planned(world, topic)).payload == b"new"
    client.delete_series(topic, "k")
    assert not [*client.list_timers(topic)]
    for call in (client.get_series, client.pause_series, client.delete_series):
        with pytest.raises(NotFound):
            call(topic, "k")
    client.create_series(topic, "k", every=3600)
    client.delete_topic(topic)
    with pytest.raises(NotFound):
        client.list_series(topic)


def test_change_to_an_end_before_the_first_time_is_rejected(world: World, topic: str) -> None:
    client = world.client
    client.create_series(topic, "k", cron="0 7 * * *")
    client.alter_series(topic, "k", end=world.clock_ms() - 1_000)
    world.until(lambda: client.get_series(topic, "k").finished)
    client.create_series(topic, "ticks", every=every(world))
    world.pass_time(4)
    world.until(lambda: client.get_series(topic, "ticks").ended)
    client.alter_series(topic, "ticks", end=world.clock_ms())  # it had an occurrence
    with pytest.raises(InvalidRequest, match=r"^end = .*Z: must be at least the first time = 2"):
        client.alter_series(topic, "ticks", cron="0 7 * * *")


def test_preview_creates_nothing(world: World, topic: str) -> None:
    client = world.client
    client.create_topic(topic)
    start = datetime(2100, 3, 27, 12, tzinfo=UTC)
    times = client.preview_series(topic, 2, cron="30 2 * * *", zone="Europe/Berlin", start=start)
    days = [datetime(2100, 3, 28, 1, tzinfo=UTC), datetime(2100, 3, 29, 0, 30, tzinfo=UTC)]
    assert times == days  # the first one is in a skipped hour
    assert not client.list_series(topic)


def test_preview_has_the_times_that_the_creation_fires(world: World, topic: str) -> None:
    start = datetime.fromtimestamp(world.clock_ms() / 1000 - 1, UTC)
    times = world.client.preview_series(topic, 2, every=3600, start=start)
    assert times == [start, start + timedelta(hours=1)]
    world.client.create_series(topic, "k", every=3600, start=start)
    world.until(lambda: world.client.get_series(topic, "k").ended == 1)
    assert world.client.next_occurrences(topic, "k", 1) == times[1:]


def test_each_call_takes_its_own_timeout(world: World, topic: str) -> None:
    client, series = world.client, (topic, "k")
    assert client.create_series(*series, every=60, timeout=timedelta(seconds=30)).ended == 0
    calls = (
        lambda: client.create_series(*series, every=60, timeout=0),
        lambda: client.preview_series(topic, every=60, timeout=0),
        lambda: client.alter_series(*series, b"p", timeout=0),
        lambda: client.pause_series(*series, timeout=0),
        lambda: client.resume_series(*series, timeout=0),
        lambda: client.delete_series(*series, timeout=0),
        lambda: client.get_series(*series, timeout=0),
        lambda: client.next_occurrences(*series, timeout=0),
        lambda: client.list_series(topic, timeout=0),
    )
    for call in calls:
        with pytest.raises(InvalidRequest, match="timeout = 0: must be"):
            call()


def test_invalid_definitions_name_field_value_and_limit(world: World, topic: str) -> None:
    client = world.client
    one, two = "2001-09-09T01:46:41.000Z", "2001-09-09T01:46:42.000Z"
    one_ms, two_ms, seconds = 1_000_000_001_000, 1_000_000_002_000, 86_400
    for options, text in (
        ({}, "every, cron = 'neither'"),
        ({"every": 0.5}, "every = 0.5: must be 1 to 316224000 s"),
        ({"every": -1}, "every = -1: must be 1 to 316224000 s"),
        ({"every": 60, "cron": "* * * * *"}, "every, cron = 'both'"),
        ({"cron": "61 * * * *"}, "cron = '61 "),
        ({"cron": "* * * * *", "zone": "Mars"}, "zone = 'Mars'"),
        (  # the clock skips each of its times since 1980
            {"cron": "0 30 2 * 3 7L", "zone": "Europe/Berlin"},
            "in the fifty years after its start, in the zone Europe/Berlin",
        ),
        ({"cron": "* * */20 * 1L"}, "cron = '* * */20 * 1L': must occur at least once in the "),
        ({"every": 60, "misfire": "twice"}, "misfire = 'twice'"),
        ({"every": 60, "max_count": 0}, "max_count = 0"),
        ({"every": 60, "nothing": 1}, "option = 'nothing'"),
        ({"every": 60, "end": datetime(1970, 1, 1, tzinfo=UTC)}, "must be after 1970 began"),
        ({"every": 60, "start": datetime(1970, 1, 1, tzinfo=UTC)}, "must be after 1970 began"),
        ({"every": 60, "end": seconds}, "in Unix milliseconds, not seconds"),
        (
            {"every": 60, "start": two_ms, "end": one_ms},
            f"end = {one}: must be at least start = {two}",
        ),
        (
            {"every": 60, "start": one_ms, "end": two_ms},
            f"end = {two}: must be at least the first ",
        ),
        ({"cron": "0 7 * * *", "end": two_ms}, f"end = {two}: must be at least the first time = 2"),
    ):
        with pytest.raises(InvalidRequest) as why:
            client.create_series(topic, "k", **options)
        assert text in str(why.value)
    for start_ms in (10**9, 10**10 - 1):  # a program in another language may send it
        fields = pb.SeriesFields(every_ms=60_000, start_ms=start_ms)
        error = refusal(
            world, "CreateSeries", pb.CreateSeriesRequest(topic=topic, key="k", fields=fields)
        )
        assert (error.field, "not seconds" in error.limit) == ("start_ms", True)
    for key, payload in (("", b""), ("k" * 5_000, b""), ("k", bytes(20_000))):
        with pytest.raises(InvalidRequest):
            client.create_series(topic, key, payload, every=60)
