"""A drained node gives the leadership away and gets none; undo or a restart end that."""

import json

import pytest

from tests.cluster.running import Running, until
from timerclient import AlreadyExists, InvalidRequest, NotFound, TimerClient
from timerclient.cli.timerctl import main

pytestmark = pytest.mark.slow


def wait_for_drained(client: TimerClient, *names: str) -> None:
    """Wait for a status to which each node contributed, with the nodes `names` drained."""

    def complete() -> bool:
        nodes = client.status().nodes
        drained = sorted(node.name for node in nodes if node.drained)
        return all(node.reachable for node in nodes) and drained == sorted(names)

    until(complete)


def test_drained_leader_is_replaced_and_not_chosen_again(
    cluster: Running, client: TimerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    first = cluster.wait_for_leader()
    follower = cluster.followers()[0]
    # Any node passes the request on.
    assert main([f"--endpoints={cluster.node(follower).grpc}", "-o", "json", "drain", first]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "node": first,
        "drained": True,
        "transferred": True,
    }
    second = cluster.wait_for_leader()
    assert second != first
    wait_for_drained(client, first)
    cluster.kill(second)
    # The drained node leads at first if the third has not caught up; then it is relieved.
    until(lambda: cluster.wait_for_leader() not in (first, second))
    cluster.start(second)
    assert not client.drain_node(first, undo=True).drained
    wait_for_drained(client)
    cluster.change_leader(client, first)


def test_restart_ends_a_drain_and_unknown_nodes_are_refused(
    cluster: Running, client: TimerClient
) -> None:
    name = cluster.followers()[0]
    answer = client.drain_node(name)
    assert (answer.drained, answer.transferred) == (True, False)
    with pytest.raises(AlreadyExists, match=f"timerctl drain {name} --undo"):
        client.drain_node(name, by="a command")
    cluster.stop(name)
    cluster.start(name)
    wait_for_drained(client)
    with pytest.raises(NotFound, match="n9"):
        client.drain_node("n9")
    with pytest.raises(InvalidRequest, match="node"):
        client.drain_node("")


def test_last_node_that_can_lead_is_not_drained(cluster: Running, client: TimerClient) -> None:
    leader = cluster.wait_for_leader()
    others = cluster.followers()
    for name in others:
        client.drain_node(name)
    refusal = f"each other voter is drained, or does not answer {leader}"
    with pytest.raises(InvalidRequest, match=refusal):
        client.drain_node(leader)
    assert cluster.wait_for_leader() == leader
    wait_for_drained(client, *others)
    for name in cluster.nodes:
        client.drain_node(name, undo=True)


def test_learner_can_not_lead_in_place_of_a_drained_node(
    cluster: Running, client: TimerClient
) -> None:
    leader = cluster.wait_for_leader()
    drained, learner = cluster.followers()
    client.change_members("remove", learner)
    until(lambda: any(n.role == "learner" for n in client.status().nodes if n.name == learner))
    client.drain_node(drained)
    with pytest.raises(InvalidRequest, match="each other voter is drained"):
        client.drain_node(leader)
    assert cluster.wait_for_leader() == leader
