"""The open ports of a running node, and its channels to the other nodes.

    public server   public services, health, reflection
    token server    the same for clients with a bearer token, if it is set
    TCP port        for messages of the other nodes without gRPC, if it is set
    link server     for the other nodes, if they have their own port: streams, snapshots, and the
                    public services, for their queries and for requests of their clients
    HTTP server     metrics, health, JSON
    channels        to the AdminService of each other node, and for requests that the leader answers

The Raft links and the replica's streams dial on channels of their own (cluster/rpc/endpoints.py).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, NamedTuple

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from cluster.api.public_services import Services
from cluster.rpc.endpoints import SERVER_OPTIONS, TOKEN_OPTIONS, AdminChannels, Endpoints
from cluster.rpc.handlers import Context, Registrar, RequestStream
from cluster.rpc.health_service import ON_ALL, ON_LEADER, HealthService
from cluster.rpc.http import HttpServer
from cluster.rpc.open_files import connections_max
from cluster.rpc.relay import Relay
from cluster.settings.config import LimitsConfig
from timer.model.timer_errors import ConfigError

logger = logging.getLogger(__name__)

WARN_S: Final = 3_600.0
"""Interval of the warning about open ports."""


class GrpcServers(NamedTuple):
    """The gRPC servers of one node."""

    public: grpc.aio.Server
    link: grpc.aio.Server | None
    """For the other nodes. None: they use the public one."""
    tokens: grpc.aio.Server | None
    """For clients with a bearer token. None: there is no such port."""


class Ports:
    """Opens and closes the ports of one node. The order is the node's."""

    def __init__(
        self,
        endpoints: Endpoints,
        channels: AdminChannels,
        http: HttpServer,
        *,
        relay: Relay,
        servers: GrpcServers,
        health_service: HealthService,
    ) -> None:
        self._endpoints, self._channels = endpoints, channels
        self._grpc, self._http, self._relay = servers, http, relay
        self.health = health_service
        if endpoints.tls is not None:
            endpoints.tls.on_renewal = self._renew
            endpoints.tls.on_withdrawal = lambda withdrawn: endpoints.end_distrusted(
                withdrawn, http.port
            )

    async def open(self) -> int:
        """Listen on the gRPC ports, then on the HTTP port; return the number of the HTTP port.

        Raises:
            ConfigError: an address is in use, or not this machine's.
        """
        try:
            await self._endpoints.open_replication()
            await self._endpoints.listen(*self._grpc)
            return await self._http.start()
        except ConfigError:
            await self.close_grpc(None)  # else it logs an error at the end of the loop
            raise

    def _renew(self) -> None:
        self._channels.renew()
        self._relay.renew()

    def reload(self) -> None:
        """Read the certificates again, soon."""
        if self._endpoints.tls is not None:
            self._endpoints.tls.reload_now()

    async def run(self) -> None:
        """Renew the certificates for as long as the node runs, or repeat a warning without TLS.

        RPCs of expired certificates end.
        """
        if self._endpoints.tls is not None:
            guards = (guard.run() for guard in self._endpoints.guards)
            await asyncio.gather(self._endpoints.tls.run(), *guards)
        while self._endpoints.insecure:
            logger.warning("insecure = true: any host that reaches the ports can read and write")
            await asyncio.sleep(WARN_S)

    def end_waiting(self) -> None:
        """Give up the relayed calls that wait for messages, and refuse further ones."""
        self._relay.end_waiting()

    async def close_grpc(self, grace_s: float | None) -> None:
        """Close the gRPC ports. Open RPCs may still take `grace_s` seconds; None: no time."""
        for server in self._grpc:
            if server is not None:
                await server.stop(grace_s)

    async def close(self) -> None:
        """Close the HTTP port and the channels."""
        await self._http.stop()
        await self._relay.close()
        await self._channels.close()


class PacedReflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # it is untyped
    """The standard reflection service. It reads the requests of a caller at the caller's rate."""

    async def ServerReflectionInfo(  # noqa: N802 -- the name in the contract
        self, requests: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        """Yield an answer to each request; see the service."""
        paced = RequestStream(requests, context)
        async for answer in super().ServerReflectionInfo(paced, context):
            yield answer


def grpc_servers_of(
    endpoints: Endpoints,
    limits: LimitsConfig,
    *,
    services: Services,
    health_service: HealthService,
    peers: Iterable[grpc.GenericRpcHandler],
) -> GrpcServers:
    """Return the gRPC servers of a node, with all handlers and without ports.

    `peers`: the handlers that serve the other nodes.
    """
    ports = 2 if endpoints.takes_tokens else 1
    connections = connections_max(limits.connections_max, ports, limits.http_connections_max)
    most = (
        ("grpc.max_concurrent_streams", limits.streams_max),
        ("grpc.max_allowed_incoming_connections", connections),
    )
    public, link = endpoints.public_server((*SERVER_OPTIONS, *most)), endpoints.link_server()
    tokens = endpoints.token_server((*TOKEN_OPTIONS, *most))
    (link or public).add_generic_rpc_handlers(tuple(peers))
    for server in filter(None, (public, link, tokens)):
        unread = services.consumers.outboxes
        services.add_to(Registrar(server, limits.request_bytes_max, unread.answer))
    reflected = [*ON_LEADER, *ON_ALL, health.SERVICE_NAME, reflection.SERVICE_NAME]
    for server in filter(None, (public, tokens)):
        health_service.add_to(server)
        servicer = PacedReflection(reflected)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    return GrpcServers(public, link, tokens)
