"""The nodes' own counts and digests during a run. The audit compares them with the log.

Every `POLL_S` each node is asked for its counts and for the digest of its last CHECKPOINT. A node
that does not answer is asked again later. Each node has a thread of its own, so that a node that
is stopped does not delay the others.
"""

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc

from chaos.history.history import COUNTS, RunFolder, States, now_ms
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
        """Record a node's counts and its digest whenever their index is another one."""
        index, checkpoint, over = 0, 0, False
        with grpc.insecure_channel(address, _OPTIONS) as channel:
            stub = timer_pb2_grpc.AdminServiceStub(channel)
            while not over:
                over = self._closed.wait(POLL_S)  # one last poll follows `close`
                with contextlib.suppress(grpc.RpcError):  # the node is down or slow
                    told = stub.GetStatus(pb.GetStatusRequest(local=True), timeout=ANSWER_S)
                    status = told.nodes[0]
                    if status.applied_index != index:
                        index = status.applied_index
                        counts = {count: getattr(status, count) for count in COUNTS}
                        self._states.record(name, index, at_ms=now_ms(), **counts)
                    last = stub.GetCheckpoint(pb.GetCheckpointRequest(local=True), timeout=ANSWER_S)
                    if last.nodes[0].checkpoint_index != checkpoint:
                        checkpoint, digest = last.nodes[0].checkpoint_index, last.nodes[0].digest
                        self._states.record(name, checkpoint, at_ms=now_ms(), digest=digest)

    def close(self) -> None:
        """Poll all nodes once more, and end."""
        self._closed.set()
        self._threads.shutdown()
        self._states.close()
        for work in self._work:
            work.result()  # raises if the thread failed by a defect
