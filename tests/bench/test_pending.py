"""What the measure of pending timers makes of the leader's metrics."""

import pytest

from bench.pending_costs import _Spent
from bench.rig import BenchError


def test_mean_is_that_of_what_came_since() -> None:
    assert _Spent(3.5, 7).mean_ms_since(_Spent(3.0, 2)) == 100


def test_mean_of_nothing_is_refused() -> None:
    with pytest.raises(BenchError, match="no durations meanwhile"):
        _Spent(3.0, 2).mean_ms_since(_Spent(3.0, 2))
