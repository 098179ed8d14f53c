"""A record of the hops of the log's entries through one node, for `timerctl trace`.

    leader     REQUEST, APPENDED, SENT, WRITING, DURABLE, ANSWERED, COMMITTED, APPLIED
    follower   RECEIVED, WRITING, DURABLE, ANSWERING

A recorder that is off costs one look at `on` per hop. It turns itself off after RECORD_S seconds,
or with STAMPS_MAX stamps, so a caller that disappears leaves nothing behind.
"""

import time
from enum import IntEnum
from typing import Final, NamedTuple

from timer.model.units import LogIndex

RECORD_S: Final = 10
STAMPS_MAX: Final = 4096


class Hop(IntEnum):
    """A point on the way of an entry; the values are those of `HopStamp.Hop` of the contract."""

    REQUEST = 1
    """The request reached its handler."""
    APPENDED = 2
    """The leader has appended the entry, in memory."""
    SENT = 3
    """The leader gives the entry to the stream to a follower."""
    RECEIVED = 4
    """The follower's loop has read the message."""
    WRITING = 5
    """The writer's thread begins to write."""
    DURABLE = 6
    """The sync is over, in the writer's thread."""
    ANSWERING = 7
    """The follower gives its answer to the stream to the leader."""
    ANSWERED = 8
    """The leader's loop has read a follower's answer."""
    COMMITTED = 9
    """A majority has the entry."""
    APPLIED = 10
    """The entry is applied, and the answer to the client is made."""


class HopStamp(NamedTuple):
    """One stamp. `entry`: the last one that it stands for; those before it are included."""

    hop: Hop
    entry: LogIndex
    at_ns: int
    """On CLOCK_MONOTONIC."""


class HopRecorder:
    """Any thread may stamp; the event loop begins and ends."""

    def __init__(self) -> None:
        self.on = False
        """Whether to stamp. Check it before any work for a stamp."""
        self._stamps: list[HopStamp] = []
        self._until_ns = 0

    def begin(self) -> None:
        """Forget all stamps, and record."""
        self._stamps, self._until_ns = [], time.monotonic_ns() + RECORD_S * 1_000_000_000
        self.on = True

    def stamp(self, hop: Hop, entry: LogIndex, at_ns: int = 0) -> None:
        """Record a hop of all entries up to `entry`. `at_ns`: 0: now."""
        now_ns = time.monotonic_ns()
        if now_ns > self._until_ns or len(self._stamps) >= STAMPS_MAX:
            self.on = False
            return
        self._stamps.append(HopStamp(hop, entry, at_ns or now_ns))

    def end(self) -> list[HopStamp]:
        """Stop, and return the stamps in the order in which they were made."""
        self.on = False
        stamps, self._stamps = self._stamps, []
        return stamps
