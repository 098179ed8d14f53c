"""The leader's part for groups: nacks, extensions, dead letters and redrives."""

from unittest import mock

import numpy as np
import pytest

from tests.calls import calls_of
from tests.timer.leading import LEASE_MS, Play, delivered, schedule
from tests.timer.machines import u64
from timer.entries.payloads import EXCLUSIVE, SHARED, TYPES
from timer.leader.groups import dead_letters as deadletters
from timer.leader.groups import ended_messages, group_batch, group_dispatch, nack_details
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.group_leases import (
    ACCEPT,
    ALREADY_ACKED,
    DEAD_LETTERED,
    LEASE_LOST,
    NOT_DELIVERED,
)
from timer.leader.groups.lease_table import ConsumerStream
from timer.leader.groups.nack_details import NackDetails
from timer.leader.intake.count_limits import CountLimits
from timer.leader.leader import LeaderConfig
from timer.model import timer_id
from timer.model.columns import ROW
from timer.model.timer_errors import DiskFullError, NotReadyError, OverloadedError
from timer.model.units import QueueOffset
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.state.apply_results import MoveApplied

# ---- nacks, extensions, dead letters


def test_nacked_message_comes_again_after_its_delay_and_not_before() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0, 0)
    first = play.deliveries[0]
    play.nack("n", first, [1], delay_ms=5_000)
    assert "n" not in play.answers, "it isn't committed"
    play.settle()
    assert play.verdict("n") == [ACCEPT]
    play.ack("a", first, [0, 2])
    play.settle()
    assert play.leader.wake_at_ms(play.now) <= play.mono_ms + 5_000
    for _ in range(4):  # checkpoints come in between
        play.wait(1_249)
        play.settle()
    assert len(play.deliveries) == 1
    play.wait(4)
    play.settle()
    assert play.last() == ([1], [2])
    play.nack("at once", play.deliveries[-1], delay_ms=0)
    play.settle()
    assert play.last() == ([1], [3])
    assert group.later_sum
    play.ack("b", play.deliveries[-1])
    play.settle()
    assert group.later_sum == 0


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("lacks", ["a consumer", "credit", "room in flight"])
def test_leader_sleeps_while_nobody_takes_what_is_back(type_: str, lacks: str) -> None:
    play = Play()
    group = play.make_group(type=type_, max_in_flight=1 if lacks == "room in flight" else 0)
    consumer = play.join(group, credit=2 if lacks == "credit" else 100)
    play.settle()
    play.schedule("s", 0, 0, keys=[b"a", b"b"])
    play.settle()
    play.nack("n", play.deliveries[0], [0], delay_ms=500)
    play.settle()
    if lacks == "a consumer":
        play.leader.groups.leave(group, consumer)
    play.wait(600)
    play.settle()
    assert play.deliver() == []
    assert play.leader.wake_at_ms(play.now) > play.mono_ms
    if any(0 in each.lease.offsets.tolist() for each in play.deliveries[1:]):
        assert (type_, lacks) != (SHARED, "a consumer")
        return
    if lacks == "room in flight":
        play.ack("a", play.deliveries[-1])
    elif lacks == "credit":
        play.leader.groups.credit(group, consumer, 100)
    else:
        play.join(group)
    play.settle()
    assert 0 in play.last()[0]


@pytest.mark.parametrize("full", [None, DiskFullError([], retry_after_ms=1)])
def test_look_behind_a_stuck_message_goes_on_in_the_next_step(full: DiskFullError | None) -> None:
    play = Play()
    group = play.make_group()
    queue, count = play.machine.topics[play.topic_id].queue, 60_000
    for _ in range(5):
        queue.append(np.zeros(count, ROW), {}, play.now.clock_ms)
    group.reserve(queue.end)
    group.nack(np.zeros(1, np.uint64), np.array([10**15]))
    group.ack(np.arange(1, queue.end - 1, dtype=np.uint64))
    play.leader.disk_error = full
    play.join(group)
    steps = 1
    while not (got := play.deliver()):
        assert play.leader.wake_at_ms(play.now) <= play.mono_ms + 1
        steps += 1
    assert got == [[5 * count - 1]]
    assert steps >= 3


