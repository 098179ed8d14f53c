"""The manifest: one replica's state at one committed index, format version 12.

    0   8   magic    b"TIMERMAN"
    8   4   version  12
    12  4   crc32    of all other bytes
    16  8   length   of the body
    24      body     msgpack, the map that `capture` returns

Version 11, written at feature level 1: the checksum covers only the body, so a flipped bit of the
version may look like an earlier version, which ends the node. The map has no level. From version 12
on the checksum covers the header as well, so such a bit is damage, which the node repairs.

All of it is the state at `applied_index`. Pending rows are in the runs that it names, fired and
unacked ones in the spill files. A restart reads the manifest and the log after it. The manifest is
replaced atomically. Files that the newest one does not name are garbage.
"""

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, astuple
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
from isal import isal_zlib

from timer.entries.payloads import GroupSettings
from timer.entries.policies import Policies, decode_policy
from timer.files.disk import Disk
from timer.model.firing_order import START, Position
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.model.units import (
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
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.memory.key_index import KeyHasher
from timer.pending.runs.run import RunMeta
from timer.pending.store import Store
from timer.ready.group import FLAGS, NUMBERS, TIMES, Group, moved_hashes
from timer.ready.group_column import FrozenColumn, GroupColumn
from timer.ready.page_cache import Block, Pages, SpillRef
from timer.ready.queue import Queue
from timer.ready.spill import Spill, check_spill, read_page, spills_of
from timer.ready.topic import Counts, Topic, TopicRelease
from timer.recovery.capture_ahead import CaptureAhead
from timer.state.apply_results import Checkpoint
from timer.state.machine import Machine
from timer.state.producers import ProducerState, RequestAnswer
from timer.state.request_ids import RememberedRequests

MAGIC: Final = b"TIMERMAN"
VERSION: Final = 12
VERSION_OF_LEVEL_1: Final = 11
NAME: Final = "manifest"
SPILL_DIRECTORY: Final = "queues"
RUN_DIRECTORY: Final = "runs"
DIRECTORIES: Final = (RUN_DIRECTORY, SPILL_DIRECTORY)
"""The directories beside the manifest. There is nothing else."""

_HEADER: Final = struct.Struct("<8sIIQ")

ManifestBody = dict[str, Any]
"""The body of a manifest, unpacked."""


class FlushSources:
    """The states of topics and producers that a flush captures before its cut.

    Between `capture_some` and `capture` no block may be spilled or moved: this does not mark its
    topic as changed.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        used = machine.producers
        self.topics = CaptureAhead(machine.changes.reader(), lambda: machine.topics, self._topic)
        self.producers = CaptureAhead(used.changes.reader(), used.ids, self._producer)
        self._spills: dict[TopicId, list[Spill]] = {}
        """Blocks without a spill file and blocks to join, by topic."""

    def _topic(self, topic_id: TopicId) -> ManifestBody | None:
        topic = self._machine.topics.get(topic_id)
        if topic is None:
            self._spills.pop(topic_id, None)
            return None
        ttl_ms = self._machine.policies.value_of("ttl_ms", topic.name, topic_id) or 0
        spills = spills_of(topic_id, topic.queue, ttl_ms)
        if spills or topic_id in self._spills:
            self._spills[topic_id] = spills
        return _topic_state(topic)

    def _producer(self, producer_id: ProducerId) -> list[Any] | None:
        producer = self._machine.producers.get(producer_id)
        return None if producer is None else _producer_state(producer_id, producer)

    @property
    def has_begun(self) -> bool:
        """Whether some state is captured."""
        return self.topics.has_begun

    def capture_some(self, count_max: int) -> bool:
        """Capture at most `count_max` more of each. Return whether all were captured once."""
        whole = self.topics.capture_some(count_max)
        return self.producers.capture_some(count_max) and whole

    def forget(self) -> None:
        """Drop the captured states. The next `capture_some` begins again."""
        self.topics.forget()
        self.producers.forget()
        self._spills.clear()

    def take_spills(self) -> list[Spill]:
        """Return the blocks to write or to join, once, after `topics.finish`."""
        spills = [spill for found in self._spills.values() for spill in found]
        self._spills.clear()
        return spills


def capture(machine: Machine, ahead: FlushSources) -> tuple[ManifestBody, list[Spill]]:
    """Return the state at `applied_index`, without runs, and the blocks to write or to join.

    Nothing in it changes later. Large values are encoded by `write`, in its thread. The state has
    the blocks that are spilled already. `add_spills` adds the others after they are written.
    """
    state: ManifestBody = {
        "index": machine.applied_index,
        "epoch": machine.applied_epoch,
        "time_ms": machine.applied_time_ms,
        "voters": list(machine.voters),
        "last_read_time_ms": machine.last_read_time_ms,
        "fire_position": list(machine.store.position),
        "next": [machine.next_seq, machine.next_topic_id, machine.next_group_id],
        "counts": _counts_state(machine.counts),
        "topics": ahead.topics.finish(),
        "topic_deleted_in": machine.topic_deleted_in,
        "policies": machine.policies.encoded,
        "producers": ahead.producers.finish(),
        "requests": machine.requests.pack(),
        "key_secret": machine.store.hasher.secret,
        "trace": machine.trace.pack(),
        "successors": machine.successors.pack(),
        "outcomes": machine.outcomes.pack(),
        "swept": machine.sweep_position and list(machine.sweep_position),
        "fire_marks": [list(mark) for mark in machine.fire_marks],
        "digest": machine.digest(),
        "checkpoint": _checkpoint_state(machine.checkpoint),
    }
    if machine.level > 1:
        state["level"] = machine.level
    if machine.series.used:
        state["series"] = machine.series.pack()
    return state, ahead.take_spills()


def add_spills(state: ManifestBody, new_spills: list[Spill]) -> None:
    """Add the blocks that were just written to `state`, in place of those that they join."""
    by_topic = {topic["id"]: topic for topic in state["topics"]}
    for spill in new_spills:
        blocks = by_topic[spill.topic]["blocks"]
        start = bisect_left(blocks, spill.old[0].first, key=_first_offset)
        stop = bisect_left(blocks, spill.old[-1].end, key=_first_offset)
        new = [_block_state(block) for block in spill.new]
        if start < stop:  # both have the first message that is left: see Block.fired_at_ms
            new[0][_FIRED_AT] = max(new[0][_FIRED_AT], blocks[start][_FIRED_AT])
        blocks[start:stop] = new


def move_spills(state: ManifestBody, places: Mapping[SpillRef, SpillRef]) -> list[TopicId]:
    """Replace the places of copied blocks in `state`. Return the topics that have such blocks."""
    touched: list[TopicId] = []
    for topic in state["topics"] if places else ():
        moved = 0
        for fields in topic["blocks"]:
            ref = places.get(SpillRef(*fields[:3]))
            if ref is not None:
                fields[:3] = [ref.file, ref.position, ref.size]
                moved += 1
        if moved:
            touched.append(TopicId(topic["id"]))
    return touched


def spill_refs(state: ManifestBody) -> list[SpillRef]:
    """Return the places of the blocks that the manifest needs."""
    return [SpillRef(*block[:3]) for topic in state["topics"] for block in topic["blocks"]]


def recover_store(
    state: ManifestBody | None, disk: Disk, directory: Path, key_secret: bytes
) -> Store:
    """Return the store that a manifest describes, or an empty one without a manifest.

    `key_secret`: secret of the empty store's hasher.

    Raises:
        CorruptFileError: a run is missing, or its length or footer is wrong.
    """
    if state is None:
        return Store.recover(disk, directory, [], START, 0, hasher=KeyHasher(key_secret))
    runs = [RunMeta.unpack(fields) for fields in state["runs"]]
    position = Position(*state["fire_position"])
    held = sum(topic["held"] for topic in state["topics"])
    pending, hasher = Counts(*state["counts"]).pending, KeyHasher(state["key_secret"])
    return Store.recover(disk, directory, runs, position, pending, held, hasher)


def spill_files(state: ManifestBody) -> set[str]:
    """Return the names of the spill files that the manifest needs."""
    return {block[0] for topic in state["topics"] for block in topic["blocks"]}


def files(state: ManifestBody) -> list[tuple[str, int, int | None]]:
    """Return (path beside the manifest, size, CRC-32) of every file that the manifest needs.

    The manifest does not have a spill file's size and CRC-32. Its size here is the least that the
    manifest needs, and its CRC-32 is None.
    """
    found: list[tuple[str, int, int | None]] = []
    for run in (RunMeta.unpack(fields) for fields in state["runs"]):
        found.append((f"{RUN_DIRECTORY}/{run.name}", run.size, run.crc32))
        if run.keys_size:
            found.append((f"{RUN_DIRECTORY}/{run.keys_name}", run.keys_size, run.keys_crc32))
    ends: dict[str, int] = {}
    for topic in state["topics"]:
        for name, position, size, *_ in topic["blocks"]:
            ends[name] = max(ends.get(name, 0), position + size)
    return found + [(f"{SPILL_DIRECTORY}/{name}", end, None) for name, end in sorted(ends.items())]


def check_spills(state: ManifestBody, disk: Disk, directory: Path) -> None:
    """Read the parts of spill files that the manifest needs.

    Raises:
        CorruptFileError: a file is too short or damaged.
    """
    for ref in spill_refs(state):
        read_page(disk, directory / SPILL_DIRECTORY, ref)


def restore(machine: Machine, state: ManifestBody, disk: Disk, directory: Path) -> None:
    """Bring an empty machine to the captured state. Empties `state["topics"]`, to free memory.

    The machine's store has the runs already.

    Raises:
        CorruptFileError: a spill file is missing or too short, or the digest differs.
    """
    machine.applied_index = LogIndex(state["index"])
    machine.applied_epoch = Epoch(state["epoch"])
    machine.applied_time_ms = UnixMs(state["time_ms"])
    machine.last_read_time_ms = UnixMs(state["last_read_time_ms"])
    machine.voters = tuple(ReplicaId(voter) for voter in state["voters"])
    machine.level = state.get("level", 1)
    next_seq, next_topic_id, next_group_id = state["next"]
    machine.next_seq = Seq(next_seq)
    machine.next_topic_id = TopicId(next_topic_id)
    machine.next_group_id = GroupId(next_group_id)
    machine.counts = Counts(*state["counts"])
    refs: dict[str, list[SpillRef]] = {}
    for ref in spill_refs(state):
        refs.setdefault(ref.file, []).append(ref)
    for name, mine in refs.items():
        check_spill(disk, directory / SPILL_DIRECTORY / name, mine)
    machine.policies = Policies(dict(map(decode_policy, state["policies"])))  # topics need them
    machine.restore_topics(_topics(state["topics"], machine.pages))
    machine.topic_deleted_in = Epoch(state["topic_deleted_in"])
    deleted = DeletedTopics.all_but(machine.topics, machine.next_topic_id)
    machine.store.restore_deleted_topics(deleted)
    if machine.policies.has("retention_ms"):
        machine.retain(machine.topics, machine.applied_time_ms)
    machine.sweep_position = Position(*state["swept"]) if state["swept"] else None
    for fields in sorted(state["producers"], key=itemgetter(2)):  # by their last use
        machine.producers.restore(*_producer(fields))
    machine.requests.restore(state["requests"])
    machine.trace.restore(state["trace"])
    machine.successors.restore(state["successors"])
    if "series" in state:
        machine.series.restore(state["series"])
    machine.outcomes.restore(state["outcomes"])
    machine.fire_marks = deque((UnixMs(a), UnixMs(b)) for a, b in state["fire_marks"])
    if state["checkpoint"] is not None:
        machine.restore_checkpoint(Checkpoint(**state["checkpoint"]))
    machine.catch_up()
    if machine.digest() != state["digest"]:
        why = f"the loaded state has digest {machine.digest()}, the manifest {state['digest']}"
        raise CorruptFileError(directory / NAME, 0, why)


def write(disk: Disk, directory: Path, state: ManifestBody) -> int:
    """Replace the manifest durably. Return its size in bytes."""
    body = _encode(state)
    version = version_of(state)
    header = _HEADER.pack(MAGIC, version, _crc32(version, body), len(body))
    disk.write_atomic(directory / NAME, header + body)
    return len(header) + len(body)


def read(disk: Disk, directory: Path) -> ManifestBody | None:
    """Return the newest manifest's state; None: there was never one.

    Raises:
        CorruptFileError: it is damaged.
        UnknownVersionError: another version wrote it.
    """
    path = directory / NAME
    return decode(disk.read(path), path) if disk.exists(path) else None


def decode(data: bytes, path: Path) -> ManifestBody:
    """Return the state in a manifest's bytes. `path`: of the file, for errors.

    Raises:
        CorruptFileError, UnknownVersionError: see `read`.
    """
    state: ManifestBody = msgpack.unpackb(_body(data, path), strict_map_key=False)
    return state


def version_of(state: ManifestBody) -> int:
    """Return the format version in which a state is written."""
    return VERSION if level_of(state) > 1 else VERSION_OF_LEVEL_1


def level_of(state: ManifestBody) -> int:
    """Return the feature level of a state."""
    level: int = state.get("level", 1)
    return level


def pending_of(state: ManifestBody) -> int:
    """Return the number of pending timers."""
    return Counts(*state["counts"]).pending


def messages_of(state: ManifestBody) -> int:
    """Return the number of fired messages that topics keep."""
    return sum(topic["end"] - topic["begin"] for topic in state["topics"])


def check(disk: Disk, directory: Path) -> bytes | None:
    """Return the newest manifest's body, verified; None: there was never one.

    Raises:
        CorruptFileError, UnknownVersionError: see `read`.
    """
    path = directory / NAME
    return _body(disk.read(path), path) if disk.exists(path) else None


def _body(data: bytes, path: Path) -> bytes:
    if len(data) < _HEADER.size:
        raise CorruptFileError(path, 0, f"{len(data)} bytes; a header has {_HEADER.size}")
    magic, version, crc32, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptFileError(path, 0, f"not a manifest: magic {magic!r}, must be {MAGIC!r}")
    body = data[_HEADER.size :]
    if len(body) != length or _crc32(version, body) != crc32:
        raise CorruptFileError(path, 8, "checksum mismatch")
    if version not in (VERSION, VERSION_OF_LEVEL_1):
        raise UnknownVersionError(path, version, VERSION)
    return body


def _crc32(version: int, body: bytes) -> int:
    if version <= VERSION_OF_LEVEL_1:
        return isal_zlib.crc32(body)
    head = _HEADER.pack(MAGIC, version, 0, len(body))
    return isal_zlib.crc32(body, isal_zlib.crc32(head[16:], isal_zlib.crc32(head[:12])))


def _encode(state: ManifestBody) -> bytes:
    """Encode the map. Lists are packed by element, so that other threads can run in between."""
    packer = msgpack.Packer(default=_pack, autoreset=False)
    packer.pack_map_header(len(state))
    for name, value in state.items():
        packer.pack(name)
        if isinstance(value, list | RememberedRequests):
            packer.pack_array_header(len(value))
            for element in value:
                packer.pack(element)
        else:
            packer.pack(value)
    return bytes(packer.bytes())


def _counts_state(counts: Counts) -> list[int]:
    return [counts.scheduled, counts.fired, counts.cancelled, counts.dropped]


def _topic_state(topic: Topic) -> ManifestBody:
    queue = topic.queue
    return {
        "id": topic.topic_id,
        "name": topic.name,
        "counts": _counts_state(topic.counts),
        "pending_sum": topic.pending_sum,
        "pending_bytes": topic.pending_bytes,
        "deleted_in": topic.deleted_in,
        "expired": topic.expired,
        "held": topic.held,
        "held_bytes": topic.held_bytes,
        "release": None if topic.release is None else [*astuple(topic.release)],
        "begin": queue.begin,
        "end": queue.end,
        "chain": queue.chain,
        "marks": [list(interval) for interval in queue.intervals],
        "blocks": [_block_state(block) for block in queue.blocks if block.spill is not None],
        "groups": [_group_state(group) for group in topic.groups.values()],
        **_creator_state(topic),
        **(
            {"traits": [queue.has_ordering_keys, queue.has_priorities]}
            if queue.has_ordering_keys or queue.has_priorities
            else {}
        ),
    }


def _creator_state(of: Topic | Group) -> ManifestBody:
    """Return the creator's field, which feature level 1 does not have."""
    return {"creator": of.creator} if of.creator else {}


_FIRED_AT: Final = 5
"""Place of a block's time in `_block_state`."""


def _block_state(block: Block) -> list[Any]:
    assert block.spill is not None
    ref = block.spill
    known = [block.fired_at_ms, block.payload_bytes, block.due_ms_min, block.due_ms_max]
    return [ref.file, ref.position, ref.size, block.first, block.end, *known]


def _first_offset(block: list[Any]) -> QueueOffset:
    """Return the first queue offset of a block in a manifest."""
    return QueueOffset(block[3])


def _topics(states: list[ManifestBody], pages: Pages) -> list[Topic]:
    """Return the topics of these states. Each state is freed, and a later topic uses its memory."""
    states.reverse()
    topics = []
    while states:
        topics.append(_topic(states.pop(), pages))
    return topics


def _topic(fields: ManifestBody, pages: Pages) -> Topic:
    intervals = [*map(tuple, fields["marks"])]
    queue = Queue(fields["begin"], fields["end"], fields["chain"], intervals, pages=pages)
    queue.has_ordering_keys, queue.has_priorities = fields.get("traits", (False, False))
    topic = Topic(
        fields["id"],
        fields["name"],
        queue,
        creator=fields.get("creator", ""),
        counts=Counts(*fields["counts"]),
        pending_sum=fields["pending_sum"],
        pending_bytes=fields["pending_bytes"],
        deleted_in=fields["deleted_in"],
        expired=fields["expired"],
        held=fields["held"],
        held_bytes=fields["held_bytes"],
    )
    if fields["release"]:
        catch_up, until_ms, seq_end, last, waits = fields["release"]
        at = Position(*last) if last else None
        topic.release = TopicRelease(catch_up, UnixMs(until_ms), Seq(seq_end), at, waits)
    if fields["blocks"]:
        _restore_blocks(queue, fields["blocks"])
    for group in fields["groups"]:
        topic.add(_group(group))
    return topic


def _restore_blocks(queue: Queue, packed: list[list[Any]]) -> None:
    """Put back a queue's blocks; they end where it ends."""
    end = queue.end
    blocks = [
        Block(
            QueueOffset(first),
            QueueOffset(block_end),
            None,
            SpillRef(*ref),
            fired_at_ms=fired_at_ms,
            payload_bytes=size,
            due_ms_min=low_ms,
            due_ms_max=high_ms,
        )
        for *ref, first, block_end, fired_at_ms, size, low_ms, high_ms in packed
    ]
    queue.end = blocks[0].first
    for block in blocks:
        queue.restore(block)
    assert queue.end == end, (queue.end, end)


COLUMNS: Final = {"acked": FLAGS, "ended": NUMBERS, "later": TIMES, "recalled": NUMBERS}
"""Columns of a group, by queue offset from its cursor on."""


def _group_state(group: Group) -> ManifestBody:
    return {
        "id": group.group_id,
        "topic": group.topic,
        "name": group.name,
        "settings": group.settings,
        "cursor": group.cursor,
        "reserved": group.reserved,
        "delivered_to": group.delivered_to,
        "since": group.since_epoch,
        "marks": list(group.delivered_ends),
        "sums": [group.ack_sum, group.ended_sum, group.acked_count, group.recalled_sum],
        "expired": [group.expired, group.expired_to],
        "acked": _column(group.acked, group.cursor),
        "ended": _column(group.ended, group.cursor),
        "later": _column(group.later, group.cursor),
        "recalled": _column(group.recalled, group.cursor),
        "moved": group.moved if len(group.moved) else b"",
        **_creator_state(group),
    }


def _column(column: GroupColumn, cursor: QueueOffset) -> FrozenColumn | bytes:
    """Return the values from the group's cursor on, which `_pack` encodes; b"" if all are 0."""
    return column.freeze(cursor) if column.count_from(cursor) else b""


def _pack(value: object) -> object:
    """Return msgpack's form of a value that `capture` did not encode. Runs in the thread."""
    if isinstance(value, GroupSettings):
        return _settings_state(value)
    if isinstance(value, RequestAnswer):
        return value.pack()
    if isinstance(value, FrozenColumn):
        return value.pack()
    assert isinstance(value, np.ndarray), type(value)
    assert value.dtype == np.uint64, value.dtype
    return value.tobytes()  # seqs and due times of timers, offsets that moved, series


@lru_cache(1024)
def _group_settings(*items: tuple[str, Any]) -> GroupSettings:
    """Return the settings of these fields: one object for all groups that have the same."""
    return GroupSettings(**dict(items))


@lru_cache(1024)
def _settings_state(settings: GroupSettings) -> ManifestBody:
    """Return the fields of a group's settings. Do not change them: the next call returns them."""
    return asdict(settings)


def _group(fields: ManifestBody) -> Group:
    ack_sum, ended_sum, acked_count, recalled_sum = fields["sums"]
    group = Group(
        group_id=fields["id"],
        topic=fields["topic"],
        name=fields["name"],
        settings=_group_settings(*fields["settings"].items()),
        cursor=fields["cursor"],
        reserved=fields["reserved"],
        delivered_to=fields["delivered_to"],
        since_epoch=fields["since"],
        delivered_ends=fields["marks"],
        ack_sum=ack_sum,
        ended_sum=ended_sum,
        acked_count=acked_count,
        expired=fields["expired"][0],
        expired_to=QueueOffset(fields["expired"][1]),
        recalled_sum=recalled_sum,
        creator=fields.get("creator", ""),
    )
    if fields["moved"]:
        group.moved = np.frombuffer(fields["moved"], np.uint64)
        group.moved_sum = moved_hashes(group.moved)
    if any(fields[name] for name in COLUMNS):
        unpack, base = GroupColumn.unpack, fields["cursor"]
        group.restore(**{name: unpack(fields[name], of, base) for name, of in COLUMNS.items()})
    return group


def _producer_state(producer_id: ProducerId, producer: ProducerState) -> list[Any]:
    past = [producer.used_at_ms, producer.last_sequence]
    return [producer_id, producer.token, *past, [*producer.answers]]


def _producer(fields: list[Any]) -> tuple[ProducerId, ProducerState]:
    producer_id, token, used_at_ms, last_sequence, answers = fields
    remembered = deque(RequestAnswer.unpack(*answer) for answer in answers)
    rows = sum(len(answer.due_ms) for answer in remembered)
    return ProducerId(producer_id), ProducerState(
        token, UnixMs(used_at_ms), last_sequence, remembered, rows
    )


def _checkpoint_state(checkpoint: Checkpoint | None) -> ManifestBody | None:
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
