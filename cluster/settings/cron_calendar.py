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
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from timer.model.timer_errors import InvalidRequestError
from timer.model.units import DUE_MS_MAX, UnixMs
from timer.state.series_table import SeriesView

logger = logging.getLogger(__name__)

TIMES_KEPT: Final = 16_384
YEARS: Final = 50
"""A time is searched for so many years ahead, as in the library."""
LAST_YEAR: Final = 9_000
"""No time is later. datetime ends with the year 9999."""
LAST_MS: Final = int(datetime(LAST_YEAR, 1, 1, tzinfo=UTC).timestamp() * 1000)
STEPS_MAX: Final = 10_000
"""Times of an expression that one look passes, because they lie before `after_ms`: those of the
doubled hour."""
NAMED: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
"""Names of expressions -> their five fields."""
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


class CronCalendar:
    """Computes the times of cron expressions; see the module."""

    def check(self, cron: str, zone: str) -> None:
        """Check an expression and a zone.

        Raises:
            InvalidRequestError: names field, value and limit.
        """
        if _next(cron, zone, 0) is None:
            raise InvalidRequestError("cron", cron, "must occur at least once in fifty years")

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
        limit = 'must be an IANA time zone, such as "Europe/Berlin"'
        raise InvalidRequestError("zone", name, limit) from None


@lru_cache(TIMES_KEPT)
def _next(cron: str, zone: str, after_ms: int) -> UnixMs | None:
    tzinfo = _zone(zone)
    if not 0 <= after_ms < min(LAST_MS, DUE_MS_MAX):
        return None
    after = datetime.fromtimestamp(after_ms / 1000, tzinfo)
    try:
        fixed = CronSim(cron, after)
        if fixed.fixup_tz is None:
            return _next_on_clock(cron, after, after_ms)
        return _first(map(_ms, fixed), after_ms)
    except (CronSimError, AssertionError, TypeError, ValueError, RecursionError) as error:
        # The library asserts on some combinations that it does not parse, such as "5L/2".
        limit = _FORMS
        if isinstance(error, CronSimError):
            values = _RANGES.get(str(error))
            takes = f"must be {values}; *, lists, ranges and steps may combine these"
            limit = f"{error}; it {takes if values else _FORMS}"
        raise InvalidRequestError("cron", cron, limit) from None


def _next_on_clock(cron: str, after: datetime, after_ms: int) -> UnixMs | None:
    """Return the first time after `after` of an expression that follows the clock.

    The library steps in elapsed hours, which are wrong where the clock moves by half of one. So it
    gets the local time without its zone.
    """
    found_ms = _first(_clock_times(cron, after), after_ms)
    again_ms = _ms(after.replace(fold=1)) - _ms(after)
    if again_ms and (found_ms is None or found_ms - after_ms > again_ms):
        # The first of two equal hours has no further time. The second shows the earlier ones again.
        found_ms = _first(_clock_times(cron, after - timedelta(milliseconds=again_ms)), after_ms)
    return found_ms


def _clock_times(cron: str, begin: datetime) -> Iterator[int]:
    """Yield the times after `begin` on the clock. A skipped one does not occur."""
    for local in CronSim(cron, begin.replace(tzinfo=None)):
        if local.year > begin.year + YEARS:
            return
        for fold in (0, 1):  # a doubled one occurs twice; of any other, both are the same
            time = local.replace(tzinfo=begin.tzinfo, fold=fold)
            if time.astimezone(UTC).astimezone(begin.tzinfo) == time:
                yield _ms(time)


def _first(times_ms: Iterable[int], after_ms: int) -> UnixMs | None:
    return next((UnixMs(ms) for ms in islice(times_ms, STEPS_MAX) if ms > after_ms), None)


def _ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)
