"""Recurring timers: series are created, changed and deleted; their occurrences become timers.

    OCCURRENCES --row of a waiting series--> a timer of its topic, with payload and headers of the
                                             series, its id and the occurrence's number
    pause, change, deletion ---------------> the pending occurrence is cancelled

The leader computes all times. See timer/state/series_table.py for the life of a series.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.series_payloads import (
    AlterSeries,
    CreateSeries,
    DeleteSeries,
    Planned,
    SeriesOp,
    decode_occurrences,
    decode_series,
)
from timer.model.columns import ROW, RowArray, encode_headers
from timer.model.timer_errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    TopicDeletedError,
)
from timer.model.units import Seq, TopicId
from timer.state.apply_results import OccurrencesApplied, SeriesApplied
from timer.state.ledger import Ledger
from timer.state.series_table import FINISHED, PAUSED
from timer.state.state import State

SERIES_HEADER: Final = "timer-series"
"""Header of an occurrence: the id of its series."""
SERIES_KEY_HEADER: Final = "timer-series-key"
"""Header of an occurrence: the key of its series."""
NUMBER_HEADER: Final = "timer-occurrence"
"""Header of an occurrence: its number, 1, 2, 3, …"""

Admit: TypeAlias = Callable[[RowArray, bytes], tuple[TopicId, ...]]


class Recurring:
    """The part of the machine that applies entries about series."""

    def __init__(self, state: State, ledger: Ledger, admit: Admit) -> None:
        """`admit`: puts rows with seqs into the store or, if they are due, into their queues."""
        self._state, self._ledger, self._admit = state, ledger, admit

    def apply(self, entry: Entry) -> SeriesApplied | OccurrencesApplied:
        """Apply a SERIES or OCCURRENCES entry."""
        if entry.kind is EntryKind.SERIES:
            return self.change(decode_series(entry.payload))
        return self.add_occurrences(decode_occurrences(entry.payload))

    def change(self, op: SeriesOp) -> SeriesApplied:
        """Create, change or delete a series. A refusal is in the result, and changes nothing."""
        match op:
            case CreateSeries():
                return self._create(op)
            case AlterSeries():
                return self._alter(op)
            case DeleteSeries():
                return self._delete(op)

    def _create(self, op: CreateSeries) -> SeriesApplied:
        if op.topic not in self._state.topics:
            return SeriesApplied(op, 0, TopicDeletedError(op.topic))
        known = self._state.series.find(op.topic, op.key)
        if known:
            name = op.key.decode(errors="replace")
            return SeriesApplied(op, known, AlreadyExistsError("series", name, "the key is taken"))
        return SeriesApplied(op, self._state.series.add(op.topic, op.key, op.spec, op.last_ms))

    def _alter(self, op: AlterSeries) -> SeriesApplied:
        view = self._state.series.view(op.series)
        if view is None:
            return SeriesApplied(op, 0, NotFoundError("series", op.series))
        spec = view.spec.with_changes(op.changes)
        try:
            spec.check()
            spec.check_size(view.key)
        except InvalidRequestError as refused:
            return SeriesApplied(op, op.series, refused)
        self._revoke(op.series)
        self._state.series.alter(op.series, spec, op.last_ms)
        return SeriesApplied(op, op.series)

    def _delete(self, op: DeleteSeries) -> SeriesApplied:
        if self._state.series.view(op.series) is None:
            return SeriesApplied(op, 0, NotFoundError("series", op.series))
        self._revoke(op.series)
        self._state.series.remove(op.series)
        return SeriesApplied(op, op.series)

    def _revoke(self, series_id: int) -> None:
        """Cancel the pending occurrence of a series. Its number is used again."""
        pending = self._state.series.revoke(series_id)
        if pending is not None:
            due_ms, seq = pending
            _, removed = self._state.store.cancel(
                np.array([due_ms], np.int64), np.array([seq], np.uint64)
            )
            assert len(removed) == 1, (series_id, pending)
            self._ledger.cancel(removed)

    def add_occurrences(self, planned: Planned) -> OccurrencesApplied:
        """Make timers of the next occurrences of series that wait for them."""
        state, series = self._state, self._state.series
        first_seq, n = state.next_seq, len(planned.series)
        state.next_seq = Seq(first_seq + n)  # the same for every outcome
        rows, places = series.rows_of(planned.series)
        waits = (rows["id"] > 0) & (rows["seq"] == 0) & (rows["number"] + 1 == planned.number)
        waits &= (rows["flags"] & (PAUSED | FINISHED)) == 0
        over = waits & (planned.planned_ms < 0)
        new = waits & ~over
        if over.any():
            series.finish(places[over])
        if not new.any():
            return OccurrencesApplied(new, over, first_seq, ())
        mine = np.flatnonzero(new)
        timers = np.zeros(len(mine), ROW)
        timers["due_ms"] = planned.due_ms[mine]
        timers["requested_ms"] = planned.planned_ms[mine]
        timers["topic"] = rows["topic"][mine]
        timers["seq"] = first_seq + mine
        blob = self._fill(timers, places[mine].tolist(), rows[mine], planned.number[mine].tolist())
        series.begin_occurrences(
            places[mine], timers["seq"].copy(), timers["due_ms"].copy(), planned.planned_ms[mine]
        )
        return OccurrencesApplied(new, over, first_seq, self._admit(timers, blob))

    def _fill(
        self, timers: RowArray, places: list[int], rows: RowArray, numbers: list[int]
    ) -> bytes:
        """Point the timers at payloads and headers; return the bytes."""
        payloads: list[bytes] = []
        headers: list[bytes] = []
        keys, sizes = rows["key_size"].tolist(), rows["payload_size"].tolist()
        extra, ids = rows["headers_size"].tolist(), rows["id"].tolist()
        for place, key, size, more, series_id, number in zip(
            places, keys, sizes, extra, ids, numbers, strict=True
        ):
            body = self._state.series.body(place)
            payloads.append(body[key : key + size])
            named = {
                SERIES_HEADER: str(series_id),
                SERIES_KEY_HEADER: body[:key].decode(errors="replace"),
                NUMBER_HEADER: str(number),
            }
            headers.append(body[key + size : key + size + more] + encode_headers(named))
        start = 0
        for name, column in (("payload", payloads), ("headers", headers)):
            each = np.fromiter(map(len, column), np.int64, len(column))
            ends = start + np.cumsum(each)
            timers[f"{name}_size"] = each
            timers[f"{name}_start"] = ends - each
            start = int(ends[-1])
        return b"".join([*payloads, *headers])
