"""Bounds of the work for one entry, checked by counts in worlds with crowds.

FIRE       timers of at most TOPICS_MAX topics. If there are more than a few dead rows between the
           fired ones, a thread passes them before the entry
SCHEDULE   the leader's own limits
GROUP      the leader's own limits
files      the next rows that a store reads of its runs have not fired (checked in all worlds)
"""

from typing import Final

from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry
from timer.leader.groups.group_batch import GROUP_OFFSETS_MAX, OP_WEIGHT
from timer.leader.leader import ENTRY_TOPICS_MAX
from timer.pending.store import Store
from timer.state.apply_results import Applied, FireApplied, GroupApplied, ScheduleApplied

TOPICS_MAX: Final = 2
DEAD_MAX: Final = 2
CHUNK: Final = 2
"""Rows of each source that a FIRE reads at a time."""
TABLE_SOURCES: Final = 6
"""Sources of two memtables: rows of a leader, rows of a follower, tombstones."""


def check(entry: Entry, applied: Applied, store: Store, *, asks: bool) -> None:
    """Check an entry that was just applied; `asks`: a thread passes dead rows before it."""
    match applied:
        case FireApplied(fired):
            _within(entry, "topics", len(fired), TOPICS_MAX)
            sources = TABLE_SOURCES + len(store.runs)
            if asks:
                _within(entry, "dead rows", store.dead_rows_passed, DEAD_MAX + CHUNK * sources)
        case GroupApplied(ops):
            _within(entry, "ops", len(ops), GROUP_OFFSETS_MAX // OP_WEIGHT)
        case ScheduleApplied(topics=topics):
            _within(entry, "topics", topics, ENTRY_TOPICS_MAX)
        case _:
            pass


def check_windows(node: object, store: Store) -> None:
    """Check a window of rows that was just put to use: it begins after the fire position."""
    end_ms, fired_ms = store.window_end_ms, store.position.due_ms
    if end_ms is not None and end_ms < fired_ms:
        raise Broken("work", f"{node} reads from {end_ms} on, and has fired up to {fired_ms}")


def _within(entry: Entry, what: str, found: int, limit: int) -> None:
    if found > limit:
        raise Broken("work", f"{entry.index}: {entry.kind.name} of {found} {what}, {limit} at most")
