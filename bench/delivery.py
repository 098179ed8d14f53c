"""S4 to S6: from schedule to ack, and the lateness of messages.

Producer and consumer run in this process and share the machine's clock with the nodes. Lateness is
therefore a plain difference: received minus due, and fired minus due.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.feed import BATCH_SIZE, PACE_MS, Feed, now_ms, paces
from bench.measure import Figure, Form, Measure, Series, check, cost, rate, wait
from bench.rig import Rig
from timerclient import Acking, AsyncConsumer, AsyncTimerClient, Batch

GROUP: Final = "bench"
WINDOW: Final = 20_000
PRODUCERS: Final = 16
"""Batches of the producer in flight."""
UNACKED_MAX: Final = 200_000
"""Unacked timers at which the producer pauses: throughput counts, not the backlog."""
SINGLE_UNRECEIVED_MAX: Final = 20_000
SPREAD_MS: Final = 1_000
WARM_UP_S: Final = 1.5
"""Seconds until timers of every delay are due."""
AHEAD_MS: Final = 1_000
"""Milliseconds from a paced timer's schedule to its due time."""
PAUSE_S: Final = 0.002
RECEIVE_TIMEOUT_S: Final = 20.0
RATES: Final = (1_000, 10_000)


class Tally:
    """Confirmed acks, with the time of each."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = asyncio.Event()
        self._at: list[float] = []
        self._counts: list[int] = []
        self._error: BaseException | None = None

    def ack(self, batch: Batch) -> None:
        """Acknowledge a batch, and count it once the ack is confirmed."""
        batch.ack().add_done_callback(self._acked)  # type: ignore[arg-type]  # it is an Acking

    def _acked(self, acking: Acking[int]) -> None:
        self._error = self._error or acking.exception()
        if self._error is None:
            self._at.append(time.time())
            self._counts.append(acking.result())
            self.count += self._counts[-1]
        self.changed.set()

    async def reach(self, count: int) -> None:
        """Wait until `count` messages are confirmed. Raise the error of any failed ack."""
        while self.count < count:
            self.changed.clear()
            await self.changed.wait()
            if self._error is not None:
                raise self._error

    def between(self, start: float, end: float) -> int:
        """Return the number confirmed in [start, end), Unix seconds."""
        at = np.array(self._at)
        return int(np.array(self._counts)[(at >= start) & (at < end)].sum())

    @property
    def last_at(self) -> float:
        """Time of the last confirmation, Unix seconds."""
        return self._at[-1]


@contextlib.asynccontextmanager
async def consuming(
    rig: Rig, consumer: AsyncConsumer, topic: str, take: Callable[[Batch], None]
) -> AsyncIterator[None]:
    """Pass every batch to `take` during the block. A failure of `take` ends the block too.

    `consumer`: of `topic` in GROUP.
    """

    async def consume() -> None:
        async for batch in consumer.batches():
            rig.record_delivery(GROUP, batch)
            take(batch)

    rig.record_open(topic, GROUP)
    async with asyncio.TaskGroup() as tasks, consumer:
        tasks.create_task(consume())
        yield


# ---- S4


def end_to_end(rig: Rig, form: Form) -> Series:
    """Schedule, fire, deliver and ack at full speed: in batches, then one by one."""
    lasting_s = 15.0 if form is Form.FULL else 4.0
    series = rig.within(90, _end_to_end(rig, lasting_s))
    return series | _one_by_one(rig, lasting_s)


async def _end_to_end(rig: Rig, lasting_s: float) -> Series:
    feed, topic, tally = Feed(), rig.topic("s4"), Tally()
    async with rig.client() as client:
        consumer = client.consumer(topic, GROUP, window=WINDOW)
        async with consuming(rig, consumer, topic, tally.ack):
            start = time.time() + WARM_UP_S
            end, scheduled = start + lasting_s, 0

            async def produce(number: int) -> None:
                nonlocal scheduled
                while time.time() < end:
                    if scheduled - tally.count >= UNACKED_MAX:
                        await asyncio.sleep(PAUSE_S)
                        continue
                    scheduled += BATCH_SIZE
                    # Half of the producers schedule timers that are due at once.
                    over_ms = 1 if number % 2 else SPREAD_MS
                    due_ms = feed.spread(now_ms(), over_ms)
                    await client.schedule_batch(topic, feed.payloads(), due_ms=due_ms)

            with rig.cpu_use() as use:
                await asyncio.gather(*map(produce, range(PRODUCERS)))
            await tally.reach(scheduled)
    check(tally.count == scheduled, f"{scheduled} scheduled, {tally.count} acked")
    return {"rate": [tally.between(start, end) / lasting_s], **use.series()}


def _one_by_one(rig: Rig, lasting_s: float) -> Series:
    """Read messages from the synchronous consumer and ack each. All timers are due at once."""
    feed, topic = Feed(), rig.topic("s4-single")
    with rig.thread_client() as client:
        rig.record_open(topic, GROUP)
        consumer = client.consumer(topic, GROUP, window=WINDOW)
        began, scheduled, received = time.monotonic(), 0, 0
        while (going := time.monotonic() - began < lasting_s) or received < scheduled:
            while going and scheduled - received < SINGLE_UNRECEIVED_MAX:
                client.submit_batch(topic, feed.payloads())
                scheduled += BATCH_SIZE
            messages = consumer.receive(BATCH_SIZE, timeout=RECEIVE_TIMEOUT_S)
            check(bool(messages), f"{received} of {scheduled} received, then none")
            rig.record_delivery(GROUP, messages)
            for message in messages:
                _ = message.ack()
            received += len(messages)
        consumer.flush()
        took_s = time.monotonic() - began
        consumer.close()
    check(received == scheduled, f"{scheduled} scheduled, {received} received")
    return {"rate_one_by_one": [received / took_s]}


# ---- S5


class MeasuredLateness:
    """The lateness of messages at their firing and at their receipt; milliseconds."""

    def __init__(self) -> None:
        self._received: list[npt.NDArray[np.float64]] = []
        self._fired: list[npt.NDArray[np.float64]] = []

    def note(self, batch: Batch) -> None:
        """Record a batch that arrives now."""
        received_ms = time.time_ns() / 1e6
        due_ms = np.array(batch.due_ms, np.float64)
        self._received.append(received_ms - due_ms)
        self._fired.append(np.array(batch.fired_at_ms, np.float64) - due_ms)

    def series(self, label: str) -> Series:
        """Return each percentile as one sample. `early`: messages fired before their due time."""
        received, fired = np.concatenate(self._received), np.concatenate(self._fired)
        p50, p99 = np.percentile(received, [50, 99])
        fired_p50, fired_p99 = np.percentile(fired, [50, 99])
        values = {
            "p50": p50,
            "p99": p99,
            "max": received.max(),
            "fired_p50": fired_p50,
            "fired_p99": fired_p99,
            "fired_max": fired.max(),
            "early": (fired < 0).sum(),
        }
        return {f"{name}_{label}": [float(value)] for name, value in values.items()}


def lateness(rig: Rig, form: Form) -> Series:
    """Schedule timers at fixed rates, each a second ahead, and return their lateness."""
    lasting_s = 20.0 if form is Form.FULL else 4.0
    series: Series = {}
    for per_s in RATES:
        series |= rig.within(lasting_s + 60, _lateness(rig, per_s, lasting_s))
    return series


async def _lateness(rig: Rig, per_s: int, lasting_s: float) -> Series:
    async with rig.client() as client:
        late = await paced_lateness(rig, client, rig.topic("s5"), per_s, lasting_s)
    return late.series(f"{per_s}")


async def paced_lateness(
    rig: Rig, client: AsyncTimerClient, topic: str, per_s: int, lasting_s: float
) -> MeasuredLateness:
    """Schedule `per_s` timers a second, each AHEAD_MS ahead. Return their lateness."""
    feed, tally, late = Feed(size=per_s * PACE_MS // 1000), Tally(), MeasuredLateness()
    scheduled = 0

    def take(batch: Batch) -> None:
        late.note(batch)
        tally.ack(batch)

    consumer = client.consumer(topic, GROUP, window=WINDOW)
    async with consuming(rig, consumer, topic, take), asyncio.TaskGroup() as tasks:
        async for at_ms in paces(lasting_s):
            due_ms = feed.spread(at_ms + AHEAD_MS, PACE_MS)
            tasks.create_task(client.schedule_batch(topic, feed.payloads(), due_ms=due_ms))
            scheduled += feed.size
        await tally.reach(scheduled)
    return late


# ---- S6


def burst(rig: Rig, form: Form) -> Series:
    """Let 100,000 timers be due in one second; in the full form also 1,000,000."""
    series = rig.within(60, _burst(rig, 100_000, ahead_s=3, label="100k"))
    if form is Form.FULL:
        series |= rig.within(180, _burst(rig, 1_000_000, ahead_s=20, label="1m"))
    return series


async def _burst(rig: Rig, count: int, ahead_s: float, label: str) -> Series:
    feed, topic, tally = Feed(), rig.topic("s6"), Tally()
    async with rig.client() as client:
        consumer = client.consumer(topic, GROUP, window=WINDOW)
        async with consuming(rig, consumer, topic, tally.ack):
            start_ms = now_ms() + round(ahead_s * 1000)

            batches = iter(range(count // BATCH_SIZE))

            async def produce() -> None:
                for _ in batches:  # the producers share one iterator
                    due_ms = feed.spread(start_ms, SPREAD_MS)
                    await client.schedule_batch(topic, feed.payloads(), due_ms=due_ms)

            await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
            check(now_ms() < start_ms, f"{count} timers were not scheduled within {ahead_s} s")
            await tally.reach(count)
    return {f"drained_{label}": [tally.last_at - start_ms / 1000]}


_CORES: Final[tuple[Figure, ...]] = (
    cost("  CPU client", "cores_client", "cores"),
    cost("  CPU leader", "cores_leader", "cores"),
    cost("  CPU both followers", "cores_followers", "cores"),
)

S4: Final = Measure(
    name="s4",
    title="schedule, fire, deliver, ack",
    run=end_to_end,
    figures=(
        rate("by batches", "rate", "timers/s", 60_000, 250_000),
        *_CORES,
        rate("one by one, synchronous", "rate_one_by_one", "timers/s"),
    ),
    runs={Form.SHORT: 2, Form.FULL: 5},
    recorded=True,
)
S5: Final = Measure(
    name="s5",
    title="lateness: received - due",
    run=lateness,
    figures=(
        wait("1,000/s: p50", "p50_1000"),
        wait("1,000/s: p99", "p99_1000"),
        wait("1,000/s: max", "max_1000"),
        wait("10,000/s: p50", "p50_10000", 15, 5),
        wait("10,000/s: p99", "p99_10000", 60, 15),
        wait("10,000/s: max", "max_10000", 250, 50),
        wait("  fired - due: p50", "fired_p50_10000"),
        wait("  fired - due: p99", "fired_p99_10000"),
        cost("  fired before due", "early_10000", "timers", 0, 0),
    ),
    runs={Form.SHORT: 2, Form.FULL: 5},
    recorded=True,
)
S6: Final = Measure(
    name="s6",
    title="due in one second: to the last ack",
    run=burst,
    figures=(
        cost("100,000", "drained_100k", "s"),
        cost("1,000,000", "drained_1m", "s", 15, 4),
    ),
    runs={Form.SHORT: 2, Form.FULL: 5},
    recorded=True,
)
