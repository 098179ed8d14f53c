"""Lists and counts of pending timers, states of single timers, status of topics and groups."""

from datetime import timedelta

import grpc
import pytest

from tests.conformance.worlds import World
from timerclient import InvalidRequest, NotFound, TimerState
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.pending_timers import Where

HOUR = 3600.0
HOUR_MS = 3_600_000


def test_list_is_in_firing_order_and_takes_filters(world: World, topic: str) -> None:
    client, now_ms = world.client, world.clock_ms()
    hours = [5, 3, 1, 4, 2]
    client.schedule_batch(
        topic,
        [b"%d" % hour for hour in hours],
        keys=[f"{'odd' if hour % 2 else 'even'}-{hour}" for hour in hours],
        due_ms=[now_ms + hour * HOUR_MS for hour in hours],
    )
    assert [t.payload for t in client.list_timers(topic)] == [b"1", b"2", b"3", b"4", b"5"]
    assert [t.payload for t in client.list_timers(topic, key_prefix="odd-")] == [b"1", b"3", b"5"]
    middle = client.list_timers(
        topic, due_from=now_ms + 2 * HOUR_MS, due_to=now_ms + 4 * HOUR_MS, page_size=1
    )
    assert [t.key for t in middle] == ["even-2", "odd-3"]
    client.cancel_where(topic)
    assert [*client.list_timers(topic)] == []
    with pytest.raises(NotFound):
        [*client.list_timers(f"{topic}-nobody-knows")]


def test_list_goes_page_by_page_and_sees_each_once(world: World, topic: str) -> None:
    client = world.client
    client.schedule_batch(topic, [b"%d" % n for n in range(2_500)], delay=HOUR)
    seen = [timer.payload for timer in client.list_timers(topic)]
    assert seen == [b"%d" % n for n in range(2_500)]
    client.cancel_where(topic)


def test_count_says_how_soon(world: World, topic: str) -> None:
    client = world.client
    delays = [30.0, 30.0, 2 * HOUR, 40 * 24 * HOUR]
    client.schedule_batch(topic, [b""] * 4, delay=delays)
    counts = client.count_timers(topic)
    within = {span: counts.within[span] for span in (timedelta(minutes=1), timedelta(hours=6))}
    assert (counts.pending, counts.beyond) == (4, 1)
    assert within == {timedelta(minutes=1): 2, timedelta(hours=6): 3}
    client.cancel_where(topic)
    assert client.count_timers(topic).pending == 0


def test_count_of_a_filter_is_the_length_of_its_list(world: World, topic: str) -> None:
    client, begin_ms = world.client, world.clock_ms() + HOUR_MS
    keys = [f"{'odd' if at % 2 else 'even'}-{at}" for at in range(10)]
    due_ms = [begin_ms + at for at in range(10)]
    timers = client.schedule_batch(topic, [b""] * 10, keys=keys, due_ms=due_ms)
    client.cancel(timers[3])
    middle: Where = {"due_from": begin_ms + 2, "due_to": begin_ms + 6}
    for where, expected in (
        (middle, 3),
        ({"key_prefix": "odd-"}, 4),
        (middle | {"key_prefix": "odd-"}, 1),
        ({"key_prefix": "none"}, 0),
        ({"due_to": begin_ms}, 0),
    ):
        counts = client.count_timers(topic, **where)
        assert (counts.pending, len([*client.list_timers(topic, **where)])) == (expected,) * 2
        assert (counts.within, counts.clock_ms > 0) == ({}, True)
    client.cancel_where(topic)


