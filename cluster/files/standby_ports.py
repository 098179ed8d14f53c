"""The ports of a node that takes no part in the cluster while it waits.

The node is healthy and not ready. Its status has the reason for the wait, and the leader and the
nodes as the other nodes report them: a client with this address alone finds the leader. All other
calls of clients are refused with that reason, and other nodes take it for absent.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.api.peer_queries import Peers, Stub, answer_of, ask_all, unreachable
from cluster.rpc.endpoints import AdminChannels, Endpoints
from cluster.rpc.grpc_errors import abort
from cluster.rpc.handlers import PINGED
from cluster.rpc.http import LocalState
from cluster.rpc.relay import PATHS
from cluster.settings.config import NodeConfig
from cluster.settings.service_manager import notice_ready
from timer.model.timer_errors import NotReadyError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.message_json import as_dict

ADMIN: Final = "timer.v1.AdminService"
CLUSTER_KEY: Final = "timer-cluster-id"
NONCE_KEY: Final = "timer-replace-nonce"
"""Metadata. A status carries the nonce of this wait, and a replacement must send it back."""
_METHODS: Final = frozenset(PATHS.values())
GRACE_S: Final = 0.5
"""Seconds that open RPCs of probes may still take at `stop`."""
FRESH_S: Final = 0.5
"""Seconds for which a query of the other nodes serves all callers: each node then makes its whole
status at most twice a second for this one."""
LEADER_S: Final = 0.4
"""Longest wait for the other nodes' answers before a leader is named. Clients wait `probe_s` of
timerclient/values/client_settings.py, 0.7 s."""
NAMED_S: Final = 0.1
"""Longest wait for further answers once one has named a leader: another may name a newer one."""


WAITING: Final = "waiting for room"
"""The role of a node that waits for room on its disk."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The present reason for which a node takes no part."""

    role: str
    why: str
    free_bytes: int | None = None
    """Free bytes of the disk. None: the node does not wait for room."""


