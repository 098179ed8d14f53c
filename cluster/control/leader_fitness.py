"""Judges over seconds how well a leader serves: its lease, its connections, its disk.

    a report, ten a second --> without a lease?              share of the time >= LEASELESS --> poor
                           --> can't take connections?       share of the time >= DEAF -------> poor
                           --> far slower than other disks?  share of the time >= SLOW -------> poor

Other checks find a dead, cut off or stuck leader within a second. This one finds a leader that
serves poorly. Older time counts less, so a single pause is soon forgotten, also if several reports
show it. A replica that led poorly is unfit for UNFIT_MS. If all nodes are equally poor, each leads
at most once in that time, so leadership does not move to and fro.

Each node judges its own disk likewise, for its operator: a slow follower costs redundancy unseen.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.control.controller_events import ReplicaReport
from timer.model.units import LogIndex, MonoMs, ReplicaId

MEMORY_MS: Final = 5_000
"""Time that is this old counts a third of the present."""
LEASELESS: Final = 0.3
"""A leader with its lease half of the time is found within five seconds; 1.7 s without it are not
enough."""
DEAF: Final = 0.3
"""A leader that takes no connections is found within two seconds."""
SLOW: Final = 0.7
"""A slow leader is found after six seconds. A slow sync counts until the next sync. With few
entries that is a CHECKPOINT's, seconds later."""
SLOW_PARTS: Final = 5
"""A disk is slow if a sync takes this part of a lease."""
SLOWER: Final = 4
"""And if it takes this many times as long as the best other disk: a leader's does more work."""
SLOW_MS_MIN: Final = 50
"""A node does not complain of its disk if a sync takes less, however short the lease is."""
UNFIT_MS: Final = 600_000
"""Time for which a replica that led poorly is unfit."""


@dataclass(slots=True)
class TimeShare:
    """The share of the time in which a condition was true, from 0 to 1."""

    value: float = 0.0
    _is_so: bool | None = None
    _since_ms: MonoMs = MonoMs(0)

    def note(self, now_ms: MonoMs, *, is_so: bool | None) -> None:
        """Note that the condition is true, or false, from now on. None: the time does not count."""
        if self._is_so is not None:
            kept = math.exp((self._since_ms - now_ms) / MEMORY_MS)
            self.value = kept * self.value + (1 - kept) * self._is_so
        self._is_so, self._since_ms = is_so, now_ms


@dataclass(slots=True)
class ServiceRecord:
    """The service of one leader since it began to serve."""

    _leaseless: TimeShare = field(default_factory=TimeShare)
    _deaf: TimeShare = field(default_factory=TimeShare)
    _slow: TimeShare = field(default_factory=TimeShare)
    _took_ms: int = 0
    _best_ms: int = 0

    def note(
        self, now_ms: MonoMs, report: ReplicaReport, others_ms: Collection[int], *, lease_ms: int
    ) -> None:
        """Take note of a leader's report.

        `others_ms`: durations of syncs on the other nodes' disks. `lease_ms`: the lease. Syncs of
        a fifth of it and commits of all of it are slow, if they also take four times as long as
        the fastest of the other disks.
        """
        disk_ms, commit_ms = report.disk_ms, report.commit_ms
        self._leaseless.note(now_ms, is_so=not report.lease_ok)
        self._deaf.note(now_ms, is_so=not report.accepts)
        best_ms = min(others_ms, default=max(disk_ms, commit_ms))
        disk_is_slow = disk_ms >= max(lease_ms // SLOW_PARTS, SLOWER * best_ms)
        is_slow = disk_is_slow or commit_ms >= max(lease_ms, SLOWER * best_ms)
        self._slow.note(now_ms, is_so=is_slow)
        if is_slow:
            self._took_ms, self._best_ms = max(disk_ms, commit_ms), best_ms

    def why_poor(self) -> str | None:
        """Return the reason to prefer another leader. None: this one serves well."""
        if self._leaseless.value >= LEASELESS:
            return f"it has no lease for {self._leaseless.value:.0%} of the time"
        if self._deaf.value >= DEAF:
            return "it can't take connections: timerctl status and timerctl check name the cause"
        if self._slow.value >= SLOW:
            took = f"its log takes {self._took_ms} ms to become durable"
            return f"{took}, another disk {self._best_ms} ms"
        return None


@dataclass(slots=True)
class DiskRecord:
    """The speed of this node's disk, whatever its role. A sync that hangs counts as well.

    A sync counts until the next one, at most for MEMORY_MS from its start or until its end. Other
    time does not count. So a single slow sync is no complaint, except one of more than MEMORY_MS,
    and a complaint ends with fast syncs only.
    """

    _slow: TimeShare = field(default_factory=TimeShare)
    _took_ms: int = 0
    _limit_ms: int = 0
    _last: tuple[int, LogIndex] | None = None
    _counts_until_ms: int = 0

    def note(self, now_ms: MonoMs, *, disk_ms: int, durable: LogIndex, lease_ms: int) -> None:
        """Take note of the duration of the last sync, or of the present one if that is longer.

        `durable`: index of the last durable entry. `lease_ms`: the lease. A sync of a fifth of it,
        and of SLOW_MS_MIN, is slow.
        """
        if self._last != (disk_ms, durable):  # `disk_ms` rises during a sync
            self._last = disk_ms, durable
            self._counts_until_ms = now_ms + max(1, MEMORY_MS - disk_ms)
        self._limit_ms = max(lease_ms // SLOW_PARTS, SLOW_MS_MIN)
        is_slow = disk_ms >= self._limit_ms
        self._slow.note(now_ms, is_so=is_slow if now_ms < self._counts_until_ms else None)
        if is_slow:
            self._took_ms = disk_ms

    def complaints(self) -> list[str]:
        """Return how slow the disk is; empty: it is fast for most of the time."""
        if self._slow.value < SLOW:
            return []
        text = f"slow disk: the log takes {self._took_ms} ms to become durable"
        limit = f"{self._limit_ms} ms or more are slow"
        return [f"{text}; {limit}: check the disk and the load of this machine"]


@dataclass(slots=True)
class UnfitReplicas:
    """Replicas that led poorly, each with the end of its time as unfit.

    Each appointment carries them, so that the next controller knows them, too.
    """

    _until_ms: dict[ReplicaId, MonoMs] = field(default_factory=dict[ReplicaId, MonoMs])

    def learn(self, now_ms: MonoMs, replicas: Iterable[ReplicaId]) -> None:
        """Note the unfit replicas of an appointment. Those known before keep their end."""
        before, until_ms = self._until_ms, MonoMs(now_ms + UNFIT_MS)
        self._until_ms = {replica: before.get(replica, until_ms) for replica in replicas}

    def at(self, now_ms: MonoMs) -> frozenset[ReplicaId]:
        """Return the replicas that are unfit at `now_ms`."""
        return frozenset(replica for replica, end_ms in self._until_ms.items() if now_ms < end_ms)
