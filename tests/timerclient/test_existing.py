"""Keys, reschedules, cancels by key and filter, and looking in, against the fake cluster."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cluster.api import timer_changes
from tests.timerclient.conftest import once
from tests.timerclient.fake_cluster import NOW_MS, Cluster, Order, wire_error
from timerclient import (
    AlreadyExists,
    AsyncTimerClient,
    CancelResult,
    InvalidRequest,
    NewTimer,
    NotFound,
    NotPending,
    OutcomeUnknown,
    RescheduleResult,
    ScheduleResult,
    TimerState,
)
from timerclient.proto import timer_pb2 as pb


async def test_taken_key_is_an_error_of_its_own_call_alone(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    first = await client.schedule("t", b"1", key="k", delay=9)
    calls = [
        client.schedule("t", b"2", key="k", delay=9),
        client.schedule("t", b"3", key="other", delay=9),
        client.schedule("t", b"4", delay=9),
    ]
    refused, other, plain = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(refused, AlreadyExists)
    assert refused.existing == first.id
    assert not refused.retryable
    assert len({first, other, plain}) == 3
    assert len(cluster.requests) == 2  # they shared one


async def test_node_is_given_the_time_that_the_call_has_left(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    timer = await client.schedule("t", b"1", key="k", delay=9)
    for timeout in (600, timedelta(days=7), float("inf"), None):
        await client.cancel(timer.id, timeout=timeout)
    given = cluster.deadlines_s[-4:]
    for deadline_s, at_least_s, at_most_s in zip(
        given,
        (60, 600, 8 * 86_400, 10),
        (610, 8 * 86_400, 366 * 86_400, 62),  # a second more, and gRPC rounds up
        strict=True,
    ):
        assert deadline_s is not None
        assert at_least_s < deadline_s <= at_most_s


@pytest.mark.parametrize("by", ["id", "key"])
async def test_single_cancels_and_reschedules_of_many_callers_share_requests(
    cluster: Cluster, client: AsyncTimerClient, by: str
) -> None:
    keys = [f"k{at}" for at in range(40)]
    timers = [await client.schedule("t", b"1", key=key, delay=9) for key in keys]
    named = [
        {"timer": timer} if by == "id" else {"topic": "t", "key": key}
        for timer, key in zip(timers, keys, strict=True)
    ]
    orders = itertools.count()

    def count(_: object) -> None:
        next(orders)

    cluster.on_call = count
    moved = await asyncio.gather(
        *(client.reschedule(**one, delay=10 + at) for at, one in enumerate(named))
    )
    assert [timer.due_ms - NOW_MS for timer in moved] == [1000 * (10 + at) for at in range(40)]
    assert next(orders) == 3
    named = [{"timer": timer} for timer in moved] if by == "id" else named
    results = await asyncio.gather(*(client.cancel(**one) for one in named))
    assert results == [CancelResult.CANCELLED] * 40
    assert next(orders) == 7


async def test_modes_do_not_share_a_request(cluster: Cluster, client: AsyncTimerClient) -> None:
    first = await client.schedule("t", b"1", key="k", delay=9)
    kept, replaced, plain = await asyncio.gather(
        client.schedule("t", b"2", key="k", delay=9, on_conflict="keep"),
        client.schedule("t", b"3", key="k", delay=9, on_conflict="replace"),
        client.schedule("t", b"4", delay=9),
    )
    assert (kept, kept.result) == (first, ScheduleResult.KEPT)
    assert (replaced.result, replaced.replaced) == (ScheduleResult.REPLACED, first.raw)
    assert plain.result is ScheduleResult.SCHEDULED
    assert len(cluster.requests) == 4
    wrong: Any = "overwrite"
    with pytest.raises(InvalidRequest, match="on_conflict"):
        await client.schedule("t", b"", key="k", on_conflict=wrong)


async def test_lost_answer_of_a_conflict_is_repeated_as_it_was(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    first = await client.schedule("t", b"1", key="k", delay=9)
    cluster.on_schedule = once("lose")
    replaced = await client.schedule("t", b"2", key="k", delay=9, on_conflict="replace")
    assert replaced.duplicate
    assert replaced.replaced == first.raw
    assert len(cluster.rows) == 2
    assert (await client.count_timers("t")).pending == 1


async def test_batch_tells_of_each_row(client: AsyncTimerClient) -> None:
    timers = await client.schedule_batch("t", [b"x"] * 3, keys=["a", "a", "b"], delay=9)
    assert [result.name for result in timers.results] == ["SCHEDULED", "REJECTED", "SCHEDULED"]
    assert timers.existing == [None, timers[0].id, None]
    rows = [NewTimer("t", b"", key=key, delay=9) for key in ("c", "b")]
    together = await client.schedule_all(rows)
    for found, at, key in ((timers, 1, "a"), (timers[1:], 0, "a"), (together, -1, "b")):
        with pytest.raises(AlreadyExists, match=f"key = '{key}'"):
            found[at]
    assert [timer.id for timer in timers[::2]] == [timers[0].id, timers[2].id]


async def test_cancel_and_reschedule_by_key(client: AsyncTimerClient) -> None:
    old = await client.schedule("t", b"p", key="k", delay=9, headers={"a": "b"})
    new = await client.reschedule(key="k", topic="t", delay=60)
    assert new.due_ms == NOW_MS + 60_000
    assert await client.cancel(old) == CancelResult.RESCHEDULED
    assert await client.cancel(key="k", topic="t") == CancelResult.CANCELLED
    assert await client.cancel(key="k", topic="t") == CancelResult.NOT_FOUND
    with pytest.raises(NotPending) as ended:
        await client.reschedule(new, due_ms=NOW_MS)
    assert ended.value.result is RescheduleResult.ALREADY_CANCELLED
    with pytest.raises(NotFound):
        await client.reschedule(key="k", topic="t", delay=1)
    for wrong in ({}, {"key": "k"}, {"timer": new, "key": "k", "topic": "t"}):
        with pytest.raises(InvalidRequest):
            await client.cancel(**wrong)


async def test_reschedule_whose_answer_is_lost_is_not_sent_again(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    timer = await client.schedule("t", b"p", key="k", delay=9)
    cluster.on_call = once("lose")
    with pytest.raises(OutcomeUnknown):
        await client.reschedule(timer, delay=60)
    assert len(cluster.called(pb.RescheduleRequest)) == 1
    assert (await client.get_timer(key="k", topic="t")).due_ms == NOW_MS + 60_000


async def test_cancel_by_key_whose_answer_is_lost_leaves_the_next_timer_of_the_key_alone(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    old = await client.schedule("t", b"1", key="k", delay=9)
    cluster.on_call = at_call(1, "lose", lambda: late(cluster, key="k"))
    with pytest.raises(OutcomeUnknown):
        await client.cancel(key="k", topic="t")
    assert await client.cancel(old) == CancelResult.ALREADY_CANCELLED  # the second call
    assert (await client.get_timer(key="k", topic="t")).payload == b"late"
    # The error had no effect: the request is sent again.
    cluster.on_call = once(wire_error(pb.REASON_NOT_READY))
    assert await client.cancel_keys("t", ["k"]) == [CancelResult.CANCELLED]


async def late(cluster: Cluster, **named: str) -> None:
    """Let another client schedule a timer."""
    async with cluster.core.client() as other:
        await other.schedule("t", b"late", delay=1, **named)  # type: ignore[arg-type]


def at_call(
    number: int, order: str, before: Callable[[], Awaitable[None]]
) -> Callable[[object], Awaitable[Order]]:
    """Give the order to that call, from 1 on, and do something right before the next one."""
    calls = itertools.count(1)

    async def on_call(_: object) -> Order:
        at = next(calls)
        if at == number + 1:
            await before()
        return order if at == number else None

    return on_call


@pytest.mark.parametrize("lost", [1, 2, 3])
@pytest.mark.parametrize("kind", ["cancel", "reschedule"])
async def test_change_by_filter_whose_answer_is_lost_changes_only_what_was_there_and_counts_so(
    cluster: Cluster,
    client: AsyncTimerClient,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    lost: int,
) -> None:
    monkeypatch.setattr(timer_changes, "FILTER_PAGE", page := 3)
    n = 2 * page + 1
    await client.schedule_batch("t", [b""] * n, delay=9)

    async def come() -> None:
        for _ in range(4 if lost > 1 else 0):
            await late(cluster)

    cluster.on_call = at_call(lost, "lose", come)
    if kind == "cancel":
        changed = await client.cancel_where("t")
    else:
        changed = await client.reschedule_where("t", {}, delay=60)
    left = [(each.payload, each.due_ms - NOW_MS) async for each in client.list_timers("t")]
    moved = [(b"", 60_000)] * (n if kind == "reschedule" else 0)
    assert left == [(b"late", 1_000)] * (4 if lost > 1 else 0) + moved
    assert (changed, changed.exact) == ((n, True) if lost == 1 else (n - page, False))


async def test_failure_after_the_first_part_is_no_certainty(
    cluster: Cluster, client: AsyncTimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = await client.schedule_batch("t", [b""] * 4, delay=9)
    monkeypatch.setattr("timerclient.client.timer_calls.CANCEL_IDS_MAX", 2)

    for call in (
        lambda: client.cancel_batch(timers),
        lambda: client.reschedule_batch(timers, delay=60),
        lambda: client.cancel_where("t"),
    ):
        cluster.on_call = once(None, wire_error(pb.REASON_INVALID_REQUEST))
        with pytest.raises(InvalidRequest) as failed:
            await call()
        assert not failed.value.outcome_known


async def test_timers_that_a_reschedule_left_are_asked_for_again(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    timers = await client.schedule_batch("t", [b"%d" % at for at in range(5)], delay=9)

    def two(request: pb.RescheduleRequest) -> pb.RescheduleResponse:
        moved = request.due_ms[:2]
        left = len(request.due_ms) - len(moved)
        results = [pb.RESCHEDULE_RESULT_RESCHEDULED] * len(moved)
        results += [pb.RESCHEDULE_RESULT_LEFT] * left
        new = b"".join(due_ms.to_bytes(6, "big") + bytes(9) for due_ms in moved)
        return pb.RescheduleResponse(results=results, timer_ids=new + bytes(15 * left))

    cluster.on_call = two
    due = [NOW_MS + 60 + at for at in range(5)]
    moved = await client.reschedule_batch(timers, due_ms=due)
    assert [one.timer.due_ms for one in moved if one.timer] == due
    asked = [request.timer_ids for request in cluster.called(pb.RescheduleRequest)]
    assert asked == [b"".join(timer.raw for timer in timers[at:]) for at in (0, 2, 4)]


async def test_batches_of_reschedules_and_filters(client: AsyncTimerClient) -> None:
    due = [NOW_MS + 1000 * at for at in range(1, 11)]
    timers = await client.schedule_batch("t", [b"%d" % ms for ms in due], due_ms=due)
    moved = await client.reschedule_batch(timers[:2], due_ms=[due[0] + 1, due[1] + 2])
    assert [one.timer.due_ms for one in moved if one.timer] == [due[0] + 1, due[1] + 2]
    again = await client.reschedule_batch([timers[0]], delay=1)
    assert again == [(RescheduleResult.ALREADY_CANCELLED, None, moved[0].timer.id)]  # type: ignore[union-attr]
    assert await client.cancel_where("t", due_to=due[4]) == 4
    start = datetime.fromtimestamp(due[6] / 1000, UTC)
    assert await client.reschedule_where("t", {"due_from": start}, delay=100) == 4
    left = [timer.due_ms async for timer in client.list_timers("t")]
    assert left == [*due[4:6], *[NOW_MS + 100_000] * 4]
    with pytest.raises(InvalidRequest, match="due_to"):
        await client.cancel_where("t", due_to=datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidRequest, match="due_from = 1795824060: must be Unix milliseconds"):
        await client.cancel_where("t", due_from=1_795_824_060)


async def test_looking_in(client: AsyncTimerClient) -> None:
    timer = await client.schedule("t", b"p\xff", key="k", headers={"a": "ä"}, delay=9)
    info = await client.get_timer(timer)
    assert (info.id, info.state, info.topic) == (timer.id, TimerState.PENDING, "t")
    assert (info.payload, info.key, info.headers) == (b"p\xff", "k", {"a": "ä"})
    assert info.requested_ms == NOW_MS + 9000
    await client.schedule_batch("t", [b""] * 8, keys=[f"a{n}" for n in range(8)], delay=1)
    counts = await client.count_timers("t", key_prefix="a", due_from=NOW_MS)
    assert (counts.pending, counts.within) == (8, {})  # of three pages
    assert await client.cancel_where("t", key_prefix="a") == 8
    counts = await client.count_timers("t")
    assert (counts.pending, counts.within[timedelta(seconds=5)], counts.beyond) == (1, 0, 0)
    await client.cancel(timer)
    ended = await client.get_timer(timer.id)
    assert (ended.id, ended.state, ended.payload) == (timer.id, TimerState.CANCELLED, None)
    with pytest.raises(NotFound):
        await client.get_timer(key="k", topic="t")
    assert [one async for one in client.list_timers("t")] == []
