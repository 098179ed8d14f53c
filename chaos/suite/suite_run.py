"""`timerctl chaos run`: one run from an empty folder to a verdict.

    run.json written ─► stage up ─► workloads start ─► strikes, in lanes ─► producing stops
    ─► heal ─► drain ─► clients close ─► stage down ─► audit ─► the verdict

Each step writes its records to the run's folder before the next one begins. A nemesis that fails, a
node that does not come back, or a drain that times out is recorded and printed. The run then
continues to the audit.

The run prints the numbers of the strikes that fell and of those that did not. A strike does not
fall if time is up first, or if it has no effect (chaos/suite/nemeses/nemesis.py). A run without any
strike proves nothing, and fails. A run that has to be complete fails if one strike did not fall.
"""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from chaos.history.history import (
    CLIENTS_ERROR,
    OWNER,
    RUNNING,
    RunFolder,
    leader_kills,
    leader_kills_text,
    read_faults,
)
from chaos.spark.session import why_no_java
from chaos.suite import scenarios
from chaos.suite.nemeses import NEMESES
from chaos.suite.nemeses.nemesis import NoEffect
from chaos.suite.scenarios import SCENARIOS
from chaos.suite.stage import stage as stages
from chaos.suite.stage.network import NetworkError
from chaos.suite.stage.network import run as run_program
from chaos.suite.stage.plan import Lane, Need, RunOptions, Strike, clock_error_ms
from chaos.suite.stage.stage import MANY_SETTINGS, Stage, end_run
from chaos.workloads import KINDS, Workloads, check
from chaos.workloads.workload_clients import Setting
from deploy.local import LaunchError
from timerclient.values.errors import TimerError

