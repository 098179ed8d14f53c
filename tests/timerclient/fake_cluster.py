"""A cluster in memory that serves the API over loopback, with errors that a test sets.

Its nodes share one state, as if every entry were committed at once; only the leader serves. It has
producers, timers, queues of topics and leases. It ignores time: a timer is delivered at once.
"""

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.timerclient.fake_timers import Row, Timers, columns, slices
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.values.reasons import Reason

RETRYABLE = {
    pb.REASON_DISK_FULL,
    pb.REASON_GROUP_HELD,
    pb.REASON_NOT_LEADER,
    pb.REASON_NOT_READY,
    pb.REASON_OVERLOADED,
    pb.REASON_QUOTA_REACHED,
    *(UNKNOWN := {pb.REASON_COMMIT_TIMEOUT, pb.REASON_LEADERSHIP_LOST}),
}
NOW_MS = 1_700_000_000_000


def wire_error(reason: int, message: str = "", **detail: Any) -> pb.Error:
    return pb.Error(
        reason=reason,  # type: ignore[arg-type]
        message=message or Reason(reason).name,
        retryable=reason in RETRYABLE,
        outcome_known=reason not in UNKNOWN,
        **detail,
    )


Settlement = pb.AckRequest | pb.NackRequest | pb.ExtendRequest


@dataclass
class Producer:
    last: int = 0
    answers: dict[int, pb.ScheduleResponse] = field(default_factory=dict)


