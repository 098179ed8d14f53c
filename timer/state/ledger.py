"""The ledger: the only writer of the counts of timers.

    scheduled --> pending --paused topic, due--> held
        |            |                            |
        | due        | cancelled, dropped         | cancelled, dropped, or
        v            v or fired                   v fired by a resume

Each timer is counted once as scheduled, and at most once as fired, cancelled or dropped. Held
timers are pending too. A timer that is due when it is scheduled is never pending.

Conservation (P7 in docs/guarantees.md): scheduled = pending + fired + cancelled + dropped, in each
topic and in all. The store holds exactly the pending timers.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from timer.model.columns import Buffers, RowArray
from timer.model.firing_order import after
from timer.model.units import TopicId, UnixMs
from timer.ready.queue import append_all
from timer.ready.topic import Topic
from timer.ready.topic_shares import payload_bytes
from timer.state.apply_results import ALREADY_CANCELLED, ALREADY_FIRED, DROPPED
from timer.state.state import State

MovedRows = list[tuple[TopicId, RowArray]]
"""Topics with their rows, in the order in which their queues got them."""


class Ledger:
    """Moves timers between the outcomes. Callers change the store."""

    def __init__(self, state: State) -> None:
        self._state = state

    def check(self) -> None:
        """Assert the conservation after an entry, for the sums over all topics."""
        counts, store, state = self._state.counts, self._state.store, self._state
        assert counts.pending == store.pending, (counts, store.pending)
        assert state.held == store.held, (state.held, store.held)
        assert 0 <= state.held <= counts.pending, (state.held, counts)

    def is_past(self, rows: RowArray) -> npt.NDArray[np.bool_]:
        """Return which rows lie at or before the fire position, (n, bool): if pending, held."""
        return ~after(rows["due_ms"], rows["seq"], self._state.store.position)

    # ---- begin

    def schedule(self, rows: RowArray, *, pending: bool) -> None:
        """Count rows as scheduled; `pending`: they come into the store."""
        self._state.counts.scheduled += len(rows)
        for topic, share in self._state.by_topic(rows, sums=pending):
            topic.counts.scheduled += len(share.rows)
            if pending:
                topic.add_pending(share)

    def add_pending(self, rows: RowArray) -> None:
        """Record that scheduled rows come into the store."""
        for topic, share in self._state.by_topic(rows, sums=True):
            topic.add_pending(share)

    def hold(self, rows: RowArray, sign: int = 1) -> None:
        """Record that pending rows are held from now on; with -1: that they no longer are."""
        for topic, share in self._state.by_topic(rows, sums=False):
            self._hold(topic, share.rows, sign)

    # ---- end

    def fire(
        self, rows: RowArray, bufs: Buffers, fired_at_ms: UnixMs, *, were_pending: bool
    ) -> MovedRows:
        """Append rows, in firing order, to their topics' queues."""
        state = self._state
        shares = state.by_topic(rows, sums=were_pending)
        for topic, share in shares:
            if were_pending:
                topic.end_pending(share)
            topic.counts.fired += len(share.rows)
            state.trace.add_fired(state.applied_index, topic.topic_id, topic.queue.end, share.rows)
        append_all([(topic.queue, share.rows) for topic, share in shares], bufs, fired_at_ms)
        state.series.on_ended(rows["seq"][rows["headers_size"] > 0])  # an occurrence has headers
        state.counts.fired += len(rows)
        return [(topic.topic_id, share.rows) for topic, share in shares]

    def fire_held(self, rows: RowArray, bufs: Buffers) -> MovedRows:
        """Append held rows, in this order, to their topics' queues."""
        self.hold(rows, -1)
        moved = self.fire(rows, bufs, self._state.applied_time_ms, were_pending=True)
        self._remember(ALREADY_FIRED, rows)
        return moved

    def cancel(self, rows: RowArray, *, were_pending: bool = True) -> None:
        """Count rows as cancelled, and remember them for later cancels."""
        state = self._state
        is_past = self.is_past(rows)
        any_past = bool(is_past.any())
        for topic, share in state.by_topic(rows, sums=were_pending):
            topic.counts.cancelled += len(share.rows)
            if were_pending:
                topic.end_pending(share)
                if any_past:
                    self._hold(topic, share.rows[self.is_past(share.rows)], -1)
        state.counts.cancelled += len(rows)
        state.series.on_ended(rows["seq"])
        until_ms = rows["due_ms"].astype(np.int64)
        if any_past:
            until_ms[is_past] = state.applied_time_ms
        state.outcomes.add(ALREADY_CANCELLED, rows["seq"].astype(np.uint64), until_ms)

    def drop_held(self, rows: RowArray) -> MovedRows:
        """Count held rows as dropped: they never fire."""
        state = self._state
        self.hold(rows, -1)
        shares = state.by_topic(rows, sums=True)
        for topic, share in shares:
            topic.end_pending(share)
            topic.counts.dropped += len(share.rows)
            state.trace.add_dropped(state.applied_index, topic.topic_id, share.rows)
        state.counts.dropped += len(rows)
        state.series.on_ended(rows["seq"])
        self._remember(DROPPED, rows)
        return [(topic.topic_id, share.rows) for topic, share in shares]

    def drop_topic(self, topic: Topic) -> int:
        """Count the pending timers of a topic that is deleted as dropped; return their number."""
        dropped = topic.counts.pending
        topic.counts.dropped += dropped
        self._state.counts.dropped += dropped
        self._state.held -= topic.held
        self._state.held_bytes -= topic.held_bytes
        return dropped

    def restore(self, topics: Iterable[Topic]) -> None:
        """Add the held timers of topics that a manifest holds."""
        for topic in topics:
            self._state.held += topic.held
            self._state.held_bytes += topic.held_bytes

    def _hold(self, topic: Topic, rows: RowArray, sign: int) -> None:
        size = payload_bytes(rows)
        topic.held += sign * len(rows)
        topic.held_bytes += sign * size
        self._state.held += sign * len(rows)
        self._state.held_bytes += sign * size

    def _remember(self, outcome: int, rows: RowArray) -> None:
        until_ms = np.full(len(rows), self._state.applied_time_ms)
        self._state.outcomes.add(outcome, rows["seq"].astype(np.uint64), until_ms)
