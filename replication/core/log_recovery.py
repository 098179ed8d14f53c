"""The state that the protocol needs of a log that was opened."""

from replication.core.log_shape import LogShape
from replication.core.peer_messages import LogStart
from replication.core.quorum import Voters
from timer.entries.entry_frame import Entry, EntryKind, frame_at
from timer.entries.payloads import decode_epoch
from timer.files.log import Log
from timer.model.timer_errors import CorruptFileError
from timer.model.units import LogIndex, UnixMs


def recover(log: Log, base_voters: Voters, state_time_ms: UnixMs) -> tuple[LogShape, UnixMs, int]:
    """Return the log's shape, the lowest time of its next entry, and its highest feature level.

    The level is 0 if the log has no EPOCH entry.

    `base_voters`: the voters in force before the first entry. The founding voters, or those of the
    manifest if the log below the manifest was dropped. `state_time_ms`: time of the last entry in
    the state, for a log that is empty after a snapshot; 0: the state is empty.

    Raises:
        CorruptFileError: an epoch does not begin with an EPOCH entry.
    """
    base = LogIndex(log.first_index - 1)
    base_epoch = log.epoch_at(base)
    assert base_epoch is not None, base
    starts: list[LogStart] = []
    last, level = log.last_index, 0
    while last > base:
        first = _first_of_epoch(log, last)
        if first is None:
            break
        entry = _read(log, first)
        if entry.kind is not EntryKind.EPOCH:
            raise CorruptFileError(
                f"entry {first}", 0, f"epoch {entry.epoch} begins with {entry.kind}"
            )
        payload = decode_epoch(entry.payload)
        starts.append(LogStart(first, entry.epoch, frozenset(payload.voters)))
        level = max(level, payload.level)
        last = LogIndex(first - 1)
    shape = LogShape(base, base_epoch, base_voters, base)
    if log.last_index > base:
        shape.extend(log.last_index, reversed(starts))
    last_ms = _read(log, log.last_index).time_ms if log.last_index > base else UnixMs(0)
    return shape, max(last_ms, state_time_ms), level


def _first_of_epoch(log: Log, last: LogIndex) -> LogIndex | None:
    """Return the first index of the epoch of `last`. None: the epoch begins below the log."""
    epoch = log.epoch_at(last)
    low, high = log.first_index - 1, int(last)  # low: of an earlier epoch; high: of this one
    if log.epoch_at(LogIndex(low)) == epoch:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if log.epoch_at(LogIndex(middle)) == epoch:
            high = middle
        else:
            low = middle
    return LogIndex(high)


def _read(log: Log, index: LogIndex) -> Entry:
    frames = log.read(index, 1)
    assert frames, index
    entry = frame_at(frames[0], 0)
    assert isinstance(entry, Entry), entry
    return entry
