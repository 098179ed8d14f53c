"""What a run works on: three new nodes on this machine, in a directory that goes afterwards.

The nodes run as users run them (deploy/local.py), with their defaults. Their end is kill -9:
nobody needs the data, and a clean stop would only take time. After a failure the directory stays.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench import cpu
from deploy.local import LocalCluster

T = TypeVar("T")


class BenchError(RuntimeError):
    """A run gave no figure, or one that can't be believed; says why."""


@dataclass(slots=True)
class CpuUse:
    """Who used how much of the CPU over a span; cores, that is seconds per second."""

    client: float = 0.0
    leader: float = 0.0
    followers: float = 0.0
    """Both together."""

    def series(self) -> dict[str, list[float]]:
        """Return it as one sample of three series."""
        return {
            "cores_client": [self.client],
            "cores_leader": [self.leader],
            "cores_followers": [self.followers],
        }


@dataclass(slots=True)
class Rig:
    """A running cluster and what measures share."""

    cluster: LocalCluster
    loop: asyncio.Runner
    """One for all runs of this process: gRPC does not like to change its event loop."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def endpoints(self) -> list[str]:
        """The nodes' gRPC addresses."""
        return self.cluster.endpoints

    def topic(self, name: str) -> str:
        """Return the name of a topic that no run has used."""
        return f"{name}-{next(self._numbers)}"

    def within(self, limit_s: float, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the event loop and return its result.

        Raises:
            BenchError: it is not done in time.
        """

        async def limited() -> T:
            async with asyncio.timeout(limit_s):
                return await work

        try:
            return self.loop.run(limited())
        except TimeoutError:
            raise BenchError(f"not done within {limit_s:g} s") from None

    def node_cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of the nodes' processes, by name."""
        return {name: cpu.of_process(node.pid) for name, node in self.cluster.nodes.items()}

    @contextlib.contextmanager
    def cpu_use(self) -> Iterator[CpuUse]:
        """Measure the CPU over the block; the result is filled in at its end."""
        use, leader = CpuUse(), self.cluster.wait_for_leader()
        before, own, began = self.node_cpu_s(), time.process_time(), time.monotonic()
        yield use
        took_s = time.monotonic() - began
        use.client = (time.process_time() - own) / took_s
        cores = {n: (used - before[n]) / took_s for n, used in self.node_cpu_s().items()}
        use.leader = cores.pop(leader)
        use.followers = sum(cores.values())


@contextlib.contextmanager
def new_rig(directory: Path, loop: asyncio.Runner) -> Iterator[Rig]:
    """Bring a new cluster up in `directory`; take it down and away.

    Raises:
        LaunchError: it does not come up.
    """
    cluster, failed = LocalCluster(directory), False
    try:
        cluster.start()
        cluster.wait_for_leader()
        yield Rig(cluster, loop)
    except Exception as error:
        failed = True
        error.add_note(f"the nodes' files: {os.path.relpath(directory)}")
        raise
    finally:
        for name in filter(cluster.is_running, cluster.nodes):
            cluster.kill(name)
        if not failed:
            shutil.rmtree(directory)
