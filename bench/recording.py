"""The history of a run: calls of a measure's clients, and the messages that they received.

    a call, or a delivered batch  ─►  an object in memory, with the columns of all its timers
    after the run                 ─►  histories/bench.parquet (docs/history-format.md), a row each

The clients of this module take the place of the plain ones. They write a mark into the first eight
bytes of each payload; its size stays. Deliveries and acks are seen where the measure sees them, so
an error of the client library is an error of the run.
"""

import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from chaos.history.history import MARK_NONE, MARK_SIZE, OpOutcome
from chaos.history.history_check import COLUMNS
from chaos.workloads.recorded_requests import outcome_of
from timer.model.columns import I64
from timerclient import (
    AckResult,
    AsyncTimerClient,
    Batch,
    LeaseLost,
    Message,
    Timer,
    TimerClient,
    TimerError,
    Timers,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import AckAction, AnyAcking, SendAck
from timerclient.values import ids
from timerclient.values.errors import NotDelivered

CLIENT: Final = "bench"
SCHEMA: Final = pa.schema([*COLUMNS.items()])
_LINES: Final = 256
"""Lines of the history that are converted at once."""
_CHARACTERS: Final = np.frombuffer(b"0123456789abcdefghijklmnopqrstuv", np.uint8)
_DIGIT: Final = np.array([16, 8, 4, 2, 1], np.uint8)
_NUMBERS: Final = ("attempts", "fired_at_ms", "due_ms")
"""Columns of a batch that are kept as they came."""
_LOST: Final = {LeaseLost: "ACK_LEASE_LOST", NotDelivered: "ACK_NOT_DELIVERED"}

Line = dict[str, Any]


def now_ms() -> int:
    """Return this machine's clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


class Recording:
    """The history of one cluster's clients. Any thread may add to it."""

    def __init__(self) -> None:
        self._next_mark = 1
        self._opens: list[Line] = []
        self._calls: list[_ScheduleCall] = []
        self._deliveries: list[_Delivery] = []

    def record_schedule(
        self, topic: str, payloads: Sequence[bytes], due_ms: Any
    ) -> "_ScheduleCall":
        """Record a call that is about to be made. `due_ms`: as in the call; None: due at once."""
        call = _ScheduleCall(topic, self._next_mark, payloads, due_ms)
        self._next_mark += len(payloads)
        self._calls.append(call)
        return call

    def record_open(self, topic: str, group: str) -> None:
        """Record that a consumer of a group is about to be opened."""
        self._opens.append({"op": "open", "topic": topic, "group": group, "start_ms": now_ms()})

    def record_delivery(self, group: str, messages: Sequence[Message]) -> None:
        """Record messages of one batch that arrive now, and from here on their acks."""
        if messages:
            self._deliveries.append(_Delivery(group, messages))

    def write(self, path: Path) -> None:
        """Write the history. End the clients first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, SCHEMA) as file:
            lines: list[Line] = []
            for line in self._lines():
                lines.append({"client": CLIENT, **line})
                if len(lines) == _LINES:
                    file.write_table(pa.Table.from_pylist(lines, SCHEMA))
                    lines.clear()
            file.write_table(pa.Table.from_pylist(lines, SCHEMA))

    def _lines(self) -> Iterator[Line]:
        yield from self._opens
        for call in self._calls:
            yield call.line()
        for delivery in self._deliveries:
            yield from delivery.lines()


class _ScheduleCall:
    """One call of `schedule`, `schedule_batch` or `submit_batch`."""

    __slots__ = ("_due_ms", "_end_ms", "_error", "_first", "_plain", "_raw", "_start_ms", "_topic")

    def __init__(self, topic: str, first: int, payloads: Sequence[bytes], due_ms: Any) -> None:
        self._topic, self._first, self._plain = topic, first, payloads
        self._due_ms = np.array(due_ms, np.int64) if isinstance(due_ms, list) else due_ms
        self._start_ms, self._end_ms = now_ms(), 0
        self._raw = b""
        self._error: BaseException | None = None

    @property
    def payloads(self) -> list[bytes]:
        """The payloads of the call, with their marks."""
        if len(self._plain) == 1:
            return [self._first.to_bytes(MARK_SIZE, "little") + self._plain[0][MARK_SIZE:]]
        marks = np.arange(self._first, self._first + len(self._plain), dtype="<i8").tobytes()
        places = range(0, len(marks), MARK_SIZE)
        pairs = zip(places, self._plain, strict=True)
        return [marks[at : at + MARK_SIZE] + payload[MARK_SIZE:] for at, payload in pairs]

    def answered(self, raw: bytes) -> None:
        """Record the answer: the timers' ids."""
        self._raw, self._end_ms = raw, now_ms()

    def failed(self, error: BaseException) -> None:
        """Record an error in place of an answer."""
        self._error, self._end_ms = error, now_ms()

    def ended(self, future: "Future[Timers]") -> None:
        """Record the outcome of a submission."""
        error = future.exception()
        if error is None:
            self.answered(future.result().raw)
        else:
            self.failed(error)

    def line(self) -> Line:
        """Return the line of the history. The outcome of a call that never ended is unknown."""
        outcome, more = OpOutcome.OK, {}
        if not self._raw:
            outcome, more = _outcome(self._error), {"detail": repr(self._error)}
        due_ms = self._due_ms
        due = {"delay_ms": 0} if due_ms is None else {"due_ms": np.atleast_1d(due_ms)}
        return {
            "op": "schedule",
            "topic": self._topic,
            "start_ms": self._start_ms,
            "end_ms": max(self._start_ms, self._end_ms),
            "outcome": outcome,
            "marks": np.arange(self._first, self._first + len(self._plain)),
            "payload_crcs": [*map(zlib.crc32, self.payloads)],
            "ids": id_texts(self._raw) or None,
            **due,
            **more,
        }


class _Delivery:
    """Messages that arrived together, and their acks.

    In place of the batch's function that sends acks, it notes each ack before it is sent. Once all
    are answered it keeps columns only, so that the batch is freed.
    """

    __slots__ = (
        *("_acked", "_ackings", "_batch", "_count", "_end_ms", "_group", "_mine", "_offsets"),
        *("_received_ms", "_refused", "_settled", "_sizes", "_start_ms", "columns", "send"),
    )

    def __init__(self, group: str, messages: Sequence[Message]) -> None:
        self._received_ms = now_ms()
        batch = messages if isinstance(messages, Batch) else messages[0].batch
        self._group, self._batch = group, batch
        self._count = len(messages)
        self._start_ms = self._end_ms = 0
        self._ackings: list[AnyAcking] = []
        self._offsets: list[int] = []
        """Of the messages of all acks, in their order."""
        self._sizes: dict[int, int] = {}
        """Number of an ack -> its messages, if they are more than one."""
        self._acked: I64 = np.array([], np.int64)
        self._refused: list[tuple[Sequence[int], object]] = []
        """Acks with another answer than ACKED for all their messages, or without any."""
        self._settled = False
        self._mine: list[int] | None = None
        """Queue offsets of the messages, if they are a part of the batch."""
        self.columns: Line | None = None
        self.send: SendAck = batch.send_ack
        if isinstance(self.send, _Delivery):  # of an earlier part
            self.columns, self.send = self.send.columns, self.send.send
        if len(messages) < len(batch):
            self._mine = [each.queue_offset for each in messages]
            self.columns = self.columns or _columns(batch)
        batch.send_ack = self

    def __call__(
        self, batch: Batch, offsets: Sequence[int], acking: AnyAcking, word: AckAction
    ) -> None:
        """Send an ack. Raises LeaseLost as the consumer does; nothing was sent then."""
        assert word.kind == "ack", word
        if not self._ackings:
            self._start_ms = now_ms()
        self.send(batch, offsets, acking, word)
        if len(offsets) > 1:
            self._sizes[len(self._ackings)] = len(offsets)
        self._ackings.append(acking)
        self._offsets += offsets
        if len(self._offsets) == self._count:
            acking.add_done_callback(self._settle)

    def _settle(self, future: object) -> None:
        """Keep columns only, if all acks are answered. `future`: None: the run is over."""
        if self._settled:
            return
        answers = [*map(_answer, self._ackings)]
        acked = self._offsets
        refused: list[tuple[Sequence[int], object]] = []
        if any(answer is not AckResult.ACKED for answer in answers):
            acked, at = [], 0
            for number, (acking, answer) in enumerate(zip(self._ackings, answers, strict=True)):
                size = self._sizes.get(number, 1)
                offsets, at = self._offsets[at : at + size], at + size
                if answer is AckResult.ACKED or (acking.counts and answer == size):
                    acked += offsets
                elif isinstance(answer, TimeoutError) and future is not None:
                    return  # the last ack was answered before another one
                else:
                    refused.append((offsets, answer))
        self._settled, self._end_ms = True, now_ms()
        self._acked, self._refused = np.array(acked, np.int64), refused
        self.columns = self.columns or _columns(self._batch)
        self._ackings, self._offsets = [], []
        del self._batch

    def lines(self) -> Iterator[Line]:
        """Yield the line of the delivery, and one for each outcome of its acks."""
        self._settle(None)
        assert self.columns is not None
        line = {**self.columns, "group": self._group}
        kept = line.pop("kept")
        columns: dict[str, npt.NDArray[Any]] = {
            **{name: line.pop(name) for name in ("offsets", "marks")},
            **{name: np.array(getattr(kept, name), np.int64) for name in _NUMBERS},
            "ids": np.array(id_texts(kept.timer_ids)),
        }
        if self._mine is not None:
            chosen = np.isin(columns["offsets"], self._mine)
            columns = {name: column[chosen] for name, column in columns.items()}
        yield {"op": "deliver", "received_ms": self._received_ms, **line, **columns}
        ack = {name: line[name] for name in ("topic", "group", "epoch", "lease_id")}
        ack |= {"op": "ack", "start_ms": self._start_ms}
        ack["end_ms"] = max(self._start_ms, self._end_ms)
        results: dict[OpOutcome, dict[int, str]] = {OpOutcome.OK: {}}
        results[OpOutcome.OK] = dict.fromkeys(self._acked.tolist(), "ACKED")
        for offsets, result in self._refused:
            for offset, (outcome, told) in zip(offsets, _outcomes_of(offsets, result), strict=True):
                results.setdefault(outcome, {})[offset] = told
        for outcome, each in results.items():
            if each:
                values = [*each.values()] if outcome is OpOutcome.OK else None
                yield {**ack, "outcome": outcome, "offsets": [*each], "results": values}


def _columns(batch: Batch) -> Line:
    """Return the fields of a delivered batch, without its payloads."""
    sizes = np.array(list(batch.payload_sizes))
    starts = np.cumsum(sizes) - sizes
    blob = np.frombuffer(batch.payload_blob + bytes(MARK_SIZE), np.uint8)
    marks = blob[starts[:, None] + np.arange(MARK_SIZE)].view("<i8").reshape(-1)
    kept = pb.Deliveries(timer_ids=batch.raw_ids)
    for name in _NUMBERS:
        getattr(kept, name).MergeFrom(getattr(batch, name))  # a copy in C
    return {
        "topic": batch.topic,
        "epoch": batch.epoch,
        "lease_id": batch.lease_id,
        "group_id": batch.group_id,
        "stream": batch.stream_no,
        "handed_out_ms": batch.handed_out_ms,
        "offsets": np.array(batch.queue_offsets, np.int64),
        "marks": np.where(sizes < MARK_SIZE, MARK_NONE, marks),
        "kept": kept,
    }


def _answer(acking: AnyAcking) -> object:
    """Return the result of an ack, or its error. TimeoutError: it is not answered."""
    future: Future[Any] = acking
    try:
        return Future.result(future, 0)  # without the guard of Acking: this never waits
    except (TimerError, TimeoutError) as error:
        return error


def _outcomes_of(offsets: Sequence[int], result: object) -> Sequence[tuple[OpOutcome, str]]:
    """Return the outcome of each message of an ack, and its result if it was answered."""
    if isinstance(result, LeaseLost | NotDelivered):
        lost = getattr(result, "offsets", ()) or offsets
        told = {offset: _LOST[type(result)] for offset in lost}
        return [(OpOutcome.OK, told.get(offset, "ACKED")) for offset in offsets]
    if isinstance(result, AckResult):
        return [(OpOutcome.OK, result.name)]
    # The answer to a joint ack has the number of messages that had expired, and not which.
    error = result if isinstance(result, Exception) else None
    return [(_outcome(error), "")] * len(offsets)


def _outcome(error: BaseException | None) -> OpOutcome:
    return outcome_of(error) if isinstance(error, TimerError) else OpOutcome.UNKNOWN


def id_texts(raw: bytes) -> list[str]:
    """Return timer ids, 15 bytes each, as texts; `timerclient.values.ids.to_text` of all."""
    bits = np.unpackbits(np.frombuffer(raw, np.uint8)).reshape(-1, len(_DIGIT))
    text = _CHARACTERS[bits @ _DIGIT].tobytes().decode()
    return [text[at : at + ids.TEXT_SIZE] for at in range(0, len(text), ids.TEXT_SIZE)]


class RecordingClient(AsyncTimerClient):
    """A client for asyncio whose schedules are recorded."""

    def __init__(self, cluster: Sequence[str], recording: Recording) -> None:
        super().__init__(cluster)
        self._recording = recording

    async def schedule(self, topic: str, payload: Any = None, **options: Any) -> Timer:
        """See AsyncTimerClient. The only option is `due_ms`."""
        call = self._recording.record_schedule(topic, (payload,), options.get("due_ms"))
        try:
            timer = await super().schedule(topic, call.payloads[0], **options)
        except BaseException as error:
            call.failed(error)
            raise
        call.answered(timer.raw)
        return timer

    async def schedule_batch(self, topic: str, payloads: Any, **options: Any) -> Timers:
        """See AsyncTimerClient. The only option is `due_ms`."""
        call = self._recording.record_schedule(topic, payloads, options.get("due_ms"))
        try:
            timers = await super().schedule_batch(topic, call.payloads, **options)
        except BaseException as error:
            call.failed(error)
            raise
        call.answered(timers.raw)
        return timers


class RecordingThreadClient(TimerClient):
    """A client for threads whose submissions of batches are recorded."""

    def __init__(self, cluster: Sequence[str], recording: Recording) -> None:
        super().__init__(cluster)
        self._recording = recording

    def submit_batch(self, topic: str, payloads: Any, **options: Any) -> "Future[Timers]":
        """See TimerClient. The only option is `due_ms`."""
        call = self._recording.record_schedule(topic, payloads, options.get("due_ms"))
        future = super().submit_batch(topic, call.payloads, **options)
        future.add_done_callback(call.ended)
        return future
