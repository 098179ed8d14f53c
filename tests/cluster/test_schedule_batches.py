"""Single schedules over HTTP that arrive together are one request, and fail one by one."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.rpc import schedule_batches
from cluster.rpc.http_call import HttpContext, LocalCalls
from cluster.rpc.problem_details import ProblemError
from cluster.rpc.schedule_batches import BYTES_MAX, ROWS_MAX, BatchCaller, ScheduleBatches
from cluster.rpc.timer_rows import request_of, row_of
from cluster.security.caller_limits import CallerLimits
from cluster.security.identities import CallerIdentity, IdentityKind
from timerclient.proto import timer_pb2 as pb

ANYONE = BatchCaller("ipv4:10.0.0.1", None)


def context() -> HttpContext:
    return HttpContext("ipv4:10.0.0.1:7", None)


class Calls:
    """Answers requests with the ids 1, 2, 3, …; refuses those with the payload `bad`."""

    def __init__(self, reason: pb.Reason.ValueType = pb.REASON_INVALID_REQUEST) -> None:
        self.requests: list[pb.ScheduleRequest] = []
        self.contexts: list[HttpContext] = []
        self._reason, self._ids = reason, 0

    async def unary(self, method: str, request: Any, context: HttpContext) -> Any:
        assert (method, context.peer()) == ("Schedule", "ipv4:10.0.0.1:7")
        self.requests.append(request)
        self.contexts.append(context)
        await asyncio.sleep(0)
        if any(b"bad" in each.payloads for each in request.timers):
            raise ProblemError(pb.Error(reason=self._reason))
        ids = range(self._ids + 1, self._ids + 1 + rows_of(request))
        self._ids = ids.stop - 1
        raw = b"".join(each.to_bytes(15, "big") for each in ids)
        return pb.ScheduleResponse(timer_ids=raw, other_ids=raw)


def rows_of(request: pb.ScheduleRequest) -> int:
    return sum(len(each.payload_sizes) for each in request.timers)


async def scheduled(calls: Calls, *timers: dict[str, Any]) -> list[Any]:
    """Return the id, or the error, of each timer; all are scheduled in one turn."""
    batches = ScheduleBatches(cast("LocalCalls", calls))
    requests = [request_of(each.pop("topic", "t"), [row_of(each)], each) for each in timers]
    done = await asyncio.gather(
        *(batches.schedule(each, ANYONE, context) for each in requests), return_exceptions=True
    )
    for each in done:
        if isinstance(each, pb.ScheduleResponse):
            assert each.other_ids == each.timer_ids
    return [
        int.from_bytes(each.timer_ids, "big") if isinstance(each, pb.ScheduleResponse) else each
        for each in done
    ]


async def test_those_of_one_turn_are_one_request_in_their_order() -> None:
    calls = Calls()
    timers: list[dict[str, Any]] = [
        {"payload": "a", "delay": 1, "key": "k", "headers": {"h": "v"}},
        {"payload": "b", "delay": 2, "ordering_key": "o", "priority": 9},
        {"payload": "c", "due_ms": 10**12},
        {"topic": "other", "delay": 0},
        {"key": "k", "on_conflict": "keep", "delay": 0},
    ]
    assert await scheduled(calls, *timers) == [1, 2, 3, 4, 5]
    first, second, third = calls.requests
    assert [rows_of(each) for each in calls.requests] == [3, 1, 1]
    assert [[*each.delay_ms, *each.due_ms] for each in first.timers] == [[1_000, 2_000], [10**12]]
    assert [each.payloads for each in first.timers] == [b"ab", b"c"]
    assert ([*first.timers[0].ordering_key_sizes], [*first.timers[0].priorities]) == (
        [0, 1],
        [4, 9],
    )
    assert ([*first.timers[0].key_sizes], second.timers[0].topic) == ([1, 0], "other")
    assert third.on_conflict == pb.ON_CONFLICT_KEEP


@pytest.mark.parametrize("reason", [pb.REASON_INVALID_REQUEST, pb.REASON_QUOTA_REACHED])
async def test_a_refused_row_refuses_no_other(reason: pb.Reason.ValueType) -> None:
    calls = Calls(reason)
    found = await scheduled(calls, {"payload": "a"}, {"payload": "bad"}, {"payload": "c"})
    assert found[::2] == [1, 2]
    assert isinstance(found[1], ProblemError)
    assert [rows_of(each) for each in calls.requests] == [3, 1, 1, 1]
    assert len({*map(id, calls.contexts)}) == 4  # a context has the error of one call


async def test_an_unknown_outcome_is_that_of_all_and_nothing_is_sent_again() -> None:
    calls = Calls(pb.REASON_COMMIT_TIMEOUT)
    found = await scheduled(calls, {"payload": "a"}, {"payload": "bad"})
    assert [each.error.reason for each in found] == [pb.REASON_COMMIT_TIMEOUT] * 2
    assert len(calls.requests) == 1


@pytest.mark.parametrize("refused", [False, True])
async def test_without_an_answer_in_time_each_request_ends(
    monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    class Slow(Calls):
        async def unary(self, method: str, request: Any, context: HttpContext) -> Any:
            await asyncio.sleep(0.06 if refused else 60)  # for each attempt
            return await super().unary(method, request, context)

    monkeypatch.setattr(schedule_batches, "CHANGE_S", 0.1)
    calls = Slow()
    found = await scheduled(calls, {"payload": "a"}, {"payload": "bad"})
    assert [type(each) for each in found] == [TimeoutError] * 2
    assert len(calls.requests) == refused


async def test_a_bug_in_the_handler_ends_each_request_with_its_error() -> None:
    class Broken(Calls):
        async def unary(self, method: str, request: Any, context: HttpContext) -> Any:
            raise KeyError("a bug")

    found = await scheduled(Broken(), {"payload": "a"}, {"payload": "b"})
    assert [type(each) for each in found] == [KeyError] * 2


async def test_a_request_has_a_limit_of_rows_and_bytes() -> None:
    calls = Calls()
    assert len(await scheduled(calls, *({"delay": 0} for _ in range(ROWS_MAX + 1)))) == ROWS_MAX + 1
    assert [rows_of(each) for each in calls.requests] == [ROWS_MAX, 1]
    calls = Calls()
    await scheduled(calls, {"payload": "x" * BYTES_MAX}, {"delay": 0}, {"delay": 0})
    assert [rows_of(each) for each in calls.requests] == [1, 2]


async def test_a_client_that_has_gone_holds_up_no_other() -> None:
    calls = Calls()
    batches = ScheduleBatches(cast("LocalCalls", calls))
    requests = [request_of("t", [row_of({"payload": ""})], {}) for _ in range(2)]
    gone, other = (
        asyncio.create_task(batches.schedule(each, ANYONE, context)) for each in requests
    )
    await asyncio.sleep(0)
    gone.cancel()
    assert (await other).timer_ids == (2).to_bytes(15, "big")
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_timers_of_two_identities_are_never_one_request() -> None:
    calls = Calls()
    batches = ScheduleBatches(cast("LocalCalls", calls))
    callers = [
        BatchCaller("ipv4:10.0.0.1", CallerIdentity(IdentityKind.CLIENT, name)) for name in "aab"
    ]
    requests = [request_of("t", [row_of({"payload": ""})], {}) for _ in callers]
    work = [batches.schedule(*each, context) for each in zip(requests, callers, strict=True)]
    await asyncio.gather(*work)
    assert [rows_of(each) for each in calls.requests] == [2, 1]


def test_timers_of_an_identity_with_limits_stay_alone() -> None:
    limited, free = (CallerIdentity(IdentityKind.CLIENT, name) for name in "ab")
    limits = {limited: CallerLimits(requests=5), free: CallerLimits()}
    guard: Any = SimpleNamespace(limits=limits.get)
    calls = LocalCalls((), guard)
    assert [calls.is_unlimited(each) for each in (limited, free, None)] == [False, True, False]
    assert LocalCalls((), None).is_unlimited(None)
