"""Payloads of the log's entries other than SCHEDULE and POLICY, format version 2.

What is frequent is fixed and little-endian; what is rare (TOPIC, PRODUCER, creation of a
group) is a msgpack map with exactly the keys of its dataclass.

    EPOCH       epoch u64, leader u64, apply_version u32, v u32, voters v x u64
    CANCEL      targets
    RESCHEDULE  targets, due_ms n x i64 (effective), requested_ms n x i64
    FIRE        read_time_ms i64, rows_max u32, bytes_max u32
    GROUP       ops, each: op u8, 3 x 0, topic u32, group u32, n u32, then by op:
                  CREATE    n bytes of msgpack {name, start, lease_ms}, padded to 8 with zeros
                  ACK       n x u64 queue offsets: done, never delivered again
                  ENDED     n x u64 queue offsets: their lease ended unacked; attempts rise
                  RESERVE   1 x u64: the leader may hand out offsets below this one
    TOPIC       msgpack {name}
    PRODUCER    msgpack {token}
    CHECKPOINT  nothing

Targets name n timers, by id (by = 0) or by topic and key (by = 1):

    0   n u32, by u32, due_ms n x i64, seq n x u64
    1   n u32, by u32, topic n x u32, key_size n x u32, keys, zeros up to a multiple of 8
"""

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np

from timer.columns import I64, U32, U64, Binary
from timer.units import Epoch, GroupId, ReplicaId, TopicId, UnixMs

_EPOCH: Final = struct.Struct("<QQII")
_TARGETS: Final = struct.Struct("<II")
_FIRE: Final = struct.Struct("<qII")
_OP: Final = struct.Struct("<B3xIII")

APPLY_VERSION: Final = 4
"""How entries are applied; a replica that does not know an epoch's version stops. 3: keys are
unique among the pending timers of a topic; RESCHEDULE. 4: POLICY."""
FIRE_ROWS_MAX: Final = 65_536
FIRE_BYTES_MAX: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class EpochStart:
    """The first entry of an epoch: who leads it, who votes in it, how entries are applied."""

    epoch: Epoch
    leader: ReplicaId
    voters: tuple[ReplicaId, ...]
    apply_version: int = APPLY_VERSION


def encode_epoch(start: EpochStart) -> bytes:
    """Return the payload of an EPOCH entry."""
    head = _EPOCH.pack(start.epoch, start.leader, start.apply_version, len(start.voters))
    return head + struct.pack(f"<{len(start.voters)}Q", *start.voters)


def decode_epoch(payload: memoryview) -> EpochStart:
    """Return what an EPOCH entry says.

    Raises:
        ValueError: the payload is malformed.
    """
    if len(payload) < _EPOCH.size:
        raise ValueError(f"EPOCH of {len(payload)} bytes")
    epoch, leader, apply_version, n = _EPOCH.unpack_from(payload)
    if len(payload) != _EPOCH.size + 8 * n or n == 0:
        raise ValueError(f"EPOCH of {len(payload)} bytes with {n} voters")
    voters = struct.unpack_from(f"<{n}Q", payload, _EPOCH.size)
    return EpochStart(
        Epoch(epoch), ReplicaId(leader), tuple(ReplicaId(v) for v in voters), apply_version
    )


@dataclass(frozen=True, slots=True)
class Ids:
    """Timers by (due_ms, seq), each (n,)."""

    due_ms: I64
    seq: U64

    def __len__(self) -> int:
        return len(self.seq)


@dataclass(frozen=True, slots=True)
class Keys:
    """Timers by topic (n,) and key: those that are pending and have it."""

    topic: U32
    key: Binary

    def __len__(self) -> int:
        return len(self.topic)


Targets: TypeAlias = Ids | Keys


@dataclass(frozen=True, slots=True)
class Reschedule:
    """Targets and when they fire instead: effective and requested due times, (n, int64)."""

    targets: Targets
    due_ms: I64
    requested_ms: I64


