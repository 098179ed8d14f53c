"""The answer to an operator's request is the outcome that the control plane knows."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from unittest import mock

import grpc
import numpy as np
import pytest

from cluster.api import admin_service, series_desk
from cluster.api.admin_service import AdminService
from cluster.api.series_desk import SeriesDesk
from cluster.control.control_plane import CommandAnswer, CommandOutcome
from cluster.control.membership import Change
from cluster.node import operator_commands
from cluster.node.node import Node
from cluster.node.operator_commands import OperatorCommands
from cluster.observe import lag, quota_view, topic_view
from cluster.observe import node_view as view
from cluster.observe.busiest_topics import BusiestTopics
from cluster.observe.clock_watch import ClockWatch
from cluster.observe.node_view import NodeState
from cluster.observe.topic_view import TopicView
from cluster.rpc.handlers import NO_HOOKS
from cluster.rpc.http import why_not_ready
from cluster.rpc.rpc_caller import CALLER, caller_name
from cluster.settings.config import build_config
from replication.core.core_events import Role
from tests.cluster.hosted import BASE
from tests.timer.leading import Play
from tests.waiting import settled
from timer.entries.policies import Policies, Scope, ScopePolicy
from timer.leader.intake.cluster_clock import ClockReport
from timer.model.recurrence import Misfire, SeriesSpec
from timer.model.timer_errors import (
    AlreadyExistsError,
    CommitTimeoutError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
)
from timer.model.units import MonoMs, Now, ReplicaId, TopicId, UnixMs
from timer.state.series_table import SeriesTable
from timerclient.proto import timer_pb2 as pb

ENGINE: Any = SimpleNamespace(machine=None)
"""Of a node whose topics may not be looked at."""
HOST: Any = SimpleNamespace(engine=ENGINE)
LIMITS: Any = SimpleNamespace(metric_topics_max=0)


def admin_of(view: Any, scrub: Any = None) -> AdminService:
    """The service over a view; its other parts are missing."""
    names = ("commands", "timers", "policies", "groups", "require_leader", "backups", "reload")
    none: Any = dict.fromkeys((*names, "hops"))
    return AdminService(view=view, scrub=scrub, hooks=NO_HOOKS, **none)


def commands_with(outcome: CommandOutcome) -> OperatorCommands:
    """A node with a given answer of its controller, and voters that never change."""

    async def answer(*_: object) -> CommandAnswer:
        return CommandAnswer(outcome, "why")

    control: Any = SimpleNamespace(
        state=SimpleNamespace(voters={"n1": ReplicaId(1)}, name_of={1: "n1"}.get),
        request_change=answer,
        request_transfer=answer,
    )
    config: Any = SimpleNamespace(name="n1", cluster_id="c", limits=LIMITS)
    passing = iter(range(1 << 20))

    def mono_ms() -> MonoMs:
        return MonoMs(next(passing) * operator_commands.CHANGE_TIMEOUT_MS)

    none = cast("Any", None)
    replica: Any = SimpleNamespace(replica_id=1, voters=frozenset({1}))
    node = NodeState(config, replica, HOST, control, {}, mono_ms, none)
    return OperatorCommands(node, replica, HOST, control, mono_ms)


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (CommandOutcome.REFUSED, InvalidRequestError),
        (CommandOutcome.NOT_NOW, NotReadyError),
        (CommandOutcome.FAILED, NotReadyError),
        (CommandOutcome.UNKNOWN, CommitTimeoutError),
    ],
)
async def test_change_or_transfer_fails_by_the_outcome_that_the_controller_tells(
    outcome: CommandOutcome, error: type[EngineError]
) -> None:
    with pytest.raises(error, match="n1"):
        await commands_with(outcome).change_members(Change.REMOVE, "n1")
    with pytest.raises(error, match="why"):
        await commands_with(outcome).transfer("n1")


@pytest.mark.parametrize(
    ("after", "is_committed"),
    [({"n1": 1, "n2": 2}, True), ({"n1": 1, "n9": 9}, False), ({"n2": 1}, False)],
)
async def test_change_is_committed_once_the_voters_and_its_own_node_have_changed(
    after: dict[str, int], is_committed: bool
) -> None:
    commands = commands_with(CommandOutcome.OK)
    control: Any = commands._control

    async def answer(*_: object) -> CommandAnswer:
        control.state.voters = after
        return CommandAnswer(CommandOutcome.OK, "")

    control.request_change = answer
    commands._mono_ms = iter(map(MonoMs, (0, 0, 0, 1 << 30))).__next__
    with nullcontext() if is_committed else pytest.raises(CommitTimeoutError):
        await commands.change_members(Change.ADD, "n2")


async def test_replacement_whose_program_is_too_old_is_named_with_its_version() -> None:
    async def get_status(*_: object, **__: object) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(nodes=[pb.NodeStatus(role="learner", version="0.1.0")])

    peers = {"n3": ("n3:7401", SimpleNamespace(GetStatus=get_status))}
    view: Any = SimpleNamespace(peers=lambda: peers)
    replica: Any = SimpleNamespace(last_index=500_000, level=2)
    times = iter((0, 0, operator_commands.CHANGE_TIMEOUT_MS))
    none = cast("Any", None)
    commands = OperatorCommands(view, replica, HOST, none, lambda: MonoMs(next(times)))
    commands._remade.add("n3")
    with pytest.raises(
        NotReadyError, match=r"its version 0\.1\.0 does not support feature level 2"
    ):
        await commands.change_members(Change.REPLACE, "n3")


async def test_transfer_without_a_target_leaves_the_choice_to_the_controller() -> None:
    commands = commands_with(CommandOutcome.OK)
    asked: list[ReplicaId | None] = []

    async def answer(target: ReplicaId | None) -> CommandAnswer:
        asked.append(target)
        return CommandAnswer(CommandOutcome.OK, "", changed=True)

    control: Any = commands._control
    replica: Any = commands._replica
    control.request_transfer = answer
    replica.voters, replica.name_of = frozenset({1, 44}), {44: "d"}.get
    control.state.name_of = {1: "n1", 44: "000000000000002c", 45: ""}.get
    for target in ("", "n1", "d"):
        assert await commands.transfer(target)
    assert asked == [None, 1, 44]
    with pytest.raises(NotReadyError, match="x is not a voter yet"):
        await commands.transfer("x")


async def test_transfer_of_a_lone_voter_is_refused_and_not_put_off() -> None:
    with pytest.raises(InvalidRequestError, match=r"^target: there is no other voter$"):
        await commands_with(CommandOutcome.NOT_NOW).transfer("")


def test_who_leads_is_told_without_a_look_at_what_the_node_holds() -> None:
    config: Any = SimpleNamespace(name="n1", cluster_id="c", peers={"n1": "host:1"}, limits=LIMITS)
    replica: Any = SimpleNamespace(replica_id=7, role=SimpleNamespace(value="leader"), epoch=3)
    host: Any = SimpleNamespace(serves=True, engine=ENGINE)
    none = cast("Any", None)
    node = NodeState(config, replica, host, none, {}, lambda: MonoMs(0), none)
    told = node.node_leadership()
    assert (told.name, told.address, told.replica_id) == ("n1", "host:1", 7)
    assert (told.role, told.serving, told.epoch) == ("leader", True, 3)


@pytest.mark.parametrize(
    ("followed", "appointed", "told"),
    [
        ((5, 1), (5, 1), (5, "n1")),
        ((5, 1), (6, 2), (6, "n2")),  # n1 was killed, and this node has not heard of n2's fence
        ((6, None), (6, 2), (6, "n2")),
        ((7, None), (6, 2), (7, "")),  # it promised an epoch, and Raft's word of it is on its way
        ((7, 3), (6, 2), (7, "n3")),
        ((0, None), (0, None), (0, "")),
    ],
)
def test_epoch_and_leader_are_told_from_one_source(
    followed: tuple[int, int | None], appointed: tuple[int, int | None], told: tuple[int, str]
) -> None:
    names = {1: "n1", 2: "n2", 3: "n3"}
    config: Any = SimpleNamespace(name="n9", cluster_id="c", limits=LIMITS)
    replica: Any = SimpleNamespace(replica_id=9, epoch=followed[0], leader_id=followed[1])
    state = SimpleNamespace(epoch=appointed[0], leader=appointed[1], name_of=names.get)
    control: Any = SimpleNamespace(state=state, reached_controller="n2")
    none = cast("Any", None)
    node = NodeState(config, replica, HOST, control, {}, lambda: MonoMs(0), none)
    assert node.leadership() == (*told, "n2")


async def test_asked_who_leads_a_node_tells_that_of_itself_and_asks_no_other() -> None:
    leads = pb.NodeStatus(name="n1", role="leader", serving=True, epoch=3)
    view: Any = SimpleNamespace(  # it has neither a status nor peers
        cluster_id="c",
        node_leadership=lambda: leads,
        leadership=lambda: (3, "n1", "n2"),
        leader_address=lambda: None,
        hears_leader=lambda: False,
    )
    none = cast("Any", None)
    admin = admin_of(view)
    told = await admin.GetStatus(pb.GetStatusRequest(leadership=True), none)
    assert ([*told.nodes], told.leader, told.epoch) == ([leads], "n1", 3)


async def test_status_names_the_controller_that_another_node_reaches() -> None:
    def reached_by(name: str, controller: str) -> Any:
        nodes = [pb.NodeStatus(name=name)]
        answer = pb.GetStatusResponse(controller=controller, nodes=nodes)
        return name, SimpleNamespace(GetStatus=mock.AsyncMock(return_value=answer))

    view: Any = SimpleNamespace(
        cluster_id="c",
        node_status=lambda: pb.NodeStatus(name="n1"),
        leadership=lambda: (3, "n2", ""),
        leader_address=lambda: None,
        hears_leader=lambda: True,
        peers=lambda: {"n2": reached_by("n2", "n3"), "n4": reached_by("n4", "")},
    )
    told = await admin_of(view).GetStatus(pb.GetStatusRequest(), cast("Any", None))
    assert ([node.name for node in told.nodes], told.controller) == (["n1", "n2", "n4"], "n3")


async def test_digests_are_compared_only_at_an_index_that_the_asked_node_knows() -> None:
    """Without one, each peer returns a digest at the shared checkpoint that it knows itself."""
    seen = list[pb.GetVerificationRequest]()

    async def there(request: pb.GetVerificationRequest, **_: object) -> pb.GetVerificationResponse:
        seen.append(request)
        found = pb.NodeVerification(node=request.node, reachable=True, digest=request.node)
        return pb.GetVerificationResponse(nodes=[found], digest_index=9)

    peers = {name: ("host:1", SimpleNamespace(GetVerification=there)) for name in ("n2", "n3")}
    view: Any = SimpleNamespace(
        name="n1",
        peers=lambda: peers,
        shared_checkpoint=lambda *, offsets: None,
        node_checkpoint=lambda index: pb.NodeCheckpoint(digest="n1"),
    )
    scrub: Any = SimpleNamespace(last_pass=lambda: pb.NodeVerification(node="n1", reachable=True))
    none = cast("Any", None)
    admin = admin_of(view, scrub)
    all_nodes = await admin.GetVerification(pb.GetVerificationRequest(), none)
    assert [(node.node, node.digest) for node in all_nodes.nodes] == [
        *(("n1", ""), ("n2", ""), ("n3", "")),
    ]
    assert (all_nodes.digest_index, all_nodes.agreement) == (0, pb.AGREEMENT_UNKNOWN)
    differ = await admin.GetVerification(pb.GetVerificationRequest(at_index=9), none)
    assert (differ.digest_index, differ.agreement) == (9, pb.AGREEMENT_DIFFER)
    one = await admin.GetVerification(pb.GetVerificationRequest(node="n3", at_index=9), none)
    assert ([node.digest for node in one.nodes], one.HasField("agreement")) == (["n3"], False)
    assert {(each.node, each.at_index) for each in seen} == {
        *((name, index) for name in ("n2", "n3") for index in (0, 9)),
    }


@pytest.mark.parametrize("votes", [True, False])
async def test_silent_node_is_shown_and_compared_only_if_it_votes(votes: bool) -> None:
    async def there(request: pb.GetVerificationRequest, **_: object) -> pb.GetVerificationResponse:
        found = pb.NodeVerification(node=request.node, reachable=True, digest="a")
        return pb.GetVerificationResponse(nodes=[found])

    async def at(request: pb.GetCheckpointRequest, **_: object) -> pb.GetCheckpointResponse:
        del request
        found = pb.NodeCheckpoint(node="n2", reachable=True, digest="a", role="leader")
        found.log_end, found.applied_index = 900, 899
        return pb.GetCheckpointResponse(nodes=[found])

    async def silent(*_: object, **__: object) -> NoReturn:
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "refused")

    replica: Any = SimpleNamespace(
        voters={1, 2, *[3] * votes}, replica_id=1, name_of=lambda _: None
    )
    control: Any = SimpleNamespace(state=SimpleNamespace(name_of={2: "n2", 3: "n3"}.get))
    config: Any = SimpleNamespace(name="n1", cluster_id="c", limits=LIMITS)
    none = cast("Any", None)
    node = NodeState(config, replica, HOST, control, {}, lambda: MonoMs(0), none)
    gone = SimpleNamespace(GetVerification=silent, GetCheckpoint=silent)
    answers = SimpleNamespace(GetVerification=there, GetCheckpoint=at)
    view: Any = SimpleNamespace(
        name="n1",
        is_voter=node.is_voter,
        peers=lambda: {"n2": ("host:1", answers), "n3": ("host:2", gone)},
        shared_checkpoint=lambda *, offsets=True: None,
        node_checkpoint=lambda index=0: pb.NodeCheckpoint(
            node="n1", reachable=True, digest="a", role="follower", log_end=5, applied_index=5
        ),
    )
    scrub: Any = SimpleNamespace(last_pass=lambda: pb.NodeVerification(node="n1", reachable=True))
    admin = admin_of(view, scrub)
    request = pb.GetVerificationRequest(at_index=9)
    found = await admin.GetVerification(request, none)
    names = ["n1", "n2", *["n3"] * votes]
    assert [each.node for each in found.nodes] == names
    agreement = pb.AGREEMENT_UNKNOWN if votes else pb.AGREEMENT_SAME
    assert found.agreement == agreement
    shown = await admin.GetCheckpoint(pb.GetCheckpointRequest(at_index=9), none)
    assert [each.node for each in shown.nodes] == names
    lags = [each.lag_entries for each in shown.nodes]
    assert lags == [895, 1, *[0] * votes], "n1 lacks most of the leader's log"
    over_http = await NodeState.checkpoint(view, cluster=True)
    assert [each["node"] for each in over_http["nodes"]] == names
    one = await admin.GetVerification(pb.GetVerificationRequest(node="n3"), none)
    assert [(each.node, each.error) for each in one.nodes] == [("n3", "refused")]
    replica.voters = {1, 4}
    assert node.is_voter("n3"), "it may be 4, whose name is unknown"


@pytest.mark.parametrize(
    "nodes",
    [
        [("leader", 5, 100), ("candidate", 6, 900)],  # the leader was deposed
        [("leader", 6, 900), ("follower", 6, 950)],  # the follower has entries of another epoch
        [("follower", 5, 950), ("candidate", 6, 900)],
    ],
)
async def test_lags_end_with_the_log_of_the_highest_epoch(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[str, int, int]]
) -> None:
    first, *others = (
        pb.NodeCheckpoint(node=f"n{at}", reachable=True, role=role, epoch=epoch, log_end=end)
        for at, (role, epoch, end) in enumerate(nodes)
    )
    first.applied_index, others[0].applied_index = 80, 880
    monkeypatch.setattr(admin_service, "ask_all", mock.AsyncMock(return_value=others))
    shown: Any = mock.Mock(shared_checkpoint=lambda: None, node_checkpoint=lambda _: first)
    answer = await admin_service.checkpoint_answer(shown, local=False)
    assert [node.lag_entries for node in answer.nodes] == [820, 20]


async def test_connections_are_counted_at_the_ports_whose_numbers_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def measured(_: object) -> None:
        pass

    monkeypatch.setattr(BusiestTopics, "measure", measured)
    more = {"grpc": "127.0.0.1:9", "http": "127.0.0.1:0", "limits.metric_topics_max": 0}
    config = build_config(BASE, more)
    replica: Any = SimpleNamespace(tcp_port=7)
    host: Any = SimpleNamespace(engine=ENGINE, leader=None)
    none = cast("Any", None)
    node = NodeState(config, replica, host, none, {}, lambda: MonoMs(0), none)
    await node.measure()
    assert node._connections == {"grpc": 0, "replication": 0}
    node.http_port = 8  # the port is open
    await node.measure()
    assert node._connections == {"grpc": 0, "http": 0, "replication": 0}


async def test_groups_and_quotas_are_measured_while_the_lags_of_topics_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Topics(BusiestTopics):
        async def measure(self) -> None:
            pass

    async def groups(*_: object) -> list[str]:
        return ["lag"]

    async def quotas(*_: object) -> tuple[str, ...]:
        return ("quota",)

    asked, end = list[None](), asyncio.Event()

    async def late() -> dict[TopicId, int]:
        asked.append(None)
        await end.wait()
        return {TopicId(1): 9}

    monkeypatch.setattr(view, "BusiestTopics", Topics)
    monkeypatch.setattr(lag, "of_groups", groups)
    monkeypatch.setattr(quota_view, "fullest", quotas)
    monkeypatch.setattr(topic_view, "LATE_WAIT_S", 0.01)
    engine: Any = SimpleNamespace(machine=None, node_policy=None)
    clock: Any = SimpleNamespace(mono_ms=0, clock_ms=0)
    host: Any = SimpleNamespace(
        engine=engine,
        leader=object(),
        now=lambda: clock,
        totals=SimpleNamespace(unacked_topics=list),
    )
    none = cast("Any", None)
    replica: Any = SimpleNamespace(tcp_port=7)
    config = build_config(BASE, {"limits.metric_topics_max": 0})
    node = NodeState(config, replica, host, none, {}, lambda: MonoMs(0), none)
    node.late_topics = late
    for _ in range(2):
        node._lags, node._quotas = [], ()
        await node.measure()
        measured: Any = node._lags, node._quotas
        assert measured == (["lag"], ("quota",))
    assert (len(asked), node.last_late()) == (1, {})
    end.set()
    await node.measure()
    assert node.last_late() == {1: 9}

    async def no_lease() -> dict[TopicId, int]:
        raise NotReadyError("no lease")

    node.late_topics = no_lease
    clock.mono_ms = topic_view.LATE_AGE_MS_MAX
    await node.measure()
    assert node.last_late() == {1: 9}
    clock.mono_ms += 1
    await node.measure()
    assert node.last_late() == {}
    clock.mono_ms, leader = 0, host.leader
    assert node.last_late() == {1: 9}
    host.leader = None
    assert node.last_late() == {}
    await node.measure()
    host.leader = leader
    assert node.last_late() == {}, "the node did not lead meanwhile"


async def test_closed_topics_take_no_place_of_quotas_that_are_used() -> None:
    play = Play()
    for name, limit in (("closed", 0), ("used", 4)):
        scope = Scope("", play.make_topic(name).topic_id)
        policy = ScopePolicy(pending_max=limit)
        play.leader.set_policy(scope, policy, [], play.now, lambda _: None)
    play.settle()
    found = await quota_view.fullest(play.machine, 1)
    assert found == ((("used", "pending_max"), (0, 4)),)


async def test_quotas_of_all_topics_are_found_without_their_effective_policies() -> None:
    play = Play()
    for name in ("a", "ns/a", "ns/b"):
        play.make_topic(name)
    policies = {Scope("ns"): ScopePolicy(ready_max=9)}
    policies[Scope("", play.machine.topic_by_name["ns/b"].topic_id)] = ScopePolicy(ready_max=5)
    for scope, policy in policies.items():
        play.leader.set_policy(scope, policy, [], play.now, lambda _: None)
    play.settle()
    with mock.patch.object(Policies, "effective") as effective:
        found = await quota_view.fullest(play.machine, 9)
        topics = {
            name: quota_view.of_topic(play.machine, topic)
            for name, topic in play.machine.topic_by_name.items()
        }
    assert not effective.call_count
    assert sorted(found) == [(("ns/a", "ready_max"), (0, 9)), (("ns/b", "ready_max"), (0, 5))]
    assert {name: [quota.source for quota in quotas] for name, quotas in topics.items()} == {
        "a": [],
        "ns/a": ["namespace"],
        "ns/b": ["topic"],
    }


def lists_by_callers(
    call: Callable[[], Coroutine[Any, Any, Any]],
) -> tuple[list["asyncio.Task[Any]"], list[str]]:
    """Begin three lists of one caller and one of another; return them, and who gets answers."""
    lists, ended = list[asyncio.Task[Any]](), list[str]()
    for name in ("many", "many", "many", "few"):
        caller: Any = SimpleNamespace(identity=name, allows=lambda _: True)
        token = CALLER.set(caller)
        lists.append(asyncio.create_task(call()))
        lists[-1].add_done_callback(lambda _, name=name: ended.append(name))  # type: ignore[misc]
        CALLER.reset(token)
    return lists, ended


async def test_lists_of_topics_at_the_same_time_take_turns_of_the_loop_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_view, "TOPICS_AT_ONCE", 2)
    play, turns, shown = Play(), list[int](), TopicView._topic
    for number in range(8):
        play.make_topic(f"t{number}")
    engine: Any = SimpleNamespace(machine=play.machine)
    host: Any = SimpleNamespace(engine=engine, leader=None, now=lambda: play.now)
    topics = TopicView(host, cast("Any", None))

    def counted(*given: Any) -> pb.TopicStatus:
        turns[-1] += 1
        return shown(*given)

    monkeypatch.setattr(TopicView, "_topic", counted)
    lists, ended = lists_by_callers(lambda: topics.topics("", 0))
    while not all(each.done() for each in lists):
        turns.append(0)
        await asyncio.sleep(0)
    assert [each.result().count for each in lists] == [9] * 4
    assert (sum(turns), max(turns)) == (4 * 9, 2)
    assert ended[:3].count("few") == 1


async def test_lags_are_looked_up_for_no_caller() -> None:
    play, callers = Play(), list[str | None]()
    engine: Any = SimpleNamespace(machine=play.machine)
    host: Any = SimpleNamespace(engine=engine, leader=play.leader, now=lambda: play.now)
    topics = TopicView(host, cast("Any", None))

    async def late_topics() -> dict[TopicId, int]:
        callers.append(caller_name())
        return {}

    topics.late_topics = late_topics
    lists, _ = lists_by_callers(lambda: topics.topics("", 0))
    await asyncio.gather(*lists)
    assert callers == [None]


async def test_lists_of_series_at_the_same_time_take_turns_of_the_loop_portion_by_portion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(series_desk, "SERIES_AT_ONCE", 2)
    table, turns, shown = SeriesTable(), list[int](), SeriesDesk._message
    ids = [table.add(TopicId(1), b"%d" % n, SeriesSpec(every_ms=1_000), 0) for n in range(12)]
    machine: Any = SimpleNamespace(series=table, topics={1: SimpleNamespace(name="t")})
    host: Any = SimpleNamespace(require_lease=lambda: SimpleNamespace(machine=machine))
    desk = SeriesDesk(host, *(cast("Any", None) for _ in range(3)), salt=0)

    def counted(*given: Any) -> pb.Series:
        turns[-1] += 1
        return shown(*given)

    inside = list[int]()

    async def shown_topics(_: object) -> None:
        inside.append(1)
        await asyncio.sleep(0)
        inside.pop()
        assert not inside, "two filter topics at the same time"

    monkeypatch.setattr(series_desk, "_covered_topics", shown_topics)
    monkeypatch.setattr(SeriesDesk, "_message", counted)
    request = pb.ListSeriesRequest(page_size=5)
    lists, ended = lists_by_callers(lambda: desk.list(request))
    while not all(each.done() for each in lists):
        turns.append(0)
        await asyncio.sleep(0)
    for each in lists:
        assert [series.series_id for series in each.result().series] == ids[:5]
        assert each.result().more
    assert (sum(turns), max(turns)) == (4 * 5, 2)
    assert ended[:3].count("few") == 1
    for size, more in ((11, True), (12, False)):
        assert (await desk.list(pb.ListSeriesRequest(page_size=size))).more == more


def test_series_that_is_behind_or_cannot_be_planned_is_a_warning() -> None:
    table, now_ms = SeriesTable(), 1_000_000
    machine: Any = SimpleNamespace(series=table)
    host: Any = SimpleNamespace(engine=SimpleNamespace(machine=machine), serves=True)
    host.now, host.clock_report = (
        lambda: Now(clock_ms=UnixMs(now_ms), mono_ms=MonoMs(0)),
        ClockReport,
    )
    replica: Any = SimpleNamespace(role=Role.LEADER, replica_id=1, leader_id=1, silent_ms=0)
    replica.behind_ms, replica.name_of = 0, lambda _: None
    config, none = build_config(BASE, {"limits.metric_topics_max": 0}), cast("Any", None)
    node = NodeState(config, replica, host, none, {}, lambda: MonoMs(0), none)
    spec = SeriesSpec(every_ms=1_000, start_ms=1)
    late, all_ = UnixMs(now_ms - 60_000), replace(spec, misfire=Misfire.FIRE_ALL)
    table.add(TopicId(1), b"once", spec, late)
    table.add(TopicId(1), b"paused", replace(all_, paused=True), late)
    table.add(TopicId(1), b"a minute behind", all_, late)
    assert [*node._warnings()] == ["a series with misfire=fire_all is 59 s behind its times"]
    planned = np.array([now_ms - 10_000])
    table.begin_occurrences(np.array([2]), np.array([1], np.uint64), planned, planned)
    table.defer(1)
    assert [*node._warnings()] == [
        "series that wait for a leader that knows their cron expression or time zone: 1"
    ]


def test_warnings_are_what_an_operator_has_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "has_spare", lambda: False)
    replica: Any = SimpleNamespace(role=Role.FOLLOWER, replica_id=1, leader_id=1, silent_ms=0)
    replica.behind_ms, replica.name_of = None, lambda _: None
    wrong = ClockReport(2_000, 0, {ReplicaId(1): 0, ReplicaId(2): 120_000, ReplicaId(3): -1_001})
    host: Any = SimpleNamespace(engine=ENGINE, serves=False, clock_report=lambda: wrong)
    none, control = (
        cast("Any", None),
        cast("Any", SimpleNamespace(state=SimpleNamespace(name_of={2: "n2"}.get))),
    )
    config = build_config(BASE, {"limits.metric_topics_max": 0})
    node = NodeState(config, replica, host, control, {}, lambda: MonoMs(0), none)
    node.concerns.append(lambda: ["a certificate"])
    *others, not_ready = node._warnings()
    files = "its limit of open files is reached: it takes no connections"
    assert others == [
        "a certificate",
        files,
        "the cluster's clock is 2.0 s ahead of the voters' clocks, and runs at half the rate",
        "n2's clock is 120.0 s ahead",
        "0000000000000003's clock is 1.0 s behind",
    ]
    assert not_ready.startswith("not ready: has not caught up with the leader")
    replica.behind_ms = 0
    wrong = ClockReport(0, 0, {ReplicaId(2): 120_000, ReplicaId(1): 0}, 120_000)
    assert "n1's and n2's clocks differ by 120.0 s" in [*node._warnings()]
    assert not any("ahead" in each for each in node._warnings())
    host.clock_report = lambda: ClockReport(1_000, 0, {ReplicaId(2): -1_000})
    node.concerns.clear()
    monkeypatch.setattr(view, "has_spare", lambda: True)
    assert [*node._warnings()] == []


def test_log_has_a_line_when_a_clock_jumps_and_when_one_becomes_wrong_or_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    watch = ClockWatch(lambda voter: f"n{voter}")
    for error_ms, jumped_ms, second_ms in (
        (0, 0, 0),
        (0, 300_000, 0),
        *[(0, 300_000, 120_000), (0, 300_000, 119_000), (0, 300_000, 800)] * 2,
        (0, 300_000, 0),
        (5_000, 300_000, 0),
        (1_001, 300_000, 0),
        (499, 300_000, 0),
        (0, 0, 0),  # the next leadership
        (0, 1_500, -2_000),
    ):
        watch.update(ClockReport(error_ms, jumped_ms, {ReplicaId(1): 0, ReplicaId(2): second_ms}))
    assert watch.jumped_total_ms == 300_000 + 1_500
    for doubt_ms in (1_001, 600, 499):
        watch.update(ClockReport(0, 0, {ReplicaId(1): 0, ReplicaId(3): 1_001}, doubt_ms))
    watch.update(ClockReport())
    wrong, right = "a clock is wrong", "a clock is right again"
    jumped = "the cluster's clock jumped ahead"
    fields = "clock", "ahead_ms", "jumped_ms"
    *lines, doubt, no_doubt, last = caplog.records
    assert (doubt.getMessage(), vars(doubt)["clocks"]) == ("clocks are in doubt", "n1, n3")
    assert no_doubt.getMessage() == "clocks are no longer in doubt"
    assert [
        (record.getMessage(), *(vars(record).get(field) for field in fields))
        for record in (*lines, last)
    ] == [
        (jumped, None, None, 300_000),
        (wrong, "n2", 120_000, None),
        (right, "n2", 0, None),
        (wrong, "the cluster", 5_000, None),
        (right, "the cluster", 499, None),
        (jumped, None, None, 1_500),
        (wrong, "n2", -2_000, None),
        (wrong, "n3", 1_001, None),
    ]


def test_state_is_current_once_a_ready_node_has_applied_its_log() -> None:
    replica: Any = SimpleNamespace(role=Role.FOLLOWER, replica_id=1, leader_id=None, silent_ms=0)
    replica.behind_ms, replica.last_index = None, 9
    host: Any = SimpleNamespace(engine=ENGINE, serves=False, applied_index=9)
    none = cast("Any", None)
    config = build_config(BASE, {"limits.metric_topics_max": 0})
    node = NodeState(config, replica, host, none, {}, lambda: MonoMs(0), none)
    assert not node.is_current(), "a leader may have committed more"
    replica.leader_id, replica.behind_ms, replica.last_index = 1, 0, 12
    assert not node.is_current()
    replica.last_index = 20
    host.applied_index = 11
    assert not node.is_current()
    host.applied_index = 12
    assert node.is_current()
    replica.leader_id, host.applied_index = None, 13
    assert node.is_current(), "it knows no leader any more, and its state is no older"


async def test_node_is_not_ready_from_the_begin_of_its_stop() -> None:
    replica: Any = SimpleNamespace(role=Role.FOLLOWER, replica_id=1, leader_id=1, silent_ms=0)
    replica.behind_ms = 0
    host: Any = SimpleNamespace(engine=ENGINE, serves=False)
    none = cast("Any", None)
    config = build_config(BASE, {"limits.metric_topics_max": 0})
    node_view = NodeState(config, replica, host, none, {}, lambda: MonoMs(0), none)
    reasons: list[str] = []

    async def drain() -> None:
        reasons.append(why_not_ready(node_view.local()))
        raise RuntimeError("the end of this test")

    node: Any = SimpleNamespace(config=config, _drain=drain)
    node._parts = SimpleNamespace(view=node_view)
    assert why_not_ready(node_view.local()) == ""
    with pytest.raises(RuntimeError, match="the end of this test"):
        await Node.stop(node)
    assert reasons == ["is stopping"]


class Drained:
    """A node that leads, with other nodes whose status it asks for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = commands_with(CommandOutcome.OK)
        self.others = [pb.NodeStatus(name="n2", reachable=True)]
        self.transfers: list[asyncio.Future[bool]] = []

        async def answers(*_: object) -> list[pb.NodeStatus]:
            return self.others

        async def transfer(_: str) -> bool:
            self.transfers.append(asyncio.get_running_loop().create_future())
            return await self.transfers[-1]

        monkeypatch.setattr(operator_commands, "ask_all", answers)
        monkeypatch.setattr(self.node._view, "leader_name", lambda: "n1")
        monkeypatch.setattr(self.node._view, "is_voter", lambda _: True)
        monkeypatch.setattr(self.node, "transfer", transfer)

    async def begin(self, holder: str) -> "asyncio.Task[bool]":
        """Begin a drain; return when it transfers the leadership, or waits."""
        task = asyncio.create_task(self.node.drain(undo=False, holder=holder))
        await settled()
        return task


