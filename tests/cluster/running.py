"""A cluster of real processes under test: the launcher, clients, raw stubs and log files."""

import contextlib
import io
import json
import os
import re
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import grpc

from cluster.node import timerd
from deploy.local import LocalCluster, LocalNode, Process
from tests.cluster import template
from timer.files.disk import RealDisk
from timer.recovery import manifest
from timerclient import TimerClient
from timerclient.client.sync import Consumer
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.rows.messages import Message
from timerclient.values.errors import OutcomeUnknown
from timerclient.values.same_fields import as_type
from timerclient.values.wire_errors import TRAILER

WAIT_S: Final = 60.0
"""Longest wait for a condition that takes a second or two on an idle machine."""
RPC_S: Final = 30.0
SOON_DROPPED = (
    "storage.memtable_bytes_flush = 1048576",
    "storage.log_bytes_flush = 1048576",
    "storage.flush_interval_ms = 1000",
    "storage.log_kept_bytes_max = 1048576",
    "limits.payload_bytes_max = 65536",
    "limits.request_bytes_max = 524288",
)
"""Settings of nodes that drop entries of their log soon."""
CALL_S: Final = 120.0
"""Timeout of a client's calls, except where a test sets another."""
POLL_S, POLL_S_MAX = 0.02, 0.1
"""Shortest and longest pause between two polls. The pause grows with the wait, because the nodes
need the processors, too."""
USUAL: Final = (
    *("timing.checkpoint_interval_ms = 1000", "timing.drain_timeout_ms = 60000"),
    *("leadership.lease_ms = 3000", "leadership.heartbeat_ms = 300"),
)
"""Settings of all test clusters. Checkpoints come soon. A pause of the machine neither ends a
leadership nor a drain. Shorter intervals would double the processor time of an idle cluster."""
AS_SHIPPED: Final = ("leadership.lease_ms = 500", "leadership.heartbeat_ms = 100")
"""The default timing, for tests of failovers. With it the leader may change at any time."""

