"""One workload in action: its producer, its consumers, and its end.

    open the consumers ─► produce, beat by beat ─► come to rest ─► wait for the last due time
    ─► wait until no timer of the topic is due and no message is without an ack, by the cluster

The cluster's word ends a workload, not a verdict: the audit judges the histories by the log.

A kind that changes the rules of its topic ends them before the last wait (`Rest`). Then no timer
is held or refused, no message expires, and the topic is not deleted.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from chaos.history.history import RunFolder, now_ms
from chaos.workloads.history_books import PAYLOAD_SIZE, Books
from chaos.workloads.recorded_requests import RecordedRequests
from chaos.workloads.workload_consumer import (
    AT_ONCE_S,
    ONE,
    RecordingConsumer,
    WorkloadReader,
    is_set,
)
from timerclient import AsyncTimerClient
from timerclient.values.client_settings import ClientSettings
from timerclient.values.errors import TimerError

BEAT_S: Final = 0.25
SETTINGS: Final = ClientSettings(call_s=10.0)
"""Calls end sooner than by default, so that the histories show an outage of that length."""
SETTLE_S: Final = 1.0
"""From the last due time to the first look, so that all timers have fired."""
RETRY_S: Final = 0.5
CLOSE_S: Final = 10.0


Rest = Callable[[], Awaitable[bool]]
"""Ends the rules of a topic. Called again until it returns True; it may raise a TimerError."""
Produce = Callable[["WorkloadClients"], Awaitable["Rest | None"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadKind:
    """The properties of one workload."""

    produce: Produce
    """Sends requests until `beats` ends. None: the topic needs no `Rest`."""
    readers: Sequence[WorkloadReader]
    settle: "Callable[[WorkloadClients], Awaitable[None]] | None" = None
    """Called again and again in the last wait, before each look; it may raise a TimerError."""
    payload_size: int = PAYLOAD_SIZE
    """Of each timer, in bytes."""
    in_own_namespace: bool = False
    """Its topic is in a namespace of its own, with the same name."""

    @property
    def line(self) -> str:
        """Its description in one line."""
        return (self.produce.__doc__ or "").partition("\n")[0]


def kind(*readers: WorkloadReader, **more: Any) -> Callable[[Produce], WorkloadKind]:
    """Make a kind of a producing function, with these consumers; without any, with a plain one."""
    return lambda produce: WorkloadKind(produce=produce, readers=readers or (ONE,), **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Values that all workloads of a run share."""

    run: RunFolder
    """The folder of the histories."""
    endpoints: Callable[[], Sequence[str]]
    """Returns the nodes' addresses, at each new client."""
    seed: int
    """Of all random choices: delays, payload sizes, cancels."""
    rate_per_s: float
    """Timers per second on average, of all workloads together."""
    horizon_s: float
    """Seconds from the start. Expected timers are due within it, and later requests are due within
    a second. Use the time until `stopping` or a little more: a workload is over hardly earlier."""
    marks: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    """The next marks of timers, unique in the run."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: no new requests, except those that end a workload."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: all ends as soon as the acks are confirmed, as far as the cluster answers."""


