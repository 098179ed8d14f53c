"""A read view: the pending rows of a store at one moment, for a thread beside the event loop.

    store --read_view (cheap, on the loop)--> ReadView --page, count, tally (in a thread)--> timers

Runs are immutable, and rows are only added to a memtable. The flags of live rows may change, so a
view has a copy of them. Its content is therefore consistent for as long as it is used. A merge may
remove the file of a run meanwhile. The read then raises FileNotFoundError, and the caller takes a
new view.

Pages are in (due, seq) order, which never changes. The end of a page is a Position, and the next
page begins after it, in any later view. Held rows (timer/pending/memory/held_rows.py) come first:
their plain dues lie at or before the fire position, all others after it. This stays so if rows
become held between two pages. The work of a page is bounded: if few rows match, the page is short
and has the position to continue from. Stripes of a run without rows of the topic are not read. A
memtable's rows of a topic are sorted for the first page. The next page, of another view, only sorts
the rows that were added since.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, TOMBSTONE, U64, Buffers, RowArray
from timer.model.firing_order import Position, after, fire_order, merge_order, place_of, rank
from timer.model.timer_id import SEQ_MAX
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.memory.held_rows import (
    BEGIN,
    DUE_MASK,
    HELD_OFFSET_MS,
    held_position,
    restore_dues,
)
from timer.pending.memory.memtable import Memtable, RowsToFlush, Tombstones, TopicOrder
from timer.pending.runs.row_reader import Packer, WholeRows
from timer.pending.runs.run import BatchColumns, Run
from timer.pending.runs.run_totals import RunTotals

SCAN_ROWS_MAX: Final = 65_536
"""Approximate rows read for one page. Then it is returned even if it is short."""
PART_ROWS: Final = 4_096
"""Rows of a memtable per step."""
NO_TOPICS: Final = np.empty(0, np.uint32)
ORDERS_MAX: Final = 4
"""Topics per memtable whose rows stay sorted for the next page: 24 bytes a row."""
PAGE_BYTES_MAX: Final = 3 << 20
"""Bytes of payloads, keys and headers in a page of several rows.

gRPC clients accept 4 MiB by default, and the columns of numbers come on top.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Timers of a topic, due in [from, to), with seqs below `seq_end` and keys with the prefix."""

    topic: int
    due_from_ms: int
    due_to_ms: int
    key_prefix: bytes = b""
    seq_end: int = SEQ_MAX

    @property
    def start(self) -> Position:
        """Position just before the first timer."""
        return Position(self.due_from_ms - 1, SEQ_MAX)


class ViewPage(NamedTuple):
    """The timers of one page of a view."""

    timers: WholeRows
    """In (due, seq) order. Without bytes if only ids were requested."""
    next: Position | None
    """Continue after it. None: there are no more."""
    held_count: int = 0
    """The first `held_count` timers are held ones."""


class ViewTally(NamedTuple):
    """The number of a filter's timers in one part of a view."""

    timers: int
    next: Position | None
    """Continue after it. None: there are no more."""


class Table(NamedTuple):
    """A memtable's rows at the view's moment."""

    rows: RowArray
    alive: npt.NDArray[np.bool_]
    bufs: Buffers
    tombstones: Tombstones
    """Tombstones of timers that are not in this memtable."""
    rows_to_flush: RowsToFlush | None
    """The rows for its new runs. None: it is not being flushed."""
    orders: dict[int, TopicOrder]
    has_held: bool

    def live(self, start: int) -> npt.NDArray[np.bool_]:
        """Return which of the SCAN_ROWS_MAX rows from `start` are pending, in a new array."""
        stop = min(start + SCAN_ROWS_MAX, len(self.rows))
        if self.rows_to_flush is None:
            return self.alive[start:stop].copy()
        flags = np.zeros(stop - start, np.bool_)
        first, last = self.rows_to_flush.live.searchsorted((start, stop)).tolist()
        flags[self.rows_to_flush.live[first:last] - start] = True
        return flags


