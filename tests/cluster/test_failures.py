"""Against three real processes: nodes killed, stopped, ended, cut to a minority, and flooded."""

import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.cluster.load import loaded
from tests.cluster.running import (
    CALL_S,
    RPC_S,
    Running,
    code_of,
    columns,
    flip,
    in_time,
    nothing_comes,
    now_ms,
    schedule,
    streamed,
    take,
    until,
)
from timerclient import CancelResult, OutcomeUnknown, TimerClient, TimerError, Timers
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import NotFound, Unreachable

pytestmark = pytest.mark.slow

KIB = 1 << 10
MIB = 1 << 20
SETTINGS = (
    "auto_create_topics = false",
    "limits.payload_bytes_max = 65536",
    "limits.request_bytes_max = 524288",
    f"limits.inflight_bytes_max = {33 * MIB}",
    f"storage.memtable_bytes_flush = {MIB}",
    f"storage.log_bytes_flush = {4 * MIB}",
    "storage.flush_interval_ms = 1000",
    "timing.drain_timeout_ms = 600000",  # a node that reaches it does not end in time
)


@pytest.fixture
def topic(cluster: Running, request: pytest.FixtureRequest) -> str:
    """A topic's name, unique to the test; all nodes are up."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    cluster.up()
    with cluster.client() as client:
        client.create_topic(name)
    return name


def is_gone(path: Path) -> bool:
    return not path.exists()


# ---- one node


def test_messages_of_a_deposed_leader_are_dropped_by_the_client_and_come_again_marked(
    cluster: Running, topic: str
) -> None:
    with cluster.client() as client, client.consumer(topic, group="g") as consumer:
        client.schedule_batch(topic, [b"%d" % at for at in range(100)])
        until(lambda: consumer._subscription._inbox._credit.waiting == 100)  # here, and not taken
        nodes = consumer._subscription._nodes
        epoch = nodes.epoch
        leader = cluster.wait_for_leader()
        cluster.kill(leader)
        until(lambda: nodes.epoch > epoch)
        client.schedule(topic, b"last")
        messages = take(consumer, 101)
        assert consumer.dropped_stale == 100
        assert [m.queue_offset for m in messages] == [*range(101)]
        assert {m.attempt for m in messages[:100]} == {2}
        assert len({m.epoch for m in messages}) == 1
    cluster.restart(leader)


def test_sigterm_of_the_leader_under_load_is_not_seen_by_clients(
    cluster: Running, topic: str, figures: Callable[[str], None]
) -> None:
    with loaded(cluster, topic) as load:
        leader = cluster.wait_for_leader()
        began_s = time.monotonic()
        cluster.kill(leader, signal.SIGTERM)
        took_s = time.monotonic() - began_s
        assert cluster.exit_status(leader) == 0
        load.wait_for_acks(200)
        cluster.restart(leader)
    figures(
        f"SIGTERM of the leader: ended in {took_s:.2f} s, no schedule answered for "
        f"{load.longest_gap_s():.2f} s"
    )


@pytest.mark.long  # both followers start again under load
def test_a_follower_that_ends_or_is_killed_costs_no_pause(
    cluster: Running, topic: str, figures: Callable[[str], None]
) -> None:
    epoch = cluster.digests_agree().shared.epoch
    with loaded(cluster, topic) as load:
        first, second = cluster.followers()
        began_s = time.monotonic()
        cluster.kill(first, signal.SIGTERM)
        took_s = time.monotonic() - began_s
        assert cluster.exit_status(first) == 0
        load.wait_for_acks(100)
        cluster.restart(first)
        cluster.digests_agree()
        cluster.kill(second)
        load.wait_for_acks(100)
        cluster.restart(second)
    assert cluster.digests_agree().shared.epoch == epoch
    figures(
        f"SIGTERM of a follower: ended in {took_s:.2f} s, no schedule answered for "
        f"{load.longest_gap_s():.2f} s"
    )


def test_node_with_damaged_or_lost_raft_files_comes_back_by_itself(
    cluster: Running, topic: str, client: TimerClient
) -> None:
    name = cluster.followers()[0]
    data = cluster.directory / cluster.node(name).data
    for file in ("raft/journal", "raft/meta", "raft-member", "raft"):
        cluster.kill(name)
        if file == "raft":
            shutil.rmtree(data / file)
        else:
            flip(data / file, 5)
        cluster.restart(name)
        client.schedule(topic, b"p", delay=3600)
        cluster.digests_agree()


# ---- all nodes


def test_all_killed_at_once_keep_every_acked_timer_and_fire_the_overdue_in_order(
    cluster: Running, topic: str
) -> None:
    soon = [b"%04d" % at for at in range(300)]

    def scheduled(begin_ms: int) -> tuple[str, int, Timers, Timers, list[CancelResult]]:
        """Kill all nodes before the first of the timers is due."""
        name = f"{topic}-{begin_ms}"
        cluster.up()
        with cluster.client() as client:
            client.create_topic(name)
            client.schedule_batch(name, [b"acked"] * 50)
            with client.consumer(name, group="g") as consumer:
                take(consumer, 50)
            start_ms = begin_ms // 10 * 10 + 10  # so that no two are due in one tick
            dues = [start_ms + 10 * at for at in range(300)]
            timers = client.schedule_batch(name, soon[::-1], due_ms=dues[::-1])
            far = client.schedule_batch(name, [b"far"] * 10, delay=3600)
            said = client.cancel_batch(timers[:10])
        cluster.kill_together(*cluster.nodes)
        return name, dues[-1], timers, far, said

    topic, last_ms, timers, far, said = in_time(scheduled)
    assert said == [CancelResult.CANCELLED] * 10
    until(lambda: now_ms() > last_ms)
    cluster.start()
    with cluster.client() as client, client.consumer(topic, group="g") as consumer:
        messages = take(consumer, 290)
        assert [m.payload for m in messages] == soon[:290]
        assert [m.queue_offset for m in messages] == [*range(50, 340)]
        assert {m.attempt for m in messages} == {1}
        nothing_comes(consumer, lambda: client.schedule(topic, b"the next"))
        assert client.cancel_batch(far) == [CancelResult.CANCELLED] * 10
        assert client.cancel(timers[0]) == CancelResult.ALREADY_CANCELLED
        assert client.cancel(timers[20]) == CancelResult.ALREADY_FIRED
    cluster.digests_agree()


def test_sigterm_of_all_ends_all_with_0_and_a_restart_has_everything(
    cluster: Running, topic: str, figures: Callable[[str], None]
) -> None:
    with cluster.client() as client:
        timers = client.schedule_batch(topic, [b"x"] * 100, delay=3600)
    began_s = time.monotonic()
    cluster.stop()
    figures(f"SIGTERM of all: ended in {time.monotonic() - began_s:.2f} s")
    assert [*map(cluster.exit_status, cluster.nodes)] == [0, 0, 0]
    cluster.start()
    with cluster.client() as client:
        assert client.cancel_batch(timers) == [CancelResult.CANCELLED] * 100
    cluster.digests_agree()


def test_without_a_majority_schedules_fail_clearly_and_the_last_node_goes_on_answering(
    cluster: Running, topic: str
) -> None:
    leader, (first, second) = cluster.wait_for_leader(), cluster.followers()
    stub = cluster.timers(leader)
    with cluster.client() as client:
        client.schedule(topic, b"before", delay=3600)
        until(lambda: cluster.json(leader, "/v1/checkpoint?scope=cluster")["shared"])
        cluster.kill_together(first, second)
        with pytest.raises(OutcomeUnknown) as caught:  # it was on its way when the lease ended
            client.schedule(topic, b"maybe", timeout=3)
        assert not caught.value.outcome_known
        # It leads without a lease for a while. That is shown at once.
        assert cluster.metric(leader, "timer_serving") == 0
        assert cluster.get(leader, "/readyz")[0] == 503
        with pytest.raises(grpc.RpcError) as refused:
            stub.Schedule(schedule(columns(topic, [b"never"])), timeout=RPC_S)
        assert code_of(refused.value) in (
            grpc.StatusCode.ABORTED,  # it waited for a majority until the epoch ended
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    # A client that never reached a leader knows that nothing happened.
    with cluster.client() as fresh:
        with pytest.raises(TimerError) as known:
            fresh.schedule(topic, b"never", timeout=2)
        assert known.value.outcome_known
        status = fresh.status()
        roles = {node.name: node.reachable for node in status.nodes}
        assert roles == {leader: True, first: False, second: False}
    assert cluster.get(leader, "/healthz")[0] == 200
    assert cluster.get(leader, "/readyz")[0] == 503
    [node] = cluster.json(leader, "/v1/status")["nodes"]
    assert (node["serving"], node["settings"]["leadership.lease_ms"]) == (False, "3000")
    assert cluster.json(leader, "/v1/members")["leader"] == ""
    assert cluster.json(leader, "/v1/checkpoint?scope=cluster")["shared"]
    assert cluster.metric(leader, "timer_serving") == 0
    until(lambda: cluster.metric(leader, "timer_controller_reached") == 0)
    cluster.restart(first)
    with cluster.client() as client:
        client.schedule(topic, b"after")
        with client.consumer(topic, group="g") as consumer:
            payloads = [m.payload for m in take(consumer, 1)]
            if payloads == [b"maybe"]:
                payloads = [m.payload for m in take(consumer, 1)]
            assert payloads == [b"after"]
            nothing_comes(consumer, lambda: client.schedule(topic, b"the next"))
    cluster.restart(second)
    cluster.digests_agree()


def test_silent_node_is_shown_as_such_and_hides_nobody_else(cluster: Running) -> None:
    def silent_ones(client: TimerClient) -> list[set[str]]:
        """Return the unreachable nodes of status, members and checkpoints. Empty: no answer."""
        try:
            status, members, all_at = client.status(), client.members(), client.checkpoint()
        except Unreachable:
            return []
        for told in (
            {node.name for node in status.nodes},
            {node.name for node in members.members},
            {node.node for node in all_at.nodes},
        ):
            assert told == {*cluster.nodes}
        return [
            {node.name for node in status.nodes if node.role == "unreachable"},
            {node.name for node in members.members if node.role == "unreachable"},
            {node.node for node in all_at.nodes if node.role == "unreachable"},
        ]

    for name in cluster.nodes:  # a silent node does not close its connections
        cluster.admin(name).GetStatus(pb.GetStatusRequest(), timeout=RPC_S)
    silent, _ = cluster.followers()
    cluster.kill(silent, signal.SIGSTOP)
    try:
        with cluster.client() as client:
            until(lambda: silent_ones(client) == [{silent}] * 3)
    finally:
        cluster.kill(silent, signal.SIGCONT)


# ---- limits of a node's memory


def test_an_unknown_topic_is_refused_where_topics_are_not_created_on_use(
    cluster: Running, topic: str
) -> None:
    with cluster.client() as client:
        with pytest.raises(NotFound, match="'unheard-of'"):
            client.schedule("unheard-of", b"x", delay=60)
        with pytest.raises(NotFound, match="'unheard-of'"):
            client.consumer("unheard-of", group="g")
        client.schedule(topic, b"x", delay=60)
        assert "unheard-of" not in {each.name for each in client.topics()}


def test_more_than_the_disks_take_is_refused_as_overloaded_and_the_client_gets_all_through(
    cluster: Running, topic: str, figures: Callable[[str], None]
) -> None:
    leader, followers = cluster.wait_for_leader(), cluster.followers()
    stub = cluster.timers(leader)
    block = [bytes(60 * KIB)] * 8
    before, refused = cluster.counts_add_up(), cluster.metric(leader, "timer_grpc_errors_total")
    requests = [schedule(columns(topic, block), request_no=at) for at in range(60)]
    for name in followers:  # no disk but the leader's: nothing commits
        cluster.kill(name, signal.SIGSTOP)
    answers = stub.ScheduleStream(streamed(*requests), timeout=CALL_S)
    with cluster.client() as client:
        futures = [client.submit_batch(topic, block, delay=3600) for _ in range(60)]
        # Answers come in order, and the first has to wait for the followers.
        until(lambda: cluster.metric(leader, "timer_grpc_errors_total") > refused)
        for name in followers:
            cluster.kill(name, signal.SIGCONT)
        answered = [*answers]
        assert [answer.request_no for answer in answered] == [*range(60)]
        taken = sum(bool(answer.timer_ids) for answer in answered)
        overloaded = [a for a in answered if a.error.reason == pb.REASON_OVERLOADED]
        assert overloaded, {pb.Reason.Name(a.error.reason) for a in answered}
        for each in overloaded:
            assert each.error.retry_after_ms > 0
            assert each.error.retryable
            assert each.error.outcome_known
        assert len({i for future in futures for i in future.result().ids}) == 480
    cluster.wait_for_leader()
    after = cluster.counts_add_up()
    unknown = sum(a.error.reason == pb.REASON_LEADERSHIP_LOST for a in answered)
    more = (after.scheduled - before.scheduled) // 8 - 60
    assert taken <= more <= taken + unknown
    figures(
        f"flood: {taken} taken, {len(overloaded)} overloaded, {unknown} unknown; "
        f"leader's memory {before.rss_bytes / MIB:.0f} -> {after.rss_bytes / MIB:.0f} MiB"
    )
    assert after.rss_bytes - before.rss_bytes < 300 * MIB
    cluster.digests_agree()


@pytest.mark.long  # writes 75 MiB, and all nodes start twice
def test_manifests_runs_and_spills_carry_everything_through_a_kill_of_all(
    cluster: Running, topic: str, figures: Callable[[str], None]
) -> None:
    def on_all(done: Callable[[pb.NodeCheckpoint], bool]) -> bool:
        answer = cluster.admin().GetCheckpoint(pb.GetCheckpointRequest(), timeout=RPC_S)
        return len(answer.nodes) == 3 and all(map(done, answer.nodes))

    block = [b"%03d" % at + bytes(60 * KIB) for at in range(8)]
    with cluster.client() as client:
        unacked = client.schedule_batch(topic, [b"unacked %d" % at for at in range(100)])
        # 75 MiB: more than a segment of the log, so that one is dropped.
        dues = [now_ms() + 3_600_000 + at for at in range(160)]
        far = [client.submit_batch(topic, block, due_ms=due) for due in dues]
        soon = client.schedule_batch(topic, [b"soon %d" % at for at in range(100)], delay=6)
        ids = [i for future in far for i in future.result().ids]
        assert client.cancel_batch(ids[::50]) == [CancelResult.CANCELLED] * 26
        index = cluster.log_end()
        until(lambda: on_all(lambda node: node.manifest_index >= index and node.runs > 0))
        assert client.cancel_batch(ids[1::50]) == [CancelResult.CANCELLED] * 26
    for name in cluster.nodes:
        folder = cluster.directory / name
        first_segment = folder / "log" / f"{1:016x}.log"
        until(partial(is_gone, first_segment))
        assert [*(folder / "state").rglob("*")], "no state on disk"
    runs = [node.runs for node in cluster.digests_agree().nodes]
    cluster.kill_together(*cluster.nodes)
    began_s = time.monotonic()
    cluster.start()
    figures(
        f"restart from manifests ({runs} runs) after kill -9 of all: "
        f"{time.monotonic() - began_s:.2f} s"
    )
    with cluster.client() as client, client.consumer(topic, group="g") as consumer:
        shown = client.peek(topic).messages  # from a spill file
        assert [m.id for m in shown] == unacked.ids
        messages = take(consumer, 200)
        assert [m.id for m in messages[:100]] == unacked.ids
        assert [m.id for m in messages[100:]] == soon.ids
        nothing_comes(consumer, lambda: client.schedule(topic, b"the next"))
        assert client.cancel_batch(ids[::50] + ids[1::50]) == [CancelResult.ALREADY_CANCELLED] * 52
        rest = [i for at, i in enumerate(ids) if at % 50 > 1]
        assert {*client.cancel_batch(rest)} == {CancelResult.CANCELLED}
    cluster.digests_agree()
    assert cluster.counts_add_up().dropped == 0
