"""FakeCluster: made of AsyncFakeCluster by `make fmt`, not written by hand."""

# ruff: noqa: B008 -- as in its source
from collections.abc import Mapping
from datetime import datetime

from timerclient import ClientSettings
from timerclient.client.timer_calls import Seconds
from timerclient.client.timer_client import TimerClient
from timerfake.cluster import NOTHING, AsyncFakeCluster, ThreadCluster


class FakeCluster(ThreadCluster):
    """An in-memory cluster, on the thread that all clients of the process share.

    Args:
        start: First time of the cluster's clock, an aware datetime. None: the present, rounded
            down to a second. Due times are rounded up to the tick; from a whole second, a delay
            of whole seconds ends exactly.
        settings: Settings of the node by key, as timerd's --set: {"limits.key_bytes_max": 64}.
    """

    def __init__(
        self, *, start: datetime | None = None, settings: Mapping[str, object] = NOTHING
    ) -> None:
        super().__init__(AsyncFakeCluster(start=start, settings=settings))

    def client(
        self, *, timeout: Seconds | None = None, settings: ClientSettings = ClientSettings()
    ) -> TimerClient:
        """Return a new client of this cluster; the arguments are TimerClient's."""
        return TimerClient(self.address, timeout=timeout, dial=self.dial, settings=settings)

    @property
    def now(self) -> datetime:
        """The cluster's time, in UTC."""
        return self._cluster.now

    @property
    def now_ms(self) -> int:
        """The cluster's time, Unix milliseconds."""
        return self._cluster.now_ms

    def advance(self, by: Seconds) -> None:
        """Advance the cluster's clock by a timedelta or by seconds.

        All events that are due by then happen in order, each at its time. When this returns,
        consumers have received all messages that can be delivered.

        Raises:
            InvalidRequest: `by` is negative, or the time would exceed the limit of a timer's id.
        """
        self._call(self._cluster.advance(by))

    def settle(self) -> None:
        """Wait until all effects of the present time have happened.

        Acks have then taken effect, and consumers have received all messages that can be delivered.
        """
        self._call(self._cluster.settle())

    def fail_over(self) -> None:
        """Start a new epoch, as another leader would. Leases end; clients reconnect by themselves.

        The clients need some real milliseconds to reconnect.
        """
        self._call(self._cluster.fail_over())

    def disconnect(self) -> None:
        """Break all connections and lose messages in flight. Reject calls until `reconnect`.

        Clients find the cluster unreachable. `advance` may be called in the meantime.
        """
        self._call(self._cluster.disconnect())

    def reconnect(self) -> None:
        """Accept connections again. Clients reconnect within some real milliseconds."""
        self._call(self._cluster.reconnect())
