"""A whole run: from an empty folder to a verdict, whatever goes wrong on the way."""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from chaos.history.history import CLOCK_ERROR, FaultTimeline, RunFolder
from chaos.suite import suite_run
from chaos.suite.nemeses.nemesis import NoEffect
from chaos.suite.scenarios import SCENARIOS
from chaos.suite.stage import disks
from chaos.suite.stage.disks import MountedDisk
from chaos.suite.stage.network import NetworkError
from chaos.suite.stage.plan import Lane, Need, RunOptions, Strike
from chaos.suite.stage.stage import Stage
from chaos.suite.stage.turn import Turn
from chaos.suite.suite_run import PlannedStrike, RunPlan, SuiteRun, spans
from chaos.workloads import Workloads
from deploy.local import LaunchError
from tests.chaos.turns import until_asked
from tests.cluster.running import until

GOOD = (sys.executable, "-c", "print('verdict: OK')")


# ---- what a run does when something fails; nothing real on the stage


class FakeStage:
    """Nodes that can't come back."""

    def __init__(self, run: RunFolder, nodes: int, **_: Any) -> None:
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.turn = Turn()
        self.away: set[str] = set()
        self.waited_for: set[str] = set()
        self.lost: set[str] = set()
        self.failures: list[str] = []
        self.events: list[str] = []
        self.dead: list[str] = []
        self.cluster = SimpleNamespace(is_running=lambda _: True)
        LAST[:] = [self]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append("down")

    def leader(self) -> str:
        return self.names[0]

    def wait_until_sure(self) -> None:
        assert not self.waited_for

    def lend_turn(self: Any, name: str) -> contextlib.AbstractContextManager[None]:
        return Stage.lend_turn(self, name)

    def record(self, event: str, **_: Any) -> None:
        self.events.append(event)

    def struck_by(self, _: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def note_deaths(self) -> list[str]:
        return self.dead


LAST: list[FakeStage] = []


class FakeWorkloads(Workloads):
    """One workload, which waits for messages as it is told to."""

    def __init__(self, *waits: bool, failure: Exception | None = None) -> None:
        self.waits = [*waits]
        self.failure = failure
        self.calls: list[str] = []
        self.each = []

    def start(self) -> None:
        self.calls.append("start")

    def stop_producing(self) -> None:
        self.calls.append("stop")

    def waiting(self) -> list[str]:
        waits = self.waits.pop(0) if len(self.waits) > 1 else any(self.waits)
        return ["fake"] * waits

    def close(self) -> None:
        self.calls.append("close")
        if self.failure is not None:
            raise self.failure


def workloads_are(monkeypatch: pytest.MonkeyPatch, workloads: FakeWorkloads) -> FakeWorkloads:
    """Let these be the workloads of the run."""
    monkeypatch.setattr(suite_run, "Workloads", lambda *_: workloads)
    return workloads


@pytest.fixture
def no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_run, "Stage", FakeStage)
    workloads_are(monkeypatch, FakeWorkloads())
    monkeypatch.setattr(suite_run, "DRAIN_S", 60.0)


def plan_of(*strikes: Strike) -> RunPlan:
    options = RunOptions(minutes=0.5 / 60)
    return RunPlan(scenario="none", seed=1, options=options, schedule=strikes)


def strikes_are(monkeypatch: pytest.MonkeyPatch, **strikes: Callable[..., Any]) -> None:
    """Let these stand in for the nemeses of these names. Each returns its undo."""

    @contextlib.contextmanager
    def lasting(strike: Callable[..., Any], *of: object) -> Iterator[None]:
        undo = strike(*of)
        yield
        undo()

    nemeses = {n: SimpleNamespace(strike=partial(lasting, each)) for n, each in strikes.items()}
    monkeypatch.setattr(suite_run, "NEMESES", nemeses)


def about(folder: Path) -> Any:
    return json.loads(RunFolder(folder).about.read_text())


