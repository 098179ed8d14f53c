"""Request ids, stories, lag and producers against three real processes, over failovers."""

import contextlib
import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest

from tests.cluster.running import (
    WAIT_S,
    Running,
    code_of,
    columns,
    error_of,
    schedule,
    take,
    until,
)
from tests.timerfake.doc_examples import examples
from timer.model.units import ProducerId
from timer.state.producers import name_of
from timerclient import NewTimer, TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_name
from timerclient.values import errors

pytestmark = pytest.mark.slow

SETTINGS = ("limits.request_window_ms = 600000", "limits.producer_idle_ms = 2000")


def test_request_with_an_id_is_one_timer_over_failover_and_restart(
    cluster: Running, topic: str
) -> None:
    request = schedule(columns(topic, [b"a", b"b"]), request_id=f"{topic}-1")
    first = cluster.timers().Schedule(request)
    assert (len(first.timer_ids), first.duplicate) == (30, False)
    cluster.kill_together(*cluster.nodes)
    cluster.up()
    other = columns(f"{topic}-2", [b"c"])
    with cluster.client() as client:
        again = cluster.timers().Schedule(request)
        assert (again.timer_ids, again.duplicate) == (first.timer_ids, True)
        request.timers[0].payloads = b"xy"
        for changed in (request, schedule(other, request_id=f"{topic}-1")):
            with pytest.raises(grpc.RpcError) as caught:
                cluster.timers().Schedule(changed)
            assert code_of(caught.value) == grpc.StatusCode.INVALID_ARGUMENT
            assert error_of(caught.value).field == "request_id"
        timer = client.schedule(topic, b"mine", delay=60, request_id=topic)
        leader = cluster.up()
        cluster.kill(leader)
        same = client.schedule(topic, b"mine", delay=60, request_id=topic)
        assert (same.id, same.duplicate) == (timer.id, True)
        assert client.count_timers(topic).pending == 3
    cluster.up()
    cluster.digests_agree()
    cluster.counts_add_up()


REFUSED: dict[str, dict[str, Any]] = {
    "too long": {"request_id": "x" * 65},
    "a zero byte": {"request_id": "a\0b"},
    "with a producer": {"request_id": "a", "producer_id": 1, "sequence": 1},
}


@pytest.mark.parametrize("case", REFUSED)
def test_request_id_that_may_not_be_names_the_limit(cluster: Running, case: str) -> None:
    request = schedule(columns("limits", [b"x"]), **REFUSED[case])
    with pytest.raises(grpc.RpcError) as caught:
        cluster.timers().Schedule(request)
    assert error_of(caught.value).field == "request_id"
    assert error_of(caught.value).limit


def test_timers_of_several_topics_are_all_there_or_none_whenever_the_leader_dies(
    cluster: Running, client: TimerClient
) -> None:
    names = ["all-1", "all-2", "all-3"]
    client.schedule_all([NewTimer(name, b"first", delay=600) for name in names])
    leader, stub = cluster.up(), cluster.timers()
    request = schedule(*(columns(name, [b"x", b"y"]) for name in names))
    begun = threading.Event()

    def send() -> int:
        """Return the number of requests answered until the leader died."""
        for number in itertools.count():
            try:
                stub.Schedule(request, timeout=WAIT_S)
            except grpc.RpcError:
                return number
            if number == 20:
                begun.set()
        raise AssertionError

    with ThreadPoolExecutor(4) as threads:
        sending = [threads.submit(send) for _ in range(4)]
        assert begun.wait(WAIT_S)
        cluster.kill(leader)
        answered = sum(each.result(WAIT_S) for each in sending)
    cluster.up()
    pending = [client.count_timers(name).pending for name in names]
    assert len({*pending}) == 1, pending
    assert 1 + 2 * answered <= pending[0] <= 1 + 2 * (answered + 4)
    new = [NewTimer(name, b"n", delay=600) for name in names for _ in "ab"]
    first, again = (client.schedule_all(new, request_id="all") for _ in "12")
    assert first.ids == again.ids
    assert (len({*first.ids}), again.duplicate) == (6, True)
    cluster.counts_add_up()


