"""The search for the leader, on a clock that the test moves."""

import asyncio
import runpy
import time
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tests.waiting import until
from timerclient import AsyncTimerClient, TimerApp
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.scheduled_timers import RequestOutcome
from timerclient.streams import nodes as nodes_module
from timerclient.streams.node_channel import NodeChannel, tcp
from timerclient.streams.nodes import PATIENCE_S_MAX, RANK_MAX, RELAYED_S, RELAYED_SLOW_S, Nodes
from timerclient.streams.producer import ProducerStream, WaitingCall
from timerclient.values import lease_clock
from timerclient.values.client_settings import ClientSettings
from timerclient.values.errors import (
    Closed,
    ConnectionLost,
    LeadershipLost,
    NotLeader,
    NotReady,
    OutcomeUnknown,
    PermissionDenied,
    TokenRejected,
    Unreachable,
)
from timerclient.values.lease_clock import BOOT_CLOCK, boot_time_s


async def test_clock_of_leases_continues_while_the_machine_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.clock_gettime", {time.CLOCK_BOOTTIME: 1_000.0}.__getitem__)
    assert (boot_time_s(), BOOT_CLOCK.now_s()) == (1_000, 1_000)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda left_s, _: loop.call_at(left_s, id, 0))
    alarm: Any = BOOT_CLOCK.call_at(1_002.5, lambda: None)
    assert alarm.when() == 2.5
    alarm.cancel()
    monkeypatch.delattr("time.CLOCK_BOOTTIME")  # macOS
    assert runpy.run_path(lease_clock.__file__)["_CLOCK"] == time.CLOCK_MONOTONIC
    monkeypatch.delattr("time.CLOCK_MONOTONIC")  # Windows
    monkeypatch.delattr("time.clock_gettime")
    assert runpy.run_path(lease_clock.__file__)["boot_time_s"]() <= time.monotonic()


async def test_patience_outlasts_rounds_in_which_the_hinted_node_and_all_others_are_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    nodes = Nodes(["127.0.0.1:1"], ClientSettings(), tcp(None))
    patience_s = []
    for _ in range(20):
        nodes._note_search()
        patience_s.append(nodes._patience_s)
        for _ in ("the hinted node", "all"):
            now_s += max(nodes.settings.probe_s, nodes._patience_s)
        now_s += nodes.settings.pause_s_max
    assert patience_s == sorted(patience_s)
    assert patience_s[-1] == PATIENCE_S_MAX


async def test_call_whose_client_is_closed_says_whether_it_may_have_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for lost, silent in ((False, False), (True, False), (False, True)):
        nodes = Nodes(["127.0.0.1:1"], ClientSettings(pause_s_min=0.001, stall_s=0.01), tcp(None))
        node = nodes.node("127.0.0.1:1")
        closing = asyncio.Event()

        async def leader(
            nodes: Nodes = nodes, closing: asyncio.Event = closing, **_: bool
        ) -> NodeChannel:
            if closing.is_set():
                await nodes.close()
            return nodes.node("127.0.0.1:1")

        async def moved(
            _: NodeChannel, leader: Callable[[], Awaitable[NodeChannel]] = leader
        ) -> bool:
            await leader()
            return False

        async def answer(
            closing: asyncio.Event = closing, lost: bool = lost, silent: bool = silent
        ) -> None:
            closing.set()
            if silent:
                await asyncio.Event().wait()
            raise ConnectionLost("it broke") if lost else NotLeader("")

        monkeypatch.setattr(nodes, "leader", leader)
        monkeypatch.setattr(nodes, "_is_replaced", moved)
        with pytest.raises(Closed) as told:
            await nodes.call(lambda *_, answer=answer: answer(), within_s=60)
        assert told.value.outcome_known == (not lost and not silent)
        await node.channel.close()


def answer_with(client: AsyncTimerClient, method: str, answers: dict[str, Any]) -> None:
    """Let each node of the client answer so to a method; None: it refuses the connection."""
    for address, answer in answers.items():

        async def answered(_: object, timeout: float, answer: Any = answer) -> Any:  # noqa: ASYNC109
            assert timeout > 0
            if answer is None:
                raise ConnectionLost("refused")
            return answer

        node: Any = client.nodes().node(address)
        node.admin = SimpleNamespace(**{method: answered})


