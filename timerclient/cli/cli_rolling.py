"""`timerctl rolling-restart`: every node restarts, one after the other, while the cluster serves.

    healthy? --no--> refuse
       |yes
    next node: learners first, then followers, the leader last
       --> drained --> the operator's command
       --> the node has a new process, serves and has caught up --> next
           (a learner: has a new process)

    rolling-restart --restart-with 'CMD {node}' [--since TIME] [--dry-run] [--yes]

A node restarts only while the leader serves, all voters answer, no voter lags or withholds its
vote, and no other node is drained. So at most one voter is ever down, also if two commands run at
the same time: each drains its node before it looks at the others. A drain has a holder, so no other
command drains the same node. A node that neither answers nor votes at the start is left out, as one
that was stopped after `members remove`. The others must go on answering.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import Commands, UsageError, duration
from timerclient.cli.cli_errors import FAILED
from timerclient.cli.cli_nodes import trouble_of_leader
from timerclient.values.errors import AlreadyExists, TimerError, Unavailable

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.timer_client import TimerClient
    from timerclient.proto import timer_pb2 as pb

LAG_MAX: Final = 1_000
"""Log entries that a healthy node may be behind."""
VOTERS_MIN: Final = 3
"""With fewer voters no majority is left while one restarts."""
CHECK_INTERVAL_S: Final = 0.25
STDERR: Final = 2
"""File of the output of an operator's command: stdout is for the result."""


def troubles_of(
    status: pb.GetStatusResponse, members: pb.ListMembersResponse, mine: str = ""
) -> Iterator[str]:
    """Yield the reasons why no node may restart now; none: the cluster is healthy.

    `mine`: the node that this command has drained.
    """
    voters = [each for each in members.members if each.voter]
    if trouble := trouble_of_leader(status):
        yield trouble
    if len(voters) < VOTERS_MIN:
        count = "1 voter" if len(voters) == 1 else f"{len(voters)} voters"
        yield f"{count}: with fewer than {VOTERS_MIN} a restart ends the service"
    end = max((node.commit_index for node in status.nodes), default=0)
    voting = {voter.name for voter in voters}
    for node in (each for each in status.nodes if each.reachable and each.name in voting):
        if node.damage:
            yield f"{node.name} has a damaged file: {node.damage}"
        elif node.unsure or node.withholds_votes:
            yield f"{node.name} does not vote yet"
        elif end - node.applied_index > LAG_MAX:
            behind = end - node.applied_index
            yield f"{node.name} is {behind} entries behind; limit: {LAG_MAX}"
    yield from drained_others(status, mine)
    nodes = {node.name: node for node in status.nodes}
    for voter in voters:
        if voter.name not in nodes:
            yield f"the voter {voter.name} is in no node's status"
        elif nodes[voter.name].role == "learner":
            yield f"{voter.name} is a learner now: timerctl members replace {voter.name}"
        elif voter.role == "unreachable" or not nodes[voter.name].reachable:
            yield f"{voter.name} does not answer: {nodes[voter.name].error or 'it did before'}"
        elif voter.lag_entries > LAG_MAX:
            yield f"{voter.name} is {voter.lag_entries} entries behind; limit: {LAG_MAX}"


def drained_others(status: pb.GetStatusResponse, mine: str) -> Iterator[str]:
    """Yield a reason for each drained node except `mine`."""
    for name in (node.name for node in status.nodes if node.drained and node.name != mine):
        yield (
            f"{name} is drained, perhaps by another rolling restart; "
            f"otherwise: timerctl drain {name} --undo"
        )


def order_of(status: pb.GetStatusResponse) -> list[str]:
    """Return the names of the nodes in the order of their restarts.

    Learners come first: nodes that have restarted may not have them in `peers` any more. The leader
    is the last.
    """
    nodes = [node for node in status.nodes if node.reachable]
    nodes.sort(key=lambda node: (node.name == status.leader, node.role != "learner", node.name))
    return [node.name for node in nodes]


class RestartError(TimerError):
    """The rolling restart stopped, or was refused. No node was touched after that."""

    outcome_known = False


