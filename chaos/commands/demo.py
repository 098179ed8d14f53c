"""The demo: timers survive two deaths of their leader, and an audit proves it.

    three nodes up -> clients schedule, cancel and consume all the time
                      kill -9 the leader while timers wait, restart it; twice
                   -> wait until all messages are delivered and acknowledged -> stop -> audit

The demo is a scenario of the chaos suite with some of its workloads. It runs on any machine: plain
processes with default settings. Each client writes a history of its calls
(chaos/history/history.py). The audit reads only the histories and the nodes' logs. The run's folder
stays, for `make audit RUN=…`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from chaos.suite import suite_commands
from chaos.suite.show import Bill, claimable
from chaos.suite.stage.plan import Need, RunOptions, Strike
from deploy.local import LaunchError

WORKLOADS: Final = ("uniform", "cancels", "singles")
FIRST_S: Final = 8.0
"""From the first schedule to the first kill."""
BETWEEN_S: Final = 10.0
"""From one kill to the next."""
DOWN_S: Final = 3.0
"""Time until a killed node is restarted."""
AFTER_S: Final = 4.0
"""From the last kill to the last schedule. Some schedules reach a dead leader."""


def bill_of(kills: int, timers: int, seed: int) -> Bill:
    """Return the demo as a scenario for the suite, with about so many timers."""
    times_s = [FIRST_S + BETWEEN_S * number for number in range(kills)]
    seconds = max(times_s, default=FIRST_S) + AFTER_S
    rate = max(1, round(timers / seconds))
    return Bill(
        scenario="demo",
        seed=seed,
        options=RunOptions(minutes=seconds / 60, workloads=WORKLOADS, rate_per_s=rate),
        schedule=[Strike(at_s=at_s, nemesis="kill", for_s=DOWN_S) for at_s in times_s],
        missing=dict.fromkeys(Need, ""),
        settings=(),
        complete=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.commands.demo`."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos.commands.demo",
        description="Run three nodes under load, kill the leader, and audit the run.",
    )
    parser.add_argument("--dir", type=Path, default=Path("run/demo"), help="the run's folder")
    parser.add_argument("--timers", type=int, default=30_000, help="about so many; default: 30000")
    parser.add_argument(
        "--kills", type=int, default=2, help="kills of the leader, ten seconds apart (default: 2)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the clients (default: 1)")
    args = parser.parse_args(argv)
    try:
        run, bill = claimable(args.dir), bill_of(args.kills, args.timers, args.seed)
        return suite_commands.play(run, bill)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
