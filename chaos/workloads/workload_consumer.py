"""A client that receives messages, acks them, and records all of that."""

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final

from chaos.history.history import History, OpOutcome, RunFolder, now_ms
from chaos.workloads.history_books import GROUP, Books
from chaos.workloads.recorded_requests import outcome_of
from timerclient import AsyncTimerClient
from timerclient.client.consumers import AsyncConsumer
from timerclient.client.group_calls import GroupOptions
from timerclient.rows.messages import Acking, Batch, Message
from timerclient.values.errors import LeaseLost, NotDelivered, TimerError

Ask = Callable[[], Acking[Any]]
LEASE: Final = timedelta(seconds=10)
SLOW_LEASE: Final = timedelta(seconds=3)
LATE_SHARE: Final = 0.3
DEATH_S: Final = 3.0
"""Lifetime of a dying consumer."""
LETTERS: Final = "dead-letters"
"""The group that consumes a topic of dead letters."""
REOPEN_S: Final = 0.2
"""Between the end of one subscription and the next."""
AT_ONCE_S: Final = 0.001
"""Timeout for the close of a client or subscription that has to break off."""
NACK_DELAYS_S: Final = (None, 0.0, 0.3, 2.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadReader:
    """A consumer of a topic."""

    group: str = GROUP
    lease: timedelta = LEASE
    hold_max: float | None = None
    """Seconds for which the client renews leases; None: the client's default."""
    nacks: float = 0.0
    """Share of the messages that are nacked, 0 .. 1. A tenth as many get a longer lease."""
    options: GroupOptions = field(default_factory=GroupOptions)
    """Options with which the group is created; empty: it is not created explicitly."""
    late: bool = False
    """It joins after a third of the run, and begins with the messages that are left then."""
    dead_of: str = ""
    """It consumes the dead letters of this group; empty: other messages."""
    acks_late: bool = False
    """It acks LATE_SHARE of its batches around the end of their lease, or after it."""
    dies: bool = False
    """It dies every few seconds, with leased messages and unconfirmed acks."""


ONE: Final = WorkloadReader()
LATE: Final = WorkloadReader(lease=SLOW_LEASE, acks_late=True)
BY_KEY: Final[GroupOptions] = {"type": "key_shared"}
STRICT: Final[GroupOptions] = {"max_attempts": 2}


async def is_set(event: asyncio.Event, within_s: float) -> bool:
    """Wait for an event, at most `within_s` seconds; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, within_s)):
            await event.wait()
    return event.is_set()


class RecordingConsumer:
    """Receives messages of one group, and opens a new subscription after the end of each.

    It receives each batch at once and does not wait for acks. Else the history would have a later
    time than that of the arrival.
    """

    def __init__(  # noqa: PLR0913 -- topic and event by keyword
        self, run: RunFolder, name: str, client: AsyncTimerClient, books: Books,
        reader: WorkloadReader, *, topic: str, stopping: asyncio.Event,
    ) -> None:  # fmt: skip
        """Prepare a consumer. Once `stopping` is set, all batches are acked at once."""
        self.opened = asyncio.Event()
        """Set with the first subscription."""
        self._history = History(run, name)
        self._client = client
        self._books = books
        self._topic, self._group, self._lease = topic, reader.group, reader.lease
        self._reader = reader
        self._stopping = stopping
        self._chance = random.Random(name)
        self._closed = False
        self._subscription: AsyncConsumer | None = None

    async def run(self) -> None:
        """Receive until `close`. All acks have an answer by then, or have failed."""
        with self._history:
            async with asyncio.TaskGroup() as self._acks:
                while not self._closed:
                    self._write_open()
                    with contextlib.suppress(TimerError):  # no leader, or the cluster refused it
                        await self._consume()
                    await asyncio.sleep(REOPEN_S)

    async def close(self) -> None:
        """Wait for the answers to the acks; `run` ends."""
        self._closed = True
        if self._subscription is not None:
            with contextlib.suppress(TimerError):  # each ack records its own outcome
                await self._subscription.close()

    def _write_open(self, **settings: int) -> None:
        lease_ms = round(self._lease.total_seconds() * 1000)
        settings |= {"start_ms": now_ms(), "lease_ms": lease_ms}
        self._history.open(self._topic, self._group, **settings)

    async def _write_settings(self) -> None:
        """Record the group's settings in the cluster, if they can be read."""
        with contextlib.suppress(TimerError):
            groups = (await self._client.describe_topic(self._topic)).groups
            for each in (each.settings for each in groups if each.name == self._group):
                self._write_open(
                    group_lease_ms=each.lease_ms,
                    max_attempts=each.max_attempts,
                    max_in_flight=each.max_in_flight,
                )

    async def _consume(self) -> None:
        """Subscribe, and receive until the subscription ends or this consumer dies."""
        reader, born_s = self._reader, time.monotonic()
        if reader.options:
            await self._client.create_group(self._topic, self._group, **reader.options)
        subscription = self._subscription = self._client.consumer(
            self._topic, group=self._group, lease=self._lease, hold_max=reader.hold_max
        )
        async with subscription:
            self.opened.set()
            if self._closed:
                return
            settled: asyncio.Task[None] | None = None
            async for batch in subscription.batches():
                mine, hurries = self._received(batch), self._stopping.is_set()
                settled = settled or self._acks.create_task(self._write_settings())
                if reader.dies and not hurries and time.monotonic() - born_s >= DEATH_S:
                    await subscription.close(AT_ONCE_S)
                    return
                if reader.acks_late and not hurries and self._chance.random() < LATE_SHARE:
                    self._acks.create_task(self._ack_late(batch, mine))
                else:
                    self._ack(batch, mine)

    async def _ack_late(self, batch: Batch, messages: Sequence[Message]) -> None:
        """Ack around the end of the lease, or at once when the workload stops."""
        await is_set(self._stopping, self._lease.total_seconds() * self._chance.uniform(0.8, 1.6))
        self._ack(batch, messages)

    def _received(self, batch: Batch) -> list[Message]:
        """Record and compare a batch, and nack some of it; return the messages to ack."""
        if dead_of := self._reader.dead_of:
            assert {each.headers["dead-letter-group"] for each in batch} == {dead_of}, dead_of
        of = [message.occurrence for message in batch]
        more: dict[str, Any] = {}
        if any(of):
            more["series"] = [one and one.series for one in of]
            more["occurrences"] = [one and one.number for one in of]
        marks = self._history.receive(self._topic, self._group, batch, **more)
        self._books.check_content(batch, marks)
        self._books.delivered += len(marks)
        back = self._complain(batch) if self._reader.nacks else set()
        return [message for message in batch if message.queue_offset not in back]

    def _complain(self, batch: Batch) -> set[int]:
        """Nack some messages, extend the lease of others; return the offsets of the nacked ones."""
        back: set[int] = set()
        for message in batch:
            chance, offset = self._chance.random(), message.queue_offset
            if chance < self._reader.nacks:
                delay = self._chance.choice(NACK_DELAYS_S)
                ms = {} if delay is None else {"delay_ms": round(delay * 1000)}
                nack = {offset: partial(message.nack, delay)}
                self._acks.create_task(self._ask("nack", batch, nack, **ms))
                back.add(offset)
            elif chance < self._reader.nacks * 1.1:
                lease_ms = round(self._lease.total_seconds() * 1000)
                longer = {offset: partial(message.extend, self._lease)}
                self._acks.create_task(self._ask("extend", batch, longer, lease_ms=lease_ms))
        return back

    def _ack(self, batch: Batch, messages: Sequence[Message]) -> None:
        # One ack per message: the answer to a joint ack has only the number of expired ones.
        asks = {message.queue_offset: message.ack for message in messages}
        self._acks.create_task(self._ask("ack", batch, asks))

    async def _ask(self, op: str, batch: Batch, asks: Mapping[int, Ask], **ms: int) -> None:
        """Ack, nack or extend messages, and record one line for those with the same outcome.

        `asks`: by queue offset.
        """
        start_ms = now_ms()
        answers = await asyncio.gather(*map(_answer, asks.values()))
        same: dict[tuple[OpOutcome, str], dict[int, str]] = defaultdict(dict)
        for offset, (outcome, detail, result) in zip(asks, answers, strict=True):
            same[outcome, detail][offset] = result
        for (outcome, detail), results in same.items():
            more = {"detail": detail} if detail else {"results": [*results.values()]}
            self._history.change(
                op, span_ms=(start_ms, now_ms()), outcome=outcome, topic=self._topic,
                group=self._group, offsets=[*results], epoch=batch.epoch, lease_id=batch.lease_id,
                **ms, **more,
            )  # fmt: skip


async def _answer(ask: Ask) -> tuple[OpOutcome, str, str]:
    """Ack, nack or extend one message.

    Returns:
        The outcome, the error, and the name of the API's result enum. An answer with a result has
        no error, and one without has.
    """
    try:
        return OpOutcome.OK, "", (await ask()).name
    except LeaseLost:  # also if the client knows of it and sends nothing
        return OpOutcome.OK, "", "ACK_LEASE_LOST"
    except NotDelivered:
        return OpOutcome.OK, "", "ACK_NOT_DELIVERED"
    except TimerError as error:
        return outcome_of(error), repr(error), ""