def test_nacks_time_outlives_the_leader() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0)
    play.nack("n", play.deliveries[0], [1], delay_ms=5_000)
    play.settle()
    play.restart()
    play.join(group)
    play.settle()
    assert play.last() == ([0], [2])
    assert play.leader.wake_at_ms(play.now) <= play.mono_ms + 5_000
    play.wait(4_999)
    play.settle()
    assert play.last()[0] == [0]
    play.wait(1)
    play.settle()
    assert play.last() == ([1], [3]), "the nack counts, and the epoch"


def test_leader_that_hands_over_tells_how_often_each_message_was_delivered() -> None:
    play = Play()
    group, consumer = delivered(play, 0, 0, 0, 0, credit=3)
    play.ack("a", play.deliveries[0], [0])
    play.nack("n", play.deliveries[0], [1], delay_ms=0)  # both gathered, and not appended yet
    play.leader.hand_over(play.now)
    play.leader.groups.credit(group, consumer, 9)
    assert play.deliver() == [], "nobody would know of it"
    play.commit()
    assert play.verdict("a") == play.verdict("n") == [ACCEPT]
    for _ in range(3):
        play.restart()
        play.leader.hand_over(play.now)
    play.restart()
    first = play.deliveries[0]
    play.leader.groups.ack(group, first.epoch, first.lease.lease_id, u64([2]), play.done("late"))
    play.leader.groups.ack(group, first.epoch, first.lease.lease_id, u64([3]), play.done("never"))
    assert play.verdict("never") == [NOT_DELIVERED]
    play.join(group)
    play.settle()
    assert play.verdict("late") == [ACCEPT], "a successor knows how far its predecessor came"
    last = play.deliveries[-1]
    assert play.last() == ([1, 3], [2, 1])
    assert last.failures.tolist() == [1, 0]


def three_groups(monkeypatch: pytest.MonkeyPatch) -> tuple[Play, list[Group]]:
    """Return a leader with three groups. It hands over about two of them in one entry."""
    monkeypatch.setattr(group_batch, "GROUP_OFFSETS_MAX", 4 * group_batch.OP_WEIGHT)
    play = Play()
    groups = [play.make_group(name) for name in ("a", "b", "c")]
    for group in groups:
        play.join(group)
    play.settle()
    return play, groups


def test_groups_are_handed_over_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    play, groups = three_groups(monkeypatch)
    play.schedule("s", 0)
    play.settle()
    assert [each.group for each in play.deliveries] == groups
    assert play.leader.hand_over(play.now)
    play.commit()
    play.schedule("between", 0)
    play.settle()
    assert len(play.deliveries) == 3, "nothing is delivered between the parts either"
    assert not play.leader.hand_over(play.now)
    play.commit()
    play.restart()
    for group in groups:
        play.join(group)
    play.settle()
    attempts = [attempt for each in play.deliveries[3:] for attempt in each.attempts.tolist()]
    assert sorted(attempts) == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("sought", [0, 2])
def test_seek_between_the_parts_of_a_handover(monkeypatch: pytest.MonkeyPatch, sought: int) -> None:
    play, groups = three_groups(monkeypatch)
    play.schedule("s", 0, 0)
    play.settle()
    group, old = groups[sought], play.deliveries[sought]
    assert play.leader.hand_over(play.now), "of a, not of c"
    play.ack("ack", old, [0])
    play.leader.groups.seek(group, QueueOffset(0), play.done("seek"))
    play.commit()
    assert not play.leader.hand_over(play.now)
    play.commit()
    assert play.verdict("ack") == [LEASE_LOST]
    play.restart()
    for each in groups:
        play.join(each)
    play.ack("old", old, epoch=old.epoch)
    assert play.verdict("old") == [LEASE_LOST, LEASE_LOST]
    play.settle()
    again = {each.group.name: each for each in play.deliveries[3:]}
    assert [again[name].lease.offsets.tolist() for name in "abc"] == [[0, 1]] * 3
    assert [again[name].attempts.tolist() for name in "abc"] == [[2, 2]] * 3


