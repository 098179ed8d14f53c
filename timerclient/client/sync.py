"""The client for threads: a thin front of the asyncio client.

    with TimerClient("127.0.0.1:7401,127.0.0.1:7402,127.0.0.1:7403") as client:
        timer = client.schedule("orders", b"cancel 4711", delay=timedelta(minutes=30))
        with client.consumer("orders", group="billing") as consumer:
            for message in consumer:
                message.ack()

The asyncio clients of a process run together on one daemon thread.

Threads: a client may be used from any number of threads. A consumer is iterated by one thread at a
time; its messages may be acked from any. Futures are concurrent.futures.Future.

A future's callbacks run on that thread: they may submit, and what would wait there, for the cluster
or for another future, is refused.

Processes: neither a client nor its connections survive a fork. Make one per process, after the
fork; a client that was made before one refuses to be used. While a process has a client open, those
that it forks can't have any: gRPC would bring them no answer. Close it before, or let them begin
anew (multiprocessing's "spawn" or "forkserver").
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
    """Return due times that the loop's thread need not ask anybody for."""
    return cast("WhenMany", {name: at_hand(values) for name, values in when.items()})


class TimerClient(TopicFront):
    """A connection to a cluster, for threads. The arguments are AsyncTimerClient's."""

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
        """Return the timer, once a majority of the cluster has it on disk.

        When it fires: `delay` (a timedelta, or seconds), `delay_level` (the nth of the topic's
        delays), `due` (an aware datetime) or `due_ms` (Unix milliseconds); none is at once.
        Policies may have the last word: see `describe_policies`.

        A `key` is unique among the pending timers of its topic. If one has it, `on_conflict` says:
        "reject" this one, "replace" it, which cancels it, or "keep" it and return it. With none
        pending, as when it has just fired, each of these schedules this one. "update" replaces a
        pending timer, and schedules nothing if there is none.

        A `request_id` (up to 64 bytes) makes the call one that may be made again, by whatever
        process: within the cluster's window (limits.request_window_ms, five minutes) the same call
        under the same id schedules nothing more and returns the same timer. The call sends it again
        itself, for four minutes: where the window is shorter, keep `timeout` below it.

        Raises:
            AlreadyExists: a pending timer has the key; `existing` is its id.
            NotPending: on_conflict is "update", and no pending timer has the key.
            InvalidRequest: an argument breaks a limit; a naive datetime, for one. Or the request
                id was another call's.
            OutcomeUnknown: no answer in time; the timer may have been scheduled, or be yet.
            TimerError: it was refused, and not scheduled.
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
        check_wait()  # before anything is on its way
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
        """Return the future of `schedule` at once; requests keep the order of submission.

        Blocks while too many bytes are unanswered.
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
        """Return the timers of one request, all or none, once a majority has them on disk.

        When they fire is one value for all, or one for each payload; see `schedule`. Timers whose
        keys are taken are decided one by one: see its `on_conflict`, and `Timers.results`. A
        `request_id` names the whole batch. A request holds up to 65,536 timers, of which up to
        1,024 have keys.

        Raises:
            InvalidRequest: an argument breaks a limit; a naive datetime, for one.
            OutcomeUnknown: no answer in time; the timers may have been scheduled, or be yet.
            TimerError: the batch was refused, and none of it scheduled.
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
        check_wait()  # before anything is on its way
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
        """Return the future of `schedule_batch` at once: this is how to pipeline.

        Requests keep the order of submission. Blocks while too many bytes are unanswered.
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
        """Return the timers of one request, of whatever topics, in their order: all or none.

        One entry of the log holds them all. Those whose keys are taken are decided one by one, as
        in a batch. Up to 1,024 have keys.

        Raises:
            InvalidRequest: an argument breaks a limit; there is no timer, for one.
            OutcomeUnknown: no answer in time; all may have been scheduled, or be yet.
            TimerError: they were refused, and none was scheduled.
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

    # ---- cancelling, rescheduling, looking in: see AsyncTimerClient's methods of the same names

    def cancel(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,
    ) -> CancelResult:
        """Return what became of the cancel of one timer: by its id, or by its key and topic.

        By id it is sent again through failovers; if a first answer was lost, the next may be
        ALREADY_CANCELLED of its own work. RESCHEDULED: it was rescheduled before, and fires under
        another id, `get_timer(timer).replaced_by`. By key only a pending timer is found, and it is
        sent once: when the answer is lost the key may be another timer's by now.

        Raises:
            NotFound: there is no such topic.
            OutcomeUnknown: no answer; it may have been cancelled. By id ask again, by key look.
        """
        call = self._client.cancel(timer, key=key, topic=topic, timeout=timeout)
        return self._background.call(call)

    def cancel_batch(
        self, timers: Iterable[TimerLike], *, timeout: Seconds | None = None
    ) -> list[CancelResult]:
        """Return what became of the cancels of many timers, one each; as `cancel` otherwise."""
        return self._background.call(self._client.cancel_batch(at_hand(timers), timeout=timeout))

    def cancel_keys(
        self, topic: str, keys: Iterable[str], *, timeout: Seconds | None = None
    ) -> list[CancelResult]:
        """Return what became of the cancels of the timers that have the keys, one each.

        Up to 256 are cancelled together. Sent once, as `cancel` by key.
        """
        call = self._client.cancel_keys(topic, at_hand(keys), timeout=timeout)
        return self._background.call(call)

    def cancel_where(
        self, topic: str, *, timeout: Seconds | None = None, **where: Unpack[Where]
    ) -> Changed:
        """Cancel the pending timers of a topic that `where` picks; return how many these were.

        Timers scheduled while it runs are left alone. `timeout` is of each of its pages, which
        are sent again through failovers: then the count may be too low, and says so.

        Raises:
            NotFound: there is no such topic.
            OutcomeUnknown: no answer in time; some may have been cancelled.
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
        """Return the timer that fires instead of a pending one, named by id, or by key and topic.

        It has a new id, and the old one's key, payload and headers. When: as `schedule`, but it has
        to be said. The old id stays known: `get_timer` of it returns the new one in `replaced_by`,
        as does the error of another reschedule; a cancel returns RESCHEDULED. The cluster knows its
        last 65,536 reschedules at least.

        Raises:
            NotPending: the timer fired, was cancelled, was rescheduled before (`replaced_by`), or
                is not known; nothing was changed.
            NotFound: there is no such topic.
            OutcomeUnknown: no answer in time; it may have been rescheduled. Look by key.
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
        """Return what became of each reschedule; as `reschedule`, but none raises NotPending."""
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
        """Return what became of the reschedule of each timer that has a key; see the batch's."""
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
        """Give the pending timers that `where` picks one new due time; return how many these were.

        Each once, wherever its new time is; otherwise as `cancel_where`.
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
        """Return what is known of one timer: by its id, or, while it is pending, by key and topic.

        Raises:
            NotFound: there is none, or no more.
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
        """Iterate over the pending timers of a topic that `where` picks, as they fire.

        It reads page by page as it goes: a timer that is there all the while is seen once.
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

    # ---- consuming

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
        """Return a consumer of a group, once a leader has opened it.

        `lease`: how long a message is this consumer's before others may get it; None: the group's
        default. The consumer renews it, at most for `hold_max` (a timedelta, or seconds; 0: not at
        all; None: `ClientSettings.hold_s_max`, ten minutes) after the application got the message.
        `start`: where the group begins if this creates it; it then keeps `lease` as its default,
        too. `window`: how many messages may be on their way or waiting here; fewer, if the
        application takes them one by one and is slow. `max_messages`: iteration ends after so
        many; no more are leased. `name` is for people.

        Raises:
            Unreachable: no leader opened it in time.
            TimerError: it was refused.
        """
        credit = make_credit(window, max_messages)
        opening = make_opening(topic, group, lease, start, name)
        hold_s = hold_max_s(hold_max, self._client.settings)
        consumer = Consumer(self._background, self._client, opening, credit, hold_s)
        register(consumer, self._consumers)
        return consumer

    # ---- administration: the answers are messages of the contract

    def status(self, *, local: bool = False) -> pb.GetStatusResponse:
        """Return the status of the cluster as one node sees it.

        It is the first one that sees a leader serve. If none does, it is one of the highest epoch:
        nodes that wait, heal or are cut off know less. `local`: of the first node that answers.
        """
        return self._background.call(self._client.status(local=local))

    def checkpoint(self, *, local: bool = False) -> pb.GetCheckpointResponse:
        """Return the nodes' checkpoints and the shared one, from the first node that answers."""
        return self._background.call(self._client.checkpoint(local=local))

    def topics(self) -> list[pb.TopicStatus]:
        """Return all topics with their groups, as the leader has them."""
        return self._background.call(self._client.topics())

    def create_topic(self, topic: str) -> int:
        """Return the id of a topic that exists from now on."""
        return self._background.call(self._client.create_topic(topic))

    def transfer(self, target: str = "") -> bool:
        """Hand the leadership over to the node named `target`; empty: to any other.

        Returns when the successor serves. False: the target leads already, and nothing changed.

        Raises:
            InvalidRequest: the target lags, and did not catch up; the leader stays.
        """
        return self._background.call(self._client.transfer(target))

    def members(self) -> pb.ListMembersResponse:
        """Return the voters and the learners that answer."""
        return self._background.call(self._client.members())

    def change_members(self, change: Change, name: str) -> pb.ListMembersResponse:
        """Let a learner become a voter (`add`, `replace`) or a voter a learner (`remove`)."""
        return self._background.call(self._client.change_members(change, name))

    def describe_policies(
        self, *, namespace: str | None = None, topic: str | None = None
    ) -> pb.DescribePoliciesResponse:
        """Return what the cluster, a namespace or a topic says of timers, and what holds for it.

        Raises:
            NotFound: there is no such topic.
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
        """Set policy fields of one scope, and unset others, by name.

        A field holds for timers that are scheduled from then on. Pauses, quotas, ttl and retention
        hold for those that exist, too.

        Args:
            said: fields to set, and their values.
            unset: fields to leave to the wider scope again.
            namespace: the scope is this namespace; or
            topic: the scope is this topic; or
            cluster: True: the scope is the whole cluster.

        Raises:
            InvalidRequest: not exactly one scope is given, a field is unknown, or its value is out
                of range.
            NotFound: there is no such topic.
            OutcomeUnknown: no answer in time; it may have been changed.
        """
        call = self._client.alter_policies(
            said, unset=at_hand(unset), namespace=namespace, topic=topic, cluster=cluster
        )
        return self._background.call(call)

    # ---- life

    def close(self, timeout: Seconds | None = None) -> None:
        """Wait for what was submitted, close all consumers, then all connections.

        What is not answered in time is given up: its future says whether it may have happened.

        Raises:
            OutcomeUnknown: of some consumer's acks; all is closed nonetheless.
        """
        if self._background.stopped:
            return
        # Whoever may not close it is told so before anything is closed.
        within_s = self._client.within_s(timeout)
        self._background.check_process()
        check_wait()
        closing = [
            each._closing()  # noqa: SLF001 -- no business of who has the consumer
            for each in [*self._consumers]
            if not each.closed
        ]
        try:
            self._background.call(self._client.close_with(closing, within_s))
        finally:
            self._background.stop()

    def __enter__(self) -> Self:
        """Return the client; it connects with its first call."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close; after an error don't wait long for what is unanswered."""
        if error is None:
            self.close()
            return
        with contextlib.suppress(TimerError):  # the error that ends the block matters more
            self.close(CLOSE_AFTER_ERROR_S)