DRAIN_S: Final = 90.0
"""The clients have received all messages within this after the last strike is healed. Recovery from
a strike takes seconds."""
CLEAN_UP_S: Final = 30.0
"""An audit that is stopped has removed its temporary files within this."""
POLL_S: Final = 0.1
NOT_REACHED: Final = "time was up"
_TURN_LANES: Final = (Lane.NODES, Lane.LEADER)
GIVE_WAY_S: Final = 2.0
"""A strike at nodes waits for a promised kill that is due within this time."""
HEAL_S: Final = 12.0
"""Least time between two kills of the leader while a node heals. After each kill the node starts to
fetch its files from the new leader."""
NODES_MAX: Final = 7
MINUTES_MAX: Final = 7 * 24 * 60
PLAIN: Final = "plain processes on loopback were requested"
_DISTRIBUTIONS: Final = ("timer-cluster", "grpcio", "numpy", "pyarrow", "pyspark", "pysyncobj")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan of a run: scenario, schedule and rules of failure."""

    scenario: str
    seed: int
    options: RunOptions
    schedule: Sequence[Strike]
    left_out: Sequence[str] = ()
    """Lines about faults that the schedule leaves out."""
    missing: Mapping[Need, str] = field(default_factory=dict)
    """Needs that the stage does without, each with the reason."""
    strikes_apart_max: int | None = None
    """The run fails if more strikes than this fell between two kills of a leader, or before the
    first, or after the last. None: not checked."""
    complete: bool = False
    """See Scenario."""


@dataclass(slots=True)
class PlannedStrike:
    """One strike of the schedule."""

    number: int
    """In the schedule, from 1."""
    strike: Strike
    why: str = NOT_REACHED
    """The reason why it did not fall; empty: it fell. One that failed counts as fallen: the run
    fails anyway."""
    has_turn: bool = False
    """It has got its turn."""


class SuiteRun:
    """One run in one folder. `execute` once."""

    def __init__(
        self,
        run: RunFolder,
        plan: RunPlan,
        *,
        audit: Sequence[str] = (sys.executable, "-m", "chaos.audit"),
    ) -> None:
        """Prepare a run.

        Args:
            run: its folder; absent or empty.
            plan: its plan.
            audit: the command of the audit. The run's folder is appended as its last argument.
        """
        self._run = run
        self._plan = plan
        self._workloads: Workloads | None = None
        self._audit = audit
        self._began = math.inf
        """When the workloads began, on the monotonic clock; infinite: they have not."""
        self._over = threading.Event()
        self._failures: list[str] = []
        self._killed_s = -math.inf
        """Start of the last promised kill of the leader, in seconds of the run."""
        self._planned = [PlannedStrike(*each) for each in enumerate(plan.schedule, 1)]
        self._leader_kills: dict[str, int] = {}

    def execute(self) -> int:
        """Execute the run and audit it.

        Returns:
            0; or the audit's exit status; or 1 if the audit succeeded and the run itself failed.
        """
        self._write(RUNNING)
        self._print_left_out()
        plan = self._plan
        with contextlib.ExitStack() as stack:
            stage = Stage(self._run, plan.options.nodes, missing=plan.missing, say=self._print)
            stack.enter_context(stage)
            count = {3: "three", 5: "five"}.get(plan.options.nodes, str(plan.options.nodes))
            self._print(f"{count} nodes are up, {stage.leader()} leads")
            self._run_workloads(stage)
            self._attempt("taking the stage down", stack.close)
        self._failures += stage.failures
        self._check_strikes()
        self._print("all nodes stopped; the audit of histories and logs takes a minute or more")
        self._print_failures()
        self._write("stopped")
        status = self._run_audit()
        self._check_audit_counts()
        self._write("audited", audit_status=status)
        return status or bool(self._failures)

    def _run_audit(self) -> int:
        """Run the audit; return its exit status. A stop of the run ends it by one SIGINT."""
        words = [*self._audit, str(self._run.root)]
        with subprocess.Popen(words, start_new_session=True) as audit:  # no SIGINT of the terminal
            try:
                return audit.wait(threading.TIMEOUT_MAX)  # polls: `waitpid` may miss a SIGINT
            except KeyboardInterrupt:
                audit.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    audit.wait(CLEAN_UP_S)
                raise
            finally:
                audit.kill()

    def _check_audit_counts(self) -> None:
        """Fail the run for acks that no client sent, and for nodes that reported no counts.

        The audit itself only counts both.
        """
        path = self._run.audit / "summary.json"
        if not path.exists():
            return  # the audit failed, as its exit status shows
        summary = json.loads(path.read_text())
        unasked, reporting = summary["acks_unasked"], summary["conservation"]["said"]["nodes"]
        if unasked is None:
            self._print("LEFT OUT, too many acks to search for those that no client sent")
        elif unasked:  # the suite's clients record each ack before they send it
            self._fail(f"{unasked} messages were acked, and no client sent the acks")
        if reporting < (nodes := self._plan.options.nodes):
            self._fail(f"only {reporting} of {nodes} nodes reported their counts")

    # ---- the run

    def _run_workloads(self, stage: Stage) -> None:
        plan = self._plan
        with contextlib.ExitStack() as stack:
            setting = Setting(
                run=self._run,
                endpoints=lambda: stage.cluster.endpoints,
                seed=plan.seed,
                rate_per_s=plan.options.rate_per_s,
                horizon_s=plan.options.horizon_s,
            )
            names = plan.options.workloads or tuple(KINDS)
            workloads = self._workloads = Workloads(names, setting)
            stack.callback(self._attempt, "the workloads", workloads.close)
            self._began = time.monotonic()
            workloads.start()
            lanes = [
                threading.Thread(target=self._run_lane, args=(stage, lane), name=lane, daemon=True)
                for lane in Lane
            ]
            try:
                for lane in lanes:
                    lane.start()
                time.sleep(max(0.0, plan.options.horizon_s - self._elapsed_s))
                if plan.complete:
                    for lane in lanes:
                        lane.join()
            finally:
                self._over.set()
                for lane in filter(threading.Thread.is_alive, lanes):  # maybe not all have begun
                    lane.join()
                workloads.stop_producing()
                self._attempt("healing", partial(self._restore_nodes, stage))
            self._drain(stage, workloads)

    def _run_lane(self, stage: Stage, lane: Lane) -> None:
        for each in self._planned:
            if each.strike.lane is lane:
                if self._over.wait(max(0.0, each.strike.at_s - self._elapsed_s)):
                    return
                if lane is Lane.NODES:
                    self._give_way()
                if self._over.is_set():
                    return
                self._attempt(each.strike.nemesis, partial(self._strike, stage, each))

    def _give_way(self) -> None:
        """Wait until the next kill of the leader has begun, if it is due within GIVE_WAY_S.

        At most one kill goes first.
        """
        until_s = self._elapsed_s + GIVE_WAY_S
        kills = (p for p in self._planned if p.strike.lane is Lane.LEADER and not p.has_turn)
        kill = next(kills, None)
        while kill is not None and kill.strike.at_s <= until_s and not kill.has_turn:
            if self._over.wait(POLL_S):
                return

    def _let_heal(self, stage: Stage) -> None:
        """While a node heals, wait until HEAL_S have passed since the last kill of the leader."""
        while stage.waited_for and self._elapsed_s < self._killed_s + HEAL_S:
            if self._over.wait(POLL_S):
                return

    def _strike(self, stage: Stage, planned: PlannedStrike) -> None:
        """Start one strike, once it has its turn, all nodes are up and the cluster is whole."""
        lane = planned.strike.lane
        if lane is Lane.NODES:
            self._print(self._progress())
        with stage.turn if lane in _TURN_LANES else contextlib.nullcontext():
            planned.has_turn = True
            if lane is Lane.LEADER:
                self._let_heal(stage)
            if self._over.is_set():  # time was up while the strike waited
                return
            if lane in _TURN_LANES:
                self._restore_nodes(stage)
            if lane is Lane.LEADER:
                self._killed_s = self._elapsed_s
            self._strike_now(stage, planned)

    def _strike_now(self, stage: Stage, planned: PlannedStrike) -> None:
        number, strike, planned.why = planned.number, planned.strike, ""
        chance = random.Random(f"{self._plan.seed}/{number}")
        with stage.struck_by(number):
            stage.record("strike", nemesis=strike.nemesis, args=dict(strike.args))
            try:
                with NEMESES[strike.nemesis].strike(stage, chance, **strike.args):
                    self._over.wait(strike.for_s)
            except NoEffect as reason:
                planned.why = str(reason)
                stage.record("fizzled", why=planned.why)
                self._print(f"FIZZLED: {number}, {strike.nemesis}: {reason}")
                if strike.lane in _TURN_LANES:
                    self._restore_nodes(stage)
            finally:
                stage.record("healed")

    def _restore_nodes(self, stage: Stage) -> None:
        """Resume and restart all nodes that are away, except lost ones; wait until all are sure.

        Nodes that a nemesis waits for are left to that nemesis. While there is one, this method
        does not wait.
        """
        died = stage.note_deaths()
        self._failures += [f"{name} ended by itself" for name in died]
        excluded = stage.lost | stage.waited_for
        for name in stage.away - excluded:
            stage.resume(name)
        down = [n for n in stage.names if n not in excluded and not stage.cluster.is_running(n)]
        if down:
            stage.restart(*down)
        if not stage.waited_for:
            stage.wait_until_sure()

    def _drain(self, stage: Stage, workloads: Workloads) -> None:
        """Wait until all clients have received all messages, for at most DRAIN_S."""
        deadline = time.monotonic() + DRAIN_S
        while (waiting := workloads.waiting()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        stage.record("gave_up" if waiting else "drained")
        if waiting:
            self._failures.append(f"not drained within {DRAIN_S:g} s: {', '.join(waiting)}")
        self._failures += [f"{name} ended by itself" for name in stage.note_deaths()]
        rest = "some messages are missing" if waiting else "no message is missing"
        self._print(f"{self._progress()}; {rest}")

    # ---- strikes that fell

    @property
    def _struck(self) -> list[PlannedStrike]:
        return [each for each in self._planned if not each.why]

    @property
    def _missed(self) -> list[PlannedStrike]:
        return [each for each in self._planned if each.why]

    def _check_strikes(self) -> None:
        """Record failures for strikes that did not fall, and for too few kills of a leader.

        The kills are those that the timeline has.
        """
        if self._missed and self._plan.complete:
            self._failures.append(f"these strikes did not fall: {spans(self._missed)}")
        elif self._planned and not self._struck:
            self._failures.append(f"no strike fell, of {spans(self._planned)}")
        self._leader_kills = leader_kills(read_faults(self._run.faults))
        strikes, most = self._leader_kills.get("strikes_apart", 0), self._plan.strikes_apart_max
        if most is not None and strikes > most:
            self._failures.append(f"no leader was killed during {strikes} strikes: limit {most}")

    def _print_strikes(self) -> None:
        struck, planned = self._struck, len(self._planned)
        counts = Counter(each.strike.nemesis for each in struck)
        kinds = ", ".join(f"{n} x {name}" for name, n in sorted(counts.items()))
        some = f"; numbers {spans(struck)} of the plan" if 0 < len(struck) < planned else ""
        self._print(f"{len(struck)} of {planned} planned faults happened: {kinds or 'none'}{some}")
        if kills := leader_kills_text(self._leader_kills):
            self._print(kills)
        if late := [each for each in self._missed if each.why == NOT_REACHED]:
            self._print(f"DID NOT HAPPEN: {spans(late)}: {NOT_REACHED}")
        for each in self._missed:
            if each.why != NOT_REACHED:
                self._print(f"DID NOT HAPPEN: {each.number}, {each.strike.nemesis}: {each.why}")

    # ---- failures

    def _attempt(self, step: str, work: Callable[[], object]) -> None:
        """Call `work`. A failure is recorded and printed."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a defect of the suite must not prevent the audit
            known = isinstance(error, LaunchError | NetworkError | OSError | TimerError)
            why = error if known else traceback.format_exc()
            self._fail(f"{step}: {why}")

    def _fail(self, failure: str) -> None:
        self._failures.append(failure)
        self._print(f"FAILED: {failure}")

    def _print_failures(self) -> None:
        self._print_strikes()
        self._print_left_out()
        for failure in self._failures:
            self._print(f"FAILED: {failure}")

    def _print_left_out(self) -> None:
        for line in self._plan.left_out:
            self._print(f"LEFT OUT, {line}")
        for need, why in self._plan.missing.items():
            self._print(f"WITHOUT {need}: {why}")

    # ---- texts and run.json

    @property
    def _elapsed_s(self) -> float:
        return max(0.0, time.monotonic() - self._began)

    def _progress(self) -> str:
        books = [each.books for each in self._workloads.each] if self._workloads else []
        requested, unanswered, delivered = (
            sum(getattr(each, name) for each in books)
            for name in ("asked", "unanswered", "delivered")
        )
        timers = f"{requested:,} timers requested ({unanswered} without an answer)"
        return f"{timers}, {delivered:,} deliveries"

    def _print(self, text: str) -> None:
        print(f"[{self._elapsed_s:5.1f} s] {text}", flush=True)

    def _write(self, state: str, **more: Any) -> None:
        plan, struck, missed = self._plan, self._struck, self._missed
        strikes = {
            "strikes": Counter(each.strike.nemesis for each in struck),
            "fizzled": Counter(p.strike.nemesis for p in missed if p.why != NOT_REACHED),
            "struck": [each.number for each in struck],
            "not_struck": [
                {"strike": each.number, "nemesis": each.strike.nemesis, "why": each.why}
                for each in missed
            ],
            "leader_kills": self._leader_kills,
        }
        about = {
            "scenario": plan.scenario,
            "seed": plan.seed,
            "state": state,
            "left_out": [*plan.left_out],
            "missing": dict(plan.missing),
            **({} if state == RUNNING else strikes),
            "failures": self._failures,
            **more,
            "options": dataclasses.asdict(plan.options),
            "settings": MANY_SETTINGS,
            "clock_error_ms": clock_error_ms(plan.schedule),
            CLIENTS_ERROR: 0,  # all clients share this machine's clock
            "machine": machine(),
            "schedule": [dataclasses.asdict(strike) for strike in plan.schedule],
        }
        self._run.root.mkdir(parents=True, exist_ok=True)
        other = self._run.about.with_suffix(".new")
        other.write_text(json.dumps(about, indent=2))
        other.rename(self._run.about)


