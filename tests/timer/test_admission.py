"""Admission: a timer's effective due follows from its request and the policies at its entry."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timer.leading import Play
from tests.timer.machines import START_MS, part_of
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import Ids, decode_reschedule
from timer.entries.policies import (
    CLUSTER,
    DEFAULTS,
    NAMESPACES_MAX,
    Policies,
    Scope,
    ScopePolicy,
    decode_policy,
)
from timer.leader.intake.admission import WAYS, Rules, WantedTimes, wanted_times_of
from timer.leader.leader import CHANGES_MAX, LeaderConfig
from timer.model.columns import decode_schedule
from timer.model.timer_errors import (
    InvalidRequestError,
    NotLeaderError,
    NotReadyError,
    OverloadedError,
)
from timer.model.units import DUE_MS_MAX, MonoMs, Now, TopicId, UnixMs

NOW = 1_000_007
AT = Now(MonoMs(0), UnixMs(NOW))
FLOOR = UnixMs(NOW - 100)


def rules(**said: Any) -> Rules:
    policies = Policies().with_policy(CLUSTER, ScopePolicy(**said))
    return Rules(policies.effective(DEFAULTS))


def given_of(**ways: list[int]) -> dict[str, list[int]]:
    return {way: ways.get(way, []) for way in WAYS}


def due_of(said: dict[str, Any], way: str, *values: int) -> list[int]:
    when = wanted_times_of(given_of(**{way: [*values]}), len(values))
    due: list[int] = rules(**said).times(when, len(values), AT, FLOOR).due_ms.tolist()
    return due


LEVELS = {"delay_levels_ms": (500, 100, 900)}


@pytest.mark.parametrize(
    ("said", "way", "value", "due"),
    [
        # no policy: as requested, but never before the last read time
        ({}, "due_ms", NOW + 1, NOW + 1),
        ({}, "due_ms", NOW, NOW),
        ({}, "due_ms", NOW - 50, NOW - 50),
        ({}, "due_ms", 0, FLOOR),
        ({}, "delay_ms", 0, NOW),
        ({}, "delay_ms", 4, NOW + 4),
        ({}, "due_ms", DUE_MS_MAX, DUE_MS_MAX),
        # tick: rounded up to it, except a past due time
        ({"tick_ms": 10}, "due_ms", NOW + 1, 1_000_010),
        ({"tick_ms": 10}, "due_ms", 1_000_010, 1_000_010),
        ({"tick_ms": 10}, "due_ms", NOW, NOW),
        ({"tick_ms": 10}, "delay_ms", 3, 1_000_010),
        ({"tick_ms": 10}, "delay_ms", 4, 1_000_020),
        ({"tick_ms": 10}, "due_ms", DUE_MS_MAX, DUE_MS_MAX),
        ({"tick_ms": 1_000}, "delay_ms", 1, 1_001_000),
        ({"tick_ms": 1_000}, "delay_ms", 0, NOW),
        # levels
        (LEVELS, "delay_level", 0, NOW),
        (LEVELS, "delay_level", 1, NOW + 500),
        (LEVELS, "delay_level", 2, NOW + 100),
        (LEVELS, "delay_level", 3, NOW + 900),
        (LEVELS, "delay_level", 4, NOW + 900),
        (LEVELS, "delay_level", 2**31 - 1, NOW + 900),
        ({}, "delay_level", 18, NOW + 7_200_000),
        # minimum: shorter delays are raised to it, past due times too
        ({"delay_ms_min": 100}, "delay_ms", 99, NOW + 100),
        ({"delay_ms_min": 100}, "delay_ms", 100, NOW + 100),
        ({"delay_ms_min": 100}, "delay_ms", 101, NOW + 101),
        ({"delay_ms_min": 100}, "delay_ms", 0, NOW + 100),
        ({"delay_ms_min": 100}, "due_ms", 5, NOW + 100),
        ({"delay_ms_min": 100, "tick_ms": 10}, "delay_ms", 0, 1_000_110),
        ({"delay_ms_min": DUE_MS_MAX}, "delay_ms", 0, DUE_MS_MAX),
        # fixed: replaces every requested time, also beyond the maximum of a wider scope
        ({"fixed_delay_ms": 50}, "delay_ms", 0, NOW + 50),
        ({"fixed_delay_ms": 50}, "due_ms", NOW + 10**9, NOW + 50),
        ({"fixed_delay_ms": 50, "tick_ms": 10}, "delay_level", 18, 1_000_060),
        ({"fixed_delay_ms": 0}, "delay_ms", 500, NOW),
        ({"fixed_delay_ms": 50, "delay_ms_max": 60}, "delay_ms", 61, NOW + 50),
        ({"fixed_delay_ms": DUE_MS_MAX}, "delay_ms", 0, DUE_MS_MAX),
        # off: at once, without regard to other fields
        ({"delayed_delivery": False}, "delay_ms", 500, NOW),
        ({"delayed_delivery": False}, "due_ms", NOW - 7, NOW - 7),
        ({"delayed_delivery": False}, "due_ms", 0, FLOOR),
        ({"delayed_delivery": False, "delay_ms_min": 5, "delay_ms_max": 9}, "delay_ms", 99, NOW),
        ({"delayed_delivery": False, "fixed_delay_ms": 50}, "delay_level", 3, NOW),
        # maximum: exactly reached
        ({"delay_ms_max": 100}, "delay_ms", 100, NOW + 100),
        ({"delay_ms_max": 100}, "due_ms", NOW + 100, NOW + 100),
        ({"delay_ms_max": 93}, "delay_ms", 93, NOW + 93),
        # rounding may exceed the maximum
        ({"delay_ms_max": 94, "tick_ms": 10}, "delay_ms", 94, 1_000_110),
    ],
)
def test_effective_due(said: dict[str, Any], way: str, value: int, due: int) -> None:
    assert due_of(said, way, value) == [due]
    assert due_of(said, way, value, value) == [due, due]


@pytest.mark.parametrize(
    ("said", "way", "value", "limit"),
    [
        ({"delay_ms_max": 100}, "delay_ms", 101, r"at most 100 \(delay_ms_max of the cluster\)"),
        ({"delay_ms_max": 100}, "due_ms", NOW + 101, f"at most {NOW + 100} .delay_ms_max of the"),
        ({"delay_ms_max": 999}, "delay_level", 1, "stands for 1000 ms, which must be at most 999"),
        ({"delay_ms_max": 0}, "delay_ms", 1, "at most 0"),
        ({}, "due_ms", DUE_MS_MAX + 1, f"at most {DUE_MS_MAX}$"),
        ({}, "delay_ms", DUE_MS_MAX, f"at most {DUE_MS_MAX - NOW}$"),
        ({}, "delay_ms", 2**63 - 1, f"at most {DUE_MS_MAX - NOW}$"),
        ({"fixed_delay_ms": 5}, "due_ms", DUE_MS_MAX + 1, f"at most {DUE_MS_MAX}$"),
        ({"delayed_delivery": False}, "delay_ms", 2**63 - 1, f"at most {DUE_MS_MAX - NOW}$"),
    ],
)
def test_beyond_the_maximum_is_refused_with_field_value_and_limit(
    said: dict[str, Any], way: str, value: int, limit: str
) -> None:
    with pytest.raises(InvalidRequestError, match=limit) as refused:
        due_of(said, way, 0, value)
    assert (refused.value.field, refused.value.value) == (way, value)


@pytest.mark.parametrize(
    ("ways", "field", "limit"),
    [
        ({}, "due_ms, delay_ms, delay_level", "exactly one"),
        ({"due_ms": [1], "delay_level": [1]}, "due_ms, delay_ms, delay_level", "exactly one"),
        ({"delay_ms": [1, 2]}, "delay_ms", "1 or 3 values"),
        ({"due_ms": [-1]}, "due_ms", "0 or more"),
        ({"delay_ms": [5, -1, 5]}, "delay_ms", "0 or more"),
        ({"delay_level": [-1]}, "delay_level", "0 or more"),
    ],
)
def test_one_way_is_given_once_or_for_each_row_and_nothing_negative(
    ways: dict[str, list[int]], field: str, limit: str
) -> None:
    with pytest.raises(InvalidRequestError, match=limit) as refused:
        wanted_times_of(given_of(**ways), 3)
    assert refused.value.field == field


def test_one_value_is_for_all_rows() -> None:
    times = rules().times(WantedTimes("delay_ms", np.array([3])), 4, AT, FLOOR)
    assert [column.tolist() for column in times] == [[NOW + 3] * 4, [1_000_010] * 4]


@settings(derandomize=True, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, DUE_MS_MAX), st.sampled_from([DUE_MS_MAX, DUE_MS_MAX - 1])),
        min_size=1,
    ),
    st.sampled_from([1, 10, 1000]),
)
def test_effective_due_is_never_early_at_most_a_tick_late_and_fits_into_an_id(
    requested: list[int], tick: int
) -> None:
    # E.2
    effective = due_of({"tick_ms": tick}, "due_ms", *requested)
    for asked, due in zip(requested, effective, strict=True):
        if asked <= NOW:
            assert due == max(asked, FLOOR)
        else:
            assert asked <= due < asked + tick
            assert due % tick == 0 or due == DUE_MS_MAX
            assert due <= DUE_MS_MAX


# ---- the leader


class Ruled(Play):
    """A leader with a second topic, `ns/b`; requests go through admission."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.b = Scope("", self.make_topic("ns/b").topic_id)

    def say(self, name: str, scope: Scope, *unset: str, **said: Any) -> None:
        self.leader.set_policy(scope, ScopePolicy(**said), unset, self.now, self.done(name))

    def take(self, name: str, topic: int, delay_ms: int) -> int:
        """Schedule one timer; return its effective due, from now."""
        when = WantedTimes("delay_ms", np.array([delay_ms]))
        times = self.leader.admission.times(when, 1, np.array([topic], np.uint32), self.now)
        self.leader.schedule(part_of([(topic, int(times.due_ms[0]), b"")]), self.done(name))
        return int(times.due_ms[0]) - self.now.clock_ms

    def newest(self, kind: EntryKind) -> Any:
        return [each for each in self.log.entries if each.kind is kind][-1]


