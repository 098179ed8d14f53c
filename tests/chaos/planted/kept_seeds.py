"""Kept seeds: each has found a defect once and is played again in every long test run.

The world of a seed changes with the draw (chaos/sim/world/options.py). A kept seed therefore names
the commit at which it failed, and keeps all options that were set. It also names a test of the same
defect that draws nothing. That test guards the fix; the seed only covers similar worlds. To add a
seed:

    KeptSeed(Task(SEED, APP, SECONDS, faults=(...)), "commit", "the defect", "file.py::test")

The Task is in the failure's report, under `reproduce`.
"""

from dataclasses import dataclass
from typing import Final

from chaos.sim.play import Task


@dataclass(frozen=True, slots=True)
class KeptSeed:
    """One seed that found a defect."""

    task: Task
    commit: str
    """The last commit with the defect; the next one is the fix."""
    found: str
    """The defect."""
    test: str
    """Path and name of the deterministic test of the same defect."""


_DAMAGE: Final = ("flip", "kill", "shorten", "wipe", "power")

KEPT: Final = (
    KeptSeed(
        Task(783110, "ledger", 60),
        "85d2fce1",
        "a controller that had lost the last changes of the voters waited for a majority of the old"
        " voters",
        "tests/cluster/test_newest_log.py::"
        "test_voters_of_the_newest_log_count_if_raft_has_lost_its_files",
    ),
    KeptSeed(
        Task(1055, "timers", 40, faults=(*_DAMAGE, "isolate")),
        "affd820",
        "simulated clients searched for a leader only among undamaged replicas, and found none"
        " while a replica with a damaged disk led",
        "tests/chaos/test_sim_timers.py::test_clients_reach_a_leader_whose_disk_is_damaged",
    ),
    KeptSeed(
        Task(2008, "ledger", 30, faults=_DAMAGE),
        "8180a47",
        "the ledger's manifest had no checksum: after a bit flip it named entries that no log"
        " held, and the error named the log",
        "tests/chaos/test_sim_damage.py::test_undamaged_replica_that_refuses_breaks_a_promise",
    ),
    KeptSeed(
        Task(90229, "timers", 60),
        "eb17ae6",
        "the checker of the order ignored that messages expire one by one: in an ordered group it"
        " waited for an expired message",
        "tests/chaos/test_sim_timers.py"
        "::test_message_that_expired_alone_is_waited_for_until_then_and_no_longer",
    ),
    KeptSeed(
        Task(219774471, "timers", 60),
        "2aaec38",
        "the book expected of a replica that was seven entries behind the acks in these entries",
        "tests/chaos/test_sim_timers.py"
        "::test_replica_that_is_behind_at_the_end_is_not_asked_for_what_came_since",
    ),
    KeptSeed(
        Task(733000736, "ledger", 40),
        "3d78ddc",
        "a bit flip in the note of a damaged node, which then was not valid text",
        "tests/chaos/test_sim_damage.py::test_replica_heals_though_its_note_of_the_damage_is_damaged",
    ),
    KeptSeed(
        Task(141001015, "timers", 40),
        "b6bfce5",
        "a topic's policy ended when its deletion was appended, and messages that it had expired"
        " were delivered until the deletion was applied",
        "tests/timer/test_expiry.py"
        "::test_what_is_over_is_not_handed_out_by_a_policy_that_may_never_be_committed",
    ),
    KeptSeed(
        Task(270000403, "timers", 60),
        "db23d76",
        "a fault of a sync struck after the world had healed, while another voter was lost",
        "tests/chaos/test_simdisk.py::test_mended_disk_syncs",
    ),
    KeptSeed(
        Task(300000171, "timers", 60),
        "56b561a",
        "a late append reached a learner after the leader had marked it as behind the kept log:"
        " the leader sent it no entries any more, and the mark stayed",
        "tests/replication/test_core.py::test_scenario",
    ),
    KeptSeed(
        Task(310004291, "timers", 60),
        "de4c201",
        "the log's time jumped by a day, and the outcome of a cancelled held timer was forgotten"
        " before its due time: the answer was ALREADY_FIRED",
        "tests/timer/test_pauses.py"
        "::test_how_a_held_timer_ended_is_told_until_its_due_time_is_forgotten",
    ),
    KeptSeed(
        Task(310004743, "timers", 60),
        "de4c201",
        "the book did not know the key of a timer that was rescheduled by key before any client"
        " had an answer about it",
        "tests/chaos/test_sim_timers.py"
        "::test_key_of_a_timer_that_nobody_heard_of_is_known_by_its_reschedule",
    ),
    KeptSeed(
        Task(330009583, "timers", 60),
        "9e94682",
        "a voter lost its log's end between its answer to a candidate and the candidate's fetch,"
        " and the candidate, with an undamaged log, stopped",
        "tests/replication/test_core.py::test_scenario",
    ),
)