async def test_status_is_that_of_a_node_that_follows_the_cluster() -> None:
    def says(epoch: int, leader: str, *, serving: bool) -> pb.GetStatusResponse:
        node = pb.NodeStatus(name="n2", epoch=2, role="leader", serving=serving)
        return pb.GetStatusResponse(epoch=epoch, leader=leader, nodes=[node])

    waits = says(0, "", serving=False)  # for room, or it heals
    cut_off = says(1, "n1", serving=True)
    elects, follows = says(2, "", serving=False), says(2, "n2", serving=True)
    for answers, told in (
        ([waits, cut_off, follows], follows),
        ([follows, waits], follows),
        ([waits, elects, cut_off], elects),
        ([waits, None], waits),
    ):
        addresses = [f"127.0.0.1:{port}" for port in range(1, len(answers) + 1)]
        async with AsyncTimerClient(addresses) as client:
            answer_with(client, "GetStatus", dict(zip(addresses, answers, strict=True)))
            assert await client.status() == told
            assert await client.status(local=True) == answers[0]


async def test_members_are_those_that_a_node_with_a_majority_knows() -> None:
    def says(epoch: int, leader: str, **roles: str) -> pb.ListMembersResponse:
        members = [pb.Member(name=name, voter=True, role=role) for name, role in roles.items()]
        return pb.ListMembersResponse(epoch=epoch, leader=leader, members=members)

    cut_off = says(1, "n1", n1="leader", n2="unreachable", n3="unreachable")
    waits = says(1, "", n1="follower", n2="follower")
    elects = says(2, "", n2="follower", n3="follower")
    follows = says(2, "n2", n2="leader", n3="follower")
    for answers, told in (
        ([cut_off, follows], follows),
        ([follows, cut_off], follows),
        ([cut_off, elects, waits], elects),
        ([cut_off, None], cut_off),
    ):
        addresses = [f"127.0.0.1:{port}" for port in range(1, len(answers) + 1)]
        async with AsyncTimerClient(addresses) as client:
            answer_with(client, "ListMembers", dict(zip(addresses, answers, strict=True)))
            assert await client.members() == told


async def test_checkpoints_are_those_of_a_node_that_reaches_the_leader_and_most_nodes() -> None:
    def says(*roles: str) -> pb.GetCheckpointResponse:
        nodes = [pb.NodeCheckpoint(role=role, reachable=bool(role)) for role in roles]
        return pb.GetCheckpointResponse(nodes=nodes)

    cut_off, alone = says("leader", "", ""), says("follower", "", "")
    elects, follows = says("", "follower", "follower"), says("", "leader", "follower")
    for answers, told in (
        ([cut_off, follows], follows),
        ([follows, cut_off], follows),
        ([alone, elects, cut_off], elects),
        ([alone, None], alone),
    ):
        addresses = [f"127.0.0.1:{port}" for port in range(1, len(answers) + 1)]
        async with AsyncTimerClient(addresses) as client:
            answer_with(client, "GetCheckpoint", dict(zip(addresses, answers, strict=True)))
            assert await client.checkpoint() == told
            assert await client.checkpoint(local=True) == answers[0]


@pytest.mark.parametrize(
    ("named", "others", "asked", "called"),
    [
        (["n3:1"], True, ["n1:1"], ["n1:1", "n2:1", "n3:1"]),
        (["n2:1"], True, ["n1:1"], ["n1:1", "n2:1"]),
        (["n3:1"], False, [], ["n1:1", "n2:1"]),
        ([None], True, ["n1:1"], ["n1:1", "n2:1"]),
        (["", "n3:1"], True, ["n1:1", "n2:1"], ["n1:1", "n2:1", "n3:1"]),
    ],
)
async def test_call_to_any_node_asks_waiting_nodes_for_the_leader_within_its_time(
    named: list[str | None], *, others: bool, asked: list[str], called: list[str]
) -> None:
    nodes = Nodes(["n1:1", "n2:1"], ClientSettings(), tcp(None), call_others=others)
    answers, asks, calls = iter(named), list[str](), list[str]()
    for address in ("n1:1", "n2:1"):

        async def status(*_: object, address: str = address, **__: object) -> pb.GetStatusResponse:
            asks.append(address)
            leader = next(answers)
            if leader is None:
                await be_silent()
            return pb.GetStatusResponse(leader_address=leader or "")

        nodes.node(address).admin = SimpleNamespace(GetStatus=status)  # type: ignore[assignment]

    async def method(node: NodeChannel, _: float) -> str:
        calls.append(node.address)
        if node.address != "n3:1":
            raise NotReady("waits for room")
        return node.address

    within_s = 0.01 if None in named else 60
    call = nodes.anywhere(method, within_s=within_s, rank=lambda _: RANK_MAX, final=())
    if called[-1] == "n3:1":
        assert await call == "n3:1"
    else:
        with pytest.raises(Unreachable, match="n2:1: waits for room"):
            await call
    assert (asks, calls) == (asked, called)
    await nodes.close()