@pytest.mark.parametrize("rejected", range(5))
def test_redelivery_is_marked_wherever_the_log_of_a_handover_ends_or_rejects_an_entry(
    monkeypatch: pytest.MonkeyPatch, rejected: int
) -> None:
    monkeypatch.setattr(group_batch, "GROUP_OFFSETS_MAX", 2 * group_batch.OP_WEIGHT)
    for kept in range(6):
        play = Play()
        group, _ = delivered(play, 0, 0, 0, 0, 0)
        for offset in range(3):
            play.ack(f"ack {offset}", play.deliveries[0], [offset])
        play.nack("nack", play.deliveries[0], [3], delay_ms=0)
        results = [mock.DEFAULT] * rejected + [OverloadedError("the log", retry_after_ms=1)]
        results += [mock.DEFAULT] * 9
        play.leader._append = mock.Mock(wraps=play.append, side_effect=results)
        while play.leader.hand_over(play.now):
            pass
        play.commit(kept)
        del play.log.entries[play.machine.applied_index :]
        play.restart()
        play.join(group)
        play.settle()
        assert min(play.last()[1]) >= 2, kept


def test_nack_is_judged_by_who_holds_the_message() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0, 0, 0)
    first = play.deliveries[0]
    play.ack("a", first, [0])
    play.settle()
    play.nack("n", first, [0, 1, 1, 9], delay_ms=10**6)
    play.settle()
    assert play.verdict("n") == [ALREADY_ACKED, ACCEPT, LEASE_LOST, NOT_DELIVERED]
    play.nack("again", first, [1], delay_ms=0)
    assert play.verdict("again") == [LEASE_LOST]
    assert group.failures(u64([1])).tolist() == [1]
    play.ack("after all", first, [1])
    play.settle()
    assert play.verdict("after all") == [ACCEPT], "nobody else has it"
    play.wait(LEASE_MS)
    play.settle()
    play.nack("late", first, [2], delay_ms=0)
    assert play.verdict("late") == [LEASE_LOST]
    old = play.deliveries[-1]
    play.restart()
    play.join(group)
    play.settle()
    play.leader.groups.nack(
        group, old.epoch, old.lease.lease_id, u64([2]), 0, play.now, play.done("old")
    )
    assert play.verdict("old") == [LEASE_LOST], "the epoch that leased it is over"


def test_nack_without_a_delay_backs_off_as_the_group_says() -> None:
    play = Play()
    group, _ = delivered(play, 0)
    play.alter(group, backoff_ms_min=100, backoff_ms_max=250)
    for number, wait_ms in enumerate([100, 200, 250, 250]):
        play.nack(f"n{number}", play.deliveries[-1])
        play.settle()
        play.wait(wait_ms - 1)
        play.settle()
        assert len(play.deliveries) == number + 1
        play.wait(1)
        play.settle()
        assert len(play.deliveries) == number + 2


