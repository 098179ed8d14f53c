"""Recurrence: the definition of a series of timers, its limits, and its next times. Pure.

    every     start, start + every, start + 2 * every, ...
    cron      the times of a cron expression in a time zone; a calendar of the shell computes them

    last <= now: missed   fire_once: the latest missed time occurs, the earlier ones do not
                          fire_all: each missed time occurs, one after the other
                          skip: none occurs; the series goes on with the next time after now

No replica computes a time when it applies an entry. The leader computes it and writes it into the
entry (timer/leader/intake/occurrence_planner.py).
"""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Protocol

from timer.model.columns import decode_headers
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import DUE_MS_MAX, UnixMs

EVERY_MS_MIN: Final = 1_000
EVERY_MS_MAX: Final = 366 * 24 * 3_600_000 * 10
CRON_SIZE_MAX: Final = 256
ZONE_SIZE_MAX: Final = 64
SERIES_BYTES_MAX: Final = 16_384
"""Bytes of key, payload, headers, cron expression and zone of one series. Each replica holds them
in memory."""
COUNT_MAX: Final = (1 << 48) - 1
TIMES_MAX: Final = 100
"""Next times of a series in one answer."""
TIMES_PORTION: Final = 20
"""Next times that one step of the event loop computes: up to two milliseconds of the calendar."""
STARTED_MS: Final = 60_000
"""A start up to this long before the creation is no past start: its occurrence is due at once."""


class Misfire(enum.IntEnum):
    """The treatment of times that a series missed, after a pause or an outage."""

    FIRE_ONCE = 0
    FIRE_ALL = 1
    SKIP = 2


class Calendar(Protocol):
    """Computes the times of cron expressions. Implemented in the shell."""

    def check(self, cron: str, zone: str) -> None:
        """Check an expression and a zone.

        Raises:
            InvalidRequestError: names field, value and limit.
        """

    def next_after(self, cron: str, zone: str, after_ms: UnixMs) -> UnixMs | None:
        """Return the first time after `after_ms`; None: there is none.

        Raises:
            InvalidRequestError: the expression or the zone is unknown here.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSpec:
    """The definition of a series. Names and units are those of the log."""

    every_ms: int = 0
    """Interval. 0: the series has a cron expression."""
    cron: str = ""
    """Five fields, or six with seconds first. Empty: the series has an interval."""
    zone: str = ""
    """IANA time zone of `cron`. Empty: UTC."""
    start_ms: int = 0
    """No occurrence is earlier. The interval counts from here. 0: none was set (cron only)."""
    end_ms: int = 0
    """No occurrence is later. 0: no end."""
    max_count: int = 0
    """Occurrences at most. 0: no limit."""
    misfire: Misfire = Misfire.FIRE_ONCE
    paused: bool = False
    payload: bytes = b""
    headers: bytes = b""
    """In the form of `encode_headers`."""

    def check(self) -> "SeriesSpec":
        """Return itself, checked.

        Raises:
            InvalidRequestError: names field, value and limit.
        """
        if bool(self.every_ms) == bool(self.cron):
            given = "both" if self.cron else "neither"
            raise InvalidRequestError("every_ms, cron", given, "exactly one must be given")
        if self.every_ms and not EVERY_MS_MIN <= self.every_ms <= EVERY_MS_MAX:
            limit = f"must be {EVERY_MS_MIN} to {EVERY_MS_MAX}"
            raise InvalidRequestError("every_ms", self.every_ms, limit)
        for name, most in (("cron", CRON_SIZE_MAX), ("zone", ZONE_SIZE_MAX)):
            value = getattr(self, name)
            if len(value.encode()) > most:
                raise InvalidRequestError(name, value, f"must have at most {most} bytes")
        if self.zone and not self.cron:
            raise InvalidRequestError("zone", self.zone, "must be given with cron only")
        if self.every_ms and not self.start_ms:
            raise InvalidRequestError("start_ms", 0, "must be given with every_ms")
        for name in ("start_ms", "end_ms"):
            if not 0 <= getattr(self, name) <= DUE_MS_MAX:
                limit = f"must be 0 to {DUE_MS_MAX}"
                raise InvalidRequestError(name, getattr(self, name), limit)
        if self.end_ms and self.end_ms < self.start_ms:
            limit = f"must be at least start_ms = {self.start_ms}"
            raise InvalidRequestError("end_ms", self.end_ms, limit)
        if not 0 <= self.max_count <= COUNT_MAX:
            raise InvalidRequestError("max_count", self.max_count, f"must be 0 to {COUNT_MAX}")
        return self

    def check_size(self, key: bytes) -> None:
        """Check the bytes that a series holds in memory.

        Raises:
            InvalidRequestError: names field, value and limit.
        """
        size = len(key) + len(self.payload) + len(self.headers)
        size += len(self.cron.encode()) + len(self.zone.encode())
        if size > SERIES_BYTES_MAX:
            limit = f"key, payload, headers, cron and zone have at most {SERIES_BYTES_MAX} bytes"
            raise InvalidRequestError("payload", f"{size} bytes in all", limit)

    def with_start(self, now_ms: int) -> "SeriesSpec":
        """Return the definition of a series that is created now: an interval has a start."""
        if not self.every_ms or self.start_ms:
            return self
        return replace(self, start_ms=now_ms + self.every_ms)

    def begins_after(self, now_ms: int) -> UnixMs:
        """Return the time after which a series that is created now has its first occurrence."""
        started_ms = max(self.start_ms, now_ms - STARTED_MS)
        return UnixMs(started_ms - 1 if self.start_ms else now_ms)

    def with_changes(self, changes: Mapping[str, Any]) -> "SeriesSpec":
        """Return the definition with some fields changed, not checked.

        An interval replaces a cron expression, and a cron expression an interval.
        """
        values = dict(changes)
        if values.get("every_ms"):
            values = {"cron": "", "zone": ""} | values
        elif values.get("cron"):
            values = {"every_ms": 0} | values
        return replace(self, **values)

    def has_same_times(self, other: "SeriesSpec") -> bool:
        """Return whether another definition has the same times, apart from its end and count."""
        return all(getattr(self, name) == getattr(other, name) for name in TIMING)

    def pack(self) -> dict[str, Any]:
        """Return the fields for the log."""
        return {**asdict(self), "misfire": int(self.misfire)}

    def changes_to(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes that make this definition the one of a creation; empty: it is that.

        `given`: the fields that the creation names. Others get their defaults, except that
        `paused` and the start stay.
        """
        wanted = SeriesSpec(**{"paused": self.paused, **given})
        wanted = replace(wanted, start_ms=wanted.start_ms or self.start_ms)
        found = {
            each.name: value
            for each in fields(self)
            if (value := getattr(wanted, each.name)) != getattr(self, each.name)
        }
        if decode_headers(self.headers) == decode_headers(wanted.headers):  # in another order
            found.pop("headers", None)
        return found


