"""Deliveries of a group of type `shared`, in any order, by priority if messages have some.

fresh offsets --scan--> free --> leased      Returned messages go first. Then come those that
returned messages ----------^                were never delivered in this epoch. A delayed
waiting: delayed messages --> returned       message waits for its time in a heap.

While the queue has messages with priorities, free messages first go on a shelf, which decides
(timer/leader/groups/priority_shelf.py).
"""

import heapq
from typing import Final

import numpy as np

from timer.leader.groups.ended_messages import EndedMessages
from timer.leader.groups.lease_table import (
    FREE,
    RESERVE_AHEAD,
    WAITING,
    ConsumerStream,
    LeaseTable,
)
from timer.leader.groups.priority_shelf import FILL_MAX, SHELF_MAX, PriorityShelf
from timer.leader.groups.roster import Roster
from timer.leader.groups.turns import OFFSETS_A_UNIT
from timer.model.columns import I64, U64
from timer.model.units import QueueOffset, UnixMs
from timer.ready.group import Group
from timer.ready.queue import Queue

SCAN_MAX: Final = 65_536
"""Offsets looked at in one call when most are already acked, as after a failover."""
STEP_ROWS: Final = 4096
"""Offsets looked at in one step of the search for the first free one."""
WAITING_MIN: Final = 256


