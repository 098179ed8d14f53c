"""Every entry that passes the check can be applied; all others are rejected."""

import random
import struct
from collections.abc import Iterator
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import Log, ids_of, keys_of, machine_on, part_of, state_of, u64
from timer.entries import payloads
from timer.entries.entry_check import check_entry
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import EpochStart, GroupOp, Op
from timer.entries.policies import Scope
from timer.model.columns import RequestId, encode_schedule
from timer.model.units import DUE_MS_MAX, Epoch, GroupId, ReplicaId, TopicId, UnixMs

EDGES = [0, 1, 2, 255, 256, 65_536, (1 << 31) - 1, (1 << 32) - 1, 1 << 32, 1 << 48]
EDGES += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def seeds(log: Log) -> Iterator[Entry]:
    """Yield entries of all kinds about existing objects: topics 1 and 2, their groups, timers."""
    now = log.now_ms
    named = RequestId(b"once", 7, UnixMs(now + 1000))
    timers = [(1, now + 5, b"payload"), (2, now + 50, b""), (1, now - 5, b"late")]
    yield log.schedule(part_of(timers, 1, 1), part_of(timers[:1]))
    yield log.schedule(replace(part_of(timers[:1]), request=named))
    yield log.schedule(part_of(timers, keys=[b"k1", b"", b"k2"]))
    yield log.cancel([(now + 5, 1), (now + 50, 2)])
    yield log.cancel_keys([(1, b"k1"), (2, b"none")])
    yield log.reschedule(ids_of([(now + 5, 4), (now + 50, 5)]), [now + 7, now + 8])
    yield log.reschedule(keys_of([(1, b"k2")]), [now + 9])
    yield log.fire(now)
    yield log.create_group(1, "late", max_attempts=3)
    one = Op.RESERVE, Op.HAND_OVER, Op.EXPIRE_BELOW, Op.SEEK
    for op in (Op.ACK, Op.ENDED, Op.RECALL, Op.EXPIRE, *one):
        yield log.op(op, 1, 0 if op is Op.EXPIRE_BELOW else 1, [0] if op in one else [0, 1])
    yield log.nack(1, 1, [0, 1], now + 10)
    yield log.alter(1, 1, lease_ms=5, max_attempts=2)
    yield log.move(1, 1, [0], "dead", "readers")
    yield log.op(Op.DELETE, 2, 2, [])
    yield log.topic("third")
    yield log.delete_topic(9)
    yield log.policy(Scope("", TopicId(1)), paused=False, ttl_ms=1000, delay_levels_ms=(1, 2))
    yield log.policy(Scope("space"), catch_up="drop")
    yield log.producer(b"token")
    yield log.checkpoint()
    yield log.append(EntryKind.CHECKPOINT, [payloads.encode_checkpoint(1000)])


def changed(rng: random.Random, payload: bytes) -> bytes:
    """Return the payload with a field overwritten, or cut, or extended."""
    out = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 3))):
        size = rng.choice((1, 2, 4, 4, 8, 8, 8))
        at = rng.randrange(0, max(1, len(out) - size + 1))
        at -= at % size * rng.choice((0, 1))
        edge = rng.choice(EDGES) + rng.choice((-1, 0, 0, 0, 1))
        out[at : at + size] = (edge % (1 << 8 * size)).to_bytes(size, "little")
    if rng.random() < 0.05:
        del out[rng.randrange(len(out) + 1) :]
    return bytes(out)


@pytest.mark.parametrize("seed", range(8))
def test_what_passes_is_applied_whatever_was_overwritten_in_it(seed: int) -> None:
    rng = random.Random(seed)
    log = Log()
    machine = machine_on(SimDisk(), leads=True)
    for made in (log.topic("one"), log.topic("two"), log.producer(b"p")):
        machine.apply(made)
    for topic in (1, 2):
        machine.apply(log.create_group(topic, "readers"))
    passed = refused = 0
    for _ in range(12):
        log.now_ms += rng.choice((0, 10, 10_000))
        # Whole ones at times: else little is there to be changed.
        whole = Log(log.now_ms, log.epoch)
        for seed_entry in seeds(whole):
            for _ in range(rng.choice((0, 2, 8))):
                payload = changed(rng, bytes(seed_entry.payload))
                entry = log.append(seed_entry.kind, [payload])
                try:
                    check_entry(entry)
                except ValueError:
                    log.entries.pop()
                    refused += 1
                    continue
                machine.apply(entry)
                passed += 1
            machine.apply(log.append(seed_entry.kind, [bytes(seed_entry.payload)]))
    assert min(passed, refused) > 100, (passed, refused)
    machine.apply(log.checkpoint())
    assert machine.digest() == machine.recomputed_digest()


def refused(kind: EntryKind, payload: bytes, time_ms: int = 1) -> str:
    entry = Log(time_ms).append(kind, [payload])
    with pytest.raises(ValueError) as why:  # noqa: PT011 - its text is what is returned
        check_entry(entry)
    return str(why.value)


def test_refusal_names_the_field_and_its_limit() -> None:
    def schedule(**columns: object) -> bytes:
        return b"".join(encode_schedule([replace(part_of([(1, 5, b"x")]), **columns)]))  # type: ignore[arg-type]

    late = np.array([DUE_MS_MAX + 1], np.int64)
    assert f"must be in 0 .. {DUE_MS_MAX}" in refused(EntryKind.SCHEDULE, schedule(due_ms=late))
    assert "topic 4294967295" in refused(
        EntryKind.SCHEDULE, schedule(topic=np.array([0xFFFFFFFF], np.uint32))
    )
    assert "columns end at" in refused(EntryKind.SCHEDULE, schedule() + b"\0")
    start = EpochStart(Epoch(1), ReplicaId(1), (ReplicaId(1),), level=99)
    assert "feature level 99" in refused(EntryKind.EPOCH, payloads.encode_epoch(start))
    policy = {"tick_ms": -1}
    said = {"version": 1, "namespace": "", "topic": 0, "policy": policy}
    assert "tick_ms" in refused(EntryKind.POLICY, msgpack.packb(said))
    assert "time_ms = -1" in refused(EntryKind.CHECKPOINT, b"", -1)
    assert "GROUP entry 1" in refused(EntryKind.GROUP, struct.pack("<B3xIII", 99, 1, 1, 0))
    settings = {"lease_ms": -5, "max_attempts": 0, "dead_letter_topic": "", "backoff_ms_min": 0}
    settings |= {"backoff_ms_max": 0, "type": "shared", "max_in_flight": 0}
    body = msgpack.packb({"name": "g", "start": "latest", "settings": settings})
    head = struct.pack("<B3xIII", Op.CREATE, 1, 0, len(body))
    assert "lease_ms = -5" in refused(EntryKind.GROUP, head + body + bytes(-len(body) % 8))


def test_offsets_beyond_a_queue_change_nothing_and_take_no_memory() -> None:
    log = Log()
    machine = machine_on(SimDisk(), leads=True)
    machine.apply(log.topic("one"))
    machine.apply(log.create_group(1, "readers"))
    before = state_of(machine)["groups"]
    beyond = Op.RESERVE, Op.HAND_OVER, Op.ACK, Op.ENDED, Op.RECALL, Op.EXPIRE, Op.EXPIRE_BELOW
    for op in beyond:
        group = GroupId(0 if op is Op.EXPIRE_BELOW else 1)
        entry = log.group(GroupOp(op, TopicId(1), group, u64([1 << 63])))
        check_entry(entry)
        machine.apply(entry)
    assert state_of(machine)["groups"] == before
