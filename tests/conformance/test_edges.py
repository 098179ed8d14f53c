"""Edge cases that need their own real nodes: rows in files, and clocks that jump."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local import NodeHost
from tests.cluster.running import RPC_S, Running, now_ms, receive, until
from timerclient import CancelResult, TimerClient, TimerState
from timerclient.proto import timer_pb2 as pb

pytestmark = pytest.mark.slow

HOUR = 3600.0
HOUR_MS = 3_600_000
LATE_MS = 60_000
"""Latest lateness: a jump of an hour would exceed it, a slow machine does not."""


class Nodes(Running):
    """Three nodes that flush every second and have movable clocks."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ["storage.flush_interval_ms = 1000"])
        self._id_prefix = "test"
        self._host = lambda name: NodeHost(
            settings=(f"test_clock = {json.dumps(self._clock(name))}",)
        )

    def _clock(self, name: str) -> str:
        return str(self.directory / f"{name}.clock")

    def move_clock(self, name: str, offset_ms: int) -> None:
        path = Path(self._clock(name))
        said = {"offset_ms": offset_ms, "drift_ppm": 0, "from_ms": 0}
        path.with_suffix(".new").write_text(json.dumps(said))
        path.with_suffix(".new").rename(path)

    def flushed(self) -> None:
        """Return when all entries so far are in files on every node."""
        local = pb.GetStatusRequest(local=True)
        end = self.admin().GetStatus(local, timeout=RPC_S).nodes[0].log_end

        def written() -> bool:
            request = pb.GetCheckpointRequest(local=True)
            found = [
                self.admin(n).GetCheckpoint(request, timeout=RPC_S).nodes[0] for n in self.nodes
            ]
            return all(node.manifest_index >= end and node.runs for node in found)

        until(written)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("edges"))
    with nodes.cleaned():
        yield nodes


@pytest.fixture
def client(nodes: Nodes) -> Iterator[TimerClient]:
    with nodes.client() as client:
        yield client


def test_cancel_finds_a_timer_wherever_its_row_lies(
    nodes: Nodes, client: TimerClient, topic: str
) -> None:
    """Timers in memory, in a run, in several runs, behind a tombstone, in the window; restarted."""
    kept, gone = [], []
    for n in range(4):  # one run each, until they are merged
        kept.append(client.schedule(topic, b"kept %d" % n, delay=HOUR + n))
        gone.append(client.schedule(topic, b"gone %d" % n, delay=HOUR + n))
        nodes.flushed()
    in_memory = client.schedule(topic, b"memory", delay=HOUR)
    assert client.cancel(in_memory) is CancelResult.CANCELLED
    assert client.cancel_batch(gone) == [CancelResult.CANCELLED] * 4
    nodes.flushed()
    assert client.cancel_batch([*gone, in_memory]) == [CancelResult.ALREADY_CANCELLED] * 5
    soon = client.schedule_batch(topic, [b"a", b"b"], delay=7)
    nodes.flushed()  # the rows are read into the window again
    if client.get_timer(soon[0]).state is TimerState.PENDING:
        told = client.cancel(soon[0])
    else:
        told = CancelResult.ALREADY_FIRED  # the machine had a long pause
    nodes.kill_together(*nodes.nodes)
    nodes.up()
    assert [timer.id for timer in client.list_timers(topic, due_from=soon.due_ms[0] + 1)] == [
        timer.id for timer in kept
    ]
    assert client.cancel_batch(gone) == [CancelResult.ALREADY_CANCELLED] * 4
    with client.consumer(topic, "g") as consumer:
        came = {m.payload for m in receive(consumer, 1 if told is CancelResult.CANCELLED else 2)}
    assert came == ({b"b"} if told is CancelResult.CANCELLED else {b"a", b"b"})
    assert client.cancel_batch(kept) == [CancelResult.CANCELLED] * 4
    assert client.count_timers(topic).pending == 0
    nodes.digests_agree()


def test_clock_of_one_node_that_jumps_makes_nothing_early_or_late(
    nodes: Nodes, client: TimerClient, topic: str
) -> None:
    """Clocks jump by hours and seconds, in both directions: the leader's, a follower's, a new
    leader's."""
    leader, *followers = (nodes.wait_for_leader(), *nodes.followers())
    with client.consumer(topic, "g") as consumer:
        for jumper, offset_ms in (
            (leader, HOUR_MS),
            (leader, -HOUR_MS),
            (followers[0], HOUR_MS),
            (followers[1], -2_000),
        ):
            due_ms = now_ms() + 1_000
            timers = client.schedule_batch(
                topic, [b"now", b"later"], due_ms=[due_ms, due_ms + 300_000]
            )
            nodes.move_clock(jumper, offset_ms)
            if jumper == followers[0]:
                nodes.change_leader(client, jumper)
            [message] = receive(consumer, 1)
            came_ms = time.time_ns() // 1_000_000
            assert message.id == timers[0].id
            assert message.fired_at_ms >= timers.due_ms[0]
            assert timers.due_ms[0] <= came_ms + 100, "early, by the true time"
            assert message.fired_at_ms - timers.due_ms[0] < LATE_MS
            assert client.get_timer(timers[1]).state is TimerState.PENDING
            assert client.cancel(timers[1]) is CancelResult.CANCELLED
            message.ack().result(RPC_S)
            nodes.move_clock(jumper, 0)
    nodes.digests_agree()
