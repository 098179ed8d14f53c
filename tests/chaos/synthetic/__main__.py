"""`python -m tests.chaos.synthetic FOLDER --timers N`."""

import argparse
import sys
import time
from pathlib import Path

from tests.chaos.synthetic.synthetic_world import PLANTS, SyntheticPlan, SyntheticWorld


def counts(text: str) -> dict[str, int]:
    """Return the counts of a text such as `lost=1,early=2`; a kind without a number counts one."""
    pairs = (pair.partition("=") for pair in text.split(",") if pair)
    return {kind: int(number or 1) for kind, _, number in pairs}


def main() -> int:
    """Write one synthetic run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.synthetic",
        description="write a synthetic run's folder",
        epilog=f"kinds of defects: {', '.join(PLANTS)}",
    )
    parser.add_argument("folder", type=Path, help="the folder to write; it must not exist")
    parser.add_argument("--timers", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--nodes", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--keyed", type=float, default=0.0, help="share of timers with keys, 0 to 1"
    )
    parser.add_argument(
        "--plant", type=counts, default={}, help="defects to plant: kind=number,kind=number,…"
    )
    parser.add_argument(
        "--diverged-entry",
        action="store_true",
        help="write one SCHEDULE entry with other due times on the last node",
    )
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists; name a new folder")
    try:
        plan = SyntheticPlan(
            timers=args.timers,
            nodes=args.nodes,
            keyed=args.keyed,
            plant=args.plant,
            diverged_entry=args.diverged_entry,
            seed=args.seed,
        )
    except ValueError as wrong:
        parser.error(str(wrong))
    args.folder.mkdir(parents=True)
    began = time.monotonic()
    SyntheticWorld(args.folder, plan).write(lambda text: print(f"\r{text}", end="", flush=True))
    print(f"\n{args.folder}: {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
