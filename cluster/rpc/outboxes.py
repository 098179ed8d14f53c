"""Counts the bytes that wait for consumers to read them, over all consumers.

The bytes of a unary answer count until its RPC has ended: gRPC holds them until the client reads.

A stream is paused when it holds more bytes than its caller may still take; see Shares. So streams
that do not read get less and less. Those with most bytes are paused first, and a stream that reads
always has some room.

The bytes are counted after a step of the leader, which gives up to STEP_DELIVERIES. So a delivery
has at most that part of the bytes left, and one step does not exceed them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from cluster.rpc.rpc_caller import caller_name
from cluster.rpc.shares import Shares
from timer.leader.groups.turns import LEASE_WORK, WORK_MAX

OUTBOX_BYTES_MAX: Final = 8 << 20
"""Of one stream, at most."""
MEMORY_PART: Final = 8
"""All streams together hold at most this part of the process's memory limit: an eighth. Unread
bytes take up to twice as much."""
ANSWER_BYTES: Final = 4 << 10
"""A smaller answer is not counted."""
STEP_DELIVERIES: Final = WORK_MAX // LEASE_WORK
DELIVERY_BYTES_MIN: Final = 64 << 10
"""Bytes of a delivery even if no bytes are left: a consumer that reads goes on."""


def reader_of(peer: str) -> str:
    """Return who must read an answer: the present caller's identity, or without TLS the peer."""
    return caller_name() or peer


class Outboxes:
    """Bytes that wait to be read, in all, by caller and by remote address."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: of all streams together; each may exceed it by a small delivery."""
        self._bytes_max = bytes_max
        self._shares = Shares(bytes_max)
        self.unread: Counter[str] = Counter()
        """Bytes by remote address; an address with 0 bytes is removed."""

    @property
    def total(self) -> int:
        """Bytes of all streams and answers."""
        return self._shares.total

    def add(self, peer: str, caller: str, size: int) -> None:
        """Add `size` bytes of a stream; a negative size removes bytes. `caller`: see reader_of."""
        self._shares.add(caller, size)
        self.unread[peer] += size
        if not self.unread[peer]:
            del self.unread[peer]

    def answer(self, size: int, context: Any) -> None:
        """Add the `size` bytes of a unary answer until its RPC has ended. `context`: gRPC's."""
        if size >= ANSWER_BYTES:
            peer, caller = context.peer(), reader_of(context.peer())
            self.add(peer, caller, size)
            context.add_done_callback(lambda _: self.add(peer, caller, -size))

    @contextmanager
    def relayed(self, size: int, context: Any) -> Iterator[None]:
        """Return a context in which gRPC holds `size` bytes of a relayed stream's answer."""
        peer, caller = context.peer(), reader_of(context.peer())
        self.add(peer, caller, size)
        try:
            yield
        finally:
            self.add(peer, caller, -size)

    def is_over_share(self, caller: str) -> bool:
        """Return whether a caller has unread bytes of its own, and more than its share."""
        return self._shares.used(caller) > 0 and self._shares.free_share(caller) < 0

    @property
    def is_crowded(self) -> bool:
        """Whether no stream may take all leases of one step, 32 MiB or more."""
        return self.total > self._bytes_max // 4

    def most(self, caller: str) -> int:
        """Return the bytes that one stream of a caller may hold; above that it is paused."""
        return min(OUTBOX_BYTES_MAX, max(0, self._shares.free_share(caller)))

    def delivery_max(self, caller: str) -> int:
        """Return the bytes that the next delivery to a caller may have; one message may exceed."""
        return max(DELIVERY_BYTES_MIN, self._shares.free_share(caller) // STEP_DELIVERIES)
