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
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from timer.model.timer_errors import InvalidRequestError
from timer.model.units import DUE_MS_MAX, UnixMs
from timer.state.series_table import SeriesView

logger = logging.getLogger(__name__)

TIMES_KEPT: Final = 16_384
LAST_YEAR: Final = 9_000
"""No time is later. The library looks fifty years ahead, and datetime ends with the year 9999."""
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
    after = datetime.fromtimestamp(after_ms / 1000, tzinfo if zone else UTC)
    try:
        times = CronSim(cron, after)
        for _ in range(STEPS_MAX):
            found_ms = round(next(times).timestamp() * 1000)
            if found_ms > after_ms:
                return UnixMs(found_ms)
    except StopIteration:
        return None
    except (CronSimError, AssertionError, TypeError, ValueError, RecursionError) as error:
        # The library asserts on some combinations that it does not parse, such as "5L/2".
        limit = _FORMS
        if isinstance(error, CronSimError):
            values = _RANGES.get(str(error))
            takes = f"must be {values}; *, lists, ranges and steps may combine these"
            limit = f"{error}; it {takes if values else _FORMS}"
        raise InvalidRequestError("cron", cron, limit) from None
    return None