def spans(strikes: Iterable[PlannedStrike]) -> str:
    """Return the numbers of strikes, which are in order, runs of neighbours as ranges: 1-3, 5."""
    numbers = enumerate(each.number for each in strikes)
    runs = ([n for _, n in of] for _, of in itertools.groupby(numbers, lambda at: at[1] - at[0]))
    return ", ".join(f"{of[0]}-{of[-1]}" if len(of) > 1 else f"{of[0]}" for of in runs)


def machine() -> dict[str, Any]:
    """Return a description of this machine: versions, commit, kernel, processors, memory."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    here = Path(__file__).parent
    commit = ""
    with contextlib.suppress(NetworkError):
        commit = run_program("git", "-C", str(here), "describe", "--always", "--dirty").strip()
    return {
        "versions": versions,
        "commit": commit,
        "kernel": platform.platform(),
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def run(scenario: str, seed: int, options: RunOptions, folder: Path) -> int:
    """Run a scenario in a folder; return the exit status.

    Args:
        scenario: a name of SCENARIOS.
        seed: of the schedule and of the clients' random choices.
        options: 3 .. NODES_MAX nodes; 10 s to MINUTES_MAX.
        folder: of the run: absent, empty, or an earlier run's, which is replaced.

    Raises:
        ValueError: an argument is out of range, or the machine lacks Java or a need of the
            scenario.
        LaunchError, NetworkError, OSError: the cluster could not be started.
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"scenario = {scenario!r}: must be one of {', '.join(SCENARIOS)}")
    if options.nodes not in range(3, NODES_MAX + 1):
        raise ValueError(f"nodes = {options.nodes}: must be 3 .. {NODES_MAX}")
    if not 10 <= options.horizon_s <= 60 * MINUTES_MAX:
        limits = f"10 s to {MINUTES_MAX:,} minutes"
        raise ValueError(f"minutes = {options.minutes:g}: must be {limits}")
    check(options.workloads, rate_per_s=options.rate_per_s, horizon_s=options.horizon_s)
    if why := why_no_java():  # the audit would fail after the run
        raise ValueError(why)
    target = claimable(folder)
    missing = _missing_needs(plain=options.plain)
    if lacking := sorted(SCENARIOS[scenario].needs.intersection(missing)):
        why = "; ".join(f"{need}: {missing[need]}" for need in lacking)
        raise ValueError(f"{scenario} needs {why}")
    options = replace(options, without=tuple(sorted(missing)))
    plan = RunPlan(
        scenario=scenario,
        seed=seed,
        options=options,
        schedule=scenarios.schedule(scenario, seed, options),
        left_out=scenarios.left_out_lines(scenario, options),
        missing=missing,
        strikes_apart_max=SCENARIOS[scenario].strikes_apart_max,
        complete=SCENARIOS[scenario].complete,
    )
    return execute(target, plan)


