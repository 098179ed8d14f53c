"""Values of calls about existing timers.

    Where        selects pending timers of a topic, by due time and key
    Changed      a number of changed timers; Redriven: of dead letters sent back
    TimerInfo    one timer, complete while it is pending
    TimerCounts  how many timers are pending, and how soon they are due

The functions convert an application's arguments to requests of the contract, and responses to
results. The client (timerclient/client/aio.py) sends them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self, TypedDict

from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.rows.scheduled_timers import HasTimerId, Timer
from timerclient.values import ids
from timerclient.values.codecs import PayloadReader
from timerclient.values.errors import InvalidRequest, NotPending
from timerclient.values.results import CancelResult, RescheduleResult, TimerState

CHANGES_MAX: Final = 256
"""Timers in one request by key; this is also the server's limit."""
PAGE_SIZE: Final = 1_000
Instant = datetime | int
"""An aware datetime, or Unix milliseconds."""


class Where(TypedDict, total=False):
    """Selects pending timers: effective due in [due_from, due_to), key with `key_prefix`.

    A prefix is compared with the keys of all timers of the topic in that range.
    """

    due_from: Instant | None
    due_to: Instant | None
    key_prefix: str


@dataclass(frozen=True, slots=True)
class TimerInfo(PayloadReader, HasTimerId):
    """One timer. Fields from `topic` to `held` are set for a pending timer only."""

    raw: bytes
    """Its id, 15 bytes."""
    state: TimerState
    topic: str = ""
    requested_ms: int | None = None
    """The requested due time, Unix milliseconds."""
    payload: bytes | None = None
    key: str | None = None
    headers: Mapping[str, str] | None = None
    held: bool = False
    """The timer is overdue because its topic is paused, or was just resumed."""
    replaced_by: str | None = None
    """Of a CANCELLED timer that was rescheduled: id of the timer that fires instead. None: not
    known. After more than 1,024 reschedules, that timer may have been rescheduled, too."""
    ordering_key: str | None = None
    priority: int | None = None
    """0 to 9, of a pending timer."""

    def __repr__(self) -> str:
        return (
            f"TimerInfo({self.id!r}, {self.state.name}, topic={self.topic!r}, key={self.key!r}, "
            f"due_ms={self.due_ms})"
        )


@dataclass(frozen=True, slots=True)
class TimerCounts:
    """How many timers of a topic, or of a filter, are pending."""

    pending: int
    within: Mapping[timedelta, int]
    """Timers due within 5 s, 1 m, 10 m, 1 h, 6 h, 1 d, 7 d, 30 d. Each includes those before.
    Empty for a filter."""
    clock_ms: int
    """The cluster's time, from which these spans are measured."""

    @property
    def beyond(self) -> int:
        """Timers due later than the longest span of `within`."""
        return self.pending - max(self.within.values(), default=0)


class Rescheduled(NamedTuple):
    """Outcome of one reschedule."""

    result: RescheduleResult
    timer: Timer | None
    """The new timer. None: it was not rescheduled."""
    replaced_by: str | None = None
    """Id of the timer that fires instead, if this one was rescheduled before; None: not known."""


class Changed(int):
    """Number of timers that a change by filter changed."""

    exact: bool
    """False: an answer was lost, for example in a failover; the true number may be higher."""

    @classmethod
    def of(cls, count: int, *, exact: bool) -> Self:
        """Return a count."""
        changed = cls(count)
        changed.exact = exact
        return changed


class Redriven(Changed):
    """Number of dead letters that were sent back."""

    topics: Mapping[str, int] = MappingProxyType({})
    """Topic -> letters that went back to it."""
    homeless: int = 0
    """Letters that stay, because their headers name no existing topic to which you may produce, or
    no group with this dead-letter topic, set or default."""
    leased: int = 0
    """Letters of your choice that stay, because a consumer has them."""


def filter_of(topic: str, selection: Where) -> pb.TimerFilter:
    """Return a filter.

    Raises:
        InvalidRequest: An argument is of the wrong type, or out of range.
        TypeError: An argument has another name.
    """
    unknown = selection.keys() - Where.__annotations__.keys()
    if unknown:
        msg = f"unexpected keyword argument {min(unknown)!r}: due_from, due_to and key_prefix are"
        raise TypeError(msg)
    return pb.TimerFilter(
        topic=rows.text("topic", topic),
        due_from_ms=rows.bound_ms("due_from", selection.get("due_from")),
        due_to_ms=rows.bound_ms("due_to", selection.get("due_to")),
        key_prefix=rows.text("key_prefix", selection.get("key_prefix", "")),
    )


def by_ids(raw: Sequence[bytes]) -> pb.RescheduleRequest:
    """Return a reschedule of timers by their raw ids."""
    return pb.RescheduleRequest(timer_ids=b"".join(raw))


def by_keys(topic: str | None) -> Callable[[Sequence[str]], pb.RescheduleRequest]:
    """Return a function that makes a reschedule of a topic's timers by keys."""
    return lambda keys: pb.RescheduleRequest(keys=timer_keys(topic, keys))


