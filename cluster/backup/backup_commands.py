"""`timerctl backup …` and `timerctl restore`.

backup --into STORE [--node NODE] [--follow]
backup list | verify | prune --from STORE
restore --from STORE [--backup ID | --at-index N | --at TIME] (--into DIR | --config FILE)

`timerctl --help` imports this module, so the modules with the work are imported by the
commands. They need the extra `server`.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import UsageError, help_arguments, tls_of
from timerclient.cli.cli_errors import FAILED, OK
from timerclient.cli.contexts import apply_context
from timerclient.cli.missing_modules import why_missing

if TYPE_CHECKING:
    from cluster.backup.backup_store import BackupStore
    from cluster.backup.catalogue import Catalogue
    from cluster.backup.restoration import RestorePlan, RestoreResult
    from cluster.backup.roll_forward import Until

STORE: Final = "a directory, or a URI such as s3://bucket/prefix?region=eu-west-1"
HEADINGS: Final = (
    *("BACKUP", "INDEX", "TIME", "PENDING", "MESSAGES", "MIB", "SENT MIB", "NODE", "PARTS"),
)
_LISTED: Final = (*HEADINGS[:3], "LOG TO INDEX", "LOG TO TIME", *HEADINGS[3:])
WIDE: Final = frozenset({"NODE", "PARTS"})

Run = Callable[[argparse.Namespace], int]


def register_backup(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `timerctl backup`."""
    text = "back up the running cluster, incrementally"
    backup = commands.add_parser("backup", **help_arguments(text))
    backup.set_defaults(run=with_extra(_backup))
    add_cluster(backup)
    cli_args.add_output(backup)
    backup.add_argument("--into", metavar="STORE", help=STORE)
    _add_follow(backup)
    actions = backup.add_subparsers(title="commands", metavar="COMMAND")
    for name, run, text in (
        ("list", _list, "show the backups of a store"),
        ("verify", _verify, "read backups again and compare all bytes with their catalogues"),
        ("prune", _prune, "delete old backups, and parts that no backup needs"),
    ):
        action = actions.add_parser(name, **help_arguments(text))
        action.set_defaults(run=with_extra(_alone(run, name)))
        action.add_argument("--from", dest="store", metavar="STORE", required=True, help=STORE)
        cli_args.add_output(action)
        if name == "verify":
            action.add_argument("--backup", metavar="ID", help="backup to read; default: all")
        if name == "prune":
            action.add_argument("--keep", type=_count, required=True, help="newest backups to keep")


def _add_follow(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--follow",
        action="store_true",
        help="go on until a signal: store the log all the time, and a backup now and then",
    )
    for option, usual, text in (
        ("--log-every", "5s", "with --follow: how often the new log is stored"),
        ("--backup-every", "1h", "with --follow: how often a backup is taken"),
    ):
        parser.add_argument(
            option, metavar="DURATION", type=cli_args.duration, help=f"{text}; default: {usual}"
        )
    parser.add_argument(
        "--keep",
        type=_count,
        help="with --follow: newest backups to keep, with the log since the oldest; default: all",
    )


def _alone(run: Run, name: str) -> Run:
    """Return a command that refuses the options of a backup."""

    @functools.wraps(run)
    def checked(args: argparse.Namespace) -> int:
        for option in ("into", "follow", "log_every", "backup_every"):
            if vars(args)[option]:
                raise UsageError(f"--{option.replace('_', '-')} does not go with {name}")
        return run(args)

    return checked


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that backs a cluster up."""
    cli_args.add_connection(parser, argparse.SUPPRESS)
    parser.add_argument(
        "--node",
        default="",
        help="node that sends its state; default: that of the last backup, else a follower",
    )
    parser.add_argument(
        "--timeout",
        metavar="DURATION",
        type=cli_args.duration,
        default=argparse.SUPPRESS,
        help="time for each call of the cluster, its repetitions included; default: 2m",
    )
    parser.set_defaults(usual_timeout=timedelta(minutes=2))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of at least 1")
    return int(text)


def add_source(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options that choose a backup."""
    parser.add_argument("--from", dest="store", metavar="STORE", required=required, help=STORE)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--backup", metavar="ID", help="backup to use; default: the newest")
    which.add_argument(
        "--at-index",
        type=_count,
        metavar="N",
        help="the state at this index of the log: an older backup, and the stored log after it",
    )
    which.add_argument(
        "--at",
        type=cli_args.aware_time,
        metavar="ISO",
        help="the state at this time: an older backup, and the stored log after it",
    )


