"""What one entry touches is bounded: judged in worlds with crowds, by counts and not by time.

FIRE       timers of TOPICS_MAX topics at most; the rows that are dead beside those that it takes
           are passed before it by a thread, where there are more than a few
SCHEDULE   the leader's own limits
GROUP
files      what a store reads next of its runs has not fired (judged in all worlds)
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
"""Rows that a FIRE looks for at a time, of each source."""
TABLE_SOURCES: Final = 6
"""Of two memtables: what came to a leader, what came to a follower, tombstones."""


def check(entry: Entry, applied: Applied, store: Store, *, asks: bool) -> None:
    """Judge an entry that was just applied; `asks`: a thread is asked before.

    Raises:
        Broken: it touched more than it may.
    """
    match applied:
        case FireApplied(fired):
            _within(entry, "topics", len(fired), TOPICS_MAX)
            sources = TABLE_SOURCES + len(store.runs)
            if asks:
                _within(entry, "dead rows", store.passed, DEAD_MAX + CHUNK * sources)
        case GroupApplied(ops):
            _within(entry, "ops", len(ops), GROUP_OFFSETS_MAX // OP_WEIGHT)
        case ScheduleApplied(topics=topics):
            _within(entry, "topics", topics, ENTRY_TOPICS_MAX)
        case _:
            pass


def check_windows(node: object, store: Store) -> None:
    """Judge what was just taken into use: it goes on after the fire position.

    Raises:
        Broken: rows that have fired would be read again.
    """
    end_ms, fired_ms = store.window_end_ms, store.position.due_ms
    if end_ms is not None and end_ms < fired_ms:
        raise Broken("work", f"{node} reads from {end_ms} on, and has fired up to {fired_ms}")


def _within(entry: Entry, what: str, found: int, limit: int) -> None:
    if found > limit:
        raise Broken("work", f"{entry.index}: {entry.kind.name} of {found} {what}, {limit} at most")
