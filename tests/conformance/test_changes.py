"""Cancels and reschedules: by id, by key, by filter, before and after a timer has fired."""

from collections.abc import Callable

import pytest

from tests.conformance.worlds import CLOCK, World, refusal
from timerclient import (
    CancelResult,
    InvalidRequest,
    NotFound,
    NotPending,
    RescheduleResult,
    TimerState,
)
from timerclient.proto import timer_pb2 as pb

HOUR = 3600.0
HOUR_MS = 3_600_000


def test_cancel_tells_what_became_of_the_timer(world: World, topic: str) -> None:
    client = world.client
    pending = client.schedule(topic, b"pending", delay=HOUR)
    second = client.schedule(topic, b"second", delay=HOUR)
    fired = client.schedule(topic, b"fired", delay=world.moment)
    with client.consumer(topic, "g") as consumer:
        world.pass_time(2)
        world.take(consumer, 1)
    assert client.cancel(pending) is CancelResult.CANCELLED
    assert client.cancel(pending.id) is CancelResult.ALREADY_CANCELLED
    assert client.cancel(fired.raw) is CancelResult.ALREADY_FIRED
    unknown = bytearray(pending.raw)
    unknown[-1] ^= 1
    assert client.cancel(bytes(unknown)) is CancelResult.NOT_FOUND
    forged = pending.id[:-1] + ("0" if pending.id[-1] != "0" else "1")
    assert client.cancel(forged) is CancelResult.NOT_FOUND
    assert client.cancel_batch([fired.id, second.id, second.id, forged]) == [
        CancelResult.ALREADY_FIRED,
        CancelResult.CANCELLED,
        CancelResult.ALREADY_CANCELLED,
        CancelResult.NOT_FOUND,
    ]


def test_cancelled_timer_never_fires_and_its_neighbours_of_the_same_tick_do(
    world: World, topic: str
) -> None:
    client = world.client

    def cancelled(due_ms: int) -> tuple[str, list[int], list[CancelResult]]:
        name = f"{topic}-{due_ms}"
        timers = client.schedule_batch(name, [b"%d" % n for n in range(100)], due_ms=due_ms)
        told = [client.cancel(timers[50]), *client.cancel_batch([timers[0], timers[99]])]
        return name, timers.due_ms, told

    name, dues, told = world.in_time(cancelled, 2)
    assert len({*dues}) == 1
    assert told == [CancelResult.CANCELLED] * 3
    with client.consumer(name, "g") as consumer:
        world.pass_time(3)
        came = [message.payload for message in world.take(consumer, 97)]
        world.nothing_waits(consumer, name)
    assert came == [b"%d" % n for n in range(100) if n not in (0, 50, 99)]


def test_cancels_around_the_time_that_timers_fire_and_what_comes_agree(
    world: World, topic: str
) -> None:
    """Cancels during the firing: timers answered CANCELLED are not delivered, all others are."""
    client, due_ms = world.client, world.clock_ms() + world.moment_ms
    payloads = [b"%d" % n for n in range(200)]
    timers = client.schedule_batch(topic, payloads, due_ms=[due_ms + n for n in range(200)])
    half = client.cancel_batch([timers[n] for n in range(0, 200, 20)])
    world.pass_time(1)
    rest = [client.cancel(timers[n]) for n in range(1, 200, 20)]
    assert {*half, *rest} <= {CancelResult.CANCELLED, CancelResult.ALREADY_FIRED}
    results = dict(zip([*range(0, 200, 20), *range(1, 200, 20)], [*half, *rest], strict=True))
    gone = {payloads[n] for n, result in results.items() if result is CancelResult.CANCELLED}
    with client.consumer(topic, "g") as consumer:
        world.pass_time(1)
        came = [message.payload for message in world.take(consumer, 200 - len(gone))]
        world.nothing_waits(consumer, topic)
    assert len({*came}) == len(came)
    assert {*came} == {*payloads} - gone


def test_cancel_by_key_finds_pending_timers_only(world: World, topic: str) -> None:
    client = world.client
    client.schedule_batch(topic, [b""] * 2, keys=["a", "b"], delay=HOUR)
    assert client.cancel(key="a", topic=topic) is CancelResult.CANCELLED
    cancelled, gone = client.cancel_keys(topic, ["b", "a"])
    assert (cancelled, gone) == (CancelResult.CANCELLED, CancelResult.NOT_FOUND)
    client.schedule(topic, b"", key="a", delay=HOUR)
    assert client.count_timers(topic).pending == 1


def test_what_is_not_there_is_told_as_that_and_not_as_a_timer_that_is_over(
    world: World, topic: str
) -> None:
    client = world.client
    asked: list[Callable[[], object]] = [
        lambda: client.count_timers(topic),
        lambda: client.cancel(key="k", topic=topic),
        lambda: client.reschedule(key="k", topic=topic, delay=1),
        lambda: client.alter_group(CLOCK, "nobody", max_attempts=1),
        lambda: client.redrive(topic),
        lambda: client.get_timer("0" * 24),
    ]
    for ask in asked:
        with pytest.raises(NotFound) as refused:
            ask()
        assert type(refused.value) is NotFound