def test_extended_lease_ends_later_and_never_sooner() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0, 0)
    first = play.deliveries[0]
    held = group, first.epoch, first.lease.lease_id
    play.ack("a", first, [0])
    play.settle()
    play.wait(LEASE_MS // 2)
    extend = play.leader.groups.extend
    assert extend(*held, u64([0, 1, 9]), LEASE_MS, play.now).tolist() == [
        ALREADY_ACKED,
        ACCEPT,
        NOT_DELIVERED,
    ]
    assert extend(*held, u64([1]), 1, play.now).tolist() == [ACCEPT], "not shorter"
    play.wait(LEASE_MS - 1)
    play.settle()
    assert len(play.deliveries) == 1
    play.wait(1)
    play.settle()
    assert play.last() == ([1, 2], [2, 2]), "what was delivered together is extended together"
    assert extend(*held, u64([1]), LEASE_MS, play.now).tolist() == [LEASE_LOST]


def dead_letters(play: Play) -> Group:
    """Deliver two messages to a group with two attempts per message."""
    group = play.make_group()
    play.alter(group, max_attempts=2)
    play.join(group)
    play.schedule("s", 0, 0, size=1)
    play.settle()
    del play.answers["s"]
    return group


def test_message_that_failed_too_often_goes_to_the_dead_letters_once() -> None:
    play = Play(LeaderConfig(id_salt=77))
    group = dead_letters(play)
    play.nack("n1", play.deliveries[-1], delay_ms=0)
    play.settle()
    play.nack("n2", play.deliveries[-1], [0], delay_ms=10**6)
    play.settle()
    play.wait(LEASE_MS)
    play.settle()
    assert len(play.deliveries) == 2, "nobody gets them any more"
    assert group.unacked_count(play.machine.topics[play.topic_id].queue.end) == 0
    (one, two) = play.messages("a.g.dead")
    assert (one[0], two[0]) == (b"x", b"x")
    assert one[2][deadletters.REASON] == "nacked"
    assert two[2] == {
        "dead-letter-reason": "lease ended",
        "dead-letter-topic": "a",
        "dead-letter-group": "g",
        "dead-letter-timer-id": two[2][deadletters.TIMER_ID],
        "dead-letter-offset": "1",
        "dead-letter-attempts": "2",
    }
    raw = timer_id.from_text(two[2][deadletters.TIMER_ID])
    _, seq, genuine = timer_id.decode(raw, 77)
    assert (seq.tolist(), genuine.tolist()) == ([2], [True])
    counts = play.machine.counts
    assert (counts.scheduled, counts.fired, counts.pending) == (4, 4, 0)


def details(play: Play) -> list[str | None]:
    return [headers.get(deadletters.DETAIL) for _, _, headers in play.messages("a.g.dead")]


def test_dead_letter_has_the_text_of_the_nack_that_was_its_last_failure() -> None:
    play = Play()
    dead_letters(play)
    play.nack("n1", play.deliveries[-1], delay_ms=0, detail="first")
    assert not play.leader.groups._details._texts, "attempts are left"
    play.settle()
    play.nack("n2", play.deliveries[-1], [0], delay_ms=10**6, detail="OSError: ünreachable")
    play.settle()
    play.wait(LEASE_MS)  # the other message fails without a nack
    play.settle()
    assert details(play) == ["OSError: ünreachable", None]


def test_dead_letter_has_no_text_of_an_earlier_nack() -> None:
    play = Play()
    group = dead_letters(play)
    play.alter(group, max_attempts=1)
    play.nack("n1", play.deliveries[-1], delay_ms=0, detail="not the last one any more")
    play.alter(group, max_attempts=2)
    play.nack("n2", play.deliveries[-1], [0], delay_ms=0)
    play.wait(LEASE_MS)
    play.settle()
    assert details(play) == [None, None]


def test_text_of_a_nack_is_lost_with_the_leader() -> None:
    play = Play()
    group = dead_letters(play)
    play.alter(group, max_attempts=1)
    play.nack("n", play.deliveries[-1], delay_ms=0, detail="lost")
    play.step()
    play.commit()
    play.restart()
    play.join(group)
    play.settle()
    assert details(play) == [None, None]


def test_leader_keeps_the_newest_texts_of_nacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nack_details, "DETAILS_MAX", 2)
    group, kept = Play().make_group(max_attempts=1), NackDetails()
    kept.note(group, u64([0, 1]), "a")
    kept.note(group, u64([2, 1]), "b")
    assert kept.take(group, u64([0, 1, 2])) == ["", "b", "b"]
    assert kept.take(group, u64([1])) == [""]


@pytest.mark.parametrize("when", ["after the move", "while it is on its way", "by another leader"])
def test_ack_of_what_became_a_dead_letter_is_told_so(when: str) -> None:
    play = Play()
    play.alter(dead_letters(play), max_attempts=1)
    held, group = play.deliveries[-1], play.deliveries[-1].group
    play.wait(LEASE_MS)
    play.step()
    play.commit()
    play.deliver()
    play.step()  # the MOVE is appended
    if when != "while it is on its way":
        play.settle()
    if when == "by another leader":
        play.restart()
    held_of = group, held.epoch, held.lease.lease_id
    play.leader.groups.ack(*held_of, u64([1, 0, 1]), play.done("late"))
    play.leader.groups.nack(*held_of, u64([0]), None, play.now, play.done("nack"))
    play.settle()
    assert play.verdict("late")[:2] == [DEAD_LETTERED, DEAD_LETTERED]
    assert len(play.messages("a.g.dead")) == 2, "they stay dead letters"
    if when == "after the move":
        assert play.verdict("nack") == [DEAD_LETTERED]


