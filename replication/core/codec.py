"""Encoding of messages: the envelope of replication/proto/replication.proto.

    u32 size of the envelope | envelope | frames

Decoding checks types and ranges. The core interprets the values.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from google.protobuf.message import DecodeError

from replication.core.message_check import ID_MAX
from replication.core.peer_messages import (
    ENTRIES_MAX,
    Append,
    AppendAnswer,
    Behind,
    Conflict,
    Fence,
    FenceAnswer,
    Fetch,
    FetchAnswer,
    LogStart,
    Message,
    Refused,
    Release,
)
from replication.core.promise import Promise
from replication.core.quorum import VOTERS_MAX
from replication.proto import replication_pb2 as pb
from timer.files.disk import Bytes
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs

_SIZE: Final = struct.Struct("<I")
STARTS_MAX: Final = 16 * ENTRIES_MAX
"""Most EPOCH entries that one message names. A log's end has few that are not committed."""


def encode(message: Message, wall_ms: UnixMs, frames: Sequence[Bytes]) -> bytes:
    """Return the message and its frames in wire format."""
    envelope = pb.Envelope(under=_leadership(message.under), wall_ms=wall_ms)
    _fill(envelope, message)
    head = envelope.SerializeToString()
    return b"".join([_SIZE.pack(len(head)), head, *frames])


def decode(data: bytes) -> tuple[Message, UnixMs, memoryview]:
    """Return (message, the sender's wall clock, frames).

    Raises:
        ValueError: the bytes are no message of this version.
    """
    view = memoryview(data)
    if len(view) < _SIZE.size:
        raise ValueError(f"message of {len(view)} bytes")
    (size,) = _SIZE.unpack_from(view)
    end = _SIZE.size + size
    if end > len(view):
        raise ValueError(f"envelope of {size} bytes in a message of {len(view)}")
    try:
        envelope = pb.Envelope.FromString(bytes(view[_SIZE.size : end]))
    except DecodeError as error:
        raise ValueError(f"damaged envelope: {error}") from None
    return _message(envelope), UnixMs(envelope.wall_ms), view[end:]


def _fill(envelope: pb.Envelope, message: Message) -> None:
    match message:
        case Append():
            envelope.append.CopyFrom(
                pb.Append(
                    sent_ms=message.sent_ms,
                    to_nonce=message.to_nonce,
                    prev_epoch=message.prev_epoch,
                    prev_index=message.prev_index,
                    last_index=message.last_index,
                    starts=_starts(message.starts),
                    commit_index=message.commit_index,
                    kept_from=message.kept_from,
                )
            )
        case AppendAnswer():
            envelope.append_answer.CopyFrom(
                pb.AppendAnswer(
                    nonce=message.nonce,
                    prev_index=message.prev_index,
                    matched_index=message.matched_index,
                    durable_index=message.durable_index,
                    conflict=_conflict(message.conflict),
                    fenced_by=message.fenced_by,
                    echo_ms=message.echo_ms,
                    held_ms=message.waited_ms,
                )
            )
        case Fence():
            envelope.fence.CopyFrom(
                pb.Fence(sent_ms=message.sent_ms, last_epoch=message.last_epoch)
            )
        case FenceAnswer():
            envelope.fence_answer.CopyFrom(
                pb.FenceAnswer(
                    last_epoch=message.last_epoch,
                    last_index=message.last_index,
                    unsure=message.unsure,
                    sets=_starts(message.sets),
                    echo_ms=message.echo_ms,
                    held_ms=message.waited_ms,
                )
            )
        case Fetch():
            envelope.fetch.CopyFrom(
                pb.Fetch(prev_epoch=message.prev_epoch, prev_index=message.prev_index)
            )
        case FetchAnswer():
            envelope.fetch_answer.CopyFrom(
                pb.FetchAnswer(
                    prev_epoch=message.prev_epoch,
                    prev_index=message.prev_index,
                    last_index=message.last_index,
                    starts=_starts(message.starts),
                    conflict=_conflict(message.conflict),
                )
            )
        case Behind():
            envelope.behind.to_nonce = message.to_nonce
            envelope.behind.SetInParent()
        case Release():
            envelope.release.SetInParent()
        case Refused():
            envelope.refused.promise.CopyFrom(_leadership(message.promise))


