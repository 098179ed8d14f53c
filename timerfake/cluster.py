"""The fake cluster: for threads, and for an event loop.

    with FakeCluster() as cluster, cluster.client() as client:
        client.schedule("orders", b"cancel 4711", delay=timedelta(minutes=30))
        consumer = client.consumer("orders", group="billing")
        cluster.advance(timedelta(minutes=30))
        [message] = consumer.receive(timeout=0)

The cluster's clock moves only in `advance`, and stops at each due event on the way. The result is
therefore the same in every run. A `timeout` is in real time: it passes on the machine's clock, and
does not move the cluster's clock.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Final, Self

import grpc

from timer.model.units import DUE_MS_MAX
from timer.state.cancel_outcomes import HORIZON_MS
from timerclient import AsyncTimerClient, ClientSettings
from timerclient.client.timer_calls import Seconds
from timerclient.rows.rows import span_ms
from timerclient.threads.background import Background
from timerclient.values.errors import InvalidRequest
from timerfake.fake_log import FakeClock
from timerfake.fake_node import ADDRESS, FakeNode
from timerfake.loopback import CLOSED, OTHER_LOOP, Channel, Server

QUIET_TURNS: Final = 20
"""Turns of the event loop without an event, after which no further event will come. In all tests
of the fake cluster, one message or entry follows another within six turns."""
RECEIVE_TURNS_MAX: Final = 2_000
"""Turns for which a consumer's receive waits at most: other threads and tasks may never rest."""
NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


class FakeDial:
    """Makes channels to an in-memory cluster. A client that uses it reads the cluster's `clock`."""

    def __init__(self, clock: FakeClock, server: Callable[[], Server]) -> None:
        self.clock = clock
        self._server = server

    def __call__(self, address: str) -> grpc.aio.Channel:
        """Return a channel; the address is ignored."""
        del address
        return Channel(self._server())


Work = Callable[[], Awaitable[bool]]
"""Waits for some work of an application; returns False when there is none."""


