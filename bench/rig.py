"""The cluster of a run: three new nodes on this machine, in a directory that is deleted afterwards.

The nodes run as users run them (deploy/local.py), with default settings. They are ended by kill -9:
their data is not needed, and a clean stop would take longer. After a failure the directory stays.
So does that of a cluster with evidence for an audit, whose nodes are stopped in good order.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench import cpu
from bench.bench_audit import Evidence
from bench.recording import RecordingClient, RecordingThreadClient
from deploy.local import LocalCluster
from timerclient import AsyncTimerClient, Message, TimerClient

T = TypeVar("T")


class BenchError(RuntimeError):
    """A run gave no figure, or an untrustworthy one. The message gives the reason."""


@dataclass(slots=True)
class CpuUse:
    """CPU use per process over a span, in cores (CPU seconds per second)."""

    client: float = 0.0
    leader: float = 0.0
    followers: float = 0.0
    """Both followers together."""

    def series(self) -> dict[str, list[float]]:
        """Return the use as one sample of each of three series."""
        return {
            "cores_client": [self.client],
            "cores_leader": [self.leader],
            "cores_followers": [self.followers],
        }


@dataclass(slots=True)
class Rig:
    """A running cluster, with helpers that measures share."""

    cluster: LocalCluster
    loop: asyncio.Runner
    """The runner of all runs in this process. gRPC works badly across several event loops."""
    evidence: Evidence | None = None
    """Of the traffic, for an audit. None: the traffic is not recorded."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def endpoints(self) -> list[str]:
        """The nodes' gRPC addresses."""
        return self.cluster.endpoints

    def client(self) -> AsyncTimerClient:
        """Return a client for asyncio, whose traffic is recorded if the rig has evidence."""
        if self.evidence is None:
            return AsyncTimerClient(self.endpoints)
        return RecordingClient(self.endpoints, self.evidence.recording)

    def thread_client(self) -> TimerClient:
        """Return a client for threads, as `client`."""
        if self.evidence is None:
            return TimerClient(self.endpoints)
        return RecordingThreadClient(self.endpoints, self.evidence.recording)

    def record_open(self, topic: str, group: str) -> None:
        """Record, if the rig has evidence, that a consumer is about to be opened."""
        if self.evidence is not None:
            self.evidence.recording.record_open(topic, group)

    def record_delivery(self, group: str, messages: Sequence[Message]) -> None:
        """Record, if the rig has evidence, messages of one batch that arrive now."""
        if self.evidence is not None:
            self.evidence.recording.record_delivery(group, messages)

    def fault(self, event: str, node: str, **more: Any) -> None:
        """Record, if the rig has evidence, that a node was killed or restarted."""
        if self.evidence is not None:
            self.evidence.fault(event, node, **more)

    def topic(self, name: str) -> str:
        """Return the name of a topic that no run has used."""
        return f"{name}-{next(self._numbers)}"

    def within(self, limit_s: float, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the event loop and return its result.

        Raises:
            BenchError: `work` is not done within `limit_s` seconds.
        """

        async def limited() -> T:
            async with asyncio.timeout(limit_s):
                return await work

        try:
            return self.loop.run(limited())
        except TimeoutError:
            raise BenchError(f"not done within {limit_s:g} s") from None

    def node_cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each node's process, by node name."""
        return {name: cpu.of_process(node.pid) for name, node in self.cluster.nodes.items()}

    @contextlib.contextmanager
    def cpu_use(self) -> Iterator[CpuUse]:
        """Measure the CPU use over the block. The yielded result is filled in at its end."""
        use, leader = CpuUse(), self.cluster.wait_for_leader()
        before, own, began = self.node_cpu_s(), time.process_time(), time.monotonic()
        yield use
        took_s = time.monotonic() - began
        use.client = (time.process_time() - own) / took_s
        cores = {n: (used - before[n]) / took_s for n, used in self.node_cpu_s().items()}
        use.leader = cores.pop(leader)
        use.followers = sum(cores.values())


async def some_at_once(
    at_once: int, items: Sequence[T], work: Callable[[T], Awaitable[object]]
) -> None:
    """Do `work` for each item, `at_once` at a time."""
    for start in range(0, len(items), at_once):
        await asyncio.gather(*map(work, items[start : start + at_once]))


@contextlib.contextmanager
def new_rig(directory: Path, loop: asyncio.Runner, *, evidence: bool = False) -> Iterator[Rig]:
    """Start a new cluster in `directory`; afterwards end it and delete the directory.

    `evidence`: record the traffic for an audit, and leave the directory for it.

    Raises:
        LaunchError: the cluster does not start.
    """
    cluster, kept = LocalCluster(directory), evidence
    try:
        cluster.start()
        cluster.wait_for_leader()
        with contextlib.ExitStack() as stack:
            of = Evidence(cluster) if evidence else None
            if of is not None:
                stack.callback(of.close)
            yield Rig(cluster, loop, of)
    except Exception as error:
        kept = True
        error.add_note(f"the nodes' files: {os.path.relpath(directory)}")
        raise
    finally:
        for name in filter(cluster.is_running, cluster.nodes):
            cluster.kill(name)
        if not kept:
            shutil.rmtree(directory)