async def test_call_to_any_node_names_a_wait_though_the_other_nodes_deny_the_call() -> None:
    nodes = Nodes(["n1:1", "n2:1"], ClientSettings(), tcp(None))

    async def status(*_: object, **__: object) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(leader_address="n3:1")

    async def method(node: NodeChannel, _: float) -> str:
        raise NotReady("waits for room") if node.address == "n1:1" else PermissionDenied("no rule")

    nodes.node("n1:1").admin = SimpleNamespace(GetStatus=status)  # type: ignore[assignment]
    with pytest.raises(Unreachable, match="n1:1: waits for room"):
        await nodes.anywhere(method, within_s=60, rank=lambda _: RANK_MAX, final=())
    await nodes.close()


@pytest.mark.parametrize("sleeps", [False, True])
async def test_call_is_not_sent_again_once_the_cluster_may_have_forgotten_it(
    sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    real, later_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + (0 if sleeps else later_s))
    monkeypatch.setattr(nodes_module, "boot_time_s", lambda: later_s)
    nodes = Nodes(["127.0.0.1:1"], ClientSettings(pause_s_min=0.001, pause_s_max=0.001), tcp(None))
    node = nodes.node("127.0.0.1:1")
    sent = 0

    async def leader(**_: bool) -> NodeChannel:
        return node

    async def answer() -> None:
        nonlocal later_s, sent
        sent, later_s = sent + 1, later_s + 100
        if sent <= 5 + 3:
            raise NotReady("not yet") if sent <= 5 else ConnectionLost("it broke")

    monkeypatch.setattr(nodes, "leader", leader)
    with pytest.raises(OutcomeUnknown, match="within 240 s"):
        await nodes.call(lambda *_: answer(), within_s=3_600, repeat_s=240)
    assert sent == 5 + 3
    await nodes.close()


async def refuse() -> None:
    raise ConnectionLost("refused")


