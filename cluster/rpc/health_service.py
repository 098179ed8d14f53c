"""The standard gRPC health service of a node.

TimerService, ConsumeService    SERVING on the leader, NOT_SERVING elsewhere
AdminService, and "" (the node) SERVING on every node
"""

from collections.abc import Callable
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

ON_LEADER: Final = ("timer.v1.TimerService", "timer.v1.ConsumeService")
"""Services that only the leader offers."""
ON_ALL: Final = ("timer.v1.AdminService",)
"""Services that every node offers."""


class HealthService:
    """The health of one node's services, by name."""

    def __init__(self, leads: Callable[[], bool]) -> None:
        """`leads`: returns whether this node serves as the leader."""
        self._leads = leads
        self._servicer = health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a gRPC server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def update(self) -> None:
        """Set the health of every service by the node's present role."""
        serving = health_pb2.HealthCheckResponse.SERVING
        leads = serving if self._leads() else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ON_LEADER:
            await self._servicer.set(service, leads)
        for service in ("", *ON_ALL):
            await self._servicer.set(service, serving)

    async def shut_down(self) -> None:
        """Set every service to NOT_SERVING, for good."""
        await self._servicer.enter_graceful_shutdown()
