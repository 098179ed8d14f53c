"""`timerctl check`: one verdict on the cluster, for monitoring systems and for people.

    status, checkpoints, topics --findings_of--> findings --> text, Nagios, Prometheus, JSON

    check [--topic TOPIC]... [--lag-warning DURATION] [--lag-critical DURATION]
          [--behind ENTRIES] [--format text|nagios|prometheus|json]

The exit code is that of a Nagios plug-in: 0 ok, 1 warning, 2 critical, 3 unknown. A wrong command
line exits with 2, as in every command of timerctl.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import output
from timerclient.cli.cli_args import Commands, duration, duration_text
from timerclient.cli.cli_nodes import (
    HOW_TO_VOTE,
    SETTLE_WAIT,
    is_in_doubt,
    lag_of,
    rejects_new_timers,
    too_old_notes,
    trouble_of_leader,
    unlike_settings_notes,
    wait_for_status,
    why_absent,
    why_low,
)
from timerclient.cli.cli_watch import add_watch
from timerclient.cli.colours import colours
from timerclient.values.errors import InvalidRequest, NotFound, TimerError, Unavailable

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.timer_client import TimerClient
    from timerclient.proto import timer_pb2 as pb

EXIT_CODES_OF_CHECK: Final = """\
exit codes, as of a Nagios plug-in:
  0  ok
  1  warning: the cluster serves, and the loss of one more node or disk may end that
  2  critical: the cluster, or a topic, does not do its work; no node can appoint a leader; or a
     node of `peers` without a vote does not answer, and one more loss leaves no majority of
     `peers`; or the command line is wrong
  3  unknown: the check itself failed
"""
BEHIND_MAX: Final = 10_000
"""Log entries that a node may be behind, by default."""
RESERVES_MIN: Final = 2
"""Free space below this multiple of the reserve is a warning."""
EXPIRES_WITHIN: Final = timedelta(days=14)
"""A certificate that expires sooner is a warning; as the alert TimerCertificateExpires."""


class Level(enum.IntEnum):
    """The verdict of one finding, and of the check. Its value is the exit code."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """A row of the table in docs/runbook.md, such as leader or disk."""
    of: str
    """The node, topic or topic/group; empty: the cluster."""
    level: Level
    text: str
    value: float | None = None
    """The measured figure: nodes, entries, bytes or seconds. None: there is no figure."""


def worst_level(findings: Iterable[Finding]) -> Level:
    """Return the level of a check: CRITICAL, else UNKNOWN, else WARNING, else OK."""
    order = (Level.OK, Level.WARNING, Level.UNKNOWN, Level.CRITICAL)
    return max((each.level for each in findings), key=order.index, default=Level.UNKNOWN)


def findings_of_nodes(
    status: pb.GetStatusResponse,
    members: pb.ListMembersResponse,
    checkpoint: pb.GetCheckpointResponse,
    behind_max: int,
) -> Iterator[Finding]:
    """Yield what a status, the voters and the checkpoints show. `behind_max`: log entries."""
    trouble = trouble_of_leader(status)
    leads = trouble or f"{status.leader} leads epoch {status.epoch}"
    yield Finding("leader", "", Level.CRITICAL if trouble else Level.OK, leads)
    named = status.controller
    appoints = f"{named} appoints leaders" if named else "none; no new leader can be appointed"
    yield Finding("controller", "", Level.OK if named else Level.CRITICAL, appoints)
    there = [node for node in status.nodes if node.reachable]
    absent = [node for node in status.nodes if not node.reachable]
    majority = len(status.nodes) // 2 + 1
    level = Level.WARNING if absent else Level.OK
    yield Finding(
        "nodes",
        "",
        level if len(there) >= majority else Level.CRITICAL,
        f"{len(there)} of {len(status.nodes)} answer"
        + (f"; no answer: {', '.join(map(_absent_text, absent))}" if absent else ""),
        len(there),
    )
    old, feature_level = too_old_notes(status), max(1, status.feature_level)
    text = "; ".join(old.values()) or f"feature level {feature_level}"
    yield Finding("level", "", Level.WARNING if old else Level.OK, text, feature_level)
    for text in unlike_settings_notes(status):
        yield Finding("settings", "", Level.WARNING, text)
    rejects = rejects_new_timers(status, members)
    for node in there:
        yield _disk_finding(node, rejects=rejects)
        if node.tls_not_after_ms:
            yield _certificate_finding(node)
        if node.damage:
            yield Finding("files", node.name, Level.CRITICAL, f"damaged: {node.damage}")
        elif node.unsure:
            text = "may have forgotten what it promised, and does not vote"
            yield Finding("files", node.name, Level.WARNING, text)
        if node.memory_high and node.serving:
            text = "more memory than limits.memory_bytes_max: new timers are rejected"
            yield Finding("memory", node.name, Level.CRITICAL, text)
        for text in node.warnings:
            yield Finding("node", node.name, Level.WARNING, text)
    for node in absent:
        if re.search("certificate (has )?expired", node.error):
            yield Finding("certificate", node.name, Level.CRITICAL, node.error)
    for at in checkpoint.nodes:
        if at.reachable:
            lag = lag_of(at, checkpoint)
            level = Level.WARNING if (lag or 0) > behind_max else Level.OK
            text = f"{lag} entries behind" if lag is not None else "unknown: no leader answers"
            yield Finding("behind", at.node, level, text, lag)
    yield _state_finding(checkpoint.nodes)


def findings_of_votes(
    status: pb.GetStatusResponse, members: pb.ListMembersResponse
) -> Iterator[Finding]:
    """Yield the nodes without a vote: learners, replicas of another log, and nodes removed.

    The controller needs the Raft votes of a majority of `peers`, voters of the log or not. So a
    node without a vote that does not answer is critical if one more loss leaves no such majority.
    """
    voters = {each.replica_id for each in members.members if each.voter}
    names = {each.name for each in members.members if each.voter}  # empty: of an unknown one
    electing = sum(node.reachable and not node.withholds_votes for node in status.nodes)
    spare = electing - (len(status.nodes) // 2 + 1)
    for node in status.nodes:
        if node.reachable and node.replica_id not in voters:
            text = f"a {node.role} without a vote; {HOW_TO_VOTE}"
            yield Finding("votes", node.name, Level.WARNING, text)
        elif not node.reachable and names.isdisjoint((node.name, "")):
            text = "in peers, no vote, does not answer: start it, or remove it from peers"
            text += "" if spare > 0 else "; with one more lost, no leader can be appointed"
            level = Level.WARNING if spare > 0 else Level.CRITICAL
            yield Finding("votes", node.name, level, text)


def _absent_text(node: pb.NodeStatus) -> str:
    return f"{node.name} ({why_absent(node)})" if node.error else node.name


def _disk_finding(node: pb.NodeStatus, *, rejects: bool) -> Finding:
    """Judge a node's free space. `rejects`: new timers are rejected, as some disks are low."""
    free, reserve = node.disk_free_bytes, node.disk_reserve_bytes
    level = Level.WARNING if free < RESERVES_MIN * reserve else Level.OK
    text = f"{free >> 20} MiB free, reserve {reserve >> 20} MiB"
    text += f"; low: {why_low(node)}" if node.disk_low and free >= reserve else ""
    level = Level.CRITICAL if node.disk_low and rejects else level
    return Finding("disk", node.name, level, text, free)


