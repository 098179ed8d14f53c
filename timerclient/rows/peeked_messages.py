"""Messages that were shown and not delivered."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.rows.message_json import payload_fields
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
class PeekedMessage(PayloadReader):
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
    headers: Mapping[str, str] = field(repr=False)
    payload: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """The id as text."""
        return ids.to_text(self.raw)

    @property
    def due_ms(self) -> int:
        """The effective due time, Unix milliseconds."""
        return ids.due_ms_of(self.raw)


@dataclass(frozen=True, slots=True)
class Peeked:
    """The result of a call."""

    messages: list[PeekedMessage]
    """In the order of their offsets."""
    next_offset: int
    """`from_offset` of a call that continues; 0: no message follows."""


def peeked(answer: pb.PeekResponse) -> Peeked:
    """Return the messages of an answer."""
    of = answer.messages
    count = len(of.queue_offsets)
    payloads = rows.slices(of.payload_sizes, of.payloads)
    keys = rows.slices(of.key_sizes, of.keys) or [b""] * count
    headers = rows.slices(of.headers_sizes, of.headers) or [b""] * count
    messages = [
        PeekedMessage(
            of.timer_ids[at * ids.SIZE : (at + 1) * ids.SIZE],
            of.queue_offsets[at],
            PeekState(answer.states[at]),
            of.due_ms[at],
            of.fired_at_ms[at],
            of.failures[at] if of.failures else 0,
            keys[at].decode() or None,
            rows.decode_headers(headers[at]),
            payloads[at],
        )
        for at in range(count)
    ]
    return Peeked(messages, answer.next_offset)


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
        "headers": dict(message.headers),
        **payload_fields(message.payload),
    }
