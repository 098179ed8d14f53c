"""A node that waits to be replaced hears its own cluster, if that answers to its status."""

import asyncio

import grpc
import pytest

from cluster.api.peer_queries import begin_verification
from cluster.files.replacement import ask_to_replace
from cluster.rpc.standby_ports import CLUSTER_KEY, NONCE_KEY, Standby, Wait
from cluster.settings.config import build_config
from deploy.local import free_ports
from tests.cluster.hosted import BASE
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
