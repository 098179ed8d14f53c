"""`timerctl recurring …`: series of recurring timers.

recurring list [TOPIC]
recurring describe TOPIC KEY [--next COUNT]
recurring create TOPIC KEY [PAYLOAD] (--every DURATION | --cron EXPRESSION) [--preview COUNT]
                 [--on-conflict alter]
recurring alter TOPIC KEY [--payload PAYLOAD] [--every … | --cron …]
recurring pause TOPIC KEY
recurring resume TOPIC KEY
recurring delete TOPIC KEY [--yes]
"""

from __future__ import annotations

import argparse
import functools
import os
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import cli_args
from timerclient.cli.cli_args import Commands, UsageError, aware_time, duration, duration_text
from timerclient.cli.cli_errors import FAILED, OK
from timerclient.cli.cli_peek import payload_text
from timerclient.rows.message_json import payload_fields

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from collections.abc import Callable, Sequence

    from timerclient.rows.series_fields import Series

TIMES: Final = 5
HEADINGS: Final = (
    *("TOPIC", "KEY", "SERIES", "TIMES", "ENDED", "NEXT", "STATE"),
    *("MISFIRE", "END", "COUNT", "PAYLOAD"),
)
WIDE_ONLY: Final = frozenset(("SERIES", "MISFIRE", "END", "COUNT", "PAYLOAD"))
SPARE: Final = ("ENDED",)
NO_LIMIT: Final = "none"
"""Removes the end or the count of a series."""
_OPTIONS: Final = ("every", "cron", "zone", "start", "end", "max_count", "misfire")


