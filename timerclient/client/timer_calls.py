"""The part of the client that is about timers that exist: cancel, reschedule, look in."""

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
from typing import Any, Final, TypeVar, Unpack

from timerclient.proto import timer_pb2 as pb
from timerclient.rows import pending_timers, rows
from timerclient.rows.pending_timers import Changed, Rescheduled, TimerCounts, TimerInfo, Where
from timerclient.rows.rows import DueTime, WhenMany
from timerclient.rows.scheduled_timers import Timer, Timers
from timerclient.streams.nodes import Method, Nodes
from timerclient.values import ids
from timerclient.values.errors import InvalidRequest, TimerError, as_unknown
from timerclient.values.results import CancelResult

T = TypeVar("T")

CANCEL_IDS_MAX: Final = 1_000
"""Ids in one request; the server takes 1,024."""
TIMEOUT_S_MAX: Final = threading.TIMEOUT_MAX
Seconds = float | timedelta
TimerLike = Timer | TimerInfo | str | bytes
"""A timer, what the cluster tells of one, its id as text, or its raw id."""


def timeout_s(timeout: Seconds, *, zero: bool = False) -> float:
    """Return a timeout in seconds; `zero`: it may be none at all. What no clock counts is for ever.

    Raises:
        InvalidRequest: it is not positive, or no duration.
    """
    if not isinstance(timeout, int | float | timedelta):
        raise InvalidRequest.of("timeout", timeout, "must be a timedelta or a number of seconds")
    within_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not (within_s > 0 or (zero and within_s == 0)):
        limit = "must be 0 or more" if zero else "must be positive"
        raise InvalidRequest.of("timeout", timeout, limit)
    return float(min(within_s, TIMEOUT_S_MAX))


def raw_ids(timers: Iterable[TimerLike]) -> bytes:
    """Return the raw ids of timers, one after the other.

    Raises:
        InvalidRequest: one of them is no id.
    """
    out = bytearray()
    for timer in timers:
        raw: Any = timer.raw if isinstance(timer, Timer | TimerInfo) else timer
        if isinstance(raw, str):
            raw = ids.from_text(raw)
        if not isinstance(raw, bytes) or len(raw) != ids.SIZE:
            # Its value may be a payload, or hold one.
            limit = f"must be a Timer, a TimerInfo, its id as text, or {ids.SIZE} bytes"
            raise InvalidRequest.of("timer_id", rows.kind_of(raw), limit)
        out += raw
    return bytes(out)


def the_timer(timer: TimerLike | None) -> TimerLike:
    """Return the timer that a call names.

    Raises:
        InvalidRequest: it names none.
    """
    if timer is None:
        raise InvalidRequest.of("timer", None, "give a timer or its id, or topic and key")
    return timer


def no_timer(timer: TimerLike | None) -> None:
    """Refuse a call that names a timer twice.

    Raises:
        InvalidRequest: it does.
    """
    if timer is not None:
        raise InvalidRequest.of(
            "timer", rows.kind_of(timer), "give a timer or its id, or topic and key, not both"
        )


def cancelling(request: pb.CancelRequest) -> Method[pb.CancelResponse]:
    """Return what asks a node to cancel."""
    return lambda node, left_s: node.timers.Cancel(request, timeout=left_s)


def rescheduling(
    request: pb.RescheduleRequest,
) -> Method[pb.RescheduleResponse]:
    """Return what asks a node to reschedule."""
    return lambda node, left_s: node.timers.Reschedule(request, timeout=left_s)


def set_times(request: pb.RescheduleRequest, times: Mapping[str, Sequence[int]]) -> None:
    """Put due_ms, delay_ms or delay_level into a request."""
    for name, values in times.items():
        getattr(request, name).extend(values)


@contextmanager
def part_of(done: object, count: int = 0) -> Iterator[None]:
    """Raise what fails in here as of unknown outcome, if something was `done` before; so much."""
    try:
        yield
    except TimerError as error:
        if done:
            as_unknown(error)
        error.done = count
        raise


