"""AdminService: what operators ask. Any node answers; each is asked for its own part."""

from collections.abc import Callable
from typing import Any, Final, Protocol

from cluster.api import wire_rows
from cluster.api.group_admin import GroupDesk
from cluster.api.peer_queries import Peers, ask_all, checkpoint_of, status_of
from cluster.api.policy_admin import PolicyDesk
from cluster.api.timer_service import TimerService
from cluster.control.membership import Change
from cluster.rpc.handlers import Context, Service, answered, within
from timer.model.timer_errors import InvalidRequestError, NotFoundError
from timer.model.units import LogIndex
from timer.ready.topic import Topic
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc


class View(Protocol):
    """What the node tells about itself (cluster/node/node.py)."""

    name: str
    cluster_id: str

    def node_status(self) -> pb.NodeStatus:
        """This node's part of the status."""

    def node_leadership(self) -> pb.NodeStatus:
        """Of that, who it is and whether it leads."""

    def node_checkpoint(self, at_index: LogIndex = LogIndex(0)) -> pb.NodeCheckpoint:
        """This node's part of the checkpoints; with the digest at one of the last ones, or 0."""

    def shared_checkpoint(self) -> pb.SharedCheckpoint | None:
        """The shared checkpoint, as this node's control plane knows it."""

    def leadership(self) -> tuple[int, str, str]:
        """Return (epoch, leader's name, controller's name); empty: none known."""

    def leader_address(self) -> str | None:
        """Return host:port of the leader, if it is another node and known."""

    def peers(self) -> Peers:
        """Return the other nodes: name -> (address, stub)."""

    def group(self, topic: str, group: str) -> pb.GroupStatus:
        """A group, as this node has applied it."""

    async def topics(self, after: str, page_size: int) -> pb.ListTopicsResponse:
        """A page of topics, as this node has applied them."""

    def topic(self, name: str, *, lateness: bool = False) -> pb.TopicStatus:
        """One topic, as this node has applied it; with histograms."""

    def producers(self, request: pb.ListProducersRequest) -> pb.ListProducersResponse:
        """A page of producers, or one, as this node has applied them."""

    async def transfer(self, target: str) -> bool:
        """Hand leadership to a node, or to any if `target` is empty. False: that one leads."""

    async def members(self) -> pb.ListMembersResponse:
        """Who votes, and who could."""

    async def change_members(self, change: Change, name: str) -> None:
        """Make, replace or remove a voter; committed when this returns."""


_CHANGES: Final = {
    pb.ChangeMembersRequest.ADD: Change.ADD,
    pb.ChangeMembersRequest.REPLACE: Change.REPLACE,
    pb.ChangeMembersRequest.REMOVE: Change.REMOVE,
}


