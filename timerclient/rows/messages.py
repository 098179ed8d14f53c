"""Delivered messages: one batch of columns, and light views of its rows.

A batch is what the leader leased together. It keeps the columns as they came; a payload is sliced
out only when somebody asks for it, so that a consumer that counts a million messages makes no
million objects.
"""

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeVar, overload

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.background import GuardedFuture
from timerclient.rows.rows import decode_headers, lease_ms, moment_of, span_ms
from timerclient.values import ids
from timerclient.values.results import AckResult, ExtendResult, NackResult

if TYPE_CHECKING:
    from timerclient.rows.holds import Hold

T = TypeVar("T")


class Acking(GuardedFuture[T]):
    """The answer to an ack, nack or extension, once it is there; for threads and for event loops.

    `result(timeout)` waits in a thread; `await acking` waits on an event loop. Nobody has to: an
    ack is on its way as soon as it is made, and `flush` or closing the consumer confirms all.
    """

    counts = False
    """The result is a count of messages, not an AckResult."""

    def cancel(self) -> bool:
        """Return False: an acknowledgement that was asked for is sent."""
        return False

    def __await__(self) -> Generator[object, None, T]:
        """Wait on the running event loop."""
        if self.done():
            return self.result()
        return (yield from asyncio.wrap_future(self).__await__())


class Word(NamedTuple):
    """What a consumer says of messages that it holds."""

    kind: str
    """As the contract calls it: ack, nack or extend."""
    results: type[IntEnum]
    """What the answer for one message is."""
    ms: int | None = None
    """Delay of a nack, lease of an extension; None: as the group has it."""
    up_to: bool = False
    """Of an ack: of all that is before it, too."""
    unseen: bool = False
    """Of a nack: of what the application did not get to see."""
    own: bool = False
    """The consumer's own, not the application's: it is of no use on another stream."""


ACK = Word("ack", AckResult)
ACK_UP_TO = Word("ack", AckResult, up_to=True)
UNSEEN = Word("nack", NackResult, unseen=True)
SHED = Word("nack", NackResult, unseen=True, own=True)


def renewal(lease_s: float) -> Word:
    """Return an extension that the consumer asks for by itself."""
    return Word("extend", ExtendResult, max(1, round(lease_s * 1000)), own=True)


def nack_after(delay: float | timedelta | None) -> Word:
    """Return a nack.

    Raises:
        InvalidRequest: the delay is negative, or far too long.
    """
    return Word("nack", NackResult, None if delay is None else span_ms("delay", delay))


def extend_by(lease: float | timedelta | None) -> Word:
    """Return an extension.

    Raises:
        InvalidRequest: the lease is not positive, or far too long.
    """
    return Word("extend", ExtendResult, None if lease is None else lease_ms(lease))


Said = Acking[AckResult] | Acking[NackResult] | Acking[ExtendResult] | Acking[int]
SendAck = Callable[["Batch", Sequence[int], Said, Word], None]
"""How a consumer takes what is said of offsets of a batch."""


