"""The cluster's clock: the median of the voters' clocks, as a pure core.

The leader alone runs one. Whatever answers it tells the voter's wall clock; with the moments of
sending and receiving on our CLOCK_BOOTTIME that gives the voter's *offset*, wall minus boottime:

    ours   ---sent_ms-------------------received_ms--->  boottime
                   \\                 /
    theirs  --------+---- wall_ms ---+---------------->  wall      offset = wall - the middle

Ordered by offset, the middle one is the median. With an even number there are two in the middle
and every instant between them is a median: we can't tell which of them is wrong. So the median is
an interval, and the clock has one rule: *run with boottime; outside of the interval, approach its
nearer end at no more than half again or half that rate.*

    2 voters    A |......... now ...............| B      differ by an hour: it runs on, between
    3 voters    A ............... B=now ........ C       one is wrong: the middle one is not

With one wrong clock of three, ours stays among the honest ones: it neither fires early nor
stands still, whether the wrong one is ahead, behind or jumps, and also when it is the leader's
own. It never goes back, and never below the last header's time or `last_read_time_ms`.

A new leader starts from the fence's answers: at the instant of the interval nearest to where the
old leader's clock would be now, which is the last thing that the old majority agreed on. After an
outage of all nodes that is where it stopped, if one of the two that answered first is behind: so,
once a third is known and outvotes it, the clock moves to the median again, if that is later.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Self

from timer.model.units import DUE_MS_MAX, MonoMs, ReplicaId, UnixMs

FORGET_MS: Final = 60_000
"""A voter that has not answered for this long no longer counts. A dead voter's clock is still
worth more than none: its offset is good to 30 ms by then (500 ppm, the most that NTP slews)."""
OUTVOTES: Final = 3
"""Among so many clocks one that is wrong is not the median."""
WELL_MS: Final = 100
"""A clock is known well if it is known within this: a slow answer says little."""
TRUST_DECAY: Final = 20
"""A sample loses one millisecond of trust in so many: a better one from before it prevails over
a slow answer, but not for long, for the voter's clock may have been set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one answer tells of a voter's clock."""

    voter: ReplicaId
    wall_ms: UnixMs
    """Its clock when it answered."""
    sent_ms: MonoMs
    """Our boottime at sending, plus how long the voter held its answer back. Our own: now."""
    received_ms: MonoMs

    @classmethod
    def at(cls, voter: ReplicaId, wall_ms: UnixMs, at_ms: MonoMs, error_ms: int) -> Self:
        """Return the sample that says: it showed `wall_ms` at our `at_ms`, give or take."""
        sent_ms, received_ms = MonoMs(at_ms - error_ms), MonoMs(at_ms + error_ms)
        return cls(voter=voter, wall_ms=wall_ms, sent_ms=sent_ms, received_ms=received_ms)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """A voter's offset, in half milliseconds, give or take `error_ms`, as of `at_ms`."""

    offset_halves: int
    error_ms: int
    at_ms: MonoMs


class ClusterClock:
    """Runs from construction to the end of one leadership. Times inside are half milliseconds,
    so that half a millisecond's correction per millisecond is a whole number.
    """

    def __init__(
        self,
        voters: Collection[ReplicaId],
        samples: Iterable[Sample],
        *,
        floor_ms: UnixMs,
        floor_at_ms: MonoMs,
        boot_ms: MonoMs,
    ) -> None:
        """Start at `boot_ms`.

        `floor_ms` is the greater of the last header's time and `last_read_time_ms`; `floor_at_ms`
        our boottime when we learned it (`boot_ms` if it was read from disk).
        """
        assert floor_at_ms <= boot_ms, (floor_at_ms, boot_ms)
        self._voters = frozenset(voters)
        self._estimates: dict[ReplicaId, _Estimate] = {}
        self._boot_ms = boot_ms
        for sample in samples:
            self.observe(sample)
        # Where the old leader's clock would be, moved into the median. It jumps here, and once more
        # as soon as one wrong clock is outvoted (`now`), if it is not yet.
        floor = 2 * floor_ms
        run_on = floor + 2 * (boot_ms - floor_at_ms)
        self._now = max(floor, run_on + self._error(run_on, boot_ms))
        self._is_sure = self._outvotes(boot_ms)

    # ---- what is known

    def observe(self, sample: Sample) -> None:
        """Take note of a voter's clock; nonsense and those who don't vote are ignored."""
        if sample.voter not in self._voters or not 0 <= sample.wall_ms <= DUE_MS_MAX:
            return
        sent_ms = min(sample.sent_ms, sample.received_ms)
        error_ms = (sample.received_ms - sent_ms + 1) // 2
        known = self._estimates.get(sample.voter)
        if known is not None:
            age_ms = sample.received_ms - known.at_ms
            if error_ms > known.error_ms + age_ms // TRUST_DECAY:
                return
        offset = 2 * sample.wall_ms - (sent_ms + sample.received_ms)
        self._estimates[sample.voter] = _Estimate(offset, error_ms, sample.received_ms)

    def known(self, boot_ms: MonoMs) -> int:
        """Return how many voters' clocks count at `boot_ms`."""
        return len(self._offsets(boot_ms))

    def spread_ms(self, boot_ms: MonoMs) -> int:
        """Return by how much the clocks that count differ at most; an alarm above a second."""
        offsets = self._offsets(boot_ms)
        return (offsets[-1] - offsets[0]) // 2 if offsets else 0

    # ---- the clock

    def now(self, boot_ms: MonoMs) -> UnixMs:
        """Return the cluster's time at `boot_ms`; never less than was returned before."""
        elapsed_ms = boot_ms - self._boot_ms
        if elapsed_ms > 0:
            self._boot_ms = boot_ms
            self._now += 2 * elapsed_ms
            error = self._error(self._now, boot_ms)
            if not self._is_sure and self._outvotes(boot_ms):
                self._is_sure = True
                self._now += max(0, error)
                error = min(0, error)
            self._now += max(-elapsed_ms, min(error, elapsed_ms))
        return UnixMs(self._now // 2)

    def wait_ms(self, until_ms: UnixMs, boot_ms: MonoMs) -> int:
        """Return after how many milliseconds `now` reads `until_ms`, unless samples change it."""
        self.now(boot_ms)
        left = 2 * until_ms - self._now
        error = self._error(self._now, self._boot_ms)
        # In each millisecond it covers 3 halves (or 1) while it approaches the median, then 2.
        if left <= 0:
            return 0
        if error >= 0:
            return -(-left // 3) if left <= 3 * error else -(-(left - error) // 2)
        return left if left <= -error else -(-(left - error) // 2)

    def _error(self, now: int, boot_ms: MonoMs) -> int:
        """Return what is to be added to `now` to be at the median: 0 inside of it."""
        offsets = self._offsets(boot_ms)
        if not offsets:
            return 0
        low = offsets[(len(offsets) - 1) // 2] + 2 * boot_ms
        high = offsets[len(offsets) // 2] + 2 * boot_ms
        return min(max(now, low), high) - now

    def _outvotes(self, boot_ms: MonoMs) -> bool:
        """Return whether so many clocks are known well that a wrong one is not the median."""
        well = [each for each in self._estimates.values() if each.error_ms <= WELL_MS]
        return sum(boot_ms - each.at_ms <= FORGET_MS for each in well) >= OUTVOTES

    def _offsets(self, boot_ms: MonoMs) -> list[int]:
        """Return the offsets that count, ascending."""
        return sorted(
            each.offset_halves
            for each in self._estimates.values()
            if boot_ms - each.at_ms <= FORGET_MS
        )
