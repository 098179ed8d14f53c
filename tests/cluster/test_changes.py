"""Against three real processes: keys, reschedules, cancels by key and filter, looking in.

The state is flushed every second, so that timers lie in memory and in runs; a test that says so
kills the leader, or every node, in between.
"""

from datetime import timedelta
from typing import Any

import grpc
import pytest

from tests.cluster.hosted import flushed
from tests.cluster.running import (
    RPC_S,
    Running,
    code_of,
    columns,
    error_of,
    nothing_comes,
    now_ms,
    schedule,
    take,
)
from timerclient import (
    CancelResult,
    NotFound,
    NotPending,
    RescheduleResult,
    TimerClient,
    TimerState,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.streams.node_channel import DIRECT

pytestmark = pytest.mark.slow

HOUR = 3600.0
SETTINGS = ("storage.flush_interval_ms = 1000", "limits.key_bytes_max = 100")


def keys_of(client: TimerClient, topic: str, **where: Any) -> list[str | None]:
    return [timer.key for timer in client.list_timers(topic, page_size=7, **where)]


def test_rescheduled_timer_fires_once_at_its_new_time_through_failover_and_restart(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    old = client.schedule(topic, b"p", delay=HOUR, key="k", headers={"a": "b"})
    far = client.schedule(topic, b"far", delay=HOUR, key="far")
    flushed(cluster)
    assert client.get_timer(old).state is TimerState.PENDING
    cluster.kill(cluster.wait_for_leader())
    info = client.get_timer(key="k", topic=topic)
    assert (info.id, info.payload, info.headers) == (old.id, b"p", {"a": "b"})
    new = client.reschedule(key="k", topic=topic, delay=HOUR / 2)
    assert new.id != old.id
    cluster.kill_together(*cluster.nodes)
    cluster.up()
    assert client.get_timer(old).state is TimerState.CANCELLED
    with pytest.raises(NotPending) as ended:
        client.reschedule(old, delay=1)
    assert ended.value.result is RescheduleResult.ALREADY_CANCELLED
    due_ms = now_ms() + 700
    last = client.reschedule(new, due_ms=due_ms)
    with client.consumer(topic, group="g") as consumer:
        [message] = take(consumer, 1)
        assert (message.id, message.key, message.headers) == (last.id, "k", {"a": "b"})
        assert message.due_ms == due_ms <= message.fired_at_ms
        assert client.get_timer(last).state is TimerState.FIRED
        nothing_comes(consumer, lambda: client.schedule(topic, b"the next"))
    assert client.get_timer(far).payload == b"far"
    assert client.cancel(key="far", topic=topic) == CancelResult.CANCELLED
    cluster.counts_add_up()
    cluster.digests_agree()


def test_filter_cancels_and_reschedules_what_it_picks_and_nothing_else(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    start = now_ms() + 2 * 3_600_000
    n = 2_500
    names = [f"{'ab'[at % 2]}{at}" for at in range(n)]
    for first in range(0, n, 500):
        span = range(first, first + 500)
        client.schedule_batch(
            topic,
            [b"%d" % at for at in span],
            keys=names[first : first + 500],
            due_ms=[start + 10 * at for at in span],
        )
    assert client.count_timers(topic).pending == n
    flushed(cluster)
    assert keys_of(client, topic, due_to=start + 10 * 20) == names[:20]
    assert keys_of(client, topic, key_prefix="b", due_to=start + 10 * 9) == names[1:9:2]
    assert client.cancel_where(topic, key_prefix="a") == n // 2
    counts = client.count_timers(topic)
    assert (counts.pending, counts.within[timedelta(hours=1)]) == (n // 2, 0)
    assert counts.within[timedelta(hours=6)] == n // 2
    moved = client.reschedule_where(topic, {"due_from": start + 10 * 2_000}, delay=6 * HOUR + 60)
    assert moved == 250
    counts = client.count_timers(topic)
    assert (counts.pending, counts.within[timedelta(hours=6)]) == (n // 2, n // 2 - 250)
    assert keys_of(client, topic) == names[1:2_000:2] + names[2_001::2]
    cluster.digests_agree()


def test_change_says_which_field_breaks_which_limit(cluster: Running, client: TimerClient) -> None:
    client.schedule("limits", b"", delay=HOUR)
    stub = cluster.timers()
    key = pb.TimerKeys(topic="limits", key_sizes=[1, 1], keys=b"kk")
    where = pb.TimerFilter(topic="limits", due_from_ms=10**12, due_to_ms=10**11)
    many = [f"{at}" for at in range(1025)]
    asked: list[tuple[Any, Any, str]] = [
        (stub.Cancel, pb.CancelRequest(), "timer_ids, keys, filter"),
        (stub.Cancel, pb.CancelRequest(timer_ids=bytes(15), keys=key), "timer_ids, keys, filter"),
        (stub.Cancel, pb.CancelRequest(keys=key), "keys"),
        (stub.Cancel, pb.CancelRequest(filter=where), "filter.due_to_ms"),
        (stub.Cancel, pb.CancelRequest(timer_ids=bytes(15), page_token=b"x"), "page_token"),
        (
            stub.Reschedule,
            pb.RescheduleRequest(timer_ids=bytes(15)),
            "due_ms, delay_ms, delay_level",
        ),
        (stub.GetTimer, pb.GetTimerRequest(topic="limits"), "timer_id, topic, key"),
        (stub.GetTimer, pb.GetTimerRequest(topic="limits", key="k" * 101), "key"),
        (stub.ListTimers, pb.ListTimersRequest(page_size=1001), "page_size"),
        (
            stub.ListTimers,
            pb.ListTimersRequest(filter=pb.TimerFilter(topic="limits"), page_token=bytes(32)),
            "page_token",
        ),
        (
            stub.CountTimers,
            pb.CountTimersRequest(topic="limits", filter=pb.TimerFilter(topic="limits")),
            "topic, filter",
        ),
        (
            stub.CountTimers,
            pb.CountTimersRequest(topic="limits", page_token=bytes(32)),
            "page_token",
        ),
        (
            stub.CountTimers,
            pb.CountTimersRequest(filter=pb.TimerFilter(topic="limits"), page_token=bytes(32)),
            "page_token",
        ),
        (
            stub.Schedule,
            schedule(columns("limits", [b""], key_sizes=[1], keys=b"k"), on_conflict=7),
            "on_conflict",
        ),
        (
            stub.Schedule,
            schedule(
                columns(
                    "limits",
                    [b""] * len(many),
                    key_sizes=[len(name) for name in many],
                    keys="".join(many).encode(),
                )
            ),
            "keys",
        ),
    ]
    for method, request, field in asked:
        with pytest.raises(grpc.RpcError) as refused:
            method(request, timeout=RPC_S)
        assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT
        assert error_of(refused.value).field == field
    with pytest.raises(NotFound):
        client.count_timers("nobody-knows")
    follower = cluster.timers(cluster.followers()[0])
    with pytest.raises(grpc.RpcError) as refused:
        follower.ListTimers(
            pb.ListTimersRequest(filter=pb.TimerFilter(topic="limits")),
            timeout=RPC_S,
            metadata=DIRECT,
        )
    assert error_of(refused.value).reason == pb.REASON_NOT_LEADER
