"""`timerctl audit`, `archive` and `chaos`: the subcommands that chaos/ adds to timerctl."""

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from timerclient.cli.cli_args import help_arguments
from timerclient.cli.cli_errors import INTERRUPTED
from timerclient.cli.missing_modules import why_missing

RUNS: Final = Path("run/chaos")
_BEGIN: Final = "exit codes:\n  0    every guarantee was kept"
AUDIT_CODES: Final = f"""\
{_BEGIN}, and no evidence is missing
  1    a guarantee was broken, or the run itself failed
  2    the folder can't be audited, or the audit could not run
  3    INCOMPLETE: no guarantee was seen broken, and evidence for some is missing
"""
RUN_CODES: Final = f"""\
{_BEGIN}, no evidence is missing, and the faults struck
  1    a guarantee was broken, or the run itself failed
  2    the run could not be played, or not be audited
  3    INCOMPLETE: no guarantee was seen broken, and evidence for some is missing
  130  interrupted: the run was not audited
"""
_RUN_OPTIONS: Final = (
    ("--nodes", 3, "N", "3 to 7 (default: 3)"),
    ("--minutes", 10.0, "M", "duration of load and faults, from 0.17 (default: 10)"),
    ("--workloads", "", "A,B", "names from `timerctl chaos list` (default: all)"),
    ("--rate", 200, "N", "timers per second, all workloads together (default: 200)"),
)
"""Options of `chaos run`: name, default, placeholder, help."""
_LIVE: Final = (
    ("--status", str, "HTTP HOST:PORT of the node, if the folder has the log of one node only"),
    ("--alerts", Path, "folder of the alerts (default: <RUN_DIR>/live/alerts)"),
    ("--overdue-ms", int, "a timer is late, a message lost, after this time (default: 5000)"),
    ("--horizon-ms", int, "a message that came is forgotten after this time (default: 600000)"),
    ("--stalled-ms", int, "alert if log or witness stand still this long (default: 10000)"),
)
"""Options that only the live audit has: name, type, help."""
_STOPS: Final = (signal.SIGINT, signal.SIGTERM)


def register(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add `timerctl audit`. Its parser sets `run`, a function of the parsed arguments."""
    parser = subparsers.add_parser(
        "audit",
        **_with_codes("check a run's folder against the guarantees (needs Java 17)", AUDIT_CODES),
    )
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument(
        "--check-history",
        action=argparse.BooleanOptionalAction,
        help="check the histories against their format first (default: if at most 256 MB)",
    )
    live = parser.add_argument_group("audit of a running cluster (docs/live-audit.md)")
    live.add_argument("--live", action="store_true", help="follow the nodes' logs until stopped")
    for name, of, what in _LIVE:  # an option that is not given is None
        live.add_argument(name, type=of, help=what)
    parser.set_defaults(run=_needing(_audit))


def register_archive(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add `timerctl archive`; see `register`."""
    text = "archive the log files that nodes delete, for an audit (docs/audit.md)"
    parser = subparsers.add_parser("archive", **help_arguments(text))
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="folder of a local cluster: archives all its nodes",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="instead of RUN_DIR: one node's data directory"
    )
    parser.add_argument(
        "--into", type=Path, metavar="ARCHIVE", help="with --data: the archive, on the same disk"
    )
    parser.set_defaults(run=_needing(_archive))


def register_chaos(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add `timerctl chaos`; see `register`."""
    text = "run real nodes under faults, then audit the run (docs/chaos.md)"
    chaos = subparsers.add_parser("chaos", **help_arguments(text))
    actions = chaos.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", **help_arguments("list the scenarios and the workloads"))
    listing.set_defaults(run=_needing(_list))
    run = actions.add_parser("run", **_with_codes("run a scenario and audit it", RUN_CODES))
    run.add_argument("scenario", metavar="SCENARIO", help="a name from `timerctl chaos list`")
    for name, default, metavar, what in _RUN_OPTIONS:
        run.add_argument(name, type=type(default), default=default, metavar=metavar, help=what)
    run.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="seed of the schedule and of the clients' choices (default: random)",
    )
    run.add_argument(
        "--plain", action="store_true", help="plain processes on loopback, even as root"
    )
    run.add_argument(
        "--dir", type=Path, metavar="D", help=f"folder of the run (default: {RUNS}/SCENARIO-SEED)"
    )
    run.set_defaults(run=_needing(_run))


def _with_codes(text: str, codes: str) -> dict[str, Any]:
    formatter = argparse.RawDescriptionHelpFormatter
    return {**help_arguments(text), "epilog": codes, "formatter_class": formatter}


def _needing(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return the command. If a module is not installed, it prints one line on stderr.

    A command imports its modules when it is called, so that timerctl starts quickly.
    """

    def run(args: argparse.Namespace) -> int:
        try:
            return command(args)
        except ModuleNotFoundError as missing:
            print(f"timerctl: {why_missing(missing, 'server,audit')}", file=sys.stderr)
            return 2

    return run


def _audit(args: argparse.Namespace) -> int:
    idle = [name for name, *_ in _LIVE if getattr(args, name[2:].replace("-", "_")) is not None]
    if args.live:
        idle = [] if args.check_history is None else ["--check-history"]
    if idle:
        which = "without" if args.live else "with"
        print(f"audit: {', '.join(idle)}: only {which} --live", file=sys.stderr)
        return 2
    if args.live:
        from chaos.live.live import run_live

        return run_live(args)
    from chaos.audit.command import run_audit

    return run_audit(args.folder, output=args.output, check_history=args.check_history)


def _archive(args: argparse.Namespace) -> int:
    from chaos.history.archive import run_archive

    return run_archive(args.folder, args.data, args.into)


def _list(_: argparse.Namespace) -> int:
    from chaos.suite.scenarios import SCENARIOS
    from chaos.workloads import KINDS

    for name, scenario in SCENARIOS.items():
        needs = ", ".join(sorted(scenario.needs))
        print(f"{name:18}{scenario.line}" + (f"  [root: {needs}]" if needs else ""))
    print("\nworkloads:")
    for name, kind in KINDS.items():
        print(f"{name:18}{kind.line}")
    return 0


def _interrupt(*_: object) -> None:
    """End the run: its processes, networks and disks. Later signals must not end that work."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # for the commands of that work, too
    for number in _STOPS:  # SIG_IGN has an error for a signal that has come already
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def _run(args: argparse.Namespace) -> int:
    import secrets  # late: it takes milliseconds of the help of timerctl

    from chaos.suite import suite_run
    from chaos.suite.stage.network import NetworkError
    from chaos.suite.stage.plan import RunOptions
    from deploy.local import LaunchError

    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    folder = args.dir or RUNS / f"{args.scenario}-{seed}"
    options = RunOptions(
        nodes=args.nodes,
        minutes=args.minutes,
        workloads=tuple(filter(None, args.workloads.split(","))),
        rate_per_s=args.rate,
        plain=args.plain,
    )
    for number in _STOPS:
        signal.signal(number, _interrupt)
    try:
        return suite_run.run(args.scenario, seed, options, folder)
    except (LaunchError, NetworkError, OSError, ValueError) as error:
        print(f"timerctl chaos: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        for number in _STOPS:  # the interpreter's end would restore the default
            signal.signal(number, signal.SIG_IGN)
        print("timerctl chaos: stopped", file=sys.stderr)
        return INTERRUPTED