def test_cumulative_ack_of_what_became_a_dead_letter_is_told_so() -> None:
    play = Play()
    group = play.make_group(type=EXCLUSIVE)
    play.alter(group, max_attempts=2)
    consumer = play.join(group, credit=5)  # for no third delivery
    play.schedule("s", 0, 0, 0)
    play.settle()
    first = play.deliveries[-1]
    play.nack("n", first, [1], delay_ms=0)
    play.settle()
    held = play.deliveries[-1]  # 1 and 2, again
    up_to = group, held.epoch, held.lease.lease_id
    play.wait(LEASE_MS)  # all fail once more: 1 for the last time
    play.settle()
    play.leader.groups.ack_up_to(*up_to, QueueOffset(2), play.done("partly"))
    play.settle()
    assert play.verdict("partly") == [DEAD_LETTERED]
    assert group.cursor == 3, "the others are acked"
    play.leader.groups.ack_up_to(*up_to, QueueOffset(1), play.done("again"))
    assert play.verdict("again") == [DEAD_LETTERED]
    play.leader.groups.credit(group, consumer, 1)
    play.schedule("more", 0)
    play.settle()
    later = play.deliveries[-1]
    up_to = group, later.epoch, later.lease.lease_id
    play.leader.groups.ack_up_to(*up_to, QueueOffset(3), play.done("later"))
    play.settle()
    assert play.verdict("later") == [ACCEPT], "what died before it was delivered is not its affair"


@pytest.mark.parametrize("type_", TYPES)
def test_delivery_that_was_not_sent_counts_no_attempt_and_no_failure(type_: str) -> None:
    play = Play()
    group = play.make_group(type=type_)
    first = play.join(group, credit=1)
    play.settle()
    play.schedule("s", 0, 0, keys=[b"a", b"b"])
    play.settle()
    play.leader.groups.credit(group, first, 1)
    play.settle()
    sent, unsent = play.deliveries
    play.leader.groups.leave(group, first, [unsent.lease.lease_id])
    play.join(group, credit=100)
    play.settle()
    again = play.deliveries[2:]
    attempts = [attempt for each in again for attempt in each.attempts.tolist()]
    failures = [failure for each in again for failure in each.failures.tolist()]
    offsets = [offset for each in again for offset in each.lease.offsets.tolist()]
    known = dict(zip(offsets, zip(attempts, failures, strict=True), strict=True))
    assert known == {sent.lease.offsets.item(): (2, 1), unsent.lease.offsets.item(): (1, 0)}


def three_deliveries(type_: str) -> tuple[Play, Group, ConsumerStream]:
    """Deliver three messages of one key to one consumer, each under a lease of its own."""
    play = Play()
    group = play.make_group(type=type_)
    consumer = play.join(group, credit=3)
    play.settle()
    for name in ("one", "two", "three"):
        play.schedule(name, 0, keys=[b"a"])
        play.wait(1)
        play.settle()
    return play, group, consumer


@pytest.mark.parametrize("type_", TYPES)
def test_lease_that_ends_before_its_delivery_is_sent_counts_no_attempt_and_no_failure(
    type_: str,
) -> None:
    play, group, consumer = three_deliveries(type_)
    leases = [each.lease.lease_id for each in play.deliveries]
    # The first delivery was sent. The others wait until the second lease ends.
    waiting = leases[1:]
    consumer.withdraw = lambda lease_id: waiting if lease_id in waiting else []
    held = play.deliveries[0].epoch, leases[0], play.deliveries[0].lease.offsets
    play.leader.groups.extend(group, *held, 2 * LEASE_MS, play.now)
    entries = len(play.log.entries)
    play.wait(LEASE_MS - 1)
    play.step()
    assert play.leader.groups.lease_counts(group) == (1, 1)
    assert len(play.log.entries) == entries, "a lease that was not sent needs no entry"
    play.leader.groups.credit(group, consumer, 100)
    play.settle()
    again = play.deliveries[3:]
    assert [offset for each in again for offset in each.lease.offsets.tolist()] == [1, 2]
    assert [attempt for each in again for attempt in each.attempts.tolist()] == [1, 1]
    assert [failure for each in again for failure in each.failures.tolist()] == [0, 0]


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("handed_over", [False, True])
def test_unsent_delivery_behind_a_nack_or_before_a_transfer_counts_no_attempt(
    type_: str, *, handed_over: bool
) -> None:
    play, group, consumer = three_deliveries(type_)
    # The first two deliveries were sent.
    waiting = [play.deliveries[2].lease.lease_id]
    consumer.withdraw = lambda lease_id: waiting if lease_id in waiting else []
    if handed_over:
        play.leader.hand_over(play.now)
        play.commit()
        play.restart()
    else:
        play.nack("back", play.deliveries[0], delay_ms=0)
        play.leader.groups.leave(group, consumer, waiting)
    play.settle()
    play.join(group, credit=100)
    play.settle()
    again = play.deliveries[3:]
    known = {
        offset: attempt
        for each in again
        for offset, attempt in zip(each.lease.offsets.tolist(), each.attempts.tolist(), strict=True)
    }
    assert known == {0: 2, 1: 2, 2: 1}


