"""The ends of a node's gRPC connections: every server and every channel of the node is made here.

    server    clients and other nodes connect to it; one listens at a time
    channel   this node's connection to another node, by the other node's name

Addresses come from the settings. Options of a connection stand beside its end.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc

from cluster.rpc.handlers import PINGED, PINGS
from cluster.settings.config import NodeConfig
from replication.shell.transport import Dial
from timer.model.timer_errors import ConfigError
from timerclient.proto import timer_pb2_grpc as rpc

MESSAGE_BYTES_MAX: Final = 64 << 20
_MESSAGES: Final = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)
SERVER_OPTIONS: Final = (
    *_MESSAGES,
    *PINGED,
    ("grpc.so_reuseport", 0),
    # A connection without a handshake, without settings or without calls is closed.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
)
PEER_OPTIONS: Final = (
    *_MESSAGES,
    *PINGS,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)

Options = Sequence[tuple[str, Any]]


class Endpoints:
    """Makes the servers and channels of one node. The caller closes them."""

    def __init__(self, config: NodeConfig) -> None:
        self._address = config.grpc
        self.others: Mapping[str, str] = {
            name: address for name, address in config.peers.items() if name != config.name
        }
        """Name -> address of each other node."""

    def channel(self, name: str, options: Options = PEER_OPTIONS) -> grpc.aio.Channel:
        """Return a new channel to another node."""
        return grpc.aio.insecure_channel(self.others[name], options=options)

    def dials(self) -> dict[str, Dial]:
        """Return name of each other node -> a function that returns a new channel to it."""
        return {name: functools.partial(self.channel, name) for name in self.others}

    def server(self, options: Options) -> grpc.aio.Server:
        """Return a new server. It has no port until `listen`."""
        return grpc.aio.server(options=options)

    async def listen(self, server: grpc.aio.Server) -> None:
        """Bind `server` to the node's gRPC address, and start it.

        Raises:
            ConfigError: the address is in use, or not this machine's.
        """
        try:
            server.add_insecure_port(self._address)
        except RuntimeError:
            limit = "cannot listen: in use, or not an address of this machine"
            raise ConfigError("grpc", self._address, limit) from None
        await server.start()


class AdminChannels:
    """A channel to the AdminService of each other node."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._channels = {name: endpoints.channel(name) for name in endpoints.others}
        self.stubs: Mapping[str, rpc.AdminServiceAsyncStub] = {
            name: rpc.AdminServiceStub(channel) for name, channel in self._channels.items()
        }
        """Name of each other node -> its stub."""

    async def close(self) -> None:
        """Close the channels, one after the other."""
        for channel in self._channels.values():
            await channel.close()
