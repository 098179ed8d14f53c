"""The slow scrub of a running node: it reads all files again and again, and starts a repair.

    due, or asked for --> pass in a thread, paced
        --> damage --> hand over to a node without damage, if it leads
                   --> wait until the others can go on without this node --> end, repair, come back

timer/recovery/scrub.py reads; cluster/files/repair.py repairs. Reads bypass the page cache, because
the bytes on the disk are checked. A node without others cannot be repaired: it reports all damage
and continues. A leader with damage can't send all of its state, so others can't be healed from it.
With others a pass ends at the first damage: the repair replaces all files.

Snapshots, backups, queries, merges and reading ahead open files, too. Damage that they meet goes to
`on_damage`, and is healed like that of a pass. A node that fetches a snapshot is not healed yet: if
its leader ended at once, the rest could be no majority. If a flush, a firing or a delivery needs
the damaged bytes earlier, the process ends at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cluster.settings.config import NodeConfig
from cluster.state.write_pace import Pacer, WriteAbandoned
from replication.shell.replica import Replica
from timer.files.data_directory import DataDirectory
from timer.files.disk import Disk
from timer.model.timer_errors import CorruptFileError, EngineError, FileDamage
from timer.model.units import UnixMs
from timer.recovery.scrub import extent, scrub
from timerclient.proto import timer_pb2 as pb

logger = logging.getLogger(__name__)

RETRY_S: Final = 2.0
HAND_OVER_S_MAX: Final = 600.0
"""Longest pause between transfers of the leadership while the repair waits. Each pause is twice as
long as the one before: the leadership came back, or the transfer failed, and may do so again."""
FIRST_S: Final = 30.0
"""Time from the start to the first pass: a node that has just started has requests to catch up."""
TELL_S: Final = 2.0
"""Wait before a repair, which closes the ports, if the pass was asked for: the caller polls."""
RESULT_S: Final = 10.0
"""Time for which the result of a pass that was asked for stays, at least: the caller polls."""
REQUESTED_RATE: Final = 4 << 20
"""Bytes per second of a pass that is asked for, if `scrub_bytes_per_s` is 0."""


@dataclass(slots=True)
class ScrubPass:
    """One pass over the files. The thread changes what it has read and found."""

    began_ms: UnixMs
    ended_ms: UnixMs = UnixMs(0)
    """0: it runs."""
    files: int = 0
    bytes: int = 0
    extent: tuple[int, int] = 0, 0
    """Files and bytes that there were at the start."""
    damages: list[tuple[Path, FileDamage]] = field(default_factory=list)
    is_requested: bool = False
    """`begin` was called during the pass or for it."""


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
        hand_over: Callable[[str], Awaitable[bool]],
        wall_ms: Callable[[], UnixMs],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """`others` requests the other nodes' status. `fatal` ends the process for a repair.

        `hand_over` gives the leadership to the node with a name; "": to any. False: not the leader.
        """
        self._disk, self._directory, self._replica = disk, directory, replica
        self._name, self._rate = config.name, config.storage.scrub_bytes_per_s
        self._interval_s = config.storage.scrub_interval_ms / 1000
        self._alone = len(config.peers) == 1
        self._others, self._hand_over = others, hand_over
        self._wall_ms, self._fatal = wall_ms, fatal
        self._pacer = Pacer(lambda: self._rate or REQUESTED_RATE)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scrub")
        self._requested = asyncio.Event()
        self._last: ScrubPass | None = None
        """The pass that runs, else the last one. None: there was none."""
        self._repair = ""
        """The repair of its damage, in words; empty: there is no damage."""
        self.damage = ""
        """The damage in words; empty: none is known."""
        self.bytes_read = 0
        """Bytes read since the start."""
        self.passes = 0
        """Whole passes since the start."""
        self.ended_ms = UnixMs(0)
        """Wall clock at the end of the last whole pass; 0: there was none."""

    def begin(self) -> None:
        """Begin a pass now. One that runs is joined, and one whose damage is being repaired."""
        if self._last is None or (self._last.ended_ms and (self._alone or not self._repair)):
            self._last = ScrubPass(self._wall_ms())
            self._requested.set()
        self._last.is_requested = True

    def on_damage(self, damage: FileDamage) -> None:
        """Heal damage that another reader of the files met, as the first damage of a pass.

        The damage ends the pass that runs. If none runs, a new pass begins and ends with it. If the
        pass that runs, or the last one, has damage already, the call has no effect. A node without
        others reads all files to the end. For the event loop.
        """
        if self._last is None or (self._last.ended_ms and not self._last.damages):
            self._last = ScrubPass(self._wall_ms())
            self._requested.set()
        if self._last.damages:
            return
        self._last.damages.append((Path(str(damage.path)), damage))
        self.damage = str(damage)
        if not self._alone:
            self._pacer.abandon()  # `_end_for_repair` ends the process

    def last_pass(self) -> pb.NodeVerification:
        """Return the pass that runs, else the last one."""
        last = self._last or ScrubPass(UnixMs(0))
        return pb.NodeVerification(
            node=self._name,
            reachable=True,
            began_at_ms=last.began_ms,
            ended_at_ms=last.ended_ms,
            files=last.files,
            bytes=last.bytes,
            files_total=last.extent[0],
            bytes_total=last.extent[1],
            damages=[_damage_message(*each) for each in list(last.damages)],
            repair=self._repair,
        )

    async def run(self) -> None:
        """Scrub again and again; if `scrub_bytes_per_s` is 0, only when `begin` asks."""
        loop = asyncio.get_running_loop()
        pause_s = min(FIRST_S, self._interval_s)
        while True:
            await self._pause(pause_s)
            next_s = loop.time() + self._interval_s
            if self._last is None or self._last.ended_ms:
                self._last = ScrubPass(self._wall_ms())
            last, self._repair = self._last, ""
            await loop.run_in_executor(self._thread, self._pass, last)
            last.ended_ms = self._wall_ms()
            self.damage = str(last.damages[0][1]) if last.damages else ""
            for _, damage in last.damages:
                hope = "and no other node has it" if self._alone else "to be repaired"
                logger.error("a file is damaged, %s", hope, extra={"error": damage})
            if last.damages:
                damage = last.damages[0][1]
                self._repair = self._repair_text(damage)
                await asyncio.sleep(TELL_S if last.is_requested else 0.0)
                await self._end_for_repair(damage)
            pause_s = max(RESULT_S if last.is_requested else 0.0, next_s - loop.time())

    async def _pause(self, seconds: float) -> None:
        """Wait until the next pass is due or asked for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds if self._rate else None):
                await self._requested.wait()
        self._requested.clear()

    def stop(self) -> None:
        """Stop the thread at its next step."""
        self._pacer.abandon()
        self._thread.shutdown()

    def _pass(self, mine: ScrubPass) -> None:
        """Read all files once, or until the first damage that can be healed, or `stop`."""
        state, log = self._directory.state, self._directory.log

        def step(size: int) -> None:
            self.bytes_read += size
            mine.bytes += size
            self._pacer(size)

        with contextlib.suppress(WriteAbandoned):
            mine.extent = extent(self._disk, state=state, log=log)
            size = 0
            for checked in scrub(self._disk, state=state, log=log, pace=step):
                size += checked.size
                mine.files, mine.bytes = mine.files + 1, size  # steps count small frames as more
                known = (path for path, _ in mine.damages)  # see `on_damage`
                if checked.damage is not None and checked.path not in known:
                    mine.damages.append((checked.path, checked.damage))
                    if not self._alone:
                        return
            self.passes += 1
            self.ended_ms = self._wall_ms()

    def _repair_text(self, damage: FileDamage) -> str:
        """Return the repair of a damage, in words."""
        if self._alone:
            return "none: there is no other node to fetch it from"
        if isinstance(damage, CorruptFileError):
            return "the node fetches its state and its log from the leader"
        return "the node ends: its release does not know the format of the file"

    async def _end_for_repair(self, damage: FileDamage) -> None:
        """End the process when the others can go on without this node; never if it is alone."""
        if self._alone:
            return
        now, reason = asyncio.get_running_loop().time, ""
        hand_over_s, pause_s = now(), RETRY_S
        while why := self._why_wait(others := await self._others()):
            if now() >= hand_over_s and await self._hand_over_before_repair(others):
                hand_over_s, pause_s = now() + pause_s, min(2 * pause_s, HAND_OVER_S_MAX)
            self._repair = f"waits: {why}"
            if why != reason:
                reason = why
                logger.warning("the repair of damaged files waits", extra={"reason": why})
            await asyncio.sleep(RETRY_S)
        await self._hand_over_before_repair(others, to_any=True)
        self._fatal(damage)

    async def _hand_over_before_repair(
        self, others: list[pb.NodeStatus], *, to_any: bool = False
    ) -> bool:
        """Hand the leadership over to a node without damage. `to_any`: else to any other.

        Returns whether the controller was asked for a transfer.
        """
        voters = [
            node for node in others if node.reachable and node.replica_id in self._replica.voters
        ]
        sound = [node for node in voters if not (node.unsure or node.damage or node.drained)]
        target = max(sound, key=lambda node: node.log_end).name if sound else ""
        if not target and not to_any:
            return False
        try:
            return await self._hand_over(target)
        except EngineError:  # there was no transfer
            return True

    def _why_wait(self, others: list[pb.NodeStatus]) -> str:
        """Return the reason to wait with the repair; empty: there is none."""
        voters = self._replica.voters
        there = [node for node in others if node.reachable and node.replica_id in voters]
        whole = [node for node in there if not node.unsure]
        if 2 * len(whole) <= len(voters):
            return f"{len(whole)} of {len(voters)} voters would be left"
        first = min([node.name for node in there if node.damage], default=self._name)
        return f"{first} is repaired first" if first < self._name else ""


def _damage_message(path: Path, damage: FileDamage) -> pb.NodeVerification.Damage:
    position = damage.position if isinstance(damage, CorruptFileError) else 0
    return pb.NodeVerification.Damage(file=str(path), byte=position, what=str(damage))