class Existing:
    """See the module; the rest is AsyncTimerClient (timerclient/client/aio.py)."""

    @abstractmethod
    def nodes(self) -> Nodes:
        """Return the cluster's nodes, on the running event loop."""

    @abstractmethod
    def within_s(self, timeout: Seconds | None) -> float:
        """Return the time that a call has, in seconds."""

    # ---- cancelling and rescheduling

    async def cancel(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,  # noqa: ASYNC109
    ) -> CancelResult:
        """Return what became of the cancel of one timer: by its id, or by its key and topic.

        By id it is sent again through failovers; if a first answer was lost, the next may be
        ALREADY_CANCELLED of its own work. RESCHEDULED: it was rescheduled before, and fires under
        another id, `get_timer(timer).replaced_by`. By key only a pending timer is found, and it is
        sent once: when the answer is lost the key may be another timer's by now.

        Raises:
            NotFound: there is no such topic.
            OutcomeUnknown: no answer; it may have been cancelled. By id ask again, by key look.
        """
        if key is not None:
            no_timer(timer)
            [result] = await self.cancel_keys(str(topic or ""), [key], timeout=timeout)
            return result
        [result] = await self.cancel_batch([the_timer(timer)], timeout=timeout)
        return result

    async def cancel_batch(
        self,
        timers: Iterable[TimerLike],
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
    ) -> list[CancelResult]:
        """Return what became of the cancels of many timers, one each; as `cancel` otherwise."""
        raw = timers.raw if isinstance(timers, Timers) else raw_ids(timers)
        results: list[CancelResult] = []
        for start in range(0, len(raw), CANCEL_IDS_MAX * ids.SIZE):
            request = pb.CancelRequest(timer_ids=raw[start : start + CANCEL_IDS_MAX * ids.SIZE])
            with part_of(results, len(results)):
                answer = await self._call(cancelling(request), timeout)
            results += pending_timers.cancelled(answer)
        return results

    async def cancel_keys(
        self,
        topic: str,
        keys: Iterable[str],
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
    ) -> list[CancelResult]:
        """Return what became of the cancels of the timers that have the keys, one each.

        Up to 256 are cancelled together. Sent once, as `cancel` by key.
        """
        listed, results = rows.texts("keys", keys), list[CancelResult]()
        for start in range(0, len(listed), pending_timers.CHANGES_MAX):
            some = pending_timers.named(topic, listed[start : start + pending_timers.CHANGES_MAX])
            request = pb.CancelRequest(keys=some)
            with part_of(results, len(results)):
                answer = await self._call(cancelling(request), timeout, repeatable=False)
            results += [CancelResult(result) for result in answer.results]
        return results

    async def cancel_where(
        self,
        topic: str,
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
        **where: Unpack[Where],
    ) -> Changed:
        """Cancel the pending timers of a topic that `where` picks; return how many these were.

        Timers scheduled while it runs are left alone. `timeout` is of each of its pages, which
        are sent again through failovers: then the count may be too low, and says so.

        Raises:
            NotFound: there is no such topic.
            OutcomeUnknown: no answer in time; some may have been cancelled.
        """
        request = pb.CancelRequest(filter=pending_timers.where(topic, where))
        return await self._page_by_page(
            request, cancelling(request), lambda answer: answer.cancelled, timeout
        )

    async def reschedule(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,  # noqa: ASYNC109
        **when: Unpack[DueTime],
    ) -> Timer:
        """Return the timer that fires instead of a pending one, named by id, or by key and topic.

        It has a new id, and the old one's key, payload and headers. When: as `schedule`, but it has
        to be said. The old id stays known: `get_timer` of it returns the new one in `replaced_by`,
        as does the error of another reschedule; a cancel returns RESCHEDULED. The cluster knows its
        last 65,536 reschedules at least.

        Raises:
            NotPending: the timer fired, was cancelled, was rescheduled before (`replaced_by`), or
                is not known; nothing was changed.
            NotFound: there is no such topic.
            OutcomeUnknown: no answer in time; it may have been rescheduled. Look by key.
        """
        if key is not None:
            no_timer(timer)
            times = pending_timers.times(when)
            [one] = await self._reschedule(pending_timers.by_keys(topic), [key], times, 1, timeout)
            return pending_timers.only(one, key)
        raw = raw_ids([the_timer(timer)])
        [one] = await self._reschedule(
            pending_timers.by_ids, [raw], pending_timers.times(when), 1, timeout
        )
        return pending_timers.only(one, ids.to_text(raw))

    async def reschedule_batch(
        self,
        timers: Iterable[TimerLike],
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
        **when: Unpack[WhenMany],
    ) -> list[Rescheduled]:
        """Return what became of each reschedule; as `reschedule`, but none raises NotPending.

        `delay`, `due` or `due_ms` is one value for all, or one for each timer.
        """
        raw = pending_timers.pieces(timers.raw if isinstance(timers, Timers) else raw_ids(timers))
        times = pending_timers.times(when, len(raw))
        return await self._reschedule(pending_timers.by_ids, raw, times, CANCEL_IDS_MAX, timeout)

    async def reschedule_keys(
        self,
        topic: str,
        keys: Iterable[str],
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
        **when: Unpack[WhenMany],
    ) -> list[Rescheduled]:
        """Return what became of the reschedule of each timer that has a key; see the batch's."""
        listed = rows.texts("keys", keys)
        times, by_keys = pending_timers.times(when, len(listed)), pending_timers.by_keys(topic)
        return await self._reschedule(by_keys, listed, times, pending_timers.CHANGES_MAX, timeout)

    async def reschedule_where(
        self,
        topic: str,
        where: Where,
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
        **when: Unpack[DueTime],
    ) -> Changed:
        """Give the pending timers that `where` picks one new due time; return how many these were.

        Each once, wherever its new time is; otherwise as `cancel_where`.
        """
        request = pb.RescheduleRequest(filter=pending_timers.where(topic, where))
        set_times(request, pending_timers.times(when))
        return await self._page_by_page(
            request, rescheduling(request), lambda answer: answer.rescheduled, timeout
        )

    async def _reschedule(
        self,
        naming: Callable[[Sequence[T]], pb.RescheduleRequest],
        targets: Sequence[T],
        times: Mapping[str, Sequence[int]],
        rows_max: int,
        timeout: Seconds | None,  # noqa: ASYNC109
    ) -> list[Rescheduled]:
        """Return what became of each target; what the leader left as it was is asked for again.

        Each is sent once: a retry could not tell its own work from somebody else's.
        """
        [(name, ms)] = times.items()
        done: dict[int, Rescheduled] = {}
        left = list(range(len(targets)))
        while left:
            some, left = left[:rows_max], left[rows_max:]
            request = naming([targets[at] for at in some])
            set_times(request, {name: ms if len(ms) == 1 else [ms[at] for at in some]})
            with part_of(done, len(done)):
                answer = await self._call(rescheduling(request), timeout, repeatable=False)
            for at, one in zip(some, pending_timers.rescheduled(answer), strict=True):
                if one is None:
                    left.append(at)
                else:
                    done[at] = one
        return [done[at] for at in range(len(targets))]

    async def _page_by_page(
        self,
        request: pb.CancelRequest | pb.RescheduleRequest,
        method: Method[T],
        count_of: Callable[[T], int],
        timeout: Seconds | None,  # noqa: ASYNC109
    ) -> Changed:
        """Change what a filter picks; return how many these were.

        The first answer is a token, which fixes which timers these are: from then on a page that
        is sent again changes none twice, and none that came meanwhile.
        """
        count, doubts = 0, set[bytes]()
        while True:
            with part_of(request.page_token, count):
                answer: Any = await self._call(
                    method, timeout, on_doubt=lambda: doubts.add(request.page_token)
                )
            count += count_of(answer)
            request.page_token = answer.next_page_token
            if not answer.next_page_token:
                return Changed.of(count, exact=doubts <= {b""})  # the first one changes nothing

    # ---- looking in

    async def get_timer(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,  # noqa: ASYNC109
    ) -> TimerInfo:
        """Return what is known of one timer: by its id, or, while it is pending, by key and topic.

        Raises:
            NotFound: there is none, or no more.
        """
        if key is not None:
            no_timer(timer)
            pending_timers.named(topic, [key])
            request = pb.GetTimerRequest(topic=topic or "", key=key)
        else:
            request = pb.GetTimerRequest(timer_id=raw_ids([the_timer(timer)]))
        answer = await self._call(
            lambda node, left_s: node.timers.GetTimer(request, timeout=left_s), timeout
        )
        return pending_timers.info(answer, request.timer_id)

    async def list_timers(
        self,
        topic: str,
        *,
        page_size: int = pending_timers.PAGE_SIZE,
        timeout: Seconds | None = None,  # noqa: ASYNC109
        **where: Unpack[Where],
    ) -> AsyncIterator[TimerInfo]:
        """Iterate over the pending timers of a topic that `where` picks, as they fire.

        It reads page by page as it goes: a timer that is there all the while is seen once.
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
        timeout: Seconds | None = None,  # noqa: ASYNC109
        **where: Unpack[Where],
    ) -> tuple[list[TimerInfo], bytes]:
        """Return a page of `list_timers`, and the token of the next; empty: it was the last.

        A page may be short, or empty, and not be the last.
        """
        request = pb.ListTimersRequest(filter=pending_timers.where(topic, where), page_token=token)
        rows.put(request, "page_size", page_size)
        answer = await self._call(
            lambda node, left_s: node.timers.ListTimers(request, timeout=left_s), timeout
        )
        return [*pending_timers.infos(topic, answer.timers)], answer.next_page_token

    async def count_timers(
        self,
        topic: str,
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
    ) -> TimerCounts:
        """Return how many timers of a topic are pending, and how soon they are due."""
        rows.utf8("topic", topic)
        request = pb.CountTimersRequest(topic=topic)
        answer = await self._call(
            lambda node, left_s: node.timers.CountTimers(request, timeout=left_s), timeout
        )
        return pending_timers.counts(answer)

    async def _call(
        self,
        method: Method[T],
        timeout: Seconds | None,  # noqa: ASYNC109
        *,
        repeatable: bool = True,
        on_doubt: Callable[[], None] = lambda: None,
    ) -> T:
        """Return the leader's answer to a unary call; see Nodes.call."""
        return await self.nodes().call(
            method,
            within_s=self.within_s(timeout),
            repeatable=repeatable,
            on_doubt=on_doubt,
        )
