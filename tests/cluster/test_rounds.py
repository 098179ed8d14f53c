"""Rounds of periodic work begin together."""

import pytest

from cluster.settings.rounds import wait_s


@pytest.mark.parametrize(
    ("now_s", "interval_s", "expected_s"),
    [
        (100.0, 0.25, 0.25),
        (100.001, 0.25, 0.249),
        (100.249, 0.25, 0.001),
        (100.2504, 0.25, 0.25),  # the last one began here: none begins twice
        (100.25, 0.1, 0.05),
        (100.3, 1.0, 0.7),
        (100.3, 0.0, 0.001),
    ],
)
def test_round_begins_at_a_multiple_of_its_interval(
    now_s: float, interval_s: float, expected_s: float
) -> None:
    assert wait_s(now_s, interval_s) == pytest.approx(expected_s)
