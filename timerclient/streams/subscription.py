"""The shell of one consumer: its stream to the leader, its credit, leases and acks.

    leader ──Deliveries──► inbox ──take──► application
       ▲                     │                  │
       ├──── credit ◄────────┘                  │ ack, nack, extend
       └──── requests ◄───── outbox ◄───────────┘

- **Credit**: at most `window` messages are granted or wait here. Credit for messages that the
  application took is granted again, half a window at a time. If the application takes single
  messages, only as many wait as it can finish within half a lease at its present pace. The others
  are returned unseen, which counts as no failure. That also ends the credit granted before, and the
  client grants no more until the answer. With the old credit the leader would deliver the same
  messages here again.
- **Leases** are extended when half of a lease is over. This ends `hold_max` after the application
  received the message; for waiting messages, `hold_max` after its last call for one. Then waiting
  messages are returned, and the leases of received messages end. A message that waited beyond the
  end of its lease is dropped.
- **Epochs**: messages of an older epoch than one seen by this client are dropped and counted. A
  deposed leader delivered them, and the new leader delivers them again.
- **Streams**: when a stream breaks, the leader ends its leases. Its messages that the application
  has not received are dropped and counted. The group receives them again, in order.
- **Acks** are sent while fewer than `ack_requests_max` requests are unanswered. A request has all
  waiting acks of one lease. Acks outlive the stream: an unanswered one is sent again on the next
  stream, with its epoch and lease. The answer to a repetition is ALREADY_ACKED. On a new stream,
  acks are sent before the credit; otherwise the leader would deliver the same messages again.
- **Leaving**: the consumer requests no more messages, and the leader confirms this after its last
  delivery. Messages that the application has not received are then returned, without a failure.
- **Nacks and extensions** are sent in the same way. They end with their stream, as their leases do:
  one that was sent and not answered is OutcomeUnknown.

Any thread may use the inbox and the outbox. The rest belongs to the event loop's thread.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.background import check_process
from timerclient.rows.holds import MARGIN_S, RETRY, SPAN_S_MIN, Hold, Transit
from timerclient.rows.messages import SHED, UNSEEN, Acking, Batch, Message, Said, Word, renewal
from timerclient.streams.acks import AckCall, Heard, QueuedAck, lost_of, put
from timerclient.streams.credit import Credit
from timerclient.streams.inbox import Inbox, Part
from timerclient.streams.nodes import (
    Backoff,
    NodeChannel,
    Nodes,
    closing_call,
    converted,
    first_to_end,
    out_of_time,
    write,
)
from timerclient.values import errors
from timerclient.values.client_events import LeasesLost
from timerclient.values.errors import (
    Closed,
    ConnectionLost,
    GroupHeld,
    LeadershipLost,
    LeaseLost,
    NotFound,
    NotReady,
    OutcomeUnknown,
    TimerError,
    from_wire,
)

LEAVE_S: Final = 1.0
"""Seconds in which a consumer that closes returns the messages that it has fetched ahead."""
LEAVE_S_MIN: Final = 0.1
"""The least of it, even if acks took all the time. Unreturned messages would have failed."""
LOOK_S_MIN: Final = 0.01
"""Seconds between two checks of the leases, at least."""


class Subscription:
    """One consumer of one group, through failovers, until it is closed."""

    def __init__(
        self,
        nodes: Nodes,
        opening: pb.OpenConsumer,
        credit: Credit,
        hold_max_s: float,
        arrived: Callable[[], None],
    ) -> None:
        self.leases_lost = 0
        """Count of messages whose leases ended while the application had them."""
        self.error: TimerError | None = None
        """The error that ended the subscription. None: no error did."""
        self.over = False
        self._nodes = nodes
        self._settings = nodes.settings
        self._opening = opening
        self._hold_max_s = hold_max_s
        self._arrived = arrived
        self._clock = nodes.clock
        self._inbox = Inbox(credit, lambda: nodes.epoch, nodes.clock.now_s, self._kick)
        self._loop = asyncio.get_running_loop()
        self._opened = asyncio.Event()
        self._changed = asyncio.Event()
        self._answered = asyncio.Event()
        self._lock = threading.Lock()
        """Guards the outbox."""
        self._kicked = False
        self._outbox: list[QueuedAck] = []
        self._holds: dict[int, Hold] = {}
        """Leases of this stream with messages that are still held, by lease id."""
        self._look = asyncio.Event()
        """Set: check the leases now."""
        self._look_at_s = 0.0
        """When the leases are checked next, at the latest."""
        self._transit = Transit()
        self._shedding = 0
        """Unanswered requests that return messages for which the application is too slow."""
        self._unconfirmed = 0
        """Acks that failed unanswered at the end and that `close` has not reported."""
        self._packed: dict[int, AckCall] = {}
        """Requests to be sent, by request_no, in that order."""
        self._on_wire: dict[int, AckCall] = {}
        self._request_no = 0
        self._resent_up_to = 0
        """The last request_no from before this stream."""
        self._leaving = False
        """The consumer wants no further messages."""
        self._left = asyncio.Event()
        """Set: no further messages come, as the leader confirmed or there is no stream."""
        self._left.set()
        self._ending = False
        """The consumer sends no further requests."""
        self._gone = asyncio.Event()
        """Set: there is no stream."""
        self._gone.set()
        self._heard_at = 0.0
        self._resume_at = 0.0
        self._pauses = Backoff(self._settings, nodes.rng)
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._ended)

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

    def take(self) -> Batch | None:
        """Return the next batch. None: none waits."""
        check_process(self._nodes.pid)
        return self._inbox.take()

    @property
    def dropped_stale(self) -> int:
        """Count of messages dropped unseen, because their leases had ended."""
        return self._inbox.dropped

    def ack(self, batch: Batch, offsets: Sequence[int], acking: Said, word: Word) -> None:
        """Send an ack, nack or extension soon; `acking` receives the answer.

        Raises:
            LeaseLost: The leader has already reported that the leases have ended.
        """
        check_process(self._nodes.pid)
        hold = batch.hold
        if hold.lost and hold.lost.issuperset(offsets):
            raise LeaseLost.of(offsets, len(offsets))
        if word.kind == "extend":
            hold.given_s = self._clock.now_s()
        with self._lock:
            over = self.over
            if not over:
                put(self._outbox, batch, offsets, acking, word, self._settings.ack_offsets_max)
        if over:
            gone = self.error if isinstance(self.error, NotFound) else None
            acking.set_exception(gone or Closed("the consumer is closed"))
        else:
            self._kick()

    def _say(self, *entries: QueuedAck) -> bool:
        """Send requests soon. False: the subscription is over."""
        with self._lock:
            if self.over:
                return False
            self._outbox += entries
        self._kick()
        return True

    def _kick(self) -> None:
        """Wake the event loop's thread, once for many calls."""
        if not self._kicked:
            self._kicked = True
            try:
                self._loop.call_soon_threadsafe(self._on_kick)
            except RuntimeError:  # the loop is closed, and this subscription with it
                self._kicked = False

    def _on_kick(self) -> None:
        self._kicked = False
        self._shed()
        self._changed.set()

    @property
    def settle(self) -> Callable[[], Coroutine[Any, Any, None]] | None:
        """See LeaseClock."""
        return self._clock.settle

    @property
    def ended(self) -> bool:
        """Whether no further message comes: closed, failed, or `max_messages` have come."""
        return self.over or self._inbox.ended

    @property
    def told(self) -> bool:
        """Whether it is over, and `close` has no error to raise."""
        return self.over and not self._unconfirmed

    # ---- opening, flushing, closing

    async def opened(self, within_s: float) -> None:
        """Wait until a leader has accepted the consumer for the first time.

        Raises:
            Unreachable: No leader did in time.
            TimerError: The consumer was rejected.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._opened.wait()
        except TimeoutError:
            raise out_of_time(within_s, self._nodes.last_error, sent=False) from None
        if self.error is not None:
            raise self.error

    async def flush(self, within_s: float) -> None:
        """Wait until all acks made so far are answered.

        Raises:
            OutcomeUnknown: Some were not answered in time. They are still retried.
        """
        self._pack()
        self._changed.set()
        last = self._request_no
        try:
            async with asyncio.timeout(within_s):
                while any(no <= last for no in (*self._packed, *self._on_wire)) and not self.over:
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            raise out_of_time(within_s, self._nodes.last_error, sent=True) from None
        if self.error is not None:
            raise self.error

    async def close(self, within_s: float) -> None:
        """Flush, then leave. Unacked messages are delivered to other consumers at once.

        Raises:
            OutcomeUnknown: Some acks were not answered in time, or before an error ended the
                consumer. Their futures have the errors. It is raised once.
        """
        until_s = self._loop.time() + within_s
        try:
            if not self.over:
                try:
                    await self.flush(within_s)
                except TimerError as error:
                    if error is not self.error:  # else the futures of the acks raise it
                        raise
                with contextlib.suppress(TimerError, TimeoutError):
                    left_s = max(LEAVE_S_MIN, until_s - self._loop.time())
                    async with asyncio.timeout(min(left_s, LEAVE_S)):
                        await self._give_back()
        finally:
            await self.abandon()
            unconfirmed, self._unconfirmed = self._unconfirmed, 0
        if unconfirmed:
            text = f"the consumer ended with {unconfirmed} acks unconfirmed"
            raise OutcomeUnknown(f"{text}: {self.error}" if self.error else text) from self.error

    async def _give_back(self) -> None:
        """Stop the deliveries, and return the messages that the application has not received."""
        self._leaving = True
        self._changed.set()
        await self._left.wait()
        for batch, offsets in self._inbox.drain():
            with contextlib.suppress(LeaseLost):
                self.ack(batch, offsets, _counting(), UNSEEN)
        await self.flush(LEAVE_S)
        self._ending = True
        self._changed.set()
        await self._gone.wait()  # the next consumer of an exclusive group finds it free

    async def abandon(self) -> None:
        """Leave without a flush; unanswered acks fail."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._finish(None)

    def _finish(self, error: TimerError | None) -> None:
        with self._lock:
            self.error = self.error or error
            self.over = True
        self._inbox.clear()
        self._pack()
        calls = [*self._packed.values(), *self._on_wire.values()]
        gone = isinstance(self.error, NotFound)  # the group is deleted, and its acks with it
        acks = () if gone else (call for call in calls if call.word.kind == "ack")
        self._unconfirmed += sum(len(call.request.offsets) for call in acks)
        for call in calls:
            if isinstance(self.error, NotFound):
                call.fail(self.error)
            elif call.sent:
                call.fail(OutcomeUnknown("the consumer ended before the ack was answered"))
            else:
                call.fail(Closed("the consumer ended before the ack was sent"))
        self._packed.clear()
        self._on_wire.clear()
        self._opened.set()
        self._answered.set()
        self._arrived()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self.over:
            return
        bug = task.exception()
        failed = errors.RpcFailed(f"the consumer failed: {bug!r}")
        failed.__cause__ = bug
        self._finish(failed)

    # ---- the stream

    async def _run(self) -> None:
        while True:
            try:
                node = await self._nodes.leader()
            except Closed as error:
                self._finish(error)
                return
            try:
                await self._stream(node)
            except TimerError as error:
                self._nodes.failed(node, error)
                # Only a consumer that has had an exclusive group waits until the group is free.
                refused = isinstance(error, GroupHeld) and not self._opened.is_set()
                if refused or not (errors.means_move(error) or errors.means_wait(error)):
                    self._finish(error)
                    return
                self._packed = dict(sorted((self._on_wire | self._packed).items()))
                self._on_wire = {}
                self._give_up(lambda call: call.sent and call.word.kind != "ack")
                await asyncio.sleep(self._pauses.take(error.retry_after_ms / 1000))

    def _give_up(self, which: Callable[[AckCall], bool]) -> None:
        """Fail requests of a broken stream: its leases ended, and only acks can be repeated."""
        lost = "the connection was lost before the answer came"
        for request_no, call in [*self._packed.items()]:
            if which(call):
                del self._packed[request_no]
                call.fail(OutcomeUnknown(lost))
                self._answered.set()

    async def _stream(self, node: NodeChannel) -> None:
        """Consume on one stream until it breaks, always by raising."""
        async with closing_call(node.consuming.Consume()) as stream:
            opening = pb.OpenConsumer()
            opening.CopyFrom(self._opening)
            opening.existing = self._opened.is_set()  # a deleted group is not created again
            self._pack()
            self._give_up(lambda call: call.word.own)
            self._resent_up_to = self._request_no
            opening.credit = self._inbox.opening(nothing=bool(self._packed) or self._leaving)
            await write(stream, pb.ConsumeRequest(open=opening))
            self._heard_at = self._loop.time()
            self._changed.set()
            self._left.clear()
            self._gone.clear()
            try:
                await first_to_end(
                    self._send(stream), self._receive(stream), self._guard(node), self._hold()
                )
            finally:
                self._left.set()
                self._gone.set()
                self._leases_ended()

    def _leases_ended(self) -> None:
        """Drop the unseen messages of a broken stream, before the next stream gets its credit."""
        self._inbox.stream_broke()
        self._holds.clear()
        self._transit = Transit()

    async def _receive(self, stream: Any) -> None:
        while True:
            with converted():
                answer = await stream.read()
            if not isinstance(answer, pb.ConsumeResponse) and self._ending:
                self._gone.set()
                await asyncio.Event().wait()  # until this is closed
            if not isinstance(answer, pb.ConsumeResponse):
                raise ConnectionLost("the node ended the stream")
            self._heard_at = self._loop.time()
            kind = answer.WhichOneof("kind")
            if kind == "deliveries":
                self._deliver(answer.deliveries)
            elif kind == "acked":
                self._acked(answer.acked)
            elif kind == "opened":
                if answer.opened.epoch < self._nodes.epoch:
                    text = f"epoch {answer.opened.epoch} is older than {self._nodes.epoch}"
                    raise NotReady(text)
                self._nodes.epoch = max(self._nodes.epoch, answer.opened.epoch)
                self._pauses.reset()
                self._nodes.last_error = None
                self._opened.set()
            elif kind == "leaving":
                self._left.set()

    def _deliver(self, columns: pb.Deliveries) -> None:
        batch = Batch(columns, self.ack, self._inbox.stream_no, self._opening.topic)
        self._nodes.epoch = max(self._nodes.epoch, batch.epoch)
        now_s, lease_s = self._clock.now_s(), batch.lease_ms / 1000
        ends_s = now_s + lease_s - self._transit.late_s(batch.handed_out_ms, now_s)
        batch.hold = Hold(batch, ends_s, lease_s)
        if self._shedding:  # delivered before the leader saw the returns: return it, too
            self._inbox.refused(batch)
            self._go_back([(batch, batch.queue_offsets)])
            return
        self._holds[batch.lease_id] = batch.hold
        if batch.hold.renew_at_s < self._look_at_s:
            self._look.set()
        # An old epoch is checked when the batch is taken; it may become old until then.
        self._inbox.arrived(batch)
        self._arrived()

    def _acked(self, answer: pb.AckResponse) -> None:
        call = self._on_wire.pop(answer.request_no, None)
        if call is None:
            return
        if not answer.HasField("error"):
            for entry, results in call.settle(answer.results):
                self._note(entry, results, call.sent_s)
            self._answered.set()
            self._changed.set()
            return
        error = from_wire(answer.error)
        self._nodes.last_error = error
        if errors.means_move(error) or errors.means_wait(error):
            # An ack may be repeated. The answer is the same, or ALREADY_ACKED.
            self._packed = {answer.request_no: call, **self._packed}
            if errors.means_move(error):
                raise error
            self._resume_at = self._loop.time() + self._pauses.take(error.retry_after_ms / 1000)
        else:
            call.fail(error)
            self._answered.set()
        self._changed.set()

    async def _send(self, stream: Any) -> None:
        leaving = False
        while True:
            self._changed.clear()
            if self._leaving and not leaving:
                leaving = True
                await write(stream, pb.ConsumeRequest(leaving=True))
            if self._ending:
                with converted():
                    await stream.done_writing()
                await asyncio.Event().wait()  # until this is closed
            pause_s = self._resume_at - self._loop.time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            if not self._packed:
                self._pack()
            if self._packed and len(self._on_wire) < self._settings.ack_requests_max:
                await self._send_ack(stream)
                continue
            if not self._packed or next(iter(self._packed)) > self._resent_up_to:
                await self._send_credit(stream)
            await self._changed.wait()

    async def _send_credit(self, stream: Any) -> None:
        credit = 0 if self._leaving or self._shedding else self._inbox.grant()
        if credit:
            await write(stream, pb.ConsumeRequest(credit=credit))

    async def _send_ack(self, stream: Any) -> None:
        request_no = next(iter(self._packed))
        call = self._on_wire[request_no] = self._packed.pop(request_no)
        call.sent, call.sent_s = True, self._clock.now_s()
        if len(self._on_wire) == 1:
            self._heard_at = max(self._heard_at, self._loop.time() - self._settings.stall_s / 2)
        said: dict[str, Any] = {call.word.kind: call.request}
        await write(stream, pb.ConsumeRequest(**said))

    def _pack(self) -> None:
        """Put the waiting acks into requests, one per lease."""
        with self._lock:
            entries, self._outbox = self._outbox, []
        open_calls: dict[tuple[int, int, Word], AckCall] = {}
        for entry in entries:
            batch, offsets, _, word = entry
            self._settle(entry)
            same = batch.epoch, batch.lease_id, word
            call = open_calls.get(same)
            most = 1 if word.up_to else self._settings.ack_offsets_max
            if call is None or len(call.request.offsets) >= most:
                self._request_no += 1
                call = open_calls[same] = AckCall(self._request_no, *same)
                self._packed[self._request_no] = call
            call.entries.append(entry)
            call.request.offsets.extend(offsets)

    def _settle(self, entry: QueuedAck) -> None:
        """Mark messages that are acked or returned as no longer held."""
        hold = entry.batch.hold
        if entry.word.kind == "extend":
            return
        if entry.word.up_to:
            hold.settle_up_to(entry.offsets[0])
        else:
            hold.settle(entry.offsets)
        if entry.word.kind == "nack":
            hold.returned.update(entry.offsets)
        if hold.over:
            self._let_go(hold)

    def _let_go(self, hold: Hold) -> None:
        if self._holds.get(hold.batch.lease_id) is hold:  # not a lease of another epoch
            del self._holds[hold.batch.lease_id]

    def _note(self, entry: QueuedAck, results: Sequence[int], sent_s: float) -> None:
        """Update a lease by the answer to a request."""
        hold, word = entry.batch.hold, entry.word
        if word.own or word.unseen:
            return
        lost = [o for o in lost_of(entry.offsets, results) if o not in hold.returned]
        if lost:
            self._lost(entry.batch, lost)
        elif word.kind == "extend" and word.ms is not None and pb.EXTENDED in results:
            hold.extended(sent_s, word.ms / 1000)
            self._look.set()

    def _lost(self, batch: Batch, offsets: Sequence[int]) -> None:
        self.leases_lost += len(offsets)
        batch.hold.lose(offsets)
        self._inbox.look_again()
        if batch.hold.over:
            self._let_go(batch.hold)
        group = self._opening.group
        self._nodes.events.tell(LeasesLost(self._opening.topic, group, tuple(offsets)))

    # ---- leases

    async def _hold(self) -> None:
        """Extend leases in time, while the stream exists."""
        while True:
            self._look.clear()
            now_s = self._clock.now_s()
            next_s = min(
                (self._look_at(hold, now_s) for hold in [*self._holds.values()]), default=math.inf
            )
            self._look_at_s = next_s
            alarm = None
            if next_s < math.inf:
                alarm = self._clock.call_at(max(next_s, now_s + LOOK_S_MIN), self._look.set)
            try:
                await self._look.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()

    def _look_at(self, hold: Hold, now_s: float) -> float:
        """Extend, return or probe one lease if it is time; return when to check it again."""
        if hold.asked:
            return math.inf  # the answer triggers a check of all leases
        if now_s < hold.renew_at_s:
            return hold.renew_at_s
        waits = bool(self._inbox.waits(hold.batch))
        if waits:
            self._shed()
            waits = bool(self._inbox.waits(hold.batch))
        since_s = max(hold.given_s, self._inbox.asked_s) if waits else hold.given_s
        span_s = min(hold.lease_s, since_s + self._hold_max_s - now_s)
        if span_s >= SPAN_S_MIN and now_s + span_s > hold.ends_s + MARGIN_S:
            self._ask(hold, now_s, span_s)
            return math.inf
        if waits and self._hold_max_s:
            self._go_back(self._inbox.give_up(hold.batch))
            return now_s + LOOK_S_MIN
        if now_s < hold.probe_at_s:
            return hold.probe_at_s
        if waits or hold.probed:
            self._let_go(hold)
        else:
            hold.probed = True
            self._ask(hold, now_s, SPAN_S_MIN)
        return math.inf

    def _ask(self, hold: Hold, now_s: float, span_s: float) -> None:
        """Request an extension to `span_s` seconds from now."""
        hold.asked = True
        renewed = partial(self._renewed, hold, now_s + span_s)
        heard = Heard(renewed, partial(self._not_renewed, hold))
        self._say(QueuedAck(hold.batch, hold.left, heard, renewal(span_s)))

    def _renewed(
        self, hold: Hold, until_s: float, offsets: Sequence[int], results: Sequence[int]
    ) -> None:
        lost = hold.answered(offsets, results, until_s)
        self._inbox.look_again()
        unseen = {*self._inbox.waits(hold.batch)} if lost else ()
        seen = [offset for offset in lost if offset not in unseen]
        if seen:
            self._lost(hold.batch, seen)
        elif hold.over:
            self._let_go(hold)
        self._look.set()
        self._arrived()  # the application may take a batch whose lease was in doubt

    def _not_renewed(self, hold: Hold) -> None:
        hold.asked = False
        hold.retry_s = self._clock.now_s() + hold.lease_s * RETRY
        self._look.set()
        self._arrived()

    def _shed(self) -> None:
        """Return messages for which the application is too slow."""
        self._go_back(self._inbox.shed())

    def _go_back(self, parts: Sequence[Part]) -> None:
        for batch, offsets in parts:
            self._shedding += 1
            batch.hold.settle(offsets)
            heard = Heard(lambda *_: self._went_back(), self._went_back)
            if not self._say(QueuedAck(batch, offsets, heard, SHED)):
                self._went_back()

    def _went_back(self) -> None:
        self._shedding -= 1
        if not self._shedding:
            self._inbox.credit_ended()

    async def _guard(self, node: NodeChannel) -> None:
        """Raise when the node is silent and another node leads. A quiet topic is silent, too."""
        stall_s = self._settings.stall_s
        while True:
            await asyncio.sleep(stall_s / 4)
            if self._loop.time() - self._heard_at > stall_s:
                if await self._nodes.moved(node):
                    silent = f"{node.address} fell silent and another node leads"
                    raise LeadershipLost(silent)
                self._heard_at = self._loop.time()


def _counting() -> Acking[int]:
    acking: Acking[int] = Acking()
    acking.counts = True
    return acking
