"""The acks, nacks and extensions of one consumer, from the call to the answer: a pure core.

    put ──► queue ──pack──► packed ──send──► on the wire ──answer──► settled
                               ▲                  │
                               └─ requeue, break ─┘

- A request has all queued acks of one lease. From `offsets_max` on, it takes no further entry.
- Fewer than `requests_max` requests are unanswered. The others wait, and the queue grows behind.
- Acks outlive the stream: an unanswered one is sent again on the next stream, with its epoch and
  lease. The answer to a repetition is ALREADY_ACKED. A new stream grants no credit before these
  acks are sent; otherwise the leader would deliver the same messages again.
- Nacks and extensions end with their stream, as their leases do. One that was sent and not answered
  is OutcomeUnknown. Those of the consumer itself are not sent on another stream.

The queue has a lock, so any thread may fill it. The rest belongs to one thread. The time is an
argument.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from timerclient.rows.messages import ACK, AckAction, Acking, Batch
from timerclient.streams.acks import AckCall, AwaitedAck, QueuedAck, SingleAcks
from timerclient.values.errors import Closed, NotFound, OutcomeUnknown, TimerError


class AckPipeline:
    """See the module. `packed` is called with each queued entry that was put into a request."""

    def __init__(
        self, offsets_max: int, requests_max: int, on_packed: Callable[[QueuedAck], None]
    ) -> None:
        self.last_no = 0
        """Number of the last request that was made."""
        self.unconfirmed = 0
        """Acks that failed unanswered when the pipeline was closed."""
        self.resume_s = 0.0
        """Nothing is sent until then: the leader asked to wait."""
        self._offsets_max = offsets_max
        self._requests_max = requests_max
        self._on_packed = on_packed
        self._lock = threading.Lock()
        """Guards the queue and `_closed`."""
        self._queue: list[QueuedAck] = []
        self._closed = False
        self._packed: dict[int, AckCall] = {}
        """Requests to be sent, by request_no, in that order."""
        self._on_wire: dict[int, AckCall] = {}
        self._last_earlier_no = 0
        """The last request_no from before this stream."""

    # ---- for any thread

    def put(
        self, batch: Batch, offsets: Sequence[int], acking: "Acking[Any]", action: AckAction
    ) -> bool:
        """Queue the application's ack, nack or extension. False: the pipeline is closed.

        Acks of single messages of one batch share an entry, up to `offsets_max`. A further message
        adds one offset and one future. Entries, requests and answers are handled as columns.
        """
        with self._lock:
            if self._closed:
                return False
            if action is not ACK or acking.counts:
                self._queue.append(QueuedAck(batch, offsets, AwaitedAck(acking, action), action))
                return True
            last = self._queue[-1] if self._queue else None
            if last is not None and last.batch is batch and isinstance(last.receiver, SingleAcks):
                receiver = last.receiver
                if len(receiver.offsets) < self._offsets_max:
                    receiver.add(offsets[0], acking)
                    return True
            receiver = SingleAcks()
            receiver.add(offsets[0], acking)
            self._queue.append(QueuedAck(batch, receiver.offsets, receiver, ACK))
            return True

    def put_own(self, entry: QueuedAck) -> bool:
        """Queue a request of the consumer itself. False: the pipeline is closed."""
        with self._lock:
            if not self._closed:
                self._queue.append(entry)
            return not self._closed

    # ---- for the thread of the stream

    @property
    def wire_count(self) -> int:
        """Number of requests that were sent on this stream and are not answered."""
        return len(self._on_wire)

    @property
    def has_resends(self) -> bool:
        """Whether a request from before this stream waits to be sent; it goes before the credit."""
        return bool(self._packed) and next(iter(self._packed)) <= self._last_earlier_no

    def has_unsettled(self, last_no: int) -> bool:
        """Whether a request up to `last_no` is not settled."""
        return any(no <= last_no for calls in (self._packed, self._on_wire) for no in calls)

    def pack(self) -> None:
        """Put the queue into requests, one per lease."""
        with self._lock:
            entries, self._queue = self._queue, []
        calls: dict[tuple[int, int, AckAction], AckCall] = {}
        for entry in entries:
            batch, offsets, _, action = entry
            self._on_packed(entry)
            lease = batch.epoch, batch.lease_id, action
            call = calls.get(lease)
            offsets_max = 1 if action.is_cumulative else self._offsets_max
            if call is None or len(call.request.offsets) >= offsets_max:
                self.last_no += 1
                call = calls[lease] = self._packed[self.last_no] = AckCall(self.last_no, *lease)
            call.entries.append(entry)
            call.request.offsets.extend(offsets)

    def send(self, now_s: float) -> AckCall | None:
        """Return the next request, and count it as sent. None: none waits, or none may be sent."""
        if not self._packed:
            self.pack()
        if not self._packed or len(self._on_wire) >= self._requests_max:
            return None
        request_no = next(iter(self._packed))
        call = self._on_wire[request_no] = self._packed.pop(request_no)
        call.was_sent, call.sent_s = True, now_s
        return call

    def take_answered(self, request_no: int, results: Sequence[int]) -> AckCall | None:
        """Return the request with this answer, which is then settled. None: it is not on the wire.

        Raises:
            ConnectionLost: The number of results is wrong. The request stays on the wire.
        """
        call = self._on_wire.get(request_no)
        if call is not None:
            call.check(results)
            del self._on_wire[request_no]
        return call

    def take_rejected(self, request_no: int) -> AckCall | None:
        """Return a request that the leader rejected. None: it is not on the wire."""
        return self._on_wire.pop(request_no, None)

    def requeue(self, call: AckCall) -> None:
        """Send a rejected request again, before the others."""
        self._packed = {call.request.request_no: call, **self._packed}

    def on_stream_broken(self) -> None:
        """Keep the unanswered acks of a broken stream, and fail the other requests."""
        self._packed = dict(sorted((self._on_wire | self._packed).items()))
        self._on_wire = {}
        self._fail_where(lambda call: call.was_sent and call.action.kind != "ack")

    def begin_stream(self) -> bool:
        """Prepare for a new stream. Return whether requests wait, which go before the credit."""
        self.pack()
        self._fail_where(lambda call: call.action.own)
        self._last_earlier_no = self.last_no
        return bool(self._packed)

    def _fail_where(self, condition: Callable[[AckCall], bool]) -> None:
        for request_no, call in [*self._packed.items()]:
            if condition(call):
                del self._packed[request_no]
                call.fail(OutcomeUnknown("the connection was lost before the answer came"))

    def close(self, error: TimerError | None) -> None:
        """Fail all requests, and accept none any more. `error` is what ended the consumer."""
        with self._lock:
            self._closed = True
        self.pack()
        calls = [*self._packed.values(), *self._on_wire.values()]
        self._packed, self._on_wire = {}, {}
        deletion = error if isinstance(error, NotFound) else None  # the group, and its acks with it
        for call in calls:
            if deletion is None and call.action.kind == "ack":
                self.unconfirmed += len(call.request.offsets)
        for call in calls:
            if deletion is not None:
                call.fail(deletion)
            elif call.was_sent:
                call.fail(OutcomeUnknown("the consumer ended before the ack was answered"))
            else:
                call.fail(Closed("the consumer ended before the ack was sent"))
