"""The recent leaders, in the memory of one node, as its control plane learned of them."""

from collections import deque
from typing import Final, NamedTuple

from cluster.control.control_state import ControlState
from timer.model.units import Epoch, ReplicaId, UnixMs

CHANGES_MAX: Final = 20


class LeaderChange(NamedTuple):
    """An appointment of a leader."""

    epoch: Epoch
    leader: ReplicaId
    time_ms: UnixMs
    """When this node learned of it."""
    reason: str
    """The controller's reason; empty: unknown."""
    earlier: bool
    """This node learned of the appointment afterwards, as after a start: its time is unknown."""


class LeaderHistory:
    """The last CHANGES_MAX appointments."""

    def __init__(self) -> None:
        self._changes: deque[LeaderChange] = deque(maxlen=CHANGES_MAX)

    def note(self, state: ControlState, now_ms: UnixMs, *, earlier: bool) -> None:
        """Record the appointment of a control state, if it is a new one."""
        last = self._changes[-1] if self._changes else None
        if state.leader is None:
            return
        if last is None or (last.epoch, last.leader) != (state.epoch, state.leader):
            change = LeaderChange(state.epoch, state.leader, now_ms, state.why, earlier)
            self._changes.append(change)

    def newest_first(self) -> list[LeaderChange]:
        """Return the appointments, the newest first."""
        return [*reversed(self._changes)]
