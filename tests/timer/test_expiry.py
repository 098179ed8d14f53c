"""Time to live: expiry compared with naive models, and with a leader over a log in memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.sim.world.simdisk import SimDisk
from tests.calls import calls_of
from tests.timer.leading import Play, delivered
from tests.timer.machines import START_MS, Log, catch_up, engine_on, part_of, state_of, u64
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import EXCLUSIVE, KEY_SHARED, SHARED, GroupOp, Op, decode_group
from timer.entries.policies import CLUSTER, Scope, ScopePolicy
from timer.leader.groups import expiry, turns
from timer.leader.groups.ended_messages import DEAD_ROWS_MAX
from timer.leader.groups.expiry import ALARM_STEP_MS, expired_prefix
from timer.leader.groups.group_leases import ACCEPT, ALREADY_ACKED, EXPIRED
from timer.model.columns import ROW
from timer.model.timer_errors import InvalidRequestError, OverloadedError
from timer.model.units import QueueOffset, TopicId, UnixMs
from timer.ready.queue import Queue
from timer.ready.topic import Topic

TTL_MS = 1_000

# ---- the state


@dataclass
class Model:
    """Topic and groups, one offset at a time."""

    begin: int = 0
    end: int = 0
    expired: int = 0
    done: dict[str, set[int]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)

    def create(self, name: str) -> None:
        if name not in self.done:
            self.done[name], self.starts[name], self.lost[name] = set(), self.begin, 0

    def cursor(self, name: str) -> int:
        at = self.starts[name]
        while at in self.done[name]:
            at += 1
        return at

    def is_done(self, name: str, offset: int) -> bool:
        return offset < self.starts[name] or offset in self.done[name]

    def ack(self, name: str, offsets: list[int]) -> None:
        self.done[name] |= {o for o in offsets if self.starts[name] <= o < self.end}
        self.trim()

    def expire(self, name: str, offsets: list[int]) -> None:
        gone = {o for o in offsets if not self.is_done(name, o)}
        self.lost[name] += len(gone)
        self.done[name] |= gone
        self.expired += sum(all(self.is_done(other, o) for other in self.done) for o in gone)
        self.trim()

    def expire_below(self, offset: int) -> None:
        for o in range(self.begin, offset):
            late = [name for name in self.done if not self.is_done(name, o)]
            self.expired += bool(late) or not self.done
            for name in late:
                self.lost[name] += 1
                self.done[name].add(o)
        self.begin = max(self.begin, offset)

    def trim(self) -> None:
        if self.done:
            self.begin = max(self.begin, min(map(self.cursor, self.done)))


offsets_of = st.lists(st.integers(0, 30), max_size=6)
names = st.sampled_from("gh")
steps_of = st.lists(
    st.one_of(
        st.tuples(st.just("fire"), st.integers(1, 5), st.none()),
        st.tuples(st.just("create"), names, st.none()),
        st.tuples(st.just("ack"), names, offsets_of),
        st.tuples(st.just("nack"), names, offsets_of),
        st.tuples(st.just("expire"), names, offsets_of),
        st.tuples(st.just("below"), st.integers(0, 100), st.none()),
        st.tuples(st.just("restart"), st.booleans(), st.none()),
    ),
    max_size=25,
)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(steps_of)
def test_topic_and_groups_are_as_a_naive_model_and_a_restart_changes_nothing(
    steps: list[tuple[str, Any, Any]],
) -> None:
    disk, log, model = SimDisk(), Log(), Model()
    engine = engine_on(disk)
    log.topic("t")
    catch_up(engine, log)
    for what, which, offsets in steps:
        topic = engine.machine.topics[TopicId(1)]
        group = topic.groups.get(which) if isinstance(which, str) else None
        if what == "fire":
            log.schedule(part_of([(1, START_MS, b"m")] * which))
            log.fire(log.now_ms)
            model.end += which
        elif what == "create":
            log.create_group(1, which)
            catch_up(engine, log)
            log.op(Op.RESERVE, 1, topic.groups[which].group_id, [1000])
            model.create(which)
        elif what == "below":
            offset = min(which, model.end)
            log.op(Op.EXPIRE_BELOW, 1, 0, [offset])
            model.expire_below(offset)
        elif what == "restart":
            flush = engine.begin_flush()
            if flush is not None:
                flush.write()
                engine.end_flush(flush)
            before = state_of(engine.machine)
            engine = engine_on(disk)
            catch_up(engine, log)
            assert state_of(engine.machine) == before
        elif group is not None:
            known = [o for o in dict.fromkeys(offsets) if o < model.end]
            if what == "ack":
                log.op(Op.ACK, 1, group.group_id, known)
                model.ack(which, known)
            elif what == "nack":
                log.nack(1, group.group_id, known, 10**15)
            else:
                log.op(Op.EXPIRE, 1, group.group_id, known)
                model.expire(which, known)
        catch_up(engine, log)
        _compare(engine.machine.topics[TopicId(1)], model)
        assert engine.machine.digest() == engine.machine.recomputed_digest()


def _compare(topic: Topic, model: Model) -> None:
    queue = topic.queue
    assert (queue.begin, queue.end, topic.expired) == (model.begin, model.end, model.expired)
    for name, group in topic.groups.items():
        assert (group.cursor, group.expired) == (model.cursor(name), model.lost[name])
        asked = range(model.end + 5)
        done = [model.is_done(name, o) or o < group.cursor for o in asked]
        assert group.is_acked(u64(asked)).tolist() == done
        assert group.unacked_count(queue.end) == done[: model.end].count(False)
        assert group.reserved >= group.cursor
        assert group.later_sum == group.recomputed_later_sum()


def test_digest_tells_expired_messages_from_acked_ones() -> None:
    digests = []
    for op in ((Op.ACK, 1, [0]), (Op.EXPIRE, 1, [0]), (Op.EXPIRE_BELOW, 0, [1])):
        engine, log = engine_on(SimDisk()), Log()
        log.topic("t")
        log.create_group(1, "g")
        log.op(Op.RESERVE, 1, 1, [10])
        log.schedule(part_of([(1, START_MS, b"m")]))
        log.fire(START_MS)
        log.op(op[0], 1, op[1], op[2])
        catch_up(engine, log)
        digests.append(engine.machine.digest())
    assert digests[0] not in digests[1:]


# ---- where the prefix ends


def queue_of(*dues: list[int]) -> Queue:
    """A queue with one block for each list of due times."""
    queue = Queue()
    for block in dues:
        rows = np.zeros(len(block), ROW)
        rows["due_ms"] = block
        rows["buf"] = 0
        queue.append(rows, {0: b""}, UnixMs(max(block)))
    return queue


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=5),
    st.integers(0, 10),
    st.integers(0, 20),
    st.integers(1, 20),
    st.booleans(),
)
def test_prefix_is_the_longest_of_which_all_is_due_by_then(
    dues: list[list[int]], outlived: int, begin: int, span: int, away: bool
) -> None:
    queue, flat = queue_of(*dues), [due for block in dues for due in block]
    begin = min(begin, len(flat) - 1)
    queue.drop_below(QueueOffset(begin))
    pages = [block.page for block in queue.blocks]
    if away:
        for block in queue.blocks:
            block.page = None
    offset, due = expired_prefix(queue, outlived, begin + span)
    if away and queue.pages._requested:
        [border] = queue.pages._requested
        assert border.due_ms_min <= outlived < border.due_ms_max, "else it is known without"
        assert (offset, due) == (max(begin, border.first), None)
        border.page = pages[queue.blocks.index(border)]
        offset, due = expired_prefix(queue, outlived, begin + span)
        if queue.pages._requested.keys() - {border}:
            return
    young = [o for o in range(begin, len(flat)) if flat[o] > outlived]
    expected = min([*young[:1], len(flat)])
    assert offset == min(expected, begin + span)
    if due is not None:
        assert outlived < due <= flat[offset], "it is looked at no later than it has to be"
    elif offset < begin + span:
        assert offset == len(flat)


# ---- the leader


def say(play: Play, scope: Scope | None = None, **said: Any) -> None:
    """Change the topic's policy, or another scope's."""
    scope = Scope("", play.topic_id) if scope is None else scope
    play.leader.set_policy(scope, ScopePolicy(**said), [], play.now, play.done("policy"))
    play.settle()
    play.answers.pop("policy")


def playing(**said: int) -> Play:
    play = Play()
    say(play, None, **({"ttl_ms": TTL_MS} | said))
    return play


def fired(play: Play, *delays: int) -> None:
    """Schedule messages that are due at once, or were due some time ago; let them fire."""
    play.schedule("s", *delays)
    play.settle()
    del play.answers["s"]


def fired_late(play: Play, *ages_ms: int) -> None:
    """Fire messages with due times this long ago, as of timers with an old decision."""
    timers = [(play.topic_id, play.now.clock_ms - age_ms, b"late") for age_ms in ages_ms]
    play.leader.schedule(part_of(timers), play.done("s"))
    play.settle()
    del play.answers["s"]


def topic_of(play: Play) -> Topic:
    return play.machine.topics[play.topic_id]


def ops_of(play: Play, since: int = 0) -> list[GroupOp]:
    """Return the EXPIRE operations in the log."""
    entries = [entry for entry in play.log.entries[since:] if entry.kind is EntryKind.GROUP]
    ops = [op for entry in entries for op in decode_group(entry.payload)]
    return [op for op in ops if isinstance(op, GroupOp) and op.op in (Op.EXPIRE_BELOW, Op.EXPIRE)]


def test_message_expires_as_its_time_to_live_is_over_and_not_before() -> None:
    play = playing()
    group = play.make_group()
    fired(play, 0, 0)
    play.wait(TTL_MS - 1)
    play.settle()
    assert ops_of(play) == []
    assert play.leader.wake_at_ms(play.now) == play.mono_ms + 1
    play.wait(1)
    play.settle()
    assert [(op.op, op.offsets.tolist()) for op in ops_of(play)] == [(Op.EXPIRE_BELOW, [2])]
    assert (group.cursor, group.expired, topic_of(play).expired) == (2, 2, 2)
    assert topic_of(play).queue.begin == 2
    play.join(group)
    play.settle()
    assert play.deliveries == []


def test_messages_of_one_moment_expire_in_one_entry() -> None:
    play = playing()
    play.make_group()
    for _ in range(9):
        fired(play, 0)
        play.wait(10)
    before = len(play.log.entries)
    play.wait(TTL_MS)
    play.settle()
    assert len(ops_of(play, before)) == 1
    assert topic_of(play).queue.begin == 9
    assert ALARM_STEP_MS >= 90


def test_alarms_of_one_moment_are_taken_a_few_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    say(play, CLUSTER, ttl_ms=TTL_MS)
    topics = [play.make_topic(name) for name in "abcde"]
    timers = [(topic.topic_id, play.now.clock_ms, b"x") for topic in topics]
    play.leader.schedule(part_of(timers), play.done("s"))
    play.settle()
    part = play.leader.groups.expiry
    assert len(part._alarms._at_ms) == len(topics)
    monkeypatch.setattr(expiry, "CHECKS_MAX", 2)
    play.wait(TTL_MS + ALARM_STEP_MS)
    for left in (3, 1, 0):
        assert part.wake_at_ms(play.now) == play.mono_ms, "more are due"
        part.step(play.now)
        assert (len(part._alarms._at_ms), len(part._to_check)) == (left, 0)
    assert part.wake_at_ms(play.now) is None
    play.settle()
    assert [topic.queue.begin for topic in topics] == [1] * 5


def test_leased_message_that_expires_is_nobodys_and_its_ack_is_told_so() -> None:
    play = playing()
    group = play.make_group(max_in_flight=2, lease_ms=10 * TTL_MS)
    consumer = play.join(group)
    consumer.lease_ms = 10 * TTL_MS
    fired(play, 0, 0, 0)
    first = play.deliveries[0]
    assert first.lease.offsets.tolist() == [0, 1]
    play.ack("in time", first, [0])
    play.settle()
    assert play.verdict("in time") == [ACCEPT]
    play.wait(TTL_MS)
    play.settle()
    assert play.leader.groups.lease_counts(group) == (0, 1)
    play.ack("late", first, [1])
    play.nack("late too", first, [1])
    play.settle()
    assert play.verdict("late") == play.verdict("late too") == [EXPIRED]
    assert group.expired == 2, "the third was never delivered"
    fired(play, 0, 0)
    assert play.last() == ([3, 4], [1, 1]), "there is room for two again"


def test_ack_that_meets_the_expiry_on_its_way_is_told_so() -> None:
    play = playing()
    group, _ = delivered(play, 0)
    play.wait(TTL_MS)
    play.leader.groups.expiry.step(play.now)
    play.ack("a", play.deliveries[0])
    play.settle()
    assert play.verdict("a") == [EXPIRED]
    assert (group.acked_count, group.expired) == (0, 1)


def test_ack_that_comes_first_counts() -> None:
    play = playing()
    group, _ = delivered(play, 0)
    play.wait(TTL_MS)
    play.ack("a", play.deliveries[0])
    play.leader.groups.flush(play.now)
    play.settle()
    assert play.verdict("a") == [ACCEPT]
    assert (group.acked_count, group.expired, topic_of(play).expired) == (1, 0, 0)
    play.ack("again", play.deliveries[0])
    assert play.verdict("again") == [ALREADY_ACKED]


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED, EXCLUSIVE])
def test_what_has_expired_behind_something_younger_is_not_handed_out(kind: str) -> None:
    play = playing()
    group = play.make_group(type=kind)
    fired(play, 0)
    play.wait(100)
    fired_late(play, TTL_MS - 200, 50, TTL_MS - 200)
    play.wait(300)
    play.settle()
    assert ops_of(play) == [], "the first one is young"
    play.join(group)
    play.deliver()
    play.step()
    play.commit()  # now it may hand out
    given = [[0, 3]] if kind == SHARED else [[0], [3]]  # an ordered group waits for the expiry
    assert play.deliver() == given[:1], "the log doesn't say yet what has expired"
    play.settle()
    assert [d.lease.offsets.tolist() for d in play.deliveries] == given
    assert [(op.op, op.group, op.offsets.tolist()) for op in ops_of(play)] == [
        (Op.EXPIRE, group.group_id, [1, 2])
    ]
    for number, delivery in enumerate([*play.deliveries]):
        play.ack(f"a{number}", delivery)
    play.settle()
    assert (group.cursor, group.expired, topic_of(play).expired) == (4, 2, 2)


def test_message_expires_once_for_the_topic_however_many_groups_it_had() -> None:
    play = playing()
    one, two = play.make_group("one"), play.make_group("two")
    fired(play, 0)
    play.wait(100)
    fired_late(play, TTL_MS - 200)
    play.wait(200)
    play.settle()
    play.join(one)
    play.settle()
    assert (one.expired, two.expired, topic_of(play).expired) == (1, 0, 0)
    play.ack("a", play.deliveries[0])
    play.settle()
    play.wait(TTL_MS)
    play.settle()
    assert (one.expired, two.expired, topic_of(play).expired) == (1, 2, 2)


def test_topic_without_groups_drops_what_has_expired() -> None:
    play = playing()
    fired(play, 0, 0)
    play.wait(TTL_MS)
    play.settle()
    assert (topic_of(play).queue.begin, topic_of(play).expired) == (2, 2)
    group = play.make_group()
    assert group.cursor == 2


def test_failed_message_that_comes_again_too_late_does_not() -> None:
    play = playing()
    group, _ = delivered(play, 0)
    play.wait(100)
    fired(play, 0)  # behind another message; as the first one the prefix would contain it
    play.nack("n", play.deliveries[0], delay_ms=TTL_MS + 10)
    play.settle()
    play.wait(TTL_MS + 20)
    play.settle()
    assert len(play.deliveries) == 2
    assert group.cursor >= 1


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED, EXCLUSIVE])
def test_message_that_expires_as_it_fails_once_too_often_is_no_dead_letter(kind: str) -> None:
    play = playing()
    group = play.make_group(type=kind, max_attempts=1)
    fired(play, 0)
    play.wait(100)
    fired_late(play, TTL_MS - 200, TTL_MS - 150)
    play.join(group)
    play.settle()
    assert play.last()[0] == [0, 1, 2]
    play.nack("n", play.deliveries[0], [1, 2])
    play.step()
    play.wait(300)
    play.commit()
    play.settle()
    assert [topic.name for topic in play.machine.topics.values()] == ["a"]
    assert [op.offsets.tolist() for op in ops_of(play)] == [[1, 2]]
    assert (group.expired, group.cursor) == (2, 0)


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED, EXCLUSIVE])
def test_many_messages_that_expire_as_they_fail_leave_the_leader_nothing_to_do(kind: str) -> None:
    play = playing()
    group = play.make_group(type=kind, max_attempts=1)
    fired(play, 0)
    play.wait(100)
    fired_late(play, *[TTL_MS - 150] * (3 * DEAD_ROWS_MAX))
    play.join(group, 10_000)
    play.settle()
    for delivery in play.deliveries:
        offsets = [at for at in delivery.lease.offsets.tolist() if at]
        play.nack(f"n{offsets[0]}", delivery, offsets)
    play.step()
    play.wait(300)
    play.commit()
    play.settle()
    assert (group.expired, group.cursor) == (3 * DEAD_ROWS_MAX, 0)
    assert play.leader.wake_at_ms(play.now) > play.mono_ms + 1


def test_new_leader_hands_out_nothing_that_has_expired_before() -> None:
    play = playing()
    group = play.make_group()
    fired(play, 0, 0)
    play.wait(TTL_MS // 2)
    fired(play, 0)
    play.wait(TTL_MS // 2)
    play.restart()
    play.join(group)
    play.settle()
    assert [d.lease.offsets.tolist() for d in play.deliveries] == [[2]]
    assert group.expired == 2


def test_lowered_time_to_live_is_of_old_messages_too_and_unset_it_ends() -> None:
    play = playing(ttl_ms=100 * TTL_MS)
    fired(play, 0)
    play.wait(2 * TTL_MS)
    play.settle()
    assert ops_of(play) == []
    say(play, CLUSTER, ttl_ms=1)
    assert ops_of(play) == [], "the topic says something else"
    say(play, ttl_ms=TTL_MS)
    assert topic_of(play).queue.begin == 1
    fired(play, 0)
    say(play, ttl_ms=0)
    play.wait(100 * TTL_MS)
    play.settle()
    assert topic_of(play).queue.begin == 1, "0: there is none, whatever wider scopes say"


def test_lowered_time_to_live_is_of_what_fires_later_in_an_empty_topic() -> None:
    play = playing(ttl_ms=100 * TTL_MS)
    delivered(play, 0)
    play.ack("a", play.deliveries[0])
    play.settle()
    say(play, ttl_ms=TTL_MS)
    fired(play, 0)
    play.wait(TTL_MS)
    play.settle()
    assert topic_of(play).expired == 1


def test_policy_that_is_appended_decides_before_it_is_applied() -> None:
    play = playing()
    play.make_group()
    fired(play, 0)
    play.wait(TTL_MS)
    scope = Scope("", play.topic_id)
    play.leader.set_policy(scope, ScopePolicy(ttl_ms=2 * TTL_MS), [], play.now, play.done("policy"))
    play.settle()
    assert ops_of(play) == []
    play.wait(TTL_MS)
    play.settle()
    assert topic_of(play).expired == 1


LONGER: Final[dict[str, Callable[[Play], None]]] = {
    "longer": lambda play: _say_only(play, ScopePolicy(ttl_ms=9 * TTL_MS)),
    "for ever": lambda play: _say_only(play, ScopePolicy(ttl_ms=0)),
    "unset": lambda play: _say_only(play, ScopePolicy(), "ttl_ms"),
    "deleted": lambda play: play.leader.delete_topic(play.topic_id, play.now, play.done("delete")),
}


def _say_only(play: Play, said: ScopePolicy, *unset: str) -> None:
    """Append it; settling commits it."""
    scope = Scope("", play.topic_id)
    play.leader.set_policy(scope, said, unset, play.now, play.done("policy"))


@pytest.mark.parametrize("how", LONGER)
@pytest.mark.parametrize("committed", [True, False])
def test_what_is_over_is_not_handed_out_by_a_policy_that_may_never_be_committed(
    how: str, committed: bool
) -> None:
    play = playing()
    group, consumer = delivered(play, 0, credit=1)
    play.ack("ack", play.deliveries[0])
    fired(play, 0)
    play.wait(TTL_MS)
    LONGER[how](play)
    play.leader.groups.credit(group, consumer, 5)
    assert play.deliver() == []
    if committed:
        before = len(play.deliveries)
        play.settle()
        handed_out = [offset for d in play.deliveries[before:] for offset in d.lease.offsets]
        assert (1 in handed_out) == (how != "deleted"), "its groups are fed by that"
        return
    del play.log.entries[play.machine.applied_index :]
    play.restart()
    play.join(group)
    play.settle()
    assert topic_of(play).queue.begin == 2
    assert topic_of(play).expired == 1


def test_groups_that_wait_for_a_policy_are_looked_at_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "WORK_MAX", 3)
    play = playing()
    for name in "abcdefgh":
        group = play.make_group(name)
        play.join(group)
    fired(play, 0)
    play.wait(TTL_MS)
    LONGER["for ever"](play)
    looked = calls_of(monkeypatch, play.leader.groups.expiry, "is_busy")
    play.leader.groups.feed([play.topic_id])
    assert play.deliver() == []
    assert len(looked) == 3


def test_policy_that_shortens_lives_does_not_wait() -> None:
    play = playing()
    group, consumer = delivered(play, 0, credit=1)
    fired(play, 0)
    play.wait(TTL_MS // 2)
    _say_only(play, ScopePolicy(ttl_ms=TTL_MS - 1))
    play.leader.groups.credit(group, consumer, 5)
    assert play.deliver() == [[1]]


def test_expiry_that_the_log_refuses_is_tried_again() -> None:
    play = playing()
    group = play.make_group()
    fired(play, 0)
    play.wait(100)
    fired_late(play, TTL_MS - 200)
    play.wait(200)
    play.full = OverloadedError("the log", retry_after_ms=1)
    play.join(group)
    play.deliver()
    assert ops_of(play) == []
    play.full = None
    play.settle()
    assert [op.offsets.tolist() for op in ops_of(play)] == [[1]]
    play.wait(TTL_MS)
    play.full = OverloadedError("the log", retry_after_ms=1)
    play.step()
    play.full = None
    play.wait(expiry.RETRY_MS)
    play.settle()
    assert topic_of(play).queue.begin == 2


def test_backlog_expires_in_portions_while_nothing_of_it_is_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expiry, "SPAN_MIN", 3)
    monkeypatch.setattr(expiry, "SPAN_BYTES", 3)
    play = playing()
    group = play.make_group()
    fired(play, *[0] * 10)
    play.wait(TTL_MS)
    fired(play, 0)
    play.restart()
    play.join(group)
    play.settle()
    assert [op.offsets.tolist() for op in ops_of(play)] == [[3], [6], [9], [10]]
    assert [d.lease.offsets.tolist() for d in play.deliveries] == [[10]]
    assert group.expired == 10


def test_topic_with_a_retention_still_lets_expired_messages_go() -> None:
    play = playing(retention_ms=100 * TTL_MS)
    group, _ = delivered(play, 0, 0)
    play.ack("a", play.deliveries[0], [0])
    play.settle()
    assert topic_of(play).queue.begin == 0
    play.wait(TTL_MS)
    play.settle()
    assert (topic_of(play).queue.begin, topic_of(play).expired, group.expired) == (2, 1, 1)


def test_message_that_is_retained_is_not_handed_out_again_when_it_has_expired() -> None:
    play = playing(retention_ms=100 * TTL_MS)
    group, _ = delivered(play, 0)
    play.ack("a", play.deliveries[0])
    play.wait(TTL_MS // 2)
    fired(play, 0)
    play.ack("b", play.deliveries[1])
    play.settle()
    play.wait(TTL_MS // 2)
    play.settle()
    assert topic_of(play).queue.begin == 0, "nothing is unacked"
    play.leader.groups.seek(group, QueueOffset(0), play.done("sought"))
    play.settle()
    assert [d.lease.offsets.tolist() for d in play.deliveries] == [[0], [1], [1]]
    assert topic_of(play).queue.begin == 1


def test_timer_that_would_have_expired_already_is_refused_and_names_the_limit() -> None:
    play = playing()
    play.schedule("s", -TTL_MS + 1)
    with pytest.raises(InvalidRequestError) as refused:
        play.schedule("t", 0, -TTL_MS)
    limit = play.now.clock_ms - TTL_MS
    assert refused.value.field == "due_ms"
    assert str(limit) in str(refused.value)
    assert "ttl_ms of the topic" in str(refused.value)
    say(play, ttl_ms=TTL_MS, delay_ms_min=10)
    play.schedule("u", -TTL_MS)  # its effective due is later than the requested one


def test_cumulative_ack_of_what_has_expired_is_told_so() -> None:
    play = playing()
    group = play.make_group(type=EXCLUSIVE)
    play.join(group)
    fired(play, 0, 0)
    lease = play.deliveries[0].lease.lease_id
    play.wait(TTL_MS)
    play.settle()
    epoch = play.deliveries[0].epoch
    play.leader.groups.ack_up_to(group, epoch, lease, QueueOffset(1), play.done("a"))
    play.settle()
    assert play.verdict("a") == [EXPIRED]
