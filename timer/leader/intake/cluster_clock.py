"""The cluster's clock: the median of the voters' clocks, as a pure core.

Only the leader runs one. Every answer to the leader holds the voter's wall clock. The times of
sending and receiving, on the leader's CLOCK_BOOTTIME, give the voter's *offset*, wall minus
boottime:

    ours   ---sent_ms-------------------received_ms--->  boottime
                   \\                 /
    theirs  --------+---- wall_ms ---+---------------->  wall      offset = wall - the middle

The median is the middle offset in ascending order. An even number of offsets has two in the middle,
and every instant between them is a median, because nothing shows which one is wrong. The median is
therefore an interval, and the clock has one rule: *run with boottime; outside of the interval,
approach its nearer end at no more than half again or half that rate; if that end is more than a
second ahead for three seconds, jump there.* Without readings of a majority there is no median, and
the clock runs on.

No reading is exact, except that of the leader's own clock: an offset may be wrong by half of the
round trip, in either direction. So the ends of the interval are the median of the least possible
offsets and that of the greatest. If the number of readings is odd, or all agree, *the clock follows
the most exact one* within the interval. It is the leader's own, so a slow answer moves no clock
that may be right. A reading far outside of the interval is of a wrong clock, and is not followed.

    2 voters    A |......... now ...............| B      differ by an hour: it runs on, between
    3 voters    A ............... B=now ........ C       one is wrong: the middle one is not

With one wrong clock of three, the cluster's clock stays among the right ones. It neither fires
early nor stands still. The wrong clock may be ahead or behind, may jump, or may be the leader's.
The cluster's clock never goes back, and never below the last header's time or `last_read_time_ms`.

A jump leads to the earliest instant that may be the median. With one wrong clock among two or more,
this is never later than all of the right clocks: of two, it is the earlier one. A majority's clocks
that are all set, as the time service corrects a common error, move the cluster's clock at once. A
reading counts for FORGET_MS, in which the voter may be silent and its clock may be set. So a clock
counts as wrong for so long after it was set right.

A new leader starts from the answers to its fence. It chooses the instant of the interval nearest to
the time that the old leader's clock would show now: the last time that the old majority agreed on.
After an outage of all nodes the clock may start where the old one stopped: one of the first two
answers is then from a clock that is behind. Once a third clock is known and outvotes that one, the
clock jumps.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from timer.model.units import DUE_MS_MAX, MonoMs, ReplicaId, UnixMs

FORGET_MS: Final = 15_000
"""A voter that has not answered for this long no longer counts. More than the longest interval of
heartbeats, 10 s."""
JUMP_MS: Final = 1_000
"""A clock that is more than this behind the median for SETTLE_MS jumps."""
SETTLE_MS: Final = 3_000
"""Several readings of each voter are made in this time: a single wrong one makes no jump."""
FAR_MS: Final = 100
"""A clock that differs by more from the ends of the interval is wrong. The clock then follows
another reading, since an end may be twice its reading's error away from the true offset."""
TRUST_DECAY: Final = 20
"""A sample's error grows by one millisecond in this many milliseconds. An older, better sample
prevails over a slow answer for a while only, because the voter's clock may have been set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One reading of a voter's clock, from one answer."""

    voter: ReplicaId
    wall_ms: UnixMs
    """The voter's wall clock when it answered."""
    sent_ms: MonoMs
    """Our boottime at sending, plus the time for which the voter delayed its answer. For our own
    clock: the time of the reading."""
    received_ms: MonoMs

    @classmethod
    def at(cls, voter: ReplicaId, wall_ms: UnixMs, at_ms: MonoMs, error_ms: int) -> Self:
        """Return the sample of a clock that showed `wall_ms` at our `at_ms`, ± `error_ms`.

        Both clocks show whole milliseconds, so the error is greater by one.
        """
        sent_ms, received_ms = MonoMs(at_ms - error_ms - 1), MonoMs(at_ms + error_ms + 1)
        return cls(voter=voter, wall_ms=wall_ms, sent_ms=sent_ms, received_ms=received_ms)


@dataclass(frozen=True, slots=True)
class ClockReport:
    """The cluster's clock and the voters' clocks against the median. Positive: ahead of it.

    A difference that the errors of the readings may explain is 0.
    """

    error_ms: int = 0
    """Of the cluster's clock."""
    jumped_ms: int = 0
    """All jumps of this leadership together."""
    offsets_ms: Mapping[ReplicaId, int] = field(default_factory=dict)
    """Of each voter's clock that counts."""
    doubt_ms: int = 0
    """The difference of the two clocks in the middle, if their number is even. `offsets_ms` then
    compares with an instant between them, and either may be wrong."""

    @property
    def spread_ms(self) -> int:
        """The greatest difference of two voters' clocks; over a second is an alarm."""
        return max(self.offsets_ms.values(), default=0) - min(self.offsets_ms.values(), default=0)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """A voter's offset, in half milliseconds, ± `error_ms`, as of `at_ms`."""

    offset_halves: int
    error_ms: int
    at_ms: MonoMs

    @property
    def low(self) -> int:
        """The least possible offset."""
        return self.offset_halves - 2 * self.error_ms

    @property
    def high(self) -> int:
        """The greatest possible offset."""
        return self.offset_halves + 2 * self.error_ms


