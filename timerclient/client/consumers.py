"""Consumers: the one for asyncio, and the part that is the same for threads."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from timerclient.client.group_calls import STARTS, Start
from timerclient.client.timer_calls import Seconds, timeout_s
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.rows.messages import Batch, Message
from timerclient.streams.credit import Credit
from timerclient.streams.subscription import Subscription
from timerclient.values.client_settings import ClientSettings
from timerclient.values.errors import Closed, TimerError

T = TypeVar("T")
S = TypeVar("S", bound=Subscription | None)
C = TypeVar("C", bound="AnyConsumer[Any]")
Subscribe = Callable[[Callable[[], None]], Subscription]
"""Makes a subscription, on the event loop. Its argument is called when a batch arrives."""

WINDOW = 1_000
"""Default of a consumer's `window`."""
BLOCKED_S = 0.01
"""Seconds between two receives after which the consumer first yields to the event loop, which the
application may have blocked, and with it the extension of leases."""
TURNS = 5
"""Turns of the event loop that the consumer then yields. A request is sent after four."""
TURNS_IN_MEMORY = 20
"""Turns within which a fake cluster delivers messages that it has. Other tasks never end them."""
WINDOW_MAX = 1_000_000
"""Highest `window` of a consumer; the leader's limit."""
CLOSE_AFTER_ERROR_S = 2.0
"""Seconds for the end of a `with` block that an error ends."""
CLOSE_CANCELLED_S = 0.1
"""Seconds for the end of a close that is cancelled."""


def make_opening(
    topic: str, group: str, lease: Seconds | None, start: Start, name: str
) -> pb.OpenConsumer:
    """Return the first request of a consumer.

    Raises:
        InvalidRequest: `start` is neither "earliest" nor "latest", the lease is not positive or
            too long, or a name is not a string.
    """
    return pb.OpenConsumer(
        topic=rows.text("topic", topic),
        group=rows.text("group", group),
        lease_ms=0 if lease is None else rows.lease_ms(lease),
        start=rows.choice("start", start, STARTS),
        consumer=rows.text("name", name),
    )


def make_credit(window: int, max_messages: int | None) -> Credit:
    """Return the credit of a consumer.

    Raises:
        InvalidRequest: A number is not positive, or the window exceeds WINDOW_MAX.
    """
    if max_messages is not None:
        rows.whole_number("max_messages", max_messages, 1, rows.UINT64_MAX)
    return Credit(rows.whole_number("window", window, 1, WINDOW_MAX), max_messages)


def hold_max_s(hold_max: Seconds | None, settings: ClientSettings) -> float:
    """Return the seconds for which a consumer extends leases.

    Raises:
        InvalidRequest: `hold_max` is negative or not a duration.
    """
    if hold_max is None:
        return settings.hold_s_max
    return rows.span_ms("hold_max", hold_max) / 1000


class AnyConsumer(Generic[S]):
    """The part that is the same for asyncio and for threads."""

    def __init__(self, opening: pb.OpenConsumer, subscription: S) -> None:
        self._opening = opening
        self._subscription = subscription
        self.closed = False
        """The consumer was closed, by its user or with the client."""

    @property
    def dropped_stale(self) -> int:
        """Count of messages dropped unseen as their leases had ended; the group gets them again."""
        return 0 if self._subscription is None else self._subscription.dropped_stale

    @property
    def leases_lost(self) -> int:
        """Count of messages whose leases ended while the application had them."""
        return 0 if self._subscription is None else self._subscription.leases_lost

    def __repr__(self) -> str:
        of = self._opening
        name = f", name={of.consumer!r}" if of.consumer else ""
        closed = ", closed" if self.closed else ""
        return f"{type(self).__name__}({of.topic!r}, group={of.group!r}{name}{closed})"

    def _check_max_messages(self, max_messages: int) -> int:
        """Return the checked argument of `receive`.

        Raises:
            Closed: The consumer is closed.
        """
        if self.closed:
            raise Closed("the consumer is closed")
        return rows.whole_number("max_messages", max_messages, 1, rows.UINT64_MAX)

    @property
    def _is_over(self) -> bool:
        """The consumer was closed, or it ended and its error, if any, was raised."""
        ended = self._subscription
        return self.closed or (ended is not None and ended.is_settled)


class Consumers(set[C]):
    """A client's consumers: all open ones, and at most about as many that are over."""

    SWEEP_AT: Final = 16
    """Fewer are never looked through."""

    def __init__(self) -> None:
        super().__init__()
        self._sweep_at = self.SWEEP_AT

    def register(self, consumer: C) -> None:
        """Add a consumer. If there are twice as many as before, remove those that are over.

        Another thread may add a consumer at the same time; none is lost.
        """
        self.add(consumer)
        if len(self) >= self._sweep_at:
            for each in [*self]:
                if each._is_over:  # noqa: SLF001 -- not for the consumer's user
                    self.discard(each)
            self._sweep_at = max(self.SWEEP_AT, 2 * len(self))