def encode_cancel(targets: Targets) -> list[bytes]:
    """Return the payload of a CANCEL entry."""
    if isinstance(targets, Ids):
        columns = [targets.due_ms.astype("<i8"), targets.seq.astype("<u8")]
        return [_TARGETS.pack(len(targets), 0), *(column.tobytes() for column in columns)]
    sizes, blob = targets.key.sizes.astype("<u4"), bytes(targets.key.blob)
    head = _TARGETS.pack(len(targets), 1) + targets.topic.astype("<u4").tobytes()
    return [head, sizes.tobytes(), blob, bytes(-len(blob) % 8)]


def decode_cancel(payload: memoryview) -> Targets:
    """Return the timers to cancel.

    Raises:
        ValueError: the payload is malformed.
    """
    targets, end = _targets(payload)
    if end != len(payload):
        raise ValueError(f"CANCEL of {len(payload)} bytes: its targets end at byte {end}")
    return targets


def encode_reschedule(order: Reschedule) -> list[bytes]:
    """Return the payload of a RESCHEDULE entry."""
    times = [order.due_ms.astype("<i8"), order.requested_ms.astype("<i8")]
    return [*encode_cancel(order.targets), *(column.tobytes() for column in times)]


def decode_reschedule(payload: memoryview) -> Reschedule:
    """Return what a RESCHEDULE entry says.

    Raises:
        ValueError: the payload is malformed.
    """
    targets, end = _targets(payload)
    n = len(targets)
    if end + 16 * n != len(payload):
        raise ValueError(f"RESCHEDULE of {len(payload)} bytes: targets of {n} end at byte {end}")
    due = np.frombuffer(payload, "<i8", n, end)
    return Reschedule(targets, due, np.frombuffer(payload, "<i8", n, end + 8 * n))


def _targets(payload: memoryview) -> tuple[Targets, int]:
    """Return the targets that the payload begins with, and where they end."""
    if len(payload) < _TARGETS.size:
        raise ValueError(f"targets in {len(payload)} bytes")
    n, by = _TARGETS.unpack_from(payload)
    start = _TARGETS.size
    width = {0: 16, 1: 8}.get(by)
    if not n or width is None or start + width * n > len(payload):
        raise ValueError(f"targets in {len(payload)} bytes: {n}, by {by}")
    if by == 0:
        due = np.frombuffer(payload, "<i8", n, start)
        return Ids(due, np.frombuffer(payload, "<u8", n, start + 8 * n)), start + 16 * n
    topic = np.frombuffer(payload, "<u4", n, start)
    sizes = np.frombuffer(payload, "<u4", n, start + 4 * n)
    start += 8 * n
    size = int(sizes.sum(dtype=np.int64))
    end = start + size + -size % 8
    if end > len(payload):
        raise ValueError(f"targets in {len(payload)} bytes: keys end at byte {end}")
    return Keys(topic, Binary(sizes=sizes, blob=payload[start : start + size])), end


@dataclass(frozen=True, slots=True)
class Fire:
    """What is due by `read_time_ms` fires, in (due, seq) order, up to the limits."""

    read_time_ms: UnixMs
    rows_max: int = FIRE_ROWS_MAX
    bytes_max: int = FIRE_BYTES_MAX


def encode_fire(fire: Fire) -> bytes:
    """Return the payload of a FIRE entry."""
    return _FIRE.pack(fire.read_time_ms, fire.rows_max, fire.bytes_max)


def decode_fire(payload: memoryview) -> Fire:
    """Return what a FIRE entry says.

    Raises:
        ValueError: the payload is malformed.
    """
    if len(payload) != _FIRE.size:
        raise ValueError(f"FIRE of {len(payload)} bytes")
    read_time_ms, rows_max, bytes_max = _FIRE.unpack(payload)
    if read_time_ms < 0 or not 1 <= rows_max <= FIRE_ROWS_MAX:
        raise ValueError(f"FIRE of up to {rows_max} rows at {read_time_ms}")
    return Fire(UnixMs(read_time_ms), rows_max, bytes_max)