class WorkloadClients:
    """The clients of one kind. The functions of their kind use the public attributes."""

    def __init__(self, name: str, kind: WorkloadKind, setting: Setting) -> None:
        """Prepare the clients. The nodes have addresses by now."""
        self.name = name
        self.topic = f"{name}/{name}" if kind.in_own_namespace else name
        self.chance = random.Random(f"{setting.seed}/{name}")
        self.books = Books(payload_size=kind.payload_size)
        self.over = False
        """Every request is accounted for: acked by every group, or over. Timers that are due after
        the run's end are not waited for."""
        self._kind = kind
        self._setting = setting
        self._clients: list[AsyncTimerClient] = []
        self._consumers: list[RecordingConsumer] = []
        self._late = [reader for reader in kind.readers if reader.late]
        """Those that have not joined."""
        self.client = self.connect()
        """Of the producer and the consumers."""
        self.requests = RecordedRequests(
            setting.run, f"{name}-requests", self.client, self.books, topic=self.topic
        )

    async def play(self) -> None:
        """Play the workload until `closing`. Rejections and failures of the cluster do not end it.

        Raises:
            ExceptionGroup: a defect, or a message with content that was not requested.
        """
        self.start_ms = now_ms()
        """Unix milliseconds."""
        self.end_ms = self.start_ms + int(1000 * self._setting.horizon_s)
        """Expected timers are due by this time, or within a second of their request."""
        with contextlib.closing(self.requests):
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    work = self._tasks.create_task(self._work())
                    await self._setting.closing.wait()
                    work.cancel()
                    await asyncio.gather(*(each.close() for each in self._consumers))
            finally:
                for client in self._clients:
                    await client.close(CLOSE_S)

    # ---- for kinds

    @property
    def stopping(self) -> bool:
        """Whether no new requests may be sent."""
        return self._setting.stopping.is_set()

    def connect(self) -> AsyncTimerClient:
        """Return a new client, which is closed at the end."""
        client = AsyncTimerClient(self._setting.endpoints(), settings=SETTINGS)
        self._clients = [*self._clients, client]
        return client

    async def drop(self, client: AsyncTimerClient) -> None:
        """Close a client's connections at once, during its requests."""
        self._clients = [each for each in self._clients if each is not client]
        await client.close(AT_ONCE_S)

    def after(self, delay_s: float, work: Callable[[], Awaitable[object]]) -> None:
        """Do `work` after `delay_s`, beside other work; drop it if `stopping` by then."""

        async def run() -> None:
            if not await is_set(self._setting.stopping, delay_s):
                await work()

        self._later.create_task(run())

    async def join(self, reader: WorkloadReader) -> None:
        """Add a consumer; return once it is open. One of dead letters opens with the first."""
        number = len(self._consumers) + 1
        consumer = RecordingConsumer(
            self._setting.run, f"{self.name}-{reader.group}-{number}", self.client, self.books,
            reader, topic=f"{self.topic}.{reader.dead_of}.dead" if reader.dead_of else self.topic,
            stopping=self._setting.stopping,
        )  # fmt: skip
        self._consumers.append(consumer)
        self._tasks.create_task(consumer.run())
        if not reader.dead_of:
            await consumer.opened.wait()

    async def beats(self, every_s: float = BEAT_S) -> AsyncIterator[tuple[int, int]]:
        """Yield beats, about every `every_s`, until `stopping`: number, and timers to request.

        The first beat, number 0, comes at once. After an outage, at most two are caught up.
        """
        owed, last_s, numbers = 0.0, time.monotonic() - every_s, itertools.count()
        while not await is_set(self._setting.stopping, last_s + every_s - time.monotonic()):
            now_s = time.monotonic()
            if self._late and now_ms() >= self.start_ms + (self.end_ms - self.start_ms) // 3:
                await self._join_late()
            owed += self._setting.rate_per_s * min(now_s - last_s, 2 * every_s)
            last_s = now_s
            if count := int(owed):
                owed -= count
                yield next(numbers), count

    async def _join_late(self) -> None:
        while self._late:
            await self.join(self._late.pop())

    def marks(self, count: int) -> list[int]:
        """Return new marks, unique in the run."""
        return [*itertools.islice(self._setting.marks, count)]

    def within(self, due_ms: float) -> int:
        """Return a due time within the run: by its end, or within a second from now."""
        return min(int(due_ms), max(self.end_ms, now_ms() + 1000))

    def soon(self, count: int, delay_ms_max: float) -> list[int]:
        """Return due times within the run, evenly spread from now on."""
        now = now_ms()
        return [self.within(now + self.chance.uniform(0, delay_ms_max)) for _ in range(count)]

    async def schedule(self, count: int, delay_ms_max: float) -> None:
        """Schedule timers in one request, with evenly distributed delays."""
        await self.requests.batch(self.marks(count), self.soon(count, delay_ms_max))

    # ---- its course

    async def _work(self) -> None:
        for reader in self._kind.readers:
            if not reader.late:
                await self.join(reader)
        async with asyncio.TaskGroup() as self._later:  # their last requests move `last_due_ms`
            rest = await self._kind.produce(self)
            await self._join_late()
        if rest is not None:
            await _until(rest)
        await asyncio.sleep(self.requests.last_due_ms / 1000 + SETTLE_S - time.time())
        await _until(self._is_over)
        self.over = True

    async def _is_over(self) -> bool:
        """Return whether no timer is due, and no message or dead letter is without an ack."""
        if self._kind.settle is not None:
            await self._kind.settle(self)
        async for _ in self.client.list_timers(self.topic, due_to=now_ms()):
            return False
        topics = await self.client.topics()
        mine = (topic for topic in topics if f"{topic.name}.".startswith(f"{self.topic}."))
        groups = [group for topic in mine for group in topic.groups]
        return bool(groups) and not any(group.unacked for group in groups)


async def _until(step: Rest) -> None:
    while True:
        with contextlib.suppress(TimerError):
            if await step():
                return
        await asyncio.sleep(RETRY_S)
