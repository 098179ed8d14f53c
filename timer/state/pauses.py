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

All of this is state, equal on every replica. A portion therefore counts live rows only: deleted and
cancelled rows are in some replicas' runs and not in others' (timer/pending/runs/held_scan.py).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedSet

from timer.entries.payloads import FIRE_BYTES_MAX
from timer.entries.policies import CATCH_UP_ALL, DROP, LATEST, Scope, namespace_of
from timer.model.columns import U32, Buffers, RowArray
from timer.model.firing_order import Position, concat
from timer.model.timer_id import SEQ_MAX
from timer.model.units import TopicId, UnixMs
from timer.pending.memory.deleted_topics import NONE, DeletedTopics
from timer.pending.memory.held_rows import BEGIN
from timer.pending.runs.held_scan import Only, Portion
from timer.ready.topic import Topic, TopicRelease
from timer.state.dirty_topics import portions
from timer.state.ledger import Ledger, Moved
from timer.state.state import State

SWEEP_ROWS_MAX: Final = 4_096
"""Held rows that one FIRE looks at."""
SWEEP_TOPICS: Final = 16
"""Topics that begin a sweep together."""
APART_MAX: Final = 1 << 18
"""Most held rows, of all topics, among which a sweep searches for its topics' rows: in files that
takes a thread some 40 ms."""
APART_BYTES: Final = 64 << 20
"""Most payload bytes of held rows for such a search: it reads whole batches."""

_whole: Final = deque[None](maxlen=0).extend
"""Runs work that is in portions to its end."""