_BAD: Final = re.compile(
    r"^Traceback.*\n(?:[ ].*\n)*.*|^.*(?:level=(?:error|critical)|exc=|Traceback|never retrieved"
    r"|was never awaited|was destroyed|not drained).*",
    re.MULTILINE,
)
T = TypeVar("T")


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Yield the ends of a pipe, to read and to write. The second one blocks its next writer."""
    read, write = os.pipe()
    with open(read, "rb"), open(write, "wb", buffering=0) as full:
        os.set_blocking(write, False)
        while full.write(b"\n" * 64):
            pass
        os.set_blocking(write, True)
        yield read, write


class Forking(LocalCluster):
    """A cluster that forks its nodes from a template (tests/cluster/template.py)."""

    def _format(self, node: LocalNode, *words: str) -> None:
        """Format a node in this process; a process for each of some hundred nodes is too slow."""
        cluster_id = tomllib.loads(self._config_path(node).read_text())["cluster_id"]
        data = str(self.directory / node.data)
        asked = ["--data", data, "--name", node.name, "--cluster-id", cluster_id, *words]
        with contextlib.redirect_stdout(io.StringIO()):
            assert timerd.init([*asked, "--voters", ",".join(self.nodes)]) == 0

    def _launch(self, name: str, words: Sequence[str], log: BinaryIO) -> Process:
        """Start a node from the template, which has already imported its modules."""
        return template.launch(name, words, log.fileno())


class Running(Forking):
    """Three nodes, or `nodes`; `cleaned` ends their processes in any case."""

    def __init__(
        self, directory: Path, settings: Iterable[str] = (), nodes: int = 3, *, tls: bool = False
    ) -> None:
        by_key = {line.partition(" =")[0]: line for line in (*USUAL, *settings)}
        super().__init__(directory, nodes, settings=[*by_key.values()], tls=tls)
        self._channels: dict[str, grpc.Channel] = {}

    @contextlib.contextmanager
    def cleaned(self) -> Iterator["Running"]:
        """Start the cluster, and end it. Check that no node logged an error."""
        try:
            self.start()
            yield self
            self.up()
            self.stop()
        finally:
            for channel in self._channels.values():
                channel.close()
            self.kill_together(*self.nodes)
        complaints = self.complaints()
        assert not complaints, "\n".join(complaints)

    def up(self) -> str:
        """Start all nodes that are down; return the leader's name once each may be lost.

        A founder, or a node with a torn log, counts for no majority until it has followed a leader.
        """
        self.start()
        until(self._sure)
        return self.wait_for_leader()

    def _sure(self) -> bool:
        with self.client() as client:
            nodes = client.status().nodes
        return all(each.reachable and not each.unsure for each in nodes)

    # ---- nodes and leaders

    def node(self, name: str) -> LocalNode:
        return self._node(name)

    def followers(self) -> list[str]:
        leader = self.wait_for_leader()
        return [name for name in self.nodes if name != leader]

    def change_leader(self, client: TimerClient, target: str = "") -> None:
        """Transfer the leadership to `target`, or to any other node; return when it serves.

        A transfer with an unknown outcome is repeated.
        """
        epoch = self._epoch()

        def asked() -> bool:
            try:
                client.transfer(target)
            except OutcomeUnknown:
                return self._epoch() > epoch  # the transfer took place
            return True

        until(asked)
        if target:
            until(lambda: self.wait_for_leader() == target)
        else:
            self.wait_for_leader(above_epoch=epoch)

    def _epoch(self) -> int:
        """Return the leader's epoch from the leader itself; other nodes may be behind."""
        state = until(lambda: self.state(self.wait_for_leader()))
        return int(state.epoch)

    def role_and_epoch(self, name: str) -> tuple[str, int]:
        """Return a node's role and epoch. The controller may be another node at any time."""
        state = until(lambda: self.state(name))
        return state.role, state.epoch

    # ---- requests

    @contextlib.contextmanager
    def client(self, **options: Any) -> Iterator[TimerClient]:
        usual = {"timeout": CALL_S, "credentials": self.tls}
        with TimerClient(self.endpoints, **usual | options) as client:
            yield client

    def channel(self, name: str) -> grpc.Channel:
        """Return a channel to one node; it stays open until the end."""
        if name not in self._channels:
            size = 64 << 20
            options = [
                ("grpc.max_send_message_length", size),
                ("grpc.max_reconnect_backoff_ms", 200),
            ]
            self._channels[name] = grpc.insecure_channel(self._node(name).grpc, options=options)
        return self._channels[name]

    def timers(self, name: str | None = None) -> rpc.TimerServiceStub:
        """Return a raw stub of a node. None: of the leader."""
        return rpc.TimerServiceStub(self.channel(name or self.wait_for_leader()))

    def consuming(self, name: str | None = None) -> rpc.ConsumeServiceStub:
        return rpc.ConsumeServiceStub(self.channel(name or self.wait_for_leader()))

    def admin(self, name: str | None = None) -> rpc.AdminServiceStub:
        return rpc.AdminServiceStub(self.channel(name or self.wait_for_leader()))

    def log_end(self, name: str | None = None) -> int:
        """Return the last index of a node's log. None: of the leader's."""
        local = pb.GetStatusRequest(local=True)
        return int(self.admin(name).GetStatus(local, timeout=RPC_S).nodes[0].log_end)

    def get(self, name: str, path: str, timeout_s: float = RPC_S) -> tuple[int, str]:
        """Return status and body of a page of a node's HTTP port."""
        url = f"http://{self._node(name).http}{path}"
        try:
            with urllib.request.urlopen(url, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def json(self, name: str, path: str) -> Any:
        status, body = self.get(name, path)
        assert status == 200, body
        return json.loads(body)

    def metric(self, name: str, metric: str) -> float:
        """Return the sum of a metric's samples."""
        _, body = self.get(name, "/metrics")
        found = re.findall(rf"^{metric}(?:{{[^}}]*}})? (\S+)$", body, re.MULTILINE)
        return sum(map(float, found))

    # ---- state of all nodes

    def digests_agree(self) -> pb.GetCheckpointResponse:
        """Wait for a CHECKPOINT after all entries so far that all nodes have applied.

        Checks that all nodes have the same digest there (P6). Returns the nodes' checkpoints.
        """
        leader, log_end = self.admin(), self.log_end()
        local = pb.GetCheckpointRequest(local=True)

        def last() -> int:
            return leader.GetCheckpoint(local, timeout=RPC_S).nodes[0].checkpoint_index

        until(lambda: last() > log_end)
        index = last()
        digests = {name: until(partial(self._digest, name, index)) for name in self.nodes}
        assert len({*digests.values()}) == 1, (index, digests)

        def shared() -> pb.GetCheckpointResponse | None:
            answer = leader.GetCheckpoint(pb.GetCheckpointRequest(), timeout=RPC_S)
            return answer if answer.shared.index >= index else None

        return until(shared)

    def _digest(self, name: str, index: int) -> str:
        """Return a node's digest at a CHECKPOINT. Empty: the node has not applied it yet."""
        asked = pb.GetCheckpointRequest(local=True, at_index=index)
        try:
            answer = self.admin(name).GetCheckpoint(asked, timeout=1)
        except grpc.RpcError:
            return ""
        assert not answer.nodes[0].queue_offsets, "of any number of topics"
        assert not answer.HasField("shared")
        return answer.nodes[0].digest

    def counts_add_up(self) -> pb.NodeStatus:
        """Check that every scheduled timer is pending or has ended (P7); return the status."""
        status = self.admin().GetStatus(pb.GetStatusRequest(local=True), timeout=RPC_S).nodes[0]
        ended = status.fired + status.cancelled + status.dropped
        assert status.scheduled == status.pending + ended, status
        return status

    # ---- logs

    def log(self, name: str) -> str:
        return self._log_path(name).read_text(errors="replace")

    def complaints(self) -> list[str]:
        """Return the log lines that show an error, a traceback with its last line."""
        return [found[0][:2000] for name in self.nodes for found in _BAD.finditer(self.log(name))]


def until(condition: Callable[[], T | None], timeout_s: float = WAIT_S) -> T:
    """Call `condition` until its value is true; return the value."""
    began_s = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s, f"not within {timeout_s} s: {condition}, {value!r}"
        time.sleep(min(max(POLL_S, waited_s / 10), POLL_S_MAX))


def kept_runs(data: Path) -> list[Path]:
    """Return the runs that a node's manifest names, oldest first: whole files all."""
    state = manifest.read(RealDisk(), data / "state")
    names = [name for name, *_ in manifest.files(state)] if state else []
    return sorted(data / "state" / name for name in names if name.endswith(".arrow"))


def flip(path: Path, at: int = -1) -> None:
    """Damage a byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def in_time(work: Callable[[int], T], lead_ms: int = 1_000) -> T:
    """Call `work` with a time ahead until it returns before that time; return its result.

    For timers that must all be scheduled before the first of them is due. Each attempt takes a time
    four times as far ahead.
    """
    while lead_ms < 1000 * CALL_S:
        begin_ms = now_ms() + lead_ms
        done = work(begin_ms)
        if now_ms() < begin_ms:
            return done
        lead_ms *= 4
    raise AssertionError(f"not done within {lead_ms} ms: {work}")


def receive(consumer: Consumer, count: int) -> list[Message]:
    """Return `count` messages without an ack."""
    got: list[Message] = []
    while len(got) < count:
        more = consumer.receive(count - len(got), timeout=WAIT_S)
        assert more, f"{len(got)} of {count} messages within {WAIT_S} s each"
        got += more
    return got


def take(consumer: Consumer, count: int, timeout_s: float = WAIT_S) -> list[Message]:
    """Return `count` messages and acknowledge them."""
    taken: list[Message] = []
    deadline_s = time.monotonic() + timeout_s
    while len(taken) < count:
        left_s = deadline_s - time.monotonic()
        assert left_s > 0, f"{len(taken)} of {count} messages within {timeout_s} s"
        found = consumer.receive(count - len(taken), timeout=left_s)
        _ = [message.ack() for message in found]
        taken += found
    consumer.flush()
    return taken


def redriven(client: TimerClient, topic: str, count: int) -> int:
    """Redrive `count` dead letters, in several calls if needed; return the number of homeless ones.

    A call that a slow node ends early leaves its letters to the next call.
    """
    sent = homeless = 0

    def all_sent() -> bool:
        nonlocal sent, homeless
        answer = client.redrive(topic)
        sent, homeless = sent + answer, homeless + answer.homeless
        return sent >= count

    until(all_sent)
    assert sent == count
    return homeless


def nothing_comes(consumer: Consumer, after: Callable[[], object]) -> None:
    """Check that no message is left: the next delivery is the message that `after` schedules."""
    after()
    (message,) = take(consumer, 1)
    assert message.payload == b"the next", message


def error_of(failed: BaseException) -> pb.Error:
    """Return the `Error` message that a failed RPC carried."""
    call: Any = failed
    trailers = dict(call.trailing_metadata() or ())
    assert TRAILER in trailers, (call.code(), call.details())
    return pb.Error.FromString(trailers[TRAILER])


def code_of(failed: BaseException) -> grpc.StatusCode:
    """Return the status of a failed RPC."""
    call: Any = failed
    code = call.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def columns(topic: str, payloads: list[bytes], **more: Any) -> pb.TimerColumns:
    """Return columns as a raw client writes them; due an hour from now if `more` has no time."""
    if "due_ms" not in more and "delay_ms" not in more:
        more["delay_ms"] = [3_600_000]
    sizes = [len(payload) for payload in payloads]
    return pb.TimerColumns(
        **{"topic": topic, "payload_sizes": sizes, "payloads": b"".join(payloads)} | more
    )


def schedule(*timers: pb.TimerColumns, **more: Any) -> pb.ScheduleRequest:
    return pb.ScheduleRequest(timers=timers, **more)


def streamed(*requests: pb.ScheduleRequest) -> Iterator[pb.ScheduleStreamRequest]:
    return iter([as_type(pb.ScheduleStreamRequest, request) for request in requests])


class Rotting(Running):
    """Its nodes meet damage, and may say so."""

    def complaints(self) -> list[str]:
        return [line for line in super().complaints() if "to be repaired" not in line]


def installs(cluster: Running, name: str) -> int:
    return cluster.log(name).count("installed the snapshot")
