"""The next occurrences of series that wait: their times, by intervals, calendar and policy.

    waiting series --at most 1,024--> planned times --tick of the topic--> OCCURRENCES entry

Intervals are computed in columns. Cron expressions are computed one by one by the calendar. An
entry begins none after CALLS_MAX calls of the calendar. A call takes some 50 µs, and up to 0.4 ms
for a new expression with rare times. The latest of many missed times takes some thirty calls.
Series of equal expressions share the result.
"""

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from timer.entries.series_payloads import ENDED, OCCURRENCES_MAX, Planned
from timer.leader.intake.admission import Admission
from timer.model.columns import I64, U64, RowArray
from timer.model.recurrence import Calendar, Misfire, SeriesSpec, planned_time
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import DUE_MS_MAX, Now, UnixMs
from timer.state.machine import Machine
from timer.state.series_table import MISFIRE, SeriesView

CALLS_MAX: Final = 64
"""Calls of the calendar in one entry, about."""

NoteUnplanned: TypeAlias = Callable[[SeriesView, InvalidRequestError], object]
"""Gets the first series that this node cannot plan for a reason, and the reason."""


class NoCalendar:
    """Stands for a calendar where none is needed: it knows no expression."""

    def check(self, cron: str, zone: str) -> None:
        """Refuse the expression."""
        del zone
        raise InvalidRequestError("cron", cron, "this program has no calendar; use every_ms")

    def next_after(self, cron: str, zone: str, after_ms: UnixMs) -> UnixMs | None:
        """Refuse the expression."""
        del after_ms
        self.check(cron, zone)
        return None


class _CountedCalendar:
    """A calendar that counts its calls."""

    def __init__(self, calendar: Calendar) -> None:
        self.check = calendar.check
        self._calendar, self.calls = calendar, 0

    def next_after(self, cron: str, zone: str, after_ms: UnixMs) -> UnixMs | None:
        """See Calendar."""
        self.calls += 1
        return self._calendar.next_after(cron, zone, after_ms)


class OccurrencePlanner:
    """Plans the next occurrences, for the leader of one epoch."""

    def __init__(
        self,
        machine: Machine,
        admission: Admission,
        calendar: Calendar,
        on_unplanned: NoteUnplanned = lambda view, why: None,
    ) -> None:
        """`on_unplanned`: called once for each unknown expression or zone, however many series."""
        self._machine, self._admission, self._calendar = machine, admission, calendar
        self._on_unplanned = on_unplanned
        self._reasons: set[str] = set()
        """Those that `on_unplanned` got."""
        machine.series.resume()  # this calendar may know more than that of an earlier epoch
        self.changes: Counter[int] = Counter()
        """Series -> its changes in flight. An occurrence behind them in the log would be planned by
        the definition before them."""

    @property
    def is_needed(self) -> bool:
        """Whether some series waits for an occurrence that can be planned."""
        waiting = self._machine.series.waiting
        return len(waiting) > len(waiting.keys() & self.changes.keys())

    def next(self, now: Now) -> Planned | None:
        """Return the next occurrences, at most one of a series; None: none is needed."""
        if not self.is_needed:
            return None
        ready = (each for each in self._machine.series.waiting if each not in self.changes)
        ids = np.array(sorted(islice(ready, OCCURRENCES_MAX)), np.uint64)
        rows, _ = self._machine.series.rows_of(ids)
        planned = np.empty(len(rows), np.int64)
        known = np.ones(len(rows), np.bool_)
        every = rows["every_ms"] > 0
        planned[every] = interval_times(rows[every], now.clock_ms)
        planned[~every], known[~every] = self._cron_times(ids[~every], now)
        planned[(rows["max_count"] > 0) & (rows["number"] >= rows["max_count"])] = ENDED
        if not known.any():
            return None
        rows, ids, planned = rows[known], ids[known], planned[known]
        return Planned(
            ids, rows["number"] + np.uint64(1), planned, self._due_times(rows, planned, now)
        )

    def _cron_times(self, ids: U64, now: Now) -> tuple[I64, npt.NDArray[np.bool_]]:
        """Return the planned times of series with cron expressions, (n,), and which are known."""
        planned = np.full(len(ids), ENDED, np.int64)
        known = np.ones(len(ids), np.bool_)
        computed: dict[tuple[SeriesSpec, int], UnixMs | None] = {}
        calendar = _CountedCalendar(self._calendar)
        for place, series_id in enumerate(ids.tolist()):
            if calendar.calls >= CALLS_MAX:
                known[place:] = False  # not even a view of these: a thousand take 15 ms
                break
            view = self._machine.series.view(series_id)
            assert view is not None, series_id
            timing = SeriesSpec(
                cron=view.spec.cron,
                zone=view.spec.zone,
                start_ms=view.spec.start_ms,
                end_ms=view.spec.end_ms,
                misfire=view.spec.misfire,
            )
            name = timing, int(view.last_ms)
            if name not in computed:
                try:
                    computed[name] = planned_time(timing, view.last_ms, now.clock_ms, calendar)
                except InvalidRequestError as why:
                    self._machine.series.defer(view.series_id)
                    if str(why) not in self._reasons:
                        self._reasons.add(str(why))
                        self._on_unplanned(view, why)
            if name not in computed:
                known[place] = False
            elif (time_ms := computed[name]) is not None:
                planned[place] = time_ms
        return planned, known

    def _due_times(self, rows: RowArray, planned: I64, now: Now) -> I64:
        """Return the due times: the topics' ticks hold, no other policy does."""
        due = np.maximum(planned, 0)
        floor_ms = self._machine.last_read_time_ms
        for topic in np.unique(rows["topic"]).tolist():
            mine = rows["topic"] == topic
            due[mine] = self._admission.rules(topic).rounded_to_tick(due[mine], now, floor_ms)
        return due


def interval_times(rows: RowArray, now_ms: int) -> I64:
    """Return the planned times of series with intervals, (n,); ENDED: past their end.

    Equal to `planned_time` of each row.
    """
    every, start = rows["every_ms"], rows["start_ms"]
    end = np.where(rows["end_ms"] > 0, rows["end_ms"], DUE_MS_MAX)
    first = _nth(every, start, rows["last_ms"])
    misfire = rows["flags"] & MISFIRE
    late = first <= now_ms
    latest = _nth(every, start, np.minimum(now_ms, end)) - every
    planned = np.where(late & (misfire == Misfire.FIRE_ONCE), latest, first)
    later = _nth(every, start, np.full(len(rows), now_ms, np.int64))
    planned = np.where(late & (misfire == Misfire.SKIP), later, planned)
    return np.where((first > end) | (planned > end), ENDED, planned)


def _nth(every: I64, start: I64, after: I64) -> I64:
    """Return the first of start, start + every, … after `after`, (n,)."""
    later = start + ((after - start) // every + 1) * every
    return np.where(after < start, start, later)
