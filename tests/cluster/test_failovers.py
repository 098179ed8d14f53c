"""Against three real processes with the lease that nodes have by default: the leader is gone."""

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.cluster.load import loaded
from tests.cluster.running import AS_SHIPPED, RPC_S, Running, columns, schedule, until
from timerclient.proto import timer_pb2 as pb

pytestmark = pytest.mark.slow

SETTINGS = (*AS_SHIPPED, "storage.flush_interval_ms = 1000")


def leader_other_than(cluster: Running, name: str) -> str:
    def other() -> str | None:
        """Request the leader's name from other nodes only; a stopped process takes a second."""
        for each in cluster.nodes:
            state = cluster.state(each) if each != name else None
            if state is not None and state.role == "leader" and state.serving:
                return each
        return None

    found = until(other)
    assert found is not None
    return found


def test_leader_killed_under_load_loses_and_repeats_nothing(
    cluster: Running, topic: str, figures: Callable[[str], None]
) -> None:
    cluster.up()
    before = cluster.digests_agree().shared.epoch
    with loaded(cluster, topic) as load:
        leader = cluster.wait_for_leader()
        killed_s = time.monotonic()
        cluster.kill(leader)
        leader_other_than(cluster, leader)
        led_s = time.monotonic()
        load.wait_for_acks(200)
        cluster.restart(leader)
        load.wait_for_acks(100)
    figures(
        f"kill -9: successor seen after {led_s - killed_s:.2f} s, no schedule answered for "
        f"{load.longest_gap_s():.2f} s, no delivery for {load.longest_delivery_gap_s():.2f} s; "
        f"{len(load.scheduled)} timers, {len(load.deliveries) - len(load.acked)} redeliveries"
    )
    assert cluster.digests_agree().shared.epoch > before

    def one_epoch() -> bool:
        state = cluster.admin().GetCheckpoint(pb.GetCheckpointRequest(), timeout=RPC_S)
        return len(state.nodes) == 3 and {n.epoch for n in state.nodes} == {state.shared.epoch}

    until(one_epoch)


def test_leader_stopped_until_another_serves_is_replaced_and_confirms_nothing_late(
    cluster: Running, topic: str, figures: Callable[[str], None]
) -> None:
    cluster.up()
    with ThreadPoolExecutor() as threads, loaded(cluster, topic) as load:
        leader = cluster.wait_for_leader()
        pid = cluster.node(leader).pid
        stub = cluster.timers(leader)
        stopped_s = time.monotonic()
        cluster.kill(leader, signal.SIGSTOP)
        late = [
            threads.submit(stub.Schedule, schedule(columns(topic, [b"late"])), timeout=RPC_S)
            for _ in range(5)
        ]
        led = leader_other_than(cluster, leader)
        led_s = time.monotonic()
        load.wait_for_acks(300)
        cluster.kill(leader, signal.SIGCONT)
        for future in late:
            # The old leader fails the call, or has seen that it no longer leads and relays it.
            try:
                timer_id = future.result().timer_ids
            except grpc.RpcError:
                continue
            cluster.timers(led).GetTimer(pb.GetTimerRequest(timer_id=timer_id), timeout=RPC_S)
        load.wait_for_acks(100)
    assert cluster.node(leader).pid == pid, "it went on as a follower"
    assert cluster.is_running(leader)
    figures(
        f"SIGSTOP: successor seen after {led_s - stopped_s:.2f} s, no schedule answered for "
        f"{load.longest_gap_s():.2f} s"
    )
