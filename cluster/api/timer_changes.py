"""Cancels and reschedules: by id, by key, by filter.

A request with ids or keys becomes entries of bounded size, all appended at once. Timers of a
reschedule that no entry took are returned as ENTRY_FULL. The caller sends those again.

    filter --> token --> page --> token --> page --> ... --> no token

The first request with a filter changes no timer. It returns a token that fixes the set: the timers
with seqs below the next one. Each further request changes one page of the set, by id, and returns
the token of the next page. A request with a token may be repeated: timers that it has changed are
no longer listed, and the timers that replaced them have higher seqs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from cluster.api import wire_rows, wire_timers
from cluster.api.timer_queries import TimerQueries
from cluster.rpc.handlers import Context, within
from cluster.state.host import Host
from timer.entries.payloads import Ids, Keys, Targets
from timer.leader.intake.admission import WantedTimes
from timer.leader.leader import RESCHEDULE_ROWS_MAX, Leader
from timer.model.columns import U32, values_at
from timer.model.timer_errors import EngineError, InvalidRequestError, OverloadedError
from timer.state.apply_results import (
    ALREADY_CANCELLED,
    CANCELLED,
    ENTRY_FULL,
    NOT_FOUND,
    RESCHEDULED,
    CancelApplied,
    RescheduleApplied,
)
from timerclient.proto import timer_pb2 as pb

FILTER_PAGE: Final = 1_000
"""Timers that one request by filter changes, at most."""

_CANCEL_RESULTS: Final = (
    pb.CANCEL_RESULT_UNSPECIFIED,
    pb.CANCEL_RESULT_CANCELLED,
    pb.CANCEL_RESULT_ALREADY_CANCELLED,
    pb.CANCEL_RESULT_ALREADY_FIRED,
    pb.CANCEL_RESULT_NOT_FOUND,
    pb.CANCEL_RESULT_UNSPECIFIED,
    pb.CANCEL_RESULT_DROPPED,
)
"""Index: a result in timer/state/apply_results.py. Value: CancelResult."""
_RESCHEDULE_RESULTS: Final = (
    pb.RESCHEDULE_RESULT_UNSPECIFIED,
    pb.RESCHEDULE_RESULT_RESCHEDULED,
    pb.RESCHEDULE_RESULT_ALREADY_CANCELLED,
    pb.RESCHEDULE_RESULT_ALREADY_FIRED,
    pb.RESCHEDULE_RESULT_NOT_FOUND,
    pb.RESCHEDULE_RESULT_LEFT,
    pb.RESCHEDULE_RESULT_DROPPED,
)
"""Index: a result in timer/state/apply_results.py. Value: RescheduleResult."""
_Results = npt.NDArray[np.uint8]


class TimerChanges:
    """Cancels and reschedules on the leader; see the module."""

    def __init__(
        self,
        host: Host,
        queries: TimerQueries,
        look_ups: TimerQueries,
        *,
        salt: int,
        key_bytes_max: int,
    ) -> None:
        """`queries`: for pages of filters. `look_ups`: for ids: they wait for no list or count."""
        self._host = host
        self._queries, self._look_ups = queries, look_ups
        self._salt = salt
        self._key_bytes_max = key_bytes_max

    # ---- cancelling

    async def cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Cancel timers. The order of the log decides each result.

        Raises:
            InvalidRequestError: a field is missing or out of its limits.
            NotFoundError: the topic does not exist.
        """
        leader = self._host.require_leader()
        match wire_timers.check_one_target(request):
            case "timer_ids":
                ids, genuine = wire_timers.ids_of(request.timer_ids, self._salt)
                genuine = genuine & await self._look_ups.permission_mask(ids)
                results = await within(self._cancel(leader, ids, genuine), context)
                results, successors = await self._successors(leader, ids, genuine, results)
                answer = _cancel_response(results)
                answer.successor_ids = successors
                return answer
            case "keys":
                topics = leader.machine.topic_by_name
                keys = wire_timers.keys_of(request.keys, topics, self._key_bytes_max)
                work = self._host.ask(lambda done: leader.cancel_keys(keys, done))
                applied = await within(work, context)
                assert isinstance(applied, CancelApplied)
                answer = _cancel_response(applied.results)
                answer.timer_ids = _raw(applied.targets, self._salt)
                return answer
            case _:
                count, token = await self._by_filter(request, context, self._cancel_page)
                return pb.CancelResponse(cancelled=count, next_page_token=token)

    async def _cancel(self, leader: Leader, ids: Ids, genuine: npt.NDArray[np.bool_]) -> _Results:
        if genuine.all():
            return await self._cancel_ids(leader, ids)
        results = np.full(len(ids), NOT_FOUND, np.uint8)
        if genuine.any():
            known = Ids(ids.due_ms[genuine], ids.seq[genuine])
            results[genuine] = await self._cancel_ids(leader, known)
        return results

    async def _cancel_ids(self, leader: Leader, ids: Ids) -> _Results:
        """Cancel timers whose ids are genuine."""
        answer = await self._host.ask(lambda done: leader.cancel(ids.due_ms, ids.seq, done))
        assert isinstance(answer, np.ndarray)
        return answer

    async def _successors(
        self, leader: Leader, ids: Ids, genuine: npt.NDArray[np.bool_], results: _Results
    ) -> tuple[_Results, bytes]:
        """Return the results of all ids, and which timers fire instead of rescheduled ones.

        A timer with a known successor was rescheduled, even if its own end is forgotten.
        """
        ended = genuine & ((results == ALREADY_CANCELLED) | (results == NOT_FOUND))
        if not ended.any():
            return results, b""
        found = Ids(np.zeros(len(ids), np.int64), np.zeros(len(ids), np.uint64))
        with suppress(OverloadedError):  # what was done is answered all the same
            last = await self._look_ups.successors(leader.machine, ids.seq[ended])
            last = await self._look_ups.visible_successors(last)
            found.due_ms[ended], found.seq[ended] = last.due_ms, last.seq
        results = np.where(found.seq > 0, np.uint8(ALREADY_CANCELLED), results)
        return results, _raw(found, self._salt) if found.seq.any() else b""

    async def _cancel_page(self, ids: Ids) -> tuple[int, bool]:
        results = await self._cancel_ids(self._host.require_leader(), ids)
        return int(np.count_nonzero(results == CANCELLED)), True

    # ---- rescheduling

    async def reschedule(
        self, request: pb.RescheduleRequest, context: Context
    ) -> pb.RescheduleResponse:
        """Give timers another due time. One entry ends the old timer and adds the new one.

        Raises:
            InvalidRequestError: a field is missing or out of its limits.
            NotFoundError: the topic does not exist.
        """
        leader = self._host.require_leader()
        kind = wire_timers.check_one_target(request)
        if kind == "filter":
            when = wire_rows.wanted_times_of(request, 1)
            topic = wire_rows.topic_of(leader.machine.topic_by_name, request.filter.topic).topic_id
            leader.admission.times(when, 1, np.full(1, topic, np.uint32), self._host.now())

            async def move(ids: Ids) -> tuple[int, bool]:
                topics = np.full(len(ids), topic, np.uint32)
                results, _ = await self._move(ids, topics, when)
                return int(np.count_nonzero(results == RESCHEDULED)), ENTRY_FULL not in results

            count, token = await self._by_filter(request, context, move)
            return pb.RescheduleResponse(rescheduled=count, next_page_token=token)
        if kind == "keys":
            topics = leader.machine.topic_by_name
            keys = wire_timers.keys_of(request.keys, topics, self._key_bytes_max)
            when = _when_of(request, len(keys))
            moving = self._move(keys, keys.topic, when)
            with _naming_places(when, np.arange(len(keys)), len(keys)):
                return self._reschedule_response(*await within(moving, context))
        ids, genuine = wire_timers.ids_of(request.timer_ids, self._salt)
        genuine = genuine & await self._look_ups.permission_mask(ids)
        when = _when_of(request, len(ids))
        results = np.full(len(ids), NOT_FOUND, np.uint8)
        timers = Ids(np.zeros(len(ids), np.int64), np.zeros(len(ids), np.uint64))
        if genuine.any():
            known, places = Ids(ids.due_ms[genuine], ids.seq[genuine]), np.flatnonzero(genuine)
            moving = self._move_ids(leader, known, when.take(places))
            with _naming_places(when, places, len(ids)):
                results[genuine], moved = await within(moving, context)
            timers.due_ms[genuine], timers.seq[genuine] = moved.due_ms, moved.seq
        results, successors = await self._successors(leader, ids, genuine, results)
        answer = self._reschedule_response(results, timers)
        answer.successor_ids = successors
        return answer

    def _reschedule_response(self, results: _Results, timers: Ids) -> pb.RescheduleResponse:
        moved = results == RESCHEDULED
        timers = Ids(timers.due_ms, np.where(moved, timers.seq, np.uint64(0)))
        return pb.RescheduleResponse(
            results=[_RESCHEDULE_RESULTS[result] for result in results.tolist()],
            timer_ids=_raw(timers, self._salt),
            rescheduled=int(np.count_nonzero(moved)),
        )

    async def _move_ids(self, leader: Leader, ids: Ids, when: WantedTimes) -> tuple[_Results, Ids]:
        """Reschedule timers by id. Their topics are looked up only if policies differ by topic."""
        topics = await self._look_ups.topics(ids) if leader.admission.differs else None
        return await self._move(ids, topics, when)

    async def _move(
        self, targets: Targets, topics: U32 | None, when: WantedTimes
    ) -> tuple[_Results, Ids]:
        """Reschedule timers of `topics`; return the results and the new ids, one per target.

        ENTRY_FULL marks timers whose entry was refused or had no room for them; never all of them.

        Args:
            targets: Ids or keys of n timers.
            topics: Topic ids (n,). None: the topic makes no difference to the times.
            when: The wanted times (n,).

        Raises:
            EngineError: every entry was refused, or the outcome of one is unknown.
        """
        n = len(targets)
        results = np.full(n, ENTRY_FULL, np.uint8)
        due_ms, seq = np.zeros(n, np.int64), np.zeros(n, np.uint64)
        leader = self._host.require_leader()
        # Times that a policy refuses are refused before the first entry is appended.
        leader.admission.times(when, n, topics, self._host.now())
        ends = range(RESCHEDULE_ROWS_MAX, n, RESCHEDULE_ROWS_MAX)
        parts = np.split(np.arange(n), ends)
        moves = [self._move_some(leader, targets, topics, when, part) for part in parts]
        refused: list[EngineError] = []
        answers = await asyncio.gather(*moves, return_exceptions=True)
        for part, applied in zip(parts, answers, strict=True):
            if isinstance(applied, RescheduleApplied):
                results[part] = applied.results
                due_ms[part], seq[part] = applied.timers.due_ms, applied.timers.seq
            elif isinstance(applied, EngineError) and applied.outcome_known:
                refused.append(applied)
            else:
                raise applied
        if len(refused) == len(parts):
            raise refused[0]
        return results, Ids(due_ms, seq)

    async def _move_some(
        self,
        leader: Leader,
        targets: Targets,
        topics: U32 | None,
        when: WantedTimes,
        places: npt.NDArray[np.intp],
    ) -> RescheduleApplied:
        some, then, now = _some(targets, places), when.take(places), self._host.now()
        theirs = None if topics is None else topics[places]
        applied = await self._host.ask(
            lambda done: leader.reschedule(some, theirs, then, now, done)
        )
        assert isinstance(applied, RescheduleApplied)
        return applied

    # ---- by filter

    async def _by_filter(
        self,
        request: pb.CancelRequest | pb.RescheduleRequest,
        context: Context,
        change: Callable[[Ids], Awaitable[tuple[int, bool]]],
    ) -> tuple[int, bytes]:
        """Change a page of a filter's timers; return their number and the token of the next page.

        Without a token in the request nothing is changed. An empty token: there is no next page.
        `change` returns the number that it changed, and False if it left some of the page: the
        token then names the same page.
        """
        leader, salt = self._host.require_lease(), self._salt
        if not request.page_token:
            seq_end: int = leader.machine.next_seq
            start = self._queries.filter(leader, request.filter, seq_end).start
            return 0, wire_timers.page_token(request.filter, start, seq_end, salt)
        seen, seq_end = wire_timers.read_page_token(request.page_token, request.filter, salt)
        what = self._queries.filter(leader, request.filter, seq_end)
        page = await self._queries.page(what, seen, FILTER_PAGE, whole=False)
        rows = page.timers.rows
        count, done = 0, True
        if len(rows):
            ids = Ids(rows["due_ms"].astype(np.int64), rows["seq"].astype(np.uint64))
            count, done = await within(change(ids), context)
        following = page.next if done else seen
        if following is None:
            return count, b""
        return count, wire_timers.page_token(request.filter, following, seq_end, salt)


