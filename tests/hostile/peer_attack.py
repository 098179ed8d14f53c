"""A peer of a running cluster that sends wrong messages under another node's name."""

import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from cluster.control import raft_link
from replication.core import codec
from replication.core.peer_messages import Message
from replication.core.promise import Promise, PromiseFile
from replication.proto import replication_pb2 as pb
from replication.shell.tcp_stream import HALF, KEY_SIZE
from replication.shell.transport import METHOD, VERSION
from tests.cluster.running import RPC_S, Running, code_of, now_ms, until
from timer.files.data_directory import Identity, read_identity
from timer.files.disk import RealDisk
from timer.model.feature_level import LEVEL_MAX, LEVEL_MIN
from timer.model.units import UnixMs

Queue = SimpleQueue[bytes | None]


class Attacker:
    """A client that poses as a node of a cluster, and takes over that node's streams meanwhile."""

    def __init__(self, cluster: Running, name: str) -> None:
        self._cluster = cluster
        self.name = name
        self.identity = self._identity(name)

    def _identity(self, name: str) -> Identity:
        return read_identity(RealDisk(), self._cluster.directory / self._cluster.node(name).data)

    def promise_of(self, name: str) -> Promise:
        """Return the promise of a node: the leadership that it follows, or its own."""
        path = self._cluster.directory / self._cluster.node(name).data / "promise"
        return PromiseFile.load(RealDisk(), path).promise

    def say(self, to: str, message: Message | bytes, frames: Sequence[bytes] = ()) -> str:
        """Send a message of the replication protocol; return the error that ended the stream."""
        if not isinstance(message, bytes):
            message = codec.encode(message, UnixMs(now_ms()), frames)
        return self._stream(to, METHOD, [self._hello(to), message])

    def say_over_tcp(self, to: str, data: bytes) -> None:
        """Send a message of the replication protocol without gRPC; wait until the node ends it."""
        with self._call(to, METHOD) as (call, queue):
            queue.put(self._hello(to))
            said = pb.Hello.FromString(next(call))
            with socket.create_connection(("127.0.0.1", said.tcp_port), RPC_S) as connection:
                connection.sendall(said.tcp_key[:HALF])
                assert connection.recv(KEY_SIZE) == said.tcp_key[HALF:]
                connection.sendall(struct.pack("<I", len(data)) + data)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""

    def _hello(self, to: str) -> bytes:
        hello = pb.Hello(
            version=VERSION,
            cluster_id=self.identity.cluster_id,
            sender=self.identity.replica_id,
            name=self.name,
            receiver_name=to,
            level_min=LEVEL_MIN,
            level_max=LEVEL_MAX,
        )
        return hello.SerializeToString()

    def say_raft(self, to: str, *messages: bytes) -> str:
        """Send lists of frames on the control plane's link; return the error that ended it."""
        hello = raft_link._hello(self.name, to, self.identity.cluster_id)
        return self._stream(to, raft_link.METHOD, [hello, *messages])

    def _stream(self, to: str, method: str, messages: Sequence[bytes]) -> str:
        failed = until(lambda: self._failure_of(to, method, messages))
        assert code_of(failed) is grpc.StatusCode.INVALID_ARGUMENT, failed
        return str(failed.details())

    def _failure_of(self, to: str, method: str, messages: Sequence[bytes]) -> Any:
        """Return the error that ended a stream; None if the true node's own stream ended it."""
        with self._call(to, method) as (call, queue):
            for message in messages:
                queue.put(message)
            with pytest.raises(grpc.RpcError) as ended:
                _ = [*call]
        return None if code_of(ended.value) is grpc.StatusCode.ABORTED else ended.value

    @contextlib.contextmanager
    def _call(self, to: str, method: str) -> Iterator[tuple[Any, Queue]]:
        queue: Queue = SimpleQueue()
        link: Any = self._cluster.channel(to).stream_stream(method)
        call = link(iter(queue.get, None), timeout=RPC_S)
        try:
            yield call, queue
        finally:
            queue.put(None)
            call.cancel()
