"""The leases that a consumer holds: a pure core; the time is an argument.

    held ──half of the lease is over──► extension requested ──EXTENDED──► held, for a further lease
      │                                           └──────────LEASE_LOST──► lost
      └──`hold_max` and the lease are over──► requested once more, as a check: lost

A lease runs on the leader's clock, from the delivery of the batch. `ends_s` is never later than the
true end. It is counted from the time before an extension was requested. For a batch that took
longer than the fastest of its stream, the difference is subtracted.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import Batch

RETRY: Final = 1 / 8
"""Fraction of a lease after which a failed extension is retried."""
SPAN_S_MIN: Final = 0.1
"""The shortest lease by a leader's default, in seconds. An extension by it also checks whether a
lease that should be over has ended."""
MARGIN_S: Final = 0.01
"""An extension by less, in seconds, is not requested."""
CLOCK_DRIFT: Final = 1e-4
"""Seconds that this process's clock may gain on the leader's in a second. A stream may last for
months, and this is no delay of its batches."""
_FINISHED: Final = (pb.ACK_RESULT_EXPIRED, pb.ACK_RESULT_DEAD_LETTERED)


@dataclass(slots=True, eq=False)
class Hold:
    """The lease of one batch. Times are seconds of this process's monotonic clock."""

    batch: Batch
    ends_s: float
    """The lease lasts at least until then."""
    lease_s: float
    received_s: float = 0.0
    """When the application last received a message of the batch."""
    extensions: dict[int, tuple[float, float]] = field(
        default_factory=dict[int, tuple[float, float]]
    )
    """Queue offset -> (time, lease in seconds) of the application's own last extension."""
    awaits_extension: bool = False
    """An extension was requested and is not answered."""
    probed: bool = False
    retry_s: float = 0.0
    lost_offsets: set[int] = field(default_factory=set)
    """Queue offsets of messages whose leases have ended."""
    finished_offsets: set[int] = field(default_factory=set)
    """Queue offsets of messages that became dead letters, expired, or were recalled by the leader
    while they were held."""
    stream_broken: bool = False
    """The stream of the lease broke, and the lease ended with it."""
    returned_offsets: dict[int, bool] = field(default_factory=dict[int, bool])
    """Queue offset -> whether as unseen, of messages that the application returned. Their leases
    are not lost."""
    _unsettled: set[int] | None = None
    """Queue offsets that are neither acked nor returned. None: all."""

    @property
    def renew_at_s(self) -> float:
        """When to request an extension: half of the lease is over."""
        return max(self.ends_s - self.lease_s / 2, self.retry_s)

    @property
    def probe_at_s(self) -> float:
        """When a lease that was not extended is over on the leader's clock, too."""
        return max(self.ends_s + self.lease_s * RETRY, self.retry_s)

    @property
    def unsettled_offsets(self) -> Sequence[int]:
        """Queue offsets of messages that are still held, ascending."""
        return self.batch.queue_offsets if self._unsettled is None else sorted(self._unsettled)

    @property
    def is_over(self) -> bool:
        """No message of the batch is held."""
        return self._unsettled is not None and not self._unsettled

    def has_ended(self, offset: int) -> bool:
        """Return whether the lease of a message is known to have ended, before its ack."""
        return self.stream_broken or offset in self.lost_offsets or offset in self.finished_offsets

    def may_have_ended(self, offset: int, now_s: float) -> bool:
        """Return whether the lease has ended, or may have by the clock, before the ack."""
        is_held = self._unsettled is None or offset in self._unsettled
        return self.has_ended(offset) or (is_held and now_s >= self.ends_s)

    def settle(self, offsets: Sequence[int]) -> None:
        """Mark messages as acked or returned."""
        if offsets is self.batch.queue_offsets:
            self._unsettled = set()
        elif self._unsettled is None:
            self._unsettled = set(self.batch.queue_offsets).difference(offsets)
        else:
            self._unsettled.difference_update(offsets)

    def settle_up_to(self, offset: int) -> None:
        """Mark the message at `offset`, and all before it, as acked."""
        self.settle([each for each in self.unsettled_offsets if each <= offset])

    def lose(self, offsets: Iterable[int]) -> None:
        """Mark the leases of messages as ended."""
        self.lost_offsets.update(offsets)
        self.settle([*self.lost_offsets])

    def mark_recalled(self, offsets: Sequence[int]) -> None:
        """Mark the messages among these, ascending, that the leader recalled. None given: all."""
        batch = self.batch.queue_offsets
        if offsets and (offsets[0] > batch[-1] or offsets[-1] < batch[0]):
            return
        recalled = {*self.unsettled_offsets}.intersection(offsets or batch)
        self.finished_offsets |= recalled
        self.settle([*recalled])

    def extend(self, requested_s: float, lease_s: float) -> None:
        """Extend the lease to `lease_s` after the request, sent at `requested_s` or later."""
        self.ends_s = max(self.ends_s, requested_s + lease_s)

    def apply_answer(
        self, offsets: Sequence[int], results: Sequence[int], until_s: float
    ) -> list[int]:
        """Apply the answer to an extension; return the offsets of lost messages.

        Those acked or returned meanwhile are not lost: their own answers tell of them.
        """
        self.awaits_extension = False
        left = {*self.unsettled_offsets}
        lost = [
            o
            for o, r in zip(offsets, results, strict=True)
            if r == pb.ACK_RESULT_LEASE_LOST and o in left
        ]
        if pb.ACK_RESULT_EXTENDED in results:
            self.ends_s = max(self.ends_s, until_s)
        self.settle(
            [o for o, r in zip(offsets, results, strict=True) if r != pb.ACK_RESULT_EXTENDED]
        )
        self.lost_offsets.update(lost)
        self.finished_offsets.update(
            o for o, r in zip(offsets, results, strict=True) if r in _FINISHED
        )
        return lost


class Transit:
    """Measures how much longer than the fastest a batch of a stream was in flight."""

    def __init__(self) -> None:
        self._least_s, self._arrived_s = math.inf, 0.0

    def late_s(self, handed_out_mono_ms: int, now_s: float) -> float:
        """Return the seconds for a batch that arrives now; 0 for the first of a stream.

        `handed_out_mono_ms`: 0 if it is unknown.
        """
        if not handed_out_mono_ms:
            return 0.0
        took_s = now_s - handed_out_mono_ms / 1000  # plus the offset of the two clocks
        drift_s = CLOCK_DRIFT * (now_s - self._arrived_s)
        self._least_s, self._arrived_s = min(self._least_s + drift_s, took_s), now_s
        return took_s - self._least_s
