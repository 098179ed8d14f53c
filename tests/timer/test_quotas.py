"""Quotas: accepted requests never exceed a quota, and requests within it are accepted."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timer.leading import Play, engine_with
from tests.timer.machines import Timer, catch_up, engine_on, flush, part_of
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import Ids, Op
from timer.entries.policies import CLUSTER, NEW_QUOTA_MAX, QUOTA_MAX, QUOTAS, Scope, ScopePolicy
from timer.leader.intake.admission import WantedTimes
from timer.leader.intake.quotas import USAGE
from timer.model.columns import RequestId
from timer.model.timer_errors import (
    InvalidRequestError,
    NotLeaderError,
    OverloadedError,
    QuotaReachedError,
)
from timer.model.units import ProducerId, TopicId
from timer.ready.topic import Topic
from timer.state.apply_results import RESCHEDULED, Accepted, Repeated

SIZE = 4
"""Bytes of each payload."""


def limited(play: Play, scope: Scope = CLUSTER, **said: Any) -> None:
    """Set quotas; None: unset."""
    values: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    policy = ScopePolicy(**values)
    unset = [name for name, value in said.items() if value is None]
    play.leader.set_policy(scope, policy, unset, play.now, lambda _: None)


def play_with(**said: Any) -> Play:
    play = Play()
    limited(play, **said)
    play.settle()
    return play


def taken(play: Play, name: str, *delays: int, **how: Any) -> bool:
    """Return whether a request was accepted."""
    try:
        play.schedule(name, *delays, **{"size": SIZE} | how)
    except QuotaReachedError:
        return False
    return True


def topic_of(play: Play) -> Topic:
    return play.machine.topics[TopicId(play.topic_id)]


def used(play: Play) -> dict[str, int]:
    return {name: USAGE[name](topic_of(play)) for name in QUOTAS}


# ---- rejected requests


@pytest.mark.parametrize("delay", [0, 100])
@pytest.mark.parametrize(
    ("quota", "limit", "fits"),
    [
        ("pending_max", 3, 3),
        ("pending_bytes_max", 3 * SIZE, 3),
        ("pending_bytes_max", 4 * SIZE - 1, 3),
        ("ready_max", 3, 3),
        ("ready_bytes_max", 3 * SIZE + 1, 3),
    ],
)
def test_request_that_would_exceed_a_quota_is_refused_whole(
    quota: str, limit: int, fits: int, delay: int
) -> None:
    counts = not (quota.startswith("ready") and delay)  # a timer is not ready before its due time
    play = play_with(**{quota: limit})
    assert taken(play, "too many", *[delay] * (fits + 1)) == (not counts)
    if counts:
        assert taken(play, "one", delay)
        assert taken(play, "the rest", *[delay] * (fits - 1))
        assert not taken(play, "one more", delay)
        play.settle()
        assert play.machine.counts.scheduled == fits


@pytest.mark.parametrize("quota", QUOTAS)
def test_quota_of_nothing_closes_the_topic_also_for_empty_payloads(quota: str) -> None:
    play = play_with(**{quota: 0})
    for delay in (0, 100):
        assert not taken(play, "x", delay, size=0)
    assert play.leader.idle
    play.step()
    assert play.machine.counts.scheduled == 0


@pytest.mark.parametrize("quota", ["ready_max", "ready_bytes_max"])
def test_reached_backlog_takes_nothing_until_it_is_acked(quota: str) -> None:
    play = play_with(**{quota: SIZE})
    group = play.make_group()
    play.join(group)
    assert taken(play, "timers", *[10] * SIZE)  # not ready yet
    play.settle()
    play.wait(20)
    play.settle()
    assert used(play)["ready_max"] == SIZE
    assert not taken(play, "later", 100)
    play.ack("ack", play.deliveries[-1])
    play.settle()
    assert taken(play, "later", 100)


def test_acked_messages_behind_an_unacked_one_are_not_ready_and_the_slowest_group_counts() -> None:
    play = play_with(ready_max=3)
    play.join(play.make_group())
    assert taken(play, "timers", 0, 0, 0)
    play.settle()
    [delivery] = play.deliveries
    play.nack("later", delivery, [0], delay_ms=3_600_000)
    play.ack("the others", delivery, [1, 2])
    play.settle()
    assert used(play)["ready_max"] == 1
    assert taken(play, "two", 0, 0)
    assert not taken(play, "no more", 100)
    play.settle()
    play.make_group("slow")
    assert used(play)["ready_max"] == 5


def test_refusal_names_topic_field_what_there_is_limit_and_whose_it_is() -> None:
    play = play_with(pending_max=2)
    assert taken(play, "one", 100)
    with pytest.raises(QuotaReachedError) as refused:
        play.schedule("two", 100, 100)
    assert str(refused.value) == (
        "topic 'a' has 1 pending timer; 2 more would exceed its limit of 2"
        " (pending_max of the cluster)"
    )
    assert refused.value.field == "pending_max"
    limited(play, Scope("", TopicId(play.topic_id)), pending_max=0)
    with pytest.raises(QuotaReachedError) as refused:
        play.schedule("one more", 100)
    text = "topic 'a' has 1 pending timer; its limit is 0 (pending_max of the topic)"
    assert str(refused.value) == text


def test_refusal_names_the_things_that_a_quota_counts() -> None:
    for name, uses in (
        ("pending_max", "2,600 pending timers"),
        ("pending_bytes_max", "2,600 bytes of pending payloads"),
        ("ready_max", "2,600 unacked messages"),
        ("ready_bytes_max", "2,600 bytes of payloads from the first unacked message on"),
    ):
        refused = QuotaReachedError("orders", name, 0, "topic", used=2_600, requested=1)
        assert str(refused) == f"topic 'orders' has {uses}; its limit is 0 ({name} of the topic)"


def test_each_topic_has_the_quota_by_itself_and_a_request_of_several_is_refused_whole() -> None:
    play = play_with(pending_max=2)
    other = play.make_topic("b").topic_id
    assert taken(play, "a", 100)
    due = play.now.clock_ms + 100
    both: list[Timer] = [(other, due, b""), (play.topic_id, due, b""), (other, due, b"")]
    play.leader.schedule(part_of(both), play.done("both"), play.now)
    for topic in (play.topic_id, other):
        with pytest.raises(QuotaReachedError):
            play.leader.schedule(part_of([(topic, due, b"")]), play.done("x"), play.now)
    limited(play, Scope("", TopicId(other)), pending_max=3)
    with pytest.raises(QuotaReachedError):  # `b` has room, `a` has none
        play.leader.schedule(part_of([both[0], both[1]]), play.done("x"), play.now)
    play.leader.schedule(part_of([both[0]]), play.done("b"), play.now)
    play.settle()
    assert [topic.counts.pending for topic in play.machine.topics.values()] == [2, 3]


# ---- requests that are never rejected


def test_repetition_is_taken_where_nothing_new_is() -> None:
    play = play_with(pending_max=1)
    play.leader.register(b"token", ProducerId(1), play.now, play.done("producer"))
    play.settle()
    who = {"producer": play.answers["producer"]}
    request = RequestId(b"r", 1, play.leader.request_id(b"", 0, play.now).until_ms)
    named = replace(part_of([(play.topic_id, play.now.clock_ms + 90, b"x")]), request=request)
    limited(play, pending_max=2)
    assert taken(play, "one", 100, sequence=1, **who)
    play.leader.schedule(named, play.done("named"), play.now)
    assert taken(play, "one, again", 100, sequence=1, **who), "while the first is on its way"
    play.leader.schedule(named, play.done("named, again"), play.now)
    play.settle()
    assert taken(play, "one, late", 100, sequence=1, **who)
    play.leader.schedule(named, play.done("named, late"), play.now)
    with pytest.raises(QuotaReachedError):
        play.schedule("two", 100, sequence=2, **who)
    play.settle()
    answers = [
        play.answers[f"{name}{when}"] for name in ("one", "named") for when in ("", ", late")
    ]
    assert [type(each) for each in answers] == [Accepted, Repeated, Accepted, Repeated]
    assert play.machine.counts.scheduled == 2
    assert play.leader.quotas.idle


def test_repetition_that_was_applied_takes_no_room_from_others() -> None:
    play = play_with(pending_max=3)
    play.leader.register(b"token", ProducerId(1), play.now, play.done("producer"))
    play.settle()
    who = {"producer": play.answers["producer"], "sequence": 1}
    assert taken(play, "two", 100, 100, **who)
    play.settle()
    assert taken(play, "two, again", 100, 100, **who)
    assert taken(play, "one more", 100)


def test_reschedules_dead_letters_and_nacks_go_on_where_all_quotas_are_reached() -> None:
    play = Play()
    group = play.make_group(max_attempts=1)
    play.join(group)
    assert taken(play, "s", 0, 50_000)
    play.settle()
    closed: dict[str, Any] = dict.fromkeys(QUOTAS, 0)
    limited(play, **closed)
    play.nack("nack", play.deliveries[-1])
    play.settle()
    assert [topic.name for topic in play.machine.topics.values()] == ["a", "a.g.dead"]
    store = play.machine.store
    [timer], *_ = store._live_due_rows(store.position, play.now.clock_ms + 60_000, 10)
    topics, when = np.array([play.topic_id], np.uint32), WantedTimes("delay_ms", np.array([70_000]))
    play.leader.reschedule(ids(timer), topics, when, play.now, play.done("moved"))
    play.settle()
    assert play.answers["moved"].results.tolist() == [RESCHEDULED]
    assert used(play) == {
        "pending_max": 1,
        "pending_bytes_max": SIZE,
        "ready_max": 0,
        "ready_bytes_max": 0,
    }


def ids(row: Any) -> Any:
    return Ids(np.array([row["due_ms"]], np.int64), np.array([row["seq"]], np.uint64))


# ---- requests in flight


@pytest.mark.parametrize("end", ["applied", "refused", "closed waiting", "closed in flight"])
@pytest.mark.parametrize("delay", [0, 100])
def test_what_is_on_its_way_counts_until_its_end(end: str, delay: int) -> None:
    play = play_with(pending_max=3, ready_max=3)
    if end == "refused":
        play.full = OverloadedError("the log", retry_after_ms=1)
    assert taken(play, "s", delay, delay)
    assert not taken(play, "x", delay, delay)
    assert not play.leader.quotas.idle
    if end != "closed waiting":
        play.step()
    if end == "applied":
        assert not taken(play, "x", delay, delay)
        play.settle()
        assert taken(play, "one", delay)
        assert not taken(play, "x", delay)
        play.settle()
    elif end == "refused":
        assert isinstance(play.answers["s"], OverloadedError)
        play.full = None
        assert taken(play, "again", delay, delay, delay)
        play.settle()
    else:
        play.leader.close(NotLeaderError(None))
    assert play.leader.quotas.idle


def test_what_is_due_at_once_is_ready_also_between_its_entry_and_the_fire_behind_it() -> None:
    play = play_with(ready_max=1)
    play.schedule("s", 0)
    assert play.step()[-2:] == [EntryKind.SCHEDULE, EntryKind.FIRE]
    while EntryKind.SCHEDULE in play.appended:
        play.commit(1)
    assert used(play)["ready_max"] == 0
    assert not taken(play, "x", 0)
    play.commit(1)
    assert used(play)["ready_max"] == 1
    assert not taken(play, "x", 0)
    assert play.leader.quotas.idle


def test_quota_that_is_set_while_requests_are_on_their_way_counts_them() -> None:
    play = Play()
    assert taken(play, "before", 100, 100)
    play.step()
    assert taken(play, "waiting", 100)
    limited(play, pending_max=4)
    assert not taken(play, "two", 100, 100)
    assert taken(play, "one", 100)
    limited(play, pending_max=None)
    assert taken(play, "without", 100)
    limited(play, pending_max=6)
    assert taken(play, "the last", 100)
    assert not taken(play, "one more", 100)
    play.settle()
    assert topic_of(play).counts.pending == 6
    assert play.leader.quotas.idle


def test_quota_that_the_log_refuses_holds_for_nobody() -> None:
    play = Play()
    play.full = OverloadedError("the log", retry_after_ms=1)
    limited(play, pending_max=0)
    play.full = None
    assert taken(play, "s", 100)


def test_next_leader_goes_by_the_same_quota_and_by_what_was_applied() -> None:
    play = play_with(pending_max=2)
    assert taken(play, "one", 100)
    play.settle()
    assert taken(play, "lost", 100)
    play.restart()
    assert taken(play, "two", 100)
    assert not taken(play, "three", 100)


# ---- usage in the state


def test_restart_knows_what_is_used() -> None:
    log, engine, disk = engine_with(a={"pending_max": 9})
    start = log.now_ms
    log.create_group(1, "g")
    log.create_group(1, "h")
    log.schedule(part_of([(1, start + at, b"x" * at) for at in range(1, 11)]))
    log.fire(start + 6)
    log.cancel([(start + 8, 8)])
    for group in (1, 2):
        log.op(Op.RESERVE, 1, group, [6])
    log.op(Op.ACK, 1, 1, range(4))
    log.op(Op.ACK, 1, 2, range(6))
    catch_up(engine, log)
    [topic] = engine.machine.topics.values()
    there = {name: USAGE[name](topic) for name in QUOTAS}
    assert there == {
        "pending_max": 3,
        "pending_bytes_max": 7 + 9 + 10,
        "ready_max": 2,
        "ready_bytes_max": (1 + 2 + 3 + 4 + 5 + 6) * 2 // 6,  # in proportion
    }
    flush(engine)
    [again] = engine_on(disk).machine.topics.values()
    assert {name: USAGE[name](again) for name in QUOTAS} == there


def test_digest_tells_pending_bytes_apart() -> None:
    _, engine, _ = engine_with(a={})
    [topic] = engine.machine.topics.values()
    before = engine.machine.recomputed_digest()
    topic.pending_bytes += 1
    assert engine.machine.recomputed_digest() != before


# ---- a naive model


@dataclass
class Model:
    """Timers and messages one by one."""

    limits: dict[str, int]
    pending: dict[int, int] = field(default_factory=dict)
    """Seq -> due."""
    keys: dict[bytes, int] = field(default_factory=dict)
    fired: int = 0
    acked: int = 0

    @property
    def used(self) -> dict[str, int]:
        ready = self.fired - self.acked
        numbers = len(self.pending), SIZE * len(self.pending), ready, SIZE * ready
        return dict(zip(QUOTAS, numbers, strict=True))

    def takes(self, delays: list[int]) -> bool:
        due = sum(delay <= 0 for delay in delays)
        asked = dict(zip(QUOTAS, (len(delays), SIZE * len(delays), due, SIZE * due), strict=True))
        return all(
            self.used[name] < limit and self.used[name] + asked[name] <= limit
            for name, limit in self.limits.items()
        )


OPS = st.one_of(
    st.tuples(st.just("schedule"), st.lists(st.sampled_from([-5, 0, 0, 10, 40]), min_size=1)),
    st.tuples(st.just("replace"), st.sampled_from([b"k", b"l"])),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
    st.tuples(st.just("wait"), st.sampled_from([1, 10, 25])),
    st.tuples(st.just("ack"), st.integers(1, 5)),
)
LIMITS = st.dictionaries(st.sampled_from(QUOTAS), st.integers(0, 20), min_size=1)


class Against:
    """A leader beside the model, settled after each operation."""

    def __init__(self, limits: dict[str, int]) -> None:
        self.play = play_with(**limits)
        self.model = Model(limits)
        self.group = self.play.make_group()
        self.consumer = self.play.join(self.group, 1000)

    def do(self, what: str, value: Any) -> None:
        getattr(self, what)(value)
        self.play.settle()
        self.play.answers.clear()
        now_ms = self.play.now.clock_ms
        for seq in [seq for seq, due in self.model.pending.items() if due <= now_ms]:
            del self.model.pending[seq]
            self.model.fired += 1
        assert used(self.play) == self.model.used
        assert self.play.leader.quotas.idle

    def schedule(self, delays: list[int], keys: list[bytes] | None = None) -> None:
        expected = self.model.takes(delays)
        assert taken(self.play, "s", *delays, keys=keys) == expected
        if not expected:
            return
        self.play.settle()
        answer = self.play.answers["s"].answer
        for seq, due in enumerate(answer.due_ms.tolist(), answer.first_seq):
            self.model.pending[seq] = due
            if keys is not None:
                self.model.pending.pop(self.model.keys.get(keys[0], 0), None)
                self.model.keys[keys[0]] = seq
        for name in ("pending_max", "pending_bytes_max"):
            if name in self.model.limits:
                assert used(self.play)[name] <= self.model.limits[name]

    def replace(self, key: bytes) -> None:
        self.schedule([40], [key])

    def cancel(self, which: int) -> None:
        if self.model.pending:
            seq = sorted(self.model.pending)[which % len(self.model.pending)]
            self.play.cancel("c", (self.model.pending.pop(seq), seq))

    def wait(self, ms: int) -> None:
        self.play.wait(ms)

    def ack(self, count: int) -> None:
        delivery = next((each for each in self.play.deliveries if len(each.lease.offsets)), None)
        count = min(count, self.model.fired - self.model.acked)
        first = self.model.acked
        for each in self.play.deliveries if delivery is not None and count else ():
            mine = [at for at in each.lease.offsets.tolist() if first <= at < first + count]
            if mine:
                self.play.ack(f"ack {mine}", each, mine)
        self.model.acked += count


@settings(max_examples=60, deadline=None)
@given(LIMITS, st.lists(OPS, max_size=25))
def test_quotas_are_kept_as_a_naive_model_keeps_them(
    limits: dict[str, int], ops: list[tuple[str, Any]]
) -> None:
    against = Against(limits)
    for what, value in ops:
        against.do(what, value)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["pending_max", "ready_max"]),
    st.integers(0, 8),
    st.lists(st.sampled_from(["s1", "s3", "step", "commit", "close"]), max_size=40),
)
def test_no_more_is_ever_there_than_a_quota_says_however_far_each_request_has_come(
    quota: str, limit: int, ops: list[str]
) -> None:
    play = play_with(**{quota: limit})
    delay = 0 if quota == "ready_max" else 1_000
    for number, op in enumerate(ops):
        if op == "step":
            play.step()
        elif op == "commit" and play.appended:
            play.commit(1)
        elif op == "close":
            play.commit()
            play.restart()
        elif op.startswith("s"):
            taken(play, f"s{number}", *[delay] * int(op[1:]))
        assert used(play)[quota] <= limit
    play.settle()
    assert used(play)[quota] <= limit
    room = limit - used(play)[quota]
    assert taken(play, "the rest", *[delay] * max(1, room)) == (room > 0)


def test_greatest_quota_is_a_quota_and_no_request_sets_one_that_json_readers_round() -> None:
    play = play_with(**dict.fromkeys(QUOTAS, NEW_QUOTA_MAX))
    assert taken(play, "s", 0, 100)
    for name in QUOTAS:
        with pytest.raises(InvalidRequestError, match=f"^{name} = 9007199254740992: must be"):
            limited(play, CLUSTER, **{name: NEW_QUOTA_MAX + 1})
    _, engine, _ = engine_with(a=dict.fromkeys(QUOTAS, QUOTA_MAX))  # of an earlier release
    assert engine.machine.policies.of(Scope("", TopicId(1))).ready_max == QUOTA_MAX
