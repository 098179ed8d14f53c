"""Each planted bug is found, by one of the checkers that it names."""

import importlib
import os
import re
from pathlib import Path
from typing import Final

import pytest

from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.referee import CHECKERS, Broken
from chaos.sim.world.world import World
from tests.chaos import planted
from tests.chaos.planted.planted import ANY_WORLD, Mutation, calm, hunt

FIRST_SEED = 1000
SOON = {
    "own_disk_alone": 1019,
    "tear_is_always_in_doubt": 1010,
    "stepdown_forgets_portion": 1005,
    "manifest_with_one_mark": 1002,
    "frames_after_another_base": 1033,
    "policy_overtakes": 1003,
    "dropped_can_be_cancelled": 1004,
    "merge_pairs_by_due": 1004,
    "handout_without_lease": 1002,
    "topic_by_topic": 1017,
    "ack_unmatched": 1009,
    "lead_without_fetching": 1010,
    "resume_drops_what_came_after": 1001,
    "log_never_stays": 1009,
    "frozen_row_lives": 1002,
    "failover_forgets_nacks": 1024,
    "extension_is_not_looked_at": 1034,
    "counts_the_retired": 1007,
    "log_goes_before_manifest": 1002,
    "fastest_clock": 1005,
    "plans_behind_a_change": 1019,
    "name_of_the_gone": 1001,
    "series_of_the_last_leader": 1032,
    "replaced_stays": 1003,
    "retry_is_new": 1006,
    "shared_entry_has_one_answer": 1012,
    "manifest_of_before": 1006,
    "flushed_payload_is_shifted": 1003,
    "adopts_without_lease": 1023,
    "sure_by_any_process": 1002,
    "delay_holds_nothing_back": 1001,
    "seek_goes_forward_only": 1003,
    "moved_by_the_clusters_policy": 1002,
    "quota_counts_what_is_applied": 1003,
    "replaced_is_new": 1002,
    "nack_is_an_ended_lease": 1001,
    "flush_forgets_tombstones": 1003,
    "merge_drops_tombstones": 1003,
}
"""First seeds of the hunts that would take long, to save time while the drawn worlds stay the same.
Tests check that each bug is found from there within its number of seeds, and that the first seed is
within that number, too. HUNT_FROM=<seed> in the environment is the first seed of all hunts."""
QUICK = {
    "ack_before_commit",
    "appoints_the_most_lagging",
    "asks_at_once",
    "bucket_has_no_end",
    "bucket_waits_for_its_end",
    "commit_by_the_leaders_word",
    "count_unsure",
    "credit_goes_on",
    "cursor_stays_behind",
    "drain_forgets_waiting",
    "extension_is_not_looked_at",
    "failover_forgets_nacks",
    "fastest_clock",
    "fire_from_checkpoint",
    "flush_is_decided_once",
    "flushed_payload_is_shifted",
    "handout_without_lease",
    "jitter_makes_timers_early",
    "lead_again_after_restart",
    "lease_from_answering",
    "leased_when_handed_over",
    "letter_stays",
    "manifest_with_one_mark",
    "nack_holds_nothing_back",
    "new_topic_fires",
    "one_too_many_expires",
    "paused_occurrence_fires",
    "priorities_are_ignored",
    "promise_not_synced",
    "quota_counts_what_is_applied",
    "released_from_runs_again",
    "requests_die_with_the_leader",
    "reschedule_says_yes",
    "seek_goes_forward_only",
    "takes_what_fills_the_disk",
    "tear_is_always_in_doubt",
    "topic_by_topic",
    "unsent_is_an_ended_lease",
}
"""Bugs that `make test` hunts: the quickest with which every checker has one to find.
`make test-long` hunts the others."""
ALL: Final[list[Mutation]] = [
    mutation
    for path in sorted(Path(planted.__file__).parent.glob("*_mutations.py"))
    for mutation in importlib.import_module(f"{planted.__name__}.{path.stem}").MUTATIONS
]
"""The bugs of all files beside planted.py: of a new file, too."""


def test_at_least_twenty_bugs_are_planted_each_under_a_name() -> None:
    assert len({mutation.name for mutation in ALL}) == len(ALL) >= 20


def test_each_function_beside_the_bugs_is_used() -> None:
    for path in Path(planted.__file__).parent.glob("*_mutations.py"):
        text = path.read_text()
        names = re.findall(r"^def (\w+)", text, re.MULTILINE)
        unused = [name for name in names if len(re.findall(rf"\b{name}\b", text)) < 2]
        assert unused == [], f"{path.name}: written, and not planted"


def test_hunt_that_begins_later_begins_within_its_number_of_the_first_seed() -> None:
    seeds = {mutation.name: mutation.seeds for mutation in ALL}
    for name, begins in SOON.items():
        assert FIRST_SEED < begins < FIRST_SEED + seeds[name], name


def test_every_checker_has_a_bug_to_find_and_a_quick_one() -> None:
    assert {mutation.name for mutation in ALL} >= QUICK
    quick = [mutation for mutation in ALL if mutation.name in QUICK]
    assert {name for mutation in quick for name in mutation.checkers} == CHECKERS.keys()


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(each, id=each.name, marks=[] if each.name in QUICK else pytest.mark.long)
        for each in ALL
    ],
)
def test_planted_bug_is_found_by_its_checker(mutation: Mutation) -> None:
    asked = os.environ.get("HUNT_FROM")
    found = hunt(mutation, int(asked) if asked else SOON.get(mutation.name, FIRST_SEED))
    assert found is not None, f"not within {mutation.seeds} seeds: {mutation.breaks}"
    assert found.checker in mutation.checkers, found


HIDDEN = [mutation for mutation in ALL if not mutation.needs.startswith(ANY_WORLD)]


def test_at_least_twenty_bugs_hide_where_nothing_goes_wrong() -> None:
    assert len(HIDDEN) >= 20


@pytest.mark.long
@pytest.mark.parametrize("mutation", HIDDEN, ids=lambda mutation: mutation.name)
def test_planted_bug_is_not_found_where_nothing_goes_wrong(mutation: Mutation) -> None:
    # A bug's event may occur by chance, such as a lease that ends before its ack is committed.
    assert any(unnoticed(mutation, seed) for seed in (3, 4, 5))


def unnoticed(mutation: Mutation, seed: int) -> bool:
    with mutation.plant():
        world = mutation.world(seed, options=calm(seed))
        try:
            world.run(10)
        except Broken:
            return False
    assert len(world.referee.committed) > 5
    return True


@pytest.mark.parametrize("world", [World, TimerWorld])
def test_nothing_is_found_where_nothing_is_planted(world: type[World]) -> None:
    world(3, options=calm(3)).run(10)
