"""Seeks, deletions and the right to consume: the leader's part, over a log in memory."""

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.leading import LEASE_MS, Play, delivered
from tests.timer.machines import Log, machine_on, part_of, u64
from timer.entries.payloads import EXCLUSIVE, FAILOVER, Op
from timer.leader.groups.group_leases import ACCEPT, ALREADY_ACKED, LEASE_LOST
from timer.leader.groups.lease_table import ConsumerStream
from timer.model import timer_errors
from timer.model.units import LeaseId, QueueOffset, TopicId, UnixMs
from timer.ready.group import Group
from timer.state.apply_results import (
    DeleteApplied,
    GroupApplied,
    MoveApplied,
    NoEffectApplied,
    SeekApplied,
)
from timer.state.machine import Machine


def seek(play: Play, group: Group, offset: int) -> None:
    play.leader.groups.seek(group, QueueOffset(offset), play.done("seek"))
    play.settle()
    assert isinstance(play.answers.pop("seek"), SeekApplied)


def other_group(play: Play) -> Group:
    """Return a group without acks, so that the topic keeps its messages."""
    return play.make_group("keeps all")


def test_sought_group_gets_again_what_it_had_acked_marked_by_the_same_stream() -> None:
    play = Play()
    other_group(play)
    group, _ = delivered(play, 0, 0, 0, 0)
    old_id = group.group_id
    play.ack("a", play.deliveries[-1])
    play.settle()
    seek(play, group, 1)
    assert group.group_id != old_id
    assert play.last() == ([1, 2, 3], [2, 2, 2])
    play.ack("b", play.deliveries[-1])
    play.settle()
    assert play.verdict("b") == [ACCEPT] * 3
    assert group.cursor == 4
    seek(play, group, 4)
    assert len(play.deliveries) == 2


def test_lease_from_before_a_seek_acks_nothing_after_it_nor_after_a_failover() -> None:
    play = Play()
    group, consumer = delivered(play, 0, 0)
    before = play.deliveries[-1]
    seek(play, group, 0)
    assert [*consumer.leases] == [play.deliveries[-1].lease.lease_id]
    for say in (play.ack, play.nack):
        say("late", before)
        assert play.answers.pop("late").tolist() == [LEASE_LOST] * 2
    after = play.deliveries[-1]
    play.restart()
    play.ack("old", before, epoch=before.epoch)
    play.ack("unsure", after, epoch=after.epoch)
    assert play.verdict("old") == play.verdict("unsure") == [LEASE_LOST] * 2
    play.join(group)
    play.settle()
    play.ack("now", play.deliveries[-1])
    play.settle()
    assert play.verdict("now") == [ACCEPT] * 2


def test_ack_that_meets_the_seek_in_the_log_has_no_part_in_the_new_life() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0)
    play.leader.groups.seek(group, QueueOffset(0), play.done("seek"))
    play.ack("with it", play.deliveries[-1], [0])
    play.step()
    play.ack("behind it", play.deliveries[-1], [1])
    play.settle()
    assert play.verdict("with it") == play.verdict("behind it") == [LEASE_LOST]
    assert (group.cursor, group.acked_count) == (0, 0)
    assert play.last() == ([0, 1], [2, 2])


def test_seek_forward_leaves_out_what_is_before_and_lets_it_go() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0, 0)
    seek(play, group, 2)
    assert play.last() == ([2], [2])
    assert play.machine.topics[play.topic_id].queue.begin == 2
    with pytest.raises(timer_errors.InvalidRequestError, match="must be 2 to 3"):
        play.leader.groups.seek(group, QueueOffset(1), play.done("too early"))
    with pytest.raises(timer_errors.InvalidRequestError, match="offset = 4"):
        play.leader.groups.seek(group, QueueOffset(4), play.done("too late"))


def test_seek_to_a_time_finds_the_first_that_fired_then_or_later_also_on_disk() -> None:
    play = Play()
    other_group(play)
    group = play.make_group()
    times = []
    for number in range(5):
        play.wait(1_000)
        times.append(play.now.clock_ms)
        play.schedule(f"s{number}", 0, 0)
        play.settle()
    queue = play.machine.topics[play.topic_id].queue
    assert [queue.offset_fired_from(UnixMs(t)) for t in times] == [0, 2, 4, 6, 8]
    assert [queue.offset_fired_from(UnixMs(t + 1)) for t in times] == [2, 4, 6, 8, 10]
    pages = [block.page for block in queue.blocks]
    for block in queue.blocks:
        block.page = None  # as if only files held them
    play.leader.groups.seek_time(group, UnixMs(times[3]), play.done("seek"))
    play.step()
    assert "seek" not in play.answers
    assert play.leader.groups.waiting
    [block] = [block for block in queue.blocks if queue.pages.is_requested(block)]
    block.page = pages[queue.blocks.index(block)]  # the others stay in their files
    play.settle()
    assert isinstance(play.answers["seek"], SeekApplied)
    assert group.cursor == 6


