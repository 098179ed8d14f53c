"""Recurring timers, for chaos/oracle/story.py: which occurrences of which series become timers.

1. A SERIES entry creates a series if its topic exists and no other series has the key.
2. Any other SERIES entry changes or deletes one, and cancels its pending occurrence, whose number
   is free again. A change that makes the definition invalid changes nothing.
3. A row of an OCCURRENCES entry counts if its series is neither paused nor over, has no pending
   occurrence, and has ended as many as the row's number less one. planned_ms = -1 ends the series.
4. An occurrence ends when its timer fires or ends in another way. A reschedule moves it.
5. Its planned time is the first after the one before, or after the time of an entry that begins the
   series again. If that time has passed: fire_all takes it, fire_once the latest, skip the next.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from heapq import merge
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim

from chaos.history.history import mark_of
from timer.entries.series_payloads import AlterSeries, CreateSeries, DeleteSeries, Planned, SeriesOp
from timer.model.columns import encode_headers
from timer.model.recurrence import Misfire, SeriesSpec
from timer.model.timer_errors import InvalidRequestError

SLACK_MS: Final = 1_000
"""From the moment for which a leader plans to the time of the entry, at most."""

Timer = tuple[int, int]
"""(due, seq)."""


class OccurrenceRow(NamedTuple):
    """A timer that is an occurrence, or a series that waits for one."""

    topic: int
    key: str
    series: int
    number: int
    seq: int
    """0: the series waits."""
    planned_ms: int | None
    since_ms: int | None
    """The series has waited since then. None: a reschedule made the timer."""
    at_ms: int
    """Time of the entry that ended the wait."""
    untrue: bool
    """The planned time is not that of the definition."""


class SeriesChange(NamedTuple):
    """A SERIES entry that took effect."""

    topic: int
    key: str
    op: str
    fields: dict[str, Any]
    series_index: int


@dataclass(slots=True)
class OneSeries:
    """One series after the last entry."""

    topic: int
    key: bytes
    spec: SeriesSpec
    last_ms: int
    """The next planned time is later."""
    since_ms: int
    ended: int = 0
    planned_ms: int = 0
    pending: Timer | None = None
    over: bool = False

    @property
    def waits(self) -> bool:
        """Whether it needs an occurrence."""
        return self.pending is None and not self.over and not self.spec.paused


@dataclass(slots=True)
class SeriesStory:
    """All series after the last entry."""

    series: dict[int, OneSeries] = field(default_factory=dict)
    made: int = 0
    index: int = 0
    """Of the entry that is applied."""
    now_ms: int = 0
    """Its time."""
    rows: list[OccurrenceRow] = field(default_factory=list)
    changes: list[SeriesChange] = field(default_factory=list)
    _number_of: dict[Timer, int] = field(default_factory=dict)
    """Pending occurrence -> its series."""

    def change(self, op: SeriesOp, topics: Iterable[int]) -> Timer | None:
        """Apply a SERIES entry; return the occurrence that it cancels. `topics`: that exist."""
        if isinstance(op, CreateSeries):
            known = {(each.topic, each.key) for each in self.series.values()}
            if op.topic in topics and (op.topic, op.key) not in known:
                self.made += 1
                made = OneSeries(op.topic, op.key, op.spec, op.last_ms, self.now_ms)
                self.series[self.made] = made
                self._note_change(made, "create_series", op.spec.pack())
            return None
        one = self.series.get(op.series)
        if one is None:
            return None
        if isinstance(op, AlterSeries):
            try:
                spec = one.spec.with_changes(op.changes).check()
                spec.check_size(one.key)
            except InvalidRequestError:
                return None
            one.spec, one.over, one.last_ms = spec, False, op.last_ms or one.last_ms
            self._note_change(one, "alter_series", dict(op.changes))
        else:
            self._note_change(one, "delete_series", {})
        cancelled, one.pending, one.since_ms = one.pending, None, self.now_ms
        if cancelled is not None:
            del self._number_of[cancelled]
        if isinstance(op, DeleteSeries):
            del self.series[op.series]
        return cancelled

    def _note_change(self, one: OneSeries, op: str, fields: dict[str, Any]) -> None:
        if "misfire" in fields:
            fields["misfire"] = Misfire(fields["misfire"]).name.lower()
        said = {name: value for name, value in fields.items() if not isinstance(value, bytes)}
        key = one.key.decode(errors="replace")
        self.changes.append(SeriesChange(one.topic, key, op, said, self.index))

    def occur(self, planned: Planned, first_seq: int) -> list[int]:
        """Apply an OCCURRENCES entry; return the places of the rows that become timers."""
        taken = []
        rows = zip(*(column.tolist() for column in planned), strict=True)
        for at, (number, nth, planned_ms, due_ms) in enumerate(rows):
            one = self.series.get(number)
            if one is None or not one.waits or nth != one.ended + 1:
                continue
            untrue = not is_next(one, planned_ms, self.now_ms)
            if planned_ms < 0:
                one.over = True
                if untrue:
                    self._note(number, 0, None, untrue=True)
                continue
            self._note(number, first_seq + at, planned_ms, untrue=untrue)
            one.pending, one.planned_ms = (due_ms, first_seq + at), planned_ms
            self._number_of[one.pending] = number
            taken.append(at)
        return taken

    def _note(self, number: int, seq: int, planned_ms: int | None, *, untrue: bool) -> None:
        one, key = self.series[number], self.series[number].key.decode(errors="replace")
        since_ms = None if seq and planned_ms is None else one.since_ms
        row = one.topic, key, number, one.ended + 1, seq, planned_ms, since_ms, self.now_ms, untrue
        self.rows.append(OccurrenceRow(*row))

    def end(self) -> None:
        """Note the series that wait at the end of the log."""
        for number, one in self.series.items():
            if one.waits:
                self._note(number, 0, None, untrue=False)

    def mark(self, series: int) -> int:
        """Return the mark in the payload of a series."""
        return mark_of(self.series[series].spec.payload)

    def sizes(self, series: int, number: int) -> tuple[int, int]:
        """Return the bytes of an occurrence's payload, and of its headers."""
        one = self.series[series]
        named = {"timer-series": str(series), "timer-series-key": one.key.decode(errors="replace")}
        own = encode_headers({**named, "timer-occurrence": str(number)})
        return len(one.spec.payload), len(one.spec.headers) + len(own)

    def note_ends(self, timers: Iterable[Timer]) -> None:
        """Note timers that fired, or that ended if they were pending."""
        for timer in timers if self._number_of else ():
            if (number := self._number_of.pop(timer, 0)) != 0:
                one = self.series[number]
                one.pending, one.since_ms, one.last_ms = None, self.now_ms, one.planned_ms
                one.ended += 1

    def note_move(self, old: Timer, new: Timer) -> None:
        """Note a rescheduled timer."""
        if (number := self._number_of.pop(old, 0)) != 0:
            self._number_of[new] = number
            self.series[number].pending = new
            self._note(number, new[1], None, untrue=False)

    def delete_topic(self, topic: int) -> None:
        """Delete the series of a topic that was deleted."""
        for number in [number for number, one in self.series.items() if one.topic == topic]:
            one = self.series.pop(number)
            if one.pending is not None:
                del self._number_of[one.pending]


