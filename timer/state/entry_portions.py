"""Portions: the long part of an entry's work, in steps of some milliseconds.

    next entry --do, do, ...--> its many topics, producers or series change --apply--> the rest

A POLICY may concern every topic, an EPOCH concerns every group, and a CHECKPOINT forgets idle
producers. The deletion of a topic removes its series and its timers in memory. A SCHEDULE of many
rows needs memory. The event loop has its turn between two portions. No other entry is applied
meanwhile, and no checkpoint cut is taken. Replicas therefore agree even if their portions differ.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Final

from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.policies import decode_policy
from timer.entries.series_payloads import count_occurrences
from timer.model.columns import rows_of
from timer.model.feature_level import is_supported
from timer.model.timer_errors import UnsupportedLevelError
from timer.pending.memory.memtable import SPARE_ROWS
from timer.ready.topic import Topic
from timer.state.dirty_topics import portions
from timer.state.pauses import Pauses
from timer.state.producers import IDLE_MS_MAX
from timer.state.state import State

KINDS: Final = frozenset({EntryKind.POLICY, EntryKind.EPOCH, EntryKind.CHECKPOINT, EntryKind.TOPIC})


class Portions:
    """The portions of the next entry. A part of the machine."""

    def __init__(self, state: State, pauses: Pauses) -> None:
        self._state, self._pauses = state, pauses
        self._rest: Iterator[None] | None = None
        """Rest of the next entry's work. None: it has not begun."""

    @property
    def has_begun(self) -> bool:
        """Whether part of the next entry's work is done; then no cut may be taken."""
        return self._rest is not None

    def do(self, entry: Entry) -> bool:
        """Do a portion of the next entry's work; return whether all of it is done."""
        if self._rest is None:
            assert entry.index == self._state.applied_index + 1, entry.index
            memtable, rows = self._state.store.memtable, self._rows(entry)
            if memtable.needs_memory(rows):
                self._rest = chain(memtable.prepare_memory(rows), self._portions(entry))
            elif entry.kind in KINDS:
                self._rest = self._portions(entry)
            else:
                return True
        for _ in self._rest:
            return False
        return True

    def finish(self, entry: Entry) -> None:
        """Do the rest of the work: the entry is applied now."""
        while not self.do(entry):
            pass
        self._rest = None

    def _rows(self, entry: Entry) -> int:
        """Return how many rows the entry puts into the memtable, at most."""
        match entry.kind:
            case EntryKind.SCHEDULE:
                return rows_of(entry.payload)
            case EntryKind.OCCURRENCES:
                return count_occurrences(entry.payload)
            case EntryKind.FIRE if self._state.store.memtable.has_held:
                return SPARE_ROWS
            case _:
                return 0

    def _portions(self, entry: Entry) -> Iterator[None]:
        match entry.kind:
            case EntryKind.POLICY:
                return self._policy(entry)
            case EntryKind.EPOCH:
                return self._epoch(entry)
            case EntryKind.CHECKPOINT:
                idle_ms = payloads.decode_checkpoint(entry.payload) or IDLE_MS_MAX
                return self._state.producers.expire(entry.time_ms, idle_ms)
            case EntryKind.TOPIC:
                op = payloads.decode_topic(entry.payload)
                if isinstance(op, payloads.DeleteTopic) and op.topic in self._state.topics:
                    series, store = self._state.series, self._state.store
                    return chain(series.drop_topic(op.topic), store.kill_topic(op.topic))
                return iter(())
            case _:
                return iter(())

    def _policy(self, entry: Entry) -> Iterator[None]:
        state = self._state
        scope, policy = decode_policy(entry.payload)
        if scope.topic and scope.topic not in state.topics:
            return
        before = state.policies.of(scope)
        state.policies = state.policies.with_policy(scope, policy)
        yield from self._pauses.policy_changed(scope, entry.time_ms)
        if before.retention_ms != policy.retention_ms:
            topics = [scope.topic] if scope.topic else [*state.topics]
            for some in portions(topics):
                state.retain(some, entry.time_ms)
                yield

    def _epoch(self, entry: Entry) -> Iterator[None]:
        start = payloads.decode_epoch(entry.payload)
        if not is_supported(start.level):
            raise UnsupportedLevelError(f"entry {entry.index}", start.level)
        for some in portions([*self._state.topics.values()]):
            for topic in filter(_has_groups, some):
                end = topic.queue.end
                if sum(group.begin_epoch(end) for group in topic.groups.values()):
                    self._state.changes.note(topic.topic_id)
            yield


def _has_groups(topic: Topic) -> bool:
    return bool(topic.groups)