class Pauses:
    """The pauses of all topics."""

    def __init__(self, state: State, ledger: Ledger) -> None:
        self._state, self._ledger = state, ledger
        self.portion = SWEEP_ROWS_MAX
        """Rows of a portion, equal on all replicas; smaller in tests. Likewise the next three."""
        self.together = SWEEP_TOPICS
        self.apart_max = APART_MAX
        self.apart_bytes = APART_BYTES
        self._holding: set[TopicId] = set()
        self._holding_ids: U32 | None = None
        """`_holding` as an array. None: it has changed."""
        self._swept_for: set[TopicId] = set()
        """Releasing topics that take part in the sweep."""
        self._turns: dict[TopicId, tuple[int, TopicId]] = {}
        """Turns (time of the resume, topic) of releasing topics that wait for a sweep to begin."""
        self._waiting = SortedSet()
        """The same turns, in order."""
        self._only = Only(frozenset(), NONE)
        """The topic filter of the last portion."""
        self._next_id = TopicId(0)

    # ---- what topics do

    def made(self, topics: Iterable[Topic]) -> None:
        """Note topics that were created, or put back from a manifest."""
        policies = self._state.policies
        pauses = policies.pauses
        for topic in topics:
            if pauses:
                topic.paused, _ = policies.firing(namespace_of(topic.name), topic.topic_id)
            if topic.holding:
                self._note(topic)

    def policy_changed(self, scope: Scope, now_ms: UnixMs) -> Iterator[None]:
        """Pause and resume topics, in portions, after a change of the scope's policy."""
        topics = self._state.topics
        inside = [topics[scope.topic]] if scope.topic in topics else []
        for some in portions(inside if scope.topic else [*topics.values()]):
            for topic in some:
                self._follow(topic, scope, now_ms)
            yield
        yield from self._begin()

    def _follow(self, topic: Topic, scope: Scope, now_ms: UnixMs) -> None:
        """Pause or resume one topic if the scope's policy changes that."""
        state, namespace = self._state, namespace_of(topic.name)
        if scope.namespace not in ("", namespace):
            return
        paused, catch_up = state.policies.firing(namespace, topic.topic_id)
        if paused == topic.paused:
            return
        state.changing(topic.topic_id)
        topic.paused, topic.release = paused, None
        if not paused and (topic.held or catch_up != CATCH_UP_ALL):
            until_ms = max(now_ms, state.last_read_time_ms)
            waits = topic.held > 0
            topic.release = TopicRelease(catch_up, until_ms, state.next_seq, waits=waits)
        self._note(topic)

    def gone(self, topic: Topic) -> None:
        """Forget a topic that was deleted, with its held rows."""
        self._forget(topic.topic_id)
        _whole(self._begin())

    def _note(self, topic: Topic) -> None:
        topic_id, release = topic.topic_id, topic.release
        self._forget(topic_id)
        if topic.holding:
            self._holding.add(topic_id)
            self._holding_ids = None
        if release is not None and release.waits:
            self._turns[topic_id] = turn = release.until_ms, topic_id
            self._waiting.add(turn)
        elif release is not None:
            self._swept_for.add(topic_id)

    def _forget(self, topic: TopicId) -> None:
        if topic in self._holding:
            self._holding.discard(topic)
            self._holding_ids = None
        self._swept_for.discard(topic)
        if topic in self._turns:
            self._waiting.remove(self._turns.pop(topic))

    def _begin(self) -> Iterator[None]:
        """Begin a sweep for waiting topics, in portions, if none is under way for others."""
        taken = len(self._swept_for)
        if not taken and not self._waiting:
            self._state.swept = None
            self._state.store.end_sweep()
        elif self._state.swept in (None, BEGIN) or not taken:
            self._state.swept = BEGIN
            yield from self._admit(max(self.together - taken, 0))

    def _admit(self, count: int) -> Iterator[None]:
        """Let `count` waiting topics take part in the sweep that begins."""
        if not self._apart:
            count = len(self._waiting)
        for some in portions([*islice(self._waiting, count)]):
            for _, topic_id in some:
                topic = self._state.changing(topic_id)
                assert topic.release is not None
                topic.release.waits = False
                self._note(topic)
            yield

    @property
    def _apart(self) -> bool:
        """Whether a sweep meets only the rows of its own topics."""
        held = self._state.store.held
        return held <= self.apart_max and self._state.held_bytes <= self.apart_bytes

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
        if self._state.swept is None:
            return None
        return self._portion(self.portion, FIRE_BYTES_MAX)

    def _portion(self, rows_max: int, bytes_max: int) -> Portion:
        only: Only | None = None
        if self._apart:
            topics = frozenset(self._swept_for)
            next_id = self._state.next_topic_id
            if topics != self._only.topics or next_id != self._next_id:
                self._only, self._next_id = (
                    Only(topics, DeletedTopics.all_but(topics, next_id)),
                    next_id,
                )
            only = self._only
        return Portion(self._state.swept or BEGIN, min(rows_max, self.portion), bytes_max, only)

    def sweep(self, rows_max: int, bytes_max: int) -> tuple[Moved, Moved, bool]:
        """Move the sweep on; return fired rows, dropped rows, and whether a FIRE must follow."""
        if self._state.swept is None:
            return [], [], False
        state, portion = self._state, self._portion(rows_max, bytes_max)
        part, seen = state.store.peek_held(portion), portion.seen
        fired: Moved = []
        dropped: Moved = []
        gone: list[RowArray] = []
        swept = np.array([*self._swept_for], np.uint32)
        mine = part.rows[np.isin(part.rows["topic"], swept)]
        for topic, share in state.by_topic(mine, sums=False):
            assert topic.release is not None
            rows = self._release(topic, topic.release, share.rows, part.bufs, fired, dropped)
            gone.append(rows)
        if gone:
            state.store.end(concat(gone))
        if len(part.rows):
            last = part.rows[-1]
            self._state.swept = seen = Position(int(last["due_ms"]), int(last["seq"]))
        if part.limited:
            return fired, dropped, True
        return fired, dropped, self._passed(seen, fired)

    def _release(
        self,
        topic: Topic,
        release: TopicRelease,
        rows: RowArray,
        bufs: Buffers,
        fired: Moved,
        dropped: Moved,
    ) -> RowArray:
        """Fire or drop a topic's next held rows; return those that leave the store."""
        overdue = np.zeros(len(rows), np.bool_)
        if release.catch_up in (DROP, LATEST):
            overdue = (rows["due_ms"] <= release.until_ms) & (rows["seq"] < release.seq_end)
        lost, kept = rows[overdue], rows[~overdue]
        if release.catch_up == LATEST and len(lost):
            last = Position(int(lost["due_ms"][-1]), int(lost["seq"][-1]))
            first = Position(int(lost["due_ms"][0]), int(lost["seq"][0]))
            if release.last is not None and release.last < first:
                self._drop_last(topic, release.last, dropped)
            release.last, lost = last, lost[:-1]
        if len(lost):
            self._drop(topic, lost, dropped)
        early = int(np.count_nonzero(kept["due_ms"] <= release.until_ms))
        if early:
            self._fire(topic, kept[:early], bufs, fired)
        if early < len(kept):
            if release.last is not None:
                self._fire_last(topic, release, fired)
            self._fire(topic, kept[early:], bufs, fired)
        return concat([part for part in (lost, kept) if len(part)])

    def _passed(self, seen: Position, fired: Moved) -> bool:
        """End the sweep's pass over all held rows; return whether another begins at once."""
        position = self._state.store.position
        again, early = False, False
        for topic_id in sorted(self._swept_for):
            topic = self._state.changing(topic_id)
            release = topic.release
            assert release is not None
            if position < Position(release.until_ms, SEQ_MAX):
                early = True  # some overdue timers have not come due by a FIRE
                continue
            if release.last is not None:
                self._fire_last(topic, release, fired)
            if topic.held:
                again = True  # its rows were scheduled as due, behind the sweep
            else:
                topic.release = None
                self._note(topic)
        again |= bool(self._waiting)
        self._state.swept = BEGIN if again else seen if early else None
        if again:
            _whole(self._admit(self.together))
        _whole(self._begin())
        return again

    def _fire_last(self, topic: Topic, release: TopicRelease, fired: Moved) -> None:
        """Fire the last overdue timer, unless it was cancelled meanwhile."""
        assert release.last is not None
        due_ms, seq = np.array([release.last.due_ms]), np.array([release.last.seq], np.uint64)
        release.last = None
        whole, _ = self._state.store.read(due_ms, seq, 0)
        if whole.rows["seq"][0]:
            self._state.store.end(whole.rows)
            self._fire(topic, whole.rows, {0: whole.blob}, fired)

    def _drop_last(self, topic: Topic, last: Position, dropped: Moved) -> None:
        """Drop the last overdue timer found so far, unless it was cancelled meanwhile."""
        due_ms, seq = np.array([last.due_ms]), np.array([last.seq], np.uint64)
        _, rows = self._state.store.cancel(due_ms, seq)
        if len(rows):
            self._drop(topic, rows, dropped)

    def _fire(self, topic: Topic, rows: RowArray, bufs: Buffers, fired: Moved) -> None:
        self._ledger.fire_held(topic, rows, bufs)
        fired.append((topic.topic_id, rows))

    def _drop(self, topic: Topic, rows: RowArray, dropped: Moved) -> None:
        self._ledger.drop_held(topic, rows)
        dropped.append((topic.topic_id, rows))
