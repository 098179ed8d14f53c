"""The calendar of a node: the times of cron expressions in IANA time zones.

    five fields   minute hour day-of-month month day-of-week
    six fields    second, then the five

Daylight saving time, as in Debian's cron. Five fields whose minute and hour begin with no "*":

    skipped hour   a time in it occurs once, right after it
    doubled hour   a time in it occurs once, the first time

A name such as @daily stands for five fields. The log has the fields only.

All other expressions follow the clock: a skipped time does not occur, a doubled one occurs twice.
The leader alone asks for times. They are in the log, so replicas need not agree on time zones.
"""

import logging
from bisect import bisect_left
from calendar import monthrange
from collections.abc import Iterable, Iterator
from copy import copy
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from itertools import product
from math import ceil
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from cronsim.cronsim import Field

from timer.model.timer_errors import InvalidRequestError
from timer.model.units import DUE_MS_MAX, UnixMs
from timer.state.series_table import SeriesView

logger = logging.getLogger(__name__)

TIMES_KEPT: Final = 16_384
CLOCKS_KEPT: Final = 1_024
YEARS: Final = 50
"""Years ahead in which a time is searched for, as in the library."""
LAST_YEAR: Final = 9_000
"""No time is later. datetime ends with the year 9999."""
LAST_MS: Final = int(datetime(LAST_YEAR, 1, 1, tzinfo=UTC).timestamp() * 1000)
NAMED: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
"""Names of expressions -> their five fields."""
OF_MACHINE: Final = frozenset({"localtime", "posixrules", "posix", "right"})
"""Files and directories beside the zones in a machine's time zone data. Other machines have others,
or lack them."""
_ZONES: Final = 'must be an IANA time zone, such as "Europe/Berlin"'
_FORMS: Final = (
    "must have five fields (minute hour day month weekday), six with seconds first, or be "
    + ", ".join(NAMED)
)
_RANGES: Final = {
    "Bad second": "0 to 59",
    "Bad minute": "0 to 59",
    "Bad hour": "0 to 23",
    "Bad day-of-month": "1 to 31, in a month that has the day, or L or LW",
    "Bad month": "1 to 12, or JAN to DEC",
    "Bad day-of-week": "0 to 7, or SUN to SAT, or such as FRI#2 or 5L",
}
"""Error of the library -> values of the field that it names."""
_COMBINED: Final = "*, lists, ascending ranges and steps of 1 or more may combine these"


class CronCalendar:
    """Computes the times of cron expressions; see the module."""

    def check(self, cron: str, zone: str) -> None:
        """Check an expression and a zone of a request.

        Raises:
            InvalidRequestError: names field, value and limit.
        """
        if zone.partition("/")[0] in OF_MACHINE:
            raise InvalidRequestError("zone", zone, _ZONES)
        _zone(zone)
        _check_steps(cron, _clock(cron).parts)

    def next_after(self, cron: str, zone: str, after_ms: UnixMs) -> UnixMs | None:
        """Return the first time after `after_ms`; None: there is none in the next fifty years.

        Raises:
            InvalidRequestError: the expression or the zone is unknown here.
        """
        return _next(cron, zone, after_ms)


def warn_of_unplanned(series: SeriesView, why: InvalidRequestError) -> None:
    """Log why the calendar of this node, the leader, cannot plan a series; others may wait, too."""
    logger.warning(
        "series wait for a leader that knows their cron expression and time zone",
        extra={"series": series.series_id, "key": series.key.decode(), "reason": why},
    )


@lru_cache(256)
def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name or "UTC")
    except (KeyError, OSError, ValueError):
        raise InvalidRequestError("zone", name, _ZONES) from None


@lru_cache(TIMES_KEPT)
def _next(cron: str, zone: str, after_ms: int) -> UnixMs | None:
    tzinfo = _zone(zone)
    if not 0 <= after_ms < min(LAST_MS, DUE_MS_MAX):
        return None
    clock, after = _clock(cron), datetime.fromtimestamp(after_ms / 1000, tzinfo)
    if clock.fixed:
        return _first(_fixed_times(clock, after), after_ms)
    found_ms = _first(_clock_times(clock, after), after_ms)
    again_s = -_moved_s(after) if not after.fold else 0
    if again_s > 0 and (found_ms is None or found_ms - after_ms > again_s * 1000):
        # The first of two equal hours has no further time. The second shows the earlier ones again.
        begin = after - timedelta(seconds=again_s)
        # For speed, to just before the first equal hour: the time before may have many times.
        begin += timedelta(seconds=_unchanged_s(begin, again_s) - 1)
        found_ms = _first(_clock_times(clock, begin), after_ms)
    return found_ms