def test_policy_holds_for_what_is_taken_after_it_though_it_is_not_applied_yet() -> None:
    play = Ruled()
    play.say("p", CLUSTER, fixed_delay_ms=70)
    assert play.take("s", play.topic_id, 10) == 70
    assert play.answers == {}
    play.settle()
    assert play.answers.keys() == {"p", "s"}
    assert play.machine.policies.of(CLUSTER) == ScopePolicy(fixed_delay_ms=70)


def test_what_was_taken_before_a_policy_lies_before_it_in_the_log() -> None:
    play = Ruled()
    for at in range(5):
        play.take(f"s{at}", play.topic_id, 10)
        play.step()
    assert play.appended.count(EntryKind.SCHEDULE) == 2  # the others wait
    play.say("p", CLUSTER, fixed_delay_ms=70)
    play.take("after", play.topic_id, 10)
    play.settle()
    kinds = [entry.kind for entry in play.log.entries]
    behind = kinds.index(EntryKind.POLICY)
    rows = [
        len(decode_schedule(e.payload).rows)
        for e in play.log.entries
        if e.kind is EntryKind.SCHEDULE
    ]
    assert sum(rows) == 6
    [after] = [e for e in play.log.entries[behind:] if e.kind is EntryKind.SCHEDULE]
    assert decode_schedule(after.payload).rows["due_ms"].tolist() == [START_MS + play.mono_ms + 70]


