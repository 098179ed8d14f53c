"""Requests about series of recurring timers: create, change, delete, show, list.

All client input about series is checked here and at the leader
(timer/leader/intake/series_intake.py). An error names field, value and limit.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np

from cluster.api import wire_rows
from cluster.api.cron_calendar import NAMED, CronCalendar
from cluster.api.owners import CreationLimits
from cluster.api.topic_filter import filter_of_caller
from cluster.api.wire_rows import RequestLimits
from cluster.rpc.caller_turns import CallerTurns
from cluster.rpc.rpc_caller import CALLER, caller_name
from cluster.security.access_rules import AccessTarget, Permission
from cluster.state.host import Host
from timer.leader.intake.quotas import NEW_TOPIC
from timer.leader.leader import Leader
from timer.model import timer_id
from timer.model.columns import decode_headers
from timer.model.recurrence import (
    TIMES_MAX,
    TIMES_PORTION,
    Misfire,
    SeriesSpec,
    check_first,
    planned_times,
)
from timer.model.timer_errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    TopicDeletedError,
)
from timer.model.units import DUE_MS_MAX, TopicId, UnixMs
from timer.ready.topic import Topic
from timer.state.apply_results import SeriesApplied
from timer.state.machine import Machine
from timer.state.series_table import SeriesView
from timerclient.proto import timer_pb2 as pb

PAGE_SIZE: Final = 100
PAGE_SIZE_MAX: Final = 1_000
SERIES_AT_ONCE: Final = 64
"""Series that are converted without a pause: about two milliseconds of work."""
CalledTopic = Callable[[Leader, str], Awaitable[Topic]]
_MISFIRES: Final = {
    pb.MISFIRE_UNSPECIFIED: Misfire.FIRE_ONCE,
    pb.MISFIRE_FIRE_ONCE: Misfire.FIRE_ONCE,
    pb.MISFIRE_FIRE_ALL: Misfire.FIRE_ALL,
    pb.MISFIRE_SKIP: Misfire.SKIP,
}
_ON_WIRE: Final = {
    Misfire.FIRE_ONCE: pb.MISFIRE_FIRE_ONCE,
    Misfire.FIRE_ALL: pb.MISFIRE_FIRE_ALL,
    Misfire.SKIP: pb.MISFIRE_SKIP,
}


def changes_of(fields: pb.SeriesFields, limits: RequestLimits) -> dict[str, Any]:
    """Return the fields that a message sets, by the names of SeriesSpec; `cron` in fields.

    Raises:
        InvalidRequestError: a number or the headers are out of range.
    """
    changes: dict[str, Any] = {}
    for field, value in fields.ListFields():
        name = field.name
        if isinstance(value, int) and not isinstance(value, bool) and not 0 <= value <= DUE_MS_MAX:
            raise InvalidRequestError(name, value, f"must be 0 to {DUE_MS_MAX}")
        if name == "end_ms":
            wire_rows.check_bound(name, value)
        elif name == "start_ms":  # an interval may count from a Monday of January 1970
            wire_rows.check_instant(name, value)
        changes[name] = value
    if "cron" in changes:
        changes["cron"] = NAMED.get(changes["cron"], changes["cron"])
    if "misfire" in changes:
        if changes["misfire"] not in _MISFIRES:
            limit = f"must be one of {', '.join(pb.Misfire.keys()[1:])}"
            raise InvalidRequestError("misfire", changes["misfire"], limit)
        changes["misfire"] = _MISFIRES[changes["misfire"]]
    if len(headers := changes.get("headers", b"")) > limits.headers_bytes_max:
        limit = f"must have at most {limits.headers_bytes_max} bytes"
        raise InvalidRequestError("headers", f"{len(headers)} bytes", limit)
    try:
        decode_headers(headers)
    except ValueError as malformed:
        raise InvalidRequestError("headers", "bytes", str(malformed)) from None
    return changes


class SeriesDesk:
    """Creates, changes and shows series, on the leader."""

    def __init__(
        self,
        host: Host,
        topic: CalledTopic,
        creations: CreationLimits,
        limits: RequestLimits,
        *,
        salt: int,
    ) -> None:
        """`topic`: returns a topic by its name, and creates it if the settings allow that."""
        self._host, self._topic, self._limits, self._salt = host, topic, limits, salt
        self._creations = creations
        self._calendar = CronCalendar()
        self._listing = CallerTurns(1)
        """Pages are made one by one: the pauses of many end in the same turn of the loop."""
        self._declaring = WeakValueDictionary[int, asyncio.Lock]()

    async def create(self, request: pb.CreateSeriesRequest) -> pb.CreateSeriesResponse:
        """Create a series, or return an equal one that has the key; `alter` makes it equal.

        Raises:
            AlreadyExistsError: a series of another definition has the key.
            InvalidRequestError: names field, value and limit.
            LimitReachedError: the cluster or the caller has the most series that it may have.
            PermissionDeniedError: the caller may not alter series.
        """
        leader, name = self._host.require_leader(), wire_rows.topic_name(request.topic)
        key, changes = self._key(request.key), changes_of(request.fields, self._limits)
        spec = SeriesSpec(**changes)
        if request.preview:
            times = self._preview(spec, request.preview)
            return pb.CreateSeriesResponse(next_ms=await _in_portions(times))
        if request.alter and (caller := CALLER.get()) is not None:
            caller.require(Permission.CANCEL, AccessTarget(name))
        found = leader.topic_or_none(name)
        known = leader.machine.series.find(found.topic_id, key) if found is not None else 0
        start_ms = leader.series.find(known).spec.start_ms if known else 0
        begun = self._with_start(replace(spec, start_ms=spec.start_ms or start_ms))
        if not known:  # all checks precede a new topic
            if found is None:
                leader.series.check_size(NEW_TOPIC, key, begun, name)
            self._check_calendar(begun)
        reserved = self._creations.reserve_series(leader, name, key)
        with reserved if found is None else nullcontext():
            topic = await self._topic(leader, name)
        known = leader.machine.series.find(topic.topic_id, key)
        if not known:
            now = self._host.now()
            applied = await self._host.ask(
                lambda done: self._creations.series(leader, topic.topic_id, key, spec, now, done)
            )
            assert isinstance(applied, SeriesApplied)
            if not isinstance(applied.refusal, AlreadyExistsError):
                _check(applied, name)
                return pb.CreateSeriesResponse(
                    series=self._series_message(leader.machine, applied.series)
                )
            known = applied.series
        # An earlier declaration may still be on its way to the log: its effect counts.
        async with self._declaring.setdefault(known, asyncio.Lock()):
            changes = leader.series.find(known).spec.changes_to(changes)
            if changes and not request.alter:
                limit = f"it differs in {', '.join(sorted(changes))}"
                limit += "; on_conflict = alter gives it this definition"
                raise AlreadyExistsError("series", request.key, limit)
            if changes:
                await self._alter(leader, known, changes, name)
        return pb.CreateSeriesResponse(
            series=self._series_message(leader.machine, known), existed=True
        )

    async def alter(self, request: pb.AlterSeriesRequest) -> pb.AlterSeriesResponse:
        """Change the given fields of a series.

        Raises:
            NotFoundError: no such topic or series.
            InvalidRequestError: names field, value and limit; or no field is given.
        """
        leader, series_id = self._leader_and_id(request.topic, request.key)
        changes = changes_of(request.fields, self._limits)
        if not changes:
            raise InvalidRequestError("fields", "none", "at least one must be given")
        await self._alter(leader, series_id, changes, request.topic)
        return pb.AlterSeriesResponse(series=self._series_message(leader.machine, series_id))

    async def _alter(
        self, leader: Leader, series_id: int, changes: Mapping[str, Any], topic: str
    ) -> None:
        now = self._host.now()
        applied = await self._host.ask(
            lambda done: leader.series.alter(series_id, changes, now, done)
        )
        assert isinstance(applied, SeriesApplied)
        _check(applied, topic)

    async def delete(self, request: pb.DeleteSeriesRequest) -> pb.DeleteSeriesResponse:
        """Delete a series.

        Raises:
            NotFoundError: no such topic or series.
        """
        leader, series_id = self._leader_and_id(request.topic, request.key)
        now = self._host.now()
        applied = await self._host.ask(lambda done: leader.series.delete(series_id, now, done))
        assert isinstance(applied, SeriesApplied)
        _check(applied, request.topic)
        return pb.DeleteSeriesResponse()

    async def get(self, request: pb.GetSeriesRequest) -> pb.GetSeriesResponse:
        """Return one series and its next times.

        Raises:
            NotFoundError: no such topic or series.
            InvalidRequestError: too many times are wanted.
        """
        leader, series_id = self._leader_and_id(request.topic, request.key)
        _check_times("next_times", request.next_times)
        times = self._next_times(leader.series.find(series_id), request.next_times)
        shown = self._series_message(leader.machine, series_id)
        return pb.GetSeriesResponse(series=shown, next_ms=await _in_portions(times))

    async def list(self, request: pb.ListSeriesRequest) -> pb.ListSeriesResponse:
        """Return a page of series, in the order of their ids.

        Without a topic, those of the topics that the caller's rules cover.

        Raises:
            NotFoundError: no such topic.
            InvalidRequestError: the page is too large.
        """
        machine = self._host.require_lease().machine
        if request.page_size > PAGE_SIZE_MAX:
            raise InvalidRequestError("page_size", request.page_size, f"at most {PAGE_SIZE_MAX}")
        topics: Sequence[int] | None = None
        if request.topic:
            topics = [wire_rows.topic_of(machine.topic_by_name, request.topic).topic_id]
        after = min(request.after_id, (1 << 63) - 1)
        async with self._listing.turn(caller_name()):
            if topics is None:
                topics = await _covered_topics(self._host.require_lease().machine)
            return await self._page(topics, after, request.page_size or PAGE_SIZE)

    async def _page(
        self, topics: Sequence[int] | None, after: int, size: int
    ) -> pb.ListSeriesResponse:
        """Return a page of series. Other work of the event loop goes on after each portion.

        Series that are deleted meanwhile may be absent, except the first one.
        """
        shown: list[pb.Series] = []
        ids = self._host.require_lease().machine.series.ids_of(topics, after, size + 1)
        for start in range(0, min(len(ids), size), SERIES_AT_ONCE):
            machine = self._host.require_lease().machine
            views = machine.series.views(ids[start : min(size, start + SERIES_AT_ONCE)])
            shown += [self._message(machine, view) for view in views]
            await asyncio.sleep(0)
        return pb.ListSeriesResponse(series=shown, more=len(ids) > size)

    def _leader_and_id(self, topic: str, key: str) -> tuple[Leader, int]:
        """Return the leader with a lease, and the id of a series."""
        leader = self._host.require_lease()
        topic_id = wire_rows.topic_of(leader.machine.topic_by_name, topic).topic_id
        series_id = leader.machine.series.find(topic_id, self._key(key))
        if not series_id:
            raise NotFoundError("series", key)
        return leader, series_id

    def _key(self, key: str) -> bytes:
        data, most = key.encode(), self._limits.key_bytes_max
        if not 1 <= len(data) <= most:
            raise InvalidRequestError("key", f"{len(data)} bytes", f"must have 1 to {most} bytes")
        return data

    def _with_start(self, spec: SeriesSpec) -> SeriesSpec:
        """Return the definition of a series that is created now. The calendar is not asked."""
        return spec.with_start(self._host.now().clock_ms).check()

    def _check_calendar(self, spec: SeriesSpec) -> None:
        """Check the expression, zone and first time of a series that is created now."""
        if spec.cron:
            self._calendar.check(spec.cron, spec.zone)
        check_first(spec, spec.begins_after(self._host.now().clock_ms), self._calendar)

    def _preview(self, spec: SeriesSpec, count: int) -> Iterator[UnixMs]:
        _check_times("preview", count)
        spec, now_ms = self._with_start(spec), self._host.now().clock_ms
        self._check_calendar(spec)
        count = min(count, spec.max_count or count)
        return planned_times(spec, spec.begins_after(now_ms), now_ms, count, self._calendar)

    def _series_message(self, machine: Machine, series_id: int) -> pb.Series:
        view = machine.series.view(series_id)
        if view is None:
            raise NotFoundError("series", series_id)
        shown = self._message(machine, view)
        if not (view.seq or view.spec.paused):  # it is planned, or finished, in a moment
            with suppress(InvalidRequestError):  # or waits for a leader that knows its zone
                planned_ms = next(self._next_times(view, 1), None)
                shown.planned_ms, shown.finished = planned_ms or 0, planned_ms is None
        return shown

    def _next_times(self, view: SeriesView, count: int) -> Iterator[UnixMs]:
        """Yield up to `count` next planned times, the pending occurrence first.

        Those of a paused series are the times that it would have if it were resumed now.
        """
        now_ms, last_ms = self._host.now().clock_ms, view.last_ms
        if view.spec.max_count:
            count = min(count, view.spec.max_count - view.number)
        if view.seq and count > 0:
            now_ms, last_ms, count = max(now_ms, view.due_ms), view.planned_ms, count - 1
            yield last_ms
        if not view.finished:
            yield from planned_times(view.spec, last_ms, now_ms, count, self._calendar)

    def _message(self, machine: Machine, view: SeriesView) -> pb.Series:
        spec = view.spec
        fields = spec.pack() | {"misfire": _ON_WIRE[spec.misfire]}
        out = pb.Series(
            series_id=view.series_id,
            topic=machine.topics[view.topic].name,
            key=view.key.decode(),
            fields=pb.SeriesFields(**fields),
            ended=view.number,
            last_ms=view.last_ms,
            finished=view.finished,
        )
        if view.seq:
            row = np.array([view.due_ms], np.int64), np.array([view.seq], np.uint64)
            out.timer_id, out.planned_ms = timer_id.encode(*row, self._salt), view.planned_ms
        return out


async def _in_portions(times: Iterable[UnixMs]) -> list[UnixMs]:
    """Return all times. Other work of the event loop goes on after each portion."""
    found: list[UnixMs] = []
    for each in times:
        found.append(each)
        if len(found) % TIMES_PORTION == 0:
            await asyncio.sleep(0)
    return found


def _check_times(field: str, count: int) -> None:
    if count > TIMES_MAX:
        raise InvalidRequestError(field, count, f"must be at most {TIMES_MAX}")


def _check(applied: SeriesApplied, topic: str) -> None:
    """Raise the reason for which a change of the series had no effect."""
    if isinstance(applied.refusal, TopicDeletedError):
        raise TopicDeletedError(topic)
    if applied.refusal is not None:
        raise applied.refusal


async def _covered_topics(machine: Machine) -> list[TopicId] | None:
    """Return the topics with series that the caller's rules cover. None: all topics."""
    if (shown := filter_of_caller()) is None:
        return None
    names = sorted(machine.topics[TopicId(each)].name for each in machine.series.topics())
    found = await shown.after(names, "", len(names))
    there = [machine.topic_by_name.get(name) for name in found]  # some may be deleted meanwhile
    return [each.topic_id for each in there if each is not None]
