"""`timerctl certs …`: makes and shows the certificates of a cluster.

`timerctl --help` imports this module, so deploy.certificate_store is imported only by a
command. It needs the extra `certs`.
"""

import argparse
import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import UsageError
from timerclient.cli.cli_errors import FAILED, put_failure
from timerclient.cli.missing_modules import why_missing

if TYPE_CHECKING:
    from deploy.certificate_store import CertificateFacts, CertificateStore

FOLDER: Final = Path("certs")
DAYS_LEFT: Final = 30
DAYS_MAX: Final = 36_500


def register(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add `timerctl certs`. Its parser sets `run`, which takes the parsed arguments."""
    text = "make and show the certificates of a cluster (TLS)"
    certs = subparsers.add_parser("certs", **cli_args.help_arguments(text))
    actions = certs.add_subparsers(metavar="ACTION", required=True)
    parsers = {}
    for name, run, text in (
        ("init", _init, "make the authorities of nodes and of clients, and a first access.toml"),
        ("issue", _issue, "make the key and the certificate of a node, client or administrator"),
        ("show", _show, "show the certificates"),
        ("check", _check, "exit with 1 if a certificate expires soon"),
    ):
        parsers[name] = parser = actions.add_parser(name, **cli_args.help_arguments(text))
        parser.add_argument(
            "--dir",
            type=Path,
            default=FOLDER,
            help=f"folder of the certificates; default: {FOLDER}",
        )
        cli_args.add_output(parser)
        parser.set_defaults(run=_with_error_reports(run))
    parsers["init"].add_argument(
        "cluster", metavar="CLUSTER", help="id of the cluster, the nodes' setting `cluster_id`"
    )
    issue = parsers["issue"]
    issue.add_argument("kind", choices=("node", "client", "admin"), metavar="node|client|admin")
    issue.add_argument(
        "name", metavar="NAME", help="name in the rules of access; of a node: its setting `name`"
    )
    issue.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="of a node: a DNS name or IP address in its clients' endpoints; may be repeated; "
        "default: those of its present certificate",
    )
    for name, days in (("init", 3650), ("issue", 365)):
        parsers[name].add_argument(
            "--days",
            type=cli_args.days(DAYS_MAX),
            metavar="N",
            help=f"validity in days; default: {days}",
        )
    parsers["check"].add_argument(
        "--within",
        type=cli_args.days(DAYS_MAX),
        default=DAYS_LEFT,
        metavar="DAYS",
        help=f"exit with 1 if a certificate expires within DAYS; default: {DAYS_LEFT}",
    )


Command = Callable[["CertificateStore", argparse.Namespace], int]


def _with_error_reports(run: Command) -> Callable[[argparse.Namespace], int]:
    """Return the command around `run`: an error becomes a message and exit status 1."""

    def command(args: argparse.Namespace) -> int:
        try:
            from deploy.certificate_store import CertificateError, CertificateStore
        except ModuleNotFoundError as missing:
            return put_failure(args, "CERTIFICATE", why_missing(missing, "certs"))
        try:
            return run(CertificateStore(args.dir), args)
        except BrokenPipeError:  # of our own output: timerctl ends quietly
            raise
        except (CertificateError, OSError) as error:
            return put_failure(args, "CERTIFICATE", error)

    return command


def _init(store: "CertificateStore", args: argparse.Namespace) -> int:
    from deploy.certificate_store import AUTHORITY_DAYS

    store.create(args.cluster, args.days or AUTHORITY_DAYS)
    return _show(store, args)


def _issue(store: "CertificateStore", args: argparse.Namespace) -> int:
    from cluster.security.identities import IdentityKind, node_host, nodes_host
    from deploy.certificate_store import LEAF_DAYS, facts_of

    kind = IdentityKind(args.kind)
    if args.host and kind is not IdentityKind.NODE:
        raise UsageError("--host: only the certificate of a node has hosts", "timerctl certs issue")
    path = store.issue(kind, args.name, hosts=args.host, days=args.days or LEAF_DAYS)
    made = facts_of(path)
    own = {node_host(args.name, made[0].cluster), nodes_host(made[0].cluster)}
    if own == {*made[0].hosts}:
        sys.stderr.write(
            f"timerctl: {path.name} has no host: with --host HOST clients can verify it by their "
            f"endpoint; else they need --tls-server-name {nodes_host(made[0].cluster)}\n"
        )
    if (end := store.authority_end(kind)) == made[0].not_after:
        sys.stderr.write(f"timerctl: {path.name} expires with its authority on {end:%Y-%m-%d}\n")
    return _print(args, made)


def _show(store: "CertificateStore", args: argparse.Namespace) -> int:
    return _print(args, [*store.facts()])


def _check(store: "CertificateStore", args: argparse.Namespace) -> int:
    limit = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=args.within)
    found = [*store.facts()]
    if found or args.output == "json":
        _print(args, found)
    late = dict.fromkeys(each.path.name for each in found if each.not_after < limit)
    if late:
        sys.stderr.write(f"timerctl: less than {args.within} days left: {', '.join(late)}\n")
    elif not found:
        sys.stderr.write(f"timerctl: {store.directory}: no certificates\n")
    return FAILED if late or not found else 0


def _print(args: argparse.Namespace, found: "list[CertificateFacts]") -> int:
    if args.output == "json":
        documents = [
            {
                "file": str(each.path),
                "cluster": each.cluster,
                "identity": each.subject,
                "hosts": list(each.hosts),
                "issuer": each.issuer,
                "issuer_key_id": each.issuer_key_id,
                "not_after": each.not_after.isoformat(),
            }
            for each in found
        ]
        print(output.to_json({"certificates": documents}))
        return 0
    rows = [
        (
            *(each.path.name, each.subject, f"{each.not_after:%Y-%m-%d}"),
            *(f"{each.issuer} {each.issuer_key_id[:8]}".strip(), *_hosts(each)),
        )
        for each in found
    ]
    print(cli_args.table(args, ("FILE", "IDENTITY", "EXPIRES", "SIGNED BY", "HOSTS"), rows))
    return 0


def _hosts(each: "CertificateFacts") -> tuple[str]:
    return (", ".join(each.hosts) or "-",)
