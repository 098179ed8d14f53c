"""Policies: valid records, precedence of scopes, and equal state on replicas and after restarts."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calls import calls_of
from tests.timer.leading import engine_with
from tests.timer.machines import STATE, catch_up, engine_on, flush
from timer.entries.policies import (
    CLUSTER,
    DEFAULTS,
    DELAY_LEVELS_MS,
    FIELDS,
    KINDS,
    LEVELS_MAX,
    QUOTAS,
    RANGES,
    Policies,
    Scope,
    ScopePolicy,
    decode_policy,
    encode_policy,
    namespace_of,
)
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import DUE_MS_MAX, TopicId
from timer.recovery import manifest

NS = Scope("ns")
TOPIC = Scope("", TopicId(1))
ALL = ScopePolicy(
    delayed_delivery=False,
    tick_ms=20,
    delay_ms_min=1,
    delay_ms_max=9,
    fixed_delay_ms=5,
    payload_bytes_max=100,
    delay_levels_ms=(3, 1, 2),
    pending_max=7,
    pending_bytes_max=700,
    ready_max=0,
    ready_bytes_max=70,
    ttl_ms=7,
    retention_ms=8,
    paused=True,
    catch_up="latest",
    jitter_ms=3,
    topic_rate_max=40,
    group_rate_max=20,
)


def test_default_levels_are_rocketmqs() -> None:
    text = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    seconds = {"s": 1, "m": 60, "h": 3600}
    wanted = [1000 * int(level[:-1]) * seconds[level[-1]] for level in text.split()]
    assert [*DELAY_LEVELS_MS] == wanted


@pytest.mark.parametrize(
    ("topic", "namespace"), [("a", "default"), ("ns/a", "ns"), ("ns/a/b", "ns"), ("a.b", "default")]
)
def test_namespace_is_what_is_before_the_first_slash(topic: str, namespace: str) -> None:
    assert namespace_of(topic) == namespace


# ---- valid records


def test_each_field_has_a_value_in_these_tests_and_each_number_has_a_range() -> None:
    assert ALL.pack().keys() == {*FIELDS}, "ALL lacks a value"
    assert {name for name, kind in KINDS.items() if kind is int} == RANGES.keys()


@pytest.mark.parametrize("scope", [CLUSTER, NS, TOPIC])
@pytest.mark.parametrize("policy", [ScopePolicy(), ALL, ScopePolicy(delayed_delivery=True)])
def test_entry_says_what_was_put_into_it(scope: Scope, policy: ScopePolicy) -> None:
    assert decode_policy(memoryview(encode_policy(scope, policy))) == (scope, policy)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"more": 1},
        {"namespace": b"ns"},
        {"topic": "1"},
        {"topic": True},
        {"topic": 1},  # and a namespace
        {"policy": None},
        {"policy": {"age_ms": 1}},
        {"policy": {"tick_ms": "1"}},
        {"policy": {"tick_ms": True}},
        {"policy": {"delayed_delivery": 1}},
        {"policy": {"delay_levels_ms": 1}},
        {"policy": {"delay_levels_ms": [1, "2"]}},
        {"policy": {"paused": 1}},
        {"policy": {"catch_up": True}},
    ],
)
def test_entry_of_another_version_or_with_unknown_fields_is_refused(change: dict[str, Any]) -> None:
    said = msgpack.unpackb(encode_policy(NS, ALL))
    with pytest.raises(ValueError):  # noqa: PT011 - which it is, the message says to people
        decode_policy(msgpack.packb({**said, **change}))


@pytest.mark.parametrize("field", ["version", "namespace", "topic", "policy"])
def test_entry_without_a_field_is_refused(field: str) -> None:
    said = msgpack.unpackb(encode_policy(NS, ALL))
    del said[field]
    with pytest.raises(ValueError, match="policy"):
        decode_policy(msgpack.packb(said))


@pytest.mark.parametrize(
    ("said", "field", "limit"),
    [
        ({"tick_ms": 0}, "tick_ms", "1 to 3600000"),
        ({"tick_ms": 3_600_001}, "tick_ms", "1 to 3600000"),
        ({"delay_ms_min": -1}, "delay_ms_min", "0 to "),
        ({"delay_ms_max": -1}, "delay_ms_max", "0 to "),
        ({"fixed_delay_ms": DUE_MS_MAX + 1}, "fixed_delay_ms", f"0 to {DUE_MS_MAX}"),
        ({"payload_bytes_max": 0}, "payload_bytes_max", "1 to 16777216"),
        ({"delay_levels_ms": ()}, "delay_levels_ms", "1 to 256"),
        ({"delay_levels_ms": (1,) * (LEVELS_MAX + 1)}, "delay_levels_ms", "1 to 256"),
        ({"delay_levels_ms": (1, 0)}, "delay_levels_ms", "each must be 1 to "),
        ({"delay_ms_min": 2, "delay_ms_max": 1}, "delay_ms_min", "at most delay_ms_max = 1"),
        ({"catch_up": "some"}, "catch_up", "must be one of all, latest, drop"),
        ({"fixed_delay_ms": 2, "delay_ms_max": 1}, "fixed_delay_ms", "at most delay_ms_max = 1"),
        ({"fixed_delay_ms": 2, "delay_ms_min": 3}, "fixed_delay_ms", "at least delay_ms_min = 3"),
    ],
)
def test_value_out_of_range_is_refused_by_name(
    said: dict[str, Any], field: str, limit: str
) -> None:
    with pytest.raises(InvalidRequestError, match=limit) as refused:
        ScopePolicy(**said).check()
    assert refused.value.field == field


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"tick_ms": 1, "delay_ms_min": 0, "delay_ms_max": 0, "fixed_delay_ms": 0},
        {"delay_ms_min": 5, "fixed_delay_ms": 5, "delay_ms_max": 5},
        {"fixed_delay_ms": DUE_MS_MAX, "payload_bytes_max": 16 << 20},
        {"delay_levels_ms": (1,) * LEVELS_MAX},
    ],
)
def test_values_at_their_limits_are_taken(said: dict[str, Any]) -> None:
    assert ScopePolicy(**said).check() == ScopePolicy(**said)


# ---- precedence


@pytest.mark.parametrize("field", FIELDS)
def test_narrower_wins_field_by_field(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {field: getattr(ALL, field)}
    policies = Policies()
    wider = policies.effective(DEFAULTS, "ns", TopicId(1))
    assert getattr(wider.policy, field) == getattr(DEFAULTS, field)
    for scope, name in ((CLUSTER, "cluster"), (NS, "namespace"), (TOPIC, "topic")):
        said = getattr(ALL, field) if scope == NS else getattr(DEFAULTS, field)
        said = value[field] if said is None else said
        policies = policies.with_policy(scope, ScopePolicy(**{field: said}))
        policy, sources = policies.effective(DEFAULTS, "ns", TopicId(1))
        assert (getattr(policy, field), sources[field]) == (said, name)
        assert {name for each, name in sources.items() if each != field} == {"node"}
    merges = calls_of(monkeypatch, ScopePolicy, "over")
    other, sources = policies.effective(DEFAULTS, "another", TopicId(2))
    assert len(merges) == 1, "of the cluster's policy: the others set nothing"
    assert sources[field] == "cluster"
    assert getattr(other, field) == getattr(policies.of(CLUSTER), field)


def test_no_policy_allows_more_than_the_node() -> None:
    node = ScopePolicy(delay_ms_max=100, payload_bytes_max=10).over(DEFAULTS)
    policies = Policies().with_policy(NS, ScopePolicy(delay_ms_max=101, payload_bytes_max=9))
    policy, sources = policies.effective(node, "ns")
    assert (policy.delay_ms_max, sources["delay_ms_max"]) == (100, "node")
    assert (policy.payload_bytes_max, sources["payload_bytes_max"]) == (9, "namespace")


SCOPES = [CLUSTER, *(Scope(name) for name in ("\0", "default", "ns", "nt"))]
SCOPES += [Scope("", TopicId(topic)) for topic in (1, 2, 10, 1 << 31)]
CHANGES = st.tuples(st.sampled_from(SCOPES), st.sets(st.sampled_from(FIELDS), max_size=3))


@settings(derandomize=True, deadline=None)
@given(st.lists(CHANGES, max_size=30))
def test_policies_changed_one_by_one_are_those_made_at_once(
    changes: list[tuple[Scope, set[str]]],
) -> None:
    plain: dict[Scope, ScopePolicy] = {}
    policies, seen = Policies(), list[tuple[Policies, bytes, dict[Scope, ScopePolicy]]]()
    for scope, names in changes:
        policy = ScopePolicy(**{name: getattr(ALL, name) for name in names})
        plain = {each: said for each, said in plain.items() if each != scope}
        plain |= {scope: policy} if names else {}
        policies = policies.with_policy(scope, policy)
        packed = b"".join(encode_policy(*each) for each in sorted(plain.items()))
        assert policies.packed == Policies(plain).packed == packed
        assert [*policies] == [*Policies(plain)] == sorted(plain.items())
        assert [policies.of(each) for each in SCOPES] == [
            plain.get(s, ScopePolicy()) for s in SCOPES
        ]
        assert policies.namespaces == sum(each.namespace != "" for each in plain)
        assert policies.has_narrow_scopes == any(each != CLUSTER for each in plain)
        spoken = {name for said in plain.values() for name in said.pack()}
        assert policies.has(*QUOTAS) == bool(spoken & {*QUOTAS})
        for name in FIELDS:
            wanted, source, first = None, "", Scope("", TopicId(1))
            for of, at in (CLUSTER, "cluster"), (Scope("ns"), "namespace"), (first, "topic"):
                value = getattr(plain.get(of, ScopePolicy()), name)
                wanted, source = (wanted, source) if value is None else (value, at)
            assert policies.value_and_source(name, "ns/a", TopicId(1)) == (wanted, source)
            assert policies.value_of(name, "ns/a", TopicId(1)) == wanted
        seen.append((policies, packed, plain))
    for before, packed, records in seen:  # policies of an earlier point stay unchanged
        assert before.packed == packed
        assert dict(before) == records


def test_change_packs_what_it_changes_and_nothing_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policies = Policies({Scope("", TopicId(topic)): ALL for topic in range(1, 1_001)})
    packed = calls_of(monkeypatch, ScopePolicy, "pack")
    changed = policies.with_policy(Scope("", TopicId(500)), ScopePolicy(tick_ms=20))
    assert changed.packed != policies.packed
    assert changed.has(*QUOTAS)
    assert changed.value_of("tick_ms", "a", TopicId(500)) == 20
    assert 0 < len(packed) < 10


# ---- as state


def test_flush_takes_the_policies_as_they_were_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    log, engine, disk = engine_with(a={"delay_ms_max": 5}, b={"tick_ms": 20})
    log.policy(NS, delay_levels_ms=(1, 2))
    catch_up(engine, log)
    packed = calls_of(monkeypatch, ScopePolicy, "pack")
    flush(engine)
    assert packed == []
    state = manifest.read(disk, STATE)
    assert state is not None
    assert state["policies"] == [encode_policy(*each) for each in engine.machine.policies]
    assert len(state["policies"]) == 3


def test_digest_tells_policies_apart() -> None:
    said: list[dict[str, Any]] = [{}, {"tick_ms": 20}, {"tick_ms": 30}, {"fixed_delay_ms": 20}]
    digests = {engine_with(a=each)[1].machine.digest() for each in said}
    assert len(digests) == len(said)


def test_restart_from_a_manifest_knows_every_scopes_policy() -> None:
    log, engine, disk = engine_with(a={"delay_ms_max": 5}, b={})
    log.policy(CLUSTER, tick_ms=20)
    log.policy(NS, delay_levels_ms=(1, 2))
    catch_up(engine, log)
    flush(engine)
    log.policy(NS)  # in the log alone
    catch_up(engine, log)
    again = engine_on(disk)
    assert dict(again.machine.policies) == {
        CLUSTER: ScopePolicy(tick_ms=20),
        NS: ScopePolicy(delay_levels_ms=(1, 2)),
        TOPIC: ScopePolicy(delay_ms_max=5),
    }
    catch_up(again, log)
    assert again.machine.digest() == engine.machine.digest()
    assert dict(again.machine.policies).keys() == {CLUSTER, TOPIC}
