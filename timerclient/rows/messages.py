"""Delivered messages: one batch of columns, and light views of its rows.

A batch holds the messages that the leader leased together, as columns. A payload is sliced out only
on access. A consumer that counts a million messages therefore makes no million objects.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING
from datetime import datetime, timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar, cast, overload

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.rows import (
    PAUSE_MS_MAX,
    PRIORITY_DEFAULT,
    decode_headers,
    kind_of,
    lease_ms,
    moment_of,
    slices,
    span_ms,
)
from timerclient.rows.series_fields import Occurrence, occurrence_of
from timerclient.threads.background import GuardedFuture, call_guarded, is_running
from timerclient.values import ids
from timerclient.values.codecs import PayloadReader
from timerclient.values.errors import InvalidRequest
from timerclient.values.results import AckResult, ExtendResult, NackResult

if TYPE_CHECKING:
    from timerclient.rows.holds import Hold

T = TypeVar("T")

_PARTS: Final = vars(Future()).keys() - {"_state", "_result", "_exception"}
"""Attributes of a Future that only a wait or a callback needs."""
DETAIL_BYTES_MAX: Final = 1_024
"""Bytes of the text of a nack or a rejection, in UTF-8. Longer ones are cut."""
_LATE: Final = (AckResult.EXPIRED, AckResult.DEAD_LETTERED)
_outcome_lock = threading.RLock()
"""Held while any Acking gets its parts or its outcome. The thread that holds it may be interrupted
by a signal handler or a finalizer that looks at an Acking, too."""


def _renew_outcome_lock() -> None:
    global _outcome_lock  # noqa: PLW0603 -- a thread that a fork left behind may hold the old one
    _outcome_lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_outcome_lock)


class Acking(GuardedFuture[T]):
    """The future of an ack, nack or extension; for threads and for event loops.

    `result(timeout)` waits in a thread, `await acking` on an event loop. Waiting is optional: an
    ack is sent at once, and `flush` or `close` of the consumer waits for all.

    A Future has a dozen objects, and only a thread that waits needs most of them. So they are made
    at the first wait of a thread, for a second callback, or for one after the outcome. Otherwise
    the garbage collector takes half of the time of an application that acks message by message.
    """

    counts = False
    """True: the result is a count of messages, not an AckResult."""
    _has_parts = False
    _on_failure: "Callable[[Future[Any]], object] | None" = None
    _state = PENDING
    _result = None
    _exception = None
    _callback: "Callable[[Future[Any]], object] | None" = None
    """The first callback. It is called before those of the list, which needs an object."""
    _done_callbacks: "Sequence[Callable[[Future[Any]], object]]" = ()

    def __init__(self) -> None:
        """Make a future without its parts."""

    def __getattr__(self, name: str) -> Any:
        """Make the missing parts, and return one of them."""
        if name not in _PARTS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        with _outcome_lock:
            whole = vars(Future())
            for part in _PARTS:
                vars(self).setdefault(part, whole[part])
            self._has_parts = True
        return vars(self)[name]

    def __reduce__(self) -> NoReturn:
        """Refuse copies, as a Future does: no outcome would reach them."""
        raise TypeError(f"cannot copy or pickle {type(self).__name__}")

    def set_result(self, result: T) -> None:
        """Settle the future; once."""
        with _outcome_lock:
            whole = self._has_parts or self.done()
            if not whole:
                self._result = result  # before the state, which others read without the lock
                self._state = FINISHED
        if whole:
            super().set_result(result)
        else:
            self._invoke_callbacks()
        if self._on_failure is not None and self._is_late():
            self.add_done_callback(self._on_failure)

    @staticmethod
    def settle_acked(ackings: "Sequence[Acking[AckResult]]") -> None:
        """Settle many futures with ACKED, as `set_result` does, at half of its cost."""
        whole = []
        with _outcome_lock:
            for acking in ackings:
                if acking._has_parts or acking._state != PENDING:  # noqa: SLF001
                    whole.append(acking)
                else:  # the result before the state, as in `set_result`
                    acking._result = AckResult.ACKED  # noqa: SLF001
                    acking._state = FINISHED  # noqa: SLF001
        for acking in ackings:
            if acking._callback is not None and acking.done():  # noqa: SLF001
                acking._invoke_callbacks()  # noqa: SLF001
        for acking in whole:
            acking.set_result(AckResult.ACKED)

    def set_exception(self, exception: BaseException | None) -> None:
        """Settle the future with an error; once."""
        with _outcome_lock:
            whole = self._has_parts or self.done()
            if not whole:
                self._exception = exception
                self._state = FINISHED
        if whole:
            super().set_exception(exception)
        else:
            self._invoke_callbacks()
        if self._on_failure is not None:
            self.add_done_callback(self._on_failure)

    def add_done_callback(self, fn: "Callable[[Future[T]], object]") -> None:
        """Call `fn` with the future once it is done. An error that `fn` raises is logged."""
        with _outcome_lock:
            if self._callback is None and not self._has_parts and not self.done():
                self._callback = fn
                return
        super().add_done_callback(fn)

    def _invoke_callbacks(self) -> None:
        first, self._callback = self._callback, None
        if first is not None:
            call_guarded(first, self)
        super()._invoke_callbacks()  # type: ignore[misc]  # of the standard library

    def result(self, timeout: float | None = None) -> T:
        """Return the result; see GuardedFuture."""
        if self.done() and self._exception is None:
            return cast("T", self._result)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None; see GuardedFuture."""
        return self._exception if self.done() else super().exception(timeout)

    def cancelled(self) -> bool:
        """Return False: see `cancel`."""
        return False

    def add_failure_callback(self, fn: "Callable[[Future[Any]], object]") -> None:
        """Call `fn` with the future of an ack if the message is not acked; for one callback.

        It fails, or the result is EXPIRED or DEAD_LETTERED. A success makes no parts.
        """
        with _outcome_lock:
            if not self._has_parts and not self.done():
                self._on_failure = fn
                return
        self.add_done_callback(lambda _: (self._exception or self._is_late()) and fn(self))

    def _is_late(self) -> bool:
        return self._result in _LATE

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._state == FINISHED

    def cancel(self) -> bool:
        """Return False: an ack can't be withdrawn."""
        return False

    def __await__(self) -> Generator[object, None, T]:
        """Wait on the running event loop."""
        if not self.done():
            loop = asyncio.get_running_loop()
            woken: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                if not woken.done():
                    woken.set_result(None)

            def wake_waiter(_: "Future[T]") -> None:
                if is_running(loop):
                    wake()
                elif not loop.is_closed():
                    loop.call_soon_threadsafe(wake)

            self.add_done_callback(wake_waiter)
            yield from woken.__await__()
        return self.result()


