"""The client for threads; it runs the asyncio client (the part that is written by hand).

    with TimerClient("127.0.0.1:7401,127.0.0.1:7402,127.0.0.1:7403") as client:
        timer = client.schedule("orders", b"cancel 4711", delay=timedelta(minutes=30))
        with client.consumer("orders", group="billing") as consumer:
            for message in consumer:
                message.ack()

The asyncio clients of a process run together on one daemon thread.

Threads: any number of threads may use a client. One thread at a time may iterate over a consumer;
any thread may ack its messages. Futures are concurrent.futures.Future.

The callbacks of futures run on the daemon thread. They may submit. A wait for the cluster or for
another future raises RuntimeError there.

Processes: a client does not survive a fork. Make one per process, after the fork. A client that was
made before a fork raises RuntimeError in the child. If the parent has a client open at the fork,
the child can't make one, as gRPC would deliver no answers there. Close the client before the fork,
or start new processes (multiprocessing's "spawn" or "forkserver").
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from timerclient.client.aio import AsyncTimerClient, make_row
from timerclient.client.consumers import (
    CLOSE_AFTER_ERROR_S,
    AnyConsumer,
    Consumers,
    Subscribe,
    hold_max_s,
)
from timerclient.client.timer_calls import Seconds, timeout_s
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.rows.messages import Batch, Message
from timerclient.rows.rows import DueTime, Headers, OnConflict, WhenMany
from timerclient.rows.scheduled_timers import RequestOutcome, Timer, Timers
from timerclient.streams.credit import Credit
from timerclient.streams.producer import WaitingCall
from timerclient.streams.subscription import Subscription
from timerclient.threads.background import Background, Budget, GuardedFuture, check_wait
from timerclient.values.client_events import SubmitBlocked
from timerclient.values.codecs import NO_VALUE, Payload, payload_of
from timerclient.values.errors import TimerError

T = TypeVar("T")


class ThreadClient:
    """The part of TimerClient that is written by hand: submissions, consumers, its life.

    The other methods each run the method of AsyncTimerClient of the same name, on the loop's
    thread. `make fmt` writes them (tests/thread_classes.py).
    """

    def __init__(self, client: AsyncTimerClient) -> None:
        self._client = client
        self._budget = Budget(
            client.settings.submitted_bytes_max,
            lambda used: client.events.report(SubmitBlocked(used)),
        )
        self._background = Background()
        self._call = self._background.call
        self._consumers: Consumers[Consumer] = Consumers()
        if client.tracing is not None:
            client.tracing.instrument_submissions(self)

    # ---- scheduling

    def submit(  # noqa: PLR0913 -- options, by keyword
        self,
        topic: str,
        payload: Payload | None = None,
        *,
        json: Any = NO_VALUE,
        key: str | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | None = None,
        ordering_key: str | None = None,
        priority: int | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[DueTime],
    ) -> "Future[Timer]":
        """Return the future of `schedule` at once. Requests keep the order of submission.

        Blocks while `ClientSettings.submitted_bytes_max` bytes are unanswered.
        """
        payload = payload_of(payload, json)
        row = make_row(topic, payload, key, headers, on_conflict, when, ordering_key, priority)
        future: Future[Timer] = GuardedFuture()
        make = partial(RequestOutcome.timer, key=key) if key else RequestOutcome.timer
        call = WaitingCall(future, 1, make, self._client.within_s(timeout))
        return self._submit(future, call, row.size, lambda p: p.submit_row(row, call))

    def submit_batch(  # noqa: PLR0913 -- options, by keyword
        self,
        topic: str,
        payloads: Iterable[bytes],
        *,
        keys: Iterable[str | None] | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | Iterable[Headers | None] | None = None,
        ordering_keys: Iterable[str | None] | None = None,
        priorities: int | Iterable[int | None] | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> "Future[Timers]":
        """Return the future of `schedule_batch` at once. Use it to pipeline requests.

        Requests keep the order of submission. Blocks while `ClientSettings.submitted_bytes_max`
        bytes are unanswered.
        """
        named = None if keys is None else tuple(rows.texts("keys", keys))
        body, n = rows.encode_batch(
            topic, payloads, when, named, headers, on_conflict, ordering_keys, priorities
        )
        future: Future[Timers] = GuardedFuture()
        make = partial(Timers, keys=named or ())
        call = WaitingCall(future, n, make, self._client.within_s(timeout))
        return self._submit(future, call, len(body), lambda p: p.submit(body, call))

    def _submit(
        self, future: "Future[T]", call: WaitingCall, size: int, submit: Callable[[Any], None]
    ) -> "Future[T]":
        self._background.check()
        self._budget.take(size, call.within_s)
        future.set_running_or_notify_cancel()
        future.add_done_callback(lambda _: self._budget.release(size))
        self._background.loop.call_soon_threadsafe(self._submit_on_loop, future, submit)
        return future

    def _submit_on_loop(self, future: "Future[Any]", submit: Callable[[Any], None]) -> None:
        try:
            submit(self._client.producer())
        except Exception as error:  # noqa: BLE001 -- the caller raises it
            future.set_exception(error)

    # ---- parts of methods that `make fmt` writes

    def _consumer(
        self, opening: pb.OpenConsumer, credit: Credit, hold_max: Seconds | None
    ) -> "Consumer":
        client, hold_s = self._client, hold_max_s(hold_max, self._client.settings)

        def subscribe(arrived: Callable[[], None]) -> Subscription:
            return Subscription(client.nodes(), opening, credit, hold_s, arrived)

        consumer = Consumer(opening, self._background, subscribe, client.within_s(None))
        self._consumers.register(consumer)
        return consumer

    def _each(
        self, page: Callable[[bytes], Coroutine[Any, Any, tuple[list[T], bytes]]]
    ) -> Iterator[T]:
        """Yield the rows of all pages. `page` returns one, and the token of the next page."""
        token = b""
        while True:
            rows_of_page, token = self._call(page(token))
            yield from rows_of_page
            if not token:
                return

    # ---- life

    def close(self, timeout: Seconds | None = None) -> None:
        """Wait for submitted calls, close all consumers, then close all connections.

        The future of a call without an answer in time has an error: OutcomeUnknown or Closed.

        Raises:
            OutcomeUnknown: A consumer's acks were not answered; everything is closed nonetheless.
        """
        if self._background.stopped or sys.is_finalizing():  # the connections end with the process
            return
        # A thread that may not wait gets its error before anything is closed.
        within_s = self._client.within_s(timeout)
        self._background.check_process()
        check_wait()
        closing = [
            each._begin_close()  # noqa: SLF001 -- not for the consumer's user
            for each in [*self._consumers]
            if not each.closed
        ]
        try:
            self._background.call(self._client.close_with(closing, within_s))
        finally:
            self._background.stop()

    def __enter__(self) -> Self:
        """Return the client; it connects at its first call."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close the client; after an error, within two seconds. In a fork: do nothing."""
        if self._background.is_forked:
            return
        if error is None:
            self.close()
            return
        with contextlib.suppress(TimerError):  # the error that ends the block matters more
            self.close(CLOSE_AFTER_ERROR_S)

    def __repr__(self) -> str:
        return f"TimerClient({self._client._repr_text()})"  # noqa: SLF001 -- its other half