def _certificate_finding(node: pb.NodeStatus) -> Finding:
    """Judge the first end of a node's certificates and authorities, on the node's own clock."""
    left = timedelta(milliseconds=node.tls_not_after_ms - node.clock_ms)
    if left <= timedelta(0):
        at = output.instant(node.tls_not_after_ms)
        level, text = (
            Level.CRITICAL,
            f"a certificate or an authority has expired, the first at {at}",
        )
    else:
        level = Level.WARNING if left < EXPIRES_WITHIN else Level.OK
        text = f"{left / timedelta(days=1):.1f} days until the first one expires"
    return Finding("certificate", node.name, level, text, left.total_seconds())


def _state_finding(nodes: Sequence[pb.NodeCheckpoint]) -> Finding:
    """Compare the digests of nodes that are at the same checkpoint."""
    digests: dict[int, list[str]] = {}
    for node in nodes:
        if node.reachable and node.digest:
            digests.setdefault(node.checkpoint_index, []).append(node.digest)
    split = [index for index, found in digests.items() if len({*found}) > 1]
    if split:
        text = f"nodes differ in their state at the checkpoint {split[0]}"
        return Finding("state", "", Level.CRITICAL, text)
    text = "nodes at the same checkpoint have the same state"
    if max(map(len, digests.values()), default=0) < 2:
        text = "not compared: no two of the nodes that answer are at the same checkpoint"
    return Finding("state", "", Level.OK, text)


def findings_of_topic(
    topic: pb.TopicStatus, warning: timedelta, critical: timedelta
) -> Iterator[Finding]:
    """Yield a topic's overdue timers, and its groups' oldest unacked messages."""

    def late(check: str, of: str, ms: int, what: str) -> Finding:
        age = timedelta(milliseconds=ms)
        level = Level.WARNING if age >= warning else Level.OK
        text = f"the oldest {what} is {duration_text(age)} old" if ms else f"no {what}"
        level = Level.CRITICAL if age >= critical else level
        return Finding(check, of, level, text, ms / 1000)

    if topic.paused:
        text = (
            f"paused: {topic.held} overdue timers wait" if topic.held else "paused: nothing fires"
        )
        yield Finding("overdue", topic.name, Level.WARNING if topic.held else Level.OK, text)
    else:
        yield late("overdue", topic.name, topic.lag_ms, "overdue timer")
    for group in topic.groups:
        of = f"{topic.name}/{group.name}"
        yield late("unacked", of, group.unacked_lag_ms, "unacked message")


