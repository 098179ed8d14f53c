"""The judge over pauses, time to live and deletions: what it excuses, and what it raises still."""

import pytest

from chaos.live.exported_events import RELEASE_MS, EventKind
from tests.chaos.test_judge import HORIZON_MS, NOW, OVERDUE_MS, Court

HOUR = 3_600_000


@pytest.fixture
def court() -> Court:
    """A judge that a witness of topic t, number 1, talks to."""
    court = Court()
    court.of_topic(EventKind.MADE, NOW - 10)
    court.of_topic(EventKind.WITNESSED, NOW - 9)
    court.reach(NOW)
    court.clock(NOW)
    assert court.step() == []
    return court


def later(court: Court, at_ms: int) -> list[tuple[str, int]]:
    """Return what is raised by then, where the log and the witness go on."""
    court.clock(at_ms)
    court.reach(at_ms, at_ms=at_ms)
    return court.kinds()


def resume(court: Court, at_ms: int, catch_up: str = "all") -> None:
    court.of_topic(EventKind.RESUMED, at_ms, read_ms=at_ms, seq=court.last_seq, detail=catch_up)


def paused(court: Court) -> int:
    """Schedule 1 to 4, pause before 2 is due, for an hour; return until when.

    2 comes due meanwhile, 3 is scheduled as due, 4 comes due after it.
    """
    court.schedule(1, NOW + 100, number=1)
    court.schedule(2, NOW + 1000, number=1)
    court.give(1, NOW + 100)
    court.of_topic(EventKind.PAUSED, NOW + 500)
    assert later(court, NOW + 600) == []
    court.schedule(3, NOW + 300, at_ms=NOW + 2000, number=1)
    end_ms = NOW + HOUR
    court.schedule(4, end_ms + 100, number=1)
    for at_ms in range(NOW + 2000, end_ms, 300_000):
        assert later(court, at_ms) == []
    return end_ms


def test_what_a_paused_topic_holds_is_not_overdue_and_comes_when_it_goes_on(court: Court) -> None:
    end_ms = paused(court)
    resume(court, end_ms)
    assert later(court, end_ms + 1) == []
    assert later(court, end_ms + 2 * OVERDUE_MS) == []  # it takes its time
    for seq, due_ms in ((2, NOW + 1000), (3, NOW + 300), (4, end_ms + 100)):
        court.give(seq, due_ms, fired_ms=end_ms + 2 * OVERDUE_MS)
    assert later(court, end_ms + RELEASE_MS + 2 * OVERDUE_MS) == []
    assert later(court, end_ms + 2 * HORIZON_MS) == []
    assert court.chunks == {}


@pytest.mark.parametrize("lost", [2, 3, 4])
def test_timer_lost_in_a_topic_that_was_paused_and_went_on_is_raised(
    court: Court, lost: int
) -> None:
    end_ms = paused(court)
    resume(court, end_ms)
    for seq, due_ms in ((2, NOW + 1000), (3, NOW + 300), (4, end_ms + 100)):
        if seq != lost:
            court.give(seq, due_ms, fired_ms=end_ms + 200)
    assert later(court, end_ms + RELEASE_MS) == []
    assert later(court, end_ms + RELEASE_MS + OVERDUE_MS) == [("lost", lost)]


def test_loss_of_what_comes_due_after_a_pause_is_raised_though_it_was_looked_at_meanwhile(
    court: Court,
) -> None:
    due_ms = NOW + HOUR
    for seq in (1, 2):
        court.schedule(seq, due_ms, number=1)
    court.of_topic(EventKind.PAUSED, NOW + 100)
    court.tell(EventKind.CANCELLED, seq=2, due_ms=due_ms, at_ms=NOW + 150)
    assert later(court, NOW + 200) == []
    resume(court, NOW + 300)
    assert later(court, NOW + 300) == []
    assert later(court, due_ms) == []
    assert later(court, due_ms + OVERDUE_MS) == [("lost", 1)]


def test_timer_lost_before_a_pause_is_raised_before_it_or_behind(court: Court) -> None:
    court.schedule(1, NOW + 100, number=1)
    court.schedule(2, NOW + 9_000, number=1)
    assert later(court, NOW + 200) == []
    assert later(court, NOW + 10_000) == [("lost", 1)]
    court.of_topic(EventKind.PAUSED, NOW + 10_000)
    assert later(court, NOW + 60_000) == []
    resume(court, NOW + 60_000)
    end_ms = NOW + 60_000 + RELEASE_MS + OVERDUE_MS
    assert later(court, end_ms) == [("lost", 2)]


