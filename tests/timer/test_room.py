"""Room on the disks: the voters that count, and the requests that are rejected."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.timer.leading import Play
from tests.timer.machines import START_MS, u64
from timer.entries.payloads import Ids
from timer.files.disk_reserve import AMPLE_MULTIPLE, SILENT_MS, DiskSpace, VoterDisks
from timer.leader.groups.group_leases import ACCEPT
from timer.leader.intake.admission import WantedTimes
from timer.model.timer_errors import DiskFullError
from timer.model.units import MonoMs, ProducerId, ReplicaId
from timer.state.apply_results import CANCELLED, Accepted, Repeated

ME, TWO, THREE = (ReplicaId(number) for number in (1, 2, 3))
VOTERS = (ME, TWO, THREE)
NOW = MonoMs(100_000)
ROOMY, LOW = DiskSpace(900, 800, low=False), DiskSpace(700, 800, low=True)


def rooms(*found: DiskSpace | None, now_ms: MonoMs = NOW) -> VoterDisks:
    known = VoterDisks(ME, now_ms)
    for voter, room in zip(VOTERS, found, strict=True):
        if room is not None:
            known.store_report(voter, f"n{voter}", room, now_ms)
    return known


@pytest.mark.parametrize("free", [0, 799, 800, 801])
def test_disk_is_low_below_its_reserve(free: int) -> None:
    assert DiskSpace.unmeasured().after(free, 800).low == (free < 800)


@pytest.mark.parametrize("free", [799, 800, 899, 900])
def test_low_disk_has_room_again_only_an_eighth_above_its_reserve(free: int) -> None:
    assert LOW.after(free, 800).low == (free < 900)


def test_no_reserve_is_never_low() -> None:
    assert not DiskSpace.unmeasured().after(0, 0).low


AMPLE_ROOM = DiskSpace(AMPLE_MULTIPLE * 800, 800, low=False)


@pytest.mark.parametrize(
    ("found", "ample"),
    [
        ((AMPLE_ROOM, AMPLE_ROOM, AMPLE_ROOM), True),
        ((AMPLE_ROOM, AMPLE_ROOM, DiskSpace(AMPLE_MULTIPLE * 800 - 1, 800, low=False)), False),
        ((ROOMY, AMPLE_ROOM, AMPLE_ROOM), False),
        ((AMPLE_ROOM, AMPLE_ROOM, None), False),
    ],
)
def test_room_is_ample_if_each_voter_has_several_times_its_reserve(
    found: tuple[DiskSpace | None, ...], *, ample: bool
) -> None:
    assert rooms(*found).are_ample(VOTERS) is ample


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        ((ROOMY, ROOMY, ROOMY), ""),
        ((ROOMY, LOW, ROOMY), ""),
        ((ROOMY, LOW, None), ""),
        ((ROOMY, LOW, LOW), "n2 n3"),
        ((LOW, ROOMY, ROOMY), "n1"),
        ((LOW, LOW, LOW), "n1 n2 n3"),
    ],
)
def test_what_is_new_needs_room_on_a_majority_and_here(
    found: tuple[DiskSpace | None, ...], refused: str
) -> None:
    refusal = rooms(*found).refusal(VOTERS, NOW)
    assert (refusal is not None) == bool(refused)
    for name in refused.split():
        told = f"{name} has 700 bytes free, below its storage.reserve_bytes = 800"
        assert told in str(refusal)


def test_disk_whose_room_is_not_yet_enough_is_not_called_below_its_reserve() -> None:
    again = LOW.after(850, 800)
    assert again.low
    told = "full until it has an eighth more than its storage.reserve_bytes = 800"
    assert f"n1 has 850 bytes free, and is {told}" in str(
        rooms(again, ROOMY, ROOMY).refusal(VOTERS, NOW)
    )


def test_silent_voter_counts_as_low_but_alone_is_no_reason() -> None:
    later = MonoMs(NOW + SILENT_MS)
    known = rooms(ROOMY, LOW, ROOMY)
    assert known.refusal(VOTERS, MonoMs(later - 1)) is None
    assert isinstance(known.refusal(VOTERS, later), DiskFullError)
    assert rooms(ROOMY, ROOMY, ROOMY).refusal(VOTERS, later) is None
    assert rooms(ROOMY, None, None).refusal(VOTERS, later) is None


def test_learner_counts_for_nothing() -> None:
    assert rooms(ROOMY, LOW, LOW).refusal((ME,), NOW) is None


def test_leader_without_room_hands_over_to_who_has_most_if_a_majority_has_any() -> None:
    more = DiskSpace(1_000, 800, low=False)
    assert rooms(LOW, ROOMY, more).better_leader(VOTERS, NOW) == THREE
    assert rooms(ROOMY, ROOMY, more).better_leader(VOTERS, NOW) is None
    assert rooms(LOW, LOW, more).better_leader(VOTERS, NOW) is None
    assert rooms(LOW, None, more).better_leader(VOTERS, NOW) is None
    assert rooms(LOW, ROOMY, more).better_leader(VOTERS, MonoMs(NOW + SILENT_MS)) is None


def test_nothing_new_is_taken_without_room_and_all_else_goes_on() -> None:
    play = Play()
    play.leader.register(b"token", ProducerId(1), play.now, play.done("producer"))
    play.commit()
    producer = play.answers.pop("producer")
    play.schedule("first", 1_000, producer=producer, sequence=1)
    play.settle()
    answer = play.answers.pop("first").answer
    timer = (int(answer.due_ms[0]), int(answer.first_seq))
    play.schedule("on its way", 0, producer=producer, sequence=2)

    full = play.leader.disk_error = DiskFullError([("n1", 5, 10)], retry_after_ms=1)
    ids = Ids(np.array([timer[0]]), u64([timer[1]]))
    topics, when = np.ones(1, np.uint32), WantedTimes("due_ms", np.array([START_MS]))
    refused: list[Callable[[], None]] = [
        lambda: play.schedule("new", 0, producer=producer, sequence=3),
        lambda: play.schedule("unnumbered", 0),
        lambda: play.leader.reschedule(ids, topics, when, play.now, play.done("moved")),
        lambda: play.leader.register(b"another", ProducerId(1), play.now, play.done("another")),
        lambda: play.leader.create_topic("b", play.now, play.done("topic")),
    ]
    for ask in refused:
        with pytest.raises(DiskFullError) as error:
            ask()
        assert error.value is full
    play.schedule("again", 0, producer=producer, sequence=1)  # it has an effect already
    play.leader.create_topic("a", play.now, play.done("known"))
    group = play.make_group()
    play.join(group)
    play.cancel("cancel", timer)
    play.settle()
    assert play.answers.pop("cancel").tolist() == [CANCELLED]
    assert isinstance(play.answers.pop("again"), Repeated)
    play.ack("ack", play.deliveries[0])
    play.settle()
    assert play.verdict("ack") == [ACCEPT]
    assert play.answers.keys() == {"on its way", "known", "ack"}

    play.leader.disk_error = None
    play.schedule("new", 0, producer=producer, sequence=3)
    play.settle()
    assert isinstance(play.answers["new"], Accepted)
