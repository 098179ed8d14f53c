"""The benchmarks: a cluster of three nodes and one client process, on this machine.

    python -m bench [--only s1,s3] [--repeat N] [--full] [--baseline]
    python -m bench --audit [--only s4]     the same with recorded traffic, which is then audited
    python -m bench profile s1 [--of leader|follower|client] [--threads]
    python -m bench stages [--runs N] [--memory]

The short form takes less than three minutes. Targets are judged by the full form (--full, or
BENCH=full). Client and nodes share the machine's cores, so no other work should run meanwhile.
Results are stored in run/bench/ (bench/bench_results.py). Each table also shows the last results.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bench import bench_results, cpu, table
from bench.bench_audit import AuditOutcome, audit
from bench.bench_machine import ROOT
from bench.bench_results import MeasureOutcome
from bench.busy_topics import S13
from bench.calibration import calibration_s
from bench.churn import S15
from bench.delivery import S4, S5, S6
from bench.failover import S9
from bench.http_singles import S16
from bench.idle import S12
from bench.idlers import S14
from bench.ingest import S1, S2, S3
from bench.measure import Form, Measure, Series
from bench.pending_costs import S7_S8_S10
from bench.profile import SampledProcess, flame_graph, pid_of
from bench.rig import BenchError, Rig, new_rig
from bench.sim import SIM
from bench.stages import STAGE_COSTS, cpu_table, memory_table
from bench.step_times import P9
from bench.writing import S11
from deploy.local import LaunchError
from timerclient import TimerError

MEASURES: Final[dict[str, Measure]] = {
    measure.name: measure
    for measure in (
        S1,
        S2,
        S3,
        S4,
        S5,
        S6,
        S7_S8_S10,
        S9,
        S11,
        S12,
        S13,
        S14,
        S15,
        S16,
        P9,
        STAGE_COSTS,
        SIM,
    )
}
"""Every measure, in the order of the table. A new measure is a function and one line here."""

BASELINE: Final = ROOT / "bench" / "baseline.json"
RESULTS: Final = ROOT / "run" / "bench"
PROFILE_S: Final = 5.0
"""A profile repeats a run until this time has passed."""
POLL_INTERVAL_S: Final = 0.5
"""Seconds for which the machine's load is observed before a measure."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks. Return exit status 1 if a measure failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops the nodes
    try:
        with asyncio.Runner() as loop:
            if arguments[:1] == ["profile"]:
                return _profile(arguments[1:], loop)
            if arguments[:1] == ["stages"]:
                return _stages(arguments[1:])
            return _measure(arguments, loop)
    except (BenchError, LaunchError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


# ---- measuring


def _measure(arguments: Sequence[str], loop: asyncio.Runner) -> int:
    titles = "\n".join(f"  {name:9}{measure.title}" for name, measure in MEASURES.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure the cluster's speed.",
        epilog=f"measures:\n{titles}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        type=_measures_of,
        metavar="S1,S3",
        help="names of measures (default: all)",
    )
    parser.add_argument(
        "--repeat", type=_runs, metavar="N", help="runs of each measure (default: its own number)"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        default=os.environ.get("BENCH") == "full",
        help="the full form, by which targets are judged",
    )
    use = parser.add_mutually_exclusive_group()
    use.add_argument("--baseline", action="store_true", help=f"write {BASELINE.name}, too")
    use.add_argument(
        "--audit",
        action="store_true",
        help="record the clients' traffic and audit it afterwards; needs Java",
    )
    parser.add_argument("--dir", type=Path, default=RESULTS, help="results, and the nodes' data")
    args = parser.parse_args(arguments)
    form = Form.FULL if args.full else Form.SHORT
    measures = args.only or [m for m in MEASURES.values() if m.recorded or not args.audit]
    if args.audit and (plain := [m.name for m in measures if not m.recorded]):
        known = ", ".join(m.name for m in MEASURES.values() if m.recorded)
        parser.error(f"--only {', '.join(plain)}: can't be audited; these can: {known}")
    head = bench_results.head_of(args.dir, form)
    last = bench_results.last_values(args.dir, BASELINE)
    outcomes = []
    for measure in measures:
        runs = args.repeat or measure.runs[form]
        outcome = MeasureOutcome(measure, busy_cores_before=cpu.busy_cores(POLL_INTERVAL_S))
        _run(outcome, runs, form, args.dir / f"data-{head.utc}", loop, audited=args.audit)
        outcomes.append(outcome)
    path = args.dir / f"{head.stem}.json"
    bench_results.save(path, head, outcomes)
    if args.baseline:
        bench_results.save(BASELINE, head, outcomes)
    print(table.render(outcomes, last))
    print(f"commit {head.commit}, {form} form: {os.path.relpath(path)}")
    return int(any(each.error or not all(a.ok for a in each.audits) for each in outcomes))


def _runs(text: str) -> int:
    """Return a number of runs, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return int(text)


def _measures_of(text: str) -> list[Measure]:
    """Return the measures that a list such as s1,s3 names, in the table's order."""
    names = {name.strip().lower() for name in text.split(",")}
    if unknown := names - MEASURES.keys():
        known = ", ".join(MEASURES)
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {known}")
    return [measure for name, measure in MEASURES.items() if name in names]


def _run(
    outcome: MeasureOutcome, runs: int, form: Form, data: Path, loop: asyncio.Runner, *,
    audited: bool,
) -> None:  # fmt: skip
    """Add the series of `runs` runs. A failure ends this measure only."""
    audits = outcome.audits if audited else None
    try:
        outcome.calibrations_s.append(calibration_s())
        for series in _series(outcome.measure, runs, form, data, loop, audits):
            outcome.add(series)
            outcome.calibrations_s.append(calibration_s())
    except (BenchError, LaunchError, TimerError, ExceptionGroup) as error:
        outcome.error = f"{type(error).__name__}: {_text(error)}"
        print(f"{outcome.measure.name}: {outcome.error}", file=sys.stderr)


def _text(error: Exception) -> str:
    if isinstance(error, ExceptionGroup):
        texts = [f"{type(each).__name__}: {_text(each)}" for each in error.exceptions]
    else:
        texts = [str(error)]
    return "; ".join([*texts, *getattr(error, "__notes__", [])])


def _series(
    measure: Measure, runs: int, form: Form, data: Path, loop: asyncio.Runner,
    audits: list[AuditOutcome] | None,
) -> Iterator[Series]:  # fmt: skip
    """Yield each run's series. All runs share one cluster, except for a measure with `fresh`.

    `audits`: the result of each cluster's audit is appended. None: there is no audit.
    """
    numbers = range(1, runs + 1)
    if measure.alone is not None:
        for number in numbers:
            _announce(measure, number, runs)
            yield measure.alone(form)
        return
    assert measure.run is not None
    for group in [[number] for number in numbers] if measure.fresh else [numbers]:
        directory = data.with_name(f"{data.name}-{measure.name}-{group[0]}")
        with new_rig(directory, loop, evidence=audits is not None) as rig:
            for number in group:
                _announce(measure, number, runs)
                yield measure.run(rig, form)
        if audits is not None:
            audits.append(_audit(directory))


def _audit(directory: Path) -> AuditOutcome:
    """Audit a cluster that has ended, and delete its directory if all is well."""
    print(f"audit of {os.path.relpath(directory)} ...", file=sys.stderr, flush=True)
    result = audit(directory)
    print(f"audit: {result.text()}", file=sys.stderr, flush=True)
    if result.ok:
        shutil.rmtree(directory)
    return result


def _announce(measure: Measure, number: int, runs: int) -> None:
    print(f"{measure.name} {number}/{runs}: {measure.title} ...", file=sys.stderr, flush=True)


def _stages(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench stages", description="Measure each stage of a timer's life."
    )
    parser.add_argument("--runs", type=_runs, default=3, metavar="N", help="runs of each case")
    parser.add_argument("--memory", action="store_true", help="bytes in place of CPU time")
    args = parser.parse_args(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for line in memory_table() if args.memory else cpu_table(args.runs, RESULTS):
        print(line)
    return 0


# ---- profiling


def _one_run(measure: Measure, rig: Rig | None) -> Series:
    if measure.alone is not None:
        return measure.alone(Form.SHORT)
    assert measure.run is not None
    assert rig is not None
    return measure.run(rig, Form.SHORT)


def _profile(arguments: Sequence[str], loop: asyncio.Runner) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench profile", description="Draw a flame graph."
    )
    parser.add_argument("measure", choices=[*MEASURES])
    parser.add_argument(
        "--of",
        type=SampledProcess,
        choices=[*SampledProcess],
        default=SampledProcess.LEADER,
        help="process (default: leader)",
    )
    parser.add_argument("--threads", action="store_true", help="also threads without the GIL")
    parser.add_argument("--dir", type=Path, default=RESULTS, help="graphs, and the nodes' data")
    args = parser.parse_args(arguments)
    measure = MEASURES[args.measure]
    head = bench_results.head_of(args.dir, Form.SHORT)
    who = args.of if measure.alone is None else SampledProcess.CLIENT
    svg = args.dir / f"{head.stem}-{measure.name}-{who}.svg"
    outcome = MeasureOutcome(measure, busy_cores_before=cpu.busy_cores(POLL_INTERVAL_S))
    with contextlib.ExitStack() as stack:
        rig = None
        if measure.run is not None:
            rig = stack.enter_context(new_rig(args.dir / f"data-{head.utc}", loop))
        stack.enter_context(
            flame_graph(pid_of(rig, who), svg, f"{who}: {measure.title}", threads=args.threads)
        )
        until = time.monotonic() + PROFILE_S
        while not outcome.runs or time.monotonic() < until:
            outcome.add(_one_run(measure, rig))
    print(table.render([outcome], bench_results.last_values(args.dir, BASELINE)))
    print(f"not stored, as sampling disturbs these figures: {os.path.relpath(svg)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