def test_release_that_a_failover_cuts_short_has_its_time_again(court: Court) -> None:
    end_ms = paused(court)
    resume(court, end_ms)
    court.clock(end_ms + RELEASE_MS - 1, since_ms=end_ms + RELEASE_MS - 1)
    assert court.kinds() == []
    assert later(court, end_ms + 2 * RELEASE_MS) == []
    assert {*later(court, end_ms + 2 * RELEASE_MS + OVERDUE_MS)} == {
        ("lost", seq) for seq in (2, 3, 4)
    }


def test_second_firing_after_a_resume_is_raised(court: Court) -> None:
    end_ms = paused(court)
    resume(court, end_ms)
    for seq, due_ms in ((2, NOW + 1000), (3, NOW + 300), (4, end_ms + 100)):
        court.give(seq, due_ms, fired_ms=end_ms + 200)
    court.give(1, NOW + 100, offset=98, fired_ms=end_ms + 200)  # it had fired before
    court.give(2, NOW + 1000, offset=99, fired_ms=end_ms + 300)
    assert {*later(court, end_ms + 1000)} == {("duplicate", 1), ("duplicate", 2)}
    assert later(court, end_ms + RELEASE_MS + OVERDUE_MS) == []


@pytest.mark.parametrize("told_before", [True, False])
def test_firing_in_a_paused_topic_is_raised_but_not_of_a_dead_letter(
    court: Court, told_before: bool
) -> None:
    court.schedule(1, NOW + 1000, number=1)
    court.schedule(2, NOW + 1000, number=1)
    court.schedule(3, NOW + 1000, number=1)
    court.tell(EventKind.RACED, seq=2, due_ms=NOW + 1000, at_ms=NOW)
    if told_before:
        court.of_topic(EventKind.PAUSED, NOW + 500)
    for seq, fired_ms in ((1, NOW + 1001), (2, NOW + 1001), (3, NOW + 500)):
        court.give(seq, NOW + 1000 - 600 * (seq == 3), fired_ms=fired_ms)
    court.clock(NOW + 2000)
    if not told_before:
        assert [each for each in court.kinds() if each[1] != 3] == []
        court.of_topic(EventKind.PAUSED, NOW + 500)
    assert [each for each in later(court, NOW + 3000) if each[1] != 3] == [("held", 1)]


@pytest.mark.parametrize("catch_up", ["drop", "latest"])
def test_what_was_overdue_and_dropped_is_not_missed_but_what_comes_later_is(
    court: Court, catch_up: str
) -> None:
    end_ms = paused(court)
    resume(court, end_ms, catch_up)
    court.schedule(5, NOW + 400, at_ms=end_ms + 10, number=1)  # behind the resume: not overdue
    if catch_up == "latest":
        court.give(2, NOW + 1000, fired_ms=end_ms + 200)
    assert later(court, end_ms + RELEASE_MS) == []
    at_ms = end_ms + RELEASE_MS + OVERDUE_MS
    assert {*later(court, at_ms)} == {("lost", 4), ("lost", 5)}
    assert later(court, at_ms + RELEASE_MS) == []


@pytest.mark.parametrize(("catch_up", "raised"), [("drop", [2, 3]), ("latest", [3])])
def test_what_fires_although_it_was_dropped_is_raised(
    court: Court, catch_up: str, raised: list[int]
) -> None:
    end_ms = paused(court)
    resume(court, end_ms, catch_up)
    for seq, due_ms in ((2, NOW + 1000), (3, NOW + 300), (4, end_ms + 100)):
        court.give(seq, due_ms, fired_ms=end_ms + 200)
    assert later(court, end_ms + 300) == [("dropped", seq) for seq in raised]


def test_pause_during_a_release_leaves_what_is_left_to_the_next(court: Court) -> None:
    end_ms = paused(court)
    resume(court, end_ms)
    court.give(3, NOW + 300, fired_ms=end_ms + 50)
    court.of_topic(EventKind.PAUSED, end_ms + 60)
    assert later(court, end_ms + HOUR) == []
    resume(court, end_ms + HOUR, "drop")
    assert later(court, end_ms + HOUR + 2 * RELEASE_MS) == []
    assert later(court, end_ms + HOUR + 2 * RELEASE_MS + 4 * HORIZON_MS) == []
    assert court.chunks == {}


