"""`timerctl topics …` and `timerctl namespaces …`.

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

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import Commands
from timerclient.cli.cli_errors import FAILED, OK
from timerclient.cli.cli_policies import value_text
from timerclient.cli.cli_seen import lateness_text, quotas_text
from timerclient.cli.cli_watch import add_watch
from timerclient.rows.message_json import as_dict

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.timer_client import TimerClient
    from timerclient.client.topic_calls import Namespace
    from timerclient.proto import timer_pb2 as pb

HEADINGS = (
    *("TOPIC", "PENDING", "SCHEDULED", "FIRED", "CANCELLED", "READY", "EXPIRED"),
    *("QUEUE", "LAG MS", "NOTE", "GROUP"),
    *("TYPE", "CURSOR", "UNACKED", "LEASED", "CONSUMERS", "WAITS MS", "UNACKED MS"),
)
WIDE_ONLY = frozenset(
    ("SCHEDULED", "CANCELLED", "EXPIRED", "QUEUE", "TYPE", "CURSOR", "WAITS MS", "UNACKED MS")
)
SPARE = ("LEASED", "FIRED", "CONSUMERS", "LAG MS")
ALL = "all"
LATEST = "latest"


class TopicCommands(Commands):
    """The commands of `topics`."""

    def register_topics(
        self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the commands to the parser of `topics`."""
        add = self.command_adder(parser, common, default=self._list)
        add_watch(add("list", self._list, "show all topics and their groups"))
        add_watch(parser)
        describe = add("describe", self._describe, "show one topic and its lateness")
        add_watch(describe)
        create = add("create", self._create, "create a topic, if it does not exist")
        pause = add(
            "pause", self._pause, "pause a topic: its timers do not fire until it is resumed"
        )
        resume = add("resume", self._resume, "resume a topic: its timers fire again")
        resume.add_argument(
            "--catch-up",
            choices=("all", "latest", "drop"),
            help="overdue timers that fire; the others are dropped. Sets the topic's policy "
            "`catch_up`; default: the policy as it is",
        )
        cli_args.add_yes(resume, "drop timers without confirmation")
        delete = add("delete", self._delete, "delete a topic, its timers, messages and groups")
        cli_args.add_yes(delete)
        for command in (describe, create, pause, resume, delete):
            command.add_argument("topic", metavar="TOPIC")

    def _list(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._show(args, client.topics())
        return OK

    def _describe(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            topic = client.describe_topic(args.topic)
        self._show(args, [topic], below=lateness_text(topic))
        return OK

    def _show(
        self, args: argparse.Namespace, topics: Sequence[pb.TopicStatus], below: str = ""
    ) -> None:
        rows = [
            (
                *(t.name, t.pending, t.scheduled, t.fired, t.cancelled, t.ready, t.expired),
                *(f"{t.queue_begin}..{t.queue_end}", t.lag_ms, _note(t)),
                *group,
            )
            for t in topics
            for group in _groups(t)
        ]
        text = cli_args.table(args, HEADINGS, rows, WIDE_ONLY, SPARE) if rows else "no topics"
        text += quotas_text(topics)
        text += f"\n\n{below}" if below else ""
        self._put(args, {"topics": [as_dict(topic) for topic in topics]}, text)

    def _create(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            topic_id = client.create_topic(args.topic)
        document = {"topic": args.topic, "topic_id": str(topic_id)}
        self._put(args, document, f"topic {args.topic} is ready")
        return OK

    def _pause(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._show_change(args, client.pause_topic(args.topic))
        return OK

    def _resume(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            catch_up = args.catch_up
            if catch_up is None and not args.yes:  # the policy decides whether timers are dropped
                catch_up = client.describe_policies(topic=args.topic).effective.catch_up
            if not (args.yes or catch_up == ALL or _confirm_drop(client, args, catch_up)):
                return FAILED
            self._show_change(args, client.resume_topic(args.topic, catch_up=args.catch_up))
        return OK

    def _show_change(self, args: argparse.Namespace, answer: pb.DescribePoliciesResponse) -> None:
        from timerclient.rows import policy_fields

        holds = policy_fields.fields_of(answer.effective)
        document = {"topic": args.topic, "paused": holds["paused"], "catch_up": holds["catch_up"]}
        text = "paused" if holds["paused"] else f"resumed, catch-up: {holds['catch_up']}"
        self._put(args, document, f"{args.topic}: {text}")

    def _delete(self, args: argparse.Namespace) -> int:
        topic = args.topic
        so = "Its pending timers never fire. Its messages and groups are deleted."
        if not cli_args.confirm(args, f"delete topic {topic}", so):
            return FAILED
        with self._connect(args) as client:
            deleted = client.delete_topic(topic)
        document: dict[str, Any] = {"deleted": topic}
        text = f"topic {topic} is deleted"
        if deleted is not None:
            document |= as_dict(deleted)
            timers = output.counted(deleted.pending, "pending timer")
            text += f", with {timers} and {output.counted(deleted.messages, 'message')}"
            for group in deleted.groups:
                text += f"\ngroup {group.name}: {group.unacked} unacked"
        self._put(args, document, text)
        return OK


def _confirm_drop(client: TimerClient, args: argparse.Namespace, catch_up: str) -> bool:
    """Ask whether a topic's held timers may be dropped. Without held timers: return True."""
    held = client.describe_topic(args.topic).held
    so = f"Of {held} overdue timers " + (
        "only the last one fires." if catch_up == LATEST else "none fires."
    )
    return not held or cli_args.confirm(args, f"resume {args.topic} with {catch_up}", so)


class NamespaceCommands(Commands):
    """The commands of `namespaces`."""

    def register_namespaces(
        self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the commands to the parser of `namespaces`."""
        add = self.command_adder(parser, common, self._list)
        add("list", self._list, "show the namespaces that have a topic or a policy")
        one = add("describe", self._describe, "show one namespace")
        delete = add("delete", self._delete, "delete a namespace's topics and policy")
        cli_args.add_yes(delete)
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
            are = "topic is" if len(topics) == 1 else f"{len(topics)} topics are"
            so = f"Its {are} deleted, with timers, messages and groups."
            if not cli_args.confirm(args, f"delete namespace {args.namespace}", so):
                return FAILED
            deleted = client.delete_namespace(args.namespace)
        text = (
            f"namespace {args.namespace} is deleted, with {output.counted(len(deleted), 'topic')}"
        )
        self._put(args, {"deleted": args.namespace, "topics": deleted}, text)
        return OK

    def _show(self, args: argparse.Namespace, found: list[Namespace]) -> None:
        rows = [
            (
                *(each.name, len(each.topics), sum(t.pending for t in each.topics)),
                *(sum(t.ready for t in each.topics), _policy_text(each)),
            )
            for each in found
        ]
        headings = ("NAMESPACE", "TOPICS", "PENDING", "READY", "POLICY")
        document = [
            {"name": each.name, "topics": [t.name for t in each.topics], "policy": each.policy}
            for each in found
        ]
        text = cli_args.table(args, headings, rows) if rows else "no namespaces"
        self._put(args, {"namespaces": document}, text)


def _policy_text(namespace: Namespace) -> str:
    """Return the fields of a namespace's policy, with values as `policies show` prints them."""
    texts = {name: value_text(name, value) for name, value in namespace.policy.items()}
    return output.pairs(texts)


def _note(topic: pb.TopicStatus) -> str:
    """Return a note about a topic's pause; empty: the topic fires."""
    if topic.paused:
        return f"paused, {topic.held} held"
    return f"releasing, {topic.held} held" if topic.releasing else ""


def _groups(topic: pb.TopicStatus) -> list[tuple[Any, ...]]:
    """Return the cells of each group of a topic; without groups, one row of blanks."""
    groups: list[tuple[Any, ...]] = [
        (
            *(g.name, g.type, g.cursor, g.unacked, g.leased, g.consumers),
            *(g.undelivered_lag_ms, g.unacked_lag_ms),
        )
        for g in topic.groups
    ]
    return groups or [("", "", None, None, None, None, None, None)]
