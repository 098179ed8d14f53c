"""Payloads of the log's entries other than SCHEDULE and POLICY, format version 2.

Frequent payloads are fixed and little-endian. Rare ones (TOPIC, PRODUCER, creation of a group) are
a msgpack map with exactly the keys of its dataclass.

    EPOCH       epoch u64, leader u64, apply_version u32, v u32, voters v x u64;
                apply_version: 13 + the feature level of the epoch
    CANCEL      targets
    RESCHEDULE  targets, due_ms n x i64 (effective), requested_ms n x i64
    FIRE        read_time_ms i64, rows_max u32, bytes_max u32, topics_max u32
    GROUP       ops, each: op u8, 3 x 0, topic u32, group u32, n u32, then by op:
                  CREATE    n bytes of msgpack {name, start, settings, creator}, padded to 8
                  ACK       n x u64 queue offsets: done, never delivered again
                  ENDED     n x u64 queue offsets: their lease ended unacked; attempts rise
                  RECALL    n x u64 queue offsets: taken back, because an earlier message failed;
                            deliveries rise, failures do not
                  RESERVE   1 x u64: the leader may deliver offsets below this one
                  HAND_OVER 1 x u64: the leader has delivered nothing at or above this offset, and
                            will not before the next RESERVE; a RECALL before it counts the leased
                            messages
                  SEEK      1 x u64: the group continues from this offset, with a new id
                  DELETE    n = 0: the group is deleted
                  EXPIRE_BELOW  1 x u64, group = 0: messages below this offset have expired: they
                            are done in every group, and the topic deletes them
                  EXPIRE    n x u64 queue offsets, all different: done, because they have expired
                  NACK      n x u64 queue offsets, n x i64 earliest time of the next delivery
                  ALTER     n bytes of msgpack, the changed settings, padded to 8
                  MOVE      n bytes of msgpack {to, to_group, offsets, rows}, padded to 8: unacked
                            messages of these offsets are acked, and added to the topic `to` as new
                            messages, which fire at once; it uses n seqs, as rows do
    TOPIC       msgpack {name, creator}: the topic is created if it does not exist; or
                msgpack {delete}: the topic of this id is deleted with all its objects
    PRODUCER    msgpack {token, id}: the id that the leader drew, void if it is in use; or
                msgpack {end}: the producer of this id has ended
    CHECKPOINT  producer_idle_ms u64: producers idle for longer are removed; or empty: the time is
                that of timer/state/producers.py

`creator` is an identity. It is absent if there is none, and at feature level 1.

Targets name n timers, by id (by = 0) or by topic and key (by = 1):

    0   n u32, by u32, due_ms n x i64, seq n x u64
    1   n u32, by u32, topic n x u32, key_size n x u32, keys, zeros up to a multiple of 8
"""

import enum
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack
import numpy as np

from timer.model.columns import I64, U32, U64, Binary, decode_schedule
from timer.model.units import DUE_MS_MAX, Epoch, GroupId, ProducerId, ReplicaId, TopicId, UnixMs

_EPOCH: Final = struct.Struct("<QQII")
_TARGETS: Final = struct.Struct("<II")
_FIRE: Final = struct.Struct("<qIII")
_CHECKPOINT: Final = struct.Struct("<Q")
_OP: Final = struct.Struct("<B3xIII")

_LEVEL_0: Final = 13
"""The rules by which entries are applied have a version in each EPOCH entry: this number, and the
feature level. A replica that does not know an epoch's version stops. Before the first release:
3: keys are unique among the pending timers of a topic; RESCHEDULE. 4: POLICY. 5: settings of
groups; NACK, ALTER, MOVE, RECALL, SEEK, DELETE. 6: EXPIRE_BELOW, EXPIRE; retention by policy; TOPIC
that deletes. 7: a sweep serves some topics, and counts their rows. 9: the end of a held timer is
forgotten by the marks of fired rows. 10: HAND_OVER; an epoch begins with nothing reserved; the
leader draws ids of producers; the body distinguishes a repeated sequence. 11: the digest sums
groups and producers. 12: a FIRE has a limit of topics, too. 13: PRODUCER that ends.
14: outcomes of ended timers have a limit of memory (the constants of
timer/state/cancel_outcomes.py are part of it)."""
NAME_SIZE_MAX: Final = 1_024
FIRE_ROWS_MAX: Final = 16_384
FIRE_ROWS: Final = 8_192
"""Limit of the leader's FIREs, as are the next two. To apply one takes 5 to 10 ms."""
FIRE_TOPICS_MAX: Final = 256
FIRE_BYTES_MAX: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class EpochStart:
    """The first entry of an epoch: its leader, its voters and its feature level."""

    epoch: Epoch
    leader: ReplicaId
    voters: tuple[ReplicaId, ...]
    level: int = 1
    """See timer/model/feature_level.py. Below 1: of a program before the first release."""


