"""`timerctl timers …`, `cancel` and `reschedule`: show, cancel and reschedule timers.

timers get ID | --topic T --key K
timers list T [--from --to --key-prefix --limit --lines]
timers count T
timers story ID
timers cancel ID... | --topic T --key K... | --topic T --from --to --key-prefix | --topic T --all
              [--yes]
timers reschedule the same, and --delay, --delay-level, --due or --due-ms

A change by filter asks for confirmation, except with --yes. `timerctl cancel` and `timerctl
reschedule` are the same commands as those of `timers`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from timerclient.cli import cli_args, cli_seen, output
from timerclient.cli.cli_args import Commands, UsageError
from timerclient.cli.cli_errors import FAILED, NOT_CHANGED, OK
from timerclient.cli.cli_peek import shown_payload
from timerclient.rows.message_json import payload_fields
from timerclient.values.errors import InvalidRequest, NotFound, TimerError
from timerclient.values.results import CancelResult, RescheduleResult

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.timer_client import TimerClient
    from timerclient.rows.pending_timers import Changed, TimerInfo, Where

LIMIT = 100
CANCEL_HELP = "cancel timers by id, by key, or by filter"
RESCHEDULE_HELP = "change the due time of timers"


class TimerCommands(Commands):
    """The commands of `timers`, and its changes as commands of their own."""

    def register_timers(
        self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the commands to the parser of `timers`."""
        add = self.command_adder(parser, common)
        get = add("get", self._get, "show one timer")
        listing = add("list", self._list, "show a topic's pending timers, in order of due time")
        listing.add_argument("topic", metavar="TOPIC")
        _add_where(listing)
        listing.add_argument(
            "--limit", metavar="N", type=int, help=f"default: {LIMIT}; with --lines: all"
        )
        listing.add_argument(
            "--lines",
            action="store_true",
            help="a line of JSON for each timer, as `schedule --from` takes it",
        )
        count = add("count", self._count, "count a topic's pending timers, by due time; or some")
        count.add_argument("topic", metavar="TOPIC")
        _add_where(count)
        story = add("story", self._story, "show the events of one timer in the log")
        for command in (get, story):
            command.add_argument("id", metavar="ID", nargs="?")
            command.add_argument("--topic", help="topic of --key")
            command.add_argument("--key", help="key of a pending timer")
            command.set_defaults(by_key=command.prog)
        self.register_cancel(add("cancel", self._cancel, CANCEL_HELP), common)
        self.register_reschedule(add("reschedule", self._reschedule, RESCHEDULE_HELP), common)

    def register_cancel(self, parser: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to a parser of `cancel`."""
        _add_targets(parser)
        parser.set_defaults(run=self._cancel)

    def register_reschedule(self, parser: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to a parser of `reschedule`."""
        _add_targets(parser)
        cli_args.add_when(parser, required=True)
        parser.set_defaults(run=self._reschedule)

    # ---- queries

    def _get(self, args: argparse.Namespace) -> int:
        _check_named(args)
        with self._connect(args) as client:
            timer = _named_timer(client, args)
        document = _document(timer)
        cells = dict(_cell(*item) for item in document.items())
        width = max(map(len, cells))
        text = "\n".join(f"{name.ljust(width)}  {cell}" for name, cell in cells.items())
        self._put(args, document, text)
        return OK

    def _list(self, args: argparse.Namespace) -> int:
        if args.limit is not None and args.limit < 1:
            raise InvalidRequest.of("--limit", args.limit, "must be positive")
        if args.lines:
            return self._list_lines(args)
        limit = args.limit or LIMIT
        with self._connect(args) as client:
            size = min(limit + 1, 1_000)
            found = client.list_timers(args.topic, page_size=size, **_where(args))
            timers = list(islice(found, limit + 1))
        more, timers = len(timers) > limit, timers[:limit]
        rows = [
            (
                *(timer.id, output.instant(timer.due_ms), timer.key),
                shown_payload(args, timer.payload or b""),
            )
            for timer in timers
        ]
        headings = ("ID", "DUE", "KEY", "PAYLOAD")
        text = cli_args.table(args, headings, rows) if rows else "no timer is pending"
        text += "\n… and more: --limit" if more else ""
        self._put(args, {"timers": [*map(_document, timers)], "more": more}, text)
        return OK

    def _list_lines(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            for timer in islice(client.list_timers(args.topic, **_where(args)), args.limit):
                line = {
                    **payload_fields(timer.payload or b""),
                    "due_ms": timer.requested_ms,
                    "key": timer.key,
                    "ordering_key": timer.ordering_key,
                    "priority": timer.priority,
                    "headers": dict(timer.headers or {}) or None,
                }
                line = {name: value for name, value in line.items() if value is not None}
                sys.stdout.write(output.to_json(line, indent=None) + "\n")
        return OK

    def _count(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            counts = client.count_timers(args.topic, **_where(args))
        if not counts.within:
            self._put(args, {"pending": counts.pending}, f"{counts.pending} pending")
            return OK
        within = {cli_args.duration_text(span): n for span, n in counts.within.items()}
        rows = [*within.items(), ("beyond", counts.beyond), ("pending", counts.pending)]
        document = {"pending": counts.pending, "within": within, "beyond": counts.beyond}
        self._put(args, document, cli_args.table(args, ("DUE WITHIN", "TIMERS"), rows))
        return OK

    def _story(self, args: argparse.Namespace) -> int:
        _check_named(args)
        with self._connect(args) as client:
            timer = args.id or _named_timer(client, args)
            story = client.tell_story(timer)
        self._put(args, cli_seen.story_document(story), cli_seen.story_text(args, story))
        return OK

    # ---- changes

    def _cancel(self, args: argparse.Namespace) -> int:
        kind = _way_of_naming(args)
        with self._connect(args) as client:
            if kind == "where":
                so = "The selected timers will never fire."
                if not cli_args.confirm(args, f"cancel timers of {args.topic}", so):
                    return FAILED
                count = client.cancel_where(args.topic, **_where(args))
                self._put(args, *_change_output("cancelled", count))
                return OK
            names = args.ids if kind == "ids" else args.keys
            if kind == "ids":
                results = client.cancel_batch(args.ids)
            else:
                results = client.cancel_keys(args.topic, args.keys)
            rows = cancel_rows(client, names, results)
        self._put(args, *cancel_output(args, kind[:-1], rows))
        done = (CancelResult.CANCELLED, CancelResult.ALREADY_CANCELLED)
        return OK if all(result in done for result in results) else NOT_CHANGED

    def _reschedule(self, args: argparse.Namespace) -> int:
        kind, when = _way_of_naming(args), cli_args.when_of(args)
        with self._connect(args) as client:
            if kind == "where":
                so = "The selected timers get one due time."
                if not cli_args.confirm(args, f"reschedule timers of {args.topic}", so):
                    return FAILED
                count = client.reschedule_where(args.topic, _where(args), **when)
                self._put(args, *_change_output("rescheduled", count))
                return OK
            if kind == "ids":
                results, names = client.reschedule_batch(args.ids, **when), args.ids
            else:
                results = client.reschedule_keys(args.topic, args.keys, **when)
                names = args.keys
        rows = [
            (name, one.result.name, one.timer and one.timer.id, one.timer and one.timer.due_ms)
            for name, one in zip(names, results, strict=True)
        ]
        document = {
            "results": [
                {kind[:-1]: name, "result": result, "new_id": new, "due_ms": due}
                for name, result, new, due in rows
            ]
        }
        cells = [(name, result, new, output.instant(due or 0)) for name, result, new, due in rows]
        headings = (kind[:-1].upper(), "RESULT", "NEW ID", "DUE")
        self._put(args, document, cli_args.table(args, headings, cells))
        moved = all(one.result is RescheduleResult.RESCHEDULED for one in results)
        return OK if moved else NOT_CHANGED


CancelRow = tuple[str, str, str | None]
"""Id or key of a timer, the result of its cancel, and the id of the timer that fires instead."""


def cancel_rows(
    client: TimerClient, names: Sequence[str], results: Sequence[CancelResult]
) -> list[CancelRow]:
    """Return a row for each result. A look-up finds the new id of a rescheduled timer.

    The cancels have happened: if a look-up fails, the rows have no more new ids.
    """
    rows: list[CancelRow] = []
    looks = True
    for name, result in zip(names, results, strict=True):
        new = None
        if looks and result is CancelResult.RESCHEDULED:
            try:
                new = client.get_timer(name).replaced_by
            except NotFound:  # forgotten since
                pass
            except TimerError:
                looks = False
        rows.append((name, result.name, new))
    return rows


def cancel_output(
    args: argparse.Namespace, kind: str, rows: Sequence[CancelRow]
) -> tuple[dict[str, Any], str]:
    """Return document and text of a cancel. `kind`: id or key."""
    document = {
        "results": [{kind: name, "result": result, "new_id": new} for name, result, new in rows]
    }
    return document, cli_args.table(args, (kind.upper(), "RESULT", "NEW ID"), rows)


def _add_where(parser: argparse.ArgumentParser) -> None:
    moment = "ISO 8601 with an offset, or Unix milliseconds"
    parser.add_argument(
        "--from",
        dest="due_from",
        metavar="TIME",
        type=_instant,
        help=f"due then or later: {moment}",
    )
    parser.add_argument(
        "--to", dest="due_to", metavar="TIME", type=_instant, help=f"due earlier: {moment}"
    )
    parser.add_argument("--key-prefix", metavar="TEXT", default="", help="prefix of the key")


def _add_targets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*", help="as `schedule` printed it")
    parser.add_argument("--topic", help="topic of the keys or of the filter")
    parser.add_argument("--key", dest="keys", action="append", default=[], help="may be repeated")
    parser.add_argument("--all", action="store_true", help="every pending timer of the topic")
    _add_where(parser)
    cli_args.add_yes(parser, "with a filter: don't ask for confirmation")
    parser.set_defaults(by_key=parser.prog)


def _instant(text: str) -> datetime | int:
    return int(text) if text.isdecimal() else cli_args.aware_time(text)


def _where(args: argparse.Namespace) -> Where:
    return {"due_from": args.due_from, "due_to": args.due_to, "key_prefix": args.key_prefix}


def _named_timer(client: TimerClient, args: argparse.Namespace) -> TimerInfo:
    """Return the timer that the command line names by its id, or by its key and topic."""
    try:
        return client.get_timer(args.id, key=args.key, topic=args.topic)
    except NotFound as error:
        if args.key and "pending" in str(error):
            more = "one that fired or was cancelled is found by its id only, which the answer to"
            more += f" its schedule and its message have (timerctl peek {args.topic})"
            error.args = (f"{error}; {more}",)
        raise


def _check_named(args: argparse.Namespace) -> None:
    """Check that a timer is named by its id, or by its key and topic.

    Raises:
        UsageError: It is named in both ways, or in none.
    """
    given = args.id, args.topic, args.key
    if [each is not None for each in given] not in ([True, False, False], [False, True, True]):
        raise UsageError("give ID, or --topic and --key", args.by_key)


def _way_of_naming(args: argparse.Namespace) -> str:
    """Return the way in which timers are named: ids, keys or where.

    Raises:
        InvalidRequest: They are not named, or in more than one way.
        UsageError: They are named without their topic.
    """
    picks = args.due_from is not None or args.due_to is not None or bool(args.key_prefix)
    ways = ("ids", bool(args.ids)), ("keys", bool(args.keys)), ("where", picks), ("all", args.all)
    given = [way for way, is_given in ways if is_given]
    if given == ["keys"] and not args.topic:
        raise UsageError("--key needs --topic")
    if len(given) != 1 or (given == ["ids"]) == bool(args.topic):
        limit = "give ids; or --topic with one of: --key; --from, --to, --key-prefix; --all"
        raise InvalidRequest.of("timers", ", ".join(given) or "none", limit)
    return "where" if given == ["all"] else given[0]


def _change_output(verb: str, count: Changed) -> tuple[dict[str, Any], str]:
    least = "" if count.exact else "at least "
    return {verb: count, "exact": count.exact}, f"{least}{count} {verb}"


def _document(timer: TimerInfo) -> dict[str, Any]:
    head = {"id": timer.id, "state": timer.state.name, "due_ms": timer.due_ms}
    if timer.payload is None:
        return head | ({"replaced_by": timer.replaced_by} if timer.replaced_by else {})
    return head | {
        "topic": timer.topic,
        "held": timer.held,
        "requested_ms": timer.requested_ms,
        "key": timer.key,
        "ordering_key": timer.ordering_key,
        "priority": timer.priority,
        "headers": dict(timer.headers or {}),
        **payload_fields(timer.payload),
    }


def _cell(name: str, value: Any) -> tuple[str, str]:
    """Return the name and the text of a field for people."""
    if name.endswith("_ms"):
        return name.removesuffix("_ms"), output.instant(value)
    if isinstance(value, bool):
        return name, "yes" if value else "no"
    if isinstance(value, dict):
        return name, output.pairs(value)
    return name, "-" if value in ("", None) else output.escape_controls(str(value))
