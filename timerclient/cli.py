"""timerctl: the cluster from a terminal.

Every command prints a table for people, or with `-o json` one document for programs (`consume`:
one line per message). Errors are one line on stderr; the exit code says what kind:

    0  done
    1  refused or failed; certainly without effect
    2  the command line is wrong
    3  the cluster can't be reached, or nobody leads it
    4  the outcome is unknown: it may have happened
    5  cancel, reschedule: some timer was not: it had fired, was dropped, or is not known
    130  interrupted

Other packages add commands through the entry-point group `timerctl.commands`: each entry is a
function `register(subparsers)` that adds its parser with `set_defaults(run=f)`, `f(args) -> int`.
"""

import argparse
import importlib.metadata
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from timerclient import show
from timerclient.cli_args import add_when, agreed, duration, when_of
from timerclient.cli_groups import GroupCommands
from timerclient.cli_policies import PolicyCommands
from timerclient.cli_seen import ProducerCommands
from timerclient.cli_timers import TimerCommands
from timerclient.cli_topics import NamespaceCommands, TopicCommands
from timerclient.errors import InvalidRequest, OutcomeUnknown, TimerError, Unavailable
from timerclient.messages import Message
from timerclient.proto import timer_pb2 as pb
from timerclient.results import CancelResult, ScheduleResult
from timerclient.sync import TimerClient

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
UNKNOWN: Final = 4
NOT_CANCELLED: Final = 5
INTERRUPTED: Final = 130

DEFAULT_CLUSTER: Final = "127.0.0.1:7401,127.0.0.1:7402,127.0.0.1:7403"
ENTRY_POINTS: Final = "timerctl.commands"
DISTRIBUTION: Final = "timer-cluster"