class Message:
    """One delivery of one fired timer; a view into its batch."""

    __slots__ = ("_at", "_batch")

    def __init__(self, batch: "Batch", at: int) -> None:
        self._batch = batch
        self._at = at

    @property
    def batch(self) -> "Batch":
        """What it was leased together with."""
        return self._batch

    @property
    def topic(self) -> str:
        """The topic, as its consumer was opened with it."""
        return self._batch.topic

    @property
    def payload(self) -> bytes:
        """What was scheduled."""
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
        """When it was asked to fire, Unix milliseconds."""
        return self._batch.due_ms[self._at]

    @property
    def due(self) -> datetime:
        """When it was asked to fire, in UTC."""
        return moment_of(self.due_ms)

    @property
    def fired_at_ms(self) -> int:
        """When it fired, Unix milliseconds on the cluster's clock."""
        return self._batch.fired_at_ms[self._at]

    @property
    def fired_at(self) -> datetime:
        """When it fired, in UTC, on the cluster's clock."""
        return moment_of(self.fired_at_ms)

    @property
    def attempt(self) -> int:
        """How often a consumer may have been given the message. 1: this delivery is the first."""
        return self._batch.attempts[self._at]

    @property
    def failures(self) -> int:
        """How many nacks and ended leases the message has had; `max_attempts` bounds them."""
        failures = self._batch.failures
        return failures[self._at] if failures else 0

    @property
    def queue_offset(self) -> int:
        """Its position in its topic's queue."""
        return self._batch.queue_offsets[self._at]

    @property
    def key(self) -> str | None:
        """The key that it was scheduled with."""
        return self._batch.key(self._at)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that it was scheduled with."""
        return self._batch.headers(self._at)

    @property
    def epoch(self) -> int:
        """The leadership that handed it out."""
        return self._batch.epoch

    @property
    def handed_out_ms(self) -> int:
        """When the leader leased it to this consumer, Unix milliseconds on the cluster's clock."""
        return self._batch.handed_out_ms

    @property
    def group_id(self) -> int:
        """Of the group, in the life in which it was handed out: a seek begins another one."""
        return self._batch.group_id

    def ack(self) -> Acking[AckResult]:
        """Say that its work is done; return at once with the future of the answer.

        That is EXPIRED if its time to live was over before. The future raises LeaseLost if the
        message is somebody else's by now, and NotDelivered if it never was handed out.
        """
        acking: Acking[AckResult] = Acking()
        self._batch.send_ack(self._batch, (self.queue_offset,), acking, ACK)
        return acking

    def ack_up_to(self) -> Acking[AckResult]:
        """Say that the work of this message and of all before it is done; return at once.

        In exclusive and failover groups only; elsewhere the future raises InvalidRequest. It raises
        LeaseLost, and nothing is acked, if another consumer has some of them by now.
        """
        acking: Acking[AckResult] = Acking()
        self._batch.send_ack(self._batch, (self.queue_offset,), acking, ACK_UP_TO)
        return acking

    def nack(self, delay: float | timedelta | None = None) -> Acking[NackResult]:
        """Give it back: an attempt is counted, and it comes again, to anyone in the group.

        Not before `delay` (a timedelta, or seconds; 0 is at once) is over; None: as the group backs
        off. Return at once with the future of the answer, which raises LeaseLost if the message was
        not this consumer's any more, and OutcomeUnknown if the connection was lost meanwhile.
        """
        acking: Acking[NackResult] = Acking()
        word = nack_after(delay)
        self._batch.send_ack(self._batch, (self.queue_offset,), acking, word)
        return acking

    def give_back(self) -> Acking[NackResult]:
        """Give it back unseen: it comes again at once, to anyone in the group, and has not failed.

        So does what a consumer has fetched ahead when it closes. Otherwise as `nack`.
        """
        acking: Acking[NackResult] = Acking()
        self._batch.send_ack(self._batch, (self.queue_offset,), acking, UNSEEN)
        return acking

    def extend(self, lease: float | timedelta | None = None) -> Acking[ExtendResult]:
        """Hold it longer: for `lease` from now on; None: as long as the group's default.

        So is held whatever else came in the same batch and is not acked or nacked. The future
        raises LeaseLost if the message was not this consumer's any more. A failover ends it.
        """
        acking: Acking[ExtendResult] = Acking()
        word = extend_by(lease)
        self._batch.send_ack(self._batch, (self.queue_offset,), acking, word)
        return acking

    def __repr__(self) -> str:
        return f"Message(queue_offset={self.queue_offset}, attempt={self.attempt})"


