"""Recurring timers, for chaos/oracle/story.py: which occurrences of which series become timers.

1. A SERIES entry creates a series if its topic exists and no other series has the key.
2. Any other SERIES entry changes or deletes one, and cancels its pending occurrence, whose number
   is free again. A change that makes the definition invalid changes nothing.
3. A row of an OCCURRENCES entry counts if its series is neither paused nor over, has no pending
   occurrence, and has ended as many as the row's number less one. planned_ms = -1 ends the series.
4. An occurrence ends when its timer fires or ends in another way. A reschedule moves it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from timer.entries.series_payloads import CreateSeries, DeleteSeries, Planned, SeriesOp
from timer.model.columns import encode_headers
from timer.model.recurrence import SeriesSpec
from timer.model.timer_errors import InvalidRequestError

Timer = tuple[int, int]
"""(due, seq)."""


@dataclass(slots=True)
class OneSeries:
    """One series after the last entry."""

    topic: int
    key: bytes
    spec: SeriesSpec
    ended: int = 0
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
    _of: dict[Timer, int] = field(default_factory=dict)
    """Pending occurrence -> its series."""

    def change(self, op: SeriesOp, topics: Iterable[int]) -> Timer | None:
        """Apply a SERIES entry; return the occurrence that it cancels. `topics`: that exist."""
        if isinstance(op, CreateSeries):
            known = {(each.topic, each.key) for each in self.series.values()}
            if op.topic in topics and (op.topic, op.key) not in known:
                self.made += 1
                self.series[self.made] = OneSeries(op.topic, op.key, op.spec)
            return None
        one = self.series.get(op.series)
        if one is None:
            return None
        if not isinstance(op, DeleteSeries):
            try:
                spec = one.spec.changed(op.changes).check()
                spec.check_size(one.key)
            except InvalidRequestError:
                return None
            one.spec, one.over = spec, False
        cancelled, one.pending = one.pending, None
        if cancelled is not None:
            del self._of[cancelled]
        if isinstance(op, DeleteSeries):
            del self.series[op.series]
        return cancelled

    def occur(self, planned: Planned, first_seq: int) -> list[int]:
        """Apply an OCCURRENCES entry; return the places of the rows that become timers."""
        taken = []
        rows = zip(*(column.tolist() for column in planned), strict=True)
        for at, (number, nth, planned_ms, due_ms) in enumerate(rows):
            one = self.series.get(number)
            if one is None or not one.waits or nth != one.ended + 1:
                continue
            if planned_ms < 0:
                one.over = True
                continue
            one.pending = due_ms, first_seq + at
            self._of[one.pending] = number
            taken.append(at)
        return taken

    def sizes(self, series: int, number: int) -> tuple[int, int]:
        """Return the bytes of an occurrence's payload, and of its headers."""
        one = self.series[series]
        named = {"timer-series": str(series), "timer-series-key": one.key.decode(errors="replace")}
        own = encode_headers({**named, "timer-occurrence": str(number)})
        return len(one.spec.payload), len(one.spec.headers) + len(own)

    def ended(self, timers: Iterable[Timer]) -> None:
        """Note timers that fired, or that ended if they were pending."""
        for timer in timers if self._of else ():
            if (number := self._of.pop(timer, 0)) != 0:
                self.series[number].pending = None
                self.series[number].ended += 1

    def moved(self, old: Timer, new: Timer) -> None:
        """Note a rescheduled timer."""
        if (number := self._of.pop(old, 0)) != 0:
            self._of[new] = number
            self.series[number].pending = new

    def gone(self, topic: int) -> None:
        """Delete the series of a topic that was deleted."""
        for number in [number for number, one in self.series.items() if one.topic == topic]:
            one = self.series.pop(number)
            if one.pending is not None:
                del self._of[one.pending]