class AsyncFakeCluster:
    """An in-memory cluster, for the event loop on which it is entered.

    Args:
        start: First time of the cluster's clock, an aware datetime. None: the present, rounded
            down to a second. Due times are rounded up to the tick; from a whole second, a delay
            of whole seconds ends exactly.
        settings: Settings of the node by key, as timerd's --set: {"limits.key_bytes_max": 64}.
    """

    address = ADDRESS
    """Address of the cluster for a client, used with `dial`."""

    def __init__(
        self, *, start: datetime | None = None, settings: Mapping[str, object] = NOTHING
    ) -> None:
        if start is not None and start.tzinfo is None:
            raise InvalidRequest.of("start", start, "must be aware of its time zone")
        first_ms = 1000 * int(time.time()) if start is None else _ms_of(start)
        self._clock = FakeClock(first_ms)
        self._settings = dict(settings)
        self._advance_lock = asyncio.Lock()
        self._node: FakeNode | None = None
        self._closed = False
        self.works: list[Work] = []
        """Work of applications, for which `settle` waits."""
        self.dial = FakeDial(self._clock, lambda: self._running_node().server)
        """The clients' argument `dial`. Its channels lead to this cluster, for any address."""
        self._clock.settle = partial(self._wait_until_quiet, RECEIVE_TURNS_MAX)

    # ---- clients

    def client(
        self,
        *,
        timeout: Seconds | None = None,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 -- frozen
    ) -> AsyncTimerClient:
        """Return a new client of this cluster; the arguments are AsyncTimerClient's."""
        return AsyncTimerClient(self.address, timeout=timeout, dial=self.dial, settings=settings)

    # ---- time

    @property
    def now(self) -> datetime:
        """The cluster's time, in UTC."""
        return datetime.fromtimestamp(self.now_ms / 1000, UTC)

    @property
    def now_ms(self) -> int:
        """The cluster's time, Unix milliseconds."""
        return self._clock.wall_ms()

    async def advance(self, by: Seconds) -> None:
        """Advance the cluster's clock by a timedelta or by seconds.

        All events that are due by then happen in order, each at its time. When this returns,
        consumers have received all messages that can be delivered.

        Raises:
            InvalidRequest: `by` is negative, or the time would exceed the limit of a timer's id.
        """
        by_ms = span_ms("by", by, DUE_MS_MAX - self.now_ms)
        self._own_node()
        async with self._advance_lock:
            end_ms = self._clock.mono_ms() + by_ms
            await self.settle()
            # The outcomes of timers that had fired by this time are forgotten at end_ms.
            await self._advance_to(end_ms - HORIZON_MS)
            await self._advance_to(end_ms)

    async def _advance_to(self, end_ms: int) -> None:
        node, clock = self._own_node(), self._clock
        if clock.mono_ms() > end_ms:
            return
        while (now_ms := clock.mono_ms()) < end_ms:
            next_ms = min(node.wake_at_ms(), clock.alarm_ms())
            clock.advance(min(max(next_ms, now_ms + 1), end_ms) - now_ms)
            clock.run_due_alarms()
            node.step()
            await self.settle()
        node.checkpoint()  # also checks that no timer is missing
        await self.settle()

    async def settle(self) -> None:
        """Wait until all effects of the present time have happened.

        Acks have then taken effect, and consumers have received all messages that can be delivered.
        """
        await self._wait_until_quiet()
        while any([await work() for work in self.works]):
            await self._wait_until_quiet()

    async def _wait_until_quiet(self, most: float = math.inf) -> None:
        """Wait as `settle`, without the work of applications, for `most` turns of the loop."""
        node, quiet, turns = self._own_node(), 0, 0
        while quiet < QUIET_TURNS and turns < most:
            before, turns = node.steps, turns + 1
            await asyncio.sleep(0)
            quiet = quiet + 1 if node.steps == before else 0
        node.server.check()

    # ---- failures

    async def fail_over(self) -> None:
        """Start a new epoch, as another leader would. Leases end; clients reconnect by themselves.

        The clients need some real milliseconds to reconnect.
        """
        self._own_node().fail_over()
        await self.settle()

    async def disconnect(self) -> None:
        """Break all connections and lose messages in flight. Reject calls until `reconnect`.

        Clients find the cluster unreachable. `advance` may be called in the meantime.
        """
        self._own_node().server.disconnect()

    async def reconnect(self) -> None:
        """Accept connections again. Clients reconnect within some real milliseconds."""
        self._own_node().server.reconnect()

    # ---- life

    async def start(self) -> None:
        """Start to serve, on the running event loop."""
        if self._node is None:
            self._node = FakeNode(self._clock, self._settings)
            self._node.start()
            await self.settle()

    async def close(self) -> None:
        """Stop the cluster. Close its clients first."""
        if self._node is not None and not self._closed:
            node, self._closed = self._own_node(), True
            await node.stop()
            node.server.check()
            node.server.close()

    async def __aenter__(self) -> Self:
        """Start the cluster and return it."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close the cluster."""
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncFakeCluster(now={self.now.isoformat()}{', closed' if self._closed else ''})"

    def _running_node(self) -> FakeNode:
        if self._closed:
            raise RuntimeError(CLOSED)
        if self._node is None:
            raise RuntimeError("enter the cluster first: `async with AsyncFakeCluster()`")
        return self._node

    def _own_node(self) -> FakeNode:
        node = self._running_node()
        if not node.server.is_own_loop:
            raise RuntimeError(OTHER_LOOP)
        return node


class ThreadCluster:
    """The part of FakeCluster that is written by hand.

    The other methods each run the method of AsyncFakeCluster of the same name. `make fmt` writes
    them (tests/thread_classes.py).
    """

    address = ADDRESS
    """Address of the cluster for a client, used with `dial`."""

    def __init__(self, cluster: AsyncFakeCluster) -> None:
        self._cluster = cluster
        self.dial = cluster.dial
        """The clients' argument `dial`. Its channels lead to this cluster, for any address."""
        self._call = Background().call
        self._call(cluster.start())

    def __repr__(self) -> str:
        return repr(self._cluster).removeprefix("Async")

    def close(self) -> None:
        """Stop the cluster. Close its clients first."""
        self._call(self._cluster.close())

    def __enter__(self) -> Self:
        """Return the cluster."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close the cluster."""
        self.close()


def _ms_of(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
