"""Search for bugs by seed: `python -m chaos.sim [--seeds 300] [--start N] [--seed N] [--app A]`.

Applications of the simulated nodes: `ledger`, the protocol alone; `timers`, the whole state plane
with producers and consumers; by default they alternate, timers on odd seeds.

Same seed, same commit, same run. Exit status: 0 all promises held; 2 one was broken; 3 an
assertion of the code failed.
"""

import argparse
import os
import secrets
import sys
import time
from collections.abc import Sequence

from chaos.sim.play import APPS, Outcome, Task, play_all


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds; stop at the first that fails and tell how to run it again."""
    parser = argparse.ArgumentParser(prog="python -m chaos.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many seeds (default 300)")
    parser.add_argument("--start", type=int, help="first seed (default: drawn)")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--app", choices=["both", *APPS], default="both")
    parser.add_argument("--seconds", type=int, default=60, help="simulated, per seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(argv)
    first = args.seed if args.seed is not None else args.start
    if first is None:
        first = secrets.randbits(31)
    count = 1 if args.seed is not None else args.seeds
    names = [*APPS] if args.app == "both" else [args.app]
    tasks = [
        Task(seed, names[seed % len(names)], args.seconds) for seed in range(first, first + count)
    ]
    begun = time.perf_counter()
    total = Outcome()
    for outcome in play_all(tasks, args.jobs):
        if outcome.exit_status:
            print(outcome.story)
            return outcome.exit_status
        total.events += outcome.events
        total.entries += outcome.entries
        total.epochs += outcome.epochs
        total.faults.update(outcome.faults)
    took_s = time.perf_counter() - begun
    injected = ", ".join(f"{kind} {number}" for kind, number in sorted(total.faults.items()))
    print(
        f"PASSED {count} seeds from {first}, {args.seconds} s each: {total.events} events"
        f" ({total.events / took_s:,.0f}/s), {total.entries} entries committed,"
        f" {total.epochs} epochs served, {total.faults.total()} faults ({injected})"
        f" in {took_s:.1f} s"
    )
    return 0


if __name__ == "__main__":
    if not __debug__:
        sys.exit("refusing to run under -O: assertions are the checkers")
    sys.exit(main())
