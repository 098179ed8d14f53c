"""Search for bugs by seed: `python -m chaos.sim [--seeds 300] [--start N] [--seed N]`.

Same seed, same commit, same run. Exit status: 0 all promises held; 2 one was broken; 3 an
assertion of the code failed.
"""

import argparse
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence

from chaos.sim.referee import Broken
from chaos.sim.world import World

EXIT_PROMISE = 2
EXIT_ASSERTION = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds; stop at the first that fails and tell how to run it again."""
    parser = argparse.ArgumentParser(prog="python -m chaos.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many seeds (default 300)")
    parser.add_argument("--start", type=int, help="first seed (default: drawn)")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--seconds", type=int, default=60, help="simulated, per seed")
    args = parser.parse_args(argv)
    first = args.seed if args.seed is not None else args.start
    if first is None:
        first = secrets.randbits(31)
    count = 1 if args.seed is not None else args.seeds
    begun = time.perf_counter()
    events = entries = epochs = 0
    faults: Counter[str] = Counter()
    for seed in range(first, first + count):
        world = World(seed)
        try:
            world.run(args.seconds)
        except AssertionError as error:
            print("\n".join(world.story()))
            print(f"options: {world.options}")
            kind = "PROMISE BROKEN" if isinstance(error, Broken) else "ASSERTION"
            print(f"{kind}: {error}")
            print(f"reproduce: python -m chaos.sim --seed {seed} --seconds {args.seconds}")
            if not isinstance(error, Broken):
                raise
            return EXIT_PROMISE
        events += world.timeline.events
        entries += len(world.referee.committed)
        epochs += world.referee.epochs
        faults.update(world.faults.injected)
    took_s = time.perf_counter() - begun
    injected = ", ".join(f"{kind} {number}" for kind, number in sorted(faults.items()))
    print(
        f"PASSED {count} seeds from {first}, {args.seconds} s each: {events} events"
        f" ({events / took_s:,.0f}/s), {entries} entries committed, {epochs} epochs served,"
        f" {sum(faults.values())} faults ({injected}) in {took_s:.1f} s"
    )
    return 0


if __name__ == "__main__":
    if not __debug__:
        sys.exit("refusing to run under -O: assertions are the checkers")
    try:
        sys.exit(main())
    except AssertionError:
        import traceback

        traceback.print_exc()
        sys.exit(EXIT_ASSERTION)
