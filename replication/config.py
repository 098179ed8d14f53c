"""Settings of replication, with their units and reasons."""

from dataclasses import dataclass

from timer.entry import HEADER_SIZE, PAYLOAD_SIZE_MAX
from timer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """Times are CLOCK_BOOTTIME milliseconds of the machine that measures them."""

    lease_ms: int = 500
    """A leader acts alone for this long after sending what a majority answered. The floor of
    every failover that nobody planned."""
    guard_percent: int = 10
    """A follower's clock may run this much faster than its leader's before two could lead."""
    heartbeat_ms: int = 100
    """An idle leader speaks this often: five chances per lease."""
    stepdown_leases: int = 4
    """A leader without a lease for so many leases gives up: it waits for nobody any more."""
    stuck_leases: int = 8
    """So does one whose disk has not synced for so many what a majority of others has: not sooner,
    as disks that are merely slow come back."""
    drain_leases: int = 2
    """A leader that hands over waits this long for its tail to commit."""
    bid_ms: int = 5_000
    """A candidate gives up when nothing has moved for this long."""
    source_ms: int = 1_000
    """A candidate looks for another majority when the log it fetches from is silent for this."""
    window_messages: int = 16
    """Appends to one follower that it has not made durable: enough to hide one fsync, few
    enough that what waits behind them becomes one large message."""
    window_bytes: int = 16 << 20
    """Bytes of such appends."""
    message_bytes: int = 4 << 20
    """Target size of one append; one entry may be larger."""
    probe_bytes: int = 64 << 10
    """Size of an append to a follower whose log is not known to match: it may be refused."""
    cache_bytes: int = 32 << 20
    """Entries kept in memory for sending and applying; what is older is read from the log."""
    learner_ms: int = 60_000
    """A learner that lags holds the log for so long after its last answer; voters do always. All
    of them up to the limit in bytes."""
    log_kept_bytes: int = 1 << 30
    """The log below the manifest that is kept for followers that lack it."""
    uncommitted_bytes: int = 64 << 20
    """What the leader takes before a majority has it; more is refused as Overloaded."""

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
    def guard_ms(self) -> int:
        """How long a follower stands by a leader that it last heard from: never under a lease."""
        return self.lease_ms + -(-self.lease_ms * self.guard_percent // 100)