def register_restore(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `timerctl restore`."""
    text = "make the data directories of a new cluster from a backup"
    restore = commands.add_parser("restore", **help_arguments(text))
    restore.set_defaults(run=with_extra(_restore))
    cli_args.add_output(restore)
    add_source(restore, required=True)
    place = restore.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--into",
        type=Path,
        metavar="DIR",
        help="parent of all nodes' data directories DIR/NODE, which must be absent or empty",
    )
    place.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings of one node: its data directory, name, peers and cluster_id",
    )
    restore.add_argument(
        "--nodes", metavar="NAME,...", help="with --into; default: the nodes of the backup"
    )
    restore.add_argument(
        "--cluster-id",
        metavar="ID",
        help="with --into; default: the backup's. Another one makes"
        " all timer ids of the old cluster invalid",
    )
    restore.add_argument(
        "--restore-id",
        metavar="ID",
        help="with --config: the same on all nodes, and a new one for each restore",
    )


def with_extra(run: Run) -> Run:
    """Return the command. Without the modules of the extra `server` it raises UsageError.

    SIGTERM ends it with SystemExit, so that it deletes its temporary files.
    """
    from cluster.backup.store_calls import leaving_calls

    @functools.wraps(run)
    def checked(args: argparse.Namespace) -> int:
        try:
            with cli_args.sigterm_exits(), leaving_calls():
                return run(args)
        except ModuleNotFoundError as missing:
            raise UsageError(why_missing(missing, "server")) from None

    return checked


# ---- backup


def _backup(args: argparse.Namespace) -> int:
    from cluster.backup.backup_store import BackupStore

    if not args.into:
        raise UsageError("backup needs --into STORE, or a command: list, verify, prune")
    if args.follow:
        from cluster.backup.follow_command import follow

        return follow(args, BackupStore(args.into))
    for name in ("log_every", "backup_every", "keep"):
        if vars(args)[name] is not None:
            raise UsageError(f"--{name.replace('_', '-')} goes with --follow")
    found = take_backup(args, BackupStore(args.into))
    print_result(args, document_of(found), cli_args.table(args, HEADINGS, [row_of(found)], WIDE))
    return OK


def take_backup(
    args: argparse.Namespace, store: "BackupStore", *, is_kept: bool = True
) -> "Catalogue":
    """Take a backup of the cluster that a command line names. `is_kept`: see `take`.

    Raises:
        TimerError: see `BackupRun.take`.
        UsageError: the options of the connection are wrong.
    """
    from cluster.backup.backup_run import BackupRun
    from timerclient.client.timer_client import TimerClient

    apply_context(args)
    patience_s = args.timeout.total_seconds()
    with TimerClient(args.endpoints, timeout=args.timeout, credentials=tls_of(args)) as client:
        run = BackupRun(
            client, store, node=args.node, patience_s=patience_s, on_progress=print_progress
        )
        return run.take(is_kept=is_kept)


def print_progress(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(f"timerctl: {text}\n")
    sys.stderr.flush()


def store_of(args: argparse.Namespace) -> "BackupStore":
    """Return the store of --from.

    Raises:
        BackupError: it does not exist.
    """
    from cluster.backup.backup_store import BackupStore

    store = BackupStore(args.store)
    store.check_exists()
    return store


def _list(args: argparse.Namespace) -> int:
    from cluster.backup.catalogue import readable_catalogues
    from cluster.backup.log_parts import StoredLog

    store = store_of(args)
    found, damages = readable_catalogues(store)
    clusters = {each.cluster_id for each in found}
    logs = {cluster: StoredLog(store, cluster) for cluster in clusters}
    several = len(clusters) > 1
    rows: list[tuple[Any, ...]] = []
    documents: list[dict[str, Any]] = []
    for each in found:
        reach = logs[each.cluster_id].reach(each.end)
        row = row_of(each)
        to = (None, None) if reach is None else (reach.last, output.instant(reach.time_ms))
        rows.append((*[each.cluster_id] * several, *row[:3], *to, *row[3:]))
        known = {} if reach is None else {"log_index": reach.last, "log_time_ms": reach.time_ms}
        documents.append(document_of(each) | known)
    headings = (*["CLUSTER"] * several, *_LISTED)
    table = cli_args.table(args, headings, rows, WIDE) if rows else f"no backups in {args.store}"
    print_result(args, {"backups": documents, "damaged": damages}, "\n".join([table, *damages]))
    return FAILED if damages else OK


def _verify(args: argparse.Namespace) -> int:
    from cluster.backup.store_care import damages_of, gaps_of

    store = store_of(args)
    checked, damages = damages_of(store, args.backup)
    gaps = gaps_of(store) if args.backup is None else []
    lines = [*damages, *gaps, f"{checked} parts: {len(damages) or 'none'} missing or damaged"]
    if damages:
        remedy = "the next backup sends the parts again that the node still has"
        lines.append(f"remove these files if they are damaged for good: {remedy}")
    print_result(args, {"parts": checked, "damaged": damages, "gaps": gaps}, "\n".join(lines))
    return FAILED if damages else OK


def _prune(args: argparse.Namespace) -> int:
    from cluster.backup.store_care import prune

    deleted = prune(store_of(args), args.keep)
    document = {"backups": deleted.backups, "parts": deleted.parts, "bytes": deleted.size}
    text = f"{len(deleted.backups)} backups and {deleted.parts} parts deleted"
    print_result(args, document, f"{text}, {_mib(deleted.size)} MiB")
    return OK


def row_of(backup: "Catalogue") -> tuple[Any, ...]:
    """Return the cells of a backup under HEADINGS."""
    sizes = _mib(backup.size), _mib(backup.sent_bytes)
    what = backup.backup, backup.index, output.instant(backup.time_ms)
    return *what, backup.pending, backup.messages, *sizes, backup.node, len(backup.parts)


def document_of(backup: "Catalogue") -> dict[str, Any]:
    """Return the fields of a backup for programs."""
    names = (
        *("backup", "cluster_id", "node", "index", "epoch", "time_ms", "begun_ms", "ended_ms"),
        *("program", "manifest_version", "pending", "messages", "sent_bytes"),
    )
    found = {name: getattr(backup, name) for name in names}
    return found | {"nodes": [*backup.nodes], "bytes": backup.size, "parts": len(backup.parts)}


def _mib(size: int) -> float:
    return round(size / (1 << 20), 1)


# ---- restore


def _restore(args: argparse.Namespace) -> int:
    from cluster.backup import restoration

    if args.config is not None and (args.nodes, args.cluster_id) != (None, None):
        raise UsageError("--nodes and --cluster-id go with --into: the settings have them")
    if args.config is None and args.restore_id:
        raise UsageError("--restore-id goes with --config: --into makes all nodes at once")
    if args.config is not None and not args.restore_id:
        text = "such as the output of `openssl rand -hex 8`"
        raise UsageError(f"--config needs --restore-id: one new id for all nodes, {text}")
    store = store_of(args)
    plan, places, target = _plan(args, *find_point(store, args))
    now_ms = time.time_ns() // 1_000_000
    result = restoration.restore(store, plan, places, target, now_ms)
    if (stage := target / restoration.STAGE).exists():
        print_progress(
            f"{stage} could not be removed; the restore is complete without it: remove it"
        )
    for place in places.values():
        if place.stat().st_uid == 0:
            print_progress(
                f"{place} is root's: if its node runs as another user, run chown -R before a start"
            )
    print_result(
        args, _restore_document(result, now_ms), _report(result, now_ms, plan.catalogue.index)
    )
    return OK


def find_point(store: "BackupStore", args: argparse.Namespace) -> "tuple[Catalogue, Until | None]":
    """Return the backup of a command line, and the last entry of the log to apply after it.

    Raises:
        BackupError: the store has no such backup.
    """
    from cluster.backup.catalogue import find_backup, read_catalogues
    from cluster.backup.log_parts import StoredLog
    from cluster.backup.roll_forward import Until
    from timer.model.units import LogIndex, UnixMs

    newest = find_backup(store, backup=args.backup, at_index=args.at_index, at=args.at)
    if args.backup is not None:
        return newest, None
    at_ms = None if args.at is None else UnixMs(int(args.at.timestamp() * 1000))
    index = None if args.at_index is None else LogIndex(args.at_index)
    until = Until(index=index, time_ms=at_ms)
    log = StoredLog(store, newest.cluster_id)
    for each in reversed(read_catalogues(store)):  # an older one may reach further
        reach = log.reach(each.end) if until.includes(each.index, each.time_ms) else None
        if reach is not None and until.is_reached(reach):
            return each, until
    return newest, until


def _plan(
    args: argparse.Namespace, found: "Catalogue", until: "Until | None"
) -> "tuple[RestorePlan, dict[str, Path], Path]":
    """Return the plan, the directory of each node to make, and the directory of all of them."""
    import secrets

    from cluster.backup.restoration import RestorePlan

    if args.config is None:
        given = found.nodes if args.nodes is None else args.nodes.split(",")
        names = tuple(name.strip() for name in given)
        restore_id = secrets.token_hex(8)
        cluster_id = found.cluster_id if args.cluster_id is None else args.cluster_id
        target, places = args.into, {name: args.into / name for name in names}
    else:
        from cluster.settings.config import load_config
        from timer.model.timer_errors import ConfigError

        try:
            config = load_config(args.config, os.environ, {})
        except ConfigError as error:
            raise UsageError(str(error)) from None
        names, cluster_id, restore_id = tuple(config.peers), config.cluster_id, args.restore_id
        target, places = config.data, {config.name: config.data}
    plan = RestorePlan(
        catalogue=found, cluster_id=cluster_id, voters=names, restore_id=restore_id, until=until
    )
    return plan, places, target


def _restore_document(result: "RestoreResult", now_ms: int) -> dict[str, Any]:
    plan, backup = result.plan, result.plan.catalogue
    return {
        "backup": backup.backup,
        "index": backup.index,
        "time_ms": backup.time_ms,
        "cluster_id": plan.cluster_id,
        "restore_id": plan.restore_id,
        "epoch": plan.epoch,
        "nodes": [*plan.voters],
        "directories": {name: str(place) for name, place in result.directories.items()},
        "pending": backup.pending,
        "messages": backup.messages,
        "held": result.held,
        "now_ms": now_ms,
        "overdue": result.overdue,
    }


def _report(result: "RestoreResult", now_ms: int, backup_index: int) -> str:
    plan, backup, overdue = result.plan, result.plan.catalogue, sum(result.overdue.values())
    since = output.instant(backup.time_ms)
    which = f"cluster {plan.cluster_id} at log index {backup.index}, {since}"
    entries = backup.index - backup_index
    log = f" and {entries} entries of the log after it" if entries else ""
    lines = [
        f"restored backup {backup.backup}{log}: {which}",
        *(f"  {name}: {place}" for name, place in result.directories.items()),
        f"  pending timers: {backup.pending}, of which {result.held} are held by a pause",
        f"  fired messages that topics keep: {backup.messages}",
        f"came due from {since} to {output.instant(now_ms)}: {overdue} timers",
        *(f"  {topic}: {count}" for topic, count in result.overdue.items()),
    ]
    if overdue:
        lines.append("They fire at the start, again if they fired in the old cluster.")
    lines += [
        "Acks, cancels, new timers and other changes after that index are lost.",
        f"Stop the old cluster for good. The first start needs all of {', '.join(plan.voters)}.",
    ]
    if plan.cluster_id != backup.cluster_id:
        lines.append(f"Timer ids of cluster {backup.cluster_id} are not valid in this one.")
    return "\n".join(lines)


def print_result(args: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    """Print a document for programs, or its text."""
    is_json = args.output == "json"
    sys.stdout.write((output.to_json(document) if is_json else text) + "\n")