@pytest.mark.parametrize("type_", TYPES)
def test_consumer_that_no_delivery_reached_leaves_no_attempt_behind(type_: str) -> None:
    play = Play()
    group = play.make_group(type=type_)
    first = play.join(group, credit=100)
    play.settle()
    play.schedule("s", 0, 0)
    play.settle()
    entries = len(play.log.entries)
    play.leader.groups.give_up(group, first)
    play.settle()
    assert (play.leader.groups.lease_counts(group), len(play.log.entries)) == ((0, 0), entries)
    play.join(group, credit=100)
    play.settle()
    assert [each.lease.offsets.tolist() for each in play.deliveries] == [[0, 1]] * 2
    assert play.deliveries[1].attempts.tolist() == [1, 1]


def test_dead_letters_move_without_a_consumer_and_from_disk() -> None:
    play = Play()
    group = dead_letters(play)
    consumer = play.deliveries[0].lease.consumer
    play.nack("n1", play.deliveries[-1], delay_ms=0)
    play.settle()
    play.nack("n2", play.deliveries[-1], delay_ms=0)
    queue = play.machine.topics[play.topic_id].queue
    (block,) = queue.blocks
    page, block.page = block.page, None  # as if only a file held it
    play.leader.groups.leave(group, consumer)
    play.settle()
    assert "a.g.dead" not in play.machine.topic_by_name
    block.page = page
    play.leader.groups.on_pages_read()
    play.settle()
    assert len(play.messages("a.g.dead")) == 2


@pytest.mark.parametrize("type_", TYPES)
def test_read_pages_give_only_the_groups_that_wait_for_them_a_turn(type_: str) -> None:
    play = Play()
    for name in ("idle", "lazy"):
        play.join(play.make_group(name, type=type_), credit=1 if name == "lazy" else 100)
    play.schedule("s", 0, 0)
    play.settle()
    (block,) = play.machine.topics[play.topic_id].queue.blocks
    page, block.page = block.page, None  # as if only a file held it
    play.join(play.make_group("reading", type=type_), credit=100)
    play.settle()
    play.settle()
    count, turns = len(play.deliveries), play.leader.groups._turns
    assert len(turns) == 0
    play.leader.groups.on_pages_read()
    assert len(turns) == 1
    play.settle()
    assert (len(play.deliveries), len(turns)) == (count, 0), "another page was read"
    block.page = page
    play.leader.groups.on_pages_read()
    play.settle()
    assert [each.group.name for each in play.deliveries[count:]] == ["reading"]
    play.leader.groups.on_pages_read()
    assert len(turns) == 0


def test_full_disks_keep_dead_letters_where_they_are_until_there_is_room() -> None:
    play = Play()
    group = dead_letters(play)
    play.alter(group, max_attempts=1)
    play.leader.disk_error = DiskFullError([], retry_after_ms=1)
    play.nack("n", play.deliveries[-1], delay_ms=0)
    play.settle()
    play.settle()
    assert "a.g.dead" not in play.machine.topic_by_name
    play.leader.disk_error = None
    play.wait(group_dispatch.LETTER_RETRY_MS)
    play.settle()
    assert len(play.messages("a.g.dead")) == 2


def test_lower_limit_makes_dead_letters_of_what_failed_before_also_for_a_new_leader() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0)
    play.nack("n", play.deliveries[0], [0], delay_ms=10**6)
    play.settle()
    play.restart()
    play.join(group)
    play.settle()
    play.alter(group, max_attempts=1, dead_letter_topic="elsewhere")
    play.settle()
    assert play.last() == ([1], [2])
    assert "elsewhere" not in play.machine.topic_by_name, "it is not looked at before its time"
    play.ack("done", play.deliveries[-1])
    play.wait(10**6)
    play.settle()
    assert [m[2][deadletters.REASON] for m in play.messages("elsewhere")] == ["nacked"]


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("priority", [4, 9])
def test_raised_limit_delivers_again_what_waits_for_a_dead_letter_topic(
    type_: str, priority: int
) -> None:
    play = Play(config=LeaderConfig(limits=CountLimits(topics_max=1)))
    group = play.make_group(type=type_, max_attempts=2)
    schedule(play, [priority] * 2)
    play.join(group)
    play.settle()
    for at in range(2):
        play.nack(f"n{at}", play.deliveries[-1], delay_ms=1)
        play.settle()
        play.wait(1)
        play.settle()
    assert play.leader.groups.states(group, u64([0, 1])).dying.all()
    play.alter(group, max_attempts=3)
    assert play.last() == ([0, 1], [3, 3])
    play.nack("n2", play.deliveries[-1], [0], delay_ms=1)
    play.settle()
    play.ack("done", play.deliveries[-1], [1])
    play.wait(group_dispatch.LETTER_RETRY_MS)
    play.settle()
    assert len(play.deliveries) == 3
    assert group.unacked_count(QueueOffset(2)) == 1