class AsyncConsumer(AnyConsumer[Subscription | None]):
    """A consumer: iterates over a group's messages until it is closed; reconnects by itself."""

    def __init__(self, opening: pb.OpenConsumer, subscribe: Subscribe, call_s: float) -> None:
        super().__init__(opening, None)
        self._subscribe = subscribe
        self._call_s = call_s
        self._received_s = 0.0
        """When the application last received messages, on the monotonic clock."""
        self._arrival = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Return the consumer, once a leader has accepted it.

        Raises:
            Unreachable: No leader accepted it in time.
            TimerError: The consumer was rejected.
        """
        try:
            await self._open().wait_until_open(self._call_s)
        except BaseException:
            if self._subscription is not None:
                await self._subscription.abandon()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait for all acks and leave the group; after an error, within two seconds."""
        if error is None:
            await self.close()
        else:
            await self._leave(min(self._call_s, CLOSE_AFTER_ERROR_S))

    def __aiter__(self) -> Self:
        """Iterate over messages. An error that ends the consumer is raised."""
        return self

    async def __anext__(self) -> Message:
        """Return the next message."""
        message = await self._wait(self._open().next, None)
        if message is None:
            raise StopAsyncIteration
        return message

    async def batches(self) -> AsyncIterator[Batch]:
        """Iterate over batches, as the leader leased them. This is the fastest way to consume."""
        while (batch := await self._wait(self._open().take_batch, None)) is not None:
            yield batch

    async def receive(
        self, max_messages: int = 1, *, timeout: Seconds | None = None
    ) -> list[Message]:
        """Return 1 to `max_messages` messages.

        Empty: none arrived in time, it was closed meanwhile, or its own `max_messages` have come.
        `timeout`: a timedelta or seconds. None: wait without limit. 0: do not wait.

        Raises:
            Closed: It was closed before.
        """
        most = self._check_max_messages(max_messages)
        within_s = None if timeout is None else timeout_s(timeout, zero=True)
        subscription = self._open()
        return await self._wait(partial(subscription.receive, most), within_s) or []

    async def _wait(self, try_receive: Callable[[], T | None], within_s: float | None) -> T | None:
        """Return what `try_receive` returns. None: nothing came in time, or it was closed."""
        subscription = self._open()
        if time.monotonic() - self._received_s > BLOCKED_S:
            for _ in range(TURNS):
                await asyncio.sleep(0)
        found = try_receive()
        if within_s == 0 and subscription.settle is not None:
            # An in-memory cluster: what the look asked for comes within some turns.
            for _ in range(TURNS_IN_MEMORY):
                if found:
                    break
                await asyncio.sleep(0)
                found = try_receive()
        if not found:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    while not (found := try_receive()):
                        if subscription.error is not None:
                            raise subscription.error
                        if subscription.has_ended:
                            break
                        self._arrival.clear()
                        await self._arrival.wait()
        self._received_s = time.monotonic()
        return found

    async def flush(self, timeout: Seconds | None = None) -> None:
        """Wait until all acks made so far are answered.

        Raises:
            OutcomeUnknown: Some were not answered in time. They are still retried.
        """
        within_s = self._call_s if timeout is None else timeout_s(timeout)
        await self._open().flush(within_s)

    async def close(self, timeout: Seconds | None = None) -> None:
        """Wait for all acks, then leave the group. Its messages are delivered to others at once.

        This counts as a failure of messages that the application received and did not ack. It is
        no failure of messages that were fetched ahead.

        Raises:
            OutcomeUnknown: Some acks were not answered in time, or failed because the consumer had
                ended with an error. Their futures have the errors.
        """
        within_s = self._call_s if timeout is None else timeout_s(timeout)
        self.closed = True
        if self._subscription is not None:
            await self._subscription.close(within_s)

    def require_group(self) -> None:
        """Raise NotFound at the opening if the group does not exist, instead of creating it.

        For the worker, which calls it before it opens the consumer.
        """
        self._opening.existing = True

    def begin_leaving(self) -> None:
        """Return messages that were fetched ahead, and fetch no more; acks work until `close`.

        For the worker, which receives nothing afterwards: a call of `receive` would not return.
        """
        if self._subscription is not None:
            self._subscription.begin_leaving()

    def take_turns(self, at_work: Iterable[Message] = ()) -> None:
        """Return a message of an ordering key only after `end_turn` of the one before.

        For the worker, which opens the consumer before. Without a keyed order, it has no effect.
        `at_work`: messages of a former consumer on which the application still works.
        """
        self._open().take_turns(at_work)

    def end_turn(self, message: Message) -> None:
        """See `take_turns`; does nothing for a message without a turn."""
        if self._subscription is not None:
            self._subscription.end_turn(message)

    @property
    def is_ordered_as_a_whole(self) -> bool:
        """The group's type is `exclusive` or `failover`, or an old leader does not tell."""
        return self._subscription is not None and self._subscription.is_ordered_as_a_whole

    async def _leave(self, within_s: float) -> None:
        with contextlib.suppress(TimerError):  # the error that ends the block matters more
            await self.close(within_s)

    def _open(self) -> Subscription:
        if self._subscription is None:
            if self.closed:
                raise Closed("the consumer is closed")
            self._subscription = self._subscribe(self._arrival.set)
        return self._subscription
