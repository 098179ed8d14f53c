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
    "manifest_with_one_mark": 1001,
    "producers_by_id": 1001,
    "late_ack_is_told_to_count": 1001,
    "drain_forgets_waiting": 1002,
    "manifest_without_verdicts": 1002,
    "trust_old_process": 1002,
    "base_not_compared": 1001,
    "lease_from_receipt": 1001,
    "ack_before_sync": 1006,
    "committed_is_equal": 1001,
    "new_voters_alone": 1023,
    "tear_is_always_in_doubt": 1002,
    "frames_after_another_base": 1008,
    "window_off_by_one": 1001,
    "own_disk_alone": 1001,
    "policy_overtakes": 1002,
    "held_is_as_good_as_fired": 1001,
    "dropped_can_be_cancelled": 1007,
    "merge_pairs_by_due": 1001,
    "redrive_loses_the_last": 1003,
    "half_is_enough": 1002,
    "handout_without_lease": 1002,
    "limit_counts_the_gone": 1002,
    "nack_is_an_ended_lease": 1002,
    "log_overlaps_snapshot": 1002,
    "old_log_stays": 1002,
    "key_of_two_consumers": 1003,
    "ordering_key_is_ignored": 1005,
    "no_guard": 1008,
    "topic_by_topic": 1034,
    "guard_under_lease": 1017,
    "count_unsure": 1009,
    "any_leader_of_the_epoch": 1012,
    "ack_unmatched": 1022,
    "lead_without_fetching": 1031,
    "resume_drops_what_came_after": 1002,
    "log_never_stays": 1014,
    "cancel_before_commit": 1026,
    "frozen_row_lives": 1060,
    "ack_from_before_the_seek": 1063,
    "failover_forgets_nacks": 1002,
    "new_topic_fires": 1002,
    "leased_when_handed_over": 1001,
    "extension_is_not_looked_at": 1003,
    "epoch_of_its_own": 1016,
    "adopts_without_lease": 1001,
    "restarted_leader_stays": 1001,
    "wiped_voter_is_sure": 1037,
    "flush_hides_what_is_due": 1007,
    "sure_by_any_process": 1021,
    "counts_the_retired": 1013,
    "log_goes_before_manifest": 1014,
    "moved_by_the_clusters_policy": 1001,
    "kept_is_another": 1002,
    "unsent_is_an_ended_lease": 1002,
    "fastest_clock": 1004,
    "letter_stays": 1003,
    "plans_behind_a_change": 1055,
    "stepdown_forgets_portion": 1005,
}
"""First seeds of the hunts that would take long, to save time while the drawn worlds stay the same.
Tests check that each bug is found from there within its number of seeds, and that the first seed is
within that number, too. HUNT_FROM=<seed> in the environment is the first seed of all hunts."""
QUICK = {
    "acks_let_go_of_what_is_retained",
    "any_leader_of_the_epoch",
    "appoints_the_most_lagging",
    "asks_at_once",
    "cancelled_payloads_weigh_on",
    "bucket_has_no_end",
    "change_uses_the_number",
    "commit_by_the_leaders_word",
    "credit_goes_on",
    "drain_forgets_waiting",
    "extension_is_not_looked_at",
    "failover_forgets_nacks",
    "fastest_clock",
    "fire_from_checkpoint",
    "fire_of_any_topics",
    "fires_by_its_own_clock",
    "flush_forgets_tombstones",
    "flushed_payload_is_shifted",
    "handout_without_lease",
    "lead_again_after_restart",
    "lease_from_answering",
    "letter_stays",
    "manifest_without_acks",
    "moved_by_the_clusters_policy",
    "nack_holds_nothing_back",
    "new_topic_fires",
    "old_log_stays",
    "own_disk_alone",
    "pressure_is_never_released",
    "priorities_are_ignored",
    "released_from_runs_again",
    "requests_die_with_the_leader",
    "seek_goes_forward_only",
    "seek_is_unmarked",
    "tear_is_always_in_doubt",
    "topic_by_topic",
    "ttl_from_the_schedule",
    "unsent_is_an_ended_lease",
    "wakes_every_second",
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
