"""Flame graphs: sample one process of a measure's cluster while the measure runs.

    python -m bench profile s1              the leader
    python -m bench profile s4 --of client  this process
    python -m bench profile stages          this process: it has no cluster
    python -m bench profile s1 --threads    all threads in every sample, waiting or not

By default a sample shows the thread that holds the GIL. This is Python's own work, which limits the
speed of one process. Work without the GIL (syncs, compression, gRPC's own threads) appears with
--threads only, beside threads that wait.

Needs py-spy (a separate program: `pip install py-spy`) and permission to trace: root, or
kernel.yama.ptrace_scope = 0.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

from bench.rig import BenchError, Rig

RATE_HZ: Final = 200
"""Samples a second. They cost about one percent of a core, and show costs down to a percent."""
WRITE_TIMEOUT_S: Final = 30.0


class SampledProcess(StrEnum):
    """The process to sample."""

    LEADER = "leader"
    FOLLOWER = "follower"
    CLIENT = "client"


def pid_of(rig: Rig | None, who: SampledProcess) -> int:
    """Return the process id of the client, the leader, or one of the followers.

    `rig`: None: a measure without a cluster, whose only process is the client.
    """
    if rig is None or who is SampledProcess.CLIENT:
        return os.getpid()
    leader = rig.cluster.wait_for_leader()
    nodes = rig.cluster.nodes
    if who is SampledProcess.LEADER:
        return nodes[leader].pid
    return next(node.pid for name, node in nodes.items() if name != leader)


@contextlib.contextmanager
def flame_graph(pid: int, svg: Path, title: str, *, threads: bool) -> Iterator[None]:
    """Sample a process during the block, then write its flame graph to `svg`.

    Raises:
        BenchError: py-spy is missing, or may not trace.
    """
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        raise BenchError("py-spy is not installed: pip install py-spy")
    command = [program, "record", "--pid", str(pid), "--output", str(svg), "--rate", str(RATE_HZ)]
    command += ["--function", "--threads" if threads else "--gil"]
    log = svg.with_suffix(".log")
    with log.open("wb") as out:
        sampler = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        if sampler.poll() is None:
            sampler.send_signal(signal.SIGINT)  # py-spy then writes the graph
        code = sampler.wait(WRITE_TIMEOUT_S)
    if code != 0 or not svg.exists():
        raise BenchError(f"py-spy failed ({code}): {log.read_text(errors='replace').strip()}")
    log.unlink()
    # py-spy's title is its own command line, with paths of this machine.
    svg.write_text(svg.read_text().replace(" ".join(command), title))