@dataclass(frozen=True, slots=True)
class RestartSequence:
    """One rolling restart, node by node."""

    client: TimerClient
    restart: Callable[[str], None]
    """Restarts a node by its name. Raises RestartError."""
    on_progress: Callable[[str], None]
    """Takes a line about the progress."""
    node_timeout_s: float = 300.0
    """Limit for each wait: for health before a restart, and for the node after it."""
    _must_answer: list[str] = field(default_factory=list, init=False)
    """Nodes that must go on answering, also without a vote."""
    _holder: str = field(default_factory=partial(secrets.token_hex, 16), init=False)
    """Of the drains of this command."""

    def run(self, names: Sequence[str]) -> None:
        """Restart the nodes in this order.

        Raises:
            RestartError: a node was not healthy in time, or its command failed.
        """
        self._must_answer.extend(names)
        for number, name in enumerate(names):
            try:
                self._restart_one(name)
            except TimerError as error:
                error.done = number
                raise

    def _restart_one(self, name: str) -> None:
        self._wait_healthy(f"before the restart of {name}")
        try:
            self._drain(name)
            self.on_progress(f"{name}: restart")
            began_s = time.monotonic()
            try:
                self.restart(name)
                self._wait_restarted(name, began_s)
            except (KeyboardInterrupt, SystemExit):
                self.on_progress(f"{name} may be down")
                raise
        except BaseException:
            with suppress(TimerError):
                self.client.drain_node(name, undo=True, by=self._holder)
            raise
        took_s = time.monotonic() - began_s
        votes = any(each.voter for each in self.client.members().members if each.name == name)
        state = "serves and has caught up" if votes else "runs again, without a vote"
        self.on_progress(f"{name}: {state}, {took_s:.1f} s")

    def _drain(self, name: str) -> None:
        """Drain a node, which gives the leadership away. Other commands see that, and stop."""
        moved = self._drain_after_election(name)
        status = self.client.status()
        if others := [*drained_others(status, name)]:
            raise RestartError("; ".join(others))
        if moved:
            self.on_progress(f"{name}: leadership transferred to {status.leader or 'another node'}")
        self._wait_healthy(f"after the drain of {name}", name)
        if not any(node.drained for node in self.client.status().nodes if node.name == name):
            raise RestartError(f"{name} is not drained any more: did another command restart it?")

    def _drain_after_election(self, name: str) -> bool:
        """Drain a node, if need be after an election is over; return whether the node led."""
        until_s = time.monotonic() + self.node_timeout_s
        while True:
            try:
                return self.client.drain_node(name, by=self._holder).transferred
            except AlreadyExists as error:
                raise RestartError(str(error)) from None
            except Unavailable:
                if time.monotonic() > until_s:
                    raise
            time.sleep(CHECK_INTERVAL_S)

    def _wait_healthy(self, when: str, mine: str = "") -> None:
        until_s = time.monotonic() + self.node_timeout_s
        while troubles := self._troubles(mine):
            if time.monotonic() > until_s:
                raise RestartError(f"{when}: {'; '.join(troubles)}")
            time.sleep(CHECK_INTERVAL_S)

    def _troubles(self, mine: str) -> list[str]:
        try:
            status, members = self.client.status(), self.client.members()
            silent = (n for n in status.nodes if n.name in self._must_answer and not n.reachable)
            return [*troubles_of(status, members, mine)] or [
                f"{node.name} does not answer: {node.error}" for node in silent
            ]
        except TimerError as error:
            return [str(error)]

    def _wait_restarted(self, name: str, began_s: float) -> None:
        """Wait until a node has a process from after `began_s`, and the cluster is healthy."""
        until_s = time.monotonic() + self.node_timeout_s
        while not self._is_new(name, began_s):
            if time.monotonic() > until_s:
                raise RestartError(f"{name} has no new process: did the command restart it?")
            time.sleep(CHECK_INTERVAL_S)
        self._wait_healthy(f"after the restart of {name}")

    def _is_new(self, name: str, began_s: float) -> bool:
        try:
            nodes = self.client.status().nodes
        except TimerError:
            return False
        lives_ms = (time.monotonic() - began_s) * 1_000
        return any(
            node.name == name and node.reachable and node.uptime_ms <= lives_ms for node in nodes
        )


