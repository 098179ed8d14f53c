"""Times and limits of the controller, and of the choice of a successor."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Times and limits of the controller; milliseconds."""

    link_grace_ms: int = 150
    """A leader whose link stays broken for longer counts as gone."""
    report_timeout_ms: int = 1_000
    """Older reports do not count. Ten reports are due in this time."""
    lease_grace_ms: int = 1_000
    """A leader without a lease for longer counts as gone: it serves no client."""
    idle_grace_ms: int = 1_000
    """An appointee that has not begun its promotion by then restarted, or was never reached."""
    stall_timeout_ms: int = 3_000
    """An appointee that does not serve by then is replaced. Doubles with each one in a row that
    stalled, so that a slow catch-up can end."""
    stall_doublings_max: int = 4
    gather_ms: int = 200
    """Wait this long for reports of further linked nodes, once a majority has reported."""
    gather_first_ms: int = 1_000
    """The same for the very first appointment, while nodes start one after another."""
    wait_logged_ms: int = 3_000
    """The log names the missing reports if the wait for them is this long."""
    promise_grace_ms: int = 3_000
    """A voter with a promise above the epoch refuses the leader. Appoint above it after this."""
    close_entries: int = 256
    """Logs with the same last epoch and a smaller difference count as equal: reports are up to
    0.1 s old."""
    lag_entries: int = 16
    """Fewer unapplied entries count as none. A follower applies every 50 ms, so it has few, except
    shortly after its start or under load."""
    late_ms: int = 1_000
    """A leader that does not serve for longer, and has `lag_entries` to apply, gives way to a node
    that has applied them."""
    propose_timeout_ms: int = 2_500
    """Propose again if a proposal has no outcome by then; longer than the shell's deadline."""
    refused_wait_ms: int = 1_000
    """Wait before the next proposal after a refusal; doubles with each refusal in a row."""
    refused_wait_ms_max: int = 16_000
    hand_over_after_ms: int = 5_000
    """Raft's leadership is handed over only after the log was led well for this long."""
    hand_over_every_ms: int = 30_000
    raise_level_after_ms: int = 60_000
    """The leader is appointed again for a higher feature level if all nodes have supported it, and
    the leader has served, for this long."""
    transfer_ms: int = 3_000
    """Time for a transfer's target to catch up. The leader serves meanwhile."""
    transfer_entries: int = 100_000
    """A target that lacks more entries is refused at once."""
    lease_ms: int = 500
    """The lease. The limits for a slow disk are parts of it."""
    caught_up_ms: int = 300
    """A target has caught up if it holds all entries that the leader held this long ago. Reports,
    ten a second, are no more exact. It fetches the rest while no node serves."""

    def __post_init__(self) -> None:
        assert self.link_grace_ms < self.report_timeout_ms <= self.stall_timeout_ms
        assert self.idle_grace_ms <= self.stall_timeout_ms

    @classmethod
    def of_lease(cls, lease_ms: int) -> Self:
        """Return times that tolerate the same pauses as the lease does.

        Up to a lease of half a second they are the defaults. A leader that is cut off keeps its
        lease for that time, and its successor waits for the end of the lease before it serves.
        """
        least = cls()
        return cls(
            lease_ms=max(least.lease_ms, lease_ms),
            report_timeout_ms=max(least.report_timeout_ms, 2 * lease_ms),
            lease_grace_ms=max(least.lease_grace_ms, 2 * lease_ms),
            idle_grace_ms=max(least.idle_grace_ms, 2 * lease_ms),
            stall_timeout_ms=max(least.stall_timeout_ms, 6 * lease_ms),
        )
