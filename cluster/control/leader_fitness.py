"""How well a leader serves, judged over seconds: its lease, and how fast its log becomes durable.

    a report, ten a second --> without a lease?              share of the time >= LEASELESS --> poor
                           --> can't take connections?       share of the time >= DEAF -------> poor
                           --> far slower than other disks?  share of the time >= SLOW -------> poor

A leader that is dead, cut off or stuck is found otherwise, within a second. This finds one that
limps. Time counts less and less as it passes, so one hiccup is forgotten, however it was spread
over the reports. Who was found poor is unfit for UNFIT_MS: with all nodes limping alike, each
leads once in that time at most, and no leadership goes to and fro.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from timer.model.units import MonoMs, ReplicaId

MEMORY_MS: Final = 5_000
"""What was so long ago counts a third of what is now."""
LEASELESS: Final = 0.3
"""Found within five seconds if the lease is held half of the time; not for 1.7 s without it."""
DEAF: Final = 0.3
"""Found within two seconds."""
SLOW: Final = 0.7
"""Found after six seconds of it. A sync that took long is the last one until the next: with few
entries that is a CHECKPOINT's, seconds later."""
SLOW_PARTS: Final = 5
"""A disk is slow if it takes this part of a lease."""
SLOWER: Final = 4
"""A disk as slow as others, or a little slower, is no reason: a leader's has more to do."""
UNFIT_MS: Final = 600_000


@dataclass(slots=True)
class TimeShare:
    """The share of the time in which something was so."""

    value: float = 0.0
    _is_so: bool = False
    _since_ms: MonoMs | None = None

    def note(self, now_ms: MonoMs, *, is_so: bool) -> None:
        """From now on it is, or is not."""
        if self._since_ms is not None:
            kept = math.exp((self._since_ms - now_ms) / MEMORY_MS)
            self.value = kept * self.value + (1 - kept) * self._is_so
        self._is_so, self._since_ms = is_so, now_ms


@dataclass(slots=True)
class ServiceRecord:
    """What one leader was like since it began to serve."""

    _leaseless: TimeShare = field(default_factory=TimeShare)
    _deaf: TimeShare = field(default_factory=TimeShare)
    _slow: TimeShare = field(default_factory=TimeShare)
    _took_ms: int = 0
    _best_ms: int = 0

    def note(  # noqa: PLR0913 - what a report tells of it
        self,
        now_ms: MonoMs,
        *,
        lease_ok: bool,
        accepts: bool,
        disk_ms: int,
        commit_ms: int,
        others_ms: Collection[int],
        lease_ms: int,
    ) -> None:
        """Take note of a leader's report.

        Args:
            now_ms: When it came.
            lease_ok: It held its lease.
            accepts: It can take connections.
            disk_ms: How long its own disk takes.
            commit_ms: How long its commits take.
            others_ms: How long the disks of the others take.
            lease_ms: The lease. Commits that take as long, and a disk that takes a fifth of it, are
                slow, if there is a disk on which they would not be.
        """
        self._leaseless.note(now_ms, is_so=not lease_ok)
        self._deaf.note(now_ms, is_so=not accepts)
        best_ms = min(others_ms, default=max(disk_ms, commit_ms))
        disk_is_slow = disk_ms >= max(lease_ms // SLOW_PARTS, SLOWER * best_ms)
        is_slow = disk_is_slow or commit_ms >= max(lease_ms, SLOWER * best_ms)
        self._slow.note(now_ms, is_so=is_slow)
        if is_slow:
            self._took_ms, self._best_ms = max(disk_ms, commit_ms), best_ms

    def why_poor(self) -> str | None:
        """Return why another should lead, if there is a better one. None: it serves well."""
        if self._leaseless.value >= LEASELESS:
            return f"it has no lease for {self._leaseless.value:.0%} of the time"
        if self._deaf.value >= DEAF:
            return "it can't take connections: its limit of open files is reached"
        if self._slow.value >= SLOW:
            took = f"its log takes {self._took_ms} ms to become durable"
            return f"{took}, another disk {self._best_ms} ms"
        return None


@dataclass(slots=True)
class UnfitReplicas:
    """Replicas that led poorly, and until when that is held against them.

    They travel with each appointment, so that the next controller knows them as well.
    """

    _until_ms: dict[ReplicaId, MonoMs] = field(default_factory=dict[ReplicaId, MonoMs])

    def learn(self, now_ms: MonoMs, replicas: Iterable[ReplicaId]) -> None:
        """An appointment was made that names these."""
        before, until_ms = self._until_ms, MonoMs(now_ms + UNFIT_MS)
        self._until_ms = {replica: before.get(replica, until_ms) for replica in replicas}

    def at(self, now_ms: MonoMs) -> frozenset[ReplicaId]:
        """Return those that are unfit."""
        return frozenset(replica for replica, end_ms in self._until_ms.items() if now_ms < end_ms)
