"""A node's files at start: opened, or installed from a snapshot, or found damaged.

what is damaged                                    what happens
identity, promise, Raft's files, order to install  the process ends (66): who this node is, and
                                                   whom it promised, nobody else can tell
state (manifest, runs, spills) or log              `Damaged`: all of it is fetched anew
the same, found while the node ran                 noted in `damaged`; the next start fetches
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from cluster import wire
from cluster.config import NodeConfig
from replication.install import install_if_ready
from replication.promise import PromiseFile
from timer.applied import Applied
from timer.directory import DataDirectory, open_directory
from timer.disk import Disk
from timer.engine import Engine
from timer.entry import Entry
from timer.errors import CorruptFile, StorageError
from timer.keys import SECRET_SIZE
from timer.leader import LeaderConfig
from timer.limits import Limits
from timer.log import SEGMENT_SIZE, Log
from timer.outgoing import Outgoing
from timer.policies import DEFAULTS, Policy
from timer.snapshot import Snapshot, remove_files, remove_unnamed

SEGMENT_SIZE_MIN: Final = 1 << 20

logger = logging.getLogger(__name__)


class Damaged(Exception):
    """State or log are not what they were; the others have them."""

    def __init__(self, why: CorruptFile) -> None:
        super().__init__(str(why))
        self.why = why


@dataclass(frozen=True, slots=True)
class Storage:
    """What a node works on."""

    directory: DataDirectory
    engine: Engine
    log: Log
    promise: PromiseFile
    outgoing: Outgoing


def node_policy(config: NodeConfig) -> Policy:
    """Return what the node's settings say where no policy does."""
    return replace(
        DEFAULTS,
        tick_ms=config.timing.tick_ms,
        delay_ms_max=config.limits.delay_ms_max,
        payload_bytes_max=config.limits.payload_bytes_max,
    )


def leader_config(config: NodeConfig) -> LeaderConfig:
    """Return the settings of the engine."""
    return LeaderConfig(
        policy=node_policy(config),
        checkpoint_interval_ms=config.timing.checkpoint_interval_ms,
        waiting_bytes_max=config.limits.inflight_bytes_max // 2,
        request_window_ms=config.limits.request_window_ms,
        producer_idle_ms=config.limits.producer_idle_ms,
        limits=Limits(**{each.name: getattr(config.limits, each.name) for each in fields(Limits)}),
        id_salt=wire.id_salt(config.cluster_id),
    )


def open_storage(
    disk: Disk, config: NodeConfig, observe: Callable[[Entry, Applied], None]
) -> Storage:
    """Lock the data directory, carry out an install that was begun, and open everything.

    Raises:
        Damaged: state or log have to be fetched anew; nothing is locked.
        WrongDirectory, CorruptFile, UnknownVersion, PromiseLost, DiskFailed: the rest.
    """
    directory = open_directory(disk, config.data, cluster_id=config.cluster_id, name=config.name)
    try:
        return _open(disk, config, directory, observe)
    except BaseException:
        directory.close()
        raise


def give_back(disk: Disk, config: NodeConfig) -> None:
    """Free what no start needs of a disk that is full: what nothing names, and half a snapshot.

    A snapshot that is whole is installed: what it replaces goes. Who can't is no worse off.
    """
    try:
        directory = open_directory(
            disk, config.data, cluster_id=config.cluster_id, name=config.name
        )
    except StorageError as error:
        logger.warning("nothing was freed: %s", error)
        return

    def end_fetching() -> None:
        if _prepared(disk, directory) is None:
            remove_files(disk, directory.incoming)

    steps: tuple[Callable[[], None], ...] = (
        lambda: remove_files(disk, directory.outgoing),
        lambda: remove_unnamed(disk, directory.state),
        end_fetching,  # last: it takes some room itself
    )
    for step in steps:
        try:
            step()
        except StorageError as error:
            logger.warning("could not free all that nothing needs: %s", error)
    directory.close()


def _prepared(disk: Disk, directory: DataDirectory) -> Snapshot | None:
    """Carry out the install that was ordered.

    Returns what was installed. None: nothing was ordered.

    Raises:
        CorruptFile, UnknownVersion, PromiseLost: order or promise can't be read.
    """
    return install_if_ready(
        disk,
        directory.incoming,
        promise=directory.promise,
        state=directory.state,
        log=directory.log,
        damaged=directory.damaged,
    )


def _open(
    disk: Disk,
    config: NodeConfig,
    directory: DataDirectory,
    observe: Callable[[Entry, Applied], None],
) -> Storage:
    installed = _prepared(disk, directory)
    if installed is not None:
        logger.info("installed the snapshot at %d", installed.index)
    PromiseFile.load(disk, directory.promise)  # who can't read it has nothing to be healed for
    try:
        _check_note(disk, directory.damaged)
        secret = secrets.token_bytes(SECRET_SIZE)
        engine = Engine(disk, directory.state, leader_config(config), observe, secret)
        floor = engine.manifest_index
        # Only whole segments can be dropped.
        size = max(SEGMENT_SIZE_MIN, min(SEGMENT_SIZE, config.storage.log_kept_bytes_max // 4))
        log = Log.open(disk, directory.log, committed_floor=floor, segment_size=size)
    except CorruptFile as error:
        raise Damaged(error) from error
    promise = PromiseFile.load(disk, directory.promise, last_epoch=log.last_epoch)
    if log.torn_bytes:
        logger.warning("the log's tail was torn: %d bytes cut", log.torn_bytes)
    if log.tail_was_cut:
        logger.warning("acknowledged entries may be gone: unsure until a leader matches the log")
        promise.set_unsure(unsure=True)
        log.cut_noted()
    outgoing = Outgoing(disk, directory.state, directory.outgoing)
    return Storage(directory, engine, log, promise, outgoing)


def _check_note(disk: Disk, damaged: Path) -> None:
    """Raise CorruptFile if a process has noted damage."""
    if disk.exists(damaged):
        noted = disk.read(damaged).decode(errors="replace")
        raise CorruptFile(damaged, 0, f"noted by an earlier process: {noted}")


def note_damage(disk: Disk, config: NodeConfig, error: BaseException) -> None:
    """Have the next start fetch everything anew.

    Raises:
        DiskFailed: the next start may find nothing wrong.
    """
    disk.write_atomic(config.data / "damaged", str(error).encode())
