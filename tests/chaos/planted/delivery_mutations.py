"""Planted bugs of ordering keys, priorities and rates."""

from typing import Any, Final

import numpy as np

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import Planting, patch
from timer.leader.groups import delivery_rates
from timer.leader.groups.delivery_rates import Bucket
from timer.leader.groups.priority_shelf import PriorityShelf
from timer.leader.intake.admission import Draws
from timer.model.columns import I64, U64, Binary, Buffers, RowArray
from timer.model.units import MonoMs
from timer.ready import queue


def _no_ordering_keys(rows: RowArray, bufs: Buffers) -> tuple[object, Binary]:
    """Find no row with an ordering key."""
    del rows, bufs
    return np.zeros(0, np.intp), Binary.of([])


def _unbounded(self: Bucket, rate: int, now_ms: MonoMs) -> int:
    """Let room grow without end while nothing is delivered."""
    self._units += self._rate * (now_ms - self._at_ms)
    self._at_ms, self._rate = now_ms, rate
    return self._units // 1000


def _both_ways(self: Draws, most: int, count: int) -> I64:
    """Draw from a window that begins before the due time."""
    self._next += count
    return np.full(count, -most // 2, np.int64)


_put = PriorityShelf.put


def _put_at_one_level(self: PriorityShelf, offsets: U64, priority: Any) -> None:
    """Sort no message by its priority: the oldest ones are first."""
    _put(self, offsets, np.zeros_like(priority))


_mutation: Final = Planting(TimerWorld, traits=True, mischief=())

MUTATIONS: Final = (
    _mutation(
        "ordering_key_is_ignored",
        "key-shared groups order by the key alone",
        {"order"},
        20,
        "messages of one ordering key in a key_shared group",
        patch(queue, "ordering_keys", _no_ordering_keys),
        types=True,
    ),
    _mutation(
        "priorities_are_ignored",
        "a shared group gets the oldest messages first",
        {"priority"},
        10,
        "more messages of a shared group are ready than a consumer has credit for",
        patch(PriorityShelf, "put", _put_at_one_level),
    ),
    _mutation(
        "bucket_has_no_end",
        "a group without messages saves up its rate for a burst",
        {"rate"},
        10,
        "a pause before several messages of a group fire",
        patch(Bucket, "allowance", _unbounded),
    ),
    _mutation(
        "burst_of_seconds",
        "a bucket holds the messages of two seconds",
        {"rate"},
        20,
        "a pause of a second, before many messages of a group fire",
        patch(delivery_rates, "BURST_MS", 2_000),
    ),
    _mutation(
        "jitter_makes_timers_early",
        "the jitter's window lies around the due time",
        {"policy", "early"},
        10,
        "a new timer",
        patch(Draws, "up_to", _both_ways),
    ),
)