class Consumer:
    """Iterates over the messages of a group until it is closed; reconnects through failovers."""

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
        """It was closed, by its user or with the client."""
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
        """Messages dropped unseen, as their leases were over: their group gets them again."""
        return self._subscription.dropped_stale

    @property
    def leases_lost(self) -> int:
        """Messages that the application had, and that were not this consumer's any more."""
        return self._subscription.leases_lost

    @property
    def _over(self) -> bool:
        """It was closed, or ended by itself, and has nothing to tell."""
        return self.closed or self._subscription.told

    def __iter__(self) -> Self:
        """Iterate over messages; an error that ends the consumer is raised."""
        return self

    def __next__(self) -> Message:
        """Return the next message."""
        message = self._look(self._subscription.next) or self._wait(self._subscription.next, None)
        if message is None:
            raise StopIteration
        return message

    def batches(self) -> Iterator[Batch]:
        """Iterate over batches as the leader leased them: the fastest way."""
        while (batch := self._wait(self._subscription.take, None)) is not None:
            yield batch

    def receive(self, max_messages: int = 1, *, timeout: Seconds | None = None) -> list[Message]:
        """Return 1 to `max_messages` messages; none if none comes in time, or it was closed.

        `timeout`: None waits for ever, 0 not at all.
        """
        rows.whole("max_messages", max_messages, 1, rows.UINT64_MAX)
        within_s = None if timeout is None else timeout_s(timeout, zero=True)
        return self._wait(partial(self._subscription.receive, max_messages), within_s) or []

    def _wait(self, look: Callable[[], T | None], within_s: float | None) -> T | None:
        """Return what `look` finds. None: nothing came in time, or the consumer was closed."""
        self._background.check_process()
        deadline_s = None if within_s is None else time.monotonic() + within_s
        while True:
            # Cleared before looking: what arrives after the look sets it again.
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
        """Return what `look` finds; in a cluster in memory, when nothing happens any more.

        There the loop's thread and the application's take turns, so what is found is the same in
        every run.
        """
        settle = self._subscription.settle
        if settle is None:
            return look()
        self._background.call(settle())
        found = look()
        self._background.call(settle())
        return found

    def flush(self, timeout: Seconds | None = None) -> None:
        """Wait until every ack that was made by now is answered.

        Raises:
            OutcomeUnknown: some are not, in time. They are still sent again.
        """
        within_s = self._call_s if timeout is None else timeout_s(timeout)
        self._background.call(self._subscription.flush(within_s))

    def close(self, timeout: Seconds | None = None) -> None:
        """Confirm all acks, then leave the group: see AsyncConsumer.close.

        Raises:
            OutcomeUnknown: some acks were not answered in time, or failed as it ended by an error;
                their futures say which.
        """
        if self.closed:
            return
        within_s = self._call_s if timeout is None else timeout_s(timeout)
        self._background.check()
        check_wait()
        self._background.call(self._closing()(within_s))

    def _closing(self) -> Callable[[float], Coroutine[Any, Any, None]]:
        """Count as closed; return what is left to do, on the loop, within so many seconds."""
        self.closed = True
        return self._subscription.close

    def __enter__(self) -> Self:
        """Return the consumer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Confirm all acks and leave the group; after an error don't wait long for that."""
        if error is None:
            self.close()
            return
        with contextlib.suppress(TimerError):  # the error that ends the block matters more
            self.close(min(self._call_s, CLOSE_AFTER_ERROR_S))
