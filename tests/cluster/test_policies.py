"""Against three real processes: delay levels, and policies of cluster, namespace and topic.

The state is flushed every second, so that timers lie in memory and in runs. Each test has a
namespace of its own; what it says of the cluster it unsays.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import grpc
import pytest

from tests.cluster.conftest import Ctl
from tests.cluster.hosted import flushed
from tests.cluster.running import (
    Running,
    code_of,
    columns,
    error_of,
    in_time,
    now_ms,
    schedule,
    take,
    until,
)
from timerclient import InvalidRequest, NotFound, Timer, TimerClient, TimerState
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import policy_fields

pytestmark = pytest.mark.slow

HOUR = 3600.0
HOUR_MS = 3_600_000
SLACK_MS = 30_000
"""Clocks of one machine, and a slow one: times of hours are told apart by it."""
SETTINGS = ("storage.flush_interval_ms = 1000", "limits.payload_bytes_max = 100000")


@pytest.fixture
def ns(topic: str) -> str:
    """A namespace of the test's own."""
    return topic


def hours_away(due_ms: int, hours: float) -> bool:
    return abs(due_ms - now_ms() - hours * HOUR_MS) < SLACK_MS


def effective(client: TimerClient, **scope: str) -> dict[str, Any]:
    return policy_fields.fields_of(client.describe_policies(**scope).effective)


# ---- delay levels


def level_column(topic: str, level: int) -> pb.TimerColumns:
    return columns(topic, [b""], delay_ms=[], delay_level=[level])


def test_negative_level_is_refused_by_client_and_server(
    cluster: Running, client: TimerClient, ns: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"delay_level.*-1.*must be 0 to 2147483647"):
        client.schedule(f"{ns}/t", b"", delay_level=-1)
    with pytest.raises(grpc.RpcError) as refused:
        cluster.timers().Schedule(schedule(level_column(f"{ns}/t", -1)))
    error = error_of(refused.value)
    assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.field, error.limit) == ("delay_level", "must be 0 or more")
    assert "delay_level = -1" in error.message


# ---- what policies do


# ---- changed while timers are pending


def test_delayed_delivery_off_delivers_new_ones_and_pending_ones_keep_their_time(
    cluster: Running, client: TimerClient, ns: str
) -> None:

    def prepared(due_ms: int) -> tuple[str, Timer, Timer]:
        """Return a topic with a new timer and two of before: one for later, one due then."""
        topic = f"{ns}/t-{due_ms}"
        client.alter_policies({"delayed_delivery": True}, namespace=ns)
        old = client.schedule(topic, b"old", delay=HOUR)
        soon = client.schedule(topic, b"soon", due_ms=due_ms)
        flushed(cluster)
        client.alter_policies({"delayed_delivery": False}, namespace=ns)
        client.schedule(topic, b"new", delay=HOUR)
        return topic, old, soon

    topic, old, soon = in_time(prepared, 4_000)
    with client.consumer(topic, group="g") as consumer:
        messages = take(consumer, 2)
        assert [message.payload for message in messages] == [b"new", b"soon"]
        assert messages[1].fired_at_ms >= soon.due_ms
        cluster.kill(cluster.wait_for_leader())
        client.schedule(topic, b"after a failover", delay=HOUR)
        assert take(consumer, 1)[0].payload == b"after a failover"
        cluster.kill_together(*cluster.nodes)
        cluster.up()
        client.schedule(topic, b"after a restart", delay=HOUR)
        assert take(consumer, 1)[0].payload == b"after a restart"
    assert client.get_timer(old).state is TimerState.PENDING
    assert client.get_timer(old).due_ms == old.due_ms
    assert effective(client, namespace=ns)["delayed_delivery"] is False
    client.alter_policies({"delayed_delivery": True}, namespace=ns)
    assert hours_away(client.schedule(topic, b"on again", delay=HOUR).due_ms, 1)
    cluster.digests_agree()
    cluster.counts_add_up()


def test_reschedule_follows_the_policies_of_each_timers_topic(
    cluster: Running, client: TimerClient, ns: str
) -> None:
    topics = f"{ns}/fixed", f"{ns}/plain"
    timers = [client.schedule(topic, b"p", delay=HOUR, key="k") for topic in topics]
    flushed(cluster)
    timers += [client.schedule(topic, b"p", delay=HOUR) for topic in topics]  # in memory
    client.alter_policies({"fixed_delay_ms": 3 * HOUR_MS}, topic=topics[0])
    client.alter_policies({"delay_levels_ms": [2 * HOUR_MS]}, namespace=ns)
    moved = client.reschedule_batch(timers, delay_level=1)
    for one, hours in zip(moved, (3, 2, 3, 2), strict=True):
        assert one.timer is not None
        assert hours_away(one.timer.due_ms, hours)
    for topic, hours in zip(topics, (3, 5), strict=True):
        by_key = client.reschedule(key="k", topic=topic, delay=5 * HOUR)
        assert hours_away(by_key.due_ms, hours)
        assert client.reschedule_where(topic, {}, delay=5 * HOUR) == 2
        assert all(hours_away(each.due_ms, hours) for each in client.list_timers(topic))
    client.alter_policies({"delay_ms_max": HOUR_MS}, topic=topics[1])
    with pytest.raises(InvalidRequest, match="delay_ms_max of the topic"):
        client.reschedule_batch([t.raw for t in client.list_timers(topics[1])], delay=2 * HOUR)


