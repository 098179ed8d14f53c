"""Majorities of voter sets.

While voters change, two sets (or more, if changes were never committed) are in force at once;
what counts is a majority of each of them.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

from timer.units import ReplicaId

Voters: TypeAlias = frozenset[ReplicaId]


def majority(voters: Voters) -> int:
    """Return how many of `voters` are more than half of them."""
    return len(voters) // 2 + 1


def granted(sets: Iterable[Voters], who: Collection[ReplicaId]) -> bool:
    """Return whether `who` holds a majority of every set."""
    return all(len(voters.intersection(who)) >= majority(voters) for voters in sets)


def reached(sets: Iterable[Voters], values: Mapping[ReplicaId, int]) -> int:
    """Return the greatest value that a majority of every set has reached; absent means 0."""
    return min(
        sorted((values.get(voter, 0) for voter in voters), reverse=True)[majority(voters) - 1]
        for voters in sets
    )
