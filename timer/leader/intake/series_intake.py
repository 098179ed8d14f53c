"""Series on the leader: creations, changes and deletions, and the entries with next occurrences.

create, alter, delete --checks--> SERIES entry
step --some series wait--> OCCURRENCES entry, one at a time --applied--> step
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from timer.entries.entry_frame import EntryKind
from timer.entries.series_payloads import (
    AlterSeries,
    CreateSeries,
    DeleteSeries,
    SeriesOp,
    encode_occurrences,
    encode_series,
)
from timer.leader.intake.admission import Admission
from timer.leader.intake.count_limits import CountLimits, check_series
from timer.leader.intake.occurrence_planner import NoteUnplanned, OccurrencePlanner
from timer.model.feature_level import LEVEL_OF_SERIES
from timer.model.recurrence import Calendar, SeriesSpec, check_first
from timer.model.timer_errors import EngineError, InvalidRequestError, NotFoundError
from timer.model.units import Now, TopicId, UnixMs
from timer.state.machine import Machine
from timer.state.series_table import SeriesView

Answer = Callable[[object], None]
"""Gets the Applied of an entry, or the EngineError for which there is none."""
Propose = Callable[[EntryKind, list[bytes], Now, Answer], bool]
"""Appends an entry; returns whether the log accepted it."""


class CheckChange(Protocol):
    """Checks that a change of a topic's series may be appended now; raises an EngineError."""

    def __call__(self, topic: TopicId, *, new: bool) -> None:
        """`new`: it creates a series."""


class SeriesHooks(NamedTuple):
    """The leader's functions that series need."""

    propose: Propose
    change: Propose
    """The same, counted as a request in flight."""
    check: CheckChange
    on_unplanned: NoteUnplanned
    """See OccurrencePlanner."""


