"""The fake cluster: for threads, and for an event loop.

    with FakeCluster() as cluster, cluster.client() as client:
        client.schedule("orders", b"cancel 4711", delay=timedelta(minutes=30))
        consumer = client.consumer("orders", group="billing")
        cluster.advance(timedelta(minutes=30))
        [message] = consumer.receive(timeout=0)

Time passes in `advance` alone, and from one thing that is due to the next: what is seen afterwards
is the same every time. Waiting is done in real time, as ever: a `timeout` passes on the machine's
clock, while nothing comes because of it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType, TracebackType
from typing import Final, Self

import grpc

from timer.model.units import DUE_MS_MAX
from timer.state.cancel_outcomes import HORIZON_MS
from timerclient import AsyncTimerClient, ClientSettings, TimerClient
from timerclient.client.timer_calls import Seconds
from timerclient.rows.background import Background
from timerclient.rows.rows import span_ms
from timerclient.values.errors import InvalidRequest
from timerfake.fake_log import FakeClock
from timerfake.fake_node import ADDRESS, FakeNode
from timerfake.loopback import Channel, Server

QUIET_TURNS: Final = 20
"""Turns of the event loop in which nothing happens, after which nothing will: what leads from one
message or entry to the next takes at most six, in all tests of the fake."""
NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


class FakeDial:
    """Makes channels to a cluster in memory, and brings its clock along."""

    def __init__(self, clock: FakeClock, server: Callable[[], Server]) -> None:
        self.clock = clock
        self._server = server

    def __call__(self, address: str) -> grpc.aio.Channel:
        """Return a channel, whatever the address."""
        del address
        return Channel(self._server())


class AsyncFakeCluster:
    """A cluster in memory, for the event loop that it is entered on.

    `start`: what its clock shows at first, an aware datetime; by default the present, cut to
    a whole second: due times are rounded up to the tick, and a delay should end when it says.
    `settings`: of its node, by key, as timerd's --set has them: {"limits.key_bytes_max": 64}.
    """

    address = ADDRESS
    """What a client is given as its cluster, beside `dial`."""

    def __init__(
        self, *, start: datetime | None = None, settings: Mapping[str, object] = NOTHING
    ) -> None:
        if start is not None and start.tzinfo is None:
            raise InvalidRequest.of("start", start, "must be aware of its time zone")
        first_ms = 1000 * int(time.time()) if start is None else _ms_of(start)
        self._clock = FakeClock(first_ms)
        self._settings = dict(settings)
        self._advancing = asyncio.Lock()
        self._node: FakeNode | None = None
        self.dial = FakeDial(self._clock, lambda: self._running().server)
        """How clients reach it: what they take as `dial`, whatever the address is."""

    # ---- clients

    def client(
        self,
        *,
        timeout: Seconds | None = None,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 -- frozen
    ) -> AsyncTimerClient:
        """Return a new client of it; the arguments are AsyncTimerClient's."""
        return AsyncTimerClient(self.address, timeout=timeout, dial=self.dial, settings=settings)

    # ---- time

    @property
    def now(self) -> datetime:
        """What the cluster's clock shows, in UTC."""
        return datetime.fromtimestamp(self.now_ms / 1000, UTC)

    @property
    def now_ms(self) -> int:
        """What the cluster's clock shows, Unix milliseconds."""
        return self._clock.wall_ms()

    async def advance(self, by: Seconds) -> None:
        """Let time pass: a timedelta, or seconds.

        What is due by then happens, in order, each thing at its time; what can be handed out has
        arrived at consumers when this returns.

        Raises:
            InvalidRequest: time goes neither back nor beyond what a timer's id can hold.
        """
        by_ms = span_ms("by", by, DUE_MS_MAX - self.now_ms)
        self._running()
        async with self._advancing:
            end_ms = self._clock.mono_ms() + by_ms
            await self.settle()
            # How far firing had come by then is what is forgotten at the end.
            await self._pass_to(end_ms - HORIZON_MS)
            await self._pass_to(end_ms)

    async def _pass_to(self, end_ms: int) -> None:
        node, clock = self._running(), self._clock
        if clock.mono_ms() > end_ms:
            return
        while (now_ms := clock.mono_ms()) < end_ms:
            next_ms = min(node.wake_at_ms(), clock.alarm_ms())
            clock.pass_by(min(max(next_ms, now_ms + 1), end_ms) - now_ms)
            clock.ring()
            node.step()
            await self.settle()
        node.checkpoint()  # also checks that no timer is missing
        await self.settle()

    async def settle(self) -> None:
        """Wait until nothing happens any more at this time.

        So acks have had their effect, and what can be handed out has arrived at consumers.
        """
        node, quiet = self._running(), 0
        while quiet < QUIET_TURNS:
            before = node.steps
            await asyncio.sleep(0)
            quiet = quiet + 1 if node.steps == before else 0
        node.server.check()

    # ---- mishaps

    async def fail_over(self) -> None:
        """Let another leader begin: leases end, and clients connect again by themselves.

        That takes them some real milliseconds.
        """
        self._running().fail_over()
        await self.settle()

    async def disconnect(self) -> None:
        """Break all connections, with what is on its way, and take none until `reconnect`.

        To clients the cluster is unreachable; time may pass meanwhile.
        """
        self._running().server.disconnect()

    async def reconnect(self) -> None:
        """Take connections again; clients find back within some real milliseconds."""
        self._running().server.reconnect()

    # ---- life

    async def start(self) -> None:
        """Begin to serve, on the running event loop."""
        if self._node is None:
            self._node = FakeNode(self._clock, self._settings)
            self._node.start()
            await self.settle()

    async def close(self) -> None:
        """End; close its clients before."""
        if self._node is not None:
            await self._node.stop()
            self._node.server.check()

    async def __aenter__(self) -> Self:
        """Start, and return the cluster."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    def _running(self) -> FakeNode:
        if self._node is None:
            raise RuntimeError("enter the cluster first: `async with AsyncFakeCluster()`")
        return self._node


class FakeCluster:
    """A cluster in memory, for threads; the arguments are AsyncFakeCluster's.

    It runs on the thread that all clients of the process share.
    """

    address = ADDRESS
    """What a client is given as its cluster, beside `dial`."""

    def __init__(
        self, *, start: datetime | None = None, settings: Mapping[str, object] = NOTHING
    ) -> None:
        self._cluster = AsyncFakeCluster(start=start, settings=settings)
        self._cluster.dial.clock.settle = self._cluster.settle
        self.dial = self._cluster.dial
        """How clients reach it: what a TimerClient takes as `dial`, whatever the address is."""
        self._background = Background()
        self._background.call(self._cluster.start())

    def client(
        self,
        *,
        timeout: Seconds | None = None,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 -- frozen
    ) -> TimerClient:
        """Return a new client of it; the arguments are TimerClient's."""
        return TimerClient(self.address, timeout=timeout, dial=self.dial, settings=settings)

    @property
    def now(self) -> datetime:
        """What the cluster's clock shows, in UTC."""
        return self._cluster.now

    @property
    def now_ms(self) -> int:
        """What the cluster's clock shows, Unix milliseconds."""
        return self._cluster.now_ms

    def advance(self, by: Seconds) -> None:
        """Let time pass; see AsyncFakeCluster.advance."""
        self._background.call(self._cluster.advance(by))

    def settle(self) -> None:
        """Wait until nothing happens any more at this time; see AsyncFakeCluster.settle."""
        self._background.call(self._cluster.settle())

    def fail_over(self) -> None:
        """Let another leader begin; see AsyncFakeCluster.fail_over."""
        self._background.call(self._cluster.fail_over())

    def disconnect(self) -> None:
        """Break all connections; see AsyncFakeCluster.disconnect."""
        self._background.call(self._cluster.disconnect())

    def reconnect(self) -> None:
        """Take connections again; see AsyncFakeCluster.reconnect."""
        self._background.call(self._cluster.reconnect())

    def close(self) -> None:
        """End; close its clients before."""
        if not self._background.stopped:
            try:
                self._background.call(self._cluster.close())
            finally:
                self._background.stop()

    def __enter__(self) -> Self:
        """Return the cluster."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _ms_of(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
