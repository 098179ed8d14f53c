"""The ends of a node's gRPC connections: every server and every channel of the node is made here.

    public server    clients connect to it
    token server     clients without a certificate connect to it, if the setting `tokens` is set
    link server      other nodes connect to it, if the setting `links` gives them their own port
    TCP port         other nodes send their messages to it, if the setting `replication` is set
    channel          this node's connection to another node, by the other node's name

Addresses and certificates come from the settings. Options of a connection stand beside its end.
"""

import asyncio
import functools
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakSet

import grpc
from prometheus_client import CollectorRegistry

from cluster.rpc.access_file import AccessFile
from cluster.rpc.audit_log import AuditLog
from cluster.rpc.call_guard import CallGuard, Gate, HttpGate, LinkGate, PublicGate, TokenGate
from cluster.rpc.caller_usages import CallerUsages
from cluster.rpc.connections import end_connections
from cluster.rpc.handlers import PINGED, PINGS
from cluster.rpc.http import (
    NO_HTTP_HOOKS,
    ExtraPaths,
    HttpHooks,
    HttpServer,
    HttpTls,
    NodeView,
)
from cluster.rpc.node_tls import NodeTls, Withdrawn, caller_identity
from cluster.security.identities import IdentityKind, node_host
from cluster.settings.config import NodeConfig, parse_address
from replication.shell.tcp_stream import TcpEnds, TcpPort
from replication.shell.transport import Dial, Identify
from timer.model.timer_errors import ConfigError
from timerclient.proto import timer_pb2_grpc as rpc

