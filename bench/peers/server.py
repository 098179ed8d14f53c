"""A peer's server: a process with a session of its own, so that its children end with it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.footprint import Resident

START_LIMIT_S: Final = 90.0
_POLL_S: Final = 0.05


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
        """End the process group with SIGKILL, even if the process itself has ended."""
        if self.process.returncode is None:  # not waited for: no other group can have its number
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def resident_bytes(self) -> int:
        """Return the resident memory of the session's processes."""
        return sum(Resident.of(pid).total for pid in _session(self.process.pid))

    async def ready(self, port: int) -> None:
        """Wait until a connection to `port` of this machine is accepted.

        Raises:
            PeerError: the process has ended, or the time limit is over.
        """
        limit = time.monotonic() + START_LIMIT_S
        while not _accepts(port):
            if self._ended() or time.monotonic() > limit:
                tail = self.log.read_text(errors="replace")[-800:]
                raise PeerError(f"no port {port} of {self.process.args!r}: {tail}")
            await asyncio.sleep(_POLL_S)

    def _ended(self) -> bool:
        """Return whether the process has ended, and leave it to `kill` to wait for it."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None


def _accepts(port: int) -> bool:
    """Return whether a connection to `port` is accepted."""
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5):
            return True
    except OSError:
        return False


def _session(leader: int) -> list[int]:
    """Return the ids of a session's processes."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(entry.name)) == leader:
                    pids.append(int(entry.name))
    return pids
