"""The command `timerctl chaos run`."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from chaos import workloads
from chaos.history.history import RunFolder
from chaos.suite import scenarios
from chaos.suite.scenarios import SCENARIOS
from chaos.suite.show import Bill, Show, claimable, clear
from chaos.suite.stage import stage
from chaos.suite.stage.plan import Need, RunOptions
from chaos.suite.stage.stage import Stage
from chaos.workloads import Workloads
from chaos.workloads.workload_clients import Setting

NODES_MAX: Final = 7
MINUTES_MAX: Final = 7 * 24 * 60
PLAIN: Final = "plain processes on loopback were requested"


def run(scenario: str, seed: int, options: RunOptions, folder: Path) -> int:
    """Play a scenario in a folder; return the exit status.

    Args:
        scenario: a name of SCENARIOS.
        seed: of the schedule and of the clients' random choices.
        options: 3 .. NODES_MAX nodes; 10 s to MINUTES_MAX.
        folder: of the run: absent, empty, or an earlier run's, which is replaced.

    Raises:
        ValueError: an argument is out of range, or the machine lacks a need of the scenario.
        LaunchError, NetworkError, OSError: the cluster could not be started.
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"scenario = {scenario!r}: must be one of {', '.join(SCENARIOS)}")
    _check(options)
    target = claimable(folder)
    missing = _missing(plain=options.plain)
    if lacking := sorted(SCENARIOS[scenario].needs.intersection(missing)):
        why = "; ".join(f"{need}: {missing[need]}" for need in lacking)
        raise ValueError(f"{scenario} needs {why}")
    options = replace(options, without=tuple(sorted(missing)))
    bill = Bill(
        scenario=scenario,
        seed=seed,
        options=options,
        schedule=scenarios.schedule(scenario, seed, options),
        left_out=scenarios.left_out(scenario, options),
        missing=missing,
        strikes_apart_max=SCENARIOS[scenario].strikes_apart_max,
        complete=SCENARIOS[scenario].complete,
    )
    return play(target, bill)


def _check(options: RunOptions) -> None:
    """Raise ValueError if an option is out of range."""
    if options.nodes not in range(3, NODES_MAX + 1):
        raise ValueError(f"nodes = {options.nodes}: must be 3 .. {NODES_MAX}")
    if not 10 <= options.horizon_s <= 60 * MINUTES_MAX:
        limits = f"10 s to {MINUTES_MAX:,} minutes"
        raise ValueError(f"minutes = {options.minutes:g}: must be {limits}")
    names, rate_per_s = options.workloads, options.rate_per_s
    workloads.check(names, rate_per_s=rate_per_s, horizon_s=options.horizon_s)


def _missing(*, plain: bool) -> dict[Need, str]:
    """Return the needs that this machine does not meet, each with the reason."""
    stage.remove_stale()
    if plain:
        return dict.fromkeys(Need, PLAIN)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        probe = RunFolder(Path(folder).resolve())
        with stage.owning(probe):  # so that the next run finds the leftovers if this one dies
            return stage.capabilities(probe.root / "nodes")


def play(target: RunFolder, bill: Bill) -> int:
    """Play a run in place of an earlier one in its folder; return the exit status."""
    clear(target)

    def make(there: Stage) -> Workloads:
        options = bill.options
        setting = Setting(
            run=target,
            endpoints=lambda: there.cluster.endpoints,
            seed=bill.seed,
            rate_per_s=options.rate_per_s,
            horizon_s=options.horizon_s,
        )
        return Workloads(options.workloads or tuple(workloads.KINDS), setting)

    print(f"{bill.scenario}, seed {bill.seed}, {bill.options.minutes:g} min, in {target.root}")
    return Show(target, bill, make).play()