def test_retry_of_what_was_applied_is_answered_as_it_was_whatever_became_policy(
    cluster: Running, client: TimerClient, ns: str
) -> None:
    timers = cluster.timers()
    producer = timers.RegisterProducer(pb.RegisterProducerRequest(token=ns.encode()[:64]))
    request = schedule(columns(f"{ns}/t", [b"four"]), producer_id=producer.producer_id, sequence=1)
    first = timers.Schedule(request)
    client.alter_policies({"delay_ms_max": 1, "payload_bytes_max": 3}, namespace=ns)
    again = timers.Schedule(request)
    assert (again.timer_ids, again.duplicate) == (first.timer_ids, True)
    request.sequence = 2
    with pytest.raises(grpc.RpcError) as refused:
        timers.Schedule(request)
    assert error_of(refused.value).field == "payload"


# ---- the API, the terminal, HTTP


@pytest.mark.parametrize(
    ("ask", "field", "text"),
    [
        (lambda c, ns: c.alter_policies({"tick_ms": 0}, namespace=ns), "tick_ms", "1 to 3600000"),
        (
            lambda c, ns: c.alter_policies({"payload_bytes_max": 10**6}, cluster=True),
            *("payload_bytes_max", "own"),
        ),
        (lambda c, ns: c.alter_policies(namespace=ns), "set, unset", "at least one"),
        (
            lambda c, ns: c.alter_policies(unset=["ttl"], cluster=True),
            *("unset", "must be one of delayed_delivery"),
        ),
        (
            lambda c, ns: c.alter_policies({"ttl": 1}, cluster=True),
            *("policy", "must be one of delayed_delivery"),
        ),
        (lambda c, ns: c.alter_policies({"tick_ms": "1s"}, topic=ns), "tick_ms", "whole number"),
        (lambda c, ns: c.alter_policies({"tick_ms": 1}, namespace="a/b"), "namespace", "must be 1"),
        (lambda c, ns: c.describe_policies(namespace=ns, topic=ns), "namespace, topic", "at most"),
        (lambda c, ns: c.schedule(f"{ns}/", b""), "topic", "not ending in /"),
        (lambda c, ns: c.schedule("default/", b""), "topic", "must be 1"),
    ],
)  # fmt: skip
def test_refusal_names_field_and_limit(
    client: TimerClient, ns: str, ask: Callable[[TimerClient, str], Any], field: str, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        ask(client, ns)
    assert refused.value.field == field


def test_topic_that_does_not_exist_is_made_by_setting_its_policy_only(
    client: TimerClient, ns: str
) -> None:
    with pytest.raises(NotFound, match=f"{ns}/t"):
        client.describe_policies(topic=f"{ns}/t")
    with pytest.raises(NotFound, match=f"{ns}/t"):
        client.alter_policies(unset=["tick_ms"], topic=f"{ns}/t")
    client.alter_policies({"fixed_delay_ms": HOUR_MS}, topic=f"{ns}/t")
    assert hours_away(client.schedule(f"{ns}/t", b"").due_ms, 1)


def test_timerctl_and_http_show_what_was_set(cluster: Running, ns: str, ctl: Ctl) -> None:
    ctl(
        *("policies", "set", "--namespace", ns, "delay_ms_max=1h", "delay_levels_ms=1s,90s"),
        "payload_bytes_max=1KiB",
    )
    ctl("policies", "set", "--topic", f"{ns}/t", "delayed_delivery=off", "tick_ms=50")
    ctl("policies", "unset", "--topic", f"{ns}/t", "tick_ms")
    shown = json.loads(ctl("policies", "show", "--topic", f"{ns}/t", "-o", "json"))
    assert shown["own"] == {"delayed_delivery": False}
    assert shown["effective"]["delay_levels_ms"] == [1_000, 90_000]
    assert shown["sources"]["delay_ms_max"] == "namespace"
    text = ctl("policies", "show", "--namespace", ns)
    assert "1s,90s" in text
    assert f"also set by: topic {ns}/t" in text
    assert f"{ns}/t" in ctl("policies", "show")
    for name in cluster.nodes:

        def told(name: str = name) -> bool:
            status, body = cluster.get(name, f"/v1/policies?topic={ns}/t")
            return status == 200 and json.loads(body)["own"] == {"delayed_delivery": False}

        until(told)
        assert cluster.json(name, "/v1/policies")["scope"] == {"namespace": "", "topic": ""}
        assert cluster.get(name, f"/v1/policies?topic={ns}/none")[0] == 404
        assert cluster.get(name, "/v1/policies?namespace=a/b")[0] == 400


def test_cluster_policy_holds_for_all_until_it_is_unset(client: TimerClient, ns: str) -> None:
    client.alter_policies({"fixed_delay_ms": HOUR_MS}, cluster=True)
    try:
        assert hours_away(client.schedule(f"{ns}/t", b"").due_ms, 1)
        assert hours_away(client.schedule(ns, b"", delay=timedelta(days=1)).due_ms, 1)
    finally:
        client.alter_policies(unset=["fixed_delay_ms"], cluster=True)
    assert "fixed_delay_ms" not in effective(client)