async def test_drain_of_a_holder_excludes_others_until_its_undo_or_one_without_a_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Drained(monkeypatch)
    monkeypatch.setattr(world.node._view, "leader_name", lambda: "n2")
    node = world.node
    await node.drain(undo=False, holder="a")
    await node.drain(undo=False, holder="a")  # a request whose answer was lost
    await node.drain(undo=False)
    for undo in (False, True):
        with pytest.raises(AlreadyExistsError, match="timerctl drain n1 --undo"):
            await node.drain(undo=undo, holder="b")
    await node.drain(undo=True, holder="a")
    assert not node.drained
    await node.drain(undo=False)
    with pytest.raises(AlreadyExistsError):
        await node.drain(undo=False, holder="b")  # an operator's drain is no command's
    await node.drain(undo=True)
    assert not node.drained


async def test_drain_whose_transfer_fails_leaves_the_drain_that_came_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Drained(monkeypatch)
    first, second = await world.begin(""), await world.begin("")
    world.transfers[0].set_exception(NotReadyError("no node caught up"))
    with pytest.raises(NotReadyError):
        await first
    await settled()
    world.transfers[1].set_result(True)
    assert await second
    assert world.node.drained


async def test_drain_that_its_client_cancels_leaves_the_node_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Drained(monkeypatch)
    drain = await world.begin("a")
    assert world.node.drained
    drain.cancel()
    await asyncio.wait({drain})
    assert drain.cancelled()
    assert not world.node.drained


async def test_nodes_that_are_drained_at_the_same_time_do_not_all_stay_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Drained(monkeypatch)

    async def drained_meanwhile(*_: object) -> list[pb.NodeStatus]:
        seen.append(world.node.drained)
        return [pb.NodeStatus(name="n2", reachable=True, drained=True)]

    seen: list[bool] = []
    monkeypatch.setattr(operator_commands, "ask_all", drained_meanwhile)
    with pytest.raises(InvalidRequestError, match="each other voter is drained"):
        await world.node.drain(undo=False)
    assert seen == [True]  # the others, which ask now, find this node drained
    assert not world.node.drained
