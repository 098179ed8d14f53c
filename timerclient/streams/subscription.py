"""The shell of one consumer: its stream to the leader, its credit, leases and acks.

    leader ──Deliveries──► inbox ──take──► application
       ▲                     │                  │
       ├──── credit ◄────────┘                  │ ack, nack, extend
       └──── requests ◄──── pipeline ◄──────────┘

- **Credit**: at most `window` messages are granted or wait here. Credit for messages that the
  application took is granted again, half a window at a time. If the application takes single
  messages, only as many wait as it can finish within half a lease at its present pace. The others
  are returned unseen (timerclient/streams/unseen_returns.py).
- **Link**: the leader learns how many bytes may be on their way, and how many deliveries have come.
- **Leases** are extended in time (timerclient/streams/lease_keeper.py). A message that waited
  beyond the end of its lease is dropped.
- **Acks** outlive their stream (timerclient/streams/ack_pipeline.py).
- **Epochs**: messages of an older epoch than one seen by this client are dropped and counted. A
  deposed leader delivered them, and the new leader delivers them again.
- **Order**: in an ordered group, a message that returns recalls the later ones of its key. The
  application receives none of these before it: they wait in the inbox until a nack is answered.
- **Streams**: when a stream breaks, the leader ends its leases. Its messages that the application
  has not received are dropped and counted. The group receives them again, in order.
- **Leaving**: the consumer requests no more messages, and returns those that the application has
  not received, without a failure. The leader confirms this after its last delivery.

Any thread may use the inbox and put acks into the pipeline. The rest belongs to the event loop's
thread.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import UNSEEN, AckAction, Acking, AnyAcking, Batch, Message
from timerclient.streams.ack_pipeline import AckPipeline
from timerclient.streams.acks import QueuedAck
from timerclient.streams.consumer_phase import WITHOUT_STREAM, ConsumerPhase, next_phase
from timerclient.streams.credit import Credit, LinkWindow
from timerclient.streams.inbox import Inbox, Part
from timerclient.streams.key_lines import GroupOrder, order_of
from timerclient.streams.lease_keeper import LeaseKeeper
from timerclient.streams.node_channel import NodeChannel
from timerclient.streams.nodes import (
    Nodes,
    RetryPauses,
    cancel_and_wait,
    closing_call,
    converting_errors,
    first_to_end,
    timeout_error,
    write,
)
from timerclient.streams.unseen_returns import UnseenReturns
from timerclient.threads.background import check_process
from timerclient.values import errors
from timerclient.values.client_events import LeasesLost
from timerclient.values.errors import (
    Closed,
    ConnectionLost,
    GroupHeld,
    LeaseLost,
    NotFound,
    NotReady,
    OutcomeUnknown,
    TimerError,
)
from timerclient.values.wire_errors import from_wire

ROW_BYTES: Final = 64
"""Bytes of a message beside its payload, key and headers, as the leader counts them."""
LEAVE_S: Final = 1.0
"""Seconds in which a consumer that closes returns the messages that it has fetched ahead."""
LEAVE_S_MIN: Final = 0.1
"""The least of it, even if acks took all the time. Unreturned messages would have failed."""


class Wakeup:
    """Runs a function on an event loop soon, once for many calls from any threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, run: Callable[[], None]) -> None:
        self._loop = loop
        self._run = run
        self._called = False

    def __call__(self) -> None:
        """Run the function soon."""
        if not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._on_loop)
            except RuntimeError:  # the loop is closed, and the caller's object with it
                self._called = False

    def _on_loop(self) -> None:
        self._called = False
        self._run()


