"""How a client behaves: one frozen set of numbers, each with its unit and reason."""

from dataclasses import dataclass

from timerclient.values.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """The defaults suit a cluster in one network; tests shorten the waits."""

    call_s: float = 30.0
    """How long a call may take, failovers included, unless it says otherwise."""
    stall_s: float = 1.5
    """Silence after which the other nodes are asked whether one of them leads by now: a node
    that is paused, or cut off, closes no connection."""
    probe_s: float = 0.7
    """How long one node may take to say whether it leads."""
    pause_s_min: float = 0.02
    """First pause between attempts; each is twice the last, with jitter."""
    pause_s_max: float = 0.15
    """A failover takes half a second; who looks seldom adds his pause to it."""
    wire_requests_max: int = 64
    """Requests that are sent and not answered."""
    wire_bytes_max: int = 32 << 20
    collect_rows_max: int = 1_000
    """Rows of single calls that go into one request."""
    collect_bytes_max: int = 1 << 20
    submitted_bytes_max: int = 64 << 20
    """Bytes of `submit` and `submit_batch` that wait for their answers before the next blocks."""
    ack_requests_max: int = 16
    """Ack requests that are sent and not answered; more acks wait and share the next one."""
    ack_offsets_max: int = 10_000
    """Acks in one request."""

    hold_s_max: float = 600.0
    """So long a consumer renews the lease of a message by itself, from when the application got
    it; 0: not at all. `hold_max` of a consumer overrides it."""

    def __post_init__(self) -> None:
        """Check the relations.

        Raises:
            InvalidRequest: a number is not positive, or the pauses are the wrong way round.
        """
        if self.hold_s_max < 0:
            raise InvalidRequest.of("hold_s_max", self.hold_s_max, "must be 0 or more")
        for name in self.__slots__:
            if name != "hold_s_max" and getattr(self, name) <= 0:
                raise InvalidRequest.of(name, getattr(self, name), "must be positive")
        if self.pause_s_min > self.pause_s_max:
            limit = f"must be at most pause_s_max = {self.pause_s_max}"
            raise InvalidRequest.of("pause_s_min", self.pause_s_min, limit)
