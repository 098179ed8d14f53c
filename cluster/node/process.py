"""The process of a node: signals, fatal errors, and restarts that repair the node."""

import asyncio
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import uvloop

from cluster.files.disk_room import wait_for_disk_space
from cluster.files.repair import repair
from cluster.files.replacement import is_replaceable, wait_for_replacement
from cluster.files.storage import Damaged, note_damage
from cluster.node import signal_handlers
from cluster.node.allocator import release_large_blocks, use_system_memory_for_arrow
from cluster.node.node import Node
from cluster.node.python_garbage import Sweeper
from cluster.rpc.open_files import raise_limit
from cluster.settings.config import NodeConfig
from cluster.settings.exit_codes import Diverged, exit_code
from cluster.settings.log_format import setup_logs
from cluster.settings.service_manager import (
    keep_watchdog,
    notice_opening,
    notice_ready,
    notice_stopping,
)
from timer.files.disk import Disk, FreshDisk, RealDisk, is_full
from timer.model.timer_errors import (
    CorruptFileError,
    DiskFailedError,
    PromiseLostError,
    StorageError,
    UnreadableFileError,
)
from timer.recovery.snapshot import crc32_of

logger = logging.getLogger(__name__)


class EndState:
    """The reason for the end of a node. A request to end for good counts at any time."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.stop_requested = False
        """SIGTERM or SIGINT arrived."""
        self._restart_requested = False

    @property
    def restarts(self) -> bool:
        """Whether a new process follows."""
        return self._restart_requested and not self.stop_requested

    def request_stop(self) -> None:
        """End for good."""
        self.stop_requested = True
        self.begun.set()

    def request_restart(self) -> None:
        """End, and restart to install a snapshot."""
        self._restart_requested = True
        self.begun.set()


def run(
    config: NodeConfig,
    *,
    raft_lost: bool = False,
    reload: Callable[[], NodeConfig] | None = None,
) -> int:
    """Run a node until SIGTERM or SIGINT; return the exit code.

    Args:
        config: the settings.
        raft_lost: see Node.
        reload: reads the settings again, at SIGHUP. None: there is no file to read.

    Raises:
        ConfigError: the limit of open files is too low.
    """
    setup_logs(level=config.log_level, node=config.name, form=config.log_format)
    for number in signal_handlers.HANDLED:  # the default action of each ends the process
        signal.signal(number, signal.SIG_IGN)
    raise_limit()
    release_large_blocks()
    use_system_memory_for_arrow()
    end_state = EndState()
    try:
        uvloop.run(_run(config, end_state, reload or (lambda: config), raft_lost=raft_lost))
    except DiskFailedError as error:
        if not is_full(error) or end_state.stop_requested:
            raise
        logger.error("the disk is full; restarting to wait for free space", extra={"error": error})  # noqa: TRY400 - no bug
        exec_again()
    if end_state.restarts:  # read late: a signal may have arrived while the loop ended
        exec_again()
    return 0


def exec_again() -> NoReturn:
    """Replace this process by a new one with the same program, arguments and pid."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves


def _is_repairable(config: NodeConfig, error: BaseException) -> bool:
    """Return whether the other nodes have the data that this node has lost."""
    others = len(config.peers) > 1
    return others and (
        isinstance(error, CorruptFileError) or (isinstance(error, Diverged) and error.repairable)
    )


def _as_damage(data: Path, error: BaseException) -> BaseException:
    """Return a missing file of the data directory as damage; another error as it is.

    Threads that read on during a merge expect files to go. A missing file that ends the process is
    in use: something else removed it, or its directory before an append to the log.
    """
    missing = error.__cause__ if isinstance(error, DiskFailedError) else error
    if not isinstance(missing, FileNotFoundError) or not isinstance(missing.filename, str):
        return error
    if not Path(missing.filename).is_relative_to(data):
        return error
    damage = CorruptFileError(missing.filename, 0, "the file is missing")
    damage.__cause__ = error
    return damage


def _is_readable_now(error: BaseException) -> bool:
    """Return whether a file that could not be read is readable now."""
    if not isinstance(error, UnreadableFileError):
        return False
    try:
        crc32_of(FreshDisk(), Path(str(error.path)))
    except (StorageError, FileNotFoundError):
        return False
    logger.warning("the file is readable again; no damage is recorded")
    return True


