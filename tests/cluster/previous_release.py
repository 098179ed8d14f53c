"""The code of the previous release, and a cluster whose nodes run either release.

tests/data/ holds the packages of the previous release (`python -m tests.distributions keep`). Its
nodes run in processes of their own, with the dependencies of this tree. Its stubs demand a newer
protobuf than this tree has, although they run with it: their check is removed.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from deploy.local import LocalNode, Process
from tests.cluster.running import Running
from tests.distributions import unpack

VERSION: Final = "0.1.0"
ARCHIVE: Final = Path(__file__).parents[1] / f"data/timer-cluster-{VERSION}.tar.xz"
CHECK: Final = r"_runtime_version\.ValidateProtobufRuntimeVersion\([^)]*\)"
RUN_S: Final = 60.0


class PreviousRelease:
    """The unpacked packages in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        unpack(ARCHIVE, directory)
        for stubs in directory.glob("*/proto/*_pb2.py"):
            stubs.write_text(re.sub(CHECK, "", stubs.read_text()))
        self.env = {**os.environ, "PYTHONPATH": str(directory)}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments; it imports the previous release."""
        command = [sys.executable, *words]
        return subprocess.run(
            command,
            cwd=self.directory,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )


class TwoReleases(Running):
    """Three nodes of the previous release. Those in `upgraded` run this tree's code."""

    def __init__(self, directory: Path, previous: PreviousRelease) -> None:
        super().__init__(directory)
        self._previous = previous
        self.upgraded: set[str] = set()

    def replace(self, name: str) -> None:
        """Restart a node, with the program that `upgraded` states."""
        self.stop(name)
        self.start(name)

    def timerd(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `timerd` of the previous release to its end."""
        return self._previous.run("-m", "cluster.node.timerd", *words)

    def _format(self, node: LocalNode, *words: str) -> None:
        cluster_id, voters = self._cluster_id(node), ",".join(self.nodes)
        data = str(self.directory / node.data)
        words = ("--data", data, "--name", node.name, *words)
        done = self.timerd("init", *words, "--cluster-id", cluster_id, "--voters", voters)
        assert done.returncode == 0, done.stderr

    def _config(self, cluster_id: str, node: LocalNode, nodes: Sequence[LocalNode]) -> str:
        """Return the settings that both releases know."""
        lines = super()._config(cluster_id, node, nodes).splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("replication ="))

    def _launch(self, name: str, words: Sequence[str], log: BinaryIO) -> Process:
        if name in self.upgraded:
            return super()._launch(name, [*words, "--set", "replication=127.0.0.1:0"], log)
        return subprocess.Popen(
            words,
            cwd=self._previous.directory,
            env=self._previous.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
