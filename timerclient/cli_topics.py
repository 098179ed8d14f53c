"""`timerctl topics …`: what there is; pauses, and the end of one. `timerctl namespaces …`.

topics [TOPIC]
topics list
topics describe TOPIC
topics create TOPIC
topics pause TOPIC
topics resume TOPIC [--catch-up all|latest|drop] [--yes]
topics delete TOPIC [--yes]
namespaces list
namespaces describe NAMESPACE
namespaces delete NAMESPACE [--yes]
"""

import argparse
from typing import Any

from timerclient import cli_args, policies, show
from timerclient.cli_args import Commands
from timerclient.cli_seen import lateness_text, quotas_text
from timerclient.errors import InvalidRequest
from timerclient.proto import timer_pb2 as pb
from timerclient.sync import TimerClient
from timerclient.topics import Namespace

OK = 0
FAILED = 1
WORDS = ("describe", "create", "pause", "resume", "delete")
"""Which want a topic's name; a topic of such a name is shown by `describe`."""
ALL = "all"
LATEST = "latest"


class TopicCommands(Commands):
    """The commands of `topics`."""

    def register(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments to the parser of `topics`."""
        parser.add_argument(
            "words",
            metavar="TOPIC",
            nargs="*",
            help="only this one, and how late, as `describe TOPIC`; `list`: all; `create TOPIC`; "
            "`pause TOPIC`: let nothing fire; `resume TOPIC`; "
            "`delete TOPIC`: let it be gone with all it has",
        )
        parser.add_argument(
            "--catch-up",
            choices=("all", "latest", "drop"),
            help="with resume: which of the overdue timers fire, after later pauses, too; "
            "default: as the policies say",
        )
        parser.add_argument(
            "--yes", action="store_true", help="with delete, or where a resume drops: don't ask"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Do what the words say."""
        if args.catch_up is not None and args.words[:1] != ["resume"]:
            raise InvalidRequest.of("--catch-up", args.catch_up, "goes with resume")
        match args.words:
            case [] | ["list"]:
                return self._show(args)
            case ["describe", topic]:
                return self._show(args, topic)
            case [topic] if topic not in WORDS:
                return self._show(args, topic)
            case ["create", topic]:
                return self._create(args, topic)
            case ["pause" | "resume" as word, topic]:
                return self._change(args, topic, paused=word == "pause")
            case ["delete", topic]:
                return self._delete(args, topic)
            case _:
                limit = "TOPIC; list; or describe, create, pause, resume or delete and TOPIC"
                raise InvalidRequest.of("topics", " ".join(args.words), limit)

    def _show(self, args: argparse.Namespace, name: str | None = None) -> int:
        with self._connect(args) as client:
            topics = client.topics() if name is None else [client.describe_topic(name)]
        headings = (
            *("TOPIC", "PENDING", "SCHEDULED", "FIRED", "CANCELLED", "READY", "EXPIRED"),
            *("QUEUE", "LAG MS", "NOTE", "GROUP"),
            *("TYPE", "CURSOR", "UNACKED", "LEASED", "CONSUMERS", "WAITS MS", "UNACKED MS"),
        )
        rows = [
            (
                *(t.name, t.pending, t.scheduled, t.fired, t.cancelled, t.ready, t.expired),
                *(f"{t.queue_begin}..{t.queue_end}", t.lag_ms, _note(t)),
                *group,
            )
            for t in topics
            for group in _groups(t)
        ]
        document = {"topics": [show.as_dict(topic) for topic in topics]}
        text = show.table(headings, rows) if rows else "no topics"
        text += quotas_text(topics)
        if name is not None:
            text += f"\n\n{lateness_text(topics[0])}"
        self._put(args, document, text.rstrip())
        return OK

    def _create(self, args: argparse.Namespace, topic: str) -> int:
        with self._connect(args) as client:
            topic_id = client.create_topic(topic)
        self._put(args, {"topic": topic, "topic_id": topic_id}, f"topic {topic} is there")
        return OK

    def _change(self, args: argparse.Namespace, topic: str, *, paused: bool) -> int:
        with self._connect(args) as client:
            if paused:
                answer = client.pause_topic(topic)
            else:
                catch_up = args.catch_up
                if catch_up is None and not args.yes:  # then the policies say whether it drops
                    catch_up = client.describe_policies(topic=topic).effective.catch_up
                if not (args.yes or catch_up == ALL or _may_drop(client, topic, catch_up)):
                    return FAILED
                answer = client.resume_topic(topic, catch_up=args.catch_up)
        holds = policies.said(answer.effective)
        document = {"topic": topic, "paused": holds["paused"], "catch_up": holds["catch_up"]}
        text = "paused" if holds["paused"] else f"goes on, catching up with: {holds['catch_up']}"
        self._put(args, document, f"{topic}: {text}")
        return OK

    def _delete(self, args: argparse.Namespace, topic: str) -> int:
        so = "Its pending timers never fire; its messages and groups are gone."
        if not (args.yes or cli_args.agreed(f"delete topic {topic}", so)):
            return FAILED
        with self._connect(args) as client:
            gone = client.delete_topic(topic)
        document: dict[str, Any] = {"deleted": topic}
        text = f"topic {topic} is deleted"
        if gone is not None:
            document |= show.as_dict(gone)
            text += f", with {gone.pending} pending timers and {gone.messages} messages"
        for group in gone.groups if gone is not None else ():
            text += f"\ngroup {group.name}: {group.unacked} unacked"
        self._put(args, document, text)
        return OK


def _may_drop(client: TimerClient, topic: str, catch_up: str) -> bool:
    """Ask whether what a topic holds may be dropped; nobody is asked where it holds nothing."""
    held = client.describe_topic(topic).held
    so = f"Of {held} that are overdue " + (
        "the last one fires." if catch_up == LATEST else "none fires."
    )
    return not held or cli_args.agreed(f"resume {topic} with {catch_up}", so)


class NamespaceCommands(Commands):
    """The commands of `namespaces`."""

    def register(self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
        """Add the commands to the parser of `namespaces`."""
        add = self.adding(parser, common)
        add("list", self._list, "show those that have a topic or a policy")
        one = add("describe", self._describe, "show one")
        delete = add("delete", self._delete, "delete all its topics, and its policy")
        delete.add_argument("--yes", action="store_true", help="don't ask")
        for command in (one, delete):
            command.add_argument("namespace", metavar="NAMESPACE")

    def _list(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._show(args, client.namespaces())
        return OK

    def _describe(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._show(args, [client.describe_namespace(args.namespace)])
        return OK

    def _delete(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            topics = client.describe_namespace(args.namespace).topics
            so = f"Its {len(topics)} topics are gone, with their timers, messages and groups."
            if not (args.yes or cli_args.agreed(f"delete namespace {args.namespace}", so)):
                return FAILED
            gone = client.delete_namespace(args.namespace)
        text = f"namespace {args.namespace} is deleted, with {len(gone)} topics"
        self._put(args, {"deleted": args.namespace, "topics": gone}, text)
        return OK

    def _show(self, args: argparse.Namespace, found: list[Namespace]) -> None:
        rows = [
            (
                *(each.name, len(each.topics), sum(t.pending for t in each.topics)),
                *(sum(t.ready for t in each.topics), show.pairs(each.policy)),
            )
            for each in found
        ]
        headings = ("NAMESPACE", "TOPICS", "PENDING", "READY", "SAYS")
        document = [
            {"name": each.name, "topics": [t.name for t in each.topics], "policy": each.policy}
            for each in found
        ]
        text = show.table(headings, rows) if rows else "no namespaces"
        self._put(args, {"namespaces": document}, text)


def _note(topic: pb.TopicStatus) -> str:
    """Return whether a topic fires, in a word."""
    if topic.paused:
        return f"paused, {topic.held} held"
    return f"releasing, {topic.held} held" if topic.releasing else ""


def _groups(topic: pb.TopicStatus) -> list[tuple[Any, ...]]:
    """Return the cells of each group of a topic; one row of blanks if it has none."""
    groups: list[tuple[Any, ...]] = [
        (
            *(g.name, g.type, g.cursor, g.unacked, g.leased, g.consumers),
            *(g.undelivered_lag_ms, g.unacked_lag_ms),
        )
        for g in topic.groups
    ]
    return groups or [("", "", None, None, None, None, None, None)]