class Batch(Sequence[Message]):
    """Messages of one topic, leased together. Iterate for messages, or use the columns."""

    __slots__ = (
        "_columns",
        "_ends",
        "_header_ends",
        "_key_ends",
        "attempts",
        "due_ms",
        "epoch",
        "failures",
        "fired_at_ms",
        "group_id",
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
    """What its consumer knows of its lease."""

    def __init__(
        self, columns: pb.Deliveries, send_ack: SendAck, stream_no: int = 0, topic: str = ""
    ) -> None:
        self._columns = columns
        self.topic = topic
        """The topic, as the consumer was opened with it."""
        self.stream_no = stream_no
        """Of its consumer's streams, the one that it came by: its leases end with it."""
        self.send_ack = send_ack
        self.epoch = columns.epoch
        """The leadership that handed it out."""
        self.lease_id = columns.lease_id
        self.lease_ms = columns.lease_ms
        """How long the messages are leased, from when the leader sent them."""
        self.handed_out_ms = columns.handed_out_ms
        """When that was, Unix milliseconds on the cluster's clock."""
        self.group_id = columns.group_id
        """Of the group, in the life in which it was handed out: a seek begins another one."""
        self.queue_offsets: list[int] = list(columns.queue_offsets)
        self.due_ms: Sequence[int] = columns.due_ms
        self.fired_at_ms: Sequence[int] = columns.fired_at_ms
        self.attempts: Sequence[int] = columns.attempts
        self.failures: Sequence[int] = columns.failures
        """Empty: no message of the batch has failed."""
        self.raw_ids = columns.timer_ids
        """The timers' ids, n x 15 bytes."""
        self._ends: list[int] | None = None
        self._key_ends: list[int] | None = None
        self._header_ends: list[int] | None = None

    @property
    def payloads(self) -> list[bytes]:
        """All payloads, sliced out."""
        blob, start, out = self._columns.payloads, 0, []
        for size in self._columns.payload_sizes:
            out.append(blob[start : start + size])
            start += size
        return out

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
        if self._ends is None:
            self._ends = [0, *accumulate(self._columns.payload_sizes)]
        return self._columns.payloads[self._ends[at] : self._ends[at + 1]]

    def key(self, at: int) -> str | None:
        """Return one row's key. None: it has none."""
        if not self._columns.key_sizes:
            return None
        if self._key_ends is None:
            self._key_ends = [0, *accumulate(self._columns.key_sizes)]
        return self._columns.keys[self._key_ends[at] : self._key_ends[at + 1]].decode() or None

    def headers(self, at: int) -> dict[str, str]:
        """Return one row's headers."""
        if not self._columns.headers_sizes:
            return {}
        if self._header_ends is None:
            self._header_ends = [0, *accumulate(self._columns.headers_sizes)]
        ends = self._header_ends
        return decode_headers(self._columns.headers[ends[at] : ends[at + 1]])

    def ack(self) -> Acking[int]:
        """Say that the work of all its messages is done; return at once.

        The future gives how many messages that were, less those that had expired. It raises
        LeaseLost, naming the offsets, if some are somebody else's by now; the others are acked all
        the same.
        """
        acking: Acking[int] = Acking()
        acking.counts = True
        self.send_ack(self, self.queue_offsets, acking, ACK)
        return acking

    def nack(self, delay: float | timedelta | None = None) -> Acking[int]:
        """Give all its messages back: see `Message.nack`.

        The future gives how many were not acked already, nor expired. It raises LeaseLost, naming
        the offsets, if some were not this consumer's any more; the others are nacked all the same.
        """
        return self._say(nack_after(delay))

    def give_back(self) -> Acking[int]:
        """Give all its messages back unseen: see `Message.give_back`; else as `nack`."""
        return self._say(UNSEEN)

    def extend(self, lease: float | timedelta | None = None) -> Acking[int]:
        """Hold what is left of it longer: see `Message.extend`; the future's result is a count."""
        return self._say(extend_by(lease))

    def _say(self, word: Word) -> Acking[int]:
        acking: Acking[int] = Acking()
        acking.counts = True
        self.send_ack(self, self.queue_offsets, acking, word)
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
