"""The shell of one consumer: its stream to the leader, its credit, its acks.

    leader ──Deliveries──► inbox ──take──► application
       ▲                     │                  │
       ├──── credit ◄────────┘                  │ ack, nack, extend
       └──── requests ◄───── outbox ◄───────────┘

- **Credit**: at most `window` messages are granted or in the inbox; what is taken is granted anew,
  half a window at a time. A message counts as taken when its batch is.
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
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from timerclient import errors
from timerclient.background import check_process
from timerclient.errors import (
    Closed,
    ConnectionLost,
    GroupHeld,
    LeadershipLost,
    LeaseLost,
    NotDelivered,
    NotFound,
    NotReady,
    OutcomeUnknown,
    TimerError,
    from_wire,
)
from timerclient.messages import Acking, Batch, Message, Said, Word
from timerclient.nodes import (
    Node,
    Nodes,
    Pauses,
    closing_call,
    converted,
    first_to_end,
    out_of_time,
    write,
)
from timerclient.proto import timer_pb2 as pb

LEAVE_S: Final = 1.0
"""What a consumer that closes gives itself to give back what it had fetched ahead, …"""
LEAVE_S_MIN: Final = 0.1
"""… and at least, if its acks took all the time: or that has failed once more."""

Entry = tuple[Batch, Sequence[int], "Acking[Any]", Word]
"""An ack, nack or extension that waits to be sent."""


_REQUESTS: Final[dict[str, type[pb.AckRequest] | type[pb.NackRequest] | type[pb.ExtendRequest]]] = {
    "ack": pb.AckRequest,
    "nack": pb.NackRequest,
    "extend": pb.ExtendRequest,
}


class AckCall:
    """One request: the same said of messages of one lease, and who waits for each."""

    __slots__ = ("entries", "request", "sent", "word")

    def __init__(self, request_no: int, epoch: int, lease_id: int, word: Word) -> None:
        self.word = word
        kind = _REQUESTS[word.kind]
        self.request = kind(request_no=request_no, epoch=epoch, lease_id=lease_id)
        if isinstance(self.request, pb.AckRequest):
            self.request.cumulative = word.up_to
        elif isinstance(self.request, pb.NackRequest):
            self.request.unseen = word.unseen
            if word.ms is not None:
                self.request.delay_ms = word.ms
        elif isinstance(self.request, pb.ExtendRequest):
            self.request.lease_ms = word.ms or 0
        self.entries: list[Entry] = []
        self.sent = False
        """It was sent at least once, and may have been applied."""

    def fail(self, error: TimerError) -> None:
        """Give every waiter `error`."""
        for _, _, acking, _ in self.entries:
            acking.set_exception(error)

    def settle(self, results: Sequence[int]) -> int:
        """Give every waiter its result; return how many leases were lost.

        Raises:
            ConnectionLost: the answer has not one result per offset.
        """
        if len(results) != len(self.request.offsets):
            msg = f"{len(results)} results for {len(self.request.offsets)} acks"
            raise ConnectionLost(msg)
        start = lost = 0
        for _, offsets, acking, word in self.entries:
            mine = results[start : start + len(offsets)]
            start += len(offsets)
            lost += _settle(word, offsets, mine, acking)
        return lost


_REFUSED = (pb.ACK_LEASE_LOST, pb.ACK_NOT_DELIVERED)


def _settle(
    word: Word, offsets: Sequence[int], results: Sequence[int], acking: "Acking[Any]"
) -> int:
    """Give one waiter the results of its offsets; return how many leases were lost."""
    if len(offsets) == 1 and not acking.counts and results[0] not in _REFUSED:
        acking.set_result(word.results(results[0]))
        return 0
    lost = [o for o, r in zip(offsets, results, strict=True) if r == pb.ACK_LEASE_LOST]
    unknown = [o for o, r in zip(offsets, results, strict=True) if r == pb.ACK_NOT_DELIVERED]
    if lost:
        text = f"{len(lost)} of {len(offsets)} messages are not this consumer's by now"
        error = LeaseLost(f"queue_offset = {lost[0]}{' …' if len(lost) > 1 else ''}: {text}")
        error.offsets = tuple(lost)
        acking.set_exception(error)
    elif unknown:
        acking.set_exception(NotDelivered(f"queue_offset = {unknown[0]}: was never handed out"))
    else:
        done = 0 if word.kind == "ack" else results.count(pb.ALREADY_ACKED)
        done += results.count(pb.ACK_EXPIRED) + results.count(pb.ACK_DEAD_LETTERED)
        acking.set_result(len(offsets) - done)
    return len(lost)


class Credit:
    """How many messages may come: a window that refills, and perhaps an end."""

    def __init__(self, window: int, total: int | None = None) -> None:
        self._window = window
        self._left = total
        """Messages that may be granted yet. None: no end."""
        self._granted = 0
        """Granted and not arrived."""
        self._buffered = 0
        """Arrived and not taken."""

    def due(self) -> bool:
        """Whether enough is free to be worth a request: half the window, or all that is left."""
        free = self._free()
        return free > 0 and (free >= (self._window + 1) // 2 or free == self._left)

    def grant(self) -> int:
        """Return how many messages may come more, and count them as granted."""
        free = max(0, self._free())
        self._granted += free
        if self._left is not None:
            self._left -= free
        return free

    def lost(self) -> None:
        """Take back what was granted: the stream is gone."""
        if self._left is not None:
            self._left += self._granted
        self._granted = 0

    def arrived(self, n: int) -> None:
        """Count `n` granted messages as arrived."""
        self._granted = max(0, self._granted - n)
        self._buffered += n

    def taken(self, n: int) -> None:
        """Count `n` arrived messages as taken."""
        self._buffered -= n

    def dropped(self, n: int) -> None:
        """Count `n` taken messages as not come."""
        if self._left is not None:
            self._left += n

    @property
    def exhausted(self) -> bool:
        """Whether all have come and were taken."""
        return self._left == 0 and not self._granted and not self._buffered

    def _free(self) -> int:
        free = self._window - self._granted - self._buffered
        return free if self._left is None else min(free, self._left)


class Subscription:
    """One consumer of one group, through failovers, until it is closed."""

    def __init__(
        self,
        nodes: Nodes,
        opening: pb.OpenConsumer,
        credit: Credit,
        arrived: Callable[[], None],
    ) -> None:
        self.dropped_stale = 0
        """Messages dropped because their leases were over: a newer epoch, or a broken stream."""
        self.leases_lost = 0
        """Acks that were refused because the message was somebody else's by then."""
        self.error: TimerError | None = None
        """Why it ended by itself. None: it did not."""
        self.over = False
        self._nodes = nodes
        self._settings = nodes.settings
        self._opening = opening
        self._credit = credit
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()
        self._opened = asyncio.Event()
        self._changed = asyncio.Event()
        self._answered = asyncio.Event()
        self._lock = threading.Lock()
        self._kicked = False
        # Under the lock: from here
        self._stream_no = 0
        """Of the stream that is, or comes next; counted when one breaks."""
        self._inbox: deque[Batch] = deque()
        self._rest: list[Message] = []
        """What the application has not come to of the batch that it reads, in reverse."""
        self._outbox: list[Entry] = []
        # to here.
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
        self._pauses = Pauses(self._settings, nodes.rng)
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._ended)

    # ---- for any thread of the process that made it; another one is told so (a RuntimeError),
    # before it waits for a lock that was held when it was forked

    def take(self) -> Batch | None:
        """Return the next batch that has arrived. None: there is none."""
        check_process(self._nodes.pid)
        with self._lock:
            batch = None
            while self._inbox and batch is None:
                batch = self._inbox.popleft()
                if self._stale(batch):
                    self._drop(len(batch))
                    self._credit.taken(len(batch))
                    batch = None
                else:
                    self._credit.taken(len(batch))
            due = self._credit.due()
        if due:
            self._kick()
        return batch

    def read(self, batch: Batch) -> None:
        """Let `next` and `receive` return the messages of a batch that was taken."""
        with self._lock:
            self._rest = [*batch][::-1]

    def next(self) -> Message | None:
        """Return the next message of the batch that is read. None: there is none any more."""
        check_process(self._nodes.pid)
        with self._lock:
            due = self._drop_rest()
            message = self._rest.pop() if self._rest else None
        if due:
            self._kick()
        return message

    def receive(self, max_messages: int) -> list[Message]:
        """Return up to so many messages of the batch that is read; none as `next`."""
        check_process(self._nodes.pid)
        with self._lock:
            due = self._drop_rest()
            taken = self._rest[: -max_messages - 1 : -1]
            del self._rest[len(self._rest) - len(taken) :]
        if due:
            self._kick()
        return taken

    def _drop_rest(self) -> bool:
        """Drop what is left of a batch whose leases are over; return whether credit is due."""
        if not self._rest or not self._stale(self._rest[-1].batch):
            return False
        self._drop(len(self._rest))
        self._rest = []
        return self._credit.due()

    def _stale(self, batch: Batch) -> bool:
        """Return whether its leases are known to be over: the group gets its messages again."""
        return batch.stream_no != self._stream_no or batch.epoch < self._nodes.epoch

    def _drop(self, n: int) -> None:
        self._credit.dropped(n)
        self.dropped_stale += n

    def ack(self, batch: Batch, offsets: Sequence[int], acking: Said, word: Word) -> None:
        """Send an ack, nack or extension soon; `acking` gets the answer."""
        check_process(self._nodes.pid)
        acking.set_running_or_notify_cancel()
        with self._lock:
            over = self.over
            if not over:
                self._outbox.append((batch, offsets, acking, word))
        if over:
            gone = self.error if isinstance(self.error, NotFound) else None
            acking.set_exception(gone or Closed("the consumer is closed"))
        else:
            self._kick()

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
        self._changed.set()

    @property
    def ended(self) -> bool:
        """Whether no message will come any more: closed, failed, or all asked for have come."""
        return self.over or self._credit.exhausted

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
        while (message := self.next()) is not None:
            _ = message.give_back()
        while (batch := self.take()) is not None:
            _ = batch.give_back()
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
            self._rest = []
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
                self._give_up_words()
                await asyncio.sleep(self._pauses.take(error.retry_after_ms / 1000))

    def _give_up_words(self) -> None:
        """The stream is gone, and with it the leases: a nack can't be repeated as an ack can."""
        lost = "the connection was lost before the answer came"
        for request_no, call in [*self._packed.items()]:
            if call.sent and call.word.kind != "ack":
                del self._packed[request_no]
                call.fail(OutcomeUnknown(lost))
                self._answered.set()

    async def _stream(self, node: Node) -> None:
        """Consume on one stream until it breaks, always by raising."""
        async with closing_call(node.consuming.Consume()) as stream:
            opening = pb.OpenConsumer()
            opening.CopyFrom(self._opening)
            opening.existing = self._opened.is_set()  # one that was deleted is not made again
            self._pack()
            self._resent_up_to = self._request_no
            with self._lock:
                self._credit.lost()
                opening.credit = 0 if self._packed or self._leaving else self._credit.grant()
            await write(stream, pb.ConsumeRequest(open=opening))
            self._heard_at = self._loop.time()
            self._changed.set()
            self._left.clear()
            self._gone.clear()
            try:
                await first_to_end(self._send(stream), self._receive(stream), self._guard(node))
            finally:
                self._left.set()
                self._gone.set()
                self._leases_ended()

    def _leases_ended(self) -> None:
        """The stream is gone: drop what nobody has seen, before the next one gets its credit."""
        with self._lock:
            self._stream_no += 1
            stale = sum(map(len, self._inbox))
            self._drop(stale)  # first: nobody may see an empty inbox as the end
            self._credit.taken(stale)
            self._inbox.clear()
            self._drop_rest()

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
        batch = Batch(columns, self.ack, self._stream_no)
        self._nodes.epoch = max(self._nodes.epoch, batch.epoch)
        with self._lock:
            # Dropped, if its epoch is old, when it is taken: by then it may have become old, too.
            self._credit.arrived(len(batch))
            self._inbox.append(batch)
        self._arrived()

    def _acked(self, answer: pb.AckResponse) -> None:
        call = self._on_wire.pop(answer.request_no, None)
        if call is None:
            return
        if not answer.HasField("error"):
            self.leases_lost += call.settle(answer.results)
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
        with self._lock:
            credit = self._credit.grant() if self._credit.due() and not self._leaving else 0
        if credit:
            await write(stream, pb.ConsumeRequest(credit=credit))

    async def _send_ack(self, stream: Any) -> None:
        request_no = next(iter(self._packed))
        call = self._on_wire[request_no] = self._packed.pop(request_no)
        call.sent = True
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
            same = batch.epoch, batch.lease_id, word
            call = open_calls.get(same)
            most = 1 if word.up_to else self._settings.ack_offsets_max
            if call is None or len(call.request.offsets) >= most:
                self._request_no += 1
                call = open_calls[same] = AckCall(self._request_no, *same)
                self._packed[self._request_no] = call
            call.entries.append(entry)
            call.request.offsets.extend(offsets)

    async def _guard(self, node: Node) -> None:
        """Raise when the node is silent and another leads; a quiet topic is silent, too."""
        stall_s = self._settings.stall_s
        while True:
            await asyncio.sleep(stall_s / 4)
            if self._loop.time() - self._heard_at > stall_s:
                if await self._nodes.moved(node):
                    silent = f"{node.address} fell silent and another node leads"
                    raise LeadershipLost(silent)
                self._heard_at = self._loop.time()
