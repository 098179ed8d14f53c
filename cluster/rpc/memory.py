"""Limits the process's memory: above the limit new work is refused.

Each large request is refused that would exceed the limit.

resident > limits.memory_bytes_max --> new work is OVERLOADED, the heaviest connections end,
                                       the state plane flushes, free pages return to the system
         < nine tenths of that     --> all requests are served again
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cluster.rpc.connections import Connections
from cluster.security.method_rules import CONTRACT_RULES
from cluster.settings.rounds import next_round
from timer.model.timer_errors import OverloadedError

CHECK_INTERVAL_S: Final = 0.25
FORGET_S: Final = 60.0
GIVE_BACK_S: Final = 5.0
"""Interval at which free pages return to the system while memory is above its limit. The flushes of
that time free some. It doubles each time that little returns, because it can hold up the event loop
for a tenth of a second."""
GIVE_BACK_S_MAX: Final = 80.0
GIVEN_BYTES_MIN: Final = 4 << 20
"""Fewer bytes that return are little."""
RETRY_AFTER_MS: Final = 1_000
LARGE_BYTES: Final = 1 << 20
"""A request of at least this size is checked at once: many may come before the next check."""
COPIES: Final = 4
"""Memory that a request takes until it is committed, as a multiple of its size: its columns, the
log entry, and what is sent to the other nodes."""

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")

logger = logging.getLogger(__name__)


def resident_bytes() -> int:
    """Return the process's resident memory in bytes.

    The file stays open after the first call, so that a process at its limit of open files can read
    it, too.
    """
    return int(os.pread(_statm(), 256, 0).split()[1]) * _PAGE


@functools.cache
def _statm() -> int:
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def available_bytes() -> int:
    """Return the memory of the machine, or the limit of the process's cgroup if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * _PAGE
    return min([machine, *_cgroup_limits()])


def limit_of(bytes_max: int) -> int:
    """Return `limits.memory_bytes_max` in bytes; 0 means three quarters of the available memory."""
    return bytes_max or available_bytes() * 3 // 4


def _cgroup_limits() -> list[int]:
    """Return the limits of the process's cgroups and of their parents, of both versions."""
    try:
        lines = _CGROUP.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        match controllers.split(","):
            case [""]:  # version 2
                name, within = "memory.max", _CGROUPS
            case several if "memory" in several:  # version 1
                name, within = "memory.limit_in_bytes", _CGROUPS / "memory"
            case _:
                continue
        at = within / path.strip("/")
        for folder in (at, *at.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                limits.append(int((folder / name).read_text()))
    return limits


class MemoryGuard:
    """Checks the process's memory every LOOK_S."""

    def __init__(
        self,
        bytes_max: int,
        connections: Connections,
        on_end: Callable[[], None] = lambda: None,
        *,
        on_check: Callable[[], None] = lambda: None,
        release_pages: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        bytes_max: See `limit_of`.
        on_end: Called for each connection that the guard ends.
        on_check: Called after each check.
        release_pages: Returns free pages to the system. A thread calls it while memory is high.
        """
        self.bytes_max = limit_of(bytes_max)
        self._connections = connections
        self.high = False
        """True while new work is refused."""
        self._on_end, self._on_check, self._release_pages = on_end, on_check, release_pages
        self._give_back_s = self._give_back_in_s = GIVE_BACK_S

    def complaints(self) -> list[str]:
        """Return why new work is refused; empty: it is not."""
        text = f"more memory than limits.memory_bytes_max = {self.bytes_max}: new work is rejected"
        return [text] if self.high else []

    def admit(self, method: str, size: int = 0) -> None:
        """Accept a method's request of `size` bytes if there is memory for it.

        Raises:
            OverloadedError: memory is above its limit, or would be with a large request. The method
                is not one that is always served.
        """
        rule = CONTRACT_RULES[method]
        if not rule.while_memory_is_high and (self.high or not self._fits(size)):
            request = f" for {size} bytes" if size >= LARGE_BYTES else ""
            what = f"memory{request}: limits.memory_bytes_max = {self.bytes_max}"
            raise OverloadedError(what, retry_after_ms=RETRY_AFTER_MS)

    def _fits(self, size: int) -> bool:
        return size < LARGE_BYTES or resident_bytes() + COPIES * size <= self.bytes_max

    async def run(self) -> None:
        """Check until cancelled, give free pages back, and forget closed connections."""
        for number in itertools.count(1):
            await next_round(CHECK_INTERVAL_S)
            with contextlib.suppress(OSError):  # no file can be opened: the next look retries
                await self.check()
                self._on_check()
                await self._give_back()
                if number % round(FORGET_S / CHECK_INTERVAL_S) == 0:
                    await self._connections.weigh()

    async def _give_back(self) -> None:
        if not self.high:
            self._give_back_s = self._give_back_in_s = GIVE_BACK_S
        self._give_back_in_s -= CHECK_INTERVAL_S
        if self._give_back_in_s > 0:
            return
        before = resident_bytes()
        await asyncio.to_thread(self._release_pages)
        little = before - resident_bytes() < GIVEN_BYTES_MIN
        self._give_back_s = min(2 * self._give_back_s, GIVE_BACK_S_MAX) if little else GIVE_BACK_S
        self._give_back_in_s = self._give_back_s

    async def check(self) -> None:
        """Check once; end connections while memory is above its limit."""
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
            self._on_end()
            logger.warning("connection ended", extra={"peer": peer, "held_bytes": weight})