async def be_silent() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("fail", [refuse, be_silent])
async def test_call_that_is_sent_once_leaves_the_node_that_failed_it(
    fail: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, asked = Nodes(["a:1", "b:1"], ClientSettings(), tcp(None)), list[str]()

    async def probe_all() -> NodeChannel:
        return nodes.node("b:1" if asked else "a:1")

    async def once(node: NodeChannel, _: float) -> None:
        asked.append(node.address)
        if node.address == "a:1":
            await fail()

    monkeypatch.setattr(nodes, "_probe_all", probe_all)
    with pytest.raises(ConnectionLost if fail is refuse else OutcomeUnknown) as failed:
        await nodes.call(once, within_s=5 if fail is refuse else 0.05, repeatable=False)
    assert not failed.value.outcome_known
    await nodes.call(once, within_s=5, repeatable=False)
    assert asked == ["a:1", "b:1"]
    await nodes.close()


async def test_request_on_the_wire_of_a_client_that_connects_no_more_is_unknown() -> None:
    nodes = Nodes(["127.0.0.1:1"], ClientSettings(), tcp(None))
    producer = ProducerStream(nodes)
    await nodes.close()
    futures = [asyncio.get_running_loop().create_future() for _ in range(2)]
    for future, sent in zip(futures, (True, False), strict=True):
        call = WaitingCall(future, 1, RequestOutcome.timer, 60)
        producer.submit(b"", call)
        assert call.request is not None
        call.request.in_doubt = sent  # a first sending was not answered
    told = await asyncio.gather(*futures, return_exceptions=True)
    assert [type(each) for each in told] == [OutcomeUnknown, Closed]
    late: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    producer.submit(b"", WaitingCall(late, 1, RequestOutcome.timer, 60))
    with pytest.raises(Closed):
        await late


async def test_error_names_the_nodes_that_accept_a_connection_and_do_not_answer() -> None:
    async def frozen(*_: object, **__: object) -> pb.GetStatusResponse:
        await asyncio.Event().wait()
        raise AssertionError

    nodes = Nodes(["a:1", "b:1"], ClientSettings(probe_s=0.01), tcp(None))
    for address in ("a:1", "b:1"):
        nodes.node(address).admin = SimpleNamespace(GetStatus=frozen)  # type: ignore[assignment]
    assert await nodes._probe_all() is None
    assert str(nodes.last_error) == "a:1, b:1: no answer within 0.01 s"
    await nodes.close()


async def test_error_names_the_leader_that_can_not_be_reached() -> None:
    async def follower(*_: object, **__: object) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(leader_address="inside:1", nodes=[pb.NodeStatus()])

    async def unresolved(*_: object, **__: object) -> pb.GetStatusResponse:
        raise ConnectionLost("domain name not found")

    nodes = Nodes(["outside:1"], ClientSettings(), tcp(None))
    for address, answer in (("inside:1", unresolved), ("outside:1", follower)):
        admin = SimpleNamespace(GetStatus=answer)
        node: Any = SimpleNamespace(address=address, admin=admin)
        assert await nodes._leader_epoch_of(node) == -1
    named = "outside:1 answers, but does not lead; the leader is at inside:1: domain name not found"
    assert str(nodes.last_error) == named
    nodes.last_error = None  # another call was answered meanwhile
    nodes._followers = {"outside:1": ("inside:1", 1)}
    nodes._count_answers(2)
    assert str(nodes.last_error) == "1 of 2 nodes answers, none leads"
    await nodes.close()


async def test_node_relays_once_a_leader_is_out_of_reach_for_longer_than_a_failover() -> None:
    def says(leader: str) -> Any:
        async def answer(*_: object, **__: object) -> pb.GetStatusResponse:
            return pb.GetStatusResponse(
                epoch=7, leader_address=leader, hears_leader=True, nodes=[pb.NodeStatus()]
            )

        return answer

    async def refused(*_: object, **__: object) -> pb.GetStatusResponse:
        raise ConnectionLost("refused")

    async def silent(*_: object, **__: object) -> pb.GetStatusResponse:
        await asyncio.Event().wait()  # until it is cancelled
        raise AssertionError

    late_s = RELAYED_S, RELAYED_SLOW_S
    for leads, others, after_s in (
        (refused, True, RELAYED_S),
        (silent, True, RELAYED_SLOW_S),
        (silent, False, RELAYED_S),  # its address is never called
        (says("n3:1"), True, None),  # it led before
        (None, True, None),
    ):
        settings = ClientSettings(probe_s=0.05)
        nodes = Nodes(["n1:1", "n2:1"], settings, tcp(None), call_others=others)
        answers = {"n1:1": refused, "n2:1": says("n3:1" if leads else "")}
        if leads and others:
            answers["n3:1"] = leads
        for address, answer in answers.items():
            node: Any = nodes.node(address)
            node.admin = SimpleNamespace(GetStatus=answer)
        assert await nodes._probe_all() is None
        found = [nodes._find_relay(0.999 * each) for each in late_s] + [
            nodes._find_relay(late_s[1])
        ]
        assert [each is not None for each in found] == [
            after_s is not None and searched_s >= after_s
            for searched_s in (0.999 * late_s[0], 0.999 * late_s[1], late_s[1])
        ]
        if (relay := found[-1]) is not None:
            assert (relay.address, relay.relays, nodes._leader_epoch) == ("n2:1", True, 7)
        await nodes.close()


async def test_node_that_knows_an_older_leader_than_another_relays_nothing() -> None:
    nodes = Nodes(["n1:1", "n2:1"], ClientSettings(), tcp(None))
    nodes._followers = {"n1:1": ("n3:1", 6), "n2:1": ("n4:1", 7)}
    chosen = {relay.address for _ in range(50) if (relay := nodes._find_relay()) is not None}
    assert chosen == {"n2:1"}
    await nodes.close()


async def test_call_leaves_a_silent_relay_that_hears_the_leader_no_more() -> None:
    nodes = Nodes(["n1:1", "n2:1"], ClientSettings(stall_s=1e-6), tcp(None))
    relay, hearing, leading = nodes._node("n1:1", relays=True), {"n1:1"}, set[str]()
    nodes._leader = relay

    def says(address: str) -> Any:
        async def answer(*_: object, **__: object) -> pb.GetStatusResponse:
            hears, leads = address in hearing, address in leading
            node = pb.NodeStatus(role="leader" if leads else "follower", serving=leads)
            if leads:
                return pb.GetStatusResponse(nodes=[node])
            return pb.GetStatusResponse(leader_address="n3:1", hears_leader=hears, nodes=[node])

        return SimpleNamespace(GetStatus=answer)

    for address in ("n1:1", "n2:1"):
        for node in (nodes.node(address), nodes._node(address, relays=True)):
            node.admin = says(address)
    assert not await nodes._is_replaced(relay)
    hearing = {"n2:1"}
    assert await nodes._is_replaced(relay)
    relay = nodes._node("n2:1", relays=True)
    assert nodes._leader is relay
    hearing = set()
    assert not await nodes._is_replaced(relay)
    assert nodes._leader_probe is None, "the round has looked for another relay"
    leading = {"n2:1"}
    assert not await nodes._is_replaced(relay)
    await nodes.close()


class LostLeader:
    """A client's nodes: n1 leads and answers after `late_s`; n2 hears it while `hears`.

    The probe of n1 alone ends once `probe_ends` is set, and one of n2 once `hear_ends` is.
    """

    def __init__(self) -> None:
        self.late_s, self.hears, self.heard = 0.0, True, 0
        self.probe_ends, self.hear_ends = asyncio.Event(), asyncio.Event()
        self.probe_ends.set()
        self.hear_ends.set()
        self.nodes = Nodes(["n1:1", "n2:1"], ClientSettings(stall_s=1e-6), tcp(None))
        self.leader, self.relay = self.nodes.node("n1:1"), self.nodes._node("n2:1", relays=True)
        self.nodes._leader = self.leader
        leads, follows = SimpleNamespace(GetStatus=self.leads), SimpleNamespace(GetStatus=self.hear)
        for node, admin in ((self.leader, leads), (self.relay, follows)):
            node.admin = self.nodes.node(node.address).admin = admin  # type: ignore[assignment]

    async def leads(self, _: object, timeout: float) -> pb.GetStatusResponse:  # noqa: ASYNC109
        if timeout >= RELAYED_SLOW_S:
            await self.probe_ends.wait()
        if timeout < self.late_s:
            raise ConnectionLost("late")
        if self.late_s < 0:
            await asyncio.Event().wait()
        return pb.GetStatusResponse(nodes=[pb.NodeStatus(epoch=7, role="leader", serving=True)])

    async def hear(self, _: object, timeout: float) -> pb.GetStatusResponse:  # noqa: ASYNC109
        assert timeout == self.nodes.settings.probe_s
        self.heard += 1
        await self.hear_ends.wait()
        return pb.GetStatusResponse(epoch=7, leader_address="n1:1", hears_leader=self.hears)

    async def trial(self) -> None:
        """Wait until the probe of the leader alone has ended."""
        assert self.nodes._leader_probe is not None
        await self.nodes._leader_probe


async def test_client_leaves_a_leader_that_it_alone_loses_and_not_one_that_is_slow() -> None:
    lost = LostLeader()
    nodes, leader = lost.nodes, lost.leader
    lost.late_s = RELAYED_SLOW_S
    for _ in range(3):
        await nodes.check(leader, silent=True, free=True)
        await lost.trial()
        assert await nodes.leader() is leader
    lost.late_s = 2 * RELAYED_SLOW_S
    await nodes.check(leader, silent=True, free=True)
    assert await nodes.leader() is leader, "it has not failed the long probe yet"
    await lost.trial()
    assert await nodes.leader() is lost.relay
    await nodes.check(leader, silent=False, free=True)
    with pytest.raises(LeadershipLost, match="n1:1 fell silent and another node is used"):
        await nodes.check(leader, silent=True, free=False)
    await nodes.close()


@pytest.mark.parametrize("relayed", [False, True])
async def test_node_that_a_call_has_left_is_not_used_again_by_an_earlier_probe(
    relayed: bool,
) -> None:
    lost = LostLeader()
    nodes, used = lost.nodes, lost.relay if relayed else lost.leader
    nodes._use(used)
    if relayed:
        lost.hear_ends.clear()
        nodes._return_at = 0
        await nodes.leader()
        trial, nodes._return_at = nodes._leader_probe, 0
        await nodes.leader()
    else:
        lost.late_s = 2 * RELAYED_SLOW_S
        lost.probe_ends.clear()
        await nodes.check(used, silent=True, free=True)
        trial = nodes._leader_probe
        await nodes.check(used, silent=True, free=True)
        lost.hear_ends.clear()
        lost.heard = 0
        lost.probe_ends.set()
    assert nodes._leader_probe is trial, "there is one at a time"
    await until(lambda: lost.heard > 0)
    error = NotLeader("another leads")
    error.leader = "n3:1"
    nodes.on_failure(used, error)
    lost.hear_ends.set()
    await lost.trial()
    assert (nodes._leader, nodes._hint) == (None, "n3:1")
    await nodes.close()


async def test_relayed_client_returns_to_the_leader_and_its_calls_stay_if_the_relay_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes_module, "RETURN_S", (0, 0))
    lost = LostLeader()
    nodes, relay = lost.nodes, lost.relay
    nodes._use(relay)
    lost.late_s = RELAYED_SLOW_S
    for _ in range(2):
        assert await nodes.leader() is relay
        await lost.trial()
    lost.late_s = 0
    await nodes.check(relay, silent=False, free=True)
    await lost.trial()
    assert await nodes.leader() is lost.leader
    with pytest.raises(LeadershipLost, match="n2:1 relays, and the leader is in reach again"):
        await nodes.check(relay, silent=False, free=True)

    answers, heard = asyncio.Event(), lost.heard
    call = asyncio.ensure_future(nodes.attempt(relay, answers.wait))
    await until(lambda: lost.heard > heard + 2)
    answers.set()
    assert await call
    lost.hears, lost.late_s = False, RELAYED_SLOW_S
    with pytest.raises(LeadershipLost, match="n2:1 fell silent and another node is used"):
        await nodes.attempt(relay, asyncio.Event().wait)
    await nodes.close()