def _message(envelope: pb.Envelope) -> Message:
    under = _promise(envelope.under)
    match envelope.WhichOneof("kind"):
        case "append":
            a = envelope.append
            return Append(
                under=under,
                sent_ms=MonoMs(a.sent_ms),
                to_nonce=Nonce(a.to_nonce),
                prev_epoch=Epoch(a.prev_epoch),
                prev_index=LogIndex(a.prev_index),
                last_index=_last_index(a.last_index, a.prev_index),
                starts=_read_starts(a.starts),
                commit_index=LogIndex(a.commit_index),
                kept_from=LogIndex(a.kept_from),
            )
        case "append_answer":
            r = envelope.append_answer
            return AppendAnswer(
                under=under,
                nonce=Nonce(r.nonce),
                prev_index=LogIndex(r.prev_index),
                matched_index=LogIndex(r.matched_index),
                durable_index=LogIndex(r.durable_index),
                conflict=_read_conflict(r.conflict) if r.HasField("conflict") else None,
                fenced_by=Epoch(r.fenced_by),
                echo_ms=MonoMs(r.echo_ms),
                waited_ms=r.held_ms,
            )
        case "fence":
            b = envelope.fence
            return Fence(under=under, last_epoch=Epoch(b.last_epoch), sent_ms=MonoMs(b.sent_ms))
        case "fence_answer":
            f = envelope.fence_answer
            return FenceAnswer(
                under=under,
                last_epoch=Epoch(f.last_epoch),
                last_index=LogIndex(f.last_index),
                unsure=f.unsure,
                sets=_read_starts(f.sets),
                echo_ms=MonoMs(f.echo_ms),
                waited_ms=f.held_ms,
            )
        case "fetch":
            return Fetch(
                under=under,
                prev_epoch=Epoch(envelope.fetch.prev_epoch),
                prev_index=LogIndex(envelope.fetch.prev_index),
            )
        case "fetch_answer":
            g = envelope.fetch_answer
            return FetchAnswer(
                under=under,
                prev_epoch=Epoch(g.prev_epoch),
                prev_index=LogIndex(g.prev_index),
                last_index=_last_index(g.last_index, g.prev_index),
                starts=_read_starts(g.starts),
                conflict=_read_conflict(g.conflict) if g.HasField("conflict") else None,
            )
        case "behind":
            return Behind(under=under, to_nonce=Nonce(envelope.behind.to_nonce))
        case "release":
            return Release(under=under)
        case "refused":
            return Refused(under=under, promise=_promise(envelope.refused.promise))
        case kind:
            raise ValueError(f"unknown message kind {kind}")


def _leadership(promise: Promise) -> pb.Leadership:
    return pb.Leadership(epoch=promise.epoch, leader=promise.leader, nonce=promise.nonce)


def _promise(leadership: pb.Leadership) -> Promise:
    for value in (leadership.epoch, leadership.leader, leadership.nonce):
        if not 1 <= value <= ID_MAX:
            raise ValueError(
                f"invalid leadership {leadership.epoch}, {leadership.leader}, {leadership.nonce}"
            )
    return Promise(Epoch(leadership.epoch), ReplicaId(leadership.leader), Nonce(leadership.nonce))


def _starts(starts: Iterable[LogStart]) -> list[pb.Start]:
    return [pb.Start(index=s.index, epoch=s.epoch, voters=sorted(s.voters)) for s in starts]


def _read_starts(starts: Sequence[pb.Start]) -> tuple[LogStart, ...]:
    if len(starts) > STARTS_MAX:
        raise ValueError(f"{len(starts)} starts: must be at most {STARTS_MAX}")
    for start in starts:
        if not 1 <= len(start.voters) <= VOTERS_MAX:
            raise ValueError(f"{len(start.voters)} voters: must be 1 .. {VOTERS_MAX}")
    return tuple(
        LogStart(LogIndex(s.index), Epoch(s.epoch), frozenset(ReplicaId(v) for v in s.voters))
        for s in starts
    )


def _conflict(conflict: Conflict | None) -> pb.Conflict | None:
    if conflict is None:
        return None
    return pb.Conflict(
        epoch=conflict.epoch, first_index=conflict.first_index, last_index=conflict.last_index
    )


def _read_conflict(conflict: pb.Conflict) -> Conflict:
    return Conflict(
        Epoch(conflict.epoch), LogIndex(conflict.first_index), LogIndex(conflict.last_index)
    )


def _last_index(last: int, prev: int) -> LogIndex:
    if not prev <= last <= prev + ENTRIES_MAX:
        raise ValueError(f"entries from {prev} to {last}: must be 0 .. {ENTRIES_MAX}")
    return LogIndex(last)