SPEC_TYPES: Final[Mapping[str, type]] = {
    each.name: {"cron": str, "zone": str, "paused": bool, "payload": bytes, "headers": bytes}.get(
        each.name, int
    )
    for each in fields(SeriesSpec)
}
"""Field -> its type in the log."""
TIMING: Final = frozenset({"every_ms", "cron", "zone", "start_ms"})
"""Fields whose change begins the series again: no time before the change is missed."""


def nth(every_ms: int, start_ms: int, after_ms: int) -> int:
    """Return the first of start, start + every, … after `after_ms`."""
    if after_ms < start_ms:
        return start_ms
    return start_ms + ((after_ms - start_ms) // every_ms + 1) * every_ms


def next_time(spec: SeriesSpec, after_ms: int, calendar: Calendar) -> UnixMs | None:
    """Return the first time of a series after `after_ms`; None: there is none. Ignores the end."""
    if spec.every_ms:
        return UnixMs(nth(spec.every_ms, spec.start_ms, after_ms))
    return calendar.next_after(spec.cron, spec.zone, UnixMs(max(after_ms, spec.start_ms - 1)))


def check_first(spec: SeriesSpec, after_ms: int, calendar: Calendar) -> None:
    """Check that a series has a time after `after_ms`, and does not end before the first of these.

    Only for requests: a log of an earlier release may have other series. They are finished.

    Raises:
        InvalidRequestError: names field, value and limit; or as `planned_time`.
    """
    first_ms = next_time(spec, after_ms, calendar)
    if first_ms is None:
        limit = "must occur at least once in the fifty years after its start"
        limit += f", in the zone {spec.zone or 'UTC'}"
        raise InvalidRequestError("cron", spec.cron, limit)
    if spec.end_ms and first_ms > spec.end_ms:
        limit = f"must be at least the first time = {first_ms}"
        raise InvalidRequestError("end_ms", spec.end_ms, limit)


def planned_times(
    spec: SeriesSpec, last_ms: int, now_ms: int, count: int, calendar: Calendar
) -> Iterator[UnixMs]:
    """Yield the times of the next `count` occurrences after `last_ms`, fewer if the series ends.

    Raises:
        InvalidRequestError: as `planned_time`.
    """
    for _ in range(count):
        time_ms = planned_time(spec, last_ms, now_ms, calendar)
        if time_ms is None:
            return
        yield time_ms
        last_ms = time_ms


def planned_time(spec: SeriesSpec, last_ms: int, now_ms: int, calendar: Calendar) -> UnixMs | None:
    """Return the time of the occurrence after `last_ms`, by the policy; None: the series ends.

    Raises:
        InvalidRequestError: the calendar does not know the cron expression or the zone.
    """
    end_ms = spec.end_ms or DUE_MS_MAX
    time_ms = next_time(spec, last_ms, calendar)
    if time_ms is None or time_ms > end_ms:
        return None
    if time_ms <= now_ms and spec.misfire is Misfire.SKIP:
        time_ms = next_time(spec, now_ms, calendar)
    elif time_ms <= now_ms and spec.misfire is Misfire.FIRE_ONCE:
        time_ms = _latest(spec, time_ms, min(now_ms, end_ms), calendar)
    return time_ms if time_ms is not None and time_ms <= end_ms else None


def _latest(spec: SeriesSpec, first_ms: UnixMs, until_ms: int, calendar: Calendar) -> UnixMs:
    """Return the last time at or before `until_ms`. `first_ms` is such a time."""
    if spec.every_ms:
        return UnixMs(nth(spec.every_ms, spec.start_ms, until_ms) - spec.every_ms)
    low, high = int(first_ms), until_ms
    while high - low > 1:  # a search by halves: some thirty times for a year
        middle = (low + high) // 2
        found = next_time(spec, middle, calendar)
        if found is not None and found <= until_ms:
            low = int(found)
        else:
            high = middle
    found = next_time(spec, low, calendar)
    return found if found is not None and found <= until_ms else UnixMs(low)
