"""Limits of an identity: their tables in the rules, and what they count."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock, patch

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from cluster.api import owners
from cluster.api.owners import CreationLimits, owned_token
from cluster.api.series_desk import SeriesDesk
from cluster.api.wire_rows import RequestLimits
from cluster.node.ports import PacedReflection
from cluster.rpc import caller_usages
from cluster.rpc.access_file import AccessFile
from cluster.rpc.caller_usages import PACE_S_MAX, CallerUsages
from cluster.rpc.rpc_caller import CALLER, Caller, check_request, keep_pace
from cluster.security.access_rules import parse_rules
from cluster.security.caller_limits import CallerLimits, CallerUsage
from cluster.security.identities import CallerIdentity, IdentityKind
from cluster.security.method_rules import METHOD_RULES
from tests.timer.leading import Play
from timer.entries.payloads import CreateGroup, GroupSettings, GroupStart
from timer.leader.intake.count_limits import CountLimits
from timer.leader.leader import LeaderConfig
from timer.model.feature_level import LEVEL_OF_CREATORS, LEVEL_OF_SERIES
from timer.model.recurrence import SeriesSpec
from timer.model.timer_errors import (
    CallerLimitError,
    ConfigError,
    LimitReachedError,
    OverloadedError,
)
from timer.model.units import MonoMs, Now, ProducerId, UnixMs
from timer.ready.topic import Topic
from timer.state.producers import Producers
from timer.state.series_table import SeriesTable
from timerclient.proto import timer_pb2 as pb

CONSUME = "/timer.v1.ConsumeService/Consume"
CREATE = "/timer.v1.AdminService/CreateTopic"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERIES = "/timer.v1.TimerService/CreateSeries"
REGISTER = "/timer.v1.TimerService/RegisterProducer"

BEGIN = '[[rule]]\nwho = ["client/*"]\nmay = ["produce"]\n'


def test_the_least_limits_of_all_rules_about_an_identity_count() -> None:
    rules = parse_rules(
        f"{BEGIN}rate = {{ requests = 9, rows = 50 }}\n"
        f"{BEGIN.replace('*', 'a')}rate = {{ requests = 4 }}\nmost = {{ streams = 2 }}\n"
    )
    found = rules.limits(CallerIdentity(IdentityKind.CLIENT, "a"))
    assert found == CallerLimits(requests=4, rows=50, streams=2)
    assert rules.limits(CallerIdentity(IdentityKind.ADMIN, "a")) == CallerLimits()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("rate = 5", "rule 1: rate = 5: must be a table with requests, rows, bytes"),
        ("rate = { streams = 5 }", "rule 1: rate = 'streams': must be one of requests"),
        ("most = { streams = 0 }", "rule 1: most.streams = 0: must be 1 to"),
        ("most = { streams = true }", "rule 1: most.streams = true: must be 1 to"),
    ],
)
def test_a_malformed_limit_is_rejected_by_name(line: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_rules(BEGIN + line)


def test_a_rate_is_refused_with_its_value_until_the_debt_is_paid() -> None:
    usage, limits = CallerUsage("client/a"), CallerLimits(requests=2, rows=100)
    usage.charge(limits, 10.0, requests=1, rows=250, bytes=0)
    with pytest.raises(CallerLimitError) as caught:
        usage.charge(limits, 11.0, requests=1, rows=0, bytes=0)
    text = "rate.rows of client/a: must be at most 100 a second; retry after 511 ms"
    assert str(caught.value) == text
    for _ in range(2):
        usage.charge(limits, 11.6, requests=1, rows=1, bytes=0)
    with pytest.raises(CallerLimitError, match=r"rate.requests of client/a: must be at most 2"):
        usage.charge(limits, 11.6, requests=1, rows=1, bytes=0)
    usage.charge(CallerLimits(), 11.6, requests=1, rows=1, bytes=0)  # new rules


def test_open_calls_and_their_connections_are_limited() -> None:
    usage, limits = CallerUsage("client/a"), CallerLimits(streams=3, connections=2)
    for address in ("a", "a", "b"):
        usage.open(limits, address)
    with pytest.raises(CallerLimitError, match=r"most.streams of client/a: 3 are open"):
        usage.open(limits, "a")
    usage.close("a")
    with pytest.raises(CallerLimitError, match=r"most.connections of client/a: 2 are open"):
        usage.open(limits, "c")
    usage.close("b")
    usage.open(limits, "c")


async def test_requests_of_reflection_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_usages, "time", SimpleNamespace(monotonic=lambda: 5.0))
    (tmp_path / "access.toml").write_text(f"{BEGIN}rate = {{ requests = 1_000 }}\n")
    access = AccessFile(str(tmp_path / "access.toml"))
    identity, usages = CallerIdentity(IdentityKind.CLIENT, "a"), CallerUsages(access)
    rule = METHOD_RULES[REFLECTION]
    token = CALLER.set(Caller(identity, REFLECTION, rule, lambda: access.rules, "", usages))
    left = iter([reflection_pb2.ServerReflectionRequest(list_services="")] * 2_500)
    context: Any = SimpleNamespace(read=AsyncMock(side_effect=lambda: next(left, grpc.aio.EOF)))
    answers = PacedReflection([]).ServerReflectionInfo(cast("Any", None), context)
    pauses = AsyncMock()
    with patch("cluster.rpc.rpc_caller.asyncio.sleep", pauses):
        assert len([each async for each in answers]) == 2_500
    CALLER.reset(token)
    pauses.assert_awaited_with(PACE_S_MAX)


async def test_request_of_a_paced_stream_is_counted_once() -> None:
    usages, identity = Mock(pace_s=Mock(return_value=0.0)), CallerIdentity(IdentityKind.CLIENT, "a")
    rules, request = parse_rules(BEGIN), pb.ConsumeRequest()
    token = CALLER.set(Caller(identity, CONSUME, METHOD_RULES[CONSUME], lambda: rules, "", usages))
    await keep_pace(request)
    check_request(request)
    CALLER.reset(token)
    usages.pace_s.assert_called_once_with(identity, request)
    usages.charge.assert_not_called()


class Registering:
    """A leader whose registrations are applied by `commit`."""

    def __init__(self) -> None:
        self.machine = SimpleNamespace(producers=Producers())
        self._waiting: list[Callable[[], None]] = []

    def register(
        self, token: bytes, drawn: ProducerId, now: object, done: Callable[[object], None]
    ) -> None:
        del now
        producers = self.machine.producers
        self._waiting.append(lambda: done(producers.register(token, drawn, UnixMs(1))))

    def commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each()


def test_producers_of_an_identity_are_limited_with_those_under_way(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text(f"{BEGIN}most = {{ producers = 2 }}\n")
    access, ids = AccessFile(str(tmp_path / "access.toml")), count(1)
    limit, leader = CreationLimits(), Registering()
    done: dict[bytes, object] = {}

    def register(name: str, token: bytes) -> None:
        """Register; the call may end before the log answers."""
        identity = CallerIdentity(IdentityKind.CLIENT, name)
        rule, usages = METHOD_RULES[REGISTER], CallerUsages(access)
        called = CALLER.set(Caller(identity, REGISTER, rule, lambda: access.rules, "", usages))
        told, now = partial(done.__setitem__, token), Now(MonoMs(1), UnixMs(1))
        try:
            drawn = ProducerId(next(ids))
            limit.register(cast("Any", leader), owned_token(token), drawn, now, told)
        finally:
            CALLER.reset(called)

    full = r"most.producers of client/a: 2 are registered: must be at most 2"
    register("a", b"1")
    register("a", b"1")  # a repeat of one under way
    register("a", b"2")
    with pytest.raises(CallerLimitError, match=full):  # both are under way
        register("a", b"3")
    leader.commit()
    first = done[b"1"]
    register("a", b"1")
    leader.commit()
    assert done[b"1"] == first, "a known token adds none"
    with pytest.raises(CallerLimitError, match=full):
        register("a", b"3")
    register("b", b"3")
    leader.machine.producers.end(ProducerId(cast("int", first)))
    register("a", b"3")
    assert [*limit._under_way] == [("producers", "client/b"), ("producers", "client/a")]
    leader.commit()
    assert limit._under_way == {}
    CALLER.set(None)
    now = Now(MonoMs(1), UnixMs(1))
    for each in range(3):  # without TLS
        limit.register(cast("Any", leader), b"a\0%d" % each, ProducerId(90), now, lambda _: None)


def test_topics_and_groups_count_for_their_creator_with_those_under_way(tmp_path: Path) -> None:
    rule = BEGIN.replace("produce", "manage")
    (tmp_path / "access.toml").write_text(f"{rule}most = {{ topics = 2, groups = 1 }}\n")
    access, limits = AccessFile(str(tmp_path / "access.toml")), CreationLimits()
    play = Play(LeaderConfig(limits=CountLimits(topics_max=5)))
    usages = CallerUsages(access)

    def call(name: str, create: Callable[[Callable[[Any], None]], None]) -> None:
        identity = CallerIdentity(IdentityKind.CLIENT, name)
        caller = Caller(identity, CREATE, METHOD_RULES[CREATE], lambda: access.rules, "", usages)
        called = CALLER.set(caller)
        try:
            create(lambda _: None)
        finally:
            CALLER.reset(called)

    def topic(name: str, title: str) -> None:
        call(name, partial(limits.topic, play.leader, title, play.now))

    def group(name: str, title: str) -> None:
        settings = GroupSettings(lease_ms=1_000)
        create = CreateGroup(play.topic_id, title, GroupStart.EARLIEST, settings)
        call(name, partial(limits.group, play.leader, create))

    topic("a", "zero")
    group("a", "f")
    play.settle()
    assert not play.machine.creators.topics + play.machine.creators.groups, "at level 1"
    play.machine.level = LEVEL_OF_CREATORS
    topic("a", "one")
    topic("a", "one")
    call("a", lambda _: limits.check_topics(play.leader, ["one", "two"]))  # one is under way
    with pytest.raises(LimitReachedError, match=r"most.topics: client/a has 1: must be at most 2"):
        call("a", lambda _: limits.check_topics(play.leader, ["two", "three"]))
    topic("a", "two")
    full = r"most.topics: client/a has 2: must be at most 2"
    with pytest.raises(LimitReachedError, match=full):  # both are under way
        topic("a", "three")
    topic("b", "three")
    play.commit()
    with pytest.raises(LimitReachedError, match="topics_max: the cluster has 5"):
        call("b", lambda _: limits.check_topics(play.leader, ["four"]))
    topic("a", "one")  # is there
    topic("a", "three")
    with pytest.raises(LimitReachedError, match=full):
        topic("a", "four")
    play.leader.delete_topic(play.machine.topic_by_name["one"].topic_id, play.now, lambda _: None)
    play.commit()
    topic("a", "four")
    group("a", "g")
    with pytest.raises(LimitReachedError, match=r"most.groups: client/a has 1: must be at most 1"):
        group("a", "h")
    play.settle()
    group("a", "g")
    with pytest.raises(LimitReachedError, match=r"most.groups: client/a has 1: must be at most 1"):
        group("a", "h")
    with pytest.raises(LimitReachedError, match="client/a has 1"):
        call("a", lambda _: limits.check_group(play.leader))
    group("b", "h")
    play.settle()
    assert limits._under_way == {}
    play.leader.delete_topic(play.topic_id, play.now, lambda _: None)
    play.settle()
    assert not play.machine.creators.groups, "they were deleted with their topic"
    play.full = OverloadedError("the log is full", retry_after_ms=1)
    topic("b", "five")
    assert limits._under_way == {}, "nothing was appended"


def test_series_count_for_each_identity_that_may_produce_to_their_topics(tmp_path: Path) -> None:
    rule = f'{BEGIN}topics = ["mine/*x", "mine/*y"]\nmost = {{ series = 3 }}\n'
    (tmp_path / "access.toml").write_text(rule)
    access, limits, play = AccessFile(str(tmp_path / "access.toml")), CreationLimits(), Play()
    play.machine.level = LEVEL_OF_SERIES
    usages, table = CallerUsages(access), play.machine.series
    mine, more, other = (play.make_topic(name) for name in ("mine/x", "mine/y", "mine/z"))

    def series(name: str, topic: Topic, key: bytes) -> None:
        identity = CallerIdentity(IdentityKind.CLIENT, name)
        rule = METHOD_RULES[SERIES]
        called = CALLER.set(Caller(identity, SERIES, rule, lambda: access.rules, "", usages))
        spec = SeriesSpec(every_ms=1_000)
        try:
            limits.series(play.leader, topic.topic_id, key, spec, play.now, lambda _: None)
        finally:
            CALLER.reset(called)

    spec = SeriesSpec(every_ms=1_000)
    for topic in (mine, other):  # without TLS
        play.leader.series.create(topic.topic_id, b"plain", spec, play.now, lambda _: None)
    play.commit()
    series("a", mine, b"1")
    series("a", mine, b"2")
    for name in "ab":  # both are under way
        full = f"most.series: client/{name} has 3: must be at most 3"
        with pytest.raises(LimitReachedError, match=full):
            series(name, more, b"3")
    play.commit()
    with pytest.raises(LimitReachedError, match=r"client/b has 3"):
        series("b", more, b"3")
    series("a", mine, b"1")  # is there: the state refuses it
    play.leader.series.delete(table.find(mine.topic_id, b"1"), play.now, lambda _: None)
    play.commit()
    limits.series(play.leader, other.topic_id, b"other", spec, play.now, lambda _: None)
    series("b", more, b"3")  # one is under way in a topic of no caller
    play.commit()
    assert limits._under_way == {}
    assert table.by_topic == {mine.topic_id: 2, more.topic_id: 1, other.topic_id: 2}
    restored = SeriesTable()
    restored.restore(table.pack())
    assert restored.by_topic == table.by_topic
    play.leader.delete_topic(mine.topic_id, play.now, lambda _: None)
    play.commit()
    assert table.by_topic == {more.topic_id: 1, other.topic_id: 2}
    series("a", more, b"4")


async def test_most_creations_count_no_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = f'{BEGIN}topics = ["mine/*"]\nmost = {{ series = 9 }}\n'
    (tmp_path / "access.toml").write_text(rule)
    access, limits, play = AccessFile(str(tmp_path / "access.toml")), CreationLimits(), Play()
    play.machine.level, table = LEVEL_OF_SERIES, play.machine.series
    mine, more, other = (play.make_topic(name) for name in ("mine/x", "mine/y", "other"))
    count, usages = Mock(side_effect=owners._topics_of_caller), CallerUsages(access)
    monkeypatch.setattr(owners, "_topics_of_caller", count)

    def call(name: str) -> None:
        identity, rule = CallerIdentity(IdentityKind.CLIENT, name), METHOD_RULES[SERIES]
        CALLER.set(Caller(identity, SERIES, rule, lambda: access.rules, "", usages))

    def create(topic: Topic, *names: int) -> None:
        for name in names:
            key, spec = b"%d" % name, SeriesSpec(every_ms=1_000)
            limits.series(play.leader, topic.topic_id, key, spec, play.now, lambda _: None)
            play.commit()

    def delete(topic: Topic, name: int) -> None:
        series_id = table.find(topic.topic_id, b"%d" % name)
        play.leader.series.delete(series_id, play.now, lambda _: None)
        play.commit()

    create(other, *range(5))  # without TLS
    call("a")
    create(mine, 0, 1, 2)
    create(more, 3)
    assert (len(table), count.call_count) == (9, 0), "the cluster has fewer than the limit"
    create(mine, 4, 5, 6, 7)
    assert count.call_count == 1, "the last count and all created since are fewer"
    create(mine, 8)
    delete(other, 0)
    for _ in range(3):
        CALLER.set(None)
        create(other, 5)
        delete(other, 5)
        call("a")
        with pytest.raises(LimitReachedError, match="has 9: must be at most 9"):
            create(mine, 9)
    assert count.call_count == 1, "the caller's topics have as many as before"
    monkeypatch.setattr(owners, "USAGES_MAX", 2)
    for name in "bc":
        call(name)
        with pytest.raises(LimitReachedError, match=f"client/{name} has 9"):
            create(mine, 9)
    assert (count.call_count, [*limits._counts]) == (3, ["client/b", "client/c"])
    call("a")
    delete(mine, 0)
    create(mine, 9)
    delete(mine, 1)
    create(mine, 10)
    with pytest.raises(LimitReachedError, match="has 9"):
        create(mine, 11)
    assert [*limits._counts] == ["client/c", "client/a"], "a new count replaces the last one"
    (tmp_path / "access.toml").write_text(rule.replace("9", "13").replace("mine/", ""))
    await access.reread()
    with pytest.raises(LimitReachedError, match="has 13"):
        create(mine, 11)


@pytest.mark.parametrize(
    ("who", "full"),
    [("a", r"most.series: client/a has 2: "), ("", r"limits.series_max: the cluster has 2: ")],
)
async def test_series_that_are_refused_leave_no_topics(tmp_path: Path, who: str, full: str) -> None:
    (tmp_path / "access.toml").write_text(f"{BEGIN}most = {{ series = 2 }}\n")
    access, limits = AccessFile(str(tmp_path / "access.toml")), CreationLimits()
    play = Play(LeaderConfig(limits=CountLimits(series_max=9 if who else 2)))
    play.machine.level = LEVEL_OF_SERIES
    going = asyncio.Event()

    async def topic(_: object, name: str) -> Topic:
        if name not in play.machine.topic_by_name:
            await going.wait()
        return play.machine.topic_by_name.get(name) or play.make_topic(name)

    async def ask(propose: Callable[[Callable[[object], None]], None]) -> object:
        answers: list[object] = []
        propose(answers.append)
        await asyncio.sleep(0)
        play.commit()
        return answers[0]

    host: Any = SimpleNamespace(require_leader=lambda: play.leader, now=lambda: play.now, ask=ask)
    sizes = RequestLimits(
        key_bytes_max=100, headers_bytes_max=100, request_rows_max=100, request_bytes_max=1_000
    )
    desk, fields = SeriesDesk(host, topic, limits, sizes, salt=0), pb.SeriesFields(every_ms=1_000)
    if who:
        identity, rule = CallerIdentity(IdentityKind.CLIENT, who), METHOD_RULES[SERIES]
        CALLER.set(Caller(identity, SERIES, rule, lambda: access.rules, "", CallerUsages(access)))

    def create(name: str) -> asyncio.Task[pb.CreateSeriesResponse]:
        request = pb.CreateSeriesRequest(topic=name, key="k", fields=fields)
        return asyncio.create_task(desk.create(request))

    names = ["0", "1", "1", "2", "3"]
    tasks = [create(name) for name in names]
    await asyncio.sleep(0)
    late = create("a")  # a topic that exists
    for _ in names:
        await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [False, False, False, True, True]
    gone = tasks.pop(0)
    gone.cancel()  # its client has gone
    await asyncio.wait([gone])
    going.set()
    done = await asyncio.gather(*tasks, late, return_exceptions=True)
    refused = [isinstance(each, LimitReachedError) for each in done]
    assert refused == [False, False, True, True, True]
    await create("4")
    with pytest.raises(LimitReachedError, match=full):
        await create("5")
    assert [*play.machine.topic_by_name] == ["a", "1", "4"]
    assert limits._under_way == {}
