"""Times and order of firing, and the answers to schedule requests."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.cluster.running import WAIT_S, columns, schedule
from tests.conformance.worlds import World, refusal
from timerclient import (
    AlreadyExists,
    CancelResult,
    InvalidRequest,
    NewTimer,
    NotPending,
    ScheduleResult,
    TimerState,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.rows import OnConflict

HOUR = 3600.0
HOUR_MS = 3_600_000
DAY_MS = 86_400_000
TICK_MS = 10


def test_nothing_comes_before_it_is_due_and_as_much_as_is_asked_for(
    world: World, topic: str
) -> None:
    unit = world.moment / 10
    with world.client.consumer(topic, "g", lease=60) as consumer:
        dues = [20, 10, 30, 50, 40]
        payloads = [b"%d" % due for due in dues]
        world.client.schedule_batch(topic, payloads, delay=[due * unit for due in dues])
        world.pass_time(1.5)
        [first] = world.receive(consumer, 1)
        world.pass_time(4.5)
        [second] = world.receive(consumer, 1)
        rest = world.receive(consumer, 3)
        world.nothing_waits(consumer, topic)
    got = [first, second, *rest]
    assert [message.payload for message in got] == [b"10", b"20", b"30", b"40", b"50"]
    assert all(message.fired_at_ms >= message.due_ms for message in got)


def test_due_on_a_tick_is_kept_and_between_ticks_is_raised_to_the_next(
    world: World, topic: str
) -> None:
    client = world.client
    client.alter_policies({"tick_ms": TICK_MS}, topic=topic)
    tick_ms = (world.clock_ms() + HOUR_MS) // TICK_MS * TICK_MS
    wanted = [tick_ms, tick_ms + 1, tick_ms + TICK_MS]
    timers = client.schedule_batch(topic, [b""] * 3, due_ms=wanted)
    assert timers.due_ms == [tick_ms, tick_ms + TICK_MS, tick_ms + TICK_MS]
    client.cancel_where(topic)
    soon_ms = world.clock_ms() + world.moment_ms
    wanted = [soon_ms, soon_ms + 1, soon_ms + TICK_MS]
    timers = client.schedule_batch(topic, [b""] * 3, due_ms=wanted)
    with client.consumer(topic, "g") as consumer:
        world.pass_time(2)
        for message, due_ms in zip(world.take(consumer, 3), timers.due_ms, strict=True):
            assert message.fired_at_ms >= due_ms


@pytest.mark.parametrize("relative", [False, True])
def test_thousand_with_one_delay_come_in_the_order_they_were_scheduled(
    world: World, topic: str, relative: bool
) -> None:
    client, payloads = world.client, [b"%d" % n for n in range(1_000)]

    def scheduled(due_ms: int) -> tuple[str, int, set[int]]:
        name = f"{topic}-{due_ms}"
        when: dict[str, Any] = {"delay": 4 * world.moment} if relative else {"due_ms": due_ms}
        singles = [client.submit(name, payload, **when) for payload in payloads[:250]]
        batches = [
            client.submit_batch(name, payloads[at : at + 100], **when)
            for at in range(250, 750, 100)
        ]
        singles += [client.submit(name, payload, **when) for payload in payloads[750:]]
        timers = [future.result() for future in singles]
        ids = {timer.id for timer in timers}.union(*(future.result().ids for future in batches))
        assert len(ids) == 1_000
        return name, due_ms, {timer.due_ms for timer in timers}

    name, due_ms, told = world.in_time(scheduled, 4)
    assert relative or told == {due_ms}
    with client.consumer(name, "g") as consumer:
        world.pass_time(5)
        assert [m.payload for m in world.take(consumer, 1_000)] == payloads


def test_immediate_messages_among_delayed_ones_come_first_and_in_order(
    world: World, topic: str
) -> None:
    payloads = [b"%s %d" % (when, n) for n in range(5) for when in (b"later", b"now")]
    world.client.schedule_batch(topic, payloads, delay=[3 * world.moment, 0] * 5)
    with world.client.consumer(topic, "g") as consumer:
        world.pass_time(4)
        came = [message.payload for message in world.take(consumer, 10)]
    assert came == [b"now %d" % n for n in range(5)] + [b"later %d" % n for n in range(5)]


def test_due_in_the_past_is_delivered_at_once(world: World, topic: str) -> None:
    client = world.client
    client.schedule(topic, b"an hour ago", due_ms=world.clock_ms() - 3_600_000)
    client.schedule(topic, b"1970", due_ms=10**10)
    client.schedule(topic, b"no time", delay=0)
    with client.consumer(topic, "g") as consumer:
        came = {message.payload for message in world.take(consumer, 3)}
    assert came == {b"an hour ago", b"1970", b"no time"}


def test_delay_and_moment_mean_the_same(world: World, topic: str) -> None:
    client, hour_ms = world.client, 3_600_000
    now_ms = world.clock_ms()
    timers = [
        client.schedule(topic, b"", delay=HOUR),
        client.schedule(topic, b"", delay=timedelta(hours=1)),
        client.schedule(topic, b"", due_ms=now_ms + hour_ms),
        client.schedule(topic, b"", due=datetime.fromtimestamp(now_ms / 1000 + HOUR, UTC)),
    ]
    for timer in timers:
        assert now_ms + hour_ms <= timer.due_ms <= world.clock_ms() + hour_ms + 2 * TICK_MS


def test_ten_years_are_no_special_case(world: World, topic: str) -> None:
    years = [1, 10]
    delays = [timedelta(days=365 * n) for n in years]
    timers = world.client.schedule_batch(topic, [b"1", b"10"], delay=delays)
    world.change_leader()
    listed = [*world.client.list_timers(topic)]
    assert [timer.due_ms for timer in listed] == timers.due_ms
    for timer, n in zip(listed, years, strict=True):
        assert abs(timer.due_ms - world.clock_ms() - 365 * n * DAY_MS) < DAY_MS
        assert timer.payload == b"%d" % n
    assert world.client.cancel_where(topic) == 2


def test_payload_key_and_headers_arrive_as_they_were(world: World, topic: str) -> None:
    client = world.client
    headers = {"trace": "ä", "empty": ""}
    client.schedule(topic, b"\x00\xff", key="order ß", headers=headers)
    client.schedule(topic, b"", key="k" * 1024)
    client.schedule_batch(topic, [b"a", b"b"], keys=[None, "b"], headers=[{"n": "1"}, None])
    with client.consumer(topic, "g") as consumer:
        got = [(m.payload, m.key, m.headers) for m in world.take(consumer, 4)]
    assert got == [
        (b"\x00\xff", "order ß", headers),
        (b"", "k" * 1024, {}),
        (b"a", None, {"n": "1"}),
        (b"b", "b", {}),
    ]


def test_message_tells_its_timer(world: World, topic: str) -> None:
    timer = world.client.schedule(topic, b"", delay=world.moment)
    with world.client.consumer(topic, "g") as consumer:
        world.pass_time(2)
        [message] = world.take(consumer, 1)
    assert message.id == timer.id
    assert (message.attempt, message.queue_offset) == (1, 0)
    assert message.due_ms <= timer.due_ms <= message.fired_at_ms <= message.handed_out_ms


def test_batch_is_answered_in_its_own_order(world: World, topic: str) -> None:
    delays = [3 * HOUR, HOUR, 2 * HOUR]
    timers = world.client.schedule_batch(topic, [b"3", b"1", b"2"], delay=delays)
    assert [world.client.get_timer(timer).payload for timer in timers] == [b"3", b"1", b"2"]
    assert [timer.payload for timer in world.client.list_timers(topic)] == [b"1", b"2", b"3"]
    world.client.cancel_where(topic)


# ---- keys


def test_key_that_is_taken_is_refused_and_names_who_has_it(world: World, topic: str) -> None:
    first = world.client.schedule(topic, b"1", delay=HOUR, key="k")
    with pytest.raises(AlreadyExists) as refused:
        world.client.schedule(topic, b"2", delay=HOUR, key="k")
    assert refused.value.existing == first.id
    assert "key = 'k'" in str(refused.value)
    with pytest.raises(AlreadyExists, match="key = 'k'"):
        world.client.schedule(topic, b"2", delay=HOUR, key="k", request_id=topic[-64:])
    assert world.client.schedule(f"{topic}-other", b"3", delay=HOUR, key="k").id != first.id


def test_key_that_is_taken_replaces_or_keeps_as_asked(world: World, topic: str) -> None:
    client = world.client
    first = client.schedule(topic, b"1", delay=HOUR, key="k")
    kept = client.schedule(topic, b"2", delay=2 * HOUR, key="k", on_conflict="keep")
    assert (kept.id, kept.result) == (first.id, ScheduleResult.KEPT)
    second = client.schedule(topic, b"3", delay=3 * HOUR, key="k", on_conflict="replace")
    assert (second.result, second.replaced) == (ScheduleResult.REPLACED, first.raw)
    assert client.get_timer(first).state is TimerState.CANCELLED
    assert client.cancel(first) is CancelResult.ALREADY_CANCELLED
    assert client.get_timer(key="k", topic=topic).payload == b"3"


def test_update_replaces_a_pending_timer_and_schedules_nothing_without_one(
    world: World, topic: str
) -> None:
    client = world.client
    with pytest.raises(NotPending, match="key = 'k'"):
        client.schedule(topic, b"0", delay=HOUR, key="k", on_conflict="update")
    first = client.schedule(topic, b"1", delay=HOUR, key="k")
    second = client.schedule(topic, b"2", delay=2 * world.moment, key="k", on_conflict="update")
    assert (second.result, second.replaced) == (ScheduleResult.REPLACED, first.raw)
    with client.consumer(topic, "g") as consumer:
        world.pass_time(3)
        [message] = world.take(consumer, 1)
        assert message.payload == b"2"
    with pytest.raises(NotPending):  # it has just fired
        client.schedule(topic, b"3", key="k", on_conflict="update", request_id=topic[-60:])
    assert client.count_timers(topic).pending == 0


def test_batch_of_updates_is_decided_one_by_one(world: World, topic: str) -> None:
    client = world.client
    first = client.schedule(topic, b"0", delay=HOUR, key="a")
    timers = client.schedule_batch(
        topic, [b"1", b"2", b"3"], keys=["a", "b", "a"], delay=HOUR, on_conflict="update"
    )
    replaced, absent = ScheduleResult.REPLACED, ScheduleResult.NOT_PENDING
    assert timers.results == [replaced, absent, replaced]
    assert timers.existing == [first.id, None, timers[0].id]
    with pytest.raises(NotPending):
        _ = timers[1]
    assert [info.payload for info in client.list_timers(topic)] == [b"3"]


@pytest.mark.parametrize("mode", ["replace", "keep", "update"])
def test_on_conflict_needs_a_key(world: World, topic: str, mode: OnConflict) -> None:
    client, limit = world.client, f"must be given with on_conflict = {mode}"
    for field, keys in (("keys", None), ("keys[1]", ["a", None]), ("keys[0]", ["", "a"])):
        with pytest.raises(InvalidRequest) as refused:
            client.schedule_batch(topic, [b"", b""], keys=keys, on_conflict=mode)
        assert str(refused.value) == f"{field}: {limit}"
    timers = [NewTimer(topic, b"", key="a"), NewTimer(topic, b"")]
    with pytest.raises(InvalidRequest, match=rf"^timers\[1\]\.key: {limit}"):
        client.schedule_all(timers, on_conflict=mode)
    for key in (None, ""):
        with pytest.raises(InvalidRequest, match=f"^key: {limit}"):
            client.schedule(topic, b"", key=key, on_conflict=mode)
    wire = pb.OnConflict.Value(f"ON_CONFLICT_{mode.upper()}")
    for field, request in (
        ("key", schedule(columns(topic, [b""]), on_conflict=wire)),
        (
            "key[1]",
            schedule(columns(topic, [b"", b""], key_sizes=[1, 0], keys=b"k"), on_conflict=wire),
        ),
        (
            "key[1]",
            schedule(
                columns(topic, [b""], key_sizes=[1], keys=b"k"),
                columns(topic, [b""]),
                on_conflict=wire,
            ),
        ),
    ):
        error = refusal(world, "Schedule", request)
        assert (error.field, error.limit) == (field, limit)


def test_an_empty_key_is_no_key(world: World, topic: str) -> None:
    client = world.client
    for _ in range(2):
        one = client.schedule(topic, b"", key="", delay=HOUR)
        [two] = client.schedule_batch(topic, [b""], keys=[""], delay=HOUR)
        assert one.result is two.result is ScheduleResult.SCHEDULED
    assert [info.key for info in client.list_timers(topic)] == [None] * 4
    for key in (0, b"", b"a"):
        with pytest.raises(InvalidRequest, match=r"key = .*: must be str"):
            client.schedule(topic, b"", key=key)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=r"keys\[0\] = .*: must be str"):
            client.schedule_batch(topic, [b""], keys=[key])  # type: ignore[list-item]


def test_batch_with_taken_keys_is_decided_one_by_one(world: World, topic: str) -> None:
    client = world.client
    first = client.schedule(topic, b"0", delay=HOUR, key="a")
    payloads, keys = [b"1", b"2", b"3", b"4"], ["a", "b", None, "b"]
    timers = client.schedule_batch(topic, payloads, keys=keys, delay=HOUR)
    rejected, scheduled = ScheduleResult.REJECTED, ScheduleResult.SCHEDULED
    assert timers.results == [rejected, scheduled, scheduled, rejected]
    assert timers.existing == [first.id, None, None, timers[1].id]
    with pytest.raises(AlreadyExists):
        _ = timers[0]
    [found] = [each for each in client.topics() if each.name == topic]
    assert (found.scheduled, found.pending) == (3, 3)


def test_key_is_free_again_once_its_timer_has_fired(world: World, topic: str) -> None:
    client = world.client
    client.schedule(topic, b"0", key="k", delay=HOUR)
    first = client.schedule(topic, b"1", key="k", delay=world.moment, on_conflict="replace")
    with client.consumer(topic, "g") as consumer:
        world.pass_time(2)
        [message] = world.take(consumer, 1)
        assert (message.payload, message.id, message.key) == (b"1", first.id, "k")
        again = client.schedule(topic, b"2", key="k", delay=0)
        assert [message.id for message in world.take(consumer, 1)] == [again.id] != [first.id]
        world.nothing_waits(consumer, topic)
    assert client.schedule(topic, b"3", key="k", delay=HOUR).id != again.id


# ---- limits


def test_payload_of_exactly_the_maximum_passes_and_one_byte_more_names_the_limit(
    world: World, topic: str
) -> None:
    most = 4 << 20
    with world.client.consumer(topic, "g") as consumer:
        world.client.schedule(topic, bytes(most))
        with pytest.raises(InvalidRequest, match=f"at most {most} bytes") as refused:
            world.client.schedule(topic, bytes(most + 1))
        assert refused.value.field == "payload"
        world.client.schedule(topic, b"the next one passes")
        assert [len(m.payload) for m in world.take(consumer, 2)] == [most, 19]


def test_batch_of_the_maximum_passes_and_one_more_does_not(world: World, topic: str) -> None:
    most = 65_536
    assert len(world.client.schedule_batch(topic, [b""] * most, delay=HOUR)) == most
    with pytest.raises(InvalidRequest, match=str(most)):
        world.client.schedule_batch(topic, [b""] * (most + 1), delay=HOUR)
    world.client.schedule(topic, b"", delay=HOUR)
    assert world.client.count_timers(topic).pending == most + 1


def test_a_size_that_the_cluster_rejects_has_the_row_of_its_batch(world: World, topic: str) -> None:
    client, long = world.client, "k" * 1025
    with pytest.raises(InvalidRequest, match=r"^key\[2\] = '1025 bytes': must have at most 1024"):
        client.schedule_batch(topic, [b""] * 3, keys=["a", "b", long], delay=HOUR)
    with pytest.raises(InvalidRequest, match=r"^delay_ms\[1\] = 281474976710655: must be at most "):
        client.schedule_batch(topic, [b""] * 2, delay=[1, 281474976710.655])
    timers = [NewTimer(topic, b"", delay=HOUR), NewTimer(f"{topic}.b", b"", due_ms=10**12)]
    timers += [NewTimer(topic, b"", delay=HOUR, headers={"h": "x" * 40_000})]
    with pytest.raises(InvalidRequest, match=r"^timers\[2\]\.headers = '40005 bytes'") as refused:
        client.schedule_all(timers)
    assert refused.value.field == "timers[2].headers"
    client.create_topic(topic)
    with pytest.raises(InvalidRequest, match=r"^key\[1\] = '1025 bytes'"):
        client.cancel_keys(topic, ["a", long])
    with pytest.raises(InvalidRequest, match=r"^key = '1025 bytes'"):
        client.schedule(topic, b"", key=long, delay=HOUR)


def test_one_bad_call_among_those_made_together_fails_alone(world: World, topic: str) -> None:
    """The calls share requests, and only the cluster knows the limit."""
    client, name = world.client, f"{topic}/t"
    client.alter_policies({"payload_bytes_max": 10}, namespace=topic)
    calls = [client.submit(name, b"x" * (10 + (n % 50 == 7)), delay=HOUR) for n in range(100)]
    for n, call in enumerate(calls):
        if n % 50 != 7:
            assert call.result(WAIT_S).result is ScheduleResult.SCHEDULED
            continue
        with pytest.raises(InvalidRequest) as refused:
            call.result(WAIT_S)
        assert refused.value.limit.startswith("must have at most 10 bytes")
        assert refused.value.outcome_known
    assert calls[7].exception() is not calls[57].exception()
    assert client.count_timers(name).pending == 98
    client.cancel_where(name)


REFUSED: list[tuple[Callable[[Any, str], Any], str, str]] = [  # Any: arguments of wrong types
    (lambda w, t: w.client.schedule("", b""), "topic", "must be"),
    (lambda w, t: w.client.schedule("no spaces", b""), "topic", "must be"),
    (lambda w, t: w.client.schedule("x" * 256, b""), "topic", "255"),
    (lambda w, t: w.client.schedule(t, b"", key="k" * 1025), "key", "1024"),
    (lambda w, t: w.client.schedule(t, b"", headers={"h": "x" * 40_000}), "headers", "32768"),
    (lambda w, t: w.client.schedule(t, b"", delay=-1), "delay", "0"),
    (lambda w, t: w.client.schedule(t, b"", due_ms=1 << 60), "due_ms", "281474976710655"),
    (lambda w, t: w.client.schedule(t, b"", due=datetime(2030, 1, 1)), "due", "naive"),  # noqa: DTZ001
    (lambda w, t: w.client.schedule(t, b"", on_conflict="shrug"), "on_conflict", "reject"),
    (lambda w, t: w.client.schedule_batch(t, []), "payloads", "at least"),
    (lambda w, t: w.client.consumer(t, "no spaces"), "group", "must be"),
    (lambda w, t: w.client.consumer(t, "g", lease=0.001), "lease_ms", "100"),
    (lambda w, t: w.client.create_group(t, "g", max_attempts=1001), "max_attempts", "1000"),
    (lambda w, t: w.client.create_group(t, "g", backoff_min=2, backoff_max=1), "backoff", "most"),
    (lambda w, t: w.client.alter_policies({"tick_ms": 0}, namespace="n"), "tick_ms", "3600000"),
    (lambda w, t: w.client.cancel("nonsense"), "timer", ""),
    (lambda w, t: w.client.schedule(f"default/default/{t}", b""), "topic", "twice"),
    (lambda w, t: w.client.schedule(t, b"", on_conflict=["keep"]), "on_conflict", "reject"),
    (lambda w, t: w.client.schedule(t, b"", timeout=0), "timeout", "positive"),
    (lambda w, t: w.client.schedule(t, b"", timeout="1"), "timeout", "seconds"),
    (lambda w, t: w.client.reschedule("0" * 24), "when", "delay_level"),
    (lambda w, t: w.client.reschedule(key="k", topic=t, delay=None), "when", "at once"),
    (lambda w, t: w.client.reschedule_where(t, {}), "when", "at once"),
    (lambda w, t: w.client.cancel_where(t, due_from=0), "due_from", "1970"),
    (lambda w, t: w.client.cancel_where(t, due_to=0), "due_to", "1970"),
    (lambda w, t: w.client.cancel_where(t, due_from=10**12, due_to=10**11), "due_to_ms", "after"),
    (lambda w, t: next(w.client.list_timers(t, page_size=-1)), "page_size", "1 to 1000"),
    (lambda w, t: next(w.client.list_timers(t, page_size=1001)), "page_size", "1000"),
    (lambda w, t: w.client.create_group(t, "g", lease=-1), "lease", "0.001 to 43200 s"),
    (lambda w, t: w.client.create_group(t, "g", max_attempts=-1), "max_attempts", "0 to 1000"),
    (lambda w, t: w.client.create_group(t, "g", type=1), "type", "string"),
    (lambda w, t: w.client.create_group(t, "g", start=["latest"]), "start", "earliest"),
    (lambda w, t: w.client.seek_group(t, "g", offset="1"), "offset", "whole"),
    (lambda w, t: w.client.seek_group(t, "g", time=datetime(2030, 1, 1)), "time", "naive"),  # noqa: DTZ001
    (lambda w, t: w.client.consumer(t, "g", lease=-1), "lease", "0.001 to 43200 s"),
    (lambda w, t: w.client.consumer(t, "g", window=1.5), "window", "whole"),
    (lambda w, t: w.client.consumer(t, "g", window=0), "window", "1 to 1000000"),
    (lambda w, t: w.client.consumer(t, "g", name="n" * 256), "consumer", "255"),
    (lambda w, t: w.client.describe_topic(""), "topic", "empty"),
    (lambda w, t: w.client.describe_namespace(""), "namespace", "empty"),
    (lambda w, t: w.client.alter_policies({"ttl_ms": 0}, topic=""), "topic", "empty"),
    (lambda w, t: w.client.alter_policies({"ttl_ms": 0}, namespace=""), "namespace", "empty"),
    (
        lambda w, t: w.client.alter_policies({"ttl_ms": 1 << 63}, topic=t),
        "ttl_ms",
        str((1 << 63) - 1),
    ),
    (
        lambda w, t: w.client.alter_policies({"ttl_ms": "1h"}, topic=t),
        "ttl_ms",
        "whole number",
    ),
    (
        lambda w, t: w.client.alter_policies({"delay_levels_ms": 5}, topic=t),
        "delay_levels_ms",
        "delays",
    ),
    (lambda w, t: w.client.change_members("promote", "n1"), "change", "replace"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusal_names_field_and_limit(world: World, topic: str, number: int) -> None:
    ask, field, limit = REFUSED[number]
    world.client.create_topic(topic)
    with pytest.raises(InvalidRequest) as refused:
        ask(world, topic)
    assert field in refused.value.field, refused.value.field
    assert limit in refused.value.limit, refused.value.limit
    assert refused.value.outcome_known
    assert not refused.value.retryable
