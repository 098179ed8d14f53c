"""The measures of a contest. Each takes a started peer and returns figures and samples.

Timers are scheduled before the first of them is due, except in `failover`, so that a peer that
schedules slowly is not late for that reason.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bench.feed import HOUR_MS
from bench.peers.deliveries import Deliveries, NumberedTimers, now_ms
from bench.peers.peer import Peer
from bench.peers.server import PeerError

BATCH: Final = 1_000
AHEAD_S: Final = 1.5
"""Least time from a schedule call to its due time."""
CALL_LIMIT_S: Final = 15.0
DRAIN_LIMIT_S: Final = 60.0
PREPARE_LIMIT_S: Final = 60.0
PART_LIMIT_S: Final = 300.0
"""Time after which a start or a measure is given up. A client may wait for ever for a server."""
QUANTILES: Final = np.linspace(0, 100, 201)
"""Percentiles of lateness that are stored in place of every sample."""
FAILOVER_PACE_MS: Final = 50
FAILOVER_AHEAD_MS: Final = 2_000
KILL_AFTER_S: Final = 4.0
WARM_UP: Final = 3
"""Calls that are left out of a latency."""
SINGLES_MIN: Final = 5
"""Least number of measured calls, however long they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The extent of a contest."""

    singles_s: float
    ingest: int
    ingest_s: float
    lateness_s: float
    bursts: tuple[int, ...]
    failover_s: float


SHORT: Final = Length(
    singles_s=3, ingest=100_000, ingest_s=6, lateness_s=3, bursts=(100_000,), failover_s=10
)
FULL: Final = Length(
    singles_s=10,
    ingest=1_000_000,
    ingest_s=60,
    lateness_s=20,
    bursts=(100_000, 1_000_000),
    failover_s=20,
)


@dataclass(slots=True)
class PeerResult:
    """The figures of a peer's turn, and the samples behind them."""

    figures: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class Contest:
    """One peer's turn: every measure, one after the other."""

    def __init__(self, peer: Peer, length: Length) -> None:
        self.peer = peer
        self.length = length
        self.result = PeerResult()
        self._timers = NumberedTimers()
        self._deliveries = Deliveries()
        """Those of the latest measure."""
        self._per_s = float(BATCH)
        """Timers scheduled per second, as measured."""

    async def run(self) -> PeerResult:
        """Take all measures. If one of them fails or takes too long, the others are still taken."""
        length = self.length
        await self._try("singles", self.singles())
        await self._try("ingest", self.ingest())
        for per_s in (2_000, 10_000):
            await self._try(f"lateness {per_s}", self.lateness(per_s))
        for count in length.bursts:
            await self._try(f"burst {count}", self.burst(count))
        if self.peer.fails_over:
            await self._try("failover", self.failover())
        return self.result

    async def _try(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(PART_LIMIT_S):
                await work
        except Exception as error:  # noqa: BLE001 -- a client library may raise anything
            self.result.errors.append(f"{name}: {type(error).__name__}: {error}"[:300])

    # ---- scheduling

    async def singles(self) -> None:
        """Schedule one timer at a time. Each call is awaited."""
        took_ms: list[float] = []
        due_ms = round(now_ms()) + HOUR_MS
        payloads = self._timers.make([due_ms] * 20_000)
        until = time.perf_counter() + self.length.singles_s
        for number, payload in enumerate(payloads):
            began = time.perf_counter()
            if began > until and len(took_ms) >= SINGLES_MIN:
                break
            await _limited(self.peer.schedule_one(due_ms, payload))
            if number >= WARM_UP:  # the first calls open connections and queues
                took_ms.append((time.perf_counter() - began) * 1000)
        p50, p99 = np.percentile(took_ms, [50, 99])
        self.result.figures |= {
            "single_per_s": 1000 * len(took_ms) / sum(took_ms),
            "single_p50_ms": float(p50),
            "single_p99_ms": float(p99),
        }
        self.result.samples["single_ms"] = np.percentile(took_ms, QUANTILES).round(3).tolist()

    async def ingest(self) -> None:
        """Schedule timers that stay pending; then compare memory and disk with those before."""
        memory, disk = self.peer.memory(), self.peer.disk()
        first_ms = round(now_ms()) + HOUR_MS
        due_ms = [first_ms + number % 1000 for number in range(self.length.ingest)]
        began = time.perf_counter()
        done = await self._schedule(due_ms, limit_s=self.length.ingest_s)
        self._per_s = done / (time.perf_counter() - began)
        self.result.figures |= {
            "batched_per_s": self._per_s,
            "memory_bytes": max(0, self.peer.memory() - memory) / done,
            "disk_bytes": max(0, self.peer.disk() - disk) / done,
        }

    async def _schedule(
        self, due_ms: Sequence[int], seen: Deliveries | None = None, limit_s: float = PART_LIMIT_S
    ) -> int:
        """Schedule in batches, several at a time. Return the number scheduled within the limit."""
        parts = (due_ms[at : at + BATCH] for at in range(0, len(due_ms), BATCH))
        batches = ((part, self._timers.make(part)) for part in parts)
        until = time.perf_counter() + limit_s

        async def produce() -> int:
            count = 0
            for part, payloads in batches:  # the producers share one iterator
                if time.perf_counter() > until:
                    break
                await self.peer.schedule_many(part, payloads)
                count += len(payloads)
                if seen is not None:
                    seen.scheduled(payloads)
            return count

        producers = [produce() for _ in range(self.peer.batches_in_flight)]
        return sum(await asyncio.gather(*producers))

    def _lead_ms(self, count: int) -> int:
        """Return the ms from now after which `count` timers are certain to be scheduled.

        Raises:
            PeerError: scheduling them would take longer than `PREPARE_LIMIT_S`.
        """
        needed_s = count / self._per_s
        if needed_s > PREPARE_LIMIT_S:
            raise PeerError(f"left out: scheduling would take {needed_s:.0f} s")
        return round(1000 * (AHEAD_S + 2 * needed_s))

    # ---- firing

    async def lateness(self, per_s: int) -> None:
        """Let `per_s` timers be due in each second."""
        count = round(per_s * self.length.lateness_s)
        async with self._consuming() as seen:
            start_ms = round(now_ms()) + self._lead_ms(count)
            due_ms = [start_ms + number * 1000 // per_s for number in range(count)]
            await self._schedule(due_ms, seen)
            self._note_overtaken(f"lateness {per_s}", start_ms)
            await asyncio.sleep((due_ms[-1] - now_ms()) / 1000)
            await seen.complete(DRAIN_LIMIT_S)
        verdict, late_ms = seen.verdict(), seen.lateness_ms()
        p50, p99 = np.percentile(late_ms, [50, 99])
        self.result.figures |= {
            f"late_{per_s}_p50_ms": float(p50),
            f"late_{per_s}_p99_ms": float(p99),
            f"late_{per_s}_max_ms": float(late_ms.max()),
            f"early_{per_s}": float(verdict.early),
            f"lost_{per_s}": float(verdict.lost),
            f"doubled_{per_s}": float(verdict.doubled),
        }
        quantiles = np.percentile(late_ms, QUANTILES).round(2)
        self.result.samples[f"late_{per_s}_ms"] = quantiles.tolist()

    async def burst(self, count: int) -> None:
        """Let `count` timers be due at one instant."""
        async with self._consuming() as seen:
            due_at = round(now_ms()) + self._lead_ms(count)
            await self._schedule([due_at] * count, seen)
            self._note_overtaken(f"burst {count}", due_at)
            await asyncio.sleep((due_at - now_ms()) / 1000)
            whole = await seen.complete(DRAIN_LIMIT_S)
        verdict = seen.verdict()
        self.result.figures |= {
            f"burst_{count}_lost": float(verdict.lost),
            f"burst_{count}_doubled": float(verdict.doubled),
            f"burst_{count}_early": float(verdict.early),
        }
        if seen.first_ms():
            self.result.figures[f"burst_{count}_first_ms"] = seen.first_ms() - due_at
        if whole:
            self.result.figures[f"burst_{count}_s"] = (seen.last_ack_ms - due_at) / 1000

    def _note_overtaken(self, name: str, due_at_ms: int) -> None:
        """Note an error if the first timer was due before the last was scheduled."""
        if now_ms() > due_at_ms:
            self.result.errors.append(f"{name}: scheduling took longer than planned")

    @contextlib.asynccontextmanager
    async def _consuming(self) -> AsyncIterator[Deliveries]:
        seen = self._deliveries = Deliveries(self._deliveries)
        consumer = asyncio.create_task(self.peer.consume(seen))
        try:
            await asyncio.sleep(0.3)
            yield seen
            if consumer.done():
                await consumer
        finally:
            while not consumer.done():  # the client of Redis now and then loses a cancellation
                consumer.cancel()
                await asyncio.wait([consumer], timeout=0.1)
            await asyncio.gather(consumer, return_exceptions=True)

    # ---- failing over

    async def failover(self) -> None:
        """Kill the leader while 2,000 timers a second are scheduled and due.

        A call that fails is not repeated, and its timers are not judged.
        """
        size, failed = 2 * FAILOVER_PACE_MS, 0
        tasks: list[asyncio.Task[None]] = []

        async def call(due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
            nonlocal failed
            try:
                await _limited(self.peer.schedule_many(due_ms, payloads))
            except Exception:  # noqa: BLE001 -- a client library may raise anything
                failed += len(payloads)
            else:
                seen.scheduled(payloads)

        async with self._consuming() as seen:
            start_ms, killing, killed_ms = round(now_ms()), None, 0.0
            for at_ms in range(0, round(self.length.failover_s * 1000), FAILOVER_PACE_MS):
                await asyncio.sleep((start_ms + at_ms - now_ms()) / 1000)
                first_ms = start_ms + at_ms + FAILOVER_AHEAD_MS
                due_ms = [first_ms + number // 2 for number in range(size)]
                tasks.append(asyncio.create_task(call(due_ms, self._timers.make(due_ms))))
                if killing is None and at_ms >= KILL_AFTER_S * 1000:
                    killed_ms = now_ms()
                    killing = asyncio.create_task(self.peer.kill_leader())
            assert killing is not None
            await asyncio.gather(*tasks, killing)
            await asyncio.sleep(FAILOVER_AHEAD_MS / 1000)
            await seen.complete(DRAIN_LIMIT_S)
        verdict = seen.verdict()
        self.result.figures |= {
            "failover_scheduled": float(verdict.scheduled),
            "failover_failed_calls": float(failed),
            "failover_lost": float(verdict.lost),
            "failover_doubled": float(verdict.doubled),
            "failover_late": float(verdict.late),
            "failover_early": float(verdict.early),
            "failover_worst_ms": verdict.worst_ms,
            "failover_gap_ms": seen.longest_gap_ms(killed_ms),
        }
        lasting_ms = round(self.length.failover_s * 1000)
        self.result.samples["failover_per_tenth"] = seen.per_tenth(killed_ms - 1000, lasting_ms)


async def _limited(work: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(CALL_LIMIT_S):
        await work