_EXIT_CODES: Final = """\
exit codes:
  0    done
  1    refused or failed; certainly without effect
  2    the command line is wrong
  3    the cluster can't be reached, or nobody leads it
  4    the outcome is unknown: it may have happened
  5    cancel, reschedule: some timer was not: it had fired, was dropped, or is not known
  130  interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name may have other letters than it can
            stream.reconfigure(errors="backslashreplace")
    code = OK
    try:
        try:
            args = make_parser().parse_args(argv)
            code = args.run(args)
        except TimerError as error:
            before = f" (at least {error.done} were done before)" if error.done else ""
            print(f"timerctl: {_one_line(error)}{before}", file=sys.stderr)
            code = exit_code(error)
        except KeyboardInterrupt:
            code = INTERRUPTED
        finally:
            if sys.stdout is not None:  # here: at its end Python would complain if nobody reads it
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does; keep the exit quiet.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def exit_code(error: TimerError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, OutcomeUnknown) or not error.outcome_known:
        return UNKNOWN
    return UNREACHABLE if isinstance(error, Unavailable) else FAILED


def _one_line(error: BaseException) -> str:
    return show.plain(" ".join(str(error).split())) or type(error).__name__


# ---- the command line


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, other packages' included."""
    parser = argparse.ArgumentParser(
        prog="timerctl",
        description="Look at a timer cluster, and use it.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(parser, cluster=os.environ.get("TIMERCTL_CLUSTER", DEFAULT_CLUSTER))
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_common(common)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            parents=[common],
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    add("status", _status, "show the nodes, who leads, and the counters")
    add("checkpoint", _checkpoint, "show how far each node is, and the shared checkpoint")
    topics = TopicCommands(_client, _print)
    topics.register(add("topics", topics.run, "show the topics and their groups, make or end one"))
    namespaces = add("namespaces", _status, "look at namespaces, or delete one with all its topics")
    NamespaceCommands(_client, _print).register(namespaces, common)
    _add_schedule(add("schedule", _schedule, "schedule one message"))
    cancel = add("cancel", _cancel, "cancel timers by id")
    cancel.add_argument("ids", metavar="ID", nargs="+", help="as `schedule` printed it")
    timers = add("timers", _status, "look at pending timers, cancel and reschedule them")
    TimerCommands(_client, _print).register(timers, common)
    policies = add("policies", _status, "show and change what holds for new timers")
    PolicyCommands(_client, _print).register(policies, common)
    groups = add("groups", _status, "look at consumer groups, make them, change their settings")
    producers = add("producers", _status, "look at those who schedule with sequences")
    ProducerCommands(_client, _print).register(producers, common)
    letters = add("deadletters", _status, "send messages that failed too often back")
    GroupCommands(_client, _print).register(groups, letters, common)
    _add_consume(add("consume", _consume, "print a group's messages as they come, and ack them"))
    transfer = add("transfer", _transfer, "hand the leadership over to another node")
    transfer.add_argument("node", metavar="NODE", nargs="?", default="", help="default: any other")
    _add_members(add("members", _members, "show who votes, or change it by one"))
    add_plugins(commands)
    return parser


def _add_common(parser: argparse.ArgumentParser, cluster: str | None = None) -> None:
    absent = argparse.SUPPRESS if cluster is None else None
    parser.add_argument(
        "--cluster",
        metavar="HOST:PORT,...",
        default=absent or cluster,
        help=f"some of the nodes; default: $TIMERCTL_CLUSTER, else {DEFAULT_CLUSTER}",
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json"),
        default=absent or "table",
        help="default: table",
    )
    parser.add_argument(
        "--timeout",
        metavar="DURATION",
        type=duration,
        default=absent or timedelta(seconds=10),
        help="how long to try, failovers included; default: 10s",
    )


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("payload", metavar="PAYLOAD", help="text; - reads standard input")
    add_when(parser)
    parser.add_argument("--key", help="unique among the topic's pending timers")
    parser.add_argument(
        "--on-conflict",
        choices=("reject", "replace", "keep"),
        default="reject",
        help="what becomes of it if a pending timer has the key; default: reject",
    )
    parser.add_argument(
        "--request-id", help="within minutes, the same again under the same id is the same timer"
    )
    parser.add_argument(
        "--header", metavar="NAME=VALUE", type=header, action="append", default=[], dest="headers"
    )


def _add_consume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("--group", required=True, help="made if it does not exist")
    parser.add_argument("--count", metavar="N", type=int, help="stop after so many messages")
    parser.add_argument(
        "--idle", metavar="DURATION", type=duration, help="stop when none comes for so long"
    )
    parser.add_argument(
        "--no-ack",
        action="store_true",
        help="look only: at the end all are given back, and have not failed by that, "
        "unless their leases ended before",
    )
    parser.add_argument(
        "--lease", metavar="DURATION", type=duration, help="default: the group's own"
    )
    parser.add_argument(
        "--from",
        dest="start",
        choices=("earliest", "latest"),
        default="earliest",
        help="where the group begins if this makes it; default: earliest",
    )


def _add_members(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("list", "add", "replace", "remove"),
        nargs="?",
        default="list",
        help="add: the learner under NAME votes; replace: in the place of the voter of that name; "
        "remove: the voter NAME votes no more; default: list",
    )
    parser.add_argument("node", metavar="NAME", nargs="?", default="")
    parser.add_argument("--yes", action="store_true", help="don't ask")


def header(text: str) -> tuple[str, str]:
    """Return the (name, value) of "name=value"."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        msg = f"{text!r} is not NAME=VALUE"
        raise argparse.ArgumentTypeError(msg)
    return name, value


# ---- commands of other packages


def add_plugins(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of other packages; one that can't be loaded says why when it is run."""
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS)):
        try:
            entry.load()(commands)
        except Exception as error:  # noqa: BLE001 -- an edge: one bad package, not all commands
            if entry.name not in commands.choices:
                _add_missing(commands, entry.name, why_missing(error))


