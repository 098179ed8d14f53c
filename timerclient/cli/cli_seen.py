"""timerctl's output of stories, of one topic and of producers.

timers story ID
topics describe TOPIC
producers list [--limit N]
producers describe ID
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import Commands
from timerclient.cli.cli_errors import OK
from timerclient.rows.enum_names import short_name
from timerclient.rows.message_json import as_dict
from timerclient.values import ids
from timerclient.values.errors import InvalidRequest
from timerclient.values.results import TimerState

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.story_calls import TimerStory
    from timerclient.proto import timer_pb2 as pb

LIMIT: Final = 100
_STATES: Final[dict[int, str]] = {state.value: state.name.lower() for state in TimerState}


class ProducerCommands(Commands):
    """The commands of `producers`."""

    def register_producers(
        self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the commands to the parser of `producers`."""
        add = self.command_adder(parser, common, self._list)
        parser.set_defaults(limit=LIMIT)
        listing = add("list", self._list, "show the producers, last used first")
        listing.add_argument(
            "--limit",
            metavar="N",
            type=int,
            default=LIMIT,
            help=f"most producers to show; default: {LIMIT}",
        )
        one = add("describe", self._describe, "show one producer")
        one.add_argument("producer", metavar="PRODUCER", type=_producer)

    def _list(self, args: argparse.Namespace) -> int:
        if args.limit < 1:
            raise InvalidRequest.of("--limit", args.limit, "must be positive")
        with self._connect(args) as client:
            found = client.producers()
        found.sort(key=lambda each: -each.used_at_ms)
        self._show(args, found[: args.limit], len(found))
        return OK

    def _describe(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._show(args, [client.describe_producer(args.producer)], 1)
        return OK

    def _show(self, args: argparse.Namespace, found: list[pb.ProducerStatus], count: int) -> None:
        headings = ("PRODUCER", "LAST SEQUENCE", "USED", "EXPIRES", "ANSWERS", "TIMERS IN THEM")
        rows = [
            (
                *(f"{each.producer:016x}", each.last_sequence, output.instant(each.used_at_ms)),
                *(output.instant(each.expires_at_ms), each.answers, each.answer_rows),
            )
            for each in found
        ]
        text = cli_args.table(args, headings, rows) if rows else "no producers"
        text += f"\n… of {count}: --limit" if count > len(rows) else ""
        document = {"producers": [*map(as_dict, found)], "count": count}
        self._put(args, document, text)


def _producer(text: str) -> int:
    """Return a producer's public name from its 16 hexadecimal digits."""
    if not re.fullmatch("[0-9a-fA-F]{16}", text):
        limit = "must be 16 hexadecimal digits, as `producers list` prints them"
        raise argparse.ArgumentTypeError(f"{text!r}: {limit}")
    return int(text, 16)


def story_text(args: argparse.Namespace, story: TimerStory) -> str:
    """Return a story for people: a line for each event, then the timer's state."""
    lines = [
        (
            output.instant(event.time_ms),
            event.index,
            event.epoch,
            _event_text(event),
            _details(event),
        )
        for event in story.events
    ]
    headings = ("TIME", "ENTRY", "EPOCH", "WHAT", "")
    text = cli_args.table(args, headings, lines) if lines else "the log holds no event of the timer"
    end = story.end
    text += f"\n\n{_STATES.get(end.state, 'unknown, or no longer known')}; the log holds entries "
    text += f"{end.log_first} (of {output.instant(end.log_first_ms)}) to {end.log_last}"
    return text + "".join(f"\nmissing: {gap}" for gap in end.gaps)


def story_document(story: TimerStory) -> dict[str, Any]:
    """Return a story for JSON."""
    events = [
        as_dict(event)
        | {
            "what": _event_text(event),
            "other_id": ids.to_text(event.other_id) if event.other_id else "",
        }
        for event in story.events
    ]
    end = as_dict(story.end) | {"state": _STATES.get(story.end.state, "unknown")}
    return {"events": events, "end": end}


def _event_text(event: pb.StoryEvent) -> str:
    from timerclient.proto import timer_pb2 as pb

    return short_name(pb.StoryEvent.What.DESCRIPTOR, event.what)


def _details(event: pb.StoryEvent) -> str:
    """Return the fields of an event, as name=value."""
    from timerclient.proto import timer_pb2 as pb

    details: dict[str, Any] = {"topic": event.topic, "group": event.group}
    if event.what in (
        pb.StoryEvent.WHAT_FIRED,
        pb.StoryEvent.WHAT_MOVED_FROM,
        pb.StoryEvent.WHAT_SOUGHT,
    ):
        details["offset"] = str(event.queue_offset)
    details["other"] = ids.to_text(event.other_id) if event.other_id else ""
    details["producer"] = f"{event.producer:016x}/{event.sequence}" if event.producer else ""
    details["request"] = event.request_id
    for name in ("requested_ms", "until_ms"):
        value = getattr(event, name)
        details[name.removesuffix("_ms")] = output.instant(value) if value else ""
    details["to"], details["failed"] = event.to_topic, event.attempt
    details["series"], details["number"] = event.series, event.number
    return "  ".join(f"{name}={value}" for name, value in details.items() if value not in ("", 0))


def lateness_text(topic: pb.TopicStatus) -> str:
    """Return a topic's histograms as a table."""
    late = topic.fired_late, topic.handed_out_late
    bounds = [*(f"{ms} ms" for ms in late[0].at_most_ms), "later"]
    rows = list(zip(bounds, *(each.counts for each in late), strict=True))
    used = [row for row in rows if row[1] or row[2]]
    return output.table(("LATE BY AT MOST", "FIRED", "DELIVERED"), used) if used else ""


def quotas_text(topics: Iterable[pb.TopicStatus]) -> str:
    """Return the topics' use of their quotas, as a table; empty: no topic has a quota."""
    rows = [(t.name, q.field, q.used, q.limit, q.source) for t in topics for q in t.quotas]
    return f"\n\n{output.table(('TOPIC', 'QUOTA', 'USED', 'LIMIT', 'FROM'), rows)}" if rows else ""
