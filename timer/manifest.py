"""The manifest: one replica's state at one committed index, format version 1.

    0   8   magic    b"TIMERMAN"
    8   4   version  1
    12  4   crc32    of the body
    16  8   length   of the body
    24      body     msgpack, the map that `capture` makes

Everything in it was taken at `applied_index`. Pending rows are in the runs that it names, fired
and unacked ones in the spill files. Restart = manifest + the log after it. It is replaced
atomically; files that the newest one does not name are garbage.
"""

import struct
import zlib
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np

from timer.disk import Disk
from timer.errors import CorruptFile, UnknownVersion
from timer.groups import Group
from timer.machine import Checkpoint, Counts, Machine, Topic
from timer.order import START, Position
from timer.producers import Answer, Producer
from timer.queues import Block, SpillRef
from timer.run import RunMeta
from timer.spill import read_spill
from timer.store import Store
from timer.units import (
    Epoch,
    GroupId,
    LogIndex,
    ProducerId,
    QueueOffset,
    ReplicaId,
    Seq,
    TopicId,
    UnixMs,
)

MAGIC: Final = b"TIMERMAN"
VERSION: Final = 1
NAME: Final = "manifest"
SPILL_DIRECTORY: Final = "queues"

_HEADER: Final = struct.Struct("<8sIIQ")

State = dict[str, Any]
"""The body of a manifest."""


def capture(machine: Machine) -> tuple[State, list[tuple[TopicId, Block]]]:
    """Return the state at `applied_index`, without runs, and the blocks that need a spill file.

    Nothing in it changes later, and what is large is encoded only by `write`, in its thread.
    Each queue's blocks are named by their SpillRef once they have one; fill in the others'
    (`add_spills`) after writing them.
    """
    fresh: list[tuple[TopicId, Block]] = []
    topics = []
    for topic_id, topic in sorted(machine.topics.items()):
        fresh += [(topic_id, block) for block in topic.queue.blocks if block.spill is None]
        topics.append(_topic_state(topic))
    state: State = {
        "index": machine.applied_index,
        "epoch": machine.applied_epoch,
        "time_ms": machine.applied_time_ms,
        "voters": list(machine.voters),
        "last_read_time_ms": machine.last_read_time_ms,
        "fire_position": list(machine.store.position),
        "next": [machine.next_seq, machine.next_topic_id, machine.next_group_id],
        "counts": _counts_state(machine.counts),
        "topics": topics,
        "next_producer": machine.producers.next_id,
        "producers": [_producer_state(i, producer) for i, producer in machine.producers],
        "cancels": [[minute, [*arrays]] for minute, arrays in machine.cancels.buckets.items()],
        "fire_marks": [list(mark) for mark in machine.fire_marks],
        "digest": machine.digest(),
        "checkpoint": _checkpoint_state(machine.checkpoint),
    }
    return state, fresh


def add_spills(state: State, fresh: list[tuple[TopicId, Block]], refs: list[SpillRef]) -> None:
    """Name in `state` the blocks that were just spilled."""
    by_topic = {topic["id"]: topic for topic in state["topics"]}
    for (topic_id, _), ref in zip(fresh, refs, strict=True):
        by_topic[topic_id]["blocks"].append([ref.file, ref.position, ref.size])


def recover_store(state: State | None, disk: Disk, directory: Path) -> Store:
    """Return the store that a manifest describes; an empty one without a manifest.

    Raises:
        CorruptFile: a run is missing, or its length or footer is wrong.
    """
    if state is None:
        return Store.recover(disk, directory, [], START, 0)
    runs = [RunMeta.unpack(fields) for fields in state["runs"]]
    position = Position(*state["fire_position"])
    return Store.recover(disk, directory, runs, position, Counts(*state["counts"]).pending)


def spill_files(state: State) -> set[str]:
    """Return the names of the spill files that the manifest needs."""
    return {block[0] for topic in state["topics"] for block in topic["blocks"]}


def restore(machine: Machine, state: State, disk: Disk, directory: Path) -> None:
    """Bring an empty machine to the captured state; its store has the runs already.

    Raises:
        CorruptFile: a spill file is missing or damaged, or the digest differs.
    """
    machine.applied_index = LogIndex(state["index"])
    machine.applied_epoch = Epoch(state["epoch"])
    machine.applied_time_ms = UnixMs(state["time_ms"])
    machine.last_read_time_ms = UnixMs(state["last_read_time_ms"])
    machine.voters = tuple(ReplicaId(voter) for voter in state["voters"])
    next_seq, next_topic_id, next_group_id = state["next"]
    machine.next_seq = Seq(next_seq)
    machine.next_topic_id = TopicId(next_topic_id)
    machine.next_group_id = GroupId(next_group_id)
    machine.counts = Counts(*state["counts"])
    for fields in state["topics"]:
        machine.restore_topic(_topic(fields, disk, directory / SPILL_DIRECTORY))
    machine.producers.next_id = ProducerId(state["next_producer"])
    for fields in state["producers"]:
        machine.producers.restore(*_producer(fields))
    for minute, arrays in state["cancels"]:
        for data in arrays:
            machine.cancels.restore(minute, np.frombuffer(data, np.uint64))
    machine.fire_marks = deque((UnixMs(a), UnixMs(b)) for a, b in state["fire_marks"])
    if state["checkpoint"] is not None:
        machine.checkpoint = Checkpoint(**state["checkpoint"])
    if machine.digest() != state["digest"]:
        why = f"digest {machine.digest()}, the manifest says {state['digest']}"
        raise CorruptFile(directory / NAME, 0, why)


