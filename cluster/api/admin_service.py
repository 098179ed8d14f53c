"""AdminService: requests of operators. Any node answers; it queries the other nodes for theirs."""

import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from cluster.api import wire_rows
from cluster.api.backup_desk import BackupDesk
from cluster.api.group_admin import GroupDesk
from cluster.api.peer_queries import (
    Peers,
    agreement_of,
    answer_of,
    ask_all,
    begin_verification,
    checkpoint_of,
    verification_of,
)
from cluster.api.policy_admin import PolicyDesk
from cluster.api.timer_service import TimerService
from cluster.api.topic_filter import TopicFilter, filter_of_caller
from cluster.control.membership import Change
from cluster.rpc.handlers import Context, Service, ServiceHooks, unary_handler, within
from cluster.rpc.relay import DIRECT
from cluster.security.reread_files import RereadFile
from cluster.settings.log_format import set_level
from cluster.settings.stack_dump import dump_stacks
from replication.shell.hop_recorder import HopRecorder
from timer.files.disk import RealDisk
from timer.model.timer_errors import InvalidRequestError, NotFoundError, NotReadyError
from timer.model.units import LogIndex, TopicId
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.values.same_fields import as_type

HOLDER_SIZE_MAX: Final = 64
"""Bytes of the holder of a drain."""
_Answer = TypeVar("_Answer", pb.NodeCheckpoint, pb.NodeVerification)
_Request = TypeVar("_Request", bound="NamesNode")
_Response = TypeVar("_Response")


class View(Protocol):
    """The node's methods that this service calls: NodeState in cluster/observe/node_view.py."""

    name: str
    cluster_id: str

    def node_status(self) -> pb.NodeStatus:
        """Return this node's part of the status."""

    def node_leadership(self) -> pb.NodeStatus:
        """Return of that part only the node's identity and whether it leads."""

    def node_checkpoint(self, at_index: LogIndex = LogIndex(0)) -> pb.NodeCheckpoint:
        """Return this node's checkpoint. `at_index`: also the digest at this index; 0: no index."""

    def shared_checkpoint(self, *, offsets: bool = True) -> pb.SharedCheckpoint | None:
        """Return the shared checkpoint of this node's control plane. None: there is none.

        `offsets`: with the queue offsets; there may be many topics.
        """

    def leadership(self) -> tuple[int, str, str]:
        """Return (epoch, leader's name, controller's name); an empty name: unknown."""

    def leader_address(self) -> str | None:
        """Return host:port of the leader. None: this node leads, or the leader is unknown."""

    def hears_leader(self) -> bool:
        """Return whether the leader that this node follows was heard a moment ago."""

    def peers(self) -> Peers:
        """Return the other nodes: name -> (address, stub)."""

    def is_voter(self, name: str) -> bool:
        """Return whether the node with a name is a voter, as far as this node knows."""

    def group(self, topic: str, group: str) -> pb.GroupStatus:
        """Return a group from the state applied on this node."""

    late_topics: Callable[[], Awaitable[Mapping[TopicId, int]]]
    """Returns topic -> age of its oldest overdue timer in ms, on a leader with a lease."""

    async def topics(
        self, after: str, page_size: int, prefix: str = "", shown: TopicFilter | None = None
    ) -> pb.ListTopicsResponse:
        """Return a page of the topics with a prefix from the state applied on this node.

        `shown`: only these.
        """

    def topic(self, name: str, *, lateness: bool = False) -> pb.TopicStatus:
        """Return a topic from the state applied on this node, without its lag.

        `lateness`: with its histograms.
        """

    def producers(self, request: pb.ListProducersRequest) -> pb.ListProducersResponse:
        """Return a page of producers, or one, from the state applied on this node."""

    async def members(self) -> pb.ListMembersResponse:
        """Return the voters, and the learners that can become voters."""


