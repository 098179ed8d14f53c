"""A node that waits: its replacement by its own cluster, and its status."""

import asyncio
from pathlib import Path

import grpc
import pytest

from cluster.api.peer_queries import begin_verification
from cluster.files.replacement import ask_to_replace
from cluster.files.standby_ports import CLUSTER_KEY, NONCE_KEY, Standby, Wait
from cluster.settings.config import build_config, load_config
from deploy.local import free_ports
from tests.cluster.hosted import BASE
from tests.cluster.running import Running
from timerclient import AsyncTimerClient
from timerclient.cli.cli_nodes import trouble_of_leader
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc


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
