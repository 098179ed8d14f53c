"""Prefetch: a thread reads parts of runs before entries are applied, or before timers are shown.

    entries --names, ids--> Prefetch --read (in a thread)--> used while the entries are applied
    a FIRE that passes many dead rows, or that serves a sweep: its rows
    (timer/pending/runs/held_scan.py)

Without a prefetch, a thousand keys, or payloads in a thousand batches, would block the event loop.
A run never changes, so an early read gives the same answer. The apply step decides whether a timer
is pending. Rows that were not prefetched are read in the apply step, with the same result.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import Ids, Keys, Targets
from timer.model.columns import (
    I64,
    ROW,
    U32,
    U64,
    Binary,
    RowArray,
    decode_schedule,
    gather,
    keyed_max,
)
from timer.pending.runs import row_reader
from timer.pending.runs.held_scan import HeldReader
from timer.pending.runs.run import Run, may_contain
from timer.pending.runs.run_set import PrefetchedTimers

LOOP_LOOKUPS_MAX: Final = 64
"""Look-ups of one timer or key in one run that together take about 5 ms. More go to a thread."""
LOOP_PAYLOADS_MAX: Final = 4
"""Most timers with payloads to read on the loop. Each may need a whole batch to be verified."""

Name = tuple[int, bytes]
StoredDues = Callable[[I64, U64], I64]
"""Returns the stored dues of timers: see Store."""


def is_surely_small(entries: Sequence[Entry], runs: int, *, keys: bool) -> bool:
    """Return whether the entries need few reads of `runs` runs, by the entries' heads alone.

    True for most entries. `keys`: some run has a timer with a key.
    """
    ids = moved = 0
    for entry in entries:
        if entry.kind in (EntryKind.CANCEL, EntryKind.RESCHEDULE):
            count, by_key = payloads.count_targets(entry.payload)
            if by_key:
                return False
            ids += count
            moved += count * (entry.kind is EntryKind.RESCHEDULE)
        elif entry.kind is EntryKind.SCHEDULE and keys and keyed_max(entry.payload):
            return False
    return moved <= LOOP_PAYLOADS_MAX and ids * runs <= LOOP_LOOKUPS_MAX


class PrefetchTargets:
    """The timers and keys that some entries need from runs."""

    def __init__(self, entries: Sequence[Entry], stored_dues: StoredDues, *, keys: bool) -> None:
        """Collect them from the entries. `keys`: some run has a timer with a key."""
        self._stored_dues = stored_dues
        self.ids: list[Ids] = []
        self.names: list[Keys] = []
        self.conflicts: list[Keys] = []
        """Those of `names` of which only the ids are needed, to decide about new timers."""
        self.with_payload: list[Targets] = []
        for entry in entries:
            match entry.kind:
                case EntryKind.CANCEL:
                    self._add(payloads.decode_cancel(entry.payload))
                case EntryKind.RESCHEDULE:
                    targets = payloads.decode_reschedule(entry.payload).targets
                    self.with_payload.append(self._add(targets))
                case EntryKind.SCHEDULE if keys:
                    rows = decode_schedule(entry.payload).rows
                    rows = rows[rows["key_size"] > 0]
                    if len(rows):
                        column = gather(rows, {0: entry.payload}, "key")
                        self.names.append(Keys(rows["topic"].astype(np.uint32), column))
                        self.conflicts.append(self.names[-1])
                case _:
                    pass

    @classmethod
    def of(cls, targets: Targets, stored_dues: StoredDues) -> "PrefetchTargets":
        """Return the targets of a request that reads timers with their payloads."""
        found = cls((), stored_dues, keys=False)
        found.with_payload.append(found._add(targets))
        return found

    def _add(self, targets: Targets) -> Targets:
        """Add targets. Return them with their stored dues."""
        if not isinstance(targets, Ids):
            self.names.append(targets)
            return targets
        stored = Ids(self._stored_dues(targets.due_ms, targets.seq), targets.seq)
        self.ids.append(stored)
        return stored

    def is_small(self, runs: Sequence[Run]) -> bool:
        """Return whether the targets are few enough for the event loop."""
        if sum(map(len, self.with_payload)) > LOOP_PAYLOADS_MAX and runs:
            return False
        if self.names and not all(run.has_read_keys for run in runs):
            return False
        count = sum(map(len, self.names))
        if count + sum(map(len, self.ids)) * len(runs) <= LOOP_LOOKUPS_MAX:
            return True
        for run in runs:
            count += sum(int(may_contain(run.meta, i.due_ms, i.seq).sum()) for i in self.ids)
        return count <= LOOP_LOOKUPS_MAX


class Prefetch:
    """Reads of runs, done by a thread before they are needed. See the module."""

    def __init__(
        self, runs: Sequence[Run], targets: PrefetchTargets, readers: Sequence[HeldReader] = ()
    ) -> None:
        self._runs = runs
        self._targets = targets
        self._readers = readers
        self._names: set[Name] = set()
        self._found: dict[int, dict[Name, list[np.void]]] = {}
        self.timers: PrefetchedTimers | None = None
        """The timers found by id and by key. None: not read, or there are no ids and keys."""

    def read(self) -> None:
        """Look everything up in the runs. For a thread.

        Raises:
            CorruptFileError: a run doesn't verify.
        """
        targets = self._targets
        ids, with_payload = (
            [*targets.ids],
            [each for each in targets.with_payload if isinstance(each, Ids)],
        )
        rows = [True] * len(ids)
        for keys in targets.names:
            found = self._find_keys(keys)
            ids.append(found)
            rows.append(not any(keys is each for each in targets.conflicts))
            if any(keys is each for each in targets.with_payload):
                with_payload.append(found)
        if ids:
            self.timers = PrefetchedTimers(
                self._runs,
                np.concatenate([each.due_ms for each in ids]),
                np.concatenate([each.seq for each in ids]),
                np.repeat(rows, [len(each.seq) for each in ids]),
            )
            self.timers.read()
        for each in with_payload:
            self._verify(each)
        for reader in self._readers:
            reader.read()

    def _find_keys(self, keys: Keys) -> Ids:
        """Note the timers that have the keys, pending or not. Return their ids."""
        names = keys.names()
        self._names |= {*names}
        rows: list[RowArray] = [np.empty(0, ROW)]
        hashes = self._runs[0].hasher(keys.topic, keys.key) if self._runs else None
        for run in self._runs:
            with suppress(FileNotFoundError):  # a merge has removed the run
                assert hashes is not None
                which, here = row_reader.find_in_run(run, hashes, keys.topic, keys.key)
                known: dict[Name, list[np.void]] = {}
                for number, row in zip(which.tolist(), here, strict=True):
                    known.setdefault(names[number], []).append(row)
                self._found.setdefault(run.meta.number, {}).update(known)
                rows.append(here)
        found = np.concatenate(rows)
        return Ids(found["due_ms"].astype(np.int64), found["seq"].astype(np.uint64))

    def _verify(self, ids: Ids) -> None:
        """Verify the batches of these timers before their payloads are read."""
        for run in self._runs:
            inside = may_contain(run.meta, ids.due_ms, ids.seq)
            batches = np.unique(run.batches_of(ids.due_ms[inside], ids.seq[inside])).tolist()
            with suppress(FileNotFoundError):
                for batch in batches:
                    if batch < len(run):
                        run.verify(batch)

    def names(self, topic: U32, keys: Binary) -> list[Name] | None:
        """Return (topic, key) for each key; None if some were not looked up."""
        names = Keys(topic, keys).names()
        return names if self._names.issuperset(names) else None

    def candidates(
        self, run: Run, names: list[Name]
    ) -> tuple[npt.NDArray[np.intp], RowArray] | None:
        """Return the result of `row_reader.find_in_run`; None if the run was not read."""
        known = self._found.get(run.meta.number)
        if known is None:
            return None
        numbered = enumerate(names if known else ())  # the usual run has none of them
        pairs = [(i, row) for i, name in numbered for row in known.get(name, ())]
        rows = np.zeros(len(pairs), ROW)
        for at, (_, row) in enumerate(pairs):
            rows[at] = row
        return np.array([number for number, _ in pairs], np.intp), rows
