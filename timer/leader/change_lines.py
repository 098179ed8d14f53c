"""Changes that wait on the leader: cancels and reschedules of existing timers, by id or by key.

    request --> line of its kind --> entry, when fewer than two of the line are in flight,
                                     or, if the line is eager, when a full entry waits

Waiting requests of a line share an entry, in the order of their arrival. No request is split. If a
shared entry had no room for the timers of a request, the request waits again, before all others. If
a policy has changed meanwhile, the request is rejected instead, as its times follow the policies of
its acceptance.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias, cast

import numpy as np

from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import (
    Ids,
    Keys,
    Reschedule,
    Targets,
    encode_cancel,
    encode_reschedule,
)
from timer.leader.groups.group_batch import OnResult, count_fitting
from timer.leader.intake.admission import Times
from timer.model.columns import Binary
from timer.model.timer_errors import (
    OVERLOAD_RETRY_MS,
    EngineError,
    NotReadyError,
    OverloadedError,
)
from timer.model.units import Now, UnixMs
from timer.state.apply_results import ENTRY_FULL, Applied, CancelApplied, RescheduleApplied

Propose: TypeAlias = Callable[
    [EntryKind, list[bytes], Now, Callable[[Applied | EngineError], None]], bool
]
IN_FLIGHT: Final = 2
"""Entries of a line in flight. While there are as many, small requests gather."""


class _Waiting(NamedTuple):
    targets: Targets
    times: Times | None
    """Of a reschedule; None for a cancel."""
    done: OnResult


class ChangeLine:
    """Requests of one kind; see the module."""

    def __init__(
        self, name: str, propose: Propose, rows_max: int, most: int, *, eager: bool = True
    ) -> None:
        """`rows_max`: timers in one entry. `most`: timers that wait or are in flight.

        `eager`: a full entry is appended at once, with any number of entries in flight.
        """
        self._name, self._propose = name, propose
        self._rows_max, self._most, self._eager = rows_max, most, eager
        self._waiting: list[_Waiting] = []
        self._rows = 0
        """Timers of the waiting requests."""
        self._rows_in_flight = 0
        self._in_flight = 0
        self._generation = 0
        """Counts the changes of policies and the deletions of topics."""

    def __bool__(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiting)

    def add(self, targets: Targets, done: OnResult, times: Times | None = None) -> None:
        """Accept a request. `done` gets its share of the CancelApplied or RescheduleApplied.

        Raises:
            OverloadedError: too much is waiting or in flight; the request was not accepted.
        """
        if self._rows + self._rows_in_flight + len(targets) > self._most:
            raise OverloadedError(self._name, retry_after_ms=OVERLOAD_RETRY_MS)
        self._waiting.append(_Waiting(targets, times, done))
        self._rows += len(targets)

    def flush(self, now: Now, *, all_of_them: bool = False) -> bool:
        """Append entries for waiting requests; return whether one has a timer that is due now.

        `all_of_them`: policies change next, or a topic is deleted.
        """
        due = False
        while self._waiting and (
            all_of_them
            or self._in_flight < IN_FLIGHT
            or (self._eager and self._rows >= self._rows_max)
        ):
            due |= self._append(self._take_batch(), now)
        self._generation += all_of_them
        return due

    def close(self, why: EngineError) -> None:
        """Answer all waiting requests: they had no effect."""
        waiting, self._waiting, self._rows = self._waiting, [], 0
        for each in waiting:
            each.done(why)

    def _take_batch(self) -> list[_Waiting]:
        count, _ = count_fitting((len(each.targets) for each in self._waiting), self._rows_max)
        batch = self._waiting[: max(1, count)]
        if len(batch) > 1 and batch[0].times is not None:
            batch = list(_distinct_prefix(batch))
        del self._waiting[: len(batch)]
        self._rows -= sum(len(each.targets) for each in batch)
        return batch

    def _append(self, batch: list[_Waiting], now: Now) -> bool:
        targets = _concatenated([each.targets for each in batch])
        self._in_flight += 1
        self._rows_in_flight += len(targets)
        generation = self._generation

        def answer(applied: Applied | EngineError) -> None:
            self._in_flight -= 1
            self._rows_in_flight -= len(targets)
            to_retry = []
            start = 0
            for each in batch:
                end = start + len(each.targets)
                share = _share(applied, slice(start, end))
                is_left = (
                    isinstance(share, RescheduleApplied) and (share.results == ENTRY_FULL).all()
                )
                if not (start and is_left):
                    each.done(share)
                elif generation == self._generation:
                    to_retry.append(each)
                else:
                    each.done(NotReadyError("a policy or topic changed meanwhile; retry"))
                start = end
            self._waiting[:0] = to_retry
            self._rows += sum(len(each.targets) for each in to_retry)

        times = [each.times for each in batch if each.times is not None]
        if not times:
            self._propose(EntryKind.CANCEL, encode_cancel(targets), now, answer)
            return False
        due_ms = np.concatenate([each.due_ms for each in times])
        requested_ms = np.concatenate([each.requested_ms for each in times])
        order = encode_reschedule(Reschedule(targets, due_ms, requested_ms))
        self._propose(EntryKind.RESCHEDULE, order, now, answer)
        return UnixMs(int(due_ms.min())) <= now.clock_ms


def _distinct_prefix(batch: Sequence[_Waiting]) -> Iterator[_Waiting]:
    """Yield requests up to the first that names a timer again: it means the rescheduled timer."""
    named = set[object]()
    for each in batch:
        targets = each.targets
        names = set(targets.seq.tolist() if isinstance(targets, Ids) else targets.names())
        if named & names:
            return
        named |= names
        yield each


def _concatenated(targets: Sequence[Targets]) -> Targets:
    if len(targets) == 1:
        return targets[0]
    if isinstance(targets[0], Ids):
        ids = cast("Sequence[Ids]", targets)
        due_ms = np.concatenate([each.due_ms for each in ids])
        return Ids(due_ms, np.concatenate([each.seq for each in ids]))
    keys = cast("Sequence[Keys]", targets)
    sizes = np.concatenate([each.key.sizes for each in keys])
    key = Binary(sizes=sizes, blob=b"".join([each.key.blob for each in keys]))
    return Keys(np.concatenate([each.topic for each in keys]), key)


def _share(applied: Applied | EngineError, rows: slice) -> Applied | EngineError:
    """Return the part of a result that belongs to one request."""
    if isinstance(applied, CancelApplied):
        return CancelApplied(applied.results[rows], _ids(applied.targets, rows))
    if isinstance(applied, RescheduleApplied):
        targets, timers = _ids(applied.targets, rows), _ids(applied.timers, rows)
        return replace(applied, results=applied.results[rows], targets=targets, timers=timers)
    return applied


def _ids(ids: Ids, rows: slice) -> Ids:
    return Ids(ids.due_ms[rows], ids.seq[rows])
