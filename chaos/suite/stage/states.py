"""The nodes' own counts and digests during a run. The audit compares them with the log.

Every `POLL_S` each node is asked for its counts and for the digest of its last CHECKPOINT. A node
that does not answer is asked again later. Each node has a thread of its own, so that a node that
is stopped does not delay the others.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc

from chaos.history.history import COUNTS, RunFolder, States
from chaos.workloads.recorded_requests import now_ms
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc

POLL_S: Final = 1.0
ANSWER_S: Final = 1.0
_OPTIONS: Final = (("grpc.max_reconnect_backoff_ms", 1000),)


class StateRecorder:
    """Records the answers of all nodes in the run's states.jsonl, until it is closed."""

    def __init__(self, run: RunFolder, addresses: Mapping[str, str]) -> None:
        """Start the threads. `addresses`: node -> HOST:PORT."""
        self._states = States(run)
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(len(addresses), "states")
        self._work = [self._threads.submit(self._listen, *each) for each in addresses.items()]

    def _listen(self, name: str, address: str) -> None:
        index, checkpoint, owed, over = 0, 0, False, False
        with grpc.insecure_channel(address, _OPTIONS) as channel:
            stub = timer_pb2_grpc.AdminServiceStub(channel)
            while not over:
                over = self._closed.wait(POLL_S)  # one last poll follows `close`
                try:
                    before, index = index, self._count(stub, name, index)
                    owed |= index != before  # only new entries can have a new CHECKPOINT
                    if owed:
                        checkpoint, owed = self._digest(stub, name, checkpoint), False
                except grpc.RpcError:
                    continue  # the node is down or slow

    def _count(self, stub: timer_pb2_grpc.AdminServiceStub, name: str, before: int) -> int:
        """Record a node's counts if its applied index is not `before`; return the index."""
        answer = stub.GetStatus(pb.GetStatusRequest(local=True), timeout=ANSWER_S)
        status = answer.nodes[0]
        if status.applied_index != before:
            counts = {count: getattr(status, count) for count in COUNTS}
            self._states.told(name, status.applied_index, at_ms=now_ms(), **counts)
        return status.applied_index

    def _digest(self, stub: timer_pb2_grpc.AdminServiceStub, name: str, before: int) -> int:
        """Record the digest of a node's last CHECKPOINT if its index is not `before`; return it."""
        answer = stub.GetCheckpoint(pb.GetCheckpointRequest(local=True), timeout=ANSWER_S)
        last = answer.nodes[0]
        if last.checkpoint_index != before:
            self._states.told(name, last.checkpoint_index, at_ms=now_ms(), digest=last.digest)
        return last.checkpoint_index

    def close(self) -> None:
        """Poll all nodes once more, and end."""
        self._closed.set()
        self._threads.shutdown()
        self._states.close()
        for work in self._work:
            work.result()  # raises if the thread failed by a defect
