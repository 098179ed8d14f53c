"""New timers that arrive one by one over HTTP: those of one turn of the event loop are one request.

    requests --same topic, on_conflict and caller--> one ScheduleRequest --> answers, row by row
                                                              \\--refused for a row--> each alone

A request costs the leader and a node that sends it on much more than a row does. A request with an
id stays alone: its id is that of the whole request. So does a request of a caller with limits: they
count requests.
"""

import asyncio
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cluster.rpc.http_call import HttpContext, LocalCalls
from cluster.rpc.http_routes import CHANGE_S
from cluster.rpc.problem_details import ProblemError
from cluster.rpc.timer_rows import TimerRow, request_of
from cluster.security.identities import CallerIdentity
from timer.model import timer_id
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.rows import PRIORITY_DEFAULT, Way

ROWS_MAX: Final = 500
"""Timers in one request."""
BYTES_MAX: Final = 1 << 20
"""Bytes of the messages in one request, about."""
ALONE: Final = frozenset({pb.REASON_INVALID_REQUEST, pb.REASON_QUOTA_REACHED})
"""Reasons of a refusal that may concern one row: then each request is sent alone."""
_WAYS: Final[tuple[Way, ...]] = ("delay_ms", "due_ms", "delay_level")


class BatchCaller(NamedTuple):
    """The caller of a request."""

    address: str
    """Without its port."""
    identity: CallerIdentity | None
    """None: there is no TLS."""


class _Key(NamedTuple):
    """Requests with the same key may be one."""

    topic: str
    on_conflict: int
    caller: BatchCaller


@dataclass(eq=False, slots=True)
class _Batch:
    """The requests of one turn, with a future for each answer."""

    context: HttpContext
    """Of the first one."""
    requests: list[pb.ScheduleRequest] = field(default_factory=list)
    answers: list[asyncio.Future[pb.ScheduleResponse]] = field(default_factory=list)
    bytes: int = 0


class ScheduleBatches:
    """Gathers single requests; see the module."""

    def __init__(self, calls: LocalCalls) -> None:
        self._calls = calls
        self._open: dict[_Key, _Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def schedule(
        self, request: pb.ScheduleRequest, caller: BatchCaller, context: Callable[[], HttpContext]
    ) -> pb.ScheduleResponse:
        """Return the answer to a request with one row and no id.

        `context`: returns the context of a call for the caller.

        Raises:
            ProblemError: it was refused.
            TimeoutError: there was no answer within CHANGE_S.
        """
        loop = asyncio.get_running_loop()
        key = _Key(request.timers[0].topic, request.on_conflict, caller)
        batch = self._open.get(key)
        if batch is None or len(batch.requests) >= ROWS_MAX or batch.bytes >= BYTES_MAX:
            batch = self._open[key] = _Batch(context())
            loop.call_soon(self._begin, key, batch)
        answer: asyncio.Future[pb.ScheduleResponse] = loop.create_future()
        batch.requests.append(request)
        batch.answers.append(answer)
        batch.bytes += request.ByteSize()
        return await answer

    def _begin(self, key: _Key, batch: _Batch) -> None:
        if self._open.get(key) is batch:
            del self._open[key]
        task = asyncio.create_task(self._send(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, batch: _Batch) -> None:
        try:
            async with asyncio.timeout(CHANGE_S):  # one limit, also if each is sent again alone
                await self._answer(batch)
        except TimeoutError:
            _fail(batch, TimeoutError)
        finally:
            for answer in batch.answers:  # of the end of the node
                answer.cancel()

    async def _answer(self, batch: _Batch) -> None:
        try:
            await self._send_together(batch)
        except ProblemError as refused:
            if len(batch.requests) > 1 and refused.error.reason in ALONE:
                await self._send_alone(batch)
            else:
                _fail(batch, functools.partial(ProblemError, refused.error))
        except Exception as error:  # noqa: BLE001 - a bug; one request alone would end with it, too
            bug = error
            _fail(batch, lambda: bug)

    async def _send_together(self, batch: _Batch) -> None:
        several = len(batch.requests) > 1
        request = together(batch.requests) if several else batch.requests[0]
        answer = await self._calls.unary("Schedule", request, batch.context)
        parts = parts_of(answer, len(batch.requests)) if several else [answer]
        for waiting, part in zip(batch.answers, parts, strict=True):
            if not waiting.done():
                waiting.set_result(part)

    async def _send_alone(self, batch: _Batch) -> None:
        each = zip(batch.requests, batch.answers, strict=True)
        alone = [_Batch(copy.copy(batch.context), [request], [answer]) for request, answer in each]
        await asyncio.gather(*map(self._answer, alone))


def _fail(batch: _Batch, error: Callable[[], Exception]) -> None:
    """End each request that waits with an error of its own."""
    for answer in batch.answers:
        if not answer.done():
            answer.set_exception(error())


def together(requests: list[pb.ScheduleRequest]) -> pb.ScheduleRequest:
    """Return one request with the rows of many, in their order. Each has one row."""
    first = requests[0]
    made = request_of(first.timers[0].topic, [*map(_row, requests)], {})
    made.on_conflict = first.on_conflict
    return made


def _row(request: pb.ScheduleRequest) -> TimerRow:
    [timers] = request.timers
    way = next(each for each in _WAYS if getattr(timers, each))
    value = getattr(timers, way)[0]
    priority = timers.priorities[0] if timers.priorities else PRIORITY_DEFAULT
    return TimerRow(
        timers.payloads,
        way,
        value,
        timers.keys,
        timers.headers,
        timers.ordering_keys,
        priority,
    )


def parts_of(answer: pb.ScheduleResponse, rows: int) -> Iterator[pb.ScheduleResponse]:
    """Yield the answer to each row."""
    made, others = answer.timer_ids, answer.other_ids  # each look at a field of bytes copies all
    for at in range(rows):
        span = slice(at * timer_id.SIZE, (at + 1) * timer_id.SIZE)
        yield pb.ScheduleResponse(
            timer_ids=made[span],
            results=answer.results[at : at + 1],
            other_ids=others[span],
        )