@pytest.mark.usefixtures("no_stage")
def test_stop_that_comes_while_the_lanes_begin_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(lane: threading.Thread) -> None:
        if begun:
            raise KeyboardInterrupt
        start(lane)
        begun.append(lane)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SuiteRun(RunFolder(tmp_path), plan_of(), audit=GOOD).execute()
    assert not begun[0].is_alive()
    assert LAST[0].events == ["down"]


@pytest.mark.usefixtures("no_stage")
def test_quiet_run_is_told_drained_and_judged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads = workloads_are(monkeypatch, FakeWorkloads(True, False))
    assert SuiteRun(RunFolder(tmp_path), plan_of(), audit=GOOD).execute() == 0
    assert workloads.calls == ["start", "stop", "close"]
    assert LAST[0].events == ["drained", "down"]
    lines = capfd.readouterr().out.splitlines()
    assert "three nodes are up, n1 leads" in lines[0]
    assert lines[-1] == "verdict: OK"
    assert (about(tmp_path)["state"], about(tmp_path)["failures"]) == ("audited", [])
    assert RunFolder(tmp_path).error_ms(CLOCK_ERROR) == 1_000, "the audit judges by clocks"


@pytest.mark.usefixtures("no_stage")
def test_audit_of_a_run_that_is_stopped_cleans_up_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than the quarter of a second that `subprocess` itself waits for a child."""
    work = """
import pathlib, sys, threading
scratch = pathlib.Path(sys.argv[1], "scratch")
try:
    scratch.touch()
    threading.Event().wait()
except KeyboardInterrupt:
    threading.Event().wait(1)
    scratch.unlink()