def test_seek_that_waits_for_a_page_is_rejected_when_the_leader_drains() -> None:
    play = Play()
    group, _ = delivered(play, 0)
    [block] = play.machine.topics[play.topic_id].queue.blocks
    block.page = None  # as if only a file held it
    play.wait(1)
    play.leader.groups.seek_time(group, play.now.clock_ms, play.done("seek"))
    play.step()
    assert not play.leader.idle
    play.leader.begin_drain(timer_errors.ShuttingDownError("bye"))
    play.step()
    assert isinstance(play.answers["seek"], timer_errors.ShuttingDownError)
    assert play.leader.idle


def test_consumer_learns_that_a_seek_takes_all_its_messages_back() -> None:
    play = Play()
    group, consumer = delivered(play, 0, 0)
    told: list[object] = []
    consumer.recall = told.append
    seek(play, group, 1)
    assert told == [None]


def test_deleted_group_sends_its_consumers_away_and_tells_their_acks() -> None:
    play = Play()
    kept, _ = delivered(play, 0, 0)
    group = play.make_group("h")
    sent_away: list[timer_errors.EngineError] = []
    consumer = ConsumerStream("c", LEASE_MS, lambda _: None, end=sent_away.append)
    play.leader.groups.join(group, consumer)
    play.leader.groups.credit(group, consumer, 10)
    play.settle()
    held = play.deliveries[-1]
    assert held.group is group
    play.leader.groups.delete(group, play.done("delete"))
    play.ack("with it", held, [0])
    play.settle()
    assert isinstance(play.answers["delete"], DeleteApplied)
    assert isinstance(play.answers["with it"], timer_errors.GroupDeletedError)
    assert str(sent_away[0]) == "group 'h' of topic 'a' was deleted"
    with pytest.raises(timer_errors.GroupDeletedError):
        play.ack("later", held, [1])
    with pytest.raises(timer_errors.GroupDeletedError):
        play.leader.groups.join(group, consumer)
    play.leader.groups.leave(group, consumer)
    play.leader.groups.credit(group, consumer, 3)
    play.wait(LEASE_MS)
    play.settle()
    assert play.last() == ([0, 1], [2, 2]), "the other group's leases end as always"
    assert play.deliveries[-1].group is kept


def test_group_made_anew_owes_nothing_to_the_leases_of_the_one_that_was_deleted() -> None:
    play = Play()
    other_group(play)
    group, _ = delivered(play, 0, 0)
    held = play.deliveries[-1]
    play.leader.groups.delete(group, play.done("delete"))
    play.settle()
    anew = play.make_group()
    play.join(anew)
    play.settle()
    assert play.last() == ([0, 1], [1, 1])
    ack = play.leader.groups.ack
    ack(anew, held.epoch, held.lease.lease_id, u64([0]), play.done("old"))
    assert play.verdict("old") == [LEASE_LOST]
    play.restart()
    play.leader.groups.ack(anew, held.epoch, LeaseId(0), u64([0]), play.done("older"))
    assert play.verdict("older") == [LEASE_LOST]


def test_exclusive_group_refuses_a_second_consumer_and_says_who_has_it() -> None:
    play = Play()
    group = play.make_group(type=EXCLUSIVE)
    first = play.join(group)
    with pytest.raises(
        timer_errors.GroupHeldError, match=r"group 'g' of topic 'a' is exclusive.*'c' has it"
    ):
        play.join(group)
    play.leader.groups.leave(group, first)
    play.join(group)
    nameless = timer_errors.GroupHeldError("a", "g", "")
    assert str(nameless).endswith("exclusive, and a consumer without a name has it")


def test_next_consumer_is_served_when_the_active_one_leaves_with_nothing_held() -> None:
    play = Play()
    group = play.make_group(type=FAILOVER)
    first = play.join(group, credit=0)
    second = play.join(group)
    play.schedule("s", 0)
    play.settle()
    assert not play.deliveries
    play.leader.groups.leave(group, first)
    play.settle()
    assert play.deliveries[-1].lease.consumer is second


