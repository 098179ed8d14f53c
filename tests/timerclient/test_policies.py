"""Delay levels and policies as the client sends them, and as timerctl reads and prints them."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.timerclient.conftest import Ctl, Threaded, once
from tests.timerclient.fake_cluster import Cluster
from timerclient import AsyncTimerClient, OutcomeUnknown
from timerclient.cli import cli_policies, timerctl
from timerclient.cli.cli_args import UsageError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import policy_fields, rows
from timerclient.values import errors, policy_names
from timerclient.values.errors import InvalidRequest
from timerclient.values.policy_names import PolicyFields


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncTimerClient]:
    async with AsyncTimerClient(cluster.address, timeout=10) as client:
        yield client


# ---- delay levels


async def test_calls_with_delays_levels_and_times_are_kept_apart_in_one_topic(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    levels = [client.schedule("a", b"l%d" % level, delay_level=level) for level in (1, 2, 1)]
    others = [client.schedule("a", b"d", delay=2), client.schedule("a", b"t", due_ms=10**12)]
    timers = await asyncio.gather(*levels, *others)
    assert len({timer.id for timer in timers}) == 5
    due = {row.payload: row.due_ms for row in cluster.rows}
    assert due[b"l2"] - due[b"l1"] == 4_000
    assert due[b"t"] == 10**12


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1, "must be 0 to 2147483647"),
        (1 << 31, "must be 0 to 2147483647"),
        (1.5, "whole number"),
        ("1", "whole number"),
        ([0, 1], "whole number"),
    ],
)
def test_level_that_is_none_is_refused(value: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        rows.moment({"delay_level": value})
    assert refused.value.field == "delay_level"


def test_level_goes_with_no_other_time() -> None:
    with pytest.raises(InvalidRequest, match="only one of delay, delay_level, due, due_ms"):
        rows.moment({"delay_level": 1, "delay": 1})


# ---- policies


async def test_fields_travel_as_they_are_named_and_only_those(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    said: PolicyFields = {
        "delayed_delivery": False,
        "tick_ms": 5,
        "delay_levels_ms": [1, 2],
    }
    with pytest.raises(InvalidRequest, match="unset = 'ttl_ms': must be a sequence"):
        await client.alter_policies(unset="ttl_ms", topic="ns/t")
    answer = await client.alter_policies(said, unset=["delay_ms_max"], topic="ns/t")
    [request] = cluster.called(pb.AlterPoliciesRequest)
    assert policy_fields.fields_of(request.set) == said
    assert [*request.unset] == ["delay_ms_max"]
    assert request.scope == answer.scope == pb.PolicyScope(topic="ns/t")
    assert policy_fields.fields_of(answer.own) == said
    assert (await client.describe_policies(namespace="ns")).scope.namespace == "ns"
    assert (await client.describe_policies()).scope == pb.PolicyScope()


@pytest.mark.parametrize(
    ("said", "field", "text"),
    [
        ({"age_ms": 1}, "policy", "must be one of delayed_delivery, tick_ms"),
        ({"tick_ms": True}, "tick_ms", "must be a number"),
        ({"tick_ms": 1.5}, "tick_ms", "must be a whole number"),
        ({"tick_ms": 1 << 64}, "tick_ms", "at most 9223372036854775807"),
        ({"delayed_delivery": 1}, "delayed_delivery", "true or false"),
        ({"delay_levels_ms": 5}, "delay_levels_ms", "must be delays"),
        ({"delay_levels_ms": ["1s"]}, "delay_levels_ms", "must be delays"),
    ],
)
def test_value_that_its_field_does_not_take_is_refused(
    said: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        policy_fields.policy_of(said)
    assert refused.value.field == field


async def test_change_whose_answer_is_lost_is_not_sent_again(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.on_call = once("lose")
    with pytest.raises(OutcomeUnknown):
        await client.alter_policies({"tick_ms": 5}, cluster=True)
    assert len(cluster.called(pb.AlterPoliciesRequest)) == 1


# ---- timerctl


@pytest.mark.parametrize(
    ("words", "scope"),
    [
        (["--topic", "orders"], {"topic": "orders"}),
        (["--topic", "ns/t"], {"topic": "ns/t"}),
        (["--namespace", "orders"], {"namespace": "orders"}),
        (["--cluster"], {}),
    ],
)
def test_scope_is_explicit(words: list[str], scope: dict[str, str]) -> None:
    args = timerctl.make_parser().parse_args(["policies", "set", *words, "tick_ms=5"])
    assert cli_policies.scope_of(args) == scope


@pytest.mark.parametrize(
    "words",
    [
        ["orders", "tick_ms=5"],
        ["tick_ms=5"],
        ["--cluster", "--topic", "orders", "tick_ms=5"],
        ["--topic", "orders", "--namespace", "orders", "tick_ms=5"],
    ],
)
def test_change_without_exactly_one_scope_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(UsageError):
        timerctl.make_parser().parse_args(["policies", "set", *words])


async def test_change_by_the_client_names_exactly_one_scope(client: AsyncTimerClient) -> None:
    for scopes in ({}, {"topic": "t", "namespace": "n"}, {"topic": "t", "cluster": True}):
        with pytest.raises(errors.InvalidRequest, match="exactly one of topic="):
            await client.alter_policies({"tick_ms": 5}, **scopes)


def test_scopes_are_shown_with_their_kind() -> None:
    shown = {
        "topic default/t": pb.PolicyScope(topic="t"),
        "topic ns/t": pb.PolicyScope(topic="ns/t"),
        "namespace cluster": pb.PolicyScope(namespace="cluster"),
        "the cluster": pb.PolicyScope(),
    }
    for text, scope in shown.items():
        assert cli_policies.scope_text(scope) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("delay_ms_max=90s", 90_000),
        ("delay_ms_max=1500", 1_500),
        ("tick_ms=1s500ms", 1_500),
        ("delayed_delivery=on", True),
        ("delayed_delivery=false", False),
        ("payload_bytes_max=64KiB", 65_536),
        ("payload_bytes_max=7", 7),
        ("ready_bytes_max=2GiB", 2 << 30),
        ("pending_max=1000", 1_000),
        ("delay_levels_ms=1s,500,2h", [1_000, 500, 7_200_000]),
    ],
)
def test_field_and_value_are_one_word(text: str, value: object) -> None:
    assert cli_policies.field_value(text) == (text.partition("=")[0], value)


@pytest.mark.parametrize(
    "text",
    [
        "tick_ms",
        "ttl=1",
        "tick_ms=soon",
        "ttl_ms=1.5",
        "delayed_delivery=maybe",
        "payload_bytes_max=1GB",
        "=1",
    ],
)
def test_word_that_sets_no_field_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        cli_policies.field_value(text)


def test_set_unset_and_show(ctl: Ctl, threaded: Threaded) -> None:
    code, out, _ = ctl(
        "policies", "set", "--namespace", "ns", "delay_ms_max=1h", "delayed_delivery=off"
    )
    assert code == 0
    assert "delay_ms_max" in out
    assert "60m" not in out
    assert "1h" in out
    code, out, _ = ctl("policies", "unset", "--namespace", "ns", "delay_ms_max", "-o", "json")
    assert (code, json.loads(out)["scope"]) == (0, {"namespace": "ns"})
    assert [*threaded.cluster.called(pb.AlterPoliciesRequest)[1].unset] == ["delay_ms_max"]
    code, out, _ = ctl("policies", "show")
    assert (code, out.splitlines()[0]) == (0, "the cluster")
    assert ctl("policies", "show", "--namespace", "ns")[1].splitlines()[0] == "namespace ns"
    assert (
        ctl("policies", "show", "--namespace", "cluster")[1].splitlines()[0] == "namespace cluster"
    )
    ctl("topics", "create", "ns/t")
    assert ctl("policies", "show", "--topic", "ns/t")[1].splitlines()[0] == "topic ns/t"
    code, _, err = ctl("policies", "set", "--namespace", "ns", "tick_ms=1", "tick_ms=2")
    assert (code, "set it once" in err) == (2, True)
    assert ctl("policies", "set", "--namespace", "ns", "nothing=1")[0] == 2


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["set", "--namespace", "ns", "ttl_ms=1h"], True),
        (["set", "--namespace", "ns", "ttl_ms=0"], False),
        (["unset", "--namespace", "ns", "ttl_ms"], True),  # a wider scope's may be shorter
        (["set", "--namespace", "ns", "retention_ms=0"], True),
        (["unset", "--namespace", "ns", "retention_ms"], True),
        (["set", "--namespace", "ns", "catch_up=latest"], True),
        (["set", "--namespace", "ns", "catch_up=all"], False),
        (["set", "--namespace", "ns", "paused=on"], False),
        (["set", "--namespace", "ns", "paused=off"], False),
        (["set", "--namespace", "dropping", "paused=off"], True),
        (["unset", "--namespace", "dropping", "paused"], True),
        (["set", "--namespace", "dropping", "paused=off", "catch_up=all"], False),
        (["set", "--cluster", "paused=off"], True),  # `dropping` is inside
        (["unset", "--namespace", "ns", "tick_ms"], False),
    ],
)
def test_what_may_end_what_is_there_is_done_when_somebody_agrees(
    ctl: Ctl,
    threaded: Threaded,
    words: list[str],
    asks: bool,
) -> None:
    assert ctl("policies", "set", "--namespace", "dropping", "catch_up=drop", "--yes")[0] == 0
    before = len(threaded.cluster.called(pb.AlterPoliciesRequest))
    code, _, err = ctl("policies", *words)
    assert (code, "needs --yes" in err) == ((2, True) if asks else (0, False))
    assert len(threaded.cluster.called(pb.AlterPoliciesRequest)) == before + (not asks)
    assert ctl("policies", *words, "--yes")[0] == 0


def test_empty_scope_is_not_the_cluster(ctl: Ctl, threaded: Threaded) -> None:
    code, _, err = ctl("policies", "set", "--namespace", "", "tick_ms=5")
    assert (code, "namespace = ''" in err) == (2, True)
    assert not threaded.cluster.called(pb.AlterPoliciesRequest)


def test_schedule_takes_a_level(ctl: Ctl, threaded: Threaded) -> None:
    assert ctl("schedule", "t", "x", "--delay-level", "2")[0] == 0
    [row] = threaded.cluster.rows
    assert row.payload == b"x"
    code, _, err = ctl("schedule", "t", "x", "--delay-level", "-1")
    assert (code, "--delay-level = -1" in err) == (2, True)


def test_delays_are_printed_as_they_are_read() -> None:
    for ms in (1, 1_500, 60_000, 7_200_000, 90_000):
        text = cli_policies._delay(ms)
        assert cli_policies.field_value(f"tick_ms={text}") == ("tick_ms", ms)


def test_fields_are_those_of_the_contract() -> None:
    assert [*policy_names.FIELDS] == [field.name for field in pb.Policy.DESCRIPTOR.fields]
