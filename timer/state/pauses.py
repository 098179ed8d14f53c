"""Pauses: paused topics hold their due timers; a resume releases them.

    due, topic paused --> held --resume, a sweep--> its queue, or dropped
                           |
                           +--> cancelled, rescheduled, replaced

A paused topic's timers are held as they come due (timer/pending/memory/held_rows.py). Held timers
are still pending: they can be cancelled, rescheduled and replaced. The resume's catch_up decides
about the timers that are overdue by then:

    all      they fire, in (due, seq) order
    latest   the last of them fires, the others are dropped
    drop     they are dropped

One sweep at a time goes over the held rows, in (due, seq) order. Each FIRE moves the sweep on by a
portion, so that an entry's work is bounded. A sweep serves a few resumed topics, because each of
them adds work to a FIRE. It meets the rows of these topics alone, so a resume's cost depends only
on its own rows. The other resumed topics wait their turn, in the order of the resumes. Topics that
a sweep has not emptied stay in the next one, in addition to those whose turn it is. A topic holds
due timers until the sweep is through with it, so the overdue ones fire first.

A topic that holds nothing needs no turn. With catch_up = all it fires again at once. Otherwise
overdue timers that no FIRE has reached may have to be dropped: the topic joins the present sweep.

If very many rows or bytes are held, a search in files for the rows of a few topics would delay a
FIRE. A sweep then serves all resumed topics, and a portion counts the rows of every topic.

Each topic takes time, too. From feature level 2 on, a FIRE serves topics of the sweep up to half of
its `topics_max`, because its due rows may be of other topics. At the end of a sweep, each FIRE
fires the last overdue timers of as many topics.

All of this is state, equal on every replica. A portion therefore counts live rows only: deleted and
cancelled rows are in some replicas' runs and not in others' (timer/pending/runs/held_scan.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedSet

from timer.entries.payloads import FIRE_BYTES_MAX, FIRE_TOPICS_MAX, Fire
from timer.entries.policies import CATCH_UP_ALL, DROP, LATEST, Scope, namespace_of
from timer.model.columns import I64, U32, U64, Buffers, RowArray
from timer.model.feature_level import LEVEL_OF_BOUNDED_SWEEPS
from timer.model.firing_order import Position, concat
from timer.model.timer_id import SEQ_MAX
from timer.model.units import TopicId, UnixMs
from timer.pending.memory.deleted_topics import NONE_DELETED, DeletedTopics
from timer.pending.memory.held_rows import BEGIN
from timer.pending.runs.held_scan import Portion, SweepTopics
from timer.ready.topic import Topic, TopicRelease
from timer.ready.topic_shares import TopicRows
from timer.state.dirty_topics import portions
from timer.state.ledger import Ledger, MovedRows
from timer.state.state import State

SWEEP_ROWS_MAX: Final = 4_096
"""Held rows that one FIRE looks at."""
SWEEP_TOPICS: Final = 16
"""Topics that begin a sweep together."""
SEARCH_ROWS_MAX: Final = 1 << 18
"""Most held rows, of all topics, among which a sweep searches for its topics' rows: in files that
takes a thread some 40 ms."""
SEARCH_BYTES_MAX: Final = 64 << 20
"""Most payload bytes of held rows for such a search: it reads whole batches."""


class Pauses:
    """The pauses of all topics."""

    def __init__(self, state: State, ledger: Ledger) -> None:
        self._state, self._ledger = state, ledger
        self.portion_rows = SWEEP_ROWS_MAX
        """Rows of a portion, equal on all replicas; smaller in tests. Likewise the next three."""
        self.sweep_topics = SWEEP_TOPICS
        self.search_rows_max = SEARCH_ROWS_MAX
        self.search_bytes_max = SEARCH_BYTES_MAX
        self._holding: set[TopicId] = set()
        self._holding_ids: U32 | None = None
        """`_holding` as an array. None: it has changed."""
        self._in_sweep: set[TopicId] = set()
        """Releasing topics that take part in the sweep."""
        self._turns: dict[TopicId, tuple[int, TopicId]] = {}
        """Turns (time of the resume, topic) of releasing topics that wait for a sweep to begin."""
        self._waiting = SortedSet()
        """The same turns, in order."""
        self._only = SweepTopics(frozenset(), NONE_DELETED)
        """The topic filter of the last portion."""
        self._next_id = TopicId(0)

    # ---- what topics do

    def add_topics(self, topics: Iterable[Topic]) -> None:
        """Note topics that were created, or put back from a manifest."""
        policies = self._state.policies
        pauses = policies.has("paused")
        for topic in topics:
            if pauses:
                topic.paused, _ = policies.pause_of(namespace_of(topic.name), topic.topic_id)
            if topic.is_holding:
                self._register(topic)

    def policy_changed(self, scope: Scope, now_ms: UnixMs) -> Iterator[None]:
        """Pause and resume topics, in portions, after a change of the scope's policy."""
        topics = self._state.topics
        inside = [topics[scope.topic]] if scope.topic in topics else []
        for some in portions(inside if scope.topic else [*topics.values()]):
            for topic in some:
                self._apply_policy(topic, scope, now_ms)
            yield
        yield from self._begin_sweep()

    def _apply_policy(self, topic: Topic, scope: Scope, now_ms: UnixMs) -> None:
        """Pause or resume one topic if the scope's policy changes that."""
        state, namespace = self._state, namespace_of(topic.name)
        if scope.namespace not in ("", namespace):
            return
        paused, catch_up = state.policies.pause_of(namespace, topic.topic_id)
        if paused == topic.paused:
            return
        state.topic_to_change(topic.topic_id)
        topic.paused, topic.release = paused, None
        if not paused and (topic.held or catch_up != CATCH_UP_ALL):
            until_ms = max(now_ms, state.last_read_time_ms)
            waits = topic.held > 0
            topic.release = TopicRelease(catch_up, until_ms, state.next_seq, is_waiting=waits)
        self._register(topic)

    def forget_topic(self, topic: Topic) -> None:
        """Forget a topic that was deleted, with its held rows."""
        self._forget(topic.topic_id)
        for _ in self._begin_sweep():
            pass

    def _register(self, topic: Topic) -> None:
        topic_id, release = topic.topic_id, topic.release
        self._forget(topic_id)
        if topic.is_holding:
            self._holding.add(topic_id)
            self._holding_ids = None
        if release is not None and release.is_waiting:
            self._turns[topic_id] = turn = release.until_ms, topic_id
            self._waiting.add(turn)
        elif release is not None:
            self._in_sweep.add(topic_id)

    def _forget(self, topic: TopicId) -> None:
        if topic in self._holding:
            self._holding.discard(topic)
            self._holding_ids = None
        self._in_sweep.discard(topic)
        if topic in self._turns:
            self._waiting.remove(self._turns.pop(topic))

    def _begin_sweep(self) -> Iterator[None]:
        """Begin a sweep for waiting topics, in portions, if none is under way for others."""
        count = len(self._in_sweep)
        if not count and not self._waiting:
            self._state.sweep_position = None
            self._state.store.end_sweep()
        elif self._state.sweep_position in (None, BEGIN) or not count:
            self._state.sweep_position = BEGIN
            yield from self._admit_to_sweep(max(self.sweep_topics - count, 0))

    def _admit_to_sweep(self, count: int) -> Iterator[None]:
        """Let `count` waiting topics take part in the sweep that begins."""
        if not self._sweeps_own_rows:
            count = len(self._waiting)
        for some in portions([*islice(self._waiting, count)]):
            for _, topic_id in some:
                topic = self._state.topic_to_change(topic_id)
                assert topic.release is not None
                topic.release.is_waiting = False
                self._register(topic)
            yield

    @property
    def _sweeps_own_rows(self) -> bool:
        """Whether a sweep meets only the rows of its own topics."""
        held = self._state.store.held
        return held <= self.search_rows_max and self._state.held_bytes <= self.search_bytes_max

    # ---- what is held

    def holds(self, rows: RowArray) -> npt.NDArray[np.bool_]:
        """Return which rows are of topics that hold due timers, (n, bool)."""
        if not self._holding:
            return np.zeros(len(rows), np.bool_)
        if self._holding_ids is None:
            self._holding_ids = np.array([*self._holding], np.uint32)
        return np.isin(rows["topic"], self._holding_ids)

    # ---- releasing

    def next_portion(self) -> Portion | None:
        """Return the largest portion of held rows for the next FIRE; None: no sweep."""
        if self._state.sweep_position is None:
            return None
        return self._portion(self.portion_rows, FIRE_BYTES_MAX, FIRE_TOPICS_MAX)

    def _portion(self, rows_max: int, bytes_max: int, topics_max: int) -> Portion:
        only: SweepTopics | None = None
        if self._sweeps_own_rows:
            topics = frozenset(self._in_sweep)
            next_id = self._state.next_topic_id
            if topics != self._only.topics or next_id != self._next_id:
                self._only, self._next_id = (
                    SweepTopics(topics, DeletedTopics.all_but(topics, next_id)),
                    next_id,
                )
            only = self._only
        swept = np.array([*self._in_sweep], np.uint32)
        seen, rows_max = self._state.sweep_position or BEGIN, min(rows_max, self.portion_rows)
        return Portion(seen, rows_max, bytes_max, only, self._topics_max(topics_max), swept)

    def _topics_max(self, of_fire: int) -> int | None:
        """Return how many topics of the sweep a FIRE may serve. None: all, as version 0.1 does."""
        bounded = self._state.level >= LEVEL_OF_BOUNDED_SWEEPS
        return max(of_fire // 2, 1) if bounded else None

    def sweep(self, fire: Fire) -> tuple[MovedRows, MovedRows, bool]:
        """Move the sweep on; return fired rows, dropped rows, and whether a FIRE must follow."""
        state = self._state
        if state.sweep_position is None:
            return [], [], False
        portion = self._portion(fire.rows_max, fire.bytes_max, fire.topics_max)
        part, seen = state.store.peek_held(portion), portion.seen
        fired: MovedRows = []
        dropped: MovedRows = []
        shares = state.by_topic(part.rows[np.isin(part.rows["topic"], portion.swept)], sums=False)
        # Version 0.1 goes from topic to topic, which shows in the outcomes that are kept.
        groups = [shares] if portion.topics_max else [[share] for share in shares]
        removed: list[RowArray] = []
        for group in groups:
            removed += self._release(group, part.bufs, fired, dropped)
        if removed:
            state.store.cancel_rows(concat(removed))
        if len(part.rows):
            last = part.rows[-1]
            self._state.sweep_position = seen = Position(int(last["due_ms"]), int(last["seq"]))
        if part.limited:
            return fired, dropped, True
        return fired, dropped, self._end_pass(seen, fired, portion.topics_max)

    def _release(
        self,
        shares: Sequence[tuple[Topic, TopicRows]],
        bufs: Buffers,
        fired: MovedRows,
        dropped: MovedRows,
    ) -> list[RowArray]:
        """Fire or drop the next held rows of topics; return those that leave the store."""
        before: list[Position] = []
        parts = [self._divide(topic, share.rows, before) for topic, share in shares]
        self._drop_lasts(before, dropped)
        to_drop, to_fire, to_fire_last = (non_empty(part[of] for part in parts) for of in range(3))
        self._drop(to_drop, dropped)
        self._fire(to_fire, bufs, fired)
        if to_fire_last:
            decided = [
                topic for (topic, _), part in zip(shares, parts, strict=True) if len(part[2])
            ]
            self._fire_lasts(decided, fired)
            self._fire(to_fire_last, bufs, fired)
        return [*to_drop, *to_fire, *to_fire_last]

    def _divide(
        self, topic: Topic, rows: RowArray, before: list[Position]
    ) -> tuple[RowArray, RowArray, RowArray]:
        """Return a topic's next held rows: to drop; to fire; to fire after the last overdue one.

        Adds the one that was the last so far to `before`, if another one is now.
        """
        release = topic.release
        assert release is not None
        overdue = np.zeros(len(rows), np.bool_)
        if release.catch_up in (DROP, LATEST):
            overdue = (rows["due_ms"] <= release.until_ms) & (rows["seq"] < release.seq_end)
        to_drop, to_fire = rows[overdue], rows[~overdue]
        if release.catch_up == LATEST and len(to_drop):
            last = Position(int(to_drop["due_ms"][-1]), int(to_drop["seq"][-1]))
            first = Position(int(to_drop["due_ms"][0]), int(to_drop["seq"][0]))
            if release.last is not None and release.last < first:
                before.append(release.last)
            release.last, to_drop = last, to_drop[:-1]
        early = int(np.count_nonzero(to_fire["due_ms"] <= release.until_ms))
        return to_drop, to_fire[:early], to_fire[early:]

    def _end_pass(self, seen: Position, fired: MovedRows, topics_max: int | None) -> bool:
        """End the sweep's pass over all held rows; return whether a FIRE must follow.

        `topics_max`: most topics that may fire their last overdue timer. None: all.
        """
        swept = [self._state.topic_to_change(topic) for topic in sorted(self._in_sweep)]
        ready = [topic for topic in swept if self._is_through(topic)]
        lasts = [topic for topic in ready if topic.release and topic.release.last is not None]
        for some in [lasts[:topics_max]] if topics_max else [[topic] for topic in lasts]:
            self._fire_lasts(some, fired)
        if topics_max and len(lasts) > topics_max:
            self._state.sweep_position = seen
            return True
        again = bool(self._waiting)
        for topic in ready:
            if topic.held:
                again = True  # its rows were scheduled as due, behind the sweep
            else:
                topic.release = None
                self._register(topic)
        early = len(ready) < len(swept)
        self._state.sweep_position = BEGIN if again else seen if early else None
        if again:
            for _ in self._admit_to_sweep(self.sweep_topics):
                pass
        for _ in self._begin_sweep():
            pass
        return again

    def _is_through(self, topic: Topic) -> bool:
        """Return whether FIREs have reached all overdue timers of a topic that is swept."""
        assert topic.release is not None
        return self._state.store.position >= Position(topic.release.until_ms, SEQ_MAX)

    def _fire_lasts(self, topics: Sequence[Topic], fired: MovedRows) -> None:
        """Fire the last overdue timers of topics, unless they were cancelled meanwhile."""
        lasts: list[Position] = []
        for release in (topic.release for topic in topics):
            if release is not None and release.last is not None:
                lasts.append(release.last)
                release.last = None
        due_ms, seq = _columns(lasts)
        while len(seq):
            whole, is_left = self._state.store.read(due_ms, seq, FIRE_BYTES_MAX)
            if len(rows := whole.rows[whole.rows["seq"] > 0]):
                self._state.store.cancel_rows(rows)
                self._fire([rows], {0: whole.blob}, fired)
            due_ms, seq = due_ms[is_left], seq[is_left]

    def _drop_lasts(self, lasts: Sequence[Position], dropped: MovedRows) -> None:
        """Drop the last overdue timers found so far, unless they were cancelled meanwhile."""
        if lasts:
            _, rows = self._state.store.cancel(*_columns(lasts))
            self._drop(non_empty([rows]), dropped)

    def _fire(self, parts: Sequence[RowArray], bufs: Buffers, fired: MovedRows) -> None:
        if parts:
            fired += self._ledger.fire_held(concat(parts), bufs)

    def _drop(self, parts: Sequence[RowArray], dropped: MovedRows) -> None:
        if parts:
            dropped += self._ledger.drop_held(concat(parts))


def non_empty(parts: Iterable[RowArray]) -> list[RowArray]:
    """Return the parts that have rows."""
    return [part for part in parts if len(part)]


def _columns(places: Sequence[Position]) -> tuple[I64, U64]:
    """Return due times and seqs of places, each (n,)."""
    due_ms = np.array([place.due_ms for place in places], np.int64)
    return due_ms, np.array([place.seq for place in places], np.uint64)