def test_alteration_of_a_group_looks_at_its_dying_messages_in_portions_after_a_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = calls_of(monkeypatch, ended_messages.EndedMessages, "_still_dying")
    monkeypatch.setattr(ended_messages, "REVIVE_MAX", 3)
    play = Play(config=LeaderConfig(limits=CountLimits(topics_max=1)))
    group = play.make_group(max_attempts=1)
    play.schedule("s", *[0] * 10)
    consumer = play.join(group, credit=10)
    play.settle()
    for some in ([0], [1], [*range(2, 10)]):
        play.nack(f"n{some[0]}", play.deliveries[0], some, delay_ms=0)
        play.settle()
    play.alter(group, max_attempts=1, backoff_ms_min=1)
    assert not looks
    play.alter(group, max_attempts=2)
    while len(looks) < 4 and play.leader.wake_at_ms(play.now) <= play.mono_ms + 1:
        play.wait(1)
        play.settle()
    assert [len(offsets) for _, offsets in looks] == [3, 3, 3, 1]
    play.leader.groups.credit(group, consumer, 10)
    play.settle()
    again = np.concatenate([each.lease.offsets for each in play.deliveries[1:]])
    assert sorted(again.tolist()) == [*range(10)]


def dead_topic(play: Play) -> Topic:
    """Deliver and nack two messages; return the dead-letter topic that they move to."""
    play.alter(dead_letters(play), max_attempts=1)
    play.nack("n", play.deliveries[-1], delay_ms=0)
    play.settle()
    return play.machine.topic_by_name["a.g.dead"]


def letters_of(play: Play, letters: Group) -> Delivery:
    play.join(letters)
    assert play.deliver() == [], "nothing is reserved yet"
    play.step()
    play.commit()
    (delivery,) = play.hand_out_new()
    return delivery


def test_dead_letters_stay_where_their_topic_is_being_deleted() -> None:
    play = Play()
    letters = dead_topic(play).groups[deadletters.GROUP]
    offsets, told = letters_of(play, letters).lease.offsets, list[object]()
    assert len(play.leader.groups.redrive(letters, offsets, told.append)) == 1
    play.leader.delete_topic(play.topic_id, play.now, play.done("delete"))
    assert [str(each) for each in told] == [str(NotReadyError("the topic is being deleted; retry"))]
    with pytest.raises(NotReadyError):
        play.leader.groups.redrive(letters, offsets, told.append)
    play.settle()
    assert play.leader.groups.redrive(letters, offsets, told.append) == []
    play.settle()
    assert play.answers["delete"].topic is not None
    assert "a" not in play.machine.topic_by_name
    assert letters.cursor == 0
    assert len(told) == 1


def test_redriven_dead_letters_are_where_they_came_from_as_they_were() -> None:
    play = Play()
    dead = dead_topic(play)
    play.topic_id = dead.topic_id
    play.schedule("stray", 0)  # a message that is no dead letter
    play.settle()
    moved: list[object] = []
    letters = dead.groups[deadletters.GROUP]
    offsets = letters_of(play, letters).lease.offsets
    assert len(play.leader.groups.redrive(letters, offsets, moved.append)) == 1
    play.settle()
    assert [m.new.tolist() for m in moved if isinstance(m, MoveApplied)] == [[True, True]]
    assert [m[0] for m in play.messages("a")] == [b"x", b"x"]
    assert all(m[2] == {} for m in play.messages("a"))
    assert letters.unacked_count(dead.queue.end) == 1, "the stray one stays"
    assert play.last()[0] == [2, 3], "the group gets them as new ones"
