"""`timerctl deadletters …`: the topics of dead letters.

deadletters list [T]
deadletters peek T [--offset N] [--limit N]
deadletters redrive T [--limit N | --offset N …]
deadletters purge T [--yes]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from timerclient.cli import cli_args
from timerclient.cli.cli_args import Commands
from timerclient.cli.cli_errors import FAILED, OK
from timerclient.cli.cli_peek import PeekCommands, add_range
from timerclient.cli.cli_watch import add_watch
from timerclient.values.errors import NotFound

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.timer_client import TimerClient
    from timerclient.proto import timer_pb2 as pb
    from timerclient.rows.peeked_messages import PeekedMessage

GROUP: Final = "dead-letters"
"""Group in a topic of dead letters; its unacked messages are the letters."""
REASON_MAX: Final = 80
"""Characters of a reason in a table, except with -o wide."""
_WIDE: Final = frozenset(("FAILED", "DUE", "STATE", "TIMER"))
_HEADINGS: Final = ("TOPIC", "LETTERS", "LEASED", "OLDEST MS", "FROM")


def _header(name: str) -> Callable[[PeekedMessage], str]:
    return lambda letter: letter.headers.get(f"dead-letter-{name}", "")


def _reason(letter: PeekedMessage) -> str:
    reason, detail = _header("reason")(letter), _header("detail")(letter)
    return f"{reason}: {detail}" if detail else reason


_ORIGIN: Final = {
    "ATTEMPTS": _header("attempts"),
    "FROM": lambda letter: f"{_header('topic')(letter)}/{_header('group')(letter)}",
    "TIMER": _header("timer-id"),
}
"""Further columns of a letter: its origin, and the timer, for `timers story`."""


class LetterCommands(Commands):
    """The commands of `deadletters`."""

    def register_deadletters(
        self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the commands to the parser of `deadletters`."""
        add = self.command_adder(parser, common)
        listing = add("list", self._list, "show the topics of dead letters")
        listing.description = (
            "Show the topics of dead letters, the number of their letters, and the groups that "
            "send them. Example: timerctl deadletters list --watch"
        )
        listing.add_argument(
            "topic", metavar="TOPIC", nargs="?", help="topic of the letters; default: all"
        )
        add_watch(listing)
        peek = add("peek", self._peek, "show the present dead letters of a topic")
        peek.set_defaults(group=GROUP)
        add_range(peek)
        redrive = add(
            "redrive", self._redrive, "send dead letters back to their topics, each exactly once"
        )
        which = redrive.add_mutually_exclusive_group()
        which.add_argument(
            "--limit", metavar="N", type=int, help="most letters to send back; default: all"
        )
        which.add_argument(
            "--offset",
            metavar="N",
            dest="offsets",
            type=int,
            action="append",
            help="queue offset of a letter, as `peek` shows it; may be repeated",
        )
        purge = add("purge", self._purge, "delete the present dead letters of a topic")
        purge.description = (
            "Delete the dead letters that a topic has now: its group `dead-letters` moves behind "
            "them. Other groups of the topic still get them. "
            "Example: timerctl deadletters purge orders.billing.dead"
        )
        cli_args.add_yes(purge)
        for command in (peek, redrive, purge):
            command.add_argument(
                "topic", metavar="TOPIC", help="topic of the dead letters: TOPIC.GROUP.dead"
            )

    def _list(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            topics = client.topics()
            wanted = _letters_of(client, args.topic)[0].name if args.topic else None
        sources: dict[str, list[str]] = {}
        for topic in topics:
            for group in topic.groups:
                if group.settings.max_attempts:
                    dead = f"{topic.name}.{group.name}.dead"
                    dead = group.settings.dead_letter_topic.removeprefix("default/") or dead
                    sources.setdefault(dead, []).append(f"{topic.name}/{group.name}")
        rows = [
            (
                *(topic.name, group.unacked, group.leased, group.unacked_lag_ms),
                ", ".join(sources.get(topic.name, [])),
            )
            for topic in topics
            for group in topic.groups
            if group.name == GROUP and wanted in (None, topic.name)
        ]
        names = ("topic", "letters", "leased", "oldest_ms", "from")
        document = {"topics": [dict(zip(names, row, strict=True)) for row in rows]}
        text = cli_args.table(args, _HEADINGS, rows) if rows else "no dead letters"
        self._put(args, document, text)
        return OK

    def _peek(self, args: argparse.Namespace) -> int:
        more = {"REASON": lambda letter: cli_args.shorten(args, _reason(letter), REASON_MAX)}
        with _letters_needed(args.topic):
            return PeekCommands(self._connect, self._put).peek(args, more | _ORIGIN, _WIDE)

    def _redrive(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client, _letters_needed(args.topic):
            count = client.redrive(args.topic, args.limit, offsets=args.offsets)
        least = "" if count.exact else "at least "
        text = f"{least}{count} redriven"
        if count.topics:
            text += ": " + ", ".join(f"{n} to {topic}" for topic, n in sorted(count.topics.items()))
        if count.homeless:
            text += f"; {count.homeless} stay: their headers name no topic that they may go back to"
        document = {
            "redriven": count,
            "exact": count.exact,
            "topics": dict(count.topics),
            "homeless": count.homeless,
        }
        if args.offsets is not None:
            missing = len({*args.offsets}) - count - count.homeless - count.leased
            text += f"; {count.leased} stay: a consumer has them" if count.leased else ""
            text += f"; offsets without a letter: {missing}" if missing and count.exact else ""
            document["leased"] = count.leased
        self._put(args, document, text)
        return OK

    def _purge(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            topic, group = _letters_of(client, args.topic)
            count = group.unacked
            are = "dead letter is" if count == 1 else f"{count} dead letters are"
            so = f"Its {are} deleted, and can't be redriven."
            if count and not cli_args.confirm(args, f"purge {topic.name}", so):
                return FAILED
            if count:  # letters that come from now on stay
                _ = client.seek_group(args.topic, GROUP, offset=topic.queue_end)
        self._put(args, {"topic": topic.name, "purged": count}, f"{count} purged")
        return OK


def _letters_of(client: TimerClient, name: str) -> tuple[pb.TopicStatus, pb.GroupStatus]:
    """Return a topic of dead letters, and the group of its letters.

    Raises:
        NotFound: There is no such topic, or it has no dead letters.
    """
    topic = client.describe_topic(name)
    for group in topic.groups:
        if group.name == GROUP:
            return topic, group
    raise NotFound(_no_letters(name))


@contextmanager
def _letters_needed(topic: str) -> Iterator[None]:
    """Let the error of a topic without the group of dead letters say so."""
    try:
        yield
    except NotFound as error:
        if "no such topic:" not in str(error):
            error.args = (_no_letters(topic),)
        raise


def _no_letters(topic: str) -> str:
    return (
        f"{topic!r} has no dead letters: give the topic of dead letters, such as TOPIC.GROUP.dead"
    )
