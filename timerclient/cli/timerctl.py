"""timerctl: the command line of a timer cluster.

Every command prints a table for people, or with `-o json` one document for programs (`consume`:
one line per message). An error is one line on stderr, or with `-o json` one document
{"error": {"reason", "message", "exit_code", ...}}. The exit code is the kind of the error: see
`EXIT_CODES` in cli_errors.py.

Other packages add commands through the entry-point group `timerctl.commands`: each entry is a
function `register(subparsers)` that adds its parser with `set_defaults(run=f)`, `f(args) -> int`.
Its module is imported at each start of timerctl, so imports that only the command needs are in `f`.
"""

import argparse
import importlib.metadata
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from timerclient import __version__
from timerclient.cli import output
from timerclient.cli.cli_args import (
    Commands,
    Parser,
    UsageError,
    add_connection,
    add_output,
    described,
    duration,
    tls_of,
)
from timerclient.cli.cli_check import CheckCommands
from timerclient.cli.cli_contexts import ContextCommands
from timerclient.cli.cli_errors import (
    EXIT_CODES,
    FAILED,
    INTERRUPTED,
    OK,
    exit_code,
    one_line,
    print_error,
)
from timerclient.cli.cli_groups import GroupCommands
from timerclient.cli.cli_letters import LetterCommands
from timerclient.cli.cli_messages import MessageCommands
from timerclient.cli.cli_nodes import NodeCommands
from timerclient.cli.cli_peek import PeekCommands
from timerclient.cli.cli_policies import PolicyCommands
from timerclient.cli.cli_rolling import RollingCommands
from timerclient.cli.cli_seen import ProducerCommands
from timerclient.cli.cli_timers import TimerCommands
from timerclient.cli.cli_top import TopCommands
from timerclient.cli.cli_topics import NamespaceCommands, TopicCommands
from timerclient.cli.cli_watch import add_watch, watch
from timerclient.cli.completion import CompletionCommands
from timerclient.cli.contexts import apply_context
from timerclient.client.timer_client import TimerClient
from timerclient.streams.nodes import MISSING_S
from timerclient.values.client_events import LOG, LeaderMissing
from timerclient.values.errors import TimerError

ENTRY_POINTS: Final = "timerctl.commands"
DISTRIBUTION: Final = "timer-cluster"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = sys.argv[1:] if argv is None else [*argv]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for names that the encoding can't write
            stream.reconfigure(errors="backslashreplace")
    code, args = OK, None
    LOG.addFilter(_first_of_an_outage)
    try:
        try:
            args = make_parser().parse_args(words)
            is_watched = getattr(args, "watch", None) is not None
            code = watch(args, words) if is_watched else args.run(args)
        except (UsageError, TimerError) as error:
            code = exit_code(error)
            print_error(error, words, args)
        except KeyboardInterrupt:
            code = INTERRUPTED
        finally:
            LOG.removeFilter(_first_of_an_outage)
            if sys.stdout is not None:  # here: a closed pipe at exit would print an error
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has exited, as `head` does: exit without an error message.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _first_of_an_outage(record: logging.LogRecord) -> bool:
    """Return whether to log a record: not the repetitions of a warning about a missing leader."""
    event = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not isinstance(event, LeaderMissing) or event.for_s < 2 * MISSING_S


# ---- the command line


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, other packages' included."""
    parser = Parser(
        prog="timerctl",
        description="Inspect, operate and use a timer cluster.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # it reads the commands' options, too: --tls would be a --tls-ca
    )
    parser.add_argument("--version", action="version", version=f"timerctl {__version__}")
    _add_common(parser, inner=False)
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_common(common, inner=True)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int] | None = None) -> Any:
        command = commands.add_parser(
            name,
            parents=[common],
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **described(text),
        )
        if run is not None:
            command.set_defaults(run=run)
        return command

    def made(of: type[Commands]) -> Any:
        return of(_client, _print)

    nodes, messages = made(NodeCommands), made(MessageCommands)
    checks, top = made(CheckCommands), made(TopCommands)
    add_watch(add("status", "show the nodes, the leader and the counters", nodes.status))
    text = "show each node's checkpoint and the shared checkpoint"
    nodes.register_checkpoint(add("checkpoint", text, nodes.checkpoint))
    checks.register(add("check", "judge the cluster, for monitoring systems", checks.check))
    top.register(add("top", "show live rates and lag of nodes, topics and groups", top.top))
    made(TopicCommands).register(
        add("topics", "show the topics; create, pause, resume or delete one"), common
    )
    made(NamespaceCommands).register(
        add("namespaces", "show namespaces, or delete one with all its topics"), common
    )
    messages.register(
        add("schedule", "schedule one message, or those of a file", messages.schedule),
        add("cancel", "cancel timers by id", messages.cancel),
        add("consume", "print a group's messages as they arrive, and ack them", messages.consume),
    )
    peeks = made(PeekCommands)
    peeks.register(add("peek", "show messages without taking them", peeks.peek))
    made(TimerCommands).register(
        add("timers", "show pending timers, cancel and reschedule them"), common
    )
    made(PolicyCommands).register(
        add("policies", "show and change the policies of the cluster, a namespace or a topic"),
        common,
    )
    made(GroupCommands).register(
        add("groups", "show, create, change, seek and delete consumer groups"), common
    )
    made(LetterCommands).register(
        add("deadletters", "show dead letters, send them back to their topics, purge them"), common
    )
    made(ProducerCommands).register(add("producers", "show the registered producers"), common)
    _add_of_nodes(add, nodes)
    rolling = made(RollingCommands)
    rolling.register(add("rolling-restart", "restart all nodes, one after the other", rolling.run))
    nodes.register(add("members", "show or change the voters and learners"), common)
    made(ContextCommands).register(add("context", "keep the settings of connections"), common)
    made(CompletionCommands).register(
        add("completion", "print a script that completes commands in a shell"), parser
    )
    add_plugins(commands)
    return parser