def test_pending_timers_keep_their_time() -> None:
    play = Ruled()
    due = START_MS + play.mono_ms + play.take("s", play.topic_id, 500)
    play.settle()
    for said in ({"delayed_delivery": False}, {"fixed_delay_ms": 5}, {"tick_ms": 60_000}):
        play.leader.set_policy(CLUSTER, ScopePolicy(**said), (), play.now, play.done(str(said)))
        play.settle()
    assert play.machine.store.next_due() == due
    play.wait(499)
    play.settle()
    assert play.machine.counts.fired == 0
    play.wait(1)
    play.settle()
    assert play.machine.counts.fired == 1


def test_policy_that_the_log_does_not_take_changes_nothing() -> None:
    play = Ruled(full=None)
    play.full = OverloadedError("the log", retry_after_ms=1)
    play.say("p", CLUSTER, fixed_delay_ms=70)
    play.full = None
    assert isinstance(play.answers["p"], OverloadedError)
    assert play.take("s", play.topic_id, 10) == 10
    play.settle()
    assert not [*play.machine.policies]


def test_fields_are_set_and_unset_one_by_one_also_in_flight() -> None:
    play = Ruled()
    play.say("1", play.b, tick_ms=20, delay_ms_max=500)
    play.say("2", play.b, "tick_ms", fixed_delay_ms=30)
    scope, policy = decode_policy(play.newest(EntryKind.POLICY).payload)
    assert (scope, policy) == (play.b, ScopePolicy(delay_ms_max=500, fixed_delay_ms=30))
    play.commit(1)
    assert play.machine.policies.of(play.b) == ScopePolicy(tick_ms=20, delay_ms_max=500)
    play.commit()
    assert play.machine.policies.of(play.b) == policy
    play.say("3", play.b, "delay_ms_max", "fixed_delay_ms")
    play.commit()
    assert not [*play.machine.policies]