"""
    workloads_are(monkeypatch, FakeWorkloads(True, False))
    watch = threading.Thread(target=lambda: _stop_once((tmp_path / "scratch").exists))
    wait = subprocess.Popen.wait

    def watched(audit: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if watch.ident is None:  # not before: a stop within Popen() would leave the audit running
            watch.start()
        return wait(audit, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", watched)
    with pytest.raises(KeyboardInterrupt):
        SuiteRun(RunFolder(tmp_path), plan_of(), audit=(sys.executable, "-c", work)).execute()
    watch.join()
    assert not (tmp_path / "scratch").exists()


def _stop_once(condition: Callable[[], bool]) -> None:
    until(condition, timeout_s=60)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.usefixtures("no_stage")
@pytest.mark.parametrize("count", [None, 0, 7])
def test_acks_that_no_client_asked_for_fail_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], count: int | None
) -> None:
    run = RunFolder(tmp_path)
    summary = json.dumps({"acks_unasked": count, "conservation": {"said": {"nodes": 3}}})
    into = run.audit / "summary.json"
    audit = f"mkdir -p {run.audit} && echo '{summary}' > {into} && echo verdict: OK"
    judge = ("/bin/sh", "-c", f"{audit} # ")
    assert SuiteRun(run, plan_of(), audit=judge).execute() == bool(count)
    words = "7 messages were acked, and no client sent the acks"
    assert about(tmp_path)["failures"] == ([words] if count else [])
    out = capfd.readouterr().out
    assert (f"FAILED: {words}" in out) == bool(count)
    assert ("LEFT OUT, too many acks" in out) == (count is None)


@pytest.mark.usefixtures("no_stage")
def test_nodes_that_were_never_heard_fail_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path)
    run.audit.mkdir()
    summary = {"acks_unasked": 0, "conservation": {"said": {"nodes": 2}}}
    (run.audit / "summary.json").write_text(json.dumps(summary))
    assert SuiteRun(run, plan_of(), audit=GOOD).execute() == 1
    words = "only 2 of 3 nodes reported their counts"
    assert about(tmp_path)["failures"] == [words]
    assert f"FAILED: {words}" in capfd.readouterr().out


@pytest.mark.usefixtures("no_stage")
def test_stage_that_does_not_come_down_costs_no_audit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise NetworkError("umount: target is busy")

    monkeypatch.setattr(FakeStage, "__exit__", fail)
    assert SuiteRun(RunFolder(tmp_path), plan_of(), audit=GOOD).execute() == 1
    lines = capfd.readouterr().out.splitlines()
    assert any("FAILED: taking the stage down: umount: target is busy" in line for line in lines)
    assert lines[-1] == "verdict: OK"
    assert about(tmp_path)["state"] == "audited"


@pytest.mark.usefixtures("no_stage")
def test_what_the_stage_finds_as_it_comes_down_fails_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(stage: FakeStage, *_: object) -> None:
        stage.failures.append("n1 ended with status 1 after SIGTERM")

    monkeypatch.setattr(FakeStage, "__exit__", down)
    assert SuiteRun(RunFolder(tmp_path), plan_of(), audit=GOOD).execute() == 1
    assert "FAILED: n1 ended with status 1 after SIGTERM" in capfd.readouterr().out
    assert about(tmp_path)["failures"] == ["n1 ended with status 1 after SIGTERM"]


def test_disk_that_stays_busy_is_moved_out_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, ...]] = []

    def run(*words: str) -> None:
        called.append(words[:2])
        if words[0] == "cp":
            (tmp_path / "n1.out").mkdir()
            (tmp_path / "n1.out/log").write_text("what the node wrote")
        elif words[:2] == ("umount", str(tmp_path / "n1")):
            raise NetworkError("target is busy")

    monkeypatch.setattr(disks, "run", run)
    monkeypatch.setattr(disks, "UNMOUNT_S", 0.0)
    disk = MountedDisk(tmp_path / "n1")
    disk.path.mkdir()
    disk.image.touch()
    disk.move_out()
    assert (tmp_path / "n1/log").read_text() == "what the node wrote"
    assert called[-1] == ("umount", "--lazy")
    assert not disk.image.exists()


@pytest.mark.usefixtures("no_stage")
def test_strike_that_fails_costs_neither_the_others_nor_the_audit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(stage: FakeStage, _: object) -> Any:
        if stage.events == ["strike"]:
            raise LaunchError("it does not want to")
        return lambda: stage.events.append("undone")

    strikes_are(monkeypatch, kill=strike)
    two = plan_of(Strike(at_s=0, nemesis="kill"), Strike(at_s=0.1, nemesis="kill"))
    two = replace(two, complete=True)  # both are played, however late the second one is
    status = SuiteRun(RunFolder(tmp_path), two, audit=GOOD).execute()
    assert LAST[0].events == ["strike", "healed", "strike", "undone", "healed", "drained", "down"]
    assert status == 1
    assert about(tmp_path)["failures"] == ["kill: it does not want to"]
    assert about(tmp_path)["strikes"] == {"kill": 2}
    assert about(tmp_path)["struck"] == [1, 2], "what it did before it failed is not known"
    lines = capfd.readouterr().out.splitlines()
    assert lines[-2].endswith("FAILED: kill: it does not want to")
    assert lines[-1] == "verdict: OK"


def leader_waits_for(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what the leader's lane waits for before it asks for its turn, on any machine."""
    event = threading.Event()

    class Second(Turn):
        def __enter__(self) -> None:
            if threading.current_thread().name == Lane.LEADER:
                assert event.wait(60)
            super().__enter__()

    monkeypatch.setitem(globals(), "Turn", Second)
    return event


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.usefixtures("no_stage")
def test_leader_is_killed_meanwhile_only_if_a_strike_at_nodes_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    killed, healing = threading.Event(), leader_waits_for(monkeypatch)

    def heal(stage: FakeStage, _: object) -> Any:
        healing.set()
        stage.away.add("n3")
        with stage.lend_turn("n3") if waits else contextlib.nullcontext():
            assert killed.wait(timeout=60 if waits else 0.5) == waits
            stage.away.remove("n3")  # nobody else has brought it back
        return lambda: stage.events.append("whole")

    def kill(stage: FakeStage, _: object) -> Any:
        assert stage.waited_for == ({"n3"} if waits else set())
        return killed.set

    monkeypatch.setattr(suite_run, "GIVE_WAY_S", 0.0)
    strikes_are(monkeypatch, wipe=heal, kill=kill)
    wipe = Strike(at_s=0, nemesis="wipe")
    both = replace(plan_of(wipe, Strike(at_s=0.2, nemesis="kill", lane=Lane.LEADER)), complete=True)
    assert SuiteRun(RunFolder(tmp_path), both, audit=GOOD).execute() == 0
    ended = ["healed", "whole", "healed"] if waits else ["whole", "healed", "strike", "healed"]
    assert LAST[0].events[:-2] == (["strike", "strike"] if waits else ["strike"]) + ended


