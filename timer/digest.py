"""The digest: a hash of a machine's state that does not depend on how it lies in files (P6).

    topic, touched --hash--> its part --.
    topic, left alone --------> as it was --+-- sum modulo 2 ** 64 --> digest, with all else

It visits what is not topics, and the topics that changed since the last digest: never rows, and not
ten thousand topics for one of them. Of producers, too, only those that changed are packed again.
"""

import hashlib
import struct
from dataclasses import astuple
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgpack
import numpy as np

from timer.changes import TopicSum
from timer.columns import RowArray
from timer.payloads import GroupSettings
from timer.timer_id import mix, mix_one
from timer.topic import Topic
from timer.units import TopicId

if TYPE_CHECKING:
    from timer.machine import Machine

MASK: Final = (1 << 64) - 1


class _Hash:
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def put(self, *numbers: int) -> None:
        self._hash.update(struct.pack(f"<{len(numbers)}Q", *(n & MASK for n in numbers)))

    def put_bytes(self, data: bytes) -> None:
        self._hash.update(data)

    def hex(self) -> str:
        return self._hash.hexdigest()


def _topic_hash(topic: Topic) -> int:
    queue, counts, release = topic.queue, topic.counts, topic.release
    words: list[object] = [
        *(topic.topic_id, topic.name, topic.deleted_in, topic.expired),
        *(topic.pending_sum, topic.pending_bytes, topic.held, topic.held_bytes),
        *(queue.begin, queue.end, queue.chain),
        *(counts.scheduled, counts.fired, counts.cancelled, counts.dropped),
    ]
    if release is not None:
        words += (release.catch_up, release.until_ms, release.seq_end, release.last, release.waits)
    for group in topic.groups.values():
        words += (group.group_id, group.cursor, group.reserved, group.marks, group.since)
        words += (group.delivered_to,)
        words += (group.ack_sum, group.acked_count, group.ended_sum, group.recalled_sum)
        words += (group.later_sum, group.expired, group.expired_to, _words_of(group.settings))
    packed = msgpack.packb(words)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


@lru_cache(1024)
def _words_of(settings: GroupSettings) -> bytes:
    return repr(astuple(settings)).encode()


def topic_sum(changed: set[TopicId]) -> TopicSum:
    """Return the sum of the topics' hashes, which the digest contains modulo 2 ** 64."""
    return TopicSum(changed, _topic_hash)


def digest_of(machine: "Machine", hashes: TopicSum, *, anew: bool = False) -> str:
    """Return the digest, 16 hex digits; `hashes`: the machine's, or a fresh one for all anew."""
    digest, counts = _Hash(), machine.counts
    digest.put(machine.applied_index, machine.last_read_time_ms, machine.next_seq)
    digest.put(machine.next_topic_id, machine.next_group_id, machine.topic_deleted_in)
    digest.put(counts.scheduled, counts.fired, counts.cancelled, counts.dropped)
    digest.put(len(machine.topics), hashes.of(machine.topics))
    digest.put_bytes(machine.policies.packed)
    digest.put(machine.cancels.sum, len(machine.fire_marks), *machine.voters)
    digest.put(*(late.sum for late in machine.late.values()))
    digest.put(*(machine.pauses.swept or (0, 0)))
    producers, requests = machine.producers, machine.requests
    digest.put(len(requests), requests.sum)
    digest.put_bytes(producers.packed_anew() if anew else producers.packed())
    return digest.hex()


def row_sum(rows: RowArray) -> int:
    """Return the order-free sum of hashes of (due, seq, payload size), modulo 2 ** 64."""
    if len(rows) == 1:
        row = rows[0]
        pair = mix_one(mix_one(row["due_ms"].item()) ^ row["seq"].item())
        return mix_one(pair ^ row["payload_size"].item())
    hashes = mix(mix(rows["due_ms"].astype(np.uint64)) ^ rows["seq"])
    return int(np.add.reduce(mix(hashes ^ rows["payload_size"]), dtype=np.uint64))