def test_contradiction_with_what_the_scope_says_already_is_refused() -> None:
    play = Ruled()
    play.say("1", CLUSTER, delay_ms_max=500)
    with pytest.raises(InvalidRequestError, match="at most delay_ms_max = 500"):
        play.say("2", CLUSTER, delay_ms_min=501)
    play.say("3", CLUSTER, "delay_ms_max", delay_ms_min=501)
    with pytest.raises(InvalidRequestError, match=r"unset.*must be one of delayed_delivery"):
        play.say("4", CLUSTER, "ttl")
    with pytest.raises(InvalidRequestError, match="must not be both set and unset"):
        play.say("5", CLUSTER, "tick_ms", tick_ms=5)


def test_no_policy_goes_beyond_the_nodes_settings() -> None:
    node = ScopePolicy(delay_ms_max=1_000, payload_bytes_max=50).over(DEFAULTS)
    play = Ruled(LeaderConfig(policy=node))
    for field, most in (("delay_ms_max", 1_000), ("payload_bytes_max", 50)):
        with pytest.raises(InvalidRequestError, match=f"at most {most}, the node's own limit"):
            play.say("p", CLUSTER, **{field: most + 1})
    with pytest.raises(InvalidRequestError, match=r"at most 1000 \(delay_ms_max of the node"):
        play.take("s", play.topic_id, 1_001)


def test_namespaces_with_policies_are_bounded() -> None:
    play = Ruled()
    policies = Policies({Scope(f"n{at}"): ScopePolicy(tick_ms=5) for at in range(NAMESPACES_MAX)})
    play.machine.policies = policies
    play.lead()
    with pytest.raises(InvalidRequestError, match=f"at most {NAMESPACES_MAX} namespaces"):
        play.say("one more", Scope("ns"), tick_ms=5)
    play.say("one of them", Scope("n1"), tick_ms=6)


def test_changes_in_flight_are_bounded() -> None:
    play = Ruled()
    for at in range(CHANGES_MAX):
        play.say(str(at), Scope("n1"), tick_ms=5 + at)
    with pytest.raises(OverloadedError):
        play.say("too many", Scope("n1"), tick_ms=5)


def test_successor_decides_by_what_was_committed() -> None:
    play = Ruled()
    play.say("kept", CLUSTER, fixed_delay_ms=70)
    play.commit()
    play.say("lost", CLUSTER, fixed_delay_ms=90)
    play.log.entries.pop()
    play.leader.close(NotLeaderError(None))
    play.machine.apply(play.log.begin_epoch())
    play.lead()
    assert play.take("s", play.topic_id, 10) == 70


