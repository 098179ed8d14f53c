"""The open ports of a running node, and its channels to the other nodes.

    gRPC server   public services, health, reflection; streams and snapshots between the nodes
    HTTP server   metrics, health, JSON
    channels      to the AdminService of each other node, and for requests that the leader answers

The Raft links and the replica's streams dial on channels of their own (cluster/rpc/endpoints.py).
"""

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from cluster.api.public_services import Services
from cluster.rpc.endpoints import SERVER_OPTIONS, AdminChannels, Endpoints
from cluster.rpc.handlers import Registrar
from cluster.rpc.health_service import ON_ALL, ON_LEADER, HealthService
from cluster.rpc.http import HttpServer
from cluster.rpc.open_files import connections_max
from cluster.rpc.relay import Relay
from cluster.rpc.request_bounds import COLUMNS_BYTES_MAX
from cluster.settings.config import LimitsConfig
from timer.model.timer_errors import ConfigError


class Ports:
    """Opens and closes the ports of one node. The order is the node's."""

    def __init__(
        self,
        endpoints: Endpoints,
        channels: AdminChannels,
        http: HttpServer,
        *,
        relay: Relay,
        grpc_server: grpc.aio.Server,
        health_service: HealthService,
    ) -> None:
        """`grpc_server` has its handlers; see `grpc_server_of`."""
        self._endpoints, self._channels = endpoints, channels
        self._grpc, self._http, self._relay = grpc_server, http, relay
        self.health = health_service

    async def open(self) -> None:
        """Listen on the gRPC port, then on the HTTP port.

        Raises:
            ConfigError: an address is in use, or not this machine's.
        """
        await self._endpoints.listen(self._grpc)
        try:
            await self._http.start()
        except ConfigError:
            await self._grpc.stop(None)  # else it logs an error at the end of the loop
            raise

    async def close_grpc(self, grace_s: float) -> None:
        """Close the gRPC port. Open RPCs may still take `grace_s` seconds."""
        await self._grpc.stop(grace_s)

    async def close(self) -> None:
        """Close the HTTP port and the channels."""
        await self._http.stop()
        await self._relay.close()
        await self._channels.close()


def grpc_server_of(
    endpoints: Endpoints,
    limits: LimitsConfig,
    *,
    services: Services,
    health_service: HealthService,
    peers: Iterable[grpc.GenericRpcHandler],
) -> grpc.aio.Server:
    """Return the gRPC server of a node, with all handlers and without a port.

    `peers`: the handlers that serve the other nodes.
    """
    most = (
        ("grpc.max_concurrent_streams", limits.streams_max),
        ("grpc.max_allowed_incoming_connections", connections_max(limits.connections_max)),
    )
    server = endpoints.server((*SERVER_OPTIONS, *most))
    server.add_generic_rpc_handlers(tuple(peers))
    services.add_to(Registrar(server, limits.request_bytes_max + COLUMNS_BYTES_MAX))
    health_service.add_to(server)
    reflected = [*ON_LEADER, *ON_ALL, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(reflected, server)
    return server
