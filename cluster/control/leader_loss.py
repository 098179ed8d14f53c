"""Reasons of the controller: for the replacement of a leader, and for the refusal of a request."""

import enum
from dataclasses import dataclass

from timer.model.units import Epoch


class Gone(enum.Enum):
    """Why the appointed leader has to be replaced. The value is the text for the log."""

    NOT_APPOINTED = "no leader is appointed"
    LINK_BROKE = "its link broke"
    SILENT = "it reports nothing"
    PROMISE_ABOVE = "it met a promise of epoch {epoch}"
    STEPPED_DOWN = "it stepped down or restarted"
    IDLE = "it does not begin its promotion"
    NO_LEASE = "it has no lease"
    NOT_SERVING = "it does not serve"
    DISOBEYED = "{names} promised, or met, another leadership"


@dataclass(frozen=True, slots=True)
class LeaderLoss:
    """A reason with its particulars."""

    reason: Gone
    epoch: Epoch = Epoch(0)
    """PROMISE_ABOVE: the epoch of that promise."""
    names: tuple[str, ...] = ()
    """DISOBEYED: the nodes that promised another leadership."""

    def __str__(self) -> str:
        return self.reason.value.format(epoch=self.epoch, names=", ".join(self.names))


class AskRefusal(enum.Enum):
    """Why a transfer or a change of voters is not proposed. The value is the operator's answer."""

    NOT_CONTROLLER = "this node is not the controller"
    APPOINTING = "an appointment is under way"
    CHANGING = "another change, or an appointment, is under way"
    NO_MAJORITY = "no majority of the voters reports"
    NO_SUCH_VOTER = "no such voter reports"
    NO_LEADER = "no leader serves"
    NO_SUCCESSOR = "no other voter could lead"
