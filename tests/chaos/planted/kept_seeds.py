"""Kept seeds: what has found something once is played again in every test run.

A seed's meaning changes with the draw (chaos/sim/world/options.py), so a kept seed names the commit
at which it found what it found, is kept with everything that it was aimed at, and never stands
alone: `test` is the test that pins the same defect without drawing anything. The seed keeps looking
at that corner of the world; the test is what guards the fix. To add one:

    Kept(Task(SEED, APP, SECONDS, faults=(...)), "commit", "what it found", "file.py::test")

where the Task is what the failure said under `reproduce`.
"""

from dataclasses import dataclass
from typing import Final

from chaos.sim.play import Task


@dataclass(frozen=True, slots=True)
class KeptSeed:
    """One seed that found something."""

    task: Task
    commit: str
    """Where it did: the fix is the next one."""
    found: str
    test: str
    """Path and name of the deterministic test of the same defect."""


_DAMAGE: Final = ("flip", "kill", "shorten", "wipe", "power")

KEPT: Final = (
    KeptSeed(
        Task(1055, "timers", 40, faults=(*_DAMAGE, "isolate")),
        "affd820",
        "simulated clients looked for a leader among whole replicas only, and starved under one"
        " with a damaged disk that still leads",
        "tests/chaos/test_sim_timers.py::test_clients_reach_a_leader_whose_disk_is_damaged",
    ),
    KeptSeed(
        Task(2008, "ledger", 30, faults=_DAMAGE),
        "8180a47",
        "the ledger's manifest had no checksum: with one bit flipped it claimed entries that no"
        " log held, and the log was blamed",
        "tests/chaos/test_sim_damage.py::test_undamaged_replica_that_refuses_breaks_a_promise",
    ),
    KeptSeed(
        Task(90229, "timers", 60),
        "eb17ae6",
        "the book of the order did not know that messages expire one by one: in an ordered group"
        " it waited for one that nobody would ever get",
        "tests/chaos/test_sim_timers.py"
        "::test_message_that_expired_alone_is_waited_for_until_then_and_no_longer",
    ),
    KeptSeed(
        Task(219774471, "timers", 60),
        "2aaec38",
        "the book asked a replica that was seven entries behind, and settled as of then, for acks"
        " that came in these",
        "tests/chaos/test_sim_timers.py"
        "::test_replica_that_is_behind_at_the_end_is_not_asked_for_what_came_since",
    ),
    KeptSeed(
        Task(733000736, "ledger", 40),
        "3d78ddc",
        "a bit flipped in the note that a damaged node had left, which then was no text any more",
        "tests/chaos/test_sim_damage.py::test_replica_heals_though_its_note_of_the_damage_is_damaged",
    ),
    KeptSeed(
        Task(141001015, "timers", 40),
        "b6bfce5",
        "a topic's policy went as its deletion was appended, and what had expired by it was handed"
        " out until that was applied",
        "tests/timer/test_expiry.py"
        "::test_what_is_over_is_not_handed_out_by_a_policy_that_may_never_be_committed",
    ),
    KeptSeed(
        Task(270000403, "timers", 60),
        "db23d76",
        "a sync that was to fail did so after the world had healed, with another voter lost",
        "tests/chaos/test_simdisk.py::test_mended_disk_syncs",
    ),
    KeptSeed(
        Task(280000639, "timers", 60),
        "b1aeedc",
        "the book excused what retention let go of in a topic without groups only if it had none at"
        " the end either",
        "tests/chaos/test_sim_letters.py"
        "::test_what_fired_may_be_unseen_only_where_something_was_passed_over",
    ),
    KeptSeed(
        Task(300000171, "timers", 60),
        "56b561a",
        "a learner's appends came after it had been taken for behind the kept log: the leader fed"
        " it no more, and called it behind for ever",
        "tests/replication/test_core.py::test_scenario",
    ),
    KeptSeed(
        Task(310004291, "timers", 60),
        "de4c201",
        "the log's time leapt by a day, and the cancel of a timer that had been held was forgotten"
        " before its due time: it was told ALREADY_FIRED",
        "tests/timer/test_pauses.py"
        "::test_how_a_held_timer_ended_is_told_until_its_due_time_is_forgotten",
    ),
    KeptSeed(
        Task(310004743, "timers", 60),
        "de4c201",
        "the book did not know the key of a timer of which nobody had heard before it was"
        " rescheduled by that key",
        "tests/chaos/test_sim_timers.py"
        "::test_key_of_a_timer_that_nobody_heard_of_is_known_by_its_reschedule",
    ),
    KeptSeed(
        Task(330006666, "ledger", 60),
        "143c837",
        "the model of the control plane appointed the only sure replica, which lacked what the"
        " others had dropped, again and again, as the real one does not",
        "tests/cluster/test_controller.py"
        "::test_only_sure_replica_that_stalls_is_followed_by_an_unsure_one",
    ),
    KeptSeed(
        Task(330009583, "timers", 60),
        "9e94682",
        "a voter lost its log's end between its word to a candidate and the candidate's fetch, and"
        " the candidate, whose log was whole, stopped",
        "tests/replication/test_core.py::test_scenario",
    ),
)
