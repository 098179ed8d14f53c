"""What `timerctl chaos` does: run, replay, clean."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from chaos import workloads
from chaos.history import Run
from chaos.suite import plan, scenarios, stage
from chaos.suite.nemeses import needs_of
from chaos.suite.plan import Need, Options
from chaos.suite.scenarios import SCENARIOS
from chaos.suite.show import Bill, Show, fresh
from chaos.suite.stage import Stage
from chaos.workloads import Workload
from deploy.local import LaunchError

NODES_MAX: Final = 7
PLAIN: Final = "plain processes on loopback were asked for"


def run(  # noqa: PLR0913
    scenario: str,
    seed: int,
    *,
    folder: Path,
    nodes: int = 3,
    minutes: float = 10.0,
    clients: tuple[str, ...] = (),
    rate_per_s: int = 200,
    plain: bool = False,
) -> int:
    """Play a scenario in a folder; return the exit status.

    Raises:
        ValueError: an argument is none that a run can have; or the machine lacks all that the
            scenario is about.
        LaunchError, NetworkError, OSError: the cluster could not be brought up.
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"scenario = {scenario!r}: must be one of {', '.join(SCENARIOS)}")
    if nodes not in range(3, NODES_MAX + 1):
        raise ValueError(f"nodes = {nodes}: must be 3 .. {NODES_MAX}")
    if not 60 * minutes >= 10:
        raise ValueError(f"minutes = {minutes:g}: must be at least 10 s")
    target = fresh(folder)
    missing = _missing(target, plain=plain)
    _check_needs(scenario, SCENARIOS[scenario].needs, missing)
    options = Options(
        nodes=nodes,
        minutes=minutes,
        workloads=clients,
        rate_per_s=rate_per_s,
        without=tuple(sorted(missing)),
        plain=plain,
    )
    schedule = scenarios.schedule(scenario, seed, options)
    bill = Bill(
        scenario=scenario,
        seed=seed,
        options=options,
        schedule=schedule,
        left_out=scenarios.left_out(scenario, options),
        missing=missing,
        leader_gap_s_max=SCENARIOS[scenario].leader_gap_s_max,
    )
    return _play(target, bill)


def replay(earlier: Path, folder: Path) -> int:
    """Play the schedule of an earlier run anew, in another folder; return the exit status.

    Raises:
        ValueError: it is no run's folder; and as `run`.
    """
    about = Run(earlier).about
    if not about.exists():
        raise ValueError(f"{earlier} has no run.json: it is no run's folder")
    told = json.loads(about.read_text())
    options, known = plan.options_from_json(told["options"]), SCENARIOS.get(told["scenario"])
    schedule = plan.from_json(told["schedule"])
    target = fresh(folder)
    missing = _missing(target, plain=options.plain)
    needs = [needs_of(strike) for strike in schedule]
    if needs and not any(each.isdisjoint(missing) for each in needs):
        _check_needs(told["scenario"], frozenset().union(*needs), missing)
    bill = Bill(
        scenario=told["scenario"],
        seed=told["seed"],
        options=options,
        schedule=schedule,
        left_out=told["left_out"],
        missing=missing,
        leader_gap_s_max=known.leader_gap_s_max if known else None,
    )
    return _play(target, bill)


def clean(folder: Path) -> int:
    """Take down what dead harnesses left on this machine, and the nodes of runs in `folder`."""
    gone = stage.remove_stale()
    for about in sorted(folder.resolve().glob("*/run.json")):
        with contextlib.suppress(LaunchError):  # somebody plays there
            gone += stage.end_run(Run(about.parent))
    print("\n".join(f"removed {what}" for what in gone) or "nothing was left")
    return 0


def _check_needs(scenario: str, needs: frozenset[Need], missing: Mapping[Need, str]) -> None:
    """Raise ValueError if some of the needs are missing."""
    if lacking := sorted(needs.intersection(missing)):
        why = "; ".join(f"{need}: {missing[need]}" for need in lacking)
        raise ValueError(f"{scenario} is pointless without {why}")


def _missing(target: Run, *, plain: bool) -> dict[Need, str]:
    stage.remove_stale()
    if plain:
        return dict.fromkeys(Need, PLAIN)
    target.root.mkdir(parents=True, exist_ok=True)
    return stage.capabilities(target.root)


def _play(target: Run, bill: Bill) -> int:
    def make(there: Stage) -> Sequence[Workload]:
        options = bill.options
        return workloads.make(
            options.workloads or tuple(workloads.NAMES),
            run=target,
            endpoints=lambda: there.cluster.endpoints,
            seed=bill.seed,
            rate_per_s=options.rate_per_s,
            horizon_s=options.horizon_s,
        )

    print(f"{bill.scenario}, seed {bill.seed}, {bill.options.minutes:g} min, in {target.root}")
    return Show(target, bill, make).play()
