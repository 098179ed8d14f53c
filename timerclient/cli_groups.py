"""`timerctl groups …` and `timerctl deadletters …`: how groups deliver, and what they gave up.

groups list [T]
groups describe T G
groups create T G [--start latest] [settings]
groups alter T G settings
deadletters redrive T [--limit N]
"""

import argparse
from typing import Any

from timerclient import cli_args, show
from timerclient.cli_args import Commands
from timerclient.errors import NotFound
from timerclient.groups import GroupOptions
from timerclient.proto import timer_pb2 as pb

OK = 0

HEADINGS = (
    *("TOPIC", "GROUP", "UNACKED", "LEASED", "CONSUMERS", "LEASE MS", "ATTEMPTS"),
    *("BACKOFF MS", "DEAD LETTERS"),
)


class GroupCommands(Commands):
    """The commands of `groups` and of `deadletters`."""

    def register(
        self,
        groups: argparse.ArgumentParser,
        deadletters: argparse.ArgumentParser,
        common: argparse.ArgumentParser,
    ) -> None:
        """Add the commands to the parsers of `groups` and of `deadletters`."""
        add = self.adding(groups, common)
        listing = add("list", self._list, "show groups and how they deliver")
        listing.add_argument("topic", metavar="TOPIC", nargs="?")
        one = add("describe", self._list, "show one group")
        create = add("create", self._create, "make a group, unless it exists")
        create.add_argument("--start", choices=("earliest", "latest"), default="earliest")
        alter = add("alter", self._alter, "change settings of a group, and no others")
        for command in (one, create, alter):
            command.add_argument("topic", metavar="TOPIC")
            command.add_argument("group", metavar="GROUP")
        for command in (create, alter):
            _add_settings(command)
        add = self.adding(deadletters, common)
        redrive = add("redrive", self._redrive, "send them back, each exactly once")
        redrive.add_argument("topic", metavar="TOPIC", help="where they are: TOPIC.GROUP.dead")
        redrive.add_argument("--limit", metavar="N", type=int, help="default: all")

    def _list(self, args: argparse.Namespace) -> int:
        group = getattr(args, "group", None)
        with self._connect(args) as client:
            topics = client.topics()
        found = [
            (topic.name, each)
            for topic in topics
            for each in topic.groups
            if args.topic in (None, topic.name) and group in (None, each.name)
        ]
        if group is not None and not found:
            msg = f"no such group: {group!r} of {args.topic!r}"
            raise NotFound(msg)
        self._show(args, found)
        return OK

    def _create(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            made = client.create_group(args.topic, args.group, start=args.start, **_options(args))
        self._show(args, [(args.topic, made)])
        return OK

    def _alter(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            altered = client.alter_group(args.topic, args.group, **_options(args))
        self._show(args, [(args.topic, altered)])
        return OK

    def _redrive(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            count = client.redrive(args.topic, args.limit)
        self._put(args, {"redriven": count}, f"{count} redriven")
        return OK

    def _show(self, args: argparse.Namespace, groups: list[tuple[str, pb.GroupStatus]]) -> None:
        rows = []
        for topic, group in groups:
            settings = group.settings
            dead = settings.dead_letter_topic or f"{topic}.{group.name}.dead"
            rows.append(
                (
                    *(topic, group.name, group.unacked, group.leased, group.consumers),
                    *(settings.lease_ms, settings.max_attempts or "any"),
                    f"{settings.backoff_ms_min}..{settings.backoff_ms_max}",
                    dead if settings.max_attempts else "",
                )
            )
        document = {"groups": [{"topic": topic} | show.as_dict(each) for topic, each in groups]}
        self._put(args, document, show.table(HEADINGS, rows) if rows else "no groups")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    duration: dict[str, Any] = {"metavar": "DURATION", "type": cli_args.duration}
    parser.add_argument("--lease", help="how long a message is held", **duration)
    parser.add_argument(
        "--max-attempts",
        metavar="N",
        type=int,
        help="a message that failed so often is a dead letter; 0: none is",
    )
    parser.add_argument("--dead-letter-topic", metavar="TOPIC", help="default: TOPIC.GROUP.dead")
    parser.add_argument("--backoff-min", help="wait after a first nack without a delay", **duration)
    parser.add_argument("--backoff-max", help="the longest such wait; each is doubled", **duration)


def _options(args: argparse.Namespace) -> GroupOptions:
    options = GroupOptions()
    for name in GroupOptions.__optional_keys__:
        if (value := getattr(args, name)) is not None:
            options[name] = value  # type: ignore[literal-required]
    return options
