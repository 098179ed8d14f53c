"""Room on the voters' disks: when nothing new is taken, so that what must go on has room.

    free bytes   0 |<--------------- reserve --------------->|
                   | firing, acks, cancels, checkpoints,     | new timers, reschedules,
                   | flushes, merges, changes of leader      | topics, producers

Every node judges its own disk: it is *low* below its reserve. A leader takes nothing new while its
own disk is low, or while so many others' are that those with room are no majority: a follower alone
that runs out of room costs as little as one that is lost, and two of three never get that far.
Who has said nothing for a while counts like a low one, but alone is no reason to refuse: that
entries reach no majority is the log's business.

A pure core: the shell looks at the disk, asks the others, and tells the leader what `refusal` says.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from timer.model.timer_errors import DiskFullError
from timer.model.units import MonoMs, ReplicaId

SILENT_MS: Final = 3_000
RETRY_AFTER_MS: Final = 1_000
START_BYTES: Final = 16 << 20
"""Room without which a node does not start: its first steps would be its last."""
AGAIN_SHARE: Final = 8
"""Room is there again when this part of the reserve is free above it: no flapping at the edge."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one node says of its disk, in bytes."""

    free: int
    reserve: int
    low: bool

    @classmethod
    def plenty(cls) -> "Room":
        """Return that of a disk which nobody has looked at yet."""
        return cls(1 << 62, 0, low=False)

    def after(self, free: int, reserve: int) -> "Room":
        """Return what a look has found, some time after this one."""
        wanted = reserve + reserve // AGAIN_SHARE if self.low else reserve
        return Room(free, reserve, low=free < wanted)


class Rooms:
    """What one leader knows of the voters' disks, its own among them."""

    def __init__(self, me: ReplicaId, now_ms: MonoMs) -> None:
        self._me = me
        self._since_ms = now_ms
        self._heard: dict[ReplicaId, tuple[str, Room, MonoMs]] = {}

    def heard(self, voter: ReplicaId, name: str, room: Room, now_ms: MonoMs) -> None:
        """Remember what a node says of its disk."""
        self._heard[voter] = (name, room, now_ms)

    def refusal(self, voters: Iterable[ReplicaId], now_ms: MonoMs) -> DiskFullError | None:
        """Return why nothing new may be taken; None: there is room on a majority, and here."""
        voters = [*voters]
        low = [voter for voter in voters if self._is_low(voter)]
        out = {*low, *(voter for voter in voters if self._is_silent(voter, now_ms))}
        short = 2 * (len(voters) - len(out)) <= len(voters)
        if self._me not in low and not (low and short):
            return None
        rooms = [self._heard[voter][:2] for voter in low]
        disks = [(name, room.free, room.reserve) for name, room in rooms]
        return DiskFullError(sorted(disks), retry_after_ms=RETRY_AFTER_MS)

    def better(self, voters: Iterable[ReplicaId], now_ms: MonoMs) -> ReplicaId | None:
        """Return who could take what this leader refuses; None: nobody, or nothing is refused."""
        voters = [*voters]
        if not self._is_low(self._me) or self._me not in voters:
            return None
        known = [voter for voter in voters if voter in self._heard]
        fit = [v for v in known if not self._is_low(v) and not self._is_silent(v, now_ms)]
        if 2 * len(fit) <= len(voters):
            return None
        return max(fit, key=lambda voter: (self._heard[voter][1].free, voter))

    def _is_low(self, voter: ReplicaId) -> bool:
        return voter in self._heard and self._heard[voter][1].low

    def _is_silent(self, voter: ReplicaId, now_ms: MonoMs) -> bool:
        heard_ms = self._heard[voter][2] if voter in self._heard else self._since_ms
        return voter != self._me and now_ms - heard_ms >= SILENT_MS