@pytest.mark.usefixtures("no_stage")
def test_late_kills_leave_a_node_time_to_heal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills, healing = queue.SimpleQueue[str](), leader_waits_for(monkeypatch)

    def heal(stage: FakeStage, _: object) -> Any:
        healing.set()
        until_asked(stage.turn, 2)  # the first kill waits for its turn,
        played._began -= 10 * suite_run.HEAL_S  # for long
        with stage.lend_turn("n3"):
            kills.get(timeout=60)
            with pytest.raises(queue.Empty):  # nor does a second one come
                kills.get(timeout=0.5)
        return lambda: None

    monkeypatch.setattr(suite_run, "GIVE_WAY_S", 0.0)
    strikes_are(monkeypatch, wipe=heal, kill=lambda *_: partial(kills.put, "killed"))
    late = [Strike(at_s=at_s, nemesis="kill", lane=Lane.LEADER) for at_s in (0.2, 0.3)]
    three = replace(plan_of(Strike(at_s=0, nemesis="wipe"), *late), complete=True)
    played = SuiteRun(RunFolder(tmp_path), three, audit=GOOD)
    assert played.execute() == 0
    assert kills.get(timeout=0) == "killed", "once it is whole"


@pytest.mark.usefixtures("no_stage")
def test_promised_kill_that_is_due_soon_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()
    strikes = {
        name: partial(lambda name, *_: partial(order.append, name), name)
        for name in ("wipe", "kill")
    }
    strikes_are(monkeypatch, **strikes)
    kills = [Strike(at_s=at_s, nemesis="kill", lane=Lane.LEADER) for at_s in (0.5, 4)]
    both = replace(plan_of(Strike(at_s=0, nemesis="wipe"), *kills), complete=True)
    assert SuiteRun(RunFolder(tmp_path), both, audit=GOOD).execute() == 0
    assert order == ["kill", "wipe", "kill"]


LATE = Strike(at_s=60, nemesis="pause")
"""Long after the clients' end."""


def fizzling(monkeypatch: pytest.MonkeyPatch, *fates: str) -> None:
    """Let kills have these fates, one after the other."""
    kills = iter(fates)

    def miss(why: str) -> None:
        raise NoEffect(why)

    def strike(*_: object) -> Any:
        fate = next(kills)
        if fate == "in vain":
            miss("nobody is hit")
        return partial(miss, "nothing has changed") if fate == "seen later" else lambda: None

    strikes_are(monkeypatch, kill=strike)


def missed(folder: Path) -> list[tuple[int, str, str]]:
    return [(each["strike"], each["nemesis"], each["why"]) for each in about(folder)["not_struck"]]


@pytest.mark.usefixtures("no_stage")
def test_run_of_which_no_strike_fell_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert SuiteRun(RunFolder(tmp_path), plan_of(LATE, LATE), audit=GOOD).execute() == 1
    assert about(tmp_path)["failures"] == ["no strike fell, of 1-2"]
    out = capfd.readouterr().out
    assert "0 of 2 planned faults happened: none\n" in out
    assert "DID NOT HAPPEN: 1-2: time was up" in out
    assert "FAILED: no strike fell, of 1-2" in out


