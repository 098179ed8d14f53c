"""The shell of a producer: sends the pipeline's requests over one stream to the leader.

    schedule, schedule_batch ──► Call ──► Request ──► pipeline ──► ScheduleStream ──► leader
                                  ▲                       │
                                  └── future, deadline ◄──┴── answers

Single calls share one request if they are made in the same turn of the event loop, or while two
such requests are on the wire. The future of a call is an asyncio or a concurrent one; only the
event loop's thread settles it.
"""

import asyncio
import contextlib
import copy
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.rows import PRIORITY_DEFAULT, Columns, Way
from timerclient.rows.scheduled_timers import RequestOutcome
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
from timerclient.streams.pipeline import Pipeline, PipelinedRequest, Step
from timerclient.streams.shared_deadlines import SharedDeadlines, SharedTimer
from timerclient.values.errors import (
    Closed,
    ConnectionLost,
    InvalidRequest,
    PermissionDenied,
    TimerError,
    means_move,
)
from timerclient.values.wire_errors import from_wire

TOKEN_SIZE: Final = 16
UNREGISTER_S: Final = 1.0
"""Seconds in which a client that closes tries to unregister its producer, at most."""
STATUS_S: Final = 1.0
"""Seconds in which the status of a stream should come after a write has failed."""
COLUMNS_MAX: Final = 1_024
"""Topics in a request of single calls; this is also the server's limit."""


class FutureLike(Protocol):
    """The methods of asyncio's and concurrent's futures that are used here."""

    def done(self) -> bool:
        """Whether it has an outcome, or was cancelled."""

    def set_result(self, result: Any, /) -> None:
        """Set the result."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Set the error."""


class WaitingCall:
    """One call, which waits for the ids of some rows of a request."""

    __slots__ = ("alarm", "began_s", "first", "future", "make", "request", "rows", "within_s")

    def __init__(
        self, future: FutureLike, rows: int, make: Callable[..., Any], within_s: float
    ) -> None:
        self.future = future
        self.rows = rows
        self.make = make
        """Makes a Timer, or Timers, from the outcome of the call's rows."""
        self.within_s = within_s
        self.began_s = time.monotonic()
        """When `within_s` began: the producer may receive the call later."""
        self.first = 0
        """Its first row in the request."""
        self.request: CallsRequest | None = None
        self.alarm: SharedTimer[WaitingCall] | None = None

    def settle(self, outcome: RequestOutcome | TimerError) -> None:
        """Settle the future with the outcome of the request, if it is not done."""
        if self.alarm is not None:
            self.alarm.remove(self)
        if self.future.done():
            return
        if isinstance(outcome, TimerError):
            self.future.set_exception(outcome)
            return
        try:
            result = self.make(outcome.part(self.first, self.rows))
        except TimerError as refused:
            self.future.set_exception(refused)
        else:
            self.future.set_result(result)


class CallsRequest(PipelinedRequest):
    """A request and the calls that wait for it."""

    __slots__ = ("body", "calls", "size", "timers")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[WaitingCall] = []
        self.body = b""
        """A ScheduleRequest without its head; empty: calls are still added."""
        self.size = 0

    def seal(self) -> bytes:
        """Return the body, which does not change from now on."""
        return self.body

    def demand(self) -> tuple[str, int, int] | None:
        """See PipelinedRequest. It is called after a rejection only, so it may decode the body."""
        if len(self.calls) > 1:
            return None
        columns = pb.ScheduleRequest.FromString(self.body).timers
        if len({each.topic for each in columns}) != 1:
            return None
        rows = sum(len(each.payload_sizes) for each in columns)
        return columns[0].topic, rows, sum(len(each.payloads) for each in columns)

    def release(self, call: WaitingCall) -> bool:
        """Remove the rows of one of several calls; return False if they can't be separated.

        Never call it for a request that may be applied: its number would then mean other rows.
        """
        return False


class BatchRequest(CallsRequest):
    """The request of one call: its rows are encoded."""

    __slots__ = ()

    def __init__(self, body: bytes, call: WaitingCall) -> None:
        super().__init__()
        self.body = body
        self.size = len(body)
        self.timers = call.rows
        self.calls.append(call)
        call.request = self


class SingleRow:
    """The one row of a single call."""

    __slots__ = (
        *("headers", "key", "on_conflict", "ordering_key", "payload", "priority", "topic"),
        *("value", "way"),
    )

    def __init__(self, topic: str, payload: bytes, way: Way, value: int) -> None:
        self.topic = topic
        self.payload = payload
        self.way: Way = way
        self.value = value
        """Milliseconds, or a level."""
        self.key = b""
        self.headers = b""
        self.ordering_key = b""
        self.priority = PRIORITY_DEFAULT
        self.on_conflict: pb.OnConflict.ValueType = pb.ON_CONFLICT_UNSPECIFIED
        """For a row with a key."""

    @property
    def size(self) -> int:
        """Approximate bytes on the wire."""
        texts = len(self.key) + len(self.headers) + len(self.ordering_key)
        return 20 + len(self.payload) + texts