def _missing_needs(*, plain: bool) -> dict[Need, str]:
    """Return the needs that this machine does not meet, each with the reason."""
    stages.remove_stale()
    if plain:
        return dict.fromkeys(Need, PLAIN)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        probe = RunFolder(Path(folder).resolve())
        with stages.owning(probe):  # so that the next run finds the leftovers if this one dies
            return stages.capabilities(probe.root)


def execute(target: RunFolder, plan: RunPlan) -> int:
    """Execute a run in place of an earlier one in its folder; return the exit status."""
    clear(target)
    print(f"{plan.scenario}, seed {plan.seed}, {plan.options.minutes:g} min, in {target.root}")
    return SuiteRun(target, plan).execute()


def claimable(folder: Path) -> RunFolder:
    """Return the folder as a run's, if it is empty, absent, or an earlier run's.

    Raises:
        LaunchError: the folder has other files.
    """
    run = RunFolder(folder.resolve())
    # A folder with cluster.json and run.json only is a user's own cluster with its audit.
    if folder.exists() and any(folder.iterdir()) and not (run.root / OWNER).exists():
        raise LaunchError(f"{folder} is not the folder of a run: name another folder")
    return run


def clear(run: RunFolder) -> None:
    """Remove an earlier run, if there is one; leave any other folder as it is.

    Raises:
        LaunchError: the run is being played.
    """
    if (run.root / OWNER).exists():
        end_run(run)
        shutil.rmtree(run.root)
