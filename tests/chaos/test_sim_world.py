"""The simulator: one seed gives one run, the promises hold, and the faults have an effect."""

import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from chaos.sim import __main__ as command
from chaos.sim.play import APPS, EXIT_FAILED, EXIT_PROMISE, SeedOutcome, Task, play
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.faults import FaultInjector
from chaos.sim.world.options import FAULTS, FAULTS_MIN, WorldOptions
from chaos.sim.world.referee import CHECKERS, Broken
from chaos.sim.world.sim_node import SimNode
from chaos.sim.world.world import World
from tests.chaos.planted.planted import PLAIN, calm
from tests.seeds import seeds
from timer.model.timer_errors import PromiseLostError
from timer.model.units import Epoch


@pytest.mark.parametrize("seed", range(2))  # `make test` plays many beside
def test_promises_hold(seed: int) -> None:
    world = World(seed)
    world.run(60)
    assert len(world.faults.struck) >= FAULTS_MIN
    assert len(world.referee.committed) > 10
    assert world.referee.epochs >= 1


def test_every_fault_strikes_within_a_few_worlds() -> None:
    struck, often = set[str](), {*FAULTS} - {"forget"}
    for seed in range(24):
        options = WorldOptions.draw(random.Random(seed)).aim(faults=FAULTS)
        # Some faults strike only while the voters change.
        options = options.aim(nodes=3, learners=1, member_changes=0.3, fault_gap_ms=1_500)
        world = World(seed, options=options)
        world.run(60)
        struck.update(often.intersection(world.faults.struck))
        if struck == often:
            break
    assert struck == often


def test_voter_that_was_added_forgets_and_stays_down() -> None:
    refused = list[object]()
    for seed in range(1000, 1008):
        options = WorldOptions.draw(random.Random(seed)).aim(
            nodes=3, faults=("forget",), mischief=()
        )
        world = World(seed, options=options.aim(learners=1, member_changes=0.1, fault_gap_ms=1_500))
        world.run(40)
        refused += [node.refused for node in world.nodes]
        if "forget" in world.faults.struck:
            break
    assert any(isinstance(each, PromiseLostError) for each in refused)


def struck_at_once(world: World, kind: str) -> list[str]:
    """Inject a fault three times in one instant; return the strikes within a few seconds."""
    world.options = world.options.aim(faults=(kind,))
    world.faults = FaultInjector(world, random.Random(7), 0)
    world.timeline.run_until(world.timeline.now_us + 4_000_000)
    return world.faults.struck


NEEDS_PROCESS = [
    "power", "power_all", "kill", "pause", "handover", "sync_fails", "lying_disk", "terminate",
]  # fmt: skip
NEEDS_MOMENT = [
    "full_disk", "newborn", "ambush", "mid_sync", "torn_write", "rival", "late_answer", "overtaken",
]  # fmt: skip


@pytest.mark.parametrize("kind", NEEDS_PROCESS + NEEDS_MOMENT)
def test_fault_that_finds_nothing_to_strike_does_not_count(kind: str) -> None:
    assert struck_at_once(World(3, options=calm(3)), kind) == []


@pytest.mark.parametrize(
    "kind", ["power", "kill", "pause", "sync_fails", "lying_disk", "terminate"]
)
def test_fault_counts_where_processes_run(kind: str) -> None:
    world = running()
    assert 1 <= struck_at_once(world, kind).count(kind) <= FAULTS_MIN


@pytest.mark.parametrize("kind", ["power_all", "wipe"])
def test_fault_that_has_taken_all_it_may_counts_once(kind: str) -> None:
    assert struck_at_once(running(), kind) == [kind]


def test_world_in_which_little_struck_goes_on_until_three_faults_have() -> None:
    struck = []
    for seed in range(4):
        options = WorldOptions.draw(random.Random(seed)).aim(
            faults=("sync_fails", "handover", "kill")
        )
        world = World(seed, options=options)
        world.run(5)
        struck.append(len(world.faults.struck))
    assert min(struck) == FAULTS_MIN, struck


def test_world_in_which_too_little_can_strike_ends_all_the_same() -> None:
    world = World(3, options=calm(3).aim(nodes=3, faults=("forget",)))
    world.run(5)
    assert world.faults.struck == [], "no voter was added"


def running() -> World:
    """Return a world of three voters without a fault so far."""
    world = World(3, options=calm(3).aim(nodes=3, proposals_per_s=8))
    world.faults = FaultInjector(world, random.Random(7), 0)
    for node in world.nodes:
        node.start()
    world._clients_act()
    world.timeline.run_until(3_000_000)
    return world


@pytest.mark.parametrize("app", [*APPS])
def test_same_seed_gives_the_same_trace_in_every_process(app: str) -> None:
    here = play(Task(5, app, 6)).trace
    arguments = ["-m", "chaos.sim", "--seed", "5", "--app", app, "--seconds", "6"]
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.rstrip().endswith(f"trace {here}")


