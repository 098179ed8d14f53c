"""The client's calls about existing timers: cancels, reschedules and queries."""

import re
import threading
from abc import abstractmethod
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, Unpack

import grpc

from timerclient.proto import timer_pb2 as pb
from timerclient.rows import pending_timers, rows
from timerclient.rows.pending_timers import Changed, Rescheduled, TimerCounts, TimerInfo, Where
from timerclient.rows.rows import DueTime, WhenMany
from timerclient.rows.scheduled_timers import Timer, Timers
from timerclient.streams.node_channel import NodeChannel
from timerclient.streams.nodes import RANK_MAX, Nodes
from timerclient.streams.shared_calls import R, Send, SharedCalls
from timerclient.values import ids
from timerclient.values.errors import InvalidRequest, NotFound, TimerError, as_unknown
from timerclient.values.results import CancelResult

Q = TypeVar("Q")
T = TypeVar("T")
Edit = TypeVar("Edit", pb.CancelRequest, pb.RescheduleRequest)
Done = TypeVar("Done", pb.CancelResponse, pb.RescheduleResponse)
Rpc = Callable[[NodeChannel], grpc.aio.UnaryUnaryMultiCallable[Q, T]]
"""A unary method of the contract, on the channel to a node."""

CANCEL_IDS_MAX: Final = 1_000
"""Ids in one request; the server's limit is 1,024."""
TIMEOUT_S_MAX: Final = threading.TIMEOUT_MAX
Seconds = float | timedelta
TimerLike = Timer | TimerInfo | str | bytes
"""A timer, a TimerInfo, an id as text, or a raw id (15 bytes)."""