@dataclass
class Group:
    """Delivery state of one group of a topic."""

    next: int = 0
    back: deque[int] = field(default_factory=deque)
    acked: set[int] = field(default_factory=set)
    expired: set[int] = field(default_factory=set)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Offset of a leased message -> (epoch, lease id)."""
    attempts: dict[int, int] = field(default_factory=dict)


OnSchedule = Callable[[pb.ScheduleRequest], "pb.Error | str | None"]
"""None serves the request. An Error is the answer. "lose" applies the request and then breaks the
stream without an answer."""


@dataclass
class Cluster:
    nodes: list["Node"] = field(default_factory=list)
    leader: int | None = 0
    epoch: int = 1
    tokens: dict[bytes, int] = field(default_factory=dict)
    producers: dict[int, Producer] = field(default_factory=dict)
    next_producer: int = 1
    unregistered: list[int] = field(default_factory=list)
    timers: Timers = field(default_factory=lambda: Timers(NOW_MS))
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    requests: list[pb.ScheduleRequest] = field(default_factory=list)
    acks: list[Settlement] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)
    """Offsets of messages that consumers returned unseen."""
    credit_ends: int = 0
    """Number of returns that ended the credit of their stream."""
    answers_leaving: bool = True
    opened: list[pb.OpenConsumer] = field(default_factory=list)
    credits: list[int] = field(default_factory=list)
    registrations: int = 0
    denied: bool = False
    probes: int = 0
    dead_letters: int = 250
    homeless: int = 0
    """Dead letters before `dead_letters` that name no existing topic."""
    seen_homeless: int = 0
    """Number of homeless letters that an earlier redrive leased; later redrives skip them."""
    redrives: int = 0
    forget_homeless: set[int] = field(default_factory=set)
    """Numbers of redrives after which all leases end, as after a failover."""
    redrive_errors: list[pb.Error | None] = field(default_factory=list)
    """Errors of the next redrives, beside their counts. None: no error."""
    lost_redrives: int = 0
    """Number of redrives with answers that are still to be lost."""
    settings: list[pb.GroupSettings] = field(default_factory=list)
    """Requested settings of groups."""
    seeks: list[pb.SeekGroupRequest] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    """Names of deleted groups."""
    transfers: list[str] = field(default_factory=list)
    changes: list[tuple[int, str]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    verifications: list[pb.GetVerificationResponse] = field(default_factory=list)
    """The answers that follow each other; the last one stays. The first is that of the begin."""
    begun: list[str] = field(default_factory=list)
    """The nodes that requests to begin a verification named."""
    named: "dict[str, Producer]" = field(default_factory=dict)
    """Request id -> its answer, as the first request of a producer."""
    alters: list[pb.AlterPoliciesRequest] = field(default_factory=list)
    lose_alters: bool = False
    on_schedule: OnSchedule = lambda _: None
    on_ack: Callable[[Settlement], "pb.Error | str | None"] = lambda _: None
    on_cancel: Callable[[], "pb.Error | str | None"] = lambda: None
    deadlines_s: list[float | None] = field(default_factory=list)
    """Deadlines of the received cancels in seconds. None: no deadline."""
    gone: pb.Error | None = None
    """Error with which broken streams end. None: the connection breaks."""
    hold: asyncio.Event | None = None
    """Answers wait for this event. None: they do not wait."""
    wake: asyncio.Condition = field(default_factory=asyncio.Condition)
    deliver_max: int = 100
    held_for: int = 0
    """Number of further consumers that get the error GROUP_HELD."""

    @property
    def address(self) -> str:
        return ",".join(node.address for node in self.nodes)

    async def start(self, n: int = 3) -> None:
        for index in range(n):
            node = Node(self, index)
            await node.start()
            self.nodes.append(node)

    async def stop(self) -> None:
        for node in self.nodes:
            await node.stop()

    async def fail_over(self, to: int) -> None:
        """Let another node lead. Leases end, and streams to the old leader end with NOT_LEADER."""
        self.leader, self.epoch = to, self.epoch + 1
        for group in self.groups.values():
            group.back.extend(sorted(group.held))
            group.held.clear()
        await self.notify()

    async def notify(self) -> None:
        async with self.wake:
            self.wake.notify_all()

    def seed(self, topic: str, payloads: Iterable[bytes]) -> None:
        """Fire messages into a topic."""
        for payload in payloads:
            self.timers.add(Row(topic, NOW_MS, payload, b"", b""))

    @property
    def rows(self) -> list[Row]:
        return self.timers.rows

    def schedule(self, request: pb.ScheduleRequest) -> pb.ScheduleResponse:
        answer = pb.ScheduleResponse(request_no=request.request_no)
        producer = self.producers.get(request.producer_id)
        if request.request_id:
            producer = self.named.setdefault(request.request_id, Producer())
            request.sequence = 1
        if producer is None:
            answer.error.CopyFrom(wire_error(pb.REASON_UNKNOWN_PRODUCER))
        elif request.sequence in producer.answers:
            answer.CopyFrom(producer.answers[request.sequence])
            answer.request_no = request.request_no
            answer.duplicate = True
        elif request.sequence <= producer.last:
            answer.error.CopyFrom(wire_error(pb.REASON_OUTCOME_FORGOTTEN))
        elif request.sequence > producer.last + 1:
            gap = wire_error(pb.REASON_SEQUENCE_GAP, expected_sequence=producer.last + 1)
            answer.error.CopyFrom(gap)
        else:
            rows = [row for columns in request.timers for row in unpack(columns)]
            if any(row.payload == b"BAD" for row in rows):
                refused = wire_error(
                    pb.REASON_INVALID_REQUEST, "payload = BAD", field="payload", limit="x"
                )
                answer.error.CopyFrom(refused)
            else:
                producer.last = request.sequence
                done = [self.timers.schedule(row, request.on_conflict) for row in rows]
                results, ids, others = zip(*done, strict=True)
                answer.timer_ids = b"".join(ids)
                if {*results} != {pb.SCHEDULE_RESULT_SCHEDULED}:
                    answer.results.extend(results)
                    answer.other_ids = b"".join(others)
                producer.answers[request.sequence] = answer
        return answer

    def queue(self, topic: str) -> list[Row]:
        return [row for row in self.rows if row.topic == topic]


def unpack(of: pb.TimerColumns) -> list[Row]:
    n = len(of.payload_sizes)
    assert [bool(of.due_ms), bool(of.delay_ms), bool(of.delay_level)].count(True) == 1
    delays = list(of.delay_ms) or [1_000 * level for level in of.delay_level]
    due = list(of.due_ms) or [NOW_MS + ms for ms in delays]
    due = due * n if len(due) == 1 else due
    assert len(due) == n
    payloads = slices(of.payload_sizes, of.payloads)
    keys = slices(of.key_sizes, of.keys) or [b""] * n
    headers = slices(of.headers_sizes, of.headers) or [b""] * n
    assert len(keys) == len(headers) == n
    return [Row(of.topic, *row) for row in zip(due, payloads, keys, headers, strict=True)]


async def refuse(context: Any, error: pb.Error, code: grpc.StatusCode) -> None:
    trailer = (("timer-error-bin", error.SerializeToString()),)
    await context.abort(code, error.message, trailing_metadata=trailer)


async def not_found(context: Any, text: str) -> None:
    await refuse(context, wire_error(pb.REASON_NOT_FOUND, text), grpc.StatusCode.NOT_FOUND)


async def ordered(context: Any, order: Any, change: Callable[[Any], Any], request: Any) -> Any:
    """Return the answer of a change, or end its RPC before or after it, as a test has ordered."""
    if isinstance(order, pb.Error):
        await refuse(context, order, grpc.StatusCode.UNAVAILABLE)
    answer = change(request)
    if order == "lose":
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
    return answer


class Node(rpc.TimerServiceServicer, rpc.ConsumeServiceServicer, rpc.AdminServiceServicer):
    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster = cluster
        self.index = index
        self.address = ""
        self.paused: asyncio.Event | None = None
        """Event that is set when the pause ends. None: the node is not paused."""
        self.hint = True
        self.status_s = 0.0
        """Delay of an answer to GetStatus in seconds."""
        self.server: Any = None

    async def start(self) -> None:
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        rpc.add_TimerServiceServicer_to_server(self, self.server)
        rpc.add_ConsumeServiceServicer_to_server(self, self.server)
        rpc.add_AdminServiceServicer_to_server(self, self.server)
        port = self.server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    async def stop(self) -> None:
        self.resume()
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    def pause(self) -> None:
        """Stop answering, as a stopped process does."""
        self.paused = asyncio.Event()

    def resume(self) -> None:
        if self.paused is not None:
            self.paused.set()
            self.paused = None

    async def _alive(self) -> None:
        if self.paused is not None:
            await self.paused.wait()

    @property
    def leads(self) -> bool:
        return self.cluster.leader == self.index

    def _not_leader(self) -> pb.Error:
        leader = self.cluster.leader
        known = self.hint and leader is not None
        return wire_error(
            pb.REASON_NOT_LEADER,
            leader=self.cluster.nodes[leader].address if known else "",  # type: ignore[index]
        )

    async def _must_lead(self, context: Any) -> None:
        await self._alive()
        if not self.leads:
            await refuse(context, self._not_leader(), grpc.StatusCode.FAILED_PRECONDITION)

    # ---- timers

    async def RegisterProducer(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        cluster = self.cluster
        cluster.registrations += 1
        if cluster.denied:
            denied = wire_error(pb.REASON_PERMISSION_DENIED, "no rule for produce")
            await refuse(context, denied, grpc.StatusCode.PERMISSION_DENIED)
        assert len(request.token) == 16
        if request.token not in cluster.tokens:
            cluster.tokens[request.token] = cluster.next_producer
            cluster.producers[cluster.next_producer] = Producer()
            cluster.next_producer += 1
        return pb.RegisterProducerResponse(producer_id=cluster.tokens[request.token])

    async def UnregisterProducer(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        self.cluster.unregistered.append(request.producer_id)
        return pb.UnregisterProducerResponse()

    async def ScheduleStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        cluster = self.cluster
        async for request in requests:
            await self._must_lead(context)
            cluster.requests.append(request)
            order = cluster.on_schedule(request)
            if isinstance(order, pb.Error):
                if order.field == "request":  # too large: a node ends the stream
                    await refuse(context, order, grpc.StatusCode.INVALID_ARGUMENT)
                yield pb.ScheduleResponse(request_no=request.request_no, error=order)
                continue
            answer = cluster.schedule(request)
            if order == "lose":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
            if cluster.hold is not None:
                await cluster.hold.wait()
            await self._alive()
            yield answer

    async def Schedule(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        cluster = self.cluster
        return await ordered(context, cluster.on_schedule(request), cluster.schedule, request)

    async def Cancel(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        self.cluster.deadlines_s.append(context.time_remaining())
        cluster = self.cluster
        return await ordered(context, cluster.on_cancel(), cluster.timers.cancel, request)

    async def Reschedule(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        cluster = self.cluster
        return await ordered(context, cluster.on_cancel(), cluster.timers.reschedule, request)

    async def GetTimer(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        answer = self.cluster.timers.get(request)
        if answer is None:
            await not_found(context, "no such timer")
        return answer

    async def ListTimers(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        rows, token = self.cluster.timers.page(request.filter, request.page_token)
        return pb.ListTimersResponse(timers=columns(rows), next_page_token=token)

    async def CountTimers(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        return self.cluster.timers.count(request)

    # ---- consuming

    async def Receive(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError  # the client uses streams only

    Ack = Nack = Extend = Peek = ReadMessages = Receive

    async def Consume(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        await self._must_lead(context)
        cluster, epoch = self.cluster, self.cluster.epoch
        opening = (await anext(aiter(requests))).open
        cluster.opened.append(opening)
        if opening.group == "FORBIDDEN":
            refused = wire_error(pb.REASON_INVALID_REQUEST, "group = FORBIDDEN", field="group")
            await refuse(context, refused, grpc.StatusCode.INVALID_ARGUMENT)
        if opening.existing and cluster.gone is not None:
            await refuse(context, cluster.gone, grpc.StatusCode.NOT_FOUND)
        if cluster.held_for > 0:
            cluster.held_for -= 1
            held = wire_error(pb.REASON_GROUP_HELD, "consumer 'other' has it")
            await refuse(context, held, grpc.StatusCode.FAILED_PRECONDITION)
        group = cluster.groups.setdefault((opening.topic, opening.group), Group())
        session = Session(cluster, group, opening, epoch)
        reader = asyncio.ensure_future(session.read(requests))
        try:
            yield pb.ConsumeResponse(opened=pb.ConsumerOpened(epoch=epoch, lease_ms=30_000))
            while True:
                await self._alive()
                if not self.leads:
                    await refuse(context, self._not_leader(), grpc.StatusCode.FAILED_PRECONDITION)
                if session.broken and cluster.gone is not None:
                    await refuse(context, cluster.gone, grpc.StatusCode.NOT_FOUND)
                if session.broken:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
                answer = session.next()
                if answer is not None:
                    yield answer
                    continue
                if session.over:
                    return
                async with cluster.wake:
                    if not session.ready() and self.leads:
                        await cluster.wake.wait()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            session.leave()

    # ---- administration

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.cluster.probes += 1
        await self._alive()
        await asyncio.sleep(self.status_s)
        leader = self.cluster.leader
        address = "" if leader is None or self.leads else self.cluster.nodes[leader].address
        return pb.GetStatusResponse(
            cluster_id="fake",
            leader_address=address,
            epoch=self.cluster.epoch,
            leader="" if self.cluster.leader is None else f"n{self.cluster.leader + 1}",
            controller="n1",
            nodes=[
                pb.NodeStatus(
                    name=f"n{node.index + 1}",
                    address=node.address,
                    reachable=True,
                    replica_id=node.index + 1,
                    role="leader" if node.leads else "follower",
                    serving=node.leads,
                    epoch=self.cluster.epoch,
                    scheduled=len(self.cluster.rows),
                )
                for node in ([self] if request.local else self.cluster.nodes)
            ],
        )

    async def GetCheckpoint(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._alive()
        return pb.GetCheckpointResponse(
            nodes=[
                pb.NodeCheckpoint(
                    node=f"n{node.index + 1}",
                    role="leader" if node.leads else "follower",
                    epoch=self.cluster.epoch,
                    log_end=12,
                    commit_index=11,
                    applied_index=10,
                    last_read_time_ms=NOW_MS,
                    queue_offsets={"orders": 5},
                    digest=self.cluster.digests.get(f"n{node.index + 1}", "abcdef0123456789"),
                    age_ms=1500,
                    reachable=True,
                )
                for node in self.cluster.nodes
            ],
            shared=pb.SharedCheckpoint(
                epoch=self.cluster.epoch, index=9, digest="abcdef0123456789"
            ),
        )

    async def ListTopics(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        groups = [pb.GroupStatus(name="billing", type="shared", cursor=2, unacked=3)]
        quota = pb.QuotaStatus(field="pending_max", used=7, limit=9, source="namespace")
        orders = pb.TopicStatus(
            name="orders", pending=7, queue_end=5, groups=groups, quotas=[quota]
        )
        topics = [orders, pb.TopicStatus(name="quiet")]
        wanted = request.topic.removeprefix("default/")
        found = [topic for topic in topics if wanted in ("", topic.name)]
        if not found:
            await not_found(context, f"no such topic: {wanted!r}")
        return pb.ListTopicsResponse(topics=found)

    async def CreateTopic(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        return pb.CreateTopicResponse(topic_id=17)

    async def DeleteTopic(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.topic == "nothing" or request.topic in self.cluster.deleted:
            await not_found(context, f"no such topic: {request.topic!r}")
        self.cluster.deleted.append(request.topic)
        if self.cluster.lose_alters:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        groups = [pb.DeletedGroup(name="billing", unacked=3)]
        return pb.DeleteTopicResponse(topic_id=17, pending=7, messages=5, groups=groups)

    async def CreateGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        self.cluster.settings.append(request.settings)
        return pb.GroupStatus(name=request.group, settings=request.settings)

    async def AlterGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.group == "nobody":
            await not_found(context, "no such group: 'nobody'")
        return await self.CreateGroup(request, context)

    async def SeekGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        self.cluster.seeks.append(request)
        return pb.GroupStatus(name=request.group, cursor=request.offset)

    async def DeleteGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.group == "nobody" or request.group in self.cluster.deleted:
            await not_found(context, f"no such group: {request.group!r}")
        self.cluster.deleted.append(request.group)
        if self.cluster.lose_alters:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return pb.DeleteGroupResponse()

    async def Redrive(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        cluster = self.cluster
        homeless = min(cluster.homeless - cluster.seen_homeless, request.max_messages)
        cluster.seen_homeless += homeless
        cluster.redrives += 1
        if cluster.redrives in cluster.forget_homeless:
            cluster.seen_homeless = 0
        moved = min(cluster.dead_letters, request.max_messages - homeless, 100)
        cluster.dead_letters -= moved
        why = cluster.redrive_errors.pop(0) if cluster.redrive_errors else None
        left = cluster.dead_letters + cluster.homeless
        if cluster.lost_redrives > 0:
            cluster.lost_redrives -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return pb.RedriveResponse(redriven=moved, left=left, error=why, homeless=homeless)

    async def TransferLeadership(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        self.cluster.transfers.append(request.target)
        if request.target == "nobody":
            await not_found(context, "no such node: 'nobody'")
        return pb.TransferLeadershipResponse(unchanged=request.target == "n1")

    async def ListMembers(self, _: Any, __: Any) -> Any:  # noqa: N802
        added = self.cluster.changes[-1:] == [(pb.ChangeMembersRequest.CHANGE_ADD, "n4")]
        rows = [
            pb.Member(name=name, replica_id=number, voter=name != "n4" or added, role="follower")
            for number, name in enumerate(("n1", "n2", "n3", "n4"), 1)
        ]
        rows[3].role = "follower" if added else "learner"
        rows[3].lag_entries = self.cluster.lags.pop(0) if added and self.cluster.lags else 0
        return pb.ListMembersResponse(epoch=3, leader="n1", members=rows)

    async def ChangeMembers(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.cluster.changes.append((request.change, request.name))
        return await self.ListMembers(request, context)

    async def DrainNode(self, request: Any, context: Any) -> Any:  # noqa: N802
        del context
        return pb.DrainNodeResponse(node=request.node, drained=not request.undo)

    async def SetLogLevel(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.node == "n3":
            silent = wire_error(pb.REASON_NOT_READY, "the node n3 did not answer")
            await refuse(context, silent, grpc.StatusCode.UNAVAILABLE)
        return pb.SetLogLevelResponse(node=request.node, before="info")

    async def ReloadFiles(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.node == "n3":
            silent = wire_error(pb.REASON_NOT_READY, "the node n3 did not answer")
            await refuse(context, silent, grpc.StatusCode.UNAVAILABLE)
        if request.node == "n4":
            denied = wire_error(pb.REASON_PERMISSION_DENIED, "no rule for operate")
            await refuse(context, denied, grpc.StatusCode.PERMISSION_DENIED)
        kept = request.node == "n2"
        result = pb.ReloadFilesResponse.RESULT_KEPT if kept else pb.ReloadFilesResponse.RESULT_TAKEN
        file = pb.ReloadFilesResponse.File(
            setting="tls.access", path="access.toml", result=result, why="not TOML" * kept
        )
        return pb.ReloadFilesResponse(node=request.node, files=[file])

    async def BeginVerification(self, request: Any, context: Any) -> Any:  # noqa: N802
        del context
        self.cluster.begun.append(request.node)
        return pb.BeginVerificationResponse(nodes=self.cluster.verifications[0].nodes)

    async def GetVerification(self, request: Any, context: Any) -> Any:  # noqa: N802
        del context
        answers = self.cluster.verifications
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def OpenBackup(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    FetchBackup = CloseBackup = FetchLog = OpenBackup

    async def DumpStacks(self, request: Any, context: Any) -> Any:  # noqa: N802
        del context
        stack = pb.DumpStacksResponse.Stack(name="run", count=3, frames=["sleep tasks.py:1"])
        return pb.DumpStacksResponse(node=request.node, tasks=[stack], task_count=5, left_out=2)

    async def TraceHops(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def AlterPolicies(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        self.cluster.alters.append(request)
        if self.cluster.lose_alters:
            lost = wire_error(pb.REASON_LEADERSHIP_LOST, "it may be so")
            await refuse(context, lost, grpc.StatusCode.ABORTED)
        return pb.DescribePoliciesResponse(
            scope=request.scope, own=request.set, effective=request.set
        )

    async def ListProducers(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        ids_ = range(request.after + 1, min(request.after + 3, 6))
        return pb.ListProducersResponse(
            producers=[pb.ProducerStatus(producer=each, used_at_ms=each) for each in ids_],
            next_after=ids_[-1] if ids_[-1] < 5 else 0,
            count=5,
        )

    async def _unserved(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    CreateSeries = AlterSeries = DeleteSeries = GetSeries = ListSeries = _unserved
    ScheduleTimer = RedriveLetters = _unserved

    async def TellStory(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        await self._must_lead(context)
        fired = pb.StoryEvent(
            what=pb.StoryEvent.WHAT_FIRED, index=9, queue_offset=4, topic="orders"
        )
        yield pb.TellStoryResponse(
            events=[pb.StoryEvent(what=pb.StoryEvent.WHAT_SCHEDULED, index=3)]
        )
        yield pb.TellStoryResponse(events=[fired])
        end = pb.StoryEnd(state=pb.TIMER_STATE_FIRED, log_first=2, log_last=12, gaps=["a gap"])
        yield pb.TellStoryResponse(end=end)

    async def DescribePolicies(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        mine = [each.set for each in self.cluster.alters if each.scope == request.scope]
        own = mine[-1] if mine else pb.Policy()
        others = [] if request.scope.namespace else [each.scope for each in self.cluster.alters]
        catch_up = own.catch_up or "all"
        return pb.DescribePoliciesResponse(
            scope=request.scope, own=own, effective=pb.Policy(catch_up=catch_up), narrower=others
        )


class Session:
    """One open Consume stream."""

    lease_ids = iter(range(1, 1 << 30))

    def __init__(
        self, cluster: Cluster, group: Group, opening: pb.OpenConsumer, epoch: int
    ) -> None:
        self.cluster = cluster
        self.group = group
        self.topic = opening.topic
        self.credit = opening.credit
        self.epoch = epoch
        self.answers: deque[pb.ConsumeResponse] = deque()
        self.broken = False
        self.over = False
        """Whether the client has ended its requests; pending answers are still sent."""

    async def read(self, requests: Any) -> None:
        async for request in requests:
            kind = request.WhichOneof("kind")
            if kind == "credit":
                self.credit += request.credit
                self.cluster.credits.append(request.credit)
            elif kind == "leaving":
                self.credit = 0
                if self.cluster.answers_leaving:
                    self.answers.append(pb.ConsumeResponse(leaving=True))
            else:
                self._ack(getattr(request, kind))
            await self.cluster.notify()
        self.over = True
        await self.cluster.notify()

    def _ack(self, ack: Settlement) -> None:
        if isinstance(ack, pb.NackRequest) and ack.unseen:
            self.cluster.given_back += ack.offsets
            self.credit = 0 if ack.ends_credit else self.credit
            self.cluster.credit_ends += ack.ends_credit
            order = None
        else:
            self.cluster.acks.append(ack)
            order = self.cluster.on_ack(ack)
        answer = pb.AckResponse(request_no=ack.request_no)
        if isinstance(order, pb.Error):
            answer.error.CopyFrom(order)
        else:
            answer.results.extend(self._judge(ack, offset) for offset in ack.offsets)
        if order == "lose":
            self.broken = True
        else:
            self.answers.append(pb.ConsumeResponse(acked=answer))

    def _judge(self, ack: Settlement, offset: int) -> Any:
        group = self.group
        if offset in group.acked:
            return pb.ACK_RESULT_ALREADY_ACKED
        if offset in group.expired:
            return pb.ACK_RESULT_EXPIRED
        if offset >= group.next:
            return pb.ACK_RESULT_NOT_DELIVERED
        if group.held.get(offset, (ack.epoch, ack.lease_id)) != (ack.epoch, ack.lease_id):
            return pb.ACK_RESULT_LEASE_LOST
        if isinstance(ack, pb.ExtendRequest):
            return pb.ACK_RESULT_EXTENDED if offset in group.held else pb.ACK_RESULT_LEASE_LOST
        held = group.held.pop(offset, None)
        if isinstance(ack, pb.NackRequest):
            if held is None:
                return pb.ACK_RESULT_LEASE_LOST
            group.back.append(offset)
            return pb.ACK_RESULT_NACKED
        group.acked.add(offset)
        if ack.cumulative:
            group.acked.update(range(offset))
        return pb.ACK_RESULT_ACKED

    def ready(self) -> bool:
        group = self.group
        more = any(o not in group.acked for o in group.back)
        more |= group.next < len(self.cluster.queue(self.topic))
        return bool(self.answers) or self.broken or self.over or (self.credit > 0 and more)

    def next(self) -> pb.ConsumeResponse | None:
        if self.answers:
            return self.answers.popleft()
        group, queue = self.group, self.cluster.queue(self.topic)
        limit = min(self.credit, self.cluster.deliver_max)
        offsets: list[int] = []
        while len(offsets) < limit and group.back:
            offset = group.back.popleft()
            if offset not in group.acked:
                offsets.append(offset)
        while len(offsets) < limit and group.next < len(queue):
            offsets.append(group.next)
            group.next += 1
        if not offsets:
            return None
        lease_id = next(self.lease_ids)
        for offset in offsets:
            group.held[offset] = self.epoch, lease_id
            group.attempts[offset] = group.attempts.get(offset, 0) + 1
        self.credit -= len(offsets)
        return deliveries(self.epoch, lease_id, [(o, queue[o]) for o in offsets], group.attempts)

    def leave(self) -> None:
        held = [o for o, (epoch, _) in self.group.held.items() if epoch == self.epoch]
        for offset in held:
            del self.group.held[offset]
        self.group.back.extend(sorted(held))


def deliveries(
    epoch: int, lease_id: int, rows: list[tuple[int, Row]], attempts: dict[int, int]
) -> pb.ConsumeResponse:
    keys = any(row.key for _, row in rows)
    headers = any(row.headers for _, row in rows)
    return pb.ConsumeResponse(
        deliveries=pb.Deliveries(
            epoch=epoch,
            lease_id=lease_id,
            lease_ms=30_000,
            queue_offsets=[offset for offset, _ in rows],
            timer_ids=b"".join(row.raw for _, row in rows),
            due_ms=[row.due_ms for _, row in rows],
            fired_at_ms=[row.due_ms + 1 for _, row in rows],
            attempts=[attempts[offset] for offset, _ in rows],
            payload_sizes=[len(row.payload) for _, row in rows],
            payloads=b"".join(row.payload for _, row in rows),
            key_sizes=[len(row.key) for _, row in rows] if keys else [],
            keys=b"".join(row.key for _, row in rows),
            headers_sizes=[len(row.headers) for _, row in rows] if headers else [],
            headers=b"".join(row.headers for _, row in rows),
        )
    )


def id_text(raw: bytes) -> str:
    return base64.b32hexencode(raw).decode().lower()
