"""Settings of a client: one frozen set of numbers, each with its unit and reason."""

import math
from dataclasses import dataclass
from typing import Final

from timerclient.values.errors import InvalidRequest

PEEK_MAX: Final = 100
"""Messages of one `peek`."""
WINDOW_BYTES_MAX: Final = 256 << 20
"""Default of `ClientSettings.window_bytes_max`."""
READ_MAX: Final = 16_384
"""Messages of one `read_messages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Limits and waits of a client. The defaults suit a cluster in one network."""

    call_s: float = 30.0
    """Seconds that a call may take, failovers included, if the call has no timeout of its own."""
    stall_s: float = 1.5
    """Seconds without an answer after which the client looks for a leader among the other nodes.
    A node that is paused or cut off closes no connection."""
    probe_s: float = 0.7
    """Seconds that one node may take to answer whether it leads."""
    pause_s_min: float = 0.02
    """First pause between attempts, in seconds. Each pause is twice the last, with jitter."""
    pause_s_max: float = 0.15
    """Longest pause between attempts, in seconds. A failover takes half a second; a long pause
    would delay the first call after it."""
    wire_requests_max: int = 64
    """Requests that are sent and not answered."""
    wire_bytes_max: int = 32 << 20
    """Bytes of requests that are sent and not answered."""
    collect_rows_max: int = 1_000
    """Rows of single calls that share one request."""
    collect_bytes_max: int = 1 << 20
    """Bytes of single calls that share one request."""
    submitted_bytes_max: int = 64 << 20
    """Bytes of `submit` and `submit_batch` without an answer; beyond it, the next call blocks."""
    ack_requests_max: int = 16
    """Ack requests that are sent and not answered. Further acks wait and share the next one."""
    ack_offsets_max: int = 10_000
    """Acks in one request."""
    window_bytes_max: int = WINDOW_BYTES_MAX
    """Payload bytes of messages that wait in a consumer, roughly: its `window` counts messages, and
    it fetches fewer of them if they are large."""

    hold_s_max: float = 600.0
    """Seconds in which a consumer extends the lease of a message by itself, counted from its
    receipt by the application. 0: leases are not extended. A consumer's `hold_max` overrides it."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InvalidRequest: A number is not positive (`hold_s_max`: is negative) or not finite, or
                `pause_s_min` exceeds `pause_s_max`.
        """
        if not self.hold_s_max >= 0:  # nan is not, either
            raise InvalidRequest.of("hold_s_max", self.hold_s_max, "must be 0 or more")
        for name in self.__slots__:
            if name != "hold_s_max" and not 0 < getattr(self, name) < math.inf:
                raise InvalidRequest.of(name, getattr(self, name), "must be positive and finite")
        if self.pause_s_min > self.pause_s_max:
            limit = f"must be at most pause_s_max = {self.pause_s_max}"
            raise InvalidRequest.of("pause_s_min", self.pause_s_min, limit)