def write(disk: Disk, directory: Path, state: State) -> None:
    """Replace the manifest, durably."""
    body: bytes = msgpack.packb(state, default=_pack)
    header = _HEADER.pack(MAGIC, VERSION, zlib.crc32(body), len(body))
    disk.write_atomic(directory / NAME, header + body)


def read(disk: Disk, directory: Path) -> State | None:
    """Return the newest manifest's state; None: there was never one.

    Raises:
        CorruptFile: it is damaged.
        UnknownVersion: it was written by another version.
    """
    path = directory / NAME
    if not disk.exists(path):
        return None
    data = disk.read(path)
    if len(data) < _HEADER.size:
        raise CorruptFile(path, 0, f"{len(data)} bytes")
    magic, version, crc32, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptFile(path, 0, f"magic {magic!r}")
    if version != VERSION:
        raise UnknownVersion(path, version, VERSION)
    body = data[_HEADER.size :]
    if len(body) != length or zlib.crc32(body) != crc32:
        raise CorruptFile(path, _HEADER.size, "checksum mismatch")
    state: State = msgpack.unpackb(body, strict_map_key=False)
    return state


def _counts_state(counts: Counts) -> list[int]:
    return [counts.scheduled, counts.fired, counts.cancelled, counts.dropped]


def _topic_state(topic: Topic) -> State:
    queue = topic.queue
    return {
        "id": topic.topic_id,
        "name": topic.name,
        "counts": _counts_state(topic.counts),
        "pending_sum": topic.pending_sum,
        "begin": queue.begin,
        "end": queue.end,
        "chain": queue.chain,
        "blocks": [
            [block.spill.file, block.spill.position, block.spill.size]
            for block in queue.blocks
            if block.spill is not None
        ],
        "groups": [_group_state(group) for group in topic.groups.values()],
    }


def _topic(fields: State, disk: Disk, spills: Path) -> Topic:
    topic = Topic(TopicId(fields["id"]), fields["name"], counts=Counts(*fields["counts"]))
    topic.pending_sum = fields["pending_sum"]
    queue = topic.queue
    refs = [SpillRef(*block) for block in fields["blocks"]]
    for name in dict.fromkeys(ref.file for ref in refs):
        mine = [ref for ref in refs if ref.file == name]
        for _, block in read_spill(disk, spills / name, mine):
            if not queue.blocks:
                queue.end = block.first
            queue.restore(block)
    queue.begin = QueueOffset(fields["begin"])
    if not queue.blocks:
        queue.end = QueueOffset(fields["end"])
    queue.chain = fields["chain"]
    assert queue.end == fields["end"], (queue.end, fields["end"])
    for group_fields in fields["groups"]:
        group = _group(group_fields)
        topic.groups[group.name] = group
    return topic


def _group_state(group: Group) -> State:
    skip = group.cursor - group.base
    return {
        "id": group.group_id,
        "topic": group.topic,
        "name": group.name,
        "lease_ms": group.lease_ms,
        "cursor": group.cursor,
        "reserved": group.reserved,
        "marks": list(group.marks),
        "sums": [group.ack_sum, group.ended_sum, group.acked_count],
        "acked": group.acked[skip:].copy(),
        "ended": group.ended[skip:].copy(),
    }


def _pack(value: object) -> object:
    """Return what msgpack writes for a value that `capture` left as it was: in the thread."""
    if isinstance(value, Answer):
        return [value.sequence, value.first_seq, value.due_ms.tobytes()]
    assert isinstance(value, np.ndarray), type(value)
    if value.dtype == np.uint64:  # seqs of cancels
        return value.tobytes()
    used = np.flatnonzero(value)
    return zlib.compress(value[: int(used[-1]) + 1 if len(used) else 0].tobytes(), 1)


def _group(fields: State) -> Group:
    ack_sum, ended_sum, acked_count = fields["sums"]
    acked = np.frombuffer(zlib.decompress(fields["acked"]), np.bool_)
    ended = np.frombuffer(zlib.decompress(fields["ended"]), np.uint16)
    size = max(len(acked), len(ended))
    return Group(
        group_id=GroupId(fields["id"]),
        topic=TopicId(fields["topic"]),
        name=fields["name"],
        lease_ms=fields["lease_ms"],
        cursor=QueueOffset(fields["cursor"]),
        reserved=QueueOffset(fields["reserved"]),
        marks=list(fields["marks"]),
        ack_sum=ack_sum,
        ended_sum=ended_sum,
        acked_count=acked_count,
        base=fields["cursor"],
        acked=np.pad(acked, (0, size - len(acked))),
        ended=np.pad(ended, (0, size - len(ended))),
    )


def _producer_state(producer_id: ProducerId, producer: Producer) -> list[Any]:
    past = [producer.used_at_ms, producer.last_sequence]
    return [producer_id, producer.token, *past, [*producer.answers]]


def _producer(fields: list[Any]) -> tuple[ProducerId, Producer]:
    producer_id, token, used_at_ms, last_sequence, answers = fields
    kept = deque(
        Answer(sequence, Seq(first_seq), np.frombuffer(due_ms, np.int64))
        for sequence, first_seq, due_ms in answers
    )
    rows = sum(len(answer.due_ms) for answer in kept)
    return ProducerId(producer_id), Producer(token, UnixMs(used_at_ms), last_sequence, kept, rows)


def _checkpoint_state(checkpoint: Checkpoint | None) -> State | None:
    if checkpoint is None:
        return None
    return {
        "epoch": checkpoint.epoch,
        "index": checkpoint.index,
        "time_ms": checkpoint.time_ms,
        "last_read_time_ms": checkpoint.last_read_time_ms,
        "queue_offsets": checkpoint.queue_offsets,
        "digest": checkpoint.digest,
    }