def is_next(one: OneSeries, planned_ms: int, now_ms: int) -> bool:
    """Return whether a planned time is the next one of a series; -1: whether there is none."""
    spec, first_ms = one.spec, _next_ms(one.spec, one.last_ms)
    end_ms = spec.end_ms or 1 << 62
    if first_ms is None or first_ms > end_ms or 0 < spec.max_count <= one.ended:
        return planned_ms < 0
    if first_ms > now_ms or spec.misfire is Misfire.FIRE_ALL:
        return planned_ms == first_ms
    if spec.misfire is Misfire.SKIP:
        next_ms = _next_ms(spec, now_ms)
        if next_ms is None or next_ms > end_ms:
            return planned_ms < 0 or now_ms - SLACK_MS < planned_ms <= end_ms
        lies = now_ms - SLACK_MS < planned_ms <= next_ms
    else:
        after_ms = _next_ms(spec, planned_ms)
        lies = after_ms is None or after_ms > min(now_ms, end_ms) - SLACK_MS
        lies &= planned_ms <= now_ms
    lies &= first_ms <= planned_ms <= end_ms
    return lies and planned_ms == _next_ms(spec, planned_ms - 1)


def _next_ms(spec: SeriesSpec, after_ms: int) -> int | None:
    """Return the first time of a definition after `after_ms`; None: there is none."""
    if spec.every_ms:
        steps = max(0, (after_ms - spec.start_ms) // spec.every_ms + 1)
        return spec.start_ms + steps * spec.every_ms
    after_ms = max(after_ms, spec.start_ms - 1)
    after = datetime.fromtimestamp(after_ms / 1000, zone := ZoneInfo(spec.zone or "UTC"))
    times: Iterable[datetime] = (fixed := CronSim(spec.cron, after))
    if fixed.fixup_tz is None:  # it follows the clock: by each offset of the zone, while that holds
        offsets = {(after + timedelta(days=14 * n)).utcoffset() or timedelta() for n in range(28)}
        shifted = (CronSim(spec.cron, after.astimezone(timezone(each))) for each in offsets)
        times = (t for t in merge(*shifted) if t.utcoffset() == t.astimezone(zone).utcoffset())
    return next((ms for each in times if (ms := round(each.timestamp() * 1000)) > after_ms), None)
