"""Settings of replication, with units and reasons."""

from dataclasses import dataclass

from timer.entries.entry_frame import HEADER_SIZE, PAYLOAD_SIZE_MAX
from timer.model.timer_errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """Times are CLOCK_BOOTTIME milliseconds of the machine that measures them."""

    lease_ms: int = 500
    """Time for which a leader acts alone after sending a message that a majority answered. The
    least duration of every unplanned failover."""
    guard_percent: int = 10
    """Percent by which a follower's clock may run faster than the leader's without two leaders."""
    heartbeat_ms: int = 100
    """Interval of an idle leader's appends: five chances per lease."""
    stepdown_leases: int = 4
    """Leases of time without a lease after which a leader steps down."""
    stuck_leases: int = 8
    """Leases of time after which a leader steps down if its disk syncs nothing that a majority
    already has. No fewer, as a disk that is only slow may recover."""
    drain_leases: int = 2
    """Leases of time for which a leader waits at a handover for its last entries to commit."""
    bid_ms: int = 5_000
    """A candidate ends its bid after this long without a new answer or new entries."""
    source_ms: int = 1_000
    """A candidate drops the answer of the voter it fetches from after this long without a reply."""
    window_messages: int = 16
    """Maximum of appends to one follower that are not durable there. Enough to hide one fsync; few
    enough that the waiting entries form one large message."""
    window_bytes: int = 16 << 20
    """Maximum bytes of those appends. Heartbeats queue behind them, so `Progress.window` is less
    on a link that takes long for as much."""
    window_bytes_start: int = 256 << 10
    """Bytes of those appends while the speed of a link is unknown."""
    window_bytes_min: int = 64 << 10
    """Bytes of those appends on the slowest link."""
    message_bytes: int = 4 << 20
    """Target size of one append in bytes; a single entry may be larger."""
    fetch_bytes: int = 1 << 20
    """Target size in bytes of an answer to a fetch, which must arrive within `source_ms`."""
    probe_bytes: int = 64 << 10
    """Size in bytes of an append while the last common index is unknown: it may be refused."""
    cache_bytes: int = 32 << 20
    """Bytes of entries kept in memory for sending and applying. Older ones are read from disk."""
    cache_ms: int = 5_000
    """Committed entries are kept in memory for this long, and for about twice as long at most. A
    burst then leaves no memory behind."""
    learner_ms: int = 60_000
    """A learner's missing log is kept for this long after its last answer; a voter's, always.
    `log_kept_bytes` limits both."""
    log_kept_bytes: int = 1 << 30
    """Bytes of log below the manifest kept for followers that lack them."""
    uncommitted_bytes: int = 64 << 20
    """Maximum bytes without a majority. The leader rejects more with OverloadedError."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < (name != "log_kept_bytes"):
                raise ConfigError(name, getattr(self, name), "at least 1")
        if self.heartbeat_ms * 2 >= self.lease_ms:
            raise ConfigError("heartbeat_ms", self.heartbeat_ms, f"below {self.lease_ms} / 2")
        largest = HEADER_SIZE + PAYLOAD_SIZE_MAX
        if self.uncommitted_bytes < largest:
            raise ConfigError("uncommitted_bytes", self.uncommitted_bytes, f"at least {largest}")

    @property
    def queued_ms_max(self) -> int:
        """Time that a message may wait behind others before less is sent: a quarter of the lease.

        The lease runs from the sending of a message that was answered.
        """
        return self.lease_ms // 4

    @property
    def guard_ms(self) -> int:
        """Time for which a follower stands by the last leader it heard; at least a lease."""
        return self.lease_ms + -(-self.lease_ms * self.guard_percent // 100)
