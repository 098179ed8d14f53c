"""Messages that leave a group without an ack: expired ones and dead letters.

to be delivered --past its time to live--> ACKING, `take_expired` --> EXPIRE op
                --failed too often-------> DYING, `take_dead` ------> MOVE op
                <--max_attempts raised, `revive`-+
"""

from collections import deque
from typing import Final

import numpy as np

from timer.leader.groups.lease_table import ACKING, DELIVERY_BYTES, DYING, FREE, LeaseTable
from timer.leader.groups.turns import OFFSETS_A_UNIT
from timer.model.columns import U64
from timer.model.units import UnixMs
from timer.ready.group import Group
from timer.ready.queue import Queue

DEAD_ROWS_MAX: Final = 256
"""Most dead letters in one MOVE: the headers of each take some microseconds."""
REVIVE_MAX: Final = 4096
"""Most dying messages that one call of `revive` looks at, about 1 ms."""
_NONE: Final = deque[U64]()
"""Of all groups that have lost no message so far: an empty deque takes 0.6 kB. Never changed."""


class EndedMessages:
    """See the module."""

    __slots__ = (
        "_attempts_max",
        "_dead",
        "_expired",
        "_group",
        "_recheck_count",
        "_table",
        "expiring",
        "outlived_ms",
        "unfinished",
        "work",
    )

    def __init__(self, group: Group, table: LeaseTable) -> None:
        self._group, self._table = group, table
        self.outlived_ms: UnixMs | None = None
        """Messages due at or before this have expired, Unix milliseconds. None: none expires."""
        self._dead = _NONE
        """Offsets marked DYING, each array ascending."""
        self._recheck_count = 0
        """Number of arrays at the front of `_dead` from before `max_attempts` was raised."""
        self._attempts_max = group.settings.max_attempts
        self._expired: list[U64] = []
        """Offsets that were to be delivered, had expired, and are marked ACKING."""
        self.expiring = 0
        """EXPIRE ops of the group in flight."""
        self.unfinished = False
        """The last `revive` or `take_dead` stopped before it had looked at everything."""
        self.work = 0
        """Work units of the last `revive`."""

    # ---- expired

    def filter_unexpired(self, offsets: U64, queue: Queue) -> U64:
        """Return the messages at hand that have not expired; note expired ones for EXPIRE.

        No lease has one of them. A message that is noted twice is taken once.
        """
        if self.outlived_ms is None or not len(offsets):
            return offsets
        slices = queue.slices(offsets)
        due_ms = np.concatenate([page.rows["due_ms"][at.astype(np.int64)] for page, at in slices])
        old = due_ms <= self.outlived_ms
        if old.any():
            self._table.set(offsets[old], ACKING)
            self._expired.append(offsets[old])
        return offsets[~old]

    def first_expired(self) -> int | None:
        """Return the first offset noted for EXPIRE; None: none is."""
        return min((int(expired[0]) for expired in self._expired), default=None)

    def take_expired(self) -> U64:
        """Return the expired messages that were not delivered, for an EXPIRE op."""
        expired, self._expired = self._expired, []
        offsets = np.unique(np.concatenate(expired)) if expired else np.zeros(0, np.uint64)
        self.expiring += bool(len(offsets))
        return offsets

    # ---- dead letters

    def mark_dying(self, offsets: U64) -> U64:
        """Mark messages that failed too often as DYING; return the others."""
        dead = self._group.are_exhausted(offsets)
        if dead.any():
            self._table.set(offsets[dead], DYING)
            if not self._dead:
                self._dead = deque()
            self._dead.append(offsets[dead])
        return offsets[~dead]

    def on_settings_changed(self) -> None:
        """Notice the group's new settings: `revive` looks at all dying messages after a raise."""
        before, self._attempts_max = self._attempts_max, self._group.settings.max_attempts
        if not 0 < self._attempts_max <= before:
            self._recheck_count = len(self._dead)

    def revive(self) -> U64:
        """Free dying messages that a raised `max_attempts` allows again; return them, ascending.

        Looks at REVIVE_MAX of them at most. `unfinished` then requests another call.
        """
        self.work, self.unfinished = 0, False
        if not self._recheck_count:
            return np.zeros(0, np.uint64)
        some, rows_left = list[U64](), REVIVE_MAX
        while self._recheck_count and rows_left:
            offsets = self._dead.popleft()
            if len(offsets) > rows_left:
                self._dead.appendleft(offsets[rows_left:])
            else:
                self._recheck_count -= 1
            some.append(offsets[:rows_left])
            rows_left -= len(some[-1])
        self.work = (REVIVE_MAX - rows_left) // OFFSETS_A_UNIT
        self.unfinished = self._recheck_count > 0
        revived = self.mark_dying(self._still_dying(np.sort(np.concatenate(some))))
        self._table.set(revived, FREE)
        return revived

    def _still_dying(self, offsets: U64) -> U64:
        return offsets[~self._group.is_acked(offsets) & self._table.of(offsets).dying]

    @property
    def dying(self) -> bool:
        """Whether some messages may be dead letters that have not moved yet."""
        return bool(self._dead)

    def take_dead(self, queue: Queue) -> U64:
        """Return dead letters for a MOVE: those in memory, about a megabyte; none if none are.

        Expired ones are left out; `take_expired` returns them.
        """
        self.unfinished = self._recheck_count > 0
        while self._dead and not self.unfinished:
            offsets = self._still_dying(self._dead.popleft())
            if not len(offsets):
                continue
            count = min(queue.count_in_memory(offsets), DEAD_ROWS_MAX)
            if count:
                count = queue.count_fitting(offsets[:count], DELIVERY_BYTES)
            if count < len(offsets):
                self._dead.appendleft(offsets[count:])
            taken = self.filter_unexpired(offsets[:count], queue)
            self.unfinished = len(taken) < count and bool(self._dead)
            return taken
        return np.zeros(0, np.uint64)
