"""Payloads: decoding inverts encoding; malformed bytes raise a ValueError and no other error."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.timer.machines import part_of
from timer.entries import payloads
from timer.entries.payloads import (
    AlterGroup,
    AnyOp,
    CreateGroup,
    EpochStart,
    Fire,
    GroupOp,
    GroupSettings,
    GroupStart,
    Ids,
    Keys,
    Move,
    Nack,
    Op,
    Reschedule,
)
from timer.model.columns import Binary, encode_schedule
from timer.model.units import DUE_MS_MAX, Epoch, GroupId, ProducerId, ReplicaId, TopicId, UnixMs

quick = settings(derandomize=True, deadline=None)
u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)


def decode_group(payload: memoryview) -> list[Any]:
    return list(payloads.decode_group(payload))


DECODERS: dict[str, Callable[[memoryview], Any]] = {
    "EPOCH": payloads.decode_epoch,
    "CANCEL": payloads.decode_cancel,
    "RESCHEDULE": payloads.decode_reschedule,
    "FIRE": payloads.decode_fire,
    "GROUP": decode_group,
    "TOPIC": payloads.decode_topic,
    "PRODUCER": payloads.decode_producer,
}
SETTINGS = asdict(GroupSettings(lease_ms=1))
TWO = Ids(np.array([5, 6], np.int64), np.array([1, 2], np.uint64))
TWO_ROWS = b"".join(encode_schedule([part_of([(0, 5, b"x"), (0, 6, b"yz")])]))
OPS: list[AnyOp] = [
    CreateGroup(TopicId(1), "group", GroupStart.LATEST, GroupSettings(lease_ms=30_000)),
    GroupOp(Op.ACK, TopicId(1), GroupId(2), np.array([1, 2, 2**64 - 1], np.uint64)),
    GroupOp(Op.ENDED, TopicId(1), GroupId(2), np.array([], np.uint64)),
    GroupOp(Op.RESERVE, TopicId(2**32 - 1), GroupId(3), np.array([4096], np.uint64)),
    Nack(Op.NACK, TopicId(1), GroupId(2), np.array([7, 3], np.uint64), np.array([0, 2**62])),
    AlterGroup(TopicId(1), GroupId(2), {"max_attempts": 3, "dead_letter_topic": "d"}),
    AlterGroup(TopicId(1), GroupId(2), {}),
    Move(Op.MOVE, TopicId(1), GroupId(2), np.array([8, 9], np.uint64), "to", "g", TWO_ROWS),
]
SAMPLES: dict[str, bytes] = {
    "EPOCH": payloads.encode_epoch(
        EpochStart(Epoch(2), ReplicaId(7), (ReplicaId(7), ReplicaId(8)))
    ),
    "CANCEL": b"".join(payloads.encode_cancel(TWO)),
    "RESCHEDULE": b"".join(
        payloads.encode_reschedule(Reschedule(TWO, TWO.due_ms + 9, TWO.due_ms + 8))
    ),
    "FIRE": payloads.encode_fire(Fire(UnixMs(99), 10, 1000)),
    "GROUP": b"".join(payloads.encode_group(OPS)),
    "TOPIC": payloads.encode_topic("orders"),
    "PRODUCER": payloads.encode_producer(b"token", ProducerId(7)),
}


def plain(ops: list[AnyOp]) -> list[Any]:
    """Return ops as values that `==` compares."""
    return [
        (type(op), *(getattr(value, "tolist", lambda v=value: v)() for value in values_of(op)))
        for op in ops
    ]


def values_of(op: AnyOp) -> list[Any]:
    return [getattr(op, each.name) for each in dataclass_fields(op)]


@quick
@given(u64, u64, st.lists(u64, min_size=1, max_size=6), u32)
def test_epoch_gives_back_what_was_encoded(
    epoch: int, leader: int, voters: list[int], version: int
) -> None:
    start = EpochStart(
        Epoch(epoch), ReplicaId(leader), tuple(ReplicaId(voter) for voter in voters), version - 13
    )
    assert payloads.decode_epoch(memoryview(payloads.encode_epoch(start))) == start


@quick
@given(st.lists(st.tuples(st.integers(-(2**62), 2**62), u64), min_size=1, max_size=5))
def test_cancel_gives_back_what_was_encoded(pairs: list[tuple[int, int]]) -> None:
    due = np.array([due for due, _ in pairs], np.int64)
    seq = np.array([seq for _, seq in pairs], np.uint64)
    targets = Ids(due, seq)
    decoded = payloads.decode_cancel(memoryview(b"".join(payloads.encode_cancel(targets))))
    assert isinstance(decoded, Ids)
    assert (decoded.due_ms.tolist(), decoded.seq.tolist()) == (due.tolist(), seq.tolist())
    order = Reschedule(targets, due - 1, due + 1)
    again = payloads.decode_reschedule(memoryview(b"".join(payloads.encode_reschedule(order))))
    assert isinstance(again.targets, Ids)
    assert again.targets.seq.tolist() == seq.tolist()
    assert again.due_ms.tolist() == (due - 1).tolist()
    assert again.requested_ms.tolist() == (due + 1).tolist()


@quick
@given(st.lists(st.tuples(u32, st.binary(max_size=20)), min_size=1, max_size=5))
def test_keys_give_back_what_was_encoded(names: list[tuple[int, bytes]]) -> None:
    topic = np.array([topic for topic, _ in names], np.uint32)
    targets = Keys(topic, Binary.of([key for _, key in names]))
    times = np.arange(len(names))
    order = Reschedule(targets, times, times + 5)
    data = b"".join(payloads.encode_reschedule(order))
    again = payloads.decode_reschedule(memoryview(data))
    for decoded in (
        again.targets,
        payloads.decode_cancel(memoryview(b"".join(payloads.encode_cancel(targets)))),
    ):
        assert isinstance(decoded, Keys)
        assert decoded.topic.tolist() == topic.tolist()
        assert decoded.key.sizes.tolist() == targets.key.sizes.tolist()
        assert bytes(decoded.key.blob) == targets.key.blob
    assert again.requested_ms.tolist() == (times + 5).tolist()
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"targets|RESCHEDULE"):
            payloads.decode_reschedule(memoryview(data)[:end])
    unknown = data[:4] + b"\2" + data[5:]
    with pytest.raises(ValueError, match="kind 2"):
        payloads.decode_reschedule(memoryview(unknown))


@quick
@given(
    st.integers(0, DUE_MS_MAX),
    st.integers(1, payloads.FIRE_ROWS_MAX),
    u32,
    st.integers(1, 2**32 - 1),
)
@example(0, 1, 0, 1)
def test_fire_gives_back_what_was_encoded(
    read_time_ms: int, rows_max: int, bytes_max: int, topics_max: int
) -> None:
    fire = Fire(UnixMs(read_time_ms), rows_max, bytes_max, topics_max)
    assert payloads.decode_fire(memoryview(payloads.encode_fire(fire))) == fire


creates = st.builds(
    CreateGroup,
    u32.map(TopicId),
    st.text(min_size=1, max_size=9),
    st.sampled_from(GroupStart),
    st.builds(GroupSettings, lease_ms=st.integers(1, 2**32), max_attempts=st.integers(0, 9)),
)
moves = st.builds(
    GroupOp,
    st.sampled_from([Op.ACK, Op.ENDED]),
    u32.map(TopicId),
    u32.map(GroupId),
    st.lists(u64, max_size=4).map(lambda values: np.array(values, np.uint64)),
)


@quick
@given(st.lists(st.one_of(creates, moves), max_size=5))
@example(OPS)
def test_group_gives_back_its_ops_in_order(ops: list[AnyOp]) -> None:
    assert plain(decode_group(memoryview(b"".join(payloads.encode_group(ops))))) == plain(ops)


def test_topic_and_producer_give_back_what_was_encoded() -> None:
    for creator in ("", "client/a"):
        payload = memoryview(payloads.encode_topic("größe", creator))
        assert payloads.decode_topic(payload) == payloads.CreateTopic("größe", creator)
    said = b"\0\xff", ProducerId(1 << 62)
    assert payloads.decode_producer(memoryview(payloads.encode_producer(*said))) == said


@pytest.mark.parametrize("kind", SAMPLES)
def test_payload_cut_at_every_byte_is_a_value_error_or_the_first_of_its_ops(kind: str) -> None:
    sample = SAMPLES[kind]
    whole = {len(b"".join(payloads.encode_group(OPS[:n]))) for n in range(len(OPS))}
    DECODERS[kind](memoryview(sample))
    for size in range(len(sample)):
        if kind == "GROUP" and size in whole:
            assert len(decode_group(memoryview(sample[:size]))) < len(OPS)
        else:
            with pytest.raises(ValueError):  # noqa: PT011
                DECODERS[kind](memoryview(sample[:size]))


@pytest.mark.parametrize("kind", SAMPLES)
def test_payload_with_a_byte_more_is_a_value_error(kind: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        DECODERS[kind](memoryview(SAMPLES[kind] + b"\0"))


def change_each_byte(kind: str, values_of: Callable[[int], Iterable[int]]) -> None:
    """Decode a sample with each byte replaced by each of its values."""
    sample = SAMPLES[kind]
    for position, byte in enumerate(sample):
        for value in values_of(byte):
            changed = bytearray(sample)
            changed[position] = value
            with contextlib.suppress(ValueError):
                DECODERS[kind](memoryview(changed))


@pytest.mark.parametrize("kind", SAMPLES)
def test_payload_with_any_byte_changed_raises_nothing_but_value_errors(kind: str) -> None:
    flips = [1 << bit for bit in range(8)]
    change_each_byte(kind, lambda byte: {byte ^ flip for flip in flips} | {0, byte - 1 & 255, 255})


@pytest.mark.long  # decodes a payload of a group some 100,000 times
@pytest.mark.parametrize("kind", SAMPLES)
def test_payload_with_any_byte_of_any_value_raises_nothing_but_value_errors(kind: str) -> None:
    change_each_byte(kind, lambda _: range(256))


@pytest.mark.parametrize("kind", DECODERS)
@quick
@given(st.binary(max_size=60))
@example(b"")
@example(b"\xc1")
@example(b"\x81\xa4name\x2a")
@example(b"\x81\xa5token\xce\x7f\xff\xff\xff")
@example(b"\x81\x90\x01")
@example(b"\xff" * 60)
def test_any_bytes_are_a_payload_or_a_value_error(kind: str, data: bytes) -> None:
    try:
        DECODERS[kind](memoryview(data))
    except ValueError:
        return


@pytest.mark.parametrize(
    ("decode", "fields"),
    [
        (payloads.decode_topic, {"name": 7}),
        (payloads.decode_topic, {"name": b"raw"}),
        (payloads.decode_topic, {"name": "a", "more": 1}),
        (payloads.decode_topic, {"name": "a", "creator": 1}),
        (payloads.decode_topic, ["name"]),
        (payloads.decode_producer, {"token": 1 << 40, "id": 1}),
        (payloads.decode_producer, {"token": [1, 2], "id": 1}),
        (payloads.decode_producer, {}),
    ],
)
def test_fields_of_another_name_or_type_are_a_value_error(
    decode: Callable[[memoryview], Any], fields: Any
) -> None:
    with pytest.raises(ValueError, match=r"must be a map|must be of type"):
        decode(memoryview(msgpack.packb(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "g", "start": "middle", "settings": SETTINGS},
        {"name": 1, "start": "latest", "settings": SETTINGS},
        {"name": "g", "start": "latest", "settings": SETTINGS | {"lease_ms": "1"}},
        {"name": "g", "start": ["latest"], "settings": SETTINGS},
        {"name": "g", "start": "latest", "settings": SETTINGS | {"max_attempts": True}},
        {"name": "g", "start": "latest", "settings": SETTINGS | {"more": 1}},
        {"name": "g", "start": "latest", "settings": {"lease_ms": 1}},
    ],
)
def test_created_group_with_a_wrong_field_is_a_value_error(fields: Any) -> None:
    body = msgpack.packb(fields)
    head = np.array([Op.CREATE, 1, 0, len(body)], "<u4").tobytes()
    with pytest.raises(ValueError, match=r"type|valid|expected"):
        decode_group(memoryview(head + body + bytes(-len(body) % 8)))


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        (Op.ALTER, {"lease_ms": "1"}),
        (Op.ALTER, {"unknown": 1}),
        (Op.ALTER, [1]),
        (Op.MOVE, {"to": "t", "to_group": "", "offsets": bytes(8), "rows": TWO_ROWS}),
        (Op.MOVE, {"to": "t", "to_group": "", "offsets": bytes(7), "rows": TWO_ROWS}),
        (Op.MOVE, {"to": "t", "to_group": "", "offsets": bytes(16), "rows": b"x"}),
        (Op.MOVE, {"to": "t", "offsets": bytes(16), "rows": TWO_ROWS}),
    ],
)
def test_altered_group_and_move_with_a_wrong_field_are_value_errors(op: Op, fields: Any) -> None:
    body = msgpack.packb(fields)
    head = np.array([op, 1, 1, len(body)], "<u4").tobytes()
    with pytest.raises(ValueError, match=r"type|must be a map|MOVE|multiple|SCHEDULE"):
        decode_group(memoryview(head + body + bytes(-len(body) % 8)))


@pytest.mark.parametrize("limits", [(0,), (payloads.FIRE_ROWS_MAX + 1,), (1, 1, 0)])
def test_fire_of_no_row_or_too_many_or_of_no_topic_is_a_value_error(limits: Any) -> None:
    with pytest.raises(ValueError, match="FIRE"):
        payloads.decode_fire(memoryview(payloads.encode_fire(Fire(UnixMs(1), *limits))))


def test_reserve_of_no_offset_or_two_is_a_value_error() -> None:
    for n in (0, 2):
        op = GroupOp(Op.RESERVE, TopicId(1), GroupId(1), np.zeros(n, np.uint64))
        with pytest.raises(ValueError, match="RESERVE"):
            decode_group(memoryview(b"".join(payloads.encode_group([op]))))
