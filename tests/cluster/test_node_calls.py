"""Log levels and stacks of single nodes: any node passes the request on."""

import json
import threading
from collections.abc import Iterator

import pytest

from tests.cluster.running import RPC_S, Running, until
from timerclient import InvalidRequest, NotFound, TimerClient
from timerclient.cli.timerctl import main
from timerclient.proto import timer_pb2 as pb


def test_stacks_of_each_node_show_threads_and_tasks(cluster: Running, client: TimerClient) -> None:
    for name in cluster.nodes:
        found = client.dump_stacks(name)
        assert found.node == name
        assert "MainThread" in {thread.name for thread in found.threads}
        frames = {frame.split()[0] for task in found.tasks for frame in task.frames}
        assert "MemoryGuard.run" in frames
        assert sum(task.count for task in found.tasks) + found.left_out == found.task_count
    with pytest.raises(NotFound, match="n9"):
        client.dump_stacks("n9")


def test_idle_streams_are_one_line_with_the_place_where_they_wait(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    leader, over = cluster.wait_for_leader(), threading.Event()

    def requests() -> Iterator[pb.ConsumeRequest]:
        yield pb.ConsumeRequest(open=pb.OpenConsumer(topic=topic, group="g"))
        over.wait(RPC_S)

    streams = [cluster.consuming(leader).Consume(requests(), timeout=RPC_S) for _ in range(3)]
    assert all(next(stream).HasField("opened") for stream in streams)

    def waiting() -> int:
        tasks = client.dump_stacks(leader).tasks
        return sum(
            task.count
            for task in tasks
            if {"_Stream.next", "ConsumeService.Consume"} <= {f.split()[0] for f in task.frames}
        )

    until(lambda: waiting() == len(streams))
    over.set()
    for stream in streams:
        stream.cancel()


def test_digests_of_all_nodes_are_compared_through_any_node(
    cluster: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoints = f"--endpoints={cluster.node(cluster.followers()[0]).grpc}"
    assert main([endpoints, "-o", "json", "--timeout", "60s", "checkpoint", "--compare"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert sorted(found["digests"]) == [*cluster.nodes]
    assert len({*found["digests"].values()}) == 1


def test_levels_of_one_node_and_of_all(
    cluster: Running, client: TimerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = cluster.followers()
    logger = "cluster.rpc.memory"
    assert client.set_log_level("debug", node=first, logger=logger) == "info"
    assert client.set_log_level("default", node=first, logger=logger) == "debug"
    assert client.set_log_level("default", node=second, logger=logger) == "info"
    assert f"of={logger}" in cluster.log(first)
    for wrong in ("loud", "default"):
        with pytest.raises(InvalidRequest, match="level"):
            client.set_log_level(wrong, node=first)
    endpoints = f"--endpoints={cluster.node(second).grpc}"
    assert main([endpoints, "-o", "json", "log-level", "info"]) == 0
    rows = json.loads(capsys.readouterr().out)["nodes"]
    assert [(row["node"], row["before"]) for row in rows] == [(n, "info") for n in cluster.nodes]
    assert main([endpoints, "dump", first]) == 0
    assert capsys.readouterr().out.startswith(f"node {first}  ")


def test_a_trace_shows_the_way_of_a_call_through_leader_and_followers(
    cluster: Running, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    leader, [follower, _] = cluster.wait_for_leader(), cluster.followers()
    endpoints = f"--endpoints={cluster.node(follower).grpc}"
    assert main([endpoints, "-o", "json", "--timeout", "60s", "trace", topic]) == 0
    found = json.loads(capsys.readouterr().out)
    for kind in ("schedule", "cancel"):
        hops = [(hop["node"], hop["text"]) for hop in found[kind]]
        mine = [text for node, text in hops if node == leader and "writ" not in text]
        assert mine == [
            *("request read", "entry appended", "entry sent to the followers"),
            *("first answer of a follower read", "committed by a majority", "applied, answer made"),
        ]
        assert hops[0] == ("caller", "call made")
        answered = next(at for at, (_, text) in enumerate(hops) if text.startswith("first answer"))
        before = {text for node, text in hops[:answered] if node not in (leader, "caller")}
        assert {"entry read from the leader", "written and synced"} <= before
