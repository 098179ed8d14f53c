"""The show: `timerctl chaos run`, one run from an empty folder to a verdict.

    run.json written ─► stage up ─► workloads start ─► strikes, in lanes ─► producing stops
    ─► heal ─► drain ─► clients close ─► stage down ─► audit ─► the verdict

Each step writes its records to the run's folder before the next one begins. A nemesis that fails, a
node that does not come back, or a drain that times out is recorded and printed. The run then
continues to the audit.

The run prints the numbers of the strikes that fell and of those that did not. A strike does not
fall if time is up first, or if it fizzles (chaos/suite/nemeses/nemesis.py). A run without any
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
    leader_kills_told,
    read_faults,
)
from chaos.spark.session import why_no_java
from chaos.suite import scenarios
from chaos.suite.nemeses import NEMESES
from chaos.suite.nemeses.nemesis import Fizzled
from chaos.suite.scenarios import SCENARIOS
from chaos.suite.stage import plan
from chaos.suite.stage import stage as stages
from chaos.suite.stage.network import NetworkError
from chaos.suite.stage.network import run as run_program
from chaos.suite.stage.plan import Lane, Need, RunOptions, Strike
from chaos.suite.stage.stage import MANY_SETTINGS, Stage, end_run
from chaos.workloads import KINDS, Workloads, check
from chaos.workloads.workload_clients import Setting
from deploy.local import LaunchError
from timerclient.values.errors import TimerError

DRAIN_S: Final = 90.0
"""The clients have received all messages within this after the last strike is healed. Recovery from
a strike takes seconds."""
CLEANS_UP_S: Final = 30.0
"""An audit that is stopped has removed its temporary files within this."""
POLL_S: Final = 0.1
NOT_REACHED: Final = "time was up"
_BY_TURNS: Final = (Lane.NODES, Lane.LEADER)
GIVES_WAY_S: Final = 2.0
"""A strike at nodes waits for a promised kill that is due within this time."""
HEALS_S: Final = 12.0
"""Least time between two kills of the leader while a node heals. After each kill the node starts to
fetch its files from the new leader."""
NODES_MAX: Final = 7
MINUTES_MAX: Final = 7 * 24 * 60
PLAIN: Final = "plain processes on loopback were requested"
_DISTRIBUTIONS: Final = ("timer-cluster", "grpcio", "numpy", "pyarrow", "pyspark", "pysyncobj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
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
    come_to: bool = False
    """It has got its turn."""


class Show:
    """One run in one folder. `play` once."""

    def __init__(
        self,
        run: RunFolder,
        bill: Bill,
        *,
        audit: Sequence[str] = (sys.executable, "-m", "chaos.audit"),
    ) -> None:
        """Prepare a run.

        Args:
            run: its folder; absent or empty.
            bill: its plan.
            audit: the command of the audit. The run's folder is appended as its last argument.
        """
        self._run = run
        self._bill = bill
        self._workloads: Workloads | None = None
        self._audit = audit
        self._began = math.inf
        """When the workloads began, on the monotonic clock; infinite: they have not."""
        self._over = threading.Event()
        self._failures: list[str] = []
        self._killed_s = -math.inf
        """Start of the last promised kill of the leader, in seconds of the run."""
        self._planned = [PlannedStrike(*each) for each in enumerate(bill.schedule, 1)]
        self._leader_kills: dict[str, int] = {}

    def play(self) -> int:
        """Play the run and audit it.

        Returns:
            0; or the audit's exit status; or 1 if the audit succeeded and the run itself failed.
        """
        self._write(RUNNING)
        self._say_left_out()
        bill = self._bill
        with contextlib.ExitStack() as stack:
            stage = Stage(self._run, bill.options.nodes, missing=bill.missing, say=self._say)
            stack.enter_context(stage)
            count = {3: "three", 5: "five"}.get(bill.options.nodes, str(bill.options.nodes))
            self._say(f"{count} nodes are up, {stage.leader()} leads")
            self._work(stage)
            self._guarded("taking the stage down", stack.close)
        self._failures += stage.failures
        self._judge()
        self._say("all nodes stopped; the audit of histories and logs takes a minute or more")
        self._complain()
        self._write("stopped")
        status = self._audited()
        self._heed_audit()
        self._write("audited", audit_status=status)
        return status or bool(self._failures)

    def _audited(self) -> int:
        """Run the audit; return its exit status. A stop of the run ends it by one SIGINT."""
        words = [*self._audit, str(self._run.root)]
        with subprocess.Popen(words, start_new_session=True) as audit:  # no SIGINT of the terminal
            try:
                return audit.wait()
            except KeyboardInterrupt:
                audit.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    audit.wait(CLEANS_UP_S)
                raise
            finally:
                audit.kill()

    def _heed_audit(self) -> None:
        """Fail the run for acks that no client sent, and for nodes that reported no counts.

        The audit itself only counts both.
        """
        path = self._run.audit / "summary.json"
        if not path.exists():
            return  # the audit failed, as its exit status shows
        summary = json.loads(path.read_text())
        unasked, said = summary["acks_unasked"], summary["conservation"]["said"]["nodes"]
        if unasked is None:
            self._say("LEFT OUT, too many acks to search for those that no client sent")
        elif unasked:  # the suite's clients record each ack before they send it
            self._fail(f"{unasked} messages were acked, and no client sent the acks")
        if said < (nodes := self._bill.options.nodes):
            self._fail(f"only {said} of {nodes} nodes reported their counts")

    # ---- the run

    def _work(self, stage: Stage) -> None:
        bill = self._bill
        with contextlib.ExitStack() as stack:
            setting = Setting(
                run=self._run,
                endpoints=lambda: stage.cluster.endpoints,
                seed=bill.seed,
                rate_per_s=bill.options.rate_per_s,
                horizon_s=bill.options.horizon_s,
            )
            names = bill.options.workloads or tuple(KINDS)
            workloads = self._workloads = Workloads(names, setting)
            stack.callback(self._guarded, "the workloads", workloads.close)
            self._began = time.monotonic()
            workloads.start()
            lanes = [
                threading.Thread(target=self._lane, args=(stage, lane), name=lane, daemon=True)
                for lane in Lane
            ]
            try:
                for lane in lanes:
                    lane.start()
                time.sleep(max(0.0, bill.options.horizon_s - self._elapsed_s))
                if bill.complete:
                    for lane in lanes:
                        lane.join()
            finally:
                self._over.set()
                for lane in filter(threading.Thread.is_alive, lanes):  # maybe not all have begun
                    lane.join()
                workloads.stop_producing()
                self._guarded("healing", partial(self._mend, stage))
            self._drain(stage, workloads)

    def _lane(self, stage: Stage, lane: Lane) -> None:
        for each in self._planned:
            if each.strike.lane is lane:
                if self._over.wait(max(0.0, each.strike.at_s - self._elapsed_s)):
                    return
                if lane is Lane.NODES:
                    self._give_way()
                if self._over.is_set():
                    return
                self._guarded(each.strike.nemesis, partial(self._strike, stage, each))

    def _give_way(self) -> None:
        """Wait until the next kill of the leader has begun, if it is due within GIVES_WAY_S.

        At most one kill goes first.
        """
        until_s = self._elapsed_s + GIVES_WAY_S
        kills = (p for p in self._planned if p.strike.lane is Lane.LEADER and not p.come_to)
        kill = next(kills, None)
        while kill is not None and kill.strike.at_s <= until_s and not kill.come_to:
            if self._over.wait(POLL_S):
                return

    def _let_heal(self, stage: Stage) -> None:
        """While a node heals, wait until HEALS_S have passed since the last kill of the leader."""
        while stage.waited_for and self._elapsed_s < self._killed_s + HEALS_S:
            if self._over.wait(POLL_S):
                return

    def _strike(self, stage: Stage, planned: PlannedStrike) -> None:
        """Play one strike, once it has its turn, all nodes are up and the cluster is whole."""
        lane = planned.strike.lane
        if lane is Lane.NODES:
            self._say(self._progress())
        with stage.turn if lane in _BY_TURNS else contextlib.nullcontext():
            planned.come_to = True
            if lane is Lane.LEADER:
                self._let_heal(stage)
            if self._over.is_set():  # time was up while the strike waited
                return
            if lane in _BY_TURNS:
                self._mend(stage)
            if lane is Lane.LEADER:
                self._killed_s = self._elapsed_s
            self._strike_now(stage, planned)

    def _strike_now(self, stage: Stage, planned: PlannedStrike) -> None:
        number, strike, planned.why = planned.number, planned.strike, ""
        chance = random.Random(f"{self._bill.seed}/{number}")
        with stage.struck_by(number):
            stage.record("strike", nemesis=strike.nemesis, args=dict(strike.args))
            try:
                with NEMESES[strike.nemesis].strike(stage, chance, **strike.args):
                    self._over.wait(strike.for_s)
            except Fizzled as fizzled:
                planned.why = str(fizzled)
                stage.record("fizzled", why=planned.why)
                self._say(f"FIZZLED: {number}, {strike.nemesis}: {fizzled}")
                if strike.lane in _BY_TURNS:
                    self._mend(stage)
            finally:
                stage.record("healed")

    def _mend(self, stage: Stage) -> None:
        """Resume and restart all nodes that are away, except lost ones; wait until all are sure.

        Nodes that a nemesis waits for are left to that nemesis. While there is one, this method
        does not wait.
        """
        died = stage.died()
        self._failures += [f"{name} ended by itself" for name in died]
        left = stage.lost | stage.waited_for
        for name in stage.away - left:
            stage.resume(name)
        down = [n for n in stage.names if n not in left and not stage.cluster.is_running(n)]
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
        self._failures += [f"{name} ended by itself" for name in stage.died()]
        rest = "some messages are missing" if waiting else "no message is missing"
        self._say(f"{self._progress()}; {rest}")

    # ---- strikes that fell

    @property
    def _struck(self) -> list[PlannedStrike]:
        return [each for each in self._planned if not each.why]

    @property
    def _missed(self) -> list[PlannedStrike]:
        return [each for each in self._planned if each.why]

    def _judge(self) -> None:
        """Record failures for strikes that did not fall, and for too few kills of a leader.

        The kills are those that the timeline has.
        """
        if self._missed and self._bill.complete:
            self._failures.append(f"these strikes did not fall: {spans(self._missed)}")
        elif self._planned and not self._struck:
            self._failures.append(f"no strike fell, of {spans(self._planned)}")
        self._leader_kills = leader_kills(read_faults(self._run.faults))
        strikes, most = self._leader_kills.get("strikes_apart", 0), self._bill.strikes_apart_max
        if most is not None and strikes > most:
            self._failures.append(f"no leader was killed during {strikes} strikes: limit {most}")

    def _tell_strikes(self) -> None:
        struck, planned = self._struck, len(self._planned)
        counts = Counter(each.strike.nemesis for each in struck)
        kinds = ", ".join(f"{n} x {name}" for name, n in sorted(counts.items()))
        some = f"; numbers {spans(struck)} of the plan" if 0 < len(struck) < planned else ""
        self._say(f"{len(struck)} of {planned} planned faults happened: {kinds or 'none'}{some}")
        if kills := leader_kills_told(self._leader_kills):
            self._say(kills)
        if late := [each for each in self._missed if each.why == NOT_REACHED]:
            self._say(f"DID NOT HAPPEN: {spans(late)}: {NOT_REACHED}")
        for each in self._missed:
            if each.why != NOT_REACHED:
                self._say(f"DID NOT HAPPEN: {each.number}, {each.strike.nemesis}: {each.why}")

    # ---- failures

    def _guarded(self, what: str, work: Callable[[], object]) -> None:
        """Call `work`. A failure is recorded and printed."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a defect of the suite must not prevent the audit
            known = isinstance(error, LaunchError | NetworkError | OSError | TimerError)
            why = error if known else traceback.format_exc()
            self._fail(f"{what}: {why}")

    def _fail(self, failure: str) -> None:
        self._failures.append(failure)
        self._say(f"FAILED: {failure}")

    def _complain(self) -> None:
        self._tell_strikes()
        self._say_left_out()
        for failure in self._failures:
            self._say(f"FAILED: {failure}")

    def _say_left_out(self) -> None:
        for line in self._bill.left_out:
            self._say(f"LEFT OUT, {line}")
        for need, why in self._bill.missing.items():
            self._say(f"WITHOUT {need}: {why}")

    # ---- texts and run.json

    @property
    def _elapsed_s(self) -> float:
        return max(0.0, time.monotonic() - self._began)

    def _progress(self) -> str:
        books = [each.books for each in self._workloads.each] if self._workloads else []
        asked, unanswered, delivered = (
            sum(getattr(each, name) for each in books)
            for name in ("asked", "unanswered", "delivered")
        )
        timers = f"{asked:,} timers requested ({unanswered} without an answer)"
        return f"{timers}, {delivered:,} deliveries"

    def _say(self, text: str) -> None:
        print(f"[{self._elapsed_s:5.1f} s] {text}", flush=True)

    def _write(self, state: str, **more: Any) -> None:
        bill, struck, missed = self._bill, self._struck, self._missed
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
            "scenario": bill.scenario,
            "seed": bill.seed,
            "state": state,
            "left_out": [*bill.left_out],
            "missing": dict(bill.missing),
            **({} if state == RUNNING else strikes),
            "failures": self._failures,
            **more,
            "options": dataclasses.asdict(bill.options),
            "settings": MANY_SETTINGS,
            "clock_error_ms": plan.clock_error_ms(bill.schedule),
            CLIENTS_ERROR: 0,  # all clients share this machine's clock
            "machine": machine(),
            "schedule": [dataclasses.asdict(strike) for strike in bill.schedule],
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
    """Play a scenario in a folder; return the exit status.

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


def _missing(*, plain: bool) -> dict[Need, str]:
    """Return the needs that this machine does not meet, each with the reason."""
    stages.remove_stale()
    if plain:
        return dict.fromkeys(Need, PLAIN)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        probe = RunFolder(Path(folder).resolve())
        with stages.owning(probe):  # so that the next run finds the leftovers if this one dies
            return stages.capabilities(probe.root)


def play(target: RunFolder, bill: Bill) -> int:
    """Play a run in place of an earlier one in its folder; return the exit status."""
    clear(target)
    print(f"{bill.scenario}, seed {bill.seed}, {bill.options.minutes:g} min, in {target.root}")
    return Show(target, bill).play()


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
