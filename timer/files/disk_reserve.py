"""Disk reserve: the leader rejects new work while free space is needed for work in progress.

    free bytes   0 |<--------------- reserve --------------->|
                   | firing, acks, cancels, checkpoints,     | new timers, reschedules,
                   | flushes, merges, changes of leader      | topics, producers

Every node judges its own disk: the node is *low* when its free bytes are below its reserve. A
leader rejects new work in two cases:

- its own disk is low;
- another voter's disk is low, and the voters with free space are no majority.

One follower that runs out of space therefore costs no more than one lost node. A second of three
does not run out, because new work is rejected from its reserve on. A voter that has sent no report
for SILENT_MS counts as having no space. Silent voters alone are no reason to reject: if entries
reach no majority, the log handles it.

A pure core. The shell measures the disk, collects the other nodes' reports, and passes the result
of `refusal` to the leader.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from timer.model.timer_errors import DiskFullError
from timer.model.units import MonoMs, ReplicaId

SILENT_MS: Final = 3_000
RETRY_AFTER_MS: Final = 1_000
START_BYTES: Final = 16 << 20
"""Free bytes below which a node does not start: it would fill its disk at once."""
AMPLE_MULTIPLE: Final = 4
"""A disk with this multiple of its reserve free does not become low within some seconds."""
RECOVERY_DIVISOR: Final = 8
"""A low node recovers when 1/8 of the reserve is free above the reserve: no flapping."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """One node's report of its disk, in bytes."""

    free: int
    reserve: int
    low: bool
    used: int = 0
    """Bytes of the node's own files."""

    @classmethod
    def unmeasured(cls) -> "DiskSpace":
        """Return the report of a disk that has not been measured yet: it is not low."""
        return cls(1 << 62, 0, low=False)

    def after(self, free: int, reserve: int, used: int = 0) -> "DiskSpace":
        """Return the report after a later measurement; a low disk needs the margin to recover."""
        wanted = reserve + reserve // RECOVERY_DIVISOR if self.low else reserve
        return DiskSpace(free, reserve, low=free < wanted, used=used)


class VoterDisks:
    """The voters' disk reports as one leader knows them, its own included."""

    def __init__(self, me: ReplicaId, now_ms: MonoMs) -> None:
        self._me = me
        self._since_ms = now_ms
        self._reports: dict[ReplicaId, tuple[str, DiskSpace, MonoMs]] = {}

    def store_report(self, voter: ReplicaId, name: str, space: DiskSpace, now_ms: MonoMs) -> None:
        """Store a node's report."""
        self._reports[voter] = (name, space, now_ms)

    def refusal(self, voters: Iterable[ReplicaId], now_ms: MonoMs) -> DiskFullError | None:
        """Return the error for new work. None: this node and a majority of voters have space."""
        voters = [*voters]
        low = [voter for voter in voters if self._is_low(voter)]
        out = {*low, *(voter for voter in voters if self._is_silent(voter, now_ms))}
        short = 2 * (len(voters) - len(out)) <= len(voters)
        if self._me not in low and not (low and short):
            return None
        reports = [self._reports[voter][:2] for voter in low]
        disks = [(name, space.free, space.reserve) for name, space in reports]
        return DiskFullError(sorted(disks), retry_after_ms=RETRY_AFTER_MS)

    def better_leader(self, voters: Iterable[ReplicaId], now_ms: MonoMs) -> ReplicaId | None:
        """Return the voter that should lead instead of this low one: of those fit, the most free.

        None if this node's disk is not low, if it is no voter, or if the voters with free
        space are no majority.
        """
        voters = [*voters]
        if not self._is_low(self._me) or self._me not in voters:
            return None
        known = [voter for voter in voters if voter in self._reports]
        fit = [v for v in known if not self._is_low(v) and not self._is_silent(v, now_ms)]
        if 2 * len(fit) <= len(voters):
            return None
        return max(fit, key=lambda voter: (self._reports[voter][1].free, voter))

    def are_ample(self, voters: Iterable[ReplicaId]) -> bool:
        """Return whether each voter's last report shows free space far above its reserve."""
        spaces = [self._reports[voter][1] for voter in voters if voter in self._reports]
        return len(spaces) == len([*voters]) and all(
            space.free >= AMPLE_MULTIPLE * space.reserve for space in spaces
        )

    def _is_low(self, voter: ReplicaId) -> bool:
        return voter in self._reports and self._reports[voter][1].low

    def _is_silent(self, voter: ReplicaId, now_ms: MonoMs) -> bool:
        reported_ms = self._reports[voter][2] if voter in self._reports else self._since_ms
        return voter != self._me and now_ms - reported_ms >= SILENT_MS