def test_reschedule_follows_the_policies_of_each_timers_topic() -> None:
    play = Ruled()
    for name, topic in (("a", play.topic_id), ("b", play.b.topic), ("c", play.topic_id)):
        play.take(name, topic, 10_000)
    play.settle()
    play.say("fixed", play.b, fixed_delay_ms=70)
    play.say("least", Scope("default"), delay_ms_min=30)
    play.settle()
    dues = np.full(3, play.now.clock_ms + 10_000)
    ids = Ids(dues, np.arange(1, 4, dtype=np.uint64))
    topics = play.machine.store.topics(ids.due_ms, ids.seq)
    assert topics.tolist() == [play.topic_id, play.b.topic, play.topic_id]
    when = WantedTimes("delay_ms", np.array([20, 20, 40]))
    play.leader.reschedule(ids, topics, when, play.now, play.done("moved"))
    play.step()
    order = decode_reschedule(play.newest(EntryKind.RESCHEDULE).payload)
    now_ms = play.now.clock_ms
    assert (order.due_ms - now_ms).tolist() == [30, 70, 40]
    assert (order.requested_ms - now_ms).tolist() == [20, 20, 40]
    play.settle()
    assert play.machine.store.topics(ids.due_ms, ids.seq).tolist() == [0, 0, 0]


def test_whose_timers_are_rescheduled_is_asked_only_if_it_matters() -> None:
    play = Ruled()
    when, now = WantedTimes("delay_ms", np.array([5_000])), play.now
    play.say("1", CLUSTER, delay_ms_max=4_000)
    with pytest.raises(InvalidRequestError, match="delay_ms_max of the cluster"):
        play.leader.admission.times(when, 1, None, now)
    play.say("2", play.b, delay_ms_max=6_000)
    with pytest.raises(NotReadyError, match="a policy changed meanwhile; retry"):
        play.leader.admission.times(when, 1, None, now)
    topics = np.array([play.b.topic, 0], np.uint32)  # 0: not pending, so nothing comes of it
    times = play.leader.admission.times(when, 2, topics, now)
    assert (times.requested_ms - now.clock_ms).tolist() == [5_000] * 2
    topics[1] = play.topic_id
    with pytest.raises(InvalidRequestError, match="delay_ms_max of the cluster"):
        play.leader.admission.times(when, 2, topics, now)


def test_reschedule_at_once_by_policy_is_followed_by_a_fire() -> None:
    play = Ruled()
    play.take("s", play.b.topic, 10_000)
    play.settle()
    play.say("off", play.b, delayed_delivery=False)
    play.settle()
    ids = Ids(np.array([play.now.clock_ms + 10_000]), np.ones(1, np.uint64))
    when, topics = WantedTimes("delay_ms", np.array([5_000])), np.array([play.b.topic], np.uint32)
    play.leader.reschedule(ids, topics, when, play.now, play.done("moved"))
    assert play.step() == [EntryKind.RESCHEDULE, EntryKind.FIRE]
    play.commit()
    assert play.machine.counts.fired == 1


def test_rules_of_a_topic_name_who_says_what() -> None:
    play = Ruled()
    play.say("1", Scope("ns"), payload_bytes_max=7)
    assert play.leader.admission.rules(play.b.topic).payload_limit == (
        7,
        " (payload_bytes_max of the namespace)",
    )
    assert play.leader.admission.rules(play.topic_id).payload_limit[1].endswith("the node)")
    play.say("own", play.b, payload_bytes_max=5)
    assert play.leader.admission.rules(play.b.topic, "ns/b").payload_limit[0] == 5
    new = [play.leader.admission.rules(9, name) for name in ("ns/x", "ns/y", "x", "other/x")]
    assert [each.payload_limit[0] == 7 for each in new] == [True, True, False, False]
    assert new == [new[0]] * 2 + [play.leader.admission.rules(0)] * 2, "some are shared"
    differs = [play.leader.admission.differs]
    play.say("other", play.b, "payload_bytes_max")
    play.say("2", Scope("ns"), "payload_bytes_max")
    play.say("3", CLUSTER, payload_bytes_max=9)
    assert [*differs, play.leader.admission.differs] == [True, False]
    assert play.leader.admission.rules(TopicId(0)).payload_limit[0] == 9
