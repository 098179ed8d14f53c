"""The channel to one node, and channels before a fork of the process.

gRPC does not survive a fork while its threads run. Before a fork the channels of closed clients are
freed, and a child with a channel of its parent refuses new clients.
"""

import contextlib
import gc
import math
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import grpc

from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.streams.secure_dial import SecureDial, with_token
from timerclient.values.client_tls import ClientTls
from timerclient.values.client_token import read_token
from timerclient.values.errors import InvalidRequest

CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    # Reconnect soon after a node's restart: the default pause grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A node whose name has a new address, as a pod after its restart: an attempt to reach the old
    # one takes 20 s by default, and the name is looked up again after 30 s.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Two clients of one process share neither a connection nor its pauses.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # A machine that fails closes no connection. Without pings the connection would seem open for
    # a quarter of an hour, while another machine may have the name and lead.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


Dial = Callable[[str], grpc.aio.Channel]
"""Makes a channel to an address (host:port), which connects at its first call."""


def tcp(
    credentials: grpc.ChannelCredentials | ClientTls | None, token: str | Path | None = None
) -> Dial:
    """Return a Dial over TCP. `credentials`: None: without TLS. `token`: or the path of its file.

    Raises:
        InvalidRequest: A file does not fit, or there is a token without TLS.
    """
    if isinstance(credentials, ClientTls):
        return SecureDial(credentials, CHANNEL_OPTIONS, token)
    if token is not None:
        text = read_token(token)
        if credentials is None:
            limit = "is sent over TLS only: give `credentials`, too, such as ClientTls(ca=...)"
            raise InvalidRequest.of("token", "(not shown)", limit)
        credentials = with_token(credentials, text)

    def dial(address: str) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, credentials, CHANNEL_OPTIONS)

    return dial


DIRECT: Final = (("timer-direct", "client"),)
"""Metadata of each call: a node that does not lead answers NOT_LEADER. Without it, the node would
send the request on to the leader, and the client would stay with a longer way."""


class _Direct:
    """Stands in for a channel while stubs are made, so that each of their calls has DIRECT."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        make = getattr(self._channel, kind)  # unary_unary and so on

        def made(*args: Any, **named: Any) -> Any:
            return partial(make(*args, **named), metadata=DIRECT)

        return made


class NodeChannel:
    """One address: its channel and the stubs on it."""

    def __init__(self, address: str, channel: grpc.aio.Channel, *, relays: bool) -> None:
        """`relays`: the node sends requests on to the leader if it does not lead."""
        self.address = address
        self.channel = channel
        self.relays = relays
        self.pid = os.getpid()
        self.is_closed = False
        calls = channel if relays else cast("grpc.aio.Channel", _Direct(channel))
        self.timers = rpc.TimerServiceStub(calls)
        self.consuming = rpc.ConsumeServiceStub(calls)
        self.schedule_stream: Any = calls.stream_stream(
            "/timer.v1.TimerService/ScheduleStream",
            response_deserializer=pb.ScheduleStreamResponse.FromString,
        )
        """ScheduleStream; its requests are already encoded."""
        self.admin = rpc.AdminServiceStub(calls)

    async def close(self) -> None:
        """Close the channel."""
        global _closed_s  # noqa: PLW0603 -- see there
        self.is_closed = True
        await self.channel.close()
        _closed_s = time.monotonic()

    def abandon(self) -> None:
        """Close the channel of an event loop that has ended: nothing can wait there any more."""
        with contextlib.suppress(StopIteration, RuntimeError):  # done, or a call of that loop
            self.close().send(None)

    def __repr__(self) -> str:
        return f"Node({self.address})"


_channels: "weakref.WeakValueDictionary[int, NodeChannel]" = weakref.WeakValueDictionary()
"""Channels over TCP that gRPC's threads serve: open ones, and closed ones that are not freed yet.
After a fork also those of the parent. The keys are their ids."""
_closed_s = -math.inf
"""When a channel was last closed, on the monotonic clock."""
THREADS_END_S: Final = 0.2
"""Seconds in which gRPC ends its threads."""


def note_channel(node: NodeChannel) -> None:
    """Note a channel over TCP: it does not survive a fork."""
    _channels[id(node)] = node


def check_not_forked() -> None:
    """Check that gRPC can deliver answers in this process.

    Raises:
        RuntimeError: This process is a fork of one that had a client open.
    """
    if any(each.pid != os.getpid() for each in _noted()):
        text = "this process was forked from one with an open client; gRPC does not work here"
        raise RuntimeError(f"{text}: close the client before the fork, or use spawn")


def _free_closed() -> None:
    """Free the channels of closed clients before a fork: gRPC then works in the child.

    gRPC ends its threads in the background, a moment after its last channel is freed.
    """
    global _closed_s  # noqa: PLW0603 -- of the process, as its threads are
    closed = _count_closed()
    if closed:
        gc.collect()
        if _count_closed() < closed:  # the application refers to the others
            _closed_s = time.monotonic()
    wait_s = _closed_s + THREADS_END_S - time.monotonic()
    if wait_s > 0:
        time.sleep(wait_s)


def _count_closed() -> int:
    return sum(each.is_closed for each in _noted())


def _noted() -> list[NodeChannel]:
    """Return the noted channels. No lock is needed: other threads may note channels meanwhile."""
    return [node for each in _channels.valuerefs() if (node := each()) is not None]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_free_closed)
