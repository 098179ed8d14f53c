"""What nodes say of themselves while a run goes on: the audit holds it against the log.

Every `POLL_S` each node is asked what it has counted, and for the digest of its last CHECKPOINT;
who does not answer is asked again later. One thread per node: who is asleep keeps nobody waiting.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc

from chaos.history.history import COUNTS, RunFolder, States
from chaos.workloads.workload_producer import now_ms
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc

POLL_S: Final = 1.0
ANSWER_S: Final = 1.0
_OPTIONS: Final = (("grpc.max_reconnect_backoff_ms", 1000),)


class StateRecorder:
    """Asks nodes, and writes down what they say, until it is closed."""

    def __init__(self, run: RunFolder, addresses: Mapping[str, str]) -> None:
        """Ask `addresses`: node -> HOST:PORT."""
        self._states = States(run)
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(len(addresses), "states")
        self._work = [self._threads.submit(self._listen, *each) for each in addresses.items()]

    def _listen(self, name: str, address: str) -> None:
        index, checkpoint, owed, over = 0, 0, False, False
        with grpc.insecure_channel(address, _OPTIONS) as channel:
            stub = timer_pb2_grpc.AdminServiceStub(channel)
            while not over:
                over = self._closed.wait(POLL_S)  # and once more then
                try:
                    before, index = index, self._count(stub, name, index)
                    owed |= index != before  # else there is no other CHECKPOINT
                    if owed:
                        checkpoint, owed = self._digest(stub, name, checkpoint), False
                except grpc.RpcError:
                    continue  # it is away, or slow

    def _count(self, stub: timer_pb2_grpc.AdminServiceStub, name: str, before: int) -> int:
        """Write down what a node has counted, if it went on; return after which entry."""
        answer = stub.GetStatus(pb.GetStatusRequest(local=True), timeout=ANSWER_S)
        status = answer.nodes[0]
        if status.applied_index != before:
            counts = {count: getattr(status, count) for count in COUNTS}
            self._states.counted(name, status.applied_index, at_ms=now_ms(), **counts)
        return status.applied_index

    def _digest(self, stub: timer_pb2_grpc.AdminServiceStub, name: str, before: int) -> int:
        """Write down the digest at a node's last CHECKPOINT, if it is another; return which."""
        answer = stub.GetCheckpoint(pb.GetCheckpointRequest(local=True), timeout=ANSWER_S)
        last = answer.nodes[0]
        if last.checkpoint_index != before:
            self._states.digested(name, last.checkpoint_index, at_ms=now_ms(), digest=last.digest)
        return last.checkpoint_index

    def close(self) -> None:
        """Ask all once more, and end."""
        self._closed.set()
        self._threads.shutdown()
        self._states.close()
        for work in self._work:
            work.result()  # a failure of ours
