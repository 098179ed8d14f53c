"""The rank of candidates: each field outweighs all that come after it."""

from dataclasses import replace
from typing import Any, Final

import pytest

from cluster.control.controller_config import ControllerConfig
from cluster.control.controller_events import (
    ReplicaReport,
    ReportedRole,
)
from cluster.control.succession import Candidate, Rank, best
from timer.model.units import Epoch, LogIndex, ReplicaId

LIMITS: Final = ControllerConfig()
END: Final = 100_000

WORSE: Final[dict[str, dict[str, Any]]] = {
    "is_bound_above": {"is_bound_above": True},
    "stalled_in": {"stalled_in": Epoch(1)},
    "seconds_behind": {"applied_index": LogIndex(END - 10 * LIMITS.lag_entries)},
    "is_closed": {"accepts": False},
    "led_poorly": {"led_poorly": True},
    "is_slow": {"is_slow": True},
    "unapplied": {"applied_index": LogIndex(END - 2 * LIMITS.lag_entries)},
    "is_controller": {"is_controller": True},
    "missing": {"last_index": LogIndex(END - 1)},
    "replica_id": {"replica_id": ReplicaId(9)},
}
"""Changes that make a candidate worse in one field of its rank."""
SECOND_ENTRIES: Final = 4 * LIMITS.lag_entries
"""Entries that the last leader appended in a second."""


def candidate(**changes: Any) -> Candidate:
    report = ReplicaReport(
        replica_id=ReplicaId(1),
        name="a",
        role=ReportedRole.FOLLOWER,
        epoch=Epoch(1),
        serving=False,
        lease_ok=False,
        last_epoch=Epoch(1),
        last_index=LogIndex(END),
        applied_index=LogIndex(END - LIMITS.lag_entries // 2),
        highest_promise=Epoch(1),
        unsure=False,
    )
    found = Candidate(
        report=report,
        stalled_in=Epoch(0),
        led_poorly=False,
        is_slow=False,
        is_controller=False,
        is_bound_above=False,
    )
    of_report = {name: changes.pop(name) for name in [*changes] if hasattr(report, name)}
    return replace(found, report=replace(report, **of_report), **changes)


@pytest.mark.parametrize("field", WORSE)
def test_field_of_the_rank_outweighs_all_that_come_after_it(field: str) -> None:
    assert [*WORSE] == [*Rank._fields]
    after = [*WORSE][[*WORSE].index(field) + 1 :]
    worse = candidate(**WORSE[field])
    changes: dict[str, Any] = {}
    for each in after:
        changes |= WORSE[each]
    better = candidate(**changes)
    assert best([worse, better], LIMITS, SECOND_ENTRIES) is better
    assert best([better, worse], LIMITS, SECOND_ENTRIES) is better


@pytest.mark.parametrize(
    "shorter", [{"last_epoch": Epoch(0)}, {"last_index": LogIndex(END - LIMITS.close_entries)}]
)
def test_log_that_ends_earlier_is_not_chosen_whatever_its_rank(shorter: dict[str, Any]) -> None:
    whole = candidate(**WORSE["is_bound_above"], **WORSE["stalled_in"])
    assert best([candidate(**shorter), whole], LIMITS) is whole


def test_unsure_log_is_chosen_only_if_all_are_unsure() -> None:
    sure = candidate(last_epoch=Epoch(0), is_bound_above=True)
    unsure = candidate(unsure=True)
    assert best([unsure, sure], LIMITS) is sure
    assert best([unsure], LIMITS) is unsure
    assert best([], LIMITS) is None


def test_entries_that_a_candidate_lacks_count_as_those_that_it_has_yet_to_apply() -> None:
    lacks = candidate(last_index=LogIndex(END - 100), applied_index=LogIndex(END - 100))
    holds = candidate(applied_index=LogIndex(END - 40))
    assert best([lacks, holds], LIMITS, SECOND_ENTRIES) is holds