def test_timer_is_told_whole_while_pending_and_by_its_end_after(world: World, topic: str) -> None:
    client = world.client
    timer = client.schedule(topic, b"p", key="k", headers={"h": "1"}, delay=HOUR)
    moved = client.schedule(topic, b"q", delay=HOUR)
    info = client.get_timer(timer)
    assert (info.state, info.topic, info.payload) == (TimerState.PENDING, topic, b"p")
    assert (info.key, info.headers, info.id) == ("k", {"h": "1"}, timer.id)
    assert info.requested_ms is not None
    assert info.requested_ms <= info.due_ms == timer.due_ms
    assert client.get_timer(key="k", topic=topic) == info
    timer = client.reschedule(timer, delay=world.moment)
    with client.consumer(topic, "g") as consumer:
        world.pass_time(2)
        world.take(consumer, 1)
    assert client.get_timer(timer.id).state is TimerState.FIRED
    client.cancel(moved)
    assert client.get_timer(moved.raw).state is TimerState.CANCELLED
    with pytest.raises(NotFound):
        client.get_timer(key="k", topic=topic)
    unknown = bytearray(timer.raw)
    unknown[-1] ^= 1
    with pytest.raises(NotFound):
        client.get_timer(bytes(unknown))


def test_topics_and_groups_are_counted(world: World, topic: str) -> None:
    client = world.client
    topic_id = client.create_topic(topic)
    assert client.create_topic(topic) == topic_id
    client.schedule_batch(topic, [b""] * 3)
    client.schedule(topic, b"", delay=HOUR)
    client.cancel(client.schedule(topic, b"", delay=HOUR))
    with client.consumer(topic, "g", window=3) as consumer:
        held = world.receive(consumer, 3)
        held[0].ack().result(60)
        [status] = [each for each in client.topics() if each.name == topic]
        assert (status.topic_id, status.scheduled, status.fired) == (topic_id, 5, 3)
        assert (status.pending, status.cancelled, status.queue_end) == (1, 1, 3)
        [group] = status.groups
        assert (group.name, group.unacked, group.leased, group.consumers) == ("g", 2, 2, 1)
        for message in held[1:]:
            _ = message.ack()
    client.cancel_where(topic)


def test_checkpoint_tells_of_each_node_how_far_it_is(world: World, topic: str) -> None:
    client = world.client
    client.schedule(topic, b"")
    client.schedule(topic, b"", delay=HOUR)

    def told() -> pb.GetCheckpointResponse | None:
        world.pass_time()
        found = client.checkpoint()
        behind = [node for node in found.nodes if node.queue_offsets.get(topic) != 1]
        return None if behind or any(not node.digest for node in found.nodes) else found

    found = world.until(told)
    assert {node.node for node in found.nodes} == {node.name for node in client.status().nodes}
    assert sum(node.role == "leader" for node in found.nodes) == 1
    for node in found.nodes:
        assert node.checkpoint_index <= node.applied_index <= node.commit_index <= node.log_end
        assert 0 < node.last_read_time_ms <= world.clock_ms()
        assert (node.reachable, node.epoch) == (True, found.nodes[0].epoch)
        # All timers are in memory, or the later ones are in a run.
        assert node.window_end_ms == 0 or (node.runs and node.window_end_ms > world.clock_ms())
    client.cancel_where(topic)


def test_namespace_is_there_while_a_topic_or_a_policy_of_it_is(world: World, topic: str) -> None:
    client = world.client
    with pytest.raises(NotFound, match=topic):
        client.describe_namespace(topic)
    client.alter_policies({"tick_ms": 50}, namespace=topic)
    for name in ("a", "b"):
        client.schedule(f"{topic}/{name}", b"", delay=HOUR)
    other = client.schedule(f"{topic}-other/a", b"", delay=HOUR)
    found = client.describe_namespace(topic)
    assert found in client.namespaces()
    assert [each.name for each in found.topics] == [f"{topic}/a", f"{topic}/b"]
    assert found.policy == {"tick_ms": 50}
    assert client.delete_namespace(topic) == [f"{topic}/a", f"{topic}/b"]
    assert topic not in {each.name for each in client.namespaces()}
    assert client.get_timer(other).state is TimerState.PENDING
    for name in (topic, "default"):
        with pytest.raises((NotFound, InvalidRequest)):
            client.delete_namespace(name)
    client.cancel(other)


