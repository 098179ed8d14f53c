"""Changes that are done in part say so: nothing is told to be without effect that had one."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.api import timer_changes
from cluster.api.timer_changes import TimerChanges
from cluster.api.timer_queries import TimerQueries
from tests.cluster.hosted import FAR, Hosted
from tests.waiting import settled
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import Ids
from timer.entries.policies import Scope, ScopePolicy
from timer.leader.intake.admission import WantedTimes
from timer.leader.leader import RESCHEDULE_ROWS_MAX
from timer.model import timer_id
from timer.model.timer_errors import (
    CommitTimeoutError,
    InvalidRequestError,
    LeadershipLostError,
    NotLeaderError,
    NotReadyError,
    OverloadedError,
)
from timer.model.units import TopicId
from timerclient.proto import timer_pb2 as pb

SALT = 5
N = 3 * RESCHEDULE_ROWS_MAX
"""Timers of three entries."""
LATER = FAR + 10**8
Asked = pb.CancelRequest | pb.RescheduleRequest


class Caller:
    """What a client asks of the service, with a deadline."""

    def __init__(self) -> None:
        self.host = Hosted()
        host: Any = self.host
        limits: dict[str, Any] = {"salt": SALT, "key_bytes_max": 100}
        queries = TimerQueries(host, **limits)
        self._changes = TimerChanges(host, queries, queries, **limits)

    async def __call__(self, request: Asked, within_s: float = 60.0) -> Any:
        context: Any = SimpleNamespace(time_remaining=lambda: within_s)
        if isinstance(request, pb.CancelRequest):
            return await self._changes.cancel(request, context)
        return await self._changes.reschedule(request, context)


@pytest.fixture
async def call() -> Caller:
    caller = Caller()
    caller.host.fill(N)
    return caller


def ids(*numbers: int) -> pb.RescheduleRequest:
    """Ask that these of the first N timers fire LATER."""
    at = np.array(numbers)
    raw = timer_id.encode(FAR + at, (1 + at).astype(np.uint64), SALT)
    return pb.RescheduleRequest(timer_ids=raw, due_ms=[LATER])


def entries_max(call: Caller, entries: int) -> None:
    call.host.leader._moves[Ids]._most = entries * RESCHEDULE_ROWS_MAX


def moved(call: Caller) -> set[int]:
    return {number for number, due in call.host.pending().items() if due == LATER}


async def test_what_did_not_fit_of_a_reschedule_is_left_and_moved_once_when_asked_again(
    call: Caller,
) -> None:
    entries_max(call, 2)
    answer = await call(ids(*range(N)))
    results = [*answer.results]
    left = [at for at in range(N) if results[at] == pb.RESCHEDULE_RESULT_LEFT]
    assert left == [*range(2 * RESCHEDULE_ROWS_MAX, N)]
    assert results.count(pb.RESCHEDULE_RESULT_RESCHEDULED) == answer.rescheduled == N - len(left)
    again = await call(ids(*left))
    assert [*again.results] == [pb.RESCHEDULE_RESULT_RESCHEDULED] * len(left)
    assert moved(call) == {*range(N)}
    assert call.host.engine.machine.counts.scheduled == 2 * N


async def test_reschedule_of_which_nothing_was_taken_certainly_had_no_effect(
    call: Caller,
) -> None:
    entries_max(call, 0)
    with pytest.raises(OverloadedError):
        await call(ids(*range(N)))
    assert not moved(call)


async def test_reschedule_that_a_deposed_log_refused_in_part_is_left_in_part(call: Caller) -> None:
    taken = iter([None, NotLeaderError("n2"), NotLeaderError("n2")])
    call.host.refuse = lambda kind: next(taken) if kind is EntryKind.RESCHEDULE else None
    answer = await call(ids(*range(N)))
    assert answer.rescheduled == RESCHEDULE_ROWS_MAX
    assert [*answer.results].count(pb.RESCHEDULE_RESULT_LEFT) == N - RESCHEDULE_ROWS_MAX


async def test_reschedule_in_flight_when_the_leader_is_lost_has_an_unknown_outcome(
    call: Caller,
) -> None:
    entries_max(call, 2)  # the third is refused, and that certainly
    call.host.holds = True
    asked = asyncio.create_task(call(ids(*range(N))))
    await settled()
    assert len(call.host.leader._in_flight) == 2
    call.host.leader.close(NotLeaderError(None))
    with pytest.raises(LeadershipLostError):
        await asked


# ---- by filter


def everything(kind: str) -> Asked:
    what = pb.TimerFilter(topic="t")
    if kind == "cancel":
        return pb.CancelRequest(filter=what)
    return pb.RescheduleRequest(filter=what, due_ms=[LATER])


def changed(call: Caller) -> set[int]:
    """Which of the first N timers are no more as they were."""
    pending = call.host.pending()
    return {number for number in range(N) if pending.get(number) != FAR + number}


async def all_pages(call: Caller, request: Asked) -> int:
    name = "cancelled" if isinstance(request, pb.CancelRequest) else "rescheduled"
    count = 0
    while True:
        answer = await call(request)
        count += int(getattr(answer, name))
        request.page_token = answer.next_page_token
        if not answer.next_page_token:
            return count


@pytest.mark.parametrize("kind", ["cancel", "reschedule"])
async def test_first_answer_by_filter_fixes_which_timers_these_are_and_changes_none(
    call: Caller, kind: str
) -> None:
    request = everything(kind)
    answer = await call(request)
    assert answer.next_page_token
    assert not changed(call)
    call.host.fill(10, first=N)
    request.page_token = answer.next_page_token
    assert await all_pages(call, request) == N
    assert changed(call) == {*range(N)}
    late = call.host.pending()
    assert all(late[number] == FAR + number for number in range(N, N + 10))


@pytest.mark.parametrize("kind", ["cancel", "reschedule"])
async def test_page_whose_answer_was_lost_is_asked_for_again_and_changes_none_twice(
    call: Caller, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_changes, "FILTER_PAGE", 40)
    request = everything(kind)
    request.page_token = (await call(request)).next_page_token
    await call(request)  # nobody hears the answer
    call.host.fill(10, first=N)
    assert await all_pages(call, request) == N - 40
    assert changed(call) == {*range(N)}
    machine = call.host.engine.machine
    assert (machine.counts.cancelled, machine.next_seq) == (N, N + 11 + N * (kind != "cancel"))


async def test_page_that_is_refused_in_part_is_listed_again(
    call: Caller,
) -> None:
    entries_max(call, 2)
    assert await all_pages(call, everything("reschedule")) == N
    assert moved(call) == {*range(N)}
    assert call.host.engine.machine.counts.scheduled == 2 * N


@pytest.mark.parametrize("kind", ["cancel", "reschedule"])
async def test_page_that_commits_too_late_has_an_unknown_outcome_and_its_token_goes_on(
    call: Caller, kind: str
) -> None:
    request = everything(kind)
    request.page_token = (await call(request)).next_page_token
    call.host.holds = True
    with pytest.raises(CommitTimeoutError):
        await call(request, 0.01)
    call.host.holds = False
    assert await all_pages(call, request) <= N  # what the first one did is not in it
    assert changed(call) == {*range(N)}
    assert call.host.engine.machine.counts.cancelled == N


async def test_reschedule_by_id_that_a_policy_overtakes_is_refused_not_decided_without_it(
    call: Caller,
) -> None:
    at = np.arange(N)
    targets, when = (
        Ids(FAR + at, (1 + at).astype(np.uint64)),
        WantedTimes("due_ms", np.array([LATER])),
    )
    moving = asyncio.create_task(call._changes._move(targets, None, when))
    scope, said, now = Scope("", TopicId(1)), ScopePolicy(fixed_delay_ms=5), call.host.now()
    alter = partial(call.host.leader.set_policy, scope, said, (), now, lambda _: None)
    asyncio.get_running_loop().call_soon(alter)  # before any entry is appended
    with pytest.raises(NotReadyError, match="a policy changed meanwhile; retry"):
        await moving
    assert [*(await call(ids(0))).results] == [pb.RESCHEDULE_RESULT_RESCHEDULED]
    assert moved(call) == set()
    assert call.host.pending()[0] == call.host.now().clock_ms + 5


async def test_reschedule_that_a_policy_refuses_changes_nothing(call: Caller) -> None:
    scope = Scope("", TopicId(1))
    call.host.leader.set_policy(
        scope, ScopePolicy(delay_ms_max=1), (), call.host.now(), lambda _: None
    )
    call.host.step()
    where = pb.RescheduleRequest(filter=pb.TimerFilter(topic="t"), due_ms=[LATER])
    for request in (ids(*range(N)), where):
        with pytest.raises(InvalidRequestError, match="delay_ms_max of the topic"):
            await call(request)
    assert moved(call) == set()
