"""timerctl: the command line of a timer cluster.

Every command prints a table for people, or with `-o json` one document for programs (`consume`:
one line per message). An error is one line on stderr, or with `-o json` one document
{"error": {"reason", "message", "exit_code", ...}}. The exit code is the kind of the error: see
`EXIT_MEANINGS` in cli_errors.py.

Other packages add commands through the entry-point group `timerctl.commands`: each entry is a
function `register(subparsers)` that adds its parser with `set_defaults(run=f)`, `f(args) -> int`.
Its module is imported by `timerctl --help`, so imports that only the command needs are in `f`.

A command that is not run costs nothing: its parser is made, and its module imported, when the
command line names it. The client, gRPC and asyncio are imported by commands that connect.
"""

import argparse
import gc
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from timerclient import __version__
from timerclient.cli import output
from timerclient.cli.cli_args import (
    LateParser,
    Parser,
    UsageError,
    add_connection,
    add_output,
    duration,
    help_arguments,
    tls_of,
    token_of,
)
from timerclient.cli.cli_errors import (
    FAILED,
    INTERRUPTED,
    OK,
    exit_code,
    exit_codes,
    print_error,
    wants_json,
)
from timerclient.cli.contexts import apply_context
from timerclient.cli.missing_modules import DISTRIBUTION, why_missing
from timerclient.cli.standard_streams import open_standard_streams
from timerclient.values.client_events import LOG, MISSING_S, Event, LeaderMissing
from timerclient.values.errors import OutcomeUnknown, TimerError

if TYPE_CHECKING:
    from timerclient.client.timer_client import TimerClient

ENTRY_POINTS: Final = "timerctl.commands"
ABSENT: Final = [
    "archive",
    "audit",
    "backup",
    "certs",
    "chaos",
    "export",
    "local",
    "recover",
    "restore",
    "tokens",
]
"""Commands that an installation without the server's package names and does not have."""
CLIENT: Final = "timerclient.client.timer_client"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = sys.argv[1:] if argv is None else [*argv]
    open_standard_streams()
    if sys.stdout is None:
        closed = UsageError("standard output is closed; to drop the output: >/dev/null")
        print_error(closed, words, None)
        return exit_code(closed)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for names that the encoding can't write
            stream.reconfigure(errors="backslashreplace")
    code, args = OK, None
    is_logged = partial(_is_logged, is_json=wants_json(words))
    LOG.addFilter(is_logged)
    try:
        try:
            args = own_parser().parse_args(words)
            code = args.run(args) if getattr(args, "watch", None) is None else _watch(args, words)
        except (UsageError, TimerError) as error:
            code = exit_code(error)
            print_error(error, words, args)
        except KeyboardInterrupt:
            code = INTERRUPTED
        finally:
            LOG.removeFilter(is_logged)
            sys.stdout.flush()  # here: a closed pipe at exit would print an error
    except BrokenPipeError:
        _drop_output()  # its reader has exited, as `head` does: no error
    except OSError as error:
        if error.filename is not None:  # not of stdout
            raise
        lost = OutcomeUnknown(f"can't write the output: {error.strerror}")
        code = exit_code(lost)
        print_error(lost, words, args)
        _drop_output()
    return code


def _drop_output() -> None:
    """Send what is left of the output nowhere. Python's flush at the exit would fail again."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _watch(args: argparse.Namespace, words: Sequence[str]) -> int:
    from timerclient.cli.cli_watch import watch

    return watch(args, words)


def _is_logged(record: logging.LogRecord, *, is_json: bool) -> bool:
    """Return whether to log a record: of the warnings about a missing leader only the first.

    `is_json`: no event of the client, as stderr has JSON only.
    """
    event = record.args[0] if isinstance(record.args, tuple) and record.args else None
    if is_json and isinstance(event, Event):
        return False
    return not isinstance(event, LeaderMissing) or event.for_s < 2 * MISSING_S


# ---- the command line


_COMMANDS: Final = {
    "status": "show the nodes, the leader and the counters",
    "checkpoint": "show each node's checkpoint and the shared checkpoint",
    "check": "judge the cluster, for monitoring systems",
    "top": "show live rates and lag of nodes, topics and groups",
    "topics": "show the topics; create, pause, resume or delete one",
    "namespaces": "show namespaces, or delete one with all its topics",
    "schedule": "schedule one message, or those of a file",
    "cancel": "cancel timers by id, by key, or by filter",
    "reschedule": "change the due time of timers",
    "consume": "print a group's messages as they arrive, and ack them",
    "peek": "show messages without taking them",
    "worker": "run the handlers of an application's timers",
    "push": "send the messages of a topic to a URL, one POST for each",
    "timers": "show pending timers, cancel and reschedule them",
    "recurring": "show, create, change, pause and delete series of recurring timers",
    "policies": "show and change the policies of the cluster, a namespace or a topic",
    "groups": "show, create, change, seek and delete consumer groups",
    "deadletters": "show dead letters, send them back to their topics, purge them",
    "producers": "show the registered producers",
    "transfer": "transfer the leadership to another node",
    "drain": "keep a node from leading, until --undo or its restart",
    "log-level": "set the log level of a node, or of all nodes",
    "reload": "let nodes look at once at their certificates and rules of access",
    "trace": "time the hops of single calls through the nodes",
    "verify": "let nodes read all their files, and compare their states; or read a stopped node's",
    "dump": "show the stacks of a node's threads and tasks",
    "rolling-restart": "restart all nodes, one after the other",
    "members": "show or change the voters and learners",
    "context": "keep named settings of connections",
    "completion": "print a script that completes commands in a shell",
}
"""Name -> help."""
_CLASSES: Final = {
    "cli_nodes.NodeCommands": "status checkpoint transfer drain log-level reload dump members",
    "cli_check.CheckCommands": "check",
    "cli_top.TopCommands": "top",
    "cli_topics.TopicCommands": "topics",
    "cli_topics.NamespaceCommands": "namespaces",
    "cli_messages.MessageCommands": "schedule consume",
    "cli_peek.PeekCommands": "peek",
    "cli_worker.WorkerCommands": "worker",
    "cli_push.PushCommands": "push",
    "cli_timers.TimerCommands": "timers cancel reschedule",
    "cli_series.SeriesCommands": "recurring",
    "cli_policies.PolicyCommands": "policies",
    "cli_groups.GroupCommands": "groups",
    "cli_letters.LetterCommands": "deadletters",
    "cli_seen.ProducerCommands": "producers",
    "cli_trace.TraceCommands": "trace",
    "cli_verify.VerifyCommands": "verify",
    "cli_rolling.RollingCommands": "rolling-restart",
    "cli_contexts.ContextCommands": "context",
    "completion.CompletionCommands": "completion",
}
"""Module and class -> the commands that its methods `register_NAME` add."""
_CLASS_OF: Final = {name: where for where, names in _CLASSES.items() for name in names.split()}


class MainParser(Parser):
    """The parser of timerctl. Other packages' commands are loaded by their names, and by the help.

    `commands` is set after the construction.
    """

    commands: "argparse._SubParsersAction[Any]"
    _has_plugins = False

    def load_plugins(self) -> None:
        """Add the commands of other packages, once."""
        if not self._has_plugins:
            self._has_plugins = True
            add_plugins(self.commands)

    def parse_known_args(  # type: ignore[override]  # its overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; without --timeout the timeout is the command's `usual_timeout`."""
        found, unknown = super().parse_known_args(args, namespace)
        if found.timeout is None:
            found.timeout = found.usual_timeout
        return found, unknown

    def format_help(self) -> str:
        """Return the help with the commands of other packages."""
        self.load_plugins()
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action is self.commands and value not in self.commands.choices:
            self.load_plugins()
        super()._check_value(action, value)