def test_story_is_told_over_a_failover_from_schedule_to_ack(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    timer = client.schedule(topic, b"x", key="k", request_id=topic)
    until(lambda: [t for t in client.topics() if t.name == topic and t.fired])
    with client.consumer(topic, "g") as consumer:
        [message] = until(lambda: consumer.receive(1, timeout=1))
        message.nack(delay=0).result(WAIT_S)
        take(consumer, 1)
    story = client.tell_story(timer)
    name = partial(short_name, pb.StoryEvent.What.DESCRIPTOR)
    assert [name(event.what) for event in story.events] == ["SCHEDULED", "FIRED", "NACKED", "ACKED"]
    assert [event.group for event in story.events[2:]] == ["g", "g"]
    assert story.events[0].request_id == topic
    assert story.end.state == pb.TIMER_STATE_FIRED
    assert not story.end.gaps
    pending = client.schedule(topic, b"y", delay=600, key="k")
    moved = client.reschedule(pending, delay=700)
    client.cancel(moved)
    cluster.change_leader(client)
    told = [client.tell_story(each) for each in (timer, pending, moved)]
    assert told[0].events == story.events
    lines = [[name(event.what) for event in each.events] for each in told[1:]]
    assert lines == [["SCHEDULED", "RESCHEDULED"], ["RESCHEDULED_FROM", "CANCELLED"]]
    first = told[1].events[0]
    assert first.producer or first.request_id, "a client's first call has a request id instead"
    assert told[1].events[1].other_id == moved.raw
    assert told[2].events[0].other_id == pending.raw
    with pytest.raises(errors.NotFound):
        client.tell_story("0" * 24)


def test_lag_is_in_the_metrics_and_gone_when_all_is_acked(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.create_group(topic, "g")
    client.schedule(topic, b"x")

    def lags() -> tuple[int, int]:
        [group] = client.describe_topic(topic).groups
        return group.undelivered_lag_ms, group.unacked_lag_ms

    leader = cluster.up()
    of_group = re.escape(f'timer_group_undelivered_lag_seconds{{group="g",topic="{topic}"}}')
    until(lambda: cluster.metric(leader, of_group) > 0.2)
    assert cluster.metric(leader, "timer_undelivered_lag_seconds") > 0.2
    with client.consumer(topic, "g") as consumer:
        [message] = until(lambda: consumer.receive(1, timeout=1))
        until(lambda: lags()[0] == 0 < lags()[1])
        message.ack().result(WAIT_S)
    assert lags() == (0, 0)
    status = client.describe_topic(topic)
    assert sum(status.handed_out_late.counts) == 1
    before = sum(status.fired_late.counts)
    client.schedule(topic, b"later", delay=0.05)
    until(lambda: sum(client.describe_topic(topic).fired_late.counts) == before + 1)
    assert cluster.metric(leader, "timer_handed_out_lateness_seconds_count") >= 1
    page = cluster.get(leader, "/metrics")[1]
    committed = dict(re.findall(r'^timer_commit_seconds_count{kind="(\w+)"} (\S+)$', page, re.M))
    assert float(committed["schedule"]) >= 2


def test_idle_producer_expires_is_told_so_and_its_client_goes_on(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    issued = cluster.timers().RegisterProducer(pb.RegisterProducerRequest(token=b"before"))
    scheduled = 0

    def names() -> set[int]:
        return {each.producer for each in client.producers()}

    def used(mine: TimerClient) -> int | None:
        """Return the new producer by which a client schedules one more. None: there is none."""
        nonlocal scheduled
        before = names()
        mine.schedule_batch(topic, [b"1"], delay=600)
        scheduled += 1
        return next(iter(names() - before), None)

    def begun() -> tuple[TimerClient, pb.ProducerStatus] | None:
        """Return a client that has scheduled once, and its producer. None: it has expired since."""
        mine = clients.enter_context(cluster.client())
        try:
            return (mine, client.describe_producer(name)) if (name := used(mine)) else None
        except errors.UnknownProducer:
            return None

    def expired(name: int) -> bool:
        try:
            client.describe_producer(name)
        except errors.UnknownProducer as error:
            return "was idle" in str(error)
        return False

    with contextlib.ExitStack() as clients:
        mine, status = until(begun)
        assert (status.last_sequence, status.answers) == (1, 1)
        assert status.expires_at_ms == status.used_at_ms + 2_000
        until(partial(expired, status.producer))
        until(partial(expired, name_of(ProducerId(issued.producer_id))))
        request = schedule(columns(topic, [b"raw"]), producer_id=issued.producer_id, sequence=1)
        with pytest.raises(grpc.RpcError) as caught:
            cluster.timers().Schedule(request)
        assert error_of(caught.value).reason == pb.REASON_UNKNOWN_PRODUCER
        assert "was idle" in error_of(caught.value).message
        assert error_of(caught.value).outcome_known
        assert until(partial(used, mine)) != status.producer
    assert client.count_timers(topic).pending == scheduled
    with pytest.raises(errors.UnknownProducer, match="never issued"):
        client.describe_producer(issued.producer_id)


def test_examples_of_the_documentation_run_and_may_be_repeated(client: TimerClient) -> None:
    client.create_topic("orders")
    first, again = (dict[str, Any](client=client) for _ in "12")
    for names in (first, again):
        for example in examples("docs/looking.md"):
            exec(example, names)
    for name in ("timer", "timers"):
        assert (first[name].duplicate, again[name].duplicate) == (False, True)
