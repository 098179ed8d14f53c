"""The slow scrub of a running node: it reads all files again and again, and starts a repair.

    pass in a thread, paced --> damage --> wait until the others can go on without this node
                                       --> hand over, if it leads --> end, repair, come back

timer/recovery/scrub.py reads; cluster/files/repair.py repairs. Reads bypass the page cache, because
the bytes on the disk are checked. A node without others cannot be repaired: it reports the damage
and continues.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from cluster.settings.config import NodeConfig
from cluster.state.write_pace import Abandoned, Pacer
from replication.shell.replica import Replica
from timer.files.data_directory import DataDirectory
from timer.files.disk import Disk
from timer.model.timer_errors import CorruptFileError, EngineError, UnknownVersionError
from timer.model.units import UnixMs
from timer.recovery.scrub import scrub
from timerclient.proto import timer_pb2 as pb

logger = logging.getLogger(__name__)

ASK_AGAIN_S: Final = 2.0
FIRST_S: Final = 30.0
"""Time from the start to the first pass: a node that has just started has requests to catch up."""


class Scrubber:
    """Scrubs one node's files; see the module. `run` on the loop until cancelled, then `stop`."""

    def __init__(  # noqa: PLR0913 - what the node lends it
        self,
        disk: Disk,
        config: NodeConfig,
        directory: DataDirectory,
        replica: Replica,
        *,
        others: Callable[[], Awaitable[list[pb.NodeStatus]]],
        hand_over: Callable[[], Awaitable[object]],
        wall_ms: Callable[[], UnixMs],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """`others` requests the other nodes' status. `fatal` ends the process for a repair."""
        self._disk, self._directory, self._replica = disk, directory, replica
        self._name, self._rate = config.name, config.storage.scrub_bytes_per_s
        self._interval_s = config.storage.scrub_interval_ms / 1000
        self._alone = len(config.peers) == 1
        self._others, self._hand_over = others, hand_over
        self._wall_ms, self._fatal = wall_ms, fatal
        self._pacer = Pacer(lambda: self._rate)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scrub")
        self.damage = ""
        """The damage in words; empty: none is known."""
        self.bytes_read = 0
        """Bytes read since the start."""
        self.passes = 0
        """Whole passes since the start."""
        self.ended_ms = UnixMs(0)
        """Wall clock at the end of the last whole pass; 0: there was none."""

    async def run(self) -> None:
        """Scrub again and again; return at once if `scrub_bytes_per_s` is 0."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(min(FIRST_S, self._interval_s))
        while self._rate:
            next_s = loop.time() + self._interval_s
            damage = await loop.run_in_executor(self._thread, self._pass)
            self.damage = str(damage or "")
            if damage is not None:
                hope = "with no other node to heal it from" if self._alone else "to be healed"
                logger.error("the scrub found damage, %s", hope, extra={"error": damage})
                await self._heal(damage)
            await asyncio.sleep(max(0.0, next_s - loop.time()))

    def stop(self) -> None:
        """Stop the thread at its next step."""
        self._pacer.abandon()
        self._thread.shutdown()

    def _pass(self) -> CorruptFileError | UnknownVersionError | None:
        """Read all files once; return the first damage. None: none was found, or `stop`."""
        state, log = self._directory.state, self._directory.log
        with contextlib.suppress(Abandoned):
            for checked in scrub(self._disk, state=state, log=log, pace=self._step):
                if checked.damage is not None:
                    return checked.damage
            self.passes += 1
            self.ended_ms = self._wall_ms()
        return None

    def _step(self, size: int) -> None:
        self.bytes_read += size
        self._pacer(size)

    async def _heal(self, damage: CorruptFileError | UnknownVersionError) -> None:
        """End the process when the others can go on without this node; never if it is alone."""
        if self._alone:
            return
        said = ""
        while why := self._why_wait(await self._others()):
            if why != said:
                said = why
                logger.warning("the repair of damaged files waits", extra={"reason": why})
            await asyncio.sleep(ASK_AGAIN_S)
        with contextlib.suppress(EngineError):
            await self._hand_over()
        self._fatal(damage)

    def _why_wait(self, others: list[pb.NodeStatus]) -> str:
        """Return the reason to wait with the repair; empty: there is none."""
        voters = self._replica.voters
        there = [node for node in others if node.reachable and node.replica_id in voters]
        whole = [node for node in there if not node.unsure]
        if 2 * len(whole) <= len(voters):
            return f"{len(whole)} of {len(voters)} voters would be left"
        first = min([node.name for node in there if node.damage], default=self._name)
        return f"{first} is healed first" if first < self._name else ""
