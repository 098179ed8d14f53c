"""The client for threads; it runs the asyncio client.

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
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import grpc

from timerclient.client.aio import (
    CLOSE_AFTER_ERROR_S,
    WINDOW,
    AsyncTimerClient,
    Change,
    hold_max_s,
    make_credit,
    make_opening,
    make_row,
    register,
)
from timerclient.client.group_calls import Start
from timerclient.client.timer_calls import Seconds, TimerLike, timeout_s
from timerclient.client.topic_calls import TopicFront
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import policy_fields, rows
from timerclient.rows.background import Background, Budget, GuardedFuture, check_wait
from timerclient.rows.messages import Batch, Message
from timerclient.rows.pending_timers import (
    PAGE_SIZE,
    Changed,
    Rescheduled,
    TimerCounts,
    TimerInfo,
    Where,
)
from timerclient.rows.policy_fields import PolicyFields
from timerclient.rows.rows import DueTime, Headers, NewTimer, OnConflict, WhenMany, at_hand
from timerclient.rows.scheduled_timers import RequestOutcome, Timer, Timers
from timerclient.streams.credit import Credit
from timerclient.streams.nodes import Dial
from timerclient.streams.producer import WaitingCall
from timerclient.streams.subscription import Subscription
from timerclient.values.client_events import OnEvent, SubmitBlocked
from timerclient.values.client_settings import ClientSettings
from timerclient.values.errors import Closed, TimerError
from timerclient.values.results import CancelResult

T = TypeVar("T")


def _at_hand(when: WhenMany) -> WhenMany:
    """Return due times as lists, so that no iterator of the caller runs on the loop's thread."""
    return cast("WhenMany", {name: at_hand(values) for name, values in when.items()})


