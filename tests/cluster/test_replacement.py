"""A node that waits: its replacement by its own cluster, and its status."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from cluster.api.peer_queries import begin_verification
from cluster.files.replacement import ask_to_replace
from cluster.files.standby_ports import ADMIN, CLUSTER_KEY, LEADER_S, NONCE_KEY, Standby, Wait
from cluster.settings.config import build_config, load_config
from deploy.local import free_ports
from tests.cluster.hosted import BASE
from tests.cluster.running import Running
from tests.waiting import until
from timerclient import AsyncTimerClient
from timerclient.cli.cli_nodes import trouble_of_leader
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.values.client_settings import ClientSettings


async def test_waiting_node_is_replaced_only_by_an_answer_to_its_status_from_its_cluster() -> None:
    grpc_port, http_port = free_ports(2)
    ports = {"grpc": f"127.0.0.1:{grpc_port}", "http": f"127.0.0.1:{http_port}"}
    config, asked = build_config(BASE, ports), asyncio.Event()
    standby = Standby(config, lambda: Wait("waiting", "its promise is lost"), asked.set)
    await standby.start()
    request = pb.ChangeMembersRequest(
        change=pb.ChangeMembersRequest.CHANGE_REPLACE, name=config.name
    )
    async with grpc.aio.insecure_channel(config.grpc) as channel:
        stub = rpc.AdminServiceStub(channel)
        status = stub.GetStatus(pb.GetStatusRequest(local=True))
        nonce = str(dict(await status.initial_metadata())[NONCE_KEY])
        mine = (CLUSTER_KEY, config.cluster_id)
        for sent in (
            (),
            (mine,),
            ((CLUSTER_KEY, "another"), (NONCE_KEY, nonce)),
            (mine, (NONCE_KEY, "0" * len(nonce))),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="its promise is lost"):
                await stub.ChangeMembers(request, metadata=sent)
        assert not asked.is_set()
        await ask_to_replace(stub, config.cluster_id, config.name)
        assert asked.is_set()
        said = await begin_verification(config.name, config.grpc, stub)
        name = config.name
        text = f"{name} is waiting and serves nothing meanwhile: its promise is lost"
        assert (said.reachable, said.error) == (False, text)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rpc.ConsumeServiceStub(channel).Consume().read()
        assert (refused.value.code(), refused.value.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            text,
        )
        await standby.stop()
        await ask_to_replace(stub, config.cluster_id, config.name)  # unreachable: no error


@pytest.mark.slow  # a cluster
async def test_waiting_node_names_all_nodes_and_the_leader(tmp_path: Path) -> None:
    with Running(tmp_path).cleaned() as cluster:
        name, follower = await asyncio.to_thread(cluster.followers)
        cluster.stop(name)
        config = load_config(cluster._config_path(cluster.node(name)), {}, {})
        standby = Standby(config, lambda: Wait("waiting", "its disk is full"))
        await standby.start()
        try:
            async with AsyncTimerClient(config.peers[name]) as client:
                members = await client.members()
                assert {member.name for member in members.members} == cluster.nodes.keys()
                await client.schedule("t", b"x", delay=3600)
                status = await client.status()
                assert trouble_of_leader(status) == ""
                cluster.stop(follower)
                cluster.stop(status.leader)
                left = trouble_of_leader(await client.status())
                assert left == "no node leads; 0 of 3 nodes answer and vote"
        finally:
            await standby.stop()
    roles = {node.name: node.role for node in status.nodes}
    assert roles == {name: "waiting", follower: "follower", status.leader: "leader"}


_N2 = pb.NodeStatus(name="n2")


class _Peer:
    """A node that answers all queries once `may_answer` is set."""

    def __init__(self, answer: pb.GetStatusResponse) -> None:
        self.answer, self.queries, self.may_answer = answer, 0, asyncio.Event()

    async def status(self, request: pb.GetStatusRequest, context: object) -> pb.GetStatusResponse:
        del context
        assert request.local
        self.queries += 1
        await self.may_answer.wait()
        return self.answer


@asynccontextmanager
async def _standing_by(peers: dict[str, _Peer]) -> AsyncIterator[Standby]:
    """Yield a node n1 that waits beside `peers`."""
    own, http, *ports = (f"127.0.0.1:{port}" for port in free_ports(2 + len(peers)))
    addresses = {"n1": own, **dict(zip(peers, ports, strict=True))}
    listed = ",".join(f"{name}={address}" for name, address in addresses.items())
    config = build_config({**BASE, "peers": listed, "grpc": own, "http": http})
    async with AsyncExitStack() as stack:
        for name, peer in peers.items():
            server = grpc.aio.server()
            method = grpc.unary_unary_rpc_method_handler(
                peer.status,
                request_deserializer=pb.GetStatusRequest.FromString,
                response_serializer=pb.GetStatusResponse.SerializeToString,
            )
            methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"GetStatus": method}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ADMIN, methods),))
            server.add_insecure_port(addresses[name])
            await server.start()
            stack.push_async_callback(server.stop, 0)
        standby = Standby(config, lambda: Wait("waiting", "its disk is full"))
        await standby.start()
        stack.push_async_callback(standby.stop)
        yield standby


async def test_waiting_node_shares_a_query_of_the_others_and_waits_little_for_the_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ClientSettings().probe_s > LEADER_S
    monkeypatch.setattr("cluster.files.standby_ports.LEADER_S", 0.01)
    monkeypatch.setattr("cluster.files.standby_ports.FRESH_S", 0)
    monkeypatch.setattr("cluster.api.peer_queries.PART_S", 600)
    nodes = {name: [pb.NodeStatus(name=name, role="follower")] for name in ("n2", "n3")}
    peers = {
        "n2": _Peer(pb.GetStatusResponse(epoch=7, feature_level=2, nodes=nodes["n2"])),
        "n3": _Peer(pb.GetStatusResponse(epoch=7, leader="n3", nodes=nodes["n3"])),
        "n4": _Peer(pb.GetStatusResponse(epoch=9)),  # no node: not an answer
    }
    async with (
        _standing_by(peers) as standby,
        grpc.aio.insecure_channel(standby._config.grpc) as channel,
    ):
        stub = rpc.AdminServiceStub(channel)

        async def status(**request: bool) -> pb.GetStatusResponse:
            return await stub.GetStatus(pb.GetStatusRequest(**request), timeout=60)

        assert (await status(local=True)).nodes[0].error == "its disk is full"
        assert not any(peer.queries for peer in peers.values()), "two such nodes would never end"
        await status(local=True, leadership=True)
        for name in ("n2", "n4"):
            peers[name].may_answer.set()
        answer = pb.GetStatusResponse()
        async with asyncio.timeout(60):
            while answer.feature_level != 2:  # n3 hangs
                answer = await status(local=True, leadership=True)
        assert (answer.epoch, answer.leader, len(answer.nodes)) == (7, "", 1)
        everything = [asyncio.create_task(status()) for _ in range(20)]
        await asyncio.gather(*(status(leadership=True) for _ in range(20)))
        await until(lambda: peers["n3"].queries)
        assert [peer.queries for peer in peers.values()] == [1, 1, 1]
        peers["n3"].may_answer.set()
        for answer in await asyncio.gather(*everything):
            assert (answer.epoch, answer.leader, answer.feature_level) == (7, "n3", 2)
            assert answer.leader_address == standby._config.peers["n3"]
            assert [node.name for node in answer.nodes] == ["n1", "n2", "n3"]
        async with aiohttp.ClientSession(f"http://{standby._config.http}") as session:
            for scope, number in (("node", 1), ("cluster", 3)):
                async with session.get("/v1/status", params={"scope": scope}) as page:
                    found = await page.json()
                assert (found["leader"], len(found["nodes"])) == ("n3", number)
                assert found["nodes"][0]["error"] == "its disk is full"
        assert standby._channels is not None
        to_other = standby._channels.channel("n2")
    assert to_other.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_waiting_node_names_the_leader_of_its_cluster_and_nodes_behind_a_wrong_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.files.standby_ports.FRESH_S", 600)
    monkeypatch.setattr("cluster.api.peer_queries.PART_S", 600)
    n2, n3 = (pb.NodeStatus(name=name, role="follower") for name in ("n2", "n3"))
    led = pb.GetStatusResponse(cluster_id="demo", epoch=7, leader="n9", controller="n2", nodes=[n2])
    led.leader_address = "10.0.0.9:7401"
    peers = {
        "n2": _Peer(led),
        "n3": _Peer(pb.GetStatusResponse(cluster_id="another", epoch=9, leader="n3", nodes=[n3])),
        "n4": _Peer(pb.GetStatusResponse(epoch=9, leader="n3", nodes=[n3])),
    }
    async with _standing_by(peers) as standby:
        asked = [asyncio.create_task(standby._answer(leadership=False)) for _ in range(2)]
        peers["n4"].may_answer.set()
        peers["n3"].may_answer.set()
        await until(lambda: standby._query is not None and len(standby._query.answers) == 2)
        peers["n2"].may_answer.set()
        answer, _ = await asyncio.gather(*asked)
        await standby._answer(leadership=True)
    assert [peer.queries for peer in peers.values()] == [1, 1, 1]
    assert (answer.epoch, answer.leader, answer.controller) == (7, "n9", "n2")
    assert answer.leader_address == "10.0.0.9:7401"
    assert [(node.name, node.role, node.error) for node in answer.nodes] == [
        ("n1", "waiting", "its disk is full"),
        ("n2", "follower", ""),
        ("n3", "unreachable", "its address is of a node of cluster another"),
        ("n4", "unreachable", "its address is of node n3"),
    ]


@pytest.mark.parametrize(
    ("silent", "status"),
    [
        (["n3"], pb.GetStatusResponse(leader="n3", hears_leader=True, nodes=[_N2])),
        (["n3"], pb.GetStatusResponse(leader="n2", nodes=[pb.NodeStatus(name="n2", serving=True)])),
        ([], pb.GetStatusResponse(leader="n3", nodes=[_N2])),  # all answers are enough
    ],
)
async def test_waiting_node_waits_for_no_silent_node_once_a_leader_is_named(
    monkeypatch: pytest.MonkeyPatch, silent: list[str], status: pb.GetStatusResponse
) -> None:
    monkeypatch.setattr("cluster.files.standby_ports.LEADER_S", 600)
    monkeypatch.setattr("cluster.files.standby_ports.NAMED_S", 0.01)
    monkeypatch.setattr("cluster.api.peer_queries.PART_S", 600)
    peers = {
        "n2": _Peer(status),
        "n3": _Peer(pb.GetStatusResponse(nodes=[pb.NodeStatus(name="n3")])),
    }
    for name in peers.keys() - silent:
        peers[name].may_answer.set()
    async with _standing_by(peers) as standby, asyncio.timeout(30):
        answer = await standby._answer(leadership=True)
    assert answer.leader == status.leader


async def test_waiting_node_waits_for_a_newer_leader_if_one_is_named_that_is_not_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.files.standby_ports.NAMED_S", 0.01)
    monkeypatch.setattr("cluster.files.standby_ports.LEADER_S", 600)
    monkeypatch.setattr("cluster.api.peer_queries.PART_S", 600)
    stale = pb.GetStatusResponse(
        epoch=5, leader="n2", controller="n4", nodes=[pb.NodeStatus(name="n4")]
    )
    # n3 still follows the stream of n2, and names the leader of a new appointment.
    newest = pb.GetStatusResponse(epoch=9, leader="n3", leader_address="n2:1", hears_leader=True)
    newest.nodes.add(name="n3")
    peers = {"n2": _Peer(pb.GetStatusResponse()), "n3": _Peer(newest), "n4": _Peer(stale)}
    peers["n4"].may_answer.set()
    async with _standing_by(peers) as standby, asyncio.timeout(60):
        asked = asyncio.create_task(standby._answer(leadership=True))
        await until(lambda: standby._query is not None and len(standby._query.answers) == 1)
        assert standby._query is not None
        assert not standby._query.is_settled.is_set()
        peers["n3"].may_answer.set()
        answer = await asked
        assert (answer.epoch, answer.leader) == (9, "n3")
        assert answer.controller == "n4", "n3 has no link to it"
        assert answer.leader_address == standby._config.peers["n3"]
