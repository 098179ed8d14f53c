"""The shell of one consumer: its stream to the leader, its credit, its leases, its acks.

    leader ──Deliveries──► inbox ──take──► application
       ▲                     │                  │
       ├──── credit ◄────────┘                  │ ack, nack, extend
       └──── requests ◄───── outbox ◄───────────┘

- **Credit**: at most `window` messages are granted or wait here; what is taken is granted anew,
  half a window at a time. For an application that takes them one by one only so many wait as its
  pace lets it finish within half a lease. Others go back unseen, which is no failed attempt.
- **Leases** are renewed when half of each is over, up to `hold_max` after the application got the
  message, or, of what waits here, after it last asked for one. Then what waits goes back, and
  leases of what the application has end. What waited beyond the end of its lease is dropped.
- **Epochs**: what carries an older epoch than one seen on this client is dropped and counted: a
  deposed leader handed it out, and the group gets it again from the new one.
- **Streams**: when one breaks, the leader ends its leases. What came by it and the application has
  not seen is dropped, too, and counted: the group gets it again, in its order.
- **Acks** are sent as soon as fewer than `ack_requests_max` requests are unanswered, each with all
  acks of one lease that wait by then. They survive the stream: an unanswered one is sent again on
  the next, with the epoch and lease it came from; the answer to a repetition is ALREADY_ACKED.
  A new stream gets them before its credit, lest the leader hand the same messages out again.
- **Leaving**: the leader is told that nothing more is wanted, and answers behind what it has handed
  out. What the application did not get to see goes back then, and has not failed by that.
- **Nacks and extensions** go the same way, but end with their stream, as the lease does that they
  are about: one that was sent and not answered is OutcomeUnknown.

The inbox and the outbox may be used from any thread; all else belongs to the event loop's.
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
"""What a consumer that closes gives itself to give back what it had fetched ahead, …"""
LEAVE_S_MIN: Final = 0.1
"""… and at least, if its acks took all the time: or that has failed once more."""
LOOK_S_MIN: Final = 0.01
"""Leases are not looked at more often."""


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
        """Messages that the application had, and that were not this consumer's any more."""
        self.error: TimerError | None = None
        """Why it ended by itself. None: it did not."""
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
        """Of the outbox."""
        self._kicked = False
        self._outbox: list[QueuedAck] = []
        self._holds: dict[int, Hold] = {}
        """Of this stream, by lease id: those of which something is held."""
        self._look = asyncio.Event()
        """The leases should be looked at."""
        self._look_at_s = 0.0
        """When they are, at the latest."""
        self._transit = Transit()
        self._shedding = 0
        """Requests on their way that give back what the application does not come to in time."""
        self._unconfirmed = 0
        """Acks that failed unanswered as this ended, and that `close` has not told of yet."""
        self._packed: dict[int, AckCall] = {}
        """To be sent, by request_no, in that order."""
        self._on_wire: dict[int, AckCall] = {}
        self._request_no = 0
        self._resent_up_to = 0
        """Ack requests up to this one were made before this stream."""
        self._leaving = False
        """Nothing more is wanted."""
        self._left = asyncio.Event()
        """Nothing more comes: the leader said so, or there is no stream."""
        self._left.set()
        self._ending = False
        """Nothing more is to be said, either."""
        self._gone = asyncio.Event()
        """There is no stream."""
        self._gone.set()
        self._heard_at = 0.0
        self._resume_at = 0.0
        self._pauses = Backoff(self._settings, nodes.rng)
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._ended)

    # ---- for any thread of the process that made it; another one is told so (a RuntimeError),
    # before it waits for a lock that was held when it was forked

    def next(self) -> Message | None:
        """Return the next message. None: none is here."""
        check_process(self._nodes.pid)
        return self._inbox.next()

    def receive(self, max_messages: int) -> list[Message]:
        """Return up to so many messages of one batch; none: none is here."""
        check_process(self._nodes.pid)
        return self._inbox.receive(max_messages)

    def take(self) -> Batch | None:
        """Return the next batch. None: none is here."""
        check_process(self._nodes.pid)
        return self._inbox.take()

    @property
    def dropped_stale(self) -> int:
        """Messages dropped because their leases were over before the application saw them."""
        return self._inbox.dropped

    def ack(self, batch: Batch, offsets: Sequence[int], acking: Said, word: Word) -> None:
        """Send an ack, nack or extension soon; `acking` gets the answer.

        Raises:
            LeaseLost: the leader has said already that these are not this consumer's any more.
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
        """Send requests soon. False: it is too late."""
        with self._lock:
            if self.over:
                return False
            self._outbox += entries
        self._kick()
        return True

    def _kick(self) -> None:
        """Wake the event loop's side, once for many calls."""
        if not self._kicked:
            self._kicked = True
            try:
                self._loop.call_soon_threadsafe(self._on_kick)
            except RuntimeError:  # the loop is closed, and so is this
                self._kicked = False

    def _on_kick(self) -> None:
        self._kicked = False
        self._shed()
        self._changed.set()

    @property
    def settle(self) -> Callable[[], Coroutine[Any, Any, None]] | None:
        """See Clock."""
        return self._clock.settle

    @property
    def ended(self) -> bool:
        """Whether no message will come any more: closed, failed, or all asked for have come."""
        return self.over or self._inbox.ended

    @property
    def told(self) -> bool:
        """Whether it is over, and `close` has nothing more to say."""
        return self.over and not self._unconfirmed

    # ---- opening, flushing, closing

    async def opened(self, within_s: float) -> None:
        """Wait until a leader has opened it for the first time.

        Raises:
            Unreachable: none did in time.
            TimerError: it was refused.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._opened.wait()
        except TimeoutError:
            raise out_of_time(within_s, self._nodes.last_error, sent=False) from None
        if self.error is not None:
            raise self.error

    async def flush(self, within_s: float) -> None:
        """Wait until every ack that was made by now is answered.

        Raises:
            OutcomeUnknown: some are not, in time. They are still sent again.
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
        """Flush, then leave: what is leased and not acked goes to other consumers at once.

        Raises:
            OutcomeUnknown: some acks were not answered, in time or before the consumer ended by
                itself; their futures say which. It is told once.
        """
        until_s = self._loop.time() + within_s
        try:
            if not self.over:
                try:
                    await self.flush(within_s)
                except TimerError as error:
                    if error is not self.error:  # of that the acks are told
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
        """Let nothing more come; give back what nobody has seen of what came."""
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
        """Leave without confirming anything; unanswered acks fail."""
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
        gone = isinstance(self.error, NotFound)  # the group is, and all acks with it: that is known
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
                # A group that is held already is waited for only by who had it before.
                refused = isinstance(error, GroupHeld) and not self._opened.is_set()
                if refused or not (errors.means_move(error) or errors.means_wait(error)):
                    self._finish(error)
                    return
                self._packed = dict(sorted((self._on_wire | self._packed).items()))
                self._on_wire = {}
                self._give_up(lambda call: call.sent and call.word.kind != "ack")
                await asyncio.sleep(self._pauses.take(error.retry_after_ms / 1000))

    def _give_up(self, which: Callable[[AckCall], bool]) -> None:
        """The stream is gone, and with it the leases: a nack can't be repeated as an ack can."""
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
            opening.existing = self._opened.is_set()  # one that was deleted is not made again
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
        """The stream is gone: drop what nobody has seen, before the next one gets its credit."""
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
        if self._shedding:  # it was handed out behind what goes back, and goes with it
            self._inbox.refused(batch)
            self._go_back([(batch, batch.queue_offsets)])
            return
        self._holds[batch.lease_id] = batch.hold
        if batch.hold.renew_at_s < self._look_at_s:
            self._look.set()
        # Dropped, if its epoch is old, when it is taken: by then it may have become old, too.
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
            # An ack may be repeated: the answer is the same, or ALREADY_ACKED.
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
        credit = 0 if self._leaving else self._inbox.grant()
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
        """Hold no longer what is acked or given back."""
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
        if self._holds.get(hold.batch.lease_id) is hold:  # not that of another epoch
            del self._holds[hold.batch.lease_id]

    def _note(self, entry: QueuedAck, results: Sequence[int], sent_s: float) -> None:
        """Note what an answer says of leases."""
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
        """Renew leases in time, as long as the stream stands."""
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
        """Do for a lease what is to be done; return when to look at it again."""
        if hold.asked:
            return math.inf  # its answer lets all be looked at
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
        """Ask for a lease that ends so many seconds from now, if it stands."""
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
        self._arrived()  # a batch whose lease was in doubt

    def _not_renewed(self, hold: Hold) -> None:
        hold.asked = False
        hold.retry_s = self._clock.now_s() + hold.lease_s * RETRY
        self._look.set()
        self._arrived()

    def _shed(self) -> None:
        """Give back what the application does not come to in time."""
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

    async def _guard(self, node: NodeChannel) -> None:
        """Raise when the node is silent and another leads; a quiet topic is silent, too."""
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
