"""AdminService: what operators ask. Any node answers; each is asked for its own part."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import grpc

from cluster import wire
from cluster.rpc import Context, answered, within
from cluster.timer_service import TimerService
from timer.errors import NotFound
from timer.machine import Topic
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc

PEER_TIMEOUT_S: Final = 1.5


class View(Protocol):
    """What the node tells about itself (cluster/node.py)."""

    name: str
    cluster_id: str

    def node_status(self) -> pb.NodeStatus:
        """This node's part of the status."""

    def node_checkpoint(self) -> pb.NodeCheckpoint:
        """This node's part of the checkpoints."""

    def shared_checkpoint(self) -> pb.SharedCheckpoint | None:
        """The shared checkpoint, as this node's control plane knows it."""

    def leadership(self) -> tuple[int, str, str]:
        """Return (epoch, leader's name, controller's name); empty: none known."""

    def peers(self) -> dict[str, tuple[str, rpc.AdminServiceAsyncStub]]:
        """Return the other nodes: name -> (address, stub)."""

    def topics(self) -> list[pb.TopicStatus]:
        """Every topic, as this node has applied it."""

    async def transfer(self, target: str) -> None:
        """Hand leadership to a node, or to any if `target` is empty."""


class AdminService(rpc.AdminServiceServicer):
    """Status, checkpoints, topics, leadership."""

    def __init__(self, view: View, timers: TimerService, require_leader: Callable[[], Any]) -> None:
        self._view = view
        self._timers = timers
        self._require_leader = require_leader

    @answered
    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """Every node's status; of this node alone if `local`."""
        del context
        nodes = [self._view.node_status()]
        if not request.local:
            nodes += await asyncio.gather(
                *(self._peer_status(n, a, s) for n, (a, s) in self._view.peers().items())
            )
        epoch, leader, controller = self._view.leadership()
        return pb.GetStatusResponse(
            cluster_id=self._view.cluster_id,
            epoch=epoch,
            leader=leader,
            controller=controller,
            nodes=sorted(nodes, key=lambda node: node.name),
        )

    async def _peer_status(
        self, name: str, address: str, stub: rpc.AdminServiceAsyncStub
    ) -> pb.NodeStatus:
        asked = stub.GetStatus(pb.GetStatusRequest(local=True), timeout=PEER_TIMEOUT_S)
        answer, why = await _ask(asked)
        if answer is None:
            return pb.NodeStatus(name=name, address=address, error=why)
        assert isinstance(answer, pb.GetStatusResponse)
        return answer.nodes[0]

    @answered
    async def GetCheckpoint(  # noqa: N802
        self, request: pb.GetCheckpointRequest, context: Context
    ) -> pb.GetCheckpointResponse:
        """Every node's checkpoint and the shared one; of this node alone if `local`."""
        del context
        nodes = [self._view.node_checkpoint()]
        if not request.local:
            nodes += await asyncio.gather(
                *(self._peer_checkpoint(n, s) for n, (_, s) in self._view.peers().items())
            )
        return pb.GetCheckpointResponse(
            nodes=sorted(nodes, key=lambda node: node.node),
            shared=self._view.shared_checkpoint(),
        )

    async def _peer_checkpoint(
        self, name: str, stub: rpc.AdminServiceAsyncStub
    ) -> pb.NodeCheckpoint:
        asked = stub.GetCheckpoint(pb.GetCheckpointRequest(local=True), timeout=PEER_TIMEOUT_S)
        answer, why = await _ask(asked)
        if answer is None:
            return pb.NodeCheckpoint(node=name, role="unreachable", error=why)
        assert isinstance(answer, pb.GetCheckpointResponse)
        return answer.nodes[0]

    @answered
    async def ListTopics(  # noqa: N802
        self, request: pb.ListTopicsRequest, context: Context
    ) -> pb.ListTopicsResponse:
        """Topics and groups as the leader sees them."""
        del request, context
        self._require_leader()
        return pb.ListTopicsResponse(topics=self._view.topics())

    @answered
    async def CreateTopic(  # noqa: N802
        self, request: pb.CreateTopicRequest, context: Context
    ) -> pb.CreateTopicResponse:
        """Create a topic; nothing if it exists."""
        wire.check_name("topic", request.topic)
        leader = self._require_leader()
        topic = await within(self._timers.topic(leader, request.topic, create=True), context)
        assert isinstance(topic, Topic)
        return pb.CreateTopicResponse(topic_id=topic.topic_id)

    @answered
    async def TransferLeadership(  # noqa: N802
        self, request: pb.TransferLeadershipRequest, context: Context
    ) -> pb.TransferLeadershipResponse:
        """Hand leadership over; answered when the control plane has appointed the successor."""
        del context
        known = {self._view.name, *self._view.peers()}
        if request.target and request.target not in known:
            raise NotFound("node", request.target)
        await self._view.transfer(request.target)
        return pb.TransferLeadershipResponse()


async def _ask(asked: Awaitable[object]) -> tuple[object | None, str]:
    try:
        return await asked, ""
    except grpc.aio.AioRpcError as error:
        return None, f"{error.code().name}: {error.details()}"
