"""Planted bugs in redrives (see tests/chaos/planted/planted.py)."""

import copy
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import Planting, patch
from timer.entries.payloads import Move
from timer.leader.groups import dead_letters, group_dispatch
from timer.ready.group import Group
from timer.state.apply_results import MoveApplied
from timer.state.machine import Machine

_move = Machine._move
_redrive = dead_letters.redrive


def _letter_stays(self: Machine, op: Move, group: Group | None) -> MoveApplied:
    """Leave a redriven letter in its dead-letter topic, too."""
    before = copy.deepcopy(group)
    applied = _move(self, op, group)
    if not op.to_group and group is not None:
        for each in fields(Group):
            setattr(group, each.name, getattr(before, each.name))
    return applied


def _last_is_lost(self: Machine, op: Move, group: Group | None) -> MoveApplied:
    """Lose the last of several redriven letters."""
    if op.to_group or group is None or len(op.offsets) < 2:
        return _move(self, op, group)
    taken = group.ack(op.offsets[-1:])
    applied = _move(self, op, group)
    return replace(applied, new=np.concatenate([applied.new[:-1], taken]))


def _to_the_others(*args: Any) -> list[Move]:
    """Redrive letters to a topic that is not their first one."""
    others = {"a": "b", "b": "n/b", "n/b": "a"}
    return [replace(move, to=others[move.to]) for move in _redrive(*args)]


class _Elsewhere:
    """Stands in for the module `dead_letters`, with another `redrive`."""

    redrive = staticmethod(_to_the_others)

    def __getattr__(self, name: str) -> Any:
        return getattr(dead_letters, name)


_mutation: Final = Planting(TimerWorld, redrives=True, mischief=(), proposals_per_s=16)

MUTATIONS: Final = (
    _mutation(
        "letter_stays",
        "a redriven letter also stays in its dead-letter topic, and is redriven again",
        {"dead", "redrive"},
        30,
        "a redrive",
        patch(Machine, "_move", _letter_stays),
    ),
    _mutation(
        "redrive_loses_the_last",
        "the last of several letters redriven at once is lost",
        {"lost"},
        60,
        "a redrive of several letters",
        patch(Machine, "_move", _last_is_lost),
    ),
    _mutation(
        "redriven_elsewhere",
        "letters are redriven to a topic that is not their first one",
        {"redrive"},
        30,
        "a redrive",
        patch(group_dispatch, "dead_letters", _Elsewhere()),
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