class _Clock(CronSim):
    """An expression, and its times on a clock that is never moved.

    The library tests each day of a search. Here the matching days of a month are computed once for
    each first weekday and length, so a search of fifty years looks at some months only.
    """

    def __init__(self, cron: str) -> None:
        super().__init__(cron, datetime.fromtimestamp(0, UTC))
        _, minute, hour, *_ = self.parts
        self.fixed = len(cron.split()) < len(self.parts) and "*" not in {minute[0], hour[0]}
        """Whether a time in a moved hour occurs once; see the module."""
        self._months = sorted(self.months)
        self._days: dict[tuple[int, int], list[int]] = {}
        """First weekday and length of a month -> its matching days, ascending."""

    def next_after(self, local: datetime) -> datetime | None:
        """Return the first time after `local`, without zone; None: not in the next fifty years."""
        search = copy(self)
        search.dt = local.replace(microsecond=0, tzinfo=None, fold=0)
        return next(search, None)

    def advance_month(self) -> None:
        """Move to the next matching day, at most just beyond the last year.

        The library's search begins with it.
        """
        now = self.dt.date()
        for year, month in product(range(now.year, now.year + YEARS + 1), self._months):
            this = (year, month) == (now.year, now.month)
            if this or (year, month) > (now.year, now.month):
                days = self._days_of(year, month)
                place = bisect_left(days, now.day) if this else 0
                if place < len(days):
                    found = date(year, month, days[place])
                    break
        else:
            found = date(now.year + YEARS + 1, 1, 1)
        if found != now:
            self.dt = datetime.combine(found, time())

    def _days_of(self, year: int, month: int) -> list[int]:
        form = monthrange(year, month)
        if form not in self._days:
            days = range(1, form[1] + 1)
            self._days[form] = [day for day in days if self.match_day(date(year, month, day))]
        return self._days[form]


@lru_cache(CLOCKS_KEPT)
def _clock(cron: str) -> _Clock:
    try:
        return _Clock(cron)
    except (CronSimError, AssertionError, TypeError, ValueError, RecursionError) as error:
        # The library asserts on some combinations that it does not parse, such as "5L/2".
        limit = _FORMS
        if isinstance(error, CronSimError):
            values = _RANGES.get(str(error))
            takes = f"must be {values}; {_COMBINED}"
            limit = f"{error}; it {takes if values else _FORMS}"
        raise InvalidRequestError("cron", cron, limit) from None


def _check_steps(cron: str, parts: Iterable[str]) -> None:
    """Check that no step follows "L" or a range of one value. Series of earlier releases have such.

    The library ignores the step of "L", and reads "8-8/2" as "8-59/2".

    Raises:
        InvalidRequestError: a step does.
    """
    for field, part in zip(Field, parts, strict=True):
        for term in part.split(","):
            values, step, _ = term.partition("/")
            spans = "-" in values or values.startswith("L")
            if step and spans and len(field.parse(values)) == 1:
                limit = f"must not have {term}: its step follows a single value"
                raise InvalidRequestError("cron", cron, limit)


def _fixed_times(clock: _Clock, begin: datetime) -> Iterator[int]:
    """Yield the times after `begin` on the clock. A skipped one occurs after the skipped hour."""
    local = begin
    while (later := clock.next_after(local)) is not None:
        local, found = later, later.replace(tzinfo=begin.tzinfo)
        yield _ms(found + timedelta(minutes=ceil(_skipped_s(found) / 60)))


def _clock_times(clock: _Clock, begin: datetime) -> Iterator[int]:
    """Yield the times after `begin` on the clock. A skipped one does not occur."""
    local = begin
    while (later := clock.next_after(local)) is not None and later.year <= begin.year + YEARS:
        local, found = later, later.replace(tzinfo=begin.tzinfo)
        if skipped_s := _skipped_s(found):
            local += timedelta(seconds=skipped_s - 1)
            continue
        yield _ms(found)
        yield _ms(found.replace(fold=1))  # a doubled one occurs twice; else both are equal


def _moved_s(local: datetime) -> int:
    """Return by how much the clock is moved ahead at `local`; negative: back; 0: it is not moved.

    A time in a skipped or a doubled hour has two offsets from UTC (PEP 495).
    """
    first, second = local.replace(fold=0).utcoffset(), local.replace(fold=1).utcoffset()
    assert first is not None, local
    assert second is not None, local
    return (second - first) // timedelta(seconds=1)


def _skipped_s(local: datetime) -> int:
    """Return the seconds from a time in a skipped hour to the end of this hour; else 0."""
    return _unchanged_s(local, max(_moved_s(local), 0))


def _unchanged_s(local: datetime, most_s: int) -> int:
    """Return the seconds from `local` to the first time with another `_moved_s`, at most most_s."""
    moved_s = _moved_s(local)
    return bisect_left(
        range(most_s), 1, key=lambda each: _moved_s(local + timedelta(seconds=each)) != moved_s
    )


def _first(times_ms: Iterable[int], after_ms: int) -> UnixMs | None:
    return next((UnixMs(ms) for ms in times_ms if ms > after_ms), None)


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