async def status_answer(
    view: View, *, local: bool, leadership: bool = False
) -> pb.GetStatusResponse:
    """Return all nodes' status; this node's only if `local`, a part of it if `leadership`."""
    own = view.node_leadership() if leadership else view.node_status()
    answers = [] if local or leadership else await ask_all(view.peers(), answer_of)
    nodes = [own, *(answer.nodes[0] for answer in answers)]
    epoch, leader, controller = view.leadership()
    # This node may have no link to the controller that others reach.
    controller = controller or max((answer.controller for answer in answers), default="")
    return pb.GetStatusResponse(
        cluster_id=view.cluster_id,
        epoch=epoch,
        leader=leader,
        controller=controller,
        leader_address=view.leader_address() or "",
        hears_leader=view.hears_leader(),
        nodes=sorted(nodes, key=lambda node: node.name),
        feature_level=max(node.feature_level for node in nodes),
    )


async def checkpoint_answer(
    view: View, *, local: bool, index: LogIndex = LogIndex(0)
) -> pb.GetCheckpointResponse:
    """Return all members' checkpoints and the shared one; only this node's if `local`.

    `index`: with the digests at this index, and without the shared checkpoint. 0: at the last one.
    """
    nodes = [view.node_checkpoint(index)]
    if not local:
        there = functools.partial(checkpoint_of, at_index=index)
        nodes += _members(view, await ask_all(view.peers(), there))
        # A node that catches up knows less of the leader's log than the leader itself. A leader of
        # an earlier epoch was deposed.
        end = max(nodes, key=lambda node: (node.epoch, node.role == "leader", node.log_end)).log_end
        for node in nodes:
            node.lag_entries = max(0, end - node.applied_index) if node.reachable else 0
    return pb.GetCheckpointResponse(
        nodes=sorted(nodes, key=lambda node: node.node),
        shared=None if index else view.shared_checkpoint(),
    )


def _members(view: View, nodes: list[_Answer]) -> list[_Answer]:
    """Leave out nodes that neither answer nor are voters: not added yet, or removed."""
    return [node for node in nodes if node.reachable or view.is_voter(node.node)]


class OperatorActions(Protocol):
    """The commands of an operator: OperatorCommands in cluster/node/operator_commands.py."""

    async def transfer(self, target: str) -> bool:
        """Transfer leadership to a node; "": to any. False: the target leads already."""

    async def drain(self, *, undo: bool, holder: str) -> bool:
        """Drain this node, or undo it; return whether the node gave the leadership away."""

    async def change_members(self, change: Change, name: str) -> None:
        """Add, replace or remove a voter; the change is committed on return."""


class Scrub(Protocol):
    """The passes over this node's files (cluster/files/scrubber.py)."""

    def begin(self) -> None:
        """Begin a pass now, or join the one that runs."""

    def last_pass(self) -> pb.NodeVerification:
        """Return the pass that runs, else the last one."""


_CHANGES: Final = {
    pb.ChangeMembersRequest.CHANGE_ADD: Change.ADD,
    pb.ChangeMembersRequest.CHANGE_REPLACE: Change.REPLACE,
    pb.ChangeMembersRequest.CHANGE_REMOVE: Change.REMOVE,
}


Reload = Callable[[], Awaitable[Sequence[RereadFile]]]
"""Reads files again; returns the result for each."""


async def no_files() -> Sequence[RereadFile]:
    """Return no results: there is no TLS."""
    return ()


class NamesNode(Protocol):
    """A request that names the node that answers it. Empty: the node that it reaches."""

    node: str


def on_named_node(
    handler: Callable[["AdminService", _Request], Awaitable[_Response]],
) -> Callable[["AdminService", _Request, Context], Awaitable[_Response]]:
    """Return a handler that passes a request on if it names another node.

    It raises NotFoundError if there is no such node.
    """
    name = handler.__name__

    @functools.wraps(handler)
    async def answer(self: "AdminService", request: _Request, context: Context) -> _Response:
        if self._is_here(request.node):
            return await handler(self, request)
        encoded: _Response = await self._forward(name, request, context)
        return encoded

    return answer