def command_of(template: str, timeout_s: float) -> Callable[[str], None]:
    """Return a function that runs an operator's command for a node, without a shell.

    Args:
        template: Words as in a shell; each `{node}` in them becomes the node's name.
        timeout_s: Limit for one run, in seconds.

    Raises:
        UsageError: The template has no {node}, or an unfinished quote.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise UsageError(f"--restart-with = {template!r}: {error}") from None
    if not any("{node}" in word for word in words):
        raise UsageError(f"--restart-with = {template!r}: must contain {{node}}")

    def run(name: str) -> None:
        command = [word.replace("{node}", name) for word in words]
        shown = shlex.join(command)
        try:
            ended = subprocess.run(  # noqa: S603 -- the operator's own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RestartError(f"{shown}: did not end within {timeout_s:g} s") from None
        except OSError as error:
            raise RestartError(f"{shown}: {error.strerror}") from None
        if ended.returncode:
            raise RestartError(f"{shown}: exit status {ended.returncode}")

    return run


class RollingCommands(Commands):
    """The command `rolling-restart`."""

    def register_rolling_restart(self, parser: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `rolling-restart`."""
        parser.set_defaults(run=self.run)
        parser.add_argument(
            "--restart-with",
            metavar="CMD",
            required=True,
            help="command that restarts one node; {node} becomes its name. It runs without a shell",
        )
        parser.add_argument(
            "--since",
            metavar="TIME",
            type=cli_args.aware_time,
            help="leave out nodes that started after TIME (ISO 8601): resume an earlier run",
        )
        parser.add_argument(
            "--node-timeout",
            metavar="DURATION",
            type=duration,
            default=timedelta(minutes=5),
            help="limit for the command and for each wait; default: 5m",
        )
        parser.add_argument("--dry-run", action="store_true", help="only check, and print the plan")
        cli_args.add_yes(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Check the cluster, then restart its nodes."""
        limit_s = args.node_timeout.total_seconds()
        restart = command_of(args.restart_with, limit_s)
        began = datetime.now(UTC)
        with self._connect(args) as client:
            status = client.status()
            troubles = [*troubles_of(status, client.members())]
            names = [name for name in order_of(status) if not _is_done(status, name, args.since)]
            if troubles:
                if not all(node.reachable for node in status.nodes):
                    troubles.append("to replace a node that is gone for good: docs/members.md")
                refused = RestartError(f"refused, nothing was restarted: {'; '.join(troubles)}")
                refused.outcome_known = True
                raise refused
            if left_out := [node.name for node in status.nodes if not node.reachable]:
                output.print_progress(
                    f"left out, as it neither answers nor votes: {', '.join(left_out)}"
                )
            document: dict[str, Any] = {"nodes": names, "restarted": not args.dry_run}
            plan = "restart " + (", ".join(names) or "no node")
            if args.dry_run or not names:
                self._put(args, document, plan)
                return 0
            if not cli_args.confirm(args, plan, "One after the other."):
                return FAILED
            rolling = RestartSequence(client, restart, output.print_progress, limit_s)
            try:
                with cli_args.sigterm_exits():
                    rolling.run(names)
            except BaseException:  # also Ctrl-C and SIGTERM
                since = (args.since or began).isoformat(timespec="milliseconds")
                output.print_progress(
                    f"stopped; to resume, repeat the command with --since {since}"
                )
                raise
        self._put(args, document, f"restarted {', '.join(names)}")
        return 0


def _is_done(status: pb.GetStatusResponse, name: str, since: datetime | None) -> bool:
    """Return whether a node started after `since`."""
    if since is None:
        return False
    [node] = [node for node in status.nodes if node.name == name]
    started = datetime.now(UTC) - timedelta(milliseconds=node.uptime_ms)
    return node.reachable and started > since