class Consumer(AnyConsumer[Subscription]):
    """A consumer: iterates over a group's messages until it is closed; reconnects by itself."""

    def __init__(
        self,
        opening: pb.OpenConsumer,
        background: Background,
        subscribe: Subscribe,
        call_s: float,
    ) -> None:
        self._background = background
        self._call_s = call_s
        self._arrival = threading.Event()
        super().__init__(opening, background.call(self._open(subscribe)))

    async def _open(self, subscribe: Subscribe) -> Subscription:
        subscription = subscribe(self._arrival.set)
        try:
            await subscription.wait_until_open(self._call_s)
        except BaseException:
            await subscription.abandon()
            raise
        return subscription

    def __iter__(self) -> Self:
        """Iterate over messages. An error that ends the consumer is raised."""
        return self

    def __next__(self) -> Message:
        """Return the next message."""
        message = self._receive_settled(self._subscription.next) or self._wait(
            self._subscription.next, None
        )
        if message is None:
            raise StopIteration
        return message

    def batches(self) -> Iterator[Batch]:
        """Iterate over batches, as the leader leased them. This is the fastest way to consume."""
        while (batch := self._wait(self._subscription.take_batch, None)) is not None:
            yield batch

    def receive(self, max_messages: int = 1, *, timeout: Seconds | None = None) -> list[Message]:
        """Return 1 to `max_messages` messages.

        Empty: none arrived in time, it was closed meanwhile, or its own `max_messages` have come.
        `timeout`: a timedelta or seconds. None: wait without limit. 0: do not wait.

        Raises:
            Closed: It was closed before.
        """
        most = self._check_max_messages(max_messages)
        within_s = None if timeout is None else timeout_s(timeout, zero=True)
        return self._wait(partial(self._subscription.receive, most), within_s) or []

    def _wait(self, try_receive: Callable[[], T | None], within_s: float | None) -> T | None:
        """Return what `try_receive` returns. None: nothing came in time, or it was closed."""
        self._background.check_process()
        deadline_s = None if within_s is None else time.monotonic() + within_s
        while True:
            # Cleared before the look: a message that arrives after the look sets it again.
            self._arrival.clear()
            found = self._receive_settled(try_receive)
            if found:
                return found
            if self._subscription.error is not None:
                raise self._subscription.error
            if self._subscription.has_ended:
                return None
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            check_wait()
            if not self._arrival.wait(left_s):
                return None

    def _receive_settled(self, try_receive: Callable[[], T | None]) -> T | None:
        """Return the result of `try_receive`; in an in-memory cluster, when all is settled.

        There the loop's thread and the application's thread alternate, so that the result is the
        same in every run.
        """
        settle = self._subscription.settle
        if settle is None:
            return try_receive()
        self._background.call(settle())
        found = try_receive()
        self._background.call(settle())
        if not found:  # the look asked for messages, and by now they have come
            found = try_receive()
            self._background.call(settle())
        return found

    def flush(self, timeout: Seconds | None = None) -> None:
        """Wait until all acks made so far are answered.

        Raises:
            OutcomeUnknown: Some were not answered in time. They are still retried.
        """
        within_s = self._call_s if timeout is None else timeout_s(timeout)
        self._background.call(self._subscription.flush(within_s))

    def close(self, timeout: Seconds | None = None) -> None:
        """Wait for all acks, then leave the group; see AsyncConsumer.close.

        Raises:
            OutcomeUnknown: Some acks were not answered in time, or failed because the consumer had
                ended with an error. Their futures have the errors.
        """
        if self.closed or sys.is_finalizing():
            return
        within_s = self._call_s if timeout is None else timeout_s(timeout)
        self._background.check()
        check_wait()
        self._background.call(self._begin_close()(within_s))

    def _begin_close(self) -> Callable[[float], Coroutine[Any, Any, None]]:
        """Mark as closed; return the function that closes the subscription, on the loop."""
        self.closed = True
        return self._subscription.close

    def __enter__(self) -> Self:
        """Return the consumer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait for all acks and leave the group; as `TimerClient.__exit__`."""
        if self._background.is_forked:
            return
        if error is None:
            self.close()
            return
        with contextlib.suppress(TimerError):  # the error that ends the block matters more
            self.close(min(self._call_s, CLOSE_AFTER_ERROR_S))