class ClusterClock:
    """The clock of one leadership. Times inside are half milliseconds, so that a correction of half
    a millisecond per millisecond is a whole number.
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

        `floor_ms`: the greater of the last header's time and `last_read_time_ms`. `floor_at_ms`:
        our boottime when this node learned it (`boot_ms` if it was read from disk).
        """
        assert floor_at_ms <= boot_ms, (floor_at_ms, boot_ms)
        self._voters = frozenset(voters)
        self._estimates: dict[ReplicaId, _Estimate] = {}
        self._boot_ms = boot_ms
        for sample in samples:
            self.observe(sample)
        self._jumped = 0
        self._behind_ms: MonoMs | None = None
        """Time since which the clock has been more than JUMP_MS behind. None: it is not."""
        # The old leader's clock, run on and moved into the median.
        floor = 2 * floor_ms
        run_on = floor + 2 * (boot_ms - floor_at_ms)
        self._now = max(floor, run_on + self._errors(run_on, boot_ms)[1])

    # ---- the voters' clocks

    def observe(self, sample: Sample) -> None:
        """Note a voter's clock; impossible times and nodes that are no voters are ignored."""
        if sample.voter not in self._voters or not 0 <= sample.wall_ms <= DUE_MS_MAX:
            return
        sent_ms = min(sample.sent_ms, sample.received_ms)
        error_ms = (sample.received_ms - sent_ms + 1) // 2
        known = self._estimates.get(sample.voter)
        if known is not None:
            age_ms = sample.received_ms - known.at_ms
            if age_ms <= FORGET_MS and error_ms > known.error_ms + age_ms // TRUST_DECAY:
                return
        offset = 2 * sample.wall_ms - (sent_ms + sample.received_ms)
        self._estimates[sample.voter] = _Estimate(offset, error_ms, sample.received_ms)

    def report(self, boot_ms: MonoMs) -> ClockReport:
        """Return how far the clocks are from the median at `boot_ms`."""
        self._advance(boot_ms)
        behind, _ = self._errors(self._now, boot_ms)
        median = self._now + behind - 2 * boot_ms
        known = self._current_estimates(boot_ms)
        each_of = known.items()
        offsets = {voter: -_outside(median, each.low, each.high) // 2 for voter, each in each_of}
        lows = sorted(each.low for each in known.values())
        highs = sorted(each.high for each in known.values())
        doubt = lows[len(known) // 2] - highs[(len(known) - 1) // 2] if known else 0
        return ClockReport(-behind // 2, self._jumped // 2, offsets, max(0, doubt // 2))

    # ---- the clock

    def now(self, boot_ms: MonoMs) -> UnixMs:
        """Return the cluster's time at `boot_ms`; never less than before."""
        if boot_ms > self._boot_ms:
            self._advance(boot_ms)
        return UnixMs(self._now // 2)

    def _advance(self, boot_ms: MonoMs) -> None:
        elapsed_ms = max(0, boot_ms - self._boot_ms)
        self._boot_ms = MonoMs(self._boot_ms + elapsed_ms)
        self._now += 2 * elapsed_ms
        behind, error = self._errors(self._now, self._boot_ms)
        if behind <= 2 * JUMP_MS:
            self._behind_ms = None
        elif self._behind_ms is None:
            self._behind_ms = self._boot_ms
        elif self._boot_ms - self._behind_ms >= SETTLE_MS:
            self._now += behind
            self._jumped += behind
            error -= behind
        self._now += max(-elapsed_ms, min(error, elapsed_ms))

    def _errors(self, now: int, boot_ms: MonoMs) -> tuple[int, int]:
        """Return the differences from `now` to the median and to where the clock should be.

        In half milliseconds. The first one is to the nearest instant that may be the median.
        """
        known = [*self._current_estimates(boot_ms).values()]
        if 2 * len(known) <= len(self._voters):
            return 0, 0
        lows, highs = sorted(each.low for each in known), sorted(each.high for each in known)
        low, high = lows[(len(known) - 1) // 2], highs[len(known) // 2]
        wanted = offset = now - 2 * boot_ms
        if len(known) % 2 or lows[-1] <= highs[0]:
            least, most = low - 2 * FAR_MS, high + 2 * FAR_MS
            near = [each for each in known if least <= each.offset_halves <= most]
            wanted = min(near, key=lambda each: each.error_ms).offset_halves
        return -_outside(offset, low, high), min(max(wanted, low), high) - offset

    def _current_estimates(self, boot_ms: MonoMs) -> dict[ReplicaId, _Estimate]:
        """Return the estimates that count."""
        known = self._estimates.items()
        return {voter: each for voter, each in known if boot_ms - each.at_ms <= FORGET_MS}


def _outside(value: int, low: int, high: int) -> int:
    """Return by how much `value` is above `high`, or negative by how much it is below `low`."""
    return value - min(max(value, low), high)
