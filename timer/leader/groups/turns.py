"""Turns: round robin over the groups that may have messages for their consumers.

    wanted: g h i j --run--> g: AGAIN, behind i
                             h: LATER, in the next call
                             i: DONE, until it is wanted again
                             j: READING, until pages were read from disk or it is wanted again

A call does a bounded amount of work, so that the shell's event loop has its turn. The groups that
are left keep their order.
"""

import enum
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from timer.model.units import GroupId

WORK_MAX: Final = 128
"""Work units of one call, some milliseconds."""
LEASE_WORK: Final = 4
"""Work units of a lease, of about a megabyte; a look that finds no message counts 1."""
OFFSETS_A_UNIT: Final = 512
"""Offsets that a look passes in the time of one work unit."""


class Next(enum.Enum):
    """What a group waits for after its turn."""

    AGAIN = "again"
    """It may have more messages: another turn behind the other groups."""
    LATER = "later"
    """There is more to look at: a turn in the next call."""
    READING = "reading"
    """Pages must be read from disk, or another event must come first."""
    DONE = "done"
    """An event must come first: credit, a message, an applied op, the end of a delay."""


class TurnResult(NamedTuple):
    """The result of one group's turn."""

    next: Next
    work: int
    """Work units that it took."""


class Turns:
    """The groups that want a turn, in their order."""

    def __init__(self) -> None:
        self._wanted: dict[GroupId, None] = {}
        self._reading: dict[GroupId, None] = {}
        """Groups that waited for pages after a turn since the last read."""
        self.unfinished = False
        """The last call left groups that want a turn: call again soon."""

    def __len__(self) -> int:
        """Return how many groups want a turn."""
        return len(self._wanted)

    def want(self, group: GroupId) -> None:
        """Give a group a turn behind those that wait already."""
        self._wanted.setdefault(group)

    def drop(self, group: GroupId) -> None:
        """Forget a group that was deleted."""
        self._wanted.pop(group, None)
        self._reading.pop(group, None)

    def on_pages_read(self) -> None:
        """Give the groups that wait for pages a turn: some pages were read."""
        self._wanted |= self._reading
        self._reading = {}

    def run(self, turn: Callable[[GroupId], TurnResult]) -> None:
        """Give the groups their turns until all are done, or WORK_MAX is reached.

        `turn` wants and drops no group.
        """
        queue, later, work = deque(self._wanted), dict[GroupId, None](), 0
        count = len(self._wanted)
        while queue and work < WORK_MAX:
            after, took = turn(queue[0])
            work += took
            match after:
                case Next.AGAIN:
                    queue.rotate(-1)
                case Next.LATER:
                    later[queue.popleft()] = None
                case Next.READING:
                    self._reading[queue[0]] = None
                    queue.popleft()
                case Next.DONE:
                    queue.popleft()
        assert len(self._wanted) == count, "a turn wanted or dropped a group"
        self._wanted = dict.fromkeys(queue) | later
        self.unfinished = bool(self._wanted)
