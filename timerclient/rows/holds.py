"""What a consumer knows of the leases that it holds: a pure core, which takes the time.

    held ──half of the lease is over──► asked ──EXTENDED──► held, for a whole lease more
      │                                   └─────LEASE_LOST──► lost
      └──the hold's maximum is over, and the lease──► asked once more, for nothing: lost

A lease runs on the leader's clock from when the leader handed the batch out. `ends_s` is never
later than its end: it counts from before a request for more was made, and what a batch took longer
on its way than the fastest of its stream is subtracted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import Batch

RETRY: Final = 1 / 8
"""Of a lease: so long after a refused renewal it is asked for again."""
SPAN_S_MIN: Final = 0.1
"""The shortest lease that a leader gives by default. An extension by so much is also the question
whether a lease stands that should be over."""
MARGIN_S: Final = 0.01
"""Less is not worth a renewal."""


@dataclass(slots=True, eq=False)
class Hold:
    """The lease of one batch. Times are seconds of this process's monotonic clock."""

    batch: Batch
    ends_s: float
    """The lease lasts until then, at least."""
    lease_s: float
    given_s: float = 0.0
    """When the application got the last message of it so far."""
    asked: bool = False
    """More was asked for, and is not answered yet."""
    probed: bool = False
    retry_s: float = 0.0
    lost: set[int] = field(default_factory=set)
    """Queue offsets of messages that are not this consumer's any more."""
    returned: set[int] = field(default_factory=set)
    """Queue offsets of messages that the application gave back: nothing is lost of these."""
    _left: set[int] | None = None
    """Queue offsets that are neither acked nor given back. None: all."""

    @property
    def renew_at_s(self) -> float:
        """When more should be asked for: half of the lease is over."""
        return max(self.ends_s - self.lease_s / 2, self.retry_s)

    @property
    def probe_at_s(self) -> float:
        """When a lease that was not renewed is over, as the leader sees it, too."""
        return max(self.ends_s + self.lease_s * RETRY, self.retry_s)

    @property
    def left(self) -> Sequence[int]:
        """Queue offsets of what is still held, ascending."""
        return self.batch.queue_offsets if self._left is None else sorted(self._left)

    @property
    def over(self) -> bool:
        """Nothing of it is held any more."""
        return self._left is not None and not self._left

    def settle(self, offsets: Sequence[int]) -> None:
        """Note that these are acked or given back."""
        if offsets is self.batch.queue_offsets:
            self._left = set()
        elif self._left is None:
            self._left = set(self.batch.queue_offsets).difference(offsets)
        else:
            self._left.difference_update(offsets)

    def settle_up_to(self, offset: int) -> None:
        """Note that these, and all before, are acked."""
        self.settle([each for each in self.left if each <= offset])

    def lose(self, offsets: Iterable[int]) -> None:
        """Note that these are not this consumer's any more."""
        self.lost.update(offsets)
        self.settle([*self.lost])

    def extended(self, asked_s: float, lease_s: float) -> None:
        """Note that the leader gave so many seconds more, asked for then or later."""
        self.ends_s = max(self.ends_s, asked_s + lease_s)

    def answered(self, offsets: Sequence[int], results: Sequence[int], until_s: float) -> list[int]:
        """Note the answer to a renewal; return which messages were lost."""
        self.asked = False
        lost = [o for o, r in zip(offsets, results, strict=True) if r == pb.ACK_LEASE_LOST]
        if pb.EXTENDED in results:
            self.ends_s = max(self.ends_s, until_s)
        self.settle([o for o, r in zip(offsets, results, strict=True) if r != pb.EXTENDED])
        self.lost.update(lost)
        return lost


class Transit:
    """How much longer than the fastest a batch was on its way."""

    def __init__(self) -> None:
        self._least_s: float | None = None

    def late_s(self, handed_out_ms: int, now_s: float) -> float:
        """Return the seconds for a batch that arrives now; of the first of a stream none."""
        took_s = now_s - handed_out_ms / 1000  # and how far the two clocks are apart
        self._least_s = took_s if self._least_s is None else min(self._least_s, took_s)
        return took_s - self._least_s