def test_nothing_is_missed_of_a_deleted_topic_and_its_namesake_is_another_one(court: Court) -> None:
    court.schedule(1, NOW + 100, number=1)
    court.schedule(2, NOW + 5000, number=1)
    court.of_topic(EventKind.DELETED, NOW + 200)
    court.of_topic(EventKind.MADE, NOW + 300, number=2)
    court.schedule(3, NOW + 400, number=2)  # nobody reads it yet
    court.of_topic(EventKind.WITNESSED, NOW + 1000, number=2)
    assert later(court, NOW + 1100) == []
    court.schedule(4, NOW + 1500, number=2)
    court.schedule(5, NOW + 1500, number=2)
    court.give(5, NOW + 1500)
    assert later(court, NOW + 2000) == []
    assert later(court, NOW + 10_000) == [("lost", 4)]
    court.give(2, NOW + 5000)
    assert later(court, NOW + 11_000) == [("deleted", 2)]


def test_deletion_lets_go_of_what_is_held(court: Court) -> None:
    end_ms = paused(court)
    court.of_topic(EventKind.DELETED, end_ms)
    assert later(court, end_ms + 1) == []
    assert later(court, end_ms + 2 * HORIZON_MS) == []
    assert court.chunks == {}


@pytest.mark.parametrize(("handed_out_ms", "raised"), [(199, []), (9_000, [("deleted", 1)])])
def test_delivery_long_after_the_deletion_is_raised(
    court: Court, handed_out_ms: int, raised: list[tuple[str, int]]
) -> None:
    court.schedule(1, NOW + 100, number=1)
    court.of_topic(EventKind.DELETED, NOW + 200)
    assert later(court, NOW + 20_000) == []  # the witness was slow
    court.give(1, NOW + 100, handed_out_ms=NOW + handed_out_ms)
    assert later(court, NOW + 20_001) == raised


def test_what_expired_is_not_missed_and_what_did_not_is(court: Court) -> None:
    court.of_topic(EventKind.LIVES, NOW, ttl_ms=2000)
    court.schedule(1, NOW + 100, number=1)
    court.schedule(2, NOW + 3000, number=1)
    court.clock(NOW + 3000)  # the witness is away
    assert court.kinds() == []
    court.of_topic(EventKind.EXPIRED, NOW + 3000, read_ms=NOW + 1000)
    assert later(court, NOW + 3001) == []
    assert later(court, NOW + 3000 + OVERDUE_MS) == [("lost", 2)]


def test_timer_lost_where_nothing_expired_is_raised_though_its_time_to_live_is_over(
    court: Court,
) -> None:
    court.of_topic(EventKind.LIVES, NOW, ttl_ms=1000)
    court.schedule(1, NOW + 100, number=1)
    assert later(court, NOW + 200) == []
    assert later(court, NOW + 200 + OVERDUE_MS) == [("lost", 1)]


def test_cancel_after_the_delivery_is_no_delivery(court: Court) -> None:
    court.of_topic(EventKind.LIVES, 0, ttl_ms=10_000)
    court.schedule(1, NOW + 100, number=1)
    court.give(1, NOW + 100)
    assert later(court, NOW + 200) == []
    court.tell(EventKind.RACED, seq=1, due_ms=NOW + 100, at_ms=NOW + 15_000)
    assert later(court, NOW + 20_000) == []


@pytest.mark.parametrize(
    ("ttl_since_ms", "handed_out_ms", "raised"),
    [
        (0, NOW + 10_099, False),
        (0, NOW + 10_100, True),
        (NOW + 9_000, NOW + 10_100, False),  # perhaps not everybody knew
    ],
)
def test_delivery_after_the_time_to_live_is_raised(
    court: Court, ttl_since_ms: int, handed_out_ms: int, raised: bool
) -> None:
    court.of_topic(EventKind.LIVES, ttl_since_ms, ttl_ms=10_000)
    court.schedule(1, NOW + 100, number=1)
    court.give(1, NOW + 100)
    assert later(court, NOW + 200) == []
    court.give(1, NOW + 100, handed_out_ms=handed_out_ms)  # a redelivery
    assert later(court, NOW + 20_000) == [("expired", 1)] * raised
