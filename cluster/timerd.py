"""`timerd`: one node of the cluster.

    timerd init --data D --name n1 --cluster-id c --voters n1,n2,n3     format a data directory
    timerd --config n1.toml                                             run the node
    timerd --config n1.toml --print-config                              show the settings in force

Exit codes: 0 stopped as asked; 2 usage; 64 a setting or a port; 65 the data directory; 66 damaged
files, or a founder formatted again; 67 the disk failed; 68 the replicas' states differ, and no
majority agrees on one; 70-75 the control plane (see cluster/raft.py); 1 anything else.

A node whose state or log is damaged, or whose state differs from that of a majority, does not end:
it fetches both anew from the leader (cluster/repair.py). To install what was fetched is to start
again: the process replaces itself by a new one with the same pid, so that nothing of what it had in
memory stays. It ends with 66 if no leader offers a snapshot in time, or there are no others.
"""

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

import uvloop

from cluster.allocator import give_back_large_blocks
from cluster.config import NodeConfig, add_flags, flags_of, load_config, print_config
from cluster.logs import setup_logs
from cluster.node import PEER_OPTIONS, Diverged, Node
from cluster.repair import repair
from cluster.space import wait_for_room
from cluster.storage import Damaged, note_damage
from replication.promise import PromiseFile
from timer.directory import format_directory, founding_replica_id
from timer.disk import Disk, RealDisk, is_full
from timer.errors import (
    ConfigError,
    CorruptFile,
    DiskFailed,
    PromiseLost,
    StorageError,
    TimerError,
    UnknownVersion,
    WrongDirectory,
)
from timer.units import ReplicaId

logger = logging.getLogger(__name__)

EXIT_OTHER: Final = 1
EXIT_CONFIG: Final = 64
EXIT_DIRECTORY: Final = 65
EXIT_CORRUPT: Final = 66
EXIT_DISK: Final = 67
EXIT_DIVERGED: Final = 68


class Ending:
    """Why a node ends. Who asks it to end for good is heard whatever else it is ending for."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.asked = False
        """By SIGTERM or SIGINT."""
        self._again = False

    @property
    def restarts(self) -> bool:
        """Whether a new process takes its place."""
        return self._again and not self.asked

    def ask(self) -> None:
        """End for good."""
        self.asked = True
        self.begun.set()

    def start_again(self) -> None:
        """End, and start again: there is a snapshot to install."""
        self._again = True
        self.begun.set()


def main(argv: list[str] | None = None) -> int:
    """Run `timerd`; return its exit code."""
    if not __debug__:
        sys.exit("timerd: refusing to run under -O: assertions guard the data")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["init"]:
            return init(arguments[1:])
        return run(arguments)
    except TimerError as error:
        print(f"timerd: {error}", file=sys.stderr)  # noqa: T201
        return exit_code(error)


def exit_code(error: BaseException) -> int:
    """Return what the process exits with because of `error`."""
    match error:
        case ConfigError():
            return EXIT_CONFIG
        case WrongDirectory():
            return EXIT_DIRECTORY
        case CorruptFile() | UnknownVersion() | PromiseLost():
            return EXIT_CORRUPT
        case StorageError():
            return EXIT_DISK
        case Diverged():
            return EXIT_DIVERGED
        case _:
            return EXIT_OTHER


def init(argv: list[str]) -> int:
    """Format a data directory."""
    parser = argparse.ArgumentParser(
        prog="timerd init",
        description="Format a data directory, once. The first start of a cluster needs all its "
        "founding voters.",
    )
    parser.add_argument("--data", type=Path, required=True, help="an absent or empty directory")
    parser.add_argument("--name", required=True, help="this node's name")
    parser.add_argument("--cluster-id", required=True, help="the same on all nodes")
    parser.add_argument("--voters", required=True, help="all founding voters, comma-separated")
    parser.add_argument(
        "--learner",
        action="store_true",
        help="a node without a vote: the leader brings it up to date from its log",
    )
    arguments = parser.parse_args(argv)
    names = [name.strip() for name in arguments.voters.split(",") if name.strip()]
    if not 1 <= len(names) <= 7 or len(set(names)) != len(names):
        raise ConfigError("--voters", arguments.voters, "1 to 7 different names")
    voters = {name: founding_replica_id(arguments.cluster_id, name) for name in names}
    if arguments.name not in voters and not arguments.learner:
        limit = "must be one of --voters; a node that joins later is a --learner"
        raise ConfigError("--name", arguments.name, limit)
    if arguments.learner:
        voters.pop(arguments.name, None)
        replica_id, role = ReplicaId(secrets.randbits(62) + 1), "learner"
    else:
        replica_id, role = voters[arguments.name], "founding voter"
    format_directory(
        RealDisk(),
        arguments.data,
        cluster_id=arguments.cluster_id,
        name=arguments.name,
        replica_id=replica_id,
        founding_voters=voters,
    )
    if not arguments.learner:
        # Was there a disk before this one? If so, what it had acknowledged is gone. Its vote counts
        # only where all voters answer, until a leader has matched it: the first start needs all.
        promise = PromiseFile.load(RealDisk(), arguments.data / "promise")
        promise.set_unsure(unsure=True)
    print(f"{arguments.data}: {role} {arguments.name} of {arguments.cluster_id}")  # noqa: T201
    return 0


def run(argv: list[str]) -> int:
    """Run a node until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="timerd", description=__doc__.split("\n")[0])
    add_flags(parser)
    parser.add_argument("--print-config", action="store_true", help="show the settings and exit")
    arguments = parser.parse_args(argv)
    path = arguments.config or os.environ.get("TIMERD_CONFIG")
    config = load_config(Path(path) if path else None, os.environ, flags_of(arguments))
    if arguments.print_config:
        sys.stdout.write(print_config(config))
        return 0
    setup_logs(level=config.log_level, node=config.name)
    give_back_large_blocks()
    ending = Ending()
    try:
        uvloop.run(_run(config, ending))
    except DiskFailed as error:
        if not is_full(error) or ending.asked:
            raise
        logger.exception("no room, to be waited for")
        start_again()
    if ending.restarts:  # asked only now: a signal may have come while the loop ended
        start_again()
    return 0


