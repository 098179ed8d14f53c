"""Planted bugs in storage and leases that show only in rare moments.

See tests/chaos/planted/planted.py.
"""

from operator import itemgetter
from typing import Any, Final

import numpy as np

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import Planting, patch
from timer.entries.payloads import GroupOp
from timer.leader.groups.group_leases import Leases
from timer.leader.groups.lease_table import ConsumerStream
from timer.model.columns import U64
from timer.model.firing_order import Position
from timer.model.units import MonoMs
from timer.pending.runs.read_window import ReadWindow
from timer.recovery import manifest
from timer.state.producers import RequestAnswer

_pack = manifest._pack
_topic_state = manifest._topic_state
_expire = Leases.expire
_drop = ReadWindow.drop


def _pack_without_verdicts(value: object) -> Any:
    """Leave the verdicts of the rows out of a kept answer."""
    packed = _pack(value)
    return packed[:4] if isinstance(value, RequestAnswer) and isinstance(packed, list) else packed


def _topic_with_one_mark(*args: Any) -> Any:
    """Write only the last retention mark of a queue."""
    state = _topic_state(*args)
    return state | {"marks": state["marks"][-1:]}


def _expire_as_noted(self: Leases, now_ms: MonoMs, room: int) -> tuple[GroupOp | None, int]:
    """End a lease at its first deadline, although it was extended."""
    for at_ms, lease_id in self._table._deadlines:
        if at_ms <= now_ms and (lease := self._table.get(lease_id)) is not None:
            lease.deadline_ms = at_ms
    return _expire(self, now_ms, room)


def _expire_counts_unsent(self: Leases, now_ms: MonoMs, room: int) -> tuple[GroupOp | None, int]:
    """Count a failure of each message whose delivery was dropped before it was sent."""
    former, room = self._end_former_leases(room)
    overdue, room = self._table.overdue(now_ms, room)
    ended: list[U64] = [former]
    for lease in overdue:
        ids = lease.consumer.withdraw(lease.lease_id) or [lease.lease_id]
        found = (self._table.get(each) for each in ids)
        ended.append(self._table.end(each for each in found if each is not None))
    return self._ended_op(np.concatenate(ended)), room


def _drop_keeps_cursor(self: ReadWindow, through: Position) -> None:
    """Keep the read position of a window, although firing has passed it."""
    cursor = self._cursor
    _drop(self, through)
    self._cursor = cursor


_mutation: Final = Planting(TimerWorld, mischief=())
_RESTARTS: Final[dict[str, Any]] = {
    "faults": ("kill", "power"),
    "fault_gap_ms": 1_500,
    "manifest_every": 20,
}

MUTATIONS: Final = (
    _mutation(
        "manifest_without_verdicts",
        "a restart loses the verdicts of the rows in a kept answer",
        {"twice", "key"},
        60,
        "a request with keys that is repeated after a restart from a manifest",
        patch(manifest, "_pack", _pack_without_verdicts),
        again=True,
        proposals_per_s=16,
        **_RESTARTS,
    ),
    _mutation(
        "manifest_with_one_mark",
        "a restart loses all retention marks of a queue but the last",
        {"retention", "digest"},
        40,
        "a restart from a manifest while messages are retained",
        patch(manifest, "_topic_state", _topic_with_one_mark),
        expiry=True,
        **_RESTARTS,
    ),
    _mutation(
        "producers_by_id",
        "a restart loses the order of the producers' last use, so the wrong producers expire",
        {"digest", "twice", "lost"},
        40,
        "a restart from a manifest, and producers that expire after it",
        patch(manifest, "itemgetter", lambda _: itemgetter(0)),
        fleeting=True,
        **_RESTARTS,
    ),
    _mutation(
        "cursor_stays_behind",
        "a new run is read from the firing position at the time of its writing",
        {"work"},
        20,
        "firing that passes the loaded rows of a new run before the run is used",
        patch(ReadWindow, "drop", _drop_keeps_cursor),
        slow_files=True,
        manifest_every=20,
        proposals_per_s=16,
    ),
    _mutation(
        "extension_is_not_looked_at",
        "an extended lease ends at its first deadline",
        {"extended"},
        60,
        "a consumer that extends a lease, and acks after the first deadline",
        patch(Leases, "expire", _expire_as_noted),
        proposals_per_s=16,
    ),
    _mutation(
        "credit_goes_on",
        "a consumer that has ended its credit goes on getting messages",
        {"credit"},
        3,
        "a consumer that returns messages while it has credit left",
        patch(ConsumerStream, "end_credit", lambda *_: None),
        sheds=True,
        proposals_per_s=16,
    ),
    _mutation(
        "unsent_is_an_ended_lease",
        "a delivery that was never sent counts a failure at its deadline",
        {"unsent"},
        3,
        "a consumer that does not read for longer than a lease",
        patch(Leases, "expire", _expire_counts_unsent),
        stalls=True,
        proposals_per_s=16,
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
