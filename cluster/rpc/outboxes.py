"""Counts the bytes that wait for consumers to read them, over all consumers.

The bytes of a unary answer count until its RPC has ended: gRPC holds them until the client reads.

A stream is paused when it holds more than all streams together have left. So n streams that do not
read hold one part in n + 1 each. The streams with most bytes are paused first, and a stream that
reads always has some room.
"""

from collections import Counter
from typing import Any, Final

OUTBOX_BYTES_MAX: Final = 8 << 20
"""Of one stream, at most."""
MEMORY_PART: Final = 4
"""All streams together hold at most this part of the process's memory limit: a quarter."""
ANSWER_BYTES: Final = 64 << 10
"""A smaller unary answer is not counted."""


class Outboxes:
    """Bytes that wait to be read, in all and by remote address."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: of all streams together; each may exceed it by one delivery."""
        self._bytes_max = bytes_max
        self.total = 0
        self.unread: Counter[str] = Counter()
        """Bytes by remote address; an address with 0 bytes is removed."""

    def add(self, peer: str, size: int) -> None:
        """Add `size` bytes of a stream; a negative size removes bytes."""
        self.total += size
        self.unread[peer] += size
        if not self.unread[peer]:
            del self.unread[peer]

    def answer(self, size: int, context: Any) -> None:
        """Add the `size` bytes of a unary answer until its RPC has ended. `context`: gRPC's."""
        if size >= ANSWER_BYTES:
            peer = context.peer()
            self.add(peer, size)
            context.add_done_callback(lambda _: self.add(peer, -size))

    @property
    def is_full(self) -> bool:
        """Whether more bytes are unread than all streams together may hold."""
        return self.total > self._bytes_max

    @property
    def crowded(self) -> bool:
        """Whether no stream may take all leases of one step, 32 MiB or more."""
        return self.total > self._bytes_max // 4

    def most(self) -> int:
        """Return the bytes that one stream may hold; above that it is paused."""
        return min(OUTBOX_BYTES_MAX, max(0, self._bytes_max - self.total))
