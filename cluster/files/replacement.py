"""A node whose promise or identity is lost or damaged waits to be replaced, and becomes a learner.

As the voter that it was it must take no part: who can lead hangs on what it has promised. It keeps
its ports open and says so; one command does the rest, from any machine:

    timerctl members replace n2 --> the leader --> n2 empties its directory, formats it as a
                                        |          learner's, starts again and catches up
                                        v
                                    the log: the new replica votes in the place of the lost one

The leader alone passes the request on, so a majority of voters is there when the files go. It
brings the cluster's id, and a nonce that it has read from the waiting node's status.
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
from cluster.files.standby_ports import CLUSTER_KEY, NONCE_KEY, Standby
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
"""The role of such a node."""
_KEPT: Final = "lost+found"


def is_replaceable(config: NodeConfig, error: StorageError) -> bool:
    """Return whether another replica in the place of this one is the way out."""
    files = {str(config.data / PROMISE_NAME), str(config.data / IDENTITY_NAME)}
    hurt = isinstance(error, CorruptFileError) and str(error.path) in files
    return len(config.peers) > 1 and (hurt or isinstance(error, PromiseLostError))


async def wait_for_replacement(disk: Disk, config: NodeConfig, error: StorageError) -> None:
    """Return when an operator has asked for it, and the directory is a new learner's."""
    asked = asyncio.Event()
    way_out = f"{error}; `timerctl members replace {config.name}` makes a new replica of it"
    standby = Standby(config, REPLACEABLE, lambda: way_out, on_replace=asked.set)
    await standby.start()
    logger.warning("takes no part: %s", way_out)
    try:
        await asked.wait()
    finally:
        await standby.stop()
    await asyncio.to_thread(format_anew, disk, config)
    logger.warning("%s was emptied, and formatted as a learner's", config.data)


async def ask_to_replace(stub: Stub, cluster_id: str, name: str) -> None:
    """Tell a node that waits to be replaced to become a learner.

    A lost answer is no error: the node's next status says whether it still waits.
    """
    with contextlib.suppress(grpc.aio.AioRpcError):
        status = stub.GetStatus(pb.GetStatusRequest(local=True), timeout=PART_S)
        nonce = dict(await status.initial_metadata()).get(NONCE_KEY, "")
        request = pb.ChangeMembersRequest(change=pb.ChangeMembersRequest.REPLACE, name=name)
        said = ((CLUSTER_KEY, cluster_id), (NONCE_KEY, str(nonce)))
        await stub.ChangeMembers(request, timeout=PART_S, metadata=said)


def format_anew(disk: Disk, config: NodeConfig) -> None:
    """Make the node's directory that of a new learner under the same name."""
    try:
        voters = dict(read_identity(disk, config.data).founding_voters)
    except (StorageError, FileNotFoundError):
        voters = {name: founding_replica_id(config.cluster_id, name) for name in config.peers}
    voters.pop(config.name, None)
    # The identity goes last: a directory that has one is met again as this node's.
    for path in sorted(config.data.iterdir(), key=lambda path: path.name == IDENTITY_NAME):
        if path.name != _KEPT:
            _remove(path)
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