@pytest.mark.usefixtures("no_stage")
def test_run_of_which_all_strikes_fizzled_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fizzling(monkeypatch, "in vain")
    kill = plan_of(Strike(at_s=0, nemesis="kill"))
    assert SuiteRun(RunFolder(tmp_path), kill, audit=GOOD).execute() == 1
    assert about(tmp_path)["failures"] == ["no strike fell, of 1"]


@pytest.mark.usefixtures("no_stage")
def test_strikes_that_were_not_come_to_are_told_by_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fizzling(monkeypatch, "hits")
    some = plan_of(Strike(at_s=0, nemesis="kill"), LATE, LATE)
    some = replace(some, options=RunOptions(minutes=2 / 60))
    assert SuiteRun(RunFolder(tmp_path), some, audit=GOOD).execute() == 0
    told = about(tmp_path)
    assert (told["strikes"], told["struck"], told["fizzled"]) == ({"kill": 1}, [1], {})
    assert missed(tmp_path) == [(2, "pause", "time was up"), (3, "pause", "time was up")]
    out = capfd.readouterr().out
    assert "1 of 3 planned faults happened: 1 x kill; numbers 1 of the plan\n" in out
    assert "DID NOT HAPPEN: 2-3: time was up" in out


@pytest.mark.usefixtures("no_stage")
@pytest.mark.parametrize(
    ("fate", "why"), [("in vain", "nobody is hit"), ("seen later", "nothing has changed")]
)
@pytest.mark.parametrize("complete", [False, True])
def test_strike_that_fizzled_does_not_count_as_struck(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fate: str,
    why: str,
    complete: bool,
) -> None:
    fizzling(monkeypatch, fate, "hits")
    mended = list[int]()
    mend = SuiteRun._restore_nodes

    def noted(run: SuiteRun, stage: Any) -> None:
        mended.append(len(stage.events))
        mend(run, stage)

    monkeypatch.setattr(SuiteRun, "_restore_nodes", noted)
    two = plan_of(Strike(at_s=0, nemesis="kill"), Strike(at_s=0.1, nemesis="kill"))
    two = replace(two, complete=complete, options=RunOptions(minutes=2 / 60))
    status = SuiteRun(RunFolder(tmp_path), two, audit=GOOD).execute()
    assert mended == [0, 2, 3, 5], "before each strike, at the end, and before the first is healed"
    events = ["strike", "fizzled", "healed", "strike", "healed", "drained", "down"]
    assert LAST[0].events == events
    told = about(tmp_path)
    assert (told["strikes"], told["fizzled"], told["struck"]) == ({"kill": 1}, {"kill": 1}, [2])
    assert missed(tmp_path) == [(1, "kill", why)]
    out = capfd.readouterr().out
    assert f"FIZZLED: 1, kill: {why}" in out
    assert "1 of 2 planned faults happened: 1 x kill; numbers 2 of the plan\n" in out
    assert f"DID NOT HAPPEN: 1, kill: {why}" in out
    failures = ["these strikes did not fall: 1"] if complete else []
    assert (status, told["failures"]) == (int(complete), failures)


@pytest.mark.usefixtures("no_stage")
def test_a_run_tells_its_faults_in_plain_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fizzling(monkeypatch, "hits", "hits")
    two = plan_of(Strike(at_s=0, nemesis="kill"), Strike(at_s=0.1, nemesis="kill"))
    two = replace(two, complete=True, options=RunOptions(minutes=2 / 60))
    assert SuiteRun(RunFolder(tmp_path), two, audit=GOOD).execute() == 0
    assert "2 of 2 planned faults happened: 2 x kill\n" in capfd.readouterr().out


