"""`timerctl local …`: a cluster on this machine, from a terminal.

timerctl imports this module at each start, so deploy.local is imported only by a command.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import DEFAULT_ENDPOINTS, ENDPOINTS_VARIABLE

if TYPE_CHECKING:
    from deploy.local import LocalCluster

FOLDER: Final = Path("run/local")
FAILED: Final = 1
USAGE: Final = 2
NODES: Final = 3


def register(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add `timerctl local`. Its parser sets `run`, which takes the parsed arguments."""
    local = subparsers.add_parser("local", help="run a whole cluster on this machine")
    actions = local.add_subparsers(metavar="ACTION", required=True)
    for name, run, text in (
        ("up", _up, "start all nodes, or the named ones; running nodes are left alone"),
        ("down", _down, "stop all nodes, or the named ones; their data stays"),
        ("status", _status, "show the nodes"),
    ):
        parser = actions.add_parser(name, help=text)
        parser.add_argument(
            "--dir", type=Path, default=FOLDER, help=f"the cluster's directory; default: {FOLDER}"
        )
        cli_args.add_output(parser)
        parser.set_defaults(run=_reporting(run), names=[], nodes=None, base_port=None, tls=False)
        if name != "status":
            parser.add_argument("names", nargs="*", metavar="NODE")
        if name == "up":
            parser.add_argument(
                "--nodes",
                type=int,
                metavar="N",
                help=f"number of nodes of a new cluster: 1 to 7; default: {NODES}",
            )
            parser.add_argument(
                "--base-port",
                type=int,
                metavar="P",
                help="ports of a new cluster: gRPC at P, P + 1, ..., HTTP ten above; default: free "
                "ports. timerctl connects to 7401, 7402 and 7403 by default",
            )
            parser.add_argument(
                "--tls",
                action="store_true",
                help="make certificates for a new cluster; its ports use TLS",
            )


Command = Callable[["LocalCluster", argparse.Namespace], None]


def _reporting(run: Command) -> Callable[[argparse.Namespace], int]:
    """Return the command around `run`: an error becomes a message and exit status 1 or 2."""

    def command(args: argparse.Namespace) -> int:
        from deploy.local import LaunchError, LocalCluster, WrongPlanError

        try:
            nodes = NODES if args.nodes is None else args.nodes
            made = LocalCluster(args.dir, nodes, base_port=args.base_port, tls=args.tls)
            run(made, args)
        except BrokenPipeError:  # of our own output: timerctl ends quietly
            raise
        except (LaunchError, OSError) as error:
            code = USAGE if isinstance(error, WrongPlanError) else FAILED
            if getattr(args, "output", "table") == "json":
                document = {"reason": "LAUNCH", "message": str(error), "exit_code": code}
                sys.stderr.write(output.to_json({"error": document}) + "\n")
            else:
                sys.stderr.write(f"timerctl: {error}\n")
            return code
        return 0

    return command


def _up(cluster: "LocalCluster", args: argparse.Namespace) -> None:
    _check_plan(cluster, args)
    cluster.start(*args.names)
    _status(cluster, args)
    if args.output == "json":
        return
    learners = [name for name in cluster.nodes if _role(cluster, name) == "learner"]
    for name in learners:
        print(f"\n{name} has no vote. If it lost its disk: timerctl members replace {name}")
    endpoints = os.environ.get(ENDPOINTS_VARIABLE) or DEFAULT_ENDPOINTS
    if not {*cluster.endpoints} <= {each.strip() for each in endpoints.split(",")}:
        print(f"\nexport {ENDPOINTS_VARIABLE}={','.join(cluster.endpoints)}")
    if (tls := cluster.tls) is not None:
        files = {"CA": tls.ca, "CERT": tls.certificate, "KEY": tls.key}
        print(f"\nexport {' '.join(f'TIMERCTL_TLS_{name}={file}' for name, file in files.items())}")


def _check_plan(cluster: "LocalCluster", args: argparse.Namespace) -> None:
    """Check that the options for a new cluster agree with the existing cluster, if there is one.

    Raises:
        WrongPlanError: They differ from the existing cluster.
    """
    from deploy.local import WrongPlanError

    addresses = cluster.endpoints
    if not addresses:
        return
    first = int(addresses[0].rpartition(":")[2])
    if args.nodes in (None, len(addresses)) and args.base_port in (None, first):
        return
    raise WrongPlanError(
        f"the cluster in {args.dir} has {len(addresses)} nodes at {', '.join(addresses)}; "
        "--nodes and --base-port apply to a new cluster"
    )


def _role(cluster: "LocalCluster", name: str) -> str:
    state = cluster.state(name) if cluster.is_running(name) else None
    return state.role if state else ""


def _down(cluster: "LocalCluster", args: argparse.Namespace) -> None:
    cluster.stop(*args.names)
    _status(cluster, args)


def _status(cluster: "LocalCluster", args: argparse.Namespace) -> None:
    from deploy.local import LaunchError

    if not cluster.nodes:
        raise LaunchError(f"{cluster.directory}: no cluster was started there yet")
    nodes = []
    for name, node in cluster.nodes.items():
        text, pid = "down", None
        if cluster.is_running(name):
            state, pid = cluster.state(name), node.pid
            text = f"{state.role}, epoch {state.epoch}" if state else "does not answer"
        nodes.append((name, pid, node.grpc, node.http, text))
    _print(args, nodes)


def _print(args: argparse.Namespace, nodes: Sequence[tuple[Any, ...]]) -> None:
    headings = ("NODE", "PID", "GRPC", "HTTP", "STATE")
    if args.output == "json":
        names = [heading.lower() for heading in headings]
        print(output.to_json({"nodes": [dict(zip(names, node, strict=True)) for node in nodes]}))
    else:
        print(cli_args.table(args, headings, nodes))