class AckAction(NamedTuple):
    """An ack, nack or extension, without its messages."""

    kind: str
    """The contract's name: ack, nack or extend."""
    results: type[IntEnum]
    """Type of the result for one message."""
    ms: int | None = None
    """Delay of a nack or lease of an extension, milliseconds. None: the group's setting."""
    is_cumulative: bool = False
    """Of an ack: it is cumulative."""
    unseen: bool = False
    """Of a nack: the application has not seen the messages."""
    own: bool = False
    """It is from the consumer, not the application. It has no use on another stream."""
    detail: str = ""
    """Of a nack: the reason, for the dead letter."""


ACK = AckAction("ack", AckResult)
ACK_UP_TO = AckAction("ack", AckResult, is_cumulative=True)
UNSEEN = AckAction("nack", NackResult, unseen=True)
SHED = AckAction("nack", NackResult, unseen=True, own=True)


def renewal(lease_s: float) -> AckAction:
    """Return an extension that the consumer sends by itself."""
    return AckAction("extend", ExtendResult, max(1, round(lease_s * 1000)), own=True)


def nack_after(delay: float | timedelta | None, detail: str = "") -> AckAction:
    """Return a nack. A long `detail` is cut.

    Raises:
        InvalidRequest: The delay is negative, or too long; or `detail` is no text.
    """
    if not isinstance(detail, str):
        raise InvalidRequest.of("detail", kind_of(detail), "must be a str")
    ms = None if delay is None else span_ms("delay", delay, PAUSE_MS_MAX)
    return AckAction("nack", NackResult, ms, detail=truncate_detail(detail))


