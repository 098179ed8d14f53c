"""The public services of a node, for clients and operators."""

from concurrent.futures import Executor
from typing import Any, NamedTuple

from cluster.api.admin_service import AdminService, OperatorActions, Reload, Scrub, View, no_files
from cluster.api.backup_desk import BackupDesk
from cluster.api.consume_service import ConsumeService
from cluster.api.group_admin import GroupDesk
from cluster.api.policy_admin import PolicyDesk
from cluster.api.timer_service import TimerService
from cluster.api.wire_rows import RequestLimits
from cluster.rpc.handlers import NO_HOOKS, ServiceHooks
from cluster.rpc.outboxes import Outboxes
from cluster.settings.config import NodeConfig
from cluster.state.host import Host
from timer.model import timer_id
from timerclient.proto import timer_pb2_grpc as rpc


class Services(NamedTuple):
    """The three services over one host."""

    timers: TimerService
    consumers: ConsumeService
    admin: AdminService

    def add_to(self, server: Any) -> None:
        """Add them to a gRPC server, or to its Registrar."""
        rpc.add_TimerServiceServicer_to_server(self.timers, server)
        rpc.add_ConsumeServiceServicer_to_server(self.consumers, server)
        rpc.add_AdminServiceServicer_to_server(self.admin, server)


def services_of(  # noqa: PLR0913 - the parts of the services
    host: Host,
    view: View,
    commands: OperatorActions,
    config: NodeConfig,
    *,
    threads: Executor | None = None,
    outboxes: Outboxes | None = None,
    hooks: ServiceHooks = NO_HOOKS,
    backups: BackupDesk | None = None,
    reload: Reload = no_files,
    scrub: Scrub | None = None,
) -> Services:
    """Return the public services of a node with the settings `config`.

    `threads`: run queries. None: threads of the services' own.
    `outboxes`: bytes that clients have not read yet. None: the services' own.
    `backups`, `scrub`: None: the node has no files. `reload`: reads files of TLS again.
    """
    limits = config.limits
    if outboxes is None:
        outboxes = Outboxes(limits.outbox_bytes_max)
    salt = timer_id.salt_of(config.cluster_id)
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
        outboxes=outboxes,
        hooks=hooks,
    )
    view.late_topics = timers.queries.late_topics
    desk = GroupDesk(host, timers, config.groups, limits.group_name_bytes_max)
    consumers = ConsumeService(host, desk, outboxes, salt=salt, hooks=hooks)
    admin = AdminService(
        view=view,
        commands=commands,
        timers=timers,
        policies=PolicyDesk(host, timers),
        groups=desk,
        require_leader=host.require_leader,
        hooks=hooks,
        backups=backups,
        reload=reload,
        hops=host.hops,
        scrub=scrub,
    )
    return Services(timers, consumers, admin)