class SeriesCommands(Commands):
    """The commands of `recurring`."""

    def register_recurring(
        self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the commands to the parser of `recurring`."""
        add = self.command_adder(parser, common, default=self._list)
        parser.set_defaults(topic="")
        listing = add("list", self._list, "show the series of a topic, or of all topics")
        listing.add_argument("topic", metavar="TOPIC", nargs="?", default="")
        describe = add("describe", self._describe, "show one series and its next times")
        create = add("create", self._create, "create a series")
        alter = add("alter", self._alter, "change the given fields of a series")
        pause = add("pause", self._pause, "pause a series: its occurrences do not fire")
        resume = add("resume", self._resume, "resume a series")
        delete = add("delete", self._delete, "delete a series, and cancel its occurrence")
        for command in (describe, create, alter, pause, resume, delete):
            command.add_argument("topic", metavar="TOPIC", help="topic of the series")
            command.add_argument("key", metavar="KEY", help="key of the series")
        create.add_argument(
            "payload", metavar="PAYLOAD", nargs="?", help="payload of each occurrence"
        )
        alter.add_argument("--payload", metavar="PAYLOAD", help="payload of later occurrences")
        for command in (create, alter):
            _add_definition(command, new=command is create)
        describe.add_argument(
            "--next",
            type=int,
            default=TIMES,
            metavar="COUNT",
            help=f"number of next times to show; default: {TIMES}",
        )
        create.add_argument(
            "--preview", type=int, metavar="COUNT", help="show the next COUNT times; create nothing"
        )
        create.add_argument(
            "--on-conflict",
            choices=("reject", "alter"),
            default="reject",
            help="if the key has a series with another definition: reject (the default), or alter "
            "it to this definition",
        )
        cli_args.add_yes(delete)

    def _list(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._show(args, client.list_series(args.topic))
        return OK

    def _describe(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            series = client.get_series(args.topic, args.key)
            times = client.next_occurrences(args.topic, args.key, args.next)
        self._show(args, [series], times)
        return OK

    def _create(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            if args.preview is not None:
                times = client.preview_series(args.topic, args.preview, **_definition(args))
                document = {"next": [_instant(each) for each in times]}
                self._put(args, document, "\n".join(document["next"]) or "no further time")
                return OK
            payload = None if args.payload is None else os.fsencode(args.payload)
            series = client.create_series(
                *(args.topic, args.key, payload), on_conflict=args.on_conflict, **_definition(args)
            )
        self._show(args, [series])
        return OK

    def _alter(self, args: argparse.Namespace) -> int:
        payload, changes = None, _definition(args)
        if args.payload is not None:
            payload = os.fsencode(args.payload)
        elif not changes:
            raise UsageError("give at least one option that changes the series")
        with self._connect(args) as client:
            series = client.alter_series(args.topic, args.key, payload, **changes)
        self._show(args, [series])
        return OK

    def _pause(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._show(args, [client.pause_series(args.topic, args.key)])
        return OK

    def _resume(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._show(args, [client.resume_series(args.topic, args.key)])
        return OK

    def _delete(self, args: argparse.Namespace) -> int:
        change = f"delete series {args.key} of topic {args.topic}"
        if not cli_args.confirm(args, change, "it occurs no more."):
            return FAILED
        with self._connect(args) as client:
            client.delete_series(args.topic, args.key)
        self._put(args, {"deleted": args.key}, f"series {args.key} deleted")
        return OK

    def _show(
        self, args: argparse.Namespace, found: Sequence[Series], times: Sequence[datetime] = ()
    ) -> None:
        rows = [
            (
                *(each.topic, each.key, each.id, _times_of(each), each.ended),
                *(_instant(each.next), _state(each), each.misfire),
                *(_instant(each.end), each.max_count or "", payload_text(each.payload)),
            )
            for each in found
        ]
        text = cli_args.table(args, HEADINGS, rows, WIDE_ONLY, SPARE) if rows else "no series"
        if times:
            text += "\n\nnext times:\n" + "\n".join(f"  {_instant(each)}" for each in times)
        document = {"series": [_as_dict(each) for each in found]}
        if times:
            document["next"] = [_instant(each) for each in times]  # type: ignore[misc]
        self._put(args, document, text)


def _add_definition(command: argparse.ArgumentParser, *, new: bool) -> None:
    way = command.add_mutually_exclusive_group(required=new)
    way.add_argument("--every", type=duration, metavar="DURATION", help="interval, such as 10s")
    way.add_argument(
        "--cron",
        metavar="EXPRESSION",
        help="five fields, six with seconds first, or a name: @daily; in quotes",
    )
    command.add_argument("--zone", help="IANA time zone of --cron; default: UTC")
    command.add_argument(
        "--start", type=aware_time, metavar="TIME", help="earliest time, ISO 8601 with an offset"
    )
    command.add_argument(
        "--end", type=_or_none(aware_time), metavar="TIME", help="latest time, likewise; or none"
    )
    command.add_argument(
        "--max-count",
        type=_or_none(int),
        metavar="COUNT",
        help="greatest number of occurrences; or none",
    )
    command.add_argument(
        "--misfire",
        choices=("fire_once", "fire_all", "skip"),
        help="times missed in a pause or an outage; default: fire_once",
    )


def _definition(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in _OPTIONS}
    return {
        name: None if value == NO_LIMIT else value
        for name, value in given.items()
        if value is not None
    }


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type of an argument that may also be `none`."""

    @functools.wraps(kind, updated=())
    def read(text: str) -> Any:
        return text if text == NO_LIMIT else kind(text)

    return read


def _times_of(series: Series) -> str:
    if series.every is not None:
        return f"every {duration_text(series.every)}"
    return f"{series.cron} {series.zone or 'UTC'}"


def _state(series: Series) -> str:
    return "finished" if series.finished else "paused" if series.paused else ""


def _instant(moment: datetime | None) -> str:
    if moment is None:
        return ""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _as_dict(series: Series) -> dict[str, Any]:
    return {
        "id": str(series.id),
        "topic": series.topic,
        "key": series.key,
        "every_ms": None if series.every is None else round(series.every.total_seconds() * 1000),
        "cron": series.cron,
        "zone": series.zone,
        "start": _instant(series.start) or None,
        "end": _instant(series.end) or None,
        "max_count": series.max_count,
        "misfire": series.misfire,
        "paused": series.paused,
        "finished": series.finished,
        "ended": series.ended,
        "timer_id": series.timer_id,
        "next": _instant(series.next) or None,
        "headers": dict(series.headers),
        **payload_fields(series.payload),
    }
