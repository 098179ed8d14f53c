"""Cancels and reschedules: by id, by key, by filter.

Ids and keys go into entries of a bounded size, all of a request at once. A filter is worked off
page by page: what a page lists is changed by id, so that each timer is told the truth, and
everybody else has a turn between two pages. It goes on while there is time, then says where it was.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from cluster import wire, wire_timers
from cluster.host import Host
from cluster.looking_in import LookingIn
from cluster.rpc import COMMIT_TIMEOUT_S, Context, within
from timer.columns import I64, taken
from timer.errors import TimerError
from timer.leader import RESCHEDULE_ROWS_MAX, Leader, resolve_due
from timer.machine import CANCELLED, LEFT, NOT_FOUND, RESCHEDULED, CancelApplied, RescheduleApplied
from timer.payloads import Ids, Keys, Targets
from timerclient.proto import timer_pb2 as pb

FILTER_PAGE: Final = 1_000
"""Timers of a filter that are changed before the next are looked for."""

_CANCEL_RESULTS: Final = (
    pb.CANCEL_RESULT_UNSPECIFIED,
    pb.CANCELLED,
    pb.ALREADY_CANCELLED,
    pb.ALREADY_FIRED,
    pb.TIMER_NOT_FOUND,
)
"""timer.machine's results to CancelResult."""
_RESCHEDULE_RESULTS: Final = (
    pb.RESCHEDULE_RESULT_UNSPECIFIED,
    pb.RESCHEDULED,
    pb.RESCHEDULE_ALREADY_CANCELLED,
    pb.RESCHEDULE_ALREADY_FIRED,
    pb.RESCHEDULE_NOT_FOUND,
)
_Results = npt.NDArray[np.uint8]