@pytest.mark.usefixtures("no_stage")
@pytest.mark.parametrize(("most", "fails"), [(None, False), (2, False), (1, True)])
def test_run_in_which_leaders_were_killed_too_seldom_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], most: int | None, fails: bool
) -> None:
    with FaultTimeline(RunFolder(tmp_path)) as faults:
        for at_ms in (0, 10_000, 15_000, 35_000):
            faults.record("strike", at_ms=at_ms)
        for at_ms in (5_000, 25_000):
            faults.record("kill", at_ms=at_ms, role="leader")
    some = replace(plan_of(), strikes_apart_max=most)
    assert SuiteRun(RunFolder(tmp_path), some, audit=GOOD).execute() == fails
    words = "no leader was killed during 2 strikes: limit 1"
    assert about(tmp_path)["failures"] == ([words] if fails else [])
    assert about(tmp_path)["leader_kills"] == {
        "kills": 2, "longest_without_ms": 20_000, "long_gaps": 1, "strikes_apart": 2
    }  # fmt: skip
    out = capfd.readouterr().out
    assert "leaders killed: 2; at most 20.0 s without a kill" in out
    assert (f"FAILED: {words}" in out) == fails


def test_only_mixes_promise_kills_of_the_leader() -> None:
    promise = {n for n, scenario in SCENARIOS.items() if scenario.strikes_apart_max is not None}
    assert promise == {"mix", "short"}


@pytest.mark.parametrize(
    ("numbers", "said"),
    [([], ""), ([4], "4"), ([1, 2], "1-2"), ([1, 2, 3, 5, 6, 9], "1-3, 5-6, 9")],
)
def test_neighbours_are_told_together(numbers: list[int], said: str) -> None:
    assert spans(PlannedStrike(number, LATE) for number in numbers) == said


@pytest.mark.usefixtures("no_stage")
def test_workload_that_never_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_run, "DRAIN_S", 0.3)
    workloads_are(monkeypatch, FakeWorkloads(True))
    assert SuiteRun(RunFolder(tmp_path), plan_of(), audit=GOOD).execute() == 1
    assert LAST[0].events == ["gave_up", "down"]
    assert about(tmp_path)["failures"] == ["not drained within 0.3 s: fake"]


@pytest.mark.usefixtures("no_stage")
def test_workload_that_failed_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads_are(monkeypatch, FakeWorkloads(failure=ValueError("a bug")))
    assert SuiteRun(RunFolder(tmp_path), plan_of(), audit=GOOD).execute() == 1
    assert LAST[0].events == ["drained", "down"]
    [failure] = about(tmp_path)["failures"]
    assert failure.startswith("the workloads: Traceback")
    assert "a bug" in failure


@pytest.mark.usefixtures("no_stage")
def test_audits_exit_status_is_the_runs(tmp_path: Path) -> None:
    audit = (sys.executable, "-c", "raise SystemExit(3)")
    assert SuiteRun(RunFolder(tmp_path), plan_of(), audit=audit).execute() == 3
    assert about(tmp_path)["audit_status"] == 3


@pytest.mark.usefixtures("no_stage")
def test_what_is_missing_is_said_first_and_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cut = RunPlan(
        scenario="isolate",
        seed=1,
        options=RunOptions(minutes=0.5 / 60),
        schedule=[LATE],
        left_out=["not allowed here: everything"],
        missing={Need.NETWORK: "not root"},
    )
    assert SuiteRun(RunFolder(tmp_path), cut, audit=GOOD).execute() == 1
    assert about(tmp_path)["failures"] == ["no strike fell, of 1"]
    lines = capfd.readouterr().out.splitlines()
    for said in (lines[:2], lines[-4:-2]):
        assert "LEFT OUT, not allowed here: everything" in said[0]
        assert "WITHOUT network: not root" in said[1]
    assert about(tmp_path)["missing"] == {"network": "not root"}
    assert about(tmp_path)["strikes"] == {}
