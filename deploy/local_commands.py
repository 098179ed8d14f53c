"""`timerctl local …`: a cluster on this machine, from a terminal.

`timerctl --help` imports this module, so deploy.local is imported only by a command.
"""

import argparse
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from timerclient.cli import cli_args, contexts, output
from timerclient.cli.cli_args import DEFAULT_ENDPOINTS, ENDPOINTS_VARIABLE, UsageError
from timerclient.cli.cli_errors import FAILED, USAGE, put_failure
from timerclient.cli.missing_modules import why_missing
from timerclient.values.cluster_url import PLAIN, SECURE
from timerclient.values.cluster_url import VARIABLE as APPLICATION_VARIABLE

if TYPE_CHECKING:
    from deploy.local import LocalCluster

CONTEXT_PREFIX: Final = "local-"
FOLDER: Final = Path("run/local")
NODES: Final = 3
LINES: Final = 100
POLL_S: Final = 0.2
_EXAMPLES: Final = {
    "up": "up --nodes 3 --base-port 7401",
    "down": "down n2",
    "status": "status -o json",
    "kill": "kill n2 n3",
    "restart": "restart n2 n3",
    "logs": "logs n2 -f",
    "destroy": "destroy --yes",
}


def register(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add `timerctl local`. Its parser sets `run`, which takes the parsed arguments."""
    local = subparsers.add_parser(
        "local", **cli_args.help_arguments("run a whole cluster on this machine")
    )
    actions = local.add_subparsers(metavar="ACTION", required=True)
    for name, run, text in (
        ("up", _up, "start all nodes, or the named ones; running nodes are left alone"),
        ("down", _down, "stop all nodes, or the named ones; their data stays"),
        ("status", _status, "show the nodes"),
        ("kill", _kill, "end nodes at once with SIGKILL, as a crash does; their data stays"),
        ("restart", _restart, "stop nodes in good order, if they run, and start them again"),
        ("logs", _logs, "print the end of a node's log"),
        ("destroy", _destroy, "kill all nodes, and remove the cluster with all its data"),
    ):
        example = f"Example: timerctl local {_EXAMPLES[name]}"
        parser = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}. {example}"
        )
        parser.add_argument(
            "--dir", type=Path, default=FOLDER, help=f"the cluster's directory; default: {FOLDER}"
        )
        cli_args.add_output(parser)
        parser.set_defaults(
            run=_with_error_reports(run), names=[], nodes=None, base_port=None, tls=False
        )
        if name in ("up", "down"):
            parser.add_argument("names", nargs="*", metavar="NODE")
        if name in ("kill", "restart"):
            parser.add_argument("names", nargs="+", metavar="NODE")
        if name == "up":
            _add_plan(parser)
        if name == "logs":
            parser.add_argument("node", metavar="NODE")
            _add_logs(parser)
        if name == "destroy":
            cli_args.add_yes(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
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
        "--add-context",
        metavar=f"{CONTEXT_PREFIX}NAME",
        help="keep the addresses as a context of timerctl, and make it the current one",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help="make certificates for a new cluster; its ports use TLS",
    )


def _add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print new lines, too, until Ctrl-C"
    )
    parser.add_argument(
        "-n",
        "--lines",
        type=int,
        metavar="N",
        default=LINES,
        help=f"lines from the end, 0 or more; default: {LINES}",
    )


Command = Callable[["LocalCluster", argparse.Namespace], int | None]


def _with_error_reports(run: Command) -> Callable[[argparse.Namespace], int]:
    """Return the command around `run`: an error becomes a message and exit status 1 or 2."""

    def command(args: argparse.Namespace) -> int:
        from deploy.local import LaunchError, LocalCluster, WrongPlanError

        try:
            nodes = NODES if args.nodes is None else args.nodes
            made = LocalCluster(args.dir, nodes, base_port=args.base_port, tls=args.tls)
            code = run(made, args) or 0
        except BrokenPipeError:  # of our own output: timerctl ends quietly
            raise
        except ModuleNotFoundError as missing:  # --tls makes certificates
            return put_failure(args, "LAUNCH", why_missing(missing, "server,certs"))
        except (LaunchError, OSError) as error:
            code = USAGE if isinstance(error, WrongPlanError) else FAILED
            put_failure(args, "LAUNCH", error, code)
        return code

    return command


def _up(cluster: "LocalCluster", args: argparse.Namespace) -> None:
    if args.add_context is not None:
        contexts.check_context_name(args.add_context)
        if not args.add_context.startswith(CONTEXT_PREFIX):
            name = args.add_context
            raise UsageError(f"--add-context = {name!r}: must begin with {CONTEXT_PREFIX!r}")
    _check_plan(cluster, args)
    cluster.start(*args.names, tell=output.print_progress)
    if args.add_context is not None:
        _keep_context(cluster, args.add_context)
    _status(cluster, args)
    if args.output == "json":
        return
    learners = [name for name in cluster.nodes if _role(cluster, name) == "learner"]
    for name in learners:
        print(f"\n{name} has no vote; see timerctl members")
    variables = {APPLICATION_VARIABLE: _url(cluster)}
    if args.add_context is None:
        variables |= _timerctl_variables(cluster)
    else:
        print(f"\nthe current context is {args.add_context}")
    unset = [each for each in variables.items() if os.environ.get(each[0]) != each[1]]
    if unset:
        print("\n" + "\n".join(f"export {name}={shlex.quote(value)}" for name, value in unset))


def _timerctl_variables(cluster: "LocalCluster") -> dict[str, str]:
    """Return the variables that timerctl needs for this cluster."""
    variables = {}
    endpoints = os.environ.get(ENDPOINTS_VARIABLE) or DEFAULT_ENDPOINTS
    if not {*cluster.endpoints} <= {each.strip() for each in endpoints.split(",")}:
        variables[ENDPOINTS_VARIABLE] = ",".join(cluster.endpoints)
    if (tls := cluster.tls) is not None:
        files = {"CA": tls.ca, "CERT": tls.certificate, "KEY": tls.key}
        variables |= {f"TIMERCTL_TLS_{name}": str(file) for name, file in files.items()}
    return variables


def _url(cluster: "LocalCluster") -> str:
    """Return the URL of the cluster for applications, with an administrator's files for TLS."""
    addresses = ",".join(cluster.endpoints)
    if (tls := cluster.tls) is None:
        return f"{PLAIN}{addresses}"
    files = {"ca": tls.ca, "cert": tls.certificate, "key": tls.key}
    return f"{SECURE}{addresses}?{urlencode(files, safe='/')}"


def _keep_context(cluster: "LocalCluster", name: str) -> None:
    """Keep the addresses and an administrator's files as the current context of timerctl."""
    known = contexts.load()
    own = {"endpoints": ",".join(cluster.endpoints)}
    if (tls := cluster.tls) is not None:
        own |= {"tls_ca": str(tls.ca), "tls_cert": str(tls.certificate), "tls_key": str(tls.key)}
    known.named[name], known.current = own, name
    known.save()


def _check_plan(cluster: "LocalCluster", args: argparse.Namespace) -> None:
    """Check that the options for a new cluster agree with the existing cluster, if there is one.

    Raises:
        WrongPlanError: They differ from the existing cluster.
    """
    from deploy.local import WrongPlanError

    addresses = cluster.endpoints
    if not addresses:
        return
    if args.tls and cluster.tls is None:
        raise WrongPlanError(
            f"the cluster in {args.dir} has no TLS; --tls applies to a new cluster"
        )
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


def _kill(cluster: "LocalCluster", args: argparse.Namespace) -> None:
    from deploy.local import LaunchError

    if down := [name for name in args.names if not cluster.is_running(name)]:
        raise LaunchError(f"not running: {', '.join(down)}; no node was killed")
    cluster.kill_together(*args.names)
    _status(cluster, args)
    if args.output != "json":
        place = "" if args.dir == FOLDER else f" --dir {shlex.quote(str(args.dir))}"
        print(f"\nKilled. Start again: timerctl local up {' '.join(args.names)}{place}")


def _restart(cluster: "LocalCluster", args: argparse.Namespace) -> None:
    if running := [name for name in args.names if cluster.is_running(name)]:
        cluster.stop(*running)
    cluster.start(*args.names, tell=output.print_progress)
    _status(cluster, args)


def _logs(cluster: "LocalCluster", args: argparse.Namespace) -> None:
    if args.lines < 0:
        raise UsageError(f"--lines = {args.lines}: must not be negative")
    if args.follow and args.output == "json":
        raise UsageError("--follow has no -o json")
    path = cluster.log_path(args.node)
    with path.open(errors="replace") as file:
        last = [line.rstrip("\n") for line in deque(file, args.lines)]
        if args.output == "json":
            print(output.to_json({"node": args.node, "file": str(path), "lines": last}))
            return
        for line in last:
            print(line)
        while args.follow:
            sys.stdout.flush()
            if text := file.read():
                sys.stdout.write(text)
            else:
                time.sleep(POLL_S)


def _destroy(cluster: "LocalCluster", args: argparse.Namespace) -> int:
    from deploy.local import LaunchError

    nodes = cluster.nodes
    if not nodes:
        raise LaunchError(f"{cluster.directory}: no cluster was started there yet")
    what = f"destroy the cluster in {cluster.directory}"
    so = f"Its {len(nodes)} nodes are killed, and their timers and messages are lost."
    if not cli_args.confirm(args, what, so):
        return FAILED
    endpoints = ",".join(cluster.endpoints)
    left = cluster.destroy()
    document = {"destroyed": str(cluster.directory), "left": [*map(str, left)]}
    if args.output == "json":
        print(output.to_json(document))
        return 0
    print(f"{cluster.directory}: the cluster is destroyed")
    for path in left:
        print(f"not of the cluster, and left: {path}")
    with suppress(UsageError):  # the file of contexts is wrong
        for name, kept in contexts.load().named.items():
            if name.startswith(CONTEXT_PREFIX) and kept.get("endpoints") == endpoints:
                print(f"a context has its addresses: timerctl context remove {name}")
    return 0