def test_cancel_by_filter_hits_what_it_names_and_nothing_else(world: World, topic: str) -> None:
    client, now_ms = world.client, world.clock_ms()
    dues = [now_ms + HOUR_MS * (1 + n // 10) for n in range(30)]
    keys = [f"{'even' if n % 2 == 0 else 'odd'}-{n}" for n in range(30)]
    client.schedule_batch(topic, [b""] * 30, keys=keys, due_ms=dues)
    hit = client.cancel_where(
        topic,
        key_prefix="even-",
        due_from=now_ms + 3 * HOUR_MS // 2,
        due_to=now_ms + 5 * HOUR_MS // 2,
    )
    assert (hit, hit.exact) == (5, True)
    left = {timer.key for timer in client.list_timers(topic)}
    assert left == {key for n, key in enumerate(keys) if n // 10 != 1 or n % 2}
    assert client.cancel_where(topic) == 25
    with pytest.raises(NotFound):
        client.cancel_where(f"{topic}-nobody-knows")


# ---- rescheduling


def test_reschedule_gives_a_new_id_and_keeps_all_else(world: World, topic: str) -> None:
    client = world.client
    old = client.schedule(topic, b"p", delay=HOUR, key="k", headers={"h": "1"})
    new = client.reschedule(old, delay=world.moment)
    assert new.id != old.id
    assert client.get_timer(old).state is TimerState.CANCELLED
    with pytest.raises(NotPending) as refused:
        client.reschedule(old, delay=HOUR)
    assert refused.value.result is RescheduleResult.ALREADY_CANCELLED
    with client.consumer(topic, "g") as consumer:
        world.pass_time(2)
        [message] = world.take(consumer, 1)
        world.nothing_waits(consumer, topic)
    assert (message.id, message.payload) == (new.id, b"p")
    assert (message.key, message.headers) == ("k", {"h": "1"})
    with pytest.raises(NotPending) as refused:
        client.reschedule(new, delay=HOUR)
    assert refused.value.result is RescheduleResult.ALREADY_FIRED
    with pytest.raises(NotPending, match=r"key = 'k': no pending timer .* nothing was rescheduled"):
        client.reschedule(key="k", topic=topic, delay=HOUR)


def test_reschedule_to_the_past_delivers_at_once(world: World, topic: str) -> None:
    timer = world.client.schedule(topic, b"p", delay=HOUR)
    world.client.reschedule(timer, due_ms=10**10)
    with world.client.consumer(topic, "g") as consumer:
        assert world.take(consumer, 1)[0].payload == b"p"


def test_reschedule_by_key_and_in_batches_answers_each(world: World, topic: str) -> None:
    client = world.client
    timers = client.schedule_batch(topic, [b"1", b"2"], keys=["a", "b"], delay=HOUR)
    moved = client.reschedule(key="a", topic=topic, delay=2 * HOUR)
    assert client.get_timer(key="a", topic=topic).id == moved.id
    gone, done = client.reschedule_batch([timers[0], timers[1]], delay=[HOUR, 3 * HOUR])
    assert (gone.result, gone.timer) == (RescheduleResult.ALREADY_CANCELLED, None)
    assert done.timer is not None
    assert [t.key for t in client.list_timers(topic)] == ["a", "b"]
    none, one = client.reschedule_keys(topic, ["nobody", "b"], due_ms=world.clock_ms() + HOUR_MS)
    assert none.result is RescheduleResult.NOT_FOUND
    assert one.result is RescheduleResult.RESCHEDULED
    assert [t.key for t in client.list_timers(topic)] == ["b", "a"]


def test_rejected_time_of_many_reschedules_is_named_by_its_place(world: World, topic: str) -> None:
    client = world.client
    client.create_topic(topic)
    client.alter_policies({"delay_ms_max": HOUR_MS}, topic=topic)
    timers = client.schedule_batch(topic, [b"1", b"2", b"3"], keys=["a", "b", "c"], delay=1800)
    client.cancel(timers[0])
    with pytest.raises(InvalidRequest) as refused:
        client.reschedule_batch(["0" * 24, *timers[1:]], delay=[0, 60, 2 * HOUR])
    assert refused.value.field == "delay_ms[2]"
    keys = [f"{n}" for n in range(258)]  # of two requests
    with pytest.raises(InvalidRequest) as refused:
        client.reschedule_keys(topic, keys, delay=[0] * 257 + [2 * HOUR])
    assert refused.value.field == "delay_ms[257]"
    with pytest.raises(InvalidRequest) as refused:
        client.reschedule_batch(timers, delay=2 * HOUR)  # one time for all has no place
    assert refused.value.field == "delay_ms"


def test_reschedule_by_filter_moves_each_once(world: World, topic: str) -> None:
    client, due_ms = world.client, world.clock_ms() + 5 * HOUR_MS
    client.schedule_batch(topic, [b""] * 100, delay=HOUR)
    later = client.schedule(topic, b"later", delay=9 * HOUR)
    assert client.reschedule_where(topic, {"due_to": due_ms}, due_ms=due_ms) == 100
    times = [timer.due_ms for timer in client.list_timers(topic)]
    assert [ms - due_ms < 10 for ms in times] == [True] * 100 + [False]
    assert client.get_timer(later).state is TimerState.PENDING
    client.cancel_where(topic)


@pytest.mark.parametrize("bound", ["due_from_ms", "due_to_ms"])
def test_filter_with_a_bound_in_seconds_is_rejected_and_selects_nothing(
    world: World, topic: str, bound: str
) -> None:
    timer = world.client.schedule(topic, b"", delay=HOUR)
    for seconds in (1, timer.due_ms // 1000, 10**10 - 1):
        what = pb.TimerFilter(topic=topic, **{bound: seconds})  # type: ignore[arg-type]
        requests = pb.CancelRequest(filter=what), pb.RescheduleRequest(filter=what, delay_ms=[0])
        for request in requests:
            method = type(request).__name__.removesuffix("Request")
            error = refusal(world, method, request)
            assert (error.field, "not seconds" in error.limit) == (f"filter.{bound}", True)
    assert world.client.count_timers(topic).pending == 1


def test_change_names_one_timer_in_one_way(world: World, topic: str) -> None:
    timer = world.client.schedule(topic, b"", key="k", delay=HOUR)
    asked: list[Callable[[], object]] = [
        world.client.cancel,
        lambda: world.client.cancel(timer, key="k", topic=topic),
        lambda: world.client.cancel(key="k"),
        lambda: world.client.reschedule(timer, delay=1, due_ms=1),
        lambda: world.client.cancel_where(topic, due_from=10**12, due_to=10**11),
    ]
    for ask in asked:
        with pytest.raises(InvalidRequest):
            ask()
    world.client.cancel(timer)


def test_old_id_of_a_rescheduled_timer_leads_to_the_timer_that_fires_instead(
    world: World, topic: str
) -> None:
    client = world.client
    old = client.schedule(topic, b"x", delay=HOUR)
    other = client.schedule(topic, b"y", delay=HOUR)
    assert client.get_timer(old).replaced_by is None
    between = client.reschedule(old, delay=2 * HOUR)
    new = client.reschedule(between, delay=3 * HOUR)
    told = client.get_timer(old.id)
    assert (told.state, told.replaced_by) == (TimerState.CANCELLED, new.id)
    assert client.cancel(old) is CancelResult.RESCHEDULED
    assert client.cancel_batch([old, other, between, other]) == [
        CancelResult.RESCHEDULED,
        CancelResult.CANCELLED,
        CancelResult.RESCHEDULED,
        CancelResult.ALREADY_CANCELLED,
    ]
    with pytest.raises(NotPending, match=f"ALREADY_CANCELLED.* as {new.id}") as refused:
        client.reschedule(old, delay=1)
    assert refused.value.replaced_by == new.id
    moved, again = client.reschedule_batch([old, new], delay=4 * HOUR)
    assert again.timer is not None
    assert (moved.result, moved.timer) == (RescheduleResult.ALREADY_CANCELLED, None)
    assert moved.replaced_by == again.timer.id
    assert client.cancel(str(client.get_timer(old).replaced_by)) is CancelResult.CANCELLED
    assert client.get_timer(other).replaced_by is None


def test_forged_id_is_not_found_and_tells_nothing_beside_others(world: World, topic: str) -> None:
    client = world.client
    old, one, other = (client.schedule(topic, b"x", delay=HOUR) for _ in range(3))
    client.reschedule(old, delay=2 * HOUR)
    forged = old.id[:-1] + ("1" if old.id[-1] == "0" else "0")  # its seq is that of `old`
    assert client.cancel(forged) is CancelResult.NOT_FOUND
    moved = client.reschedule_batch([forged, one, forged], delay=[HOUR, 2 * HOUR, 3 * HOUR])
    assert [each.result.name for each in moved] == ["NOT_FOUND", "RESCHEDULED", "NOT_FOUND"]
    assert [each.replaced_by for each in moved[::2]] == [None, None]
    assert moved[1].timer is not None
    assert client.get_timer(one).replaced_by == moved[1].timer.id
    assert moved[1].timer.due_ms - one.due_ms > 0.9 * HOUR * 1000
    assert client.cancel_batch([forged, other, forged, moved[1].timer]) == [
        *(CancelResult.NOT_FOUND, CancelResult.CANCELLED),
        *(CancelResult.NOT_FOUND, CancelResult.CANCELLED),
    ]


def test_old_id_is_known_after_its_timer_has_fired_and_another_leader_leads(
    world: World, topic: str
) -> None:
    client = world.client
    old = client.schedule(topic, b"x", delay=HOUR, key="k")
    new = client.reschedule(key="k", topic=topic, delay=world.moment)
    world.change_leader()
    with client.consumer(topic, "g") as consumer:
        world.pass_time(2)
        [message] = world.take(consumer, 1)
    assert message.id == new.id == client.get_timer(old).replaced_by
    assert client.cancel(old) is CancelResult.RESCHEDULED
    assert client.cancel(new) is CancelResult.ALREADY_FIRED