def test_client_closes_while_it_probes_the_leader_alone_also_on_a_later_event_loop() -> None:
    async def probing() -> Nodes:
        lost = LostLeader()
        lost.nodes._use(lost.relay)
        await lost.nodes.leader()
        assert lost.nodes._leader_probe is None, "there is a pause first"
        lost.nodes._return_at, lost.late_s = 0, -1
        await lost.nodes.leader()
        assert lost.nodes._return_at > asyncio.get_running_loop().time()
        return lost.nodes

    async def closed() -> None:
        nodes = await probing()
        trial = nodes._leader_probe
        await nodes.close()
        assert trial is not None
        assert trial.cancelled()

    asyncio.run(closed())
    asyncio.run(asyncio.run(probing()).close())


async def test_connections_to_relays_are_renewed_and_closed_as_all_others() -> None:
    renewed = [False]

    class Renewing:
        def __call__(self, address: str) -> grpc.aio.Channel:
            return grpc.aio.insecure_channel(address)

        def has_new_files(self) -> bool:
            return renewed.pop() if renewed else False

    nodes = Nodes(["n1:1"], ClientSettings(), Renewing())
    first = nodes._node("n1:1", relays=True)
    assert nodes._node("n1:1", relays=True) is first
    renewed.append(True)
    second = nodes._node("n1:1", relays=True)
    assert second is not first
    assert [each.is_closed for each in (first, second)] == [False, False], "streams go on"
    renewed.append(True)
    third = weakref.ref(nodes._node("n1:1", relays=True))
    renewed.append(True)
    nodes._node("n1:1", relays=True)
    assert third() is None, "it has no stream"
    assert {*nodes._outdated} == {first, second}
    await nodes.close()
    assert [each.is_closed for each in (first, second)] == [True, True]


async def test_leader_that_rejects_the_token_is_searched_again_with_the_present_one() -> None:
    nodes = Nodes(["127.0.0.1:1"], ClientSettings(), tcp(None))
    leader = nodes._leader = nodes.node("127.0.0.1:1")
    known = []
    for error in (PermissionDenied("no rule"), TokenRejected("the token has expired")):
        nodes.on_failure(leader, error)
        known.append(nodes._leader)
    assert known == [leader, None]
    await nodes.close()


def test_app_closes_the_connections_of_event_loops_that_have_ended() -> None:
    made: list[grpc.aio.Channel] = []

    def dial(address: str) -> grpc.aio.Channel:
        made.append(grpc.aio.insecure_channel(address))
        return made[-1]

    app = TimerApp("timers://127.0.0.1:1", dial=dial)

    async def connect() -> list[bool]:
        app.client.nodes().node("127.0.0.1:1")
        return [each._channel.closed() for each in made]  # type: ignore[attr-defined]

    found = [asyncio.run(connect()) for _ in range(3)]
    assert found == [[False], [True, False], [True, True, False]]
    asyncio.run(made[-1].close())
