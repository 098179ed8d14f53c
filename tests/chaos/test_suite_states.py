"""The listener: what nodes say is written down once, whoever is away or slow."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from chaos.history.history import RunFolder, read
from chaos.suite.stage import states
from chaos.suite.stage.states import StateRecorder
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc


class Node(rpc.AdminServiceServicer):
    """Says what it is told to, and how often it was asked; nobody calls its other methods."""

    def __init__(self) -> None:
        self.applied, self.checkpoint = 0, 0
        self.is_slow = self.hides_digest = False
        self.asked = threading.Semaphore(0)

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        assert request.local
        self.asked.release()
        if self.is_slow:
            context.abort(grpc.StatusCode.UNAVAILABLE, "asleep")
        at = self.applied
        node = pb.NodeStatus(
            applied_index=at, scheduled=5 * at, pending=at, fired=2 * at, cancelled=at, dropped=at
        )
        return pb.GetStatusResponse(nodes=[node])

    def GetCheckpoint(  # noqa: N802
        self, request: pb.GetCheckpointRequest, context: Any
    ) -> pb.GetCheckpointResponse:
        assert request.local
        if self.hides_digest:
            context.abort(grpc.StatusCode.UNAVAILABLE, "asleep")
        node = pb.NodeCheckpoint(checkpoint_index=self.checkpoint, digest=f"{self.checkpoint:x}")
        return pb.GetCheckpointResponse(nodes=[node])

    def wait_asked(self, times: int = 2) -> None:
        """Return once it was asked so often from now on: the answer before the last is known."""
        while self.asked.acquire(blocking=False):
            pass
        for _ in range(times):
            assert self.asked.acquire(timeout=60)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who listens asks without a pause, and waits for an answer however long it takes."""
    monkeypatch.setattr(states, "POLL_S", 0.01)
    monkeypatch.setattr(states, "ANSWER_S", 60.0)


def new_node() -> Node:
    return Node()  # type: ignore[abstract]


@contextmanager
def served(node: Node) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_AdminServiceServicer_to_server(node, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_each_state_is_written_down_once_and_who_does_not_answer_is_asked_again(
    tmp_path: Path,
) -> None:
    run, node = RunFolder(tmp_path), new_node()
    with served(node) as address:
        listener = StateRecorder(run, {"n1": address})
        node.wait_asked()
        node.applied = 7
        node.wait_asked(3)
        node.checkpoint = 6
        node.applied = 8
        node.wait_asked(3)
        node.is_slow = True
        node.wait_asked()
        node.applied, node.is_slow = 9, False
        node.wait_asked(3)
        node.applied = 10
        listener.close()
    lines = [{k: v for k, v in line.items() if k != "at_ms"} for line in read(run.states)]
    counts = ("scheduled", "pending", "fired", "cancelled", "dropped")
    told = [
        {"node": "n1", "index": at, **dict(zip(counts, (5 * at, at, 2 * at, at, at), strict=True))}
        if digest is None
        else {"node": "n1", "index": at, "digest": digest}
        for at, digest in ((7, None), (8, None), (6, "6"), (9, None), (10, None))
    ]
    assert sorted(lines, key=str) == sorted(told, key=str)


def test_nodes_that_are_away_keep_nobody_waiting(
    tmp_path: Path,
) -> None:
    run, node = RunFolder(tmp_path), new_node()
    node.applied = 3
    with served(new_node()) as gone:
        pass
    with served(node) as address:
        listener = StateRecorder(run, {"n1": gone, "n2": address})
        node.wait_asked()
        listener.close()
    assert {line["node"] for line in read(run.states)} == {"n2"}


def test_digest_that_was_not_told_is_asked_for_again(
    tmp_path: Path,
) -> None:
    run, node = RunFolder(tmp_path), new_node()
    node.applied, node.checkpoint, node.hides_digest = 7, 6, True
    with served(node) as address:
        listener = StateRecorder(run, {"n1": address})
        node.wait_asked(3)
        node.hides_digest = False
        node.wait_asked(3)
        listener.close()
    assert [line["index"] for line in read(run.states)] == [7, 6]
