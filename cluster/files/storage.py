"""A node's files at start: it opens them, installs a snapshot, or reports damage.

damaged file                                       effect
identity, promise                                  the node waits to be replaced: no other node
                                                   has a copy
state (manifest, runs, spill files), log, install  `Damaged`: the node fetches state and log again
order
the same, found while the node ran                 a note in the file `damaged`; the next start
                                                   fetches them again
"""

import functools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final, NamedTuple

from cluster.api.backup_desk import pin_directories
from cluster.api.cron_calendar import CronCalendar, warn_of_unplanned
from cluster.settings.config import NodeConfig
from cluster.settings.wall_clock import wall_clock
from replication.core.promise import PromiseFile
from replication.shell.snapshot_install import install_if_ready
from timer.entries.entry_frame import Entry
from timer.entries.policies import DEFAULTS, ScopePolicy
from timer.files.data_directory import DataDirectory, open_directory
from timer.files.disk import Disk
from timer.files.log import SEGMENT_SIZE, Log
from timer.leader.intake.count_limits import CountLimits
from timer.leader.leader import LeaderConfig
from timer.model import timer_id
from timer.model.timer_errors import CorruptFileError, StorageError
from timer.model.units import UnixMs
from timer.pending.memory.key_index import SECRET_SIZE
from timer.recovery.engine import Engine
from timer.recovery.snapshot import Snapshot, remove_files, remove_unnamed
from timer.recovery.snapshot_source import OfferedSnapshot
from timer.state.apply_results import Applied

SEGMENT_SIZE_MIN: Final = 1 << 20
REPAIRED_NAME: Final = "repaired"
"""The file with the last repair. It stays for the metrics and the status."""
CLOCK_ERROR_MS_MAX: Final = 86_400_000
"""The last repair may be later than the present clock by this, if the clock was wrong then."""

_NOTED: Final = "noted by an earlier process: "

logger = logging.getLogger(__name__)


class Damaged(Exception):
    """State or log are damaged. The other nodes have copies."""

    def __init__(self, why: CorruptFileError) -> None:
        super().__init__(str(why))
        self.why = why


class LastRepair(NamedTuple):
    """The last time that the node fetched state and log again."""

    began_ms: UnixMs
    why: str
    """The damage, or the divergence."""


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """The open files of a node, and what was recovered from them."""

    directory: DataDirectory
    engine: Engine
    log: Log
    promise: PromiseFile
    outgoing: OfferedSnapshot


def node_policy(config: NodeConfig) -> ScopePolicy:
    """Return the policy of the node's settings: it holds where no other policy does."""
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
        limits=CountLimits(
            **{each.name: getattr(config.limits, each.name) for each in fields(CountLimits)}
        ),
        calendar=CronCalendar(),
        on_unplanned=warn_of_unplanned,
        id_salt=timer_id.salt_of(config.cluster_id),
    )


def open_storage(
    disk: Disk, config: NodeConfig, observe: Callable[[Entry, Applied], None]
) -> NodeFiles:
    """Lock the data directory, finish an install that has begun, and open all files.

    Raises:
        Damaged: state or log must be fetched again. The directory is not locked.
        WrongDirectoryError, CorruptFileError, UnknownVersionError, PromiseLostError,
            DiskFailedError: other failures.
    """
    directory = open_directory(disk, config.data, cluster_id=config.cluster_id, name=config.name)
    try:
        return _open(disk, config, directory, observe)
    except BaseException:
        directory.close()
        raise