def _restart_if_it_helps(
    disk: Disk, config: NodeConfig, end_state: EndState, error: BaseException
) -> BaseException:
    """Restart if that helps against `error`; else return the error that ends the process."""
    error = _as_damage(config.data, error)
    if _is_repairable(config, error):
        logger.error(
            "damaged data, to be repaired at the next start", exc_info=error, extra={"error": error}
        )
        try:
            if not _is_readable_now(error):
                note_damage(disk, config, error)
            if not end_state.stop_requested:
                exec_again()
        except DiskFailedError as failed:  # the next start finds the damage again
            error = failed
        except FileNotFoundError:
            pass  # the whole directory is gone: a note has no place, and a new process no files
    if is_full(error) and not end_state.stop_requested:
        logger.error("the disk is full; restarting to wait for free space", extra={"error": error})
        exec_again()
    return error


async def _run(
    config: NodeConfig, end_state: EndState, reload: Callable[[], NodeConfig], *, raft_lost: bool
) -> None:
    disk = RealDisk()

    def fatal(error: BaseException) -> None:
        """End or restart at once: the state in memory can't be trusted."""
        error = _restart_if_it_helps(disk, config, end_state, error)
        logger.critical("fatal", exc_info=error, extra={"error": error})
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(exit_code(error))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end_state.request_stop)
    settings_reload = signal_handlers.SettingsReload(config, reload)
    signal_handlers.handle(loop, settings_reload)

    def on_start(node: Node) -> None:
        settings_reload.also = node.reload

    def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        del loop
        error = context.get("exception")
        if isinstance(error, AssertionError | StorageError):
            fatal(error)
        cause = error if isinstance(error, BaseException) else None
        logger.error("%s", context.get("message"), exc_info=cause)

    loop.set_exception_handler(on_exception)

    watchdog = loop.create_task(keep_watchdog())
    try:
        node = functools.partial(
            Node, config, fatal, end_state.request_restart, raft_lost=raft_lost
        )
        await _run_node(disk, config, end_state, node, on_start)
    finally:
        watchdog.cancel()


async def _run_node(
    disk: Disk,
    config: NodeConfig,
    end_state: EndState,
    make_node: Callable[[], Node],
    on_start: Callable[[Node], None],
) -> None:
    """Wait for room, start the node, and stop it when the process has to end."""
    loop = asyncio.get_running_loop()
    space_wait = loop.create_task(wait_for_disk_space(disk, config))
    if not await _wait_or_cancel(space_wait, end_state):
        return
    sweeper = Sweeper()
    notice_opening()
    try:
        node = make_node()
        sweeper.start()  # the state is in memory, and no client can connect yet
        addresses = await node.start()
        on_start(node)
        notice_ready(f"started: {addresses}")
    except (Damaged, CorruptFileError, PromiseLostError) as error:
        repairing = loop.create_task(_repair_or_wait(disk, config, error))
        if await _wait_or_cancel(repairing, end_state):
            end_state.request_restart()
        return
    sweeping = loop.create_task(sweeper.run(lambda: node.is_flushing))
    await end_state.begun.wait()
    sweeping.cancel()
    logger.info("starting again" if end_state.restarts else "stopping")
    if not end_state.restarts:
        notice_stopping()
    await node.stop()


async def _repair_or_wait(disk: Disk, config: NodeConfig, error: Exception) -> None:
    """Remove the cause that kept the node from starting.

    Raises:
        StorageError: the cause, if it cannot be removed in time.
    """
    if isinstance(error, Damaged):
        if len(config.peers) == 1:
            raise error.why from None
        await repair(disk, config, error)
    elif isinstance(error, StorageError) and is_replaceable(config, error):
        await wait_for_replacement(disk, config, error)
    else:
        raise error


async def _wait_or_cancel(work: asyncio.Task[None], end_state: EndState) -> bool:
    """Return True after `work` has ended. Cancel it and return False if the process has to end."""
    stopped = asyncio.create_task(end_state.begun.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
        return False
    stopped.cancel()
    work.result()
    return True