class Op(enum.IntEnum):
    """What one op of a GROUP entry does."""

    CREATE = 1
    ACK = 2
    ENDED = 3
    RESERVE = 4


class Start(enum.StrEnum):
    """Where a new group begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class CreateGroup:
    """A group of a topic comes into being; its id is issued at apply."""

    topic: TopicId
    name: str
    start: Start
    lease_ms: int
    """Default time that a consumer holds a message."""


@dataclass(frozen=True, slots=True)
class GroupOp:
    """ACK, ENDED or RESERVE: `offsets` is (n, uint64)."""

    op: Op
    topic: TopicId
    group: GroupId
    offsets: U64


def encode_group(ops: Sequence[CreateGroup | GroupOp]) -> list[bytes]:
    """Return the payload of a GROUP entry, in pieces to be concatenated."""
    pieces: list[bytes] = []
    for op in ops:
        if isinstance(op, CreateGroup):
            body: bytes = msgpack.packb(
                {"name": op.name, "start": str(op.start), "lease_ms": op.lease_ms}
            )
            pieces += [_OP.pack(Op.CREATE, op.topic, 0, len(body)), body, bytes(-len(body) % 8)]
        else:
            assert op.op is not Op.CREATE
            pieces.append(_OP.pack(op.op, op.topic, op.group, len(op.offsets)))
            pieces.append(op.offsets.astype("<u8", copy=False).tobytes())
    return pieces


def decode_group(payload: memoryview) -> Iterator[CreateGroup | GroupOp]:
    """Yield the ops of a GROUP entry, in order.

    Raises:
        ValueError: the payload is malformed.
    """
    position = 0
    while position < len(payload):
        if position + _OP.size > len(payload):
            raise ValueError(f"GROUP ends within the head of an op, at byte {len(payload)}")
        code, topic, group, n = _OP.unpack_from(payload, position)
        position += _OP.size
        op = Op(code)
        end = position + (n + -n % 8 if op is Op.CREATE else 8 * n)
        if end > len(payload) or (op is Op.RESERVE and n != 1):
            raise ValueError(f"GROUP of {len(payload)} bytes: {op.name} of {n} up to byte {end}")
        if op is Op.CREATE:
            yield _create_group(TopicId(topic), payload[position : position + n])
        else:
            offsets = np.frombuffer(payload, "<u8", n, position)
            yield GroupOp(op, TopicId(topic), GroupId(group), offsets)
        position = end


def _create_group(topic: TopicId, body: memoryview) -> CreateGroup:
    fields = _unpack(body, {"name": str, "start": str, "lease_ms": int})
    return CreateGroup(topic, fields["name"], Start(fields["start"]), fields["lease_ms"])


def encode_topic(name: str) -> bytes:
    """Return the payload of a TOPIC entry that creates `name`."""
    return bytes(msgpack.packb({"name": name}))


def decode_topic(payload: memoryview) -> str:
    """Return the name of the topic to create.

    Raises:
        ValueError: the payload is malformed.
    """
    name: str = _unpack(payload, {"name": str})["name"]
    return name


def encode_producer(token: bytes) -> bytes:
    """Return the payload of a PRODUCER entry; a repeated token gets the id issued before."""
    return bytes(msgpack.packb({"token": token}))


def decode_producer(payload: memoryview) -> bytes:
    """Return the token of the producer to register.

    Raises:
        ValueError: the payload is malformed.
    """
    token: bytes = _unpack(payload, {"token": bytes})["token"]
    return token


def _unpack(payload: memoryview, types: dict[str, type]) -> dict[str, Any]:
    """Return a map that has exactly these keys, with values of these types.

    Raises:
        ValueError: it is something else. (What msgpack raises is a ValueError too.)
    """
    fields = msgpack.unpackb(payload)
    if not isinstance(fields, dict) or fields.keys() != types.keys():
        raise ValueError(f"expected a map with {sorted(types)}, got {fields!r}")
    if any(type(fields[key]) is not expected for key, expected in types.items()):
        raise ValueError(f"a field of a wrong type in {fields!r}")
    return fields
