"""What waits for consumers to read it, of all of them together.

A stream that holds more than all have left is paused: n streams that don't read hold one part in
n + 1 each. So the largest pause first, and something is left for one that reads.
"""

from collections import Counter
from typing import Final

OUTBOX_BYTES_MAX: Final = 8 << 20
"""Of one stream."""


class Outboxes:
    """Bytes that wait, in all and by remote end."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: of all; each stream may exceed it by one delivery."""
        self._bytes_max = bytes_max
        self.total = 0
        self.unread: Counter[str] = Counter()
        """By remote end; none is 0."""

    def add(self, peer: str, size: int) -> None:
        """Count bytes that were put in; negative: taken out."""
        self.total += size
        self.unread[peer] += size
        if not self.unread[peer]:
            del self.unread[peer]

    @property
    def crowded(self) -> bool:
        """Whether a step's leases, 32 MiB or more, must not all go to one stream."""
        return self.total > self._bytes_max // 4

    def most(self) -> int:
        """Return what one stream may hold: above it is paused."""
        return min(OUTBOX_BYTES_MAX, max(0, self._bytes_max - self.total))