def encode_rows(
    rows: Sequence[SingleRow], on_conflict: pb.OnConflict.ValueType
) -> tuple[bytes, list[int]]:
    """Return (a ScheduleRequest without its head, the index in `rows` of each of its rows).

    Rows of one topic with the same kind of due time are adjacent.
    """
    columns: dict[tuple[str, Way], Columns] = {}
    places: dict[tuple[str, Way], list[int]] = {}
    for at, row in enumerate(rows):
        name = row.topic, row.way
        column = columns.get(name)
        if column is None:
            column = columns[name] = Columns(*name)
            places[name] = []
        column.values.append(row.value)
        column.payloads.append(row.payload)
        column.keys.append(row.key)
        column.headers.append(row.headers)
        column.ordering_keys.append(row.ordering_key)
        column.priorities.append(row.priority)
        places[name].append(at)
    request = pb.ScheduleRequest(on_conflict=on_conflict)
    for column in columns.values():
        column.write(request.timers.add())
    return request.SerializeToString(), [at for each in places.values() for at in each]


class CollectedRequest(CallsRequest):
    """The rows of single calls, collected until it is sent."""

    __slots__ = ("on_conflict", "rows", "ways")
    is_collecting = True

    def __init__(self, row: SingleRow, call: WaitingCall) -> None:
        super().__init__()
        self.rows: list[SingleRow] = []
        self.ways: dict[str, Way] = {}
        """Per topic, the kind of its rows' due times: one kind per topic."""
        self.on_conflict = row.on_conflict
        """The mode of all rows. A node rejects a row without a key in another mode than reject."""
        self.add(row, call)

    def can_add(self, row: SingleRow, rows_max: int, bytes_max: int) -> bool:
        """Return whether `row` may be added."""
        return (
            not self.body
            and len(self.rows) < rows_max
            and self.size + row.size <= bytes_max
            and self.ways.get(row.topic, row.way) == row.way
            and (row.topic in self.ways or len(self.ways) < COLUMNS_MAX)
            and row.on_conflict == self.on_conflict
        )

    def add(self, row: SingleRow, call: WaitingCall) -> None:
        """Add a row."""
        self.rows.append(row)
        self.calls.append(call)
        self.timers = len(self.rows)
        self.ways[row.topic] = row.way
        self.size += row.size
        call.request = self

    def release(self, call: WaitingCall) -> bool:
        """Remove the row of one of several calls."""
        at = self.calls.index(call)
        del self.calls[at]
        self.size -= self.rows.pop(at).size
        self.timers = len(self.rows)
        self.body = b""
        return True

    def seal(self) -> bytes:
        """Return the rows encoded, topic by topic. They do not change from now on."""
        if self.body:
            return self.body
        self.body, order = encode_rows(self.rows, self.on_conflict)
        for first, at in enumerate(order):
            self.calls[at].first = first
        return self.body

    def split(self) -> "list[CollectedRequest]":
        """Return one request per call, if there are several."""
        if len(self.calls) < 2:
            return []
        parts = [CollectedRequest(*one) for one in zip(self.rows, self.calls, strict=True)]
        for part in parts:
            part.seal()
        return parts