MESSAGE_BYTES_MAX: Final = 64 << 20
_MESSAGES: Final = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)
_SERVER: Final = (
    *_MESSAGES,
    *PINGED,
    ("grpc.so_reuseport", 0),
    # Only identity, bit 0. gRPC expands a compressed message a thousandfold before any check here.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Calls that wait until the event loop takes them. gRPC ends some of more than 1,000 at random,
    # and clients get INTERNAL: thousands of consumers connect to a new leader at once.
    ("grpc.server.max_pending_requests", 1 << 14),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 15),
    # A connection without a handshake, without settings or without calls is closed.
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
)
SERVER_OPTIONS: Final = (*_SERVER, ("grpc.server_handshake_timeout_ms", 10_000))
TOKEN_OPTIONS: Final = tuple(
    (name, 30_000 if name == "grpc.max_connection_idle_ms" else value)
    for name, value in SERVER_OPTIONS
)
"""Anyone may connect to the port for bearer tokens: a connection without a call ends early."""
LINKS_MAX: Final = 256
"""Connections to a node's link port, with unfinished handshakes. A node has a few to each other."""
LINK_OPTIONS: Final = (
    *_SERVER,
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_allowed_incoming_connections", LINKS_MAX),
)
PEER_OPTIONS: Final = (
    *_MESSAGES,
    *PINGS,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # Connect soon after a node's restart. gRPC takes at least 100 ms.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Time for one attempt: a busy node is slow to accept, and calls fail with the attempt.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    # A node whose name has a new address, as a pod after its restart. gRPC waits for 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)
READ_AHEAD_BYTES: Final = 256 << 10
"""Of one relayed stream, at most. With gRPC's 64 KiB, a link with a round trip of 2 ms carries
18 MB/s, with these 50 MB/s."""
RELAY_OPTIONS: Final = (
    *PEER_OPTIONS,
    # gRPC reads ahead as many bytes for each stream as a link carries in a round trip: megabytes.
    # A client that does not read leaves them there, uncounted. Without that probe the whole
    # connection carries READ_AHEAD_BYTES in a round trip, for all of its streams.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", READ_AHEAD_BYTES),
)
"""Of connections for requests of clients."""

_NOT_HERE: Final = "cannot listen: in use, or not an address of this machine"
_UNRESOLVED: Final = "cannot listen: the host does not resolve"

Options = Sequence[tuple[str, Any]]


class Endpoints:
    """Makes the servers and channels of one node. The caller closes them."""

    def __init__(
        self, config: NodeConfig, *, on_denied: Callable[[], object] = lambda: None
    ) -> None:
        """Read the certificates, if the settings have any. `on_denied`: see AuditLog.

        Raises:
            ConfigError: a certificate does not fit.
        """
        self._config = config
        self.tls = NodeTls(config) if config.tls.on else None
        """None: without TLS."""
        self.audit = AuditLog(config.name, config.audit_log, on_denied)
        self.guards: list[CallGuard] = []
        """Of the servers made so far."""
        self._usages = CallerUsages(self.tls.access) if self.tls is not None else None
        self.insecure = config.insecure
        """Whether ports beyond loopback may be open without TLS."""
        addresses = config.links or config.peers
        self.others: Mapping[str, str] = {
            name: address for name, address in addresses.items() if name != config.name
        }
        """Name -> address of each other node, for this node."""
        self.replication = self._replication_port()
        """None: the messages of the other nodes come over gRPC."""

    def end_distrusted(self, withdrawn: Withdrawn, http_port: int) -> int:
        """End the connections whose handshake trusted withdrawn authorities; return their number.

        `http_port`: the bound one.

        It takes all connections of a port: which authority signed is not known afterwards. For a
        thread.
        """
        config = self._config
        ports = {parse_address("grpc", config.grpc).port, http_port} if withdrawn.clients else set()
        ports |= {parse_address("link", config.link).port} if withdrawn.nodes else set()
        return end_connections(
            accepted_at=ports,
            dialled_to={parse_address("links", at).port for at in self.others.values()}
            if withdrawn.nodes
            else set(),
        )

    # ---- channels

    def channel(self, name: str, options: Options = PEER_OPTIONS) -> grpc.aio.Channel:
        """Return a new channel to another node."""
        if self.tls is not None:
            return self.tls.channel(name, self.others[name], options)
        return grpc.aio.insecure_channel(self.others[name], options=options)

    def dials(self) -> dict[str, Dial]:
        """Return name of each other node -> a function that returns a new channel to it."""
        return {name: functools.partial(self.channel, name) for name in self.others}

    async def connect(self, name: str, port: int, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Connect to the TCP port of another node.

        Raises:
            OSError: it failed.
        """
        contexts = self.tls.replication if self.tls is not None else None
        await asyncio.get_running_loop().create_connection(
            protocol,
            parse_address("links", self.others[name]).host,
            port,
            ssl=contexts.dial if contexts is not None else None,
            server_hostname=node_host(name, self._config.cluster_id) if contexts else None,
        )

    @property
    def tcp(self) -> TcpEnds:
        """How messages between nodes may go over TCP."""
        return TcpEnds(self.replication, self.connect)

    # ---- servers

    def _replication_port(self) -> TcpPort | None:
        if not self._config.replication:
            return None
        host, port = parse_address("replication", self._config.replication, port_min=0)
        tls = self.tls
        return TcpPort(host, port, lambda: tls.replication.accept if tls is not None else None)

    @property
    def identify(self) -> Identify | None:
        """Returns the node name in a caller's certificate. None: without TLS there is none."""
        return self._node_name if self.tls is not None else None

    def _node_name(self, context: "grpc.aio.ServicerContext[Any, Any]") -> str:
        found = caller_identity(context, self._config.cluster_id)
        return found.name if found.kind is IdentityKind.NODE else ""

    def public_server(self, options: Options) -> grpc.aio.Server:
        """Return a new server for clients. It has no port until `listen`."""
        return grpc.aio.server(options=options, interceptors=self._guards(PublicGate))

    @property
    def takes_tokens(self) -> bool:
        """Whether there is a gRPC port for bearer tokens."""
        return bool(self._config.tokens)

    def token_server(self, options: Options) -> grpc.aio.Server | None:
        """Return a new server for clients with a bearer token. None: there is no such port."""
        if not self._config.tokens or self.tls is None or self.tls.tokens is None:
            return None
        tokens = self.tls.tokens
        guards = self._guards(lambda _, access, usages: TokenGate(access, usages, tokens))
        return grpc.aio.server(options=options, interceptors=guards)

    def link_server(self) -> grpc.aio.Server | None:
        """Return a new server for the other nodes. None: they use the public one."""
        if not self._config.links:
            return None
        gate = functools.partial(LinkGate, nodes=self.others)
        return grpc.aio.server(options=LINK_OPTIONS, interceptors=self._guards(gate))

    def _guards(self, gate: Callable[[str, AccessFile, CallerUsages], Gate]) -> list[CallGuard]:
        if self.tls is None:
            return []
        access = self.tls.access
        assert self._usages is not None
        made = gate(self._config.cluster_id, access, self._usages)
        guard = CallGuard(made, access, self.audit, self.tls.tokens)
        self.guards.append(guard)
        return [guard]

    def http_guard(self) -> CallGuard | None:
        """Return the guard of RPCs that come over HTTP. None: there is no TLS."""
        if self.tls is None:
            return None
        gate = functools.partial(HttpGate, tokens=self.tls.tokens)
        return next(iter(self._guards(gate)), None)

    def http_server(
        self,
        view: NodeView,
        registry: CollectorRegistry,
        pages: ExtraPaths | None = None,
        hooks: HttpHooks = NO_HTTP_HOOKS,
    ) -> HttpServer:
        """Return the HTTP server. It listens from its `start` on. Arguments: see HttpServer."""
        secured = None
        if (tls := self.tls) is not None:
            assert self._usages is not None
            secured = HttpTls(
                lambda: tls.http,
                self._config.cluster_id,
                tls.access,
                tls.tokens,
                self.audit,
                self._usages,
            )
        return HttpServer(
            self._config.http,
            view,
            registry,
            pages,
            secured,
            hooks,
            connections_max=self._config.limits.http_connections_max,
        )

    async def listen(
        self,
        public: grpc.aio.Server,
        link: grpc.aio.Server | None,
        tokens: grpc.aio.Server | None = None,
    ) -> None:
        """Bind the servers to the node's addresses, and start them.

        Raises:
            ConfigError: an address is in use, not this machine's, or does not resolve.
        """
        tls = self.tls
        self._bind(public, "grpc", tls.for_clients() if tls is not None else None)
        if link is not None:
            self._bind(link, "link", tls.for_nodes() if tls is not None else None)
            await link.start()
        if tokens is not None:
            assert tls is not None
            self._bind(tokens, "tokens", tls.for_tokens())
            await tokens.start()
        await public.start()

    async def open_replication(self) -> None:
        """Listen on the TCP port, if it is set. Do it before `listen`: peers learn the port.

        Raises:
            ConfigError: the address is in use, not this machine's, or does not resolve.
        """
        if self.replication is not None:
            try:
                await self.replication.open()
            except OSError:
                raise self._cannot_listen("replication") from None

    def _bind(
        self, server: grpc.aio.Server, key: str, credentials: grpc.ServerCredentials | None
    ) -> None:
        address = getattr(self._config, key)
        try:
            if credentials is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, credentials)
        except RuntimeError:
            raise self._cannot_listen(key) from None

    def _cannot_listen(self, key: str) -> ConfigError:
        address, why = getattr(self._config, key), _NOT_HERE
        try:
            socket.getaddrinfo(*parse_address(key, address, port_min=0))
        except OSError:
            why = _UNRESOLVED
        return ConfigError(self._config.source_of(key), address, why)


class AdminChannels:
    """A channel to the AdminService of each other node."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._outdated: WeakSet[grpc.aio.Channel] = WeakSet()
        """Of earlier certificates, with calls. The end of the last call frees and closes one."""
        self.stubs: dict[str, rpc.AdminServiceAsyncStub] = {}
        """Name of each other node -> its stub."""
        self.renew()

    def renew(self) -> None:
        """Make new channels, with the present certificate. Calls on the old ones may finish."""
        self._outdated.update(self._channels.values())
        for name in self._endpoints.others:
            channel = self._channels[name] = self._endpoints.channel(name)
            self.stubs[name] = rpc.AdminServiceStub(channel)

    def channel(self, name: str) -> grpc.aio.Channel:
        """Return the channel to another node."""
        return self._channels[name]

    async def close(self) -> None:
        """Close the channels, one after the other."""
        for channel in (*self._outdated, *self._channels.values()):
            await channel.close()
