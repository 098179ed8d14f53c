"""Results of a schedule: one timer, or a lazy sequence over the raw ids of many."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, overload

from timerclient.rows.rows import moment_of
from timerclient.values import ids
from timerclient.values.errors import AlreadyExists, NotPending
from timerclient.values.results import ScheduleResult


class RequestOutcome(NamedTuple):
    """The response to a request, or to some of its rows."""

    raw: bytes
    """n x 15 bytes: the timers' ids; zeros for a row that was not scheduled."""
    duplicate: bool
    """An earlier attempt of the request was applied."""
    results: Sequence[int]
    """ScheduleResults, one per row. Empty: all are SCHEDULED."""
    others: bytes
    """n x 15 bytes, with `results`: the timer that was replaced, or that has the key."""

    def part(self, first: int, rows: int) -> "RequestOutcome":
        """Return the outcome of some rows."""
        span = slice(first * ids.SIZE, (first + rows) * ids.SIZE)
        results = self.results[first : first + rows]
        return RequestOutcome(self.raw[span], self.duplicate, results, self.others[span])

    def ordered(self, order: Sequence[int]) -> "RequestOutcome":
        """Return the outcome in the caller's order; row i here is row `order[i]` there."""
        places = sorted(range(len(order)), key=order.__getitem__)
        raw, others = ids.split(self.raw), ids.split(self.others)
        return RequestOutcome(
            b"".join(raw[at] for at in places),
            self.duplicate,
            [self.results[at] for at in places] if self.results else (),
            b"".join(others[at] for at in places) if others else b"",
        )

    def timer(self, key: str = "") -> "Timer":
        """Return the only timer; `key` is for the error's message; empty: not known.

        Raises:
            AlreadyExists: A pending timer has the key.
            NotPending: on_conflict was "update", and no pending timer has the key.
        """
        result = ScheduleResult(self.results[0]) if self.results else ScheduleResult.SCHEDULED
        if result is ScheduleResult.REJECTED:
            raise AlreadyExists.of_timer(ids.to_text(self.others), key)
        if result is ScheduleResult.NOT_PENDING:
            raise NotPending.of_key(key)
        replaced = self.others if result is ScheduleResult.REPLACED else None
        return Timer(self.raw, duplicate=self.duplicate, result=result, replaced=replaced)


class HasTimerId:
    """A value with the raw id of a timer, which holds the due time."""

    __slots__ = ()
    raw: bytes
    """Its id, 15 bytes."""

    @property
    def id(self) -> str:
        """The id as text."""
        return ids.to_text(self.raw)

    @property
    def due_ms(self) -> int:
        """The effective due time, Unix milliseconds; never before the requested one."""
        return ids.due_ms_of(self.raw)

    @property
    def due(self) -> datetime:
        """The effective due time, in UTC."""
        return moment_of(self.due_ms)


class Timer(HasTimerId):
    """A timer that a majority of the cluster has on disk."""

    __slots__ = ("duplicate", "raw", "replaced", "result")

    def __init__(
        self,
        raw: bytes,
        *,
        duplicate: bool = False,
        result: ScheduleResult = ScheduleResult.SCHEDULED,
        replaced: bytes | None = None,
    ) -> None:
        self.raw = raw
        self.duplicate = duplicate
        """The request was a repetition: an earlier attempt of it was applied."""
        self.result = result
        """SCHEDULED, REPLACED, or KEPT: the pending timer existed before."""
        self.replaced = replaced
        """Raw id of the timer that this one replaced. None: it replaced none."""

    def __repr__(self) -> str:
        return f"Timer({self.id!r}, due_ms={self.due_ms})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timer) and other.raw == self.raw

    def __hash__(self) -> int:
        return hash(self.raw)


class Timers(Sequence[Timer]):
    """The timers of one batch, in the order of its payloads; each is made on access.

    Access to a row that was not scheduled raises AlreadyExists (a pending timer has the key) or
    NotPending (an update found no timer). `results` has all outcomes and raises nothing.
    """

    __slots__ = ("_keys", "_outcome")

    def __init__(self, outcome: RequestOutcome, keys: Sequence[str | None] = ()) -> None:
        """`keys`: one per row, for errors; empty: none."""
        self._outcome, self._keys = outcome, keys

    @property
    def raw(self) -> bytes:
        """The ids, n x 15 bytes; zeros for a row that was not scheduled."""
        return self._outcome.raw

    @property
    def duplicate(self) -> bool:
        """The request was a repetition: an earlier attempt of it was applied."""
        return self._outcome.duplicate

    @property
    def results(self) -> list[ScheduleResult]:
        """The outcome of each row."""
        results = self._outcome.results
        return [*map(ScheduleResult, results)] or [ScheduleResult.SCHEDULED] * len(self)

    @property
    def existing(self) -> list[str | None]:
        """Per row, the id of the timer that it replaced or that has its key; or None."""
        others = self._outcome.others or bytes(len(self.raw))
        return [ids.to_text(raw) if any(raw) else None for raw in ids.split(others)]

    @property
    def ids(self) -> list[str]:
        """All ids as text."""
        return [ids.to_text(raw) for raw in ids.split(self.raw)]

    @property
    def due_ms(self) -> list[int]:
        """All effective due times, Unix milliseconds."""
        return [ids.due_ms_of(raw) for raw in ids.split(self.raw)]

    def __len__(self) -> int:
        return len(self.raw) // ids.SIZE

    @overload
    def __getitem__(self, index: int) -> Timer: ...
    @overload
    def __getitem__(self, index: slice) -> "Timers": ...
    def __getitem__(self, index: int | slice) -> "Timer | Timers":
        if isinstance(index, slice):
            o, others = self._outcome, self._outcome.others
            results = o.results[index] if o.results else ()
            rest = b"".join(ids.split(others)[index])
            return Timers(
                RequestOutcome(b"".join(ids.split(self.raw)[index]), o.duplicate, results, rest),
                self._keys[index],
            )
        key = self._keys[index] if self._keys else None
        return self._outcome.part(range(len(self))[index], 1).timer(key or "")

    def __repr__(self) -> str:
        return f"Timers({len(self)})"