def test_status_names_the_leader_and_adds_up(world: World, topic: str) -> None:
    world.client.schedule(topic, b"")
    status = world.client.status()
    [leader] = [node for node in status.nodes if node.name == status.leader]
    assert leader.serving
    ended = leader.fired + leader.cancelled + leader.dropped
    assert leader.scheduled == leader.pending + ended
    members = world.client.members()
    assert {each.name for each in members.members if each.voter} == {n.name for n in status.nodes}


def test_page_of_several_rows_has_no_more_than_grpc_clients_accept(
    world: World, topic: str
) -> None:
    """They accept 4 MiB by default. A row of more than 3 MiB comes alone."""
    client, most, sizes = world.client, 4 << 20, [3 << 19, 3 << 20, (4 << 20) - 500, 1]
    client.schedule_batch(topic, [bytes(size) for size in sizes], delay=HOUR)
    listed: list[list[int]] = []
    token = b""
    while token or not listed:
        filter_ = pb.TimerFilter(topic=topic)
        page = world.unary("ListTimers", pb.ListTimersRequest(filter=filter_, page_token=token))
        listed.append([*page.timers.payload_sizes])
        token = page.next_page_token
    assert listed == [[size] for size in sizes]
    client.create_group(f"{topic}/now", "g")
    for _ in range(2):
        client.schedule_batch(f"{topic}/now", [bytes(300)] * 8_192, headers=[{"a": ""}] * 8_192)
    world.until(lambda: client.describe_topic(f"{topic}/now").queue_end == 16_384)
    read = world.unary("ReadMessages", pb.ReadMessagesRequest(topic=f"{topic}/now"))
    assert (3 << 20) < read.ByteSize() <= most


def test_messages_are_read_by_their_offsets_without_a_lease(world: World, topic: str) -> None:
    client = world.client
    client.create_group(topic, "g")
    client.schedule_batch(
        topic, [b"%d" % n for n in range(250)], keys=[f"k{n}" for n in range(250)]
    )
    world.until(lambda: world.unacked(topic, "g") == 250)
    page = client.read_messages(topic, max_messages=100)
    seen = page.messages
    while page.next_offset < page.end_offset:
        page = client.read_messages(topic, page.next_offset)
        seen += page.messages
    assert [(each.queue_offset, each.payload, each.key) for each in seen] == [
        (n, b"%d" % n, f"k{n}") for n in range(250)
    ]
    assert (page.begin_offset, page.end_offset, world.leased(topic, "g")) == (0, 250, 0)
    page = client.read_messages(topic, 7, end_offset=9, payloads=False)
    assert [(each.queue_offset, each.payload) for each in page.messages] == [(7, b""), (8, b"")]
    assert [*page.columns.payload_sizes] == [1, 1]
    past = client.read_messages(topic, 900)
    assert (len(past), past.next_offset, past.end_offset) == (0, 900, 250)
    little = world.unary("ReadMessages", pb.ReadMessagesRequest(topic=topic, max_bytes=1))
    assert ([*little.messages.queue_offsets], little.next_offset) == ([0], 1)
    with client.consumer(topic, group="g") as consumer:
        world.take(consumer, 250)
    world.until(lambda: client.read_messages(topic).begin_offset == 250)
    assert client.read_messages(topic, 3, end_offset=5).next_offset == 250
    client.delete_topic(topic)
    client.create_topic(topic)
    assert client.read_messages(topic).topic_id != page.topic_id
    with pytest.raises(InvalidRequest, match="end_offset"):
        client.read_messages(topic, 5, end_offset=4)
    with pytest.raises(NotFound):
        client.read_messages(f"{topic}-nobody-knows")
    for field, too_large in (("max_messages", 16_385), ("max_bytes", 4_194_305)):
        request = pb.ReadMessagesRequest(topic=topic)
        setattr(request, field, too_large)
        with pytest.raises(grpc.RpcError, match=field):
            world.unary("ReadMessages", request)
