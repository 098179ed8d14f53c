"""The check that an entry can be applied, made before its append by leader and followers alike.

A committed entry that can't be applied would end every node at every start. So each replica decodes
an entry before it appends it, and rejects malformed values and values out of range. The machine can
apply every entry that passes (timer/state/machine.py). Names of absent objects change nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import (
    Move,
    decode_cancel,
    decode_checkpoint,
    decode_epoch,
    decode_fire,
    decode_group,
    decode_producer,
    decode_reschedule,
    decode_topic,
)
from timer.entries.policies import decode_policy
from timer.entries.series_payloads import decode_occurrences, decode_series
from timer.model.columns import check_schedule
from timer.model.feature_level import LEVEL_MAX, LEVEL_MIN, is_supported
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import DUE_MS_MAX


def check_entry(entry: Entry) -> None:
    """Check that the entry can be applied. The work is per column, not per timer.

    Raises:
        ValueError: the entry can't be applied.
    """
    if not 0 <= entry.time_ms <= DUE_MS_MAX:
        raise ValueError(f"time_ms = {entry.time_ms}: must be in 0 .. {DUE_MS_MAX}")
    try:
        _CHECKS[entry.kind](entry.payload)
    except (ValueError, InvalidRequestError) as error:
        raise ValueError(f"{entry.kind.name} entry {entry.index}: {error}") from None


def bad_entry_text(entries: Sequence[Entry]) -> str:
    """Return a phrase that names the entry that can't be applied, for `timerctl recover`."""
    for each in entries:
        try:
            check_entry(each)
        except ValueError:
            break
    else:
        each = entries[-1]
        if len(entries) > 1:
            return f"it is one of entries {entries[0].index} to {each.index}"
    return f"it is entry {each.index}, {each.kind.name} of epoch {each.epoch}"


def _check_group(payload: memoryview) -> None:
    for op in decode_group(payload):
        if isinstance(op, Move):
            check_schedule(memoryview(op.rows))


def _check_reschedule(payload: memoryview) -> None:
    due_ms = decode_reschedule(payload).due_ms
    low, high = int(due_ms.min()), int(due_ms.max())
    if low < 0 or high > DUE_MS_MAX:
        raise ValueError(f"due_ms from {low} to {high}: must be in 0 .. {DUE_MS_MAX}")


def _check_epoch(payload: memoryview) -> None:
    level = decode_epoch(payload).level
    if not is_supported(level):
        known = f"this program supports {LEVEL_MIN} to {LEVEL_MAX}"
        raise ValueError(f"feature level {level}; {known}")


_CHECKS: Final[Mapping[EntryKind, Callable[[memoryview], object]]] = {
    EntryKind.EPOCH: _check_epoch,
    EntryKind.SCHEDULE: check_schedule,
    EntryKind.CANCEL: decode_cancel,
    EntryKind.FIRE: decode_fire,
    EntryKind.GROUP: _check_group,
    EntryKind.TOPIC: decode_topic,
    EntryKind.PRODUCER: decode_producer,
    EntryKind.CHECKPOINT: decode_checkpoint,
    EntryKind.RESCHEDULE: _check_reschedule,
    EntryKind.POLICY: lambda payload: decode_policy(payload)[1].check(),
    EntryKind.SERIES: decode_series,
    EntryKind.OCCURRENCES: decode_occurrences,
}