class CheckCommands(Commands):
    """The command `check`."""

    def register_check(self, check: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `check`."""
        check.set_defaults(run=self.check)
        check.epilog = EXIT_CODES_OF_CHECK
        check.add_argument(
            "--topic",
            metavar="TOPIC",
            action="append",
            default=[],
            help="also check its overdue timers and its groups' unacked messages; may be repeated",
        )
        for word, at in (("warning", timedelta(seconds=10)), ("critical", timedelta(minutes=1))):
            check.add_argument(
                f"--lag-{word}",
                metavar="DURATION",
                type=duration,
                default=at,
                help=f"age of a topic's oldest overdue timer or unacked message for {word}; "
                f"default: {duration_text(at)}",
            )
        check.add_argument(
            "--behind",
            metavar="ENTRIES",
            type=int,
            default=BEHIND_MAX,
            help=f"log entries that a node may be behind; default: {BEHIND_MAX}",
        )
        check.add_argument(
            "--format",
            choices=("text", "nagios", "prometheus", "json"),
            default="text",
            help="nagios: one line; prometheus: for a node exporter's textfile; json: as -o json; "
            "default: text",
        )
        add_watch(check)

    def check(self, args: argparse.Namespace) -> int:
        """Judge the cluster; see the module."""
        if args.behind < 0:
            raise InvalidRequest.of("--behind", args.behind, "must not be negative")
        if args.format == "json":
            args.output = "json"
        findings = [*self._findings(args)]
        level = worst_level(findings)
        forms: dict[str, Callable[[Sequence[Finding]], str]] = {
            "text": partial(_text, args),
            "nagios": _nagios,
            "prometheus": _prometheus,
            "json": lambda _: "",
        }
        document: dict[str, Any] = {
            "level": level.name,
            "findings": [
                {**dataclasses.asdict(each), "of": each.of or None, "level": each.level.name}
                for each in findings
            ],
        }
        self._put(args, document, forms[args.format](findings))
        return int(level)

    def _findings(self, args: argparse.Namespace) -> Iterator[Finding]:
        try:
            with self._connect(args) as client:
                status, members = _status_of(client), client.members()
                checkpoint = client.checkpoint()
                yield from findings_of_nodes(status, members, checkpoint, args.behind)
                yield from findings_of_votes(status, members)
                for name in args.topic:
                    try:
                        topic = client.describe_topic(name)
                    except NotFound:
                        yield Finding("overdue", name, Level.UNKNOWN, "there is no such topic")
                    else:
                        yield from findings_of_topic(topic, args.lag_warning, args.lag_critical)
        except InvalidRequest:  # of the command line: no finding about the cluster
            raise
        except Unavailable as error:
            yield Finding("leader", "", Level.CRITICAL, str(error))
        except TimerError as error:
            yield Finding("leader", "", Level.UNKNOWN, str(error))


def _status_of(client: TimerClient) -> pb.GetStatusResponse:
    """Return the status, after an election or a search for the leader that is in progress.

    Raises:
        TimerError: There is no status.
    """

    def is_settled(found: pb.GetStatusResponse) -> bool:
        is_electing = not found.controller and not trouble_of_leader(found)
        return not (is_electing or is_in_doubt(found))

    return wait_for_status(client, SETTLE_WAIT, is_settled)


def _text(args: argparse.Namespace, findings: Sequence[Finding]) -> str:
    headings = ("LEVEL", "CHECK", "OF", "RESULT")
    rows = [(each.level.name, each.check, each.of, each.text) for each in findings]
    return output.table(headings, rows, colours=colours(args, headings, rows))


_UNITS: Final = {"disk": "B", "certificate": "s", "overdue": "s", "unacked": "s"}
"""Units of figures in Nagios' performance data, by check. The other checks count."""


def _nagios(findings: Sequence[Finding]) -> str:
    level = worst_level(findings)
    bad = [f"{each.check} {each.of}".strip() + f": {each.text}" for each in findings if each.level]
    counts = Counter(each.level.name for each in findings)
    text = "; ".join(bad) or f"{counts['OK']} checks"
    figures = " ".join(
        f"'{each.check} {each.of}'".replace(" '", "'")
        + f"={each.value:.3f}".rstrip("0").rstrip(".")
        + _UNITS.get(each.check, "")
        for each in findings
        if each.value is not None
    )
    return f"TIMER {level.name}: {text} | {figures}".replace("\n", " ")


def _prometheus(findings: Sequence[Finding]) -> str:
    lines = [
        "# HELP timer_check_level 0 ok, 1 warning, 2 critical, 3 unknown",
        "# TYPE timer_check_level gauge",
    ]
    lines += [f"timer_check_level{_labels(each)} {int(each.level)}" for each in findings]
    lines += [
        "# HELP timer_check_value the figure of a check: nodes, entries, bytes or seconds",
        "# TYPE timer_check_value gauge",
    ]
    lines += [
        f"timer_check_value{_labels(each)} {each.value:g}"
        for each in findings
        if each.value is not None
    ]
    return "\n".join(lines)


def _labels(finding: Finding) -> str:
    of = finding.of.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{check="{finding.check}",of="{of}"}}'