def truncate_detail(text: str) -> str:
    """Return the beginning of a text, at most DETAIL_BYTES_MAX bytes, without lone surrogates."""
    data = text[: DETAIL_BYTES_MAX + 1].encode(errors="replace")
    if len(data) > DETAIL_BYTES_MAX:
        data = data[: DETAIL_BYTES_MAX - 3] + "…".encode()
    return data.decode(errors="ignore")


def extend_by(lease: float | timedelta | None) -> AckAction:
    """Return an extension.

    Raises:
        InvalidRequest: The lease is not positive, or too long.
    """
    return AckAction("extend", ExtendResult, None if lease is None else lease_ms(lease))


AnyAcking = Acking[AckResult] | Acking[NackResult] | Acking[ExtendResult] | Acking[int]
SendAck = Callable[["Batch", Sequence[int], AnyAcking, AckAction], None]
"""A consumer's function that sends an ack, nack or extension of offsets of a batch."""


class Message(PayloadReader):
    """One delivery of one fired timer; a view into its batch."""

    __slots__ = ("_at", "_batch")

    def __init__(self, batch: "Batch", at: int) -> None:
        self._batch = batch
        self._at = at

    @property
    def batch(self) -> "Batch":
        """The messages that were leased together with this one."""
        return self._batch

    @property
    def topic(self) -> str:
        """The topic, as named when the consumer was made."""
        return self._batch.topic

    @property
    def payload(self) -> bytes:
        """The payload of the timer."""
        return self._batch.payload(self._at)

    @property
    def id(self) -> str:
        """The timer's id, as text."""
        return ids.to_text(self.raw_id)

    @property
    def raw_id(self) -> bytes:
        """The timer's id, 15 bytes."""
        at = self._at * ids.SIZE
        return self._batch.raw_ids[at : at + ids.SIZE]

    @property
    def due_ms(self) -> int:
        """The requested due time, Unix milliseconds, as the producer gave it.

        The effective due time may differ: the policy and the tick change it, and it is never
        before the schedule. `timerclient.values.ids.due_ms_of(message.raw_id)` returns it.
        """
        return self._batch.due_ms[self._at]

    @property
    def due(self) -> datetime:
        """The requested due time, in UTC; see `due_ms`."""
        return moment_of(self.due_ms)

    @property
    def fired_at_ms(self) -> int:
        """When the timer fired, Unix milliseconds on the cluster's clock."""
        return self._batch.fired_at_ms[self._at]

    @property
    def fired_at(self) -> datetime:
        """When the timer fired, in UTC, on the cluster's clock."""
        return moment_of(self.fired_at_ms)

    @property
    def attempt(self) -> int:
        """How often the message may have been delivered to the group. 1: this is the first."""
        return self._batch.attempts[self._at]

    @property
    def failures(self) -> int:
        """Nacks and ended leases of the message so far; `max_attempts` limits them."""
        failures = self._batch.failures
        return failures[self._at] if failures else 0

    @property
    def queue_offset(self) -> int:
        """Position of the message in its topic's queue."""
        return self._batch.queue_offsets[self._at]

    @property
    def key(self) -> str | None:
        """The key of the timer. None: it has none."""
        return self._batch.key(self._at)

    @property
    def ordering_key(self) -> str | None:
        """The ordering key of the timer. None: it has none, and `key` orders it."""
        return self._batch.ordering_key(self._at)

    @property
    def priority(self) -> int:
        """The priority of the timer, 0 to 9."""
        return self._batch.priority(self._at)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the timer."""
        return self._batch.headers(self._at)

    @property
    def occurrence(self) -> Occurrence | None:
        """Series and number, if the message is an occurrence of a recurring timer; else None."""
        return occurrence_of(self.headers)

    @property
    def epoch(self) -> int:
        """The epoch of the leader that delivered the message."""
        return self._batch.epoch

    @property
    def handed_out_ms(self) -> int:
        """When the leader leased it to this consumer, Unix milliseconds on the cluster's clock."""
        return self._batch.handed_out_ms

    @property
    def group_id(self) -> int:
        """The group's id at the delivery. A seek assigns a new one."""
        return self._batch.group_id

    def ack(self) -> Acking[AckResult]:
        """Acknowledge the message: its work is done. Return the future of the result at once.

        The result is EXPIRED if the time to live was over before. The future raises LeaseLost if
        the lease had ended, and NotDelivered if the message was never delivered.
        """
        return self._send(ACK)

    def ack_up_to(self) -> Acking[AckResult]:
        """Acknowledge this message and all before it. Return the future at once.

        This is for exclusive and failover groups; in others the future raises InvalidRequest. If
        some leases have ended, no message is acked, and the future raises LeaseLost.
        """
        return self._send(ACK_UP_TO)

    def nack(
        self, delay: float | timedelta | None = None, *, detail: str = ""
    ) -> Acking[NackResult]:
        """Return the message to the group, which receives it again. This counts as a failure.

        The message is delivered again after `delay` (a timedelta, or seconds; 0: at once; None: the
        group's backoff), to any consumer of the group. The future, returned at once, raises
        LeaseLost if the lease had ended, and OutcomeUnknown if the connection was lost.

        `detail`: the reason, for people. If this nack makes the message a dead letter, the header
        `dead-letter-detail` has up to 1,024 bytes of it.
        """
        return self._send(nack_after(delay, detail))

    def give_back(self) -> Acking[NackResult]:
        """Return the message as unseen: it is delivered again at once, and has not failed.

        A consumer that closes returns the messages that it has fetched ahead in this way.
        Otherwise as `nack`.
        """
        return self._send(UNSEEN)

    def extend(self, lease: float | timedelta | None = None) -> Acking[ExtendResult]:
        """Extend the lease to `lease` (a timedelta, or seconds) from now; None: the group's lease.

        The call extends all messages of the batch that are neither acked nor nacked. The future
        raises LeaseLost if the lease had ended. A failover ends the extension.
        """
        return self._send(extend_by(lease))

    def _send(self, action: AckAction) -> Acking[Any]:
        acking: Acking[Any] = Acking()
        self._batch.send_ack(self._batch, (self.queue_offset,), acking, action)
        return acking

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same delivery: each access to a batch makes a new view."""
        if not isinstance(other, Message):
            return NotImplemented
        return (other._batch, other._at) == (self._batch, self._at)

    def __hash__(self) -> int:
        return hash((self._batch, self._at))

    def __reduce__(self) -> NoReturn:
        """Refuse copies: only the consumer that has the lease can ack."""
        raise TypeError("cannot copy or pickle a Message: pass its payload, id, key and headers")

    def __repr__(self) -> str:
        return f"Message({self.id!r}, queue_offset={self.queue_offset}, attempt={self.attempt})"


class Batch(Sequence[Message]):
    """Messages of one topic, leased together. Iterate for messages, or use the columns."""

    __slots__ = (
        "_columns",
        "_headers",
        "_keys",
        "_ordering_keys",
        "_payloads",
        "attempts",
        "due_ms",
        "epoch",
        "failures",
        "fired_at_ms",
        "group_id",
        "handed_out_mono_ms",
        "handed_out_ms",
        "hold",
        "lease_id",
        "lease_ms",
        "queue_offsets",
        "raw_ids",
        "send_ack",
        "stream_no",
        "topic",
    )
    hold: "Hold"
    """The consumer's state of the lease."""

    def __init__(
        self, columns: pb.Deliveries, send_ack: SendAck, stream_no: int = 0, topic: str = ""
    ) -> None:
        self._columns = columns
        self.topic = topic
        """The topic, as named when the consumer was made."""
        self.stream_no = stream_no
        """Number of the consumer's stream that delivered it. Its leases end with that stream."""
        self.send_ack = send_ack
        self.epoch = columns.epoch
        """The epoch of the leader that delivered it."""
        self.lease_id = columns.lease_id
        self.lease_ms = columns.lease_ms
        """Duration of the lease, from the time at which the leader sent the messages."""
        self.handed_out_ms = columns.handed_out_ms
        """That time, Unix milliseconds on the cluster's clock."""
        self.handed_out_mono_ms = columns.handed_out_mono_ms
        """That time on the leader's monotonic clock. 0: the leader's release does not send it."""
        self.group_id = columns.group_id
        """The group's id at the delivery. A seek assigns a new one."""
        self.queue_offsets: list[int] = list(columns.queue_offsets)
        self.due_ms: Sequence[int] = columns.due_ms
        self.fired_at_ms: Sequence[int] = columns.fired_at_ms
        self.attempts: Sequence[int] = columns.attempts
        self.failures: Sequence[int] = columns.failures
        """Empty: no message of the batch has failed."""
        self.raw_ids = columns.timer_ids
        """The timers' ids, n x 15 bytes."""
        # Values of columns, sliced out at the first use: each read of a field of bytes copies it.
        self._payloads: list[bytes] | None = None
        self._keys: list[bytes] | None = None
        self._headers: list[bytes] | None = None
        self._ordering_keys: list[bytes] | None = None

    @property
    def payloads(self) -> list[bytes]:
        """All payloads, sliced out."""
        return slices(self._columns.payload_sizes, self._columns.payloads)

    @property
    def payload_blob(self) -> bytes:
        """All payloads, one after the other; their sizes are `payload_sizes`."""
        return self._columns.payloads

    @property
    def payload_sizes(self) -> Sequence[int]:
        """The size of each payload, in bytes."""
        return self._columns.payload_sizes

    @property
    def ids(self) -> list[str]:
        """The timers' ids as text."""
        return [message.id for message in self]

    def payload(self, at: int) -> bytes:
        """Return one row's payload."""
        if self._payloads is None:
            self._payloads = self.payloads
        return self._payloads[at]

    def key(self, at: int) -> str | None:
        """Return one row's key. None: it has none."""
        if self._keys is None:
            self._keys = slices(self._columns.key_sizes, self._columns.keys, len(self))
        return self._keys[at].decode() or None

    def ordering_key(self, at: int) -> str | None:
        """Return one row's ordering key. None: it has none."""
        if self._ordering_keys is None:
            of = self._columns
            self._ordering_keys = slices(of.ordering_key_sizes, of.ordering_keys, len(self))
        return self._ordering_keys[at].decode() or None

    def priority(self, at: int) -> int:
        """Return one row's priority."""
        return self._columns.priorities[at] if self._columns.priorities else PRIORITY_DEFAULT

    def headers(self, at: int) -> dict[str, str]:
        """Return one row's headers."""
        if self._headers is None:
            self._headers = slices(self._columns.headers_sizes, self._columns.headers, len(self))
        return decode_headers(self._headers[at])

    def ack(self) -> Acking[int]:
        """Acknowledge all messages of the batch. Return the future at once.

        Its result is the number of messages, without those that had expired or are dead letters.
        If some leases have ended, it raises LeaseLost with their offsets; the others are acked.
        """
        return self._send(ACK)

    def nack(self, delay: float | timedelta | None = None, *, detail: str = "") -> Acking[int]:
        """Return all messages to the group; see `Message.nack`.

        The future's result is the number of messages, without those that were acked before, had
        expired or are dead letters. If some leases have ended, it raises LeaseLost with their
        offsets; the others are nacked.
        """
        return self._send(nack_after(delay, detail))

    def give_back(self) -> Acking[int]:
        """Return all messages as unseen; see `Message.give_back`. Otherwise as `nack`."""
        return self._send(UNSEEN)

    def extend(self, lease: float | timedelta | None = None) -> Acking[int]:
        """Extend the lease of the batch; see `Message.extend`. The future's result is a count."""
        return self._send(extend_by(lease))

    def _send(self, action: AckAction) -> Acking[int]:
        acking: Acking[int] = Acking()
        acking.counts = True
        self.send_ack(self, self.queue_offsets, acking, action)
        return acking

    def __len__(self) -> int:
        return len(self.queue_offsets)

    def __iter__(self) -> Iterator[Message]:
        return (Message(self, at) for at in range(len(self.queue_offsets)))

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        rows = range(len(self))[index]
        if isinstance(rows, range):
            return [Message(self, at) for at in rows]
        return Message(self, rows)

    def __repr__(self) -> str:
        return f"Batch({len(self)} messages, epoch={self.epoch}, lease_id={self.lease_id})"
