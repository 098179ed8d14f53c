"""The digest: a hash of a replica's state, independent of the file layout.

    a changed topic --hash--> its part --.
    an unchanged topic ------> its part --+-- sum modulo 2 ** 64 --> digest, with all other state

Replicas that applied the same log have the same digest (P6 in docs/guarantees.md). It visits no
rows. It hashes the topics that changed since the last digest, and in them the groups that changed.
Of producers, too, it hashes only the changed ones. One change among ten thousand topics therefore
costs one hash.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Final

import msgpack

from timer.entries.payloads import GroupSettings
from timer.model.units import TopicId
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.state.dirty_topics import TopicSum
from timer.state.state import State

MASK: Final = (1 << 64) - 1
_pack: Final = msgpack.Packer().pack


class _Hash:
    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    def put(self, *numbers: int) -> None:
        self._hash.update(struct.pack(f"<{len(numbers)}Q", *(n & MASK for n in numbers)))

    def put_bytes(self, data: bytes) -> None:
        self._hash.update(data)

    def hex(self) -> str:
        return self._hash.hexdigest()


def _topic_hash(group_hash: Callable[[Group], int], topic: Topic) -> int:
    queue, counts, release = topic.queue, topic.counts, topic.release
    words: list[object] = [
        *(topic.topic_id, topic.name, topic.deleted_in, topic.expired),
        *(topic.pending_sum, topic.pending_bytes, topic.held, topic.held_bytes),
        *(queue.begin, queue.end, queue.chain),
        *(counts.scheduled, counts.fired, counts.cancelled, counts.dropped),
    ]
    if release is not None:
        words += (
            release.catch_up,
            release.until_ms,
            release.seq_end,
            release.last,
            release.is_waiting,
        )
    if topic.creator:
        words.append(topic.creator)
    groups = topic.groups
    words.append(sum(map(group_hash, groups.values())) & MASK if groups else 0)
    return _hash_of(words)


def _cached_hash(group: Group) -> int:
    if group.digest_part is None:
        group.digest_part = _group_hash(group)
    return group.digest_part


def _group_hash(group: Group) -> int:
    words = (
        *(
            group.group_id,
            group.name,
            group.cursor,
            group.reserved,
            group.delivered_ends,
            group.since_epoch,
        ),
        *(group.delivered_to, group.ack_sum, group.acked_count, group.ended_sum),
        *(group.recalled_sum, group.later_sum, group.expired, group.expired_to, group.moved_sum),
        _words_of(group.settings),
    )
    return _hash_of((*words, group.creator) if group.creator else words)


def _hash_of(words: Sequence[object]) -> int:
    return int.from_bytes(blake2b(_pack(words), digest_size=8).digest(), "little")


@lru_cache(1024)
def _words_of(settings: GroupSettings) -> bytes:
    return repr(astuple(settings)).encode()


def topic_sum(changed: set[TopicId], *, recomputed: bool = False) -> TopicSum:
    """Return the sum of the topics' hashes; the digest contains it modulo 2 ** 64.

    `recomputed`: hash every group, also those that did not change.
    """
    return TopicSum(changed, partial(_topic_hash, _group_hash if recomputed else _cached_hash))


def digest_of(state: State, hashes: TopicSum, *, recomputed: bool = False) -> str:
    """Return the digest, 16 hex digits. `hashes`: the state's sum, or a recomputed one."""
    digest, counts = _Hash(), state.counts
    digest.put(state.applied_index, state.last_read_time_ms, state.next_seq)
    digest.put(state.next_topic_id, state.next_group_id, state.topic_deleted_in)
    digest.put(counts.scheduled, counts.fired, counts.cancelled, counts.dropped)
    digest.put(len(state.topics), hashes.of(state.topics))
    digest.put_bytes(state.policies.packed)
    digest.put(len(state.fire_marks), *state.voters)
    digest.put(*state.outcomes.words)
    digest.put(*(state.sweep_position or (0, 0)))
    producers, requests = state.producers, state.requests
    digest.put(len(requests), requests.sum)
    digest.put(producers.recomputed_sum() if recomputed else producers.sum())
    series = state.series
    if series.used:  # so that programs without series compute the same digest
        digest.put(
            series.next_id, len(series), series.recomputed_sum() if recomputed else series.sum()
        )
    return digest.hex()
