"""A node that fetches its state from the leader because its own is damaged.

Meanwhile it takes no part in the cluster: none of its files can be trusted. Its ports report the
progress (cluster/rpc/standby_ports.py).
"""

import asyncio
import functools
import logging
from pathlib import Path
from typing import Final

from cluster.files.storage import Damaged, leader_config
from cluster.rpc.endpoints import Endpoints
from cluster.rpc.standby_ports import Standby
from cluster.settings.config import NodeConfig
from replication.shell.snapshot_fetch import SnapshotFetch
from timer.files.data_directory import open_directory
from timer.files.disk import Disk
from timer.recovery.engine import Engine

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.5
SAY_EVERY_S: Final = 10.0


def check_state(config: NodeConfig, disk: Disk, directory: Path) -> None:
    """Raise CorruptFileError if no process could start from the state in `directory`."""
    Engine(disk, directory, leader_config(config))


async def repair(disk: Disk, config: NodeConfig, damaged: Damaged) -> None:
    """Fetch a snapshot. The next start installs it.

    Raises:
        CorruptFileError: the damage; the fetch has not moved for refetch_timeout_ms.
    """
    timeout_s = config.storage.refetch_timeout_ms / 1000
    directory = open_directory(disk, config.data, cluster_id=config.cluster_id, name=config.name)
    refetch = SnapshotFetch(
        disk,
        directory.incoming,
        cluster_id=config.cluster_id,
        name=config.name,
        dials=Endpoints(config).dials(),
        check=functools.partial(check_state, config, disk),
    )
    logger.warning("%s; fetching state and log from the leader", damaged)
    standby = Standby(config, "being healed", lambda: f"{damaged}: {refetch.status}")
    await standby.start()
    loop = asyncio.get_running_loop()
    said_s = loop.time()
    work = loop.create_task(refetch.run())
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=LOOK_S)
            if loop.time() - refetch.moved_s >= timeout_s:
                logger.error("gave up after %.0f s: %s", timeout_s, refetch.status)
                raise damaged.why
            if not work.done() and loop.time() - said_s >= SAY_EVERY_S:
                said_s = loop.time()
                logger.warning("%s; %s", damaged, refetch.status)
        work.result()
    finally:
        work.cancel()
        await asyncio.wait({work})
        await standby.stop()
        directory.close()