class SeriesIntake:
    """Changes of series, and their occurrences, for the leader of one epoch."""

    def __init__(
        self,
        machine: Machine,
        admission: Admission,
        calendar: Calendar,
        limits: CountLimits,
        hooks: SeriesHooks,
    ) -> None:
        self._machine, self._admission, self._calendar = machine, admission, calendar
        self._limits, self._hooks = limits, hooks
        self._planner = OccurrencePlanner(machine, admission, calendar, hooks.on_unplanned)
        self._creating = 0
        self._in_flight = False
        """Occurrences were appended and are not applied."""
        self.rejected = False
        """The log rejected the last entry with occurrences."""

    # ---- requests

    def check_count(self) -> None:
        """Check that the cluster may have one more series.

        Raises:
            InvalidRequestError: the feature level is too low.
            LimitReachedError: the cluster has the most series that it may have.
        """
        if self._machine.level < LEVEL_OF_SERIES:
            limit = f"recurring timers need {LEVEL_OF_SERIES}: version 0.2 or later on all nodes"
            raise InvalidRequestError("feature_level", self._machine.level, limit)
        check_series(self._limits, self._machine, self._creating)

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Reserve room for one more series until the end of the block.

        Raises:
            InvalidRequestError, LimitReachedError: see check_room.
        """
        self.check_count()
        self._creating += 1
        try:
            yield
        finally:
            self._creating -= 1

    def create(self, topic: TopicId, key: bytes, spec: SeriesSpec, now: Now, done: Answer) -> None:
        """Create a series; `done` gets the SeriesApplied.

        Raises:
            InvalidRequestError: names field, value and limit.
            LimitReachedError: the cluster has the most series that it may have.
            OverloadedError: too much is in flight already; the request was not accepted.
            DiskFullError: there is no room for timers.
            NotReadyError, TopicDeletedError: the topic is being deleted, or was deleted.
        """
        self.check_count()
        self._hooks.check(topic, new=True)
        last_ms = spec.begins_after(now.clock_ms)
        spec = spec.with_start(now.clock_ms)
        self._check(topic, key, spec, new_times=True)
        self._creating += 1

        def answer(applied: object) -> None:
            self._creating -= 1
            done(applied)

        self._append(CreateSeries(topic, key, spec, last_ms), now, answer)

    def alter(self, series_id: int, changes: Mapping[str, Any], now: Now, done: Answer) -> None:
        """Change fields of a series (timer/model/recurrence.py); `done` gets the SeriesApplied.

        A change of its times begins it again, as does any change if it is finished: no time before
        the change occurs. A default start that has not passed is then computed again.

        Raises:
            NotFoundError: no such series.
            InvalidRequestError: names field, value and limit.
            OverloadedError: too much is in flight already; the request was not accepted.
            NotReadyError, TopicDeletedError: the topic is being deleted, or was deleted.
        """
        view = self.find(series_id)
        self._hooks.check(view.topic, new=False)
        spec = view.spec.with_changes(changes)
        restarts = not spec.has_same_times(view.spec)
        if restarts and "start_ms" not in changes and _waits_one_interval(view, now):
            spec = replace(spec, start_ms=0)
        restart_ms = UnixMs(max(spec.start_ms - 1, now.clock_ms))
        spec = spec.with_start(now.clock_ms)
        if spec.start_ms != view.spec.start_ms:
            changes = {**changes, "start_ms": spec.start_ms}
        self._check(view.topic, view.key, spec, new_times=restarts)
        if restarts:
            check_first(spec, restart_ms, self._calendar)
        last_ms = restart_ms if restarts or view.finished else UnixMs(0)
        in_flight = self._planner.changes
        in_flight[series_id] += 1

        def answer(applied: object) -> None:
            in_flight[series_id] -= 1
            if not in_flight[series_id]:
                del in_flight[series_id]
            done(applied)

        self._append(AlterSeries(series_id, changes, last_ms), now, answer)

    def delete(self, series_id: int, now: Now, done: Answer) -> None:
        """Delete a series, and cancel its pending occurrence; `done` gets the SeriesApplied.

        Raises:
            NotFoundError: no such series.
            OverloadedError: too much is in flight already; the request was not accepted.
        """
        view = self.find(series_id)
        self._hooks.check(view.topic, new=False)
        self._append(DeleteSeries(series_id), now, done)

    def find(self, series_id: int) -> SeriesView:
        """Return a series.

        Raises:
            NotFoundError: no such series.
        """
        view = self._machine.series.view(series_id)
        if view is None:
            raise NotFoundError("series", series_id)
        return view

    def _check(self, topic: TopicId, key: bytes, spec: SeriesSpec, *, new_times: bool) -> None:
        spec.check()
        if spec.cron and new_times:
            self._calendar.check(spec.cron, spec.zone)
        self.check_size(topic, key, spec)

    def check_size(self, topic: TopicId, key: bytes, spec: SeriesSpec, new: str = "") -> None:
        """Check the size of a series and of its payload. `new`: see Admission.rules.

        Raises:
            InvalidRequestError: it is too large.
        """
        limit, whose = self._admission.rules(topic, new).payload_limit
        if len(spec.payload) > limit:
            value = f"{len(spec.payload)} bytes"
            raise InvalidRequestError("payload", value, f"must have at most {limit} bytes{whose}")
        spec.check_size(key)

    def _append(self, op: SeriesOp, now: Now, done: Answer) -> None:
        self._hooks.change(EntryKind.SERIES, [encode_series(op)], now, done)

    # ---- occurrences

    @property
    def unplanned(self) -> int:
        """Number of series whose expression or zone this node's calendar does not know."""
        return len(self._machine.series.deferred)

    @property
    def is_needed(self) -> bool:
        """Whether an entry with occurrences should be appended."""
        return not self._in_flight and self._planner.is_needed

    def step(self, now: Now) -> bool:
        """Append the next occurrences, if series wait; return whether some are due already."""
        if not self.is_needed:
            return False
        planned = self._planner.next(now)
        if planned is None:
            return False
        self._in_flight, self.rejected = True, False
        payload = encode_occurrences(planned)
        appended = self._hooks.propose(EntryKind.OCCURRENCES, payload, now, self._applied)
        due = planned.due_ms[planned.planned_ms >= 0]
        return appended and bool((due <= now.clock_ms).any())

    def _applied(self, applied: object) -> None:
        self._in_flight = False
        self.rejected = isinstance(applied, EngineError)


def _waits_one_interval(view: SeriesView, now: Now) -> bool:
    """Return whether a series waits for its default start.

    With a start that was given, its times lie after the millisecond before the start.
    """
    every_ms, start_ms = view.spec.every_ms, view.spec.start_ms
    return now.clock_ms < start_ms == view.last_ms + every_ms and every_ms > 0