class AdminService(Service, rpc.AdminServiceServicer):
    """Status, checkpoints, topics, leadership, members, policies, backups."""

    def __init__(  # noqa: PLR0913 - the parts that carry its requests out
        self,
        *,
        view: View,
        commands: OperatorActions,
        timers: TimerService,
        policies: PolicyDesk,
        groups: GroupDesk,
        require_leader: Callable[[], Any],
        hooks: ServiceHooks,
        backups: BackupDesk | None,
        reload: Reload,
        hops: HopRecorder,
        scrub: Scrub | None,
    ) -> None:
        """`backups`, `scrub`: None: this node has no files. `reload`: reads files of TLS again.

        `hops`: the record of this node's hops.
        """
        super().__init__(hooks)
        self._hops = hops
        self._reload = reload
        self._backups = backups
        self._scrub = scrub
        self._view, self._commands = view, commands
        self._timers = timers
        self._policies = policies
        self._groups = groups
        self._require_leader = require_leader

    @unary_handler
    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """Return all nodes' status; this node's only if `local`, a part of it if `leadership`."""
        del context
        return await status_answer(self._view, local=request.local, leadership=request.leadership)

    @unary_handler
    async def GetCheckpoint(  # noqa: N802
        self, request: pb.GetCheckpointRequest, context: Context
    ) -> pb.GetCheckpointResponse:
        """Return all nodes' checkpoints and the shared one; only this node's if `local`."""
        del context
        return await checkpoint_answer(
            self._view, local=request.local, index=LogIndex(request.at_index)
        )

    @unary_handler
    async def ListTopics(  # noqa: N802
        self, request: pb.ListTopicsRequest, context: Context
    ) -> pb.ListTopicsResponse:
        """Return a page of topics, or one, with their groups, from the leader.

        A page has the topics that the caller's rules cover.
        """
        del context
        self._require_leader()
        if not request.topic:
            if request.lateness:
                raise InvalidRequestError("lateness", "true", "needs a topic: give `topic`, too")
            return await self._view.topics(
                request.after, request.page_size, request.prefix, filter_of_caller()
            )
        topic = self._view.topic(wire_rows.topic_name(request.topic), lateness=request.lateness)
        topic.lag_ms = await self._timers.queries.lag_ms(TopicId(topic.topic_id))
        return pb.ListTopicsResponse(topics=[topic], count=1)

    @unary_handler
    async def ListProducers(  # noqa: N802
        self, request: pb.ListProducersRequest, context: Context
    ) -> pb.ListProducersResponse:
        """Return a page of producers, or one, from the leader."""
        del context
        self._require_leader()
        return self._view.producers(request)

    @unary_handler
    async def CreateTopic(  # noqa: N802
        self, request: pb.CreateTopicRequest, context: Context
    ) -> pb.CreateTopicResponse:
        """Create a topic; an existing one stays as it is."""
        name, leader = wire_rows.topic_name(request.topic), self._require_leader()
        topic = await within(self._timers.topic(leader, name, create=True), context)
        return pb.CreateTopicResponse(topic_id=topic.topic_id)

    @unary_handler
    async def DeleteTopic(  # noqa: N802
        self, request: pb.DeleteTopicRequest, context: Context
    ) -> pb.DeleteTopicResponse:
        """Delete a topic with its timers, messages and groups; return their numbers."""
        leader = self._require_leader()
        applied = await within(self._timers.delete_topic(leader, request.topic), context)
        return pb.DeleteTopicResponse(
            topic_id=applied.op.topic,
            pending=applied.dropped,
            messages=applied.messages,
            groups=[pb.DeletedGroup(name=name, unacked=n) for name, n in applied.groups],
        )

    @unary_handler
    async def CreateGroup(  # noqa: N802
        self, request: pb.CreateGroupRequest, context: Context
    ) -> pb.CreateGroupResponse:
        """Create a group; an existing one stays as it is."""
        made = self._groups.open(request.topic, request.group, request.start, request.settings)
        await within(made, context)
        return as_type(pb.CreateGroupResponse, self._view.group(request.topic, request.group))

    @unary_handler
    async def AlterGroup(  # noqa: N802
        self, request: pb.AlterGroupRequest, context: Context
    ) -> pb.AlterGroupResponse:
        """Change settings of a group; return the group."""
        altered = self._groups.alter(request.topic, request.group, request.settings)
        await within(altered, context)
        return as_type(pb.AlterGroupResponse, self._view.group(request.topic, request.group))

    @unary_handler
    async def SeekGroup(  # noqa: N802
        self, request: pb.SeekGroupRequest, context: Context
    ) -> pb.SeekGroupResponse:
        """Move a group to another position of its topic."""
        await within(self._groups.seek(request), context)
        return as_type(pb.SeekGroupResponse, self._view.group(request.topic, request.group))

    @unary_handler
    async def DeleteGroup(  # noqa: N802
        self, request: pb.DeleteGroupRequest, context: Context
    ) -> pb.DeleteGroupResponse:
        """Delete a group with its position, settings and leases."""
        await within(self._groups.delete(request.topic, request.group), context)
        return pb.DeleteGroupResponse()

    @unary_handler
    async def Redrive(  # noqa: N802
        self, request: pb.RedriveRequest, context: Context
    ) -> pb.RedriveResponse:
        """Send dead letters back to their topics."""
        return await within(self._groups.redrive(request.topic, request.max_messages), context)

    @unary_handler
    async def RedriveLetters(  # noqa: N802
        self, request: pb.RedriveLettersRequest, context: Context
    ) -> pb.RedriveLettersResponse:
        """Send chosen dead letters back to their topics."""
        work = self._groups.redrive_letters(request.topic, request.offsets)
        return await within(work, context)

    @unary_handler
    async def TransferLeadership(  # noqa: N802
        self, request: pb.TransferLeadershipRequest, context: Context
    ) -> pb.TransferLeadershipResponse:
        """Transfer leadership; the answer comes when the new leader serves."""
        del context
        known = {self._view.name, *self._view.peers()}
        if request.target and request.target not in known:
            raise NotFoundError("node", request.target)
        moved = await self._commands.transfer(request.target)
        return pb.TransferLeadershipResponse(unchanged=not moved)

    @unary_handler
    @on_named_node
    async def DrainNode(  # noqa: N802
        self, request: pb.DrainNodeRequest
    ) -> pb.DrainNodeResponse:
        """Drain one node, or undo it; the answer comes when another node leads."""
        if not request.node:
            raise InvalidRequestError("node", "", "must be the name of a node")
        if (size := len(request.holder.encode())) > HOLDER_SIZE_MAX:
            limit = f"must have at most {HOLDER_SIZE_MAX} bytes"
            raise InvalidRequestError("holder", f"{size} bytes", limit)
        moved = await self._commands.drain(undo=request.undo, holder=request.holder)
        return pb.DrainNodeResponse(node=request.node, drained=not request.undo, transferred=moved)

    @unary_handler
    @on_named_node
    async def SetLogLevel(  # noqa: N802
        self, request: pb.SetLogLevelRequest
    ) -> pb.SetLogLevelResponse:
        """Set the level of a logger of one node, until it restarts."""
        before = set_level(request.logger, request.level)
        return pb.SetLogLevelResponse(node=self._view.name, before=before)

    @unary_handler
    @on_named_node
    async def DumpStacks(  # noqa: N802
        self, request: pb.DumpStacksRequest
    ) -> pb.DumpStacksResponse:
        """Return the stacks of all threads and tasks of one node."""
        del request
        found = await dump_stacks()
        threads, tasks = (
            [pb.DumpStacksResponse.Stack(name=n.name, count=n.count, frames=n.frames) for n in each]
            for each in (found.threads, found.tasks)
        )
        return pb.DumpStacksResponse(
            node=self._view.name,
            threads=threads,
            tasks=tasks,
            task_count=found.task_count,
            left_out=found.left_out,
        )

    @unary_handler
    @on_named_node
    async def TraceHops(  # noqa: N802
        self, request: pb.TraceHopsRequest
    ) -> pb.TraceHopsResponse:
        """Begin or end the record of one node's hops."""
        answer = pb.TraceHopsResponse(
            node=self._view.name, clock_ns=time.monotonic_ns(), boot_id=RealDisk().boot_id()
        )
        if request.begin:
            self._hops.begin()
        else:
            for hop, index, at_ns in self._hops.end():
                answer.stamps.add(hop=pb.HopStamp.Hop.ValueType(hop), index=index, at_ns=at_ns)
        return answer

    @unary_handler
    async def BeginVerification(  # noqa: N802
        self, request: pb.BeginVerificationRequest, context: Context
    ) -> pb.BeginVerificationResponse:
        """Begin passes over the files of one node, or of all."""
        del context
        if not self._is_here(request.node):
            node = await begin_verification(request.node, *self._view.peers()[request.node])
            return pb.BeginVerificationResponse(nodes=[node])
        scrub = self._own_scrub()
        scrub.begin()
        nodes = [scrub.last_pass()]
        if not request.node:
            nodes += _members(self._view, await ask_all(self._view.peers(), begin_verification))
        return pb.BeginVerificationResponse(nodes=sorted(nodes, key=lambda node: node.node))

    @unary_handler
    async def GetVerification(  # noqa: N802
        self, request: pb.GetVerificationRequest, context: Context
    ) -> pb.GetVerificationResponse:
        """Return the last pass of one node, or those of all and whether their states agree."""
        del context
        shared = self._view.shared_checkpoint(offsets=False)
        index = LogIndex(request.at_index or (shared.index if shared is not None else 0))
        there = functools.partial(verification_of, at_index=index)
        if not self._is_here(request.node):
            nodes = [await there(request.node, *self._view.peers()[request.node])]
        else:
            nodes = [self._own_scrub().last_pass()]
            nodes[0].digest = self._view.node_checkpoint(index).digest
            if not request.node:
                nodes += _members(self._view, await ask_all(self._view.peers(), there))
        if not index:  # digests of different indexes are not comparable
            for node in nodes:
                node.digest = ""
        return pb.GetVerificationResponse(
            nodes=sorted(nodes, key=lambda node: node.node),
            digest_index=index,
            agreement=None if request.node else agreement_of([node.digest for node in nodes]),
        )

    def _own_scrub(self) -> Scrub:
        if self._scrub is None:
            raise InvalidRequestError("node", self._view.name, "can't verify: it has no files")
        return self._scrub

    @unary_handler
    @on_named_node
    async def ReloadFiles(  # noqa: N802
        self, request: pb.ReloadFilesRequest
    ) -> pb.ReloadFilesResponse:
        """Reread the certificates and access rules of one node; return the result for each file."""
        del request
        return pb.ReloadFilesResponse(
            node=self._view.name,
            files=[
                pb.ReloadFilesResponse.File(
                    setting=each.setting,
                    path=each.path,
                    result=pb.ReloadFilesResponse.Result.Value(f"RESULT_{each.result}"),
                    why=each.why,
                )
                for each in await self._reload()
            ],
        )

    @unary_handler
    @on_named_node
    async def OpenBackup(  # noqa: N802
        self, request: pb.OpenBackupRequest
    ) -> pb.OpenBackupResponse:
        """Pin one node's state for a backup; return its parts."""
        desk = self._desk()
        opened = await desk.open(request.backup_id, LogIndex(request.min_index))
        return pb.OpenBackupResponse(
            cluster_id=self._view.cluster_id,
            replica_id=desk.replica_id,
            index=opened.index,
            epoch=opened.epoch,
            parts=[
                pb.OpenBackupResponse.Part(path=part.path, size=part.size, crc32=part.crc32)
                for part in opened.parts
            ],
        )

    @unary_handler
    @on_named_node
    async def FetchBackup(  # noqa: N802
        self, request: pb.FetchBackupRequest
    ) -> pb.FetchBackupResponse:
        """Return bytes of one part of an open backup."""
        data = await self._desk().fetch(request.backup_id, request.path, request.offset)
        return pb.FetchBackupResponse(data=data)

    @unary_handler
    @on_named_node
    async def CloseBackup(  # noqa: N802
        self, request: pb.CloseBackupRequest
    ) -> pb.CloseBackupResponse:
        """Unpin one node's state."""
        self._desk().close(request.backup_id, complete=request.complete)
        return pb.CloseBackupResponse()

    @unary_handler
    @on_named_node
    async def FetchLog(  # noqa: N802
        self, request: pb.FetchLogRequest
    ) -> pb.FetchLogResponse:
        """Return applied log entries of one node."""
        after, stored = LogIndex(request.after_index), LogIndex(request.stored_index)
        found = await self._desk().log.fetch(after, stored, request.shipper_id)
        return pb.FetchLogResponse(
            cluster_id=self._view.cluster_id,
            epoch=found.epoch,
            applied_index=found.applied[0],
            applied_epoch=found.applied[1],
            frames=found.frames,
            is_gone=found.is_dropped,
        )

    def _desk(self) -> BackupDesk:
        if self._backups is None:
            raise InvalidRequestError("node", self._view.name, "can't back up: it has no files")
        return self._backups

    def _is_here(self, node: str) -> bool:
        """Return whether a request names this node.

        Raises:
            NotFoundError: there is no such node.
        """
        if node not in ("", self._view.name, *self._view.peers()):
            raise NotFoundError("node", node)
        return node in ("", self._view.name)

    async def _forward(self, method: str, request: Any, context: Context) -> Any:
        """Return the answer of the node that a request names, encoded; see Registrar."""
        sender = dict(context.invocation_metadata() or ()).get(DIRECT)
        if self.hooks.relay is None or sender in self._view.peers():  # one hop at most
            raise NotReadyError(f"this node can't reach {request.node}")
        return await self.hooks.relay.answer(request.node, method, request, context)

    @unary_handler
    async def ListMembers(  # noqa: N802
        self, request: pb.ListMembersRequest, context: Context
    ) -> pb.ListMembersResponse:
        """Return the voters of this node's log, and the learners that answer."""
        del request, context
        return await self._view.members()

    @unary_handler
    async def ChangeMembers(  # noqa: N802
        self, request: pb.ChangeMembersRequest, context: Context
    ) -> pb.ChangeMembersResponse:
        """Change one voter; the answer comes when the change is committed."""
        del context
        name, change = request.name, _CHANGES.get(request.change)
        if change is None:
            raise InvalidRequestError("change", int(request.change), "ADD, REPLACE or REMOVE")
        known = name in (self._view.name, *self._view.peers())
        if not known and not self._view.is_voter(name):
            where = f"in peers of {self._view.name} (docs/members.md)"
            raise NotFoundError(f"node {where}", name)
        await self._commands.change_members(change, name)
        return as_type(pb.ChangeMembersResponse, await self._view.members())

    @unary_handler
    async def AlterPolicies(  # noqa: N802
        self, request: pb.AlterPoliciesRequest, context: Context
    ) -> pb.AlterPoliciesResponse:
        """Set and unset fields of one scope; the answer comes when the change is committed."""
        done = await within(self._policies.alter(request), context)
        return as_type(pb.AlterPoliciesResponse, done)

    @unary_handler
    async def DescribePolicies(  # noqa: N802
        self, request: pb.DescribePoliciesRequest, context: Context
    ) -> pb.DescribePoliciesResponse:
        """Return a scope's own and effective fields, from the leader."""
        del context
        return self._policies.describe(request.scope)
