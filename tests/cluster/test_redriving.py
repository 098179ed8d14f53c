"""A redrive beside what else becomes of dead letters: it says how many went back, no more."""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.api import group_admin
from cluster.api.group_admin import GroupDesk
from cluster.rpc.rpc_caller import CALLER, Caller
from cluster.security.access_rules import parse_rules
from cluster.security.identities import CallerIdentity, IdentityKind
from cluster.security.method_rules import METHOD_RULES
from tests.cluster.hosted import Hosted
from tests.timer.machines import START_MS, catch_up, part_of
from timer.entries.payloads import Move, Op
from timer.leader.groups import dead_letters
from timer.leader.groups.lease_table import ConsumerStream
from timer.model.columns import Binary, encode_headers
from timer.model.timer_errors import (
    EngineError,
    InvalidRequestError,
    LeadershipLostError,
    TopicDeletedError,
)
from timer.model.units import MonoMs, Now, UnixMs
from timerclient.proto import timer_pb2 as pb

LETTERS = 5
DEAD = "t.g.dead"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed out comes at once, unless the machine is away."""
    monkeypatch.setattr(group_admin, "REDRIVE_WAIT_S", 60.0)


class Handing(Hosted):
    """A host with dead letters of "t" in topic 2, which it hands out."""

    waited_ms = 0

    def __init__(self) -> None:
        super().__init__()
        self.behind: Callable[[], object] = lambda: None
        """Called after a delivery, before its receiver continues."""
        self.log.topic(DEAD)
        self.log.create_group(1, "g")
        self.log.create_group(2, dead_letters.GROUP)
        self.log.fire(START_MS)
        headers = Binary.of(
            [encode_headers({dead_letters.TOPIC: "t", dead_letters.FROM_GROUP: "g"})]
        )
        for at in range(LETTERS):  # each is a block of its own, which may leave memory
            part = part_of([(2, START_MS, b"%d" % at)])
            self.log.schedule(replace(part, headers=headers))
        catch_up(self.engine, self.log)

    def now(self) -> Now:
        return Now(MonoMs(self.waited_ms), UnixMs(START_MS + self.waited_ms))

    def step(self) -> None:
        for _ in range(2):  # the first one reserves offsets
            for delivery in self.leader.deliver(self.now()):
                delivery.lease.consumer.sink(delivery)
                self.behind()
                catch_up(self.engine, self.log)
            super().step()


def test_letter_that_dies_over_and_over_tells_of_its_newest_deaths_alone() -> None:
    headers = {"mine": "kept"}
    for death in range(3 * dead_letters.DEATHS_MAX):
        headers = dead_letters._with_older_deaths(headers) | {dead_letters.TOPIC: f"t{death}"}
    newest = 3 * dead_letters.DEATHS_MAX - 1
    assert headers == {"mine": "kept"} | {
        dead_letters.PRIOR * deaths + dead_letters.TOPIC: f"t{newest - deaths}"
        for deaths in range(dead_letters.DEATHS_MAX)
    }
    assert dead_letters._without_death(headers)[dead_letters.TOPIC] == f"t{newest - 1}"


async def redriven(host: Handing) -> tuple[int, int]:
    any_host: Any = host
    desk = GroupDesk(any_host, any_host, any_host, 100)
    answer = await desk.redrive(DEAD, 0)
    return answer.redriven, answer.left


async def test_redrive_sends_back_what_is_there() -> None:
    host = Handing()
    assert await redriven(host) == (LETTERS, 0)
    assert host.engine.machine.topic_by_name["t"].queue.end == LETTERS


async def letters(host: Handing, *offsets: int) -> pb.RedriveLettersResponse:
    any_host: Any = host
    return await GroupDesk(any_host, any_host, any_host, 100).redrive_letters(DEAD, offsets)


async def test_chosen_letters_go_back_alone_though_none_was_ever_reserved() -> None:
    host = Handing()
    machine, group = host.engine.machine, host.engine.machine.topic_by_name[DEAD].groups
    assert (await letters(host, 3, 1, 3)).redriven == 2
    assert machine.topic_by_name["t"].queue.end == 2
    assert group[dead_letters.GROUP].undelivered_from == 4
    assert (await letters(host, 1, 2)).redriven == 1, "the first one is gone already"
    before = machine.applied_index
    assert await letters(host, 1) == pb.RedriveLettersResponse()
    assert machine.applied_index == before, "no entry tells of a letter that is gone"
    assert await redriven(host) == (1, 1), "the other one is beyond the reserved offsets"
    for wrong, text in (
        ((), "offsets = '0 of them': must be 1 to 256"),
        ((5,), "must be below 5, the end"),
    ):
        with pytest.raises(InvalidRequestError, match=text):
            await letters(host, *wrong)


async def test_chosen_letter_that_a_consumer_has_stays() -> None:
    host, had = Handing(), list[Any]()
    group = host.engine.machine.topic_by_name[DEAD].groups[dead_letters.GROUP]
    consumer = ConsumerStream("c", 30_000, had.append, single_lease=True)
    host.leader.groups.join(group, consumer)
    host.leader.groups.credit(group, consumer, 2)
    host.step()
    [delivery] = had
    assert delivery.lease.offsets.tolist() == [0, 1]
    answer = await letters(host, 1, 2, 3)
    assert (answer.redriven, answer.leased, answer.homeless) == (2, 1, 0)


async def test_chosen_letters_of_more_than_a_megabyte_take_several_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_admin, "DELIVERY_BYTES", 1)
    host = Handing()
    answer = await letters(host, 0, 2, 4)
    assert (answer.redriven, answer.next_offset) == (1, 2)
    assert (await letters(host, 4)).next_offset == 0


async def test_redrive_moves_letters_only_to_topics_that_its_caller_may_produce_to() -> None:
    host: Any = Handing()
    text = '[[rule]]\nwho = ["client/a"]\nmay = ["manage"]\n'
    text += '[[rule]]\nwho = ["client/a"]\nmay = ["produce"]\ntopics = ["%s"]\n'
    method = "/timer.v1.AdminService/Redrive"
    rules = [parse_rules(text % DEAD)]
    identity = CallerIdentity(IdentityKind.CLIENT, "a")
    unused: Any = None
    caller = Caller(identity, method, METHOD_RULES[method], lambda: rules[-1], "", unused)
    token = CALLER.set(caller)
    try:
        answer = await GroupDesk(host, host, host, 100).redrive(DEAD, 0)
        assert (answer.redriven, answer.left, answer.homeless) == (0, LETTERS, LETTERS)
        assert host.engine.machine.topic_by_name["t"].queue.end == 0
        rules.append(parse_rules(text % "t"))
        host = Handing()
        assert await redriven(host) == (LETTERS, 0)
    finally:
        CALLER.reset(token)


async def test_redrive_counts_no_failure_of_the_letters_that_stay() -> None:
    host = Handing()
    group = host.engine.machine.topic_by_name[DEAD].groups[dead_letters.GROUP]
    host.log.delete_topic(1)
    catch_up(host.engine, host.log)
    for _ in range(2):
        assert await redriven(host) == (0, LETTERS)
        every = group.first_unacked(LETTERS, LETTERS)
        assert host.leader.groups.states(group, every).leased.all(), "the next call gets others"
        host.waited_ms += group.settings.lease_ms
        host.step()
        host.step()
        assert host.leader.groups.states(group, every).free.all()
        assert not group.failures(every).any()
        assert (group.attempts(every) == 1).all()


async def test_redrive_of_what_expires_meanwhile_counts_what_went_back() -> None:
    host = Handing()
    host.behind = lambda: host.log.op(Op.EXPIRE_BELOW, 2, 0, [3])
    assert await redriven(host) == (LETTERS - 3, 0)
    assert host.engine.machine.topic_by_name["t"].queue.end == LETTERS - 3


async def test_redrive_of_which_some_fails_says_how_many_went_back_and_why_no_more() -> None:
    host = Handing()
    real = host.leader.groups.redrive

    def half(
        group: Any, offsets: Any, done: Callable[[object], None], allows: Any = bool
    ) -> list[Move]:
        moves = real(group, offsets, done, allows)
        done(LeadershipLostError("the leader was deposed"))  # an op for another topic
        return [*moves, replace(moves[0], offsets=moves[0].offsets[:0])]

    host.leader.groups.redrive = half  # type: ignore[method-assign]
    desk = GroupDesk(host, host, host, 100)  # type: ignore[arg-type]
    answer = await desk.redrive(DEAD, 0)
    assert (answer.redriven, answer.left) == (LETTERS, 0)
    assert (answer.error.reason, answer.error.outcome_known) == (pb.REASON_LEADERSHIP_LOST, False)


async def test_redrive_that_meets_a_bug_of_ours_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("no such header")

    host = Handing()
    with monkeypatch.context() as patch:
        patch.setattr(dead_letters, "redrive", broken)
        with pytest.raises(LookupError, match="no such header"):
            await redriven(host)
    assert await redriven(host) == (LETTERS, 0), "the leader goes on, and nothing stayed leased"


async def test_redrive_whose_caller_is_gone_before_its_answer_is_over_in_silence() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))

    async def give_up() -> None:
        host = Handing()
        call = asyncio.ensure_future(redriven(host))
        host.behind = lambda: (call.cancel(), host.log.delete_topic(2))
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0)  # the step that was asked for as the call ended

    await give_up()
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("turns", [0, 1, 2])
@pytest.mark.parametrize("lost", [False, True])
async def test_end_of_a_redrive_whose_caller_is_gone_is_told_to_the_audit_log(
    *, turns: int, lost: bool
) -> None:
    """`turns` of the loop lie between the delivery of the letters and the end of the call."""
    host, told, delivered = Handing(), list[tuple[int, object]](), asyncio.Event()

    def hold() -> None:
        host.holds = True
        delivered.set()

    host.behind = hold
    caller: Any = SimpleNamespace(
        note=lambda _, index: told.append((index, "noted")),
        on_late=lambda _, error: told.append((told[-1][0], error)),
        may_produce=lambda _: True,
    )
    token = CALLER.set(caller)
    call = asyncio.ensure_future(redriven(host))
    CALLER.reset(token)
    async with asyncio.timeout(5.0):
        await delivered.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert told == []
    if lost:
        host.leader.close(LeadershipLostError("deposed"))
        [_, (_, error)] = told
        assert isinstance(error, LeadershipLostError)
    else:
        host.holds = False
        host.step()
        [noted, late] = told
        assert noted[0] > 0
        assert late == (noted[0], None)


async def test_redrive_of_a_topic_that_is_deleted_meanwhile_says_so() -> None:
    host = Handing()
    host.behind = lambda: host.log.delete_topic(2)
    with pytest.raises(EngineError) as raised:
        await redriven(host)
    assert isinstance(raised.value, TopicDeletedError)