class Changes:
    """See the module."""

    def __init__(
        self, host: Host, looking_in: LookingIn, *, salt: int, key_bytes_max: int, delay_ms_max: int
    ) -> None:
        self._host = host
        self._looking_in = looking_in
        self._salt = salt
        self._key_bytes_max = key_bytes_max
        self._delay_ms_max = delay_ms_max

    # ---- cancelling

    async def cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Cancel timers; the log's order decides what each is told.

        Raises:
            InvalidRequest: it names field, value and limit.
            NotFound: there is no such topic.
        """
        leader = self._host.require_leader()
        match wire_timers.check_one_target(request):
            case "timer_ids":
                ids, genuine = wire_timers.ids_of(request.timer_ids, self._salt)
                results = await within(self._cancel_ids(leader, ids, genuine), context)
                return _cancelled(results)
            case "keys":
                topics = leader.machine.topic_by_name
                keys = wire_timers.keys_of(request.keys, topics, self._key_bytes_max)
                now = self._host.now()
                asked = self._host.ask(lambda done: leader.cancel_keys(keys, now, done))
                applied = await within(asked, context)
                assert isinstance(applied, CancelApplied)
                answer = _cancelled(applied.results)
                answer.timer_ids = _raw(applied.targets, self._salt)
                return answer
            case _:
                count, token = await self._by_filter(request, context, self._cancel_page)
                return pb.CancelResponse(cancelled=count, next_page_token=token)

    async def _cancel_ids(
        self, leader: Leader, ids: Ids, genuine: npt.NDArray[np.bool_]
    ) -> _Results:
        results = np.full(len(ids), NOT_FOUND, np.uint8)
        if genuine.any():
            due_ms, seq = ids.due_ms[genuine], ids.seq[genuine]
            answer = await self._host.ask(lambda done: leader.cancel(due_ms, seq, done))
            assert isinstance(answer, np.ndarray)
            results[genuine] = answer
        return results

    async def _cancel_page(self, ids: Ids) -> int:
        results = await self._cancel_ids(
            self._host.require_leader(), ids, np.ones(len(ids), np.bool_)
        )
        return int(np.count_nonzero(results == CANCELLED))

    # ---- rescheduling

    async def reschedule(
        self, request: pb.RescheduleRequest, context: Context
    ) -> pb.RescheduleResponse:
        """Give timers another due time; each in one entry with its end.

        Raises:
            InvalidRequest: it names field, value and limit.
            NotFound: there is no such topic.
        """
        leader = self._host.require_leader()
        kind = wire_timers.check_one_target(request)
        if kind == "filter":
            self._requested(request, 1)

            async def move(ids: Ids) -> int:
                results, _ = await self._move(ids, self._requested(request, len(ids)))
                return int(np.count_nonzero(results == RESCHEDULED))

            count, token = await self._by_filter(request, context, move)
            return pb.RescheduleResponse(rescheduled=count, next_page_token=token)
        if kind == "keys":
            topics = leader.machine.topic_by_name
            keys = wire_timers.keys_of(request.keys, topics, self._key_bytes_max)
            requested = self._requested(request, len(keys))
            return self._rescheduled(*await within(self._move(keys, requested), context))
        ids, genuine = wire_timers.ids_of(request.timer_ids, self._salt)
        requested = self._requested(request, len(ids))
        results = np.full(len(ids), NOT_FOUND, np.uint8)
        timers = Ids(np.zeros(len(ids), np.int64), np.zeros(len(ids), np.uint64))
        if genuine.any():
            known = Ids(ids.due_ms[genuine], ids.seq[genuine])
            results[genuine], moved = await within(self._move(known, requested[genuine]), context)
            timers.due_ms[genuine], timers.seq[genuine] = moved.due_ms, moved.seq
        return self._rescheduled(results, timers)

    def _requested(self, request: pb.RescheduleRequest, rows: int) -> I64:
        due = np.array(request.due_ms, np.int64) if len(request.due_ms) else None
        delay = np.array(request.delay_ms, np.int64) if len(request.delay_ms) else None
        return resolve_due(due, delay, rows, self._host.now(), self._delay_ms_max)

    def _rescheduled(self, results: _Results, timers: Ids) -> pb.RescheduleResponse:
        moved = results == RESCHEDULED
        timers = Ids(timers.due_ms, np.where(moved, timers.seq, np.uint64(0)))
        return pb.RescheduleResponse(
            results=[_RESCHEDULE_RESULTS[result] for result in results.tolist()],
            timer_ids=_raw(timers, self._salt),
            rescheduled=int(np.count_nonzero(moved)),
        )

    async def _move(self, targets: Targets, requested_ms: I64) -> tuple[_Results, Ids]:
        """Reschedule timers; return what became of each, and the new ones."""
        results = np.full(len(targets), LEFT, np.uint8)
        due_ms, seq = np.zeros(len(targets), np.int64), np.zeros(len(targets), np.uint64)
        while (left := np.flatnonzero(results == LEFT)).size:
            parts = [
                left[start : start + RESCHEDULE_ROWS_MAX]
                for start in range(0, len(left), RESCHEDULE_ROWS_MAX)
            ]
            leader = self._host.require_leader()
            asked = [self._move_some(leader, targets, requested_ms, part) for part in parts]
            for part, applied in zip(parts, await asyncio.gather(*asked), strict=True):
                results[part] = applied.results
                due_ms[part], seq[part] = applied.timers.due_ms, applied.timers.seq
        return results, Ids(due_ms, seq)

    async def _move_some(
        self, leader: Leader, targets: Targets, requested_ms: I64, places: npt.NDArray[np.intp]
    ) -> RescheduleApplied:
        some = _some(targets, places)
        now, times = self._host.now(), requested_ms[places]
        applied = await self._host.ask(lambda done: leader.reschedule(some, times, now, done))
        assert isinstance(applied, RescheduleApplied)
        return applied

    # ---- by filter

    async def _by_filter(
        self,
        request: pb.CancelRequest | pb.RescheduleRequest,
        context: Context,
        change: Callable[[Ids], Awaitable[int]],
    ) -> tuple[int, bytes]:
        """Change what a filter lists; return how many, and the token of what is left.

        A failure after the first page is no error: the caller goes on with the token.
        """
        leader = self._host.require_lease()
        seq_end: int = leader.machine.next_seq
        what = self._looking_in.filter(leader, request.filter, seq_end)
        seen = what.start
        if request.page_token:
            token, salt = request.page_token, self._salt
            seen, seq_end = wire_timers.read_page_token(token, request.filter, salt)
            what = self._looking_in.filter(leader, request.filter, seq_end)
        left_s: float | None = context.time_remaining()
        loop = asyncio.get_running_loop()
        stop_at = loop.time() + min(COMMIT_TIMEOUT_S, left_s or COMMIT_TIMEOUT_S) / 2
        count = pages = 0
        while True:
            try:
                page = await self._looking_in.page(what, seen, FILTER_PAGE, whole=False)
                rows = page.timers.rows
                if len(rows):
                    ids = Ids(rows["due_ms"].astype(np.int64), rows["seq"].astype(np.uint64))
                    count += await within(change(ids), context)
            except TimerError:
                if not pages:
                    raise
                break
            pages += 1
            if page.next is None:
                return count, b""
            seen = page.next
            if loop.time() > stop_at:
                break
        return count, wire_timers.page_token(request.filter, seen, seq_end, self._salt)


def _cancelled(results: _Results) -> pb.CancelResponse:
    return pb.CancelResponse(
        results=[_CANCEL_RESULTS[result] for result in results.tolist()],
        cancelled=int(np.count_nonzero(results == CANCELLED)),
    )


def _raw(timers: Ids, salt: int) -> bytes:
    return wire.ids_or_zeros(timers.due_ms, timers.seq, salt)


def _some(targets: Targets, places: npt.NDArray[np.intp]) -> Targets:
    if isinstance(targets, Ids):
        return Ids(targets.due_ms[places], targets.seq[places])
    return Keys(targets.topic[places], taken(targets.key, places))
