"""Deliveries of a group that keeps an order: types `key_shared`, `exclusive` and `failover`.

    cursor                                queue end
      | L  A  L  W  f  f  .  .  .  .  .  .  |     one key: messages behind the wall W wait

Messages of one ordering key, or without one of one key, are delivered in the order of their queue
offsets. A priority has no effect. Groups of types `exclusive`
and `failover` serve one consumer at a time and treat all messages as one key.

A message is delivered only if every earlier message of its key is acked (A), or leased to the same
consumer (L). A message that returns by a nack or an ended lease is a wall until it is delivered
again. A return also recalls the later messages of its key from their consumer: RECALL. The
deliveries of a key therefore go on without a gap, or go back to the key's first unacked message.

The lease table alone decides which messages may be delivered. A look computes them in a window that
begins at the first unacked offset. Further looks use the window again, as many as it took work
units, or until a message returns. Meanwhile an acked message's consumer still counts as the holder
of its key. Keys are hashes: two keys of one hash wait for each other.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from timer.entries.payloads import KEY_SHARED, GroupSettings
from timer.leader.groups.ended_messages import EndedMessages
from timer.leader.groups.lease_table import (
    ENDING,
    RESERVE_AHEAD,
    ConsumerStream,
    LeaseTable,
)
from timer.leader.groups.offset_column import OffsetColumn
from timer.leader.groups.roster import Roster
from timer.leader.groups.turns import OFFSETS_A_UNIT
from timer.model.columns import I64, U64
from timer.model.units import LeaseId, QueueOffset, UnixMs
from timer.ready.group import Group
from timer.ready.queue import Queue

ORDER_WINDOW: Final = 16_384
"""Length of the window, in unacked offsets: nothing beyond it is delivered."""
WINDOW_MIN: Final = 1024
SEARCH_WORK: Final = 4
"""Work units of a look beside those of its offsets (timer/leader/groups/turns.py)."""
TRIES_MAX: Final = 16
"""Consumers with open messages that one look tries, if those are on disk or have expired."""
SHARES_MAX: Final = 64
"""Consumers among which a burst is divided, about: each of them costs a look."""
NO_OWNER: Final = 0
MOVES_MAX: Final = 1024
_NO_WALL: Final = (1 << 63) - 1


class _Window(NamedTuple):
    """Messages that may be delivered: offsets ascending, their keys and owners, each (n,)."""

    offsets: U64
    keys: U64
    owner: I64
    """Number of the consumer that holds messages of the same key. 0: none does."""
    behind: int
    """Number of the queue's offsets behind those that were looked at."""
    size: int
    """Number of unacked messages that were looked at."""
    settings: GroupSettings
    looks_left: int
    """Number of further looks that may use the window."""

    @property
    def unowned_count(self) -> int:
        """Number of messages whose keys no consumer holds, and of all that are behind."""
        return int(np.count_nonzero(self.owner == NO_OWNER)) + self.behind

    def of(self, consumer: ConsumerStream, share: int) -> U64:
        """Return the messages for a consumer: `share` at most of those whose keys none holds."""
        anybody = self.owner == NO_OWNER
        anybody &= np.cumsum(anybody) <= share
        offsets: U64 = self.offsets[anybody | (self.owner == consumer.number)]
        return offsets

    def without(self, leased: U64, consumer: ConsumerStream) -> "_Window":
        """Return the window after a lease of some of its messages to a consumer."""
        left = np.ones(len(self.offsets), np.bool_)
        left[self.offsets.searchsorted(leased)] = False
        offsets, keys, owner = self.offsets[left], self.keys[left], self.owner[left]
        owner[np.isin(keys, self.keys[~left])] = consumer.number
        return self._replace(offsets=offsets, keys=keys, owner=owner)


