"""The log whose voters count for the controller: which of the reported ones it is."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.control.control_state import ControlState
from cluster.control.controller_events import ReplicaReport, ReportedRole
from cluster.control.newest_log import named, newest_log
from replication.core.quorum import Voters
from tests.cluster.controlling import VOTERS, follower, voter_sets
from timer.model.units import Epoch, ReplicaId

OURS = (1, 2, 3)
STATE = ControlState(cluster_id="test", voters=VOTERS, epoch=Epoch(9), leader=ReplicaId(2))
LOST = ControlState(cluster_id="test", voters=VOTERS)
"""Raft's files were lost: no leader is known, and the voters are the founders."""
LEADS: dict[str, Any] = {"role": ReportedRole.LEADER, "serving": True, "lease_ok": True}
EPOCH_MAX = 1_000


def log(replica: int, epoch: int, *sets: tuple[int, ...], **more: Any) -> ReplicaReport:
    report = follower("a", epoch=epoch)
    told: tuple[Voters, ...] = sum(map(voter_sets, sets), start=())
    return replace(report, replica_id=ReplicaId(replica), sets=told, **more)


@pytest.mark.parametrize(
    ("reports", "state", "newest"),
    [
        pytest.param([log(1, 10, OURS), log(2, 9, OURS, **LEADS)], STATE, 1, id="leader"),
        pytest.param(
            [log(1, 10, OURS), log(2, 9, OURS, **LEADS | {"serving": False})], STATE, 0,
            id="leader that does not serve",
        ),
        pytest.param(
            [log(1, 10, OURS), log(2, 9, OURS, **LEADS | {"lease_ok": False})], STATE, 0,
            id="leader without a lease",
        ),
        pytest.param(
            [log(1, 10, OURS), log(2, 8, OURS, **LEADS)], STATE, 0, id="leader of an earlier epoch"
        ),
        pytest.param(
            [log(1, 10, OURS), log(3, 9, OURS, **LEADS)], STATE, 0, id="leader not appointed"
        ),
        pytest.param(
            [log(2, 9, **LEADS), log(1, 10, OURS)], STATE, 0, id="leader of the release before"
        ),
        pytest.param(
            [log(44, 9, **LEADS), log(1, 9, (1, 2, 44))], replace(STATE, leader=ReplicaId(44)), 1,
            id="leader of the release before that is not published",
        ),
        pytest.param([log(1, 9), log(2, 8, OURS)], STATE, 0, id="newest of the release before"),
        pytest.param([log(1, 9), log(2, 9, OURS)], STATE, 1, id="one of two tells voters"),
        pytest.param([log(77, 10), log(2, 9, OURS)], STATE, 1, id="unknown, tells no voters"),
        pytest.param(
            [log(1, 9, OURS, (1, 2, 44)), log(2, 9, (1, 2, 44))], STATE, 1, id="change committed"
        ),
        pytest.param(
            [log(7, 10, OURS, (1, 2, 44)), log(1, 9, OURS)], STATE, 1,
            id="change that only a learner has",
        ),
        pytest.param(
            [log(44, 10, OURS, (1, 2, 44)), log(1, 9, OURS)], STATE, 0, id="change of a new voter"
        ),
        pytest.param([log(3, 10, (1, 2, 44)), log(1, 9, OURS)], STATE, 0, id="removed voter"),
        pytest.param([log(1, EPOCH_MAX + 1, OURS), log(2, 9, OURS)], STATE, 1, id="incredible"),
        pytest.param([log(77, 30, (77,)), log(1, 9, OURS)], STATE, 1, id="restored elsewhere"),
        pytest.param([log(77, 30, (77,))], STATE, None, id="restored elsewhere alone"),
        pytest.param(
            [log(77, 30, (77,)), log(1, 9, OURS), log(2, 9, OURS)], LOST, 1,
            id="restored elsewhere, Raft lost",
        ),
        pytest.param(
            [log(44, 9, (44, 45, 46)), log(45, 9, (44, 45, 46)), log(1, 4, OURS)], LOST, 0,
            id="all founders replaced, Raft lost",
        ),
        pytest.param(
            [log(45, 9, (44, 45, 46))], replace(STATE, leader=ReplicaId(44)), 0,
            id="of the appointed leader",
        ),
        pytest.param(
            [log(45, 9, (44, 45, 46))], replace(STATE, proposed={"d": ReplicaId(46)}), 0,
            id="of a proposed voter",
        ),
    ],
)  # fmt: skip
def test_voters_of_which_log_count(
    reports: list[ReplicaReport], state: ControlState, newest: int | None
) -> None:
    found = newest_log(reports, state, state.voters, EPOCH_MAX)
    assert found is (None if newest is None else reports[newest])


def test_name_of_a_voter_that_is_unknown_is_its_id() -> None:
    voters, reporting = frozenset(map(ReplicaId, (1, 44, 45))), log(44, 9)
    known = {"a": ReplicaId(1), "x": ReplicaId(44)}, {"d": ReplicaId(44)}
    assert named(voters, known, []) == {"a": 1, "d": 44, "000000000000002d": 45}
    assert named(voters, [{"a": ReplicaId(44)}, {"a": ReplicaId(1)}], [reporting])["a"] == 44


def test_of_two_voters_with_one_name_the_one_that_reports_has_it() -> None:
    voters = frozenset(map(ReplicaId, (44, 45)))
    for first, second in ((44, 45), (45, 44)):
        known = [{"c": ReplicaId(first)}, {"c": ReplicaId(second)}]
        assert named(voters, known, [log(44, 9)]) == {"c": 44}