class ReadView:
    """The pending rows of a store at one moment. See the module."""

    def __init__(
        self,
        position: Position,
        tables: Sequence[tuple[Memtable, RowsToFlush | None]],
        runs: Sequence[Run],
        deleted_topics: DeletedTopics,
    ) -> None:
        self._position = position
        self._deleted_topics = deleted_topics
        self._tables = [
            Table(
                table.rows[: table.count],
                table.alive[: table.count].copy(),
                table.bufs,
                table.tombstones(),
                left,
                table.orders,
                table.has_held,
            )
            for table, left in tables
        ]
        self._runs = [run for run in runs if run.meta.last > position]

    @property
    def _has_held(self) -> bool:
        """Whether rows of any topic may be held."""
        if any(run.meta.last.due_ms >= HELD_OFFSET_MS for run in self._runs):
            return True
        return any(table.has_held for table in self._tables)

    # ---- counting

    def count(self, topic: int, until_ms: Sequence[int]) -> list[int]:
        """Return how many pending timers of a topic have due <= each of `until_ms`, ascending.

        Raises:
            CorruptFileError: a head doesn't verify.
            FileNotFoundError: a run was removed; take a new view.
        """
        edges = np.array(until_ms, np.int64)
        counts = np.zeros(len(edges), np.int64)
        if self._deleted_topics.has(topic):
            return counts.tolist()
        for table in self._tables:
            rows = table.rows
            places = (
                np.flatnonzero(table.alive)
                if table.rows_to_flush is None
                else table.rows_to_flush.live
            )
            mine = places[rows["topic"][places] == topic]
            counts += self._counts_until(rows["due_ms"][mine], rows["seq"][mine], edges)
            due, seq, of = table.tombstones
            mine = of == topic
            counts -= self._counts_until(due[mine], seq[mine], edges)
        for run in self._runs:
            counts += self._counts_in_run(_RunCounter(run, topic), until_ms)
        return counts.tolist()

    def count_all(self, until_ms: Sequence[int]) -> tuple[list[int], bool]:
        """Return how many pending timers of all topics have due <= each of `until_ms`, ascending.

        Held timers count with their plain due. Then whether the counts are exact: cancelled timers
        and deleted topics in runs make some of them estimates (timer/pending/runs/run_totals.py).

        Raises:
            CorruptFileError: a head doesn't verify.
            FileNotFoundError: a run was removed; take a new view.
        """
        edges, exact = np.array(until_ms, np.int64), True
        counts = np.zeros(len(edges), np.int64)
        for table in self._tables:
            for start in range(0, len(table.rows), SCAN_ROWS_MAX):
                rows, live = table.rows[start : start + SCAN_ROWS_MAX], table.live(start)
                if self._deleted_topics:
                    # Perhaps deleted after the freeze.
                    live &= ~self._deleted_topics.of(rows["topic"])
                counts += self._counts_until(rows["due_ms"][live], rows["seq"][live], edges)
            due, seq, topic = table.tombstones
            existing = ~self._deleted_topics.of(topic)
            counts -= self._counts_until(due[existing], seq[existing], edges)
        for run in self._runs:
            totals = RunTotals(run, self._deleted_topics)
            counts += self._counts_in_run(totals, until_ms)
            exact &= totals.exact
        return counts.tolist(), exact

    def first_overdue(self, until_ms: int, rows_max: int) -> dict[int, int]:
        """Return topic -> due time of its first timer with due <= `until_ms`, without held timers.

        `rows_max`: about this many rows of each run are read, the oldest ones. The search ends, for
        all runs, at the (due, seq) of the first unread row: a later timer may be cancelled there.

        Raises:
            CorruptFileError: a head doesn't verify.
            FileNotFoundError: a run was removed; take a new view.
        """
        dues, seqs, topics = [np.empty(0, np.int64)], [np.empty(0, np.uint64)], [NO_TOPICS]
        dead, end = [np.empty(0, np.uint64)], Position(until_ms + 1, 0)  # rows before it count
        for table in self._tables:
            for start in range(0, len(table.rows), SCAN_ROWS_MAX):
                rows, live = table.rows[start : start + SCAN_ROWS_MAX], table.live(start)
                rows = rows[live & (rows["due_ms"] <= until_ms)]
                rows = rows[after(rows["due_ms"], rows["seq"], self._position)]
                dues.append(rows["due_ms"])
                seqs.append(rows["seq"])
                topics.append(rows["topic"])
            dead.append(table.tombstones[1])
        for run in self._runs:
            batch, rows_read = run.batch_after(self._position), 0
            while batch < len(run) and run.first(batch) < end:
                if rows_read >= rows_max:
                    end = run.first(batch)  # later rows may be cancelled by unread ones
                    break
                head = run.head(batch)
                start = rank(head.due_ms, head.seq, self._position)
                stop = max(start, place_of(head.due_ms, head.seq, *end))
                is_dead = head.topic[start:stop] == TOMBSTONE
                dead.append(head.seq[start:stop][is_dead])
                dues.append(head.due_ms[start:stop][~is_dead])
                seqs.append(head.seq[start:stop][~is_dead])
                topics.append(head.topic[start:stop][~is_dead])
                batch, rows_read = batch + 1, rows_read + stop - start
        due, seq, topic = np.concatenate(dues), np.concatenate(seqs), np.concatenate(topics)
        live = (due < end.due_ms) | ((due == end.due_ms) & (seq < np.uint64(end.seq)))
        live &= ~np.isin(seq, np.concatenate(dead))
        if self._deleted_topics:
            live &= ~self._deleted_topics.of(topic)
        order = np.flatnonzero(live)[due[live].argsort(kind="stable")]
        found, first = np.unique(topic[order], return_index=True)
        return dict(zip(found.tolist(), due[order][first].tolist(), strict=True))

    def _counts_until(self, due: I64, seq: U64, edges: I64) -> I64:
        """Return how many pairs after the fire position are due by each of `edges`, ascending."""
        later = due > self._position.due_ms
        if not later.all():
            due = due[later | after(due, seq, self._position)]
        places = np.bincount(edges.searchsorted(due & DUE_MASK), minlength=len(edges) + 1)
        return np.asarray(np.cumsum(places)[: len(edges)], np.int64)

    def _counts_in_run(
        self, counter: "_RunCounter | RunTotals", until_ms: Sequence[int]
    ) -> list[int]:
        """Return how many timers of a run after the fire position are due by each of `until_ms`."""
        begun = counter.upto(self._position) + counter.upto(held_position(BEGIN))
        return [
            counter.upto(held_position(end)) + counter.upto(max(end, self._position)) - begun
            for end in (Position(until, SEQ_MAX) for until in until_ms)
        ]

    def tally(self, where: Filter, seen: Position) -> ViewTally:
        """Return how many timers after `seen` a filter selects: all of them without a key prefix.

        With a prefix, a call reads about SCAN_ROWS_MAX rows.

        Raises:
            CorruptFileError: a batch doesn't verify.
            FileNotFoundError: a run was removed; take a new view.
        """
        if self._deleted_topics.has(where.topic):
            return ViewTally(0, None)
        if not where.key_prefix and seen == where.start and where.seq_end == SEQ_MAX:
            before, upto = self.count(where.topic, [where.due_from_ms - 1, where.due_to_ms - 1])
            return ViewTally(upto - before, None)
        count = 0
        if seen < self._position and self._has_held:
            count, following = self._tally(self._held_filter(where), held_position(seen))
            if following is not None:
                return ViewTally(count, Position(following.due_ms - HELD_OFFSET_MS, following.seq))
        more, following = self._tally(where, max(seen, self._position))
        return ViewTally(count + more, following)

    def _tally(self, where: Filter, seen: Position) -> ViewTally:
        """Return the number of the next timers after `seen`, in a range of stored dues."""
        steps = [*self._steps(where, seen)]
        return ViewTally(sum(step.count() for step in steps), steps[-1].next)

    # ---- pages

    def page(
        self, where: Filter, seen: Position, rows_max: int, *, with_bytes: bool = True
    ) -> ViewPage:
        """Return the next timers after `seen`, at most `rows_max`, whole or without their bytes.

        Raises:
            CorruptFileError: a batch doesn't verify.
            FileNotFoundError: a run was removed; take a new view.
        """
        if self._deleted_topics.has(where.topic):
            return ViewPage(_pack([]), None)
        if seen < self._position and self._has_held:
            page = self._page(
                self._held_filter(where), held_position(seen), rows_max, with_bytes=with_bytes
            )
            held = len(restore_dues(page.timers.rows))
            if page.next is not None:
                following = Position(page.next.due_ms - HELD_OFFSET_MS, page.next.seq)
                return page._replace(next=following, held_count=held)
            if held:
                return page._replace(next=max(self._position, where.start), held_count=held)
        return self._page(where, max(seen, self._position), rows_max, with_bytes=with_bytes)

    def _held_filter(self, where: Filter) -> Filter:
        """Return the filter of those of its timers that are held."""
        return replace(
            where,
            due_from_ms=where.due_from_ms + HELD_OFFSET_MS,
            due_to_ms=min(where.due_to_ms, self._position.due_ms + 1) + HELD_OFFSET_MS,
        )

    def _page(self, where: Filter, seen: Position, rows_max: int, *, with_bytes: bool) -> ViewPage:
        """Return the next timers after `seen`, in a range of stored dues."""
        found: list[tuple[np.void, Buffers]] = []
        size = 0
        following: Position | None = seen
        for step in self._steps(where, seen):
            for part, at in step.rows():
                row, bufs = (
                    part.lane.whole_row(part, at)
                    if with_bytes
                    else part.lane.row_without_bytes(part, at)
                )
                size += int(row["payload_size"]) + int(row["key_size"]) + int(row["headers_size"])
                if found and size > PAGE_BYTES_MAX:
                    return _page_to_here(found)
                found.append((row, bufs))
                if len(found) >= rows_max:
                    return _page_to_here(found)
            following = step.next
        return ViewPage(_pack(found), following)

    def _steps(self, where: Filter, seen: Position) -> Iterator["_Step"]:
        """Yield the next timers after `seen`, step by step; about SCAN_ROWS_MAX rows are read."""
        seen = max(seen, where.start)
        lanes: list[_TableLane | _RunLane] = [_RunLane(run, where) for run in self._runs]
        lanes += [_TableLane(table, where) for table in self._tables if len(table.rows)]
        tombstones = [
            seq[(topic == where.topic) & (due >= seen.due_ms)]
            for due, seq, topic in (table.tombstones for table in self._tables)
        ]
        dead = np.sort(np.concatenate([np.empty(0, np.uint64), *tombstones]))
        rows_read = 0
        following: Position | None = seen
        while following is not None and rows_read < SCAN_ROWS_MAX:
            parts = [part for lane in lanes if (part := lane.part(following)) is not None]
            horizon = min((part.last for part in parts if part.last is not None), default=None)
            rows_read += sum(part.rows_read for part in parts)
            stuck = horizon is not None and horizon <= following
            following = following if stuck else horizon
            yield _Step(parts, horizon, dead, where.seq_end, following)
            if stuck:
                break