def timer_keys(topic: str | None, keys: Sequence[str]) -> pb.TimerKeys:
    """Return timers by their keys.

    Raises:
        InvalidRequest: The topic is missing, or a key is empty or not a string.
    """
    if not topic:
        raise InvalidRequest.of("topic", topic, "must be given with a key")
    encoded = [rows.utf8("key", key) for key in keys]
    if not all(encoded):
        raise InvalidRequest.of("key", "", "must not be empty")
    name = rows.text("topic", topic)
    return pb.TimerKeys(topic=name, key_sizes=map(len, encoded), keys=b"".join(encoded))


def reschedule_outcomes(answer: pb.RescheduleResponse) -> list[Rescheduled | None]:
    """Return the outcome of each timer of a request. None: unchanged; send the timer again."""
    out: list[Rescheduled | None] = []
    others = successors(answer.successor_ids, len(answer.results))
    for result, raw, other in zip(answer.results, ids.split(answer.timer_ids), others, strict=True):
        if result == pb.RESCHEDULE_RESULT_LEFT:
            out.append(None)
            continue
        done = RescheduleResult(result)
        moved = done is RescheduleResult.RESCHEDULED
        out.append(Rescheduled(done, Timer(raw) if moved else None, other))
    return out


def successors(raw: bytes, n: int) -> list[str | None]:
    """Return the ids of the timers that fire instead of n rescheduled ones; None: none is known."""
    return [ids.to_text(one) if any(one) else None for one in ids.split(raw)] or [None] * n


def cancel_outcomes(answer: pb.CancelResponse) -> list[CancelResult]:
    """Return the outcome of each timer of a request."""
    others = successors(answer.successor_ids, len(answer.results))
    return [
        CancelResult.RESCHEDULED if other else CancelResult(result)
        for result, other in zip(answer.results, others, strict=True)
    ]


def new_timer_of(one: Rescheduled, *, timer_id: str = "", key: str = "") -> Timer:
    """Return the new timer of a call that named a timer by its id, or by its key.

    Raises:
        NotPending: The timer was not rescheduled.
    """
    if one.timer is not None:
        return one.timer
    if timer_id:
        raise NotPending.of(timer_id, one.result, one.replaced_by)
    raise NotPending.of_key(key, "rescheduled")


def infos(topic: str, timers: pb.PendingTimers, held: int) -> Iterator[TimerInfo]:
    """Yield the timers of a page. The first `held` of them are held."""
    raw = ids.split(timers.timer_ids)
    payloads = rows.slices(timers.payload_sizes, timers.payloads)
    keys = rows.slices(timers.key_sizes, timers.keys, len(raw))
    headers = rows.slices(timers.headers_sizes, timers.headers, len(raw))
    orders = rows.slices(timers.ordering_key_sizes, timers.ordering_keys, len(raw))
    levels = timers.priorities or [rows.PRIORITY_DEFAULT] * len(raw)
    columns = raw, timers.due_ms, payloads, keys, headers, orders, levels
    for at, row in enumerate(zip(*columns, strict=True)):
        one, due_ms, payload, key, texts, ordering_key, priority = row
        yield TimerInfo(
            one,
            TimerState.PENDING,
            topic,
            due_ms,
            payload,
            key.decode() or None,
            rows.decode_headers(texts),
            held=at < held,
            ordering_key=ordering_key.decode() or None,
            priority=priority,
        )


def info(answer: pb.GetTimerResponse, raw: bytes) -> TimerInfo:
    """Return one timer; `raw` is the id in the request."""
    if answer.state == pb.TIMER_STATE_PENDING:
        return next(infos(answer.topic, answer.timer, int(answer.held)))
    replaced_by = ids.to_text(answer.successor_id) if answer.successor_id else None
    return TimerInfo(raw, TimerState(answer.state), replaced_by=replaced_by)


def count_request(topic: str, selection: Where) -> pb.CountTimersRequest:
    """Return a request for the counts of a topic, or for the number of a filter's timers.

    Raises:
        InvalidRequest: See `filter_of`.
    """
    chosen = filter_of(topic, selection)
    if chosen == pb.TimerFilter(topic=topic):
        return pb.CountTimersRequest(topic=topic)
    return pb.CountTimersRequest(filter=chosen)


def counts(answer: pb.CountTimersResponse, pending: int) -> TimerCounts:
    """Return the counts of a topic or a filter. `pending`: of all responses."""
    spans = [timedelta(milliseconds=ms) for ms in answer.horizon_ms]
    within = dict(zip(spans, answer.within, strict=True))
    return TimerCounts(pending, within, answer.clock_ms)


def times(when: Mapping[str, Any], n: int | None = None) -> dict[str, Sequence[int]]:
    """Return a request's due_ms, delay_ms or delay_level; one value, or one for each of n.

    Raises:
        InvalidRequest: No due time is given, there is neither one value nor n, or a value is not a
            time.
    """
    if all(value is None for value in when.values()):
        raise InvalidRequest.of("when", None, "give delay, delay_level, due or due_ms; 0: at once")
    way, values = rows.moment(when, n)
    return {way: values}
