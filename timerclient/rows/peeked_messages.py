"""Messages that were shown and not delivered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.rows.message_json import payload_fields
from timerclient.rows.scheduled_timers import HasTimerId
from timerclient.values import ids
from timerclient.values.codecs import PayloadReader


class PeekState(IntEnum):
    """State of a message in a group."""

    UNKNOWN = 0
    """The call named no group."""
    READY = 1
    """It waits for a consumer."""
    LEASED = 2
    """A consumer has it."""
    DELAYED = 3
    """A nack has delayed it."""
    ENDING = 4
    """Its ack, its nack or the end of its lease is being committed."""


@dataclass(frozen=True, slots=True)
class PeekedMessage(PayloadReader, HasTimerId):
    """One message, at the moment of the call."""

    raw: bytes
    """Id of its timer, 15 bytes."""
    queue_offset: int
    state: PeekState
    requested_ms: int
    """The requested due time, Unix milliseconds."""
    fired_at_ms: int
    failures: int
    """Its nacks and ended leases in the group."""
    key: str | None
    headers: Mapping[str, str]
    payload: bytes
    ordering_key: str | None = None
    priority: int = rows.PRIORITY_DEFAULT

    def __repr__(self) -> str:
        return (
            f"PeekedMessage({self.id!r}, {self.state.name}, queue_offset={self.queue_offset}, "
            f"failures={self.failures}, key={self.key!r})"
        )


@dataclass(frozen=True, slots=True)
class Peeked:
    """The result of a call."""

    messages: list[PeekedMessage]
    """In the order of their offsets."""
    next_offset: int
    """`from_offset` of a call that continues; 0: no message follows."""


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Messages of a range of queue offsets, as a call of `read_messages` returned them."""

    columns: pb.Deliveries = field(repr=False)
    """The messages as columns, without lease and attempts; `messages` has them as objects."""
    next_offset: int
    """`from_offset` of a call that continues."""
    begin_offset: int
    """Offset of the oldest message that the topic keeps. Messages below it were deleted."""
    end_offset: int
    """Offset of the next message that will fire."""
    topic_id: int
    """Another one, with offsets from 0, after the topic was deleted and created again."""

    def __len__(self) -> int:
        return len(self.columns.queue_offsets)

    @property
    def messages(self) -> list[PeekedMessage]:
        """The messages, in the order of their offsets. Omitted payloads are empty."""
        return messages_of(self.columns)


def peeked_of(answer: pb.PeekResponse) -> Peeked:
    """Return the messages of an answer."""
    return Peeked(messages_of(answer.messages, answer.states), answer.next_offset)


def page_of(answer: pb.ReadMessagesResponse) -> MessagePage:
    """Return the messages of an answer."""
    offsets = answer.next_offset, answer.begin_offset, answer.end_offset
    return MessagePage(answer.messages, *offsets, answer.topic_id)


def messages_of(
    of: pb.Deliveries | pb.ReceiveResponse, states: Sequence[int] = ()
) -> list[PeekedMessage]:
    """Return the messages in columns. `states`: one for each; empty: they are not known."""
    count = len(of.queue_offsets)
    timer_ids = ids.split(of.timer_ids)  # once: each look at a field of bytes copies it
    payloads = rows.slices(of.payload_sizes, of.payloads)
    keys = rows.slices(of.key_sizes, of.keys, count)
    headers = rows.slices(of.headers_sizes, of.headers, count)
    orders = rows.slices(of.ordering_key_sizes, of.ordering_keys, count)
    return [
        PeekedMessage(
            timer_ids[at],
            of.queue_offsets[at],
            PeekState(states[at]) if states else PeekState.UNKNOWN,
            of.due_ms[at],
            of.fired_at_ms[at],
            of.failures[at] if of.failures else 0,
            keys[at].decode() or None,
            rows.decode_headers(headers[at]),
            payloads[at],
            orders[at].decode() or None,
            of.priorities[at] if of.priorities else rows.PRIORITY_DEFAULT,
        )
        for at in range(count)
    ]


def document_of(message: PeekedMessage) -> dict[str, Any]:
    """Return a message for JSON."""
    return {
        "id": message.id,
        "queue_offset": message.queue_offset,
        "state": message.state.name if message.state else None,
        "due_ms": message.due_ms,
        "requested_ms": message.requested_ms,
        "fired_at_ms": message.fired_at_ms,
        "failures": message.failures,
        "key": message.key,
        "ordering_key": message.ordering_key,
        "priority": message.priority,
        "headers": dict(message.headers),
        **payload_fields(message.payload),
    }