def _page_to_here(found: list[tuple[np.void, Buffers]]) -> ViewPage:
    """Return a page that the next one continues after its last row."""
    row, _ = found[-1]
    return ViewPage(_pack(found), Position(int(row["due_ms"]), int(row["seq"])))


def _pack(found: list[tuple[np.void, Buffers]]) -> WholeRows:
    packer = Packer(len(found))
    for at, (row, bufs) in enumerate(found):
        packer.put(at, row, bufs)
    return packer.packed_rows()


class _Part(NamedTuple):
    """Matching rows from one source, in order, and their places in it."""

    lane: "_TableLane | _RunLane"
    due: I64
    seq: U64
    place: npt.NDArray[np.intp]
    dead: U64
    """Seqs of timers that this source's tombstones cancel."""
    last: Position | None
    """Complete up to here. None: complete to the end of the range."""
    rows_read: int


@dataclass(frozen=True, slots=True)
class _Step:
    """The next rows of all sources, up to `horizon`."""

    parts: Sequence[_Part]
    horizon: Position | None
    dead: U64
    """Sorted seqs of the timers that tombstones in memtables cancel."""
    seq_end: int
    next: Position | None
    """Continue after it. None: there are no more."""

    def count(self) -> int:
        """Return the number of live rows."""
        return int(np.count_nonzero(self._live(*self._columns()))) if self.parts else 0

    def rows(self) -> Iterator[tuple[_Part, int]]:
        """Yield (part, number in it) of the live rows, in firing order."""
        if not self.parts:
            return
        due, seq = self._columns()
        source = np.repeat(np.arange(len(self.parts)), [len(part.due) for part in self.parts])
        number = np.concatenate([np.arange(len(part.due)) for part in self.parts])
        places = np.flatnonzero(self._live(due, seq))
        for at in places[fire_order(due[places], seq[places])].tolist():
            yield self.parts[int(source[at])], int(number[at])

    def _columns(self) -> tuple[I64, U64]:
        due = np.concatenate([part.due for part in self.parts])
        return due, np.concatenate([part.seq for part in self.parts])

    def _live(self, due: I64, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which rows are pending and within `horizon` and `seq_end`."""
        left = ~np.isin(seq, np.concatenate([part.dead for part in self.parts]))
        if len(self.dead):
            left &= self.dead.take(self.dead.searchsorted(seq), mode="clip") != seq
        left &= seq < np.uint64(self.seq_end)
        if self.horizon is not None:
            left &= ~after(due, seq, self.horizon)
        return left


def _order_of(table: Table, topic: int) -> TopicOrder:
    """Return a topic's rows in order. Only rows added since the last page are sorted."""
    count, known = len(table.rows), table.orders.get(topic)
    if known is not None and known.end >= count:
        return known
    rows = table.rows[0 if known is None else known.end :]
    fresh = np.flatnonzero(rows["topic"] == topic)
    due, seq = rows["due_ms"][fresh], rows["seq"][fresh]
    places = fresh + (count - len(rows))
    if known is not None:
        due, seq = np.concatenate([known.due_ms, due]), np.concatenate([known.seq, seq])
        places = np.concatenate([known.places, places])
    order = merge_order(due, seq)
    found = TopicOrder(count, due[order], seq[order], places[order])
    table.orders[topic] = found
    for other in [*table.orders][:-ORDERS_MAX]:
        table.orders.pop(other, None)
    return found


class _TableLane:
    """A memtable's rows for a page."""

    def __init__(self, table: Table, where: Filter) -> None:
        self._table, self._prefix = table, where.key_prefix
        self._order = _order_of(table, where.topic)
        self._end = int(self._order.due_ms.searchsorted(where.due_to_ms))

    def part(self, seen: Position) -> _Part:
        order = self._order
        start = rank(order.due_ms, order.seq, seen)
        stop = max(start, min(start + PART_ROWS, self._end))
        last = None
        if stop < self._end:
            last = Position(int(order.due_ms[stop - 1]), int(order.seq[stop - 1]))
        places = order.places[start:stop]
        live = places < len(self._table.rows)  # later rows are not in this view
        live &= self._table.alive.take(places, mode="clip")
        if self._prefix:
            live[live] = self._has_prefix(places[live])
        due, seq = order.due_ms[start:stop][live], order.seq[start:stop][live]
        return _Part(self, due, seq, places[live], seq[:0], last, stop - start)

    def _has_prefix(self, places: npt.NDArray[np.intp]) -> list[bool]:
        """Return which rows have keys with the prefix (n)."""
        rows, bufs, prefix = self._table.rows, self._table.bufs, self._prefix
        starts = rows["key_start"][places].tolist()
        sizes = np.minimum(rows["key_size"][places], len(prefix)).tolist()
        of = rows["buf"][places].tolist()
        return [bufs[b][s : s + n] == prefix for b, s, n in zip(of, starts, sizes, strict=True)]

    def whole_row(self, part: _Part, at: int) -> tuple[np.void, Buffers]:
        return self._table.rows[part.place[at]], self._table.bufs

    def row_without_bytes(self, part: _Part, at: int) -> tuple[np.void, Buffers]:
        """Return the row without its bytes."""
        row = self._table.rows[part.place[at]].copy()  # not the memtable's own row
        row["payload_size"] = row["key_size"] = row["headers_size"] = 0
        return row, self._table.bufs


class _RunLane:
    """A run's rows for a page, batch by batch."""

    def __init__(self, run: Run, where: Filter) -> None:
        self._run, self._where = run, where
        self._stripes = run.stripes_of(where.topic)["stripe"].astype(np.int64)
        self._head: BatchColumns | None = None
        self._matching = self._tombstones = np.empty(0, np.intp)
        """Places in the batch: of timers whose keys have the prefix, of the topic's tombstones."""

    def part(self, seen: Position) -> _Part | None:
        """Return the rest of one batch after `seen`; None if the range has no more rows."""
        batch, until_ms = self._next_batch(self._run.batch_after(seen)), self._where.due_to_ms - 1
        if batch == len(self._run) or self._run.first_due(batch) > until_ms:
            return None
        if (head := self._head) is None or head.batch != batch:
            head = self._head = self._run.head(batch)
            self._matching = self._matches(head)
            mine = (head.topic == TOMBSTONE) & (head.requested_ms == self._where.topic)
            self._tombstones = np.flatnonzero(mine)
        start = rank(head.due_ms, head.seq, seen)
        stop = max(start, int(head.due_ms.searchsorted(until_ms, "right")))
        more = stop == len(head.seq) and self._next_batch(batch + 1) < len(self._run)
        last = Position(int(head.due_ms[-1]), int(head.seq[-1])) if more else None
        place, tombstones = (
            places[slice(*places.searchsorted((start, stop)))]
            for places in (self._matching, self._tombstones)
        )
        return _Part(
            self,
            head.due_ms[place],
            head.seq[place],
            place,
            head.seq[tombstones],
            last,
            stop - start,
        )

    def _next_batch(self, batch: int) -> int:
        """Return the first batch from `batch` in a stripe with rows of the topic; or `len(run)`."""
        size = self._run.meta.stripe
        following = self._stripes[self._stripes.searchsorted(batch // size) :]
        return max(batch, int(following[0]) * size) if len(following) else len(self._run)

    def _matches(self, head: BatchColumns) -> npt.NDArray[np.intp]:
        prefix, place = self._where.key_prefix, np.flatnonzero(head.topic == self._where.topic)
        if not prefix or not len(place):
            return place
        offsets, blob = self._run.keys_of(head)
        starts, raw = offsets[place], np.frombuffer(blob, np.uint8)
        long_enough = offsets[place + 1] - starts >= len(prefix)
        for at, byte in enumerate(prefix):
            place, starts = place[long_enough], starts[long_enough]
            long_enough = raw[starts + at] == byte
        return place[long_enough]

    def whole_row(self, part: _Part, at: int) -> tuple[np.void, Buffers]:
        assert self._head is not None
        place = int(part.place[at])
        rows, data = self._run.rows(self._head, place, place + 1)
        return rows[0], {0: data}

    def row_without_bytes(self, part: _Part, at: int) -> tuple[np.void, Buffers]:
        """Return the row without its bytes."""
        assert self._head is not None
        rows = self._head.rows(part.place[at : at + 1])
        rows["payload_size"] = 0
        return rows[0], {0: b""}


class _RunCounter:
    """Counts the timers of one topic in a run, less its tombstones."""

    def __init__(self, run: Run, topic: int) -> None:
        self._run, self._topic = run, topic
        table = run.stripes_of(topic)
        self._stripes = table["stripe"].astype(np.int64)
        signed = table["timers"].astype(np.int64) - table["tombstones"]
        self._sums = np.concatenate([[0], np.cumsum(signed)])
        self._heads: dict[int, BatchColumns] = {}

    def upto(self, position: Position) -> int:
        """Return the number at or before `position`."""
        batch = self._run.batch_after(position)
        stripe, within = divmod(batch, self._run.meta.stripe)
        before = int(self._stripes.searchsorted(stripe))
        count = int(self._sums[before])
        if before == len(self._stripes) or self._stripes[before] != stripe:
            return count  # none in this stripe
        for number in range(batch - within, min(batch + 1, len(self._run))):
            count += self._in_batch(number, position)
        return count

    def _in_batch(self, batch: int, position: Position) -> int:
        if (head := self._heads.get(batch)) is None:
            head = self._heads[batch] = self._run.head(batch)
        stop = rank(head.due_ms, head.seq, position)
        topic, requested = head.topic[:stop], head.requested_ms[:stop]
        timers = int(np.count_nonzero(topic == self._topic))
        dead = (topic == TOMBSTONE) & (requested == self._topic)
        return timers - int(np.count_nonzero(dead))
