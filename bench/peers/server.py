"""A peer's server: a process with a session of its own, so that its children end with it."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

START_LIMIT_S: Final = 90.0
_POLL_S: Final = 0.05
_BLOCK: Final = 512


class PeerError(RuntimeError):
    """A peer did not do its part. The message gives the reason."""


class PeerServer:
    """A running process and its descendants."""

    def __init__(
        self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Start the command `words`; its output goes to the file `log`.

        Args:
            env: variables in addition to this process's.
        """
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | (env or {}),
                start_new_session=True,
            )

    def kill(self) -> None:
        """End the process group with SIGKILL."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def resident_bytes(self) -> int:
        """Return the resident memory of the session's processes."""
        return sum(resident_bytes(pid) for pid in _session(self.process.pid))

    async def ready(self, port: int) -> None:
        """Wait until a connection to `port` of this machine is accepted.

        Raises:
            PeerError: the process has ended, or the time limit is over.
        """
        await self.until(lambda: accepts(port), f"port {port}")

    async def until(self, condition: Callable[[], bool], name: str) -> None:
        """Wait for a condition of a start.

        Raises:
            PeerError: as for `ready`.
        """
        limit = time.monotonic() + START_LIMIT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > limit:
                tail = self.log.read_text(errors="replace")[-800:]
                raise PeerError(f"no {name} of {self.process.args!r}: {tail}")
            await asyncio.sleep(_POLL_S)


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback interface."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def accepts(port: int) -> bool:
    """Return whether a connection to `port` is accepted."""
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5):
            return True
    except OSError:
        return False


def disk_bytes(directory: Path) -> int:
    """Return the bytes that the files below `directory` occupy; holes do not count."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * _BLOCK
            except FileNotFoundError:
                continue
    return total


def _session(leader: int) -> list[int]:
    """Return the ids of a session's processes."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[stat.rindex(")") + 2 :].split()[3]) == leader:
                pids.append(int(entry.name))
    return pids


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