def free_disk_space(disk: Disk, config: NodeConfig) -> None:
    """Delete the files on a full disk that no start needs.

    These are outgoing snapshots, pinned backups, files that no manifest names, and an incomplete
    incoming snapshot. A complete one is installed, which deletes the files that it replaces. A
    failure is logged.
    """
    try:
        directory = open_directory(
            disk, config.data, cluster_id=config.cluster_id, name=config.name
        )
    except StorageError as error:
        logger.warning("no files were deleted from the full disk", extra={"error": error})
        return

    def end_fetching() -> None:
        if install_ready(disk, directory) is None:
            remove_files(disk, directory.incoming)

    steps: tuple[Callable[[], None], ...] = (
        lambda: remove_files(disk, directory.outgoing),
        *(
            functools.partial(remove_files, disk, each)
            for each in pin_directories(directory.backups)
        ),
        lambda: remove_unnamed(disk, directory.state),
        end_fetching,  # last: an install needs some room itself
    )
    for step in steps:
        try:
            step()
        except StorageError as error:
            logger.warning("some unneeded files stay on the full disk", extra={"error": error})
    directory.close()


def install_ready(disk: Disk, directory: DataDirectory) -> Snapshot | None:
    """Install the snapshot that is ready, if any.

    Returns the installed snapshot. None: no snapshot was ready.

    Raises:
        CorruptFileError, UnknownVersionError, PromiseLostError: the snapshot's plan or the promise
            is unreadable.
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
) -> NodeFiles:
    # First: without it the node can't heal.
    is_used = PromiseFile.load(disk, directory.promise).is_given
    try:
        installed = install_ready(disk, directory)
        if installed is not None:
            logger.info("installed the snapshot", extra={"log_index": installed.index})
        _check_note(disk, directory.damaged)
        secret = secrets.token_bytes(SECRET_SIZE)
        engine = Engine(disk, directory.state, leader_config(config), observe, secret)
        floor = engine.manifest_index
        # Only whole segments can be dropped.
        size = max(SEGMENT_SIZE_MIN, min(SEGMENT_SIZE, config.storage.log_kept_bytes_max // 4))
        log = Log.open(
            disk, directory.log, committed_floor=floor, segment_size=size, is_used=is_used
        )
    except CorruptFileError as error:
        raise Damaged(error) from error
    directory.raise_level(engine.machine.level)  # an installed snapshot may be of a higher one
    promise = PromiseFile.load(disk, directory.promise, last_epoch=log.last_epoch)
    if log.torn_bytes:
        logger.warning("the log's tail was torn", extra={"cut_bytes": log.torn_bytes})
    if log.tail_was_cut:
        logger.warning("acknowledged entries may be lost: unsure until a leader matches this log")
        promise.set_unsure(unsure=True)
        log.clear_tail_was_cut()
    outgoing = OfferedSnapshot(disk, directory.state, directory.outgoing)
    return NodeFiles(directory, engine, log, promise, outgoing)


def _check_note(disk: Disk, damaged: Path) -> None:
    """Raise CorruptFileError if an earlier process has noted damage."""
    if disk.exists(damaged):
        raise CorruptFileError(damaged, 0, f"{_NOTED}{disk.read(damaged).decode(errors='replace')}")


def note_damage(disk: Disk, config: NodeConfig, error: BaseException) -> None:
    """Write a note that makes the next start fetch state and log again.

    Raises:
        DiskFailedError: the note may be missing, and the next start may not notice the damage.
    """
    disk.write_atomic(config.data / "damaged", str(error).encode())


def note_repair(disk: Disk, config: NodeConfig, why: str) -> None:
    """Write down, for later processes, that a repair begins. A failure is logged.

    `why`: the damage. Of one that an earlier process has noted, its own words count.
    """
    text = f"{wall_clock(config.test_clock)()} {why.rpartition(_NOTED)[2]}"
    try:
        disk.write_atomic(config.data / REPAIRED_NAME, text.encode())
    except StorageError as error:
        logger.warning("the repair was not written down", extra={"error": error})


def last_repair(disk: Disk, config: NodeConfig) -> LastRepair | None:
    """Return the last repair. None: there was none, or its file is unreadable."""
    try:
        text, _, why = disk.read(config.data / REPAIRED_NAME).decode().partition(" ")
        began_ms = int(text)
    except (FileNotFoundError, StorageError, ValueError):
        return None
    is_time = 0 <= began_ms <= wall_clock(config.test_clock)() + CLOCK_ERROR_MS_MAX
    return LastRepair(UnixMs(began_ms), why) if is_time else None