def make_parser() -> MainParser:
    """Return the parser of all commands, other packages' included."""
    parser = own_parser()
    parser.load_plugins()
    return parser


def own_parser() -> MainParser:
    """Return the parser. It loads a command's module, or another package, when it is needed."""
    codes = exit_codes()
    parser = MainParser(
        prog="timerctl",
        description="Inspect, operate and use a timer cluster.",
        epilog=codes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"timerctl {__version__}")
    _add_common(parser, inner=False)
    parser.set_defaults(usual_timeout=timedelta(seconds=10))
    parser.commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=LateParser
    )
    shared, of_worker = (
        LateParser(
            partial(_add_common, inner=True, absent=absent),
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )
        for absent in ("default", "default if the app's URL does not count")
    )
    for name, text in _COMMANDS.items():
        common = of_worker if name == "worker" else shared
        parser.commands.add_parser(
            name,
            parents=[common],
            epilog=codes,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            fill=partial(_fill, name, common),
            **help_arguments(text),
        )
    return parser


def _fill(name: str, common: argparse.ArgumentParser, parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command of `_COMMANDS`."""
    module, commands = _CLASS_OF[name].split(".")
    made = getattr(importlib.import_module(f"timerclient.cli.{module}"), commands)(_client, _print)
    getattr(made, f"register_{name.replace('-', '_')}")(parser, common)


def _add_common(parser: argparse.ArgumentParser, *, inner: bool, absent: str = "default") -> None:
    """Add the options of every command. `inner`: absent ones keep the outer parser's values.

    `absent`: introduces the values of the connection's absent options in the help.
    """
    default = argparse.SUPPRESS if inner else None
    group = parser.add_argument_group("connection and output")
    add_connection(group, default, absent)
    add_output(group, default or "table")
    group.add_argument(
        "--timeout",
        metavar="DURATION",
        type=duration,
        default=default,
        help="time of one request, failovers included; default: 10s",
    )


# ---- commands of other packages


def add_plugins(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the commands of other packages. One that can't be loaded prints the reason when run."""
    import importlib.metadata  # takes longer than the imports of most commands

    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS)):
        try:
            entry.load()(commands)
        except Exception as error:  # noqa: BLE001 -- an edge: one bad package, not all commands
            if entry.name not in commands.choices:
                _add_missing(commands, entry.name, why_missing(error, command=entry.name))
    for name in ABSENT:
        if name not in commands.choices:
            _add_missing(commands, name, f"comes with the package {DISTRIBUTION}")


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


def _client(args: argparse.Namespace) -> "TimerClient":
    if CLIENT not in sys.modules:
        _load_client()
    from timerclient.client.timer_client import TimerClient

    apply_context(args)
    tls, token = tls_of(args), token_of(args)
    return TimerClient(args.endpoints, timeout=args.timeout, credentials=tls, token=token)


def _load_client() -> None:
    """Import the client. Its objects stay: the collector does not visit them, nor at the exit."""
    gc.disable()
    try:
        importlib.import_module(CLIENT)
    finally:
        gc.freeze()
        gc.enable()


def _print(args: argparse.Namespace, document: Any, text: str) -> None:
    if args.output != "json":
        print(text)
    elif getattr(args, "watch", None) is not None or getattr(args, "is_repeated", False):
        print(output.to_json(document, indent=None), flush=True)
    else:
        print(output.to_json(document))


if __name__ == "__main__":
    sys.exit(main())