class AdminService(Service, rpc.AdminServiceServicer):
    """Status, checkpoints, topics, leadership, members, policies."""

    def __init__(
        self,
        view: View,
        timers: TimerService,
        policies: PolicyDesk,
        groups: GroupDesk,
        require_leader: Callable[[], Any],
    ) -> None:
        self._view = view
        self._timers = timers
        self._policies = policies
        self._groups = groups
        self._require_leader = require_leader

    @answered
    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """Every node's status; of this node alone if `local`, and little of it if `leadership`."""
        del context
        view = self._view
        nodes = [view.node_leadership() if request.leadership else view.node_status()]
        if not (request.local or request.leadership):
            nodes += await ask_all(self._view.peers(), status_of)
        epoch, leader, controller = self._view.leadership()
        return pb.GetStatusResponse(
            cluster_id=self._view.cluster_id,
            epoch=epoch,
            leader=leader,
            controller=controller,
            leader_address=self._view.leader_address() or "",
            nodes=sorted(nodes, key=lambda node: node.name),
        )

    @answered
    async def GetCheckpoint(  # noqa: N802
        self, request: pb.GetCheckpointRequest, context: Context
    ) -> pb.GetCheckpointResponse:
        """Every node's checkpoint and the shared one; of this node alone if `local`."""
        del context
        nodes = [self._view.node_checkpoint(LogIndex(request.at_index))]
        if not request.local:
            nodes += await ask_all(self._view.peers(), checkpoint_of)
        return pb.GetCheckpointResponse(
            nodes=sorted(nodes, key=lambda node: node.node),
            shared=None if request.at_index else self._view.shared_checkpoint(),
        )

    @answered
    async def ListTopics(  # noqa: N802
        self, request: pb.ListTopicsRequest, context: Context
    ) -> pb.ListTopicsResponse:
        """A page of topics, or one, with their groups as the leader sees them."""
        del context
        self._require_leader()
        if not request.topic:
            if request.lateness:
                raise InvalidRequestError("lateness", "true", "is told of one topic at a time")
            return await self._view.topics(request.after, request.page_size)
        topic = self._view.topic(wire_rows.topic_name(request.topic), lateness=request.lateness)
        if not topic.lag_ms:  # perhaps behind many timers of others
            topic.lag_ms = await self._timers.lag_ms(topic.topic_id)
        return pb.ListTopicsResponse(topics=[topic], count=1)

    @answered
    async def ListProducers(  # noqa: N802
        self, request: pb.ListProducersRequest, context: Context
    ) -> pb.ListProducersResponse:
        """Producers as the leader has them."""
        del context
        self._require_leader()
        return self._view.producers(request)

    @answered
    async def CreateTopic(  # noqa: N802
        self, request: pb.CreateTopicRequest, context: Context
    ) -> pb.CreateTopicResponse:
        """Create a topic; nothing if it exists."""
        name, leader = wire_rows.topic_name(request.topic), self._require_leader()
        topic = await within(self._timers.topic(leader, name, create=True), context)
        assert isinstance(topic, Topic)
        return pb.CreateTopicResponse(topic_id=topic.topic_id)

    @answered
    async def DeleteTopic(  # noqa: N802
        self, request: pb.DeleteTopicRequest, context: Context
    ) -> pb.DeleteTopicResponse:
        """Delete a topic with its timers, messages and groups; tell what these were."""
        leader = self._require_leader()
        applied = await within(self._timers.delete_topic(leader, request.topic), context)
        return pb.DeleteTopicResponse(
            topic_id=applied.op.topic,
            pending=applied.dropped,
            messages=applied.messages,
            groups=[pb.DeletedGroup(name=name, unacked=n) for name, n in applied.groups],
        )

    @answered
    async def CreateGroup(  # noqa: N802
        self, request: pb.CreateGroupRequest, context: Context
    ) -> pb.GroupStatus:
        """Create a group; nothing if it exists."""
        made = self._groups.open(request.topic, request.group, request.start, request.settings)
        await within(made, context)
        return self._view.group(request.topic, request.group)

    @answered
    async def AlterGroup(  # noqa: N802
        self, request: pb.AlterGroupRequest, context: Context
    ) -> pb.GroupStatus:
        """Change settings of a group."""
        altered = self._groups.alter(request.topic, request.group, request.settings)
        await within(altered, context)
        return self._view.group(request.topic, request.group)

    @answered
    async def SeekGroup(  # noqa: N802
        self, request: pb.SeekGroupRequest, context: Context
    ) -> pb.GroupStatus:
        """Let a group go on elsewhere in its topic."""
        await within(self._groups.seek(request), context)
        return self._view.group(request.topic, request.group)

    @answered
    async def DeleteGroup(  # noqa: N802
        self, request: pb.DeleteGroupRequest, context: Context
    ) -> pb.DeleteGroupResponse:
        """Delete a group, with what it has not acked."""
        await within(self._groups.delete(request.topic, request.group), context)
        return pb.DeleteGroupResponse()

    @answered
    async def Redrive(  # noqa: N802
        self, request: pb.RedriveRequest, context: Context
    ) -> pb.RedriveResponse:
        """Send dead letters back where they came from."""
        answer = await within(self._groups.redrive(request.topic, request.max_messages), context)
        assert isinstance(answer, pb.RedriveResponse)
        return answer

    @answered
    async def TransferLeadership(  # noqa: N802
        self, request: pb.TransferLeadershipRequest, context: Context
    ) -> pb.TransferLeadershipResponse:
        """Hand leadership over; answered when the successor serves."""
        del context
        known = {self._view.name, *self._view.peers()}
        if request.target and request.target not in known:
            raise NotFoundError("node", request.target)
        moved = await self._view.transfer(request.target)
        return pb.TransferLeadershipResponse(unchanged=not moved)

    @answered
    async def ListMembers(  # noqa: N802
        self, request: pb.ListMembersRequest, context: Context
    ) -> pb.ListMembersResponse:
        """Voters as this node's log has them, and the learners that answer."""
        del request, context
        return await self._view.members()

    @answered
    async def ChangeMembers(  # noqa: N802
        self, request: pb.ChangeMembersRequest, context: Context
    ) -> pb.ListMembersResponse:
        """Change the voters by one; answered when that is committed."""
        del context
        known = {self._view.name, *self._view.peers()}
        change = _CHANGES.get(request.change)
        if change is None:
            raise InvalidRequestError("change", int(request.change), "ADD, REPLACE or REMOVE")
        if request.name not in known:
            raise NotFoundError("node", request.name)
        await self._view.change_members(change, request.name)
        return await self._view.members()

    @answered
    async def AlterPolicies(  # noqa: N802
        self, request: pb.AlterPoliciesRequest, context: Context
    ) -> pb.DescribePoliciesResponse:
        """Set and unset fields of what one scope says; answered when that is committed."""
        done = await within(self._policies.alter(request), context)
        assert isinstance(done, pb.DescribePoliciesResponse)
        return done

    @answered
    async def DescribePolicies(  # noqa: N802
        self, request: pb.DescribePoliciesRequest, context: Context
    ) -> pb.DescribePoliciesResponse:
        """What a scope says, and what holds for it, from the leader."""
        del context
        return self._policies.describe(request.scope)