class ProducerStream:
    """One idempotent producer of a client; registers itself before its first request.

    Its methods belong to the event loop's thread.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._settings = nodes.settings
        self._deadlines: SharedDeadlines[WaitingCall] = SharedDeadlines(self._on_timeout)
        self._pipeline: Pipeline[CallsRequest] = Pipeline(
            wire_requests_max=self._settings.wire_requests_max,
            wire_bytes_max=self._settings.wire_bytes_max,
        )
        self._token = b""
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._quiet = asyncio.Event()
        self._closed = False
        self._failure = ""
        """The bug that ended this."""
        self._pauses = RetryPauses(self._settings, nodes.rng)
        self._resume_at = 0.0
        self._progress_at = 0.0
        self._has_answer = False
        self._refusal: TimerError | None = None
        """The leader's last refusal, if it has taken nothing since. None: there is none, or the
        leader is gone."""
        self._stream_error = ""
        """The error that broke the last stream, if the leader may have taken requests from it."""

    # ---- calls

    def submit(self, body: bytes, call: WaitingCall) -> None:
        """Send the encoded rows of `call`, after all earlier ones."""
        if self._reject_if_closed(call):
            return
        self._queue(BatchRequest(body, call), call)

    def submit_row(self, row: SingleRow, call: WaitingCall) -> None:
        """Send one row, together with those of other single calls."""
        if self._reject_if_closed(call):
            return
        tail = self._pipeline.queue[-1] if self._pipeline.queue else None
        rows_max, bytes_max = self._settings.collect_rows_max, self._settings.collect_bytes_max
        if isinstance(tail, CollectedRequest) and tail.can_add(row, rows_max, bytes_max):
            tail.add(row, call)
            self._watch(call)
            return
        self._queue(CollectedRequest(row, call), call)

    def withdraw(self, call: WaitingCall) -> None:
        """Withdraw a call whose caller no longer waits."""
        self._forget(call)
        self._set_if_quiet()

    def _reject_if_closed(self, call: WaitingCall) -> bool:
        if self._closed:
            call.settle(Closed(self._failure or "the client is closed"))
        return self._closed

    def _queue(self, request: CallsRequest, call: WaitingCall) -> None:
        self._pipeline.add(request)
        self._watch(call)
        self._changed.set()
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
            self._task.add_done_callback(self._on_task_end)

    def _watch(self, call: WaitingCall) -> None:
        waited_s = time.monotonic() - call.began_s
        call.alarm = self._deadlines.add(call, call.within_s - waited_s)

    def _on_timeout(self, call: WaitingCall) -> None:
        if call.future.done():
            return
        untouched = self._forget(call)
        last = self._refusal or self._nodes.last_error
        lost = self._stream_error if call.request is not None and call.request.in_doubt else ""
        call.settle(timeout_error(call.within_s, last, sent=not untouched, lost=lost))
        self._set_if_quiet()

    def _forget(self, call: WaitingCall) -> bool:
        """Withdraw the call's rows, if possible; return whether they were certainly not applied."""
        request = call.request
        assert request is not None
        if call.alarm is not None:
            call.alarm.remove(call)
        if any(not other.future.done() for other in request.calls if other is not call):
            # The request is sent for the other calls: without this row, if it can't be applied yet.
            return not self._pipeline.may_be_applied(request) and request.release(call)
        return self._pipeline.withdraw(request)

    # ---- sending

    async def close(self, within_s: float) -> None:
        """Wait for all answers, at most `within_s`; then fail the calls without one."""
        self._closed = True
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        try:
            if self._pipeline.is_awaited:
                self._quiet.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until_s):
                        await self._quiet.wait()
        finally:
            # The error of a kept task has a traceback, with a node, and so a channel.
            task, self._task = self._task, None
            try:
                if task is not None:
                    await cancel_and_wait([task])
            finally:
                self._give_up()
        left_s = min(until_s - loop.time(), UNREGISTER_S)
        if self._pipeline.producer_id and left_s > 0:  # its outcome does not matter
            await asyncio.gather(self._unregister(left_s), return_exceptions=True)

    def _reject_queued(self, error: TimerError) -> None:
        """Fail the calls that wait to be sent, as no node accepts them."""
        for request in [each for each in self._pipeline.queue if not each.in_doubt]:
            self._pipeline.withdraw(request)
            for call in request.calls:
                call.settle(copy.copy(error))
        self._set_if_quiet()

    def _reject_largest(self, error: TimerError) -> None:
        """Fail the largest request on the wire: it ended the stream, as it exceeds a limit."""
        wire = self._pipeline.wire
        largest = max(wire, key=lambda request_no: len(wire[request_no].seal()), default=0)
        self._settle(self._pipeline.on_answer(largest, error), None)

    def _give_up(self) -> None:
        """Fail all calls; those that were sent have an unknown outcome."""
        self._closed = True
        self._settle(self._pipeline.close(), None)

    async def _run(self) -> None:
        while True:
            while self._pipeline.is_idle:
                self._changed.clear()
                await self._changed.wait()
            self._has_answer = False
            try:
                node = await self._nodes.leader(denied=not self._pipeline.producer_id)
            except Closed:
                self._give_up()
                return
            except TimerError as error:
                self._reject_queued(error)
                if not self._pipeline.is_idle:
                    await asyncio.sleep(self._pauses.take())
                continue
            try:
                await self._stream(node)
            except Closed:
                self._give_up()
                return
            except TimerError as error:
                self._nodes.on_failure(node, error)
                self._refusal = None if means_move(error) else error
                self._stream_error = "" if error.outcome_known else str(error)
                of_one = isinstance(error, InvalidRequest) and error.field == "request"
                if of_one:
                    self._reject_largest(error)
                # A node that rejects the stream before any answer has accepted no request.
                taken = of_one or self._has_answer or not error.outcome_known
                self._settle(self._pipeline.on_stream_broken(received=taken), None)
                if isinstance(error, PermissionDenied):
                    self._reject_queued(error)
                await asyncio.sleep(self._pauses.take(error.retry_after_ms / 1000))

    async def _stream(self, node: NodeChannel) -> None:
        """Send and receive on one stream until it breaks, always by raising."""
        if not self._pipeline.producer_id:
            await self._register(node)
        async with closing_call(node.schedule_stream()) as stream:
            self._progress_at = asyncio.get_running_loop().time()
            await first_to_end(self._send(node, stream), self._receive(stream), self._guard(node))

    async def _register(self, node: NodeChannel) -> None:
        # A token per producer: repeated until it is answered, then never used again.
        self._token = self._token or secrets.token_bytes(TOKEN_SIZE)
        request = pb.RegisterProducerRequest(token=self._token)
        answer = await self._nodes.attempt(node, lambda: node.timers.RegisterProducer(request))
        self._token = b""
        answers_kept = answer.requests_kept, answer.rows_kept
        self._pipeline.on_registered(answer.producer_id, *answers_kept)

    async def _unregister(self, within_s: float) -> None:
        """Unregister the producer; the cluster would otherwise forget it after a long idle time."""
        request = pb.UnregisterProducerRequest(producer_id=self._pipeline.producer_id)
        async with asyncio.timeout(within_s):
            node = await self._nodes.leader()
            await self._nodes.attempt(node, lambda: node.timers.UnregisterProducer(request))

    async def _send(self, node: NodeChannel, stream: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            pause_s = self._resume_at - loop.time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            following = self._pipeline.next()
            if following is None:
                if self._pipeline.queue and self._pipeline.needs_producer:
                    await self._register(node)
                else:
                    await self._changed.wait()
                continue
            request_no, request = following
            if len(self._pipeline.wire) == 1:
                self._progress_at = loop.time()
            head = pb.ScheduleStreamRequest(
                producer_id=self._pipeline.producer_id,
                sequence=request.sequence,
                request_no=request_no,
            )
            # Two encoded messages, one after the other, are their union: the rows stay encoded.
            message = head.SerializeToString() + request.seal()
            try:
                await write(stream, message)
            except ConnectionLost:
                await asyncio.sleep(STATUS_S)  # the reader gets the status, and raises it
                raise

    async def _receive(self, stream: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with converting_errors():
                answer = await stream.read()
            if not isinstance(answer, pb.ScheduleStreamResponse):
                raise ConnectionLost("the node ended the stream")
            self._has_answer = True
            self._progress_at = loop.time()
            error = from_wire(answer.error) if answer.HasField("error") else None
            if error is None:
                self._refusal = self._nodes.last_error = None
                self._pauses.reset()
            step = self._pipeline.on_answer(answer.request_no, error)
            self._settle(step, answer)
            if step.pause_ms is not None:  # not a gap: that only follows from such a refusal
                self._refusal = error
                self._resume_at = loop.time() + self._pauses.take(step.pause_ms / 1000)
            if step.move is not None:
                raise step.move
            self._changed.set()

    async def _guard(self, node: NodeChannel) -> None:
        """Raise when the stream moves to another node."""
        loop = asyncio.get_running_loop()
        stall_s = self._settings.stall_s
        while True:
            await asyncio.sleep(stall_s / 4)
            silent = bool(self._pipeline.wire) and loop.time() - self._progress_at > stall_s
            await self._nodes.check(node, silent=silent, free=True)
            if silent:
                self._progress_at = loop.time() - stall_s / 2

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if self._task is None:  # `close` ended it
            return
        if task.cancelled():  # as by a program that cancels all tasks
            self._failure = "the client failed: its task was cancelled"
            self._give_up()
            return
        if (bug := task.exception()) is None:
            return
        # A bug in this client: fail all calls, as no answer will come.
        self._closed, self._failure = True, f"the client failed: {bug!r}"
        for request, _ in self._pipeline.close().settled:
            for call in request.calls:
                if not call.future.done():
                    call.future.set_exception(bug)
        self._set_if_quiet()

    # ---- settling

    def _settle(self, step: Step[CallsRequest], answer: pb.ScheduleStreamResponse | None) -> None:
        for request, error in step.settled:
            outcome: RequestOutcome | TimerError | None = error
            if outcome is None:
                assert answer is not None
                results, others = answer.results, answer.other_ids
                outcome = RequestOutcome(answer.timer_ids, answer.duplicate, results, others)
            for number, call in enumerate(request.calls):
                # Each call has its own copy of the error: raising it changes the traceback.
                shared = number and isinstance(outcome, TimerError)
                call.settle(copy.copy(outcome) if shared else outcome)
        self._set_if_quiet()

    def _set_if_quiet(self) -> None:
        if self._closed and not self._pipeline.is_awaited:
            self._quiet.set()