class Subscription:
    """One consumer of one group, through failovers, until it is closed."""

    def __init__(
        self,
        nodes: Nodes,
        opening: pb.OpenConsumer,
        credit: Credit,
        hold_max_s: float,
        on_arrival: Callable[[], None],
    ) -> None:
        self.leases_lost = 0
        """Count of messages whose leases ended while the application had them."""
        self.error: TimerError | None = None
        """The error that ended the subscription. None: no error did."""
        self._nodes = nodes
        self._opening = opening
        self._on_arrival = on_arrival
        self._loop = nodes.loop()
        self._wake = Wakeup(self._loop, self._on_wake)
        credit.bytes_max = nodes.settings.window_bytes_max
        self._inbox = Inbox(credit, lambda: nodes.epoch, nodes.clock.now_s, self._wake)
        self._link = LinkWindow(nodes.clock.now_s())
        self._returns = UnseenReturns(self._inbox, self._send_own, on_arrival)
        self._leases = LeaseKeeper(
            nodes.clock,
            self._inbox,
            self._returns,
            hold_max_s=hold_max_s,
            send_own=self._send_own,
            on_lost=self._on_leases_lost,
            on_arrival=on_arrival,
        )
        settings = nodes.settings
        self._acks = AckPipeline(
            settings.ack_offsets_max, settings.ack_requests_max, self._leases.settle
        )
        self._phase = ConsumerPhase.OPENING
        self._has_stream = False
        self._to_send = asyncio.Event()
        """Set: the sender looks for something to send."""
        self._progress = asyncio.Event()
        """Set: the phase changed, or a request is settled."""
        self._last_answer_s = 0.0
        self._pauses = RetryPauses(settings, nodes.rng)
        self._task: asyncio.Task[None] | None = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._on_task_end)

    # ---- for any thread of the process that made it. In a forked process these raise
    # RuntimeError before they wait for a lock that was held at the fork.

    def next(self) -> Message | None:
        """Return the next message. None: none waits."""
        check_process(self._nodes.pid)
        return self._inbox.next()

    def receive(self, max_messages: int) -> list[Message]:
        """Return up to `max_messages` messages of one batch. Empty: none waits."""
        check_process(self._nodes.pid)
        return self._inbox.receive(max_messages)

    def take_batch(self) -> Batch | None:
        """Return the next batch. None: none waits."""
        check_process(self._nodes.pid)
        return self._inbox.take_batch()

    @property
    def dropped_stale(self) -> int:
        """Count of messages dropped unseen, because their leases had ended."""
        return self._inbox.dropped_count

    def ack(
        self, batch: Batch, offsets: Sequence[int], acking: AnyAcking, action: AckAction
    ) -> None:
        """Send an ack, nack or extension soon; `acking` receives the answer.

        Raises:
            LeaseLost: The leader has already reported that the leases have ended.
        """
        check_process(self._nodes.pid)
        hold = batch.hold
        if hold.lost_offsets and hold.lost_offsets.issuperset(offsets):
            raise LeaseLost.of(offsets, len(offsets))
        if action.kind == "extend":
            hold.received_s = now_s = self._nodes.clock.now_s()
            lease_s = hold.lease_s if action.ms is None else action.ms / 1000
            hold.extensions |= dict.fromkeys(offsets, (now_s, lease_s))
        elif action.kind == "nack":
            hold.returned_offsets |= dict.fromkeys(offsets, action.unseen)
            if keys := self._inbox.block(batch, offsets):
                acking.add_done_callback(lambda _: self._release(keys))
        if self._acks.put(batch, offsets, acking, action):
            self._wake()
        else:
            deletion = self.error if isinstance(self.error, NotFound) else None
            acking.set_exception(deletion or Closed("the consumer is closed"))

    def _release(self, keys: set[str]) -> None:
        self._inbox.release(keys)
        self._on_arrival()

    def take_turns(self, at_work: Iterable[Message] = ()) -> None:
        """Return a message of an ordering key only after `end_turn` of the one before.

        `at_work`: messages of a former consumer on which the application still works.
        """
        self._inbox.take_turns(at_work)

    def end_turn(self, message: Message) -> None:
        """See `take_turns`; does nothing for a message without a turn."""
        if self._inbox.end_turn(message):
            self._on_arrival()

    @property
    def is_ordered_as_a_whole(self) -> bool:
        """Whether the group is, as the last leader has reported it."""
        return self._inbox.order is GroupOrder.QUEUE

    def _send_own(self, entry: QueuedAck) -> bool:
        """Send a request of the consumer itself soon. False: the subscription is over."""
        put = self._acks.put_own(entry)
        if put:
            self._wake()
        return put

    def _on_wake(self) -> None:
        self._returns.shed()
        self._to_send.set()

    @property
    def settle(self) -> Callable[[], Coroutine[Any, Any, None]] | None:
        """See LeaseClock."""
        return self._nodes.clock.settle

    @property
    def is_over(self) -> bool:
        """Whether it is closed, or an error ended it."""
        return self._phase is ConsumerPhase.OVER

    @property
    def has_ended(self) -> bool:
        """Whether no further message comes: closed, failed, or `max_messages` have come."""
        return self.is_over or self._inbox.is_exhausted

    @property
    def is_settled(self) -> bool:
        """Whether it is over, and `close` has no error to raise."""
        return self.is_over and not self._acks.unconfirmed

    # ---- opening, flushing, closing

    async def wait_until_open(self, within_s: float) -> None:
        """Wait until a leader has accepted the consumer for the first time.

        Raises:
            Unreachable: No leader did in time.
            TimerError: The consumer was rejected.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._wait_until(lambda: self._phase > ConsumerPhase.OPENING)
        except TimeoutError:
            raise timeout_error(within_s, self._nodes.last_error, sent=False) from None
        if self.error is not None:
            raise self.error

    async def flush(self, within_s: float) -> None:
        """Wait until all acks made so far are answered.

        Raises:
            OutcomeUnknown: Some were not answered in time. They are still retried.
        """
        self._acks.pack()
        self._to_send.set()
        last_no = self._acks.last_no
        try:
            async with asyncio.timeout(within_s):
                await self._wait_until(
                    lambda: self.is_over or not self._acks.has_unsettled(last_no)
                )
        except TimeoutError:
            raise timeout_error(within_s, self._nodes.last_error, sent=True) from None
        if self.error is not None:
            raise self.error

    def begin_leaving(self) -> None:
        """Request no more messages, and return those that the application has not received.

        Those that are still on their way are returned when they arrive. Acks work until `close`.
        """
        self._enter(ConsumerPhase.LEAVING)
        self._return_unseen(self._inbox.drain())

    def _return_unseen(self, parts: Sequence[Part]) -> None:
        for batch, offsets in parts:
            with contextlib.suppress(LeaseLost):
                self.ack(batch, offsets, _counting_future(), UNSEEN)

    async def close(self, within_s: float) -> None:
        """Flush, then leave. Unacked messages are delivered to other consumers at once.

        Raises:
            OutcomeUnknown: Some acks were not answered in time, or before an error ended the
                consumer. Their futures have the errors. It is raised once.
        """
        until_s = self._loop.time() + within_s
        try:
            if not self.is_over:
                try:
                    await self.flush(within_s)
                except TimerError as error:
                    if error is not self.error:  # else the futures of the acks raise it
                        raise
                with contextlib.suppress(TimerError, TimeoutError):
                    left_s = max(LEAVE_S_MIN, until_s - self._loop.time())
                    async with asyncio.timeout(min(left_s, LEAVE_S)):
                        await self._return_unreceived()
        finally:
            await self.abandon()
            unconfirmed, self._acks.unconfirmed = self._acks.unconfirmed, 0
        if unconfirmed:
            text = f"the consumer ended with {unconfirmed} acks unconfirmed"
            raise OutcomeUnknown(f"{text}: {self.error}" if self.error else text) from self.error

    async def _return_unreceived(self) -> None:
        """Stop the deliveries, and return the messages that the application has not received."""
        self.begin_leaving()
        await self._wait_until(lambda: self._phase > ConsumerPhase.LEAVING)
        await self.flush(LEAVE_S)
        self._enter(ConsumerPhase.ENDING)
        # The next consumer of an exclusive group then finds it free.
        await self._wait_until(lambda: self._phase > ConsumerPhase.ENDING)

    async def abandon(self) -> None:
        """Leave without a flush; unanswered acks fail."""
        # The error of a kept task has a traceback, with a node, and so a channel.
        task, self._task = self._task, None
        try:
            if task is not None:
                await cancel_and_wait([task])
        finally:
            self._finish(None)

    def _enter(self, phase: ConsumerPhase) -> None:
        """Enter a phase, unless the consumer is beyond it."""
        self._phase = next_phase(self._phase, phase)
        if not self._has_stream and self._phase in WITHOUT_STREAM:
            self._phase = next_phase(self._phase, WITHOUT_STREAM[self._phase])
        self._progress.set()
        self._to_send.set()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._progress.clear()
            await self._progress.wait()

    def _finish(self, error: TimerError | None) -> None:
        if self.is_over:
            return
        self.error = self.error or error
        self._enter(ConsumerPhase.OVER)
        self._inbox.clear()
        self._acks.close(self.error)
        self._on_arrival()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if self._task is None or self.is_over:  # `abandon` ended it
            return
        bug = None if task.cancelled() else task.exception()
        failed = errors.RpcFailed(f"the consumer failed: {bug or 'its task was cancelled'!r}")
        failed.__cause__ = bug
        self._finish(failed)

    # ---- the stream

    async def _run(self) -> None:
        while True:
            try:
                node = await self._nodes.leader(denied=self._phase is ConsumerPhase.OPENING)
            except TimerError as error:
                self._finish(error)
                return
            try:
                await self._stream(node)
            except TimerError as error:
                self._nodes.on_failure(node, error)
                # Only a consumer that has had an exclusive group waits until the group is free.
                refused = isinstance(error, GroupHeld) and self._phase is ConsumerPhase.OPENING
                if refused or not (errors.means_move(error) or errors.means_wait(error)):
                    self._finish(error)
                    return
                self._acks.on_stream_broken()
                self._progress.set()
                await asyncio.sleep(self._pauses.take(error.retry_after_ms / 1000))

    async def _stream(self, node: NodeChannel) -> None:
        """Consume on one stream until it breaks, always by raising."""
        async with closing_call(node.consuming.Consume()) as stream:
            opening = pb.OpenConsumer()
            opening.CopyFrom(self._opening)
            # A deleted group is not created again.
            opening.existing |= self._phase > ConsumerPhase.OPENING
            opening.recalls = True
            leaving = self._phase >= ConsumerPhase.LEAVING
            resends = self._acks.begin_stream()
            self._progress.set()
            opening.credit = self._inbox.opening_credit(none=resends or leaving)
            self._link = LinkWindow(self._nodes.clock.now_s())
            await write(stream, pb.ConsumeRequest(open=opening, window_bytes=self._link.size))
            self._last_answer_s = self._loop.time()
            self._has_stream = True
            try:
                await first_to_end(
                    self._send(stream),
                    self._receive(stream),
                    self._guard(node),
                    self._leases.run(),
                )
            finally:
                self._has_stream = False
                self._enter(self._phase)  # or the one that follows without a stream
                # Before the next stream gets its credit.
                self._inbox.on_stream_broken()
                self._leases.on_stream_broken()

    async def _receive(self, stream: Any) -> None:
        while True:
            with converting_errors():
                answer = await stream.read()
            if not isinstance(answer, pb.ConsumeResponse):
                if self._phase < ConsumerPhase.ENDING:
                    raise ConnectionLost("the node ended the stream")
                self._enter(ConsumerPhase.ENDED)
                await asyncio.Event().wait()  # until this is closed
                continue
            self._last_answer_s = self._loop.time()
            kind = answer.WhichOneof("kind")
            if kind == "deliveries":
                self._on_deliveries(answer.deliveries)
            elif kind == "acked":
                self._on_ack_answer(answer.acked)
            elif kind == "recalled":
                self._leases.on_recall(answer.recalled.offsets)
            elif kind == "opened":
                self._inbox.order = order_of(answer.opened)
                self._on_opened(answer.opened.epoch)
            elif kind == "leaving" and self._phase is ConsumerPhase.LEAVING:
                self._enter(ConsumerPhase.LEFT)

    def _on_opened(self, epoch: int) -> None:
        if epoch < self._nodes.epoch:
            raise NotReady(f"epoch {epoch} is older than {self._nodes.epoch}")
        self._nodes.epoch = epoch
        self._pauses.reset()
        self._nodes.last_error = None
        self._enter(ConsumerPhase.OPEN)

    def _on_deliveries(self, columns: pb.Deliveries) -> None:
        batch = Batch(columns, self.ack, self._inbox.stream_no, self._opening.topic)
        self._nodes.epoch = max(self._nodes.epoch, batch.epoch)
        batch.hold = self._leases.lease_of(batch)
        size = len(columns.payloads) + len(columns.keys) + len(columns.headers)
        size += ROW_BYTES * len(batch)
        self._link.count_arrived(size, batch.lease_ms / 1000, self._nodes.clock.now_s())
        if self._link.is_report_due():
            self._to_send.set()
        if self._returns.unanswered:  # delivered before the leader saw the returns: return it, too
            self._inbox.count_returned(batch)
            self._returns.send([(batch, batch.queue_offsets)])
            return
        if self._phase >= ConsumerPhase.LEAVING:
            self._inbox.count_returned(batch)
            self._return_unseen([(batch, batch.queue_offsets)])
            return
        self._leases.add(batch.hold)
        # An old epoch is checked when the batch is taken; it may become old until then.
        self._inbox.append(batch)
        self._on_arrival()

    def _on_ack_answer(self, answer: pb.AckResponse) -> None:
        if answer.HasField("error"):
            self._on_ack_rejected(answer.request_no, from_wire(answer.error))
        elif (call := self._acks.take_answered(answer.request_no, answer.results)) is not None:
            for entry, results in call.settle(answer.results):
                self._leases.apply_answer(entry, results, call.sent_s)
        self._progress.set()
        self._to_send.set()

    def _on_ack_rejected(self, request_no: int, error: TimerError) -> None:
        call = self._acks.take_rejected(request_no)
        if call is None:
            return
        self._nodes.last_error = error
        if errors.means_move(error) or errors.means_wait(error):
            # An ack may be repeated. The answer is the same, or ALREADY_ACKED.
            self._acks.requeue(call)
            if errors.means_move(error):
                raise error
            pause_s = self._pauses.take(error.retry_after_ms / 1000)
            self._acks.resume_s = self._loop.time() + pause_s
        else:
            call.fail(error)

    def _on_leases_lost(self, offsets: Sequence[int]) -> None:
        self.leases_lost += len(offsets)
        group = self._opening.group
        self._nodes.events.report(LeasesLost(self._opening.topic, group, tuple(offsets)))

    async def _send(self, stream: Any) -> None:
        leaving_sent = False
        while True:
            self._to_send.clear()
            if self._phase >= ConsumerPhase.LEAVING and not leaving_sent:
                leaving_sent = True
                await write(stream, pb.ConsumeRequest(leaving=True))
            if self._phase >= ConsumerPhase.ENDING:
                with converting_errors():
                    await stream.done_writing()
                await asyncio.Event().wait()  # until this is closed
            pause_s = self._acks.resume_s - self._loop.time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
                continue  # the consumer may be leaving now
            call = self._acks.send(self._nodes.clock.now_s())
            if call is not None:
                if self._acks.wire_count == 1:
                    patience_s = self._nodes.settings.stall_s / 2
                    self._last_answer_s = max(self._last_answer_s, self._loop.time() - patience_s)
                request: dict[str, Any] = {call.action.kind: call.request}
                await write(stream, pb.ConsumeRequest(**request))
                continue
            if not self._acks.has_resends:
                await self._send_credit(stream)
            await self._to_send.wait()

    async def _send_credit(self, stream: Any) -> None:
        if self._phase < ConsumerPhase.LEAVING and not self._returns.unanswered:
            credit = self._inbox.grant()
            if credit or self._link.is_report_due():
                window, received = self._link.size, self._link.take_report()
                request = pb.ConsumeRequest(credit=credit, window_bytes=window, received=received)
                await write(stream, request)

    async def _guard(self, node: NodeChannel) -> None:
        """Raise when the stream moves to another node. A quiet topic is silent, too."""
        stall_s = self._nodes.settings.stall_s
        while True:
            await asyncio.sleep(stall_s / 4)
            silent = self._loop.time() - self._last_answer_s > stall_s
            free = not (self._leases.has_leases or self._acks.wire_count or self._acks.has_resends)
            await self._nodes.check(node, silent=silent, free=free)
            if silent:
                self._last_answer_s = self._loop.time()


def _counting_future() -> Acking[int]:
    acking: Acking[int] = Acking()
    acking.counts = True
    return acking