def _when_of(request: pb.RescheduleRequest, n: int) -> WantedTimes:
    """See wire_rows.wanted_times_of; an error about one of several times has its place."""
    try:
        return wire_rows.wanted_times_of(request, n)
    except InvalidRequestError as error:
        raise error.in_request(0, n) from None


@contextmanager
def _naming_places(when: WantedTimes, places: npt.NDArray[np.intp], n: int) -> Iterator[None]:
    """Put the place of a rejected time into the name of its field, as in delay_ms[3].

    `places`: of the timers at hand among the n of the request. One time for all has no place.
    """
    try:
        yield
    except InvalidRequestError as error:
        if len(when.values) == 1:
            raise
        raise error.at_rows(places.tolist()).in_request(0, n) from None


def _cancel_response(results: _Results) -> pb.CancelResponse:
    known = results.tolist()
    return pb.CancelResponse(
        results=[_CANCEL_RESULTS[result] for result in known], cancelled=known.count(CANCELLED)
    )


def _raw(timers: Ids, salt: int) -> bytes:
    return wire_rows.ids_or_zeros(timers.due_ms, timers.seq, salt)


def _some(targets: Targets, places: npt.NDArray[np.intp]) -> Targets:
    if isinstance(targets, Ids):
        return Ids(targets.due_ms[places], targets.seq[places])
    return Keys(targets.topic[places], values_at(targets.key, places))
