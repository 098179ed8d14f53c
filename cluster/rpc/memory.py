"""How much memory the process has and may have, and the refusal of new work above that.

resident > limits.memory_bytes_max --> new work is OVERLOADED, the heaviest connections end
         < nine tenths of it       --> all is served again
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cluster.rpc.connections import Connections
from timer.model.timer_errors import OverloadedError

LOOK_S: Final = 0.25
RETRY_AFTER_MS: Final = 1_000
GO_ON: Final = frozenset(
    {
        *("Ack", "Nack", "Extend", "Cancel", "DeleteTopic", "DeleteGroup"),
        *("GetStatus", "GetCheckpoint", "TransferLeadership", "ListMembers", "ChangeMembers"),
    }
)
"""Methods that are served whatever the memory: they make less of it, or operators need them."""

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_STATM: Final = Path("/proc/self/statm")
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")

logger = logging.getLogger(__name__)


def resident_bytes() -> int:
    """Return the process's resident memory."""
    return int(_STATM.read_bytes().split()[1]) * _PAGE


def available_bytes() -> int:
    """Return what the machine has, or the process's cgroup allows, whichever is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * _PAGE
    return min([machine, *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    """Return the limits of the process's cgroup and those around it (version 2, then 1)."""
    try:
        at = _CGROUP.read_text().splitlines()[-1].rpartition(":")[2].strip("/")
    except (OSError, IndexError):
        return []
    folders = [_CGROUPS / at, *(_CGROUPS / at).parents, _CGROUPS / "memory"]
    limits = []
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limits.append(int((folder / name).read_text()))
            except (OSError, ValueError):  # "max": there is none
                continue
    return limits


class MemoryGuard:
    """Looks at the process's memory, four times a second."""

    def __init__(self, bytes_max: int, connections: Connections) -> None:
        """`bytes_max`: 0 for three quarters of what there is."""
        self.bytes_max = bytes_max or available_bytes() * 3 // 4
        self._connections = connections
        self.high = False
        """New work is refused."""
        self.on_end: Callable[[], None] = lambda: None
        """Called for each connection that is ended."""

    def admit(self, method: str) -> None:
        """Let a method be served, if there is memory for it.

        Raises:
            OverloadedError: there is not.
        """
        if self.high and method not in GO_ON:
            what = f"memory: limits.memory_bytes_max = {self.bytes_max}"
            raise OverloadedError(what, retry_after_ms=RETRY_AFTER_MS)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Look once; end connections if it has to be."""
        resident = resident_bytes()
        if resident <= self.bytes_max:
            if self.high and resident < self.bytes_max * 9 // 10:
                self.high = False
                logger.warning("memory is below its limit again", extra={"resident": resident})
            return
        if not self.high:
            self.high = True
            more = {"resident": resident, "limit": self.bytes_max}
            logger.warning("too much memory: new work is refused", extra=more)
        for peer, weight in await self._connections.end_heaviest(resident - self.bytes_max):
            self.on_end()
            logger.warning("connection ended", extra={"peer": peer, "held_bytes": weight})
