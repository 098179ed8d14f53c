"""Each stage is measured once for each timer, whatever the sizes."""

import pytest

from bench.stages import BASE, CASES, STAGES, Case, costs_of


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=1, payload=1 << 16),
        Case(batch=8, payload=1 << 16, topics=4, groups=3),
        Case(batch=4, payload=1 << 16, pending=1_000),
    ],
)
def test_timers_go_through_all_stages(case: Case) -> None:
    costs = costs_of(case)
    assert [*costs.us] == [*STAGES]
    assert all(us > 0 for us in costs.us.values())


def test_memory_is_that_of_the_payloads_and_little_more() -> None:
    case = Case(batch=4, payload=1 << 16)
    costs = costs_of(case, memory=True)
    assert case.payload <= costs.peak["client"] < 5 * case.payload
    assert costs.us["client"] == 0


def test_each_case_changes_one_size() -> None:
    base = CASES["base"]
    assert base == BASE
    for name, case in CASES.items():
        changed = [
            field for field in Case.__slots__ if getattr(case, field) != getattr(base, field)
        ]
        assert len(changed) == (name != "base")
        assert case.timers % case.batch == 0 == case.batch % case.topics