def start_again() -> NoReturn:
    """Become a new process of the same program and arguments, under the same pid."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves


def _curable(config: NodeConfig, error: BaseException) -> bool:
    """Return whether others have what this node has lost."""
    others = len(config.peers) > 1
    return others and (
        isinstance(error, CorruptFile) or (isinstance(error, Diverged) and error.curable)
    )


def _begin_anew(
    disk: Disk, config: NodeConfig, ending: Ending, error: BaseException
) -> BaseException:
    """Start again if that helps against `error`; else return what ends the process."""
    if _curable(config, error):
        logger.error("fatal, to be healed: %s", error, exc_info=error)
        try:
            note_damage(disk, config, error)
            if not ending.asked:
                start_again()
        except DiskFailed as failed:  # the damage will be met again
            error = failed
    if is_full(error) and not ending.asked:
        logger.error("no room, to be waited for: %s", error, exc_info=error)
        start_again()
    return error


async def _run(config: NodeConfig, ending: Ending) -> None:
    disk = RealDisk()

    def fatal(error: BaseException) -> None:
        """What is in memory can't be trusted: end at once, or begin anew."""
        error = _begin_anew(disk, config, ending, error)
        logger.critical("fatal: %s", error, exc_info=error)
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(exit_code(error))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.ask)

    def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        del loop
        error = context.get("exception")
        if isinstance(error, AssertionError | StorageError):
            fatal(error)
        cause = error if isinstance(error, BaseException) else None
        logger.error("%s", context.get("message"), exc_info=cause)

    loop.set_exception_handler(on_exception)

    waiting = loop.create_task(wait_for_room(disk, config))
    if not await _unless_ended(waiting, ending):
        return
    node = Node(config, fatal, ending.start_again)
    try:
        await node.start()
    except Damaged as damaged:
        if len(config.peers) == 1:
            raise damaged.why from None
        healing = loop.create_task(repair(disk, config, damaged, [*PEER_OPTIONS]))
        if await _unless_ended(healing, ending):
            ending.start_again()
        return
    await ending.begun.wait()
    logger.info("starting again" if ending.restarts else "stopping")
    await node.stop()


async def _unless_ended(work: asyncio.Task[None], ending: Ending) -> bool:
    """Wait for `work`, and return True; or cancel it when the process is told to end."""
    stopped = asyncio.create_task(ending.begun.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
        return False
    stopped.cancel()
    work.result()
    return True


if __name__ == "__main__":
    sys.exit(main())