class _Metrics(Collector):
    """The metrics of a node that waits."""

    def __init__(self, wait: Callable[[], Wait]) -> None:
        self._wait = wait

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See Collector."""
        wait = self._wait()
        standby = GaugeMetricFamily("timer_standby", "1: the node takes no part", labels=["role"])
        standby.add_metric([wait.role], 1)
        yield standby
        if wait.free_bytes is not None:
            yield GaugeMetricFamily(
                "timer_disk_free_bytes", "Free bytes of the disk", value=wait.free_bytes
            )


class _Others(grpc.GenericRpcHandler):
    """Ends calls of all methods for clients, of one request or of a stream."""

    def __init__(self, refuse: Callable[..., Any]) -> None:
        self._handler: Any = grpc.stream_stream_rpc_method_handler(refuse)

    def service(self, call: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """See GenericRpcHandler."""
        return self._handler if call.method in _METHODS else None


class _PeerQuery:
    """A query of the other nodes, for all callers of the next FRESH_S."""

    def __init__(self, cluster_id: str, peers: Peers) -> None:
        self._cluster_id = cluster_id
        self.answers: list[pb.GetStatusResponse] = []
        """The status of the nodes that have answered so far."""
        self.is_settled = asyncio.Event()
        """A serving leader, or a node that hears its leader, has answered, or all nodes have."""
        self._ends_s = asyncio.get_running_loop().time() + FRESH_S
        self.task = asyncio.create_task(ask_all(peers, self._ask))
        self.task.add_done_callback(lambda _: self.is_settled.set())

    async def _ask(self, name: str, address: str, stub: Stub) -> pb.GetStatusResponse:
        answer = await answer_of(name, address, stub)
        if answer.cluster_id not in ("", self._cluster_id):
            reason = f"its address is of a node of cluster {answer.cluster_id}"
            answer = unreachable(name, address, reason)
        elif answer.nodes and answer.nodes[0].name != name:
            answer = unreachable(name, address, f"its address is of node {answer.nodes[0].name}")
        if answer.nodes:
            self.answers.append(answer)
        if answer.hears_leader or any(node.serving for node in answer.nodes):
            self.is_settled.set()
        return answer

    def is_fresh(self) -> bool:
        """Return whether further callers use this query: no two are under way."""
        return not self.task.done() or asyncio.get_running_loop().time() < self._ends_s


class Standby:
    """Serves all ports from `start` to `stop`."""

    def __init__(
        self,
        config: NodeConfig,
        wait: Callable[[], Wait],
        on_replace: Callable[[], object] | None = None,
    ) -> None:
        """`wait` returns the reason for the wait.

        `on_replace` is called when an operator requests the replacement of this node's replica.
        None: the replica cannot be replaced.
        """
        self._config, self._wait = config, wait
        registry = CollectorRegistry()
        registry.register(_Metrics(wait))
        self._endpoints = Endpoints(config)
        self._http = self._endpoints.http_server(self, registry)
        self._server = self._endpoints.public_server((*PINGED, ("grpc.so_reuseport", 0)))
        self._link = self._endpoints.link_server()
        self._renewing: asyncio.Task[None] | None = None
        self._channels: AdminChannels | None = None
        """To the other nodes, from `start` on."""
        self._query: _PeerQuery | None = None
        status = grpc.unary_unary_rpc_method_handler(
            self._status,
            request_deserializer=pb.GetStatusRequest.FromString,
            response_serializer=pb.GetStatusResponse.SerializeToString,
        )
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"GetStatus": status}
        self._on_replace, self._nonce = on_replace, secrets.token_hex(16)
        if on_replace is not None:
            methods["ChangeMembers"] = grpc.unary_unary_rpc_method_handler(
                self._change_members,
                request_deserializer=pb.ChangeMembersRequest.FromString,
                response_serializer=pb.ListMembersResponse.SerializeToString,
            )
        admin = grpc.method_handlers_generic_handler(ADMIN, methods)
        others = _Others(self._refuse)
        (self._link or self._server).add_generic_rpc_handlers((admin, others))
        if self._link is not None:
            public = grpc.method_handlers_generic_handler(ADMIN, {"GetStatus": status})
            self._server.add_generic_rpc_handlers((public, others))

    async def start(self) -> None:
        """Listen on all ports.

        Raises:
            ConfigError: an address is in use, or not this machine's.
        """
        await self._endpoints.listen(self._server, self._link)
        self._channels = AdminChannels(self._endpoints)
        if self._endpoints.tls is not None:
            self._endpoints.tls.on_renewal = self._channels.renew
            self._renewing = asyncio.create_task(self._endpoints.tls.run())
        await self._http.start()
        notice_ready(self._text())

    async def stop(self) -> None:
        """Close all ports."""
        if self._renewing is not None:
            self._renewing.cancel()
        for server in (self._server, self._link):
            if server is not None:
                await server.stop(GRACE_S)
        await self._http.stop()
        if self._query is not None:
            self._query.task.cancel()
        if self._channels is not None:
            await self._channels.close()

    async def _status(
        self,
        request: pb.GetStatusRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> pb.GetStatusResponse:
        """Return all nodes' status; only this node's, without a leader, if `local`.

        With `leadership`: only this node's, and the leader that the others report.
        """
        await context.send_initial_metadata(((NONCE_KEY, self._nonce),))
        if request.local and not request.leadership:
            return self._own()
        return await self._answer(leadership=request.leadership)

    def _own(self) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(cluster_id=self._config.cluster_id, nodes=[self._node()])

    async def _answer(self, *, leadership: bool) -> pb.GetStatusResponse:
        """Return all nodes' status, or only this node's if `leadership`, and the leader."""
        answers = await self._answers(leadership=leadership)
        own, peers = self._own(), self._config.peers
        newest = max(answers, key=lambda each: (each.epoch, each.leader != ""), default=own)
        own.epoch, own.leader = newest.epoch, newest.leader
        others = (answer.controller for answer in answers)  # one may have no link to it
        own.controller = newest.controller or max(others, default="")
        own.leader_address = peers.get(newest.leader) or newest.leader_address
        own.feature_level = max((answer.feature_level for answer in answers), default=0)
        if not leadership:
            own.nodes.extend(answer.nodes[0] for answer in answers)
            own.nodes.sort(key=lambda node: node.name)
        return own

    async def _answers(self, *, leadership: bool) -> list[pb.GetStatusResponse]:
        """Return the other nodes' answers. With `leadership`: those of LEADER_S at most."""
        if self._query is None or not self._query.is_fresh():
            assert self._channels is not None
            peers, stubs = self._config.peers, self._channels.stubs
            self._query = _PeerQuery(
                self._config.cluster_id, {name: (peers[name], stubs[name]) for name in stubs}
            )
        query = self._query
        if leadership:
            with suppress(TimeoutError):
                await asyncio.wait_for(query.is_settled.wait(), LEADER_S - NAMED_S)
        await asyncio.wait([query.task], timeout=NAMED_S if leadership else None)
        return query.answers

    async def _refuse(
        self, requests: object, context: "grpc.aio.ServicerContext[object, object]"
    ) -> None:
        del requests
        name, wait = self._config.name, self._wait()
        text = f"{name} is {wait.role} and serves nothing meanwhile: {wait.why}"
        await abort(context, NotReadyError(text))

    async def _change_members(
        self,
        request: pb.ChangeMembersRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> pb.ListMembersResponse:
        """Note a request to replace this node's replica; the leader sends it.

        A request is rejected if it is for another node or cluster, or if its nonce is not of a
        status of this wait. So a late copy of an earlier request deletes no files.
        """
        sent = dict(context.invocation_metadata() or ())
        meant = sent.get(CLUSTER_KEY), sent.get(NONCE_KEY), request.change, request.name
        config, replace = self._config, pb.ChangeMembersRequest.CHANGE_REPLACE
        if meant != (config.cluster_id, self._nonce, replace, config.name):
            await abort(context, NotReadyError(self._wait().why))
        assert self._on_replace is not None
        self._on_replace()
        return pb.ListMembersResponse()

    def _node(self) -> pb.NodeStatus:
        name, wait = self._config.name, self._wait()
        return pb.NodeStatus(
            name=name,
            address=self._config.peers[name],
            role=wait.role,
            error=wait.why,
            disk_free_bytes=wait.free_bytes or 0,
            disk_reserve_bytes=self._config.storage.reserve_bytes,
            disk_low=wait.free_bytes is not None,
        )

    def _text(self) -> str:
        wait = self._wait()
        return f"{wait.role}: {wait.why}"

    def local(self) -> LocalState:
        """See NodeView."""
        return LocalState(role=self._text(), serving=False, leader="", silent_ms=0, silent_ms_max=0)

    async def measure(self) -> None:
        """See NodeView: there is nothing to measure."""

    async def status(self, *, cluster: bool) -> Mapping[str, object]:
        """See NodeView."""
        return as_dict(await self._answer(leadership=not cluster))

    async def checkpoint(self, *, cluster: bool) -> Mapping[str, object]:
        """See NodeView."""
        del cluster
        return {"nodes": [], "shared": None}

    async def policies(self, *, namespace: str, topic: str) -> Mapping[str, object]:
        """See NodeView.

        Raises:
            NotReadyError: always; this node has applied no policies.
        """
        del namespace, topic
        raise NotReadyError(self._wait().why)
