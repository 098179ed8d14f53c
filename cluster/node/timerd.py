"""`timerd`: one node of the cluster.

    timerd init --data D --name n1 --cluster-id c --voters n1,n2,n3     format a data directory
    timerd --config n1.toml                                             run the node
    timerd --config n1.toml --print-config                              show the settings in force
    timerd --config n1.toml --raft-lost      with raft/ lost on most nodes (docs/members.md)

A node does not end if its state or log is damaged, or if its state differs from the majority's. It
fetches both from the leader (cluster/files/repair.py). Then the process replaces itself by a new
one with the same pid, which installs them. Nothing of the old memory stays. The node ends with 66
if no leader offers a snapshot in time, or if there are no other nodes. A node whose promise or
identity is damaged waits for its replacement (cluster/files/replacement.py).
"""

import argparse
import gc
import logging
import os
import secrets
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import timerclient  # noqa: F401 -- before grpc, whose core then writes no lines of its own
from cluster.settings.exit_codes import ExitCode, exit_code
from replication.core.quorum import VOTERS_MAX
from timer.files.data_directory import format_directory, founding_replica_id
from timer.files.disk import RealDisk
from timer.model.timer_errors import ConfigError, EngineError
from timer.model.units import ReplicaId
from timerclient.cli.standard_streams import open_standard_streams

_DESCRIPTION: Final = """\
Run one node of the cluster.

Before the first start, format its data directory once (timerd init --help):

  timerd init --data D --name n1 --cluster-id c --voters n1,n2,n3
"""
_EPILOG: Final = """\
Settings come from the file, then from the environment
(TIMERD_LIMITS__PAYLOAD_BYTES_MAX=...), then from flags. The later source wins.
docs/settings.md describes each; --print-config prints those in force.

exit codes (docs/runbook.md):
  0      stopped by SIGTERM or SIGINT
  1      an error of the program
  2      a wrong command line
  64     a wrong setting, a port in use, or too few open files allowed
  65     the data directory belongs to another node or cluster, or is in use
  66     a damaged file, a file of another version, a lost promise, or a founder
         that was formatted again
  67     the disk failed
  68     the replicas' states differ, and no majority agrees
  69     a certificate is not valid yet, or not any more, by this machine's
         clock; start the node again
  70-75  the control plane failed; start the node again
"""


def main(argv: list[str] | None = None) -> int:
    """Run `timerd`; return its exit code."""
    if not __debug__:
        sys.exit("timerd: refusing to run under -O: assertions guard the data")
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["init"]:
            return init(arguments[1:])
        with _exit_at_signals():
            return run(arguments)
    except EngineError as error:
        text = " ".join(map(str, ("timerd:", error, *getattr(error, "__notes__", ()))))
        return _report_failure(text, exit_code(error))
    except ModuleNotFoundError as missing:  # only the client is installed
        from timerclient.cli.missing_modules import why_missing  # not needed by a start

        return _report_failure(f"timerd: {why_missing(missing, 'server')}", ExitCode.OTHER)
    except Exception:  # noqa: BLE001 -- Python would print it to a pipe that may be full
        return _report_failure(traceback.format_exc(), ExitCode.OTHER)
    finally:
        _drop_unwritten_log()


def init(argv: list[str]) -> int:
    """Format a data directory; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="timerd init",
        description="Format a data directory, once. A new cluster serves after all its founding "
        "voters have started.",
    )
    parser.add_argument("--data", type=Path, required=True, help="an absent or empty directory")
    parser.add_argument("--name", required=True, help="this node's name")
    parser.add_argument("--cluster-id", required=True, help="the same on all nodes")
    parser.add_argument("--voters", required=True, help="all founding voters, comma-separated")
    parser.add_argument(
        "--learner",
        action="store_true",
        help="without a vote: for a node that joins later, or that lost its disk",
    )
    arguments = parser.parse_args(argv)
    from cluster.settings.config import check_directory
    from cluster.settings.names import NAME, NAME_RULE
    from replication.core.promise import NEVER_GIVEN

    check_directory("--data", arguments.data)
    names = [name.strip() for name in arguments.voters.split(",") if name.strip()]
    given = [("--name", arguments.name), ("--cluster-id", arguments.cluster_id)]
    for option, value in given + [("--voters", name) for name in names]:
        if not NAME.fullmatch(value):
            raise ConfigError(option, value, f"must be {NAME_RULE}")
    if not 1 <= len(names) <= VOTERS_MAX or len(set(names)) != len(names):
        raise ConfigError(
            "--voters", arguments.voters, f"must be 1 to {VOTERS_MAX} different names"
        )
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
        promise=NEVER_GIVEN,
    )
    print(f"{arguments.data}: {role} {arguments.name} of {arguments.cluster_id}")  # noqa: T201
    return 0


def run(argv: list[str]) -> int:
    """Run a node until SIGTERM or SIGINT, or print its settings; return the exit code."""
    with _without_collections():
        from cluster.settings.config import (
            NodeConfig,
            add_flags,
            flags_of,
            load_config,
            print_config,
        )
        from cluster.settings.release import RELEASE

    parser = argparse.ArgumentParser(
        prog="timerd",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    parser.add_argument("--version", action="version", version=f"timerd {RELEASE.program}")
    parser.add_argument("--print-config", action="store_true", help="show the settings and exit")
    parser.add_argument(
        "--raft-lost",
        action="store_true",
        help="this node has lost raft/, and the absent nodes never return: elect a controller "
        "without them (docs/members.md)",
    )
    arguments = parser.parse_args(argv)
    path = arguments.config or os.environ.get("TIMERD_CONFIG")

    def load() -> NodeConfig:
        return load_config(Path(path) if path else None, os.environ, flags_of(arguments))

    config = load()
    if arguments.print_config:
        sys.stdout.write(print_config(config))
        return 0
    with _without_collections():  # this import takes half a second, and only a run needs it
        from cluster.node import process

    return process.run(config, raft_lost=arguments.raft_lost, reload=load)


def _report_failure(text: str, code: int) -> int:
    """Print a text to standard error, after the log; return the code.

    End the process with the code if standard error is full for a second.
    """
    for handler in logging.getLogger().handlers:
        handler.flush()

    def write() -> None:
        with suppress(OSError):  # standard error may be a file on a full disk
            print(text, file=sys.stderr)  # noqa: T201

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(1.0)
    if writing.is_alive():
        os._exit(code)
    return code


def _drop_unwritten_log() -> None:
    """Drop the lines that standard error did not take. Python would end with 120 for them."""
    try:
        sys.stderr.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())


@contextmanager
def _exit_at_signals() -> Iterator[None]:
    """End the process with 0 at SIGTERM or SIGINT, until the node's loop handles them.

    In a container the process may have pid 1. The kernel then drops a signal without a handler.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: os._exit(0)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Import modules without visits of the collector: nearly all that they make stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
