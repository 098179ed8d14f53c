"""The pace of background writing, on a clock that only waiting moves."""

import math

import pytest

from cluster.state.write_pace import RATE_MIN, IngestRate, Pacer, WriteAbandoned


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def paced(rate: float) -> tuple[Pacer, Clock]:
    clock = Clock()
    return Pacer(lambda: rate, clock=clock, wait=clock.wait), clock


def test_writing_takes_the_time_that_its_rate_says() -> None:
    pacer, clock = paced(1_000)
    for _ in range(50):
        pacer(100)
    assert clock.now_s == pytest.approx(105)


def test_time_that_nothing_was_written_in_is_not_made_up_for() -> None:
    pacer, clock = paced(1_000)
    pacer(100)
    clock.now_s += 3_600
    pacer(100)
    assert clock.now_s == pytest.approx(100 + 3_600 + 0.2)


def test_unbounded_rate_and_hurry_do_not_wait() -> None:
    pacer, clock = paced(math.inf)
    pacer(1 << 40)
    hurried, other = paced(1)
    hurried.hurry()
    hurried(1 << 40)
    assert clock.now_s == other.now_s == 100


def test_abandoned_writing_ends_at_its_next_step() -> None:
    pacer, _ = paced(math.inf)
    pacer(1)
    pacer.abandon()
    with pytest.raises(WriteAbandoned):
        pacer(1)


def test_rate_rises_at_once_falls_slowly_and_is_doubled() -> None:
    ingest = IngestRate(0.0)
    assert ingest.write_rate() == RATE_MIN
    ingest.add(50 << 20, 0.1)  # too soon to say
    assert ingest.write_rate() == RATE_MIN
    ingest.add(50 << 20, 1.0)
    assert ingest.write_rate() == 2 * (100 << 20)
    ingest.add(0, 2.0)
    assert 100 << 20 < ingest.write_rate() < 200 << 20
    ingest.add(0, 100.0)
    assert ingest.write_rate() == RATE_MIN