class KeyOrder:
    """The order of a group's deliveries: see the module, and `Order` in group_leases.py."""

    __slots__ = (
        *("_ended", "_group", "_keys", "_moves", "_recalled", "_returns_at", "_roster", "_table"),
        *("_window", "ahead", "unfinished", "work"),
    )

    def __init__(
        self, group: Group, table: LeaseTable, roster: Roster, ended: EndedMessages
    ) -> None:
        self._group, self._table, self._roster, self._ended = group, table, roster, ended
        self.unfinished = False
        self.ahead = RESERVE_AHEAD
        self.work = SEARCH_WORK
        self._keys = OffsetColumn(table.fresh)
        """Hashes of keys by offset. 0: not read yet."""
        self._recalled: list[U64] = []
        self._returns_at: UnixMs | None = None
        self._moves: list[tuple[int, int]] = []
        """(Lease number, first message) of the last MOVEs."""
        self._window: _Window | None = None
        """The window of the last look, without the messages leased since. None: it is outdated."""

    @property
    def _by_key(self) -> bool:
        return self._group.settings.type == KEY_SHARED

    def next(self, clock_ms: UnixMs, queue: Queue, limit: int) -> tuple[ConsumerStream, U64] | None:
        """See Order. The lease goes to the next consumer that may get an open message."""
        roster = self._roster
        self.work = SEARCH_WORK + roster.work
        served = roster.consumers if self._by_key else roster.active_consumers()
        if self._ended.expiring or not any(roster.allowance(each) > 0 for each in served):
            return None
        window, self._window = self._window, None
        if window is not None and window.looks_left and window.settings is self._group.settings:
            window = window._replace(looks_left=window.looks_left - 1)
            found = self._choose(served, window, queue, limit, again=True)
            if found is not None:
                return found
        size = min(max(WINDOW_MIN, 2 * self._table.in_flight + limit), ORDER_WINDOW)
        while True:
            window = self._open_window(clock_ms, queue, size)
            self.work += window.looks_left
            found = self._choose(served, window, queue, limit)
            if found is not None or window.size < size or size >= ORDER_WINDOW:
                return found
            size = min(4 * size, ORDER_WINDOW)

    def _choose(
        self,
        served: Sequence[ConsumerStream],
        window: _Window,
        queue: Queue,
        limit: int,
        *,
        again: bool = False,
    ) -> tuple[ConsumerStream, U64] | None:
        """Return the next consumer that may get open messages, and these. Keep the window.

        `again`: the window is that of an earlier look. None, too, if it is outdated.
        """
        roster = self._roster
        for consumer in self._candidates(served, window):
            share = limit
            if self._by_key:
                share = max(
                    window.unowned_count // SHARES_MAX,
                    roster.share(consumer, window.unowned_count),
                )
            most = min(limit, roster.allowance(consumer))
            offsets = window.of(consumer, share)[:most]
            if again and not self._are_open(offsets):
                return None
            offsets = self._deliverable(consumer, offsets, queue)
            if len(offsets):
                if self._by_key:
                    roster.end_turn(consumer)
                self._table.fresh = max(self._table.fresh, int(offsets[-1]) + 1)
                self._window = window.without(offsets, consumer)
                return consumer, offsets
        return None

    def _are_open(self, offsets: U64) -> bool:
        """Return whether messages of an earlier window are still unacked, free and reserved."""
        if not len(offsets):
            return True
        if int(offsets[-1]) >= int(self._group.reserved) or self._group.is_acked(offsets).any():
            return False
        return bool(self._table.of(offsets).free.all())

    def _candidates(
        self, consumers: Sequence[ConsumerStream], window: _Window
    ) -> Iterator[ConsumerStream]:
        """Return the first TRIES_MAX consumers that may get one of the open messages."""
        owners = set(np.unique(window.owner).tolist())
        able = (
            each
            for each in consumers
            if (NO_OWNER in owners or each.number in owners) and self._roster.allowance(each) > 0
        )
        return itertools.islice(able, TRIES_MAX)

    def _deliverable(self, consumer: ConsumerStream, offsets: U64, queue: Queue) -> U64:
        """Return the first ones of open messages that may be delivered together now."""
        if len(offsets):
            offsets = self._ended.filter_unexpired(offsets[: queue.count_in_memory(offsets)], queue)
            # Messages behind the first expired one wait until that one is gone.
            first = self._ended.first_expired()
            offsets = offsets if first is None else offsets[offsets < first]
        if len(offsets):
            offsets = offsets[: queue.count_fitting(offsets, consumer.bytes_max)]
        return offsets

    def _open_window(self, clock_ms: UnixMs, queue: Queue, size: int) -> _Window:
        """Find the messages that may be delivered among the first `size` unacked offsets."""
        group = self._group
        offsets = group.first_unacked(min(int(queue.end), int(group.reserved)), size)
        keys = self._keys_of(offsets, queue)
        offsets = offsets[: len(keys)]
        behind = int(queue.end) - int(offsets[-1]) - 1 if len(offsets) else 0
        if group.settings.max_attempts:
            self._ended.mark_dying(offsets[self._table.of(offsets).free])
        states = self._table.of(offsets)
        times = group.not_before_ms(offsets)
        early = states.free & (times > clock_ms)
        self._returns_at = UnixMs(int(times[early].min())) if early.any() else None
        free, leased = states.free & ~early, states.leased
        walls = ~(free | leased | states.acking)
        mine = keys[free]
        wall_at = _first_values(keys[walls], offsets[walls].astype(np.int64), mine, _NO_WALL)
        lease_ids = states.values[leased].astype(np.int64)
        owner = _first_values(keys[leased], lease_ids, mine, NO_OWNER)
        owned = owner != NO_OWNER
        _, owner[owned] = self._holders(owner[owned].astype(np.uint64))
        offsets = offsets[free]
        before = offsets.astype(np.int64) < wall_at
        looks = len(keys) // OFFSETS_A_UNIT
        offsets, mine, owner = offsets[before], mine[before], owner[before]
        return _Window(offsets, mine, owner, behind, len(keys), group.settings, looks)

    def _keys_of(self, offsets: U64, queue: Queue) -> U64:
        """Return the keys, (n, uint64); fewer if the next messages must first be read from disk."""
        if not self._by_key:
            return np.zeros(len(offsets), np.uint64)
        keys = self._keys.of(offsets)
        unknown = offsets[keys == 0]
        if not len(unknown):
            return keys
        there = queue.count_in_memory(unknown)
        if there:
            if self._keys.used > 2 * ORDER_WINDOW:  # acked ones may lie anywhere
                self._keys.drop(self._group.is_acked)
            self._keys.set(unknown[:there], queue.key_hashes(unknown[:there]))
            keys = self._keys.of(offsets)
        if there < len(unknown):
            keys = keys[: int(np.searchsorted(offsets, unknown[there]))]
        return keys

    def _holders(self, lease_ids: U64) -> tuple[dict[int, ConsumerStream], I64]:
        """Return the consumers that hold leases, and the number of each lease's, (n, int64)."""
        ids, places = np.unique(lease_ids, return_inverse=True)
        consumers = [self._table[LeaseId(each)].consumer for each in ids.tolist()]
        numbers = np.array([each.number for each in consumers], np.int64)
        return {each.number: each for each in consumers}, numbers[places.ravel()]

    def next_return_ms(self) -> UnixMs | None:
        """See Order."""
        return self._returns_at

    def waiting_from(self, queue_end: QueueOffset, clock_ms: UnixMs) -> int | None:
        """See Order. Covers the first unacked messages, also those that wait for their order."""
        offsets = self._group.first_unacked(queue_end, ORDER_WINDOW)
        free = offsets[self._table.of(offsets).free]
        free = free[self._group.not_before_ms(free) <= clock_ms]
        return int(free[0]) if len(free) else None

    # ---- return and recall

    def on_freed(self, offsets: U64) -> None:
        """See Order. Freed messages are no longer walls, and `_open_window` finds them."""
        if len(offsets):
            self._window = None

    def on_returned(self, offsets: U64) -> None:
        """See Order. Recall the leased messages behind these, in each of their keys.

        Messages whose delivery was not sent are free at once, and count no attempt.
        """
        if not len(offsets):
            return
        self._window = None
        offsets = np.sort(offsets)
        behind = self._group.first_unacked(self._table.fresh, ORDER_WINDOW)
        behind, returned = behind[behind > offsets[0]], self._key(offsets)
        behind = behind[np.isin(self._key(behind), returned)]
        behind = behind[self._table.of(behind).leased]
        first = _first_values(returned, offsets.astype(np.int64), self._key(behind), _NO_WALL)
        behind = behind[behind.astype(np.int64) > first]
        if not len(behind):
            return
        self._table.free_unsent(map(LeaseId, np.unique(self._table.of(behind).values).tolist()))
        behind = behind[self._table.of(behind).leased]
        if len(behind):
            holders, owner = self._holders(self._table.of(behind).values)
            for number, consumer in holders.items():
                consumer.recall(behind[owner == number])
            self._table.take(behind, ENDING)
            self._recalled.append(behind)

    def _key(self, offsets: U64) -> U64:
        """Return the keys of delivered messages."""
        return self._keys.of(offsets) if self._by_key else np.zeros(len(offsets), np.uint64)

    def take_recalled(self) -> U64:
        """See Order."""
        recalled, self._recalled = self._recalled, []
        return np.concatenate(recalled) if recalled else np.zeros(0, np.uint64)

    # ---- the rest

    def on_move(self, lease_number: int, first: int) -> None:
        """See Order."""
        self._moves.append((lease_number, first))
        del self._moves[:-MOVES_MAX]

    def has_moved_since(self, lease_id: int, offset: int) -> bool:
        """See Order."""
        return any(lease_id < number and first <= offset for number, first in self._moves)

    def on_silent(self, consumer: ConsumerStream) -> None:
        """See Order. In a group with one consumer at a time the next one takes over for good."""
        if not self._by_key and self._roster.consumers[:1] == [consumer]:
            self._roster.end_turn(consumer)

    def forget_below(self, cursor: int) -> None:
        """See Order."""
        self._keys.forget_below(cursor)


def _first_values(keys: U64, values: I64, of: U64, default: int) -> I64:
    """Return, for each key in `of`, the value at its first place in `keys`, or the default."""
    wanted, places = np.unique(of, return_inverse=True)
    found = np.full(len(wanted) + 1, default, np.int64)  # the last element takes other keys
    place = np.searchsorted(wanted, keys)
    other = wanted[np.minimum(place, len(wanted) - 1)] != keys if len(wanted) else place >= 0
    place[other] = len(wanted)
    found[place[::-1]] = values[::-1]  # the last assignment to a key is its first place
    return found[places.ravel()]