def encode_epoch(start: EpochStart) -> bytes:
    """Return the payload of an EPOCH entry."""
    version = _LEVEL_0 + start.level
    head = _EPOCH.pack(start.epoch, start.leader, version, len(start.voters))
    return head + struct.pack(f"<{len(start.voters)}Q", *start.voters)


def decode_epoch(payload: memoryview) -> EpochStart:
    """Return the content of an EPOCH entry.

    Raises:
        ValueError: the payload is malformed.
    """
    if len(payload) < _EPOCH.size:
        raise ValueError(f"EPOCH of {len(payload)} bytes: must be at least {_EPOCH.size}")
    epoch, leader, apply_version, n = _EPOCH.unpack_from(payload)
    if len(payload) != _EPOCH.size + 8 * n or n == 0:
        size = _EPOCH.size + 8 * n
        raise ValueError(f"EPOCH of {len(payload)} bytes: must be {size} for {n} voters, 1 or more")
    voters = struct.unpack_from(f"<{n}Q", payload, _EPOCH.size)
    return EpochStart(
        Epoch(epoch), ReplicaId(leader), tuple(map(ReplicaId, voters)), apply_version - _LEVEL_0
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
    """Timers by topic (n,) and key: the pending timers with these keys."""

    topic: U32
    key: Binary

    def __len__(self) -> int:
        return len(self.topic)

    def names(self) -> list[tuple[int, bytes]]:
        """Return (topic, key) of each timer."""
        return list(zip(self.topic.tolist(), self.key.values(), strict=True))


Targets: TypeAlias = Ids | Keys


@dataclass(frozen=True, slots=True)
class Reschedule:
    """Targets and their new due times, effective and requested (n, int64)."""

    targets: Targets
    due_ms: I64
    requested_ms: I64


def encode_cancel(targets: Targets) -> list[bytes]:
    """Return the payload of a CANCEL entry."""
    if isinstance(targets, Ids):
        columns = [targets.due_ms.astype("<i8", copy=False), targets.seq.astype("<u8", copy=False)]
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


def count_targets(payload: memoryview) -> tuple[int, bool]:
    """Return how many timers a CANCEL or RESCHEDULE names, and whether by key. Checks no more.

    Raises:
        ValueError: the payload is malformed.
    """
    if len(payload) < _TARGETS.size:
        raise ValueError(f"targets of {len(payload)} bytes: must be at least {_TARGETS.size}")
    n, by = _TARGETS.unpack_from(payload)
    return n, by != 0


def encode_reschedule(order: Reschedule) -> list[bytes]:
    """Return the payload of a RESCHEDULE entry."""
    times = [order.due_ms.astype("<i8"), order.requested_ms.astype("<i8")]
    return [*encode_cancel(order.targets), *(column.tobytes() for column in times)]


def decode_reschedule(payload: memoryview) -> Reschedule:
    """Return the content of a RESCHEDULE entry.

    Raises:
        ValueError: the payload is malformed.
    """
    targets, end = _targets(payload)
    n = len(targets)
    if end + 16 * n != len(payload):
        size = end + 16 * n
        raise ValueError(f"RESCHEDULE of {len(payload)} bytes: must be {size} for {n} targets")
    due = np.frombuffer(payload, "<i8", n, end)
    return Reschedule(targets, due, np.frombuffer(payload, "<i8", n, end + 8 * n))


def _targets(payload: memoryview) -> tuple[Targets, int]:
    """Return the targets at the start of the payload, and where they end."""
    if len(payload) < _TARGETS.size:
        raise ValueError(f"targets of {len(payload)} bytes: must be at least {_TARGETS.size}")
    n, by = _TARGETS.unpack_from(payload)
    start = _TARGETS.size
    width = {0: 16, 1: 8}.get(by)
    if not n or width is None or start + width * n > len(payload):
        raise ValueError(
            f"{n} targets of kind {by} in {len(payload)} bytes: must be 1 or more, of kind 0 (id)"
            " or 1 (key), within the payload"
        )
    if by == 0:
        due = np.frombuffer(payload, "<i8", n, start)
        return Ids(due, np.frombuffer(payload, "<u8", n, start + 8 * n)), start + 16 * n
    topic = np.frombuffer(payload, "<u4", n, start)
    sizes = np.frombuffer(payload, "<u4", n, start + 4 * n)
    start += 8 * n
    size = int(sizes.sum(dtype=np.int64))
    end = start + size + -size % 8
    if end > len(payload):
        raise ValueError(f"targets of {len(payload)} bytes: their keys end at byte {end}")
    return Keys(topic, Binary(sizes=sizes, blob=payload[start : start + size])), end


class Fire(NamedTuple):
    """Rows due by `read_time_ms` fire, in (due, seq) order, up to the limits."""

    read_time_ms: UnixMs
    rows_max: int = FIRE_ROWS
    bytes_max: int = FIRE_BYTES_MAX
    topics_max: int = FIRE_TOPICS_MAX


def encode_fire(fire: Fire) -> bytes:
    """Return the payload of a FIRE entry."""
    return _FIRE.pack(fire.read_time_ms, fire.rows_max, fire.bytes_max, fire.topics_max)


def decode_fire(payload: memoryview) -> Fire:
    """Return the content of a FIRE entry.

    Raises:
        ValueError: the payload is malformed.
    """
    if len(payload) != _FIRE.size:
        raise ValueError(f"FIRE of {len(payload)} bytes: must be {_FIRE.size}")
    read_time_ms, rows_max, bytes_max, topics_max = _FIRE.unpack(payload)
    if not 0 <= read_time_ms <= DUE_MS_MAX:
        raise ValueError(f"FIRE at read_time_ms = {read_time_ms}: must be in 0 .. {DUE_MS_MAX}")
    if not 1 <= rows_max <= FIRE_ROWS_MAX:
        raise ValueError(f"FIRE of rows_max = {rows_max}: must be in 1 .. {FIRE_ROWS_MAX}")
    if topics_max < 1:
        raise ValueError(f"FIRE of topics_max = {topics_max}: must be at least 1")
    return Fire(UnixMs(read_time_ms), rows_max, bytes_max, topics_max)


class Op(enum.IntEnum):
    """The effect of one op of a GROUP entry."""

    CREATE = 1
    ACK = 2
    ENDED = 3
    RESERVE = 4
    NACK = 5
    ALTER = 6
    MOVE = 7
    RECALL = 8
    SEEK = 9
    DELETE = 10
    EXPIRE_BELOW = 11
    EXPIRE = 12
    HAND_OVER = 13


class GroupStart(enum.StrEnum):
    """The first message of a new group."""

    EARLIEST = "earliest"
    LATEST = "latest"


SHARED: Final = "shared"
KEY_SHARED: Final = "key_shared"
EXCLUSIVE: Final = "exclusive"
FAILOVER: Final = "failover"
TYPES: Final = (SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """How a group delivers. Names, units and order are those of the log and of the manifest."""

    lease_ms: int
    """Default lease of a message, in milliseconds."""
    max_attempts: int = 0
    """Nacks and ended leases after which a message is a dead letter. 0: no limit."""
    dead_letter_topic: str = ""
    """Empty: `<topic>.<group>.dead`."""
    backoff_ms_min: int = 0
    """Wait after the first nack without a delay. Each further one doubles it."""
    backoff_ms_max: int = 0
    """Upper limit of that wait."""
    type: str = SHARED
    """One of TYPES. Never changes."""
    max_in_flight: int = 0
    """Messages that all consumers together may hold. 0: no limit."""

    def check(self) -> "GroupSettings":
        """Return itself, checked.

        Raises:
            ValueError: a value is out of range. Nodes have narrower limits.
        """
        for name in GroupSettings.__slots__:
            value = getattr(self, name)
            if isinstance(value, int) and not 0 <= value <= DUE_MS_MAX:
                raise ValueError(f"{name} = {value}: must be in 0 .. {DUE_MS_MAX}")
        if not self.lease_ms:
            raise ValueError(f"lease_ms = {self.lease_ms}: must be at least 1")
        if self.type not in TYPES:
            raise ValueError(f"type = {self.type!r}: must be one of {', '.join(TYPES)}")
        return self


@dataclass(frozen=True, slots=True)
class CreateGroup:
    """A new group of a topic. Its id is issued when the entry is applied."""

    topic: TopicId
    name: str
    start: GroupStart
    settings: GroupSettings
    creator: str = ""
    """See timer/state/creators.py."""


@dataclass(frozen=True, slots=True)
class AlterGroup:
    """A change of some settings of a group. The others keep their values."""

    topic: TopicId
    group: GroupId
    changes: Mapping[str, int | str]
    """Field of GroupSettings -> its new value."""

    def of(self, settings: GroupSettings) -> GroupSettings:
        """Return the changed settings."""
        return GroupSettings(**{**asdict(settings), **self.changes})


MOVED_GROUP: Final = GroupSettings(lease_ms=30_000)
"""Settings of a group that a MOVE creates."""


@dataclass(frozen=True, slots=True)
class GroupOp:
    """An op that only has queue offsets: `offsets` is (n, uint64)."""

    op: Op
    topic: TopicId
    group: GroupId
    offsets: U64


@dataclass(frozen=True, slots=True)
class Nack(GroupOp):
    """Leases ended by their holders. No delivery before `not_before_ms` (n, int64)."""

    not_before_ms: I64


@dataclass(frozen=True, slots=True)
class Move(GroupOp):
    """Messages that leave a group and fire at once as new messages of another topic."""

    to: str
    """Name of the topic. It is created if it does not exist."""
    to_group: str
    """A group that is created in the topic first, if it does not exist. Empty: none."""
    rows: bytes
    """Payload of a SCHEDULE of n rows, in the order of `offsets`. Its topics are ignored."""


AnyOp: TypeAlias = CreateGroup | AlterGroup | GroupOp
_SETTINGS: Final[Mapping[str, type]] = {
    each.name: str if each.name in ("dead_letter_topic", "type") else int
    for each in fields(GroupSettings)
}
_ALTERABLE: Final = _SETTINGS.keys() - {"type"}


def encode_group(ops: Sequence[AnyOp]) -> list[bytes]:
    """Return the payload of a GROUP entry, in pieces to be concatenated."""
    pieces: list[bytes] = []
    for op in ops:
        match op:
            case CreateGroup():
                body: dict[str, Any] = {
                    "name": op.name,
                    "start": str(op.start),
                    "settings": asdict(op.settings),
                    **_creator(op.creator),
                }
                pieces += _map(Op.CREATE, op.topic, 0, body)
            case AlterGroup():
                pieces += _map(Op.ALTER, op.topic, op.group, op.changes)
            case Move():
                offsets = op.offsets.astype("<u8", copy=False).tobytes()
                body = {"to": op.to, "to_group": op.to_group, "offsets": offsets, "rows": op.rows}
                pieces += _map(Op.MOVE, op.topic, op.group, body)
            case _:
                assert op.op in _COLUMNS, op
                pieces.append(_OP.pack(op.op, op.topic, op.group, len(op.offsets)))
                pieces.append(op.offsets.astype("<u8", copy=False).tobytes())
                if isinstance(op, Nack):
                    pieces.append(op.not_before_ms.astype("<i8", copy=False).tobytes())
    return pieces


def _map(op: Op, topic: int, group: int, fields: Mapping[str, Any]) -> list[bytes]:
    body: bytes = msgpack.packb(fields)
    return [_OP.pack(op, topic, group, len(body)), body, bytes(-len(body) % 8)]


_COLUMNS: Final = {
    **dict.fromkeys((Op.ACK, Op.ENDED, Op.RECALL, Op.RESERVE, Op.SEEK, Op.DELETE), 8),
    **dict.fromkeys((Op.EXPIRE_BELOW, Op.EXPIRE, Op.HAND_OVER), 8),
    Op.NACK: 16,
}
"""Bytes per offset, in the ops that are not maps."""
_COUNTS: Final = {
    **dict.fromkeys((Op.RESERVE, Op.SEEK, Op.EXPIRE_BELOW, Op.HAND_OVER), 1),
    Op.DELETE: 0,
}
"""Number of offsets, in the ops with a fixed number."""


def decode_group(payload: memoryview) -> Iterator[AnyOp]:
    """Yield the ops of a GROUP entry, in order.

    Raises:
        ValueError: the payload is malformed.
    """
    position = 0
    while position < len(payload):
        if position + _OP.size > len(payload):
            raise ValueError(f"GROUP of {len(payload)} bytes: ends within the head of an op")
        code, topic, group, n = _OP.unpack_from(payload, position)
        position += _OP.size
        op = Op(code)
        end = position + (_COLUMNS[op] * n if op in _COLUMNS else n + -n % 8)
        stray = op is Op.EXPIRE_BELOW and group
        if end > len(payload) or n != _COUNTS.get(op, n) or stray:
            raise ValueError(
                f"GROUP of {len(payload)} bytes: {op.name} with count {n} and group {group} ends at"
                f" byte {end}, or has a wrong count or group"
            )
        if op in _COLUMNS:
            offsets = np.frombuffer(payload, "<u8", n, position)
            if op is Op.NACK:
                times = np.frombuffer(payload, "<i8", n, position + 8 * n)
                yield Nack(op, TopicId(topic), GroupId(group), offsets, times)
            else:
                yield GroupOp(op, TopicId(topic), GroupId(group), offsets)
        else:
            body = payload[position : position + n]
            yield _MAPS[op](TopicId(topic), GroupId(group), body)
        position = end


def _create_group(topic: TopicId, group: GroupId, body: memoryview) -> CreateGroup:
    del group
    values = msgpack.unpackb(body)
    read = _typed_created(values, {"name": str, "start": str, "settings": dict})
    settings = GroupSettings(**_typed(read["settings"], _SETTINGS)).check()
    name, start = _name(read["name"]), GroupStart(read["start"])
    return CreateGroup(topic, name, start, settings, read["creator"])


def _alter_group(topic: TopicId, group: GroupId, body: memoryview) -> AlterGroup:
    changes = msgpack.unpackb(body)
    if not isinstance(changes, dict) or not changes.keys() <= _ALTERABLE:
        raise ValueError(f"{changes!r}: must be a map with fields of {sorted(_ALTERABLE)}")
    typed = _typed(changes, {name: _SETTINGS[name] for name in changes})
    replace(MOVED_GROUP, **typed).check()
    return AlterGroup(topic, group, typed)


def _move(topic: TopicId, group: GroupId, body: memoryview) -> Move:
    read = _unpack(body, {"to": str, "to_group": str, "offsets": bytes, "rows": bytes})
    offsets = np.frombuffer(read["offsets"], "<u8")
    count = len(decode_schedule(memoryview(read["rows"])).rows)
    if count != len(offsets):
        raise ValueError(f"MOVE of {len(offsets)} offsets and {count} rows: must be equal")
    to_group = read["to_group"] and _name(read["to_group"])
    return Move(Op.MOVE, topic, group, offsets, _name(read["to"]), to_group, read["rows"])


_MAPS: Final[Mapping[Op, Callable[[TopicId, GroupId, memoryview], AnyOp]]] = {
    Op.CREATE: _create_group,
    Op.ALTER: _alter_group,
    Op.MOVE: _move,
}


def _name(name: str) -> str:
    """Return the name of a topic or group if its size is valid. Nodes have narrower limits."""
    if not 1 <= len(name) <= NAME_SIZE_MAX:
        raise ValueError(f"name of {len(name)} characters: must be in 1 .. {NAME_SIZE_MAX}")
    return name


@dataclass(frozen=True, slots=True)
class CreateTopic:
    """A new topic, if none has the name."""

    name: str
    creator: str = ""
    """See timer/state/creators.py."""


def encode_topic(name: str, creator: str = "") -> bytes:
    """Return the payload of a TOPIC entry that creates `name`."""
    return bytes(msgpack.packb({"name": name, **_creator(creator)}))


def _creator(creator: str) -> dict[str, str]:
    return {"creator": creator} if creator else {}


def _typed_created(value: Any, types: dict[str, type]) -> dict[str, Any]:
    """Return a map with these keys and `creator`, which is empty if it is absent."""
    has_creator = isinstance(value, dict) and "creator" in value
    typed = _typed(value, types | ({"creator": str} if has_creator else {}))
    if has_creator:
        _name(typed["creator"])
    return {"creator": "", **typed}


@dataclass(frozen=True, slots=True)
class DeleteTopic:
    """The deletion of a topic, with its timers, messages, groups and policy."""

    topic: TopicId


def encode_delete_topic(topic: TopicId) -> bytes:
    """Return the payload of a TOPIC entry that deletes a topic."""
    return bytes(msgpack.packb({"delete": topic}))


def decode_topic(payload: memoryview) -> CreateTopic | DeleteTopic:
    """Return the creation or the deletion.

    Raises:
        ValueError: the payload is malformed.
    """
    values = msgpack.unpackb(payload)
    if isinstance(values, dict) and "delete" in values:
        return DeleteTopic(TopicId(_typed(values, {"delete": int})["delete"]))
    read = _typed_created(values, {"name": str})
    return CreateTopic(_name(read["name"]), read["creator"])


def encode_producer(token: bytes, producer_id: ProducerId) -> bytes:
    """Return the payload of a PRODUCER entry. A repeated token keeps its id."""
    return bytes(msgpack.packb({"token": token, "id": producer_id}))


@dataclass(frozen=True, slots=True)
class EndProducer:
    """The end of a producer: its client sends nothing more."""

    producer_id: ProducerId


def encode_end_producer(producer_id: ProducerId) -> bytes:
    """Return the payload of a PRODUCER entry that ends a producer."""
    return bytes(msgpack.packb({"end": producer_id}))


def decode_producer(payload: memoryview) -> tuple[bytes, ProducerId] | EndProducer:
    """Return the token of the producer to register and its id, or the end of a producer.

    Raises:
        ValueError: the payload is malformed.
    """
    unpacked = msgpack.unpackb(payload)
    if isinstance(unpacked, dict) and "end" in unpacked:
        return EndProducer(ProducerId(_typed(unpacked, {"end": int})["end"]))
    values = _typed(unpacked, {"token": bytes, "id": int})
    if not 1 <= values["id"] < 1 << 63:
        raise ValueError(f"PRODUCER with id {values['id']}: must be in 1 .. {(1 << 63) - 1}")
    return values["token"], ProducerId(values["id"])


def encode_checkpoint(producer_idle_ms: int) -> bytes:
    """Return the payload of a CHECKPOINT entry."""
    return _CHECKPOINT.pack(producer_idle_ms)


def decode_checkpoint(payload: memoryview) -> int | None:
    """Return after how long idle producers are removed, in milliseconds. None: the default.

    Raises:
        ValueError: the payload is malformed.
    """
    if len(payload) not in (0, _CHECKPOINT.size):
        raise ValueError(f"CHECKPOINT of {len(payload)} bytes: must be 0 or {_CHECKPOINT.size}")
    return int(_CHECKPOINT.unpack(payload)[0]) if payload else None


def _unpack(payload: memoryview, types: dict[str, type]) -> dict[str, Any]:
    """Return a map that has exactly these keys, with values of these types.

    Raises:
        ValueError: the content differs. (An error of msgpack is a ValueError, too.)
    """
    return _typed(msgpack.unpackb(payload), types)


def _typed(fields: Any, types: Mapping[str, type]) -> dict[str, Any]:
    """Return `fields` if it is a map with exactly these keys, and values of these types."""
    if not isinstance(fields, dict) or fields.keys() != types.keys():
        raise ValueError(f"{fields!r}: must be a map with exactly {sorted(types)}")
    for key, expected in types.items():
        if type(fields[key]) is not expected:
            raise ValueError(f"{key} = {fields[key]!r}: must be of type {expected.__name__}")
    return fields