def timeout_s(timeout: Seconds, *, zero: bool = False) -> float:
    """Return a timeout in seconds, at most TIMEOUT_S_MAX. `zero`: 0 is allowed.

    Raises:
        InvalidRequest: The timeout is not positive, or not a duration.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | timedelta):
        raise InvalidRequest.of("timeout", timeout, "must be a timedelta or a number of seconds")
    within_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not (within_s > 0 or (zero and within_s == 0)):
        limit = "must be 0 or more" if zero else "must be positive"
        raise InvalidRequest.of("timeout", timeout, limit)
    return float(min(within_s, TIMEOUT_S_MAX))


def raw_ids(timers: Iterable[TimerLike]) -> bytes:
    """Return the raw ids of timers, one after the other.

    Raises:
        InvalidRequest: One of them is not a timer or an id; or `timers` is one id.
    """
    if isinstance(timers, str | bytes):
        raise InvalidRequest.of("timers", rows.kind_of(timers), "must be a sequence of timers")
    out = bytearray()
    for timer in timers:
        raw: Any = timer.raw if isinstance(timer, Timer | TimerInfo) else timer
        if isinstance(raw, str):
            raw = ids.from_text(raw)
        if not isinstance(raw, bytes) or len(raw) != ids.SIZE:
            # The value is not shown: it may be a payload, or hold one.
            limit = f"must be a Timer, a TimerInfo, its id as text, or {ids.SIZE} bytes"
            raise InvalidRequest.of("timer_id", rows.kind_of(raw), limit)
        out += raw
    return bytes(out)


def require_timer(timer: TimerLike | None) -> TimerLike:
    """Return `timer`.

    Raises:
        InvalidRequest: It is None.
    """
    if timer is None:
        raise InvalidRequest.of("timer", None, "give a timer or its id, or topic and key")
    return timer


def check_no_timer(timer: TimerLike | None) -> None:
    """Check that a call with a key has no `timer`.

    Raises:
        InvalidRequest: `timer` is not None.
    """
    if timer is not None:
        raise InvalidRequest.of(
            "timer", rows.kind_of(timer), "give a timer or its id, or topic and key, not both"
        )


def set_times(request: pb.RescheduleRequest, times: Mapping[str, Sequence[int]]) -> None:
    """Set due_ms, delay_ms or delay_level of a request."""
    for name, values in times.items():
        getattr(request, name).extend(values)


@contextmanager
def counting_done(done: object, count: int = 0) -> Iterator[None]:
    """Set `done` of an error in the block to `count`; if `done`, its outcome is unknown."""
    try:
        yield
    except TimerError as error:
        if done:
            as_unknown(error)
        error.done = count
        raise


@contextmanager
def naming_place(places: Sequence[int]) -> Iterator[None]:
    """Name the element at fault, as in delay_ms[3], by its place among the caller's elements.

    `places`: of the elements of the request, in their order.
    """
    try:
        yield
    except InvalidRequest as error:
        if not (row := re.fullmatch(r"(\w+)\[(\d+)\]", error.field)):
            raise
        raise error.with_field(f"{row[1]}[{places[int(row[2])]}]") from None


class TimerCalls:
    """Calls about existing timers, for an event loop; a part of AsyncTimerClient."""

    @abstractmethod
    def nodes(self) -> Nodes:
        """Return the cluster's nodes, on the running event loop."""

    @abstractmethod
    def within_s(self, timeout: Seconds | None) -> float:
        """Return the seconds that a call may take."""

    shared: SharedCalls
    """Calls of one timer each, which share requests."""

    # ---- cancels and reschedules

    async def cancel(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,
    ) -> CancelResult:
        """Cancel one timer, by its id, or by its key and topic; return the outcome.

        A cancel by id is retried through failovers. If the answer of an earlier attempt was lost,
        the outcome may be ALREADY_CANCELLED through the call itself. RESCHEDULED: the timer was
        rescheduled before; `get_timer(timer).replaced_by` is the id that fires. A cancel by key
        finds pending timers only. It is sent once, because another timer may have the key then.

        Raises:
            NotFound: There is no such topic.
            OutcomeUnknown: No answer; the timer may be cancelled. Repeat a cancel by id; after one
                by key, call `get_timer` first.
        """
        if key is not None:
            check_no_timer(timer)
            pending_timers.timer_keys(topic, [key])
            by_keys = partial(self._cancel_keys, str(topic))
            line, most = ("cancel", topic), pending_timers.CHANGES_MAX
            return await self._share(line, key, key, by_keys, most, timeout)
        raw = raw_ids([require_timer(timer)])
        return await self._share(("cancel",), raw, raw, self._cancel_ids, CANCEL_IDS_MAX, timeout)

    async def _cancel_ids(self, raw: Sequence[bytes], within_s: float) -> list[CancelResult]:
        return await self.cancel_batch(raw, timeout=within_s)

    async def _cancel_keys(
        self, topic: str, keys: Sequence[str], within_s: float
    ) -> list[CancelResult]:
        return await self.cancel_keys(topic, keys, timeout=within_s)

    async def cancel_batch(
        self, timers: Iterable[TimerLike], *, timeout: Seconds | None = None
    ) -> list[CancelResult]:
        """Cancel many timers; return one outcome per timer, in their order; see `cancel`."""
        raw = timers.raw if isinstance(timers, Timers) else raw_ids(timers)
        results: list[CancelResult] = []
        for start in range(0, len(raw), CANCEL_IDS_MAX * ids.SIZE):
            request = pb.CancelRequest(timer_ids=raw[start : start + CANCEL_IDS_MAX * ids.SIZE])
            with counting_done(results, len(results)):
                answer = await self._call(lambda node: node.timers.Cancel, request, timeout)
            results += pending_timers.cancel_outcomes(answer)
        return results

    async def cancel_keys(
        self, topic: str, keys: Iterable[str], *, timeout: Seconds | None = None
    ) -> list[CancelResult]:
        """Cancel pending timers by their keys; return one outcome per key, in their order.

        Each request has up to 256 keys and is sent once, as `cancel` by key.
        """
        listed, results = rows.texts("keys", keys), list[CancelResult]()
        for start in range(0, len(listed), pending_timers.CHANGES_MAX):
            some = pending_timers.timer_keys(
                topic, listed[start : start + pending_timers.CHANGES_MAX]
            )
            request = pb.CancelRequest(keys=some)
            some_at = range(start, start + pending_timers.CHANGES_MAX)
            with counting_done(results, len(results)), naming_place(some_at):
                answer = await self._call(
                    lambda node: node.timers.Cancel, request, timeout, repeatable=False
                )
            results += [CancelResult(result) for result in answer.results]
        return results

    async def cancel_where(
        self, topic: str, *, timeout: Seconds | None = None, **where: Unpack[Where]
    ) -> Changed:
        """Cancel the pending timers of a topic that `where` selects; return their number.

        Without `where`, or with an empty prefix alone, all are selected. Timers that are scheduled
        during the call are not cancelled. The call sends one request per page; `timeout` applies to
        each. A page is retried through failovers; then the number may be too low, and not `exact`.

        Raises:
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; some timers may be cancelled.
        """
        request = pb.CancelRequest(filter=pending_timers.filter_of(topic, where))
        return await self._page_by_page(
            lambda node: node.timers.Cancel, request, lambda answer: answer.cancelled, timeout
        )

    async def reschedule(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[DueTime],
    ) -> Timer:
        """Change the due time of a pending timer, named by id, or by key and topic.

        Returns the new timer, which has a new id, and the key, payload and headers of the old one.
        The due time is as in `schedule`, and required. The cluster knows at least its last 65,536
        reschedules. For an old id, `get_timer` returns the new id in `replaced_by`; so does the
        error of a further reschedule. A cancel returns RESCHEDULED.

        Raises:
            NotPending: The timer fired, was cancelled, was rescheduled before (`replaced_by`), or
                is not known. It was not changed.
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; the timer may be rescheduled. Call `get_timer`, by
                its key if it has one.
        """
        [(way, [ms])] = pending_timers.times(when).items()
        if key is not None:
            check_no_timer(timer)
            pending_timers.timer_keys(topic, [key])
            move = partial(self._move, pending_timers.by_keys(topic), way)
            line, most = ("reschedule", way, topic), pending_timers.CHANGES_MAX
            one = await self._share(line, key, (key, ms), move, most, timeout)
            return pending_timers.new_timer_of(one, key=key)
        raw = raw_ids([require_timer(timer)])
        by_ids = partial(self._move, pending_timers.by_ids, way)
        one = await self._share(
            ("reschedule", way), raw, (raw, ms), by_ids, CANCEL_IDS_MAX, timeout
        )
        return pending_timers.new_timer_of(one, timer_id=ids.to_text(raw))

    async def _move(
        self,
        make_request: Callable[[Sequence[T]], pb.RescheduleRequest],
        way: str,
        moves: Sequence[tuple[T, int]],
        within_s: float,
    ) -> list[Rescheduled | None]:
        request = make_request([target for target, _ in moves])
        set_times(request, {way: [ms for _, ms in moves]})
        answer = await self._call(
            lambda node: node.timers.Reschedule, request, within_s, repeatable=False
        )
        return pending_timers.reschedule_outcomes(answer)

    async def reschedule_batch(
        self,
        timers: Iterable[TimerLike],
        *,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> list[Rescheduled]:
        """Reschedule many timers; return one outcome per timer, in their order; see `reschedule`.

        `delay`, `delay_level`, `due` or `due_ms` is one value for all, or one for each timer. A
        timer that is not pending is an outcome, not a NotPending error.
        """
        raw = ids.split(timers.raw if isinstance(timers, Timers) else raw_ids(timers))
        times = pending_timers.times(when, len(raw))
        return await self._reschedule(pending_timers.by_ids, raw, times, CANCEL_IDS_MAX, timeout)

    async def reschedule_keys(
        self,
        topic: str,
        keys: Iterable[str],
        *,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> list[Rescheduled]:
        """Reschedule pending timers by their keys; one outcome per key; see `reschedule_batch`."""
        listed = rows.texts("keys", keys)
        times, by_keys = pending_timers.times(when, len(listed)), pending_timers.by_keys(topic)
        return await self._reschedule(by_keys, listed, times, pending_timers.CHANGES_MAX, timeout)

    async def reschedule_where(
        self, topic: str, where: Where, *, timeout: Seconds | None = None, **when: Unpack[DueTime]
    ) -> Changed:
        """Reschedule the pending timers that `where` selects to one due time; return their number.

        Each is rescheduled once, even if `where` selects its new due time. Else as `cancel_where`.
        """
        request = pb.RescheduleRequest(filter=pending_timers.filter_of(topic, where))
        set_times(request, pending_timers.times(when))
        return await self._page_by_page(
            lambda node: node.timers.Reschedule, request, lambda answer: answer.rescheduled, timeout
        )

    async def _reschedule(
        self,
        make_request: Callable[[Sequence[T]], pb.RescheduleRequest],
        targets: Sequence[T],
        times: Mapping[str, Sequence[int]],
        rows_max: int,
        timeout: Seconds | None,
    ) -> list[Rescheduled]:
        """Reschedule the targets; return one outcome per target.

        Targets that the leader left unchanged are sent again. A request is sent once: a retry could
        not distinguish its own effect from that of another request.
        """
        [(name, ms)] = times.items()
        done: dict[int, Rescheduled] = {}
        left = list(range(len(targets)))
        while left:
            some, left = left[:rows_max], left[rows_max:]
            request = make_request([targets[at] for at in some])
            set_times(request, {name: ms if len(ms) == 1 else [ms[at] for at in some]})
            with counting_done(done, len(done)), naming_place(some):
                answer = await self._call(
                    lambda node: node.timers.Reschedule, request, timeout, repeatable=False
                )
            for at, one in zip(some, pending_timers.reschedule_outcomes(answer), strict=True):
                if one is None:
                    left.append(at)
                else:
                    done[at] = one
        return [done[at] for at in range(len(targets))]

    async def _page_by_page(
        self,
        rpc: Rpc[Edit, Done],
        request: Edit,
        count_of: Callable[[Done], int],
        timeout: Seconds | None,
    ) -> Changed:
        """Change the timers that a filter selects; return their number.

        The first response is a token that fixes the set of timers. A page with a token may
        therefore be retried: it changes no timer twice, and no timer that was scheduled later.
        """
        count, doubts = 0, set[bytes]()
        while True:
            with counting_done(request.page_token, count):
                answer = await self._call(
                    rpc, request, timeout, on_doubt=lambda: doubts.add(request.page_token)
                )
            count += count_of(answer)
            request.page_token = answer.next_page_token
            if not answer.next_page_token:
                return Changed.of(count, exact=doubts <= {b""})  # the first request changes nothing

    # ---- queries

    async def get_timer(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,
    ) -> TimerInfo:
        """Return the state of one timer, by its id, or, if it is pending, by its key and topic.

        Raises:
            NotFound: The timer does not exist or is no longer known.
        """
        if key is not None:
            check_no_timer(timer)
            pending_timers.timer_keys(topic, [key])
            request = pb.GetTimerRequest(topic=topic or "", key=key)
        else:
            request = pb.GetTimerRequest(timer_id=raw_ids([require_timer(timer)]))
        answer = await self._call(lambda node: node.timers.GetTimer, request, timeout)
        return pending_timers.info(answer, request.timer_id)

    async def list_timers(
        self,
        topic: str,
        *,
        page_size: int = pending_timers.PAGE_SIZE,
        timeout: Seconds | None = None,
        **where: Unpack[Where],
    ) -> AsyncIterator[TimerInfo]:
        """Iterate over the pending timers of a topic that `where` selects, in order of due time.

        Pages are read during the iteration. A timer that is pending throughout is returned once.
        """
        token = b""
        while True:
            page, token = await self.list_page(
                topic, token, page_size=page_size, timeout=timeout, **where
            )
            for one in page:
                yield one
            if not token:
                return

    async def list_page(
        self,
        topic: str,
        token: bytes = b"",
        *,
        page_size: int = pending_timers.PAGE_SIZE,
        timeout: Seconds | None = None,
        **where: Unpack[Where],
    ) -> tuple[list[TimerInfo], bytes]:
        """Return a page of `list_timers` and the token of the next page; empty: it is the last.

        A page that is short or empty may have a next page.
        """
        request = pb.ListTimersRequest(
            filter=pending_timers.filter_of(topic, where), page_token=token
        )
        request.page_size = rows.whole_number("page_size", page_size, 1, pending_timers.PAGE_SIZE)
        answer = await self._call(lambda node: node.timers.ListTimers, request, timeout)
        return [*pending_timers.infos(topic, answer.timers, answer.held)], answer.next_page_token

    async def count_timers(
        self, topic: str, *, timeout: Seconds | None = None, **where: Unpack[Where]
    ) -> TimerCounts:
        """Return how many timers of a topic are pending, and how soon; or how many `where` selects.

        A count by `key_prefix` reads all keys in the due range. Other counts take one request.
        """
        request, pending = pending_timers.count_request(topic, where), 0
        while True:
            answer = await self._call(lambda node: node.timers.CountTimers, request, timeout)
            pending += answer.pending
            request.page_token = answer.next_page_token
            if not request.page_token:
                return pending_timers.counts(answer, pending)

    async def _share(
        self,
        line: tuple[str | None, ...],
        timer: str | bytes,
        row: R,
        send: Send[R, T],
        rows_max: int,
        timeout: Seconds | None,
    ) -> T:
        """Return the outcome of a call for one timer; calls of one `line` share requests."""
        within_s = self.within_s(timeout)
        return await self.shared.call(line, timer, row, send, rows_max=rows_max, within_s=within_s)

    async def _call(
        self,
        rpc: Rpc[Q, T],
        request: Q,
        timeout: Seconds | None = None,
        *,
        repeatable: bool = True,
        on_doubt: Callable[[], None] = lambda: None,
    ) -> T:
        """Return the leader's response to a request; see Nodes.call."""
        return await self.nodes().call(
            lambda node, left_s: rpc(node)(request, timeout=left_s),
            within_s=self.within_s(timeout),
            repeatable=repeatable,
            on_doubt=on_doubt,
        )

    async def _delete(self, rpc: Rpc[Q, T], request: Q, timeout: Seconds | None = None) -> T | None:
        """Return the response to a deletion.

        None: an earlier attempt has deleted it, and the response to that was lost.
        """
        doubts: list[None] = []
        try:
            return await self._call(rpc, request, timeout, on_doubt=lambda: doubts.append(None))
        except NotFound:
            if not doubts:
                raise
            return None

    async def _anywhere(
        self,
        rpc: Rpc[Q, T],
        request: Q,
        *,
        final: tuple[type[TimerError], ...] = (),
        rank: Callable[[T], int] = lambda _: RANK_MAX,
    ) -> T:
        """Return the response of any node; see Nodes.anywhere."""
        return await self.nodes().anywhere(
            lambda node, left_s: rpc(node)(request, timeout=left_s),
            within_s=self.within_s(None),
            rank=rank,
            final=final,
        )
