"""The life of a consumer, and its transitions.

OPENING ──► OPEN ──► LEAVING ──► LEFT ──► ENDING ──► ENDED ──► OVER
   └───── closed early ─▲                                       ▲
                                an error, from any phase ───────┘
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final


class ConsumerPhase(IntEnum):
    """A phase of a consumer's life. They rise."""

    OPENING = 1
    """No leader has accepted the consumer."""
    OPEN = 2
    """A leader has accepted it; messages come."""
    LEAVING = 3
    """It wants no further messages; some may be on their way."""
    LEFT = 4
    """No further messages come: the leader has confirmed, or there is no stream."""
    ENDING = 5
    """It sends no further requests."""
    ENDED = 6
    """Its last stream is over."""
    OVER = 7
    """It is closed, or an error ended it. Nothing changes any more."""


_P = ConsumerPhase
NEXT: Final[Mapping[ConsumerPhase, frozenset[ConsumerPhase]]] = MappingProxyType(
    {
        _P.OPENING: frozenset({_P.OPEN, _P.LEAVING, _P.OVER}),
        _P.OPEN: frozenset({_P.LEAVING, _P.OVER}),
        _P.LEAVING: frozenset({_P.LEFT, _P.OVER}),
        _P.LEFT: frozenset({_P.ENDING, _P.OVER}),
        _P.ENDING: frozenset({_P.ENDED, _P.OVER}),
        _P.ENDED: frozenset({_P.OVER}),
        _P.OVER: frozenset(),
    }
)
"""The phases that may follow each phase."""
WITHOUT_STREAM: Final[Mapping[ConsumerPhase, ConsumerPhase]] = MappingProxyType(
    {_P.LEAVING: _P.LEFT, _P.ENDING: _P.ENDED}
)
"""Phases that end when there is no stream, and the phases that follow."""


def next_phase(old: ConsumerPhase, new: ConsumerPhase) -> ConsumerPhase:
    """Return `new`, or `old` if the consumer is already beyond `new`."""
    if new <= old:
        return old
    assert new in NEXT[old], f"{old.name} to {new.name}"
    return new
