"""A load of schedules, cancels and a consumer, and the check of its results."""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.cluster.running import WAIT_S, Running, until
from timerclient import Batch, CancelResult, LeaseLost, OutcomeUnknown, TimerClient, TimerError

TOPIC = "load"
GROUP = "workers"
DELAY_S_MAX = 0.8
PAUSE_S = 0.04
"""Between two rounds of schedules. Nodes that fail and restart need the processors, too."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """One delivery, in the order of receipt."""

    id: str
    payload: bytes
    offset: int
    attempt: int
    epoch: int
    at_s: float


class Load:
    """A load that runs inside of a `with`. `stop` ends scheduling; `check` tests the results."""

    def __init__(self, cluster: Running, topic: str = TOPIC, *, consume: bool = True) -> None:
        self.topic = topic
        self.errors: list[BaseException] = []
        """Errors of schedules, cancels and the consumer; there must be none."""
        self.scheduled: dict[str, bytes] = {}
        self.cancelled: set[str] = set()
        self.deliveries: list[Delivered] = []
        self.acked: dict[str, float] = {}
        """Timer id -> time of its confirmed ack, in monotonic seconds."""
        self.scheduled_at_s: list[float] = []
        self._cluster = cluster
        self._consume = consume
        self._stopping = threading.Event()
        self._stack = contextlib.ExitStack()
        self._random = random.Random(1)
        self._marks = itertools.count()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        client = self._stack.enter_context(self._cluster.client())
        self._consumer = self._stack.enter_context(client.consumer(self.topic, group=GROUP))
        works = [self._schedule, self._consume_all] if self._consume else [self._schedule]
        for work in works:
            thread = threading.Thread(target=self._guarded, args=(work, client))
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.stop()
        with contextlib.suppress(OutcomeUnknown) if kind else contextlib.nullcontext():
            self._consumer.close(2 if kind else WAIT_S)
        for thread in self._threads:
            thread.join()
        self._stack.close()

    def _guarded(self, work: "object", client: TimerClient) -> None:
        try:
            work(client)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - `check` tests that there is none
            self.errors.append(error)

    def stop(self) -> None:
        """End the scheduling."""
        self._stopping.set()
        self._threads[0].join()

    def _schedule(self, client: TimerClient) -> None:
        while not self._stopping.wait(PAUSE_S):
            payloads = [b"%d" % next(self._marks) for _ in range(10)]
            delays = [self._random.uniform(0, DELAY_S_MAX) for _ in payloads]
            timers = client.schedule_batch(self.topic, payloads, delay=delays)
            single = b"%d" % next(self._marks)
            one = client.schedule(self.topic, single, delay=self._random.uniform(0, DELAY_S_MAX))
            self.scheduled_at_s.append(time.monotonic())
            self.scheduled |= dict(zip(timers.ids, payloads, strict=True))
            self.scheduled[one.id] = single
            chosen = self._random.choice(timers.ids)
            # A retry during a failover may find its first attempt applied.
            if client.cancel(chosen) in (CancelResult.CANCELLED, CancelResult.ALREADY_CANCELLED):
                self.cancelled.add(chosen)

    def _consume_all(self, client: TimerClient) -> None:
        del client
        for batch in self._consumer.batches():
            at_s = time.monotonic()
            ids, payloads = batch.ids, batch.payloads
            for row, timer_id in enumerate(ids):
                self.deliveries.append(
                    Delivered(
                        timer_id,
                        payloads[row],
                        batch.queue_offsets[row],
                        batch.attempts[row],
                        batch.epoch,
                        at_s,
                    )
                )
            self._ack(batch, ids)

    def _ack(self, batch: Batch, ids: list[str]) -> None:
        def answered(acking: object) -> None:
            error = acking.exception()  # type: ignore[attr-defined]
            lost: set[int] = set()
            if isinstance(error, LeaseLost):
                lost = {*error.offsets}
            elif isinstance(error, TimerError):
                return  # the consumer was closed
            now_s = time.monotonic()
            for offset, timer_id in zip(batch.queue_offsets, ids, strict=True):
                if offset not in lost:
                    self.acked.setdefault(timer_id, now_s)

        batch.ack().add_done_callback(answered)

    # ---- checks

    def wait_for_acks(self, more: int) -> None:
        """Wait until `more` further timers are acked."""
        goal = len(self.acked) + more
        until(lambda: len(self.acked) >= goal or self.errors)
        assert not self.errors, self.errors

    def drained(self) -> None:
        """Wait until every timer that must fire is acked."""
        until(lambda: not (self.scheduled.keys() - self.cancelled - self.acked.keys()))

    def check(self) -> None:
        """Check that each timer was delivered once, no cancelled one, and redeliveries marked."""
        assert not self.errors, self.errors
        offsets: dict[str, int] = {}
        first: set[str] = set()
        for each in self.deliveries:
            assert self.scheduled.get(each.id) == each.payload, each
            assert offsets.setdefault(each.id, each.offset) == each.offset, each
            assert each.attempt >= 2 or each.id not in first, f"unmarked redelivery: {each}"
            assert each.id not in self.cancelled, f"cancelled, yet delivered: {each}"
            first.add(each.id)
        assert len({*offsets.values()}) == len(offsets), "two timers at one offset"
        assert self.scheduled.keys() - self.cancelled == offsets.keys()
        epochs = [each.epoch for each in self.deliveries]
        assert epochs == sorted(epochs), "a stale epoch reached the application"
        for each in self.deliveries:
            acked_at_s = self.acked.get(each.id)
            assert acked_at_s is None or each.at_s <= acked_at_s, f"delivered after its ack: {each}"

    def longest_gap_s(self) -> float:
        """Return the longest time without an answer to a schedule request, in seconds."""
        times = self.scheduled_at_s
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    def longest_delivery_gap_s(self) -> float:
        """Return the longest time without a delivery, in seconds."""
        times = [each.at_s for each in self.deliveries]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


@contextlib.contextmanager
def loaded(cluster: Running, topic: str) -> Iterator[Load]:
    """Run a load, drain and check it at the end, and check that the replicas are equal."""
    with Load(cluster, topic) as load:
        load.wait_for_acks(100)
        yield load
        load.stop()
        load.drained()
    load.check()
    cluster.digests_agree()
    cluster.counts_add_up()


PAUSE_S_MAX = 10.0
"""Bound for a loaded machine; docs/members.md has a measured figure."""
