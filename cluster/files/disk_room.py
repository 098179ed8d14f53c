"""Watches free disk space: this node's and, while it leads, the other voters'.

    statvfs in a thread, twice a second --> Room --> host: flushes, merges, the log that is kept
    leading: the others' status, once a second --> Rooms --> refuse new timers, or hand over

While all disks have ample room, the others are asked every five seconds.

The rules are in timer/files/disk_reserve.py. A write that finds the disk full ends the
process. The next process, under the same pid, deletes files that it does not need. Before it opens
any file it waits for room (`wait_for_disk_space`).
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from cluster.api.peer_queries import Peers, ask_all, status_of
from cluster.files.standby_ports import WAITING, Standby, Wait
from cluster.files.storage import free_disk_space
from cluster.settings.config import NodeConfig
from cluster.settings.rounds import next_round
from cluster.state.host import Host
from replication.shell.replica import Replica
from timer.files.disk import Disk
from timer.files.disk_reserve import START_BYTES, DiskSpace, VoterDisks
from timer.leader.leader import Leader
from timer.model.timer_errors import DiskFullError
from timer.model.units import MonoMs, ReplicaId

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 0.5
USED_MS: Final = 5_000
"""Interval of the sums of the sizes of the node's files."""
ASK_MS: Final = 1_000
ASK_AMPLE_MS: Final = 5_000
"""The interval while all disks have ample room: none becomes low within it."""
MOVE_MS: Final = 10_000
"""Interval of a leader's attempts to hand over while its disk is low."""


class DiskWatch:
    """Applies the disk's state to the host; see the module. `run` on the loop until cancelled."""

    def __init__(  # noqa: PLR0913 - what the node lends it
        self,
        disk: Disk,
        config: NodeConfig,
        replica: Replica,
        host: Host,
        *,
        peers: Callable[[], Peers],
        transfer: Callable[[ReplicaId], Awaitable[object]],
        mono_ms: Callable[[], MonoMs],
    ) -> None:
        """`transfer` hands the leadership to a replica. `mono_ms` is the monotonic clock."""
        self._disk, self._name, self._path = disk, config.name, config.data
        self._reserve = config.storage.reserve_bytes
        self._replica, self._host = replica, host
        self._peers, self._transfer, self._mono_ms = peers, transfer, mono_ms
        self._leader: Leader | None = None
        self._rooms = VoterDisks(replica.replica_id, mono_ms())
        self._requested_ms = self._moved_ms = MonoMs(0)
        self._asking: asyncio.Task[None] | None = None
        self._moving: asyncio.Task[object] | None = None
        self._refusal = ""
        self._used, self._used_ms = 0, MonoMs(mono_ms() - USED_MS)
        """Bytes of the node's files, and when they were counted."""

    async def run(self) -> None:
        """Every LOOK_S, measure the free space and check that the log's active segment exists.

        Raises:
            CorruptFileError: the segment was removed or cut: the node must acknowledge no entry.
            DiskFailedError: the free space cannot be read.
        """

        def read() -> int:
            free = self._disk.free_bytes(self._path)
            self._replica.check_log()
            if (now_ms := self._mono_ms()) - self._used_ms >= USED_MS:
                self._used, self._used_ms = used_bytes(self._path), now_ms
            return free

        while True:
            self._update(await asyncio.to_thread(read))
            await next_round(CHECK_INTERVAL_S)

    def _update(self, free: int) -> None:
        before = self._host.engine.disk_space
        room = before.after(free, self._reserve, self._used)
        if room.low != before.low:
            more = {"free_bytes": room.free, "reserve_bytes": room.reserve}
            now = "too little free space" if room.low else "enough free space again"
            logger.warning("the disk has %s", now, extra=more)
        self._host.use_disk_space(room)
        leader = self._host.leader
        if leader is None:
            self._leader = None
            return
        now_ms = self._mono_ms()
        if leader is not self._leader:
            self._leader, self._rooms = leader, VoterDisks(self._replica.replica_id, now_ms)
        self._rooms.store_report(self._replica.replica_id, self._name, room, now_ms)
        self._ask(now_ms)
        leader.disk_error = self._rooms.refusal(self._replica.voters, now_ms)
        self._log_refusal(leader.disk_error)
        self._hand_over_if_low(now_ms)

    def _ask(self, now_ms: MonoMs) -> None:
        """Request the other nodes' status, except while the last requests are under way."""
        every_ms = ASK_AMPLE_MS if self._rooms.are_ample(self._replica.voters) else ASK_MS
        if now_ms - self._requested_ms >= every_ms and (
            self._asking is None or self._asking.done()
        ):
            self._requested_ms = now_ms
            self._asking = asyncio.create_task(self._gather(self._rooms))

    async def _gather(self, rooms: VoterDisks) -> None:
        for status in await ask_all(self._peers(), status_of):
            if status.reachable:
                room = DiskSpace(
                    status.disk_free_bytes, status.disk_reserve_bytes, low=status.disk_low
                )
                rooms.store_report(ReplicaId(status.replica_id), status.name, room, self._mono_ms())

    def _log_refusal(self, refusal: DiskFullError | None) -> None:
        if refusal is not None and not self._refusal:
            logger.warning("new timers are rejected", extra={"error": refusal})
        elif refusal is None and self._refusal:
            logger.warning("a majority of the disks has free space again: timers are accepted")
        self._refusal = str(refusal or "")

    def _hand_over_if_low(self, now_ms: MonoMs) -> None:
        """Hand over to a voter with room, if a majority of the voters has room."""
        better = self._rooms.better_leader(self._replica.voters, now_ms)
        busy = self._moving is not None and not self._moving.done()
        if better is not None and not busy and now_ms - self._moved_ms >= MOVE_MS:
            self._moved_ms = now_ms
            more = {"target": self._replica.name_of(better)}
            logger.warning("handing over to a node whose disk has free space", extra=more)
            self._moving = asyncio.ensure_future(self._transfer(better))


def used_bytes(directory: Path) -> int:
    """Return the bytes of all files in a directory and below; of hard links, once. In a thread."""
    sizes = dict[tuple[int, int], int]()
    for folder, _, files in os.walk(directory):
        for name in files:
            with suppress(OSError):  # deleted meanwhile
                found = (Path(folder) / name).stat()
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


async def wait_for_disk_space(disk: Disk, config: NodeConfig) -> None:
    """Return when the disk has room to start. Until then the ports report the free space."""

    def wait() -> Wait:
        why = f"the disk has {free >> 20} MiB free; {START_BYTES >> 20} MiB are needed to start"
        return Wait(WAITING, why, free)

    if not disk.exists(config.data):
        return  # opening the directory reports that it is missing
    free = await asyncio.to_thread(disk.free_bytes, config.data)
    if free < START_BYTES:
        await asyncio.to_thread(free_disk_space, disk, config)
        free = await asyncio.to_thread(disk.free_bytes, config.data)
    if free >= START_BYTES:
        return
    more = {"free_bytes": free, "needed_bytes": START_BYTES}
    logger.warning(WAITING, extra=more)
    standby = Standby(config, wait)
    await standby.start()
    try:
        while free < START_BYTES:
            await asyncio.sleep(CHECK_INTERVAL_S)
            free = await asyncio.to_thread(disk.free_bytes, config.data)
    finally:
        await standby.stop()
    logger.warning("the disk has enough free space again", extra={"free_bytes": free})