def _add_of_nodes(add: Callable[..., Any], nodes: NodeCommands) -> None:
    """Add the commands to nodes; those of `members` are apart."""
    transfer = add("transfer", "transfer the leadership to another node", nodes.transfer)
    transfer.add_argument("node", metavar="NODE", nargs="?", default="", help="default: any other")
    text = "keep a node from leading, until --undo or its restart"
    nodes.register_drain(add("drain", text, nodes.drain))
    level = add("log-level", "set the log level of a node, or of all nodes", nodes.log_level)
    level.add_argument("node", metavar="NODE", nargs="?", help="default: every node that answers")
    level.add_argument(
        "logger", metavar="LOGGER", nargs="?", default="", help="default: all loggers"
    )
    text = "debug, info, warning or error; of a named LOGGER also default"
    level.add_argument("level", metavar="LEVEL", help=text)
    text = "let nodes look at once at their certificates and rules of access"
    reload = add("reload", text, nodes.reload)
    reload.add_argument("nodes", metavar="NODE", nargs="*", help="default: every node")
    dump = add("dump", "show the stacks of a node's threads and tasks", nodes.dump)
    dump.add_argument("node", metavar="NODE")


def _add_common(parser: argparse.ArgumentParser, *, inner: bool) -> None:
    """Add the options of every command. `inner`: absent ones keep the outer parser's values."""
    absent = argparse.SUPPRESS if inner else None
    add_connection(parser, absent)
    add_output(parser, absent or "table")
    parser.add_argument(
        "--timeout",
        metavar="DURATION",
        type=duration,
        default=absent or timedelta(seconds=10),
        help="time of one request, failovers included; default: 10s",
    )


# ---- commands of other packages


def add_plugins(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the commands of other packages. One that can't be loaded prints the reason when run."""
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS)):
        try:
            entry.load()(commands)
        except Exception as error:  # noqa: BLE001 -- an edge: one bad package, not all commands
            if entry.name not in commands.choices:
                _add_missing(commands, entry.name, why_missing(error))


def why_missing(error: Exception) -> str:
    """Return why a command could not be loaded, and the extra that installs its module."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"can't be loaded: {type(error).__name__}: {one_line(error)}"
    extras = _extras_with(error.name.partition(".")[0])
    if extras:
        wanted = " or ".join(f"'.[{extra}]'" for extra in extras)
        return f"needs {error.name}: pip install {wanted} in a clone"
    return f"needs the module {error.name}, which is not installed"


def _extras_with(module: str) -> list[str]:
    """Return the extras of this distribution that install a module."""
    wanted = {module.replace("_", "-").lower(), f"{module.replace('_', '-').lower()}-client"}
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", requirement)
        if name and extra and name[0].replace("_", "-").lower() in wanted:
            found.append(extra[1])
    return [extra for extra in found if extra != "dev"]


def _add_missing(commands: "argparse._SubParsersAction[Any]", name: str, why: str) -> None:
    def run(_: argparse.Namespace) -> int:
        print(f"timerctl: {name} {why}", file=sys.stderr)
        return FAILED

    # The arguments are those of the missing command: with no options here, any are accepted.
    command = commands.add_parser(
        name, help=why.replace("%", "%%"), add_help=False, prefix_chars="\0"
    )
    command.add_argument("rest", nargs="*")
    command.set_defaults(run=run)


# ---- arguments of the commands


def _client(args: argparse.Namespace) -> TimerClient:
    apply_context(args)
    return TimerClient(args.endpoints, timeout=args.timeout, credentials=tls_of(args))


def _print(args: argparse.Namespace, document: Any, text: str) -> None:
    if args.output != "json":
        print(text)
    elif getattr(args, "watch", None) is not None or getattr(args, "is_repeated", False):
        print(output.to_json(document, indent=None), flush=True)
    else:
        print(output.to_json(document))


if __name__ == "__main__":
    sys.exit(main())
