"""`timerctl status`, `checkpoint`, `transfer`, `drain`, `log-level`, `dump`, `reload`, `members …`.

members list
members add NAME [--yes]
members replace NAME [--yes]
members remove NAME [--yes]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import Commands
from timerclient.cli.cli_errors import FAILED, OK, UNREACHABLE
from timerclient.cli.cli_watch import add_watch
from timerclient.rows.message_json import as_dict
from timerclient.values.errors import TimerError, Unavailable, Unreachable

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.timer_client import TimerClient
    from timerclient.proto import timer_pb2 as pb

CAUGHT_UP_LAG_MAX: Final = 100
"""Log entries that a node which has caught up may be behind: the log grows meanwhile."""
HOW_TO_VOTE: Final = "see timerctl members"
SETTLE_WAIT: Final = timedelta(seconds=5)
"""Time for a cluster that changes: a leader is connected to, or a controller elected."""
CHECK_INTERVAL_S: Final = 0.25
"""Seconds between two looks at the cluster."""

_STATUS: Final = (
    *("NODE", "ADDRESS", "ROLE", "SERVING", "EPOCH", "LOG END", "COMMIT", "APPLIED"),
    *("PENDING", "READY", "SCHEDULED", "FIRED", "CANCELLED", "DROPPED", "FREE MIB", "VERSION"),
    *("LEVEL", "NOTE"),
)
_STATUS_WIDE: Final = frozenset(
    (
        *("LOG END", "COMMIT", "SCHEDULED", "FIRED", "CANCELLED", "DROPPED", "FREE MIB"),
        *("VERSION", "LEVEL"),
    )
)
_CHECKPOINT: Final = (
    *("NODE", "ROLE", "EPOCH", "LOG END", "COMMIT", "APPLIED", "LAG", "READ TIME"),
    *("CHECKPOINT", "DIGEST", "AGE MS", "RUNS", "WINDOW END", "QUEUE OFFSETS", "NOTE"),
)
_CHECKPOINT_WIDE: Final = frozenset(
    ("ROLE", "LOG END", "COMMIT", "CHECKPOINT", "RUNS", "WINDOW END", "QUEUE OFFSETS")
)
_PATHS: Final = frozenset({"PATH"})
_IDENTITY: Final = frozenset(("name", "node", "address", "reachable", "error"))
"""Fields that are known of a node that does not answer. All others are unknown."""


def status_document(status: pb.GetStatusResponse) -> dict[str, Any]:
    """Return a status for JSON; the figures of a node that does not answer are None."""
    document = as_dict(status)
    return document | {"nodes": [known_fields(node) for node in document["nodes"]]}


def known_fields(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node's fields for JSON; the figures of one that does not answer are None."""
    if node["reachable"]:
        return node
    return {name: value if name in _IDENTITY else None for name, value in node.items()}


def why_absent(node: pb.NodeStatus) -> str:
    """Return why a node takes no part: its error, after its role if it waits for something."""
    waits = node.role and node.role != "unreachable"
    return (f"{node.role}: " if waits else "") + (node.error or "does not answer")


def trouble_of_leader(status: pb.GetStatusResponse) -> str:
    """Return the reason why the cluster does not serve; empty: its leader answers and serves."""
    trouble = _trouble(status)
    voting = sum(node.reachable and node.role != "learner" for node in status.nodes)
    if trouble and 2 * voting <= len(status.nodes):
        trouble += f"; {voting} of {len(status.nodes)} nodes answer and vote"
    return trouble


def is_in_doubt(status: pb.GetStatusResponse) -> bool:
    """Return whether the node that answered hears a leader that did not answer it, or not yet."""
    return status.hears_leader and bool(trouble_of_leader(status))


