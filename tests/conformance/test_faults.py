"""The promises hold through changes of the leader and deaths of nodes."""

import time

import pytest

from tests.cluster.running import CALL_S, WAIT_S, Running, in_time, until
from tests.conformance.worlds import World
from timer.pending.memory.wheel import NEAR_BITS
from timerclient import AckResult, NackResult, TimerClient, Timers
from timerclient.client.sync import Consumer

HOLES = 10_001
WINDOW_MS = 2 << NEAR_BITS
"""Range of the wheel's slots of one tick, at most (timer/pending/memory/wheel.py)."""


def each_once(world: World, consumer: Consumer, count: int) -> dict[bytes, int]:
    """Receive and ack `count` messages while leaders change; return time of firing by payload."""
    came: dict[bytes, int] = {}
    while len(came) < count:
        [message] = world.receive(consumer, 1)
        # A message with a lease that a failover ended is redelivered, and marked.
        assert message.payload not in came or message.attempt > 1
        came[message.payload] = message.fired_at_ms
        _ = message.ack()
    consumer.flush()
    return came


def test_timers_due_while_leaders_change_twice_come_once_each(world: World, topic: str) -> None:
    client, due_ms = world.client, world.clock_ms() + world.moment_ms
    step_ms = world.moment_ms // 50
    payloads = [b"%d" % n for n in range(200)]
    timers = client.schedule_batch(
        topic, payloads, due_ms=[due_ms + step_ms * n for n in range(200)]
    )
    with client.consumer(topic, "g") as consumer:
        world.pass_time(2)
        world.change_leader()
        world.pass_time(1)
        world.change_leader()
        world.pass_time(2)
        came = each_once(world, consumer, 200)
    assert {*came} == {*payloads}
    fired = [came[payload] for payload in payloads]
    assert fired == sorted(fired)
    assert all(at >= due for at, due in zip(fired, timers.due_ms, strict=True))
    assert world.unacked(topic, "g") == 0


def test_change_of_leader_ends_leases_and_marks_what_comes_again(world: World, topic: str) -> None:
    client = world.client
    client.schedule_batch(topic, [b"acked", b"held"])
    with client.consumer(topic, "g") as consumer:
        acked, held = world.receive(consumer, 2)
        assert acked.ack().result(WAIT_S) is AckResult.ACKED
        world.change_leader()
        [again] = world.receive(consumer, 1)
        assert (again.payload, again.queue_offset) == (b"held", held.queue_offset)
        assert again.attempt > held.attempt
        assert again.epoch > held.epoch
        assert again.ack().result(WAIT_S) is AckResult.ACKED
        world.nothing_waits(consumer, topic)


def test_nothing_acked_comes_again_however_many_holes_there_are(world: World, topic: str) -> None:
    """RocketMQ and Pulsar store a limited number of holes; beyond it they redeliver."""
    client = world.client
    client.create_group(topic, "g")
    client.schedule_batch(topic, [b"%d" % n for n in range(2 * HOLES)])
    with client.consumer(topic, "g", window=2 * HOLES) as consumer:
        held = world.receive(consumer, 2 * HOLES)
        for acking in [message.ack() for message in held[1::2]]:
            acking.result(WAIT_S)
    world.change_leader()
    with client.consumer(topic, "g", window=2 * HOLES) as consumer:
        again = world.take(consumer, HOLES)
        world.nothing_waits(consumer, topic)
    assert [int(message.payload) for message in again] == [*range(0, 2 * HOLES, 2)]
    assert {message.attempt > 1 for message in again} == {True}


def test_schedules_on_their_way_while_leaders_change_become_one_timer_each(
    world: World, topic: str
) -> None:
    client = world.client
    pending = []
    for _ in range(2):
        pending += [client.submit(topic, b"%d" % n, delay=3600) for n in range(100)]
        world.change_leader()
    ids = {future.result(WAIT_S).id for future in pending}
    assert len(ids) == 200
    assert client.count_timers(topic).pending == 200
    assert {timer.id for timer in client.list_timers(topic)} == ids
    client.cancel_where(topic)


def test_nacked_message_keeps_its_time_over_a_change_of_leader(world: World, topic: str) -> None:
    world.client.schedule(topic, b"p")
    with world.client.consumer(topic, "g") as consumer:
        [message] = world.receive(consumer, 1)
        assert message.nack(delay=4 * world.moment).result(WAIT_S) is NackResult.NACKED
        world.change_leader()
        world.pass_time(4.5)
        [again] = world.take(consumer, 1)
    assert again.attempt > 1
    assert again.handed_out_ms >= message.handed_out_ms + 4 * world.moment_ms


def test_policies_and_keys_outlive_a_change_of_leader(world: World, topic: str) -> None:
    client, name = world.client, f"{topic}/t"
    client.alter_policies({"fixed_delay_ms": 3_600_000}, topic=name)
    first = client.schedule(name, b"1", key="k")
    world.change_leader()
    kept = client.schedule(name, b"2", key="k", on_conflict="keep")
    assert kept.id == first.id
    assert first.due_ms > world.clock_ms() + 3_000_000
    client.cancel_where(name)


# ---- nodes that die; only on the real cluster


@pytest.mark.slow
def test_leader_killed_in_the_middle_of_a_delay(
    cluster: Running, real_world: World, topic: str
) -> None:
    """The next leader fires due timers once, and overdue ones at once, in order."""
    client, payloads = real_world.client, [b"%d" % n for n in range(100)]

    def scheduled(begin_ms: int) -> tuple[str, Timers]:
        name, dues = f"{topic}-{begin_ms}", [begin_ms + 20 * n for n in range(100)]
        return name, client.schedule_batch(name, payloads, due_ms=dues)

    name, timers = in_time(scheduled)
    with client.consumer(name, "g") as consumer:
        real_world.take(consumer, 1)
        cluster.kill(cluster.wait_for_leader())
        came = each_once(real_world, consumer, 99)
        cluster.up()
        real_world.nothing_waits(consumer, name)
    assert {*came} == {*payloads[1:]}
    fired = [came[payload] for payload in payloads[1:]]
    assert fired == sorted(fired)
    assert all(at >= due for at, due in zip(fired, timers.due_ms[1:], strict=True))


@pytest.mark.long  # waits for a window to pass
@pytest.mark.slow
def test_all_nodes_stopped_for_longer_than_the_wheels_window(
    cluster: Running, real_world: World, topic: str
) -> None:
    """All overdue timers fire after the return of the nodes: in order, once."""
    payloads = [b"%d" % n for n in range(250)]
    step_ms = WINDOW_MS // 250 + 10
    with cluster.client() as client:

        def scheduled(begin_ms: int) -> tuple[str, Timers]:
            name, dues = f"{topic}-{begin_ms}", [begin_ms + step_ms * (249 - n) for n in range(250)]
            return name, client.schedule_batch(name, payloads, due_ms=dues)

        name, timers = in_time(scheduled)
        cluster.kill_together(*cluster.nodes)
    left_s = max(timers.due_ms) / 1000 - time.time()
    until(lambda: time.time_ns() // 1_000_000 > max(timers.due_ms), timeout_s=left_s + WAIT_S)
    cluster.up()
    with TimerClient(cluster.endpoints, timeout=CALL_S) as client:
        with client.consumer(name, "g") as consumer:
            came = [m.payload for m in real_world.take(consumer, 250)]
            real_world.nothing_waits(consumer, name)
        assert client.count_timers(name).pending == 0
    assert came == payloads[::-1]
    cluster.digests_agree()
    cluster.counts_add_up()