class TimerClient(TopicFront):
    """A client of a cluster, for threads. The arguments are AsyncTimerClient's."""

    def __init__(
        self,
        cluster: str | Sequence[str],
        *,
        timeout: Seconds | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        dial: Dial | None = None,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 -- frozen
        on_event: OnEvent | None = None,
    ) -> None:
        self._client = AsyncTimerClient(
            cluster,
            timeout=timeout,
            credentials=credentials,
            dial=dial,
            settings=settings,
            on_event=on_event,
        )
        events = self._client.events
        self._budget = Budget(
            settings.submitted_bytes_max, lambda used: events.tell(SubmitBlocked(used))
        )
        self._background = Background()
        self._seen, self._call = self._client, self._background.call
        self._consumers: set[Consumer] = set()

    # ---- scheduling

    def schedule(  # noqa: PLR0913 -- options, by keyword
        self,
        topic: str,
        payload: bytes,
        *,
        key: str | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | None = None,
        request_id: str | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[DueTime],
    ) -> Timer:
        """Schedule a timer; return it once a majority of the cluster has it on disk.

        The due time is one of `delay` (a timedelta, or seconds), `delay_level` (n: the topic's nth
        delay), `due` (an aware datetime) and `due_ms` (Unix milliseconds). Without any, the timer
        fires at once. Policies may change the due time: see `describe_policies`.

        A `key` is unique among the pending timers of its topic. If a pending timer has the key,
        `on_conflict` decides: "reject" raises AlreadyExists, "replace" cancels the pending timer,
        "keep" returns the pending timer and schedules nothing. If no pending timer has the key (the
        last may just have fired), these three schedule the new timer. "update" replaces a pending
        timer; if there is none, it raises NotPending.

        A `request_id` (up to 64 bytes) lets any process repeat the call. Within the cluster's
        window (limits.request_window_ms, five minutes) the same call with the same id schedules
        nothing more and returns the same timer. The client retries for four minutes. If the window
        is shorter, use a `timeout` below it.

        Raises:
            AlreadyExists: A pending timer has the key; `existing` is its id.
            NotPending: `on_conflict` is "update", and no pending timer has the key.
            InvalidRequest: An argument exceeds a limit, a datetime is naive, or a different call
                had the request id.
            OutcomeUnknown: No answer in time; the timer may have been scheduled, or may still be.
            TimerError: The call was rejected; no timer was scheduled.
        """
        if request_id is not None or self._client.is_new:
            return self._background.call(
                self._client.schedule(
                    topic,
                    payload,
                    key=key,
                    on_conflict=on_conflict,
                    headers=headers,
                    request_id=request_id,
                    timeout=timeout,
                    **when,
                )
            )
        check_wait()  # before anything is sent
        return self.submit(
            topic,
            payload,
            key=key,
            on_conflict=on_conflict,
            headers=headers,
            timeout=timeout,
            **when,
        ).result()

    def submit(
        self,
        topic: str,
        payload: bytes,
        *,
        key: str | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[DueTime],
    ) -> "Future[Timer]":
        """Return the future of `schedule` at once. Requests keep the order of submission.

        Blocks while `ClientSettings.submitted_bytes_max` bytes are unanswered.
        """
        row = make_row(topic, payload, key, headers, on_conflict, when)
        future: Future[Timer] = GuardedFuture()
        make = partial(RequestOutcome.timer, key=key) if key else RequestOutcome.timer
        call = WaitingCall(future, 1, make, self._client.within_s(timeout))
        return self._submit(future, call, row.size, lambda p: p.submit_row(row, call))

    def schedule_batch(  # noqa: PLR0913 -- options, by keyword
        self,
        topic: str,
        payloads: Iterable[bytes],
        *,
        keys: Iterable[str | None] | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | Iterable[Headers | None] | None = None,
        request_id: str | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> Timers:
        """Schedule the timers of one request, all or none; return once a majority has them on disk.

        The due time is one value for all, or one for each payload; see `schedule`. A key that a
        pending timer has concerns its own timer only: see `on_conflict` there, and
        `Timers.results`. A `request_id` is of the whole batch. A request holds up to 65,536 timers,
        of which up to 1,024 have keys.

        Raises:
            InvalidRequest: An argument exceeds a limit, or a datetime is naive.
            OutcomeUnknown: No answer in time; the timers may have been scheduled, or may still be.
            TimerError: The batch was rejected; no timer was scheduled.
        """
        if request_id is not None:
            return self._background.call(
                self._client.schedule_batch(
                    topic,
                    at_hand(payloads),
                    keys=at_hand(keys),
                    on_conflict=on_conflict,
                    headers=at_hand(headers),
                    request_id=request_id,
                    timeout=timeout,
                    **_at_hand(when),
                )
            )
        check_wait()  # before anything is sent
        return self.submit_batch(
            topic,
            payloads,
            keys=keys,
            on_conflict=on_conflict,
            headers=headers,
            timeout=timeout,
            **when,
        ).result()

    def submit_batch(
        self,
        topic: str,
        payloads: Iterable[bytes],
        *,
        keys: Iterable[str | None] | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | Iterable[Headers | None] | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> "Future[Timers]":
        """Return the future of `schedule_batch` at once. Use it to pipeline requests.

        Requests keep the order of submission. Blocks while `ClientSettings.submitted_bytes_max`
        bytes are unanswered.
        """
        body, n = rows.encode_batch(topic, payloads, when, keys, headers, on_conflict)
        future: Future[Timers] = GuardedFuture()
        call = WaitingCall(future, n, Timers, self._client.within_s(timeout))
        return self._submit(future, call, len(body), lambda p: p.submit(body, call))

    def schedule_all(
        self,
        timers: Iterable[NewTimer],
        *,
        on_conflict: OnConflict = "reject",
        request_id: str | None = None,
        timeout: Seconds | None = None,
    ) -> Timers:
        """Schedule timers of any topics in one request, all or none; return them in their order.

        One entry of the log holds all of them. A key that a pending timer has concerns its own
        timer only, as in a batch. Up to 1,024 timers have keys.

        Raises:
            InvalidRequest: An argument exceeds a limit, or there is no timer.
            OutcomeUnknown: No answer in time; all may have been scheduled, or may still be.
            TimerError: The request was rejected; no timer was scheduled.
        """
        return self._background.call(
            self._client.schedule_all(
                at_hand(timers), on_conflict=on_conflict, request_id=request_id, timeout=timeout
            )
        )

    def _submit(
        self, future: "Future[T]", call: WaitingCall, size: int, submit: Callable[[Any], None]
    ) -> "Future[T]":
        self._background.check()
        call.waited_s = self._budget.take(size, call.within_s)
        future.set_running_or_notify_cancel()
        future.add_done_callback(lambda _: self._budget.give(size))
        self._background.loop.call_soon_threadsafe(self._submit_on_loop, future, submit)
        return future

    def _submit_on_loop(self, future: "Future[Any]", submit: Callable[[Any], None]) -> None:
        try:
            producer = self._client.producer()
        except Closed as error:
            future.set_exception(error)
        else:
            submit(producer)

    # ---- cancels, reschedules, queries: see AsyncTimerClient's methods of the same names

    def cancel(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,
    ) -> CancelResult:
        """Cancel one timer, by its id, or by its key and topic; return the outcome.

        A cancel by id is retried through failovers. If the answer of an earlier attempt was lost,
        the outcome may be ALREADY_CANCELLED through the call itself. RESCHEDULED: the timer was
        rescheduled before; `get_timer(timer).replaced_by` is the id that fires. A cancel by key
        finds pending timers only. It is sent once: after a lost answer, another timer may have the
        key.

        Raises:
            NotFound: There is no such topic.
            OutcomeUnknown: No answer; the timer may be cancelled. Repeat a cancel by id; after one
                by key, call `get_timer` first.
        """
        call = self._client.cancel(timer, key=key, topic=topic, timeout=timeout)
        return self._background.call(call)

    def cancel_batch(
        self, timers: Iterable[TimerLike], *, timeout: Seconds | None = None
    ) -> list[CancelResult]:
        """Cancel many timers; return one outcome per timer, in their order; see `cancel`."""
        return self._background.call(self._client.cancel_batch(at_hand(timers), timeout=timeout))

    def cancel_keys(
        self, topic: str, keys: Iterable[str], *, timeout: Seconds | None = None
    ) -> list[CancelResult]:
        """Cancel pending timers by their keys; return one outcome per key, in their order.

        Each request has up to 256 keys and is sent once, as `cancel` by key.
        """
        call = self._client.cancel_keys(topic, at_hand(keys), timeout=timeout)
        return self._background.call(call)

    def cancel_where(
        self, topic: str, *, timeout: Seconds | None = None, **where: Unpack[Where]
    ) -> Changed:
        """Cancel the pending timers of a topic that `where` selects; return their number.

        Timers that are scheduled during the call are not cancelled. The call sends one request per
        page; `timeout` applies to each. A page is retried through failovers. The number may then
        be too low; `exact` of the result is False.

        Raises:
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; some timers may be cancelled.
        """
        return self._background.call(self._client.cancel_where(topic, timeout=timeout, **where))

    def reschedule(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[DueTime],
    ) -> Timer:
        """Change the due time of a pending timer, named by id, or by key and topic.

        Returns the new timer, which has a new id, and the key, payload and headers of the old one.
        The due time is as in `schedule`, and required. The cluster knows at least its last 65,536
        reschedules. For an old id, `get_timer` returns the new id in `replaced_by`; so does the
        error of a further reschedule. A cancel returns RESCHEDULED.

        Raises:
            NotPending: The timer fired, was cancelled, was rescheduled before (`replaced_by`), or
                is not known. It was not changed.
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; the timer may be rescheduled. Call `get_timer`, by
                its key if it has one.
        """
        call = self._client.reschedule(timer, key=key, topic=topic, timeout=timeout, **when)
        return self._background.call(call)

    def reschedule_batch(
        self,
        timers: Iterable[TimerLike],
        *,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> list[Rescheduled]:
        """Reschedule many timers; one outcome per timer; see AsyncTimerClient.reschedule_batch."""
        call = self._client.reschedule_batch(at_hand(timers), timeout=timeout, **_at_hand(when))
        return self._background.call(call)

    def reschedule_keys(
        self,
        topic: str,
        keys: Iterable[str],
        *,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> list[Rescheduled]:
        """Reschedule pending timers by their keys; one outcome per key; see `reschedule_batch`."""
        call = self._client.reschedule_keys(topic, at_hand(keys), timeout=timeout, **_at_hand(when))
        return self._background.call(call)

    def reschedule_where(
        self,
        topic: str,
        where: Where,
        *,
        timeout: Seconds | None = None,
        **when: Unpack[DueTime],
    ) -> Changed:
        """Reschedule the pending timers that `where` selects to one due time; return their number.

        Each timer is rescheduled once, even if `where` selects its new due time, too. Otherwise as
        `cancel_where`.
        """
        call = self._client.reschedule_where(topic, where, timeout=timeout, **when)
        return self._background.call(call)

    def get_timer(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,
    ) -> TimerInfo:
        """Return the state of one timer, by its id, or, if it is pending, by its key and topic.

        Raises:
            NotFound: The timer does not exist or is no longer known.
        """
        call = self._client.get_timer(timer, key=key, topic=topic, timeout=timeout)
        return self._background.call(call)

    def list_timers(
        self,
        topic: str,
        *,
        page_size: int = PAGE_SIZE,
        timeout: Seconds | None = None,
        **where: Unpack[Where],
    ) -> Iterator[TimerInfo]:
        """Iterate over the pending timers of a topic that `where` selects, in order of due time.

        Pages are read during the iteration. A timer that is pending throughout is returned once.
        """
        token = b""
        while True:
            call = self._client.list_page(
                topic, token, page_size=page_size, timeout=timeout, **where
            )
            page, token = self._background.call(call)
            yield from page
            if not token:
                return

    def count_timers(self, topic: str, *, timeout: Seconds | None = None) -> TimerCounts:
        """Return how many timers of a topic are pending, and how soon they are due."""
        return self._background.call(self._client.count_timers(topic, timeout=timeout))

    # ---- consumers

    def consumer(  # noqa: PLR0913 -- options, by keyword
        self,
        topic: str,
        group: str,
        *,
        lease: Seconds | None = None,
        hold_max: Seconds | None = None,
        start: Start = "earliest",
        window: int = WINDOW,
        max_messages: int | None = None,
        name: str = "",
    ) -> "Consumer":
        """Return a consumer of a group, once a leader has accepted it.

        A missing group is created, and a missing topic if topics are created automatically.

        Args:
            lease: Duration of a lease, a timedelta or seconds; None: the group's setting. A group
                that is created by this call has it as its setting.
            hold_max: Time after the receipt of a message in which its lease is extended; 0: leases
                are not extended; None: `ClientSettings.hold_s_max`, ten minutes.
            start: First message of a group that is created by this call.
            window: Messages in flight or waiting in the consumer, 1 to 1,000,000. Fewer, if the
                application receives single messages slowly.
            max_messages: The iteration ends after this many; no more are leased. None: no limit.
            name: Of the consumer, for people.

        Raises:
            Unreachable: No leader accepted it in time.
            TimerError: The consumer was rejected.
        """
        credit = make_credit(window, max_messages)
        opening = make_opening(topic, group, lease, start, name)
        hold_s = hold_max_s(hold_max, self._client.settings)
        consumer = Consumer(self._background, self._client, opening, credit, hold_s)
        register(consumer, self._consumers)
        return consumer

    # ---- administration: the results are messages of the contract

    def status(self, *, local: bool = False) -> pb.GetStatusResponse:
        """Return the cluster's status, as one node knows it.

        The status is that of the first node that knows a serving leader; if there is none, of the
        node with the highest epoch. `local`: the first answer, with that node's own status only.
        """
        return self._background.call(self._client.status(local=local))

    def checkpoint(self, *, local: bool = False) -> pb.GetCheckpointResponse:
        """Return the nodes' checkpoints and the shared checkpoint; the first node's answer."""
        return self._background.call(self._client.checkpoint(local=local))

    def topics(self) -> list[pb.TopicStatus]:
        """Return all topics with their groups, by name, from the leader."""
        return self._background.call(self._client.topics())

    def create_topic(self, topic: str) -> int:
        """Create a topic if it does not exist; return its id."""
        return self._background.call(self._client.create_topic(topic))

    def transfer(self, target: str = "") -> bool:
        """Transfer the leadership to the node named `target`; empty: to any other node.

        Returns True when the successor serves, and False if the target was the leader already.

        Raises:
            InvalidRequest: The target lags and did not catch up; the leader is unchanged.
        """
        return self._background.call(self._client.transfer(target))

    def members(self) -> pb.ListMembersResponse:
        """Return the voters, and the learners that answer; see AsyncTimerClient.members."""
        return self._background.call(self._client.members())

    def change_members(self, change: Change, name: str) -> pb.ListMembersResponse:
        """Make a learner a voter (`add`, `replace`), or a voter a learner (`remove`)."""
        return self._background.call(self._client.change_members(change, name))

    def describe_policies(
        self, *, namespace: str | None = None, topic: str | None = None
    ) -> pb.DescribePoliciesResponse:
        """Return the policy of the cluster, a namespace or a topic: own and effective fields.

        Raises:
            NotFound: There is no such topic.
        """
        call = self._client.describe_policies(namespace=namespace, topic=topic)
        return self._background.call(call)

    def alter_policies(
        self,
        said: PolicyFields = policy_fields.NOTHING,
        *,
        unset: Iterable[str] = (),
        namespace: str | None = None,
        topic: str | None = None,
        cluster: bool = False,
    ) -> pb.DescribePoliciesResponse:
        """Set and unset policy fields of one scope: a namespace, a topic, or the cluster.

        A field applies to timers that are scheduled later. Pauses, quotas, ttl and retention also
        apply to existing timers and messages.

        Args:
            said: Names and values of fields to set.
            unset: Names of fields to unset; they follow the wider scope again.

        Raises:
            InvalidRequest: Not exactly one scope is given, a field is unknown, or a value is out
                of range.
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; the policy may have been changed.
        """
        call = self._client.alter_policies(
            said, unset=at_hand(unset), namespace=namespace, topic=topic, cluster=cluster
        )
        return self._background.call(call)

    # ---- life

    def close(self, timeout: Seconds | None = None) -> None:
        """Wait for submitted calls, close all consumers, then close all connections.

        The future of a call without an answer in time has an error: OutcomeUnknown or Closed.

        Raises:
            OutcomeUnknown: A consumer's acks were not answered; everything is closed nonetheless.
        """
        if self._background.stopped:
            return
        # A thread that may not wait gets its error before anything is closed.
        within_s = self._client.within_s(timeout)
        self._background.check_process()
        check_wait()
        closing = [
            each._closing()  # noqa: SLF001 -- not for the consumer's user
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
        """Close the client; after an error, within two seconds."""
        if error is None:
            self.close()
            return
        with contextlib.suppress(TimerError):  # the error that ends the block matters more
            self.close(CLOSE_AFTER_ERROR_S)


class Consumer:
    """A consumer: iterates over a group's messages until it is closed; reconnects by itself."""

    def __init__(
        self,
        background: Background,
        client: AsyncTimerClient,
        opening: pb.OpenConsumer,
        credit: Credit,
        hold_max_s: float,
    ) -> None:
        self._background = background
        self._call_s = client.within_s(None)
        self._arrived = threading.Event()
        self.closed = False
        """The consumer was closed, by its user or with the client."""
        self._subscription = background.call(self._open(client, opening, credit, hold_max_s))

    async def _open(
        self,
        client: AsyncTimerClient,
        opening: pb.OpenConsumer,
        credit: Credit,
        hold_max_s: float,
    ) -> Subscription:
        subscription = Subscription(client.nodes(), opening, credit, hold_max_s, self._arrived.set)
        try:
            await subscription.opened(self._call_s)
        except BaseException:
            await subscription.abandon()
            raise
        return subscription

    @property
    def dropped_stale(self) -> int:
        """Count of messages dropped unseen as their leases had ended; the group gets them again."""
        return self._subscription.dropped_stale

    @property
    def leases_lost(self) -> int:
        """Count of messages whose leases ended while the application had them."""
        return self._subscription.leases_lost

    @property
    def _over(self) -> bool:
        """The consumer was closed, or it ended and its error, if any, was raised."""
        return self.closed or self._subscription.told

    def __iter__(self) -> Self:
        """Iterate over messages. An error that ends the consumer is raised."""
        return self

    def __next__(self) -> Message:
        """Return the next message."""
        message = self._look(self._subscription.next) or self._wait(self._subscription.next, None)
        if message is None:
            raise StopIteration
        return message

    def batches(self) -> Iterator[Batch]:
        """Iterate over batches, as the leader leased them. This is the fastest way to consume."""
        while (batch := self._wait(self._subscription.take, None)) is not None:
            yield batch

    def receive(self, max_messages: int = 1, *, timeout: Seconds | None = None) -> list[Message]:
        """Return 1 to `max_messages` messages. Empty: none arrived in time, or it was closed.

        `timeout`: a timedelta or seconds. None: wait without limit. 0: do not wait.
        """
        rows.whole("max_messages", max_messages, 1, rows.UINT64_MAX)
        within_s = None if timeout is None else timeout_s(timeout, zero=True)
        return self._wait(partial(self._subscription.receive, max_messages), within_s) or []

    def _wait(self, look: Callable[[], T | None], within_s: float | None) -> T | None:
        """Return the result of `look`. None: nothing came in time, or the consumer was closed."""
        self._background.check_process()
        deadline_s = None if within_s is None else time.monotonic() + within_s
        while True:
            # Cleared before the look: a message that arrives after the look sets it again.
            self._arrived.clear()
            found = self._look(look)
            if found:
                return found
            if self._subscription.error is not None:
                raise self._subscription.error
            if self._subscription.ended:
                return None
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            check_wait()
            if not self._arrived.wait(left_s):
                return None

    def _look(self, look: Callable[[], T | None]) -> T | None:
        """Return the result of `look`; in an in-memory cluster, after all effects of its time.

        There the loop's thread and the application's thread alternate, so that the result is the
        same in every run.
        """
        settle = self._subscription.settle
        if settle is None:
            return look()
        self._background.call(settle())
        found = look()
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
        if self.closed:
            return
        within_s = self._call_s if timeout is None else timeout_s(timeout)
        self._background.check()
        check_wait()
        self._background.call(self._closing()(within_s))

    def _closing(self) -> Callable[[float], Coroutine[Any, Any, None]]:
        """Mark as closed; return the function that closes the subscription, on the loop."""
        self.closed = True
        return self._subscription.close

    def __enter__(self) -> Self:
        """Return the consumer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait for all acks and leave the group; after an error, within two seconds."""
        if error is None:
            self.close()
            return
        with contextlib.suppress(TimerError):  # the error that ends the block matters more
            self.close(min(self._call_s, CLOSE_AFTER_ERROR_S))