class SharedOrder:
    """The order of a group's deliveries: see the module, and `Order` in group_leases.py."""

    __slots__ = (
        *("_returned", "_ended", "_group", "_merge_at", "_roster", "_shelf", "_table", "_waiting"),
        *("ahead", "unfinished", "work"),
    )

    def __init__(
        self, group: Group, table: LeaseTable, roster: Roster, ended: EndedMessages
    ) -> None:
        self._group, self._table, self._roster, self._ended = group, table, roster, ended
        self.unfinished = False
        self.work = 1
        self.ahead = RESERVE_AHEAD
        self._shelf = PriorityShelf()
        self._returned: list[U64] = []
        """Offsets to be delivered again, each array ascending."""
        self._waiting: list[tuple[UnixMs, int, I64, U64]] = []
        """Heap of delayed messages: (first time, first offset, ascending times, their offsets)."""
        self._merge_at = WAITING_MIN

    def next(self, clock_ms: UnixMs, queue: Queue, limit: int) -> tuple[ConsumerStream, U64] | None:
        """See Order."""
        self.work = 1 + self._roster.work
        consumer = self._roster.next()
        if consumer is None:
            return None
        self._release(clock_ms)
        share = self._roster.share(consumer, self._ready_count(queue.end))
        limit = min(limit, share, self._roster.allowance(consumer))
        if queue.has_priorities or self._shelf.count:
            offsets = self._take_by_priority(clock_ms, queue, limit, consumer.bytes_max)
            if len(offsets):
                self._roster.end_turn(consumer)
            return (consumer, offsets) if len(offsets) else None
        self.ahead = RESERVE_AHEAD
        offsets = self._take(clock_ms, queue.end, limit)
        if not len(offsets):
            return None
        offsets = self._split_off(offsets, queue.count_in_memory(offsets))
        offsets = self._ended.filter_unexpired(offsets, queue)
        if not len(offsets):
            return None
        offsets = self._split_off(offsets, queue.count_fitting(offsets, consumer.bytes_max))
        self._roster.end_turn(consumer)
        return consumer, offsets

    def _ready_count(self, queue_end: QueueOffset) -> int:
        """Return how many messages wait for nothing except a consumer.

        Acked ones among them count, too, until they are looked at.
        """
        fresh = max(self._table.fresh, int(self._group.cursor))
        returned = sum(map(len, self._returned))
        return max(0, int(queue_end) - fresh) + returned + self._shelf.count

    def _split_off(self, offsets: U64, count: int) -> U64:
        """Return the first `count` messages; the others are delivered next."""
        if count < len(offsets):
            self._returned.insert(0, offsets[count:])
        return offsets[:count]

    def _take(self, clock_ms: UnixMs, queue_end: QueueOffset, limit: int) -> U64:
        while self._returned:
            offsets = self._deliverable(clock_ms, self._returned.pop(0))
            if len(offsets):
                return self._split_off(offsets, limit)
        table = self._table
        end = min(int(queue_end), int(self._group.reserved))
        table.fresh = max(table.fresh, int(self._group.cursor))
        scan = scanned = limit
        while table.fresh < end:
            offsets = np.arange(table.fresh, min(table.fresh + scan, end), dtype=np.uint64)
            found = self._deliverable(clock_ms, offsets, limit)
            table.fresh = int(found[-1] if len(found) == limit else offsets[-1]) + 1
            if len(found):
                return found
            scanned += len(offsets)
            if scanned > SCAN_MAX:  # millions may be acked behind one that is stuck
                self.unfinished |= table.fresh < end
                break
            scan = min(2 * scan, max(limit, SCAN_MAX))
        return np.zeros(0, np.uint64)

    def _take_by_priority(self, clock_ms: UnixMs, queue: Queue, limit: int, bytes_max: int) -> U64:
        """Return messages to be delivered, of `bytes_max` at most; empty: none can be."""
        self.ahead, shelf = SHELF_MAX, self._shelf
        if not self._fill_shelf(clock_ms, queue):
            self.unfinished = True
            return np.zeros(0, np.uint64)
        offsets = self._take_from_shelf(clock_ms, queue, limit, bytes_max)
        if offsets is None:
            self._sweep_shelf(clock_ms, queue)
            offsets = self._take_from_shelf(clock_ms, queue, limit, bytes_max)
            assert offsets is not None, (self._group.group_id, shelf.count)
        return offsets

    def _take_from_shelf(
        self, clock_ms: UnixMs, queue: Queue, limit: int, bytes_max: int
    ) -> U64 | None:
        """Take the next messages from the shelf; return them, empty if none are in memory.

        None: some of them can't be delivered, and the shelf is as before.
        """
        chosen = self._shelf.choose(limit)
        if len(self._deliverable(clock_ms, chosen)) < len(chosen):
            return None
        offsets = chosen[: queue.count_in_memory(chosen)] if len(chosen) else chosen
        if len(offsets):
            offsets = offsets[: queue.count_fitting(offsets, bytes_max)]
            if len(self._ended.filter_unexpired(offsets, queue)) < len(offsets):
                return None
            self._shelf.take(offsets)
        return offsets

    def _sweep_shelf(self, clock_ms: UnixMs, queue: Queue) -> None:
        """Remove all messages from the shelf that can't be delivered.

        Expired ones that are not in memory stay.
        """
        self.work += self._shelf.count // OFFSETS_A_UNIT

        def deliverable(offsets: U64) -> U64:
            free = self._deliverable(clock_ms, offsets)
            if self._ended.outlived_ms is None or not len(free):
                return free
            there = queue.count_in_memory(free)
            return np.concatenate([self._ended.filter_unexpired(free[:there], queue), free[there:]])

        self._shelf.retain(deliverable)

    def _fill_shelf(self, clock_ms: UnixMs, queue: Queue) -> bool:
        """Put free messages on the shelf; return whether it has all that it can have now."""
        rows_left = FILL_MAX
        while most := min(rows_left, SHELF_MAX - self._shelf.count):
            offsets = self._take(clock_ms, queue.end, most)
            if not len(offsets):
                return True
            offsets = self._split_off(offsets, queue.count_in_memory(offsets))
            if not len(offsets):
                return True
            self._shelf.put(offsets, queue.priorities(offsets))
            self.work += 1 + len(offsets) // OFFSETS_A_UNIT
            rows_left -= len(offsets)
        return self._shelf.count >= SHELF_MAX

    def _deliverable(self, clock_ms: UnixMs, offsets: U64, most: int | None = None) -> U64:
        """Return the offsets that may be delivered; move delayed ones to the heap, mark dying ones.

        With `most`, only the first of them. Delayed ones after the last of these stay: the next
        call visits them again.
        """
        group = self._group
        free: U64 = offsets[~group.is_acked(offsets) & self._table.of(offsets).free]
        if group.settings.max_attempts:
            free = self._ended.mark_dying(free)
        if group.later.value_count:
            times = group.not_before_ms(free)
            early = times > clock_ms
            ready = np.flatnonzero(~early)[:most]
            end = int(ready[-1]) + 1 if len(ready) == most else len(free)
            late = early[:end]
            self._delay(free[:end][late], times[:end][late])
            free = free[ready]
        return free[:most]

    # ---- returned and delayed messages

    def on_returned(self, offsets: U64) -> None:
        """See Order. No other message depends on these."""

    def take_recalled(self) -> U64:
        """See Order."""
        return np.zeros(0, np.uint64)

    def on_freed(self, offsets: U64) -> None:
        """See Order. Each message is delivered at its time."""
        if not len(offsets):
            return
        times = self._group.not_before_ms(offsets)
        self._delay(offsets[times > 0], times[times > 0])
        if (now := offsets[times == 0]).size:
            self._add_returned(now)

    def _add_returned(self, offsets: U64) -> None:
        """Add free messages to those that are delivered next.

        Short arrays are merged: a return of one message must not cost an array.
        """
        while self._returned and len(self._returned[-1]) <= len(offsets) < FILL_MAX:
            offsets = np.sort(np.concatenate([self._returned.pop(), offsets]))
        self._returned.append(offsets)

    def _delay(self, offsets: U64, times: I64) -> None:
        if len(offsets):
            self._table.set(offsets, WAITING)
            order = np.argsort(times, kind="stable")
            self._push_delayed(times[order], offsets[order])

    def _push_delayed(self, times: I64, offsets: U64) -> None:
        heapq.heappush(self._waiting, (UnixMs(int(times[0])), int(offsets[0]), times, offsets))
        if len(self._waiting) > self._merge_at:
            self._merge_waiting()

    def _merge_waiting(self) -> None:
        """Merge many small arrays into one: a nack of one message must not cost an array."""
        runs = sorted(self._waiting, key=lambda run: len(run[2]))
        ends = np.cumsum([len(run[2]) for run in runs])
        small = int(np.searchsorted(ends, SCAN_MAX, side="right"))
        times = np.concatenate([run[2] for run in runs[:small]])
        offsets = np.concatenate([run[3] for run in runs[:small]])
        order = np.argsort(times, kind="stable")
        times, offsets = times[order], offsets[order]
        self._waiting = [(UnixMs(int(times[0])), int(offsets[0]), times, offsets), *runs[small:]]
        heapq.heapify(self._waiting)
        self._merge_at = len(self._waiting) + WAITING_MIN

    def _release(self, clock_ms: UnixMs) -> None:
        """Free delayed messages whose time has come: SCAN_MAX of them, and the rest of an array."""
        left = SCAN_MAX
        while left > 0 and self._waiting and self._waiting[0][0] <= clock_ms:
            _, _, times, offsets = heapq.heappop(self._waiting)
            due = int(np.searchsorted(times, clock_ms, side="right"))
            if due < len(times):
                self._push_delayed(times[due:], offsets[due:])
            left -= due
            ready = np.sort(offsets[:due])
            ready = ready[self._table.of(ready).waiting]
            self._table.set(ready, FREE)
            self._add_returned(ready)
        self.work += (SCAN_MAX - left) // OFFSETS_A_UNIT
        self.unfinished |= left <= 0

    def next_return_ms(self) -> UnixMs | None:
        """See Order."""
        return self._waiting[0][0] if self._waiting else None

    # ---- the rest

    def waiting_from(self, queue_end: QueueOffset, clock_ms: UnixMs) -> int | None:
        """See Order. Delayed messages are in no list of returned ones before their time.

        A group without consumers has no turn in which they would be freed.
        """
        self._release(clock_ms)
        fresh = self._group.unacked_from(max(self._table.fresh, int(self._group.cursor)))
        found = [fresh] if fresh < queue_end else []
        for offsets in (*self._returned, *self._shelf.levels):
            for start in range(0, len(offsets), STEP_ROWS):
                some = offsets[start : start + STEP_ROWS]
                free = some[~self._group.is_acked(some) & self._table.of(some).free]
                if len(free):
                    found.append(int(free[0]))
                    break
        for first_ms, _, times, offsets in self._waiting:
            if first_ms > clock_ms:
                continue  # the others are those that `_release` left
            due = offsets[: int(np.searchsorted(times, clock_ms, side="right"))]
            if len(due := due[self._table.of(due).waiting]):
                found.append(int(due.min()))
        return min(found, default=None)

    def on_move(self, lease_number: int, first: int) -> None:
        """See Order. Messages of shared groups are acked one by one."""

    def has_moved_since(self, lease_id: int, offset: int) -> bool:
        """See Order."""
        del lease_id, offset
        return False

    def on_silent(self, consumer: ConsumerStream) -> None:
        """See Order. The roster skips the consumer."""

    def forget_below(self, cursor: int) -> None:
        """See Order. The lists leave acked messages out when they are read."""
