"""Planted bugs in the controller (see tests/chaos/planted/planted.py)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from cluster.control.controller import (
    Controller,
    ControllerEffects,
)
from tests.chaos.planted.planted import Mutation, patch
from timer.model.units import Epoch, MonoMs

_adopt = Controller._adopt
_loss_of_leader = Controller._loss_of_leader


def _adopt_without_lease(self: Controller, now_ms: MonoMs) -> ControllerEffects | None:
    """Adopt a leader of a later epoch that holds no lease."""
    fresh = [(node, node.report) for node in self._fresh(now_ms)]
    for node, report in fresh:
        if report is not None:
            node.report = replace(report, lease_ok=True)
    found = _adopt(self, now_ms)
    for node, report in fresh:
        node.report = report
    return found


def _last_of_all(self: Controller, now_ms: MonoMs, candidates: Iterable[Any], **how: Any) -> Any:
    """Appoint the candidate with the shortest log."""
    del self, now_ms, how
    reported = [node for node in candidates if node.report is not None]
    ends = {id(node): (node.report.last_epoch, node.report.last_index) for node in reported}
    return min(reported, key=lambda node: ends[id(node)], default=None)


def _next_of_its_own(self: Controller) -> Epoch:
    """Propose the epoch after the last appointment, without regard to the voters' promises."""
    return Epoch(self._state.epoch + 1)


def _never_gone(self: Controller, now_ms: MonoMs) -> str | None:
    """Keep a leader that stepped down or restarted, as long as it reports."""
    loss = _loss_of_leader(self, now_ms)
    return None if loss == "it stepped down or restarted" else loss


_WORLDS: Final[dict[str, Any]] = {
    "nodes": 3,
    "fault_gap_ms": 1_500,
    "learners": 0,
    "member_changes": 0.0,
}

MUTATIONS: Final = (
    Mutation(
        "adopts_without_lease",
        "the controller adopts a leader that holds no lease",
        frozenset({"appoint"}),
        40,
        "Raft that loses its last states, and a leader that is cut off from the other voters",
        patch(Controller, "_adopt", _adopt_without_lease),
        _WORLDS | {"faults": ("one_way", "isolate", "split"), "mischief": ("forget", "spurious")},
    ),
    Mutation(
        "appoints_the_most_lagging",
        "the controller appoints the replica with the shortest log",
        frozenset({"appoint"}),
        20,
        "a leader that is lost while another voter lags",
        patch(Controller, "_best", _last_of_all),
        _WORLDS | {"faults": ("kill", "split", "isolate"), "mischief": (), "proposals_per_s": 16},
    ),
    Mutation(
        "epoch_of_its_own",
        "the controller proposes an epoch that voters have promised already",
        frozenset({"liveness"}),
        40,
        "Raft that loses its last states",
        patch(Controller, "_next_epoch", _next_of_its_own),
        _WORLDS | {"faults": ("kill", "isolate"), "mischief": ("forget",)},
    ),
    Mutation(
        "restarted_leader_stays",
        "the controller keeps a leader that restarted and does not lead any more",
        frozenset({"liveness"}),
        20,
        "a leader that restarts",
        patch(Controller, "_loss_of_leader", _never_gone),
        _WORLDS | {"faults": ("kill", "power"), "mischief": ()},
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
