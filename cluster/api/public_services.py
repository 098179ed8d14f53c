"""The public services of a node: what clients and operators call."""

from concurrent.futures import Executor
from typing import Any, NamedTuple

from cluster.api import wire_rows
from cluster.api.admin_service import AdminService, View
from cluster.api.consume_service import ConsumeService
from cluster.api.group_admin import GroupDesk
from cluster.api.policy_admin import PolicyDesk
from cluster.api.timer_service import TimerService
from cluster.api.wire_rows import RequestLimits
from cluster.rpc.outboxes import Outboxes
from cluster.settings.config import NodeConfig
from cluster.state.host import Host
from timerclient.proto import timer_pb2_grpc as rpc


class Services(NamedTuple):
    """One of each, over one host."""

    timers: TimerService
    consumers: ConsumeService
    admin: AdminService

    def add_to(self, server: Any) -> None:
        """Let a gRPC server, or its Registrar, offer them."""
        rpc.add_TimerServiceServicer_to_server(self.timers, server)
        rpc.add_ConsumeServiceServicer_to_server(self.consumers, server)
        rpc.add_AdminServiceServicer_to_server(self.admin, server)


def services_of(
    host: Host, view: View, config: NodeConfig, threads: Executor | None = None
) -> Services:
    """Return the services that `config` asks for; `threads` look in, by default their own."""
    limits = config.limits
    salt = wire_rows.id_salt(config.cluster_id)
    timers = TimerService(
        host,
        limits=RequestLimits(
            key_bytes_max=limits.key_bytes_max,
            headers_bytes_max=limits.headers_bytes_max,
            request_rows_max=limits.request_rows_max,
            request_bytes_max=limits.request_bytes_max,
        ),
        salt=salt,
        auto_create_topics=config.auto_create_topics,
        topic_name_bytes_max=limits.topic_name_bytes_max,
        threads=threads,
    )
    desk = GroupDesk(host, timers, config.groups, limits.group_name_bytes_max)
    consumers = ConsumeService(host, desk, Outboxes(limits.outbox_bytes_max), salt=salt)
    admin = AdminService(view, timers, PolicyDesk(host, timers), desk, host.require_leader)
    return Services(timers, consumers, admin)
