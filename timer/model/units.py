"""Identifiers and units: a bare `int` never crosses a module boundary."""

from typing import Final, NamedTuple, NewType

UnixMs = NewType("UnixMs", int)
"""A wall-clock instant on the cluster's clock: milliseconds since 1970-01-01 UTC."""
MonoMs = NewType("MonoMs", int)
"""An instant on one machine's CLOCK_BOOTTIME, in milliseconds. Never compared across machines."""
LogIndex = NewType("LogIndex", int)
"""Position of an entry in the timer log. The first is 1; 0 means "before the log"."""
Epoch = NewType("Epoch", int)
"""Fencing token: one data-plane leadership; the first is 1. (Raft's own counter is `term`.)"""
ReplicaId = NewType("ReplicaId", int)
"""Identity of one data directory, made once; 1 .. 2**63 - 1."""
Nonce = NewType("Nonce", int)
"""Identity of one run of a process; random, 1 .. 2**63 - 1."""
Seq = NewType("Seq", int)
"""Global number of a timer row, from its place in the log; the first is 1."""
TopicId = NewType("TopicId", int)
"""One incarnation of a topic, issued through the log; 1 .. 2**32 - 1."""
GroupId = NewType("GroupId", int)
"""One incarnation of a consumer group, issued through the log; 1 .. 2**32 - 1."""
ProducerId = NewType("ProducerId", int)
"""One idempotent producer, issued through the log; 0 stands for "not idempotent"."""
QueueOffset = NewType("QueueOffset", int)
"""Position of a fired message in its topic's queue; 0-based."""
LeaseId = NewType("LeaseId", int)
"""One delivery of a batch of messages to one consumer; unique within an epoch."""

EPOCH_MAX: Final = 1 << 62
"""No epoch is above it, so that a next epoch always exists."""
DUE_MS_MAX: Final = (1 << 48) - 1
"""Latest due time (year 10889): the timer id has six bytes for it."""


class Now(NamedTuple):
    """One instant on both clocks."""

    mono_ms: MonoMs
    clock_ms: UnixMs
    """The cluster's clock."""
