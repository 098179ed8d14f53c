"""Planted bugs in ordered groups and in seeks (see tests/chaos/planted/planted.py)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import numpy as np

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import SLOW_LINKS, Planting, patch
from timer.entries.payloads import GroupOp, Op
from timer.leader.groups import key_order
from timer.leader.groups.group_leases import Leases
from timer.leader.groups.key_order import NO_OWNER, KeyOrder
from timer.model.columns import I64, U64
from timer.model.units import UnixMs
from timer.ready.group import Group
from timer.ready.queue import Queue
from timer.state.machine import Machine

_first_values = key_order._first_values


def _no_walls(keys: U64, values: I64, of: U64, default: int) -> I64:
    """Deliver messages although an earlier one of their key is delayed or still leased."""
    upto = None if default == NO_OWNER else 0
    return _first_values(keys[:upto], values[:upto], of, default)


_look = KeyOrder._open_window


def _look_past_delays(self: KeyOrder, clock_ms: UnixMs, queue: Queue, size: int) -> Any:
    """Deliver messages although an earlier one of their key waits for the delay of its nack."""
    at_once = mock.patch.object(
        Group, "not_before_ms", lambda _, each: np.zeros(len(each), np.int64)
    )
    with at_once:
        found = _look(self, clock_ms, queue, size)
    times = self._group.not_before_ms(found.offsets)
    early = times > clock_ms
    self._returns_at = UnixMs(int(times[early].min())) if early.any() else None
    kept = {name: getattr(found, name)[~early] for name in ("offsets", "keys", "owner")}
    return found._replace(**kept)


def _no_owners(keys: U64, values: I64, of: U64, default: int) -> I64:
    """Deliver messages of a key to any consumer, although another one holds messages of it."""
    upto = 0 if default == NO_OWNER else None
    return _first_values(keys[:upto], values[:upto], of, default)


def _returned(self: KeyOrder, offsets: U64) -> None:
    """Do not recall later messages of a key when an earlier one returns."""
    del self, offsets


_restart = Group.restart


def _restart_unmarked(self: Group, *args: Any) -> None:
    """Forget at a seek which messages were delivered before."""
    _restart(self, *args)
    self.delivered_ends = []


_seek = Machine._seek


def _seek_forward(self: Machine, op: Any, group: Group) -> Any:
    """Ignore a seek to a lower offset."""
    later = np.maximum(op.offsets, np.uint64(group.cursor))
    applied = _seek(self, replace(op, offsets=later), group)
    return replace(applied, op=op)


_hand_over = Leases.hand_over


def _hand_over_untold(self: Leases) -> Iterator[GroupOp]:
    """Append only the HAND_OVER operations at a handover, and none for the leases."""
    return (op for op in _hand_over(self) if op.op is Op.HAND_OVER)


def _same_life(self: Leases, epoch: Any, lease_id: Any) -> bool:
    """Accept an ack of a message that was delivered before a seek."""
    del self, epoch, lease_id
    return False


_mutation: Final = Planting(TimerWorld, types=True, mischief=())

MUTATIONS: Final = (
    _mutation(
        "nack_holds_nothing_back",
        "an ordered group delivers messages behind one that is delayed or still leased",
        {"order"},
        20,
        "a nack, or a lease that ends, in an ordered group",
        patch(key_order, "_first_values", _no_walls),
    ),
    _mutation(
        "delay_holds_nothing_back",
        "an ordered group delivers messages behind one that waits for the delay of its nack",
        {"order"},
        20,
        "a nack with a delay in an ordered group",
        patch(KeyOrder, "_open_window", _look_past_delays),
    ),
    _mutation(
        "nothing_is_recalled",
        "a message returns, and later messages of its key are not recalled",
        {"order"},
        20,
        "a nack in an ordered group while later messages are leased",
        patch(KeyOrder, "on_returned", _returned),
    ),
    _mutation(
        "key_of_two_consumers",
        "two consumers hold messages of one key at the same time",
        {"order"},
        40,
        "a key_shared group with two consumers, and several messages of a key",
        patch(key_order, "_first_values", _no_owners),
        proposals_per_s=16,
    ),
    _mutation(
        "ack_from_before_the_seek",
        "an ack of a message that was delivered before a seek counts after the seek",
        {"lost"},
        120,
        "a seek while messages are leased",
        patch(Leases, "_may_predate_group", _same_life),
        proposals_per_s=16,
        faults=("slow_disk",),
        **SLOW_LINKS,
    ),
    _mutation(
        "seek_is_unmarked",
        "a message that was delivered before a seek is redelivered as a first attempt",
        {"unmarked"},
        40,
        "a seek back",
        patch(Group, "restart", _restart_unmarked),
    ),
    _mutation(
        "leased_when_handed_over",
        "after a handover the successor does not count deliveries that were leased then",
        {"unmarked"},
        20,
        "a handover while messages are leased",
        patch(Leases, "hand_over", _hand_over_untold),
    ),
    _mutation(
        "seek_goes_forward_only",
        "a seek back leaves the group where it is",
        {"seek"},
        40,
        "a seek back",
        patch(Machine, "_seek", _seek_forward),
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
