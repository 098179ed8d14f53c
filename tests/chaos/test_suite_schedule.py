"""Schedules: pure, replayable, and true to what a scenario says."""

from itertools import pairwise

import pytest

from chaos.suite import scenarios
from chaos.suite.nemeses import NEMESES
from chaos.suite.scenarios import SCENARIOS
from chaos.suite.stage import plan
from chaos.suite.stage.plan import QUIET_S, Lane, Need, RunOptions, Strike
from tests.chaos.blows import Blow

SEEDS = range(20)
MIXES = ("mix", "short")


def kills_of_leader(strikes: list[Strike]) -> list[float]:
    return [s.at_s for s in strikes if s.nemesis == "kill" and s.args["who"] == "leader"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_schedule_follows_from_name_seed_and_options(name: str) -> None:
    options = RunOptions(minutes=2)
    assert scenarios.schedule(name, 5, options) == scenarios.schedule(name, 5, options)
    clients = RunOptions(minutes=2, rate_per_s=7, workloads=("herd",))
    assert scenarios.schedule(name, 5, clients) == scenarios.schedule(name, 5, options)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_strikes_within_half_a_minute_and_is_over_in_time(name: str) -> None:
    for seed in SEEDS:
        schedule = scenarios.schedule(name, seed, RunOptions(minutes=0.5))
        assert schedule
        assert all(s.at_s + s.for_s <= 30 - QUIET_S for s in schedule)
        assert schedule == sorted(schedule, key=lambda strike: strike.at_s)
        assert [Blow(NEMESES[strike.nemesis], **strike.args) for strike in schedule]


@pytest.mark.parametrize("name", MIXES)
def test_mix_plans_a_kill_of_the_leader_at_least_every_10_s(name: str) -> None:
    for seed in SEEDS:
        schedule = scenarios.schedule(name, seed, RunOptions(minutes=10))
        kills = kills_of_leader(schedule)
        assert max(later - earlier for earlier, later in pairwise(kills)) <= 10
        assert kills[0] <= 10
        assert 600 - QUIET_S - kills[-1] <= 15


@pytest.mark.parametrize("name", MIXES)
def test_mix_takes_nodes_away_one_strike_at_a_time(name: str) -> None:
    for seed in SEEDS:
        schedule = scenarios.schedule(name, seed, RunOptions(minutes=10))
        nodes = [s for s in schedule if s.lane is not Lane.AROUND]
        assert {s.lane for s in nodes} == {Lane.NODES, Lane.LEADER}
        assert all(a.at_s + a.for_s <= b.at_s for a, b in pairwise(nodes))
        away = {"kill", "kill-many", "pause", "isolate", "power-cut", "rolling-restart", "flap"}
        assert not away & {s.nemesis for s in schedule if s.lane is Lane.AROUND}


@pytest.mark.parametrize(
    ("name", "error_ms"),
    [("kill-leader", 1_000), ("clock-jump", 5_000), ("clock-drift", 5_000), ("mix", 30_000)],
)
def test_clocks_are_vouched_for_as_far_as_strikes_let_them(name: str, error_ms: int) -> None:
    schedule = scenarios.schedule(name, 1, RunOptions(minutes=10))
    assert plan.clock_error_ms(schedule) == error_ms
    assert plan.clock_error_ms([]) == 1_000


def test_mix_has_every_fault() -> None:
    found = {s.nemesis for s in scenarios.schedule("mix", 1, RunOptions(minutes=10))}
    assert found == NEMESES.keys()
    assert found - {"flood"} == {
        s.nemesis for s in scenarios.schedule("short", 1, RunOptions(minutes=10))
    }
    assert scenarios.left_out_lines("mix", RunOptions()) == []


def test_schedule_needs_nothing_that_the_machine_lacks() -> None:
    options = RunOptions(minutes=10, without=(Need.DISKS, Need.NETWORK))
    schedule = scenarios.schedule("mix", 1, options)
    assert not any(NEMESES[strike.nemesis].needs for strike in schedule)
    assert {"kill", "kill-many", "pause", "clock-jump"} <= {s.nemesis for s in schedule}
    [line] = scenarios.left_out_lines("mix", options)
    assert line == (
        "not allowed here: bridge, cut-clients, fill, flap, isolate, near-lease, one-way, "
        "power-cut, remove-cut-off, replace-cut-off, slow"
    )


def test_another_seed_is_another_schedule() -> None:
    schedules = [str(scenarios.schedule("mix", seed, RunOptions())) for seed in SEEDS]
    assert len({*schedules}) == len(SEEDS)
