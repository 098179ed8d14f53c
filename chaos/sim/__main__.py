"""Search for bugs by seed: `python -m chaos.sim [--seeds 300] [--start N] [--seed N] [--app A]`.

Applications of the simulated nodes: `ledger`, the protocol alone; `timers`, the whole state plane
with producers and consumers; by default they alternate, timers on odd seeds. What kind of world a
seed makes is drawn from it, as far as --nodes, --faults and --mischief don't say.

Same seed, same options, same commit, same run: the trace that is printed for a single seed is a
hash of all that happened. Exit status: 0 all promises held; 2 one was broken; 3 the code
itself failed, by an assertion or any other exception; 64 there are no worlds as were asked for.
"""

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Final, NoReturn

from chaos.sim.play import APPS, SeedOutcome, Task, play_all
from chaos.sim.world.options import FAULTS, FAULTS_MIN, MISCHIEF, NODES
from chaos.sim.world.referee import CHECKERS

EXIT_USAGE: Final = 64


class _Parser(argparse.ArgumentParser):
    """Ends with a status of its own: argparse's would say that a promise was broken."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake in the arguments, and end."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds; stop at the first that fails and tell how to run it again."""
    parser = make_parser()
    args = parser.parse_args(argv)
    for name in ("seeds", "seconds", "jobs"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    first = args.seed if args.seed is not None else args.start
    if first is None:
        first = secrets.randbits(31)
    count = 1 if args.seed is not None else args.seeds
    apps = [*APPS] if args.app == "both" else [args.app]
    aim = (args.nodes, args.faults, args.mischief)
    tasks = [
        Task(seed, apps[seed % len(apps)], args.seconds, *aim)
        for seed in range(first, first + count)
    ]
    try:
        tasks[0].world()
    except ValueError as error:
        parser.error(str(error))
    begun = time.perf_counter()
    total = SeedOutcome()
    for outcome in play_all(tasks, args.jobs):
        if outcome.exit_status:
            print(outcome.story)
            return outcome.exit_status
        total.add(outcome)
    took_s = time.perf_counter() - begun
    if args.json:
        print(json.dumps({"seeds": count, "took_s": took_s, "trace": total.trace, **total.counts}))
    else:
        print(_summary(total, tasks, took_s))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    checkers = "\n".join(f"  {name:<13} {promise}" for name, promise in CHECKERS.items())
    parser = _Parser(
        prog="python -m chaos.sim",
        description=__doc__,
        epilog=f"faults: {', '.join(FAULTS)}\n"
        f"mischief of the control plane: {', '.join(MISCHIEF)}\ncheckers:\n{checkers}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=300, help="how many seeds (default 300)")
    parser.add_argument("--start", type=int, help="first seed (default: random)")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--app", choices=["both", *APPS], default="both")
    parser.add_argument("--seconds", type=int, default=60, help="simulated seconds per seed")
    parser.add_argument("--nodes", type=int, choices=NODES)
    parser.add_argument("--faults", type=_names, metavar="A,B", help="only these, or none")
    parser.add_argument("--mischief", type=_names, metavar="A,B", help="only this, or none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel processes")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(text.split(","))


def _summary(total: SeedOutcome, tasks: Sequence[Task], took_s: float) -> str:
    faults, of = total.faults, total.counts
    struck = ", ".join(f"{kind} {number}" for kind, number in sorted(faults.items())) or "none"
    text = (
        f"PASSED {len(tasks)} seeds from {tasks[0].seed}, {tasks[0].seconds} s each:"
        f" {of['events']} events ({of['events'] / took_s:,.0f}/s), {of['entries']} entries"
        f" committed, {of['rows']} timers scheduled, fired and acked ({of['rows'] / took_s:,.0f}/s)"
        f", {of['epochs']} epochs served, {of['snapshots']} snapshots installed"
        f", {faults.total()} faults ({struck}) in {took_s:.1f} s"
    )
    if of["stranded"]:
        text += f"; {of['stranded']} worlds wait for the repair of a damaged replica"
    if of["calm"]:
        text += f"; {of['calm']} worlds met fewer than {FAULTS_MIN} faults: none else could strike"
    return f"{text}; trace {total.trace}" if len(tasks) == 1 else text


if __name__ == "__main__":
    if not __debug__:
        sys.exit("refusing to run under -O: assertions are the checkers")
    sys.exit(main())
