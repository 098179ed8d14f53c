"""A voter whose promise or identity is lost waits to be replaced, and becomes a learner.

It must not take part as the former voter, because its promises decide which node can lead. It keeps
its ports open and reports the wait. One command on any machine does the rest:

    timerctl members replace n2 --> the leader --> n2 empties its directory, formats it as a
                                        |          learner's, starts again and catches up
                                        v
                                    the log: the new replica votes in the place of the lost one

Only the leader passes the request on, so a majority of voters is present when the files are
deleted. The request carries the cluster's id, and a nonce from the waiting node's status.
"""

import asyncio
import contextlib
import logging
import secrets
import shutil
from pathlib import Path
from typing import Final

import grpc

from cluster.api.peer_queries import PART_S, Stub
from cluster.files.standby_ports import CLUSTER_KEY, NONCE_KEY, Standby, Wait
from cluster.settings.config import NodeConfig
from replication.core.promise import NEVER_GIVEN
from timer.files.data_directory import (
    IDENTITY_NAME,
    PROMISE_NAME,
    format_directory,
    founding_replica_id,
    read_identity,
)
from timer.files.disk import Disk
from timer.model.timer_errors import CorruptFileError, PromiseLostError, StorageError
from timer.model.units import ReplicaId
from timerclient.proto import timer_pb2 as pb

logger = logging.getLogger(__name__)

REPLACEABLE: Final = "waiting to be replaced"
"""The role of a node that waits for its replacement."""
_LOST_AND_FOUND: Final = "lost+found"


def is_replaceable(config: NodeConfig, error: StorageError) -> bool:
    """Return whether a new replica in the place of this one solves the error."""
    files = {str(config.data / PROMISE_NAME), str(config.data / IDENTITY_NAME)}
    hurt = isinstance(error, CorruptFileError) and str(error.path) in files
    return len(config.peers) > 1 and (hurt or isinstance(error, PromiseLostError))


async def wait_for_replacement(disk: Disk, config: NodeConfig, error: StorageError) -> None:
    """Return when an operator has requested it and the directory is formatted as a learner's."""
    requested = asyncio.Event()
    way_out = f"{error}; replace this replica with `timerctl members replace {config.name}`"
    standby = Standby(config, lambda: Wait(REPLACEABLE, way_out), requested.set)
    await standby.start()
    logger.warning("this node waits for its replacement: %s", way_out)
    try:
        await requested.wait()
    finally:
        await standby.stop()
    await asyncio.to_thread(reformat, disk, config)
    logger.warning("%s was emptied and formatted for a learner", config.data)


async def ask_to_replace(stub: Stub, cluster_id: str, name: str) -> None:
    """Request that a waiting node becomes a learner.

    A lost answer is not an error: the node's next status shows whether it still waits.
    """
    with contextlib.suppress(grpc.aio.AioRpcError):
        status = stub.GetStatus(pb.GetStatusRequest(local=True), timeout=PART_S)
        nonce = dict(await status.initial_metadata()).get(NONCE_KEY, "")
        request = pb.ChangeMembersRequest(change=pb.ChangeMembersRequest.CHANGE_REPLACE, name=name)
        metadata = ((CLUSTER_KEY, cluster_id), (NONCE_KEY, str(nonce)))
        await stub.ChangeMembers(request, timeout=PART_S, metadata=metadata)


def reformat(disk: Disk, config: NodeConfig) -> None:
    """Empty the node's directory and format it for a new learner under the same name."""
    try:
        voters = dict(read_identity(disk, config.data).founding_voters)
    except (StorageError, FileNotFoundError):
        voters = {name: founding_replica_id(config.cluster_id, name) for name in config.peers}
    voters.pop(config.name, None)
    # The identity goes last: after a crash the next start still recognises the directory.
    for path in config.data.iterdir():
        if path.name not in {_LOST_AND_FOUND, IDENTITY_NAME}:
            _remove(path)
    disk.sync_dir(config.data)
    (config.data / IDENTITY_NAME).unlink(missing_ok=True)
    format_directory(
        disk,
        config.data,
        cluster_id=config.cluster_id,
        name=config.name,
        replica_id=ReplicaId(secrets.randbits(62) + 1),
        founding_voters=voters,
        promise=NEVER_GIVEN,
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
