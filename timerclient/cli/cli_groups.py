"""`timerctl groups …`: consumer groups.

groups list [T]
groups describe T G
groups create T G [--type key_shared] [--start latest] [settings]
groups alter T G settings
groups seek T G --offset N | --time ISO | --latest
groups reset T G
groups delete T G [--yes]
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from timerclient.cli import cli_args
from timerclient.cli.cli_args import Commands
from timerclient.cli.cli_errors import FAILED, OK
from timerclient.cli.cli_watch import add_watch
from timerclient.rows.message_json import as_dict
from timerclient.values.errors import NotFound

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.group_calls import GroupOptions
    from timerclient.proto import timer_pb2 as pb

TYPES = ("shared", "key_shared", "exclusive", "failover")

HEADINGS = (
    *("TOPIC", "GROUP", "TYPE", "CURSOR", "UNACKED", "LEASED", "CONSUMERS", "LEASE MS", "ATTEMPTS"),
    *("BACKOFF MS", "DEAD LETTERS"),
)
WIDE_ONLY = frozenset(("CURSOR", "BACKOFF MS", "DEAD LETTERS"))
SPARE = ("LEASE MS", "ATTEMPTS", "LEASED", "TYPE", "CONSUMERS")


class GroupCommands(Commands):
    """The commands of `groups`."""

    def register_groups(
        self, groups: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the commands to the parser of `groups`."""
        add = self.command_adder(groups, common)
        listing = add("list", self._list, "show groups and their settings")
        listing.add_argument(
            "topic", metavar="TOPIC", nargs="?", help="topic of the groups; default: all"
        )
        one = add("describe", self._list, "show one group")
        add_watch(listing)
        add_watch(one)
        create = add("create", self._create, "create a group, if it does not exist")
        create.add_argument(
            "--start",
            choices=("earliest", "latest"),
            default="earliest",
            help="first message of the group: the earliest that the topic keeps, or the next that "
            "fires; default: earliest",
        )
        text = "order of messages with equal keys: docs/consuming.md; default: shared"
        create.add_argument("--type", choices=TYPES, help=text)
        alter = add("alter", self._alter, "change the given settings of a group")
        seek = add("seek", self._seek, "move a group to another message that its topic keeps")
        to = seek.add_mutually_exclusive_group(required=True)
        to.add_argument("--offset", metavar="N", type=int, help="queue offset of the next message")
        to.add_argument(
            "--time",
            metavar="ISO",
            type=cli_args.aware_time,
            help="the first message that fired then or later",
        )
        to.add_argument(
            "--latest",
            dest="start",
            action="store_const",
            const="latest",
            help="only messages that fire from now on",
        )
        seek.set_defaults(action="seek")
        text = "move a group to the earliest message that its topic keeps"
        reset = add("reset", self._seek, text)
        reset.set_defaults(action="reset", offset=None, time=None, start="earliest")
        delete = add("delete", self._delete, "delete a group; its consumers end with NOT_FOUND")
        for command in (seek, reset, delete):
            cli_args.add_yes(command)
        for command in (one, create, alter, seek, reset, delete):
            command.add_argument("topic", metavar="TOPIC")
            command.add_argument("group", metavar="GROUP")
        for command in (create, alter):
            _add_settings(command)

    def _list(self, args: argparse.Namespace) -> int:
        group = getattr(args, "group", None)
        with self._connect(args) as client:
            topics = client.topics() if args.topic is None else [client.describe_topic(args.topic)]
        found = [
            (topic.name, each)
            for topic in topics
            for each in topic.groups
            if group in (None, each.name)
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

    def _seek(self, args: argparse.Namespace) -> int:
        change = f"{args.action} group {args.group} of {args.topic}"
        so = "The group's acks are forgotten. Messages before that offset are not delivered."
        if not cli_args.confirm(args, change, so):
            return FAILED
        with self._connect(args) as client:
            sought = client.seek_group(
                args.topic, args.group, offset=args.offset, time=args.time, start=args.start
            )
        self._show(args, [(args.topic, sought)])
        return OK

    def _delete(self, args: argparse.Namespace) -> int:
        name = f"group {args.group} of {args.topic}"
        so = "Its unacked messages are not delivered."
        if not cli_args.confirm(args, f"delete {name}", so):
            return FAILED
        with self._connect(args) as client:
            client.delete_group(args.topic, args.group)
        self._put(args, {"deleted": args.group}, f"{name} is deleted")
        return OK

    def _show(self, args: argparse.Namespace, groups: list[tuple[str, pb.GroupStatus]]) -> None:
        rows = []
        for topic, group in groups:
            settings = group.settings
            dead = settings.dead_letter_topic or f"{topic}.{group.name}.dead"
            rows.append(
                (
                    *(topic, group.name, group.type, group.cursor),
                    *(group.unacked, group.leased, group.consumers),
                    *(settings.lease_ms, settings.max_attempts or "any"),
                    f"{settings.backoff_ms_min}..{settings.backoff_ms_max}",
                    dead if settings.max_attempts else "",
                )
            )
        document = {"groups": [{"topic": topic} | as_dict(each) for topic, each in groups]}
        text = cli_args.table(args, HEADINGS, rows, WIDE_ONLY, SPARE) if rows else "no groups"
        self._put(args, document, text)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    duration: dict[str, Any] = {"metavar": "DURATION", "type": cli_args.duration}
    lease = duration | {"type": cli_args.positive_duration}
    parser.add_argument("--lease", help="duration of a lease", **lease)
    parser.add_argument(
        "--max-attempts",
        metavar="N",
        type=int,
        help="failures after which a message becomes a dead letter; 0: no limit",
    )
    parser.add_argument(
        "--max-in-flight",
        metavar="N",
        type=int,
        help="most messages that all consumers together hold; 0: no limit",
    )
    parser.add_argument("--dead-letter-topic", metavar="TOPIC", help="default: TOPIC.GROUP.dead")
    parser.add_argument(
        "--backoff-min", help="delay after the first nack that has none of its own", **duration
    )
    parser.add_argument(
        "--backoff-max",
        help="longest such delay; it doubles with each failure; 0: always --backoff-min",
        **duration,
    )


def _options(args: argparse.Namespace) -> GroupOptions:
    from timerclient.client.group_calls import GroupOptions

    options = GroupOptions()
    for name in GroupOptions.__optional_keys__:
        if (value := getattr(args, name, None)) is not None:
            options[name] = value  # type: ignore[literal-required]
    return options