def test_cumulative_ack_is_one_answer_and_refused_where_several_consume() -> None:
    play = Play()
    group = play.make_group(type=FAILOVER)
    play.join(group)
    play.schedule("s", 0, 0, 0, 0)
    play.settle()
    lease = play.deliveries[-1].lease.lease_id
    held = play.deliveries[-1].epoch, lease, QueueOffset(0)
    for name, offset, verdict in (("one", 2, ACCEPT), ("again", 1, ALREADY_ACKED)):
        held = play.deliveries[-1].epoch, lease, QueueOffset(offset)
        play.leader.groups.ack_up_to(group, *held, play.done(name))
        play.settle()
        assert play.verdict(name) == [verdict]
    assert group.cursor == 3
    for name, offset in (("all", 3), ("repeated", 3), ("less", 2)):
        held = play.deliveries[-1].epoch, lease, QueueOffset(offset)
        play.leader.groups.ack_up_to(group, *held, play.done(name))
        play.step()
    answered = {name: play.answers.get(name) for name in ("all", "repeated", "less")}
    assert answered == {"all": None, "repeated": None, "less": [ALREADY_ACKED]}, "not committed yet"
    play.settle()
    assert [play.verdict(name) for name in ("all", "repeated")] == [[ACCEPT], [ALREADY_ACKED]]
    shared = play.make_group("shared")
    play.leader.groups.ack_up_to(shared, *held, play.done("refused"))
    assert "'shared' is shared" in str(play.answers["refused"])


# ---- on every replica


def opened(*groups: str) -> tuple[Log, Machine]:
    """Return a machine with three fired timers of topic 1, and its log."""
    log, machine = Log(), machine_on(SimDisk(), leads=True)
    machine.apply(log.topic("a"))
    for group in groups:
        machine.apply(log.create_group(1, group))
    machine.apply(log.schedule(part_of([(1, due, b"x") for due in (1, 2, 3)])))
    machine.apply(log.fire(5))
    return log, machine


def test_ops_that_come_after_a_seek_or_a_deletion_find_nobody() -> None:
    log, machine = opened("g", "h")
    machine.apply(log.op(Op.RESERVE, 1, 1, [3]))
    machine.apply(log.op(Op.SEEK, 1, 1, [0]))
    machine.apply(log.op(Op.DELETE, 1, 2, []))
    group = machine.topics[TopicId(1)].groups["g"]
    scheduled, next_seq = machine.counts.scheduled, machine.next_seq
    for op, of in ((Op.ACK, 1), (Op.ENDED, 1), (Op.RECALL, 2), (Op.RESERVE, 2), (Op.SEEK, 2)):
        applied = machine.apply(log.op(op, 1, of, [1]))
        assert isinstance(applied, GroupApplied)
        assert isinstance(applied.results[0], NoEffectApplied)
    assert isinstance(machine.apply(log.nack(1, 2, [1], 9)), GroupApplied)
    assert isinstance(machine.apply(log.alter(1, 1, max_attempts=1)), GroupApplied)
    assert (group.group_id, group.cursor, group.acked_count, group.settings.max_attempts) == (
        *(3, 0, 0),
        0,
    )
    applied = machine.apply(log.move(1, 2, [1], "dead"))
    assert isinstance(applied, GroupApplied)
    (moved,) = applied.results
    assert isinstance(moved, MoveApplied)
    assert not moved.new.any()
    assert (machine.counts.scheduled, machine.next_seq) == (scheduled, next_seq + 1)
    machine.apply(log.checkpoint())


def test_seek_beyond_what_is_kept_ends_at_the_nearest_offset() -> None:
    log, machine = opened("g")
    machine.apply(log.op(Op.RESERVE, 1, 1, [3]))
    machine.apply(log.op(Op.ACK, 1, 1, [0]))
    group = machine.topics[TopicId(1)].groups["g"]
    for asked, found in ((0, 1), (99, 3)):
        machine.apply(log.op(Op.SEEK, 1, group.group_id, [asked]))
        assert group.cursor == found
    assert np.array_equal(group.first_unacked(9, 9), np.arange(3, 9, dtype=np.uint64))


def test_last_group_that_is_deleted_leaves_what_fired_to_retention() -> None:
    log, machine = opened("g")
    machine.apply(log.op(Op.DELETE, 1, 1, []))
    topic = machine.topics[TopicId(1)]
    assert (topic.queue.begin, topic.queue.end, topic.groups, topic.group_by_id) == (0, 3, {}, {})
    machine.apply(log.create_group(1, "g"))
    assert topic.groups["g"].cursor == 0
    assert topic.groups["g"].since_epoch == machine.applied_epoch
