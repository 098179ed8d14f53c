"""A node that fetches its state from the leader because its own is damaged.

Meanwhile it takes no part in the cluster: none of its files can be trusted. Its ports report the
progress (cluster/files/standby_ports.py).
"""

import asyncio
import functools
import logging
from pathlib import Path
from typing import Final

from cluster.files.standby_ports import WAITING, Standby, Wait
from cluster.files.storage import Damaged, leader_config, note_repair
from cluster.rpc.endpoints import Endpoints
from cluster.settings.config import NodeConfig
from replication.shell.snapshot_fetch import SnapshotFetch
from timer.files.data_directory import open_directory
from timer.files.disk import Disk
from timer.model.timer_errors import CorruptFileError
from timer.recovery.engine import Engine

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 0.5
LOG_EVERY_S: Final = 10.0
REPAIRING: Final = "being healed"
"""The role of a node that fetches its state."""


def check_state(config: NodeConfig, disk: Disk, directory: Path) -> None:
    """Raise CorruptFileError if no process could start from the state in `directory`."""
    Engine(disk, directory, leader_config(config))


async def repair(disk: Disk, config: NodeConfig, damaged: Damaged) -> None:
    """Fetch a snapshot. The next start installs it.

    While the disk has too little room for the snapshot, the node waits for room without a timeout.

    Raises:
        CorruptFileError: the damage, with the last obstacle; the fetch has not moved for
            refetch_timeout_ms.
    """
    directory = open_directory(disk, config.data, cluster_id=config.cluster_id, name=config.name)
    refetch = SnapshotFetch(
        disk,
        directory.incoming,
        cluster_id=config.cluster_id,
        name=config.name,
        dials=Endpoints(config).dials(),
        check=functools.partial(check_state, config, disk),
    )
    note_repair(disk, config, str(damaged))
    logger.warning("%s; fetching state and log from the leader", damaged)
    standby = Standby(config, functools.partial(_wait, damaged, refetch))
    await standby.start()
    work = asyncio.create_task(refetch.run())
    try:
        await _watch(work, refetch, damaged, config.storage.refetch_timeout_ms / 1000)
    finally:
        work.cancel()
        await asyncio.wait({work})
        await standby.stop()
        directory.close()


def _wait(damaged: Damaged, refetch: SnapshotFetch) -> Wait:
    """Return the state of the repair for probes and the log."""
    why = f"{damaged}: {refetch.status}"
    if (error := refetch.room_error) is not None:
        return Wait(WAITING, why, error.free_bytes)
    return Wait(REPAIRING, why)


async def _watch(
    work: asyncio.Task[object], refetch: SnapshotFetch, damaged: Damaged, timeout_s: float
) -> None:
    """Return when `work`, the run of `refetch`, has ended. Log its state now and then.

    Raises:
        CorruptFileError: see `repair`.
    """
    loop = asyncio.get_running_loop()
    logged_s, waited_s, role = loop.time(), refetch.moved_s, REPAIRING
    while not work.done():
        await asyncio.wait({work}, timeout=CHECK_INTERVAL_S)
        now_s, wait = loop.time(), _wait(damaged, refetch)
        if wait.role == WAITING:
            waited_s = now_s
        if now_s - max(refetch.moved_s, waited_s) >= timeout_s:
            why = f"{damaged.why.why}; not healed within {timeout_s:g} s: {refetch.status}"
            raise CorruptFileError(damaged.why.path, damaged.why.position, why)
        if wait.role != role or (role != WAITING and now_s - logged_s >= LOG_EVERY_S):
            logged_s, role = now_s, wait.role
            logger.warning("%s: %s", wait.role, wait.why)
    work.result()
