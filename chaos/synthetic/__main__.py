"""`python -m chaos.synthetic FOLDER --timers N`."""

import argparse
import sys
import time
from pathlib import Path

from chaos.synthetic.synthetic_world import PLANTS, SyntheticPlan, SyntheticWorld


def counts(text: str) -> dict[str, int]:
    """Return what `lost=1,early=2` says."""
    pairs = (pair.partition("=") for pair in text.split(",") if pair)
    return {kind: int(number or 1) for kind, _, number in pairs}


def main() -> int:
    """Write one synthetic run."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos.synthetic",
        description="write a run's folder of any size",
        epilog=f"to plant: {', '.join(PLANTS)}",
    )
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--timers", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument(
        "--keyed", type=float, default=0.0, help="share of timers with keys, 0 to 1"
    )
    parser.add_argument("--plant", type=counts, default={}, help="kind=number,…")
    parser.add_argument("--diverged-entry", action="store_true", help="on the last node")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists already")
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