def _trouble(status: pb.GetStatusResponse) -> str:
    if not status.leader:
        return "no node leads"
    named = next((node for node in status.nodes if node.name == status.leader), None)
    if named is None or not named.reachable:
        heard = ", although the node that answered hears it" if status.hears_leader else ""
        return f"{status.leader} is appointed and does not answer{heard}"
    if named.role != "leader" or named.epoch != status.epoch:
        return f"{status.leader} is appointed for epoch {status.epoch} and does not lead"
    return "" if named.serving else f"{status.leader} leads and does not serve yet"


def lag_of(node: pb.NodeCheckpoint, answer: pb.GetCheckpointResponse) -> int | None:
    """Return the entries that a node has yet to apply.

    None: unknown, as no leader of the highest epoch answers.
    """
    there = [each for each in answer.nodes if each.reachable]
    epoch = max((each.epoch for each in there), default=0)
    leads = any(each.role == "leader" and each.epoch == epoch for each in there)
    return node.lag_entries if leads else None


def rejects_new_timers(status: pb.GetStatusResponse, members: pb.ListMembersResponse) -> bool:
    """Return whether the leader rejects new timers, because its disk or those of others are low."""
    voters = {member.replica_id for member in members.members if member.voter}
    low = {node.replica_id for node in status.nodes if node.disk_low}
    with_space = {node.replica_id for node in status.nodes if node.reachable} - low
    leader_low = any(node.disk_low for node in status.nodes if node.name == status.leader)
    return leader_low or (bool(low & voters) and 2 * len(with_space & voters) <= len(voters))


def why_low(node: pb.NodeStatus) -> str:
    """Return why a disk is low: it stays so until an eighth more than the reserve is free."""
    more = "below" if node.disk_free_bytes < node.disk_reserve_bytes else "not yet an eighth above"
    return f"{more} the reserve of {node.disk_reserve_bytes >> 20} MiB"


def too_old_notes(status: pb.GetStatusResponse) -> dict[int, str]:
    """Return replica id -> note, of nodes whose program does not support the cluster's level."""
    remedy = f"does not support feature level {status.feature_level}: install a newer release"
    return {
        node.replica_id: f"version {node.version} of {node.name} {remedy}"
        for node in status.nodes
        if node.reachable and (node.feature_level_max or 1) < status.feature_level
    }


def unlike_settings_notes(status: pb.GetStatusResponse) -> Iterator[str]:
    """Yield a note for each setting that differs between nodes. Old releases report none."""
    values = dict[str, dict[str, list[str]]]()
    for node in status.nodes:
        for setting, value in node.settings.items():
            values.setdefault(setting, {}).setdefault(value, []).append(node.name)
    for setting, names in sorted(values.items()):
        if len(names) > 1:
            shown = "; ".join(f"{value} on {', '.join(on)}" for value, on in names.items())
            yield f"{setting} must be the same on all nodes: {shown}"


def wait_for_status(
    client: TimerClient, wait: timedelta, is_settled: Callable[[pb.GetStatusResponse], bool]
) -> pb.GetStatusResponse:
    """Return the first status that is settled, or the one that is there after `wait`.

    Raises:
        TimerError: There is no status after `wait`.
    """
    until_s = time.monotonic() + wait.total_seconds()
    while True:
        try:
            status = client.status()
            if is_settled(status) or time.monotonic() >= until_s:
                return status
        except Unavailable:
            if time.monotonic() >= until_s:
                raise
        time.sleep(CHECK_INTERVAL_S)


def _serves(node: pb.NodeStatus) -> bool | None:
    """Return whether a leader serves. None: the node does not lead."""
    return node.serving if node.role == "leader" else None


def _leader(client: TimerClient) -> str:
    """Return the leader's name; empty: it is not known."""
    try:
        return client.status().leader
    except TimerError:  # the transfer is done, so this is no failure of the command
        return ""


def _versions(status: pb.GetStatusResponse) -> str:
    """Return the feature level, and the versions and settings of the nodes if they differ."""
    nodes = [node for node in status.nodes if node.reachable]
    level, most = max(1, status.feature_level), [node.feature_level_max or 1 for node in nodes]
    text = f"  feature level {level}"
    if len(nodes) == len(status.nodes) and min(most, default=1) > level:
        text += f", all nodes support {min(most)}"
    if len({node.version for node in nodes}) > 1:
        text += "\nversions " + ", ".join(f"{node.name} {node.version}" for node in nodes)
    return "\n".join([text, *unlike_settings_notes(status)])