def test_trace_tells_runs_apart() -> None:
    traces = {play(Task(seed, "ledger", 8)).trace for seed in (5, 6)}
    traces |= {play(Task(5, "ledger", 8, faults=("kill",))).trace}
    assert len(traces) == 3


def test_broken_promise_is_told_with_seed_story_and_how_to_play_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(world: World, seconds: int) -> None:
        world.timeline.note("node 1", "does something")
        world.referee.committed.append((Epoch(1), b"other"))
        raise Broken("lost", f"after {seconds} s")

    monkeypatch.setattr(World, "run", run)
    aimed = ["--nodes", "3", "--faults", "kill,flip", "--mischief", "none"]
    assert command.main(["--seed", "77", "--seconds", "9", *aimed]) == EXIT_PROMISE
    said = capsys.readouterr().out
    assert "does something" in said
    assert "PROMISE BROKEN: lost: after 9 s" in said
    again = "--app timers --seconds 9 --nodes 3 --faults kill,flip --mischief none"
    assert f"python -m chaos.sim --seed 77 {again}" in said
    assert f'make sim SEED=77 ARGS="{again}"' in said


def test_any_exception_of_the_code_is_told_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(world: World, seconds: int) -> None:
        raise KeyError(world.options.nodes, seconds)

    monkeypatch.setattr(World, "run", run)
    assert command.main(["--seed", "78", "--seconds", "9"]) == EXIT_FAILED
    said = capsys.readouterr().out
    assert "KeyError: " in said
    assert "python -m chaos.sim --seed 78" in said


def test_aimed_world_has_what_was_asked_for_and_draws_the_rest() -> None:
    drawn = Task(7, "ledger", 1).world().options
    aimed = Task(7, "ledger", 1, nodes=5, faults=("wipe",), mischief=("late",)).world().options
    assert (aimed.nodes, aimed.faults, aimed.mischief) == (5, ("wipe",), ("late",))
    assert (aimed.delay_us, aimed.sync_us) == (drawn.delay_us, drawn.sync_us)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--faults", "kill,rust"], "faults rust: must be one of power, power_all"),
        (["--mischief", "sloth"], "mischief sloth: must be one of transfer, slow"),
        (["--nodes", "4"], "invalid choice: 4"),
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--seed", "1", "--seconds", "0"], "--seconds 0: must be at least 1"),
        (["--jobs", "-1"], "--jobs -1: must be at least 1"),
    ],
)
def test_unknown_aim_is_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="64"):
        command.main(["--seed", "1", *arguments])
    assert why in capsys.readouterr().err


def test_help_lists_faults_and_checkers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in (*FAULTS, *CHECKERS))


def test_checker_without_a_name_is_refused() -> None:
    with pytest.raises(AssertionError, match="nobody"):
        Broken("nobody", "knows")


def test_each_kind_of_world_is_drawn_and_is_not_always() -> None:
    drawn = [WorldOptions.draw(random.Random(seed)) for seed in range(300)]
    for kind in PLAIN:
        share = sum(getattr(options, kind) for options in drawn) / len(drawn)
        assert 0.05 < share < 0.5, kind


def test_clients_of_two_worlds_differ_in_temper_and_settings() -> None:
    worlds = [TimerWorld(seed) for seed in range(30)]
    tempers = {tuple(each._temper for each in world.town.consumers) for world in worlds}
    settings = {world.town.settings("a", "g") for world in worlds}
    assert len(tempers) > 5
    assert len(settings) > 3


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_leader_whose_disk_hangs_is_succeeded(seed: int) -> None:
    world = World(seed, options=calm(seed).aim(nodes=3, proposals_per_s=16))
    hung: list[SimNode] = []

    def hang() -> None:
        (leader,) = [node for node in world.nodes if node.core.serving]
        leader.slow_disk = 10**9
        hung.append(leader)

    def look() -> None:
        assert [node for node in world.nodes if node.core.serving and node not in hung]
        hung[0].stop_hard()
        world.timeline.after(1_000, hung[0].start)
        hung[0].slow_disk = 1

    world.timeline.after(5_000_000, hang)
    world.timeline.after(25_000_000, look)
    world.run(30)
    assert hung


def test_worlds_that_met_few_faults_are_counted() -> None:
    total = SeedOutcome()
    for task in (Task(7, "ledger", 1, faults=()), Task(7, "ledger", 1, faults=("handover",))):
        total.add(play(task))
    assert total.counts["calm"] == 0, "none were asked for; or they struck"
    total.add(SeedOutcome(counts=Counter(calm=1)))
    line = command._summary(total, [Task(7, "ledger", 1)], 1.0)
    assert "; 1 worlds met fewer than 3 faults: none else could strike" in line