def why_missing(error: Exception) -> str:
    """Return why a command could not be loaded, and which extra would bring it."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"can't be loaded: {type(error).__name__}: {_one_line(error)}"
    extras = _extras_with(error.name.partition(".")[0])
    if extras:
        wanted = " or ".join(f"pip install '.[{extra}]'" for extra in extras)
        return f"needs {error.name}: {wanted} in a clone of {DISTRIBUTION}"
    return f"needs the module {error.name}, which is not installed"


def _extras_with(module: str) -> list[str]:
    """Return the extras of this distribution that bring a module."""
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


def _add_missing(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, why: str
) -> None:
    def run(_: argparse.Namespace) -> int:
        print(f"timerctl: {name} {why}", file=sys.stderr)
        return FAILED

    # The arguments are the absent command's: none is an option here, so that any are taken.
    command = commands.add_parser(
        name, help=why.replace("%", "%%"), add_help=False, prefix_chars="\0"
    )
    command.add_argument("rest", nargs="*")
    command.set_defaults(run=run)


# ---- commands


def _client(args: argparse.Namespace) -> TimerClient:
    return TimerClient(args.cluster, timeout=args.timeout)


def _print(args: argparse.Namespace, document: Any, text: str) -> None:
    print(show.to_json(document) if args.output == "json" else text)


def _status(args: argparse.Namespace) -> int:
    with _client(args) as client:
        status = client.status()
    headings = (
        *("NODE", "ADDRESS", "ROLE", "SERVING", "EPOCH", "LOG END", "COMMIT", "APPLIED"),
        *("PENDING", "READY", "SCHEDULED", "FIRED", "CANCELLED", "DROPPED"),
        *("FREE MIB", "NOTE"),
    )
    rows = [
        (
            *(n.name, n.address, n.role, n.serving, n.epoch, n.log_end, n.commit_index),
            *(n.applied_index, n.pending, n.ready, n.scheduled, n.fired, n.cancelled, n.dropped),
            n.disk_free_bytes >> 20,
            ", ".join(_notes(n)) if n.reachable else n.error or "unreachable",
        )
        for n in status.nodes
    ]
    head = (
        f"cluster {status.cluster_id or '-'}  epoch {status.epoch}  "
        f"leader {status.leader or 'none'}  controller {status.controller or 'none'}"
    )
    _print(args, show.as_dict(status), f"{head}\n\n{show.table(headings, rows)}")
    return OK if status.leader else UNREACHABLE


def _notes(node: pb.NodeStatus) -> Iterator[str]:
    if node.unsure:
        yield "unsure"
    if node.damage:
        yield f"damaged: {node.damage}"
    if node.disk_low:
        yield f"disk low: below the reserve of {node.disk_reserve_bytes >> 20} MiB"


def _checkpoint(args: argparse.Namespace) -> int:
    with _client(args) as client:
        checkpoint = client.checkpoint()
    headings = (
        *("NODE", "ROLE", "EPOCH", "LOG END", "COMMIT", "APPLIED", "LAG", "READ TIME"),
        *("CHECKPOINT", "DIGEST", "AGE MS", "RUNS", "WINDOW END", "QUEUE OFFSETS", "NOTE"),
    )
    rows = [
        (
            *(n.node, n.role, n.epoch, n.log_end, n.commit_index, n.applied_index, n.lag_entries),
            *(show.instant(n.last_read_time_ms), n.checkpoint_index, n.digest[:12], n.age_ms),
            *(n.runs, show.instant(n.window_end_ms), show.pairs(n.queue_offsets)),
            "" if n.reachable else n.error or "unreachable",
        )
        for n in checkpoint.nodes
    ]
    text = show.table(headings, rows)
    if checkpoint.HasField("shared"):
        s = checkpoint.shared
        text += (
            f"\n\nshared: epoch {s.epoch}  index {s.index}  "
            f"read time {show.instant(s.last_read_time_ms)}  digest {s.digest[:12] or '-'}  "
            f"age {s.age_ms} ms  queue offsets {show.pairs(s.queue_offsets)}"
        )
    else:
        text += "\n\nshared: none yet"
    _print(args, show.as_dict(checkpoint), text)
    return OK


def _schedule(args: argparse.Namespace) -> int:
    headers = dict(args.headers)
    if len(headers) < len(args.headers):
        raise InvalidRequest.of("--header", args.headers, "each name once")
    payload = sys.stdin.buffer.read() if args.payload == "-" else os.fsencode(args.payload)
    with _client(args) as client:
        timer = client.schedule(
            args.topic,
            payload,
            key=args.key,
            on_conflict=args.on_conflict,
            headers=headers,
            request_id=args.request_id,
            **when_of(args),
        )
    document = {"id": timer.id, "due_ms": timer.due_ms, "duplicate": timer.duplicate}
    document["result"] = timer.result.name
    note = "" if timer.result is ScheduleResult.SCHEDULED else f"  {timer.result.name}"
    note += "  repeated" if timer.duplicate else ""
    _print(args, document, f"{timer.id}  due {show.instant(timer.due_ms)}{note}")
    return OK


def _cancel(args: argparse.Namespace) -> int:
    with _client(args) as client:
        results = client.cancel_batch(args.ids)
    named = list(zip(args.ids, [result.name for result in results], strict=True))
    document = {"results": [{"id": id_, "result": name} for id_, name in named]}
    _print(args, document, show.table(("ID", "RESULT"), named))
    done = (CancelResult.CANCELLED, CancelResult.ALREADY_CANCELLED)
    return OK if all(result in done for result in results) else NOT_CANCELLED


def _consume(args: argparse.Namespace) -> int:
    if args.count is not None and args.count < 1:
        raise InvalidRequest.of("--count", args.count, "must be positive")
    with (
        _client(args) as client,
        client.consumer(
            args.topic,
            args.group,
            lease=args.lease,
            start=args.start,
            max_messages=args.count,
        ) as consumer,
    ):
        looked_at: list[Message] = []
        try:
            while messages := consumer.receive(1_000, timeout=args.idle):
                for message in messages:
                    print(_line(args, message))
                sys.stdout.flush()  # what could not be printed is not acked
                if args.no_ack:
                    looked_at += messages
                else:
                    for message in messages:
                        _ = message.ack()  # leaving the block confirms it
        finally:
            for message in looked_at:
                _ = message.give_back()
    return OK


def _line(args: argparse.Namespace, message: Message) -> str:
    if args.output == "json":
        return show.to_json(_document(message), indent=None)
    text = _document(message)
    payload = text.get("payload", text.get("payload_base64", ""))
    return (
        f"{message.queue_offset}  {message.id}  due {show.instant(message.due_ms)}  "
        f"fired {show.instant(message.fired_at_ms)}  attempt {message.attempt}  "
        f"key {show.plain(message.key or '-')}  {show.plain(payload)}"
    )


def _document(message: Message) -> dict[str, Any]:
    """Return a message for JSON: its payload as text if it is UTF-8, else as base64."""
    return {
        "id": message.id,
        "queue_offset": message.queue_offset,
        "due_ms": message.due_ms,
        "fired_at_ms": message.fired_at_ms,
        "attempt": message.attempt,
        "failures": message.failures,
        "key": message.key,
        "headers": message.headers,
        **show.payload(message.payload),
    }


def _transfer(args: argparse.Namespace) -> int:
    with _client(args) as client:
        moved = client.transfer(args.node)
    document = {"transferred": moved, "target": args.node or None}
    to = args.node or "another node"
    _print(args, document, f"transferred to {to}" if moved else f"{to} leads already: no change")
    return OK


def _members(args: argparse.Namespace) -> int:
    if (args.action == "list") == bool(args.node):
        raise InvalidRequest.of("NAME", args.node, f"{args.action} takes {_TAKES[args.action]}")
    with _client(args) as client:
        if args.action == "list":
            members = client.members()
        elif args.action != "add" and not (
            args.yes or agreed(f"{args.action} {args.node}", "Its present replica votes no more.")
        ):
            return FAILED
        else:
            members = client.change_members(args.action, args.node)
    headings = ("NAME", "REPLICA", "VOTER", "ROLE", "LOG END", "LAG", "ADDRESS", "NOTE")
    rows = [
        (
            *(m.name, f"{m.replica_id:016x}", m.voter, m.role, m.log_end, m.lag_entries),
            *(m.address, "unsure" if m.unsure else ""),
        )
        for m in members.members
    ]
    head = f"epoch {members.epoch}  leader {members.leader or 'none'}"
    _print(args, show.as_dict(members), f"{head}\n\n{show.table(headings, rows)}")
    return OK


_TAKES: Final = dict.fromkeys(("add", "replace", "remove"), "a node's name") | {"list": "none"}


if __name__ == "__main__":
    sys.exit(main())