class NodeCommands(Commands):
    """The commands about nodes."""

    def register_members(
        self, members: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the commands to the parser of `members`."""
        add = self.command_adder(members, common, default=self._list)
        add_watch(add("list", self._list, "show the voters and the learners"))
        add_watch(members)
        for word, text in (
            ("add", "make the learner NAME a voter"),
            ("replace", "replace the voter NAME by the learner of the same name"),
            ("remove", "make the voter NAME a learner"),
        ):
            command = add(word, self._change, text)
            command.set_defaults(change=word)
            command.add_argument("node", metavar="NAME", help="name of the node")
            cli_args.add_yes(command)

    def register_status(self, status: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `status`."""
        status.set_defaults(run=self.status)
        status.add_argument(
            "--wait",
            metavar="DURATION",
            type=cli_args.duration,
            default=timedelta(),
            help="longest wait until the cluster serves; default: 0s",
        )
        add_watch(status)

    def register_checkpoint(self, checkpoint: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `checkpoint`."""
        checkpoint.set_defaults(run=self.checkpoint)
        text = "compare the digests of all nodes at the shared checkpoint; exit 1 if they differ"
        checkpoint.add_argument("--compare", action="store_true", help=text)
        add_watch(checkpoint)

    def register_transfer(self, transfer: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `transfer`."""
        transfer.set_defaults(run=self.transfer)
        transfer.add_argument(
            "node",
            metavar="NODE",
            nargs="?",
            type=cli_args.non_empty,
            help="node that becomes the leader; default: another voter",
        )

    def register_log_level(self, level: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `log-level`."""
        level.set_defaults(run=self.log_level)
        level.add_argument(
            "node",
            metavar="NODE",
            nargs="?",
            help="node whose level is set; default: every node that answers",
        )
        level.add_argument(
            "logger",
            metavar="LOGGER",
            nargs="?",
            default="",
            help="logger or package whose level is set; default: all",
        )
        text = "debug, info, warning or error; with LOGGER also default, to follow its package"
        level.add_argument("level", metavar="LEVEL", help=text)

    def register_reload(self, reload: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `reload`."""
        reload.set_defaults(run=self.reload)
        reload.add_argument(
            "nodes", metavar="NODE", nargs="*", help="nodes that reread their files; default: all"
        )

    def register_dump(self, dump: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `dump`."""
        dump.set_defaults(run=self.dump)
        dump.add_argument("node", metavar="NODE", help="node whose stacks are shown")

    def register_drain(self, drain: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `drain`."""
        drain.set_defaults(run=self.drain)
        drain.add_argument("node", metavar="NODE", help="node that must not lead")
        drain.add_argument("--undo", action="store_true", help="the node may lead again")

    def status(self, args: argparse.Namespace) -> int:
        """Show the nodes, the leader and the counters; with --wait once the cluster serves."""
        with self._connect(args) as client:
            wait, args.wait = args.wait, timedelta()  # --watch: in the first frame
            status = wait_for_status(client, wait, lambda found: not trouble_of_leader(found))
            if is_in_doubt(status):
                status = wait_for_status(client, SETTLE_WAIT, lambda found: not is_in_doubt(found))
            trouble = trouble_of_leader(status)
            low = not trouble and any(node.disk_low for node in status.nodes)
            rejects = low and rejects_new_timers(status, client.members())
        rows = [
            (
                *(n.name, n.address, n.role, _serves(n), n.epoch, n.log_end, n.commit_index),
                *(n.applied_index, n.pending, n.ready, n.scheduled, n.fired, n.cancelled),
                *(n.dropped, n.disk_free_bytes >> 20, n.version, n.feature_level or 1),
                "; ".join(_notes(n)),
            )
            if n.reachable
            else (n.name, n.address, *[None] * (len(_STATUS) - 3), why_absent(n))
            for n in status.nodes
        ]
        head = (
            f"cluster {status.cluster_id or '-'}  epoch {status.epoch or '-'}  "
            f"leader {'none' if trouble else status.leader}  "
            f"controller {status.controller or 'none'}"
        )
        head += _versions(status)
        head += f"\nthe cluster does not serve: {trouble}" if trouble else ""
        head += "\nnew timers are rejected: disks have too little free space" if rejects else ""
        table = cli_args.table(args, _STATUS, rows, _STATUS_WIDE)
        document = status_document(status) | {"serves": not trouble, "trouble": trouble}
        document |= {"rejects_new_timers": rejects}
        self._put(args, document, f"{head}\n\n{table}")
        return UNREACHABLE if trouble else OK

    def checkpoint(self, args: argparse.Namespace) -> int:
        """Show each node's checkpoint, and the shared checkpoint, or compare the nodes there."""
        if args.compare:
            return self._compare(args)
        with self._connect(args) as client:
            checkpoint = client.checkpoint()
        rows = [
            (
                *(n.node, n.role, n.epoch, n.log_end, n.commit_index, n.applied_index),
                *(lag_of(n, checkpoint), output.instant(n.last_read_time_ms), n.checkpoint_index),
                *(n.digest[:12], n.age_ms, n.runs, output.instant(n.window_end_ms)),
                *(output.pairs(n.queue_offsets), ""),
            )
            if n.reachable
            else (n.node, *[None] * (len(_CHECKPOINT) - 2), n.error or "does not answer")
            for n in checkpoint.nodes
        ]
        text = cli_args.table(args, _CHECKPOINT, rows, _CHECKPOINT_WIDE)
        if checkpoint.HasField("shared"):
            s = checkpoint.shared
            text += (
                f"\n\nshared: epoch {s.epoch}  index {s.index}  "
                f"read time {output.instant(s.last_read_time_ms)}  digest {s.digest[:12] or '-'}  "
                f"age {s.age_ms} ms"
            )
            if args.output == "wide":
                text += f"  queue offsets {output.pairs(s.queue_offsets)}"
        else:
            text += "\n\nshared: none yet"
        document = as_dict(checkpoint)
        document |= {"nodes": [known_fields(node) for node in document["nodes"]]}
        for row, n in zip(document["nodes"], checkpoint.nodes, strict=True):
            row["lag_entries"] = lag_of(n, checkpoint) if n.reachable else None
        self._put(args, document, text)
        return OK

    def _compare(self, args: argparse.Namespace) -> int:
        """Compare the digests of all nodes at the shared checkpoint, once all have applied it."""
        until_s = time.monotonic() + args.timeout.total_seconds()
        with self._connect(args) as client:
            index = client.checkpoint().shared.index
            nodes = client.checkpoint(at_index=index).nodes if index else []
            while not (nodes and all(n.digest for n in nodes)) and time.monotonic() < until_s:
                time.sleep(CHECK_INTERVAL_S)
                index = client.checkpoint().shared.index
                nodes = client.checkpoint(at_index=index).nodes if index else []
        digests = {node.node: node.digest for node in nodes}
        silent = sorted(name for name, digest in digests.items() if not digest)
        differs = len({*digests.values()} - {""}) > 1
        verdict = "the nodes DIFFER" if differs else "the nodes have the same state"
        if not differs and (silent or not digests):
            missing = ", ".join(silent) or "any node"
            verdict = f"not compared: no digest of {missing}"
        document = {"index": index or None, "digests": digests, "equal": verdict.endswith("state")}
        table = cli_args.table(args, ("NODE", "DIGEST"), [*digests.items()])
        self._put(args, document, f"checkpoint {index}: {verdict}\n\n{table}")
        return OK if document["equal"] else FAILED

    def transfer(self, args: argparse.Namespace) -> int:
        """Transfer the leadership. If the node is the leader already, nothing changes."""
        with self._connect(args) as client:
            moved = client.transfer(args.node or "")
            leader = _leader(client) or args.node
        document = {"transferred": moved, "target": leader or None}
        to = leader or "another node"
        self._put(
            args, document, f"transferred to {to}" if moved else f"{to} is the leader already"
        )
        return OK

    def drain(self, args: argparse.Namespace) -> int:
        """Keep a node from leading, or undo that."""
        with self._connect(args) as client:
            done = client.drain_node(args.node, undo=args.undo)
        text = f"{done.node} is drained" if done.drained else f"{done.node} may lead"
        text += "; the leadership was transferred" if done.transferred else ""
        self._put(args, as_dict(done), text)
        return OK

    def log_level(self, args: argparse.Namespace) -> int:
        """Set the level of a logger on one node, or on every node that answers."""
        rows: list[tuple[str, str, str, str]] = []
        failed = False
        with self._connect(args) as client:
            names = [args.node] if args.node else sorted(n.name for n in client.status().nodes)
            for name in names:
                try:
                    before = client.set_log_level(args.level, node=name, logger=args.logger)
                    rows.append((name, before, args.level, ""))
                except Unreachable as error:
                    if args.node:
                        raise
                    failed = True
                    rows.append((name, "", "", str(error)))
        keys = ("node", "before", "level", "error")
        document = [dict(zip(keys, row, strict=True)) for row in rows]
        table = cli_args.table(args, ("NODE", "BEFORE", "LEVEL", "NOTE"), rows)
        self._put(args, {"logger": args.logger, "nodes": document}, table)
        return UNREACHABLE if failed else OK

    def dump(self, args: argparse.Namespace) -> int:
        """Show the stacks of a node's threads and tasks, the innermost frame first."""
        with self._connect(args) as client:
            found = client.dump_stacks(args.node)
        lines = [f"node {found.node}  {found.task_count} tasks"]
        for kind, stacks in (("thread", found.threads), ("task", found.tasks)):
            for each in stacks:
                many = f"{each.count} x " if each.count > 1 else ""
                lines.append(f"\n{kind}  {many}{each.name}")
                lines += [f"    {frame}" for frame in each.frames]
        if found.left_out:
            lines.append(f"\n{found.left_out} further tasks are left out")
        self._put(args, as_dict(found), "\n".join(lines))
        return OK

    def reload(self, args: argparse.Namespace) -> int:
        """Let nodes look at their files of TLS; show the result for each file."""
        rows: list[tuple[str, str, str, str, str]] = []
        with self._connect(args) as client:
            for name in args.nodes or sorted(n.name for n in client.status().nodes):
                try:
                    found = client.reload_files(name)
                except TimerError as error:
                    answered = not isinstance(error, Unreachable)
                    rows.append((name, "", "", "refused" if answered else "no answer", str(error)))
                    continue
                rows += [
                    (name, f.setting, f.path, as_dict(f)["result"].lower(), f.why)
                    for f in found.files
                ] or [(name, "", "", "no files", "without TLS")]
        keys = ("node", "setting", "path", "result", "why")
        document = [dict(zip(keys, row, strict=True)) for row in rows]
        table = cli_args.table(args, ("NODE", "SETTING", "PATH", "RESULT", "NOTE"), rows, _PATHS)
        self._put(args, {"files": document}, table)
        results = {row[3] for row in rows}
        if results & {"kept", "no answer"}:
            return UNREACHABLE
        return FAILED if "refused" in results else OK

    def _list(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._show(args, client.members(), client.status())
        return OK

    def _change(self, args: argparse.Namespace) -> int:
        so, change = "Its present replica loses its vote.", f"{args.change} {args.node}"
        if args.change != "add" and not cli_args.confirm(args, change, so):
            return FAILED
        with self._connect(args) as client:
            members = client.change_members(args.change, args.node)
            until_s = time.monotonic() + args.timeout.total_seconds()
            is_done = _is_learner if args.change == "remove" else _has_caught_up
            while late := not is_done(members, args.node):
                if time.monotonic() > until_s:
                    break
                time.sleep(CHECK_INTERVAL_S)
                with suppress(TimerError):  # the change is done: this is no failure of the command
                    members = client.members()
            self._show(args, members, client.status())
        if late:
            state = "votes, and has not caught up yet"
            if args.change == "remove":
                state = "has no vote, and is not a learner yet: do not stop it"
            sys.stderr.write(f"{args.node} {state}; see timerctl members\n")
        return OK

    def _show(
        self,
        args: argparse.Namespace,
        members: pb.ListMembersResponse,
        status: pb.GetStatusResponse,
    ) -> None:
        headings = ("NAME", "REPLICA", "VOTER", "ROLE", "LOG END", "LAG", "ADDRESS", "NOTE")
        voters, old = {m.name for m in members.members if m.voter}, too_old_notes(status)
        nameless = voters & {f"{m.replica_id:016x}" for m in members.members}
        rows = [
            (
                *(m.name, f"{m.replica_id:016x}", m.voter, m.role),
                m.log_end if m.role != "unreachable" else None,
                _lag_of_member(m, members),
                *(
                    m.address,
                    ", ".join(_notes_of_member(m, voters, nameless, old.get(m.replica_id))),
                ),
            )
            for m in members.members
        ]
        head = f"epoch {members.epoch}  leader {members.leader or 'none'}"
        table = cli_args.table(args, headings, rows)
        document = as_dict(members)
        for row, m in zip(document["members"], members.members, strict=True):
            row["lag_entries"] = _lag_of_member(m, members)
        self._put(args, document, f"{head}\n\n{table}")


def _lag_of_member(member: pb.Member, answer: pb.ListMembersResponse) -> int | None:
    """Return the entries of the leader's log that a member lacks. None: unknown."""
    return member.lag_entries if answer.leader and member.role != "unreachable" else None


def _notes_of_member(
    member: pb.Member, voters: Container[str], nameless: Collection[str], old: str | None
) -> Iterator[str]:
    """Yield what to know of a member.

    `voters`: names of all voters. `nameless`: the names that are ids, as docs/members.md explains.
    `old`: see `too_old_notes`.
    """
    if member.unsure:
        yield "unsure"
    if old is not None:
        yield old
    elif not member.voter and member.role == "learner":
        change = f"replace {member.name}" if member.name in voters else f"add {member.name}"
        if nameless and member.name not in voters:
            lost = min(nameless)
            change = f"replace {member.name}" if len(nameless) == 1 else f"remove {lost}"
            change += f", once voter {lost} is lost for good"
        yield f"to give it a vote: timerctl members {change}"
    elif not member.voter:
        yield "its data has no vote here: format it again, as a learner"


def _has_caught_up(members: pb.ListMembersResponse, name: str) -> bool:
    """Return whether a voter answers and is close to the end of the leader's log."""
    lags = (_lag_of_member(m, members) for m in members.members if m.voter and m.name == name)
    return any(lag is not None and lag <= CAUGHT_UP_LAG_MAX for lag in lags)


def _is_learner(members: pb.ListMembersResponse, name: str) -> bool:
    """Return whether a node is a learner, or does not answer."""
    answers = (each for each in members.members if each.name == name)
    return all(each.role in ("learner", "unreachable") for each in answers)


def _notes(node: pb.NodeStatus) -> Iterator[str]:
    if node.role == "learner":
        yield f"does not vote; {HOW_TO_VOTE}"
    if node.drained:
        yield "drained"
    if node.unsure:
        yield "unsure"
    if node.withholds_votes:
        yield "withholds Raft votes: not up to date yet"
    if node.damage:
        yield f"damaged: {node.damage}"
    if node.disk_low:
        yield f"disk low: {why_low(node)}"
    yield from node.warnings
